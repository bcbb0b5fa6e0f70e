"""Metrics by name or your own: means over examples, and functions of a whole set of examples."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.losses import Each, MeanLoss, cross_entropy, which_count


@dataclass(frozen=True)
class Metric:
    """A metric that is a mean over examples: its name, a value per example, and its direction.

    >>> Metric("far", lambda outputs, targets: (outputs - targets).abs() > 1, False).name
    'far'
    """

    name: str
    each: Each
    """``each(outputs, targets)``: the values (see :data:`fedshuffle.losses.Each`)."""
    higher_is_better: bool
    finish: Callable[[FloatArray], FloatArray] = lambda means: means
    """The metric as a function of an array of means; by default the means themselves."""

    def __post_init__(self) -> None:
        _check(self.name, self.higher_is_better, self.each, self.finish)

    def sums(self, outputs: Tensor, targets: Tensor) -> FloatArray:
        """For each example the sum of its values, and their number."""
        result, examples = self.each(outputs, targets), len(targets)
        values, counts = result if isinstance(result, tuple) else (result, None)
        if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != examples:
            raise FedShuffleError(
                f"metric {self.name!r} gave {shape(values)} for {examples} examples: return one"
                " value for each of them, not their mean."
            )
        table = values.cpu().double().reshape(examples, -1)
        weights = 1 if counts is None else counts.cpu().double().reshape(table.shape)
        times = torch.ones_like(table) * weights
        sums = (table * times).where(times != 0, 0.0).sum(1)
        return torch.stack([sums, times.sum(1)]).numpy()


@dataclass(frozen=True)
class SetMetric:
    """A metric that needs all examples of a client, or of all clients, at once.

    >>> spread = SetMetric("spread", lambda outputs, targets, weights: float(outputs.std()), False)
    >>> spread.name
    'spread'
    """

    name: str
    compute: Callable[[Tensor, Tensor, FloatArray], float]
    """``compute(outputs, targets, weights)`` of a set of examples: all those of one client, with
    equal weights, or those of all clients, with ``w_i / n_i`` for an example of client i. Where
    there is a class per token, the tokens are the examples, and those of class -100 are left out.
    """
    higher_is_better: bool
    undefined: Callable[[Tensor], str | None] = lambda targets: None
    """Why the metric is undefined for examples with these targets; None where it is defined."""

    def __post_init__(self) -> None:
        _check(self.name, self.higher_is_better, self.compute, self.undefined)

    def evaluate(self, outputs: Tensor, targets: Tensor, weights: FloatArray) -> tuple[float, str]:
        """The metric, or NaN and why it is undefined; NaN without a reason for NaN outputs."""
        if why := self.undefined(targets):
            return np.nan, why
        if bool(outputs.isnan().any()):
            return np.nan, ""
        value = float(self.compute(outputs, targets, weights))
        return value, "it cannot be computed from its examples" if np.isnan(value) else ""


def _check(name: Any, higher_is_better: Any, *functions: Any) -> None:
    """Refuse the parts of a metric that are of the wrong type."""
    expect(name, str, "the name of a metric")
    expect(higher_is_better, bool, f"higher_is_better of metric {name!r}")
    for function in functions:
        if not callable(function):
            raise FedShuffleError(f"metric {name!r} needs a function, but got {function!r}.")


def get(metric: Any, loss: Loss | None) -> Metric | SetMetric:
    """A metric by its name; a loss that shows no values per example is its own ``each``."""
    if isinstance(metric, Metric | SetMetric):
        return metric
    parts = [getattr(metric, name, None) for name in ("update", "compute", "reset")]
    if all(map(callable, parts)) and not isinstance(metric, type):
        return from_torchmetrics(metric)
    if callable(metric):
        raise FedShuffleError(
            "a metric is a function alone. Write Metric(name, function, higher_is_better=...)."
        )
    expect(metric, str, "metric")
    if metric == "loss":
        each = loss.each if isinstance(loss, MeanLoss) else loss or _missing_loss
        return Metric("loss", each, higher_is_better=False)
    if found := re.fullmatch(r"top-([1-9][0-9]*)", metric):
        return Metric(metric, partial(top, k=int(found[1])), higher_is_better=True)
    if metric not in _NAMED:
        raise unknown("metric", metric, {*_NAMED, "loss", "top-1", "top-5"})
    return _NAMED[metric]


def from_torchmetrics(
    metric: Any, name: str | None = None, higher_is_better: bool | None = None
) -> SetMetric:
    """A metric with ``update``, ``compute`` and ``reset``, such as those of torchmetrics.

    It gets all outputs and targets of a set at once, on the CPU. By default the name is that of its
    class in snake case, and ``higher_is_better`` its own attribute.

    >>> class MeanOutput:
    ...     higher_is_better = True
    ...     def reset(self): self.values = []
    ...     def update(self, outputs, targets): self.values.append(float(outputs.mean()))
    ...     def compute(self): return sum(self.values)
    >>> from_torchmetrics(MeanOutput()).name
    'mean_output'
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


