"""The vectorized engine: many clients (of one run or of many) train side by side in one step.

The models of a group of clients are rows of one table per parameter. Clients never mix, so the
result is that of the reference engine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines import base
from fedshuffle.engines.cpu_tuning import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.gradients import (
    Batch,
    Descend,
    Tables,
    by_hand,
    by_vmap,
    column,
    fault,
    flat_rows,
    scaled_rows,
)
from fedshuffle.engines.local_losses import GroupLosses
from fedshuffle.engines.packing import (
    GradientPiece,
    OwnedTask,
    PackedMinibatches,
    gradient_pieces,
    groups,
    transformed_rows,
)
from fedshuffle.engines.problem import GRADIENT_ROWS, Problem
from fedshuffle.engines.row_optimiser import RowOptimiser
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining
from fedshuffle.randomness import ReusableGenerator
from fedshuffle.transforms import NO_TRANSFORMS

_MAX_NUMBERS = 1 << 22  # parameters of a group, so that memory does not grow with cohorts


class VectorizedEngine(base.OneWorker):
    """Trains up to ``width`` clients at once, each in one row, with one dispatch per step for all.

    A stack of linear layers is differentiated by hand, any other model through vmap.
    """

    name = "vectorized"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.width = max(1, min(1024, _MAX_NUMBERS // len(problem.start)))
        keep_freed_memory()
        if base.check_model(problem):
            raise FedShuffleError(
                "the model draws random numbers (dropout?), which the vectorized engine would draw"
                " in another order than the reference. Use the engine 'sequential', or"
                " 'sequential:2:processes' for two workers."
            )
        self._shapes = [p.shape for p in problem.parameters.values()]
        self._draw = ReusableGenerator()
        found, way = by_hand(problem), "differentiated by hand, many clients at once"
        if found and fault(problem, way, partial(self._gradients, found.descend), warn=True):
            found = None
        # Without autograd, the examples of a minibatch may have different shares, even none.
        self._by_hand = found
        if found:
            self._descend: Descend = found.descend
            return
        self._descend = by_vmap(problem)
        wrong = fault(problem, "vectorized", partial(self._gradients, self._descend))
        if wrong:
            raise FedShuffleError(
                f"this model or loss cannot be vectorized ({wrong}). Use the engine"
                " 'sequential', or 'reference' to see at which client it fails."
            )

    def _gradients(self, descend: Descend, points: Tensor, batch: Batch) -> Tensor:
        """The gradients at all points over the same examples."""
        found = [torch.zeros_like(table) for table in self._tables(points)]
        many = tuple(torch.stack([field] * len(points)) for field in batch)
        shares = points.new_full((len(points), len(batch[0])), 1 / len(batch[0]))
        descend(self._tables(points), many, shares, found, None)
        return torch.cat([flat_rows(table) for table in found], dim=1)

    def _tables(self, models: Tensor) -> Tables:
        parts = torch.split(models, [shape.numel() for shape in self._shapes], dim=1)
        pairs = zip(parts, self._shapes, strict=True)
        return [part.reshape(len(models), *shape) for part, shape in pairs]

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Answer]:
        # All sums of all requests are the rows of one table, and so are the numbers of all tasks.
        first = np.cumsum([0, *(request.sums for request in requests)])
        place = np.cumsum([0, *(len(request.tasks) for request in requests)])
        starts = self._tables(torch.stack([request.start for request in requests]))
        sums = [start.new_zeros(int(first[-1]), start[0].numel()) for start in starts]
        metrics = np.full((2, int(place[-1])), math.nan)
        ids = self.problem.federation.ids
        gathered = {
            k: base.Gathered(request, partial(self.own_gradients, request.start), ids)
            for k, request in enumerate(requests)
            if request.chain
        }
        for group in groups([request.tasks for request in requests], self.width):
            found = self._train_group(group, starts, sums, first, gathered)
            metrics[:, [place[one.request] + one.row for one in group]] = found
        answers = []
        for k, total in enumerate(torch.split(torch.cat(sums, dim=1), np.diff(first).tolist())):
            loss, norm = metrics[:, place[k] : place[k + 1]]
            own = {"train_loss": loss, "update_norm": norm}
            if k in gathered:
                gathered[k].observe(slice(None), **own)
            answers.append(gathered[k].answer() if k in gathered else Answer(total, metrics=own))
        return answers

    def own_gradients(self, x: Tensor, tasks: Sequence[ClientTask]) -> Tensor:
        clients = np.array([task.minibatches.client for task in tasks])
        stream = tasks[0].minibatches
        request = FullGradient((x,), clients, np.eye(len(tasks)), stream.round, seed=stream.seed)
        with torch.inference_mode(False):  # local training may be in it
            rows = self.full_gradients([request])[0].sums[:, 0]
        return rows.addcmul_(x.new_tensor([[task.weight_decay] for task in tasks]), x)

    def _train_group(
        self,
        group: list[OwnedTask],
        starts: Tables,
        sums: Tables,
        first: IntArray,
        gathered: dict[int, base.Gathered],
    ) -> FloatArray:
        """Train the clients of a group, and add what they send to the sums; returns their mean
        losses and the norms of their updates.
        """
        tasks = [one.task for one in group]
        threads = threads_for(self.problem, sum(task.minibatches.batch_size for task in tasks))
        # Where no autograd is needed, its bookkeeping would only cost.
        with flushed_denormals(), threads, torch.inference_mode(self._by_hand is not None):
            owner = torch.tensor([one.request for one in group], device=starts[0].device)
            x = [start[owner] for start in starts]
            y, losses = self._local(x, group, starts)
            weights = np.zeros((int(first[-1]), len(group)))
            for row, one in enumerate(group):
                if one.request not in gathered:
                    weights[first[one.request] : first[one.request + 1], row] = one.task.weights
            dense, norms = starts[0].new_tensor(weights), list[Tensor]()
            for table, end, begin in zip(sums, y, x, strict=True):
                update = flat_rows(end.sub_(begin))
                norms.append(base.norms(update))
                if len(gathered) < len(starts[0]):
                    table.addmm_(dense, update)
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            finite = torch.isfinite(norm)
            if not finite.all():
                raise base.not_finite(self.problem, tasks[int((~finite).nonzero()[0])])
            for k, answer in gathered.items():
                mine = [row for row, one in enumerate(group) if one.request == k]
                if mine:
                    updates = torch.cat([flat_rows(table[mine]) for table in y], dim=1)
                    answer.add([group[row].row for row in mine], updates, norm[mine])
            return np.stack([losses, base.numbers(norm)])

    def _local(
        self, x: Tables, group: list[OwnedTask], starts: Tables
    ) -> tuple[Tables, FloatArray]:
        """The models of a group of clients after their local steps, with a row per client:
        y <- y - gamma D (alpha g(y) - beta g(x) + v + mu (y - x)), or as their local optimiser
        steps along that; and their mean losses.
        """
        like, tasks = x[0], [one.task for one in group]
        coefficients = [task.coefficients for task in tasks]
        gamma, decay = np.array([(task.step_size, task.weight_decay) for task in tasks]).T
        optimiser = None
        if tasks[0].optimiser is not None:  # it multiplies by the step sizes itself
            optimiser = RowOptimiser(tasks[0].optimiser, x, gamma)
            gamma = np.ones_like(gamma)
        alpha, beta, mu = np.array([(c.alpha, c.beta, c.mu) for c in coefficients]).T
        shrink, anchor = gamma * (mu + alpha * decay), gamma * (mu + beta * decay)
        along, against = like.new_tensor(-gamma * alpha), like.new_tensor(gamma * beta)
        keep, less = like.new_tensor(1 - shrink) if shrink.any() else None, like.new_tensor(-shrink)
        constant = [scaled_rows(x, like.new_tensor(anchor))] if anchor.any() else []
        if (v := self._rows(self._constants(group, starts), 0.0)) is not None:
            constant.append(scaled_rows(v, like.new_tensor(-gamma)))
        scale = self._rows([c.scale for c in coefficients], 1.0)
        clips = any(task.clip < math.inf for task in tasks)
        clip = like.new_tensor([task.clip for task in tasks]) if clips else None
        at_y, at_x = bool(alpha.any()), bool(beta.any())

        y = [table.clone() for table in x]
        packed = self._packed(tasks)
        losses = GroupLosses(self._by_hand, packed)
        for rows, batch, shares in self._batches(packed, tasks, at_y or at_x):
            if self.stop:
                raise base.Stopped
            share = torch.as_tensor(shares, dtype=like.dtype, device=like.device)
            here = [table[rows] for table in y]  # views, unless the rows are scattered
            limit = None if clip is None else clip[rows]
            into, kept = here, None if keep is None else keep[rows]
            if scale is not None or optimiser is not None:  # the whole direction first
                into, kept = scaled_rows(here, less[rows]), None
            again = batch
            if at_y and at_x and not self._by_hand:  # a model may change its inputs
                again = tuple(field.clone() for field in batch)
            if at_y:
                seen = self._clipped(here, batch, share, along[rows], into, kept, limit)
                losses.add(rows, seen)
            elif kept is not None:
                torch._foreach_mul_(into, [column(kept, table) for table in into])
            if at_x:
                there = [table[rows] for table in x]
                self._clipped(there, again, share, against[rows], into, None, limit)
            for more in constant:
                torch._foreach_add_(into, [table[rows] for table in more])
            if optimiser is not None:
                if scale is not None:
                    torch._foreach_mul_(into, [table[rows] for table in scale])
                optimiser.step(rows, here, list(torch._foreach_neg(into)))
            elif scale is not None:
                torch._foreach_addcmul_(here, into, [table[rows] for table in scale])
            if not isinstance(rows, slice):
                for table, part in zip(y, here, strict=True):
                    table[rows] = part
        return y, losses.means()

    def _batches(
        self, packed: PackedMinibatches, tasks: Sequence[ClientTask], needed: bool
    ) -> Iterator[tuple[slice | list[int], Batch, FloatArray]]:
        """The clients that step together, their examples, if needed, and the shares of these."""
        done = [0] * len(tasks)
        padded = packed.full or bool(self._by_hand)
        for rows, examples, shares in packed.side_by_side() if padded else packed.by_length():
            if self.problem.federation.transform is None or not needed:
                yield rows, self.problem.gather(examples) if needed else (), shares
                continue
            clients = list(range(rows.stop)) if isinstance(rows, slice) else rows
            streams = [tasks[k].minibatches for k in clients]
            addresses = [one.address(done[k]) for k, one in zip(clients, streams, strict=True)]
            for k in clients:
                done[k] += 1
            owners = [stream.client for stream in streams]
            stage = "local training"
            alike = transformed_rows(self.problem, examples, owners, addresses, stage)
            for some, batch in alike:
                if len(some) == len(clients):
                    yield rows, batch, shares
                else:
                    yield [clients[k] for k in some], batch, shares[some]

    def _constants(self, group: list[OwnedTask], starts: Tables) -> list[Tensor | None]:
        """The vector v of each client, less its own full gradient if that is asked for."""
        vectors = [one.task.coefficients.v for one in group]
        own = [row for row, one in enumerate(group) if one.task.coefficients.own_gradient]
        for k in {group[row].request for row in own}:
            mine = [row for row in own if group[row].request == k]
            x = torch.cat([start[k].reshape(-1) for start in starts])
            gradients = self.own_gradients(x, [group[row].task for row in mine])
            for row, gradient in zip(mine, gradients, strict=True):
                v = vectors[row]
                vectors[row] = -gradient if v is None else v - gradient
        return vectors

    def _rows(self, vectors: Sequence[Tensor | None], default: float) -> Tables | None:
        """A vector per client, which many may share; None if no client has one."""
        known = {id(vector): vector for vector in vectors if vector is not None}
        if not known:
            return None
        place = {key: k for k, key in enumerate(known, 1)}
        table = torch.stack(list(known.values()))
        table = torch.cat([torch.full_like(table[:1], default), table])
        which = torch.tensor([place.get(id(v), 0) for v in vectors], device=table.device)
        return [part[which] for part in self._tables(table)]

    def _clipped(
        self,
        at: Tables,
        batch: Batch,
        shares: Tensor,
        by: Tensor,
        into: Tables,
        keep: Tensor | None,
        clip: Tensor | None,
    ) -> Tensor:
        """``into <- keep into + by g``, with g the clipped gradients at ``at``, row by row.

        Returns what was observed of the losses.
        """
        if clip is None:
            return self._descend(at, batch, shares * by.unsqueeze(1), into, keep)
        gradient = [torch.zeros_like(table) for table in at]
        observed = self._descend(at, batch, shares, gradient, None)
        norms = torch.stack([flat_rows(table).norm(dim=1) for table in gradient]).norm(dim=0)
        shorter = (clip / norms.clamp_min(1e-30)).clamp_max(1.0)  # a zero gradient stays zero
        if keep is not None:
            torch._foreach_mul_(into, [column(keep, table) for table in into])
        torch._foreach_add_(into, scaled_rows(gradient, shorter * by))
        return observed

    def _packed(self, tasks: Sequence[ClientTask]) -> PackedMinibatches:
        """The minibatches of a group, with the longest clients first."""
        streams = [task.minibatches for task in tasks]
        # Runs in lockstep often share their minibatches: draw them once.
        drawn = {stream: stream.positions(self._draw) for stream in dict.fromkeys(streams)}
        firsts = self.problem.rows(np.array([stream.client for stream in streams]), 0)
        return PackedMinibatches(streams, [drawn[stream] for stream in streams], firsts)

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Answer]:
        answers = self._full_gradients([_each_client(r) if r.chain else r for r in requests])
        ids = self.problem.federation.ids
        return [
            base.transformed_gradients(request, answer.sums[:, 0], ids) if request.chain else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _full_gradients(self, requests: Sequence[FullGradient]) -> list[Answer]:
        # All answers are the rows of one table: every sum of a request has a row for every point.
        points = torch.stack([x for request in requests for x in request.points])
        shapes = [(request.weights.shape[1], len(request.points)) for request in requests]
        answers = points.new_zeros(sum(map(math.prod, shapes)), points.shape[1])
        tables = self._tables(points)
        for length, pieces in gradient_pieces(self.problem, requests).items():
            width = max(1, min(self.width, 64 * GRADIENT_ROWS // length))
            for begin in range(0, len(pieces), width):
                for some, batch in self._examples(pieces[begin : begin + width]):
                    at = torch.tensor([piece.point for piece in some], device=points.device)
                    here = [table[at] for table in tables]
                    found = [torch.zeros_like(table) for table in here]
                    each = points.new_full((len(at), length), 1 / length)
                    with threads_for(self.problem, len(at) * length):
                        self._descend(here, batch, each, found, None)
                    weights = np.zeros((len(answers), len(at)))
                    for k, piece in enumerate(some):
                        weights[piece.answers, k] = piece.weights
                    flat = torch.cat([flat_rows(table) for table in found], dim=1)
                    answers.addmm_(flat.new_tensor(weights), flat)
        parts = torch.split(answers, [math.prod(shape) for shape in shapes])
        return [
            base.finished_gradients(request, part.view(*shape, -1))
            for request, part, shape in zip(requests, parts, shapes, strict=True)
        ]

    def _examples(
        self, pieces: Sequence[GradientPiece]
    ) -> Iterator[tuple[Sequence[GradientPiece], Batch]]:
        """Pieces of one length with their examples; those of one shape together."""
        rows = np.stack([piece.rows for piece in pieces])
        if self.problem.federation.transform is None:
            yield pieces, self.problem.gather(rows)
            return
        clients, addresses = [one.client for one in pieces], [one.address for one in pieces]
        alike = transformed_rows(self.problem, rows, clients, addresses, "full gradient")
        for some, batch in alike:
            yield [pieces[k] for k in some], batch


def _each_client(request: FullGradient) -> FullGradient:
    """The same request for the gradient of each client, before any transform."""
    weights = np.eye(len(request.clients))
    return replace(request, chain=NO_TRANSFORMS, weights=weights, weight_decay=0.0)
