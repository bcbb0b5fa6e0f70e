"""Divergence by the loss; an update that is not finite is an error before that."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

FACTOR = 10.0
"""A loss this many times that of the start counts as divergence."""


def has_diverged(loss: float, start: float) -> bool:
    """Whether a loss is not finite, or more than :data:`FACTOR` times that of the start.

    A loss that is zero or negative at the start sets no limit.
    """
    return not math.isfinite(loss) or loss > FACTOR * start > 0


def monitored_loss(names: Collection[str]) -> str | None:
    """The metric that shows divergence: the loss on training data, or else the loss."""
    return next((name for name in ("train_loss", "loss") if name in names), None)


class DivergenceMonitor:
    """Compares the loss of each record with that of the start, and warns once.

    The start is the name and value of the loss before training, or else the first loss recorded.
    """

    def __init__(
        self, start: tuple[str, float] | None, history: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.name: str | None
        self.name, self._first = start or (None, math.nan)
        self._when = "at the start"
        self._warned = True  # about the rounds before a run was resumed
        self.diverged: str | None = None
        """Why the run counts as diverged; None otherwise."""
        for record in history:
            self.add(record)
        self._warned = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Check the record of one round."""
        name = self.name or monitored_loss(record)
        if name is None or name not in record:
            return
        loss, when = record[name], f"after round {record['round']}"
        if self.name is None:
            self.name, self._first, self._when = name, loss, when
        self.diverged = None
        if has_diverged(loss, self._first):
            was = f"was {self._first:.4g} {self._when}"
            self.diverged = f"the {name} is {loss:.4g} {when}, and {was}"
        if self.diverged and not self._warned:
            warnings.warn(f"training diverges: {self.diverged}. Lower the step size.", stacklevel=3)
            self._warned = True
