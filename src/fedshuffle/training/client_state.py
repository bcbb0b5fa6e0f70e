"""Client state: one vector of the model's size per client, as the rows of a file.

Control variates of a million clients fit neither into memory nor into a checkpoint. Here the
vector of client i is ``rows[slots[i]]``, or 0 if ``slots[i] = -1``. A :class:`ClientState` holds
``slots`` and checksums and never changes: new rows go to free slots, and a new ``ClientState``
points to them. So the state before a failed round is intact. A slot is free if no living
``ClientState`` and no pin (a checkpoint on disk) refers to it.
"""

import os
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle import _files
from fedshuffle._arrays import IntArray, frozen
from fedshuffle.errors import FedShuffleError, error_context

_HEADER = 128
"""Bytes before the first row: the magic number, and the size and dtype of rows."""
_REMEDY = "Put back a copy of it, or start a new run in another folder"


class ClientStateStore:
    """The rows of clients in one file, opened or created with the first access, for one thread.

    A file to which no pin and no living :class:`ClientState` refers is overwritten, so pin first
    what shall survive. A row has ``width`` values. Without a path the file is a temporary one
    (``TMPDIR`` says where, which should be a disk).
    """

    def __init__(self, width: int, dtype: torch.dtype, path: Path | None = None) -> None:
        self.width = width
        self.dtype = dtype
        self.path = path
        self.where = "a temporary file" if path is None else repr(str(path))
        self.row_bytes = width * dtype.itemsize
        self.pins: dict[int, IntArray] = {}
        """Slots that are protected under a key, such as the round of a checkpoint on disk."""
        self._living: weakref.WeakSet[ClientState] = weakref.WeakSet()
        self._file: FileIO | None = None

    def pin(self, key: int, slots: IntArray) -> None:
        """Also protect these slots (-1 is none) under this key."""
        self.pins[key] = np.union1d(self.pins.get(key, slots[:0]), slots[slots >= 0])

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        if self._file is not None:
            with self._disk_errors("write"):
                os.fsync(self._file.fileno())

    def open(self) -> FileIO:
        """The file, which must hold every slot that is referred to."""
        if self._file is None:
            if self.path is not None:
                self._check(self.path)
            with self._disk_errors("write"):
                opened = tempfile.TemporaryFile if self.path is None else self.path.open
                self._file = opened("r+b", buffering=0)
            weakref.finalize(self, self._file.close)
        return self._file

    def write(self, rows: NDArray[np.uint8]) -> IntArray:
        """Write rows to the first free slots, which are returned."""
        file, needed = self.open(), self._needed()
        free = np.append(~needed, np.ones(len(rows), np.bool_))
        slots = np.flatnonzero(free)[: len(rows)]
        with self._disk_errors("write"):
            for slot, row in zip(slots.tolist(), rows, strict=True):
                file.seek(_HEADER + slot * self.row_bytes)
                rest = row.data
                while rest:  # an unbuffered file may write a part
                    rest = rest[file.write(rest) :]
        return slots

    def read(self, slot: int, into: NDArray[np.uint8]) -> None:
        """Read a row; bytes beyond the end of the file stay as they are."""
        file = self.open()
        with self._disk_errors("read"):
            file.seek(_HEADER + slot * self.row_bytes)
            rest = into.data
            while rest and (got := file.readinto(rest)):
                rest = rest[got:]

    def _needed(self) -> NDArray[np.bool_]:
        """Whether a slot is needed, up to the last that is."""
        referred = [*self.pins.values(), *(state.slots for state in self._living)]
        needed = np.zeros(max((int(s.max(initial=-1)) + 1 for s in referred), default=0), np.bool_)
        for slots in referred:
            needed[slots[slots >= 0]] = True
        return needed

    def _check(self, path: Path) -> None:
        """Refuse a file that lacks a slot that is needed; if none is, create a new file."""
        rows = f"{self.width} values of {self.dtype}"
        header = f"fedshuffle client rows 1\n{rows}\n".encode().ljust(_HEADER, b"\0")
        if not (slots := len(self._needed())):
            with self._disk_errors("write"):
                _files.atomic_write(path, header)
            return
        if not path.exists():
            raise FedShuffleError(f"the client state {str(path)!r} is missing. {_REMEDY}.")
        with self._disk_errors("read"), path.open("rb") as file:
            found, size = file.read(_HEADER), path.stat().st_size
        whole = _HEADER + slots * self.row_bytes
        if found != header or size < whole:
            problem = f"has {size} bytes of {whole}: it was cut off"
            if found != header:
                problem = f"does not hold client state of {rows}, or is damaged"
            raise FedShuffleError(f"the client state {str(path)!r} {problem}. {_REMEDY}.")

    def _disk_errors(self, what: str) -> AbstractContextManager[None]:
        other = "choose another folder" if self.path else "set TMPDIR to another folder"
        remedy = f"make room, or {other}" if what == "write" else "check the disk"
        return error_context(
            lambda error: (
                f"cannot {what} client state, {self.row_bytes} bytes per client, in {self.where}:"
                f" {error.strerror}. What was saved before is intact; {remedy}."
            ),
            OSError,
        )


