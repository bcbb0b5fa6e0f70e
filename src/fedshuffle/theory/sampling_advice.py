"""Which sampling, and how many clients per round: by M and by the predicted rounds.

For methods that weight by inclusion probability the sampling enters the bound only by
``M = max_i s_i w_i / p_i``; docs/theory.md gives it for each kind of sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, expect, positive
from fedshuffle.federation import Federation
from fedshuffle.sampling import Independent, Uniform, importance_probabilities
from fedshuffle.sampling.base import check_cohort_size
from fedshuffle.theory.constants import smallest_s
from fedshuffle.theory.rates import ConvergenceRate, Regime

KINDS = ("uniform", "importance", "best")
"""The samplings to compare: ``best`` is the independent one with the smallest M, and also bounds
optimal client sampling."""

MAX_EIGENVALUE_CLIENTS = 400
"""Largest number of clients for which M of uniform sampling is an eigenvalue, not a formula."""


@dataclass(frozen=True)
class SamplingOption:
    """A sampling with its M, and the rounds that are proven with it."""

    sampling: str
    """One of the kinds."""
    cohort: int
    """The number of clients that take part, or are expected to."""
    M: float
    rounds: int
    """After which the bound reaches the target."""
    step_size: float
    """With which it does."""


@dataclass(frozen=True)
class SamplingAdvice:
    """Samplings and cohort sizes, compared by what is proven."""

    regime: Regime
    cohort: int
    options: tuple[SamplingOption, ...]
    """Every kind, for this cohort size."""
    sizes: tuple[tuple[SamplingOption, ...], ...]
    """Every kind, for cohorts of 1, 2, 4, ... up to all clients."""
    pays_until: dict[str, int]
    """For every kind the largest cohort that is at least half as fast as a linear speed-up."""


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
    from scipy.optimize import brentq  # a third of a second to import: only when needed

    # Importance sampling has less than 1 / b.
    M = brentq(lambda M: float((w / (w + M)).sum()) - b, 0.0, 1.0 / b, xtol=1e-300)  # noqa: N803, N806
    return w / (w + M)


def sampling_variance(kind: str, federation: Federation, b: int) -> float:
    """M of a kind of sampling with b clients (expected).

    >>> clients = Federation.from_sizes([8, 1, 1])
    >>> [round(sampling_variance(kind, clients, 1), 3) for kind in KINDS]
    [1.7, 0.9, 0.453]
    """
    w = federation.weights
    if kind == "uniform":
        sampling = Uniform(len(w), b)
        found = float((sampling.s * w / sampling.p).max())
        if 1 < len(w) <= MAX_EIGENVALUE_CLIENTS:
            found = min(found, float((smallest_s(sampling, w) * w / sampling.p).max()))
        return found
    importance = kind == "importance"
    p = importance_probabilities(federation.sizes, b) if importance else best_probabilities(w, b)
    return float((Independent(p).s * w / p).max())


def sampling_advice(
    federation: Federation,
    rate: ConvergenceRate,
    cohort: int,
    *,
    epsilon: float,
    start: float,
) -> SamplingAdvice:
    """Compare samplings and cohort sizes by the rounds that they are predicted to need.

    ``rate`` is that of a method that weights by inclusion probability, with any sampling; cohort is
    the number of clients per round, epsilon the target, ``start`` as for
    :class:`~fedshuffle.theory.rates.ConvergenceRate`.

    >>> from fedshuffle.theory import ProblemConstants, method_constants
    >>> clients = Federation.from_sizes([10] * 40)
    >>> rate = ConvergenceRate(
    ...     method_constants(clients, "fedshuffle"), ProblemConstants(L=1.0, G=4.0), regime="convex"
    ... )
    >>> advice = sampling_advice(clients, rate, 4, epsilon=0.5, start=10.0)
    >>> [option.rounds for option in advice.options], advice.pays_until["importance"]
    ([503, 496, 496], 7)
    """
    expect(federation, Federation, "federation")
    expect(rate, ConvergenceRate, "rate")
    n = len(federation)
    b = check_cohort_size(cohort, n, "a cohort")

    def option(kind: str, size: int) -> SamplingOption:
        M = sampling_variance(kind, federation, size)  # noqa: N806
        found = rate.with_variance(M).rounds_to(epsilon, start=start)
        return SamplingOption(kind, size, M, found.rounds, found.step_size)

    ladder: list[int] = sorted({*(2**k for k in range(n.bit_length()) if 2**k <= n), n})
    sizes = [tuple(option(kind, size) for kind in KINDS) for size in ladder]

    def pays_until(k: int, kind: str) -> int:
        """The largest cohort with ``rounds(1) / rounds(b) >= b / 2``."""

        def pays(found: SamplingOption) -> bool:
            return sizes[0][k].rounds >= 0.5 * found.cohort * found.rounds

        last = max(j for j, row in enumerate(sizes) if pays(row[k]))
        low, high = ladder[last], [*ladder, n + 1][last + 1]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(option(kind, middle)) else (low, middle)
        return low

    return SamplingAdvice(
        regime=rate.regime,
        cohort=b,
        options=tuple(option(kind, b) for kind in KINDS),
        sizes=tuple(sizes),
        pays_until={kind: pays_until(k, kind) for k, kind in enumerate(KINDS)},
    )
