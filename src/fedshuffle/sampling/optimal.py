"""Optimal client sampling: a pool of clients trains, and the most important updates are sent.

Chen, Horvath and Richtarik, Optimal Client Sampling for Federated Learning, 2020.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, IntArray, count, expect, vector
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.randomness import Purpose, ReusableGenerator
from fedshuffle.sampling.base import Cohorts, Sampling
from fedshuffle.sampling.independent import ApproximateIndependent, importance_probabilities
from fedshuffle.sampling.stratified import Stratified
from fedshuffle.sampling.uniform import One, Uniform

Kind = Literal["exact", "approximate"]
_HOW = {"exact": "optimal", "approximate": "optimal-approximate"}
"""The kinds, and how the text of each begins."""

_ITERATIONS = 4
"""Rescalings of the approximation, as in the paper."""

_NEGLIGIBLE = 1e-200
"""A norm smaller than the largest by this factor counts as zero."""


class Optimal(Sampling):
    r"""A pool of clients is drawn and trains; about b of them then send their updates.

    Each client i of the pool sends the norm :math:`u_i = \|a_i (y_i - x)\|` of its weighted update.
    It sends the update itself with the probability :math:`p'_i` that :meth:`select` chooses, with
    weight :math:`w_i / (p_i p'_i)`: the mean is the update of the whole pool, and the variance
    :math:`\sum_i (1/p'_i - 1) u_i^2` is the least possible with b updates on average.

    ``p``, ``s`` and the draw are those of the pool, the clients that train.

        >>> sampling = Optimal(Uniform(20, 4), 2)
        >>> sampling
        optimal:2 of uniform:4
        >>> asked, p = sampling.select([8, 1, 1, 0], seed=7, round=0, clients=[3, 5, 6, 9])
        >>> p.tolist(), bool(asked[0]), bool(asked[3])
        ([1.0, 0.5, 0.5, 0.0], True, False)
    """

    two_phase = True

    def __init__(self, pool: Sampling, b: int, how: Kind = "exact") -> None:
        expect(pool, Sampling, "the pool of optimal sampling")
        if pool.two_phase:
            raise FedShuffleError(
                f"optimal sampling cannot have {pool!r} for its pool, since that selects clients"
                " only after they have trained. Use the pool of that sampling."
            )
        check_known("kind of optimal sampling", how, _HOW)
        self._pool, self.how = pool, how
        what = f"the number of clients of the pool {pool!r} that send their updates"
        self.b = count(b, what, most=_largest(pool))
        self.p = pool.p

    def __repr__(self) -> str:
        return f"{_HOW[self.how]}:{self.b} of {self.pool!r}"

    @property
    def pool(self) -> Sampling:
        return self._pool

    @property
    def expected_updates(self) -> float:
        return float(self.b)

    @property
    def s(self) -> FloatArray:
        return self.pool.s

    def pair_probabilities(self) -> FloatArray:
        return self.pool.pair_probabilities()

    def expected_sums(self, v: FloatArray) -> FloatArray:
        return self.pool.expected_sums(v)

    def draw(self, seed: int, round: int) -> IntArray:
        return self.pool.draw(seed, round)

    def cohorts(self, limit: int) -> Cohorts | None:
        return self.pool.cohorts(limit)

    def select(
        self, norms: ArrayLike, seed: int, round: int, clients: IntArray | Sequence[int]
    ) -> tuple[NDArray[np.bool_], FloatArray]:
        """Which of these clients send their updates, and with which probabilities ``p'``.

        Each decides for itself: given its probability, a pure function of (seed, round, client).
        A client with norm zero never sends its update.
        """
        numbers = np.asarray(clients, dtype=np.int64).tolist()
        u = _norms(norms, numbers)
        rule = optimal_probabilities if self.how == "exact" else approximate_probabilities
        p = rule(u, self.b)
        stream = ReusableGenerator()
        tickets = np.array(
            [stream(seed, Purpose.SELECTION, round=round, client=i).random() for i in numbers]
        )
        return tickets < p, p


def optimal_probabilities(norms: ArrayLike, m: int) -> FloatArray:
    """The p' from [0, 1] with sum m and the least ``sum_i (1/p'_i - 1) norm_i^2``.

    ``p'_i = min(1, t * norm_i)`` with t such that the sum is m. A norm of zero gets 0, and if no
    more than m norms are positive, those get 1.

        >>> optimal_probabilities([8, 1, 1, 0], 2).tolist()
        [1.0, 0.5, 0.5, 0.0]
        >>> optimal_probabilities([8, 0, 0, 0], 2).tolist()
        [1.0, 0.0, 0.0, 0.0]
    """
    u, m = _norms(norms), count(m, "the number of clients to ask")
    p = (u > 0).astype(np.float64)
    positive = np.flatnonzero(u)
    if m < len(positive):
        p[positive] = importance_probabilities(u[positive], m)
    return p


def approximate_probabilities(
    norms: ArrayLike, m: int, iterations: int = _ITERATIONS
) -> FloatArray:
    """An approximation from sums over the clients alone, which secure aggregation can hide.

    From the sum of the norms, every client computes ``min(m norm_i / sum, 1)``. Capped ones leave
    some of m unused; so, in each iteration, the clients below one sum their number I and their
    probabilities P, and multiply these by ``C = (m - n + I) / P``: the n - I others take one each,
    and the rest of m is shared. Once C is one, the result is optimal. Every iteration but the last
    caps a client, so n iterations always suffice; until then the sum is less than m.

        >>> approximate_probabilities([8, 1, 1, 0], 2).tolist()
        [1.0, 0.5, 0.5, 0.0]
    """
    u, m = _norms(norms), count(m, "the number of clients to ask")
    total = float(u.sum())
    if total == 0:
        return np.zeros_like(u)
    p = np.minimum(m * (u / total), 1.0)
    for _ in range(count(iterations, "the number of iterations")):
        below = p < 1
        together = float(p[below].sum())
        if together == 0:  # every positive norm has probability one
            break
        factor = (m - len(p) + int(below.sum())) / together
        if factor <= 1 + 1e-12:
            break
        p[below] = np.minimum(factor * p[below], 1.0)
    return p


def _norms(norms: ArrayLike, clients: Sequence[int] | None = None) -> FloatArray:
    """Norms relative to the largest."""
    clients = range(np.size(norms)) if clients is None else clients
    remedy = " If training diverged, use a smaller step size."
    array = vector(norms, "norms of updates", clients, within="[0, inf)", remedy=remedy)
    largest = float(array.max(initial=0.0))
    if largest > 0:
        array /= largest
        array[array < _NEGLIGIBLE] = 0.0
    return array


def _largest(pool: Sampling) -> int:
    """The most clients that a pool can have."""
    match pool:
        case One():
            return 1
        case Uniform() | Stratified():
            return pool.b
        case ApproximateIndependent():
            return pool.k
    return len(pool)
