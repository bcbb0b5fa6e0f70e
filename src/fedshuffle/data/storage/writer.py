"""Writing a store: rows arrive in any order and end up packed by client.

Rows are appended to the fields' files as they arrive. If they arrive client by client, sorted by
id, that is the packed layout already. If not, a second pass over blocks of rows moves each row to
its place, which is known once all clients have been counted. So memory holds the table of clients
and one block of rows, never the data.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from rich.progress import TimeElapsedColumn

from fedshuffle._arrays import IntArray, common_length, numeric
from fedshuffle._terminal import Console, progress_bar
from fedshuffle.data.storage.atomic_dir import AtomicDir, checked_dtype, encoded_ids, writing
from fedshuffle.data.storage.store import Field
from fedshuffle.errors import FedShuffleError, unknown

Id = str | int

_BLOCK_ROWS, _BLOCK_BYTES = 1 << 16, 1 << 25
"""Most rows and bytes that are moved at a time."""
_BUFFER_BYTES = 1 << 22
"""Small chunks are collected up to this size and written together."""
_CONVERT = "Convert it to numbers first (in Python, a function read can), or drop that example."
_SAME = "Give the same fields for every client."


class StoreWriter:
    """Packs examples into a store, which exists once the ``with`` block has ended.

    Args:
        out: the folder of the store.
        names: names of the fields; ``field0``, ``field1``, ... by default.
        dtype: dtype to store a field as, by name; by default that of the first rows.
        origin: where the data is from, in your words; stored with it.
        parse_ids: turn text ids into whole numbers if all of them are written as such.
        overwrite: replace an existing store.
        progress: show a progress bar.
        total: number of rows to come, for the progress bar.

    Examples:
        >>> import tempfile
        >>> from fedshuffle import Federation
        >>> folder = tempfile.mkdtemp() + "/people"
        >>> with StoreWriter(folder, names=["x"]) as store:
        ...     store.add("bob", [[1.0], [2.0]])
        ...     store.add("ann", [[3.0]])
        ...     store.add("bob", [[4.0]])
        >>> people = Federation.open(folder)
        >>> list(people.ids), people.fields[0].ravel().tolist()
        (['ann', 'bob'], [3.0, 1.0, 2.0, 4.0])
    """

    def __init__(
        self,
        out: str | Path,
        *,
        names: Sequence[str] | None = None,
        dtype: Mapping[str, DTypeLike] | None = None,
        origin: Mapping[str, Any] | None = None,
        parse_ids: bool = False,
        overwrite: bool = False,
        progress: bool = False,
        total: int | None = None,
    ) -> None:
        self.rows = 0
        """Number of rows written so far."""
        self._folder = AtomicDir(out, overwrite)
        self._fields: list[Field] = []
        self._files: list[BinaryIO] = []
        self._origin = origin
        self._parse_ids = parse_ids
        self._names = None if names is None else tuple(names)
        self._dtype = {name: checked_dtype(name, kind) for name, kind in (dtype or {}).items()}
        self._buffer: list[tuple[Id, int, list[NDArray[Any]]]] = []
        self._buffered = 0
        self._layout: list[Any] = []
        self._id_type: type | None = None
        self._empty: set[Id] = set()
        self._codes: dict[Id, int] = {}
        self._counts = np.zeros(1024, dtype=np.int64)
        self._grouped = True
        self._last = 0
        rows = "{task.completed:,.0f} rows"
        self._bar = progress_bar(progress, rows, TimeElapsedColumn(), transient=True)
        self._task = self._bar.add_task("importing", total=total)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._folder)
            self._owners = self._folder.open("owners")
            self._bar.start()
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        except KeyboardInterrupt:
            kind = KeyboardInterrupt
            raise
        finally:
            self._bar.stop()
            published = self._folder.published
            self._folder.__exit__()
            if kind is KeyboardInterrupt and not published:
                Console(stderr=True).print(
                    f"Interrupted: nothing was kept of {self.rows} rows. Import them again."
                )

    def add(self, client: Any, *fields: ArrayLike | Mapping[str, ArrayLike]) -> None:
        """Add examples of one client, as arrays or by name; more of them may come later."""
        if len(fields) == 1 and isinstance(fields[0], Mapping):
            self._names = self._names or tuple(fields[0])
            if fields[0].keys() != set(self._names):
                raise FedShuffleError(
                    f"client {client!r} has the fields {', '.join(fields[0])}, but others have"
                    f" {', '.join(self._names)}. {_SAME}"
                )
            fields = tuple(fields[0][name] for name in self._names)
        arrays, rows = self._arrays(fields, f" of client {client!r}")
        name = self._id(client)
        if not rows:
            self._empty.add(name)
            return
        layout = [(array.dtype, array.shape[1:]) for array in arrays]
        if layout != self._layout:
            self._flush()
            self._layout = layout
        # Copies, since an iterator may fill the same arrays again and again.
        self._buffer.append((name, rows, [array.copy() for array in arrays]))
        self._buffered += sum(array.nbytes for array in arrays)
        if self._buffered > _BUFFER_BYTES:
            self._flush()

    def add_rows(self, clients: Sequence[Any], owners: IntArray, *fields: ArrayLike) -> None:
        """Add examples of several clients; row k belongs to ``clients[owners[k]]``."""
        self._flush()
        arrays, rows = self._arrays(fields)
        if rows:
            self._append([self._id(client) for client in clients], owners, arrays)

    def _flush(self) -> None:
        buffer, self._buffer, self._buffered = self._buffer, [], 0
        if buffer:
            ids, rows, chunks = zip(*buffer, strict=True)
            arrays = [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
            self._append(ids, np.repeat(np.arange(len(ids)), rows), arrays)

    def _append(self, ids: Sequence[Id], owners: IntArray, arrays: list[NDArray[Any]]) -> None:
        if not self._fields:
            self._define_fields(arrays)
        if len(arrays) != len(self._fields):
            raise FedShuffleError(
                f"there are {len(arrays)} arrays after rows with {len(self._fields)}. {_SAME}"
            )
        pairs = zip(self._fields, arrays, strict=True)
        arrays = [self._fit(field, array, ids, owners) for field, array in pairs]
        known = [self._codes.setdefault(name, len(self._codes)) for name in ids]
        codes = np.array(known, dtype=np.int64)[owners]
        if len(self._codes) > len(self._counts):
            self._counts = np.pad(self._counts, (0, 2 * len(self._codes) - len(self._counts)))
        np.add.at(self._counts, codes, 1)
        self._grouped &= bool(codes[0] >= self._last and (codes[1:] >= codes[:-1]).all())
        self._last = int(codes[-1])
        with writing(self._folder.out):
            for file, array in zip([self._owners, *self._files], [codes, *arrays], strict=True):
                file.write(array.data)
        self.rows += len(codes)
        self._bar.advance(self._task, len(codes))

    def _id(self, client: Any) -> Id:
        name: Id = client.item() if isinstance(client, np.generic) else client
        problem = None
        if isinstance(name, bool) or not isinstance(name, str | int):
            problem = f"is of type {type(name).__name__}. Use text or whole numbers"
        elif isinstance(name, int) and not -(2**63) <= name < 2**63:
            problem = "does not fit in 64 bits. Use text instead"
        elif self._id_type not in (None, type(name)):
            problem = "follows ids of another type. Make all of them text, or all whole numbers"
        if problem:
            raise FedShuffleError(f"client id {name!r:.60} {problem}.")
        if isinstance(name, str) and not name.isascii():
            encoded_ids([name])
        self._id_type = type(name)
        return name

    def _arrays(self, fields: Sequence[Any], who: str = "") -> tuple[list[NDArray[Any]], int]:
        """The fields as arrays of numbers, and their common number of rows."""
        arrays = []
        for k, field in enumerate(fields):
            what = f"field {self._name(k)!r}{who}"
            arrays.append(numeric(field, what, _CONVERT))
            if arrays[k].dtype.char in "gG":
                raise FedShuffleError(f"{what} holds {arrays[k].dtype} values. {_CONVERT}")
        return arrays, common_length(arrays, who)

    def _name(self, k: int) -> str:
        return self._names[k] if self._names and k < len(self._names) else f"field{k}"

    def _define_fields(self, arrays: Sequence[NDArray[Any]]) -> None:
        names = [self._name(k) for k in range(len(arrays))]
        if len(set(self._names or names)) != len(names):
            raise FedShuffleError(
                f"there are {len(arrays)} arrays for the fields {', '.join(self._names or ())}:"
                " give one for each, and every field another name."
            )
        for name in self._dtype.keys() - names:
            raise unknown("field", name, names)
        for name, array in zip(names, arrays, strict=True):
            kind = self._dtype.get(name, array.dtype.newbyteorder("="))
            self._files.append(self._folder.open(f"field{len(self._fields)}.npy"))
            self._fields.append(Field(name, kind, array.shape[1:]))
            self._write_header(-1)

    def _write_header(self, k: int) -> None:
        """Write an npy header; numpy pads it so that the number of rows may grow in place."""
        shape = (self.rows, *self._fields[k].shape)
        header = {"descr": self._fields[k].dtype.str, "fortran_order": False, "shape": shape}
        with writing(self._folder.out):
            self._files[k].seek(0)
            np.lib.format.write_array_header_1_0(self._files[k], header)

    def _fit(
        self, field: Field, array: NDArray[Any], ids: Sequence[Id], owners: IntArray
    ) -> NDArray[Any]:
        """The rows as the field stores them, or an error that names the first bad one."""

        def check(good: NDArray[np.bool_], what: str, remedy: str) -> None:
            if not good.all():
                row = int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
                name = ids[owners[row]]
                before = int(self._counts[self._codes[name]]) if name in self._codes else 0
                same = np.array([other == name for other in ids])
                example = before + int(same[owners[:row]].sum())
                raise FedShuffleError(
                    f"field {field.name!r} of client {name!r} has {what} in its example {example}."
                    f" {remedy}"
                )

        who = f"field {field.name!r} of client {ids[owners[0]]!r}"
        if array.shape[1:] != field.shape:
            raise FedShuffleError(
                f"{who} has examples of shape {array.shape[1:]}, but others have {field.shape}."
                " Pad or cut them to one shape."
            )
        if array.dtype.kind in "fc":
            check(np.isfinite(array), "NaN or infinity", "Clean or drop that example.")
        if array.dtype == field.dtype:
            return np.ascontiguousarray(array, dtype=field.dtype)
        requested = field.name in self._dtype and array.dtype.kind != "c"
        if not (requested or np.can_cast(array.dtype, field.dtype)):
            raise FedShuffleError(
                f"{who} holds {array.dtype} values, but others hold {field.dtype}. Say its dtype,"
                f" such as {np.promote_types(array.dtype, field.dtype)}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(field.dtype)
        good = np.isfinite(cast) if field.dtype.kind in "fc" else cast == array
        check(good, f"a number that {field.dtype} cannot hold", "Choose another dtype.")
        return cast

    def _finish(self) -> None:
        self._flush()
        ids = list(self._codes)
        if not ids:
            raise FedShuffleError("there are no examples to import.")
        for k in range(len(self._files)):
            self._write_header(k)
        with writing(self._folder.out):
            for file in (self._owners, *self._files):
                file.close()
        if self._parse_ids and all(re.fullmatch("0|-?[1-9][0-9]{0,17}", str(id)) for id in ids):
            ids = [int(id) for id in ids]
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__))
        sizes = self._counts[order]
        owners = self._folder.path / "owners"
        if not (self._grouped and (np.diff(order) > 0).all()):
            self._task = self._bar.add_task("packing", total=len(self._fields) * self.rows)
            begins, rank = np.cumsum(sizes) - sizes, np.argsort(order)
            with writing(self._folder.out):
                for k, field in enumerate(self._fields):
                    path = self._folder.path / f"field{k}.npy"
                    for moved in _pack(path, field, owners, rank, begins.copy()):
                        self._bar.advance(self._task, moved)
        owners.unlink()
        ids = [ids[k] for k in order.tolist()]
        self._folder.publish(self._fields, sizes, ids, origin=self._origin)
        if empty := sorted(self._empty - self._codes.keys()):
            warnings.warn(
                f"{len(empty)} clients without examples were left out, such as {empty[0]!r}.",
                stacklevel=4,
            )


def _pack(file: Path, field: Field, owners: Path, rank: IntArray, free: IntArray) -> Iterator[int]:
    """Move every row of a field to the next free place of its client; yield how many were moved."""
    rows = owners.stat().st_size // 8
    unsorted = file.rename(file.with_suffix(".unsorted"))
    np.lib.format.open_memmap(file, "w+", field.dtype, (rows, *field.shape))
    if hasattr(os, "posix_fallocate"):  # a mapping that finds no disk space would end the process
        with file.open("rb+") as stream:
            os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
    with unsorted.open("rb") as source, owners.open("rb") as clients:
        source.seek(-rows * field.bytes, os.SEEK_END)
        at_once = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, field.bytes)))
        for begin in range(0, rows, at_once):
            length = min(at_once, rows - begin)
            order, places = _places(rank[np.fromfile(clients, np.int64, length)], free)
            block = np.fromfile(source, field.dtype, length * math.prod(field.shape))
            # Mapped for each block: the pages of one mapping would fill the memory.
            target = np.lib.format.open_memmap(file, "r+")
            target[places] = block.reshape(length, *field.shape)[order]
            yield length
    unsorted.unlink()


def _places(clients: IntArray, free: IntArray) -> tuple[IntArray, IntArray]:
    """A block's rows sorted by client, and the place of each, which is then no longer free.

    >>> free = np.array([0, 10])
    >>> order, places = _places(np.array([1, 0, 1]), free)
    >>> order.tolist(), places.tolist(), free.tolist()
    ([1, 0, 2], [0, 10, 11], [1, 12])
    """
    order = np.argsort(clients, kind="stable")
    ordered = clients[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(first, append=len(ordered))
    places = free[ordered] + np.arange(len(ordered)) - np.repeat(first, lengths)
    free[ordered[first]] += lengths
    return order, places
