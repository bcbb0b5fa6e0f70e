"""Updates of one exchange, stored until their weights are known.

A client's weight may depend on who else replied and on the steps really done, which are known only
when the exchange is over. So updates are stored as they arrive and added in the cohort's order at
the end. The result does not depend on who was first, and memory does not grow with the cohort.
"""

from __future__ import annotations

import tempfile
import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fedshuffle.engines.base import add_weight_decay, nonzero_weights
from fedshuffle.errors import error_context
from fedshuffle.kernel import FullGradient, LocalTraining

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
        self._one = torch.empty_like(like, device="cpu")
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

    def sums(self, request: LocalTraining | FullGradient) -> Tensor:
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
