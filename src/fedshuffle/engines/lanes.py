"""Lanes: many clients (of one run or of many) walk side by side in one vectorised step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshuffle import kernel
from fedshuffle._arrays import IntArray
from fedshuffle.engines.base import PROBE_ROWS, check_probe, not_finite
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Order, Probe, Walk


@final
class LanesEngine:
    """Runs up to ``width`` clients at once, each in a lane of its own, through vmap.

    Python and dispatch are paid once per step of a whole group instead of once per client, which
    decides the speed of small models. A lane never mixes with another: minibatches of different
    lengths go in different groups, without padding, so the result is that of the reference engine.
    """

    def __init__(self, problem: Problem, width: int = 1024) -> None:
        self.problem = problem
        self.width = width
        objective = _Objective(problem.model, problem.loss)
        names = [f"model.{name}" for name in problem.parameters]
        shapes = [p.shape for p in problem.parameters.values()]
        lengths = [p.numel() for p in problem.parameters.values()]

        def losses(models: Tensor, *batch: Tensor) -> Tensor:
            parts = torch.split(models, lengths, dim=1)
            parameters = {
                name: part.reshape(-1, *shape)
                for name, part, shape in zip(names, parts, shapes, strict=True)
            }
            call: Callable[..., Any] = vmap(lambda p, *b: functional_call(objective, p, b))
            values: Tensor = call(parameters, *batch)
            return values

        self._losses = losses

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        sums = [walk.start.new_zeros(walk.sums, len(walk.start)) for walk in walks]
        lanes = [(k, order) for k, walk in enumerate(walks) for order in walk.orders]
        lanes.sort(key=lambda lane: -lane[1].minibatches.steps)  # alike lengths side by side
        for begin in range(0, len(lanes), self.width):
            group = lanes[begin : begin + self.width]
            orders = [order for _, order in group]
            starts = torch.stack([walks[k].start for k, _ in group])
            updates = self._local(starts, orders) - starts
            finite = torch.isfinite(updates).all(dim=1)
            if not finite.all():
                raise not_finite(self.problem, orders[int((~finite).nonzero()[0])])
            members: dict[int, list[int]] = defaultdict(list)
            for lane, (k, _) in enumerate(group):
                members[k].append(lane)
            for k, own in members.items():
                weights = updates.new_tensor([orders[lane].weights for lane in own])
                sums[k] += weights.T @ updates[own]
        return sums

    def _local(self, x: Tensor, orders: Sequence[Order]) -> Tensor:
        """The models of a group of clients after their local steps, one row each."""
        steerings = [order.steering for order in orders]
        gamma = _column(x, [order.step_size for order in orders])
        alpha = _column(x, [steering.alpha for steering in steerings])
        beta = _column(x, [steering.beta for steering in steerings])
        mu = _column(x, [steering.mu for steering in steerings])
        zero = torch.zeros_like(x[0])
        v = torch.stack([zero if steering.v is None else steering.v for steering in steerings])

        streams = [
            [self.problem.rows(order.minibatches.client, p) for p in order.minibatches]
            for order in orders
        ]
        y = x.clone()
        for k in range(max(len(stream) for stream in streams)):
            for lanes, batch in self._groups(streams, k, steerings):
                gradient = self._gradient(y[lanes], batch)
                anchored = bool(steerings[int(lanes[0])].beta)
                y[lanes] = kernel.step(
                    y[lanes],
                    x[lanes],
                    gradient,
                    self._gradient(x[lanes], batch) if anchored else None,
                    gamma[lanes],
                    alpha[lanes],
                    beta[lanes],
                    mu[lanes],
                    v[lanes],
                )
        return y

    def _groups(
        self, streams: Sequence[Sequence[IntArray]], k: int, steerings: Sequence[kernel.Steering]
    ) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """Lanes that still walk at step k, grouped by minibatch length and kind of step."""
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for lane, stream in enumerate(streams):
            if k < len(stream):
                groups[len(stream[k]), bool(steerings[lane].beta)].append(lane)
        return [
            (
                torch.tensor(lanes),
                self.problem.batch(np.stack([streams[lane][k] for lane in lanes])),
            )
            for lanes in groups.values()
        ]

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        offsets = self.problem.federation.offsets
        answers = [torch.zeros_like(torch.stack(list(probe.points))) for probe in probes]
        pieces: dict[int, list[tuple[Tensor, Tensor, float, IntArray]]] = defaultdict(list)
        for probe, answer in zip(probes, answers, strict=True):
            for client, weight in zip(probe.clients.tolist(), probe.weights.tolist(), strict=True):
                rows = np.arange(offsets[client], offsets[client + 1])
                for begin in range(0, len(rows), PROBE_ROWS):
                    piece = rows[begin : begin + PROBE_ROWS]
                    share = weight * len(piece) / len(rows)
                    for point, target in zip(probe.points, answer, strict=True):
                        pieces[len(piece)].append((point, target, share, piece))
        for group in pieces.values():
            for begin in range(0, len(group), self.width):
                points, targets, shares, rows_ = zip(
                    *group[begin : begin + self.width], strict=True
                )
                gradients = self._gradient(torch.stack(points), self.problem.batch(np.stack(rows_)))
                weighted = _column(gradients, shares) * gradients
                for target, row in zip(targets, weighted, strict=True):
                    target += row
        return [
            check_probe(self.problem, probe, answer)
            for probe, answer in zip(probes, answers, strict=True)
        ]

    def _gradient(self, models: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        """One gradient per lane. Lanes are independent, so one backward pass serves them all."""
        leaf = models.detach().requires_grad_()
        try:
            losses = self._losses(leaf, *batch)
        except RuntimeError as error:
            raise FedShuffleError(
                f"this model or loss cannot run in lanes ({error}). Use engine='loop'."
            ) from error
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return gradient


class _Objective(nn.Module):
    """Model and loss as one module, so that functional_call can swap the parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return like.new_tensor(values).unsqueeze(1)
