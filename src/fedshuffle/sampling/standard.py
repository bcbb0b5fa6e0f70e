"""The standard samplings: full, uniform, one client, independent with any probabilities, listed."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, frozen, number, vector
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import (
    Cohorts,
    EqualPairCorrelation,
    Sampling,
    check_probabilities,
)


class Full(EqualPairCorrelation):
    """Every client takes part in every round.

    >>> Full(3).draw(seed=1, round=0).tolist()
    [0, 1, 2]
    """

    rho = 1.0

    def __init__(self, n: int) -> None:
        self.p = np.ones(count(n, "the number of clients"))

    def __repr__(self) -> str:
        return "full"

    def draw(self, seed: int, round: int) -> IntArray:
        return np.arange(len(self))

    def cohorts(self, limit: int) -> Cohorts:
        return Cohorts(np.arange(len(self)), np.array([0, len(self)]), np.ones(1))


class Uniform(EqualPairCorrelation):
    """b of n clients, every subset of size b equally likely: ``p = b/n``, ``s = (n-b)/(n-1)``.

    >>> Uniform(3, 2).p.round(3).tolist(), Uniform(3, 2).s.tolist()
    ([0.667, 0.667, 0.667], [0.5, 0.5, 0.5])
    """

    def __init__(self, n: int, b: int) -> None:
        self.b = count(b, "the number of sampled clients", most=n)
        self.p = np.full(n, self.b / n)
        self.rho = (self.b - 1) * n / (self.b * (n - 1)) if n > 1 else 1.0

    def __repr__(self) -> str:
        return f"uniform:{self.b}"

    def draw(self, seed: int, round: int) -> IntArray:
        rng = generator(seed, Purpose.COHORT, round=round)
        return np.sort(rng.choice(len(self), self.b, replace=False, shuffle=False))

    def cohorts(self, limit: int) -> Cohorts | None:
        return Cohorts.of_strata([range(len(self))], np.array([self.b]), limit)


class One(EqualPairCorrelation):
    """Exactly one client, client i with probability p_i; the p_i sum to one. ``s = 1``, a bound.

    >>> One([0.8, 0.1, 0.1]).s.tolist()
    [1.0, 1.0, 1.0]
    """

    rho = 0.0

    def __init__(self, p: ArrayLike) -> None:
        p = check_probabilities(p)
        if not np.isclose(p.sum(), 1.0, rtol=0, atol=1e-9):
            raise FedShuffleError(
                f"sampling one client: the probabilities sum to {p.sum():g}. Divide them by that."
            )
        self.p = frozen(p / p.sum())
        self._cohorts = Cohorts(np.arange(len(p)), np.arange(len(p) + 1), self.p)

    def __repr__(self) -> str:
        return "one"

    def draw(self, seed: int, round: int) -> IntArray:
        return self._cohorts.at(generator(seed, Purpose.COHORT, round=round).random())

    def cohorts(self, limit: int) -> Cohorts:
        return self._cohorts


class Independent(EqualPairCorrelation):
    """Client i takes part with probability p_i, independently of all others: ``s = 1 - p``.

    The cohort may be empty; such a round leaves the model as it is.

        >>> Independent([0.5, 1.0]).s.tolist()
        [0.5, 0.0]
    """

    rho = 1.0

    def __init__(self, p: ArrayLike) -> None:
        self.p = frozen(check_probabilities(p))

    def __repr__(self) -> str:
        return f"independent, {self.p.sum():g} of {len(self)} expected"

    def draw(self, seed: int, round: int) -> IntArray:
        rng = generator(seed, Purpose.COHORT, round=round)
        return np.flatnonzero(rng.random(len(self)) < self.p)

    def cohorts(self, limit: int) -> Cohorts | None:
        always, unsure = np.flatnonzero(self.p == 1).tolist(), np.flatnonzero(self.p < 1)
        if 2 ** min(len(unsure), 64) > limit:
            return None
        subsets = _subsets(unsure.tolist(), self.p[unsure])
        return Cohorts.of([(tuple(sorted([*always, *some])), q) for some, q in subsets])


class ApproximateIndependent(EqualPairCorrelation):
    """Invite ``k >= n max p`` clients uniformly; an invited one stays with probability n p_i / k.

    Then ``P(i in S) = p_i`` exactly, and no more than k clients need to be reachable in a round
    (Horvath and Richtarik 2019, section 2.3).

        >>> ApproximateIndependent([0.5, 0.25, 0.25, 0.5]).k
        2
    """

    def __init__(self, p: ArrayLike, k: int | None = None) -> None:
        self.p = frozen(check_probabilities(p))
        n = len(self.p)
        least = min(n, math.ceil(n * float(self.p.max()) * (1 - 1e-12)))
        what = f"k, the number of clients invited to reach the probability {self.p.max():g},"
        self.k = least if k is None else count(k, what, least, n)
        self.keep = frozen(np.minimum(1.0, n * self.p / self.k))
        self.rho = (self.k - 1) * n / (self.k * (n - 1)) if n > 1 else 1.0

    def __repr__(self) -> str:
        return f"approximate independent, {self.p.sum():g} of {self.k} invited expected"

    def draw(self, seed: int, round: int) -> IntArray:
        rng = generator(seed, Purpose.COHORT, round=round)
        invited = np.sort(rng.choice(len(self), self.k, replace=False, shuffle=False))
        return invited[rng.random(self.k) < self.keep[invited]]

    def cohorts(self, limit: int) -> Cohorts | None:
        if (
            2 ** min(self.k, 64) > limit
            or (ways := math.comb(len(self), self.k)) * 2**self.k > limit
        ):
            return None
        total: dict[tuple[int, ...], float] = {}
        for invited in itertools.combinations(range(len(self)), self.k):
            for cohort, q in _subsets(list(invited), self.keep[list(invited)]):
                total[cohort] = total.get(cohort, 0.0) + q / ways
        return Cohorts.of([(cohort, q) for cohort, q in sorted(total.items()) if q > 0])


def _subsets(clients: list[int], p: FloatArray) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every subset of clients that decide independently, with its probability."""
    for picks in itertools.product([False, True], repeat=len(clients)):
        yield tuple(itertools.compress(clients, picks)), float(np.where(picks, p, 1 - p).prod())


