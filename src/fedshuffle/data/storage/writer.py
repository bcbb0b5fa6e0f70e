"""Writing a store: rows arrive in any order and end up packed by client.

Rows are appended to the fields' files as they arrive. If they arrive client by client, sorted by
id, that is the packed layout already. If not, a second pass over blocks of rows moves each row to
its place, which is known once all clients have been counted. So memory holds the table of clients
and one block of rows, never the data.
"""

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray
from rich.progress import Progress, TimeElapsedColumn

from fedshuffle._arrays import IntArray
from fedshuffle._terminal import Console, progress_bar
from fedshuffle.data.storage.store import checked_dtype, draft, encoded_ids, publish, writing
from fedshuffle.errors import FedShuffleError, unknown

Batch = tuple[Sequence[Any], IntArray, Mapping[str, NDArray[Any]]]
"""Clients, the index of each row's client among them, and the rows of each field."""

_BLOCK_ROWS, _BLOCK_BYTES = 1 << 16, 1 << 25  # most rows and bytes that are moved at a time


def write_store(
    batches: Iterable[Batch],
    out: str | Path,
    *,
    dtype: Mapping[str, DTypeLike] | None = None,
    origin: Mapping[str, Any] | None = None,
    parse_ids: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Pack batches of rows into a store, which exists once all of them have been read.

    ``parse_ids`` turns text ids into whole numbers if all of them are written as such. For the
    other arguments see :func:`fedshuffle.data.import_chunks`.
    """
    bar = progress_bar(progress, "{task.completed:,.0f} rows", TimeElapsedColumn(), transient=True)
    rows = _Rows({name: checked_dtype(name, kind) for name, kind in (dtype or {}).items()}, bar)
    with draft(out, overwrite) as rows.folder, bar:
        try:
            rows.open("owners")
            for batch in batches:
                rows.append(*batch)
            ids, sizes = rows.pack(parse_ids)
        except KeyboardInterrupt:
            Console(stderr=True).print(
                f"Interrupted: nothing was kept of {rows.number} rows. Import them again."
            )
            raise
        finally:
            for file in rows.files:
                with suppress(OSError):  # was reported before
                    file.close()
        publish(rows.folder, rows.fields, sizes, ids, origin=origin)
    if empty := [id for id, number in rows.clients.items() if not rows.sizes[number]]:
        warnings.warn(
            f"{len(empty)} clients without examples were left out, such as {empty[0]!r}.",
            stacklevel=3,
        )


class _Rows:
    """Rows on their way into a store: the files they are in, and the clients they belong to."""

    folder: Path

    def __init__(self, dtype: Mapping[str, np.dtype[Any]], bar: Progress) -> None:
        self.number = 0
        self.fields: dict[str, np.dtype[Any]] = {}
        self.files: list[BinaryIO] = []  # of the rows' clients, and of each field
        self.clients: dict[Any, int] = {}  # numbered as they come
        self.sizes = np.zeros(1024, dtype=np.int64)
        self._dtype = dtype
        self._grouped, self._last = True, 0
        self._bar = bar
        self._task = bar.add_task("importing", total=None)

    def open(self, name: str) -> None:
        with writing(self.folder.parent):
            self.files.append((self.folder / name).open("wb", buffering=1 << 20))

    def append(
        self, ids: Sequence[Any], owners: IntArray, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        numbers = np.array([self._client(id) for id in ids], dtype=np.int64)[owners]
        if not len(numbers):
            return
        if not self.fields:
            self._define_fields(arrays)
        columns = [self._fit(name, arrays[name], numbers) for name in self.fields]
        np.add.at(self.sizes, numbers, 1)
        self._grouped &= bool(numbers[0] >= self._last and (numbers[1:] >= numbers[:-1]).all())
        self._last = int(numbers[-1])
        with writing(self.folder.parent):
            for file, column in zip(self.files, [numbers, *columns], strict=True):
                file.write(column.data)
        self.number += len(numbers)
        self._bar.advance(self._task, len(numbers))

    def _client(self, client: Any) -> int:
        """The number of the client with an id, which must be of the same type as others."""
        id = client.item() if isinstance(client, np.generic) else client
        problem = None
        if isinstance(id, bool) or not isinstance(id, str | int):
            problem = f"is of type {type(id).__name__}. Use text or whole numbers"
        elif isinstance(id, int) and not -(2**63) <= id < 2**63:
            problem = "does not fit in 64 bits. Use text instead"
        elif self.clients and not isinstance(id, type(next(iter(self.clients)))):
            problem = "follows ids of another type. Make all of them text, or all whole numbers"
        if problem:
            raise FedShuffleError(f"client id {id!r:.60} {problem}.")
        if id not in self.clients:
            if isinstance(id, str) and not id.isascii():
                encoded_ids([id])  # refuses invalid text
            self.clients[id] = len(self.clients)
            if len(self.clients) > len(self.sizes):
                self.sizes = np.pad(self.sizes, (0, len(self.sizes)))
        return self.clients[id]

    def _define_fields(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name in self._dtype.keys() - arrays.keys():
            raise unknown("field", name, arrays)
        for k, (name, array) in enumerate(arrays.items()):
            kind = self._dtype.get(name) or checked_dtype(name, array.dtype)
            self.fields[name] = np.dtype((kind, array.shape[1:]))
            self.open(f"field{k}.npy")
        self._write_headers()

    def _write_headers(self) -> None:
        """Write npy headers; numpy pads them so that the number of rows may grow in place."""
        with writing(self.folder.parent):
            for file, field in zip(self.files[1:], self.fields.values(), strict=True):
                shape = (self.number, *field.shape)
                header = {"descr": field.base.str, "fortran_order": False, "shape": shape}
                file.seek(0)
                np.lib.format.write_array_header_1_0(file, header)

    def _fit(self, name: str, array: NDArray[Any], clients: IntArray) -> NDArray[Any]:
        """The rows as the field stores them, or an error that names the first bad one."""

        def who(client: int) -> str:
            return f"field {name!r} of client {list(self.clients)[client]!r}"

        def check(good: NDArray[np.bool_], what: str, remedy: str) -> None:
            if not good.all():
                row = int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
                client = clients[row]
                example = self.sizes[client] + np.count_nonzero(clients[:row] == client)
                where = f"in its example {example}"
                raise FedShuffleError(f"{who(client)} has {what} {where}. {remedy}")

        kind, shape = self.fields[name].base, self.fields[name].shape
        if array.shape[1:] != shape:
            raise FedShuffleError(
                f"{who(clients[0])} has examples of shape {array.shape[1:]}, but others have"
                f" {shape}. Pad or cut them to one shape."
            )
        if array.dtype.kind in "fc":
            check(np.isfinite(array), "NaN or infinity", "Clean or drop that example.")
        if array.dtype == kind:
            return np.ascontiguousarray(array, dtype=kind)
        requested = name in self._dtype and array.dtype.kind != "c"
        if not (requested or np.can_cast(array.dtype, kind)):
            raise FedShuffleError(
                f"{who(clients[0])} holds {array.dtype} values, but others hold {kind}. Say its"
                f" dtype, such as {np.promote_types(array.dtype, kind)}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(kind)
        good = np.isfinite(cast) if kind.kind in "fc" else cast == array
        check(good, f"a number that {kind} cannot hold", "Choose another dtype.")
        return cast

    def pack(self, parse_ids: bool) -> tuple[list[Any], IntArray]:
        """Sort the rows by client; the ids, sorted, and the sizes of clients with examples."""
        if not self.number:
            raise FedShuffleError("there are no examples to import.")
        self._write_headers()
        with writing(self.folder.parent):
            for file in self.files:
                file.close()
        ids = list(self.clients)
        if parse_ids and all(re.fullmatch("0|-?[1-9][0-9]{0,17}", str(id)) for id in ids):
            ids = [int(id) for id in ids]
        order = sorted(np.flatnonzero(self.sizes).tolist(), key=ids.__getitem__)
        sizes = self.sizes[order]
        if not (self._grouped and sorted(order) == order):
            rank = np.zeros(len(ids), dtype=np.int64)
            rank[order] = np.arange(len(order))
            self._bar.update(self._task, description="packing", total=self.number, completed=0)
            with writing(self.folder.parent):
                for k, field in enumerate(self.fields.values()):
                    self._move(self.folder / f"field{k}.npy", field, rank, np.cumsum(sizes) - sizes)
        (self.folder / "owners").unlink()
        return [ids[k] for k in order], sizes

    def _move(self, file: Path, field: np.dtype[Any], rank: IntArray, free: IntArray) -> None:
        """Move every row of a field to the next free place of its client."""
        unsorted = file.rename(file.with_suffix(".unsorted"))
        np.lib.format.open_memmap(file, "w+", field.base, (self.number, *field.shape))
        if hasattr(os, "posix_fallocate"):  # a mapping that finds no disk space ends the process
            with file.open("rb+") as stream:
                os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
        with unsorted.open("rb") as source, (self.folder / "owners").open("rb") as owners:
            source.seek(-self.number * field.itemsize, os.SEEK_END)
            at_once = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, field.itemsize)))
            for begin in range(0, self.number, at_once):
                length = min(at_once, self.number - begin)
                order, places = _places(rank[np.fromfile(owners, np.int64, length)], free)
                # Mapped for each block: the pages of one mapping would fill the memory.
                target = np.lib.format.open_memmap(file, "r+")
                target[places] = np.fromfile(source, field, length)[order]
                self._bar.advance(self._task, length / len(self.fields))
        unsorted.unlink()


def _places(clients: IntArray, free: IntArray) -> tuple[IntArray, IntArray]:
    """A block's rows sorted by client, and the place of each, which is then no longer free."""
    order = np.argsort(clients, kind="stable")
    ordered = clients[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(first, append=len(ordered))
    places = free[ordered] + np.arange(len(ordered)) - np.repeat(first, lengths)
    free[ordered[first]] += lengths
    return order, places
