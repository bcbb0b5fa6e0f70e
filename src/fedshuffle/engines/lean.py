"""The lean engine: one client at a time, with nothing between the gradients.

The parameters are views of one flat vector that is updated in place, many minibatches are
gathered at once, and nothing is allocated per step but what the gradient needs. What computes the
gradient is a replica of the model: by autograd for any model, or by hand for a stack of linear
layers.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from fedshuffle import kernel
from fedshuffle.engines.agreement import Gradients, trusted
from fedshuffle.engines.base import (
    Stopped,
    check_probe,
    counted,
    first_look,
    gradients,
    largest_batch,
    model_randomness,
    named,
    not_finite,
)
from fedshuffle.engines.layout import Layout
from fedshuffle.engines.machine import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.problem import PROBE_ROWS, Problem
from fedshuffle.engines.stack import Stack, hooked
from fedshuffle.kernel import Order, Probe, Walk
from fedshuffle.losses import MeanLoss
from fedshuffle.randomness import Rewound

_ROWS = 4096
"""A client's examples are gathered in portions of about so many rows."""


@final
class LeanEngine:
    """Walks clients one by one, in place, into one running sum.

    A stack of linear layers is differentiated by hand (unless ``fused`` is False), any other model
    by autograd.
    """

    stop = False

    def __init__(self, problem: Problem, fused: bool = True) -> None:
        self.problem = problem
        keep_freed_memory()
        self._random = first_look(problem)
        self._rewound = Rewound()
        self._replica = _replica(problem, fused)
        self._here = self._replica()
        # Others, for those who need them: at the global model, and to gather a direction or a sum.
        self._there: _Replica | None = None
        self._gathered: _Replica | None = None

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        with flushed_denormals():
            return [self._walk(walk) for walk in walks]

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        with threads_for(self.problem, PROBE_ROWS):
            return [self._probe(probe) for probe in probes]

    def _walk(self, walk: Walk) -> Tensor:
        with threads_for(self.problem, largest_batch(walk)):
            sums = self._sums(walk)
        if torch.isfinite(sums).all():
            return self._here.layout.restore(sums)
        for order in walk.orders:  # whose update is it? Walk again, one by one
            weights = [weight for _, weight in counted(order.weights)] or [0.0]
            alone = Walk(walk.start, [replace(order, weights=weights)], len(weights))
            if not torch.isfinite(self._sums(alone)).all():
                raise not_finite(self.problem, order)
        raise not_finite(self.problem, walk.orders[-1])

    def _sums(self, walk: Walk) -> Tensor:
        layout = self._here.layout
        x = layout.arrange(walk.start)
        arrange = lru_cache(maxsize=4)(layout.arrange)  # clients often share their v and scale
        if any(order.steering.beta for order in walk.orders):
            self._there = self._there or self._replica()
            self._there.flat.copy_(x)
        if any(map(_gathers, walk.orders)):
            self._gathered = self._gathered or self._replica()
        sums = x.new_zeros(walk.sums, len(x))
        with torch.inference_mode(self._here.by_hand):  # autograd's book-keeping costs, too
            for order in walk.orders:
                stream, steering = order.minibatches, order.steering
                v = None if steering.v is None else arrange(steering.v)
                scale = None if steering.scale is None else arrange(steering.scale)
                with named(self.problem, stream.client, stream.round, "local training"):
                    self._local(x, order, v, scale)
                update = self._here.flat.sub_(x)
                # What counts nowhere must be finite, too.
                for k, weight in counted(order.weights) or [(0, 0.0)]:
                    sums[k].add_(update, alpha=weight)
        return sums

    def _local(self, x: Tensor, order: Order, v: Tensor | None, scale: Tensor | None) -> None:
        """The local steps of one client, from x on, in place."""
        self._here.flat.copy_(x)
        if _gathers(order):
            self._gather(x, order, v, scale)
        elif order.steering.alpha:
            self._descend(x, order, v)
        else:
            self._coast(x, order, v, scale)

    def _descend(self, x: Tensor, order: Order, v: Tensor | None) -> None:
        """The kernel, in place: y <- y - gamma (alpha g(y) - beta g(x) + v + mu (y - x))."""
        stream, steering, gamma = order.minibatches, order.steering, order.step_size
        here, there, y = self._here, self._there, self._here.flat
        seed = stream.model_seed() if self._random else 0
        shrink = gamma * (steering.mu + steering.alpha * order.weight_decay)
        pull = gamma * (steering.mu + steering.beta * order.weight_decay)
        for batch in self._batches(order):
            if self.stop:
                raise Stopped
            again = here.spare(batch) if steering.beta else batch
            here.descend(batch, -gamma * steering.alpha, here, 1 - shrink, order.clip, seed)
            if steering.beta and there:
                self._settle(there, x)
                there.descend(again, gamma * steering.beta, here, 1.0, order.clip, seed)
            if pull:
                y.add_(x, alpha=pull)
            if v is not None:
                y.add_(v, alpha=-gamma)
            seed += 1

    def _gather(self, x: Tensor, order: Order, v: Tensor | None, scale: Tensor | None) -> None:
        """The kernel with a scale, or without g(y): the whole direction first, then the step."""
        stream, steering, gamma = order.minibatches, order.steering, order.step_size
        here, there, direction, y = self._here, self._there, self._gathered, self._here.flat
        assert direction is not None
        seed = stream.model_seed() if self._random else 0
        shrink = steering.mu + steering.alpha * order.weight_decay
        fixed = x * -(steering.mu + steering.beta * order.weight_decay)
        if v is not None:
            fixed += v
        for batch in self._batches(order):
            if self.stop:
                raise Stopped
            direction.flat.copy_(fixed)
            again = here.spare(batch) if steering.alpha and steering.beta else batch
            if steering.alpha:
                here.descend(batch, steering.alpha, direction, clip=order.clip, seed=seed)
            if steering.beta and there:
                self._settle(there, x)
                there.descend(again, -steering.beta, direction, clip=order.clip, seed=seed)
            if shrink:  # last, for the model may change its parameters when it runs
                direction.flat.add_(y, alpha=shrink)
            if scale is None:
                y.add_(direction.flat, alpha=-gamma)
            else:
                y.addcmul_(direction.flat, scale, value=-gamma)
            seed += 1

    def _settle(self, replica: _Replica, point: Tensor) -> None:
        """Put a replica back at a point that its own forward pass may have moved it from."""
        if self.problem.restless:
            replica.flat.copy_(point)

    def _coast(self, x: Tensor, order: Order, v: Tensor | None, scale: Tensor | None) -> None:
        """The kernel without any gradient: no example is looked at."""
        y, nothing, mu = self._here.flat, torch.zeros_like(x), order.steering.mu
        for _ in range(order.minibatches.steps):
            if self.stop:
                raise Stopped
            y.copy_(kernel.step(y, x, nothing, None, order.step_size, 0.0, 0.0, mu, v, scale))

    def _batches(self, order: Order) -> Iterator[tuple[Tensor, ...]]:
        """The minibatches of a client, gathered many at a time."""
        return chain.from_iterable(self._portions(order))

    def _portions(self, order: Order) -> Iterator[Iterator[tuple[Tensor, ...]]]:
        stream = order.minibatches
        for positions, lengths in stream.portions(_ROWS, self._rewound):
            rows = self.problem.rows(stream.client, positions)
            fields = self._here.ready(self.problem.batch(rows))
            yield zip(*(field.split_with_sizes(lengths) for field in fields), strict=True)

    def _probe(self, probe: Probe) -> Tensor:
        here, layout = self._here, self._here.layout
        own = self._gathered = self._gathered or self._replica()
        points = layout.arrange(torch.stack(list(probe.points)))
        sums = points.new_zeros(probe.weights.shape[1], *points.shape)
        for j, point in enumerate(points):
            here.flat.copy_(point)
            for client, weights in zip(probe.clients.tolist(), probe.weights, strict=True):
                counts = counted(weights)
                own.flat.zero_()
                with named(self.problem, client, probe.round, "probe"):
                    for rows, share in self.problem.pieces(client) if counts else ():
                        self._settle(here, point)
                        here.descend(here.ready(self.problem.batch(rows)), share, own)
                for k, weight in counts:
                    sums[k, j].add_(own.flat, alpha=weight)
        return check_probe(self.problem, probe, layout.restore(sums))


