r"""Metrics of a set of examples that are not means over them: AUC, F1, and those of torchmetrics.

In the metric over all clients, each example of client i has the weight :math:`w_i / n_i`, as in a
metric that is a mean; in the metric of one client all examples have the same weight.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import IGNORED, FloatArray, IntArray, expect
from fedshuffle.errors import FedShuffleError

Compute = Callable[[Tensor, Tensor, FloatArray], float]
"""``compute(outputs, targets, weights)`` of a set of examples.

Where there is a class per token, the tokens are the examples, and those of class -100 are left out.
"""


@dataclass(frozen=True)
class SetMetric:
    """A metric that needs all examples of a client, or of all clients, at once.

    >>> spread = SetMetric("spread", lambda outputs, targets, weights: float(outputs.std()), False)
    >>> spread.name
    'spread'
    """

    name: str
    compute: Compute
    higher_is_better: bool
    undefined: Callable[[Tensor], str | None] | None = None
    """Why the metric is undefined for examples with these targets; None where it is defined."""

    def __post_init__(self) -> None:
        check_metric(self.name, self.higher_is_better, self.compute)

    def why_undefined(self, targets: Tensor) -> str:
        """Why the metric is undefined for these targets; empty where it is defined."""
        return (self.undefined(targets) if self.undefined else None) or ""

    def evaluate(self, outputs: Tensor, targets: Tensor, weights: FloatArray) -> tuple[float, str]:
        """The metric, or NaN and why it is undefined; NaN without a reason for NaN outputs."""
        if why := self.why_undefined(targets):
            return np.nan, why
        if bool(outputs.isnan().any()):
            return np.nan, ""
        value = float(self.compute(outputs, targets, weights))
        return value, "it cannot be computed from its examples" if np.isnan(value) else ""


def check_metric(name: Any, higher_is_better: Any, *functions: Any) -> None:
    """Refuse the parts of a metric that are of the wrong type."""
    expect(name, str, "the name of a metric")
    expect(higher_is_better, bool, f"higher_is_better of metric {name!r}")
    for function in functions:
        if not callable(function):
            raise FedShuffleError(f"metric {name!r} needs a function, but got {function!r}.")


def from_torchmetrics(
    metric: Any, name: str | None = None, higher_is_better: bool | None = None
) -> SetMetric:
    """A metric with ``update``, ``compute`` and ``reset``, such as those of torchmetrics.

    It gets all outputs and targets of a set at once, on the CPU. By default the name is that of its
    class in snake case, and ``higher_is_better`` its own attribute.
    """
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
    if higher_is_better is None:
        higher_is_better = getattr(metric, "higher_is_better", None)
    if not isinstance(higher_is_better, bool):
        raise FedShuffleError(
            f"metric {name!r} does not say whether higher is better. Write"
            " from_torchmetrics(metric, higher_is_better=True), or False."
        )

    def compute(outputs: Tensor, targets: Tensor, weights: FloatArray) -> float:
        if not np.allclose(weights, weights[0], rtol=1e-9, atol=0):
            raise FedShuffleError(
                f"metric {name!r} gives every example the same weight, but the federation does not."
                " Evaluate on a federation that is weighted by size, or use another metric."
            )
        metric.reset()
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                metric.update(outputs, targets)
                value = metric.compute()
        finally:
            metric.reset()
        # Where one class is missing, torchmetrics warns and gives 0, which is not a measurement.
        if any(re.search(r"No (positive|negative) samples", str(note.message)) for note in notes):
            return float("nan")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise FedShuffleError(
                f"metric {name!r} gave {value.numel()} numbers, not one: choose an average."
            )
        return float(value)

    return SetMetric(name, compute, higher_is_better)


def is_torchmetric(value: object) -> bool:
    """Whether something can be updated, computed and reset."""
    parts = ("update", "compute", "reset")
    return not isinstance(value, type) and all(callable(getattr(value, k, None)) for k in parts)


def flatten(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, IntArray]:
    """Outputs and targets on the CPU with tokens as examples, and the number of each example's."""
    outputs, targets = outputs.cpu(), targets.cpu()
    tokens = targets.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape
    if targets.is_floating_point() or not (tokens or targets.ndim == 1):
        return outputs, targets, np.ones(len(targets), np.int64)
    valid = targets != IGNORED
    counts: IntArray = valid.reshape(len(targets), -1).sum(1).numpy()
    return (outputs.movedim(1, -1) if tokens else outputs)[valid], targets[valid], counts


