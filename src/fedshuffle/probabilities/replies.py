r"""Who was asked and who replied so far, on a real server: nothing of that can be drawn again."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.probabilities.drift import BlockCounts, drift
from fedshuffle.probabilities.estimates import Estimate


class Replies:
    r"""Who was asked and who replied so far, as much as an estimate needs of it.

    Estimated is the probability that a client replies if it is asked. To a rule, the rounds of a
    client are those in which it was asked, so clients that are asked rarely, or join late, are
    estimated like all others. The prior of a rule is the share of all that were asked who replied,
    :math:`(1 + R) / (1 + A)` for R replies to A questions. Estimates depend on the past only, so
    given the past, a client that replies with probability :math:`r_i` counts
    :math:`r_i / \hat r_i` times what was meant.

    Args:
        estimate: the rule that estimates probabilities.
        clients: the number of clients; it may :meth:`grow`.

    >>> from fedshuffle.probabilities import BetaRate
    >>> replies, both = Replies(BetaRate(), clients=2), np.array([0, 1])
    >>> for round in range(3):
    ...     replies.add(asked=both, replied=both[:1])
    >>> replies.probabilities(both).round(3).tolist()
    [0.842, 0.211]
    """

    def __init__(self, estimate: Estimate, clients: int = 0) -> None:
        self.estimate = estimate
        self._times = np.zeros(clients, dtype=np.int64)  # that a client was asked
        self._last = np.full(clients, -1, dtype=np.int64)  # question to which it replied
        self._score = np.zeros(clients)
        self._asked, self._replied = BlockCounts(clients), BlockCounts(clients)

    def __len__(self) -> int:
        return len(self._times)

    @property
    def rate(self) -> float:
        """The share of all that were asked who replied, from 1 on."""
        return float((1 + self._replied.counts.sum()) / (1 + self._asked.counts.sum()))

    def grow(self, clients: int) -> None:
        """Add clients up to this number; new ones were never asked."""
        if not (new := clients - len(self)):
            return
        self._times = np.pad(self._times, (0, new))
        self._last = np.pad(self._last, (0, new), constant_values=-1)
        self._score = np.pad(self._score, (0, new))
        for blocks in (self._asked, self._replied):
            blocks.counts = np.pad(blocks.counts, ((0, 0), (0, new)))

    def probabilities(self, clients: IntArray) -> FloatArray:
        """The estimates for clients that are asked now, from the questions before."""
        times, score = self._times[clients], self._score[clients]
        return self.estimate.probability(score, times - self._last[clients], times, self.rate)

    def add(self, asked: IntArray, replied: IntArray) -> None:
        """Add a question: who was asked, and which of them replied."""
        gap = self._times[replied] - self._last[replied]
        self._score[replied] = self.estimate.updated(self._score[replied], gap)
        self._last[replied] = self._times[replied]
        self._times[asked] += 1
        self._asked.add(asked)
        self._replied.add(replied)

    def missed(self, clients: IntArray) -> IntArray:
        """The number of questions in a row, up to now, without a reply from each client."""
        found: IntArray = self._times[clients] - self._last[clients] - 1
        return found

    def forget(self, clients: IntArray) -> None:
        """Drop all that is known of clients, as if they had never been asked."""
        self._times[clients], self._last[clients], self._score[clients] = 0, -1, 0
        self._asked.counts[:, clients] = self._replied.counts[:, clients] = 0

    def drift(self) -> float:
        """How much clients' shares of replies changed over time, where more than 1 is not chance
        (see :func:`fedshuffle.probabilities.drift.drift`): compared are replies less those
        expected of a client that always replies with the same probability.
        """
        asked, replied = self._asked.complete(), self._replied.complete()
        share = replied.sum(axis=0) / np.maximum(asked.sum(axis=0), 1)
        return drift(np.round(replied - asked * share, 9))  # or rounding would look like a change

    def state(self) -> dict[str, NDArray[Any]]:
        """All of it, as arrays with an entry for each client that was asked before."""
        seen = np.flatnonzero(self._times)
        return {
            "clients": seen,
            "times": self._times[seen],
            "last": self._last[seen],
            "score": self._score[seen],
            "asked": self._asked.counts[:, seen],
            "replied": self._replied.counts[:, seen],
            "blocks": np.array([self._asked.rounds, self._asked.length]),
        }

    def restore(self, state: Mapping[str, ArrayLike]) -> None:
        """Continue from a state."""
        seen = np.asarray(state["clients"], dtype=np.int64)
        for name in ("times", "last", "score"):
            getattr(self, f"_{name}")[seen] = np.asarray(state[name])
        for name in ("asked", "replied"):
            blocks: BlockCounts = getattr(self, f"_{name}")
            blocks.counts[:, seen] = np.asarray(state[name])
            blocks.rounds, blocks.length = np.asarray(state["blocks"]).tolist()
