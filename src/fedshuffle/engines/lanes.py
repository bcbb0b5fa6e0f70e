"""Lanes: many clients (of one run or of many) walk side by side in one vectorised step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshuffle import kernel
from fedshuffle._arrays import IntArray
from fedshuffle.engines.base import PROBE_ROWS, check_probe, gradients, not_finite
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

        def loss(model: Tensor, *batch: Tensor) -> Tensor:
            parts = torch.split(model, lengths)
            parameters = {
                name: part.reshape(shape)
                for name, part, shape in zip(names, parts, shapes, strict=True)
            }
            value: Tensor = functional_call(objective, parameters, batch)
            return value

        self._losses: Callable[..., Tensor] = vmap(loss)

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        # All sums of all walks are the rows of one table.
        first = np.cumsum([0, *(walk.sums for walk in walks)])
        sums = walks[0].start.new_zeros(int(first[-1]), len(walks[0].start))
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
            weights = np.zeros((len(sums), len(group)))
            for lane, (k, order) in enumerate(group):
                weights[first[k] : first[k + 1], lane] = order.weights
            sums += updates.new_tensor(weights) @ updates
        return list(torch.split(sums, [walk.sums for walk in walks]))

    def _local(self, x: Tensor, orders: Sequence[Order]) -> Tensor:
        """The models of a group of clients after their local steps, one row each."""
        steerings = [order.steering for order in orders]
        gamma = _column(x, [order.step_size for order in orders])
        alpha = _column(x, [steering.alpha for steering in steerings])
        beta = _column(x, [steering.beta for steering in steerings])
        mu = _column(x, [steering.mu for steering in steerings])
        clip = _column(x, [order.clip for order in orders])
        decay = _column(x, [order.weight_decay for order in orders])
        adjust = any(order.clip < math.inf or order.weight_decay for order in orders)
        zero = torch.zeros_like(x[0])
        v = torch.stack([zero if steering.v is None else steering.v for steering in steerings])

        # Runs in lockstep often walk the same minibatches: draw them once.
        drawn = {
            stream: [self.problem.rows(stream.client, positions) for positions in stream]
            for stream in {order.minibatches for order in orders}
        }
        streams = [drawn[order.minibatches] for order in orders]
        y = x.clone()
        for lanes, rows in _lockstep(streams):
            anchored = [place for place, lane in enumerate(lanes) if steerings[lane].beta]
            gradient, anchor = self._gradients(y[lanes], x[lanes], rows, anchored)
            if adjust:
                gradient = kernel.adjusted(gradient, y[lanes], clip[lanes], decay[lanes])
                if anchor is not None:
                    anchor = kernel.adjusted(anchor, x[lanes], clip[lanes], decay[lanes])
            y[lanes] = kernel.step(
                y[lanes],
                x[lanes],
                gradient,
                anchor,
                gamma[lanes],
                alpha[lanes],
                beta[lanes],
                mu[lanes],
                v[lanes],
            )
        return y

    def _gradients(
        self, y: Tensor, x: Tensor, rows: IntArray, anchored: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients at y and, for the lanes that the kernel anchors there, at x: one pass."""
        if not anchored:
            return self._gradient(y, self.problem.batch(rows)), None
        batch = self.problem.batch(np.concatenate([rows, rows[anchored]]))
        both = self._gradient(torch.cat([y, x[anchored]]), batch)
        at_y, at_x = both[: len(y)], both[len(y) :]
        anchor = torch.zeros_like(at_y)
        anchor[anchored] = at_x
        return at_y, anchor

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        offsets = self.problem.federation.offsets
        starts = np.cumsum([0, *(len(probe.points) for probe in probes[:-1])]).tolist()
        answers = torch.zeros_like(torch.stack([x for probe in probes for x in probe.points]))
        pieces: dict[int, list[tuple[Tensor, int, float, IntArray]]] = defaultdict(list)
        for start, probe in zip(starts, probes, strict=True):
            for client, weight in zip(probe.clients.tolist(), probe.weights.tolist(), strict=True):
                rows = np.arange(offsets[client], offsets[client + 1])
                for begin in range(0, len(rows), PROBE_ROWS):
                    piece = rows[begin : begin + PROBE_ROWS]
                    share = weight * len(piece) / len(rows)
                    for target, point in enumerate(probe.points, start):
                        pieces[len(piece)].append((point, target, share, piece))
        for group in pieces.values():
            for begin in range(0, len(group), self.width):
                points, targets, shares, rows_ = zip(
                    *group[begin : begin + self.width], strict=True
                )
                found = self._gradient(torch.stack(points), self.problem.batch(np.stack(rows_)))
                answers.index_add_(0, torch.tensor(targets), _column(found, shares) * found)
        parts = torch.split(answers, [len(probe.points) for probe in probes])
        return [
            check_probe(self.problem, probe, part)
            for probe, part in zip(probes, parts, strict=True)
        ]

    def _gradient(self, models: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        """One gradient per lane. Lanes are independent, so one backward pass serves them all."""
        leaf = models.detach().requires_grad_()
        try:
            losses = self._losses(leaf, *batch)
        except Exception as error:
            raise FedShuffleError(
                f"this model or loss cannot run in lanes ({type(error).__name__}: {error})."
                " Use engine='loop' to see which client it fails at, or if it cannot be vectorised."
            ) from error
        (gradient,) = gradients(losses.sum(dim=0), [leaf])
        return gradient


def _lockstep(streams: Sequence[Sequence[IntArray]]) -> Iterator[tuple[list[int], IntArray]]:
    """Steps that lanes can take together: lanes, and the rows of their minibatches.

    Only minibatches of one length fit in one tensor. Lanes do not depend on each other, so those
    with a shorter minibatch before them wait until they are the largest group.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    done = [0] * len(streams)
    for lane, stream in enumerate(streams):
        waiting[len(stream[0])].append(lane)
    while waiting:
        length = max(waiting, key=lambda length: (len(waiting[length]), length))
        lanes = waiting.pop(length)
        yield lanes, np.stack([streams[lane][done[lane]] for lane in lanes])
        for lane in lanes:
            done[lane] += 1
            if done[lane] < len(streams[lane]):
                waiting[len(streams[lane][done[lane]])].append(lane)


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
