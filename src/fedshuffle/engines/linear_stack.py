"""A stack of linear layers, differentiated by hand.

Autograd costs a small model more than its arithmetic. For linear layers with simple activations,
under a loss whose derivative is known, the gradient is written out here, and the matrix product
that computes each layer's part adds it to the parameters. The same lines serve one client
(matrices) and many clients side by side (a leading dimension everywhere).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines.problem import Problem

_aten: Any = torch.ops.aten


class _Activation(NamedTuple):
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


class _Layer(NamedTuple):
    """A linear layer: the positions of its parameters, its outputs, and what follows it."""

    weight: int
    bias: int | None
    width: int
    activation: _Activation = _NONE


class LinearStack:
    """The gradient of a problem whose model is a stack of linear layers."""

    def __init__(self, layers: Sequence[_Layer], slope: Callable[..., Tensor]) -> None:
        self._layers = layers
        self._slope = slope

    @classmethod
    def of(cls, problem: Problem) -> LinearStack | None:
        """The stack that a problem's model is, or None if it is anything else."""
        layers = _layers(problem)
        slope = _slope(problem, layers[-1].width) if layers else None
        return None if slope is None else cls(layers, slope)

    def descend(
        self,
        at: Sequence[Tensor],
        batch: tuple[Tensor, ...],
        scale: float | Tensor,
        into: Sequence[Tensor],
        keep: float | Tensor | None = None,
    ) -> None:
        """``into <- keep into + sum_j scale_j grad f_j(at)``, parameter by parameter.

        The sum runs over the examples of the batch; ``into`` may be ``at`` itself. With clients
        side by side, everything has a leading dimension: ``scale`` has shape (clients, examples)
        and ``keep`` (clients,).
        """
        inputs, targets = batch
        many = at[0].ndim == 3
        output, outputs = inputs.flatten(2 if many else 1), []
        for layer in self._layers:
            outputs.append(output)
            weight = at[layer.weight].mT
            if layer.bias is None:
                output = output @ weight
            elif many:
                output = torch.baddbmm(at[layer.bias].unsqueeze(1), output, weight)
            else:
                output = torch.addmm(at[layer.bias], output, weight)
            output = layer.activation.forward(output)
        slope, alpha = self._slope(output, targets), 1.0
        if isinstance(scale, Tensor):
            slope.mul_(scale.unsqueeze(2))
        else:
            alpha = scale
        of_weight = of_bias = 1.0 if keep is None else keep
        if isinstance(keep, Tensor):
            of_weight, of_bias = keep.view(-1, 1, 1), keep.view(-1, 1)
        shrinks = isinstance(keep, Tensor) or of_weight != 1
        add_product = Tensor.baddbmm_ if many else Tensor.addmm_
        for layer in reversed(self._layers):
            slope = layer.activation.backward(slope, output)
            output = outputs.pop()
            # The layer below needs the weights before they change.
            below = slope @ at[layer.weight] if outputs else slope
            if shrinks:
                into[layer.weight].mul_(of_weight)
            add_product(into[layer.weight], slope.mT, output, alpha=alpha)
            if layer.bias is not None:
                bias = into[layer.bias]
                if shrinks:
                    bias.mul_(of_bias)
                bias.add_(slope.sum(dim=-2), alpha=alpha)
            slope = below


def _layers(problem: Problem) -> list[_Layer]:
    """The linear layers of the model with what follows each; none if it is no such stack."""
    layers: list[_Layer] = []
    flat = problem.fields[0].ndim == 2
    positions = count()
    for module in _leaves(problem.model):
        if type(module) is nn.Linear and flat:
            weight, bias = next(positions), None if module.bias is None else next(positions)
            layers.append(_Layer(weight, bias, module.out_features))
        elif type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif type(module) in _ACTIVATIONS and layers and layers[-1].activation is _NONE:
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[type(module)])
        elif type(module) is not nn.Identity:
            return []
    whole = next(positions) == len(problem.parameters) == len(list(problem.model.parameters()))
    return layers if whole else []


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after another; a module with hooks counts as unknown."""
    if type(module) is nn.Sequential and not hooked(module):
        for child in module:
            yield from _leaves(child)
    else:
        yield nn.Module() if hooked(module) else module


_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether a module may do more than its class says: by hooks, or by its own ``forward``."""
    everywhere = any(getattr(nn.modules.module, f"_global_{hooks}") for hooks in _HOOKS)
    own = any(getattr(module, f"_{hooks}") for hooks in _HOOKS)
    return everywhere or own or "forward" in vars(module)


def _slope(problem: Problem, width: int) -> Callable[..., Tensor] | None:
    """The derivative of an example's loss by the model's output, where it is known."""
    if len(problem.fields) != 2 or not problem.fields[0].is_floating_point():
        return None
    if not isinstance(problem.loss, losses.MeanLoss):  # only its equality can be trusted
        return None
    targets = problem.fields[1]
    if problem.loss == losses.squared_error:
        fits = targets.is_floating_point() and targets.shape[1:] == (width,)
        return torch.sub if fits else None
    if problem.loss != losses.cross_entropy or targets.dtype != torch.int64 or targets.ndim != 1:
        return None
    parts = torch.split(targets, 1 << 20)  # a negative label means that it does not count
    classes = all(int(part.min()) >= 0 and int(part.max()) < width for part in parts)
    return _cross_entropy_slope if classes else None


def _cross_entropy_slope(logits: Tensor, labels: Tensor) -> Tensor:
    """``softmax(logits) - onehot(labels)``."""
    if logits.ndim == 2:
        slope = torch.softmax(logits, dim=-1)
    else:  # over a few classes of many clients, torch's softmax is several times slower than this
        slope = logits.sub(logits.amax(dim=-1, keepdim=True)).exp_()
        slope.div_(slope.sum(dim=-1, keepdim=True))
    return slope.scatter_(-1, labels.unsqueeze(-1), -1.0, reduce="add")