def importance(scores: ArrayLike, b: int) -> Independent:
    """Independent sampling with p proportional to the scores (sizes), b clients expected.

    >>> importance([8, 1, 1], 1).p.round(3).tolist()
    [0.8, 0.1, 0.1]
    """
    return Independent(importance_probabilities(scores, b))


def importance_probabilities(scores: ArrayLike, b: int) -> FloatArray:
    """``p_i = min(1, t * score_i)`` with t such that the sum is b.

    A share above one is capped, and the rest of b goes to the other clients in proportion, until
    no share exceeds one.

        >>> importance_probabilities([8, 1, 1], 2).tolist()
        [1.0, 0.5, 0.5]
    """
    score = vector(scores, "importance scores")
    b = count(b, "the number of sampled clients", most=len(score))
    # With the c largest capped, t = (b - c) / (sum of the rest). The right c is the first for which
    # the largest of the rest stays below one.
    descending = np.sort(score)[::-1]
    rest = np.cumsum(descending[::-1])[::-1]
    capped = np.arange(b)
    fits = (b - capped) * descending[capped] <= rest[capped]
    c = int(capped[fits][0])
    return np.minimum(1.0, score * ((b - c) / float(rest[c])))


class Listed(Sampling):
    """Any sampling, given as (cohort, probability) rows.

    >>> Listed(3, [((0, 1), 0.5), ((2,), 0.5)]).p.tolist()
    [0.5, 0.5, 0.5]
    """

    def __init__(self, n: int, rows: Iterable[tuple[Sequence[int], float]]) -> None:
        checked = [_check_row(n, members, probability) for members, probability in rows]
        total = sum(probability for _, probability in checked)
        if not np.isclose(total, 1.0, rtol=0, atol=1e-9):
            raise FedShuffleError(
                f"the probabilities of the cohorts sum to {total:g}. Make them sum to 1."
            )
        self._cohorts = Cohorts.of([(members, q / total) for members, q in checked])
        lengths = np.diff(self._cohorts.starts)
        weights = np.repeat(self._cohorts.probabilities, lengths)
        p = np.bincount(self._cohorts.members, weights=weights, minlength=n)
        self.p = check_probabilities(np.minimum(p, 1.0))

    def __repr__(self) -> str:
        return f"table of {len(self._cohorts)} cohorts"

    def pair_probabilities(self) -> FloatArray:
        pairs = np.zeros((len(self), len(self)))
        for members, probability in self._cohorts:
            pairs[np.ix_(members, members)] += probability
        return pairs

    def expected_sums(self, v: FloatArray) -> FloatArray:
        sums = np.zeros(len(self))
        for members, probability in self._cohorts:
            sums[members] += probability * v[members].sum()
        return sums

    def draw(self, seed: int, round: int) -> IntArray:
        return self._cohorts.at(generator(seed, Purpose.COHORT, round=round).random())

    def cohorts(self, limit: int) -> Cohorts:
        return self._cohorts


def _check_row(n: int, members: Sequence[int], probability: float) -> tuple[tuple[int, ...], float]:
    what = f"cohort {members!r}: members must be client numbers."
    with error_context(lambda _: what, TypeError):
        cohort = tuple(sorted(operator.index(i) for i in members))
    if len(set(cohort)) != len(cohort) or any(not 0 <= i < n for i in cohort):
        raise FedShuffleError(
            f"cohort {cohort}: members must be different clients from 0 to {n - 1}."
        )
    return cohort, number(probability, f"the probability of cohort {cohort}", within="[0, 1]")