def binary_auc(positive: Any, scores: FloatArray, weights: FloatArray) -> float:
    """The probability that a positive example has a larger score than a negative one.

    Equal scores count one half, and examples are drawn by their weights.

        >>> binary_auc(np.array([False, True, True]), np.array([0.1, 0.4, 0.1]), np.ones(3))
        0.75
    """
    order = np.argsort(scores)
    ranked = scores[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    weights, positive = weights[order], positive[order]
    up = np.add.reduceat(np.where(positive, weights, 0.0), starts)
    down = np.add.reduceat(np.where(positive, 0.0, weights), starts)
    below = np.cumsum(down) - down / 2
    return float(up @ below / (up.sum() * down.sum()))


def f1_scores(classes: IntArray, predicted: IntArray, weights: FloatArray) -> FloatArray:
    """``2 TP / (2 TP + FP + FN)`` of every class; NaN where it is neither there nor predicted.

    >>> f1_scores(np.array([0, 1, 1]), np.array([0, 1, 0]), np.ones(3)).round(2).tolist()
    [0.67, 0.67]
    """
    number = max(2, 1 + int(max(classes.max(), predicted.max())))
    right = np.bincount(classes, weights * (classes == predicted), number)
    sums = np.bincount(classes, weights, number) + np.bincount(predicted, weights, number)
    scores: FloatArray = np.full(number, np.nan)
    np.divide(2 * right, sums, out=scores, where=sums > 0)
    return scores


def _auc(outputs: Tensor, targets: Tensor, weights: FloatArray) -> float:
    """The area under the ROC curve; for more than two classes the mean of each against the rest.

    The mean is over the classes that the examples have.
    """
    scores, classes = _scores_and_classes(outputs, targets, "auc")
    if scores.shape[1] == 1:
        return binary_auc(classes == 1, scores[:, 0], weights)
    if scores.shape[1] == 2:
        return binary_auc(classes == 1, scores[:, 1] - scores[:, 0], weights)
    shares = torch.from_numpy(scores).softmax(1).numpy()
    areas = [binary_auc(classes == k, shares[:, k], weights) for k in np.unique(classes)]
    return float(np.mean(areas))


def _f1(outputs: Tensor, targets: Tensor, weights: FloatArray, name: str) -> float:
    """F1 of class 1, or for ``f1-macro`` the mean over the classes that are there or predicted."""
    scores, classes = _scores_and_classes(outputs, targets, name)
    if name == "f1" and scores.shape[1] > 2:
        raise FedShuffleError("f1 is for two classes, 0 and 1. For more take 'f1-macro'.")
    one = (scores[:, 0] > 0).astype(np.int64)
    each = f1_scores(classes, one if scores.shape[1] == 1 else scores.argmax(1), weights)
    return float(each[1] if name == "f1" else np.nanmean(each))


def _scores_and_classes(outputs: Tensor, targets: Tensor, name: str) -> tuple[FloatArray, IntArray]:
    """Outputs with a column per class, or one column for class 1 against 0; and the classes."""
    scores = outputs.double().reshape(len(outputs), -1).numpy()
    classes = targets.reshape(len(targets), -1).numpy()
    if outputs.ndim > 2 or classes.shape[1] != 1 or len(scores) != len(classes):
        raise FedShuffleError(
            f"{name} needs outputs (batch, classes), or one for class 1 against class 0, and a"
            f" class for every example, but there are outputs {tuple(outputs.shape)} and targets"
            f" {tuple(targets.shape)}."
        )
    whole = classes[:, 0].astype(np.int64)
    number = max(2, scores.shape[1])
    bad = classes[(classes[:, 0] != whole) | (whole < 0) | (whole >= number), 0]
    if bad.size:
        raise FedShuffleError(
            f"{name} knows classes 0 to {number - 1} here, but a target is {bad[0]}."
        )
    return scores, whole


def _one_class(targets: Tensor) -> str | None:
    return "all its examples are of one class" if len(torch.unique(targets)) < 2 else None


def _no_positive(targets: Tensor) -> str | None:
    return None if bool((targets == 1).any()) else "it has no example of class 1"


NAMED = {
    "auc": SetMetric("auc", _auc, True, _one_class),
    "f1": SetMetric("f1", partial(_f1, name="f1"), True, _no_positive),
    "f1-macro": SetMetric("f1-macro", partial(_f1, name="f1-macro"), True),
}
"""Metrics of sets by name."""
