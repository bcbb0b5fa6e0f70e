"""Step sizes over the rounds: a number, or a function of the round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedshuffle._arrays import number
from fedshuffle.errors import FedShuffleError

Schedule = float | Callable[[int], float]


def value(schedule: Schedule, round: int, what: str) -> float:
    """The step size of a round, checked."""
    size = number(schedule(round) if callable(schedule) else schedule, f"the {what}")
    if not (math.isfinite(size) and size > 0):
        raise FedShuffleError(
            f"the {what} in round {round} is {size}. It must be positive and finite."
        )
    return size


def describe(schedule: Schedule) -> float | str:
    """A schedule as plain data."""
    return "schedule" if callable(schedule) else float(schedule)


def drops(
    step_size: float, rounds: int, at: Sequence[float] = (0.5, 0.75), factor: float = 0.1
) -> Callable[[int], float]:
    """A step size that is multiplied by ``factor`` at given shares of the rounds.

    >>> schedule = drops(1.0, rounds=100)
    >>> [round(schedule(r), 3) for r in (0, 49, 50, 75)]
    [1.0, 1.0, 0.1, 0.01]
    """
    return lambda round: float(step_size * factor ** sum(round >= share * rounds for share in at))


def inverse_time(step_size: float, halved_after: float) -> Callable[[int], float]:
    """``step_size / (1 + round / halved_after)``, the classical decay for a noisy objective.

    >>> inverse_time(1.0, halved_after=10)(10)
    0.5
    """
    return lambda round: step_size / (1 + round / halved_after)
