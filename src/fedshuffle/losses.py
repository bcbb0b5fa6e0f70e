"""Losses of the form ``loss(model, *fields)``, the mean over a minibatch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the model's logits."""
    return functional.cross_entropy(model(inputs), labels)


def squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the examples of half the squared distance to the target."""
    distance: Tensor = (model(inputs) - targets).flatten(1)
    return 0.5 * distance.square().sum(1).mean()
