"""Lanes: many clients (of one run or of many) walk side by side in one vectorised step."""

from __future__ import annotations

import abc
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines.agreement import fault, trusted
from fedshuffle.engines.base import (
    Stopped,
    check_probe,
    first_look,
    gradients,
    not_finite,
)
from fedshuffle.engines.machine import flushed_denormals, keep_freed_memory, threads_for
from fedshuffle.engines.problem import PROBE_ROWS, Loss, Problem
from fedshuffle.engines.stack import Stack
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Order, Probe, Walk
from fedshuffle.local_work import Minibatches
from fedshuffle.randomness import Rewound

_NUMBERS = 1 << 22
"""All lanes together hold at most so many parameters, so that memory does not grow with cohorts."""

_EXAMPLES = 1 << 20
"""The lanes of a group visit about so many examples together."""

_FEW_SUMS = 16
"""Requests with more sums than this are looked at: perhaps each client counts in few of them."""

Tables = list[Tensor]
"""The parameters of many models: one table per parameter, one row per model."""


@final
class LanesEngine:
    """Runs up to ``width`` clients at once, each in a lane of its own.

    Python and dispatch are paid once per step of a whole group instead of once per client, which
    decides the speed of small models. A lane never mixes with another, so the result is that of the
    reference engine. A stack of linear layers is differentiated by hand (unless ``fused`` is
    False), any other model through vmap.
    """

    stop = False

    def __init__(self, problem: Problem, width: int | None = None, fused: bool = True) -> None:
        self.problem = problem
        self.width = width or max(1, min(1024, _NUMBERS // len(problem.start)))
        keep_freed_memory()
        if first_look(problem):
            raise FedShuffleError(
                "the model draws random numbers (dropout?), which lanes would draw in another order"
                " than the reference. Use the engine 'lean', or 'lean:2:processes' for two workers."
            )
        self._shapes = [p.shape for p in problem.parameters.values()]
        self._slopes = self._trusted(Stack.of(problem) if fused else None)
        self._rewound = Rewound()

    def _trusted(self, stack: Stack | None) -> _Slopes:
        """The fastest way to the gradients that agrees with the reference."""
        problem = self.problem
        if stack is not None:
            by_hand = _ByHand(stack)
            way = "differentiated by hand in lanes"
            if trusted(problem, way, lambda: partial(self._gradients, by_hand)):
                return by_hand
        _refuse_what_vmap_ignores(problem)
        slopes = _ByVmap(problem)
        wrong = fault(problem, "in lanes", lambda: partial(self._gradients, slopes))
        if wrong is not None:
            raise _not_in_lanes(wrong.why)
        return slopes

    def _gradients(self, slopes: _Slopes, points: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        """The gradients at all points, each in a lane of its own, over the same examples."""
        found = [torch.zeros_like(table) for table in self._tables(points)]
        many = tuple(torch.stack([field] * len(points)) for field in batch)
        shares = points.new_full((len(points), len(batch[0])), 1 / len(batch[0]))
        slopes.descend(self._tables(points), many, shares, found, None)
        return torch.cat([_flat(table) for table in found], dim=1)

    def _tables(self, models: Tensor) -> Tables:
        """Models given as rows of plain vectors."""
        parts = torch.split(models, [shape.numel() for shape in self._shapes], dim=1)
        pairs = zip(parts, self._shapes, strict=True)
        return [part.reshape(len(models), *shape) for part, shape in pairs]

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        # All sums of all walks are the rows of one table.
        first = np.cumsum([0, *(walk.sums for walk in walks)])
        starts = self._tables(torch.stack([walk.start for walk in walks]))
        sums = [start.new_zeros(int(first[-1]), start[0].numel()) for start in starts]
        lanes = [(k, order) for k, walk in enumerate(walks) for order in walk.orders]
        # Alike lengths side by side; and only those together that need gradients at all.
        lanes.sort(key=lambda lane: (_needs(lane[1]), -lane[1].minibatches.steps))
        for _, alike in itertools.groupby(lanes, lambda lane: _needs(lane[1])):
            for group in self._groups(alike):
                self._walk_group(group, starts, sums, first)
        return list(torch.split(torch.cat(sums, dim=1), [walk.sums for walk in walks]))

    def _walk_group(
        self, group: list[tuple[int, Order]], starts: Tables, sums: Tables, first: IntArray
    ) -> None:
        """Walk the orders of a group, and add what comes of it to the sums."""
        orders = [order for _, order in group]
        threads = threads_for(self.problem, sum(o.minibatches.batch_size for o in orders))
        # Where no autograd is needed, its book-keeping would only cost.
        with flushed_denormals(), threads, torch.inference_mode(self._slopes.by_hand):
            owner = torch.tensor([k for k, _ in group], device=starts[0].device)
            x = [start[owner] for start in starts]
            y = self._local(x, orders)
            weights = np.zeros((int(first[-1]), len(group)))
            for lane, (k, order) in enumerate(group):
                weights[first[k] : first[k + 1], lane] = order.weights
            summed = _Summed(starts[0], weights, int(np.diff(first).max()))
            sizes = starts[0].new_zeros(len(group))
            for table, end, begin in zip(sums, y, x, strict=True):
                update = _flat(end.sub_(begin))
                sizes += update.sum(dim=1)
                summed.add(update, table)
            finite = torch.isfinite(sizes)
            if not finite.all():
                raise not_finite(self.problem, orders[int((~finite).nonzero()[0])])

    def _groups(self, lanes: Iterable[tuple[int, Order]]) -> Iterator[list[tuple[int, Order]]]:
        group: list[tuple[int, Order]] = []
        examples = 0
        for lane in lanes:
            stream = lane[1].minibatches
            if len(group) == self.width or (group and examples > _EXAMPLES):
                yield group
                group, examples = [], 0
            group.append(lane)
            examples += stream.steps * stream.batch_size
        if group:
            yield group

    def _local(self, x: Tables, orders: Sequence[Order]) -> Tables:
        """The models of a group of clients after their local steps.

        The kernel, with a row per client:
        y <- y - gamma D (alpha g(y) - beta g(x) + v + mu (y - x)).
        """
        like = x[0]
        steerings = [order.steering for order in orders]
        gamma = np.array([order.step_size for order in orders])
        alpha = np.array([steering.alpha for steering in steerings])
        beta = np.array([steering.beta for steering in steerings])
        mu = np.array([steering.mu for steering in steerings])
        decay = np.array([order.weight_decay for order in orders])
        shrink, pull = gamma * (mu + alpha * decay), gamma * (mu + beta * decay)
        along, against = like.new_tensor(-gamma * alpha), like.new_tensor(gamma * beta)
        keep, less = like.new_tensor(1 - shrink) if shrink.any() else None, like.new_tensor(-shrink)
        pulled = _scaled(x, like.new_tensor(pull)) if pull.any() else None
        push = self._rows([steering.v for steering in steerings], 0.0)
        if push is not None:
            push = _scaled(push, like.new_tensor(-gamma))
        scale = self._rows([steering.scale for steering in steerings], 1.0)
        clips = any(order.clip < math.inf for order in orders)
        clip = like.new_tensor([order.clip for order in orders]) if clips else None
        at_y, at_x = bool(alpha.any()), bool(beta.any())

        y = [table.clone() for table in x]
        for lanes, rows, shares in self._schedule(orders) if at_y or at_x else _blindly(orders):
            if self.stop:
                raise Stopped
            batch = self.problem.batch(rows) if at_y or at_x else ()
            share = torch.as_tensor(shares, dtype=like.dtype, device=like.device)
            here = [table[lanes] for table in y]  # views, unless the lanes are scattered
            limit = None if clip is None else clip[lanes]
            into, kept = here, None if keep is None else keep[lanes]
            if scale is not None:  # the whole step first, then it is scaled
                into, kept = _scaled(here, less[lanes]), None
            again = batch
            if at_y and at_x and not self._slopes.by_hand:  # a model may change what it is given
                again = tuple(field.clone() for field in batch)
            if at_y:
                self._descend(here, batch, share, along[lanes], into, kept, limit)
            elif kept is not None:
                torch._foreach_mul_(into, [_column(kept, table) for table in into])
            if at_x:
                there = [table[lanes] for table in x]
                self._descend(there, again, share, against[lanes], into, None, limit)
            for more in (pulled, push):
                if more is not None:
                    torch._foreach_add_(into, [table[lanes] for table in more])
            if scale is not None:
                torch._foreach_addcmul_(here, into, [table[lanes] for table in scale])
            if not isinstance(lanes, slice):
                for table, part in zip(y, here, strict=True):
                    table[lanes] = part
        return y

    def _rows(self, vectors: Sequence[Tensor | None], otherwise: float) -> Tables | None:
        """A vector per client, which many may share; nothing if no client has one."""
        known = {id(vector): vector for vector in vectors if vector is not None}
        if not known:
            return None
        place = {key: k for k, key in enumerate(known, 1)}
        table = torch.stack(list(known.values()))
        table = torch.cat([torch.full_like(table[:1], otherwise), table])
        of = [place.get(id(vector), 0) for vector in vectors]
        which = torch.tensor(of, device=table.device)
        return [part[which] for part in self._tables(table)]

    def _descend(
        self,
        at: Tables,
        batch: tuple[Tensor, ...],
        shares: Tensor,
        by: Tensor,
        into: Tables,
        keep: Tensor | None,
        clip: Tensor | None,
    ) -> None:
        """``into <- keep into + by g``, with g the clipped gradients at ``at``, row by row."""
        if clip is None:
            self._slopes.descend(at, batch, shares * by.unsqueeze(1), into, keep)
            return
        gradient = [torch.zeros_like(table) for table in at]
        self._slopes.descend(at, batch, shares, gradient, None)
        norms = torch.stack([_flat(table).norm(dim=1) for table in gradient]).norm(dim=0)
        shorter = (clip / norms.clamp_min(1e-30)).clamp_max(1.0)  # a zero gradient stays zero
        if keep is not None:
            torch._foreach_mul_(into, [_column(keep, table) for table in into])
        torch._foreach_add_(into, _scaled(gradient, shorter * by))

    def _schedule(self, orders: Sequence[Order]) -> Iterator[_Step]:
        """The steps of a group, whose longest come first."""
        # Runs in lockstep often walk the same minibatches: draw them once.
        streams = [order.minibatches for order in orders]
        drawn = {stream: stream.positions(self._rewound) for stream in dict.fromkeys(streams)}
        firsts = self.problem.rows(np.array([stream.client for stream in streams]), 0)
        timetable = _Timetable(streams, [drawn[stream] for stream in streams], firsts)
        if timetable.full or self._slopes.by_hand:
            return timetable.side_by_side()
        return timetable.in_groups()

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        # All answers are the rows of one table: every sum of a probe has a row for every point.
        points = torch.stack([x for probe in probes for x in probe.points])
        shapes = [(probe.weights.shape[1], len(probe.points)) for probe in probes]
        answers = points.new_zeros(sum(sums * count for sums, count in shapes), points.shape[1])
        pieces: dict[int, list[_Piece]] = defaultdict(list)
        for piece in self._pieces(probes):
            pieces[len(piece.rows)].append(piece)
        tables, most = self._tables(points), max(sums for sums, _ in shapes)
        for length, alike in pieces.items():
            width = max(1, min(self.width, 64 * PROBE_ROWS // length))
            for begin in range(0, len(alike), width):
                group = alike[begin : begin + width]
                at = torch.tensor([piece.point for piece in group], device=points.device)
                found = [torch.zeros_like(table[at]) for table in tables]
                batch = self.problem.batch(np.stack([piece.rows for piece in group]))
                each = points.new_full((len(group), length), 1 / length)
                with threads_for(self.problem, len(group) * length):
                    self._slopes.descend([table[at] for table in tables], batch, each, found, None)
                weights = np.zeros((len(answers), len(group)))
                for lane, piece in enumerate(group):
                    weights[piece.answers, lane] = piece.weights
                flat = torch.cat([_flat(table) for table in found], dim=1)
                _Summed(flat, weights, most).add(flat, answers)
        parts = torch.split(answers, [sums * count for sums, count in shapes])
        return [
            check_probe(self.problem, probe, part.view(*shape, -1))
            for probe, part, shape in zip(probes, parts, shapes, strict=True)
        ]

    def _pieces(self, probes: Sequence[Probe]) -> Iterator[_Piece]:
        """Every piece of every client's data, once for each of the points."""
        point = answer = 0
        for probe in probes:
            count = len(probe.points)
            end = answer + count * probe.weights.shape[1]
            for client, weights in zip(probe.clients.tolist(), probe.weights, strict=True):
                for rows, share in self.problem.pieces(client) if weights.any() else ():
                    for j in range(count):
                        yield _Piece(
                            rows, point + j, slice(answer + j, end, count), weights * share
                        )
            point, answer = point + count, end


class _Piece(NamedTuple):
    """Examples of a client whose mean gradient is wanted at one of the points."""

    rows: IntArray
    point: int
    answers: slice
    """To which rows of the answers it is added."""
    weights: FloatArray
    """By what it counts in each of them."""


def _needs(order: Order) -> int:
    """Which gradients an order needs: 0 at y and perhaps at x, 1 only at x, 2 none at all."""
    if order.steering.alpha:
        return 0
    return 1 if order.steering.beta else 2


class _Summed:
    """``weights @ table``: a row for every sum, a column for every lane."""

    def __init__(self, like: Tensor, weights: FloatArray, sums: int) -> None:
        self._dense = None
        entries = np.nonzero(weights) if sums > _FEW_SUMS else None
        if entries is None or 8 * len(entries[0]) > weights.size:
            self._dense = like.new_tensor(weights)
        else:  # when every client has a sum of its own, nearly all of the product is zeros
            self._rows, self._lanes = (torch.as_tensor(e, device=like.device) for e in entries)
            self._weights = like.new_tensor(weights[entries])

    def add(self, table: Tensor, into: Tensor) -> None:
        """Add the sums of a table's rows, and never hold more than the table once again."""
        if self._dense is not None:
            into.addmm_(self._dense, table)
            return
        parts = (self._rows, self._lanes, self._weights)
        for rows, lanes, weights in zip(
            *(torch.split(part, len(table)) for part in parts), strict=True
        ):
            into.index_add_(0, rows, table[lanes].mul_(weights.unsqueeze(1)))


class _Slopes(abc.ABC):
    """The gradients of a group of clients at models of their own, one row each."""

    by_hand: bool
    """Whether it does without autograd; then the examples of a minibatch may count differently,
    and those without a share are mere fillers.
    """

    @abc.abstractmethod
    def descend(
        self,
        at: Tables,
        batch: tuple[Tensor, ...],
        shares: Tensor,
        into: Tables,
        keep: Tensor | None,
    ) -> None:
        """``into_i <- keep_i into_i + sum_j shares_ij grad f_ij(at_i)`` for every client i."""


@final
class _ByHand(_Slopes):
    by_hand = True

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def descend(
        self,
        at: Tables,
        batch: tuple[Tensor, ...],
        shares: Tensor,
        into: Tables,
        keep: Tensor | None,
    ) -> None:
        kept: float | Tensor = 1.0 if keep is None else keep.view(-1, 1, 1)
        self._stack.descend(at, batch, shares.unsqueeze(2), into, kept)


@final
class _ByVmap(_Slopes):
    by_hand = False

    def __init__(self, problem: Problem) -> None:
        # A copy of its own, since functional_call swaps the parameters of the module itself.
        objective = _Objective(problem.replica(), problem.loss)
        names = [f"model.{name}" for name in problem.parameters]

        def loss(model: Tables, batch: tuple[Tensor, ...]) -> Tensor:
            parameters = dict(zip(names, model, strict=True))
            value: Tensor = functional_call(objective, parameters, batch)
            return value

        self._losses: Callable[..., Tensor] = vmap(loss)

    def descend(
        self,
        at: Tables,
        batch: tuple[Tensor, ...],
        shares: Tensor,
        into: Tables,
        keep: Tensor | None,
    ) -> None:
        leaves = [table.detach().requires_grad_() for table in at]
        try:
            losses = self._losses(leaves, batch)
        except Exception as error:
            raise FedShuffleError(
                f"this model or loss cannot run in lanes ({type(error).__name__}: {error})."
                " Use the engine 'loop' to see at which client, or if it cannot be vectorised."
            ) from error
        # Lanes are independent, so one backward pass serves them all.
        found = gradients(losses.sum(dim=0), leaves)
        by = shares.sum(dim=1)
        for table, gradient in zip(into, found, strict=True):
            if keep is not None:
                table.mul_(_column(keep, table))
            table.addcmul_(gradient, _column(by, table))


def _not_in_lanes(why: str) -> FedShuffleError:
    return FedShuffleError(
        f"this model or loss cannot run in lanes ({why}). Use the engine 'lean', or 'loop' to see"
        " which client it fails at."
    )


def _refuse_what_vmap_ignores(problem: Problem) -> None:
    """What looking up embeddings does besides; the examples tried might not show it."""
    if problem.restless:
        raise FedShuffleError(
            "the forward pass changes parameters (max_norm?), which has no effect in lanes. Use the"
            " engine 'lean'."
        )
    with _Lookups() as lookups:
        problem.loss(problem.replica(), *problem.few())
    if lookups.options:
        raise FedShuffleError(
            f"an embedding has {lookups.options[0]}, which has no effect in lanes. Use the engine"
            " 'lean'."
        )


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the options of embeddings that are looked up, by a layer or by a function."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.options: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.embedding, torch.ops.aten._embedding_bag):
            named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
            given = {**dict(named), **(kwargs or {})}
            if (
                given.get("padding_idx", -1) >= 0
                and func.overloadpacket is torch.ops.aten.embedding
            ):
                self.options.append("padding_idx")
            if given.get("scale_grad_by_freq"):
                self.options.append("scale_grad_by_freq")
        return func(*args, **(kwargs or {}))


class _Objective(nn.Module):
    """Model and loss as one module, so that functional_call can swap the parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


_Step = tuple[slice | list[int], IntArray, FloatArray]
"""Which lanes take a step together, the rows of their minibatches, and each row's share in the
mean of its minibatch."""


class _Timetable:
    """The minibatches of a group of lanes, of which the longest come first.

    Step after step, all lanes that still walk have ``width`` places each; places that a shorter
    minibatch leaves empty hold the client's first row, with no share.
    """

    def __init__(
        self, streams: Sequence[Minibatches], positions: Sequence[IntArray], firsts: IntArray
    ) -> None:
        size = np.array([stream.size for stream in streams])
        batch = np.array([stream.batch_size for stream in streams])
        self.steps = np.array([stream.steps for stream in streams])
        self.width = int(batch.max())
        walking = (self.steps > np.arange(self.steps[0])[:, None]).sum(axis=1)
        self.begins = np.concatenate([[0], np.cumsum(walking * self.width)])

        # Every position of every stream: its epoch, its step, and its place in the minibatch.
        counts = np.array([len(some) for some in positions])
        lane = np.repeat(np.arange(len(streams)), counts)
        nth = np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)
        epoch, within = np.divmod(nth, size[lane])
        turn, place = np.divmod(within, batch[lane])
        step = epoch * (-(-size // batch))[lane] + turn
        target = self.begins[step] + lane * self.width + place
        length = np.minimum(batch[lane], size[lane] - turn * batch[lane])

        walkers = np.arange(walking.sum()) - np.repeat(np.cumsum(walking) - walking, walking)
        self.rows = np.repeat(firsts[walkers], self.width)
        self.rows[target] += np.concatenate(positions)
        self.shares = np.zeros(len(self.rows))
        self.shares[target] = 1 / length
        self.full = len(target) == len(self.rows)

    def side_by_side(self) -> Iterator[_Step]:
        """All lanes that still walk take each step together."""
        for begin, end in itertools.pairwise(self.begins.tolist()):
            shape = (end - begin) // self.width, self.width
            rows, shares = self.rows[begin:end], self.shares[begin:end]
            yield slice(0, shape[0]), rows.reshape(shape), shares.reshape(shape)

    def in_groups(self) -> Iterator[_Step]:
        """Lanes with minibatches of one length step together.

        Lanes do not depend on each other, so those with another length before them wait until they
        are the largest group.
        """
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)

        def wait(lane: int, step: int) -> None:
            if step < self.steps[lane]:
                begin = int(self.begins[step]) + lane * self.width
                length = int(np.count_nonzero(self.shares[begin : begin + self.width]))
                waiting[length].append((lane, step))

        for lane in range(len(self.steps)):
            wait(lane, 0)
        while waiting:
            length = max(waiting, key=lambda length: (len(waiting[length]), length))
            group = waiting.pop(length)
            begins = [int(self.begins[step]) + lane * self.width for lane, step in group]
            rows = self.rows[np.array(begins)[:, None] + np.arange(length)]
            yield [lane for lane, _ in group], rows, np.full(rows.shape, 1 / length)
            for lane, step in group:
                wait(lane, step + 1)


def _blindly(orders: Sequence[Order]) -> Iterator[_Step]:
    """The steps of a group that needs no examples; the longest come first."""
    steps = np.array([order.minibatches.steps for order in orders])
    for walking in (steps > np.arange(steps[0])[:, None]).sum(axis=1).tolist():
        yield slice(0, walking), np.zeros((walking, 0), np.int64), np.zeros((walking, 0))


def _column(values: Tensor, like: Tensor) -> Tensor:
    """One number per row, to be multiplied with a table."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _flat(table: Tensor) -> Tensor:
    """Every row of a table as a vector."""
    return table.reshape(len(table), -1)


def _scaled(tables: Tables, by: Tensor) -> Tables:
    return [table * _column(by, table) for table in tables]
