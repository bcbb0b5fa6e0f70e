"""Every client decides for itself; importance sampling is the case of p proportional to size."""

from __future__ import annotations

import itertools
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, frozen, positive
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import AlikePairs, Cohorts, check_cohort_size


@final
class Independent(AlikePairs):
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
        certain = self.p == 1
        unsure = np.flatnonzero(~certain)
        if len(unsure) > 60 or 2 ** len(unsure) > limit:
            return None
        always = np.flatnonzero(certain).tolist()
        cohorts = []
        for picks in itertools.product([False, True], repeat=len(unsure)):
            chosen = unsure[np.array(picks, dtype=bool)]
            probability = np.where(picks, self.p[unsure], 1 - self.p[unsure]).prod()
            cohorts.append((tuple(sorted([*always, *chosen.tolist()])), float(probability)))
        return Cohorts.of(cohorts)


def importance(scores: ArrayLike, b: int) -> Independent:
    """Independent sampling with p proportional to the scores (sizes), b clients expected.

    >>> importance([8, 1, 1], 1).p.round(3).tolist()
    [0.8, 0.1, 0.1]
    """
    return Independent(importance_probabilities(scores, b))


def importance_probabilities(scores: ArrayLike, b: int) -> FloatArray:
    """``p_i = min(1, t * score_i)`` with t such that the sum is b.

    Clients whose share would exceed one are capped, and what is left goes to the others in
    proportion, until nobody exceeds one.

        >>> importance_probabilities([8, 1, 1], 2).tolist()
        [1.0, 0.5, 0.5]
    """
    score = positive(scores, np.size(scores), "importance scores")
    n = len(score)
    b = check_cohort_size(b, n, "importance sampling")
    # With the c largest capped, t = (b - c) / (sum of the rest). The right c is the first for which
    # the largest of the rest stays below one.
    descending = np.sort(score)[::-1]
    rest = np.cumsum(descending[::-1])[::-1]
    capped = np.arange(b)
    fits = (b - capped) * descending[capped] <= rest[capped]
    c = int(capped[fits][0])
    return np.minimum(1.0, score * ((b - c) / float(rest[c])))


def check_probabilities(p: ArrayLike) -> FloatArray:
    """A vector of probabilities in (0, 1], or an error that names the first bad client."""
    try:
        array = np.array(p, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedShuffleError(f"inclusion probabilities must be numbers: {error}.") from error
    if array.ndim != 1 or array.size == 0:
        raise FedShuffleError("inclusion probabilities must be a non-empty list, one per client.")
    bad = np.flatnonzero(~((array > 0) & (array <= 1)))
    if bad.size:
        i = int(bad[0])
        raise FedShuffleError(
            f"client {i} has inclusion probability {array[i]:g}, which is outside (0, 1]. A client"
            " that can never take part has no place in the objective: leave it out or raise its"
            " probability."
        )
    return array
