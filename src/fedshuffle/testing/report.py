"""Results of checks: passed, failed (expected and found values), or skipped (with a reason)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError


class ConformanceError(FedShuffleError):
    """A promise is broken: the message says what was expected and what was found."""


class DoesNotApplyError(FedShuffleError):
    """A check does not apply to a method; the message is the reason."""


class CheckResult(NamedTuple):
    """The result of one check."""

    check: str
    """Its name, and the sampling it was made under if there are several."""
    outcome: Literal["passed", "failed", "skipped"]
    message: str
    """What was expected and found, or why the check does not apply; empty if it passed."""


@dataclass(frozen=True)
class Report:
    """The results of all checks of a method or a sampling.

    >>> rest, cost = CheckResult("rest", "passed", ""), CheckResult("cost", "failed", "2, 1")
    >>> report = Report("mine", (rest, cost))
    >>> report.passed, [result.check for result in report.failures]
    (False, ['cost'])
    """

    subject: str
    results: tuple[CheckResult, ...]

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    @property
    def failures(self) -> list[CheckResult]:
        """Those that failed."""
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def passed(self) -> bool:
        """Whether none failed, and not all were skipped."""
        return not self.failures and any(one.outcome == "passed" for one in self.results)

    def __str__(self) -> str:
        lines = [f"{one.check}: {one.outcome}. {one.message}".rstrip(" ") for one in self.results]
        return "\n".join([self.subject, *lines])


def run_check(name: str, check: Callable[..., None], *arguments: Any) -> CheckResult:
    """Make one check. An unexpected error counts as a failure."""
    try:
        check(*arguments)
    except DoesNotApplyError as reason:
        return CheckResult(name, "skipped", str(reason))
    except Exception as error:
        kind = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
        return CheckResult(name, "failed", f"{kind}{error}")
    return CheckResult(name, "passed", "")


def ensure(condition: bool | np.bool_, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def equal(found: ArrayLike, expected: ArrayLike, tolerance: float | FloatArray, what: str) -> None:
    """Fail if numbers differ by more than the tolerance; NaN differs from everything."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    same = a.shape == b.shape and bool((np.abs(a - b) <= tolerance).all())
    ensure(same, f"{what}: expected {short(b)}, found {short(a)}.")


def short(values: ArrayLike) -> str:
    """Numbers as a short text.

    >>> short([0.1, 1 / 3])
    '[0.1, 0.333333]'
    """
    array = np.asarray(values, dtype=np.float64)
    few = [f"{value:.6g}" for value in array.ravel()[:8]]
    text = f"{', '.join(few)}{', ...' if array.size > 8 else ''}"
    return f"[{text}]" if array.ndim else text
