"""How long the tasks of clients take: the mean, the law, and samples."""

import functools
from typing import Literal

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.randomness import Purpose, uniforms
from fedshuffle.timing.jitter import Exponential, NoJitter
from fedshuffle.timing.tasks import Tasks


class TaskTimes:
    """The seconds from when a client starts a task until its update arrives.

    >>> from fedshuffle import LocalWork
    >>> from fedshuffle.timing import Clock
    >>> work = LocalWork(epochs=2).on(np.array([5, 10]))
    >>> times = TaskTimes(Tasks(Clock([0.1, 0.2]), work))
    >>> times.mean.tolist(), times.law
    ([1.0, 4.0], 'fixed')
    """

    def __init__(self, tasks: Tasks) -> None:
        self.clock, self.sizes, self._workload = tasks.clock, tasks.sizes, tasks.workload
        self.steps, self.chances = tasks.possible

    def __len__(self) -> int:
        return len(self.steps)

    @functools.cached_property
    def mean(self) -> FloatArray:
        """The mean seconds of each client."""
        everyone = np.arange(len(self))
        each = [self.clock.mean(everyone, steps, self.sizes) for steps in self.steps.T]
        return np.asarray(self.chances @ np.array(each))

    @functools.cached_property
    def law(self) -> Literal["exponential", "fixed"] | None:
        """The distribution, if it is one of these for all clients."""
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
        return self.clock.per == "task" or len(self.chances) == 1

    def alternative(self, seed: int, task: int, client: int) -> int:
        """Which of the possible numbers of steps a task has: a column of ``steps``."""
        if len(self.chances) == 1:
            return 0
        planned = self._workload.planned(np.array([client]), seed, task)
        return int(np.argmax(self.steps[client] == planned))

    def draw(self, seed: int, task: int, client: int) -> float:
        """The seconds of a task: a pure function of (seed, task, client)."""
        steps = int(self.steps[client, self.alternative(seed, task, client)])
        return self.clock.duration(seed, task, client, steps, self.sizes)

    def sample(self, seed: int, client: int, count: int) -> tuple[IntArray, FloatArray]:
        """Independent tasks of a client, for a simulation without training: which numbers of steps
        they have, and their seconds.
        """
        tasks, clients = np.arange(count), np.full(count, client)
        which = np.zeros(count, dtype=np.int64)
        if len(self.chances) > 1:
            u = uniforms(seed, Purpose.MONTE_CARLO, round=tasks, client=clients)
            which = np.searchsorted(np.cumsum(self.chances)[:-1], u, side="right")
        steps = self.steps[client, which]
        return which, self.clock.durations(seed, tasks, clients, steps, self.sizes)
