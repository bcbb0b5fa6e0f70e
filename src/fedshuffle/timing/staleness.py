r"""How much clients lose by staleness: the mean of :math:`s(\theta) = (1 + \theta)^{-a}`.

A task of client i starts when b updates are in the buffer of K. If M others arrive before its own
update, that is :math:`\theta = \lfloor (b + M) / K \rfloor` server steps old. For clients that
loop, b is uniform on 0, ..., K - 1 and independent of M, and

- if times are exponential, M is geometric, :math:`P(M = m) = p q^m`, where p is the client's share
  of the arrivals (:func:`looping_exponential`);
- if times are fixed and no multiples of the rates :math:`1 / T_j` add up to zero, client j is at a
  uniform place of its task when i starts, wherever the others are. So it arrives
  :math:`\lfloor T_i / T_j \rfloor` times in between, and once more with probability
  :math:`T_i / T_j - \lfloor T_i / T_j \rfloor`, independently of the others
  (:func:`looping_fixed`). Sums of two or three rates are looked for; four or more that add up, but
  no three of them, are times that somebody made up.

Elsewhere the schedule is simulated (:mod:`fedshuffle.timing.simulation`).
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.timing.rates import rate_shares
from fedshuffle.timing.schedule import Asynchronous
from fedshuffle.timing.tasks import Tasks

_MOST = 500  # clients with fixed times: n^3 operations
_MULTIPLE = 10_000  # times whose ratio is that of two numbers up to this have a common multiple
_FACTORS = np.arange(1, 7)  # of two rates that add up with multiples of a third
_CLOSE = 1e-14  # a ratio of two random times is so close to such a one in one of a million cases


def mean_weights(schedule: Asynchronous, tasks: Tasks) -> FloatArray | None:
    """The mean staleness weight of each client; None if no formula is known.

    >>> from fedshuffle import LocalWork
    >>> from fedshuffle.timing import Clock, Exponential
    >>> clock = Clock([0.25, 0.5, 1, 2], per="task", jitter=Exponential())
    >>> tasks = Tasks(clock, LocalWork().on(np.ones(4, dtype=int)))
    >>> mean_weights(Asynchronous(staleness=0.5), tasks).round(3).tolist()
    [0.823, 0.649, 0.501, 0.379]
    """
    if schedule.staleness == 0:
        return np.ones(len(tasks))
    if not schedule.loops(len(tasks)):
        return None
    if tasks.law == "exponential":
        shares = rate_shares(schedule, tasks)
        return looping_exponential(shares, schedule.buffer, schedule.staleness)
    if tasks.law != "fixed" or len(tasks) > _MOST:
        return None
    if common_multiple(tasks.mean) or rates_add_up(tasks.mean):
        return None
    return looping_fixed(tasks.mean, schedule)


def looping_exponential(share: FloatArray, buffer: int, exponent: float) -> FloatArray:
    r"""The mean weight if times are exponential, with shares p of the arrivals.

    With :math:`q = 1 - p` and :math:`Q = q^K`,

    .. math:: E[s] = 1 - \frac{q (1 - Q)}{K p} + \frac{q (1 - Q)^2}{K p}
              \sum_{t = 1}^{\infty} Q^{t-1} (1 + t)^{-a},

    for K = 1 and :math:`q > 0` this is :math:`(p / q) \mathrm{Li}_a(q)`. The series is an integral,

    .. math:: \sum_{t=1}^\infty Q^{t-1} (1 + t)^{-a} = \frac{1}{\Gamma(1 + a)} \int_0^\infty
              u^a e^{-2u} \frac{2 - Q e^{-u}}{(1 - Q e^{-u})^2} du,

    where the trapezoidal rule in :math:`\log u` is as precise as floating point.

    >>> looping_exponential(np.array([0.5]), buffer=1, exponent=1.0).round(6).tolist()  # log 2
    [0.693147]
    """
    log_q = np.log1p(-np.minimum(share, 1 - 1e-16))  # finite for a single client
    gone = -np.expm1(buffer * log_q)  # 1 - Q
    x = np.arange(-40.0, 7.0, 1 / 8)
    u = np.exp(x)
    scaled = (1 + exponent) * x - 2 * u - math.lgamma(1 + exponent)
    series = np.empty(len(share))
    for k, log_big in enumerate((buffer * log_q).tolist()):
        rest = -np.expm1(log_big - u)  # 1 - Q e^-u
        series[k] = (np.exp(scaled) * (1 + rest) / rest**2).sum() / 8
    return np.asarray(1 - (1 - share) * gone / (buffer * share) * (1 - gone * series))


def looping_fixed(times: FloatArray, schedule: Asynchronous) -> FloatArray:
    """The mean weight if times are fixed, and no multiples of rates add up to zero.

    >>> looping_fixed(np.array([1.0, np.sqrt(2)]), Asynchronous(staleness=1.0)).round(4).tolist()
    [0.6464, 0.431]
    """
    buffer, found = schedule.buffer, np.empty(len(times))
    for i, own in enumerate(times):
        ratios = own / np.delete(times, i)
        number = np.array([1.0])  # of the other arrivals, beyond those that are certain
        for chance in ratios % 1:
            number = np.convolve(number, [1 - chance, chance])
        number = np.convolve(number, np.full(buffer, 1 / buffer))  # and those in the buffer
        steps = (np.floor(ratios).sum() + np.arange(len(number))) // buffer
        found[i] = number @ schedule.weight(steps)
    return found


def common_multiple(times: FloatArray) -> bool:
    """Whether multiples, by small numbers, of two clients' times are equal.

    >>> common_multiple(np.array([5.3, 5.9])), common_multiple(np.array([1.0, 2**0.5]))
    (True, False)
    """
    return any(_fractions(times[i + 1 :] / own).any() for i, own in enumerate(times[:-1]))


def rates_add_up(times: FloatArray) -> bool:
    """Whether small multiples of two clients' rates, and any of a third's, add up to zero: then
    these clients are not at independent places of their tasks.

    >>> rates_add_up(1 / np.array([1.0, 2**0.5, 1 + 2**0.5])), rates_add_up(np.sqrt([1, 2, 3]))
    (True, False)
    """
    for i, own in enumerate(times):
        multiples = np.outer(own / np.delete(times, i), _FACTORS).ravel()
        rest = np.abs(multiples - np.round(multiples))  # equal ones have a whole sum or difference
        order = np.argsort(rest)
        close = _CLOSE * np.maximum(multiples[order][1:], multiples[order][:-1])
        if (np.diff(rest[order]) <= close).any():
            return True
    return False


def _fractions(ratios: FloatArray) -> NDArray[np.bool_]:
    """Which ratios are fractions of small numbers: then one of its convergents, p / q."""
    found, beyond = np.zeros(len(ratios), dtype=np.bool_), 2.0 * _MULTIPLE
    p, q, rest = np.ones_like(ratios), np.zeros_like(ratios), np.minimum(ratios, beyond)
    p_before, q_before = q, p
    while (np.maximum(p, q) <= _MULTIPLE).any():
        whole = np.floor(rest)
        p, p_before = whole * p + p_before, p
        q, q_before = whole * q + q_before, q
        near = np.abs(p / q - ratios) <= _CLOSE * ratios
        found |= near & (np.maximum(p, q) <= _MULTIPLE)
        rest = 1 / np.maximum(rest - whole, 1 / beyond)
    return found
