"""The tasks of clients: how many steps each plans, and how long that takes it."""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.availability.base import BoolArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import Workload
from fedshuffle.randomness import Purpose, uniforms
from fedshuffle.timing.clock import NO_BYTES, Clock, MessageSizes
from fedshuffle.timing.jitter import Exponential, NoJitter


@dataclass(frozen=True, eq=False)
class Tasks:
    """What every client would do in a round, and how long that would take it.

    >>> from fedshuffle import LocalWork
    >>> tasks = Tasks(Clock([0.1, 0.4]), LocalWork(epochs=2).on(np.array([10, 20])))
    >>> tasks.durations(seed=0, round=0, clients=np.arange(2)).tolist()
    [2.0, 16.0]
    >>> tasks.mean.tolist(), tasks.law
    ([2.0, 16.0], 'fixed')
    """

    clock: Clock
    workload: Workload
    sizes: MessageSizes = NO_BYTES

    def __post_init__(self) -> None:
        work = self.workload.work
        if isinstance(work.steps, str):
            raise FedShuffleError(
                f"the steps of a client are the {work.steps!r} over its cohort, so nobody knows"
                " before who is in time: give every client its own epochs or steps, or schedule"
                " 'wait'."
            )
        if work.interruption is not None:
            raise FedShuffleError(
                f"the local work has an interruption ({work.interruption!r}), and the schedule"
                " decides itself who is done: leave out one of them."
            )

    def __len__(self) -> int:
        return len(self.workload.sizes)

    @property
    def possible(self) -> tuple[IntArray, FloatArray]:
        """The steps that each client may plan, (n, A), and their chances, (A,)."""
        return self.workload.possible_steps

    def durations(self, seed: int, round: int, clients: IntArray) -> FloatArray:
        """The seconds from the start of a round until these clients would be done."""
        steps = self.workload.planned(clients, seed, round)
        return self.clock.durations(seed, round, clients, steps, self.sizes)

    def finished(self, deadline: float, seed: int, round: int, clients: IntArray) -> BoolArray:
        """Which of these clients would be done in time."""
        steps = self.workload.planned(clients, seed, round)
        return self.clock.finished(deadline, seed, round, clients, steps, self.sizes)

    def in_time(self, deadline: float) -> FloatArray:
        """The probability of each client to be done in time, for each number of steps: (n, A)."""
        everyone = np.arange(len(self))
        columns = [
            self.clock.in_time(deadline, everyone, steps, self.sizes)
            for steps in self.possible[0].T
        ]
        return np.stack(columns, axis=1)

    @functools.cached_property
    def mean(self) -> FloatArray:
        """The mean seconds of a task of each client."""
        everyone, (planned, chances) = np.arange(len(self)), self.possible
        each = [self.clock.mean(everyone, steps, self.sizes) for steps in planned.T]
        return np.asarray(chances @ np.array(each))

    @functools.cached_property
    def law(self) -> Literal["exponential", "fixed"] | None:
        """The distribution of the seconds of a task, if it is one of these for all clients."""
        if not self.independent_of_steps:
            return None
        if isinstance(self.clock.jitter, NoJitter):
            return "fixed"
        on_the_way = self.clock.network(np.arange(len(self)), self.sizes).any()
        memoryless = isinstance(self.clock.jitter, Exponential) and not on_the_way
        return "exponential" if memoryless else None

    @property
    def independent_of_steps(self) -> bool:
        """Whether the time of a client's task does not tell how many steps it has."""
        return self.clock.per == "task" or len(self.possible[1]) == 1

    def alternative(self, seed: int, task: int, client: int) -> int:
        """Which of the possible numbers of steps a task has."""
        steps, chances = self.possible
        if len(chances) == 1:
            return 0
        planned = self.workload.planned(np.array([client]), seed, task)
        return int(np.argmax(steps[client] == planned))

    def draw(self, seed: int, task: int, client: int) -> float:
        """The seconds of a task: a pure function of (seed, task, client)."""
        steps = int(self.possible[0][client, self.alternative(seed, task, client)])
        return self.clock.duration(seed, task, client, steps, self.sizes)

    def sample(self, seed: int, client: int, count: int) -> tuple[IntArray, FloatArray]:
        """Independent tasks of a client, for a simulation without training: which numbers of steps
        they have, and their seconds.
        """
        tasks, clients, (planned, chances) = np.arange(count), np.full(count, client), self.possible
        which = np.zeros(count, dtype=np.int64)
        if len(chances) > 1:
            u = uniforms(seed, Purpose.MONTE_CARLO, round=tasks, client=clients)
            which = np.searchsorted(np.cumsum(chances)[:-1], u, side="right")
        steps = planned[client, which]
        return which, self.clock.durations(seed, tasks, clients, steps, self.sizes)
