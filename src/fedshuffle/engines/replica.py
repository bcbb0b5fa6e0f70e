"""A copy of the model whose parameters are one flat vector, for engines that train in place."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedshuffle.engines import base
from fedshuffle.engines.gradients import Batch, ByHand, by_hand, fault, hooked
from fedshuffle.engines.problem import Problem
from fedshuffle.losses import MeanLoss


class Layout:
    """The order of numbers in a flat vector of parameters: those with ``ndim`` axes are stored with
    ``last_axis[ndim]`` last. Methods know only plain vectors.

        >>> layout = Layout([torch.Size([2, 3]), torch.Size([2])], {2: -2})
        >>> x = torch.arange(8.0)
        >>> layout.arrange(x)
        tensor([0., 3., 1., 4., 2., 5., 6., 7.])
        >>> bool((layout.restore(layout.arrange(x)) == x).all())
        True
    """

    def __init__(self, shapes: Sequence[torch.Size], last_axis: Mapping[int, int]) -> None:
        self._lengths = [shape.numel() for shape in shapes]
        self._axes = [last_axis.get(len(shape), -1) for shape in shapes]
        pairs = zip(shapes, self._axes, strict=True)
        self._stored = [torch.empty(s, device="meta").movedim(axis, -1).shape for s, axis in pairs]
        self._plain = set(self._axes) <= {-1}

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in their own shape, as views of an arranged vector (or rows of them)."""
        parts = torch.split(flat, self._lengths, dim=-1)
        return [
            part.view([*flat.shape[:-1], *shape]).movedim(-1, axis)
            for part, shape, axis in zip(parts, self._stored, self._axes, strict=True)
        ]

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
        lead, views = arranged.shape[:-1], zip(self.views(arranged), self._lengths, strict=True)
        return torch.cat([view.reshape(*lead, length) for view, length in views], dim=-1)


class Replica:
    """A copy of the model with its parameters in one flat vector, ``flat``, differentiated by hand
    if it is a linear stack; images may run with channels last.
    """

    def __init__(
        self, problem: Problem, by_hand: ByHand | None = None, channels_last: bool = False
    ) -> None:
        self.problem = problem
        self.by_hand = by_hand
        self._channels_last = channels_last
        last_axis = {2: -2} if by_hand else {4: -3} if channels_last else {}
        self.layout = Layout([p.shape for p in problem.parameters.values()], last_axis)
        self.flat = self.layout.arrange(problem.start).clone()
        self.views = self.layout.views(self.flat)
        if by_hand is not None:
            self._scratch: list[Tensor] = []
            return
        self._model = problem.replica()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter, view in zip(self._parameters, self.views, strict=True):
            parameter.data = view
        if channels_last and isinstance(problem.loss, MeanLoss):  # it runs the model as a whole
            _pool_first(self._model)

    def ready(self, fields: Batch) -> Batch:
        """Examples in the form in which this replica wants them."""
        if self.by_hand and not fields[1].is_floating_point():
            return fields[0], fields[1].unsqueeze(1)  # labels are places in rows
        if not self._channels_last:
            return fields
        last = torch.channels_last
        return tuple(f.contiguous(memory_format=last) if f.ndim == 4 else f for f in fields)

    def spare(self, batch: Batch) -> Batch:
        """The same examples once more, as a model may change its inputs."""
        return batch if self.by_hand else tuple(field.clone() for field in batch)

    def descend(
        self,
        batch: Batch,
        by: float,
        into: "Replica",
        keep: float = 1.0,
        clip: float = math.inf,
        seed: int = 0,
        length: int = 0,
    ) -> Tensor:
        """``into <- keep into + by g``, with g the clipped gradient at these parameters.

        Returns what was observed of the loss: the loss itself, or what ``by_hand.losses`` takes.
        """
        length = length or len(batch[0])
        if self.by_hand and clip == math.inf:
            return self.by_hand.descend(self.views, batch, by / length, into.views, keep)
        found: list[Tensor] | tuple[Tensor, ...]
        if self.by_hand:
            found = self._scratch = self._scratch or [torch.empty_like(v) for v in self.views]
            torch._foreach_zero_(found)
            observed = self.by_hand.descend(self.views, batch, 1 / length, found)
        else:
            with base.model_randomness(self.problem, seed):
                loss = self.problem.loss(self._model, *batch)
            found = base.gradients(loss, self._parameters)
            observed = loss.detach()
        if clip < math.inf:
            norm = float(torch.stack(torch._foreach_norm(found)).norm())
            by *= min(1.0, clip / norm) if norm else 1.0
        if keep != 1:
            into.flat.mul_(keep)
        torch._foreach_add_(into.views, found, alpha=by)
        return observed


def fastest_replica(problem: Problem) -> Callable[[], Replica]:
    """Makes the fastest replica that agrees with the reference."""
    ways: dict[str, Callable[[], Replica]] = {}
    if (stack := by_hand(problem)) is not None:
        ways["differentiated by hand"] = partial(Replica, problem, stack)
    pools = any(isinstance(module, nn.MaxPool2d) for module in problem.model.modules())
    if pools and problem.device.type == "cpu":  # ten times as fast; convolutions hardly care
        ways["with channels last"] = partial(Replica, problem, channels_last=True)
    for way, make in ways.items():
        if not fault(problem, way, partial(_gradients, make), warn=True):
            return make
    return partial(Replica, problem)


def _gradients(make: Callable[[], Replica], points: Tensor, batch: Batch) -> Tensor:
    here, own = make(), make()
    rows = []
    for point in here.layout.arrange(points):
        here.flat.copy_(point)
        own.flat.zero_()
        here.descend(here.spare(here.ready(batch)), 1.0, own)
        rows.append(own.flat.clone())
    return here.layout.restore(torch.stack(rows))


def _pool_first(layers: nn.Module) -> None:
    """Swap a ReLU with the max-pooling after it: exactly the same, on a quarter of the numbers."""
    if type(layers) is not nn.Sequential or hooked(layers):
        return
    for layer in layers:
        _pool_first(layer)
    for k in range(len(layers) - 1):
        relu, pool = layers[k], layers[k + 1]
        plain = type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices
        if plain and not hooked(relu) and not hooked(pool):
            layers[k], layers[k + 1] = pool, relu
