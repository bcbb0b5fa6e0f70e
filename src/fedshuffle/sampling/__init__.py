"""Samplings: who takes part in a round, each with its inclusion probabilities.

A sampling is an object (:class:`Uniform`, :class:`Independent`, ...) or the text that names one,
which :func:`parse` reads: ``full``, ``uniform:B``, ``importance:B``, ``independent:p1,p2,...``,
``one``, ``ais:B``, ``stratified:B:K``, ``reshuffled:B``, ``optimal:B`` and
``optimal:B:of:SAMPLING``. Where clients come and go, :class:`AmongAvailable` draws among those who
are there.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fedshuffle import availability as availabilities
from fedshuffle._arrays import IntArray, count, expect
from fedshuffle.availability import Always, Availability
from fedshuffle.errors import FedShuffleError, check_known, error_context
from fedshuffle.federation import Federation
from fedshuffle.local_work import Workload
from fedshuffle.sampling.available import AmongAvailable
from fedshuffle.sampling.base import Cohorts, Sampling, check_probabilities
from fedshuffle.sampling.buffers import Buffers, buffers
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
from fedshuffle.sampling.over_selection import OverSelected
from fedshuffle.sampling.reshuffled import Reshuffled
from fedshuffle.sampling.stratified import Stratified, strata_by_size
from fedshuffle.sampling.uniform import Full, One, Uniform
from fedshuffle.timing import (
    Asynchronous,
    Deadline,
    InTime,
    OverSelection,
    Tasks,
    Timing,
    UntilDeadline,
    Wait,
)

__all__ = [
    "AmongAvailable",
    "ApproximateIndependent",
    "Buffers",
    "Cohorts",
    "Full",
    "Independent",
    "Listed",
    "One",
    "Optimal",
    "OverSelected",
    "Reshuffled",
    "Sampling",
    "Stratified",
    "Uniform",
    "among_available",
    "approximate_probabilities",
    "importance",
    "importance_probabilities",
    "optimal_probabilities",
    "parse",
    "resolve",
    "scheduled",
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


def among_available(
    sampling: Sampling,
    availability: str | Availability | None,
    federation: Federation,
    rounds: int | None = None,
    folder: Path | None = None,
) -> Sampling:
    """The sampling among those who are there; as it is, without an availability.

    ``rounds`` are those of the run, for an availability that drifts; files are in ``folder``.

        >>> clients = Federation.from_sizes([1, 2])
        >>> among_available(Full(2), "independent:0.5,1", clients).p.tolist()
        [0.5, 1.0]
    """
    if availability is None:
        return sampling
    there = availabilities.resolve(availability, federation, rounds, folder)
    found = AmongAvailable(sampling, there)
    if there.drop and not found.inclusion.any():
        raise FedShuffleError(f"nobody is ever available ({there!r}), so there is nobody to train.")
    for i in np.flatnonzero(found.p == 0).tolist():
        raise FedShuffleError(
            f"client {federation.ids[i]} is never available ({there!r}), so its"
            " objective cannot be minimised: leave it out of the federation, or add '+drop' to the"
            " availability to train without such clients."
        )
    return found


def scheduled(
    sampling: Sampling, timing: Timing, workload: Workload, ids: Sequence[Hashable]
) -> tuple[Sampling, Workload]:
    """Who takes part, and how much they do, if the server does not wait for everybody.

    >>> from fedshuffle import LocalWork
    >>> clients = Federation.from_sizes([10, 20])
    >>> timing = Timing.of("deadline:6", "fixed:0.1,0.4+jitter:exponential", clients)
    >>> workload = LocalWork().on(clients.sizes)
    >>> scheduled(Full(2), timing, workload, clients.ids)[0].p.round(3).tolist()
    [0.998, 0.528]
    """
    schedule, clock = timing.schedule, timing.clock
    if clock is None or isinstance(schedule, Wait):
        return sampling, workload
    tasks = Tasks(clock, workload, timing.sizes)
    if isinstance(schedule, Asynchronous):
        return buffers(schedule, sampling, tasks), workload
    if isinstance(schedule, Deadline):
        found, workload = _until(schedule, sampling, tasks)
    else:
        found = _first(schedule, sampling, tasks)
    late = np.flatnonzero((found.inclusion == 0) & (sampling.inclusion > 0))
    if len(late):
        raise FedShuffleError(_never_in_time(schedule, ids, tasks, late))
    return found, workload


def _until(schedule: Deadline, sampling: Sampling, tasks: Tasks) -> tuple[Sampling, Workload]:
    """The sampling of those who are in time, and the work that they do until then."""
    among = sampling if isinstance(sampling, AmongAvailable) else None
    there = Always(len(sampling)) if among is None else among.availability
    drawn = sampling if among is None else among.sampling
    chances = tasks.possible[1]
    if schedule.partial:
        stop = UntilDeadline(tasks, schedule.seconds)
        in_time = InTime(there, schedule, stop.first_step() @ chances, stop.finished)
        work = replace(tasks.workload.work, interruption=stop)
        return AmongAvailable(drawn, in_time), work.on(tasks.workload.sizes)
    each = tasks.in_time(schedule.seconds) * chances
    chance = each.sum(axis=1)
    given = each / np.maximum(chance, 1e-300)[:, None] if len(chances) > 1 else None
    finished = partial(tasks.finished, schedule.seconds)
    return AmongAvailable(drawn, InTime(there, schedule, chance, finished, given)), tasks.workload


def _first(schedule: OverSelection, sampling: Sampling, tasks: Tasks) -> OverSelected:
    asks = isinstance(sampling, Full) or repr(sampling) == f"uniform:{schedule.ask}"
    if not asks:
        raise FedShuffleError(
            f"schedule {str(schedule)!r} asks {schedule.ask} clients itself, uniformly, so that"
            f" sampling {sampling!r} has no say: leave out the sampling and the availability, or"
            " use a deadline."
        )
    count(schedule.ask, f"the number of clients that {schedule} asks", most=len(sampling))
    return OverSelected(schedule, tasks)


def _never_in_time(
    schedule: Deadline | OverSelection, ids: Sequence[Hashable], tasks: Tasks, late: IntArray
) -> str:
    """Why these clients can never take part, and what to do."""
    seconds = tasks.clock.mean(late, tasks.possible[0][late, 0], tasks.sizes)
    slowest, others = late[seconds.argmax()], len(late) - 1
    also = f", like {others} other{'s' * (others > 1)}," if others else ""
    told = f"client {ids[slowest]} needs {seconds.max():.3g} seconds and{also} is never in time for"
    told += f" {schedule}, so its objective cannot be minimised: "
    if isinstance(schedule, OverSelection):
        return f"{told}take more updates, or give the clock a jitter, or leave out the client."
    partly = "" if schedule.partial else "add '+partial', so that it sends what it has; or "
    return f"{told}{partly}set a later deadline, or leave it out of the federation."


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
    "reshuffled": ("reshuffled:B", lambda b, f: Reshuffled(len(f), int(b))),
    "ais": ("ais:B", lambda b, f: ApproximateIndependent(importance(f.sizes, int(b)).p)),
    "stratified": ("stratified:B:K[:weight]", _stratified),
    "optimal": ("optimal:B[:of:SAMPLING]", _optimal),
    "optimal-approximate": (
        "optimal-approximate:B[:of:SAMPLING]",
        lambda a, f: _optimal(a, f, "approximate"),
    ),
}
