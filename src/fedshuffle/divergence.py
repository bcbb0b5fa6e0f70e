"""When training has diverged, by its loss; an update that is not finite is noticed before that."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any, final

FACTOR = 10.0
"""A loss this many times that of the start counts as divergence."""


def has_diverged(loss: float, start: float) -> bool:
    """Whether a loss is not finite, or more than :data:`FACTOR` times that of the start.

    A loss that is zero or negative at the start sets no limit.

    >>> has_diverged(1396.0, 0.69), has_diverged(2.0, 0.69), has_diverged(float("nan"), -1.0)
    (True, False, True)
    """
    return not math.isfinite(loss) or loss > FACTOR * start > 0


def watched_loss(names: Collection[str]) -> str | None:
    """The metric that tells: the loss on training data if it is evaluated, else any loss.

    >>> watched_loss(["accuracy", "loss", "train_loss"]), watched_loss(["accuracy"])
    ('train_loss', None)
    """
    return next((name for name in ("train_loss", "loss") if name in names), None)


@final
class Watch:
    """Whether the loss of the last record that has one shows that training has diverged.

    Args:
        start: the name and the value of the loss before training; if they are not known, those of
            the first record take their place.
    """

    def __init__(self, start: tuple[str, float] | None) -> None:
        self._name: str | None = start[0] if start else None
        self._first = start[1] if start else math.nan
        self._when = "at the start"
        self._warned = False
        self.diverged: str | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Look at another record, in which nothing need be evaluated."""
        name = self._name or watched_loss(record)
        if name is None or name not in record:
            return
        loss, when = record[name], f"after round {record['round']}"
        if self._name is None:
            self._name, self._first, self._when = name, loss, when
        self.diverged = None
        if has_diverged(loss, self._first):
            self.diverged = (
                f"the {name} is {loss:.4g} {when}, and was {self._first:.4g} {self._when}"
            )

    @property
    def blind(self) -> bool:
        """Whether no record had a loss."""
        return self._name is None

    def warn(self) -> None:
        """Say it once, as soon as it is so: whoever looks on need not wait for the end."""
        if self.diverged and not self._warned:
            warnings.warn(f"training diverges: {self.diverged}. Lower the step size.", stacklevel=3)
            self._warned = True
