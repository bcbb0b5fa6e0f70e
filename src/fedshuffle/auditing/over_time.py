"""Who counts when: effective weights in parts of a run, where availability changes with time."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.estimation import LOG_BATCHES, Observations
from fedshuffle.auditing.findings import Finding, findings_of
from fedshuffle.auditing.subject import Subject
from fedshuffle.errors import NotAuditableError
from fedshuffle.sampling import AmongAvailable

WINDOWS = 4  # parts of the rounds to look at
_NOTICED = 1.05  # a client that counts more than this many times what was meant is named
_MOST = 10**6  # clients times rounds

_SURE = 5.0  # standard errors by which a window must differ to be reported

WeightsOf = Callable[[Subject], tuple[FloatArray, str] | None]


def check_steady(subject: Subject) -> None:
    """Refuse to simulate what has no long-run mean."""
    sampling = subject.sampling
    if not isinstance(sampling, AmongAvailable) or sampling.period == 1:
        return
    if subject.step_size is not None or not sampling.availability.repeats:
        raise NotAuditableError(
            f"no formula is known for {subject.method.name}, and an availability that changes with"
            " time cannot be simulated with a schedule or a drift: audit the averaging alone, or"
            " leave out step_size and rounds, and take an availability that repeats."
        )


def over_time(
    subject: Subject, exact: bool, biased: bool, weights_of: WeightsOf
) -> tuple[list[Finding], list[str]]:
    """A finding, or a note if the weights are right in the mean, that says who counts when."""
    sampling, objective = subject.sampling, subject.federation.weights
    rounds = sampling.period if subject.step_size is None else subject.rounds
    steady = sampling.period == 1 or subject.dependencies.window
    steady = steady or subject.method.direction.remembers  # who is away counts as well
    if not isinstance(sampling, AmongAvailable) or steady or not exact:
        return [], []
    if rounds * len(objective) > _MOST:
        return [], []
    most, window, client = 0.0, range(0), subject.federation.ids[0]
    bounds = [rounds * k // WINDOWS for k in range(WINDOWS + 1)]
    for part in (range(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end):
        found = weights_of(replace(subject, within=part))
        if found is None or not found[0].sum() > 0:  # nobody was there
            continue
        ratio = found[0] / found[0].sum() / objective
        if ratio.max() > most:
            most, window = float(ratio.max()), part
            client = subject.federation.ids[int(ratio.argmax())]
    if most < _NOTICED:
        return [], []
    span = f"{window[0]} to {window[-1]}" if len(window) > 1 else f"{window[0]}"
    when = f"in round{'s' * (len(window) > 1)} {span} client {client} counts {most:.3g} times"
    if not biased:
        return [], [f"the weights are right over {rounds} rounds, but {when} what you meant"]
    steps = [subject.step_size_of(round) for round in range(rounds)]
    cause = "time" if min(steps) == max(steps) else "time and step sizes"
    if subject.method.averaging.by_probability and cause == "time":
        whole = sampling.availability.repeats and rounds % sampling.period == 0
        if whole or rounds == sampling.period:  # another cause, which has its own finding
            return [], [f"{when} what you meant"]
        cause = "time and rounds"
    share = sum(steps[round] for round in window) / sum(steps)
    values = {"when": when, "share": f"{share:.0%}", "window": span}
    values |= {"period": str(sampling.period), "rounds": str(rounds)}
    return findings_of({cause: True}, **values), []


@dataclass(frozen=True, eq=False)
class Window:
    """Successive rounds of a log, and the effective weights of these alone."""

    first: str  # the names of its first and last round
    last: str
    share: float  # of what the model moved in all rounds
    effective_weights: FloatArray
    standard_errors: FloatArray


def log_windows(seen: Observations, names: Sequence[str], n: int) -> tuple[Window, ...]:
    """The effective weights in each quarter of a log; none of a log of few rounds.

    Their errors come from the differences of neighbouring batches, which a slow drift hardly adds
    to.
    """
    if seen.rounds < 4 * LOG_BATCHES:
        return ()
    batch = seen.round * LOG_BATCHES // seen.rounds
    cells = np.bincount(batch * n + seen.client, seen.contribution, LOG_BATCHES * n)
    batches = cells.reshape(LOG_BATCHES, n)
    totals = batches.sum(axis=1, keepdims=True)
    shares = batches / np.where(totals > 0, totals, 1.0)  # so that large steps hide no small ones
    apart = np.diff(shares, axis=0)[((totals[1:] > 0) & (totals[:-1] > 0))[:, 0]]
    spread = np.sqrt((apart**2).mean(axis=0) / 2) if len(apart) else np.full(n, np.inf)
    each = LOG_BATCHES // WINDOWS
    windows = []
    for begin in range(0, LOG_BATCHES, each):
        part = slice(begin, begin + each)
        moved = batches[part].sum(axis=0)
        if not moved.sum() > 0:
            continue
        weights, counted = moved / moved.sum(), totals[part] / moved.sum()
        first, end = (-(-k * seen.rounds // LOG_BATCHES) for k in (begin, begin + each))
        share = float(moved.sum() / batches.sum())
        errors = spread * float(np.sqrt((counted**2).sum()))
        windows.append(Window(names[first], names[end - 1], share, weights, errors))
    return tuple(windows)


def window_findings(
    windows: Sequence[Window], overall: FloatArray, ids: Sequence[Hashable]
) -> list[Finding]:
    """A finding that names the client whose weight rises most above its mean, and when, if that is
    more than chance.
    """
    most, where = _NOTICED, None
    for window in windows:
        sure = window.effective_weights - overall > _SURE * window.standard_errors
        ratio = np.where(sure, window.effective_weights / np.maximum(overall, 1e-300), 0.0)
        if ratio.max() > most:
            most, where = float(ratio.max()), (window, int(ratio.argmax()))
    if where is None:
        return []
    window, i = where
    values = {"first": window.first, "last": window.last, "client": ids[i]}
    values |= {"then": window.effective_weights[i], "overall": overall[i]}
    return findings_of({"windows": True}, **values)
