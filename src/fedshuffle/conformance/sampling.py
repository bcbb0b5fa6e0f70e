"""Whether a sampling is what it says: its probabilities, against its cohorts and its draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.conformance.report import ConformanceError, DoesNotApplyError, equal
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Cohorts, Optimal, Sampling

_DRAWS = 2000
_COHORTS = 4096
_SIGMAS = 5.0
_PAIRS = 200
"""Pair probabilities are looked at one by one for up to so many clients."""


def _enumerated(sampling: Sampling) -> Cohorts:
    cohorts = sampling.cohorts(_COHORTS)
    if cohorts is None:
        raise DoesNotApplyError(f"{sampling!r} has too many cohorts to go through.")
    return cohorts


def _few(sampling: Sampling) -> None:
    if len(sampling) > _PAIRS:
        raise DoesNotApplyError(f"{len(sampling)} clients have too many pairs to go through.")


def probabilities(sampling: Sampling) -> None:
    """All p are in (0, 1], one for each client, and the cohorts' probabilities sum to one."""
    p = sampling.p
    if p.ndim != 1 or not ((p > 0) & (p <= 1)).all():
        raise ConformanceError(f"inclusion probabilities: expected in (0, 1], found {p}.")
    if (cohorts := sampling.cohorts(_COHORTS)) is not None:
        equal(cohorts.probabilities.sum(), 1.0, 1e-9, "the sum of the cohorts' probabilities")


def inclusion(sampling: Sampling) -> None:
    """``p[i]`` is the probability of the cohorts that hold i."""
    found = np.zeros(len(sampling))
    for members, probability in _enumerated(sampling):
        found[members] += probability
    equal(sampling.p, found, 1e-9, "p, beside the cohorts that hold each client")


def pairs(sampling: Sampling) -> None:
    """``P[i, j]`` is the probability of the cohorts that hold both."""
    _few(sampling)
    found = np.zeros((len(sampling), len(sampling)))
    for members, probability in _enumerated(sampling):
        found[np.ix_(members, members)] += probability
    equal(sampling.pair_probabilities(), found, 1e-9, "pair probabilities, beside the cohorts")


def sums(sampling: Sampling) -> None:
    """``expected_sums(v)`` is ``P v``."""
    _few(sampling)
    v: FloatArray = generator(0, Purpose.MONTE_CARLO).normal(size=len(sampling))
    matrix = sampling.pair_probabilities()
    equal(np.diag(matrix), sampling.p, 1e-9, "the diagonal of the pair probabilities, beside p")
    equal(sampling.expected_sums(v), matrix @ v, 1e-9 * len(v), "expected_sums(v), beside P v")


def variance(sampling: Sampling) -> None:
    """``Diag(p s) - (P - p p^T)`` has no negative eigenvalue, and s is not negative."""
    _few(sampling)
    p, s = sampling.p, sampling.s
    if not (s >= 0).all():
        raise ConformanceError(f"s: expected not negative, found {s}.")
    gap = np.diag(p * s) - (sampling.pair_probabilities() - np.outer(p, p))
    least = float(np.linalg.eigvalsh(gap)[0])
    if least < -1e-9:
        raise ConformanceError(
            "Diag(p s) - (P - p p^T): expected no negative eigenvalue, found"
            f" {least:g}: s is too small."
        )


def draws(sampling: Sampling) -> None:
    """A draw is a sorted list of different clients, and a pure function of (seed, round)."""
    cohorts = sampling.cohorts(_COHORTS)
    allowed = None
    if cohorts is not None:
        allowed = {tuple(members.tolist()) for members, q in cohorts if q > 0}
    for round in range(50):
        cohort = _draw(sampling, 7, round)
        where = f"the draw of round {round}"
        if cohort.dtype.kind != "i" or cohort.ndim != 1:
            raise ConformanceError(f"{where}: expected whole numbers, found {cohort!r}.")
        if len(cohort) and (cohort[0] < 0 or cohort[-1] >= len(sampling)):
            raise ConformanceError(
                f"{where}: expected clients from 0 to {len(sampling) - 1}, found {cohort}."
            )
        if (np.diff(cohort) <= 0).any():
            raise ConformanceError(
                f"{where}: expected sorted and different clients, found {cohort}."
            )
        if not np.array_equal(cohort, _draw(sampling, 7, round)):
            raise ConformanceError(f"{where}: expected the same again, found another cohort.")
        if allowed is not None and tuple(cohort.tolist()) not in allowed:
            raise ConformanceError(
                f"{where}: expected one of the cohorts it lists, found {cohort.tolist()}."
            )


def seeds(sampling: Sampling) -> None:
    """Where cohorts are random, they differ from round to round and from seed to seed."""
    if (sampling.p == 1).all():
        raise DoesNotApplyError("everybody always takes part: nothing is random.")
    cohorts = sampling.cohorts(_COHORTS)
    if cohorts is not None and cohorts.probabilities.max() > 0.99:
        raise DoesNotApplyError("hardly anything is random.")
    rounds = {tuple(_draw(sampling, 7, round).tolist()) for round in range(100)}
    by_seed = {tuple(_draw(sampling, seed, 0).tolist()) for seed in range(100)}
    for what, found in {"100 rounds": rounds, "100 seeds": by_seed}.items():
        if len(found) == 1:
            raise ConformanceError(f"cohorts of {what}: expected several, found always the same.")


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
    _near(often, sampling.p, "how often clients are drawn, beside p")
    if together is not None:
        _near(together, sampling.pair_probabilities(), "how often pairs are drawn, beside P")


def _near(found: FloatArray, p: FloatArray, what: str) -> None:
    error = np.sqrt(np.clip(p * (1 - p), 1 / _DRAWS, None) / _DRAWS)
    far = np.abs(found - p) > np.where(p >= 1, 1e-9, _SIGMAS * error)
    if far.any():
        i = tuple(np.argwhere(far)[0].tolist())
        raise ConformanceError(
            f"{what}, over {_DRAWS} rounds, client {', '.join(map(str, i))}: expected"
            f" {p[i]:.4f} +- {error[i]:.4f}, found {found[i]:.4f}."
        )


def selection(sampling: Sampling) -> None:
    """Who of a pool is asked for an update: as often as the probabilities say, never for none."""
    if not isinstance(sampling, Optimal):
        raise DoesNotApplyError("everybody who takes part sends an update.")
    norms = np.arange(len(sampling), dtype=np.float64)
    clients = np.arange(len(sampling))
    often = np.zeros(len(sampling))
    for round in range(_DRAWS):
        asked, p = sampling.select(norms, 3, round, clients)
        often[asked] += 1 / _DRAWS
    if p[0] != 0 or p.sum() > sampling.b + 1e-9:
        raise ConformanceError(
            f"probabilities of being asked: expected none for an update of zero and at most"
            f" {sampling.b} in all, found {p}."
        )
    _near(often, p, "how often clients are asked")


def _draw(sampling: Sampling, seed: int, round: int) -> IntArray:
    return np.asarray(sampling.draw(seed, round))


CHECKS: dict[str, Callable[[Sampling], None]] = {
    "probabilities": probabilities,
    "inclusion": inclusion,
    "pairs": pairs,
    "expected sums": sums,
    "variance vector": variance,
    "draws": draws,
    "seeds": seeds,
    "frequencies": frequencies,
    "selection": selection,
}
