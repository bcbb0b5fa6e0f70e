"""The sequential engine: one client at a time, with nothing between the gradients.

The parameters are views of one flat vector that is updated in place, many minibatches are
gathered at once, and nothing is allocated per step but what the gradient needs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from fedshuffle import kernel
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.gradients import Batch, Descend, by_hand, fault, hooked
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.kernel import ClientTask, FullGradient, LocalTraining
from fedshuffle.losses import MeanLoss
from fedshuffle.randomness import ReusableGenerator

_GATHERED_ROWS = 4096  # a client's minibatches are gathered in portions of about this length


class SequentialEngine(base.OneWorker):
    """Trains clients one by one, in place, into one running sum.

    A stack of linear layers is differentiated by hand, any other model by autograd.
    """

    name = "sequential"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        keep_freed_memory()
        self._random = base.check_model(problem)
        self._draw = ReusableGenerator()
        self._replica = fastest_replica(problem)
        self._here = self._replica()
        # Made when needed: at the global model, and to collect a direction or a sum.
        self._there: Replica | None = None
        self._collected: Replica | None = None

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Tensor]:
        with flushed_denormals():
            return [self._train(request) for request in requests]

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Tensor]:
        with threads_for(self.problem, GRADIENT_ROWS):
            return [self._full_gradient(request) for request in requests]

    def _train(self, request: LocalTraining) -> Tensor:
        layout = self._here.layout
        x = layout.arrange(request.start)
        arrange = lru_cache(maxsize=4)(layout.arrange)  # clients often share their v and scale
        if any(task.coefficients.beta for task in request.tasks):
            self._there = self._there or self._replica()
            self._there.flat.copy_(x)
        if any(map(_needs_direction, request.tasks)):  # not in inference mode: others use it, too
            self._collected = self._collected or self._replica()
        sums = x.new_zeros(request.sums, len(x))
        largest = max((task.minibatches.batch_size for task in request.tasks), default=1)
        # Where no autograd is needed, its bookkeeping would only cost.
        by_hand = self._here.by_hand is not None
        with threads_for(self.problem, largest), torch.inference_mode(by_hand):
            for task in request.tasks:
                stream, coefficients = task.minibatches, task.coefficients
                v = None if coefficients.v is None else arrange(coefficients.v)
                scale = None if coefficients.scale is None else arrange(coefficients.scale)
                self._here.flat.copy_(x)
                client, round = stream.client, stream.round
                with base.client_context(self.problem, client, round, "local training"):
                    if _needs_direction(task):
                        self._step_by_direction(x, task, v, scale)
                    elif coefficients.alpha:
                        self._step(x, task, v)
                    else:
                        self._step_without_gradients(x, task, v, scale)
                update = self._here.flat.sub_(x)
                if not math.isfinite(update.sum()):
                    raise base.not_finite(self.problem, task)
                for k, weight in base.nonzero_weights(task.weights):
                    sums[k].add_(update, alpha=weight)
        return layout.restore(sums)

    def _step(self, x: Tensor, task: ClientTask, v: Tensor | None) -> None:
        """The kernel, in place: y <- y - gamma (alpha g(y) - beta g(x) + v + mu (y - x))."""
        coefficients, gamma = task.coefficients, task.step_size
        alpha, beta, mu = coefficients.alpha, coefficients.beta, coefficients.mu
        here, there, y = self._here, self._there, self._here.flat
        shrink = gamma * (mu + alpha * task.weight_decay)
        anchor = gamma * (mu + beta * task.weight_decay)
        for seed, batch in self._batches(task):
            again = here.spare(batch) if beta else batch
            here.descend(batch, -gamma * alpha, here, 1 - shrink, task.clip, seed)
            if beta and there:
                self._restore(there, x)
                there.descend(again, gamma * beta, here, 1.0, task.clip, seed)
            if anchor:
                y.add_(x, alpha=anchor)
            if v is not None:
                y.add_(v, alpha=-gamma)

    def _step_by_direction(
        self, x: Tensor, task: ClientTask, v: Tensor | None, scale: Tensor | None
    ) -> None:
        """The kernel with a scale, or without g(y): the whole direction first, then the step."""
        coefficients, gamma = task.coefficients, task.step_size
        alpha, beta, mu = coefficients.alpha, coefficients.beta, coefficients.mu
        here, there, y = self._here, self._there, self._here.flat
        direction = self._collected
        assert direction is not None
        shrink = mu + alpha * task.weight_decay
        fixed = x * -(mu + beta * task.weight_decay)
        if v is not None:
            fixed += v
        for seed, batch in self._batches(task):
            direction.flat.copy_(fixed)
            again = here.spare(batch) if alpha and beta else batch
            if alpha:
                here.descend(batch, alpha, direction, clip=task.clip, seed=seed)
            if beta and there:
                self._restore(there, x)
                there.descend(again, -beta, direction, clip=task.clip, seed=seed)
            if shrink:  # last, for the model may change its parameters when it runs
                direction.flat.add_(y, alpha=shrink)
            if scale is None:
                y.add_(direction.flat, alpha=-gamma)
            else:
                y.addcmul_(direction.flat, scale, value=-gamma)

    def _step_without_gradients(
        self, x: Tensor, task: ClientTask, v: Tensor | None, scale: Tensor | None
    ) -> None:
        y, zero, mu = self._here.flat, torch.zeros_like(x), task.coefficients.mu
        for _ in range(task.minibatches.steps):
            if self.stop:
                raise base.Stopped
            y.copy_(kernel.step(y, x, zero, None, task.step_size, 0.0, 0.0, mu, v, scale))

    def _restore(self, replica: "Replica", point: Tensor) -> None:
        """Put a replica back at a point if its own forward pass may have moved it."""
        if self.problem.changes_parameters:
            replica.flat.copy_(point)

    def _batches(self, task: ClientTask) -> Iterator[tuple[int, Batch]]:
        """The minibatches of a client, with the seeds for the model's own randomness."""
        stream = task.minibatches
        seed = stream.model_seed() if self._random else 0
        for positions, lengths in stream.portions(_GATHERED_ROWS, self._draw):
            rows = self.problem.rows(stream.client, positions)
            fields = self._here.ready(self.problem.batch(rows))
            for batch in zip(*(field.split_with_sizes(lengths) for field in fields), strict=True):
                if self.stop:
                    raise base.Stopped
                yield seed, batch
                seed += 1

    def _full_gradient(self, request: FullGradient) -> Tensor:
        here, layout = self._here, self._here.layout
        own = self._collected = self._collected or self._replica()
        points = layout.arrange(torch.stack(list(request.points)))
        sums = points.new_zeros(request.weights.shape[1], *points.shape)
        for j, point in enumerate(points):
            here.flat.copy_(point)
            for client, weights in zip(request.clients.tolist(), request.weights, strict=True):
                used = base.nonzero_weights(weights)
                own.flat.zero_()
                with base.client_context(self.problem, client, request.round, "full gradient"):
                    for rows, share in self.problem.pieces(client) if used else ():
                        self._restore(here, point)
                        here.descend(here.ready(self.problem.batch(rows)), share, own)
                for k, weight in used:
                    sums[k, j].add_(own.flat, alpha=weight)
        return base.finished_gradients(request, layout.restore(sums))


