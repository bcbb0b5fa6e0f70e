"""A stack of linear layers, differentiated by hand.

Autograd costs a small model more than its arithmetic. For a stack of linear layers with simple
activations, under a loss whose slope is known, the gradient is written out here, and each layer's
part of it is added to the parameters by the matrix product that makes it. The same lines serve one
client (matrices) and many clients side by side (a leading dimension everywhere).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, final

import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines.layout import Layout
from fedshuffle.engines.problem import Problem

_aten: Any = torch.ops.aten


@final
@dataclass(frozen=True)
class _Activation:
    """``forward`` works in place; ``backward(slope, output)`` needs only the output."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_NONE = _Activation(lambda z: z, lambda slope, _: slope)
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.Identity: _NONE,
    nn.ReLU: _Activation(torch.relu_, lambda slope, a: _aten.threshold_backward(slope, a, 0)),
    nn.Tanh: _Activation(torch.tanh_, _aten.tanh_backward),
    nn.Sigmoid: _Activation(torch.sigmoid_, _aten.sigmoid_backward),
}


def _cross_entropy_slope(logits: Tensor, labels: Tensor) -> Tensor:
    """``softmax(logits) - onehot(labels)``."""
    if logits.ndim == 2:
        slope = torch.softmax(logits, dim=-1)
    else:  # over a few classes of many clients, torch's softmax is several times slower than this
        slope = logits.sub(logits.amax(dim=-1, keepdim=True)).exp_()
        slope.div_(slope.sum(dim=-1, keepdim=True))
    return slope.scatter_(-1, labels.unsqueeze(-1), -1.0, reduce="add")


def _squared_error_slope(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs - targets


class _One:
    """The products for one client. Weights lie transposed, inputs by outputs: forward likes it."""

    features = 1

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return inputs @ weight if bias is None else torch.addmm(bias, inputs, weight)

    @staticmethod
    def backward(slope: Tensor, weight: Tensor) -> Tensor:
        return slope @ weight.t()

    @staticmethod
    def add(weight: Tensor, inputs: Tensor, slope: Tensor, alpha: float) -> None:
        weight.addmm_(inputs.t(), slope, alpha=alpha)


class _Many:
    """The products for clients side by side. Weights lie as they are, outputs by inputs."""

    features = 2

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.transpose(1, 2)
        if bias is None:
            return inputs @ weight
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight)

    @staticmethod
    def backward(slope: Tensor, weight: Tensor) -> Tensor:
        return slope @ weight

    @staticmethod
    def add(weight: Tensor, inputs: Tensor, slope: Tensor, alpha: float) -> None:
        weight.baddbmm_(slope.transpose(1, 2), inputs, alpha=alpha)


@final
@dataclass(frozen=True)
class _Layer:
    """A linear layer: where its parameters stand, and what follows it."""

    weight: int
    bias: int | None
    width: int
    activation: _Activation


