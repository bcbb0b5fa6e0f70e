"""The lean engine: one client at a time per worker, with nothing between the gradients.

The parameters are views of one flat vector that is updated in place, an epoch's examples are
gathered at once, and nothing is allocated per step but what autograd needs. Several workers are
threads with a model of their own: torch releases the interpreter's lock while it computes, so they
share the data for free.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor

from fedshuffle.engines.base import (
    PROBE_ROWS,
    check_probe,
    gradients,
    model_randomness,
    named,
    not_finite,
)
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Order, Probe, Walk

_ROWS = 4096
"""Examples of an epoch are gathered in portions of about so many rows."""


@final
class LeanEngine:
    """Walks clients one by one on each of ``workers`` threads, the longest first."""

    def __init__(self, problem: Problem, workers: int = 1) -> None:
        self.problem = problem
        with named(problem, 0, 0, "first look at the model"):
            must_be_alone = workers > 1 and problem.random
        if must_be_alone:
            raise FedShuffleError(
                "the model draws random numbers (dropout?), and threads would draw them from one"
                " stream in any order. Use engine='lean', with one worker."
            )
        self.workers = [_Worker(problem) for _ in range(workers)]
        self._threads = (
            ThreadPoolExecutor(workers, "fedshuffle", _one_thread_each) if workers > 1 else None
        )

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        return [self._walk(walk) for walk in walks]

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        return [self._probe(probe) for probe in probes]

    def _walk(self, walk: Walk) -> Tensor:
        loads = [order.minibatches.steps * order.minibatches.batch_size for order in walk.orders]
        shares = _longest_first(loads, len(self.workers))
        return self._together(
            lambda worker, share: worker.walk(walk, [walk.orders[k] for k in share]), shares
        )

    def _probe(self, probe: Probe) -> Tensor:
        sizes = self.problem.federation.sizes[probe.clients].tolist()
        shares = _longest_first(sizes, len(self.workers))
        total = self._together(lambda worker, share: worker.probe(probe, share), shares)
        return check_probe(self.problem, probe, total)

    def _together(
        self, work: Callable[[_Worker, list[int]], Tensor], shares: Sequence[list[int]]
    ) -> Tensor:
        """Every worker its share; the partial sums are added in the workers' order."""
        if self._threads is None:
            return work(self.workers[0], shares[0])
        tasks = [
            self._threads.submit(work, worker, share)
            for worker, share in zip(self.workers, shares, strict=True)
        ]
        total, *others = [task.result() for task in tasks]
        for other in others:
            total += other
        return total


class _Worker:
    """Walks orders one after another into one running sum."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.here = _Replica(problem)
        self.there: _Replica | None = None  # at the global model, for directions that need it

    def walk(self, walk: Walk, orders: Sequence[Order]) -> Tensor:
        sums = walk.start.new_zeros(walk.sums, len(walk.start))
        for order in orders:
            stream = order.minibatches
            with named(self.problem, stream.client, stream.round, "local training"):
                self._local(walk.start, order)
            update = self.here.flat.sub_(walk.start)
            if not math.isfinite(float(update.sum())):
                raise not_finite(self.problem, order)
            for total, weight in zip(sums, order.weights, strict=True):
                total.add_(update, alpha=weight)
        return sums

    def _local(self, x: Tensor, order: Order) -> None:
        """The kernel, in place: y <- y - gamma (alpha g(y) - beta g(x) + v + mu (y - x))."""
        stream, steering, gamma = order.minibatches, order.steering, order.step_size
        seed = stream.model_seed() if self.problem.random else 0
        here, y = self.here, self.here.flat
        y.copy_(x)
        there = self._at(x) if steering.beta else None
        portion = max(1, _ROWS // stream.batch_size) * stream.batch_size
        for epoch in stream.epochs():
            rows = self.problem.rows(stream.client, epoch)
            for begin in range(0, len(rows), portion):
                fields = self.problem.batch(rows[begin : begin + portion])
                for batch in zip(*(torch.split(f, stream.batch_size) for f in fields), strict=True):
                    gradient = here.gradient(batch, seed, order.clip)
                    anchor = there.gradient(batch, seed, order.clip) if there else None
                    seed += 1
                    # What multiplies y comes first, before the gradients move it.
                    shrink = gamma * (steering.mu + steering.alpha * order.weight_decay)
                    pull = gamma * (steering.mu + steering.beta * order.weight_decay)
                    if shrink or pull:
                        y.mul_(1 - shrink).add_(x, alpha=pull)
                    here.move(gradient, -gamma * steering.alpha)
                    if anchor:
                        here.move(anchor, gamma * steering.beta)
                    if steering.v is not None:
                        y.add_(steering.v, alpha=-gamma)

    def _at(self, x: Tensor) -> _Replica:
        self.there = self.there or _Replica(self.problem)
        self.there.flat.copy_(x)
        return self.there

    def probe(self, probe: Probe, share: Sequence[int]) -> Tensor:
        sums = torch.zeros_like(torch.stack(list(probe.points)))
        offsets = self.problem.federation.offsets
        for place in share:
            client, weight = int(probe.clients[place]), float(probe.weights[place])
            rows = torch.arange(int(offsets[client]), int(offsets[client + 1]))
            with named(self.problem, client, probe.round, "probe"):
                for piece in torch.split(rows, PROBE_ROWS):
                    batch = self.problem.batch(piece)
                    for total, point in zip(sums, probe.points, strict=True):
                        self.here.flat.copy_(point)
                        parts = [part.reshape(-1) for part in self.here.gradient(batch, seed=0)]
                        total.add_(torch.cat(parts), alpha=weight * len(piece) / len(rows))
        return sums


class _Replica:
    """A copy of the model whose parameters are views of one flat vector."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = copy.deepcopy(problem.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.flat = problem.start.clone()
        parts = torch.split(self.flat, [p.numel() for p in self.parameters])
        self.views = [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def gradient(
        self, batch: tuple[Tensor, ...], seed: int, clip: float = math.inf
    ) -> tuple[Tensor, ...]:
        """The clipped gradient by parameters; the seed rules the model's own randomness."""
        if self.problem.random:
            with model_randomness(self.problem, seed):
                loss = self.problem.loss(self.model, *batch)
        else:
            loss = self.problem.loss(self.model, *batch)
        found = gradients(loss, self.parameters)
        if clip < math.inf:
            norm = float(torch.stack(torch._foreach_norm(found)).norm())
            if norm > clip:
                return tuple(torch._foreach_mul(found, clip / norm))
        return found

    def move(self, along: tuple[Tensor, ...], by: float) -> None:
        """``flat += by * along``."""
        torch._foreach_add_(self.views, along, alpha=by)


def _longest_first(loads: Sequence[int], workers: int) -> list[list[int]]:
    """Each task, from the longest on, to the worker with the least to do: always the same way."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    totals = [0] * workers
    for task in sorted(range(len(loads)), key=lambda task: -loads[task]):
        worker = totals.index(min(totals))
        shares[worker].append(task)
        totals[worker] += loads[task]
    return shares


def _one_thread_each() -> None:
    """Workers must not compete with each other for cores, nor crawl through denormal numbers."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