def _needs_direction(task: ClientTask) -> bool:
    """Whether the whole direction of a step must be computed before the step."""
    alpha, beta = bool(task.coefficients.alpha), bool(task.coefficients.beta)
    return beta and not alpha if task.coefficients.scale is None else alpha or beta


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
        lead = arranged.shape[:-1]
        return torch.cat([view.reshape(*lead, -1) for view in self.views(arranged)], dim=-1)


class Replica:
    """A copy of the model with its parameters in one flat vector, ``flat``, differentiated by hand
    if it is a linear stack; images may run with channels last.
    """

    def __init__(
        self, problem: Problem, by_hand: Descend | None = None, channels_last: bool = False
    ) -> None:
        self.problem = problem
        self.by_hand = by_hand
        self._channels_last = channels_last
        last_axis = {2: -2} if by_hand else {4: -3} if channels_last else {}
        self.layout = Layout([p.shape for p in problem.parameters.values()], last_axis)
        self.flat = self.layout.arrange(problem.start).clone()
        self._views = self.layout.views(self.flat)
        if by_hand is not None:
            self._scratch: list[Tensor] = []
            return
        self._model = problem.replica()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        if channels_last and isinstance(problem.loss, MeanLoss):  # it runs the model as a whole
            _pool_first(self._model)

    def ready(self, fields: Batch) -> Batch:
        """Examples in the memory format of this replica."""
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
    ) -> None:
        """``into <- keep into + by g``, with g the clipped gradient at these parameters."""
        if self.by_hand and clip == math.inf:
            self.by_hand(self._views, batch, by / len(batch[0]), into._views, keep)
            return
        found: list[Tensor] | tuple[Tensor, ...]
        if self.by_hand:
            found = self._scratch = self._scratch or [torch.empty_like(v) for v in self._views]
            torch._foreach_zero_(found)
            self.by_hand(self._views, batch, 1 / len(batch[0]), found)
        else:
            with base.model_randomness(self.problem, seed):
                loss = self.problem.loss(self._model, *batch)
            found = base.gradients(loss, self._parameters)
        if clip < math.inf:
            norm = float(torch.stack(torch._foreach_norm(found)).norm())
            by *= min(1.0, clip / norm) if norm else 1.0
        if keep != 1:
            into.flat.mul_(keep)
        torch._foreach_add_(into._views, found, alpha=by)


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
