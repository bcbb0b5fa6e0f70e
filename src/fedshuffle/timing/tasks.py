"""The tasks of a round: how many steps each client plans, and when it is done."""

from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.availability.base import BoolArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import Workload
from fedshuffle.timing.clock import NO_BYTES, Clock, MessageSizes


@dataclass(frozen=True, eq=False)
class Tasks:
    """What every client would do in a round, and how long that would take it.

    >>> from fedshuffle import LocalWork
    >>> tasks = Tasks(Clock([0.1, 0.4]), LocalWork(epochs=2).on(np.array([10, 20])))
    >>> tasks.durations(seed=0, round=0, clients=np.arange(2)).tolist()
    [2.0, 16.0]
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
