"""The sequential engine: one client at a time, with nothing between the gradients.

The parameters are views of one flat vector that is updated in place, many minibatches are
gathered at once, and nothing is allocated per step but what the gradient needs.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import kernel
from fedshuffle._arrays import FloatArray
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.gradients import Batch, ByHand, by_hand, fault, hooked
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining
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

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Answer]:
        with flushed_denormals():
            return [self._train(request) for request in requests]

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Answer]:
        with threads_for(self.problem, GRADIENT_ROWS):
            return [self._full_gradient(request) for request in requests]

    def _train(self, request: LocalTraining) -> Answer:
        layout = self._here.layout
        x = layout.arrange(request.start)
        arrange = lru_cache(maxsize=4)(layout.arrange)  # clients often share their v and scale
        if any(task.coefficients.beta for task in request.tasks):
            self._there = self._there or self._replica()
            self._there.flat.copy_(x)
        if any(map(_needs_direction, request.tasks)):  # not in inference mode: others use it, too
            self._collected = self._collected or self._replica()
        gathered = base.Gathered(request, partial(self.own_gradients, request.start))
        arranged = request.chain.any_layout  # whether updates may be summed as they are
        losses = _Losses(self._here.by_hand)
        largest = max((task.minibatches.batch_size for task in request.tasks), default=1)
        # Where no autograd is needed, its bookkeeping would only cost.
        by_hand = self._here.by_hand is not None
        with threads_for(self.problem, largest), torch.inference_mode(by_hand):
            for k, task in enumerate(request.tasks):
                stream, coefficients = task.minibatches, task.coefficients
                v = None if coefficients.v is None else arrange(coefficients.v)
                scale = None if coefficients.scale is None else arrange(coefficients.scale)
                if coefficients.own_gradient:
                    own = layout.arrange(self.own_gradients(request.start, [task])[0])
                    v = -own if v is None else v - own
                self._here.flat.copy_(x)
                client, round = stream.client, stream.round
                with base.client_context(self.problem, client, round, "local training"):
                    if _needs_direction(task):
                        self._step_by_direction(x, task, v, scale, losses)
                    elif coefficients.alpha:
                        self._step(x, task, v, losses)
                    else:
                        self._step_without_gradients(x, task, v, scale)
                update = self._here.flat.sub_(x)
                norm = float(base.norms(update))
                if not math.isfinite(norm):
                    raise base.not_finite(self.problem, task)
                losses.end(k)
                gathered.observe([k], update_norm=norm)
                if request.chain:  # which may compute gradients with this replica
                    update = update.clone() if arranged else layout.restore(update.clone())
                gathered.add([k], update[None])
        gathered.observe(losses.tasks, train_loss=losses.means())
        return gathered.answer(layout.restore if arranged else None)

    def _step(self, x: Tensor, task: ClientTask, v: Tensor | None, losses: "_Losses") -> None:
        """The kernel, in place: y <- y - gamma (alpha g(y) - beta g(x) + v + mu (y - x))."""
        coefficients, gamma = task.coefficients, task.step_size
        alpha, beta, mu = coefficients.alpha, coefficients.beta, coefficients.mu
        here, there, y = self._here, self._there, self._here.flat
        shrink = gamma * (mu + alpha * task.weight_decay)
        anchor = gamma * (mu + beta * task.weight_decay)
        for seed, batch in self._batches(task):
            again = here.spare(batch) if beta else batch
            losses.add(here.descend(batch, -gamma * alpha, here, 1 - shrink, task.clip, seed))
            if beta and there:
                self._restore(there, x)
                there.descend(again, gamma * beta, here, 1.0, task.clip, seed)
            if anchor:
                y.add_(x, alpha=anchor)
            if v is not None:
                y.add_(v, alpha=-gamma)

    def _step_by_direction(
        self,
        x: Tensor,
        task: ClientTask,
        v: Tensor | None,
        scale: Tensor | None,
        losses: "_Losses",
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
                losses.add(here.descend(batch, alpha, direction, clip=task.clip, seed=seed))
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

    def _full_gradient(self, request: FullGradient) -> Answer:
        here, layout = self._here, self._here.layout
        own = self._collected = self._collected or self._replica()
        points = layout.arrange(torch.stack(list(request.points)))
        sums = points.new_zeros(request.weights.shape[1], *points.shape)
        rows = points.new_empty(len(request.clients) if request.chain else 0, points.shape[1])
        for j, point in enumerate(points):
            here.flat.copy_(point)
            for i, client in enumerate(request.clients.tolist()):
                weights = request.weights[i]
                own.flat.zero_()
                with base.client_context(self.problem, client, request.round, "full gradient"):
                    for some, share in self.problem.pieces(client) if weights.any() else ():
                        self._restore(here, point)
                        here.descend(here.ready(self.problem.batch(some)), share, own)
                if request.chain:
                    rows[i] = own.flat
                for total, weight in zip(sums, weights.tolist(), strict=True):
                    total[j].add_(own.flat, alpha=weight)
        if request.chain:
            return base.transformed_gradients(request, layout.restore(rows))
        return base.finished_gradients(request, layout.restore(sums))


class _Losses:
    """The losses of minibatches: kept as steps observe them, and computed for many at once."""

    _MOST = 4096  # steps to keep

    def __init__(self, by_hand: ByHand | None) -> None:
        self._by_hand = by_hand
        self._observed: list[Tensor] = []
        self._computed: list[FloatArray] = []
        self._steps = 0
        self.tasks: list[int] = []
        """The tasks that are done,"""
        self._ends = [0]
        """and after how many steps each of them was."""

    def add(self, observed: Tensor) -> None:
        """Keep what a step observed."""
        self._observed.append(observed)
        self._steps += 1
        if len(self._observed) == self._MOST:
            self._compute()

    def end(self, task: int) -> None:
        """The steps since the last task were those of this one."""
        self.tasks.append(task)
        self._ends.append(self._steps)

    def means(self) -> FloatArray:
        """The mean loss over the steps of each task; NaN for one without gradients."""
        self._compute()
        losses = np.concatenate([np.zeros(0), *self._computed])
        parts = (losses[begin:end] for begin, end in itertools.pairwise(self._ends))
        return np.array([part.mean() if len(part) else math.nan for part in parts])

    def _compute(self) -> None:
        if self._observed and self._by_hand is None:
            self._computed.append(torch.stack(self._observed).double().cpu().numpy())
        elif self._observed and self._by_hand:
            lengths = np.array([len(one) for one in self._observed])
            each = self._by_hand.losses(torch.cat(self._observed)).double().cpu().numpy()
            self._computed.append(np.add.reduceat(each, np.cumsum(lengths) - lengths) / lengths)
        self._observed.clear()


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
        self, problem: Problem, by_hand: ByHand | None = None, channels_last: bool = False
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
    ) -> Tensor:
        """``into <- keep into + by g``, with g the clipped gradient at these parameters.

        Returns what was observed of the loss: the loss itself, or what ``by_hand.losses`` takes.
        """
        if self.by_hand and clip == math.inf:
            return self.by_hand.descend(self._views, batch, by / len(batch[0]), into._views, keep)
        found: list[Tensor] | tuple[Tensor, ...]
        if self.by_hand:
            found = self._scratch = self._scratch or [torch.empty_like(v) for v in self._views]
            torch._foreach_zero_(found)
            observed = self.by_hand.descend(self._views, batch, 1 / len(batch[0]), found)
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
        torch._foreach_add_(into._views, found, alpha=by)
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
