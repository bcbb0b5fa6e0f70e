"""The sequential engine: one client at a time, with nothing between the gradients.

The parameters are views of one flat vector that is updated in place, many minibatches are
gathered at once, and nothing is allocated per step but what the gradient needs.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.gradients import Batch
from fedshuffle.engines.local_losses import LocalLosses
from fedshuffle.engines.optimisers import over
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.engines.replica import Replica, fastest_replica
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining
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
        ids = self.problem.federation.ids
        gathered = base.Gathered(request, partial(self.own_gradients, request.start), ids)
        arranged, sums = request.chain.any_layout, list(gathered.sums)
        losses, norms = LocalLosses(self._here.by_hand), np.zeros(len(request.tasks))
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
                losses.end_task()
                update = self._here.flat.sub_(x)
                norm = base.norms(update)
                norms[k] = length = float(norm)
                if not math.isfinite(length):
                    raise base.not_finite(self.problem, task)
                if request.chain:
                    if not arranged:  # the chain may compute gradients with this replica
                        update = layout.restore(update.clone())
                    gathered.add([k], update[None], norm[None])
                    continue
                for total, weight in zip(sums, task.weights, strict=True):
                    total.add_(update, alpha=weight)
        everyone = slice(0, len(norms))
        gathered.observe(everyone, train_loss=losses.means(), update_norm=norms)
        return gathered.answer(layout.restore if arranged else None)

    def _step(self, x: Tensor, task: ClientTask, v: Tensor | None, losses: LocalLosses) -> None:
        """The kernel, in place: y <- y - gamma (alpha g(y) - beta g(x) + v + mu (y - x))."""
        coefficients, gamma = task.coefficients, task.step_size
        alpha, beta, mu = coefficients.alpha, coefficients.beta, coefficients.mu
        here, there, y = self._here, self._there, self._here.flat
        shrink = gamma * (mu + alpha * task.weight_decay)
        anchor = gamma * (mu + beta * task.weight_decay)
        observe = losses.observed.append
        for seed, length, batch in self._batches(task, losses):
            again = here.spare(batch) if beta else batch
            observe(here.descend(batch, -gamma * alpha, here, 1 - shrink, task.clip, seed, length))
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
        losses: LocalLosses,
    ) -> None:
        """The whole direction first, then the step: the kernel with a scale, or without g(y), and
        local optimisers.
        """
        coefficients, gamma = task.coefficients, task.step_size
        alpha, beta, mu = coefficients.alpha, coefficients.beta, coefficients.mu
        here, there, y = self._here, self._there, self._here.flat
        direction = self._collected
        assert direction is not None
        views = here.views, direction.views
        optimiser = over(task, (y, direction.flat), views)
        shrink = mu + alpha * task.weight_decay
        fixed = x * -(mu + beta * task.weight_decay)
        if v is not None:
            fixed += v
        for seed, length, batch in self._batches(task, losses if alpha else None):
            direction.flat.copy_(fixed)
            again = here.spare(batch) if alpha and beta else batch
            if alpha:
                seen = here.descend(batch, alpha, direction, 1.0, task.clip, seed, length)
                losses.observed.append(seen)
            if beta and there:
                self._restore(there, x)
                there.descend(again, -beta, direction, clip=task.clip, seed=seed)
            if shrink:  # last, for the model may change its parameters when it runs
                direction.flat.add_(y, alpha=shrink)
            if optimiser is not None:
                if scale is not None:
                    direction.flat.mul_(scale)
                optimiser.step()
            elif scale is None:
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

    def _restore(self, replica: Replica, point: Tensor) -> None:
        """Put a replica back at a point if its own forward pass may have moved it."""
        if self.problem.changes_parameters:
            replica.flat.copy_(point)

    def _batches(
        self, task: ClientTask, losses: LocalLosses | None
    ) -> Iterator[tuple[int, int, Batch]]:
        """The minibatches of a client: the seed of the model's own randomness, the length, and the
        examples. Lengths are noted for the losses, if there will be any.
        """
        stream, step = task.minibatches, 0
        as_they_are = self.problem.federation.transform is None
        seed = stream.model_seed() if self._random else 0
        for positions, lengths in stream.portions(_GATHERED_ROWS, self._draw):
            fields = self.problem.gather(self.problem.rows(stream.client, positions))
            if as_they_are:
                fields = self._here.ready(fields)
            if losses is not None:
                losses.lengths += lengths
            parts = zip(*(field.split_with_sizes(lengths) for field in fields), strict=True)
            for length, batch in zip(lengths, parts, strict=True):
                if self.stop:
                    raise base.Stopped
                if not as_they_are:
                    changed = self.problem.transformed(batch, stream.address(step))
                    batch = self._here.ready(changed)
                yield seed + step, length, batch
                step += 1

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
                    needed = request.chain or weights.any()
                    address = request.address(client)
                    pieces = self.problem.pieces(client, None, address) if needed else ()
                    for some, share, drawn in pieces:
                        self._restore(here, point)
                        here.descend(here.ready(self.problem.batch(some, drawn)), share, own)
                if request.chain:
                    rows[i] = own.flat
                for total, weight in zip(sums, weights.tolist(), strict=True):
                    total[j].add_(own.flat, alpha=weight)
        if request.chain:
            ids = self.problem.federation.ids
            return base.transformed_gradients(request, layout.restore(rows), ids)
        return base.finished_gradients(request, layout.restore(sums))


def _needs_direction(task: ClientTask) -> bool:
    """Whether the whole direction of a step must be computed before the step."""
    if task.optimiser is not None:
        return True
    alpha, beta = bool(task.coefficients.alpha), bool(task.coefficients.beta)
    return beta and not alpha if task.coefficients.scale is None else alpha or beta
