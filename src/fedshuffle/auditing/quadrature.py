r"""Exact expectations of ratios of sums over a random cohort.

For a cohort S and positive numbers u, v, c of the clients this module computes

.. math:: E\Big[ 1\{i \in S\}\, c_i\, \frac{\sum_{j \in S} v_j}{(\sum_{j \in S} u_j)^k} \Big]

for every client, without sampling. With :math:`X^{-k} = \int_0^\infty t^{k-1} e^{-tX} dt / (k-1)!`
the expectation becomes an integral over t of a *generating function*
:math:`E[1\{i \in S\} e^{-t \sum_S u}]`, and that has a closed form:

- every client decides for itself: a product over clients;
- k of n clients uniformly, each kept with some probability: an elementary symmetric polynomial,
  read off the product :math:`\prod_j (1 + a_j z)` as a Fourier coefficient on a circle through the
  saddle point, where all terms are of like size and nothing cancels;
- so many of every stratum: a product of such, as the strata are independent.

The integrand is analytic in :math:`\log t`, so the trapezoidal rule on that scale converges faster
than any power of its step; the rule with every second point says how accurate it is. Clients with
equal numbers are interchangeable and are computed once.

A client's numbers may be random, independently of the cohort (epochs drawn anew each round): they
are then given as A alternatives per client, with the chances of the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.sampling import (
    ApproximateIndependent,
    Cohorts,
    Full,
    Independent,
    One,
    Optimal,
    Sampling,
    Stratified,
    Uniform,
)

ComplexArray = NDArray[np.complex128]

ACCURACY = 1e-10
"""The relative accuracy that is asked of every expectation."""

_BLOCK = 1 << 20
"""How many complex numbers are held at a time."""

_STRATA = 32
"""With more strata than this the integral takes longer than sampling."""


def expected_ratio(
    sampling: Sampling,
    u: FloatArray,
    *,
    c: FloatArray | None = None,
    v: FloatArray | None = None,
    power: int = 1,
    chances: FloatArray | None = None,
) -> FloatArray | None:
    """``E[1{i in S} c_i (sum_S v) / (sum_S u) ** power]`` for every client i.

    ``u``, ``c`` and ``v`` have shape (n, A), A alternatives with ``chances``; without ``v`` the
    numerator is 1. Where ``u`` is infinite, the client must be absent: cohorts with it count zero.
    None where no exact way is known for this sampling.

        >>> u = np.array([[1.0], [2.0], [3.0]])
        >>> share = expected_ratio(Uniform(3, 2), u, c=u)  # 7/36, 16/45 and 9/20
        >>> (180 * share).round(9).tolist()
        [35.0, 64.0, 81.0]
    """
    sampling = _who_walks(sampling)
    chances = np.ones(1) if chances is None else chances
    c = np.ones_like(u) if c is None else c
    if isinstance(sampling, One):
        return sampling.p * (_over(c, u, v, power) @ chances)
    listed = sampling.cohorts(0) if len(chances) == 1 else None
    if listed is not None:
        return _by_cohorts(listed, u[:, 0], c[:, 0], None if v is None else v[:, 0], power)

    smallest = _smallest(sampling, u)
    if not np.isfinite(smallest):
        return np.zeros(len(sampling))
    finite = np.where(np.isfinite(u), u, 0.0)
    largest = float(finite.max() + sampling.p @ (finite @ chances))
    transform: Callable[[float], FloatArray]
    if isinstance(sampling, Stratified):
        if len(sampling.sizes) > _STRATA:
            return None
        transform = _Strata(sampling, u, c, v, chances)
        group_of = transform.group_of
    else:
        shape = _shape(sampling)
        if shape is None:
            return None
        keep, invited = shape
        clients, group_of = _Groups.of(keep, u, c, v, chances)
        transform = _transform(clients, invited)
    values = _integral(transform, power, smallest=smallest, largest=largest)
    return None if values is None else values[group_of]


def _who_walks(sampling: Sampling) -> Sampling:
    """The sampling that draws the clients who walk."""
    return sampling.pool if isinstance(sampling, Optimal) else sampling


def _smallest(sampling: Sampling, u: FloatArray) -> float:
    """What the sum of u over any cohort exceeds; infinite where no cohort is allowed."""
    if isinstance(sampling, Stratified):
        least = [u[members].min() for members in sampling.members]
        return float(sampling.take @ np.array(least))
    if isinstance(sampling, Uniform):
        return sampling.b * float(u.min())
    return float(u.min())


def _shape(sampling: Sampling) -> tuple[FloatArray, int] | None:
    """A sampling as "so many are invited uniformly, and each is kept with its probability"."""
    if isinstance(sampling, Uniform):
        return np.ones(len(sampling)), sampling.b
    if isinstance(sampling, ApproximateIndependent):
        return sampling.keep, sampling.k
    if isinstance(sampling, (Independent, Full)):
        return sampling.p, len(sampling)
    return None


def probability_of_anybody(sampling: Sampling) -> float:
    """The probability that the cohort is not empty, from ``sum_i E[1{i in S} / |S|]``."""
    sampling = _who_walks(sampling)
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


@dataclass(frozen=True)
class _Groups:
    """Clients with equal numbers, taken together. Shapes: (G,) and (G, A)."""

    count: IntArray
    keep: FloatArray
    u: FloatArray
    c: FloatArray
    v: FloatArray | None
    chances: FloatArray

    @classmethod
    def of(
        cls,
        keep: FloatArray,
        u: FloatArray,
        c: FloatArray,
        v: FloatArray | None,
        chances: FloatArray,
    ) -> tuple[_Groups, IntArray]:
        columns = [keep, *u.T, *c.T, *(() if v is None else v.T)]
        code = np.zeros(len(keep), dtype=np.int64)
        for column in columns:
            values, inverse = np.unique(column, return_inverse=True)
            _, code = np.unique(code * len(values) + inverse, return_inverse=True)
        _, first, count = np.unique(code, return_index=True, return_counts=True)
        groups = cls(
            count, keep[first], u[first], c[first], None if v is None else v[first], chances
        )
        return groups, code

    def at(self, t: float) -> _Marks:
        """What the generating function needs of every group at the point t."""
        exponent = np.log(self.chances) - t * self.u
        present = np.logaddexp.reduce(exponent, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            mix = np.exp(exponent - present[:, None])
            log_keep, log_drop = np.log(self.keep), np.log1p(-self.keep)
        mix[np.isneginf(present)] = 0.0
        either = np.logaddexp(log_drop, log_keep + present)
        mean_c = (mix * self.c).sum(1)
        if self.v is None:
            return _Marks(log_keep + present, either, mean_c, None, None)
        return _Marks(
            log_keep + present,
            either,
            mean_c,
            (mix * self.v).sum(1),
            (mix * self.c * self.v).sum(1),
        )


@dataclass(frozen=True)
class _Marks:
    """Per group, at one t: logarithms of E[1{in} e^{-tu}] and E[e^{-tu 1{in}}], and the means of
    c, v and cv over the alternatives, weighted by e^{-tu}.
    """

    present: FloatArray
    either: FloatArray
    c: FloatArray
    v: FloatArray | None
    cv: FloatArray | None


class _Product:
    """``E[1{i in S} c_i (sum_S v) e^{-t sum_S u}]`` where every client decides for itself."""

    def __init__(self, clients: _Groups) -> None:
        self.clients = clients

    def __call__(self, t: float) -> FloatArray:
        marks, count = self.clients.at(t), self.clients.count
        result = np.zeros(len(count))
        total = float(count @ marks.either)
        if np.isneginf(total):  # somebody who must be absent is always there
            return result
        alive = ~np.isneginf(marks.present)
        here = np.exp(marks.present[alive] - marks.either[alive])
        factor = marks.c[alive]
        if marks.v is not None and marks.cv is not None:
            own = here * marks.v[alive]
            factor = marks.cv[alive] + factor * (count[alive] @ own - own)
        result[alive] = np.exp(total) * here * factor
        return result


class _FixedSize:
    """The same where ``size`` of n clients are invited uniformly and each is kept or not.

    The elementary symmetric polynomial of the ``a_j = E[e^{-t u_j 1{in}}]`` is written through
    independent coins: for any radius r, ``e_k(a) = prod (1 + a_j r) r^-k P(k coins show heads)``
    with chances ``pi_j = a_j r / (1 + a_j r)``. The saddle point is the r for which k heads are
    expected; that probability is then large, and it is the mean over the circle of
    ``prod_j (1 + pi_j (e^{i theta} - 1)) e^{-i k theta}``.
    """

    def __init__(self, clients: _Groups, size: int) -> None:
        self.clients, self.size = clients, size
        n = int(clients.count.sum())
        self.log_radius = float(np.log(size / (n - size)))  # the saddle point of a = 1
        fair = _Coins(np.array([size / n]), np.array([n]))
        self.at_start = float(fair.mean(fair.product * fair.turn ** -float(size)))

    def __call__(self, t: float) -> FloatArray:
        marks, count = self.clients.at(t), self.clients.count
        result = np.zeros(len(count))
        possible = ~np.isneginf(marks.either)
        if count[possible].sum() < self.size:
            return result
        log_radius = self._saddle(marks.either[possible], count[possible])
        coins = _Coins(_expit(marks.either + log_radius), count)
        rest = coins.product * coins.turn ** -float(self.size - 1)

        alive = np.flatnonzero(~np.isneginf(marks.present))
        here = np.exp(marks.present[alive] - marks.either[alive])
        factor: FloatArray | ComplexArray = marks.c[alive, None]
        blocks = coins.blocks(alive)
        if marks.v is None or marks.cv is None:
            for block in blocks:
                result[block] = coins.mean(rest / coins.factors(block)) * marks.c[block]
        else:
            heads = np.zeros(len(count))
            heads[alive] = here * marks.v[alive] * coins.chance[alive]
            others = sum(
                (count[block] * heads[block]) @ (coins.turn / coins.factors(block))
                for block in blocks
            )
            for block in blocks:
                factors = coins.factors(block)
                own = heads[block, None] * coins.turn / factors
                factor = marks.cv[block, None] + marks.c[block, None] * (others - own)
                result[block] = coins.mean(rest * factor / factors)
        scale = self._log_scale(marks.either, log_radius)
        result[alive] *= np.exp(scale) / self.at_start * here * coins.chance[alive]
        return result

    def _saddle(self, log_a: FloatArray, count: IntArray) -> float:
        """The logarithm of the radius for which ``size`` heads are expected."""
        from scipy.optimize import brentq  # a third of a second to import: only when needed

        # Above the weight at which the size-th client joins, nothing changes any more.
        order = np.argsort(-log_a)
        last = order[np.searchsorted(np.cumsum(count[order]), self.size)]
        low, high = -float(log_a.max()) - 40.0, -float(log_a[last]) + 80.0

        def excess(log_radius: float) -> float:
            return float(count @ _expit(log_a + log_radius)) - self.size

        if not excess(low) < 0 < excess(high):  # all who can be there must be there
            return high
        return float(brentq(excess, low, high, xtol=1e-4, maxiter=200))

    def _log_scale(self, log_a: FloatArray, log_radius: float) -> float:
        """``log prod (1 + a r) r^-k`` less its value at a = 1, without taking large differences."""
        shift = log_a + log_radius - self.log_radius
        start = self.log_radius
        with np.errstate(over="ignore"):
            close = np.log1p(_expit(start) * np.expm1(shift))
        far = np.logaddexp(0.0, start + shift) - np.logaddexp(0.0, start)
        change = np.where(shift < 30, close, far)
        return float(self.clients.count @ change) - self.size * (log_radius - start)


def _transform(clients: _Groups, size: int) -> _Product | _FixedSize:
    """The generating function where ``size`` of these clients are invited."""
    everybody = size == int(clients.count.sum())
    return _Product(clients) if everybody else _FixedSize(clients, size)


class _Strata:
    """The same where so many clients of every stratum take part.

    For stratum k alone let ``G = E[e^{-t sum u}]``, ``H = E[(sum v) e^{-t sum u}]``, and F and J
    the same with ``1{i in S} c_i``. As v adds up and all else multiplies, a stratum is the number
    ``G + H e`` with ``e^2 = 0``, and client i has ``F + J e`` times the numbers of the other
    strata: its e part, or its plain part where there is no v.
    """

    def __init__(
        self,
        sampling: Stratified,
        u: FloatArray,
        c: FloatArray,
        v: FloatArray | None,
        chances: FloatArray,
    ) -> None:
        self.group_of = np.zeros(len(sampling), dtype=np.int64)
        self.parts: list[_Stratum] = []
        groups = 0
        for members, take in zip(sampling.members, sampling.take.tolist(), strict=True):
            rows = None if v is None else v[members]
            clients, code = _Groups.of(np.ones(len(members)), u[members], c[members], rows, chances)
            self.group_of[members] = groups + code
            groups += len(clients.count)
            self.parts.append(_Stratum(clients, take))

    def __call__(self, t: float) -> FloatArray:
        parts = [part(t) for part in self.parts]
        below, above = [(1.0, 0.0)], [(1.0, 0.0)]
        for (whole, _), (other, _) in zip(parts, reversed(parts), strict=True):
            below.append(_times(below[-1], whole))
            above.append(_times(above[-1], other))
        result = []
        for k, (_, (plain, marked)) in enumerate(parts):
            g, h = _times(below[k], above[len(parts) - 1 - k])
            result.append(plain * g if marked is None else marked * g + plain * h)
        return np.concatenate(result)


class _Stratum:
    """One stratum at a point t: ``(G, H)``, and ``(F, J)`` of every group of clients."""

    def __init__(self, clients: _Groups, take: int) -> None:
        self.count, self.take = clients.count, take
        plain = replace(clients, v=None)
        self.g = _transform(replace(plain, c=np.ones_like(clients.c)), take)
        self.f = _transform(plain, take)
        self.h = self.j = None
        if clients.v is not None:
            self.h = _transform(replace(plain, c=clients.v), take)
            self.j = _transform(clients, take)

    def __call__(
        self, t: float
    ) -> tuple[tuple[float, float], tuple[FloatArray, FloatArray | None]]:
        g = float(self.count @ self.g(t)) / self.take  # every cohort has that many members
        h = 0.0 if self.h is None else float(self.count @ self.h(t))
        return (g, h), (self.f(t), None if self.j is None else self.j(t))


def _times(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """``(a + a' e) (b + b' e)`` with ``e^2 = 0``."""
    return a[0] * b[0], a[0] * b[1] + a[1] * b[0]


class _Coins:
    """Independent coins, and the generating function of their number of heads on a half circle.

    Its modulus is at most ``exp(-var (1 - cos theta))``, so only angles where that is not
    negligible are kept; their number hardly grows with the number of coins.
    """

    def __init__(self, chance: FloatArray, count: IntArray) -> None:
        self.chance = chance
        variance = float(count @ (chance * (1 - chance)))
        self.points = int(np.ceil(5 * np.sqrt(variance) + 20))
        angles = (np.arange(self.points) + 0.5) * np.pi / self.points
        self.turn: ComplexArray = np.exp(1j * angles[variance * (1 - np.cos(angles)) < 45])
        logs: ComplexArray = np.zeros(len(self.turn), dtype=np.complex128)
        for block in self.blocks(np.arange(len(chance))):
            factors = self.factors(block)
            modulus = 0.5 * np.log(factors.real**2 + factors.imag**2)
            logs = logs + count[block] @ modulus
            logs = logs + 1j * (count[block] @ np.arctan2(factors.imag, factors.real))
        self.product: ComplexArray = np.exp(logs)

    def factors(self, block: IntArray) -> ComplexArray:
        """``1 + pi (e^{i theta} - 1)``, a row for every coin of the block."""
        return 1 + self.chance[block, None] * (self.turn - 1)

    def mean(self, values: ComplexArray) -> FloatArray:
        """The mean over the whole circle: the lower half mirrors the upper one."""
        mean: FloatArray = values.real.sum(axis=-1) / self.points
        return mean

    def blocks(self, coins: IntArray) -> list[IntArray]:
        """Coins in portions that fit in memory."""
        parts = -(-len(coins) * len(self.turn) // _BLOCK)
        return np.array_split(coins, max(parts, 1))


def _expit(x: Any) -> Any:
    """``1 / (1 + e^-x)`` without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def _integral(
    f: Callable[[float], FloatArray], power: int, *, smallest: float, largest: float
) -> FloatArray | None:
    """``int_0^inf t^(power-1) f(t) dt / (power-1)!`` by the trapezoidal rule in log t.

    ``smallest`` bounds the decay: f(t) falls at least like e^{-t smallest}. Below ``1e-8/largest``
    f is constant to the accuracy wanted, and that part of the rule is a geometric series. None
    where the accuracy is not reached.
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
        if (np.abs(fine - coarse) <= ACCURACY * np.abs(fine)).all():
            return fine
    return None
