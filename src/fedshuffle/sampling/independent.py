"""Every client decides for itself, exactly or among those invited; importance sampling."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, frozen, vector
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import (
    Cohorts,
    EqualPairCorrelation,
    check_probabilities,
)


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
        if 2 ** min(int((self.p < 1).sum()), 64) > limit:
            return None
        return Cohorts.of(list(decided(np.arange(len(self)), self.p)))


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
            for cohort, q in subsets(list(invited), self.keep[list(invited)]):
                total[cohort] = total.get(cohort, 0.0) + q / ways
        return Cohorts.of([(cohort, q) for cohort, q in sorted(total.items()) if q > 0])


def subsets(clients: list[int], p: FloatArray) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every subset of clients that decide independently, with its probability."""
    for picks in itertools.product([False, True], repeat=len(clients)):
        yield tuple(itertools.compress(clients, picks)), float(np.where(picks, p, 1 - p).prod())


def decided(clients: IntArray, p: FloatArray) -> Iterator[tuple[tuple[int, ...], float]]:
    """The same of some of all clients, with p of all: who is certain is in every subset."""
    chance = p[clients]
    sure, unsure = clients[chance >= 1].tolist(), clients[(chance > 0) & (chance < 1)]
    for some, q in subsets(unsure.tolist(), p[unsure]):
        yield tuple(sorted([*sure, *some])), q


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
