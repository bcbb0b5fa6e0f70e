"""A store while it is being written: one writer at a time, and one rename that makes it the store.

The arrays are written to a new folder inside that of the store. When all are on the disk, the file
``federation.json`` that points to them replaces the one before, by one rename. So at any moment the
store is the old one or the new one, and whole. What no ``federation.json`` points to is removed
after that, or by the next import if this one was killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedshuffle import _files
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.populations.store import ARRAYS, FACTS, FORMAT, VERSION, Field

_BLOCK_ROWS, _BLOCK_BYTES = 1 << 16, 1 << 25
"""The most rows and bytes that are moved at a time."""
_MARK = "draft"
"""A file that says that a folder of arrays is a draft, and may go."""


@final
class Draft:
    """The arrays of a store before it is whole: fields that grow, then all the rest at once."""

    def __init__(self, out: str | Path, overwrite: bool = False) -> None:
        self.out = Path(out).absolute()
        self.overwrite = overwrite
        self.fields: list[Field] = []
        self.rows = 0
        self._files: list[Any] = []

    def __enter__(self) -> Self:
        self._check()
        with contextlib.ExitStack() as stack, writing(self.out):
            stack.enter_context(_files.one_writer(self.out))
            self._check()  # again: another writer may just have ended
            stack.callback(self._clean)
            _sweep(self.out)
            last = max((int(folder.name[len(ARRAYS) :]) for folder in _arrays(self.out)), default=0)
            self.path = self.out / f"{ARRAYS}{last + 1}"
            self.path.mkdir()
            (self.path / _MARK).touch()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    @property
    def finished(self) -> bool:
        """Whether it is the store now."""
        return _live(self.out) == self.path.name

    def _check(self) -> None:
        """Refuse a place that holds something else, or a store that may not be replaced."""
        if not self.out.exists():
            return
        if not self.out.is_dir() or not ((self.out / FACTS).is_file() or _unused(self.out)):
            raise FedShuffleError(
                f"{str(self.out)!r} holds something that is no federation. Choose another place"
                " for the store."
            )
        if (self.out / FACTS).exists() and not self.overwrite:
            raise FedShuffleError(
                f"{str(self.out)!r} holds a federation already. Choose another folder, or allow"
                " it with overwrite."
            )

    def _clean(self) -> None:
        with contextlib.suppress(OSError):  # such as a full disk, named before
            for file in self._files:
                file.close()
        with contextlib.suppress(OSError):  # the next import will
            _sweep(self.out)

    def field(self, field: Field) -> None:
        """Begin one more field."""
        with writing(self.out):
            file = self._file(len(self.fields)).open("wb", buffering=1 << 20)
            self._files.append(file)
            self.fields.append(field)
            _write_header(file, field, 0)

    def append(self, arrays: Iterable[NDArray[Any]]) -> None:
        """Add rows to every field."""
        with writing(self.out):
            for file, array in zip(self._files, arrays, strict=True):
                file.write(array.data)
        self.rows += len(array)

    def move(self, k: int, places: Path) -> Iterator[int]:
        """Put the rows of a field at these places; says how many were moved, block by block."""
        self._close(k)
        field, packed = self.fields[k], self._file(k)
        came = packed.with_suffix(".came")
        packed.rename(came)
        shape = (self.rows, *field.shape)
        np.lib.format.open_memmap(packed, "w+", field.dtype, shape)
        _reserve(packed)
        with came.open("rb") as rows, places.open("rb") as whereto:
            rows.seek(-self.rows * field.bytes, os.SEEK_END)
            for length in blocks(self.rows, field.bytes):
                place = np.fromfile(whereto, np.int64, length)
                block = np.fromfile(rows, field.dtype, length * math.prod(field.shape))
                order = np.argsort(place)
                # Mapped anew for every block: the pages of one mapping would pile up in memory.
                target = np.lib.format.open_memmap(packed, "r+")
                target[place[order]] = block.reshape(length, *field.shape)[order]
                yield length
        came.unlink()

    def finish(
        self,
        sizes: IntArray,
        ids: Sequence[Any] | None,
        weights: FloatArray | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all but the fields, and make it the store; ids None are numbers."""
        kind, arrays = encoded_ids(ids)
        arrays["sizes"] = sizes
        if weights is not None:
            arrays["weights"] = weights
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "clients": len(sizes),
            "examples": int(sizes.sum()),
            "ids": kind,
            "weights": weights is not None,
            "fields": [
                {"name": field.name, "dtype": field.dtype.name, "shape": field.shape}
                for field in self.fields
            ],
            "arrays": self.path.name,
            "source": dict(source or {}),
        }
        with writing(self.out):
            for k in range(len(self.fields)):
                self._close(k)
            for name, array in arrays.items():
                np.save(self.path / f"{name}.npy", array)
            for file in self.path.iterdir():
                _flush(file)
            _flush_folder(self.path)
            _files.replace(self.out / FACTS, (json.dumps(facts, indent=2) + "\n").encode())
            _flush_folder(self.out)  # before the old arrays go
            (self.path / _MARK).unlink()

    def _file(self, k: int) -> Path:
        return self.path / f"field{k}.npy"

    def _close(self, k: int) -> None:
        """Write how many rows there are into the file's header."""
        if not self._files[k].closed:
            self._files[k].seek(0)
            _write_header(self._files[k], self.fields[k], self.rows)
            self._files[k].close()


