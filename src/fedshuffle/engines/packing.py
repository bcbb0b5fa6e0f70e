"""What clients do side by side: the groups that train together, with their minibatches as rows of
examples for every step, and the pieces of their full gradients.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines.base import client_context
from fedshuffle.engines.gradients import Batch
from fedshuffle.engines.problem import Problem
from fedshuffle.kernel import ClientTask, FullGradient
from fedshuffle.local_work import Minibatches
from fedshuffle.randomness import Address

_MAX_EXAMPLES = 1 << 20  # about the most examples that a group of clients visits


class OwnedTask(NamedTuple):
    """A task, the place of its request among all, and its own place there."""

    request: int
    row: int
    task: ClientTask


def groups(requests: Iterable[Sequence[ClientTask]], width: int) -> Iterator[list[OwnedTask]]:
    """The tasks of all requests in groups of at most ``width`` that train together: similar lengths
    side by side; and apart from others those that need no gradient at y, or have another optimiser.
    """
    every = [OwnedTask(k, r, task) for k, own in enumerate(requests) for r, task in enumerate(own)]
    kinds: dict[Hashable, list[OwnedTask]] = defaultdict(list)
    for one in sorted(every, key=lambda one: -one.task.minibatches.steps):
        kinds[one.task.optimiser, bool(one.task.coefficients.alpha)].append(one)
    for tasks in kinds.values():
        group, examples = list[OwnedTask](), 0
        for one in tasks:
            if len(group) == width or (group and examples > _MAX_EXAMPLES):
                yield group
                group, examples = [], 0
            group.append(one)
            examples += one.task.minibatches.steps * one.task.minibatches.batch_size
        yield group


Step = tuple[slice | list[int], IntArray, FloatArray]
"""Which clients take a step together, the rows of their minibatches, and each row's share in the
mean of its minibatch."""


class PackedMinibatches:
    """The minibatches of a group of clients, the longest clients first.

    In a step, each client has ``width`` places; empty ones hold its first row, with no share.
    """

    def __init__(
        self, streams: Sequence[Minibatches], positions: Sequence[IntArray], firsts: IntArray
    ) -> None:
        size, batch, self.steps = np.array([(s.size, s.batch_size, s.steps) for s in streams]).T
        self.width = int(batch.max())
        active: IntArray = (self.steps > np.arange(self.steps[0])[:, None]).sum(axis=1)
        self.begins = np.concatenate([[0], np.cumsum(active * self.width)])

        # Every position of every stream: its epoch, its step, and its place in the minibatch.
        counts = np.array([len(some) for some in positions])
        client = np.repeat(np.arange(len(streams)), counts)
        epoch, within = np.divmod(_ranges(counts), size[client])
        turn, place = np.divmod(within, batch[client])
        step = epoch * (-(-size // batch))[client] + turn
        target = self.begins[step] + client * self.width + place
        length = np.minimum(batch[client], size[client] - turn * batch[client])

        self.owners = np.repeat(_ranges(active), self.width)
        """The client of each place, step after step."""
        self.rows = firsts[self.owners]
        self.rows[target] += np.concatenate(positions)
        self.shares = np.zeros(len(self.rows))
        self.shares[target] = 1 / length
        self.full = len(target) == len(self.rows)

    def side_by_side(self) -> Iterator[Step]:
        """All clients that are not done take each step together."""
        for begin, end in itertools.pairwise(self.begins.tolist()):
            shape = (end - begin) // self.width, self.width
            rows, shares = self.rows[begin:end], self.shares[begin:end]
            yield slice(0, shape[0]), rows.reshape(shape), shares.reshape(shape)

    def by_length(self) -> Iterator[Step]:
        """Clients whose next minibatches have the same length step together; the others wait."""
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        clients, steps = np.arange(len(self.steps)), np.zeros_like(self.steps)
        while True:
            for client, step in zip(clients.tolist(), steps.tolist(), strict=True):
                if step < self.steps[client]:
                    begin = int(self.begins[step]) + client * self.width
                    length = int(np.count_nonzero(self.shares[begin : begin + self.width]))
                    waiting[length].append((client, step))
            if not waiting:
                return
            # The largest such group comes first.
            length = max(waiting, key=lambda length: (len(waiting[length]), length))
            clients, steps = np.array(waiting.pop(length)).T
            begins = self.begins[steps] + clients * self.width
            rows = self.rows[begins[:, None] + np.arange(length)]
            yield clients.tolist(), rows, np.full(rows.shape, 1 / length)
            steps = steps + 1


def transformed_rows(
    problem: Problem,
    examples: IntArray,
    clients: Sequence[int],
    addresses: Sequence[Address],
    stage: str,
) -> Iterator[tuple[list[int], Batch]]:
    """The minibatches of clients, a row each, after the transform; those of one shape together.

    Errors name the client, the round and the stage.
    """
    found: dict[object, list[tuple[int, Batch]]] = defaultdict(list)
    fields = problem.gather(examples)
    for k, (client, address) in enumerate(zip(clients, addresses, strict=True)):
        with client_context(problem, client, address.round, stage):
            batch = problem.transformed(tuple(field[k] for field in fields), address)
        found[tuple((field.shape, field.dtype) for field in batch)].append((k, batch))
    for alike in found.values():
        batches = zip(*(batch for _, batch in alike), strict=True)
        yield [k for k, _ in alike], tuple(torch.stack(field) for field in batches)


class GradientPiece(NamedTuple):
    """Add the mean gradient of these rows at this point to these answers, with these weights."""

    client: int
    rows: IntArray
    address: Address
    point: int
    answers: slice
    weights: FloatArray


def gradient_pieces(
    problem: Problem, requests: Sequence[FullGradient]
) -> dict[int, list[GradientPiece]]:
    """Every piece of every client's data, once for each of the points, by length."""
    found: dict[int, list[GradientPiece]] = defaultdict(list)
    point = answer = 0
    for request in requests:
        count = len(request.points)
        end = answer + count * request.weights.shape[1]
        for client, weights in zip(request.clients.tolist(), request.weights, strict=True):
            address = request.address(client)
            pieces = problem.pieces(client, None, address) if weights.any() else ()
            for rows, share, drawn in pieces:
                for j in range(count):
                    places = slice(answer + j, end, count)
                    one = GradientPiece(client, rows, drawn, point + j, places, weights * share)
                    found[len(rows)].append(one)
        point, answer = point + count, end
    return found


def _ranges(lengths: IntArray) -> IntArray:
    """``0, 1, ..`` for every length, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
