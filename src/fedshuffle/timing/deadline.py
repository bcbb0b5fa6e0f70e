r"""Deadlines: who is late is dropped, or sends what it has.

Client i takes part if it is there, is asked, and is done in time: with probability
:math:`P(T_i \le D)`, or, if it sends what it has, if its first step is done in time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, frozen, shortest
from fedshuffle.availability import Always, Availability
from fedshuffle.availability.base import BoolArray
from fedshuffle.local_work import Interruption
from fedshuffle.timing.jitter import NoJitter
from fedshuffle.timing.schedule import Deadline
from fedshuffle.timing.tasks import Tasks

Finished = Callable[[int, int, IntArray], BoolArray]
"""Of (seed, round, clients): which of them are in time."""


class InTime(Availability):
    """An availability in which a client that is asked must also be in time to take part.

    ``chance`` is the probability of each client to be in time, and ``finished`` says who is.

        >>> late = lambda seed, round, clients: clients % 2 == round % 2
        >>> half = InTime(Always(4), Deadline(60), np.full(4, 0.5), late)
        >>> half.answers(seed=0, round=1, clients=np.arange(4)).tolist()
        [False, True, False, True]
    """

    def __init__(
        self,
        of: Availability,
        deadline: Deadline,
        chance: FloatArray,
        finished: Finished,
        step_chances: FloatArray | None = None,
    ) -> None:
        self.step_chances = step_chances
        """The chances of the steps of a client that is in time, if they are random."""
        self.of, self.period, self.repeats, self.drop = of, of.period, of.repeats, of.drop
        self.deadline, self.chance, self._finished = deadline, frozen(chance), finished
        stay = self.chance if of.leaves is None else self.chance * (1 - of.leaves)
        self.leaves: FloatArray = frozen(1 - stay)

    def __repr__(self) -> str:
        there = "" if isinstance(self.of, Always) else f"{self.of!r}, "
        return f"{there}in time for {self.deadline}"

    def __len__(self) -> int:
        return len(self.of)

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        return self.of.available(seed, round, clients)

    def at(self, round: int) -> "InTime":
        of = self.of.at(round)
        if of is self.of:
            return self
        return InTime(of, self.deadline, self.chance, self._finished, self.step_chances)

    def probability(self, round: int) -> FloatArray:
        return self.of.probability(round)

    def answers(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        stays = self.of.answers(seed, round, clients)
        return stays & self._finished(seed, round, clients)


@dataclass(frozen=True, eq=False)
class UntilDeadline(Interruption):
    """Late clients stop at the deadline, and send the steps that they have done by then.

    One step counts as done in any case: who has none in time takes no part in the round.

    >>> from fedshuffle import LocalWork
    >>> from fedshuffle.timing import Clock
    >>> tasks = Tasks(Clock([0.1, 0.4]), LocalWork().on(np.array([10, 20])))
    >>> stop = UntilDeadline(tasks, deadline=2.0)
    >>> stop.done(np.array([10, 20]), np.arange(2), seed=0, round=0).tolist()
    [10, 5]
    """

    tasks: Tasks
    deadline: float

    def __repr__(self) -> str:
        return f"UntilDeadline({shortest(self.deadline)})"

    @property
    def random(self) -> bool:  # type: ignore[override]
        return not isinstance(self.tasks.clock.jitter, NoJitter)

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        clock, sizes = self.tasks.clock, self.tasks.sizes
        steps = clock.steps_by(self.deadline, seed, round, clients, planned, sizes)
        return np.clip(steps, 1, planned).astype(np.int64)

    def chances(self, planned: IntArray) -> FloatArray:
        """The probability of every client to do 1, 2, ... of its planned steps: (n, steps).

        Their sum is the probability to take part.
        """
        everyone, most = np.arange(len(planned)), int(planned.max())
        number = np.arange(1, most + 2)
        share = number / planned[:, None]  # of the task
        at_least = self.tasks.clock.in_time(
            self.deadline, everyone[:, None], planned[:, None], self.tasks.sizes, share
        )
        at_least[number > planned[:, None]] = 0.0
        return at_least[:, :-1] - at_least[:, 1:]

    def finished(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        """Which of these clients have done a step in time."""
        planned = self.tasks.workload.planned(clients, seed, round)
        clock, sizes = self.tasks.clock, self.tasks.sizes
        return clock.steps_by(self.deadline, seed, round, clients, planned, sizes) >= 1

    def first_step(self) -> FloatArray:
        """The probability of each client to have done a step in time, (n, A)."""
        everyone, clock, sizes = np.arange(len(self.tasks)), self.tasks.clock, self.tasks.sizes
        columns = [
            clock.in_time(self.deadline, everyone, planned, sizes, 1 / planned)
            for planned in self.tasks.possible[0].T
        ]
        return np.stack(columns, axis=1)
