r"""Rules that estimate inclusion probabilities from who took part so far.

A client that takes part in round t (from 0) counts :math:`w / \hat p_t`. What that does to the
objective is told by :math:`p\, E[1 / \hat p_t]`, which is 1 if probabilities are known. Below,
:math:`q = 1 - p`, and rounds are independent unless said otherwise.
"""

import abc
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, number


class Estimate(abc.ABC):
    """A rule that estimates inclusion probabilities from who took part so far.

    It keeps one number per client, the score, which changes only when the client takes part. The
    gap is the number of rounds since the client took part last, or since before the first round; 0
    if it takes part in this one already, as in a buffer of an asynchronous schedule.

        >>> rule, before = MovingRate(share=0.5), np.zeros(1)
        >>> rule.updated(before, gap=np.array([1])).tolist()  # it takes part in round 0
        [0.5]
        >>> rule.probability(np.array([0.5]), gap=np.array([2]), round=2, rate=0.0).tolist()
        [0.625]
    """

    settles: bool = False
    """Whether the estimate tends to a number, if rounds are independent; else it varies forever."""

    @abc.abstractmethod
    def updated(self, score: FloatArray, gap: IntArray) -> FloatArray:
        """The scores of clients after a round in which they take part."""

    @abc.abstractmethod
    def probability(
        self, score: FloatArray, gap: IntArray, round: IntArray | int, rate: float
    ) -> FloatArray:
        """The estimates for clients that take part in a round, which is one for all or, if clients
        joined at different times, one each; ``rate`` is the share of all clients that took part in
        a round so far, on average.
        """

    @abc.abstractmethod
    def limit(self, p: FloatArray) -> FloatArray:
        r"""What the estimate amounts to in a long run: :math:`1 / E[1 / \hat p]`, if rounds are
        independent and client i takes part with probability ``p[i]``.
        """


@dataclass(frozen=True)
class TruncatedIntervals(Estimate):
    r"""FedAU: the weight :math:`1 / \hat p` is the mean interval between participations so far,
    where an interval is cut when it reaches ``cutoff`` rounds, K. Before the first interval ends,
    the weight is 1.

    An interval T is geometric. Cut ones have

    .. math:: E[\min(T, K)] = \frac{1 - q^K}{p}, \qquad
       E[\min(T, K)^2] = \frac{1 - q^K}{p} + \frac{2 q (1 - K q^{K-1} + (K - 1) q^K)}{p^2}.

    So in a long run a client counts :math:`1 - q^K` times what was meant, and the weight after M
    intervals has the variance of one divided by M. For every process of participations, the limit
    of the weight is :math:`E[T] / E[\lceil T / K \rceil]`, and no weight exceeds K.

        >>> TruncatedIntervals(cutoff=2).limit(np.array([0.5])).round(3).tolist()
        [0.667]

    Reference: Wang and Ji, A Lightweight Method for Tackling Unknown Participation Statistics in
    Federated Averaging, 2024.
    """

    cutoff: int = 50
    settles = True

    def __post_init__(self) -> None:
        count(self.cutoff, "the cutoff of intervals")

    def updated(self, score: FloatArray, gap: IntArray) -> FloatArray:
        """The number of intervals that have ended."""
        return score + np.maximum(-(-gap // self.cutoff), 1)

    def probability(
        self, score: FloatArray, gap: IntArray, round: IntArray | int, rate: float
    ) -> FloatArray:
        cuts, begun = np.divmod(gap - 1, self.cutoff)  # since it took part last
        ended = score + cuts
        return np.where(ended > 0, ended / np.maximum(round - begun, 1), 1.0)

    def limit(self, p: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.asarray(p / -np.expm1(self.cutoff * np.log1p(-p)))


@dataclass(frozen=True)
class MovingRate(Estimate):
    r"""An exponentially weighted mean of participations, this one included:
    :math:`\hat p_t = \alpha + (1 - \alpha) r_t` with :math:`r_{t+1} = (1 - \alpha) r_t + \alpha
    1\{i \in S_t\}`, where :math:`\alpha` is ``share`` and :math:`r_0` the mean rate of all clients.

    It forgets, so it follows a drift with a lag of :math:`1 / \alpha` rounds, and never settles:

    .. math:: E[\hat p] = p + \alpha q, \qquad
       \mathrm{Var}[\hat p] = (1 - \alpha)^2 \frac{\alpha}{2 - \alpha}\, p q,

    and a client counts about :math:`1 - \alpha q / (2 p)` times what was meant. No weight exceeds
    :math:`1 / \alpha`.

        >>> MovingRate(share=0.05).limit(np.array([0.5])).round(3).tolist()
        [0.513]
    """

    share: float = 0.05

    def __post_init__(self) -> None:
        number(self.share, "the share of a round in the moving rate", within="(0, 1)")

    def updated(self, score: FloatArray, gap: IntArray) -> FloatArray:
        return score * (1 - self.share) ** gap + self.share

    def probability(
        self, score: FloatArray, gap: IntArray, round: IntArray | int, rate: float
    ) -> FloatArray:
        keep = 1 - self.share
        return score * keep**gap + rate * keep ** (round + 1) + self.share

    def limit(self, p: FloatArray) -> FloatArray:
        # E[1 / X] is the integral of E[exp(-s X)] over s, by Gauss-Laguerre in v = s m, where m is
        # the mean of X.
        values, where = np.unique(p, return_inverse=True)
        nodes, weights = np.polynomial.laguerre.laggauss(48)
        keep = 1 - self.share
        mean = self.share + keep * values
        v = nodes / mean[:, None]
        logs = nodes - v * self.share
        with np.errstate(divide="ignore"):
            absent, present = np.log1p(-values)[:, None], np.log(values)[:, None]
        term = self.share * keep
        while term > 1e-18:
            logs += np.logaddexp(absent, present - v * term)
            term *= keep
        return (mean / (np.exp(logs) @ weights))[where]


@dataclass(frozen=True)
class BetaRate(Estimate):
    r"""The mean of a Beta(a, b) prior after N participations in t rounds,
    :math:`\hat p_t = (a + N) / (a + b + t)`.

    By default ``b`` is such that the prior mean is the mean rate of all clients so far. With a = 1,

    .. math:: p\, E[1 / \hat p_t] = \frac{1 + b + t}{1 + t}\, (1 - q^{t+1}):

    the first factor is the same for all clients and tends to 1, the second is the probability to
    have taken part by then. The variance of :math:`1 / \hat p_t` is about
    :math:`q / (t p^3)`. In a long run there is no bias, also if rounds are correlated.

        >>> rule = BetaRate(a=1, b=1)
        >>> rule.probability(np.array([3.0]), gap=np.array([1]), round=8, rate=0.5).tolist()
        [0.4]
    """

    a: float = 1.0
    b: float | None = None
    settles = True

    def __post_init__(self) -> None:
        number(self.a, "the a of the Beta prior", within="(0, inf)")
        if self.b is not None:
            number(self.b, "the b of the Beta prior", within="[0, inf)")

    def updated(self, score: FloatArray, gap: IntArray) -> FloatArray:
        """The number of participations."""
        return score + 1

    def probability(
        self, score: FloatArray, gap: IntArray, round: IntArray | int, rate: float
    ) -> FloatArray:
        prior = self.a / rate if self.b is None else self.a + self.b
        return (self.a + score) / (prior + round)

    def limit(self, p: FloatArray) -> FloatArray:
        return p
