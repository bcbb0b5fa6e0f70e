"""Updates of one exchange, stored until their weights are known.

A client's weight may depend on who else replied and on the steps really done, which are known only
when the exchange is over. So updates are stored as they arrive and added in the cohort's order at
the end. The result does not depend on who was first, and memory does not grow with the cohort:
all but the first few updates are in a temporary file.
"""

from __future__ import annotations

import tempfile
import weakref
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from fedshuffle.engines.base import add_weight_decay, nonzero_weights
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.kernel import FullGradient, LocalTraining

MAX_BYTES = 256 * 2**20
"""Bytes held in memory; the rest goes to disk."""


class UpdateBuffer:
    """One array of a fixed shape per client that replied.

    >>> buffer = UpdateBuffer((2,), torch.float64)
    >>> buffer.put(7, torch.tensor([1.0, 2.0], dtype=torch.float64))
    >>> 7 in buffer, 8 in buffer, buffer.read(7, torch.empty(2, dtype=torch.float64)).tolist()
    (True, False, [1.0, 2.0])
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._bytes = int(np.prod(shape)) * dtype.itemsize
        self._in_memory: dict[int, Tensor] = {}
        self._positions: dict[int, int] = {}
        with self._disk_errors():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def put(self, client: int, values: Tensor) -> None:
        """Store what a client sent."""
        if client in self._in_memory or (len(self._in_memory) + 1) * self._bytes <= MAX_BYTES:
            self._in_memory[client] = values.to("cpu", self.dtype)
            return
        position = self._positions.get(client, len(self._positions))
        flat = values.to("cpu", self.dtype).contiguous().view(-1)
        with self._disk_errors():
            self._file.seek(position * self._bytes)
            self._file.write(flat.view(torch.uint8).numpy().data)
            self._file.flush()
        self._positions[client] = position

    def __contains__(self, client: int) -> bool:
        return client in self._in_memory or client in self._positions

    def read(self, client: int, buffer: Tensor) -> Tensor:
        """What a client sent; read into ``buffer`` if it is on disk."""
        if client in self._in_memory:
            return self._in_memory[client]
        with self._disk_errors():
            self._file.seek(self._positions[client] * self._bytes)
            read = self._file.readinto(buffer.view(-1).view(torch.uint8).numpy().data)
        if read != self._bytes:
            raise FedShuffleError(f"the update of client {client} is cut short in its file.")
        return buffer

    def sums(self, request: LocalTraining | FullGradient) -> Tensor:
        """The weighted sums that a request asks for, over clients that have all replied."""
        if isinstance(request, LocalTraining):
            sums = torch.zeros(request.sums, *self.shape, dtype=self.dtype)
            rows = [(task.minibatches.client, task.weights) for task in request.tasks]
        else:
            sums = torch.zeros(request.weights.shape[1], *self.shape, dtype=self.dtype)
            rows = list(zip(request.clients.tolist(), request.weights, strict=True))
        buffer = torch.empty(self.shape, dtype=self.dtype)
        for client, weights in rows:
            values = self.read(client, buffer)
            for k, weight in nonzero_weights(weights):
                sums[k].add_(values, alpha=weight)
        return sums if isinstance(request, LocalTraining) else add_weight_decay(request, sums)

    def _disk_errors(self) -> AbstractContextManager[None]:
        return error_context(
            lambda error: (
                f"cannot store updates of {self._bytes} bytes in a temporary file:"
                f" {error.strerror}. Make room, or set TMPDIR to another folder."
            ),
            OSError,
        )
