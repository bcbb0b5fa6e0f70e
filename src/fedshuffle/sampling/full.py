"""Full participation."""

from __future__ import annotations

from typing import final

import numpy as np

from fedshuffle._arrays import IntArray, count
from fedshuffle.sampling.base import AlikePairs, Cohorts


@final
class Full(AlikePairs):
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
