"""Samplings: who takes part in a round, each with its inclusion probabilities.

A sampling is an object (:class:`Uniform`, :class:`Independent`, ...) or the text that names one,
which :func:`parse` reads: ``full``, ``uniform:B``, ``importance:B``, ``independent:p1,p2,...``,
``one``, ``ais:B``, ``stratified:B:K``, ``optimal:B`` and ``optimal:B:of:SAMPLING``.
"""

from collections.abc import Callable

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError, check_known, error_context
from fedshuffle.federation import Federation
from fedshuffle.sampling.base import Cohorts, Sampling, check_probabilities
from fedshuffle.sampling.independent import (
    ApproximateIndependent,
    Independent,
    importance,
    importance_probabilities,
)
from fedshuffle.sampling.listed import Listed
from fedshuffle.sampling.optimal import (
    Kind,
    Optimal,
    approximate_probabilities,
    optimal_probabilities,
)
from fedshuffle.sampling.stratified import Stratified, strata_by_size
from fedshuffle.sampling.uniform import Full, One, Uniform

__all__ = [
    "ApproximateIndependent",
    "Cohorts",
    "Full",
    "Independent",
    "Listed",
    "One",
    "Optimal",
    "Sampling",
    "Stratified",
    "Uniform",
    "approximate_probabilities",
    "importance",
    "importance_probabilities",
    "optimal_probabilities",
    "parse",
    "resolve",
    "strata_by_size",
]


def parse(text: str, federation: Federation) -> Sampling:
    """The sampling that a text names, for this federation.

    >>> parse("uniform:2", Federation.from_sizes([1, 2, 3]))
    uniform:2
    """
    form, make, argument = _read(text)
    try:
        return resolve(make(argument, federation), federation)
    except FedShuffleError:
        raise
    except ValueError as error:
        raise FedShuffleError(f"sampling {text!r} cannot be read: write {form!r}.") from error


def check(text: str) -> None:
    """Refuse a text that names no sampling, before there is a federation."""
    _read(text)


def is_two_phase(sampling: str | Sampling) -> bool:
    """Whether clients are selected by their updates after they have trained.

    >>> is_two_phase("optimal:2"), is_two_phase("uniform:2")
    (True, False)
    """
    return ":of:" in _read(sampling)[0] if isinstance(sampling, str) else sampling.two_phase


def _read(text: str) -> tuple[str, Callable[[str, Federation], Sampling], str]:
    """How such a sampling is written, what makes it, and its argument."""
    name, _, argument = text.strip().partition(":")
    check_known("sampling", name, _MAKERS)
    form, make = _MAKERS[name]
    if bool(argument) != (":" in form):
        raise FedShuffleError(f"sampling {text!r} is incomplete or has too much: write {form!r}.")
    _, of, pool = argument.partition(":of:")
    if of and ":of:" in form:  # a pool of another sampling
        if not pool:
            raise FedShuffleError(f"sampling {text!r} is incomplete: write {form!r}.")
        _read(pool)
    return form, make, argument


def resolve(sampling: str | Sampling, federation: Federation) -> Sampling:
    """A sampling, given as text or as it is, that fits the federation.

    >>> resolve(Uniform(3, 2), Federation.from_sizes([1, 2, 3]))
    uniform:2
    """
    if isinstance(sampling, str):
        return parse(sampling, federation)
    expect(sampling, Sampling, "sampling")
    if len(sampling) != len(federation):
        raise FedShuffleError(
            f"the sampling is for {len(sampling)} clients, but the federation has"
            f" {len(federation)}."
        )
    with error_context(f"the p of {type(sampling).__name__}"):
        check_probabilities(sampling.p)
    return sampling


def is_import_path(text: str) -> bool:
    """Whether a text names a sampling of the user's own, ``module:function``.

    >>> is_import_path("my.module:make"), is_import_path("uniform:2")
    (True, False)
    """
    name, _, attribute = text.strip().partition(":")
    return name not in _MAKERS and all(part.isidentifier() for part in attribute.split("."))


def _stratified(argument: str, federation: Federation) -> Stratified:
    b, k, *rest = argument.split(":")
    if rest not in ([], ["weight"]):
        raise ValueError(rest)
    weights = federation.weights if rest else None
    return Stratified(strata_by_size(federation.sizes, int(k)), int(b), weights)


def _optimal(argument: str, federation: Federation, how: Kind = "exact") -> Optimal:
    b, _, pool = argument.partition(":of:")
    return Optimal(parse(pool or "full", federation), int(b), how)


_MAKERS: dict[str, tuple[str, Callable[[str, Federation], Sampling]]] = {
    "full": ("full", lambda _, f: Full(len(f))),
    "uniform": ("uniform:B", lambda b, f: Uniform(len(f), int(b))),
    "importance": ("importance:B", lambda b, f: importance(f.sizes, int(b))),
    "independent": ("independent:p1,p2,...", lambda p, _: Independent(p.split(","))),
    "one": ("one", lambda _, f: One(f.sizes / f.sizes.sum())),
    "ais": ("ais:B", lambda b, f: ApproximateIndependent(importance(f.sizes, int(b)).p)),
    "stratified": ("stratified:B:K[:weight]", _stratified),
    "optimal": ("optimal:B[:of:SAMPLING]", _optimal),
    "optimal-approximate": (
        "optimal-approximate:B[:of:SAMPLING]",
        lambda a, f: _optimal(a, f, "approximate"),
    ),
}
