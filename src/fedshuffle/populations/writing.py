"""Writing a store: rows stream in from anywhere, in any order, and lie packed by client at the end.

Rows are appended to the fields' files as they come. Where they came client by client, sorted by id,
that is the packed layout already. Where not, every row's place is known once all clients have been
counted, and a second pass puts the rows there, block by block. So memory holds the table of clients
and one block of rows, never the data.

All this happens in a draft, which becomes the store when it is whole and is removed when anything
goes wrong.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedshuffle._arrays import IntArray, numeric
from fedshuffle._terminal import Console
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.populations.draft import Draft, blocks, checked_dtype, encoded_ids, writing
from fedshuffle.populations.store import Field

Id = str | int

_WAITING_BYTES = 1 << 22
"""Small chunks are written together when they amount to this."""
_CONVERT = "Convert it to numbers first (in Python, a function read can), or drop that example."


@final
class StoreWriter:
    """Packs examples into a store: leave the ``with`` block, and it is in its place.

    Args:
        out: the store's folder, made when all is written.
        names: the fields' names; ``field0``, ``field1``, ... if not given.
        dtype: what a field is stored as, by its name; as it comes first if not given.
        overwrite: replace the store that is there.
        progress: show a bar.
        total: rows to come, for the bar.

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
        overwrite: bool = False,
        progress: bool = False,
        total: int | None = None,
    ) -> None:
        self.draft = Draft(out, overwrite)
        self.source: dict[str, Any] = {}
        self.settle: Callable[[list[Id]], list[Id]] | None = None
        """What becomes of the ids once all are known."""
        self._waiting: list[tuple[Id, int, list[NDArray[Any]]]] = []
        self._bytes = 0
        self._kinds: list[Any] = []
        self._id_kind: type | None = None
        self._empty: set[Id] = set()
        self._names = None if names is None else tuple(names)
        self._dtype = {name: checked_dtype(name, kind) for name, kind in (dtype or {}).items()}
        self._codes: dict[Id, int] = {}
        self._counts = np.zeros(1024, dtype=np.int64)
        self._grouped = True
        self._last = 0
        self._bar = _Bar(progress, total)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.draft)
            self._spilled = self.draft.path / "owners"
            with writing(self.draft.out):
                self._owners = self._spilled.open("wb", buffering=1 << 20)
            self._bar.start()
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._finish()
        except KeyboardInterrupt:
            kind = KeyboardInterrupt
            raise
        finally:
            self._bar.stop()
            with contextlib.suppress(OSError):  # of what is thrown away
                self._owners.close()
            kept = self.draft.finished
            self.draft.__exit__()
            if kind is KeyboardInterrupt and not kept:
                Console(stderr=True).print(
                    f"Interrupted: nothing was kept of {self.rows} rows. Import them again."
                )

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self.draft.rows

    def add(self, client: Any, *fields: ArrayLike | Mapping[str, ArrayLike]) -> None:
        """Some examples of one client, as arrays or by name; more of them may come later."""
        if len(fields) == 1 and isinstance(fields[0], Mapping):
            self._names = self._names or tuple(fields[0])
            if fields[0].keys() != set(self._names):
                raise FedShuffleError(
                    f"client {client!r} has the fields {', '.join(fields[0])}, but others have"
                    f" {', '.join(self._names)}. Give the same fields for every client."
                )
            fields = tuple(fields[0][name] for name in self._names)
        arrays = [self._array(k, field, f" of client {client!r}") for k, field in enumerate(fields)]
        rows = _rows(arrays, f" of client {client!r}")
        name = self._id(client)
        if not rows:
            self._empty.add(name)
            return
        kinds = [(array.dtype, array.shape[1:]) for array in arrays]
        if kinds != self._kinds:
            self._flush()
            self._kinds = kinds
        # Copies, since an iterator may fill the same arrays again and again.
        self._waiting.append((name, rows, [array.copy() for array in arrays]))
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes > _WAITING_BYTES:
            self._flush()

    def add_rows(self, clients: Sequence[Any], owners: IntArray, *fields: ArrayLike) -> None:
        """Examples of several clients; row k belongs to ``clients[owners[k]]``."""
        self._flush()
        arrays = [self._array(k, field) for k, field in enumerate(fields)]
        if _rows(arrays):
            self._append([self._id(client) for client in clients], owners, arrays)

    def _flush(self) -> None:
        """Write the small chunks that waited for company."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            ids, rows, chunks = zip(*waiting, strict=True)
            arrays = [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
            self._append(ids, np.repeat(np.arange(len(ids)), rows), arrays)

    def _append(self, ids: Sequence[Id], owners: IntArray, arrays: list[NDArray[Any]]) -> None:
        fields = self._fields(arrays)
        arrays = [
            self._fit(field, array, ids, owners)
            for field, array in zip(fields, arrays, strict=True)
        ]
        known = [self._codes.setdefault(name, len(self._codes)) for name in ids]
        codes = np.array(known, dtype=np.int64)[owners]
        self._count(codes)
        with writing(self.draft.out):
            self._owners.write(codes.data)
        self.draft.append(arrays)
        self._bar.advance(len(codes))

    def _id(self, client: Any) -> Id:
        name: Id = client.item() if isinstance(client, np.generic) else client
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise FedShuffleError(
                f"client id {name!r:.60} is of type {type(name).__name__}. Use text or whole"
                " numbers."
            )
        if isinstance(name, int) and not -(2**63) <= name < 2**63:
            raise FedShuffleError(f"client id {name} does not fit in 64 bits. Use text instead.")
        if isinstance(name, str) and not name.isascii():
            encoded_ids([name])
        self._id_kind = self._id_kind or type(name)
        if self._id_kind is not type(name):
            raise FedShuffleError(
                f"client ids mix text and numbers, such as {name!r}. Make them all text, or all"
                " numbers."
            )
        return name

    def _array(self, k: int, field: Any, who: str = "") -> NDArray[Any]:
        what = f"field {self._name(k)!r}{who}"
        array = numeric(field, what, _CONVERT)
        if array.dtype.char in "gG":
            raise FedShuffleError(f"{what} holds {array.dtype} values. {_CONVERT}")
        return array

    def _name(self, k: int) -> str:
        return self._names[k] if self._names and k < len(self._names) else f"field{k}"

    def _fields(self, arrays: Sequence[NDArray[Any]]) -> list[Field]:
        """The fields, as the first rows define them."""
        if not self.draft.fields:
            names = [self._name(k) for k in range(len(arrays))]
            if len(set(self._names or names)) != len(names):
                raise FedShuffleError(
                    f"there are {len(arrays)} arrays for the fields {', '.join(self._names or ())}:"
                    " give one for each, and every field another name."
                )
            for name in self._dtype:
                if name not in names:
                    raise unknown("field", name, names)
            for name, array in zip(names, arrays, strict=True):
                kind = self._dtype.get(name, array.dtype.newbyteorder("="))
                self.draft.field(Field(name, kind, array.shape[1:]))
        if len(arrays) != len(self.draft.fields):
            raise FedShuffleError(
                f"there are {len(arrays)} arrays after rows with {len(self.draft.fields)}."
                " Give the same fields for every client."
            )
        return self.draft.fields

    def _fit(
        self, field: Field, array: NDArray[Any], ids: Sequence[Id], owners: IntArray
    ) -> NDArray[Any]:
        """The rows as the field stores them, or an error that names the first that does not fit."""

        def refuse(good: NDArray[np.bool_], what: str, remedy: str) -> None:
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

        if array.shape[1:] != field.shape:
            raise FedShuffleError(
                f"field {field.name!r} of client {ids[owners[0]]!r} has examples of shape"
                f" {array.shape[1:]}, but others have {field.shape}. Pad or cut them to one shape."
            )
        if array.dtype.kind in "fc":
            refuse(np.isfinite(array), "NaN or infinity", "Clean or drop that example.")
        if array.dtype == field.dtype:
            return np.ascontiguousarray(array, dtype=field.dtype)
        told = field.name in self._dtype and array.dtype.kind != "c"
        if not (told or np.can_cast(array.dtype, field.dtype)):
            raise FedShuffleError(
                f"field {field.name!r} of client {ids[owners[0]]!r} holds {array.dtype} values, but"
                f" others hold {field.dtype}. Say its dtype, such as"
                f" {np.promote_types(array.dtype, field.dtype)}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(field.dtype)
        good = np.isfinite(cast) if field.dtype.kind in "fc" else cast == array
        refuse(good, f"a number that {field.dtype} cannot hold", "Choose another dtype.")
        return cast

    def _count(self, codes: IntArray) -> None:
        if len(self._codes) > len(self._counts):
            more = np.zeros(2 * len(self._codes) - len(self._counts), dtype=np.int64)
            self._counts = np.concatenate([self._counts, more])
        np.add.at(self._counts, codes, 1)
        self._grouped &= bool(codes[0] >= self._last and (codes[1:] >= codes[:-1]).all())
        self._last = int(codes[-1])

    def _finish(self) -> None:
        self._flush()
        with writing(self.draft.out):
            self._owners.close()
        ids = list(self._codes)
        if not ids:
            raise FedShuffleError("there are no examples to import.")
        if self.settle is not None:
            ids = self.settle(ids)
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__))
        sizes = self._counts[order]
        if not (self._grouped and (np.diff(order) > 0).all()):
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            self._pack(rank, np.cumsum(sizes) - sizes)
        self._spilled.unlink()
        self.draft.finish(sizes, [ids[k] for k in order.tolist()], source=self.source)
        empty = sorted(self._empty - self._codes.keys())
        if empty:
            warnings.warn(
                f"{len(empty)} clients without examples were left out, such as {empty[0]!r}.",
                stacklevel=4,
            )

    def _pack(self, rank: IntArray, free: IntArray) -> None:
        """Move every row to its client; ``free`` is the next free place of each client."""
        self._bar.next("packing", len(self.draft.fields) * self.rows)
        places = self.draft.path / "places"
        with writing(self.draft.out):
            with self._spilled.open("rb") as owners, places.open("wb") as file:
                for length in blocks(self.rows, 8):
                    file.write(_places(rank[np.fromfile(owners, np.int64, length)], free).data)
            for k in range(len(self.draft.fields)):
                for moved in self.draft.move(k, places):
                    self._bar.advance(moved)
            places.unlink()


def _places(clients: IntArray, free: IntArray) -> IntArray:
    """Where the rows of a block go, in the order they came; takes these places from ``free``.

    >>> free = np.array([0, 10])
    >>> _places(np.array([1, 0, 1]), free).tolist(), free.tolist()
    ([10, 0, 11], [1, 12])
    """
    order = np.argsort(clients, kind="stable")
    ordered = clients[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(first, append=len(ordered))
    places = np.empty_like(clients)
    places[order] = free[ordered] + np.arange(len(ordered)) - np.repeat(first, lengths)
    free[ordered[first]] += lengths
    return places


def _rows(arrays: Sequence[NDArray[Any]], who: str = "") -> int:
    lengths = {len(array) if array.ndim else -1 for array in arrays}
    if len(lengths) > 1 or -1 in lengths:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise FedShuffleError(f"all fields{who} need one row per example, got shapes {shapes}.")
    if not lengths:
        raise FedShuffleError("give at least one array of examples.")
    return lengths.pop()


@final
class _Bar:
    """Rows so far, on standard error, for those who want to see them."""

    def __init__(self, wanted: bool, total: int | None) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if wanted:
            columns = (BarColumn(), TextColumn("{task.completed:,.0f} rows"), TimeElapsedColumn())
            console = Console(stderr=True)
            self._progress = Progress(
                TextColumn("{task.description}"), *columns, console=console, transient=True
            )
            self._task = self._progress.add_task("importing", total=total)

    def start(self) -> None:
        if self._progress:
            self._progress.start()

    def next(self, what: str, total: int) -> None:
        if self._progress:
            self._task = self._progress.add_task(what, total=total)

    def advance(self, rows: int) -> None:
        if self._progress:
            self._progress.advance(self._task, rows)

    def stop(self) -> None:
        if self._progress:
            self._progress.stop()
