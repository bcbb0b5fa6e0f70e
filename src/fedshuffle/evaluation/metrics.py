"""Metrics that are means over examples, by name or your own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import IGNORED, FloatArray, expect
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.evaluation import set_metrics
from fedshuffle.evaluation.set_metrics import SetMetric, check_metric
from fedshuffle.losses import Each, MeanLoss, cross_entropy


@dataclass(frozen=True)
class Metric:
    """A metric that is a mean over examples: its name, a value per example, and its direction.

    >>> Metric("far", lambda outputs, targets: (outputs - targets).abs() > 1, False).name
    'far'
    """

    name: str
    each: Each
    """``each(outputs, targets)``: one value per example, or a row of values per example, such as
    one per token; or a pair of values and their weights."""
    higher_is_better: bool
    finish: Callable[[FloatArray], FloatArray] | None = None
    """The metric as a function of an array of means; by default the means themselves."""

    def __post_init__(self) -> None:
        check_metric(self.name, self.higher_is_better, self.each, self.finish or np.exp)

    def finished(self, means: FloatArray) -> FloatArray:
        """The metric for each of these means."""
        return means if self.finish is None else self.finish(means)


def worst(clients: FloatArray, higher_is_better: bool) -> FloatArray:
    """The worst tenth of these values, rounded up; NaN is worse than all.

    >>> worst(np.arange(11.0), higher_is_better=False)
    array([ 9., 10.])
    """
    order = np.argsort(-clients if higher_is_better else clients)  # NaN comes last
    return clients[order[len(clients) - -(-len(clients) // 10) :]]


def get(metric: Any, loss: Loss | None) -> Metric | SetMetric:
    """A metric by its name; a loss that shows no values per example is its own ``each``."""
    if isinstance(metric, Metric | SetMetric):
        return metric
    if set_metrics.is_torchmetric(metric):
        return set_metrics.from_torchmetrics(metric)
    if callable(metric):
        raise FedShuffleError(
            "a metric is a function alone. Write Metric(name, function, higher_is_better=...)."
        )
    expect(metric, str, "metric")
    if metric == "loss":
        each = loss.each if isinstance(loss, MeanLoss) else loss or missing_loss
        return Metric("loss", each, higher_is_better=False)
    if top := re.fullmatch(r"top-([1-9][0-9]*)", metric):
        return Metric(metric, Top(int(top[1])), higher_is_better=True)
    if metric not in _NAMED:
        raise unknown("metric", metric, {*_NAMED, "loss", "top-1", "top-5"})
    return _NAMED[metric]


def missing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Stand in for a loss that was not given."""
    raise FedShuffleError(
        "the metric 'loss' needs the loss: give loss=..., such as losses.cross_entropy."
    )


@dataclass(frozen=True)
class Top:
    """Whether the target is among the k classes with the largest outputs.

    Among equal outputs the first counts as largest. NaN counts as larger than any number, so that a
    diverged model is right about nothing.

        >>> scores = torch.tensor([[0.1, 0.7, 0.2], [0.1, 0.7, 0.2], [0.1, 0.7, 0.2]])
        >>> Top(2)(scores, torch.tensor([0, 1, 2]))[0].tolist()
        [False, True, True]
    """

    k: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if (
            not isinstance(outputs, Tensor)
            or targets.is_floating_point()
            or outputs.ndim < 2
            or (outputs.shape[0], *outputs.shape[2:]) != targets.shape
        ):
            raise FedShuffleError(
                "accuracy and top-K need outputs (batch, classes) and a class for every example, or"
                " (batch, classes, time) and one for every token, but there are outputs"
                f" {shape(outputs)} and targets {shape(targets)} of {targets.dtype}."
            )
        if self.k > outputs.shape[1]:
            raise FedShuffleError(f"top-{self.k} has no meaning for {outputs.shape[1]} classes.")
        counted = targets != IGNORED
        right = (targets * counted).long().unsqueeze(1)
        own = outputs.gather(1, right)
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        earlier = classes.reshape(-1, *[1] * (outputs.ndim - 2)) < right
        ahead = ~(outputs <= own) | ((outputs == own) & earlier)
        return ahead.sum(1) < self.k, counted


def shape(value: Any) -> object:
    """The shape of a tensor, or the type of anything else, for a message."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


_NAMED: dict[str, Metric | SetMetric] = {
    "accuracy": Metric("accuracy", Top(1), higher_is_better=True),
    "perplexity": Metric("perplexity", cross_entropy.each, higher_is_better=False, finish=np.exp),
    **set_metrics.NAMED,
}
