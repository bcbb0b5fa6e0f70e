"""Replicas of the model for the sequential engine: all parameters in one flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedshuffle.engines.base import gradients, model_randomness
from fedshuffle.engines.gradcheck import Gradients, trusted
from fedshuffle.engines.linear_stack import LinearStack, hooked
from fedshuffle.engines.problem import Problem
from fedshuffle.losses import MeanLoss


class Layout:
    """The order of numbers in a flat vector of parameters: each parameter's axes may be permuted.

    Methods know only plain vectors. The engine arranges what it is given, computes, and restores
    its answer.

        >>> layout = Layout([torch.Size([2, 3]), torch.Size([2])], [(1, 0), (0,)])
        >>> x = torch.arange(8.0)
        >>> layout.arrange(x)
        tensor([0., 3., 1., 4., 2., 5., 6., 7.])
        >>> bool((layout.restore(layout.arrange(x)) == x).all())
        True
    """

    def __init__(self, shapes: Sequence[torch.Size], axes: Sequence[tuple[int, ...]]) -> None:
        self._shapes = list(shapes)
        self._axes = list(axes)
        self._lengths = [shape.numel() for shape in shapes]
        self._plain = all(order == tuple(range(len(order))) for order in axes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in their own shape, as views of an arranged vector (or rows of them)."""
        lead = flat.shape[:-1]
        found = []
        parts = torch.split(flat, self._lengths, dim=-1)
        for part, shape, axes in zip(parts, self._shapes, self._axes, strict=True):
            stored = part.view([*lead, *(shape[axis] for axis in axes)])
            back = [len(lead) + axes.index(axis) for axis in range(len(axes))]
            found.append(stored.permute([*range(len(lead)), *back]))
        return found

    def arrange(self, plain: Tensor) -> Tensor:
        """Plain vectors (one, or rows) in this layout."""
        if self._plain:
            return plain
        arranged = torch.empty_like(plain)
        parts = torch.split(plain, self._lengths, dim=-1)
        for view, part in zip(self.views(arranged), parts, strict=True):
            view.copy_(part.view(view.shape))
        return arranged

    def restore(self, arranged: Tensor) -> Tensor:
        """Arranged vectors (one, or rows) as plain ones."""
        if self._plain:
            return arranged
        lead = arranged.shape[:-1]
        return torch.cat([view.reshape(*lead, -1) for view in self.views(arranged)], dim=-1)


class Replica:
    """A copy of the model with its parameters in one flat vector, ``flat``, differentiated by hand
    if it is a linear stack; images may run with channels last.
    """

    def __init__(
        self, problem: Problem, stack: LinearStack | None = None, channels_last: bool = False
    ) -> None:
        self.problem = problem
        self.stack = stack
        self._channels_last = channels_last

        def axes(ndim: int) -> tuple[int, ...]:
            permuted = {2: (1, 0)} if stack else {4: (0, 2, 3, 1)} if channels_last else {}
            return permuted.get(ndim, tuple(range(ndim)))

        shapes = [p.shape for p in problem.parameters.values()]
        self.layout = Layout(shapes, [axes(len(shape)) for shape in shapes])
        self.flat = self.layout.arrange(problem.start).clone()
        self._views = self.layout.views(self.flat)
        if stack is not None:
            self._scratch: list[Tensor] = []
            return
        self._model = problem.replica()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        if channels_last and isinstance(problem.loss, MeanLoss):  # it runs the model as a whole
            _pool_first(self._model)

    def ready(self, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Examples in the memory format of this replica."""
        if not self._channels_last:
            return fields
        last = torch.channels_last
        return tuple(f.contiguous(memory_format=last) if f.ndim == 4 else f for f in fields)

    def spare(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The same examples once more, as a model may change its inputs."""
        return batch if self.stack else tuple(field.clone() for field in batch)

    def descend(
        self,
        batch: tuple[Tensor, ...],
        by: float,
        into: Replica,
        keep: float = 1.0,
        clip: float = math.inf,
        seed: int = 0,
    ) -> None:
        """``into <- keep into + by g``, with g the clipped gradient at this replica's parameters;
        the seed is for the model's own randomness.
        """
        if self.stack and clip == math.inf:
            self.stack.descend(self._views, batch, by / len(batch[0]), into._views, keep)
            return
        found: list[Tensor] | tuple[Tensor, ...]
        found = self._by_hand(batch) if self.stack else self._by_autograd(batch, seed)
        if clip < math.inf:
            norm = float(torch.stack(torch._foreach_norm(found)).norm())
            by *= min(1.0, clip / norm) if norm else 1.0
        if keep != 1:
            into.flat.mul_(keep)
        torch._foreach_add_(into._views, found, alpha=by)

    def _by_autograd(self, batch: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
        with model_randomness(self.problem, seed):
            loss = self.problem.loss(self._model, *batch)
        return gradients(loss, self._parameters)

    def _by_hand(self, batch: tuple[Tensor, ...]) -> list[Tensor]:
        assert self.stack is not None
        self._scratch = self._scratch or [torch.empty_like(view) for view in self._views]
        torch._foreach_zero_(self._scratch)
        self.stack.descend(self._views, batch, 1 / len(batch[0]), self._scratch)
        return self._scratch


def fastest_replica(problem: Problem) -> Callable[[], Replica]:
    """Makes the fastest replica that agrees with the reference.

    On a CPU, max-pooling is ten times as fast with channels last, while convolutions hardly care.
    But a model that looks at the memory of its activations cannot be run so.
    """
    ways: dict[str, Callable[[], Replica]] = {}
    if (stack := LinearStack.of(problem)) is not None:
        ways["differentiated by hand"] = partial(Replica, problem, stack)
    pools = any(isinstance(module, nn.MaxPool2d) for module in problem.model.modules())
    if pools and problem.device.type == "cpu":
        ways["with channels last"] = partial(Replica, problem, channels_last=True)
    for way, make in ways.items():
        if trusted(problem, way, partial(_gradients, make)):
            return make
    return partial(Replica, problem)


def _gradients(make: Callable[[], Replica]) -> Gradients:
    here, own = make(), make()

    def found(points: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        rows = []
        for point in here.layout.arrange(points):
            here.flat.copy_(point)
            own.flat.zero_()
            here.descend(here.spare(here.ready(batch)), 1.0, own)
            rows.append(own.flat.clone())
        return here.layout.restore(torch.stack(rows))

    return found


def _pool_first(layers: nn.Module) -> None:
    """Swap a ReLU with the max-pooling after it: exactly the same, on a quarter of the numbers.

    Only in layers that are sure to run one after another.
    """
    if type(layers) is not nn.Sequential or hooked(layers):
        return
    for layer in layers:
        _pool_first(layer)
    for k in range(len(layers) - 1):
        relu, pool = layers[k], layers[k + 1]
        plain = type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices
        if plain and not hooked(relu) and not hooked(pool):
            layers[k], layers[k + 1] = pool, relu
