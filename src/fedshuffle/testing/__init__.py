"""The conformance suite: what methods, samplings and transforms must do, yours as well.

>>> from fedshuffle import testing as conformance
>>> report = conformance.check("fedshuffle", checks=["order", "descent"])
>>> report.passed, len(report.results)
(True, 2)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fedshuffle import methods
from fedshuffle.availability import Independent
from fedshuffle.errors import check_known
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.sampling import AmongAvailable, Listed, Sampling, Uniform, resolve
from fedshuffle.testing import method_checks, sampling_checks, transform_checks, unbiasedness_checks
from fedshuffle.testing.problems import SIZES, ConformanceError, DoesNotApplyError
from fedshuffle.transforms import Transform

__all__ = [
    "CHECKS",
    "SAMPLINGS",
    "CheckResult",
    "ConformanceError",
    "Report",
    "check",
    "check_sampling",
    "check_transform",
]

SAMPLINGS: tuple[str | Sampling, ...] = (
    *("full", "uniform:2", "importance:2", "independent:0.5,0.9,0.2,0.4", "one", "ais:2"),
    *("stratified:2:2", "reshuffled:2", "optimal:2", "optimal-approximate:2:of:uniform:3"),
    AmongAvailable(Uniform(4, 2), Independent([0.9, 0.5, 0.7, 0.4])),
    Listed(4, [((0, 1), 0.25), ((2, 3), 0.5), ((1, 2, 3), 0.25)]),
)
"""The samplings under which a method is checked, for four clients with 1, 2, 4 and 5 examples."""


class Check(NamedTuple):
    """One thing that every method must do."""

    run: Callable[..., None]
    every_sampling: bool = False


CHECKS: dict[str, Check] = {
    "rest": Check(method_checks.rest, every_sampling=True),
    "order": Check(method_checks.order),
    "workers": Check(method_checks.workers),
    "descent": Check(method_checks.descent),
    "resume": Check(method_checks.resume),
    "expectation": Check(unbiasedness_checks.expectation, every_sampling=True),
    "fixed point": Check(unbiasedness_checks.fixed_point, every_sampling=True),
    "engines": Check(method_checks.agreement),
    "gradients": Check(method_checks.gradients),
    "messages": Check(method_checks.messages),
    "purity": Check(method_checks.purity),
}
"""The checks of methods by name; ``help(CHECKS[name].run)`` gives the details."""


class CheckResult(NamedTuple):
    """The result of one check."""

    check: str  # its name, and the sampling it was made under if there are several
    outcome: Literal["passed", "failed", "skipped"]
    message: str  # what was expected and found, or why it does not apply; empty if it passed


@dataclass(frozen=True)
class Report:
    """The results of all checks of a method, a sampling or a transform.

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


def check(
    method: str | Method,
    samplings: Sequence[str | Sampling] = SAMPLINGS,
    checks: Sequence[str] | None = None,
) -> Report:
    """Make all checks, or those named, of a method.

    Args:
        method: a name, or a method of your own.
        samplings: those of four clients under which to check it.
        checks: names of :data:`CHECKS`; all by default.

    >>> check("fedavg", samplings=["uniform:2"], checks=["rest"]).results
    (CheckResult(check='rest under uniform:2', outcome='passed', message=''),)
    """
    found, clients = methods.get(method), Federation.from_sizes(SIZES)
    given = {str(one): resolve(one, clients) for one in samplings}
    results: list[CheckResult] = []
    for name in CHECKS if checks is None else checks:
        check_known("check", name, CHECKS)
        run, every_sampling = CHECKS[name]
        if every_sampling:
            results += [_run(f"{name} under {s}", run, found, one) for s, one in given.items()]
        else:
            results.append(_run(name, run, found))
    return Report(found.name, tuple(results))


def check_sampling(given: Sampling) -> Report:
    """Make all checks of a sampling, for any number of clients.

    >>> from fedshuffle.sampling import Uniform
    >>> check_sampling(Uniform(5, 2)).passed
    True
    """
    results = [_run(name, run, given) for name, run in sampling_checks.CHECKS.items()]
    return Report(repr(given), tuple(results))


def check_transform(given: Transform) -> Report:
    """Make all checks of a transform, in a run with few clients on every engine.

    >>> from fedshuffle.privacy import Clip
    >>> check_transform(Clip(1.0)).passed
    True
    """
    results = [_run(name, run, given) for name, run in transform_checks.CHECKS.items()]
    return Report(repr(given), tuple(results))


def _run(name: str, check: Callable[..., None], *arguments: Any) -> CheckResult:
    """Make one check. An unexpected error counts as a failure."""
    try:
        check(*arguments)
    except DoesNotApplyError as reason:
        return CheckResult(name, "skipped", str(reason))
    except Exception as error:
        kind = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
        return CheckResult(name, "failed", f"{kind}{error}")
    return CheckResult(name, "passed", "")
