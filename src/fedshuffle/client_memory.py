"""What clients keep from round to round: one vector of the model's size each, in a file.

A control variate for each of a million clients is no matter for memory, nor for a model. Here the
vectors are the rows of one file, the shelf, and a :class:`ClientMemory` says which row is whose:

    row of client i = rows[slots[i]],  0 if slots[i] = -1: it never kept anything

It never changes. New rows go to slots that nobody needs, and the new ``ClientMemory`` points there;
so the one before is whole whatever becomes of a round, and a checkpoint is just ``slots`` and the
checksums. Nobody needs a slot that no living ``ClientMemory`` and no pin, that of a checkpoint on
disk, refers to. Memory holds ``slots``, the checksums and the rows asked for; the rest is the
file's. One server writes it: a shelf is for one thread of one process.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle import _files
from fedshuffle._arrays import IntArray, count, expect, frozen
from fedshuffle.errors import FedShuffleError

_MAGIC = b"fedshuffle client rows 1\n"
_HEADER = 128
"""Bytes before the first row: what the file is, and of which rows."""
_GROWTH = 2**30
"""The file grows as what is needed doubles, but not by more bytes than these at once."""


@final
class Shelf:
    """The rows of clients in one file, written only where nobody needs what is there.

    The file is opened, or made, when the first row is read or written. One that no pin and no
    living :class:`ClientMemory` refers to is made anew, so pin first what shall outlast a process.

    Args:
        width: how many values a row has.
        dtype: of which kind; a row comes back bit for bit.
        path: the file; by default a temporary one that vanishes with the process (it lies where
            ``TMPDIR`` says, which should be a disk).
    """

    def __init__(self, width: int, dtype: torch.dtype, path: Path | None = None) -> None:
        expect(dtype, torch.dtype, "dtype")
        if not dtype.is_floating_point:
            raise FedShuffleError(f"clients keep floating point numbers, not {dtype}.")
        self.width = count(width, "width")
        self.dtype = dtype
        self.path = path
        self.row_bytes = self.width * dtype.itemsize
        self._file: FileIO | None = None
        self._free: IntArray = np.empty(0, dtype=np.int64)
        self._pins: dict[int, IntArray] = {}
        self._living: weakref.WeakSet[ClientMemory] = weakref.WeakSet()

    @property
    def pins(self) -> frozenset[int]:
        """The keys under which slots are pinned."""
        return frozenset(self._pins)

    def pin(self, key: int, slots: IntArray) -> None:
        """Leave these slots as they are until the key is unpinned, besides those it pins already.

        A slot of -1 is none. What is pinned before a checkpoint is written is safe whenever the
        process ends.
        """
        self._pins[key] = np.union1d(self._pins.get(key, slots[:0]), slots[slots >= 0])
        self._free = self._free[:0]  # these slots may be among them: look again

    def unpin(self, key: int) -> None:
        """Give the slots of a key free, unless somebody else needs them."""
        self._pins.pop(key, None)

    def settle(self) -> None:
        """See to it that all rows written so far are on the disk."""
        if self._file is not None:
            with self._named("write"):
                os.fsync(self._file.fileno())

    def __reduce__(self) -> Any:
        raise TypeError("a Shelf is a file of this process: it can be neither pickled nor copied")

    def _put(self, rows: NDArray[np.uint8]) -> IntArray:
        """Write rows to slots that nobody needs."""
        file = self._open()
        slots = self._take(len(rows))
        with self._named("write"):
            for slot, row in zip(slots.tolist(), rows, strict=True):
                file.seek(_HEADER + slot * self.row_bytes)
                rest = row.data
                while rest:  # a raw file may take a part
                    rest = rest[file.write(rest) :]
        return slots

    def _get(self, slot: int, into: NDArray[np.uint8]) -> None:
        """Read a row; what lies beyond the end of the file is left as it is."""
        file = self._open()
        with self._named("read"):
            file.seek(_HEADER + slot * self.row_bytes)
            rest = into.data
            while rest and (got := file.readinto(rest)):
                rest = rest[got:]

    def _take(self, need: int) -> IntArray:
        """Slots to write to; if those known to be free do not suffice, look for more."""
        if len(self._free) < need:
            needed = self._needed()
            used = int(needed.sum())
            room = max(need, min(used, _GROWTH // self.row_bytes))
            free = np.ones(max(len(needed), used + room), dtype=np.bool_)
            free[: len(needed)] = ~needed
            self._free = np.flatnonzero(free)
        taken, self._free = self._free[:need], self._free[need:]
        return taken

    def _needed(self) -> NDArray[np.bool_]:
        """Whether a slot is needed, up to the last that is."""
        referred = [*self._pins.values(), *(memory.slots for memory in self._living)]
        needed = np.zeros(max((int(s.max(initial=-1)) + 1 for s in referred), default=0), np.bool_)
        for slots in referred:
            needed[slots[slots >= 0]] = True
        return needed

    def _open(self) -> FileIO:
        """The file, opened at first use."""
        if self._file is None:
            if self.path is None:
                with self._named("write"):
                    self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            else:
                self._file = self._existing(self.path, len(self._needed()))
            weakref.finalize(self, self._file.close)
        return self._file

    def _existing(self, path: Path, slots: int) -> FileIO:
        """Open the file that holds so many slots; if there is nothing to hold, make it anew."""
        remedy = "Put back a copy of it, or begin anew in another folder"
        header = _MAGIC + f"{self.width} values of {self.dtype}\n".encode()
        found = b""
        if path.exists():
            with self._named("read"), path.open("rb") as file:
                found = file.read(_HEADER)
            if not found.startswith(_MAGIC) and (found or slots):
                raise FedShuffleError(
                    f"{str(path)!r} does not hold what clients keep, or is damaged. {remedy}."
                )
        elif slots:
            raise FedShuffleError(f"{str(path)!r}, what the clients kept, is missing. {remedy}.")
        if not slots:
            with self._named("write"):
                _files.replace(path, header.ljust(_HEADER, b"\0"))
        elif len(found) == _HEADER and not found.startswith(header):
            rows = found[len(_MAGIC) :].split(b"\n")[0].decode(errors="replace")
            raise FedShuffleError(
                f"{str(path)!r} has rows of {rows}, but the model needs {self.width} values of"
                f" {self.dtype}. Use the model that the run began with."
            )
        elif (size := path.stat().st_size) < (whole := _HEADER + slots * self.row_bytes):
            raise FedShuffleError(
                f"{str(path)!r} has {size} bytes, but what the clients kept takes {whole}: it was"
                f" cut short. {remedy}."
            )
        with self._named("write"):
            return path.open("r+b", buffering=0)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say what the disk refused, and what to do about it."""
        try:
            yield
        except OSError as error:
            where, other = "a temporary file", "set TMPDIR to another folder"
            if self.path is not None:
                where, other = repr(str(self.path)), "choose another folder"
            remedy = f"make room, or {other}" if what == "write" else "check the disk"
            raise FedShuffleError(
                f"cannot {what} what the clients keep, {self.row_bytes} bytes each, in {where}:"
                f" {error.strerror}. What was saved before is whole; {remedy}."
            ) from error


