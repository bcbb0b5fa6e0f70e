"""Full participation, a fixed number of clients uniformly, and one client per round."""

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import IntArray, count, frozen
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import (
    Cohorts,
    EqualPairCorrelation,
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
