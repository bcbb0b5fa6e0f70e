"""A federation on disk: a folder of plain arrays that are memory-mapped, not read, when opened.

docs/reference/files.md lists the files. A writer, one at a time, fills a new folder of arrays,
with a ``federation.json`` of its own. Once all is on disk, one rename moves it over the store's,
which then points to the new arrays. So at any moment the folder holds the old store or the new one,
complete. Arrays that it does not point to are removed afterwards, or by the next writer if this one
was killed.

:mod:`fedshuffle.data.storage.writer` guarantees what opening does not check: that all numbers are
finite and that every row belongs to its client.
"""

import bisect
import json
import math
import mmap
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedshuffle import _files
from fedshuffle._arrays import FloatArray, IntArray, counts, vector
from fedshuffle.errors import FedShuffleError, error_context, one_line

FORMAT = "fedshuffle federation"
VERSION = 2
FACTS = "federation.json"
ARRAYS = re.compile(r"arrays-(\d+)")
"""The names of folders of arrays."""


@dataclass(frozen=True, eq=False)
class Store:
    """An opened store. Its fields are memory-mapped; writing to them never changes the files."""

    path: Path
    arrays: Path
    """The folder of its arrays."""
    sizes: IntArray
    weights: FloatArray | None
    """Objective weights; None if proportional to size."""
    ids: Sequence[Hashable]
    names: tuple[str, ...]
    fields: tuple[NDArray[Any], ...]
    origin: dict[str, Any]
    """Where the data is from, as the importer described it."""

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in (self.path / FACTS, *self.arrays.iterdir()))


class StoredIds(Sequence[Hashable]):
    """Client ids that are read from disk one by one: whole numbers, or text with offsets."""

    def __init__(self, values: NDArray[Any], offsets: IntArray | None = None) -> None:
        self._values, self._offsets = values, offsets

    def __len__(self) -> int:
        return len(self._values) if self._offsets is None else len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        return self._at(chosen) if isinstance(chosen, int) else tuple(map(self._at, chosen))

    def _at(self, i: int) -> Any:
        if self._offsets is None:
            return int(self._values[i])
        return self._values[self._offsets[i] : self._offsets[i + 1]].tobytes().decode()

    def index(self, value: Any, *within: Any) -> int:
        """The client with this id, by binary search first, since importers sort by id."""
        with suppress(TypeError):  # text among numbers, or numbers among text
            position = bisect.bisect_left(self, value)
            if not within and self[position : position + 1] == (value,):
                return position
        return super().index(value, *within)


def open_store(path: str | Path) -> Store:
    """Map a store's arrays after checking that every file exists and has the right length.

    Most callers want :meth:`fedshuffle.Federation.open`, which opens a store as a federation.

    >>> from tempfile import TemporaryDirectory
    >>> from fedshuffle.data import import_chunks
    >>> with TemporaryDirectory() as folder:
    ...     _ = import_chunks([("a", [[1.0]], [0]), ("b", [[2.0]], [1])], f"{folder}/store")
    ...     open_store(f"{folder}/store").sizes.tolist()
    [1, 1]
    """
    folder, text = Path(path).absolute(), None
    if not (folder / FACTS).is_file():
        raise FedShuffleError(f"there is no federation in {str(path)!r}: {FACTS} is missing.")
    try:
        text = (folder / FACTS).read_bytes()
        return _open(folder, json.loads(text))
    except (OSError, KeyError, TypeError, ValueError) as error:
        with suppress(OSError):
            if (folder / FACTS).read_bytes() != text:
                return open_store(path)  # it was replaced while this one was opened
        what = f"{FACTS} lacks {error}" if isinstance(error, KeyError) else one_line(error)
        raise FedShuffleError(
            f"the federation in {str(path)!r} is broken: {what}. Import it again."
        ) from error


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _open(folder: Path, facts: Any) -> Store:
    described = isinstance(facts, dict) and facts.get("format") == FORMAT
    _require(described, f"{FACTS} does not describe a federation")
    version, name = facts["version"], str(facts["arrays"])
    _require(version == VERSION, f"its version is {version!r}, and this fedshuffle reads {VERSION}")
    _require(ARRAYS.fullmatch(name) is not None, f"{FACTS} refers to arrays in {name!r}")
    arrays, clients, examples = folder / name, int(facts["clients"]), int(facts["examples"])
    sizes = counts(_map(arrays, "sizes", "<i8", (clients,)), "sizes.npy")
    total = int(sizes.sum())
    _require(total == examples, f"sizes.npy adds up to {total} examples instead of {examples}")
    weights = None
    if facts["weights"]:
        weights = vector(_map(arrays, "weights", "<f8", (clients,)), "weights.npy", range(clients))
        share = float(weights.sum())
        _require(abs(share - 1) < 1e-6, f"weights.npy adds up to {share:g} instead of 1")
    fields = [
        _map(arrays, f"field{k}", field["dtype"], (examples, *field["shape"]))
        for k, field in enumerate(facts["fields"])
    ]
    names = tuple(str(field["name"]) for field in facts["fields"])
    ids = _ids(arrays, facts["ids"], clients)
    return Store(folder, arrays, sizes, weights, ids, names, tuple(fields), dict(facts["source"]))


