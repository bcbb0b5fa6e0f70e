"""Losses of the form ``loss(model, *fields)``, the mean over a minibatch.

A client's objective is its loss over all its examples at once. The means over several batches are
combined by the number of values in each: the number of examples, unless the loss has a method
``counted(model, *fields)`` that gives another number, such as that of labels that are not padding.

    >>> import torch
    >>> def per_token(model, tokens, labels):
    ...     return functional.cross_entropy(model(tokens), labels, ignore_index=0)
    >>> per_token.counted = lambda model, tokens, labels: (labels != 0).sum()
    >>> counted(per_token, nn.Identity(), [torch.zeros(2, 3), torch.tensor([[4, 5, 0], [6, 0, 0]])])
    3.0
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fedshuffle._arrays import IGNORED
from fedshuffle.errors import FedShuffleError, error_context, one_line

__all__ = [
    "Each",
    "MeanLoss",
    "causal_lm",
    "cross_entropy",
    "sequence_classification",
    "squared_error",
]

Each = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""``each(outputs, targets)``: one value per example, or a row of values per example, such as one
per token; or a pair of such values and their weights, which must not depend on the outputs.
"""


def predict(model: nn.Module, fields: Sequence[Tensor]) -> tuple[Any, Tensor]:
    """The model's outputs for all fields but the last, and the last: the targets."""
    _check_fields(fields)
    return model(*fields[:-1]), fields[-1]


def _check_fields(fields: Sequence[Tensor]) -> None:
    if len(fields) < 2:
        raise FedShuffleError(
            f"the examples have {len(fields)} field, but this needs inputs and targets. Give both,"
            " or your own loss(model, *fields)."
        )


@dataclass(frozen=True)
class MeanLoss:
    """The mean over a minibatch of a function of the model's outputs and the targets.

    The last field holds the targets; the model gets all others. Training takes any function of the
    model and the fields, but this form gives values per example, so that evaluation can compute
    the loss of every client in large batches.

        >>> import torch
        >>> absolute = MeanLoss(lambda outputs, targets: (outputs - targets).abs().sum(1))
        >>> float(absolute(nn.Identity(), torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])))
        1.5
    """

    each: Each
    mean: Callable[[Tensor, Tensor], Tensor] | None = None
    """The mean of the same values, if there is a faster way to compute it."""
    counts: Callable[[Tensor], Tensor] | None = None
    """The weights of the values, if they follow from the last field alone."""
    predict: Callable[[nn.Module, Sequence[Tensor]], tuple[Tensor, Tensor]] = predict
    """Runs the model on the fields: its outputs and the targets. Metrics use it, too."""

    def __call__(self, model: nn.Module, *fields: Tensor) -> Tensor:
        outputs, targets = self.predict(model, fields)
        if self.mean is not None:
            return self.mean(outputs, targets)
        result = self.each(outputs, targets)
        if isinstance(result, Tensor):
            return result.mean()
        values, counts = result
        total = counts.sum()
        values = (values * counts).where(counts != 0, 0.0)
        return values.sum() / total.where(total != 0, 1)  # zero if nothing counts

    def counted(self, model: nn.Module, *fields: Tensor) -> float:
        """The number of values in the mean over a minibatch."""
        if self.counts is not None:
            return float(self.counts(fields[-1]).sum())
        result = self.each(*self.predict(model, fields))
        return float(len(result) if isinstance(result, Tensor) else result[1].sum())


def tells_counts(loss: object) -> bool:
    """Whether a loss gives the number of values in its mean."""
    return callable(getattr(loss, "counted", None))


def counted(loss: Any, model: nn.Module, fields: Sequence[Tensor]) -> float:
    """The number of values in the loss of a minibatch."""
    if not tells_counts(loss):
        return float(len(fields[0]))
    number = float(loss.counted(model, *fields))
    if not 0 <= number < math.inf:
        raise FedShuffleError(f"the loss's counted(...) gave {number}: return a number from 0 on.")
    return number


def which_count(targets: Tensor) -> Tensor:
    """Which classes count. Among bytes, torch would take 156 for -100.

    >>> import torch
    >>> which_count(torch.tensor([156, 0], dtype=torch.uint8)).tolist()
    [True, True]
    """
    return targets.long() != IGNORED


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    values = functional.cross_entropy(outputs, _numbered(outputs, targets), reduction="none")
    return values if targets.is_floating_point() else (values, which_count(targets))  # soft targets


def _mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return functional.cross_entropy(outputs, _numbered(outputs, targets))
    total = functional.cross_entropy(outputs, _numbered(outputs, targets), reduction="sum")
    return total / which_count(targets).sum().clamp(min=1)  # zero if nothing counts