@final
@dataclass(frozen=True, eq=False)
class ClientMemory:
    """Which row of a shelf belongs to which client; a value that never changes.

    Args:
        shelf: where the rows are.
        slots: the slot of each client, -1 if it never kept anything.
        crc: the CRC-32 of each client's row.

    >>> before = ClientMemory.empty(1_000_000, Shelf(2, torch.float32))
    >>> after = before.updated(np.array([7, 999_999]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> after.rows(np.array([999_999, 5])).tolist(), before.rows(np.array([7])).tolist()
    ([[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0]])
    """

    shelf: Shelf
    slots: IntArray
    crc: NDArray[np.uint32]

    def __post_init__(self) -> None:
        frozen(self.slots)
        frozen(self.crc)
        self.shelf._living.add(self)

    @classmethod
    def empty(cls, n: int, shelf: Shelf) -> ClientMemory:
        """For n clients of which none has kept anything."""
        n = count(n, "the number of clients")
        return cls(shelf, np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.uint32))

    @classmethod
    def restore(cls, shelf: Shelf, index: Mapping[str, Tensor]) -> ClientMemory:
        """What :meth:`index` gave, with the same rows, which are not read yet."""
        slots, crc = (index[name].numpy(force=True).astype(np.int64) for name in ("slots", "crc"))
        if slots.ndim != 1 or slots.shape != crc.shape or not len(slots) or slots.min() < -1:
            raise FedShuffleError("the index of what clients keep is damaged: use another copy.")
        memory = cls(shelf, slots, crc.astype(np.uint32))
        if slots.max() >= 0:
            shelf._free = shelf._free[:0]  # as after a pin
            shelf._open()  # now that it is known which slots must be there
        return memory

    def index(self) -> dict[str, Tensor]:
        """All that a checkpoint needs besides the shelf's file."""
        return {
            "slots": torch.from_numpy(self.slots.copy()),
            "crc": torch.from_numpy(self.crc.astype(np.int64)),
        }

    def __len__(self) -> int:
        """How many clients there are, whether they have kept anything or not."""
        return len(self.slots)

    def rows(self, clients: IntArray, device: torch.device | str | None = None) -> Tensor:
        """What these clients kept, a row each; zeros for one that never kept anything."""
        clients = self._known(clients)
        raw = torch.zeros((len(clients), self.shelf.row_bytes), dtype=torch.uint8)
        for client, row in zip(clients.tolist(), raw.numpy(), strict=True):
            if (slot := int(self.slots[client])) < 0:
                continue
            self.shelf._get(slot, row)
            if zlib.crc32(row) != self.crc[client]:
                raise self._damaged(client)
        return raw.view(self.shelf.dtype).to(device)

    def updated(self, clients: IntArray, rows: Tensor) -> ClientMemory:
        """The memory in which these clients keep these rows; this one stays as it is."""
        clients = self._known(clients)
        shape, dtype = (len(clients), self.shelf.width), self.shelf.dtype
        if tuple(rows.shape) != shape or rows.dtype != dtype:
            raise FedShuffleError(
                f"{shape[0]} clients keep {shape[1]} values of {dtype} each, but got"
                f" {tuple(rows.shape)} of {rows.dtype}."
            )
        if len(np.unique(clients)) < len(clients):
            raise FedShuffleError("a client can keep one row only: name every client once.")
        if not len(clients):
            return self
        raw = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
        slots, crc = self.slots.copy(), self.crc.copy()
        slots[clients] = self.shelf._put(raw)
        crc[clients] = [zlib.crc32(row) for row in raw]
        return ClientMemory(self.shelf, slots, crc)

    def __copy__(self) -> ClientMemory:
        return self  # as of all that never changes

    def __deepcopy__(self, memo: object) -> ClientMemory:
        return self

    def _known(self, clients: IntArray) -> IntArray:
        clients = np.asarray(clients, dtype=np.int64)
        bad = clients[(clients < 0) | (clients >= len(self))]
        if clients.ndim != 1 or bad.size:
            what = f"client {bad[0]}" if bad.size else f"an array of shape {clients.shape}"
            raise FedShuffleError(
                f"clients are a list of numbers from 0 to {len(self) - 1}, got {what}."
            )
        return clients

    def _damaged(self, client: int) -> FedShuffleError:
        path = self.shelf.path
        where = "a temporary file" if path is None else repr(str(path))
        remedy = "Put back a copy of the file, or begin" if path else "Check the disk, and begin"
        return FedShuffleError(
            f"what client {client} kept, row {self.slots[client]} of {where}, is damaged: its"
            f" checksum does not fit. {remedy} anew."
        )
