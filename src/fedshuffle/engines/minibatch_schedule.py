"""Which clients of a group take a step together, and on which examples."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.kernel import ClientTask
from fedshuffle.local_work import Minibatches

Step = tuple[slice | list[int], IntArray, FloatArray]
"""Which clients take a step together, the rows of their minibatches, and each row's share in the
mean of its minibatch."""


class PackedMinibatches:
    """The minibatches of a group of clients, of which the longest come first.

    In every step, each client that is not done has ``width`` places; places that a shorter
    minibatch leaves empty hold the client's first row, with no share.
    """

    def __init__(
        self, streams: Sequence[Minibatches], positions: Sequence[IntArray], firsts: IntArray
    ) -> None:
        size, batch, self.steps = np.array([(s.size, s.batch_size, s.steps) for s in streams]).T
        self.width = int(batch.max())
        active = _active(self.steps)
        self.begins = np.concatenate([[0], np.cumsum(active * self.width)])

        # Every position of every stream: its epoch, its step, and its place in the minibatch.
        counts = np.array([len(some) for some in positions])
        client = np.repeat(np.arange(len(streams)), counts)
        epoch, within = np.divmod(_ranges(counts), size[client])
        turn, place = np.divmod(within, batch[client])
        step = epoch * (-(-size // batch))[client] + turn
        target = self.begins[step] + client * self.width + place
        length = np.minimum(batch[client], size[client] - turn * batch[client])

        self.rows = np.repeat(firsts[_ranges(active)], self.width)
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
        """Clients whose next minibatches have the same length step together, the largest such
        group first; the others wait.
        """
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)

        def wait(client: int, step: int) -> None:
            if step < self.steps[client]:
                begin = int(self.begins[step]) + client * self.width
                length = int(np.count_nonzero(self.shares[begin : begin + self.width]))
                waiting[length].append((client, begin))

        step = [0] * len(self.steps)
        for client in range(len(step)):
            wait(client, 0)
        while waiting:
            length = max(waiting, key=lambda length: (len(waiting[length]), length))
            clients, begins = zip(*waiting.pop(length), strict=True)
            rows = self.rows[np.array(begins)[:, None] + np.arange(length)]
            yield list(clients), rows, np.full(rows.shape, 1 / length)
            for client in clients:
                step[client] += 1
                wait(client, step[client])


def _ranges(lengths: IntArray) -> IntArray:
    """``0, 1, ..`` for every length, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _active(steps: IntArray) -> IntArray:
    """How many clients take each step; the longest come first."""
    active: IntArray = (steps > np.arange(steps[0])[:, None]).sum(axis=1)
    return active


def without_examples(tasks: Sequence[ClientTask]) -> Iterator[Step]:
    """The steps of a group that needs no examples."""
    for active in _active(np.array([task.minibatches.steps for task in tasks])).tolist():
        yield slice(0, active), np.zeros((active, 0), np.int64), np.zeros((active, 0))
