"""Step-size schedules: a number, a function of the round, or a schedule by name.

A name is written ``NAME:STEP_SIZE``; ``warmup:ROUNDS+`` before it makes the step size grow evenly
in the first rounds:

    >>> schedule = resolve("cosine:0.1", rounds=100)
    >>> with_warmup = resolve("warmup:10+cosine:0.1", rounds=100)
    >>> round(schedule(50), 4), round(with_warmup(4) / schedule(4), 4)
    (0.0505, 0.5)
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedshuffle._arrays import count, number
from fedshuffle.errors import FedShuffleError, check_known, unknown

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "drops",
    "inverse_time",
    "resolve",
    "warmed_up",
]

Schedule = float | Callable[[int], float]
"""A step size: a number, or a function of the round, which starts at 0."""


def value(schedule: Schedule, round: int, what: str) -> float:
    """The step size of a round, checked."""
    size = schedule(round) if callable(schedule) else schedule
    return number(size, f"the {what} in round {round}", within="(0, inf)")


def describe(schedule: Schedule, rounds: int, what: str) -> float | dict[str, float]:
    """A schedule as plain data: the number, or its values at rounds 0, 1, 2, 5, 10, 20, 50, ...

    >>> describe(lambda round: 0.5**round, 4, "step size")
    {'0': 1.0, '1': 0.5, '2': 0.25, '3': 0.125}
    """
    if not callable(schedule):
        return value(schedule, 0, what)
    scales = [10**k for k in range(len(str(rounds)))]
    shown = {0, rounds - 1, *(m * scale for scale in scales for m in (1, 2, 5))}
    # The last digits may differ between machines.
    at = {r: float(f"{value(schedule, r, what):.12g}") for r in sorted(shown) if r < rounds}
    return {str(r): size for r, size in at.items()}


def constant(step_size: float) -> Callable[[int], float]:
    """Always the same step size; of use after a warm-up.

    >>> constant(0.5)(7)
    0.5
    """
    return lambda round: step_size


def cosine(step_size: float, rounds: int, end: float = 0.01) -> Callable[[int], float]:
    """``step_size * (end + (1 - end) * (1 + cos(pi * round / rounds)) / 2)``, and after the rounds
    ``step_size * end``.

    >>> schedule = cosine(1.0, rounds=10, end=0.1)
    >>> [round(schedule(r), 3) for r in (0, 5, 10, 99)]
    [1.0, 0.55, 0.1, 0.1]
    """

    def at(round: int) -> float:
        share = (1 + math.cos(math.pi * min(1.0, round / rounds))) / 2
        return step_size * (end + (1 - end) * share)

    return at


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


def warmed_up(schedule: Callable[[int], float], rounds: int) -> Callable[[int], float]:
    """A schedule times ``(round + 1) / rounds`` in the first rounds.

    >>> [warmed_up(constant(1.0), 4)(r) for r in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return lambda round: schedule(round) * min(1.0, (round + 1) / rounds)


SCHEDULES: dict[str, Callable[..., Callable[[int], float]]] = {
    schedule.__name__: schedule for schedule in (constant, cosine, drops, inverse_time)
}
"""The schedules that can be given by name."""


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments in the text of a schedule.

    Numbers follow the name in the order of the function's arguments, without ``rounds``. A number
    alone is a constant.

    >>> parse("warmup:10+cosine:0.1"), parse("0.1")
    (('warmup:10+cosine', {'step_size': 0.1}), ('constant', {'step_size': 0.1}))
    >>> parse("inverse_time:0.1:30")
    ('inverse_time', {'step_size': 0.1, 'halved_after': 30.0})
    """
    with suppress(ValueError):
        return "constant", {"step_size": float(text)}
    warmup, plus, last = text.rpartition("+")
    name, *numbers = last.split(":")
    full = warmup + plus + name
    arguments = [key for key in parameters(full) if key != "rounds"]
    try:
        given = [float(word) for word in numbers]
    except ValueError:
        given = []
    if not given or len(given) > len(arguments) or (name == "drops" and len(given) > 1):
        raise FedShuffleError(
            f"step-size schedule {text!r} cannot be read: write its step size after its name, such"
            f" as '{full}:0.1'."
        )
    return full, dict(zip(arguments, given))


def parameters(name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of the schedule of that name."""
    return inspect.signature(_split(name)[1]).parameters


@dataclass(frozen=True)
class NamedSchedule:
    """The schedule of a name over a number of rounds.

    >>> NamedSchedule("cosine", {"step_size": 0.1}, rounds=100)(0)
    0.1
    """

    name: str
    arguments: Mapping[str, Any]
    rounds: int

    @cached_property
    def at(self) -> Callable[[int], float]:
        """The function of the round; the arguments may set another number of rounds."""
        warmup, schedule = _split(self.name)
        known = parameters(self.name)
        given = {"rounds": self.rounds} if "rounds" in known else {}
        given |= self.arguments
        for key in given:
            check_known(f"argument of step-size schedule {self.name!r}", key, known)
        for key, parameter in known.items():
            if parameter.default is parameter.empty and key not in given:
                raise FedShuffleError(f"step-size schedule {self.name!r} needs {key!r}: add it.")
        made = schedule(**given)
        return made if warmup is None else warmed_up(made, warmup)

    def __call__(self, round: int) -> float:
        return self.at(round)


def make(name: str, arguments: Mapping[str, Any], rounds: int) -> NamedSchedule:
    """The schedule of that name, over this number of rounds unless the arguments set another."""
    made = NamedSchedule(name, arguments, rounds)
    made(0)  # an error for arguments that do not fit
    return made


def text(name: str, arguments: Mapping[str, Any]) -> str | None:
    """The text that :func:`parse` reads as this schedule; None if there is none.

    >>> text("warmup:10+cosine", {"step_size": 0.32}), text("drops", {"step_size": 1, "factor": 0})
    ('warmup:10+cosine:0.32', None)
    """
    numbers = [f"{v:.12g}" for v in arguments.values() if isinstance(v, int | float)]
    written = ":".join([name, *numbers])
    try:
        same = parse(written) == (name, dict(arguments))
    except FedShuffleError:
        return None
    return written if same else None


def resolve(schedule: Schedule | str, rounds: int) -> Schedule:
    """A schedule for a run of this number of rounds, also if it is given by its name.

    >>> resolve("drops:0.1", rounds=10)(9) < 0.1, resolve(0.3, rounds=10)
    (True, 0.3)
    """
    return make(*parse(schedule), rounds) if isinstance(schedule, str) else schedule


def size(schedule: Schedule) -> float:
    """The step size of a schedule by name, or else the one of the first round.

    >>> size(resolve("warmup:10+cosine:0.3", rounds=100)), size(lambda round: 1 / (round + 2))
    (0.3, 0.5)
    """
    if isinstance(schedule, NamedSchedule):
        schedule = float(schedule.arguments["step_size"])
    return value(schedule, 0, "step size")


def resized(schedule: Schedule, to: float) -> Schedule:
    """The same schedule with another :func:`size`.

    >>> resized(0.1, to=0.3), resized(resolve("cosine:0.1", rounds=10), to=0.3)(0)
    (0.3, 0.3)
    """
    if isinstance(schedule, NamedSchedule):
        return replace(schedule, arguments={**schedule.arguments, "step_size": to})
    if not callable(schedule):
        return to
    times, given = to / size(schedule), schedule
    return lambda round: times * given(round)


def shortened(schedule: Schedule, rounds: int, to: int) -> Schedule:
    """A straight line that stands for the schedule of a run in a much shorter one.

    It starts at the :func:`size` and would reach the schedule's last step size in round ``to``. In
    a few rounds, steps that fall evenly show best what large ones reach once they have become
    small.

    >>> short = shortened(resolve("warmup:30+drops:1.0", rounds=100), rounds=100, to=3)
    >>> [round(short(r), 2) for r in range(3)], shortened(0.3, rounds=100, to=3)
    ([1.0, 0.67, 0.34], 0.3)
    """
    if not callable(schedule):
        return schedule
    first, last = size(schedule), schedule(rounds - 1)
    return lambda round: first + (last - first) * round / to


def _split(name: str) -> tuple[int | None, Callable[..., Callable[[int], float]]]:
    """The rounds of the warm-up, if any, and the function that makes the schedule after it."""
    before, plus, last = name.rpartition("+")
    found = re.fullmatch("warmup:([0-9]+)", before)
    if plus and found is None:
        raise FedShuffleError(
            f"step-size schedule {name!r} cannot be read: write 'warmup:10+{last}' for a step size"
            " that grows in the first 10 rounds."
        )
    if last not in SCHEDULES:
        raise unknown("step-size schedule", last, [*SCHEDULES, "warmup:ROUNDS+SCHEDULE"])
    warmup = count(int(found[1]), "the number of rounds of the warm-up") if found else None
    return warmup, SCHEDULES[last]
