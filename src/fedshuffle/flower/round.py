"""One round with clients that may fail.

The method is the simulator's. It makes a request, some clients reply, and then its round runs again
as if only those that replied had been sampled, each with the probability that it was sampled *and*
replied, and with the steps it really did. So the method's rules alone decide the weights.

Weights are known only when an exchange is over. So updates are stored as they arrive and added in
the cohort's order at the end. The result does not depend on who was first, and memory does not grow
with the cohort.
"""

from __future__ import annotations

import tempfile
import time
import weakref
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.engines.base import add_weight_decay, nonzero_weights
from fedshuffle.errors import error_context
from fedshuffle.kernel import LocalTraining, Request
from fedshuffle.methods import Cohort
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, advance

MAX_BYTES = 256 * 2**20
"""Bytes held in memory; more go to a temporary file."""
Update = tuple[Tensor, int]
"""What a client computed, and its number of steps."""


class UpdateBuffer:
    """The updates of clients, all shaped as one that is given.

    >>> buffer = UpdateBuffer(torch.zeros(2))
    >>> buffer[7] = torch.tensor([1.0, 2.0]), 4
    >>> buffer.steps, buffer[7].tolist()
    ({7: 4}, [1.0, 2.0])
    """

    def __init__(self, like: Tensor) -> None:
        self.steps: dict[int, int] = {}
        """The steps that each client did."""
        self._positions: dict[int, int] = {}
        self._one = torch.empty(like.shape, dtype=like.dtype)
        self._bytes = self._one.view(-1).view(torch.uint8).numpy().data
        """The memory of the one array that is written or was read."""
        self._file = tempfile.SpooledTemporaryFile(MAX_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def __setitem__(self, client: int, update: Update) -> None:
        values, self.steps[client] = update
        self._one.copy_(values)
        with self._disk_errors():
            self._seek(client)
            self._file.write(self._bytes)

    def __getitem__(self, client: int) -> Tensor:
        """The update of a client; valid until the next is read or stored."""
        with self._disk_errors():
            self._seek(client)
            self._file.readinto(self._bytes)
        return self._one

    def sums(self, request: Request) -> Tensor:
        """The weighted sums that a request asks for, over clients that have all replied."""
        if isinstance(request, LocalTraining):
            number = request.sums
            rows = [(task.minibatches.client, task.weights) for task in request.tasks]
        else:
            number = request.weights.shape[1]
            rows = list(zip(request.clients.tolist(), request.weights, strict=True))
        sums = self._one.new_zeros(number, *self._one.shape)
        for client, weights in rows:
            values = self[client]
            for k, weight in nonzero_weights(weights):
                sums[k].add_(values, alpha=weight)
        return sums if isinstance(request, LocalTraining) else add_weight_decay(request, sums)

    def _seek(self, client: int) -> None:
        position = self._positions.setdefault(client, len(self._positions))
        self._file.seek(position * len(self._bytes))

    def _disk_errors(self) -> AbstractContextManager[None]:
        return error_context(
            lambda error: (
                f"cannot store updates of {len(self._bytes)} bytes in a temporary file:"
                f" {error.strerror}. Make room, or set TMPDIR to another folder."
            ),
            OSError,
        )


class ClientRound:
    """A round of a run, exchange by exchange.

    Args:
        run: the settings.
        state: the state before the round.
        response_probability: for every client the probability that it replies to a message,
            independently of everything else.
    """

    def __init__(self, run: Run, state: State, response_probability: FloatArray) -> None:
        self.run = run
        self.state = state
        self.response_probability = response_probability
        self.cohort: Cohort = run.cohort(state.round)
        """The clients that have replied to every request so far."""
        self.missing: dict[int, str] = {}
        """The clients that have not, and why."""
        self.begun = time.perf_counter()
        self.buffers: list[UpdateBuffer] = []
        """The replies to each request so far."""
        self._request: Request | State = state

    def next(self) -> Request | State:
        """The next request to the cohort, or the state after the round."""
        requests = self.run.round(self.state, self.cohort)
        self._request = advance(requests)
        for buffer in self.buffers:
            if isinstance(self._request, State):  # nobody is left
                break
            self._request = advance(requests, buffer.sums(self._request))
        return self._request

    def add_replies(self, buffer: UpdateBuffer) -> None:
        """End the exchange of the last request with its replies."""
        cohort, clients = self.cohort, self.cohort.clients
        if isinstance(self._request, LocalTraining):
            done = [buffer.steps.get(client, 1) for client in clients.tolist()]
            cohort = replace(cohort, done=np.array(done, dtype=np.int64))
        replied = np.isin(clients, list(buffer.steps))
        self.cohort = cohort.only(replied, cohort.probability * self.response_probability[clients])
        self.buffers.append(buffer)
