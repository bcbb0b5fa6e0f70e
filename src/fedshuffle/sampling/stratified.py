"""A fixed number of clients from every stratum, uniformly inside it."""

import bisect
import hashlib
import itertools

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, as_array, count, counts, frozen, vector
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import Cohorts, Sampling, check_pairs


class Stratified(Sampling):
    """b clients in all, ``b_k`` of the ``n_k`` of stratum k, independently between the strata.

    ``strata`` has a whole number for each client; clients with the same one form a stratum. The b
    clients are shared among the strata in proportion to their numbers of clients or, where
    ``weights`` are given, to their weights: at least one each, at most all of it, the rest by the
    largest remainder. Then ``p = b_k/n_k`` and ``s = (n_k-b_k)/(n_k-1)``, or 0 where all are taken.

        >>> sampling = Stratified([0, 0, 0, 0, 7, 7], 3)
        >>> sampling.take.tolist(), sampling.p.tolist()
        ([2, 1], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
        >>> Stratified([0, 0, 0, 0, 7, 7], 3, weights=[1, 1, 1, 1, 8, 8]).take.tolist()
        [1, 2]
    """

    def __init__(self, strata: ArrayLike, b: int, weights: ArrayLike | None = None) -> None:
        self.strata: IntArray = frozen(_labels(strata))
        """The stratum of each client, numbered from 0 in the order of the given numbers."""
        n = len(self.strata)
        self.sizes: IntArray = frozen(np.bincount(self.strata))
        """The clients of each stratum."""
        k = len(self.sizes)
        what = f"the number of sampled clients (at least one from each of {k} strata)"
        self.b = count(b, what, k, n)
        weight = vector(np.ones(n) if weights is None else weights, "weights", range(n))
        # Relative, and large enough that no quotient overflows.
        weight = np.maximum(weight / weight.max(), 1e-100)
        measure: FloatArray = np.bincount(self.strata, weights=weight).astype(np.float64)
        self.take: IntArray = frozen(allocate(measure, self.b, self.sizes))
        """How many clients of each stratum take part."""
        self.p = frozen((self.take / self.sizes)[self.strata])
        by_stratum = np.argsort(self.strata, kind="stable")
        self.members: list[IntArray] = np.split(by_stratum, np.cumsum(self.sizes)[:-1])
        """The clients of each stratum, in order."""

    def __repr__(self) -> str:
        # The digest lets a resumed run check its strata.
        digest = hashlib.sha256(self.strata.astype("<i8").tobytes()).hexdigest()
        return f"stratified:{self.b} over {len(self.sizes)} strata ({digest[:8]})"

    @property
    def s(self) -> FloatArray:
        return ((self.sizes - self.take) / np.maximum(self.sizes - 1, 1))[self.strata]

    @property
    def _rho(self) -> FloatArray:
        """Per stratum, ``P(i and j) / (p_i p_j)`` for two of its clients."""
        n, b = self.sizes, self.take
        return np.where(n > 1, (b - 1) * n / (b * np.maximum(n - 1, 1)), 1.0)

    def pair_probabilities(self) -> FloatArray:
        check_pairs(self)
        pairs = np.outer(self.p, self.p)
        for members, rho in zip(self.members, self._rho, strict=True):
            pairs[np.ix_(members, members)] *= rho
        np.fill_diagonal(pairs, self.p)
        return pairs

    def expected_sums(self, v: FloatArray) -> FloatArray:
        own = self.p * v
        per_stratum = np.bincount(self.strata, weights=own)
        near = per_stratum[self.strata] - own
        far = (float(per_stratum.sum()) - per_stratum)[self.strata]
        sums: FloatArray = own + self.p * (self._rho[self.strata] * near + far)
        return sums

    def draw(self, seed: int, round: int) -> IntArray:
        rng = generator(seed, Purpose.COHORT, round=round)
        chosen = [
            members[rng.choice(len(members), take, replace=False, shuffle=False)]
            for members, take in zip(self.members, self.take.tolist(), strict=True)
        ]
        return np.sort(np.concatenate(chosen))

    def cohorts(self, limit: int) -> Cohorts | None:
        return Cohorts.of_strata([m.tolist() for m in self.members], self.take, limit)


def allocate(measure: FloatArray, b: int, most: IntArray) -> IntArray:
    """Whole numbers that sum to b, as nearly proportional to the measure as the bounds allow.

    The shares ``min(max(t * measure_k, 1), most_k)``, with t such that they sum to b, are rounded
    down, and what is left goes to the largest remainders (the first of equal ones).

        >>> allocate(np.array([6.0, 3.0, 1.0]), 5, np.array([6, 3, 1])).tolist()
        [3, 1, 1]
    """

    def shares(t: float) -> FloatArray:
        return np.clip(t * measure, 1, most)

    # The sum grows with t, linearly between the points where a share leaves or reaches a bound.
    leaves, reaches = 1 / measure, most / measure
    points = np.unique(np.concatenate([leaves, reaches]))
    below = bisect.bisect_right(points, b, key=lambda t: shares(t).sum())
    t = float(points[max(below - 1, 0)])
    open_ = (leaves <= t) & (t < reaches)
    if open_.any():
        t += (b - float(shares(t).sum())) / float(measure[open_].sum())
    share = shares(t)
    taken = np.floor(share + 1e-9).astype(np.int64)
    remainder = np.round(share - taken, 9)  # equal shares must stay equal
    first = np.argsort(-remainder, kind="stable")
    taken[first[: b - int(taken.sum())]] += 1
    return taken


def strata_by_size(sizes: ArrayLike, k: int) -> IntArray:
    """K strata of clients of like size: a stratum for each client, from the smallest clients up.

    The cuts are the quantiles of size, each moved to where the size changes, so that clients of
    equal size stay together. Where there are fewer sizes than strata, the most common are divided.

        >>> strata_by_size([5, 1, 1, 1, 9, 9], 2).tolist()
        [1, 0, 0, 0, 1, 1]
        >>> strata_by_size([1, 1, 1, 1, 9], 3).tolist()
        [0, 0, 1, 1, 2]
    """
    size = counts(sizes, "sizes")
    n = len(size)
    k = count(k, f"the number of strata of {n} clients", most=n)
    _, kind, common = np.unique(size, return_inverse=True, return_counts=True)
    if len(common) < k:
        strata = np.empty(n, dtype=np.int64)
        parts = allocate(common.astype(np.float64), k, common)
        groups = np.split(np.argsort(kind, kind="stable"), np.cumsum(common)[:-1])
        pieces = [np.array_split(group, part) for group, part in zip(groups, parts, strict=True)]
        for stratum, piece in enumerate(itertools.chain.from_iterable(pieces)):
            strata[piece] = stratum
        return strata
    ends = np.cumsum(common)  # the clients up to each size
    first_kinds = [0]
    for cut in range(1, k):
        # Each stratum has at least one size, and leaves one for each that follows.
        low, high = first_kinds[-1] + 1, len(common) - (k - cut)
        distance = np.abs(ends[low - 1 : high] - cut * n / k)
        first_kinds.append(low + int(distance.argmin()))
    return np.searchsorted(first_kinds, kind, side="right").astype(np.int64) - 1


def _labels(strata: ArrayLike) -> IntArray:
    array = as_array(strata, "strata")
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise FedShuffleError(
            "strata must be a non-empty list with one whole number for each client, such as"
            f" [0, 0, 1, 1]: got {strata!r:.60}."
        )
    return np.unique(array, return_inverse=True)[1].astype(np.int64)
