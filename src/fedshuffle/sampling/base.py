"""What every sampling offers: who takes part in a round, and with which probabilities."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError

PAIRS_LIMIT = 20_000
"""Above this many clients a dense matrix of pair probabilities is refused (3 GB and more)."""


@dataclass(frozen=True, eq=False)
class Cohorts:
    """Cohorts written out one after another, each with its probability.

    Cohort ``k`` is ``members[starts[k]:starts[k + 1]]``; ``starts`` ends with ``len(members)``.
    """

    members: IntArray
    starts: IntArray
    probabilities: FloatArray

    def __len__(self) -> int:
        return len(self.probabilities)

    def __iter__(self) -> Iterator[tuple[IntArray, float]]:
        return (self[k] for k in range(len(self)))

    def at(self, ticket: float) -> IntArray:
        """The cohort that a uniform number from [0, 1) picks."""
        k = int(np.searchsorted(self._cumulative, ticket * self._cumulative[-1], side="right"))
        return self[min(k, len(self) - 1)][0]

    @functools.cached_property
    def _cumulative(self) -> FloatArray:
        return np.cumsum(self.probabilities)

    def __getitem__(self, k: int) -> tuple[IntArray, float]:
        return self.members[self.starts[k] : self.starts[k + 1]], float(self.probabilities[k])

    @classmethod
    def of(cls, cohorts: list[tuple[tuple[int, ...], float]]) -> Cohorts:
        """From a list of (members, probability)."""
        lengths = [len(members) for members, _ in cohorts]
        flat = [i for members, _ in cohorts for i in members]
        return cls(
            np.array(flat, dtype=np.int64),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([probability for _, probability in cohorts], dtype=np.float64),
        )


class Sampling(abc.ABC):
    """A random set S of clients.

    ``p[i]`` is the inclusion probability P(i in S). The vector ``s`` is one that satisfies
    ``P - p p^T <= Diag(p_1 s_1, ..., p_n s_n)`` with ``P`` the matrix of pair probabilities (the
    paper's equation for arbitrary participation); it measures the variance that sampling adds.
    """

    p: FloatArray

    def __len__(self) -> int:
        return len(self.p)

    @abc.abstractmethod
    def pair_probabilities(self) -> FloatArray:
        """The matrix ``P[i, j] = P(i in S and j in S)``; its diagonal is ``p``."""

    @abc.abstractmethod
    def draw(self, seed: int, round: int) -> IntArray:
        """The cohort of a round, sorted: a pure function of (seed, round)."""

    @property
    def s(self) -> FloatArray:
        """The variance vector of the paper; by default the smallest valid one whose entries are
        all equal, from the largest eigenvalue of the pair probabilities.
        """
        root = np.sqrt(self.p)
        covariance = self.pair_probabilities() - np.outer(self.p, self.p)
        largest = float(np.linalg.eigvalsh(covariance / np.outer(root, root))[-1])
        return np.full(len(self), max(largest, 0.0))

    def expected_sums(self, v: FloatArray) -> FloatArray:
        """``E[1{i in S} * sum of v over S]`` for every client i; by default from the matrix."""
        return self.pair_probabilities() @ v

    def cohorts(self, limit: int) -> Cohorts | None:
        """Every possible cohort with its probability, or None where there are more than limit (or
        nobody has listed them, as by default; audits then sample where no formula is known).
        """
        return None


class AlikePairs(Sampling):
    """A sampling whose pairs are all correlated alike: ``P[i, j] = rho p_i p_j`` for i != j.

    Then ``P - p p^T = Diag(p - rho p^2) - (1 - rho) p p^T``, and as ``rho <= 1`` for all of these
    samplings, ``s_i = 1 - rho p_i`` is valid.
    """

    rho: float

    @property
    def s(self) -> FloatArray:
        return np.maximum(1.0 - self.rho * self.p, 0.0)

    def pair_probabilities(self) -> FloatArray:
        if len(self) > PAIRS_LIMIT:
            raise FedShuffleError(
                f"a matrix of pair probabilities for {len(self)} clients does not fit in memory."
                " Use expected_sums, or p and s."
            )
        pairs = self.rho * np.outer(self.p, self.p)
        np.fill_diagonal(pairs, self.p)
        return pairs

    def expected_sums(self, v: FloatArray) -> FloatArray:
        own = self.p * v
        others = float(own.sum()) - own
        return own + self.rho * self.p * others


def check_cohort(clients: IntArray, n: int, sampling: Sampling) -> IntArray:
    """A drawn cohort, or a clear error where it is none: a rule would weigh the wrong clients."""
    drawn = np.asarray(clients)
    if drawn.size == 0:
        return np.empty(0, dtype=np.int64)
    ordered = drawn.ndim == 1 and drawn.dtype.kind in "iu" and bool((np.diff(drawn) > 0).all())
    if not ordered or drawn[0] < 0 or drawn[-1] >= n:
        raise FedShuffleError(
            f"{type(sampling).__name__}.draw gives {clients!r:.60}: give the numbers of different"
            f" clients, from 0 to {n - 1}, in rising order."
        )
    return drawn.astype(np.int64, copy=False)


def check_cohort_size(b: int, n: int, what: str) -> int:
    """B as an int from 1 to n, or a clear error."""
    try:
        size = operator.index(b)
    except TypeError:
        size = 0
    if not 1 <= size <= n:
        raise FedShuffleError(
            f"{what}: cannot take {b} of {n} clients. Choose a whole number from 1 to {n}."
        )
    return size
