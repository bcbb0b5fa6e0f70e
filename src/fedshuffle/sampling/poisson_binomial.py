r"""Expectations over the number M of clients that are there, if each decides for itself.

M has the generating function :math:`E[z^M] = \prod_j (1 - q_j + q_j z)`, and

.. math:: E[f(M)] = \frac{1}{N} \sum_k E[e^{i \theta_k M}] \sum_m f(m) e^{-i \theta_k m}

over N angles, where m runs over the N numbers around the mean outside of which M is practically
never. The generating function is at most :math:`e^{-\mathrm{var} (1 - \cos \theta)}`, so only some
ten angles matter, however many clients there are. A client is left out by dividing by its factor.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError

_NEGLIGIBLE = 45.0  # exp(-45) is
_MOST = 1_000_000_000  # groups times clients
_BLOCK = 1 << 20  # most complex numbers that are held at a time

Function = Callable[[FloatArray], FloatArray]


class PoissonBinomial:
    """The number of clients that are there, client j with probability ``q[j]``.

    >>> there = PoissonBinomial(np.array([0.9, 0.5, 0.2]))
    >>> there.without_one(lambda m: 1 / (1 + m)).round(4).tolist()
    [0.6833, 0.51, 0.45]
    """

    def __init__(self, q: FloatArray) -> None:
        self.q, self._group, counts = np.unique(q, return_inverse=True, return_counts=True)
        mean, variance = float(counts @ self.q), float(counts @ (self.q * (1 - self.q)))
        reach = 10 * np.sqrt(variance) + 40
        low, high = max(0.0, np.floor(mean - reach)), min(float(len(q)), np.ceil(mean + reach))
        self._numbers = np.arange(low, high + 1)
        half = len(self._numbers) // 2 + 1  # angles on the upper half of the circle
        angles = (np.arange(half) + 0.5) * np.pi / half
        self._angles = angles[variance * (1 - np.cos(angles)) < _NEGLIGIBLE]
        self._points, self._mean = half, mean
        logs = np.zeros(len(self._angles), dtype=np.complex128)
        for rows, factors in self._factors():
            q = self.q[rows, None]
            # |factor|^2 = 1 - 4 q (1 - q) sin^2(theta/2). Turns are taken less q theta, whose
            # sum is the mean times theta, so that no large angles cancel.
            lengths = 0.5 * np.log1p(-4 * q * (1 - q) * np.sin(self._angles / 2) ** 2)
            logs += counts[rows] @ (lengths + 1j * (np.angle(factors) - q * self._angles))
        self._product = np.exp(logs)

    def _factors(self) -> Iterator[tuple[slice, NDArray[np.complex128]]]:
        """``1 - q + q e^{i theta}``, a row for every group of equal clients, in portions."""
        size = max(_BLOCK // max(len(self._angles), 1), 1)
        for begin in range(0, len(self.q), size):
            rows = slice(begin, begin + size)
            yield rows, 1 + self.q[rows, None] * (np.exp(1j * self._angles) - 1)

    def _spectrum(self, f: Function) -> NDArray[np.complex128]:
        """What the factors of all but some clients are multiplied by and summed."""
        turns = np.exp(1j * np.outer(self._angles, self._mean - self._numbers))
        whole: NDArray[np.complex128] = self._product * (turns @ f(self._numbers)) / self._points
        return whole

    def without_one(self, f: Function) -> FloatArray:
        """``E[f(M - X_i)]`` for every client i: the number of the others."""
        whole, found = self._spectrum(f), np.empty(len(self.q))
        for rows, factors in self._factors():
            found[rows] = (whole / factors).real.sum(axis=1)
        return found[self._group]

    def sums_without_two(self, f: Function, v: FloatArray) -> FloatArray:
        """``sum_j v_j E[f(M - X_i - X_j)]`` over all j but i, for every client i."""
        total = np.bincount(self._group, weights=v, minlength=len(self.q))
        sums = np.zeros(len(self._angles), dtype=np.complex128)
        for rows, factors in self._factors():
            sums += total[rows] @ (1 / factors)
        whole, first, second = self._spectrum(f), np.empty(len(self.q)), np.empty(len(self.q))
        for rows, factors in self._factors():
            first[rows] = (whole * sums / factors).real.sum(axis=1)
            second[rows] = (whole / factors**2).real.sum(axis=1)
        return first[self._group] - v * second[self._group]


def without_one(q: FloatArray, f: Function) -> FloatArray:
    """``E[f(M - X_i)]`` for every client i, in each of several rows of chances: shape (rows, n).

    >>> without_one(np.array([[0.9, 0.5, 0.2]]), lambda m: 1 / (1 + m)).round(4).tolist()
    [[0.6833, 0.51, 0.45]]
    """
    mean, variance = q.sum(axis=1), (q * (1 - q)).sum(axis=1)
    reach = 10 * np.sqrt(variance.max()) + 40
    low = max(0.0, np.floor(mean.min() - reach))
    numbers = np.arange(low, min(float(q.shape[1]), np.ceil(mean.max() + reach)) + 1)
    half = len(numbers) // 2 + 1
    angles = (np.arange(half) + 0.5) * np.pi / half
    angles = angles[variance.min() * (1 - np.cos(angles)) < _NEGLIGIBLE]
    values = np.exp(-1j * np.outer(angles, numbers)) @ f(numbers) / half
    found, size = np.empty(q.shape), max(1, _BLOCK // (q.shape[1] * len(angles)))
    for begin in range(0, len(q), size):
        factors = 1 + q[begin : begin + size, :, None] * (np.exp(1j * angles) - 1)
        whole = factors.prod(axis=1) * values
        found[begin : begin + size] = (whole[:, None] / factors).real.sum(axis=2)
    return found


def members_of_others(q: FloatArray, sizes: IntArray) -> Iterator[FloatArray]:
    """For each group, the distribution of the number of members of other groups that are there.

    Group h, of ``sizes[h]`` members, is there with probability ``q[h]``.

        >>> for others in members_of_others(np.array([0.5, 0.25]), np.array([1, 2])):
        ...     print(others.round(9).tolist())
        [0.75, 0.0, 0.25, 0.0]
        [0.5, 0.5, 0.0, 0.0]
    """
    nobody = np.zeros(int(sizes.sum()) + 1)
    nobody[0] = 1.0
    if len(q) * len(nobody) > _MOST:
        raise FedShuffleError(
            f"{len(q)} groups of {len(nobody) - 1} clients are too many for exact inclusion"
            " probabilities: use fewer groups, or sampling full."
        )

    def of(groups: range, others: FloatArray) -> Iterator[FloatArray]:
        """For each of these groups, given the distribution without any of them: by halves."""
        if len(groups) == 1:
            yield others
            return
        first, second = groups[: len(groups) // 2], groups[len(groups) // 2 :]
        for half, rest in ((first, second), (second, first)):
            known = others
            for h in rest:
                known = _with_group(known, float(q[h]), int(sizes[h]))
            yield from of(half, known)

    yield from of(range(len(q)), nobody)


def _with_group(distribution: FloatArray, q: float, size: int) -> FloatArray:
    moved = (1 - q) * distribution
    moved[size:] += q * distribution[: len(distribution) - size]
    return moved