def _missing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise FedShuffleError(
        "the metric 'loss' needs the loss: give loss=..., such as losses.cross_entropy."
    )


def top(outputs: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Whether the target is among the k classes with the largest outputs, and whether it counts.

    Among equal outputs the first counts as largest. NaN counts as larger than any number, so that a
    diverged model is right about nothing.
    """
    fits = isinstance(outputs, Tensor) and outputs.ndim > 1 and not targets.is_floating_point()
    if not fits or (outputs.shape[0], *outputs.shape[2:]) != targets.shape:
        raise FedShuffleError(
            "accuracy and top-K need outputs (batch, classes) and a class for every example, or"
            " (batch, classes, time) and one for every token, but there are outputs"
            f" {shape(outputs)} and targets {shape(targets)} of {targets.dtype}."
        )
    if k > outputs.shape[1]:
        raise FedShuffleError(f"top-{k} has no meaning for {outputs.shape[1]} classes.")
    counted = which_count(targets)
    right = (targets.long() * counted).unsqueeze(1)
    own = outputs.gather(1, right)
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    earlier = classes.reshape(-1, *[1] * (outputs.ndim - 2)) < right
    ahead = ~(outputs <= own) | ((outputs == own) & earlier)
    return ahead.sum(1) < k, counted


def shape(value: Any) -> object:
    """The shape of a tensor, or the type of anything else, for a message."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def flatten(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, IntArray]:
    """Outputs and targets on the CPU with tokens as examples, and the number of each example's."""
    outputs, targets = outputs.cpu(), targets.cpu()
    tokens = targets.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape
    if targets.is_floating_point() or not (tokens or targets.ndim == 1):
        return outputs, targets, np.ones(len(targets), np.int64)
    valid = which_count(targets)
    counts: IntArray = valid.reshape(len(targets), -1).sum(1).numpy()
    return (outputs.movedim(1, -1) if tokens else outputs)[valid], targets[valid], counts


def _auc(outputs: Tensor, targets: Tensor, weights: FloatArray) -> float:
    """The probability that a positive example has a larger score than a negative one.

    Equal scores count one half, and examples are drawn by their weights. For more than two classes
    it is the mean of each against the rest, over the classes that the examples have.
    """
    scores, classes = _scores_and_classes(outputs, targets, "auc")
    if scores.shape[1] <= 2:  # a score for class 1, or one for each class
        against = [(classes == 1, np.diff(scores, prepend=0)[:, -1])]
    else:
        shares = torch.from_numpy(scores).softmax(1).numpy()
        against = [(classes == k, shares[:, k]) for k in np.unique(classes)]
    areas = []
    for positive, score in against:
        _, rank = np.unique(score, return_inverse=True)
        up, down = np.bincount(rank, weights * positive), np.bincount(rank, weights * ~positive)
        areas.append(up @ (np.cumsum(down) - down / 2) / (up.sum() * down.sum()))
    return float(np.mean(areas))


def _f1(outputs: Tensor, targets: Tensor, weights: FloatArray, name: str) -> float:
    """``2 TP / (2 TP + FP + FN)`` of class 1; f1-macro: its mean over classes seen or predicted."""
    scores, classes = _scores_and_classes(outputs, targets, name)
    number = max(2, scores.shape[1])
    if name == "f1" and number > 2:
        raise FedShuffleError("f1 is for two classes, 0 and 1. For more take 'f1-macro'.")
    predicted = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(np.int64)
    right = np.bincount(classes, weights * (classes == predicted), number)
    found = np.bincount(classes, weights, number) + np.bincount(predicted, weights, number)
    used = found > 0 if name == "f1-macro" else np.arange(number) == 1
    return float(np.mean(2 * right[used] / found[used]))


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


_NAMED: dict[str, Metric | SetMetric] = {
    "accuracy": Metric("accuracy", partial(top, k=1), True),
    "perplexity": Metric("perplexity", cross_entropy.each, False, finish=np.exp),
    "auc": SetMetric(
        "auc",
        _auc,
        True,
        lambda y: "all its examples are of one class" if len(torch.unique(y)) < 2 else None,
    ),
    "f1": SetMetric(
        "f1",
        partial(_f1, name="f1"),
        True,
        lambda y: None if bool((y == 1).any()) else "it has no example of class 1",
    ),
    "f1-macro": SetMetric("f1-macro", partial(_f1, name="f1-macro"), True),
}