@dataclass(frozen=True, eq=False)
class ClientState:
    """Which row of a store belongs to which client, and the row's CRC-32; immutable."""

    store: ClientStateStore
    slots: IntArray
    crc: NDArray[np.uint32]

    def __post_init__(self) -> None:
        frozen(self.slots)
        frozen(self.crc)
        self.store._living.add(self)

    @classmethod
    def empty(cls, n: int, store: ClientStateStore) -> "ClientState":
        """The state of n clients before any update."""
        return cls(store, np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.uint32))

    @classmethod
    def restore(cls, store: ClientStateStore, index: Mapping[str, Tensor]) -> "ClientState":
        """The state of an :meth:`index`; rows are read when they are asked for."""
        state = cls(store, index["slots"].numpy().copy(), index["crc"].numpy().astype(np.uint32))
        if state.slots.max() >= 0:
            store.open()  # now that it is known which slots must be there
        return state

    def index(self) -> dict[str, Tensor]:
        """The part of the client state that a checkpoint holds."""
        crc = torch.from_numpy(self.crc.astype(np.int64))
        return {"slots": torch.from_numpy(self.slots.copy()), "crc": crc}

    def __len__(self) -> int:
        """The number of clients, updated or not."""
        return len(self.slots)

    def rows(self, clients: IntArray, device: torch.device | str | None = None) -> Tensor:
        """The vectors of some clients, one row each; zero for a client that was never updated."""
        raw = torch.zeros((len(clients), self.store.row_bytes), dtype=torch.uint8)
        for client, row in zip(clients.tolist(), raw.numpy(), strict=True):
            if (slot := int(self.slots[client])) < 0:
                continue
            self.store.read(slot, row)
            if zlib.crc32(row) != self.crc[client]:
                remedy = _REMEDY if self.store.path else "Check the disk, and restart"
                raise FedShuffleError(
                    f"the state of client {client}, row {slot} of {self.store.where}, is damaged:"
                    f" its checksum does not fit. {remedy}."
                )
        return raw.view(self.store.dtype).to(device)

    def updated(self, clients: IntArray, rows: Tensor) -> "ClientState":
        """A state in which some clients have new vectors; this one stays as it is."""
        shape, dtype = (len(clients), self.store.width), self.store.dtype
        if tuple(rows.shape) != shape or rows.dtype != dtype:
            raise FedShuffleError(
                f"the state of {shape[0]} clients is {shape[1]} values of {dtype} each, but got"
                f" {tuple(rows.shape)} of {rows.dtype}."
            )
        if not len(clients):
            return self
        raw = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
        slots, crc = self.slots.copy(), self.crc.copy()
        slots[clients] = self.store.write(raw)
        crc[clients] = [zlib.crc32(row) for row in raw]
        return ClientState(self.store, slots, crc)
