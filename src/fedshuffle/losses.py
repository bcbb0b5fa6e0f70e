"""Losses of the form ``loss(model, *fields)``, the mean over a minibatch.

A client's objective is its loss over all its examples at once. Where these are too many for one
batch, the means over several are put together by the number of values in each. That is the number
of examples, unless the loss has a method ``counted(model, *fields)`` that gives another, such as
the number of labels that are not padding.

    >>> import torch
    >>> def per_token(model, tokens, labels):
    ...     return functional.cross_entropy(model(tokens), labels, ignore_index=0)
    >>> per_token.counted = lambda model, tokens, labels: (labels != 0).sum()
    >>> counted(per_token, nn.Identity(), [torch.zeros(2, 3), torch.tensor([[4, 5, 0], [6, 0, 0]])])
    3.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

from fedshuffle.errors import FedShuffleError

Each = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""``each(outputs, targets)``: one value per example, or a row of values per example, such as one
per token; or a pair of such values and of how often each of them counts, which must not depend on
the outputs.
"""

IGNORED = -100
"""The class that stands for no target, as in torch: such entries do not count."""


@final
@dataclass(frozen=True)
class MeanLoss:
    """The mean over a minibatch of a function of the model's outputs and the targets.

    The last field holds the targets, the model is given all the others. Any function of the model
    and the fields will do for training. But of this form evaluation can take the values one by
    one, and so give every client its own loss in large batches.

        >>> import torch
        >>> absolute = MeanLoss(lambda outputs, targets: (outputs - targets).abs().sum(1))
        >>> float(absolute(nn.Identity(), torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])))
        1.5
    """

    each: Each
    mean: Callable[[Tensor, Tensor], Tensor] | None = None
    """The mean of the same values, if there is a faster way to it."""
    counts: Callable[[Tensor], Tensor] | None = None
    """How often each value counts, if that follows from the targets alone: it saves a look at the
    outputs."""

    def __call__(self, model: nn.Module, *fields: Tensor) -> Tensor:
        outputs, targets = predict(model, fields)
        if self.mean is not None:
            return self.mean(outputs, targets)
        found = self.each(outputs, targets)
        if isinstance(found, Tensor):
            return found.mean()
        values, counts = found
        total = counts.sum()
        values = (values * counts).where(counts != 0, 0.0)
        return values.sum() / total.where(total != 0, 1)  # zero, where nothing counts

    def counted(self, model: nn.Module, *fields: Tensor) -> float:
        """The number of values that the mean over a minibatch is taken over."""
        if self.counts is not None:
            return float(self.counts(fields[-1]).sum())
        found = self.each(*predict(model, fields))
        return float(len(found) if isinstance(found, Tensor) else found[1].sum())


def tells_counts(loss: object) -> bool:
    """Whether a loss says how many values its mean is taken over."""
    return callable(getattr(loss, "counted", None))


def counted(loss: Any, model: nn.Module, fields: Sequence[Tensor]) -> float:
    """How much the loss of a minibatch counts beside that of others."""
    if not tells_counts(loss):
        return float(len(fields[0]))
    found = float(loss.counted(model, *fields))
    if not 0 <= found < math.inf:
        raise FedShuffleError(f"the loss's counted(...) gave {found}: return a number from 0 on.")
    return found


def predict(model: nn.Module, fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What the model makes of all fields but the last, and the last: the targets."""
    if len(fields) < 2:
        raise FedShuffleError(
            f"the examples have {len(fields)} field, but this needs inputs and targets. Give both,"
            " or a loss(model, *fields) of your own."
        )
    return model(*fields[:-1]), fields[-1]


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    values = functional.cross_entropy(outputs, targets, reduction="none")
    if targets.is_floating_point():  # a probability for every class
        return values
    return values, targets != IGNORED


def _mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return functional.cross_entropy(outputs, targets)
    total = functional.cross_entropy(outputs, targets, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)  # zero, where nothing counts


def _classes_count(targets: Tensor) -> Tensor:
    return targets.new_ones(len(targets)) if targets.is_floating_point() else targets != IGNORED


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # else one would be stretched to the other in silence
        raise FedShuffleError(
            f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape"
            f" {tuple(targets.shape)}. Reshape the targets."
        )
    return 0.5 * (outputs - targets).reshape(len(outputs), -1).square().sum(1)


cross_entropy = MeanLoss(_cross_entropies, _mean_cross_entropy, _classes_count)
"""Mean cross-entropy of the model's logits: outputs (batch, classes) and a class per example, or
outputs (batch, classes, time) and a class per token, where -100 does not count. It is zero for a
minibatch in which no class counts.
"""

squared_error = MeanLoss(_squared_errors)
"""Mean over the examples of half the squared distance to the target."""
