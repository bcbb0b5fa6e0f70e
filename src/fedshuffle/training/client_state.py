"""Client state: one vector of the model's size per client, as the rows of a file.

Control variates of a million clients fit neither into memory nor into a checkpoint. Here the
vector of client i is ``rows[slots[i]]``, or 0 if ``slots[i] = -1``. A :class:`ClientState` holds
``slots`` and checksums and never changes: new rows go to free slots, and a new ``ClientState``
points to them. So the state before a failed round is intact. A slot is free if no living
``ClientState`` and no pin (a checkpoint on disk) refers to it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle import _files
from fedshuffle._arrays import IntArray, count, expect, frozen
from fedshuffle.errors import FedShuffleError, error_context

_MAGIC = b"fedshuffle client rows 1\n"
_HEADER = 128
"""Bytes before the first row: the magic number, and the size and dtype of rows."""
_GROWTH = 2**30
"""The file doubles when it is full, but grows by at most this number of bytes at once."""
_REMEDY = "Put back a copy of it, or start a new run in another folder"


class ClientStateStore:
    """The rows of clients in one file, opened or created with the first access, for one thread.

    A file to which no pin and no living :class:`ClientState` refers is overwritten, so pin first
    what shall survive. A row has ``width`` values. Without a path the file is a temporary one
    (``TMPDIR`` says where, which should be a disk).
    """

    def __init__(self, width: int, dtype: torch.dtype, path: Path | None = None) -> None:
        expect(dtype, torch.dtype, "dtype")
        if not dtype.is_floating_point:
            raise FedShuffleError(f"client state is of floating point numbers, not {dtype}.")
        self.width = count(width, "width")
        self.dtype = dtype
        self.path = path
        self.row_bytes = self.width * dtype.itemsize
        self._file: FileIO | None = None
        self._free: IntArray = np.empty(0, dtype=np.int64)
        self._pins: dict[int, IntArray] = {}
        self._living: weakref.WeakSet[ClientState] = weakref.WeakSet()

    @property
    def pins(self) -> frozenset[int]:
        """The keys under which slots are pinned."""
        return frozenset(self._pins)

    def pin(self, key: int, slots: IntArray) -> None:
        """Also protect these slots (-1 is none) under this key until it is unpinned."""
        self._pins[key] = np.union1d(self._pins.get(key, slots[:0]), slots[slots >= 0])
        self._free = self._free[:0]  # these slots may be among them: search again

    def unpin(self, key: int) -> None:
        """Release the slots of a key."""
        self._pins.pop(key, None)

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        if self._file is not None:
            with self._disk_errors("write"):
                os.fsync(self._file.fileno())

    def __reduce__(self) -> Any:
        raise TypeError("a ClientStateStore is a file of this process: it cannot be pickled")

    def _write(self, rows: NDArray[np.uint8]) -> IntArray:
        file, slots = self._open(), self._take(len(rows))
        with self._disk_errors("write"):
            for slot, row in zip(slots.tolist(), rows, strict=True):
                file.seek(_HEADER + slot * self.row_bytes)
                rest = row.data
                while rest:  # an unbuffered file may write a part
                    rest = rest[file.write(rest) :]
        return slots

    def _read(self, slot: int, into: NDArray[np.uint8]) -> None:
        """Read a row; bytes beyond the end of the file stay as they are."""
        file = self._open()
        with self._disk_errors("read"):
            file.seek(_HEADER + slot * self.row_bytes)
            rest = into.data
            while rest and (got := file.readinto(rest)):
                rest = rest[got:]

    def _take(self, number: int) -> IntArray:
        """Free slots; searches for more if the known ones do not suffice."""
        if len(self._free) < number:
            needed = self._needed()
            used = int(needed.sum())
            room = max(number, min(used, _GROWTH // self.row_bytes))
            free = np.ones(max(len(needed), used + room), dtype=np.bool_)
            free[: len(needed)] = ~needed
            self._free = np.flatnonzero(free)
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def _needed(self) -> NDArray[np.bool_]:
        """Whether a slot is needed, up to the last that is."""
        referred = [*self._pins.values(), *(state.slots for state in self._living)]
        needed = np.zeros(max((int(s.max(initial=-1)) + 1 for s in referred), default=0), np.bool_)
        for slots in referred:
            needed[slots[slots >= 0]] = True
        return needed

    def _open(self) -> FileIO:
        if self._file is None:
            if self.path is not None:
                self._check(self.path, len(self._needed()))
            with self._disk_errors("write"):
                if self.path is None:
                    self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                else:
                    self._file = self.path.open("r+b", buffering=0)
            weakref.finalize(self, self._file.close)
        return self._file

    def _check(self, path: Path, slots: int) -> None:
        """Refuse a file that does not hold this number of slots; for none create a new file."""
        header = _MAGIC + f"{self.width} values of {self.dtype}\n".encode()
        found, size, problem = b"", path.stat().st_size if path.exists() else -1, ""
        if size >= 0:
            with self._disk_errors("read"), path.open("rb") as file:
                found = file.read(_HEADER)
        if slots and size < 0:
            problem = "is missing"
        elif not found.startswith(_MAGIC) and (found or slots):
            problem = "does not hold client state, or is damaged"
        elif slots and len(found) == _HEADER and not found.startswith(header):
            rows = found[len(_MAGIC) :].split(b"\n")[0].decode(errors="replace")
            raise FedShuffleError(
                f"{str(path)!r} has rows of {rows}, but the model needs {self.width} values of"
                f" {self.dtype}. Use the model that the run was started with."
            )
        elif slots and size < (whole := _HEADER + slots * self.row_bytes):
            problem = f"has {size} bytes of {whole}: it was cut off"
        if problem:
            raise FedShuffleError(f"the client state {str(path)!r} {problem}. {_REMEDY}.")
        if not slots:
            with self._disk_errors("write"):
                _files.atomic_write(path, header.ljust(_HEADER, b"\0"))

    def _disk_errors(self, what: str) -> AbstractContextManager[None]:
        where, other = "a temporary file", "set TMPDIR to another folder"
        if self.path is not None:
            where, other = repr(str(self.path)), "choose another folder"
        remedy = f"make room, or {other}" if what == "write" else "check the disk"
        return error_context(
            lambda error: (
                f"cannot {what} client state, {self.row_bytes} bytes per client, in {where}:"
                f" {error.strerror}. What was saved before is intact; {remedy}."
            ),
            OSError,
        )


@dataclass(frozen=True, eq=False)
class ClientState:
    """Which row of a store belongs to which client, and the row's CRC-32; immutable.

    >>> before = ClientState.empty(1_000_000, ClientStateStore(2, torch.float32))
    >>> after = before.updated(np.array([7, 999_999]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> after.rows(np.array([999_999, 5])).tolist(), before.rows(np.array([7])).tolist()
    ([[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0]])
    """

    store: ClientStateStore
    slots: IntArray
    crc: NDArray[np.uint32]

    def __post_init__(self) -> None:
        frozen(self.slots)
        frozen(self.crc)
        self.store._living.add(self)

    @classmethod
    def empty(cls, n: int, store: ClientStateStore) -> ClientState:
        """The state of n clients before any update."""
        n = count(n, "the number of clients")
        return cls(store, np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.uint32))

    @classmethod
    def restore(cls, store: ClientStateStore, index: Mapping[str, Tensor]) -> ClientState:
        """The state of an :meth:`index`; rows are read when they are asked for."""
        slots, crc = (index[name].numpy(force=True).astype(np.int64) for name in ("slots", "crc"))
        if slots.ndim != 1 or slots.shape != crc.shape or not len(slots) or slots.min() < -1:
            raise FedShuffleError("the index of the client state is damaged: use another copy.")
        state = cls(store, slots, crc.astype(np.uint32))
        if slots.max() >= 0:
            store._free = store._free[:0]  # as after a pin
            store._open()  # now that it is known which slots must be there
        return state

    def index(self) -> dict[str, Tensor]:
        """The part of the client state that a checkpoint holds."""
        return {
            "slots": torch.from_numpy(self.slots.copy()),
            "crc": torch.from_numpy(self.crc.astype(np.int64)),
        }

    def __len__(self) -> int:
        """The number of clients, updated or not."""
        return len(self.slots)

    def rows(self, clients: IntArray, device: torch.device | str | None = None) -> Tensor:
        """The vectors of some clients, one row each; zero for a client that was never updated."""
        clients = self._checked(clients)
        raw = torch.zeros((len(clients), self.store.row_bytes), dtype=torch.uint8)
        for client, row in zip(clients.tolist(), raw.numpy(), strict=True):
            if (slot := int(self.slots[client])) < 0:
                continue
            self.store._read(slot, row)
            if zlib.crc32(row) != self.crc[client]:
                path = self.store.path
                raise FedShuffleError(
                    f"the state of client {client}, row {slot} of"
                    f" {'a temporary file' if path is None else repr(str(path))}, is damaged: its"
                    f" checksum does not fit. {_REMEDY if path else 'Check the disk, and restart'}."
                )
        return raw.view(self.store.dtype).to(device)

    def updated(self, clients: IntArray, rows: Tensor) -> ClientState:
        """A state in which some clients have new vectors; this one stays as it is."""
        clients = self._checked(clients)
        shape, dtype = (len(clients), self.store.width), self.store.dtype
        if tuple(rows.shape) != shape or rows.dtype != dtype:
            raise FedShuffleError(
                f"the state of {shape[0]} clients is {shape[1]} values of {dtype} each, but got"
                f" {tuple(rows.shape)} of {rows.dtype}."
            )
        if len(np.unique(clients)) < len(clients):
            raise FedShuffleError("a client has one row only: name every client once.")
        if not len(clients):
            return self
        raw = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
        slots, crc = self.slots.copy(), self.crc.copy()
        slots[clients] = self.store._write(raw)
        crc[clients] = [zlib.crc32(row) for row in raw]
        return ClientState(self.store, slots, crc)

    def __deepcopy__(self, memo: object) -> ClientState:
        return self  # it is immutable

    def __copy__(self) -> ClientState:
        return self

    def _checked(self, clients: IntArray) -> IntArray:
        clients = np.asarray(clients, dtype=np.int64)
        bad = clients[(clients < 0) | (clients >= len(self))]
        if clients.ndim != 1 or bad.size:
            what = f"client {bad[0]}" if bad.size else f"an array of shape {clients.shape}"
            raise FedShuffleError(
                f"clients are a list of numbers from 0 to {len(self) - 1}, got {what}."
            )
        return clients
