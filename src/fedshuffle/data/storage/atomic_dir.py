"""The folder of a store, which changes by one rename and has one writer at a time.

A writer puts its arrays into a new folder inside that of the store. Once all of them are on disk,
one rename replaces ``federation.json``, which points to the arrays. So at any moment the folder
holds the old store or the new one, complete. Arrays that ``federation.json`` does not point to are
removed afterwards, or by the next writer if this one was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedshuffle import _files
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.data.storage.store import ARRAYS, FACTS, FORMAT, VERSION, Field
from fedshuffle.errors import FedShuffleError, error_context

_MARK = "draft"
"""A file that marks a folder of arrays as unfinished, so that it may be removed."""
_SCRAP = f"{FACTS}.draft"
"""What a killed writer may leave of :func:`fedshuffle._files.atomic_write`."""


class AtomicDir:
    """A new folder of arrays, ``path``, that :meth:`publish` makes the content of the store."""

    def __init__(self, out: str | Path, overwrite: bool = False) -> None:
        self.out = Path(out).absolute()
        self.overwrite = overwrite

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

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def published(self) -> bool:
        return _live(self.out) == self.path.name

    def _check(self) -> None:
        """Refuse a folder that holds something else, or a store that may not be replaced."""
        if not self.out.exists():
            return
        if not self.out.is_dir() or not ((self.out / FACTS).is_file() or _unused(self.out)):
            raise FedShuffleError(
                f"{str(self.out)!r} is neither a store nor empty. Choose another folder."
            )
        if (self.out / FACTS).exists() and not self.overwrite:
            raise FedShuffleError(
                f"{str(self.out)!r} holds a federation already. Choose another folder, or allow"
                " it with overwrite."
            )

    def _clean(self) -> None:
        with contextlib.suppress(OSError):  # the next writer will
            _sweep(self.out)

    def open(self, name: str) -> BinaryIO:
        """A new file among the arrays; closed on exit at the latest."""
        self._stack.enter_context(contextlib.suppress(OSError))  # on closing: was reported before
        with writing(self.out):
            return self._stack.enter_context((self.path / name).open("wb", buffering=1 << 20))

    def publish(
        self,
        fields: Sequence[Field],
        sizes: IntArray,
        ids: Sequence[Any] | None,
        weights: FloatArray | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all but the fields and make it the store; a power cut leaves the old or the new."""
        kind, arrays = encoded_ids(ids)
        arrays |= {"sizes": sizes} | ({} if weights is None else {"weights": weights})
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "clients": len(sizes),
            "examples": int(sizes.sum()),
            "ids": kind,
            "weights": weights is not None,
            "fields": [{"name": f.name, "dtype": f.dtype.name, "shape": f.shape} for f in fields],
            "source": dict(origin or {}),
            "arrays": self.path.name,
        }
        with writing(self.out):
            for name, array in arrays.items():
                np.save(self.path / f"{name}.npy", array)
            for file in self.path.iterdir():
                with file.open("rb+") as stream:
                    os.fsync(stream.fileno())
            _flush_names(self.path)
            _files.atomic_write(self.out / FACTS, (json.dumps(facts, indent=2) + "\n").encode())
            _flush_names(self.out)  # before the old arrays are removed
            (self.path / _MARK).unlink()


def save_arrays(
    out: str | Path,
    fields: Sequence[Any],
    sizes: IntArray,
    ids: Sequence[Hashable] | None,
    weights: FloatArray | None,
    names: Sequence[str] | None,
    overwrite: bool,
) -> None:
    """Write packed arrays or tensors as a store; without ids, clients are numbered from 0."""
    names = names or [f"field{k}" for k in range(len(fields))]
    if len(names) != len(fields):
        raise FedShuffleError(f"there are {len(names)} names for {len(fields)} fields.")
    encoded_ids(ids)  # refuses unsuitable ids before anything is written
    described = []
    with AtomicDir(out, overwrite) as folder:
        for k, (name, values) in enumerate(zip(names, fields, strict=True)):
            if hasattr(values, "detach"):
                with error_context(f"field {name!r} needs a dtype that numpy has", TypeError):
                    values = values.detach().cpu().numpy()
            kind = checked_dtype(name, values.dtype)
            described.append(Field(name, kind, tuple(values.shape[1:])))
            with writing(folder.out):
                np.save(folder.path / f"field{k}.npy", np.ascontiguousarray(values, dtype=kind))
        folder.publish(described, sizes, ids, weights)


def checked_dtype(name: str, kind: DTypeLike) -> np.dtype[Any]:
    """A dtype that a field can be stored as, or a clear error."""
    try:
        dtype = np.dtype(kind)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" or dtype.char in "gG":
        raise FedShuffleError(
            f"field {name!r} cannot be stored as {kind!r}, but as float32, int64, uint8 or bool."
        )
    return dtype.newbyteorder("=")


def encoded_ids(ids: Sequence[Any] | None) -> tuple[str, dict[str, NDArray[Any]]]:
    """The kind of the ids, and the arrays that hold them."""
    if ids is None:
        return "none", {}
    if all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        return "numbers", {"ids": np.array(ids, dtype=np.int64)}
    if not all(isinstance(id, str) for id in ids):
        raise FedShuffleError("a store keeps ids that are all text or all whole numbers.")
    try:
        words = [id.encode() for id in ids]
    except UnicodeEncodeError as error:
        raise FedShuffleError(f"client id {error.object!r} is not valid text: {error}.") from error
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    return "text", {"ids": np.frombuffer(b"".join(words), np.uint8), "id_offsets": offsets}


def _flush_names(folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _arrays(out: Path) -> list[Path]:
    """All folders of arrays in the folder of a store, in use or not."""
    return [path for path in out.glob(f"{ARRAYS}*") if path.name[len(ARRAYS) :].isdecimal()]


def _live(out: Path) -> str | None:
    """The folder of arrays that a store points to; None if no store can be read."""
    try:
        return str(json.loads((out / FACTS).read_bytes())["arrays"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_draft(arrays: Path) -> bool:
    return (arrays / _MARK).exists() or not any(arrays.iterdir())


def _unused(out: Path) -> bool:
    """Whether a folder holds nothing but what killed writers left."""
    drafts = {path.name for path in _arrays(out) if _is_draft(path)}
    return {path.name for path in out.iterdir()} <= {*drafts, _SCRAP, _files.LOCK}


def _sweep(out: Path) -> None:
    """Remove what earlier writers left: drafts, and arrays that the store does not point to."""
    live = _live(out)
    for path in _arrays(out):
        if path.name != live and (live is not None or _is_draft(path)):
            for file in path.iterdir():
                if file.name != _MARK:  # removed last, so that a partly removed draft stays a draft
                    file.unlink()
            shutil.rmtree(path)
    if live is not None:
        for file in out.glob("*.npy"):  # of version 1, which had its arrays there
            file.unlink()
    (out / _SCRAP).unlink(missing_ok=True)


def writing(out: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an error of the disk into one line."""
    remedy = "Nothing of it was kept: make room or choose another folder."
    return error_context(
        lambda error: f"cannot write {str(out)!r}: {error.strerror or error}. {remedy}", OSError
    )
