r"""Exact expectations of ratios of sums over a random cohort.

For a cohort S and positive numbers u, v, c of the clients this module computes

.. math:: E\Big[ 1\{i \in S\}\, c_i\, \frac{\sum_{j \in S} v_j}{(\sum_{j \in S} u_j)^k} \Big]

for every client, without sampling. With :math:`X^{-k} = \int_0^\infty t^{k-1} e^{-tX} dt / (k-1)!`
the expectation becomes an integral over t of the *generating function*
:math:`E[1\{i \in S\} c_i (\sum_S v) e^{-t \sum_S u}]`, which has a closed form. A cohort consists
of independent draws; in each a fixed number of clients is invited uniformly, and every invited
client is kept with its probability.

A client's numbers may be random, independently of the others (epochs drawn in every round): they
are then given as A alternatives per client, with the chances of the alternatives, given that it
takes part.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.available_quadrature import AvailableDraw, expit
from fedshuffle.sampling import (
    AmongAvailable,
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
_BLOCK = 1 << 20  # most complex numbers that are held at a time

_Draw = tuple[IntArray, FloatArray, int, FloatArray | None]
"""Members, their chances to be kept, number invited, and chances to be there if not all are."""


def expected_ratio(
    sampling: Sampling,
    u: FloatArray,
    c: FloatArray | None = None,
    v: FloatArray | None = None,
    power: int = 1,
    chances: FloatArray | None = None,
) -> FloatArray | None:
    """``E[1{i in S} c_i (sum_S v) / (sum_S u) ** power]`` for every client i.

    ``u``, ``c`` and ``v`` have shape (n, A), A alternatives with ``chances``, of all clients or of
    each; without ``v`` the numerator is 1. If ``u`` is infinite, cohorts with that client count
    zero. None if no exact formula is known for this sampling.

        >>> u = np.array([[1.0], [2.0], [3.0]])
        >>> share = expected_ratio(Uniform(3, 2), u, c=u)  # 7/36, 16/45 and 9/20
        >>> (180 * share).round(9).tolist()
        [35.0, 64.0, 81.0]
    """
    sampling = sampling.pool
    chances = np.broadcast_to(np.ones(1) if chances is None else chances, u.shape)
    c = np.ones_like(u) if c is None else c
    if isinstance(sampling, One):
        alone: FloatArray = sampling.p * (_over(c, u, v, power) * chances).sum(axis=1)
        return alone
    listed = sampling.cohorts(0) if chances.shape[1] == 1 else None
    if listed is not None:
        return _by_cohorts(listed, u[:, 0], c[:, 0], None if v is None else v[:, 0], power)
    draws = _independent_draws(sampling)
    if draws is None:
        return None
    if not draws:  # nobody is there
        return np.zeros(len(sampling))
    # A lower bound of the sum of u over a cohort. If all may be dropped, one may be alone.
    least = [(float(u[members].min()), size) for members, _, size, _ in draws]
    if isinstance(sampling, Uniform | Stratified):
        smallest = sum(one * size for one, size in least)
    else:
        smallest = min(one for one, _ in least)
    if not np.isfinite(smallest):
        return np.zeros(len(sampling))
    finite = np.where(np.isfinite(u), u, 0.0)
    largest = float(finite.max() + sampling.p @ (finite * chances).sum(axis=1))
    found = _generating_function(draws, u, c, v, chances)
    if found is None:
        return None
    function, group_of = found
    values = _integral(function, power, smallest=smallest, largest=largest)
    return None if values is None else np.where(sampling.inclusion > 0, values[group_of], 0.0)


def _independent_draws(sampling: Sampling) -> list[_Draw] | None:
    """The sampling as independent draws of a fixed number of clients, each then kept or not."""
    everyone, ones = np.arange(len(sampling)), np.ones(len(sampling))
    if isinstance(sampling, Stratified) and len(sampling.sizes) <= _STRATA:
        parts = zip(sampling.members, sampling.take.tolist(), strict=True)
        return [(members, ones[members], take, None) for members, take in parts]
    if isinstance(sampling, Uniform):
        return [(everyone, ones, sampling.b, None)]
    if isinstance(sampling, ApproximateIndependent):
        return [(everyone, sampling.keep, sampling.k, None)]
    if isinstance(sampling, (Independent, Full)):
        return [(everyone, sampling.p, len(sampling), None)]
    if isinstance(sampling, AmongAvailable):
        among = sampling.independent_draws()
        return None if among is None or len(among) > _STRATA else among
    return None


def nonempty_probability(sampling: Sampling) -> float:
    """The probability that the cohort is not empty, from ``sum_i E[1{i in S} / |S|]``; NaN if
    it is not known.
    """
    sampling = sampling.pool
    if isinstance(sampling, AmongAvailable):
        return sampling.nonempty
    if isinstance(sampling, Stratified | Uniform):
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


def _generating_function(
    draws: list[_Draw], u: FloatArray, c: FloatArray, v: FloatArray | None, chances: FloatArray
) -> tuple[Callable[[float], FloatArray], IntArray] | None:
    """The generating function of independent draws, a number for every group of interchangeable
    clients; and the group of each client. None if it would take too long.

    For one draw alone let ``G = E[e^{-t sum u}]``, ``H = E[(sum v) e^{-t sum u}]``, and F and J
    the same with ``1{i in S} c_i``. As v adds up and all else multiplies, a draw is the number
    ``G + H e`` with ``e^2 = 0``, and client i has the e part of ``F + J e`` times the numbers of
    the other draws. Without v, H is 0 and J is F.
    """
    group_of = np.zeros(len(u), dtype=np.int64)
    functions: list[_DrawFunction | AvailableDraw] = []
    groups = 0
    for members, keep, size, there in draws:
        numbers = [array[members] for array in (chances, u, c, v) if array is not None]
        columns = [keep, *(x for array in numbers for x in array.T)]
        first, code, count = _group(columns if there is None else [there, *columns])
        group_of[members] = groups + code
        groups += len(first)
        each = [array[first] for array in numbers]
        if there is None:
            functions.append(_DrawFunction(size, count, keep[first], *each))
            continue
        among = AvailableDraw(size, count, keep[first], there[first], *each)
        if among.too_many:
            return None
        functions.append(among)

    def value(t: float) -> FloatArray:
        values = [function(t) for function in functions]
        result = []
        for k, (_, _, f, j) in enumerate(values):
            others = [(g, h) for m, (g, h, _, _) in enumerate(values) if m != k]
            g, h = reduce(_times, others, (1.0, 0.0))
            result.append(j * g + f * h)
        return np.concatenate(result)

    return value, group_of


def _times(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """``(a + a' e) (b + b' e)`` with ``e^2 = 0``."""
    return a[0] * b[0], a[0] * b[1] + a[1] * b[0]


def _group(columns: list[FloatArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Rows with equal numbers: the first row and the size of each group; the group of each row."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        _, code = np.unique(code * len(values) + inverse, return_inverse=True)
    _, first, count = np.unique(code, return_index=True, return_counts=True)
    return first, code, count


class _DrawFunction:
    """``(G, H, F, J)`` of one draw of groups of equal clients: shapes (groups,) and (groups, A).

    The elementary symmetric polynomial of the ``a_j = E[e^{-t u_j 1{in}}]`` is written through
    independent coins: for any radius r, ``e_k(a) = prod (1 + a_j r) r^-k P(k coins show heads)``
    with chances ``pi_j = a_j r / (1 + a_j r)``. The saddle point is the r for which k heads are
    expected; that probability is then large, and it is the mean over the circle of
    ``prod_j (1 + pi_j (e^{i theta} - 1)) e^{-i k theta}``. If everyone is invited, all coins show
    heads.
    """

    def __init__(
        self, size: int, count: IntArray, keep: FloatArray, chances: FloatArray, *each: FloatArray
    ) -> None:
        self.size, self.count, (self.u, self.c) = size, count, each[:2]
        self.v = each[2] if len(each) > 2 else None
        with np.errstate(divide="ignore"):
            self.log_chances = np.log(chances)
            self.log_keep, self.log_drop = np.log(keep), np.log1p(-keep)
        n = int(count.sum())
        self.everyone = size == n
        if not self.everyone:
            self.start = float(np.log(size / (n - size)))  # the saddle point of a = 1
            fair = _Coins(np.array([size / n]), np.array([n]))
            self.at_start = float(fair.mean(fair.product * fair.turn ** -float(size)))

    def __call__(self, t: float) -> tuple[float, float, FloatArray, FloatArray]:
        count, f, j = self.count, np.zeros(len(self.count)), np.zeros(len(self.count))
        exponent = self.log_chances - t * self.u
        decay = np.logaddexp.reduce(exponent, axis=1)  # log E[e^{-tu}]
        absent = np.isneginf(decay)
        log_a = np.logaddexp(self.log_drop, self.log_keep + decay)
        possible = ~np.isneginf(log_a)
        if count[possible].sum() < self.size:  # a client that must be absent always takes part
            return 0.0, 0.0, f, j
        with np.errstate(invalid="ignore"):
            mix = np.exp(exponent - decay[:, None])  # chances of the alternatives, given e^{-tu}
            here = np.exp(self.log_keep + decay - log_a)
        mix[absent] = here[absent] = 0.0
        if self.everyone:
            coins, scale = _Coins(np.ones(len(count)), count, certain=True), np.exp(count @ log_a)
        else:
            log_radius = self._saddle(log_a[possible], count[possible])
            coins = _Coins(expit(log_a + log_radius), count)
            scale = np.exp(self._log_scale(log_a, log_radius)) / self.at_start

        heads = here * coins.chance
        c = (mix * self.c).sum(1)
        v = cv = others = np.zeros(1)
        if self.v is not None:
            v, cv = heads * (mix * self.v).sum(1), (mix * self.c * self.v).sum(1)
            others = sum((count * v)[k] @ (coins.turn / factors) for k, factors in coins.blocks())
        rest = coins.product * coins.turn ** -float(self.size - 1)  # after one coin shows heads
        for k, factors in coins.blocks():
            share = rest / factors
            f[k] = coins.mean(share) * c[k]
            if self.v is not None:
                own = v[k, None] * coins.turn / factors
                j[k] = coins.mean(share * (cv[k, None] + c[k, None] * (others - own)))
        whole = rest / coins.turn
        g, h = float(scale * coins.mean(whole)), float(scale * coins.mean(whole * others))
        scales = scale * here * coins.chance
        return g, h, scales * f, scales * (f if self.v is None else j)

    def _saddle(self, log_a: FloatArray, count: IntArray) -> float:
        """The logarithm of the radius for which ``size`` heads are expected."""
        from scipy.optimize import brentq  # a third of a second to import: only when needed

        # Above the weight at which the size-th client joins, nothing changes any more.
        order = np.argsort(-log_a)
        last = order[np.searchsorted(np.cumsum(count[order]), self.size)]
        low, high = -float(log_a.max()) - 40.0, -float(log_a[last]) + 80.0

        def excess(log_radius: float) -> float:
            return float(count @ expit(log_a + log_radius)) - self.size

        if not excess(low) < 0 < excess(high):  # all who can take part must
            return high
        return float(brentq(excess, low, high, xtol=1e-4, maxiter=200))

    def _log_scale(self, log_a: FloatArray, log_radius: float) -> float:
        """``log prod (1 + a r) r^-k`` less its value at a = 1, without taking large differences."""
        shift, start = log_a + log_radius - self.start, self.start
        with np.errstate(over="ignore"):
            close = np.log1p(expit(start) * np.expm1(shift))
        far = np.logaddexp(0.0, start + shift) - np.logaddexp(0.0, start)
        change = np.where(shift < 30, close, far)
        return float(self.count @ change) - self.size * (log_radius - start)


class _Coins:
    """Independent coins, and the generating function of their number of heads on a half circle.

    Its modulus is at most ``exp(-var (1 - cos theta))``, so only angles where that is not
    negligible are kept; their number hardly grows with the number of coins. If all heads are
    certain, the angle zero says it all.
    """

    def __init__(self, chance: FloatArray, count: IntArray, certain: bool = False) -> None:
        self.chance, self.points = chance, 1
        self.turn: NDArray[Any] = np.ones(1)
        self.product: NDArray[Any] = np.ones(1)
        if certain:
            return
        variance = float(count @ (chance * (1 - chance)))
        self.points = int(np.ceil(5 * np.sqrt(variance) + 20))
        angles = (np.arange(self.points) + 0.5) * np.pi / self.points
        self.turn = np.exp(1j * angles[variance * (1 - np.cos(angles)) < 45])
        logs = np.zeros(len(self.turn), dtype=np.complex128)
        for k, factors in self.blocks():
            logs += count[k] @ (0.5 * np.log(factors.real**2 + factors.imag**2))
            logs += 1j * (count[k] @ np.arctan2(factors.imag, factors.real))
        self.product = np.exp(logs)

    def blocks(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """``1 + pi (e^{i theta} - 1)``, a row for every coin, in portions that fit in memory."""
        size = max(_BLOCK // len(self.turn), 1)
        for begin in range(0, len(self.chance), size):
            block = slice(begin, begin + size)
            yield block, 1 + self.chance[block, None] * (self.turn - 1)

    def mean(self, values: NDArray[Any]) -> Any:
        """The mean over the whole circle: the lower half mirrors the upper one."""
        return values.real.sum(axis=-1) / self.points
