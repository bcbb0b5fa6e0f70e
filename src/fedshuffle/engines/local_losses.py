"""The mean loss over the local steps of clients, computed for many steps at once.

A step keeps what it has observed of its loss, which is a by-product of the gradient. So that this
costs next to nothing, losses are computed from it later, for many steps in a few operations.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines.base import numbers
from fedshuffle.engines.gradients import ByHand
from fedshuffle.engines.packing import PackedMinibatches

_MOST = 4096  # steps to keep


class LocalLosses:
    """The losses of clients that train one after another."""

    def __init__(self, by_hand: ByHand | None) -> None:
        self._by_hand = by_hand
        self.observed: list[Tensor] = []
        """What each step has observed."""
        self.lengths: list[int] = []
        """The length of each step's minibatch."""
        self._computed: list[FloatArray] = []
        self._steps = 0
        self._ends = [0]
        """The number of steps after each task."""

    def end_task(self) -> None:
        """The steps since the last task were those of one more."""
        self._ends.append(self._steps + len(self.observed))
        if len(self.observed) > _MOST:
            self._compute()

    def means(self) -> FloatArray:
        """The mean loss over the steps of each task; NaN for one without gradients."""
        self._compute()
        steps = np.diff(self._ends)
        means = np.full(len(steps), math.nan)
        if self._steps:
            used = steps > 0
            starts = np.array(self._ends[:-1])[used]
            means[used] = np.add.reduceat(np.concatenate(self._computed), starts) / steps[used]
        return means

    def _compute(self) -> None:
        if not self.observed:
            return
        if self._by_hand is None:
            self._computed.append(numbers(torch.stack(self.observed)))
        else:
            each = numbers(self._by_hand.losses(torch.cat(self.observed)))
            lengths = np.array(self.lengths)
            sums = np.add.reduceat(each.reshape(-1), np.cumsum(lengths) - lengths)
            self._computed.append(sums / lengths)
        self._steps += len(self.observed)
        self.observed.clear()
        self.lengths.clear()


class GroupLosses:
    """The losses of clients that train side by side, in rows."""

    def __init__(self, by_hand: ByHand | None, packed: PackedMinibatches) -> None:
        self._by_hand, self._packed = by_hand, packed
        self._observed: list[Tensor] = []
        self._rows: list[IntArray | list[int]] = []

    def add(self, rows: slice | list[int], observed: Tensor) -> None:
        """Keep what these rows have observed in a step."""
        self._observed.append(observed.reshape(-1))
        if self._by_hand is None:
            self._rows.append(np.arange(rows.stop) if isinstance(rows, slice) else rows)

    def means(self) -> FloatArray:
        """The mean loss over the steps of each row; NaN if no step took a gradient."""
        packed, n = self._packed, len(self._packed.steps)
        if not self._observed:
            return np.full(n, math.nan)
        observed = torch.cat(self._observed)
        if self._by_hand:  # every example of every step, in the order of the packed minibatches
            losses = numbers(self._by_hand.losses(observed)) * packed.shares
            sums = np.bincount(packed.owners, losses, n)
        else:
            sums = np.bincount(np.concatenate(self._rows), numbers(observed), n)
        means: FloatArray = sums / packed.steps
        return means
