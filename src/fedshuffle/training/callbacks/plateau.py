"""Callbacks for a metric that no longer improves: stop, or take smaller steps."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedshuffle._arrays import count, expect, number
from fedshuffle.errors import check_known
from fedshuffle.state import State
from fedshuffle.training.callbacks.base import Callback, TrainingContext
from fedshuffle.training.monitoring import Record, is_evaluated, metrics_of

Mode = Literal["min", "max"]


class _Plateau:
    """The best value of a metric, and for how many records it has not improved.

    A function of the records alone, so that a resumed run can replay them.
    """

    def __init__(self, metric: str, patience: int, min_delta: float, mode: Mode) -> None:
        expect(metric, str, "metric")
        self.metric, self.patience = metric, count(patience, "patience")
        self.min_delta = number(min_delta, "min_delta", within="[0, inf)")
        check_known("mode", mode, ["min", "max"])
        self.sign = 1.0 if mode == "min" else -1.0
        self.best = math.inf
        self.waited = 0
        self.seen = False

    def reached(self, record: Record) -> bool:
        """Whether the metric has not improved in ``patience`` records that hold it; counts again
        afterwards.
        """
        if self.metric not in record:
            return False
        self.seen = True
        value = self.sign * record[self.metric]
        if value < self.best - self.min_delta:  # never true of NaN
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        if self.waited < self.patience:
            return False
        self.waited = 0
        return True

    def check(self, record: Record, context: TrainingContext) -> None:
        """Refuse a metric that is neither recorded nor going to be evaluated."""
        names = context.evaluated
        if names is None:  # those of a function are known when it was called
            names = () if is_evaluated(record) else (self.metric,)
        # A round without clients lacks the metrics of the training.
        if record["clients"] and not self.seen:
            check_known("metric", self.metric, {*names, "train_loss", *metrics_of(record)})


@dataclass(eq=False)
class EarlyStopping(Callback):
    """Stop when a metric has not improved in ``patience`` evaluations.

    Args:
        metric: the name of a metric in the records; rounds without it are ignored.
        patience: the number of evaluations without improvement after which to stop.
        min_delta: a change of at most this much is no improvement.
        mode: whether lower (``"min"``) or higher (``"max"``) is better.

    The last model is returned, not the best one.

    >>> stopping = EarlyStopping("accuracy", patience=5, mode="max")
    >>> stopping.patience
    5
    """

    metric: str = "loss"
    patience: int = 10
    min_delta: float = 0.0
    mode: Mode = "min"

    def __post_init__(self) -> None:
        self._plateau = _Plateau(self.metric, self.patience, self.min_delta, self.mode)

    def on_start(self, context: TrainingContext) -> bool:
        self.__post_init__()
        self._context = context
        return any(self._plateau.reached(record) for record in context.history)

    def on_round(self, record: Record, state: State) -> bool:
        self._plateau.check(record, self._context)
        return self._plateau.reached(record)


@dataclass(eq=False)
class ReduceOnPlateau(Callback):
    """Multiply the step size by ``factor`` whenever a metric has not improved in ``patience``
    evaluations.

    The schedule of the run goes on: its step size is multiplied by ``factor`` to the power of the
    number of reductions so far. ``step_factor`` is in the records of the rounds with a smaller
    step size.

    Args:
        metric: the name of a metric in the records; rounds without it are ignored.
        factor: of the step size, between 0 and 1.
        patience: the number of evaluations without improvement after which to reduce.
        min_delta: a change of at most this much is no improvement.
        mode: whether lower (``"min"``) or higher (``"max"``) is better.
        min_factor: where reductions end.

    >>> ReduceOnPlateau("train_loss", factor=0.5, patience=20).step_factor
    1.0
    """

    changes_step_size: ClassVar[bool] = True

    metric: str = "loss"
    factor: float = 0.1
    patience: int = 10
    min_delta: float = 0.0
    mode: Mode = "min"
    min_factor: float = 1e-4

    def __post_init__(self) -> None:
        number(self.factor, "factor", within="(0, 1)")
        number(self.min_factor, "min_factor", within="(0, 1]")
        self._plateau = _Plateau(self.metric, self.patience, self.min_delta, self.mode)
        self.step_factor = 1.0

    def on_start(self, context: TrainingContext) -> None:
        self.__post_init__()
        self._context = context
        for record in context.history:
            self._add(record)

    def on_round(self, record: Record, state: State) -> None:
        self._plateau.check(record, self._context)
        self._add(record)

    def _add(self, record: Record) -> None:
        if self._plateau.reached(record):
            self.step_factor = max(self.min_factor, self.step_factor * self.factor)
