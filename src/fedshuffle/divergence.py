"""When training has diverged, by its loss; an update that is not finite is noticed before that."""

from __future__ import annotations

import math
from collections.abc import Collection

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
