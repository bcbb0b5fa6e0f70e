"""The sequential engine: one client at a time, with nothing between the gradients.

The parameters are views of one flat vector that is updated in place, many minibatches are
gathered at once, and nothing is allocated per step but what the gradient needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.engines.replica import Replica, fastest_replica
from fedshuffle.kernel import ClientTask, FullGradient, LocalTraining
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
        by_hand = self._here.stack is not None
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

    def _restore(self, replica: Replica, point: Tensor) -> None:
        """Put a replica back at a point if its own forward pass may have moved it."""
        if self.problem.changes_parameters:
            replica.flat.copy_(point)

    def _batches(self, task: ClientTask) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
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