def _gathers(order: Order) -> bool:
    """Whether the direction of a step must be whole before the step is done."""
    steering = order.steering
    if steering.scale is None:
        return not steering.alpha and bool(steering.beta)
    return bool(steering.alpha or steering.beta)


class _Replica(abc.ABC):
    """A copy of the model with its parameters in one flat vector."""

    by_hand = False
    """Whether it does without autograd."""

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem = problem
        self.layout = layout
        self.flat = layout.arrange(problem.start).clone()
        self.views = layout.views(self.flat)

    def ready(self, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Examples as this replica likes them."""
        return fields

    def spare(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The same examples once again, as a model may change those that it is given."""
        return tuple(field.clone() for field in batch)

    @abc.abstractmethod
    def descend(
        self,
        batch: tuple[Tensor, ...],
        by: float,
        into: _Replica,
        keep: float = 1.0,
        clip: float = math.inf,
        seed: int = 0,
    ) -> None:
        """``into <- keep into + by g``, with g the clipped gradient at this replica's parameters.

        The seed rules the model's own randomness.
        """


class _ByAutograd(_Replica):
    """Any model, perhaps with channels last."""

    def __init__(self, problem: Problem, channels_last: bool = False) -> None:
        self.model = problem.replica()
        self.channels_last = channels_last
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        orders = [
            (0, 2, 3, 1) if channels_last and p.ndim == 4 else tuple(range(p.ndim))
            for p in parameters
        ]
        super().__init__(problem, Layout([p.shape for p in parameters], orders))
        for parameter, view in zip(parameters, self.views, strict=True):
            parameter.data = view
        self.parameters = parameters
        if channels_last:
            if isinstance(problem.loss, MeanLoss):  # which runs the model as a whole
                _pool_first(self.model)
            for module in self.model.modules():
                if isinstance(module, nn.MaxPool2d):
                    module.register_forward_hook(_pass_gradients_channels_last)

    def ready(self, fields: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.channels_last:
            return fields
        last = torch.channels_last
        return tuple(f.contiguous(memory_format=last) if f.ndim == 4 else f for f in fields)

    def descend(
        self,
        batch: tuple[Tensor, ...],
        by: float,
        into: _Replica,
        keep: float = 1.0,
        clip: float = math.inf,
        seed: int = 0,
    ) -> None:
        if self.problem.random:
            with model_randomness(self.problem, seed):
                loss = self.problem.loss(self.model, *batch)
        else:
            loss = self.problem.loss(self.model, *batch)
        found = gradients(loss, self.parameters)
        if clip < math.inf:
            by *= _shortening(found, clip)
        if keep != 1:
            into.flat.mul_(keep)
        torch._foreach_add_(into.views, found, alpha=by)


class _ByHand(_Replica):
    """A stack of linear layers: the update is part of the matrix products of the gradient."""

    by_hand = True

    def __init__(self, problem: Problem, stack: Stack) -> None:
        shapes = [p.shape for p in problem.parameters.values()]
        super().__init__(problem, stack.layout(shapes))
        self.stack = stack
        self.blocks = stack.transposed(self.views)
        self._scratch: list[Tensor] | None = None

    def spare(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return batch  # which nothing here changes

    def descend(
        self,
        batch: tuple[Tensor, ...],
        by: float,
        into: _Replica,
        keep: float = 1.0,
        clip: float = math.inf,
        seed: int = 0,
    ) -> None:
        assert isinstance(into, _ByHand)
        scale = by / len(batch[0])
        if clip == math.inf:
            self.stack.descend(self.blocks, batch, scale, into.blocks, keep)
            return
        if self._scratch is None:
            self._scratch = [torch.empty_like(block) for block in self.blocks]
        torch._foreach_zero_(self._scratch)
        self.stack.descend(self.blocks, batch, 1 / len(batch[0]), self._scratch)
        by *= _shortening(self._scratch, clip)
        if keep != 1:
            into.flat.mul_(keep)
        torch._foreach_add_(into.blocks, self._scratch, alpha=by)


def _shortening(gradient: list[Tensor] | tuple[Tensor, ...], clip: float) -> float:
    """By what the gradient must be multiplied to be no longer than ``clip``."""
    norm = float(torch.stack(torch._foreach_norm(gradient)).norm())
    return min(1.0, clip / norm) if norm else 1.0


def _replica(problem: Problem, fused: bool) -> Callable[[], _Replica]:
    """What makes the fastest replica that agrees with the reference.

    On a CPU, max-pooling is ten times as quick with channels last, while convolutions hardly care.
    But a model that looks at the memory of its activations cannot be run so.
    """
    ways: dict[str, Callable[[], _Replica]] = {}
    if fused and (stack := Stack.of(problem)) is not None:
        ways["differentiated by hand"] = partial(_ByHand, problem, stack)
    pools = any(isinstance(module, nn.MaxPool2d) for module in problem.model.modules())
    if pools and problem.device.type == "cpu":
        ways["with channels last"] = partial(_ByAutograd, problem, channels_last=True)
    for way, make in ways.items():
        if trusted(problem, way, partial(_gradients, make)):
            return make
    return partial(_ByAutograd, problem)


def _gradients(make: Callable[[], _Replica]) -> Gradients:
    """The gradients that a replica gives."""
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


def _pass_gradients_channels_last(_: nn.Module, __: object, output: Any) -> None:
    """Spare a pooling layer from copying its gradient from one memory format to the other."""
    if isinstance(output, Tensor) and output.requires_grad and output.ndim == 4:
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: grad.contiguous(memory_format=torch.channels_last)
        )
