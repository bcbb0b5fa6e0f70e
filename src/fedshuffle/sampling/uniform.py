"""A fixed number of clients, uniformly."""

from __future__ import annotations

import itertools
import math
from typing import final

import numpy as np

from fedshuffle._arrays import IntArray
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import AlikePairs, Cohorts, check_cohort_size


@final
class Uniform(AlikePairs):
    """b of n clients, every subset of size b equally likely: ``p = b/n``, ``s = (n-b)/(n-1)``.

    >>> Uniform(3, 2).p.round(3).tolist(), Uniform(3, 2).s.tolist()
    ([0.667, 0.667, 0.667], [0.5, 0.5, 0.5])
    """

    def __init__(self, n: int, b: int) -> None:
        self.b = check_cohort_size(b, n, "uniform sampling")
        self.p = np.full(n, self.b / n)
        self.rho = (self.b - 1) * n / (self.b * (n - 1)) if n > 1 else 1.0

    def __repr__(self) -> str:
        return f"uniform:{self.b}"

    def draw(self, seed: int, round: int) -> IntArray:
        rng = generator(seed, Purpose.COHORT, round=round)
        return np.sort(rng.choice(len(self), self.b, replace=False, shuffle=False))

    def cohorts(self, limit: int) -> Cohorts | None:
        if min(self.b, len(self) - self.b) > 60:  # more than anybody can list; comb would crawl
            return None
        count = math.comb(len(self), self.b)
        if count > limit:
            return None
        subsets = itertools.combinations(range(len(self)), self.b)
        return Cohorts.of([(subset, 1 / count) for subset in subsets])
