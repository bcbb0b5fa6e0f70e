"""The reference engine: one client at a time, one step after another, written to be read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle._arrays import IntArray
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.kernel import ClientTask, FullGradient, LocalTraining


class ReferenceEngine(base.OneWorker):
    """Runs the kernel for any module and any loss. Other engines are tested to equal this one."""

    name = "reference"

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Tensor]:
        return [self._train(request) for request in requests]

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Tensor]:
        with threads_for(self.problem, GRADIENT_ROWS):
            return [self._full_gradient(request) for request in requests]

    def _train(self, request: LocalTraining) -> Tensor:
        x = request.start
        sums = x.new_zeros(request.sums, len(x))
        for task in request.tasks:
            with threads_for(self.problem, task.minibatches.batch_size):
                update = self._local_model(x, task) - x
            if not torch.isfinite(update).all():
                raise base.not_finite(self.problem, task)
            for k, weight in base.nonzero_weights(task.weights):
                sums[k] += weight * update
        return sums

    def _local_model(self, x: Tensor, task: ClientTask) -> Tensor:
        """The model of one client after its local steps."""
        client, c, gamma = task.minibatches.client, task.coefficients, task.step_size
        y, zero = x, torch.zeros_like(x)
        with base.client_context(self.problem, client, task.minibatches.round, "local training"):
            seed = task.minibatches.model_seed() if self.problem.random else 0
            for k, positions in enumerate(task.minibatches):
                rows = self.problem.rows(client, positions)
                at_y, at_x = zero, None
                if c.alpha:
                    at_y, y = gradient_at(self.problem, y, rows, seed + k)
                    at_y = kernel.adjusted(at_y, y, task.clip, task.weight_decay)
                if c.beta:
                    at_x, _ = gradient_at(self.problem, x, rows, seed + k)
                    at_x = kernel.adjusted(at_x, x, task.clip, task.weight_decay)
                y = kernel.step(y, x, at_y, at_x, gamma, c.alpha, c.beta, c.mu, c.v, c.scale)
        return y

    def _full_gradient(self, request: FullGradient) -> Tensor:
        points = torch.stack(list(request.points))
        sums = points.new_zeros(request.weights.shape[1], *points.shape)
        for client, weights in zip(request.clients.tolist(), request.weights, strict=True):
            used = base.nonzero_weights(weights)
            with base.client_context(self.problem, client, request.round, "full gradient"):
                for rows, share in self.problem.pieces(client) if used else ():
                    for j, point in enumerate(points):
                        gradient, _ = gradient_at(self.problem, point, rows, seed=0)
                        for k, weight in used:
                            sums[k, j] += weight * share * gradient
        return base.finished_gradients(request, sums)


def gradient_at(
    problem: Problem, point: Tensor, rows: IntArray, seed: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the loss over some examples, with a seed for the model's own randomness.

    And the point as the model leaves it: some layers change their own parameters, such as
    ``nn.Embedding(max_norm=...)``. A model may change its inputs, too, so they are gathered here.
    """
    parameters = list(problem.parameters.values())
    with base.model_randomness(problem, seed):
        loss = problem.loss_at(point, problem.batch(rows))
    parts = base.gradients(loss, parameters)
    left = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    return torch.cat([part.reshape(-1) for part in parts]), left
