"""Optimal client sampling: a pool of clients walks, and those whose updates matter are asked.

Chen, Horvath and Richtarik, Optimal Client Sampling for Federated Learning, 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.randomness import Purpose, Rewound
from fedshuffle.sampling.approximate import ApproximateIndependent
from fedshuffle.sampling.base import Cohorts, Sampling
from fedshuffle.sampling.independent import importance_probabilities
from fedshuffle.sampling.one import One
from fedshuffle.sampling.stratified import Stratified
from fedshuffle.sampling.uniform import Uniform

_HOW = {"exact": "optimal", "approximate": "optimal-approximate"}
"""The kinds, and how the text of each begins."""

_ITERATIONS = 4
"""Rescalings of the approximation, as in the paper."""

_NEGLIGIBLE = 1e-200
"""A norm so much smaller than the largest changes no float, and counts as zero."""


@final
class Optimal(Sampling):
    r"""A pool of clients is drawn and walks; about b of them are then asked for their updates.

    Each client i of the pool says only the norm :math:`u_i = \|a_i (y_i - x)\|` of its
    weighted update. It is asked with the probability :math:`p'_i` that :meth:`select` chooses, so
    that its update counts for :math:`w_i / (p_i p'_i)`: the mean is the update of the whole pool,
    and the variance :math:`\sum_i (1/p'_i - 1) u_i^2` the least possible with b asked on average.

    As a sampling it is its pool: ``p``, ``s`` and the draw say who *walks*. Who is asked is not
    known before.

        >>> sampling = Optimal(Uniform(20, 4), 2)
        >>> sampling
        optimal:2 of uniform:4
        >>> asked, p = sampling.select([8, 1, 1, 0], seed=7, round=0, clients=[3, 5, 6, 9])
        >>> p.tolist(), bool(asked[0]), bool(asked[3])
        ([1.0, 0.5, 0.5, 0.0], True, False)
    """

    def __init__(
        self, pool: Sampling, b: int, how: Literal["exact", "approximate"] = "exact"
    ) -> None:
        expect(pool, Sampling, "the pool of optimal sampling")
        if isinstance(pool, Optimal):
            raise FedShuffleError(
                f"optimal sampling cannot have {pool!r} for its pool, since who is asked there is"
                " not known before the walk. Use the pool of that sampling."
            )
        if how not in _HOW:
            raise unknown("kind of optimal sampling", how, _HOW)
        self.pool, self.how = pool, how
        self.b = count(b, "the number of clients that are asked for their updates")
        if self.b > (most := _largest(pool)):
            raise FedShuffleError(
                f"optimal sampling: cannot ask {b} clients, since a pool of the sampling {pool!r}"
                f" has at most {most}. Choose a whole number from 1 to {most}, or a larger pool."
            )
        self.p = pool.p

    def __repr__(self) -> str:
        return f"{_HOW[self.how]}:{self.b} of {self.pool!r}"

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
        """Who of these clients is asked, and with which probabilities ``p'``.

        Each decides for itself: given its probability, a pure function of (seed, round, client).
        A client with norm zero is never asked, as nothing is lost without it.
        """
        numbers = np.asarray(clients, dtype=np.int64).tolist()
        u = _norms(norms, numbers)
        p = _approximate(u, self.b, _ITERATIONS) if self.how == "approximate" else _exact(u, self.b)
        stream = Rewound()
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
    return _exact(_norms(norms), count(m, "the number of clients to ask"))


def approximate_probabilities(
    norms: ArrayLike, m: int, iterations: int = _ITERATIONS
) -> FloatArray:
    """The same, nearly, by sums over the clients alone, which secure aggregation can hide.

    From the sum of the norms, every client finds ``min(m norm_i / sum, 1)``. Capped ones leave some
    of m unused; so, in each iteration, the clients below one add up their number I and their
    probabilities P, and multiply these by ``C = (m - n + I) / P``: the n - I others take one each,
    and what is left of m is shared. When nobody new is capped, C is one and the result is optimal.
    Every iteration but the last caps somebody, so n of them always suffice; until then the sum is
    less than m.

        >>> approximate_probabilities([8, 1, 1, 0], 2).tolist()
        [1.0, 0.5, 0.5, 0.0]
    """
    m = count(m, "the number of clients to ask")
    return _approximate(_norms(norms), m, count(iterations, "the number of iterations"))


def _exact(u: FloatArray, m: int) -> FloatArray:
    p = (u > 0).astype(np.float64)
    positive = np.flatnonzero(u)
    if m < len(positive):
        p[positive] = importance_probabilities(u[positive], m)
    return p


def _approximate(u: FloatArray, m: int, iterations: int) -> FloatArray:
    total = float(u.sum())
    if total == 0:
        return np.zeros_like(u)
    p = np.minimum(m * (u / total), 1.0)
    for _ in range(iterations):
        below = p < 1
        together = float(p[below].sum())
        if together == 0:  # all who have anything to say are certain to be asked
            break
        factor = (m - len(p) + int(below.sum())) / together
        if factor <= 1 + 1e-12:
            break
        p[below] = np.minimum(factor * p[below], 1.0)
    return p


def _norms(norms: ArrayLike, clients: Sequence[int] | None = None) -> FloatArray:
    """Norms relative to the largest, or an error that names the first bad client."""
    try:
        array = np.array(norms, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedShuffleError(f"norms of updates must be numbers: {error}.") from error
    if array.ndim != 1 or (clients is not None and len(array) != len(clients)):
        pool = "" if clients is None else f" of the {len(clients)} clients"
        raise FedShuffleError(
            f"norms of updates must be one number for each{pool or ' client'}, got shape"
            f" {array.shape}."
        )
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        i = int(bad[0])
        raise FedShuffleError(
            f"the update of client {i if clients is None else clients[i]} has norm {array[i]:g},"
            " but a norm is finite and not negative. If training diverged, use a smaller step size."
        )
    largest = float(array.max(initial=0.0))
    if largest > 0:
        array /= largest
        array[array < _NEGLIGIBLE] = 0.0
    return array


def _largest(pool: Sampling) -> int:
    """No pool has more clients than this."""
    match pool:
        case One():
            return 1
        case Uniform() | Stratified():
            return pool.b
        case ApproximateIndependent():
            return pool.k
    return len(pool)
