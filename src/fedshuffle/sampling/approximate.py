"""Approximate independent sampling: a uniform invitation, then each invited client decides."""

from __future__ import annotations

import itertools
import math
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import IntArray, count, frozen
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import AlikePairs, Cohorts
from fedshuffle.sampling.independent import check_probabilities


@final
class ApproximateIndependent(AlikePairs):
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
        self.k = least if k is None else count(k, "the number of invited clients")
        if not least <= self.k <= n:
            raise FedShuffleError(
                f"approximate independent sampling: inviting k = {self.k} of {n} clients cannot"
                f" reach the largest probability {self.p.max():g}. Choose k from {least} to {n}."
            )
        self.keep = frozen(np.minimum(1.0, n * self.p / self.k))
        self.rho = (self.k - 1) * n / (self.k * (n - 1)) if n > 1 else 1.0

    def __repr__(self) -> str:
        return f"approximate independent, {self.p.sum():g} of {self.k} invited expected"

    def draw(self, seed: int, round: int) -> IntArray:
        rng = generator(seed, Purpose.COHORT, round=round)
        invited = np.sort(rng.choice(len(self), self.k, replace=False, shuffle=False))
        return invited[rng.random(self.k) < self.keep[invited]]

    def cohorts(self, limit: int) -> Cohorts | None:
        if self.k > 60:  # more than anybody can list
            return None
        count = math.comb(len(self), self.k)
        if count * 2**self.k > limit:
            return None
        total: dict[tuple[int, ...], float] = {}
        for invited in itertools.combinations(range(len(self)), self.k):
            keep = self.keep[list(invited)]
            for picks in itertools.product([False, True], repeat=self.k):
                probability = float(np.where(picks, keep, 1 - keep).prod()) / count
                cohort = tuple(itertools.compress(invited, picks))
                total[cohort] = total.get(cohort, 0.0) + probability
        return Cohorts.of([(cohort, q) for cohort, q in sorted(total.items()) if q > 0])
