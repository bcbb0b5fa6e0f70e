r"""Metrics of a set of examples that are no means over them: AUC, F1, and those of torchmetrics.

The examples of client i count :math:`w_i / n_i` each in the metric over the whole, as they do where
a metric is a mean, and alike in that of the client.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.errors import FedShuffleError
from fedshuffle.losses import IGNORED

Compute = Callable[[Tensor, Tensor, FloatArray], float]
"""``compute(outputs, targets, weights)`` of a set of examples; weights say how often each counts.

Where there is a class per token, the tokens are the examples, and those of class -100 are left out.
"""


@final
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
    """Why there is no such number for examples with these targets; None where there is."""

    def __post_init__(self) -> None:
        expect(self.name, str, "the name of a metric")
        expect(self.higher_is_better, bool, f"higher_is_better of metric {self.name!r}")
        if not callable(self.compute):
            raise FedShuffleError(f"metric {self.name!r} is given {self.compute!r}, no function.")


def named(name: str) -> SetMetric | None:
    """One of the metrics here by its name.

    >>> named("f1").higher_is_better, named("accuracy")
    (True, None)
    """
    match name:
        case "auc":
            return SetMetric("auc", _auc, True, _one_class)
        case "f1":
            return SetMetric("f1", _binary_f1, True, _no_positive)
        case "f1-macro":
            return SetMetric("f1-macro", _macro_f1, True)
    return None


def from_torchmetrics(
    metric: Any, name: str | None = None, higher_is_better: bool | None = None
) -> SetMetric:
    """A metric with ``update``, ``compute`` and ``reset``, such as those of torchmetrics.

    Args:
        metric: the object; it gets the outputs and targets of a set at once, on the CPU.
        name: its name in records; that of its class in small letters if none.
        higher_is_better: which end is the good one; what the object itself says if none.
    """
    label = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
    name = label if name is None else name
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
                f"metric {name!r} counts every example alike, but the weights of the federation do"
                " not. Evaluate on a federation that is weighted by size, or use another metric."
            )
        metric.reset()
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                metric.update(outputs, targets)
                found = metric.compute()
        finally:
            metric.reset()
        # Where one class is missing, torchmetrics warns and gives 0, which is no measurement.
        if any(re.search(r"No (positive|negative) samples", str(note.message)) for note in notes):
            return float("nan")
        if isinstance(found, Tensor) and found.numel() != 1:
            raise FedShuffleError(
                f"metric {name!r} gave {found.numel()} numbers, not one: choose an average."
            )
        return float(found)

    return SetMetric(name, compute, higher_is_better)


def is_torchmetric(value: object) -> bool:
    """Whether something can be updated, computed and reset."""
    parts = ("update", "compute", "reset")
    return not isinstance(value, type) and all(callable(getattr(value, k, None)) for k in parts)


# Over the clients of a federation -----------------------------------------------------------------


@final
@dataclass(frozen=True)
class Collected:
    """The outputs and targets of all examples; those of client i begin at ``offsets[i]``."""

    outputs: Tensor
    targets: Tensor
    offsets: IntArray

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor, IntArray]], offsets: IntArray) -> Collected:
        """Those of all batches; the last of a part says how many each of its examples became."""
        if not parts:
            return cls(torch.empty(0), torch.empty(0), offsets)
        outputs, targets, counts = zip(*parts, strict=True)
        ends = np.concatenate([[0], *counts]).cumsum()
        return cls(torch.cat(outputs), torch.cat(targets), ends[offsets])


def flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, IntArray]:
    """Outputs and targets on the CPU, tokens as examples; and how many each example became."""
    outputs, targets = outputs.cpu(), targets.cpu()
    tokens = targets.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape
    if targets.is_floating_point() or not (tokens or targets.ndim == 1):
        return outputs, targets, np.ones(len(targets), np.int64)
    kept = targets != IGNORED
    counts: IntArray = kept.reshape(len(targets), -1).sum(1).numpy()
    return (outputs.movedim(1, -1) if tokens else outputs)[kept], targets[kept], counts


def compute(
    metric: SetMetric, outputs: Tensor, targets: Tensor, weights: FloatArray
) -> tuple[float, str]:
    """The metric; NaN where it is undefined, and why: a model that has diverged is no reason."""
    if why := why_undefined(metric, targets):
        return np.nan, why
    if bool(outputs.isnan().any()):
        return np.nan, ""
    value = float(metric.compute(outputs, targets, weights))
    return value, "it cannot be computed from its examples" if np.isnan(value) else ""


def why_undefined(metric: SetMetric, targets: Tensor) -> str:
    return (metric.undefined(targets) if metric.undefined else None) or ""


# By name ----------------------------------------------------------------------------------------


def _auc(outputs: Tensor, targets: Tensor, weights: FloatArray) -> float:
    """The area under the ROC curve; of more than two classes the mean of each against the rest.

    A class that none of the examples has is left out of that mean.
    """
    table, classes = _table(outputs, targets, "auc")
    if table.shape[1] == 1:
        return binary_auc(classes == 1, table[:, 0], weights)
    if table.shape[1] == 2:
        return binary_auc(classes == 1, table[:, 1] - table[:, 0], weights)
    shares = torch.from_numpy(table).softmax(1).numpy()
    areas = [binary_auc(classes == k, shares[:, k], weights) for k in np.unique(classes)]
    return float(np.mean(areas))


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


def _binary_f1(outputs: Tensor, targets: Tensor, weights: FloatArray) -> float:
    table, classes = _table(outputs, targets, "f1")
    if table.shape[1] > 2:
        raise FedShuffleError("f1 is for two classes, 0 and 1. For more take 'f1-macro'.")
    return float(f1_scores(classes, _predicted(table), weights)[1])


def _macro_f1(outputs: Tensor, targets: Tensor, weights: FloatArray) -> float:
    """The mean of F1 over the classes that are there or predicted."""
    table, classes = _table(outputs, targets, "f1-macro")
    return float(np.nanmean(f1_scores(classes, _predicted(table), weights)))


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


def _predicted(table: FloatArray) -> IntArray:
    best: IntArray = (table[:, 0] > 0).astype(np.int64)
    return best if table.shape[1] == 1 else table.argmax(1)


def _table(outputs: Tensor, targets: Tensor, name: str) -> tuple[FloatArray, IntArray]:
    """Outputs with a column per class, or one column for class 1 against 0; and the classes."""
    table = outputs.double().reshape(len(outputs), -1).numpy()
    classes = targets.reshape(len(targets), -1).numpy()
    if outputs.ndim > 2 or classes.shape[1] != 1 or len(table) != len(classes):
        raise FedShuffleError(
            f"{name} needs outputs (batch, classes), or one for class 1 against class 0, and a"
            f" class for every example, but there are outputs {tuple(outputs.shape)} and targets"
            f" {tuple(targets.shape)}."
        )
    whole = classes[:, 0].astype(np.int64)
    number = max(2, table.shape[1])
    for bad in classes[(classes[:, 0] != whole) | (whole < 0) | (whole >= number), 0][:1].tolist():
        raise FedShuffleError(
            f"{name} knows classes 0 to {number - 1} here, but a target is {bad}."
        )
    return table, whole


def _one_class(targets: Tensor) -> str | None:
    return "all its examples are of one class" if len(torch.unique(targets)) < 2 else None


def _no_positive(targets: Tensor) -> str | None:
    return None if bool((targets == 1).any()) else "it has no example of class 1"
