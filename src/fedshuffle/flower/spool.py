"""What clients sent in one exchange, put aside until all is known by which it is weighed.

How a client counts may depend on who else answered and on the steps that were really done, and both
are known only when the exchange is over. So updates are put aside as they come, whenever they come,
and are added in the cohort's order at the end: the result does not depend on who was first, and
memory does not grow with the cohort, since all but the first few updates lie in a file.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedshuffle.engines.base import counted, decayed
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Probe, Walk

IN_MEMORY = 256 * 2**20
"""So many bytes are kept in memory; what comes after goes to disk."""


@final
class Spool:
    """One array of a fixed shape for each client that answered; vanishes with the process.

    >>> spool = Spool((2,), torch.float64)
    >>> spool.put(7, torch.tensor([1.0, 2.0], dtype=torch.float64))
    >>> 7 in spool, 8 in spool, spool.read(7, torch.empty(2, dtype=torch.float64)).tolist()
    (True, False, [1.0, 2.0])
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._bytes = int(np.prod(shape)) * dtype.itemsize
        self._kept: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}
        with self._named():
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def put(self, client: int, values: Tensor) -> None:
        """Keep what a client sent."""
        if client in self._kept or (len(self._kept) + 1) * self._bytes <= IN_MEMORY:
            self._kept[client] = values.to("cpu", self.dtype)
            return
        place = self._places.get(client, len(self._places))
        rest = values.to("cpu", self.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
        with self._named():
            self._file.seek(place * self._bytes)
            while rest:  # a raw file may take a part
                rest = rest[self._file.write(rest) :]
        self._places[client] = place

    def __contains__(self, client: int) -> bool:
        return client in self._kept or client in self._places

    def read(self, client: int, buffer: Tensor) -> Tensor:
        """What a client sent; what lies on disk is read into the buffer."""
        if client in self._kept:
            return self._kept[client]
        rest = buffer.view(-1).view(torch.uint8).numpy().data
        with self._named():
            self._file.seek(self._places[client] * self._bytes)
            while rest:
                got = self._file.readinto(rest)
                if not got:
                    raise FedShuffleError(f"what client {client} sent is cut short in its file.")
                rest = rest[got:]
        return buffer

    def answer(self, request: Walk | Probe) -> Tensor:
        """The weighted sums that a request asks for, over clients that have all answered."""
        if isinstance(request, Walk):
            sums = torch.zeros(request.sums, *self.shape, dtype=self.dtype)
            rows = [(order.minibatches.client, order.weights) for order in request.orders]
        else:
            sums = torch.zeros(request.weights.shape[1], *self.shape, dtype=self.dtype)
            rows = list(zip(request.clients.tolist(), request.weights, strict=True))
        buffer = torch.empty(self.shape, dtype=self.dtype)
        for client, weights in rows:
            values = self.read(client, buffer)
            for k, weight in counted(weights):
                sums[k].add_(values, alpha=weight)
        return sums if isinstance(request, Walk) else decayed(request, sums)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FedShuffleError(
                f"cannot keep what clients send, {self._bytes} bytes each, in a temporary file:"
                f" {error.strerror}. Make room, or set TMPDIR to another folder."
            ) from error
