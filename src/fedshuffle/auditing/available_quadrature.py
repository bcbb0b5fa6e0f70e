r"""The generating function of b clients drawn uniformly among those who are there.

Give every client a number, uniform on (0, 1), and take the b smallest of those who are there. If
the largest of these is x, each client of the cohort is there with a number below x, and all others
are not. So with :math:`\pi_j = q_j x`

.. math:: P(S) = \int_0^1 \frac{b}{x} \prod_{j \in S} \pi_j \prod_{j \notin S} (1 - \pi_j)\, dx
          \quad (|S| = b), \qquad
          P(S) = \prod_{j \in S} q_j \prod_{j \notin S} (1 - q_j) \quad (|S| < b),

and sums over cohorts are coefficients of :math:`\prod_j (1 - \pi_j + \pi_j a_j z)`. They are found
as in :mod:`fedshuffle.auditing.quadrature`, for all nodes x of a Gauss rule at once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray

_PANEL = 24  # nodes of the Gauss rule in each panel
_NODES = 20_000  # most nodes times groups of equal clients
_REACH = 40.0  # beyond ten standard deviations and this many, a number of clients is impossible


class AvailableDraw:
    """``(G, H, F, J)`` of one draw of groups of equal clients, as of ``_DrawFunction``.

    ``size`` of those who are ``there`` are asked, all if fewer, and each stays with ``keep``.
    """

    def __init__(
        self,
        size: int,
        count: IntArray,
        keep: FloatArray,
        there: FloatArray,
        chances: FloatArray,
        *each: FloatArray,
    ) -> None:
        self.size, self.count, self.there = size, count, there
        self.u, self.c = each[:2]
        self.v = each[2] if len(each) > 2 else None
        with np.errstate(divide="ignore"):
            self.log_chances = np.log(chances)
            self.log_keep, self.log_drop = np.log(keep), np.log1p(-keep)
        x, self.weights = _nodes(size, there, count)
        self.pi = np.append(x, 1.0)[:, None] * there  # the last row is for fewer than b
        self.weights *= size / x
        self.too_many = len(x) * len(count) > _NODES
        self._log_radius = np.zeros(len(x))

    def __call__(self, t: float) -> tuple[float, float, FloatArray, FloatArray]:
        exponent = self.log_chances - t * self.u
        decay = np.logaddexp.reduce(exponent, axis=1)  # log E[e^{-tu}]
        log_a = np.logaddexp(self.log_drop, self.log_keep + decay)
        with np.errstate(invalid="ignore", divide="ignore"):
            mix = np.exp(exponent - decay[:, None])
            here = np.exp(self.log_keep + decay - log_a)
            odds = np.log(self.pi) - np.log1p(-self.pi) + log_a
        odds[:, np.isneginf(log_a)] = -np.inf  # who must be away, even if it never is
        mix[np.isneginf(decay)] = here[np.isneginf(decay)] = 0.0
        c = here * (mix * self.c).sum(axis=1)
        v = cv = None
        if self.v is not None:
            v, cv = here * (mix * self.v).sum(axis=1), here * (mix * self.c * self.v).sum(axis=1)
        total = self._fewer(odds[-1], log_a, c, v, cv)
        if self.count[~np.isneginf(log_a)].sum() < self.size:
            return total
        radius = self._saddle(odds[:-1])
        heads = expit(odds[:-1] + radius[:, None])
        log_scale = self._log_scale(slice(0, -1), log_a, radius) - self.size * radius
        variance = float((heads * (1 - heads) @ self.count).max())
        numbers = np.array([self.size])
        rows = _Heads(heads, self.count, variance, numbers).expectations(c, v, cv)
        scale = self.weights * np.exp(log_scale)
        g, h, f, j = (scale @ part for part in rows)
        return total[0] + float(g), total[1] + float(h), total[2] + f, total[3] + j

    def _fewer(
        self,
        odds: FloatArray,
        log_a: FloatArray,
        c: FloatArray,
        v: FloatArray | None,
        cv: FloatArray | None,
    ) -> tuple[float, float, FloatArray, FloatArray]:
        """The part of the cohorts of fewer than ``size`` clients: all who are there."""
        heads = expit(odds)
        mean, variance = float(heads @ self.count), float(heads * (1 - heads) @ self.count)
        reach = 10 * np.sqrt(variance) + _REACH
        low, high = max(0, int(mean - reach)), min(self.size - 1, int(mean + reach) + 1)
        if low > high:
            nothing = np.zeros(len(odds))
            return 0.0, 0.0, nothing, nothing
        scale = float(np.exp(self._log_scale(slice(-1, None), log_a, np.zeros(1))[0]))
        numbers = np.arange(low, high + 1)
        rows = _Heads(heads[None], self.count, 4 * variance, numbers).expectations(c, v, cv)
        g, h, f, j = (scale * part[0] for part in rows)
        return float(g), float(h), f, j

    def _log_scale(self, rows: slice, log_a: FloatArray, radius: FloatArray) -> FloatArray:
        """``log prod (1 - pi + pi a r)`` for each node."""
        with np.errstate(divide="ignore"):
            out, into = np.log1p(-self.pi[rows]), np.log(self.pi[rows]) + log_a
        scale: FloatArray = np.logaddexp(out, into + radius[:, None]) @ self.count
        return scale

    def _saddle(self, odds: FloatArray) -> FloatArray:
        """The logarithm of a radius for which about ``size`` heads are expected, by Newton steps
        from the one before.
        """
        radius = self._log_radius
        for _ in range(100):
            heads = expit(odds + radius[:, None])
            slope = np.maximum((heads * (1 - heads)) @ self.count, 1e-3)
            step = np.clip((self.size - heads @ self.count) / slope, -3, 3)
            radius = np.clip(radius + step, -700, 700)
            if np.abs(step).max() < 0.1:
                break
        self._log_radius = radius
        return radius


class _Heads:
    """Rows of independent coins, ``count`` of each kind, of which given numbers show heads."""

    def __init__(
        self, heads: FloatArray, count: IntArray, variance: float, numbers: IntArray
    ) -> None:
        self.heads, self.count = heads, count
        # One window of numbers fits on the circle, so that no other number is taken for one of it.
        self.points = int(np.ceil(5 * np.sqrt(variance) + _REACH / 2)) + len(numbers)
        angles = (np.arange(self.points) + 0.5) * np.pi / self.points
        self.turn: NDArray[np.complex128] = np.exp(1j * angles)
        self.factors = 1 + heads[:, :, None] * (self.turn - 1)
        product = np.exp(np.einsum("g,kgt->kt", count.astype(np.float64), np.log(self.factors)))
        power = np.exp(-1j * np.outer(numbers, angles))
        self.whole = product * power.sum(axis=0)
        self.rest = product * (power[numbers > 0].sum(axis=0) * self.turn)  # after one shows heads

    def expectations(
        self, c: FloatArray, v: FloatArray | None, cv: FloatArray | None
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """``G, H`` of each row, and ``F, J`` of each row and kind, but for the scale."""
        share = self.rest[:, None, :] / self.factors
        g, f = self._mean(self.whole), self.heads * c * self._mean(share)
        if v is None or cv is None:
            return g, np.zeros_like(g), f, f
        each = (self.heads * v)[:, :, None] * self.turn / self.factors
        others = np.einsum("g,kgt->kt", self.count.astype(np.float64), each)
        h = self._mean(self.whole * others)
        beside = self._mean(share * (others[:, None, :] - each))
        return g, h, f, self.heads * (cv * self._mean(share) + c * beside)

    def _mean(self, values: NDArray[np.complex128]) -> FloatArray:
        mean: FloatArray = values.real.sum(axis=-1) / self.points
        return mean


def _nodes(size: int, q: FloatArray, count: IntArray) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights for x, where the largest number may be, whoever is taken."""
    order, mean = np.argsort(-q), float(q @ count)
    taken = np.minimum(np.cumsum(count[order]), size)
    most = float(q[order] @ np.diff(taken, prepend=0))  # of the clients that are there most often
    reach = 12 * np.sqrt(size) + _REACH
    low = max(0.0, (size - reach) / (mean + size))
    high = min(1.0, (size + reach) / max(mean - most, 1e-9))
    panels = int(np.ceil((high - low) * (mean + size) / (12 * np.sqrt(size))))
    edges = np.linspace(low, high, min(panels, 10_000) + 1)
    points, weights = np.polynomial.legendre.leggauss(_PANEL)
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + points)
    return x.ravel(), (half * weights).ravel()


def expit(x: Any) -> Any:
    """``1 / (1 + e^-x)`` without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))