@final
class Stack:
    """The gradient of a problem whose model is a stack of linear layers."""

    def __init__(self, layers: Sequence[_Layer], slope: Callable[..., Tensor]) -> None:
        self._layers = layers
        self._slope = slope

    @classmethod
    def of(cls, problem: Problem) -> Stack | None:
        """The stack that a problem's model is, or None if it is anything else."""
        layers = _layers(problem)
        slope = _slope(problem, layers[-1].width) if layers else None
        return None if slope is None else cls(layers, slope)

    def layout(self, shapes: Sequence[torch.Size]) -> Layout:
        """Where the parameters of one client lie: weights transposed."""
        return Layout(shapes, [(1, 0) if len(shape) == 2 else (0,) for shape in shapes])

    def transposed(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of one client as :meth:`descend` takes them."""
        weights = {layer.weight for layer in self._layers}
        return [view.t() if k in weights else view for k, view in enumerate(views)]

    def descend(
        self,
        at: Sequence[Tensor],
        batch: tuple[Tensor, ...],
        scale: float | Tensor,
        into: Sequence[Tensor],
        keep: float | Tensor = 1.0,
    ) -> None:
        """``into <- keep into + sum_j scale_j grad f_j(at)``, parameter by parameter.

        The sum runs over the examples of the batch; ``into`` may be ``at`` itself. With clients
        side by side, everything has a leading dimension: ``scale`` has shape (clients, examples, 1)
        and ``keep`` (clients, 1, 1).
        """
        inputs, targets = batch
        products: type[_One | _Many] = _One if at[0].ndim == 2 else _Many
        output = inputs.flatten(products.features)
        outputs = []
        for layer in self._layers:
            outputs.append(output)
            bias = None if layer.bias is None else at[layer.bias]
            output = layer.activation.forward(products.forward(output, at[layer.weight], bias))
        slope, alpha = self._slope(output, targets), 1.0
        if isinstance(scale, Tensor):
            slope.mul_(scale)
        else:
            alpha = scale
        shrinks = isinstance(keep, Tensor) or keep != 1
        for layer in reversed(self._layers):
            slope = layer.activation.backward(slope, output)
            output = outputs.pop()
            # What flows further down needs the weights before they change.
            below = products.backward(slope, at[layer.weight]) if outputs else slope
            if shrinks:
                into[layer.weight].mul_(keep)
            products.add(into[layer.weight], output, slope, alpha)
            if layer.bias is not None:
                bias = into[layer.bias]
                if shrinks:
                    bias.mul_(keep.squeeze(-1) if isinstance(keep, Tensor) else keep)
                bias.add_(slope.sum(dim=-2), alpha=alpha)
            slope = below


def _layers(problem: Problem) -> list[_Layer]:
    """The linear layers of the model with what follows each; none if it is no such stack."""
    layers: list[_Layer] = []
    flat = problem.fields[0].ndim == 2
    places = count()
    for module in leaves(problem.model):
        if type(module) is nn.Linear and flat:
            weight, bias = next(places), None if module.bias is None else next(places)
            layers.append(_Layer(weight, bias, module.out_features, _NONE))
        elif type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif type(module) in _ACTIVATIONS and layers and layers[-1].activation is _NONE:
            layers[-1] = replace(layers[-1], activation=_ACTIVATIONS[type(module)])
        elif type(module) is not nn.Identity:
            return []
    whole = next(places) == len(problem.parameters) == len(list(problem.model.parameters()))
    return layers if whole else []


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after another; a module with hooks counts as unknown."""
    if type(module) is nn.Sequential and not hooked(module):
        for child in module:
            yield from leaves(child)
    else:
        yield nn.Module() if hooked(module) else module


_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether a module may do more than its class says: by hooks, or a ``forward`` of its own."""
    everywhere = any(getattr(nn.modules.module, f"_global_{hooks}") for hooks in _HOOKS)
    own = any(getattr(module, f"_{hooks}") for hooks in _HOOKS)
    return everywhere or own or "forward" in vars(module)


def _are_classes(labels: Tensor, classes: int) -> bool:
    """Whether all labels are classes; a negative one means "does not count"."""
    parts = torch.split(labels, 1 << 20)
    return all(int(part.min()) >= 0 and int(part.max()) < classes for part in parts)


def _slope(problem: Problem, width: int) -> Callable[..., Tensor] | None:
    """The derivative of an example's loss by the model's output, where it is known."""
    if len(problem.fields) != 2 or not problem.fields[0].is_floating_point():
        return None
    if not isinstance(problem.loss, losses.MeanLoss):  # whose equality is known
        return None
    targets = problem.fields[1]
    if problem.loss == losses.cross_entropy:
        fits = targets.dtype == torch.int64 and targets.ndim == 1 and _are_classes(targets, width)
        return _cross_entropy_slope if fits else None
    if problem.loss == losses.squared_error:
        fits = targets.is_floating_point() and targets.shape[1:] == (width,)
        return _squared_error_slope if fits else None
    return None
