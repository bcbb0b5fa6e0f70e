"""Step sizes over the rounds: a number, a function of the round, or a schedule by name.

A name is written ``NAME:STEP_SIZE``, and ``warmup:ROUNDS+`` before it lets the step size grow
evenly in the first rounds:

    >>> cosine_by_name = over("cosine:0.1", rounds=100)
    >>> warmed_up = over("warmup:10+cosine:0.1", rounds=100)
    >>> round(cosine_by_name(50), 4), round(warmed_up(4) / cosine_by_name(4), 4)
    (0.0505, 0.5)
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedshuffle._arrays import count, number
from fedshuffle.errors import FedShuffleError, unknown

Schedule = float | Callable[[int], float]

WARMUP = "warmup:"
"""Begins the name of a schedule whose step size grows in the first rounds."""


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


def cosine(step_size: float, rounds: int, end: float = 0.01) -> Callable[[int], float]:
    """A step size that falls along a cosine over the rounds, to the share ``end`` of itself.

    ``step_size * (end + (1 - end) * (1 + cos(pi * round / rounds)) / 2)``; after the rounds it
    stays at its end.

    >>> schedule = cosine(1.0, rounds=10, end=0.1)
    >>> [round(schedule(r), 3) for r in (0, 5, 10, 99)]
    [1.0, 0.55, 0.1, 0.1]
    """

    def at(round: int) -> float:
        share = (1 + math.cos(math.pi * min(1.0, round / rounds))) / 2
        return step_size * (end + (1 - end) * share)

    return at


def constant(step_size: float) -> Callable[[int], float]:
    """Always the same step size; of use after a warm-up.

    >>> constant(0.5)(7)
    0.5
    """
    return lambda round: step_size


def warmed_up(schedule: Callable[[int], float], rounds: int) -> Callable[[int], float]:
    """A schedule times ``(round + 1) / rounds`` in the first rounds.

    >>> [warmed_up(constant(1.0), 4)(r) for r in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return lambda round: schedule(round) * min(1.0, (round + 1) / rounds)


# By name ----------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[..., Callable[[int], float]]] = {
    "constant": constant,
    "cosine": cosine,
    "drops": drops,
    "inverse_time": inverse_time,
}


def read(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a schedule that is written in one text.

    Numbers follow the name in the order of the function's arguments, but for ``rounds``.

    >>> read("warmup:10+cosine:0.1")
    ('warmup:10+cosine', {'step_size': 0.1})
    >>> read("inverse_time:0.1:30")
    ('inverse_time', {'step_size': 0.1, 'halved_after': 30.0})
    """
    before, plus, last = text.rpartition("+")
    name, *numbers = last.split(":")
    arguments = [key for key in parameters(before + plus + name) if key != "rounds"]
    try:
        given = [float(word) for word in numbers]
    except ValueError:
        given = []
    if not given or len(given) > len(arguments) or (name == "drops" and len(given) > 1):
        raise FedShuffleError(
            f"the schedule {text!r} cannot be read: write its step size after its name, such as"
            f" '{before}{plus}{name}:0.1'."
        )
    return before + plus + name, dict(zip(arguments, given))


def parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """What the schedule of that name takes."""
    return inspect.signature(_split(name)[1]).parameters


def made(name: str, arguments: Mapping[str, Any], rounds: int) -> Callable[[int], float]:
    """The schedule of that name over a run of so many rounds, unless the arguments say how many."""
    warmup, maker = _split(name)
    takes = inspect.signature(maker).parameters
    given = {"rounds": rounds} | dict(arguments) if "rounds" in takes else dict(arguments)
    for key in given:
        if key not in takes:
            raise unknown(f"argument of schedule {name!r}", key, takes)
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in given:
            raise FedShuffleError(f"schedule {name!r} needs {key!r}: add it.")
    schedule = maker(**given)
    return schedule if warmup is None else warmed_up(schedule, warmup)


def over(schedule: Schedule | str, rounds: int) -> Schedule:
    """A schedule for a run of so many rounds, where it is given by its name."""
    return made(*read(schedule), rounds) if isinstance(schedule, str) else schedule


def _split(name: str) -> tuple[int | None, Callable[..., Callable[[int], float]]]:
    """The rounds of the warm-up, if any, and what makes the schedule after it."""
    before, plus, last = name.rpartition("+")
    warmup = None
    if plus:
        if re.fullmatch(rf"{WARMUP}[0-9]+", before) is None:
            raise FedShuffleError(
                f"the schedule {name!r} cannot be read: write 'warmup:10+{last}' for a step size"
                " that grows in the first 10 rounds."
            )
        warmup = count(int(before.removeprefix(WARMUP)), "the number of rounds of the warm-up")
    if last not in SCHEDULES:
        raise unknown("schedule", last, [*SCHEDULES, "warmup:ROUNDS+SCHEDULE"])
    return warmup, SCHEDULES[last]
