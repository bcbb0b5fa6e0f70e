"""Whether the stated probabilities of a sampling match its cohorts and its draws."""

from collections.abc import Callable

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Sampling
from fedshuffle.sampling.base import MAX_COHORTS
from fedshuffle.testing.problems import DoesNotApplyError, ensure, equal, listed_cohorts

_DRAWS = 2000
_SIGMAS = 5.0
_PAIRS = 200  # most clients for which pair probabilities are checked one by one


def probabilities(sampling: Sampling) -> None:
    """All p are in (0, 1], one for each client, and the cohorts' probabilities sum to one."""
    p = sampling.p
    valid = p.ndim == 1 and ((p > 0) & (p <= 1)).all()
    ensure(valid, f"inclusion probabilities: expected in (0, 1], found {p}.")
    if (cohorts := sampling.cohorts(MAX_COHORTS)) is not None:
        equal(cohorts.probabilities.sum(), 1.0, 1e-9, "the sum of the cohorts' probabilities")


def inclusion(sampling: Sampling) -> None:
    """``p[i]`` is the probability of the cohorts that hold i."""
    found = np.zeros(len(sampling))
    for members, probability in listed_cohorts(sampling):
        found[members] += probability
    equal(sampling.p, found, 1e-9, "p, against the cohorts that hold each client")


def pairs(sampling: Sampling) -> None:
    """``P[i, j]`` is the probability of the cohorts that hold both."""
    stated = _pair_probabilities(sampling)
    found = np.zeros_like(stated)
    for members, probability in listed_cohorts(sampling):
        found[np.ix_(members, members)] += probability
    equal(stated, found, 1e-9, "pair probabilities, against the cohorts")


def expected_sums(sampling: Sampling) -> None:
    """``expected_sums(v)`` is ``P v``."""
    matrix = _pair_probabilities(sampling)
    v: FloatArray = generator(0, Purpose.MONTE_CARLO).normal(size=len(sampling))
    equal(np.diag(matrix), sampling.p, 1e-9, "the diagonal of the pair probabilities, against p")
    equal(sampling.expected_sums(v), matrix @ v, 1e-9 * len(v), "expected_sums(v), against P v")


def variance_vector(sampling: Sampling) -> None:
    """``Diag(p s) - (P - p p^T)`` has no negative eigenvalue, and s is not negative."""
    p, s = sampling.p, sampling.s
    gap = np.diag(p * s) - (_pair_probabilities(sampling) - np.outer(p, p))
    ensure((s >= 0).all(), f"s: expected not negative, found {s}.")
    least = float(np.linalg.eigvalsh(gap)[0])
    what = "Diag(p s) - (P - p p^T): expected no negative eigenvalue"
    ensure(least >= -1e-9, f"{what}, found {least:g}: s is too small.")


def _pair_probabilities(sampling: Sampling) -> FloatArray:
    if len(sampling) > _PAIRS:
        raise DoesNotApplyError(f"{len(sampling)} clients have too many pairs to enumerate.")
    return sampling.pair_probabilities()


def draws(sampling: Sampling) -> None:
    """A draw is a sorted list of different clients, and a pure function of (seed, round)."""
    cohorts, n = sampling.cohorts(MAX_COHORTS), len(sampling)
    allowed = {tuple(members.tolist()) for members, q in cohorts or [] if q > 0}
    for round in range(50):
        cohort, again = _draw(sampling, 7, round), _draw(sampling, 7, round)
        members = cohort.tolist()
        rules = {
            "whole numbers": cohort.dtype.kind == "i" and cohort.ndim == 1,
            f"clients from 0 to {n - 1}": all(0 <= client < n for client in members),
            "sorted and different clients": bool((np.diff(cohort) > 0).all()),
            f"{again.tolist()} again": np.array_equal(cohort, again),
            "one of the cohorts it lists": cohorts is None or tuple(members) in allowed,
        }
        for what, holds in rules.items():
            ensure(holds, f"the draw of round {round}: expected {what}, found {members}.")


def seeds(sampling: Sampling) -> None:
    """Random cohorts differ from round to round and from seed to seed."""
    cohorts = sampling.cohorts(MAX_COHORTS)
    if (sampling.p == 1).all() or (cohorts is not None and cohorts.probabilities.max() > 0.99):
        raise DoesNotApplyError("nothing, or hardly anything, is random.")
    rounds = {tuple(_draw(sampling, 7, round).tolist()) for round in range(100)}
    by_seed = {tuple(_draw(sampling, seed, 0).tolist()) for seed in range(100)}
    for what, found in {"100 rounds": rounds, "100 seeds": by_seed}.items():
        ensure(len(found) > 1, f"cohorts of {what}: expected several, found always the same.")


def frequencies(sampling: Sampling) -> None:
    """Clients and pairs are drawn as often as p and P say, within five standard errors."""
    n = len(sampling)
    often = np.zeros(n)
    together = np.zeros((n, n)) if n <= _PAIRS else None
    for round in range(_DRAWS):
        cohort = _draw(sampling, 3, round)
        often[cohort] += 1 / _DRAWS
        if together is not None:
            together[np.ix_(cohort, cohort)] += 1 / _DRAWS
    _near(often, sampling.p, "how often clients are drawn, against p")
    if together is not None:
        _near(together, sampling.pair_probabilities(), "how often pairs are drawn, against P")


def selection(sampling: Sampling) -> None:
    """Clients are selected with the stated probabilities, and never for an update of zero."""
    if not sampling.two_phase:
        raise DoesNotApplyError("every client of the cohort sends an update.")
    clients, often = np.arange(len(sampling)), np.zeros(len(sampling))
    most = sampling.expected_updates
    for round in range(_DRAWS):
        asked, p = sampling.select(clients.astype(np.float64), 3, round, clients)
        often[asked] += 1 / _DRAWS
    ensure(
        p[0] == 0 and p.sum() <= most + 1e-9,
        "probabilities of being asked: expected none for an update of zero and at most"
        f" {most:g} in all, found {p}.",
    )
    _near(often, p, "how often clients are asked")


def _draw(sampling: Sampling, seed: int, round: int) -> IntArray:
    return np.asarray(sampling.draw(seed, round))


def _near(found: FloatArray, p: FloatArray, what: str) -> None:
    error = np.sqrt(np.clip(p * (1 - p), 1 / _DRAWS, None) / _DRAWS)
    far = np.abs(found - p) > np.where(p >= 1, 1e-9, _SIGMAS * error)
    for i in map(tuple, np.argwhere(far).tolist()):
        who, expected = ", ".join(map(str, i)), f"{p[i]:.4f} +- {error[i]:.4f}"
        shown = f"client {who}: expected {expected}, found {found[i]:.4f}."
        ensure(False, f"{what}, over {_DRAWS} rounds, {shown}")


_STATED = (probabilities, inclusion, pairs, expected_sums, variance_vector)
_DRAWN = (draws, seeds, frequencies, selection)
CHECKS: dict[str, Callable[[Sampling], None]] = {
    check.__name__.replace("_", " "): check for check in (*_STATED, *_DRAWN)
}
