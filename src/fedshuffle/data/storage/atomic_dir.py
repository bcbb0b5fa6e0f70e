"""The folder of a store, which changes by one rename and has one writer at a time.

A writer fills a draft: a new folder of arrays, marked by a ``federation.json`` of its own. Once all
is on disk, one rename moves that file over the store's, which then points to the new arrays. So at
any moment the folder holds the old store or the new one, complete. Other arrays are removed
afterwards, or by the next writer if this one was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedshuffle import _files
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.data.storage.store import ARRAYS, FACTS, FORMAT, VERSION
from fedshuffle.errors import FedShuffleError, error_context

Fields = Mapping[str, np.dtype[Any]]
"""The dtype of an example by the name of the field; an array is a subarray dtype of its shape."""


@contextmanager
def draft(out: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A new folder of arrays, which is removed at the end unless it was published."""
    out = Path(out).absolute()
    with ExitStack() as stack:
        with writing(out):
            stack.enter_context(_files.one_writer(out))
            found = {path.name for path in out.iterdir()} - {_files.LOCK}
            drafts = {path.name for path in _folders(out) if _is_draft(path)}
            if FACTS not in found and found != drafts:
                raise FedShuffleError(
                    f"{str(out)!r} is neither a store nor empty. Choose another folder."
                )
            if FACTS in found and not overwrite:
                raise FedShuffleError(
                    f"{str(out)!r} holds a federation already. Choose another folder, or allow it"
                    " with overwrite."
                )
            _sweep(out)
            last = max((int(path.name.partition("-")[2]) for path in _folders(out)), default=0)
            arrays = out / f"arrays-{last + 1}"
            stack.callback(_sweep, out)
            arrays.mkdir()
            (arrays / FACTS).touch()
        yield arrays


def publish(
    arrays: Path,
    fields: Fields,
    sizes: IntArray,
    ids: Sequence[Any] | None,
    weights: FloatArray | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write all but the fields and make the draft the store, even if the power fails meanwhile."""
    kind, others = encoded_ids(ids)
    others |= {"sizes": sizes} | ({} if weights is None else {"weights": weights})
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "clients": len(sizes),
        "examples": int(sizes.sum()),
        "ids": kind,
        "weights": weights is not None,
        "fields": [
            {"name": name, "dtype": kind.base.name, "shape": kind.shape}
            for name, kind in fields.items()
        ],
        "source": dict(origin or {}),
        "arrays": arrays.name,
    }
    out = arrays.parent
    with writing(out):
        for name, array in others.items():
            np.save(arrays / f"{name}.npy", array)
        (arrays / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        for file in arrays.iterdir():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        _flush_names(arrays)
        os.replace(arrays / FACTS, out / FACTS)
        _flush_names(out)  # before the old arrays are removed


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
    if len(set(names)) != len(fields):
        raise FedShuffleError(f"there are {len(set(names))} names for {len(fields)} fields.")
    encoded_ids(ids)  # refuses unsuitable ids before anything is written
    described = {}
    with draft(out, overwrite) as arrays:
        for k, (name, values) in enumerate(zip(names, fields, strict=True)):
            if hasattr(values, "detach"):
                with error_context(f"field {name!r} needs a dtype that numpy has", TypeError):
                    values = values.detach().cpu().numpy()
            kind = checked_dtype(name, values.dtype)
            described[name] = np.dtype((kind, values.shape[1:]))
            with writing(arrays.parent):
                np.save(arrays / f"field{k}.npy", np.ascontiguousarray(values, dtype=kind))
        publish(arrays, described, sizes, ids, weights)


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


def writing(out: Path) -> AbstractContextManager[None]:
    """Turn an error of the disk into one line."""
    remedy = "Nothing of it was kept: make room or choose another folder."
    return error_context(
        lambda error: f"cannot write {str(out)!r}: {error.strerror or error}. {remedy}", OSError
    )


def _flush_names(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _folders(out: Path) -> list[Path]:
    """All folders of arrays of a store, in use or not."""
    return [path for path in out.iterdir() if ARRAYS.fullmatch(path.name)]


def _is_draft(arrays: Path) -> bool:
    return (arrays / FACTS).exists() or not any(arrays.iterdir())


def _sweep(out: Path) -> None:
    """Remove the arrays that the store does not point to; without a readable store, only drafts."""
    live = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        live = json.loads((out / FACTS).read_bytes())["arrays"]
    with suppress(OSError):  # then the next writer removes them
        for folder in _folders(out):
            if folder.name != live and (live is not None or _is_draft(folder)):
                # The mark last, so that a partly removed draft stays a draft.
                for file in sorted(folder.iterdir(), key=lambda file: file.name == FACTS):
                    file.unlink()
                folder.rmdir()
