"""Losses of the form ``loss(model, *fields)``, the mean over a minibatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from fedshuffle.errors import FedShuffleError

Each = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""``each(outputs, targets)``: one value per example, or a row of values per example, such as one
per token; or a pair of such values and of how often each of them counts.
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

    def __call__(self, model: nn.Module, *fields: Tensor) -> Tensor:
        outputs, targets = predict(model, fields)
        if self.mean is not None:
            return self.mean(outputs, targets)
        found = self.each(outputs, targets)
        if isinstance(found, Tensor):
            return found.mean()
        values, counts = found
        return (values * counts).sum() / counts.sum()


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


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # else one would be stretched to the other in silence
        raise FedShuffleError(
            f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape"
            f" {tuple(targets.shape)}. Reshape the targets."
        )
    return 0.5 * (outputs - targets).reshape(len(outputs), -1).square().sum(1)


cross_entropy = MeanLoss(_cross_entropies, functional.cross_entropy)
"""Mean cross-entropy of the model's logits: outputs (batch, classes) and a class per example, or
outputs (batch, classes, time) and a class per token, where -100 does not count.
"""

squared_error = MeanLoss(_squared_errors)
"""Mean over the examples of half the squared distance to the target."""
