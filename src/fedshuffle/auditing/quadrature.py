r"""Exact expectations of ratios of sums over a random cohort.

For a cohort S and positive numbers u, v, c of the clients this module computes

.. math:: E\Big[ 1\{i \in S\}\, c_i\, \frac{\sum_{j \in S} v_j}{(\sum_{j \in S} u_j)^k} \Big]

for every client, without sampling. With :math:`X^{-k} = \int_0^\infty t^{k-1} e^{-tX} dt / (k-1)!`
the expectation becomes an integral over t of a *generating function*
:math:`E[1\{i \in S\} e^{-t \sum_S u}]`, which has a closed form
(:mod:`fedshuffle.auditing.generating_functions`).

The integrand is analytic in :math:`\log t`, so the trapezoidal rule on that scale converges faster
than any power of its step; the rule with every second point gives its accuracy. Clients with equal
numbers are interchangeable and are computed once.

A client's numbers may be random, independently of the cohort (epochs drawn in every round): they
are then given as A alternatives per client, with the chances of the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.generating_functions import Draw, GeneratingFunction
from fedshuffle.sampling import (
    ApproximateIndependent,
    Cohorts,
    Full,
    Independent,
    One,
    Sampling,
    Stratified,
    Uniform,
)

_ACCURACY = 1e-10  # the relative accuracy of every expectation
_STRATA = 32  # with more strata than this the integral takes longer than sampling


def expected_ratio(
    sampling: Sampling,
    u: FloatArray,
    c: FloatArray | None = None,
    v: FloatArray | None = None,
    power: int = 1,
    chances: FloatArray | None = None,
) -> FloatArray | None:
    """``E[1{i in S} c_i (sum_S v) / (sum_S u) ** power]`` for every client i.

    ``u``, ``c`` and ``v`` have shape (n, A), A alternatives with ``chances``; without ``v`` the
    numerator is 1. If ``u`` is infinite, cohorts with that client count zero.
    None if no exact formula is known for this sampling.

        >>> u = np.array([[1.0], [2.0], [3.0]])
        >>> share = expected_ratio(Uniform(3, 2), u, c=u)  # 7/36, 16/45 and 9/20
        >>> (180 * share).round(9).tolist()
        [35.0, 64.0, 81.0]
    """
    sampling = sampling.pool
    chances = np.ones(1) if chances is None else chances
    c = np.ones_like(u) if c is None else c
    if isinstance(sampling, One):
        return sampling.p * (_over(c, u, v, power) @ chances)
    listed = sampling.cohorts(0) if len(chances) == 1 else None
    if listed is not None:
        return _by_cohorts(listed, u[:, 0], c[:, 0], None if v is None else v[:, 0], power)
    draws = _independent_draws(sampling)
    if draws is None:
        return None
    # A lower bound of the sum of u over a cohort. If all may be dropped, one may be alone.
    dropping = not isinstance(sampling, Uniform | Stratified)
    least = np.array([u[draw.members].min() for draw in draws])
    smallest = float(np.array([1 if dropping else draw.size for draw in draws]) @ least)
    if not np.isfinite(smallest):
        return np.zeros(len(sampling))
    finite = np.where(np.isfinite(u), u, 0.0)
    largest = float(finite.max() + sampling.p @ (finite @ chances))
    function = GeneratingFunction(draws, u, c, v, chances)
    values = _integral(function, power, smallest=smallest, largest=largest)
    return None if values is None else values[function.group_of]


def _independent_draws(sampling: Sampling) -> list[Draw] | None:
    """The sampling as independent draws of a fixed number of clients, each then kept or not."""
    everyone, ones = np.arange(len(sampling)), np.ones(len(sampling))
    if isinstance(sampling, Stratified):
        if len(sampling.sizes) > _STRATA:
            return None
        parts = zip(sampling.members, sampling.take.tolist(), strict=True)
        return [Draw(members, ones[members], take) for members, take in parts]
    if isinstance(sampling, Uniform):
        return [Draw(everyone, ones, sampling.b)]
    if isinstance(sampling, ApproximateIndependent):
        return [Draw(everyone, sampling.keep, sampling.k)]
    if isinstance(sampling, (Independent, Full)):
        return [Draw(everyone, sampling.p, len(sampling))]
    return None


def nonempty_probability(sampling: Sampling) -> float:
    """The probability that the cohort is not empty, from ``sum_i E[1{i in S} / |S|]``."""
    sampling = sampling.pool
    if isinstance(sampling, Stratified):
        return 1.0
    listed = sampling.cohorts(0)
    if listed is not None:
        return float(listed.probabilities[np.diff(listed.starts) > 0].sum())
    if isinstance(sampling, Independent):
        with np.errstate(divide="ignore"):
            return float(-np.expm1(np.log1p(-sampling.p).sum()))
    shares = expected_ratio(sampling, np.ones((len(sampling), 1)))
    return 1.0 if shares is None else float(shares.sum())


def _by_cohorts(
    cohorts: Cohorts, u: FloatArray, c: FloatArray, v: FloatArray | None, power: int
) -> FloatArray:
    """The expectation by its definition, over a list of cohorts."""
    cohort_of = np.repeat(np.arange(len(cohorts)), np.diff(cohorts.starts))
    sums = np.bincount(cohort_of, weights=u[cohorts.members], minlength=len(cohorts))
    above: FloatArray | None = None
    if v is not None:
        above = np.bincount(cohort_of, v[cohorts.members], len(cohorts)).astype(np.float64)
    share = _over(cohorts.probabilities, np.where(sums > 0, sums, 1.0), above, power)
    return c * np.bincount(cohorts.members, weights=share[cohort_of], minlength=len(u))


def _over(c: FloatArray, u: FloatArray, v: FloatArray | None, power: int) -> FloatArray:
    """``c v / u**power``, without a power of u, which may be too small for a float."""
    share = c / u if v is None else c / u * v
    return share if power == 1 else share / u ** (power - 1)


def _integral(
    f: Callable[[float], FloatArray], power: int, *, smallest: float, largest: float
) -> FloatArray | None:
    """``int_0^inf t^(power-1) f(t) dt / (power-1)!`` by the trapezoidal rule in log t.

    ``smallest`` bounds the decay: f(t) falls at least like e^{-t smallest}. Below ``1e-8/largest``
    f is constant to the accuracy wanted, and that part of the rule is a geometric series. None
    if the accuracy is not reached.
    """
    if power * np.log(700 / smallest) > np.log(np.finfo(float).max):
        return None  # t**power is too large for a float before f has decayed
    start = np.log(1e-8 / largest)
    for step in (1 / 6, 1 / 12, 1 / 24):
        t = float(np.exp(start))
        first = f(t) * t**power
        sums = [first.copy(), np.zeros_like(first)]  # points with even and with odd number
        k = 0
        rest = np.array(np.inf)
        while (rest > 1e-14 * step * (sums[0] + sums[1])).any() and t * smallest < 700:
            k += 1
            t = float(np.exp(start + k * step))
            value = f(t)
            sums[k % 2] += value * t**power
            rest = value * (t ** (power - 1) / smallest) * (1 + (power - 1) / (t * smallest))
        left = [first / np.expm1(power * h) for h in (step, 2 * step)]
        fine: FloatArray = step * (sums[0] + sums[1] + left[0])
        coarse = 2 * step * (sums[0] + left[1])
        if (np.abs(fine - coarse) <= _ACCURACY * np.abs(fine)).all():
            return fine
    return None
