"""What checks say: passed, failed with what was expected and found, or skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError


class ConformanceError(FedShuffleError):
    """A promise is broken: the message says what was expected and what was found."""


class DoesNotApplyError(FedShuffleError):
    """A check has nothing to say of a method; the message is the reason."""


class Outcome(NamedTuple):
    """What one check said."""

    check: str
    """Its name, and the sampling it was made under if there are several."""
    outcome: Literal["passed", "failed", "skipped"]
    message: str
    """What was expected and found, or why the check does not apply; empty if it passed."""


@final
@dataclass(frozen=True)
class Report:
    """What all checks said of a method or a sampling.

    >>> report = Report("mine", (Outcome("rest", "passed", ""), Outcome("cost", "failed", "2, 1")))
    >>> report.passed, [outcome.check for outcome in report.failures]
    (False, ['cost'])
    """

    subject: str
    outcomes: tuple[Outcome, ...]

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        """Those that failed."""
        return [outcome for outcome in self.outcomes if outcome.outcome == "failed"]

    @property
    def passed(self) -> bool:
        """Whether none failed, and some did not have to be skipped."""
        return not self.failures and any(one.outcome == "passed" for one in self.outcomes)

    def __str__(self) -> str:
        lines = [f"{one.check}: {one.outcome}. {one.message}".rstrip(" ") for one in self.outcomes]
        return "\n".join([self.subject, *lines])


def outcome(name: str, check: Callable[..., None], *arguments: Any) -> Outcome:
    """Make one check. Whatever else goes wrong in it is a failure too."""
    try:
        check(*arguments)
    except DoesNotApplyError as reason:
        return Outcome(name, "skipped", str(reason))
    except ConformanceError as error:
        return Outcome(name, "failed", str(error))
    except Exception as error:
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, "passed", "")


def equal(found: ArrayLike, expected: ArrayLike, tolerance: float | FloatArray, what: str) -> None:
    """Refuse numbers that differ by more than the tolerance; NaN differs from everything."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != b.shape or not (np.abs(a - b) <= tolerance).all():
        raise ConformanceError(f"{what}: expected {shown(b)}, found {shown(a)}.")


def shown(values: ArrayLike) -> str:
    """Numbers, short.

    >>> shown([0.1, 1 / 3])
    '[0.1, 0.333333]'
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0:
        return f"{float(array):.6g}"
    few = [f"{value:.6g}" for value in array.ravel()[:8]]
    return f"[{', '.join(few)}{', ...' if array.size > 8 else ''}]"
