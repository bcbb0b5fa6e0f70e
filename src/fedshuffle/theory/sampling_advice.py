r"""Which sampling, and how many clients a round: by M and by the predicted rounds.

For methods that weigh by inclusion probability the sampling enters the bound by
:math:`M = \max_i s_i w_i / p_i` alone.

*Independent sampling* has :math:`M = \max_i (1 - p_i) w_i / p_i`. With b clients expected this is
smallest where it is the same for all: :math:`p_i = w_i / (w_i + M)`, with M such that they sum to
b. Importance sampling, :math:`p_i = b w_i`, has :math:`(1 - b \min_i w_i) / b`, which is the same
only for equal weights.

*Optimal client sampling* asks those whose updates matter. Its variance is the least that any
independent sampling of b clients has for the updates at hand, so that the M of the best is an upper
bound for it as well: the proof needs the variance for given updates only, and that the mean is
right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, expect, number, positive
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.sampling import Independent, Uniform, importance_probabilities
from fedshuffle.sampling.base import check_cohort_size
from fedshuffle.theory.constants import smallest_s
from fedshuffle.theory.rates import Quantity, Recursion, fewest, measured_by

KINDS = ("uniform", "importance", "best")
"""The samplings that are compared: ``best`` is the independent one with the smallest M, and what
is said of it also holds for optimal client sampling."""

EIGENVALUES = 400
"""Up to so many clients M of uniform sampling is found by an eigenvalue, else by a formula."""

_HALF = 0.5
"""A cohort pays as long as it is at least this share as fast as a linear speed-up would be."""


@final
@dataclass(frozen=True)
class Option:
    """A sampling with its variance and what that means."""

    sampling: str
    """One of the kinds."""
    cohort: int
    """How many clients take part, or are expected to."""
    M: float
    rounds: int
    """In which the bound reaches the target."""
    step_size: float
    """With which it does."""


@final
@dataclass(frozen=True, eq=False)
class SamplingAdvice:
    """How samplings and cohort sizes compare, by what is proven."""

    cohort: int
    options: tuple[Option, ...]
    """Every kind, for the cohort size that was asked for."""
    sizes: tuple[tuple[Option, ...], ...]
    """Every kind, for cohorts of 1, 2, 4, ... up to all clients."""
    pays_until: dict[str, int]
    """For every kind the largest cohort that is at least half as fast as a linear speed-up."""
    p: FloatArray
    """The inclusion probabilities of ``best``, for the cohort size that was asked for."""

    @property
    def fastest(self) -> Option:
        """The option with the fewest rounds for the cohort size that was asked for."""
        return min(self.options, key=lambda option: (option.rounds, option.M))


def best_probabilities(weights: ArrayLike, b: int) -> FloatArray:
    """``p_i = w_i / (w_i + M)`` with sum b: independent sampling with the smallest M.

    >>> p = best_probabilities([0.8, 0.1, 0.1], 1)
    >>> p.round(4).tolist(), round(float(((1 - p) / p * [0.8, 0.1, 0.1]).max()), 4)
    ([0.6384, 0.1808, 0.1808], 0.4531)
    """
    w = positive(weights, np.size(weights), "weights")
    w = w / float(w.sum())
    b = check_cohort_size(b, len(w), "sampling")
    if b == len(w):
        return np.ones(len(w))
    low, high = 0.0, 1.0 / b  # importance sampling has less than 1 / b
    for _ in range(64):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float((w / (w + middle)).sum()) > b else (low, middle)
    return w / (w + high)


def variance(kind: str, federation: Federation, b: int) -> float:
    """M of a kind of sampling with b clients (expected).

    >>> clients = Federation.from_sizes([8, 1, 1])
    >>> [round(variance(kind, clients, 1), 3) for kind in KINDS]
    [1.7, 0.9, 0.453]
    """
    w = federation.weights
    if kind == "uniform":
        sampling = Uniform(len(w), b)
        found = float((sampling.s * w / sampling.p).max())
        if 1 < len(w) <= EIGENVALUES:
            found = min(found, float((smallest_s(sampling, w) * w / sampling.p).max()))
        return found
    if kind == "importance":
        p = importance_probabilities(federation.sizes, b)
    else:
        p = best_probabilities(w, b)
    return float((Independent(p).s * w / p).max())


def sampling_advice(
    federation: Federation,
    recursion: Recursion,
    cohort: int,
    *,
    epsilon: float,
    start: float,
    quantity: Quantity | None = None,
) -> SamplingAdvice:
    """Compare samplings and cohort sizes by the rounds that they are predicted to need.

    Args:
        federation: the clients.
        recursion: the proof's inequality for a method that weighs by inclusion probability, with
            any sampling.
        cohort: the number of clients a round to compare samplings for.
        epsilon: the target.
        start: as for :func:`~fedshuffle.theory.rates.upper_bound`.
        quantity: of what, as there.

    >>> from fedshuffle.theory import ProblemConstants, method_constants
    >>> clients = Federation.from_sizes([10] * 40)
    >>> recursion = Recursion.of(
    ...     method_constants(clients, "fedshuffle"), ProblemConstants(L=1.0, G=4.0), regime="convex"
    ... )
    >>> advice = sampling_advice(clients, recursion, 4, epsilon=0.5, start=10.0)
    >>> [option.rounds for option in advice.options], advice.pays_until["importance"]
    ([503, 496, 496], 7)
    """
    expect(federation, Federation, "federation")
    expect(recursion, Recursion, "recursion")
    n = len(federation)
    b = check_cohort_size(cohort, n, "a cohort")
    measured = measured_by(recursion.regime, quantity)
    if not 0.0 < number(epsilon, "epsilon") < math.inf:
        raise FedShuffleError(f"epsilon is {epsilon}, but must be positive and finite.")

    def option(kind: str, size: int) -> Option:
        M = variance(kind, federation, size)  # noqa: N806
        found = fewest(recursion.sampled(M), epsilon, start, measured)
        return Option(kind, size, M, found.rounds, found.step_size)

    ladder = sorted({*(2**k for k in range(n.bit_length()) if 2**k <= n), n})
    sizes = tuple(tuple(option(kind, size) for kind in KINDS) for size in ladder)
    pays = {}
    for k, kind in enumerate(KINDS):
        rungs = [row[k] for row in sizes]
        pays[kind] = _pays(rungs, lambda size, kind=kind: option(kind, size))  # type: ignore[misc]
    return SamplingAdvice(
        cohort=b,
        options=tuple(option(kind, b) for kind in KINDS),
        sizes=sizes,
        pays_until=pays,
        p=best_probabilities(federation.weights, b),
    )


def _pays(rungs: list[Option], option: Callable[[int], Option]) -> int:
    """The largest cohort with ``rounds(1) / rounds(b) >= b / 2``."""
    alone = rungs[0].rounds

    def pays(found: Option) -> bool:
        return alone >= _HALF * found.cohort * found.rounds

    last = max(k for k, found in enumerate(rungs) if pays(found))
    if last == len(rungs) - 1:
        return rungs[-1].cohort
    low, high = rungs[last].cohort, rungs[last + 1].cohort
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(option(middle)) else (low, middle)
    return low
