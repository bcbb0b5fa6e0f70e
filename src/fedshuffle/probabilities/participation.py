r"""Who took part so far, in rounds that can be drawn again."""

from collections.abc import Callable

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.probabilities.drift import BlockCounts, drift
from fedshuffle.probabilities.estimates import Estimate


class Participation:
    """The participations of a run, as much as an estimate needs of them.

    A round costs as much as its cohort. The cohorts of past rounds are drawn again when they are
    needed, so a resumed run has the estimates of one that was never interrupted.

    Args:
        clients: the number of all clients.
        estimate: the rule that estimates probabilities.
        draw: the cohort of a round.

    >>> from fedshuffle.probabilities import TruncatedIntervals
    >>> cohorts = [np.array([0, 1]), np.array([1]), np.array([0, 1])]
    >>> past = Participation(2, TruncatedIntervals(), cohorts.__getitem__)
    >>> past.probabilities(round=2, clients=cohorts[2]).tolist()
    [1.0, 1.0]
    >>> past.probabilities(round=3, clients=np.array([0, 1])).round(3).tolist()
    [0.667, 1.0]
    """

    def __init__(self, clients: int, estimate: Estimate, draw: Callable[[int], IntArray]) -> None:
        self.estimate, self._draw = estimate, draw
        self._n = clients
        self._newest: tuple[int, IntArray] | None = None
        self._restart()

    def _restart(self) -> None:
        self._total = 0
        self._last = np.full(self._n, -1, dtype=np.int64)
        self._score = np.zeros(self._n)
        self._blocks = BlockCounts(self._n)

    def probabilities(self, round: int, clients: IntArray) -> FloatArray:
        """The estimates for the clients that take part in a round, from the rounds before."""
        self._advance(round)
        self._newest = round, clients
        if not len(clients):  # perhaps nobody has come so far
            return np.empty(0)
        rate = (self._total + len(clients)) / ((round + 1) * self._n)
        gap = round - self._last[clients]
        return self.estimate.probability(self._score[clients], gap, round, rate)

    def drift(self, round: int) -> float:
        """How much participation changed from the first half of the rounds before to the second,
        where more than 1 is not chance (see :func:`fedshuffle.probabilities.drift.drift`).
        """
        self._advance(round)
        return drift(self._blocks.complete())

    def _advance(self, round: int) -> None:
        """Count the rounds before this one, and no others."""
        if round < self._blocks.rounds:
            self._restart()
        while (now := self._blocks.rounds) < round:
            known = self._newest is not None and self._newest[0] == now
            clients = self._newest[1] if known and self._newest else self._draw(now)
            rest = clients
            while len(rest):  # once, unless a client takes part several times
                some, first = np.unique(rest, return_index=True)
                gap = now - self._last[some]
                self._score[some] = self.estimate.updated(self._score[some], gap)
                self._last[some] = now
                rest = np.delete(rest, first)
            self._total += len(clients)
            self._blocks.add(clients)
