r"""Whether participation drifts, by counts in blocks of successive rounds."""

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.probabilities.estimates import Estimate, MovingRate

_BLOCKS = 24  # all equally long; when they are full, pairs are joined
_SHORTEST = 4  # rounds of a block to judge by
_PAIRS = 6  # of blocks to judge by; there are 12 blocks after some were joined
_INDEPENDENT = 10  # clients at most that are taken to come and go independently
_SWINGS = 12  # slow swings to judge chance by, over all clients; at least 2 of each
_CHANCE = 1e-3  # that a stationary population is called a drifting one


class BlockCounts:
    """How often each client was counted, in at most 24 blocks of successive rounds.

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
        """The blocks that are complete, none if they are too short to judge by."""
        return self.counts[: self.rounds // self.length if self.length >= _SHORTEST else 0]


def drift(counts: NDArray[np.int32] | FloatArray) -> float:
    r"""How much counts changed from the first half of the blocks to the second, where more than 1
    is not chance.

    Blocks are compared in pairs: with counts :math:`N_{ki}` of client i in block k of successive
    rounds, and the differences :math:`D_{ki} = N_{k + s, i} - N_{ki}` of m pairs of different
    blocks, the mean :math:`\bar D_i` is compared with the slowest swings of the differences,

    .. math:: F = m \sum_i \bar D_i^2 \Big/ \frac{1}{B} \sum_i \sum_{j=1}^{B} \Big(
              \sqrt{\tfrac{2}{m}} \sum_{k=1}^{m} D_{ki} \cos \tfrac{\pi j (k - 1/2)}{m} \Big)^2.

    That has an F distribution if rounds are correlated for much less long than the run. B is 2, and
    larger for few clients: with all swings, B = m - 1, the denominator would be the variance of the
    differences, and clients that stay for longer than a block would look like a drift. The result
    is F divided by the value that chance exceeds once in a thousand times, if at least ten clients,
    or all, come and go independently.

    An even drift makes all differences of a client equal, so it does not hide itself. Neither does
    the swing of day and night: s is a multiple of three and blocks have 8, 16, ... rounds, so that
    a day of 24 rounds, or of 48 or 96, is compared with itself at the same time of day.

    Reference: Lazarus, Lewis, Stock and Watson, HAR Inference: Recommendations for Practice, 2018,
    for the variance by cosines.

    >>> drift(np.repeat([[4], [0]], 6, axis=0))
    inf
    """
    apart = (len(counts) + 3) // 6 * 3
    pairs = min(apart, len(counts) - apart)
    if pairs < _PAIRS:
        return 0.0
    first = len(counts) - apart - pairs
    changes = (counts[-pairs:] - counts[first : first + pairs]).astype(np.float64)
    means = changes.mean(axis=0)
    between = pairs * means**2
    varied = int(np.count_nonzero(np.ptp(changes, axis=0) + between))
    alone = min(varied, _INDEPENDENT)
    if not varied:
        return 0.0
    swings = min(max(2, -(-_SWINGS // alone)), pairs - 1)
    angles = np.pi * np.outer(np.arange(1, swings + 1), np.arange(pairs) + 0.5) / pairs
    within = 2 / pairs * ((np.cos(angles) @ (changes - means)) ** 2).sum() / swings
    if not within:
        return np.inf
    from scipy.special import fdtri  # a third of a second to import: only when needed

    limit = fdtri(alone, swings * alone, 1 - _CHANCE)
    return float(between.sum() / within / limit)


def drift_warning(estimate: Estimate, drifted: float, what: str, setting: str) -> str:
    """The warning if participation drifted and the estimate does not forget; else nothing.

    >>> drift_warning(MovingRate(), np.inf, "who takes part", "probabilities")
    ''
    """
    if isinstance(estimate, MovingRate) or drifted <= 1:
        return ""
    return (
        f"{what}, more than by chance unless clients come and go very slowly, so estimated"
        " inclusion probabilities are wrong: a client counts by when it was there, too. Use"
        f" {setting} 'estimate:ewma:0.05', which follows a slow drift, and a constant step size."
    )
