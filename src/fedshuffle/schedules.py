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


def describe(schedule: Schedule, rounds: int, what: str) -> float | dict[str, float]:
    """A schedule as plain data: the number, or the values at some of so many rounds.

    >>> describe(lambda round: 0.5**round, 4, "step size")
    {'0': 1.0, '1': 0.5, '2': 0.25, '3': 0.125}
    """
    if not callable(schedule):
        return value(schedule, 0, what)
    # The last digits are left out: they may differ from one machine to another.
    return {str(r): float(f"{value(schedule, r, what):.12g}") for r in _some(rounds)}


def _some(rounds: int) -> list[int]:
    """0, 1, 2, 5, 10, 20, 50 and so on, and the last of the rounds."""
    found, scale = {0, rounds - 1}, 1
    while scale < rounds:
        found |= {scale, 2 * scale, 5 * scale}
        scale *= 10
    return sorted(r for r in found if r < rounds)


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
