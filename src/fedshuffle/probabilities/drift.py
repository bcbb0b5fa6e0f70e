r"""Whether clients come as ever, by counts in blocks of successive rounds."""

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.probabilities.estimates import Estimate, MovingRate

_BLOCKS = 16  # all equally long; when they are full, pairs are joined
_SHORTEST = 4  # rounds of a block to judge by
_INDEPENDENT = 10  # clients at most that are taken to come and go independently
_CHANCE = 1e-3  # that a stationary population is called a drifting one


class BlockCounts:
    """How often each client was counted, in at most 16 blocks of successive rounds.

    >>> blocks = BlockCounts(clients=2)
    >>> for round in range(64):
    ...     blocks.add(np.array([0]))
    >>> blocks.length, blocks.complete()[:, 0].tolist()
    (4, [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4])
    """

    def __init__(self, clients: int) -> None:
        self.counts: NDArray[np.int32] = np.zeros((_BLOCKS, clients), dtype=np.int32)
        self.rounds, self.length = 0, 1
        """The rounds so far, and those of a block."""

    def add(self, clients: IntArray) -> None:
        """Count these clients in the next round."""
        if self.rounds == _BLOCKS * self.length:
            joined = self.counts[::2] + self.counts[1::2]
            self.counts[: _BLOCKS // 2], self.counts[_BLOCKS // 2 :] = joined, 0
            self.length *= 2
        np.add.at(self.counts[self.rounds // self.length], clients, 1)
        self.rounds += 1

    def complete(self) -> NDArray[np.int32]:
        """An even number of blocks that are complete, none if they are too short to judge by."""
        even = self.rounds // self.length // 2 * 2
        return self.counts[: even if self.length >= _SHORTEST else 0]


def drift(counts: NDArray[np.int32] | FloatArray) -> float:
    r"""How much counts changed from the first half of the blocks to the second, where more than 1
    is not chance.

    The halves are compared by the variation within them: with counts :math:`N_{ki}` of client i
    in 2m blocks k of successive rounds, and their means :math:`A_i, B_i` over each half,

    .. math:: F = \frac{m}{2} \sum_i (A_i - B_i)^2 \Big/
                  \frac{1}{2m - 2} \sum_{k, i} (N_{ki} - \text{mean of its half})^2

    has an F distribution if blocks are longer than the time for which rounds are correlated.
    The result is F divided by the value that chance exceeds once in a thousand times, if at
    least ten clients, or all, come and go independently.

    >>> drift(np.array([[4], [4], [0], [0]]))
    inf
    """
    half = len(counts) // 2
    if half < 2:
        return 0.0
    halves = counts.reshape(2, half, -1).astype(np.float64)
    means = halves.mean(axis=1)
    within = ((halves - means[:, None]) ** 2).sum(axis=(0, 1)) / (2 * half - 2)
    between = (means[0] - means[1]) ** 2 * half / 2
    varied = int(np.count_nonzero(within + between))
    if not varied or not within.any():
        return np.inf if varied else 0.0
    from scipy.special import fdtri  # a third of a second to import: only when needed

    alone = min(varied, _INDEPENDENT)
    limit = fdtri(alone, (2 * half - 2) * alone, 1 - _CHANCE)
    return float(between.sum() / within.sum() / limit)


def drift_warning(estimate: Estimate, drifted: float, what: str, setting: str) -> str:
    """What to warn of, if an estimate that does not forget saw no one probability to estimate.

    >>> drift_warning(MovingRate(), np.inf, "who takes part", "probabilities")
    ''
    """
    if isinstance(estimate, MovingRate) or drifted <= 1:
        return ""
    return (
        f"{what}, more than by chance, so estimated inclusion probabilities are wrong: a client"
        f" counts by when it was there, too. Use {setting} 'estimate:ewma:0.05', which follows a"
        " slow drift, and a constant step size."
    )
