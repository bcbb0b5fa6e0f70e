"""The names in a record, and whether a run diverges."""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
"""What is known of a round, by name."""

RECORD_KEYS = (
    *("round", "time", "clients", "steps", "bytes_down", "bytes_up"),
    *("cohort", "per_client", "step_factor", "seconds", "evaluation_seconds"),
)
"""Keys of a record that are not metrics."""
TRAINING_METRICS = (
    *("train_loss", "update_norm", "update_norm_max", "clipped", "epsilon"),
    *("staleness", "staleness_max"),
)
"""Metrics that training gives for nothing: of local steps, of clients' updates, of privacy, of
asynchronous schedules."""


def metrics_of(record: Record) -> dict[str, Any]:
    """The metrics in a record: those that were evaluated, then those of the training.

    >>> metrics_of({"round": 1, "train_loss": 0.5, "seconds": 0.1, "accuracy": 0.9})
    {'accuracy': 0.9, 'train_loss': 0.5}
    """
    training = {name: record[name] for name in TRAINING_METRICS if name in record}
    return evaluated(record) | training


def evaluated(record: Record) -> dict[str, Any]:
    """The metrics in a record that were evaluated, with a transform's own."""
    ours = {*RECORD_KEYS, *TRAINING_METRICS}
    return {name: value for name, value in record.items() if name not in ours}


def is_evaluated(record: Record) -> bool:
    """Whether the model was evaluated after the round."""
    return "evaluation_seconds" in record


def scalars(record: Record) -> dict[str, float]:
    """The numbers in a record, without its round, for logs."""
    left_out = ("round", "cohort", "per_client")
    return {name: value for name, value in record.items() if name not in left_out}


def has_diverged(loss: float, start: float) -> bool:
    """Whether a loss is not finite, or more than ten times that of the start.

    A loss that is zero or negative at the start sets no limit.
    """
    return not math.isfinite(loss) or loss > 10 * start > 0


def monitored_loss(names: Collection[str]) -> str | None:
    """The metric that shows divergence: the loss evaluated on training data, or else the loss."""
    return next((name for name in ("training_loss", "loss") if name in names), None)


class DivergenceMonitor:
    """Compares the loss of each record with that of the start, and warns once.

    The start is the name and value of the loss before training, or else the first loss recorded.
    """

    def __init__(self, start: tuple[str, float] | None, history: Sequence[Record] = ()) -> None:
        self.name: str | None
        self.name, self._first = start or (None, math.nan)
        self._when = "at the start"
        self._train_loss = math.nan
        self._warned = True  # of the rounds before a run was resumed
        self.diverged: str | None = None
        """Why the run counts as diverged; None otherwise."""
        for record in history:
            self.add(record)
            self.suspects(record)
        self._warned = False

    def add(self, record: Record) -> None:
        """Check the record of one round."""
        name = self.name or monitored_loss(record)
        if name is None or name not in record:
            return
        if self.name is None:
            self.name, self._first = name, record[name]
            self._when = f"after round {record['round']}"
        self._check(name, record[name], self._first, record["round"])

    def suspects(self, record: Record) -> bool:
        """Whether to measure a loss, as none is evaluated and the training loss has grown tenfold
        since it was last suspect. That alone proves nothing: cohorts differ.
        """
        if self.name is not None or "train_loss" not in record:
            return False
        loss, known = record["train_loss"], math.isfinite(self._train_loss)
        grown = known and has_diverged(loss, self._train_loss)
        if grown or not known:
            self._train_loss = loss
        return grown

    def measured(self, loss: float, start: float, round: int) -> None:
        """Check a loss that was measured after a round, and before training."""
        self._check("loss", loss, start, round)

    def _check(self, name: str, loss: float, first: float, round: int) -> None:
        self.diverged = None
        if has_diverged(loss, first):
            was = f"was {first:.4g} {self._when}"
            self.diverged = f"the {name} is {loss:.4g} after round {round}, and {was}"
        if self.diverged and not self._warned:
            warnings.warn(f"training diverges: {self.diverged}. Lower the step size.", stacklevel=4)
            self._warned = True
