"""The reference engine: one client at a time, one step after another, written to be read."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle._arrays import IntArray
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.engines.optimisers import over
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining
from fedshuffle.randomness import NO_ADDRESS, Address


class ReferenceEngine(base.OneWorker):
    """Runs the kernel for any module and any loss. Other engines are tested to equal this one."""

    name = "reference"

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Answer]:
        return [self._train(request) for request in requests]

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Answer]:
        with threads_for(self.problem, GRADIENT_ROWS):
            return [self._full_gradient(request) for request in requests]

    def _train(self, request: LocalTraining) -> Answer:
        x = request.start
        gathered = base.Gathered(
            request, partial(self.own_gradients, x), self.problem.federation.ids
        )
        for k, task in enumerate(request.tasks):
            with threads_for(self.problem, task.minibatches.batch_size):
                y, loss = self._local_model(x, task)
            update = y - x
            if not torch.isfinite(update).all():
                raise base.not_finite(self.problem, task)
            norm = base.norms(update[None])
            gathered.observe([k], train_loss=loss, update_norm=norm)
            gathered.add([k], update[None], norm)
        return gathered.answer()

    def _local_model(self, x: Tensor, task: ClientTask) -> tuple[Tensor, float]:
        """The model of one client after its local steps, and its mean loss over them."""
        client, c, gamma = task.minibatches.client, task.coefficients, task.step_size
        y, zero, v, losses = x, torch.zeros_like(x), c.v, list[float]()
        if c.own_gradient:
            v = (zero if v is None else v) - self.own_gradients(x, [task])[0]
        own, gradient = x.clone(), torch.zeros_like(x)
        optimiser = over(task, (own, gradient), (self._views(own), self._views(gradient)))
        with base.client_context(self.problem, client, task.minibatches.round, "local training"):
            seed = task.minibatches.model_seed() if self.problem.random else 0
            for k, positions in enumerate(task.minibatches):
                rows = self.problem.rows(client, positions)
                examples = rows, seed + k, task.minibatches.address(k)
                at_y, at_x = zero, None
                if c.alpha:
                    at_y, y, loss = gradient_at(self.problem, y, *examples)
                    at_y = kernel.adjusted(at_y, y, task.clip, task.weight_decay)
                    losses.append(loss)
                if c.beta:
                    at_x, _, _ = gradient_at(self.problem, x, *examples)
                    at_x = kernel.adjusted(at_x, x, task.clip, task.weight_decay)
                along = kernel.direction(y, x, at_y, at_x, c.alpha, c.beta, c.mu, v, c.scale)
                if optimiser is None:
                    y = y - gamma * along
                else:  # it steps from its own copy of y, along its own copy of the direction
                    own.copy_(y)
                    gradient.copy_(along)
                    optimiser.step()
                    y = own
        return y, sum(losses) / len(losses) if losses else math.nan

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in their own shapes."""
        shapes = [p.shape for p in self.problem.parameters.values()]
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _full_gradient(self, request: FullGradient) -> Answer:
        points = torch.stack(list(request.points))
        if request.chain:
            rows = [self._gradients(client, points, request) for client in request.clients.tolist()]
            return base.transformed_gradients(request, torch.cat(rows), self.problem.federation.ids)
        sums = points.new_zeros(request.weights.shape[1], *points.shape)
        for client, weights in zip(request.clients.tolist(), request.weights, strict=True):
            gradients = self._gradients(client, points, request) if weights.any() else points
            for total, weight in zip(sums, weights.tolist(), strict=True):
                total += weight * gradients
        return base.finished_gradients(request, sums)

    def _gradients(self, client: int, points: Tensor, request: FullGradient) -> Tensor:
        """A client's full gradient at each of the points."""
        gradients = torch.zeros_like(points)
        with base.client_context(self.problem, client, request.round, "full gradient"):
            for rows, share, address in self.problem.pieces(client, None, request.address(client)):
                for own, point in zip(gradients, points, strict=True):
                    own += share * gradient_at(self.problem, point, rows, 0, address)[0]
        return gradients


def gradient_at(
    problem: Problem, point: Tensor, rows: IntArray, seed: int, address: Address = NO_ADDRESS
) -> tuple[Tensor, Tensor, float]:
    """The gradient of the loss over some examples, with a seed for the model's own randomness and
    the address of that of the examples' transform.

    And the point as the model leaves it: some layers change their own parameters, such as
    ``nn.Embedding(max_norm=...)``; and the loss. A model may change its inputs, too, so they are
    gathered here.
    """
    parameters = list(problem.parameters.values())
    with base.model_randomness(problem, seed):
        loss = problem.loss_at(point, problem.batch(rows, address))
    parts = base.gradients(loss, parameters)
    left = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    return torch.cat([part.reshape(-1) for part in parts]), left, float(loss.detach())
