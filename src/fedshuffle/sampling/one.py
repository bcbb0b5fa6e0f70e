"""One client per round."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import IntArray, frozen
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import AlikePairs, Cohorts
from fedshuffle.sampling.independent import check_probabilities


@final
class One(AlikePairs):
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