def _mean_next_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same, with the logits as the model made them: no copy, and several times as fast."""
    return _mean_cross_entropy(outputs.transpose(1, 2).flatten(0, 1), targets.flatten())


def _numbered(outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes by numbers of any type, or a share of each class, as torch takes them."""
    if not isinstance(outputs, Tensor):
        raise FedShuffleError(
            f"the model gives {type(outputs).__name__}, and this loss takes logits: use"
            " losses.sequence_classification or losses.causal_lm for a model of transformers."
        )
    if not targets.is_floating_point():
        if targets.shape != (wanted := (*outputs.shape[:1], *outputs.shape[2:])):
            raise FedShuffleError(
                f"classes of shape {tuple(targets.shape)} do not fit outputs of shape"
                f" {tuple(outputs.shape)}: give classes of shape {tuple(wanted)}, one number each."
            )
        return targets.long()
    if targets.shape != outputs.shape:
        raise FedShuffleError(
            f"targets of {targets.dtype} and shape {tuple(targets.shape)} are no classes: convert"
            " them to whole numbers, as by astype(int), or use squared_error for regression."
        )
    return targets


def _classes_count(targets: Tensor) -> Tensor:
    return targets.new_ones(len(targets)) if targets.is_floating_point() else which_count(targets)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # torch would broadcast
        raise FedShuffleError(
            f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape"
            f" {tuple(targets.shape)}. Reshape the targets."
        )
    return 0.5 * (outputs - targets).reshape(len(outputs), -1).square().sum(1)


cross_entropy = MeanLoss(_cross_entropies, _mean_cross_entropy, _classes_count)
"""Mean cross-entropy of logits (batch, classes) and a class per example, or of logits (batch,
classes, time) and a class per token. Class -100 is ignored; if all are, the loss is zero.
"""


def _logits(model: nn.Module, fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The logits of a model of transformers, in single precision at least, and the labels."""
    _check_fields(fields)
    tokens, *mask, labels = fields
    if len(mask) > 1:
        raise FedShuffleError(
            f"the examples have {len(fields)} fields, but this loss takes input_ids, attention_mask"
            " and labels (or no mask). Leave out the others, or write your own loss(model,"
            " *fields)."
        )
    with error_context(
        lambda error: (
            f"the model cannot look up the tokens from {int(tokens.min())} to {int(tokens.max())}"
            f" ({one_line(error)}). Use its own tokenizer, and sequences that are short enough."
        ),
        IndexError,
    ):
        output = model(input_ids=tokens, **({"attention_mask": mask[0]} if mask else {}))
    if not isinstance(logits := getattr(output, "logits", None), Tensor):
        raise FedShuffleError(
            f"the model gives {type(output).__name__}, which has no logits. Use a model of"
            " transformers for this task, or losses.cross_entropy for one that gives a tensor."
        )
    labels = labels if labels.is_floating_point() else labels.long()
    return logits.float() if logits.element_size() == 2 else logits, labels


def _classes(model: nn.Module, fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (batch, classes) and a class for each, or a share of each class."""
    logits, labels = _logits(model, fields)
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    if kind not in (None, "single_label_classification"):
        raise FedShuffleError(
            f"the model is for {kind}, and this loss takes one class per sequence: write your own"
            " loss(model, *fields)."
        )
    if logits.ndim != 2 or logits.shape[1] == 1:  # the loss of one class is zero, whatever it is
        raise FedShuffleError(
            f"the model gives logits of shape {tuple(logits.shape)}, but this loss needs two"
            " classes or more per sequence: set num_labels, or write your own loss(model, *fields)"
            " for regression."
        )
    if labels.shape not in (logits.shape[:1], logits.shape):
        raise FedShuffleError(
            f"labels of shape {tuple(labels.shape)} do not fit {len(logits)} sequences: give one"
            " class for each."
        )
    return logits, labels


def _next_tokens(model: nn.Module, fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits (batch, vocabulary, time) and the token that each should predict; none at the end."""
    logits, labels = _logits(model, fields)
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise FedShuffleError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape"
            f" {tuple(labels.shape)}: this loss takes a language model, and a label per token."
        )
    return logits.transpose(1, 2), functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _next_tokens_count(labels: Tensor) -> Tensor:
    return which_count(labels[:, 1:])


squared_error = MeanLoss(_squared_errors)
"""Mean over the examples of half the squared distance to the target."""

sequence_classification = MeanLoss(
    _cross_entropies, _mean_cross_entropy, _classes_count, predict=_classes
)
"""Mean cross-entropy of a sequence classifier of transformers. Fields: ``input_ids``, perhaps
``attention_mask``, and ``labels``, a class per sequence; class -100 is ignored.
"""

causal_lm = MeanLoss(
    _cross_entropies,
    _mean_next_tokens,
    _next_tokens_count,
    predict=_next_tokens,
)
"""Mean cross-entropy over the tokens that a language model of transformers predicts, each from
those before it. Fields: ``input_ids``, perhaps ``attention_mask``, and ``labels``: the same tokens,
with -100 for those that do not count, such as padding. A client's objective is the mean over all
its tokens.
"""
