"""All checks together, for a method or a sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedshuffle import methods
from fedshuffle.conformance import costs, moving, repeating, sampling, weighing
from fedshuffle.conformance.clients import SIZES
from fedshuffle.conformance.report import Outcome, Report, outcome
from fedshuffle.errors import unknown
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling, Table, resolve

SAMPLINGS: tuple[str | Sampling, ...] = (
    "full",
    "uniform:2",
    "importance:2",
    "independent:0.5,0.9,0.2,0.4",
    "one",
    "ais:2",
    "stratified:2:2",
    "optimal:2",
    "optimal-approximate:2:of:uniform:3",
    Table(4, [((0, 1), 0.25), ((2, 3), 0.5), ((1, 2, 3), 0.25)]),
)
"""Those under which a method is checked, of four clients with 1, 2, 4 and 5 examples."""


class Check(NamedTuple):
    """One thing that every method must do."""

    run: Callable[..., None]
    every_sampling: bool = False


CHECKS: dict[str, Check] = {
    "rest": Check(moving.rest, every_sampling=True),
    "order": Check(moving.order),
    "workers": Check(repeating.workers),
    "descent": Check(moving.descent),
    "resume": Check(repeating.resume),
    "expectation": Check(weighing.expectation, every_sampling=True),
    "fixed point": Check(weighing.fixed_point, every_sampling=True),
    "engines": Check(repeating.agreement),
    "gradients": Check(costs.gradients),
    "messages": Check(costs.messages),
    "purity": Check(repeating.purity),
}
"""What every method must do, by name; ``help(CHECKS[name].run)`` says what exactly."""


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

    >>> check("fedavg", samplings=["uniform:2"], checks=["rest"]).outcomes
    (Outcome(check='rest under uniform:2', outcome='passed', message=''),)
    """
    found = methods.get(method)
    clients = Federation.from_sizes(SIZES)
    given = {str(one): resolve(one, clients) for one in samplings}
    outcomes: list[Outcome] = []
    for name in CHECKS if checks is None else checks:
        one = _known(name)
        if one.every_sampling:
            outcomes += [
                outcome(f"{name} under {text}", one.run, found, sampling_)
                for text, sampling_ in given.items()
            ]
        else:
            outcomes.append(outcome(name, one.run, found))
    return Report(found.name, tuple(outcomes))


def _known(name: Any) -> Check:
    if name not in CHECKS:
        raise unknown("check", name, CHECKS)
    return CHECKS[name]


def check_sampling(given: Sampling) -> Report:
    """Make all checks of a sampling, for any number of clients.

    >>> from fedshuffle.sampling import Uniform
    >>> check_sampling(Uniform(5, 2)).passed
    True
    """
    outcomes = [outcome(name, run, given) for name, run in sampling.CHECKS.items()]
    return Report(repr(given), tuple(outcomes))
