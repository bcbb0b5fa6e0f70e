"""Availability windows: in each round only the clients of one time zone are available.

In every round one window is drawn, each with the same probability, and b of its clients take part.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from fedshuffle import Federation, FedShuffleError, Sampling
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Cohorts


class Windows(Sampling):
    """``window[i]`` is the window of client i: ``p_i = b / (windows * clients in its window)``."""

    def __init__(self, window: Sequence[int] | np.ndarray, b: int) -> None:
        self.window = np.unique(window, return_inverse=True)[1]  # numbered from 0
        self.awake = np.bincount(self.window)
        if not 1 <= b <= self.awake.min():
            raise FedShuffleError(f"a window has {self.awake.min()} clients: cannot take {b}.")
        self.b = b
        self.p = (b / (len(self.awake) * self.awake))[self.window]

    def __repr__(self) -> str:
        return f"{self.b} of one of {len(self.awake)} windows"

    def pair_probabilities(self) -> np.ndarray:
        others = np.maximum(self.awake - 1, 1)  # of a pair, the second
        pairs = np.outer(self.p, (self.b - 1) / others[self.window])
        pairs[self.window[:, None] != self.window] = 0.0  # never awake together
        np.fill_diagonal(pairs, self.p)
        return pairs

    def draw(self, seed: int, round: int) -> np.ndarray:
        rng = generator(seed, Purpose.COHORT, round=round)
        members = np.flatnonzero(self.window == rng.integers(len(self.awake)))
        return np.sort(rng.choice(members, self.b, replace=False))

    def cohorts(self, limit: int) -> Cohorts | None:
        """Optional: with a list of the cohorts, audits are exact."""
        if (self.awake.astype(float) ** self.b).sum() > limit:
            return None
        rows = []
        for k in range(len(self.awake)):
            members = np.flatnonzero(self.window == k).tolist()
            subsets = list(itertools.combinations(members, self.b))
            rows += [(subset, 1 / (len(self.awake) * len(subsets))) for subset in subsets]
        return Cohorts.of(rows)


def make(federation: Federation) -> Sampling:
    """For configs: three windows, two clients per round."""
    return Windows(np.arange(len(federation)) % 3, b=2)
