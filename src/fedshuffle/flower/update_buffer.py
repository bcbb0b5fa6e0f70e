"""What clients sent in one exchange, until it is summed."""

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedshuffle.engines.base import Gathered, add_weight_decay
from fedshuffle.errors import error_context
from fedshuffle.flower.chain import WireChain
from fedshuffle.kernel import Answer, FullGradient, LocalTraining
from fedshuffle.transforms import NO_TRANSFORMS

MAX_BYTES = 256 * 2**20
"""Bytes of updates held in memory; more go to a temporary file."""


class Update(NamedTuple):
    """What a client computed, its number of steps, and its metrics."""

    values: Tensor
    steps: int
    metrics: Mapping[str, float] = {}


class UpdateBuffer:
    """The updates of clients, all shaped as one that is given.

    >>> buffer = UpdateBuffer(torch.zeros(2))
    >>> buffer[7] = Update(torch.tensor([1.0, 2.0]), steps=4)
    >>> buffer.steps, buffer[7].tolist()
    ({7: 4}, [1.0, 2.0])
    """

    def __init__(self, like: Tensor, wire: WireChain | None = None) -> None:
        self.steps: dict[int, int] = {}
        """The steps that each client did."""
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._wire = WireChain() if wire is None else wire
        self._positions: dict[int, int] = {}
        self._one = torch.empty(like.shape, dtype=like.dtype)
        self._bytes = self._one.view(-1).view(torch.uint8).numpy().data
        """The memory of the one array that is written or was read."""
        self._file = tempfile.SpooledTemporaryFile(MAX_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def __setitem__(self, client: int, update: Update) -> None:
        values, self.steps[client], self._metrics[client] = update
        self._one.copy_(values)
        with self._position(client):
            self._file.write(self._bytes)

    def __getitem__(self, client: int) -> Tensor:
        """The update of a client; valid until the next is read or stored."""
        with self._position(client):
            self._file.readinto(self._bytes)
        return self._one

    def full_gradients(self, request: FullGradient) -> Answer:
        """The answer to a request to clients that have all replied."""
        sums = self._one.new_zeros(request.weights.shape[1], *self._one.shape)
        for client, weights in zip(request.clients.tolist(), request.weights, strict=True):
            values = self[client]
            for total, weight in zip(sums, weights.tolist(), strict=True):
                total.add_(values, alpha=weight)
        return Answer(add_weight_decay(request, sums))

    def local_training(self, request: LocalTraining) -> Answer:
        """The answer to a request to clients that have all replied. The first row of an update is
        the message; the second, if any, the client's next state, or its full gradient.
        """
        of_method = request.chain.keeps_state and not self._wire.chain.keeps_state
        sums = request  # with what the method keeps, which the server computes from the update
        if not of_method:  # clients have run the chain
            sums = replace(request, chain=NO_TRANSFORMS, states=None, state_weights=None)
        gathered = Gathered(sums, lambda tasks: self._one[1:])
        states = request.states if self._wire.chain.keeps_state else None
        states = states.clone() if states is not None and self._wire.shares_memory else states
        for k, task in enumerate(request.tasks):
            client = task.minibatches.client
            rows = self[client]
            if states is not None and self._wire.shares_memory:
                states[k] = rows[1]
            gathered.observe([k], **self._metrics[client])
            gathered.add([k], rows[:1].clone() if of_method else rows[:1])  # a chain overwrites
        answer = gathered.answer()
        return answer if of_method else replace(answer, states=states)

    @contextmanager
    def _position(self, client: int) -> Iterator[None]:
        """Where the file holds the update of a client; errors of the disk get a remedy."""
        cannot = f"cannot store updates of {len(self._bytes)} bytes in a temporary file"
        remedy = "Make room, or set TMPDIR to another folder."
        with error_context(lambda error: f"{cannot}: {error.strerror}. {remedy}", OSError):
            position = self._positions.setdefault(client, len(self._positions))
            self._file.seek(position * len(self._bytes))
            yield