def checked_dtype(name: str, kind: DTypeLike) -> np.dtype[Any]:
    """A dtype that a field can be stored as, or a clear error."""
    try:
        found = np.dtype(kind)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufc" or found.char in "gG":
        raise FedShuffleError(
            f"field {name!r} cannot be stored as {kind!r}. Choose a dtype such as float32, int64,"
            " uint8 or bool."
        )
    return found.newbyteorder("=")


def _write_header(file: Any, field: Field, rows: int) -> None:
    """The header of an npy file; numpy pads it so that the number of rows may grow in place."""
    shape = (rows, *field.shape)
    header = {"descr": field.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def encoded_ids(ids: Sequence[Any] | None) -> tuple[str, dict[str, NDArray[Any]]]:
    """The kind of the ids, and the arrays that hold them."""
    if ids is None:
        return "none", {}
    if all(isinstance(name, int) and not isinstance(name, bool) for name in ids):
        return "numbers", {"ids": np.array(ids, dtype=np.int64)}
    if not all(isinstance(name, str) for name in ids):
        raise FedShuffleError("a store keeps ids that are all text or all whole numbers.")
    try:
        words = [name.encode() for name in ids]
    except UnicodeEncodeError as error:
        raise FedShuffleError(f"client id {error.object!r} is no valid text: {error}.") from error
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    return "text", {"ids": np.frombuffer(b"".join(words), np.uint8), "id_offsets": offsets}


def blocks(rows: int, row_bytes: int) -> Iterator[int]:
    """So many rows, block by block, in blocks that fit in memory.

    >>> list(blocks(150_000, 8))
    [65536, 65536, 18928]
    """
    length = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, row_bytes)))
    return (min(length, rows - at) for at in range(0, rows, length))


def _reserve(file: Path) -> None:
    """Claim the disk space of a file: a mapping that finds none would end the process."""
    if hasattr(os, "posix_fallocate"):
        with file.open("rb+") as stream:
            os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)


def _flush(file: Path) -> None:
    """To the disk, so that even after a power cut a store in its place is whole."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    """The same for the names of the files in it, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _arrays(out: Path) -> list[Path]:
    """The folders of arrays in the folder of a store, in use or not."""
    return [path for path in out.glob(f"{ARRAYS}*") if path.name[len(ARRAYS) :].isdecimal()]


def _live(out: Path) -> str | None:
    """The folder of arrays that a store points to; None if there is no store that can be read."""
    try:
        return str(json.loads((out / FACTS).read_bytes())["arrays"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


_SCRAP = f"{FACTS}.draft"
"""What a killed import may leave of :func:`fedshuffle._files.replace`."""


def _is_draft(arrays: Path) -> bool:
    return (arrays / _MARK).exists() or not any(arrays.iterdir())


def _unused(out: Path) -> bool:
    """Whether a folder holds nothing but what killed imports left."""
    drafts = {path.name for path in _arrays(out) if _is_draft(path)}
    return {path.name for path in out.iterdir()} <= {*drafts, _SCRAP, _files.LOCK}


def _sweep(out: Path) -> None:
    """Remove what earlier imports left: drafts, and arrays to which the store does not point."""
    live = _live(out)
    for path in _arrays(out):
        if path.name != live and (live is not None or _is_draft(path)):
            for file in path.iterdir():
                if file.name != _MARK:  # which goes last, so that the rest of a draft is one
                    file.unlink()
            shutil.rmtree(path)
    if live is not None:
        for file in out.glob("*.npy"):  # of version 1, which had its arrays there
            file.unlink()
    (out / _SCRAP).unlink(missing_ok=True)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Say in one line why something could not be written."""
    try:
        yield
    except OSError as error:
        raise FedShuffleError(
            f"cannot write {str(out)!r}: {error.strerror or error}. Nothing of it was kept: make"
            " room or choose another folder."
        ) from error
