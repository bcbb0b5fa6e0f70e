r"""Generating functions of cohorts, :math:`E[1\{i \in S\} c_i (\sum_S v) e^{-t \sum_S u}]`.

A cohort consists of independent draws; in each a fixed number of clients is invited uniformly, and
every invited client is kept with its probability:

- everyone is invited (independent participation): a product over clients;
- k of n clients are invited: an elementary symmetric polynomial, read off the product
  :math:`\prod_j (1 + a_j z)` as a Fourier coefficient on a circle through the saddle point, where
  all terms are of like size and nothing cancels;
- several draws (strata): a product of such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray

ComplexArray = NDArray[np.complex128]

_BLOCK = 1 << 20  # most complex numbers that are held at a time


class Draw(NamedTuple):
    """``size`` of the members are invited uniformly, and each is kept with its probability."""

    members: IntArray
    keep: FloatArray
    size: int


class GeneratingFunction:
    """The generating function of independent draws, for every group of interchangeable clients.

    For one draw alone let ``G = E[e^{-t sum u}]``, ``H = E[(sum v) e^{-t sum u}]``, and F and J
    the same with ``1{i in S} c_i``. As v adds up and all else multiplies, a draw is the number
    ``G + H e`` with ``e^2 = 0``, and client i has ``F + J e`` times the numbers of the other
    draws: its e part, or its plain part without v.
    """

    def __init__(
        self,
        draws: list[Draw],
        u: FloatArray,
        c: FloatArray,
        v: FloatArray | None,
        chances: FloatArray,
    ) -> None:
        self.group_of = np.zeros(len(u), dtype=np.int64)
        self.parts: list[_Part] = []
        groups = 0
        for members, keep, size in draws:
            rows = None if v is None else v[members]
            clients, code = _group(keep, u[members], c[members], rows, chances)
            self.group_of[members] = groups + code
            groups += len(clients.count)
            self.parts.append(_Part(clients, size))

    def __call__(self, t: float) -> FloatArray:
        if len(self.parts) == 1:
            return self.parts[0].own(t)
        wholes = [part.whole(t) for part in self.parts]
        below, above = [(1.0, 0.0)], [(1.0, 0.0)]
        for one, other in zip(wholes, reversed(wholes), strict=True):
            below.append(_times(below[-1], one))
            above.append(_times(above[-1], other))
        result = []
        for k, part in enumerate(self.parts):
            g, h = _times(below[k], above[len(wholes) - 1 - k])
            plain = part.plain(t)
            result.append(plain * g if part.clients.v is None else part.own(t) * g + plain * h)
        return np.concatenate(result)


class _Part:
    """One draw of a cohort: its ``(G, H)``, and the F and J of every group of clients."""

    def __init__(self, clients: _Groups, size: int) -> None:
        self.clients, self.size = clients, size
        without = replace(clients, v=None)
        self.own = _function(clients, size)
        self.plain = _function(without, size)
        self.g = _function(replace(without, c=np.ones_like(clients.c)), size)
        self.h = None if clients.v is None else _function(replace(without, c=clients.v), size)

    def whole(self, t: float) -> tuple[float, float]:
        count = self.clients.count
        g = float(count @ self.g(t)) / self.size  # every cohort has that many members
        return g, 0.0 if self.h is None else float(count @ self.h(t))


def _times(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """``(a + a' e) (b + b' e)`` with ``e^2 = 0``."""
    return a[0] * b[0], a[0] * b[1] + a[1] * b[0]


@dataclass(frozen=True)
class _Groups:
    """Clients with equal numbers, taken together. Shapes: (G,) and (G, A)."""

    count: IntArray
    keep: FloatArray
    u: FloatArray
    c: FloatArray
    v: FloatArray | None
    chances: FloatArray

    def at(self, t: float) -> _Terms:
        exponent = np.log(self.chances) - t * self.u
        present = np.logaddexp.reduce(exponent, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            mix = np.exp(exponent - present[:, None])
            log_keep, log_drop = np.log(self.keep), np.log1p(-self.keep)
        mix[np.isneginf(present)] = 0.0
        either = np.logaddexp(log_drop, log_keep + present)
        mean_v = None if self.v is None else (mix * self.v).sum(1)
        mean_cv = None if self.v is None else (mix * self.c * self.v).sum(1)
        return _Terms(log_keep + present, either, (mix * self.c).sum(1), mean_v, mean_cv)


class _Terms(NamedTuple):
    """Per group, at one t: logarithms of E[1{in} e^{-tu}] and E[e^{-tu 1{in}}], and the means of
    c, v and cv over the alternatives, weighted by e^{-tu}.
    """

    present: FloatArray
    either: FloatArray
    c: FloatArray
    v: FloatArray | None
    cv: FloatArray | None


def _group(
    keep: FloatArray, u: FloatArray, c: FloatArray, v: FloatArray | None, chances: FloatArray
) -> tuple[_Groups, IntArray]:
    """The groups, and the group of every client."""
    code = np.zeros(len(keep), dtype=np.int64)
    for column in [keep, *u.T, *c.T, *(() if v is None else v.T)]:
        values, inverse = np.unique(column, return_inverse=True)
        _, code = np.unique(code * len(values) + inverse, return_inverse=True)
    _, first, count = np.unique(code, return_index=True, return_counts=True)
    of_v = None if v is None else v[first]
    return _Groups(count, keep[first], u[first], c[first], of_v, chances), code


def _function(clients: _Groups, size: int) -> Callable[[float], FloatArray]:
    """The generating function where ``size`` of these clients are invited."""
    everyone = size == int(clients.count.sum())
    return partial(_product, clients) if everyone else _FixedSize(clients, size)


def _product(clients: _Groups, t: float) -> FloatArray:
    """The generating function where every client decides for itself."""
    terms, count = clients.at(t), clients.count
    result = np.zeros(len(count))
    total = float(count @ terms.either)
    if np.isneginf(total):  # a client that must be absent always takes part
        return result
    alive = ~np.isneginf(terms.present)
    here = np.exp(terms.present[alive] - terms.either[alive])
    factor = terms.c[alive]
    if terms.v is not None and terms.cv is not None:
        own = here * terms.v[alive]
        factor = terms.cv[alive] + factor * (count[alive] @ own - own)
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
        terms, count = self.clients.at(t), self.clients.count
        result = np.zeros(len(count))
        possible = ~np.isneginf(terms.either)
        if count[possible].sum() < self.size:
            return result
        log_radius = self._saddle(terms.either[possible], count[possible])
        coins = _Coins(_expit(terms.either + log_radius), count)
        rest = coins.product * coins.turn ** -float(self.size - 1)

        alive = np.flatnonzero(~np.isneginf(terms.present))
        here = np.exp(terms.present[alive] - terms.either[alive])
        blocks = coins.blocks(alive)
        if terms.v is None or terms.cv is None:
            for block in blocks:
                result[block] = coins.mean(rest / coins.factors(block)) * terms.c[block]
        else:
            heads = np.zeros(len(count))
            heads[alive] = here * terms.v[alive] * coins.chance[alive]
            others = sum(
                (count[block] * heads[block]) @ (coins.turn / coins.factors(block))
                for block in blocks
            )
            for block in blocks:
                factors = coins.factors(block)
                own = heads[block, None] * coins.turn / factors
                factor = terms.cv[block, None] + terms.c[block, None] * (others - own)
                result[block] = coins.mean(rest * factor / factors)
        scale = self._log_scale(terms.either, log_radius)
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

        if not excess(low) < 0 < excess(high):  # all who can take part must
            return high
        return float(brentq(excess, low, high, xtol=1e-4, maxiter=200))

    def _log_scale(self, log_a: FloatArray, log_radius: float) -> float:
        """``log prod (1 + a r) r^-k`` less its value at a = 1, without taking large differences."""
        shift, start = log_a + log_radius - self.log_radius, self.log_radius
        with np.errstate(over="ignore"):
            close = np.log1p(_expit(start) * np.expm1(shift))
        far = np.logaddexp(0.0, start + shift) - np.logaddexp(0.0, start)
        change = np.where(shift < 30, close, far)
        return float(self.clients.count @ change) - self.size * (log_radius - start)


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