def _ids(folder: Path, kind: str, clients: int) -> Sequence[Hashable]:
    if kind == "none":
        return range(clients)
    if kind == "numbers":
        return StoredIds(_map(folder, "ids", "<i8", (clients,)))
    _require(kind == "text", f"{FACTS} has ids of the unknown kind {kind!r}")
    offsets = _map(folder, "id_offsets", "<i8", (clients + 1,))
    ascending = offsets[0] == 0 and (np.diff(offsets) >= 0).all()
    _require(bool(ascending), "id_offsets.npy does not ascend from 0")
    return StoredIds(_map(folder, "ids", "|u1", (int(offsets[-1]),)), offsets)


def _map(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map the array in a file, which must have this dtype and shape, without reading it."""
    file, want = f"{name}.npy", np.dtype(dtype)
    _require(want.kind in "biufc", f"{FACTS} asks for {dtype} values in {file}")
    _require((folder / file).is_file(), f"{file} is missing")
    with (folder / file).open("rb") as stream:
        try:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("not of version 1.0")
            with warnings.catch_warnings():  # from Python's parser, and numpy's second attempt
                warnings.simplefilter("ignore")
                header = np.lib.format.read_array_header_1_0(stream)
        except Exception as error:  # numpy parses it as a Python literal, which fails in many ways
            raise ValueError(f"{file} is not an array ({one_line(error):.80})") from error
        actual = f"{header[2]} {header[0]}" + " in Fortran order" * header[1]
        _require(header == (shape, False, want), f"{file} holds {actual}, not {want} {shape}")
        begin = stream.tell()
        excess = os.fstat(stream.fileno()).st_size - begin - math.prod(shape) * want.itemsize
        wrong = "long" if excess > 0 else "short"
        _require(not excess, f"{file} is {abs(excess)} bytes too {wrong}")
        return np.ndarray(shape, want, buffer=_mapping(stream.fileno()), offset=begin)


def _mapping(file: int) -> mmap.mmap:
    """The file as memory that torch may write to; the writes never reach the disk."""
    if sys.platform != "linux":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Without NORESERVE Linux refuses to map more than its memory, since all of it might be written.
    common = platform.machine() in ("x86_64", "aarch64")
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if common else 0)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE | reserve, prot=protection)


# Writing ---------------------------------------------------------------------------------------


@contextmanager
def draft(out: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A new folder of arrays, which is removed at the end unless it was published."""
    out = Path(out).absolute()
    with ExitStack() as stack:
        with writing(out):
            stack.enter_context(_files.one_writer(out))
            if (out / FACTS).exists() and not overwrite:
                raise FedShuffleError(
                    f"'{out}' holds a federation already. Choose another folder, or overwrite."
                )
            others = {path.name for path in out.iterdir()} - {_files.LOCK}
            if others - _arrays_in(out) and not (out / FACTS).exists():
                raise FedShuffleError(f"'{out}' is neither a store nor empty. Choose another.")
            _sweep(out)
            last = max((int(name.partition("-")[2]) for name in _arrays_in(out)), default=0)
            arrays = out / f"arrays-{last + 1}"
            stack.callback(_sweep, out)
            arrays.mkdir()
        yield arrays


def publish(
    arrays: Path,
    fields: Mapping[str, np.dtype[Any]],
    sizes: IntArray,
    ids: Sequence[Any] | None,
    weights: FloatArray | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write all but the fields and make the draft the store, even if the power fails meanwhile.

    The dtype of a field is that of an example: an array is a subarray dtype of its shape.
    """
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
    with error_context(
        lambda error: f"client id {error.object!r} is not valid text: {error}.", UnicodeEncodeError
    ):
        words = [id.encode() for id in ids]
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


def _arrays_in(out: Path) -> set[str]:
    """The folders of arrays of a store, in use or not."""
    return {path.name for path in out.iterdir() if ARRAYS.fullmatch(path.name)}


def _sweep(out: Path) -> None:
    """Remove all arrays that the store does not point to, unless that cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # then the next writer does
        facts = out / FACTS
        live = json.loads(facts.read_bytes())["arrays"] if facts.exists() else None
        for name in _arrays_in(out) - {live}:
            shutil.rmtree(out / name)
