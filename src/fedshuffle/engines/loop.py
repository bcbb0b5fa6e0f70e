"""The reference engine: one client at a time, one step after another, written to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle._arrays import IntArray
from fedshuffle.engines.base import (
    check_probe,
    counted,
    gradients,
    model_randomness,
    named,
    not_finite,
)
from fedshuffle.engines.machine import threads_for
from fedshuffle.engines.problem import PROBE_ROWS, Problem
from fedshuffle.kernel import Order, Probe, Walk


@final
class LoopEngine:
    """Runs the kernel for any module and any loss. Other engines are held equal to this one."""

    stop = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        return [self._walk(walk) for walk in walks]

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        with threads_for(self.problem, PROBE_ROWS):
            return [self._probe(probe) for probe in probes]

    def _walk(self, walk: Walk) -> Tensor:
        x = walk.start
        sums = x.new_zeros(walk.sums, len(x))
        for order in walk.orders:
            with threads_for(self.problem, order.minibatches.batch_size):
                update = self._local(x, order) - x
            if not torch.isfinite(update).all():
                raise not_finite(self.problem, order)
            for k, weight in counted(order.weights):
                sums[k] += weight * update
        return sums

    def _local(self, x: Tensor, order: Order) -> Tensor:
        """The model of one client after its local steps."""
        client, steering = order.minibatches.client, order.steering
        y, nothing = x, torch.zeros_like(x)
        with named(self.problem, client, order.minibatches.round, "local training"):
            seed = order.minibatches.model_seed() if self.problem.random else 0
            for k, positions in enumerate(order.minibatches):
                rows = self.problem.rows(client, positions)
                gradient, anchor = nothing, None
                if steering.alpha:
                    gradient, y = gradient_at(self.problem, y, rows, seed + k)
                    gradient = kernel.adjusted(gradient, y, order.clip, order.weight_decay)
                if steering.beta:
                    anchor, _ = gradient_at(self.problem, x, rows, seed + k)
                    anchor = kernel.adjusted(anchor, x, order.clip, order.weight_decay)
                y = kernel.step(
                    y,
                    x,
                    gradient,
                    anchor,
                    order.step_size,
                    steering.alpha,
                    steering.beta,
                    steering.mu,
                    steering.v,
                    steering.scale,
                )
        return y

    def _probe(self, probe: Probe) -> Tensor:
        points = torch.stack(list(probe.points))
        sums = points.new_zeros(probe.weights.shape[1], *points.shape)
        for client, weights in zip(probe.clients.tolist(), probe.weights, strict=True):
            counts = counted(weights)
            with named(self.problem, client, probe.round, "probe"):
                for rows, share in self.problem.pieces(client) if counts else ():
                    for j, point in enumerate(points):
                        gradient, _ = gradient_at(self.problem, point, rows, seed=0)
                        for k, weight in counts:
                            sums[k, j] += weight * share * gradient
        return check_probe(self.problem, probe, sums)


def gradient_at(
    problem: Problem, point: Tensor, rows: IntArray, seed: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the loss over some examples; the seed rules the model's own randomness.

    And the point as the model leaves it: some layers change their own parameters, such as
    ``nn.Embedding(max_norm=...)``. The examples are gathered anew each time, as the model may
    change them, too.
    """
    parameters = list(problem.parameters.values())
    with model_randomness(problem, seed):
        loss = problem.loss_at(point, problem.batch(rows))
    parts = gradients(loss, parameters)
    left = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    return torch.cat([part.reshape(-1) for part in parts]), left
