"""The interface of samplings: which clients take part in a round, with which probabilities."""

import abc
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, IntArray, vector
from fedshuffle.errors import FedShuffleError

MAX_COHORTS = 4096
"""Largest number of cohorts to enumerate where no formula applies; above it they are sampled."""
_MAX_PAIRS = 20_000
"""Above this many clients a dense matrix of pair probabilities is refused (3 GB and more)."""
_LISTED = 60
"""More clients to choose or leave out than this have too many subsets to list."""


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

    def pair_probabilities(self, n: int) -> FloatArray:
        """``P[i, j] = P(i in S and j in S)`` for n clients."""
        pairs = np.zeros((n, n))
        for members, probability in self:
            pairs[np.ix_(members, members)] += probability
        return pairs

    def expected_sums(self, v: FloatArray) -> FloatArray:
        """``E[1{i in S} * sum of v over S]`` for every client i."""
        sums = np.zeros(len(v))
        for members, probability in self:
            sums[members] += probability * v[members].sum()
        return sums

    @classmethod
    def of(cls, cohorts: list[tuple[tuple[int, ...], float]]) -> "Cohorts":
        """From a list of (members, probability)."""
        lengths = [len(members) for members, _ in cohorts]
        return cls(
            np.array([i for members, _ in cohorts for i in members], dtype=np.int64),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([probability for _, probability in cohorts], dtype=np.float64),
        )

    @classmethod
    def of_strata(
        cls, strata: Sequence[Sequence[int]], take: IntArray, limit: int
    ) -> "Cohorts | None":
        """All ways to take ``take[k]`` clients of stratum k; None if there are more than limit."""
        count = 1
        for members, b in zip(strata, take.tolist(), strict=True):
            if min(b, len(members) - b) > _LISTED:  # comb would take too long
                return None
            count *= math.comb(len(members), b)
            if count > limit:
                return None
        subsets = itertools.starmap(itertools.combinations, zip(strata, take.tolist(), strict=True))
        chosen = (sorted(itertools.chain(*parts)) for parts in itertools.product(*subsets))
        return cls.of([(tuple(members), 1 / count) for members in chosen])


class Sampling(abc.ABC):
    """A random set S of clients.

    ``p[i]`` is the inclusion probability P(i in S). The vector ``s`` is one that satisfies
    ``P - p p^T <= Diag(p_1 s_1, ..., p_n s_n)`` with ``P`` the matrix of pair probabilities (the
    paper's equation for arbitrary participation); it measures the variance that sampling adds.

    >>> from fedshuffle.sampling import Uniform
    >>> Uniform(4, 2).p.tolist(), Uniform(4, 2).draw(seed=0, round=1).tolist()
    ([0.5, 0.5, 0.5, 0.5], [0, 2])
    """

    p: FloatArray
    two_phase: bool = False
    """Whether only some of the drawn clients, selected by the norms of their updates, send one."""
    period: int = 1
    """The cohorts of rounds 0 to ``period - 1`` may have different distributions."""
    independent_rounds: bool = True
    """Whether a cohort does not depend on the cohorts of other rounds."""
    distinct: bool = True
    """Whether a client is in a cohort at most once, and cohorts are sorted."""

    step_chances: FloatArray | None = None
    """Where who takes part depends on the steps that are planned: the chances of each possible
    number of steps of a client that takes part, (n, A)."""

    @property
    def pool(self) -> "Sampling":
        """The sampling that draws the clients who train: this one, unless it is two-phase."""
        return self

    @property
    def inclusion(self) -> FloatArray:
        """The probability of each client to take part: ``p``, but 0 for one that never does."""
        return self.p

    def at(self, round: int) -> "Sampling":
        """A sampling whose independent rounds all have the distribution of this round; ``p`` and
        the rest of this one are means over the rounds of a period.
        """
        return self

    def kind_of_round(self, round: int) -> Hashable:
        """Equal for rounds whose cohorts have the same distribution."""
        return None

    @property
    def expected_updates(self) -> float:
        """Expected number of clients that send an update in a round."""
        return float(self.p.sum())

    def select(
        self, norms: ArrayLike, seed: int, round: int, clients: IntArray | Sequence[int]
    ) -> tuple[NDArray[np.bool_], FloatArray]:
        """Which of the drawn clients send their updates, and with which probabilities; by default
        all do.
        """
        return np.ones(len(clients), dtype=np.bool_), np.ones(len(clients))

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
        """Every possible cohort with its probability; None if there are more than limit, and by
        default. Audits then sample where no formula is known.
        """
        return None


class EqualPairCorrelation(Sampling):
    """A sampling with equally correlated pairs: ``P[i, j] = rho p_i p_j`` for i != j.

    Then ``P - p p^T = Diag(p - rho p^2) - (1 - rho) p p^T``, and as ``rho <= 1`` for all of these
    samplings, ``s_i = 1 - rho p_i`` is valid.
    """

    rho: float

    @property
    def s(self) -> FloatArray:
        return np.maximum(1.0 - self.rho * self.p, 0.0)

    def pair_probabilities(self) -> FloatArray:
        check_pairs(self)
        pairs = self.rho * np.outer(self.p, self.p)
        np.fill_diagonal(pairs, self.p)
        return pairs

    def expected_sums(self, v: FloatArray) -> FloatArray:
        own = self.p * v
        others = float(own.sum()) - own
        return own + self.rho * self.p * others


def enumerated(sampling: Sampling) -> Cohorts:
    """All cohorts of a sampling whose pair probabilities have no formula."""
    cohorts = sampling.cohorts(MAX_COHORTS)
    if cohorts is None:
        raise FedShuffleError(
            f"the pair probabilities of {sampling!r} are not known: there is no formula, and it has"
            f" more than {MAX_COHORTS} cohorts."
        )
    return cohorts


def check_pairs(sampling: Sampling) -> None:
    """Refuse a dense matrix of pair probabilities that is too large for memory."""
    if len(sampling) > _MAX_PAIRS:
        raise FedShuffleError(
            f"a matrix of pair probabilities for {len(sampling)} clients does not fit in memory."
            " Use expected_sums, or p and s."
        )


def check_cohort(clients: IntArray, n: int, sampling: Sampling) -> IntArray:
    """A drawn cohort, or a clear error if it is not one."""
    drawn = np.asarray(clients)
    if drawn.size == 0:
        return np.empty(0, dtype=np.int64)
    ordered = drawn.ndim == 1 and drawn.dtype.kind in "iu"
    ordered = ordered and not (sampling.distinct and (np.diff(drawn) <= 0).any())
    if not ordered or drawn.min() < 0 or drawn.max() >= n:
        raise FedShuffleError(
            f"{type(sampling).__name__}.draw gives {clients!r:.60}: give the numbers of different"
            f" clients, from 0 to {n - 1}, in rising order."
        )
    return drawn.astype(np.int64, copy=False)


def check_probabilities(p: ArrayLike) -> FloatArray:
    """A vector of probabilities in (0, 1], or an error that names the first bad client."""
    remedy = (
        " A client that can never take part has no place in the objective: leave it out or raise"
        " its probability."
    )
    return vector(p, "inclusion probabilities", within="(0, 1]", remedy=remedy)
