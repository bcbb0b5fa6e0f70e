"""Metrics by name, and your own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, expect
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.evaluation import set_metrics
from fedshuffle.evaluation.set_metrics import SetMetric
from fedshuffle.losses import IGNORED, Each, MeanLoss, cross_entropy

NAMES = ("accuracy", "auc", "f1", "f1-macro", "loss", "perplexity", "top-1", "top-5")
"""Some names; any number may follow ``top-``."""


@final
@dataclass(frozen=True)
class Metric:
    """A metric of your own: its name, a value per example, and which end is the good one.

    >>> Metric("far", lambda outputs, targets: (outputs - targets).abs() > 1, False).name
    'far'
    """

    name: str
    each: Each
    """``each(outputs, targets)``: one value per example, or a row of them per example (one per
    token, say), which count alike; or a pair of values and of how often each counts."""
    higher_is_better: bool
    finish: Callable[[FloatArray], FloatArray] | None = None
    """What turns a mean into the metric, given an array of means; by default it stays."""

    def __post_init__(self) -> None:
        expect(self.name, str, "the name of a metric")
        expect(self.higher_is_better, bool, f"higher_is_better of metric {self.name!r}")
        for part in (self.each, self.finish or np.exp):
            if not callable(part):
                raise FedShuffleError(f"metric {self.name!r} is given {part!r}, no function.")

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
    if metric == "perplexity":
        return Metric("perplexity", cross_entropy.each, higher_is_better=False, finish=np.exp)
    if metric == "accuracy":
        return Metric("accuracy", Top(1), higher_is_better=True)
    if top := re.fullmatch(r"top-([1-9][0-9]*)", metric):
        return Metric(metric, Top(int(top[1])), higher_is_better=True)
    if (over_sets := set_metrics.named(metric)) is not None:
        return over_sets
    raise unknown("metric", metric, NAMES)


def missing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Stands for the loss that is yet to be given."""
    raise FedShuffleError(
        "the metric 'loss' needs the loss: give loss=..., such as losses.cross_entropy."
    )


@final
@dataclass(frozen=True)
class Top:
    """Whether the target is among the k classes with the largest outputs.

    Of equal outputs the first counts as the largest. NaN counts as larger than any number, so that
    a model that has diverged is right about nothing.

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
    """What to call a value in a message."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
