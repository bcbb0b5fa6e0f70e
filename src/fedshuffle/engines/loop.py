"""The reference engine: one client at a time, one step after another, written to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle.engines.base import (
    PROBE_ROWS,
    check_probe,
    counted,
    gradients,
    model_randomness,
    named,
    not_finite,
)
from fedshuffle.engines.problem import Problem
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
        return [self._probe(probe) for probe in probes]

    def _walk(self, walk: Walk) -> Tensor:
        x = walk.start
        sums = x.new_zeros(walk.sums, len(x))
        for order in walk.orders:
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
                batch: tuple[Tensor, ...] = ()
                if steering.alpha or steering.beta:  # else nobody looks at it
                    batch = self.problem.batch(self.problem.rows(client, positions))
                gradient = self._adjusted(y, batch, seed + k, order) if steering.alpha else nothing
                anchor = self._adjusted(x, batch, seed + k, order) if steering.beta else None
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
        offsets = self.problem.federation.offsets
        for client, weights in zip(probe.clients.tolist(), probe.weights, strict=True):
            counts = counted(weights)
            rows = torch.arange(int(offsets[client]), int(offsets[client + 1]))
            with named(self.problem, client, probe.round, "probe"):
                for piece in torch.split(rows, PROBE_ROWS) if counts else ():
                    batch = self.problem.batch(piece)
                    for j, point in enumerate(points):
                        gradient = self._gradient(point, batch, seed=0) * len(piece) / len(rows)
                        for k, weight in counts:
                            sums[k, j] += weight * gradient
        return check_probe(self.problem, probe, sums)

    def _adjusted(
        self, point: Tensor, batch: tuple[Tensor, ...], seed: int, order: Order
    ) -> Tensor:
        gradient = self._gradient(point, batch, seed)
        return kernel.adjusted(gradient, point, order.clip, order.weight_decay)

    def _gradient(self, point: Tensor, batch: tuple[Tensor, ...], seed: int) -> Tensor:
        """The gradient of the minibatch loss; the seed rules the model's own randomness."""
        with model_randomness(self.problem, seed):
            loss = self.problem.loss_at(point, batch)
        parts = gradients(loss, list(self.problem.parameters.values()))
        return torch.cat([part.reshape(-1) for part in parts])
