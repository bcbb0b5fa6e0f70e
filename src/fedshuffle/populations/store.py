"""A federation on disk: a folder of plain arrays, opened by mapping them, without reading them.

    DIR/federation.json           version, numbers of clients and examples, the fields, where from,
                                  and which folder holds the arrays
    DIR/arrays-1/sizes.npy        examples of each client
    DIR/arrays-1/weights.npy      objective weights, only where they are not by size
    DIR/arrays-1/ids.npy          the clients' ids: whole numbers, or text as UTF-8 end to end,
    DIR/arrays-1/id_offsets.npy   and then where each begins; neither where ids are numbers from 0
    DIR/arrays-1/field0.npy ...   the packed examples, one array a field, sorted by client

Overwriting writes ``arrays-2``, then replaces ``federation.json``, then removes ``arrays-1``. A
store is written by :mod:`fedshuffle.populations.writing`, which vouches for what opening does not
look at: that the numbers are finite and lie with their clients.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import re
import sys
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final, overload

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray, counts, positive
from fedshuffle.errors import FedShuffleError, one_line

FORMAT = "fedshuffle federation"
VERSION = 2
FACTS = "federation.json"
ARRAYS = "arrays-"


class Field(NamedTuple):
    """What a store knows of a field: its name, and the dtype and shape of one example."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What one example takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, eq=False)
class Store:
    """An opened store; its fields are mapped, and what is written to them stays off the disk."""

    path: Path
    arrays: Path
    """The folder of its arrays."""
    sizes: IntArray
    weights: FloatArray | None
    ids: Sequence[Hashable]
    names: tuple[str, ...]
    fields: tuple[NDArray[Any], ...]
    source: dict[str, Any]
    """What was imported, in the importer's words."""

    @property
    def bytes(self) -> int:
        """What the files take on disk."""
        files = [self.path / FACTS, *self.arrays.iterdir()]
        return sum(file.stat().st_size for file in files)


@final
class StoredIds(Sequence[Hashable]):
    """Ids that stay on disk and are read one by one: whole numbers, or text with offsets.

    >>> StoredIds(np.frombuffer(b"annbob", np.uint8), np.array([0, 3, 6]))[1]
    'bob'
    """

    def __init__(self, values: NDArray[Any], offsets: IntArray | None = None) -> None:
        self._values = values
        self._offsets = offsets
        self._length = len(values) if offsets is None else len(offsets) - 1

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Hashable: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Hashable, ...]: ...
    def __getitem__(self, index: int | slice) -> Hashable:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        name: Hashable = self._at(range(len(self))[index])
        return name

    def _at(self, i: int) -> Any:
        if self._offsets is None:
            return int(self._values[i])
        return self._values[self._offsets[i] : self._offsets[i + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[Hashable]:
        return (self._at(i) for i in range(len(self)))

    def __repr__(self) -> str:
        shown = [repr(name) for name in self[:3]] + ["..."] * (len(self) > 3)
        return f"StoredIds({', '.join(shown)})"

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The client with this id; fast, since importers sort by id."""
        low, high = 0, len(self)
        try:
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if self._at(middle) < value else (low, middle)
            if low < len(self) and self._at(low) == value and start <= low < (stop or len(self)):
                return low
        except TypeError as error:  # text among numbers, or numbers among text
            raise ValueError(f"{value!r} is no id") from error
        return super().index(value, start, *([] if stop is None else [stop]))


class _BrokenError(Exception):
    """What is wrong with a store."""


def open_store(path: str | Path) -> Store:
    """Map a store's arrays, after checking that every file is there and of the right length."""
    folder = Path(path).absolute()
    while True:
        if not (folder / FACTS).is_file():
            raise FedShuffleError(f"there is no federation in {str(path)!r}: {FACTS} is missing.")
        text = None
        try:
            text = (folder / FACTS).read_bytes()
            return _opened(folder, json.loads(text))
        except (_BrokenError, OSError, KeyError, TypeError, ValueError) as error:
            with suppress(OSError):
                if (folder / FACTS).read_bytes() != text:
                    continue  # another store took its place while this one was opened
            what = f"{FACTS} lacks {error}" if isinstance(error, KeyError) else one_line(error)
            raise FedShuffleError(
                f"the federation in {str(path)!r} is broken: {what}. Import it again."
            ) from error


def _opened(folder: Path, facts: Any) -> Store:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise _BrokenError(f"{FACTS} does not describe a federation")
    if facts["version"] != VERSION:
        raise _BrokenError(
            f"its version is {facts['version']!r}, and this fedshuffle reads {VERSION}"
        )
    if not re.fullmatch(rf"{ARRAYS}\d+", str(facts["arrays"])):  # and so inside of the store
        raise _BrokenError(f"{FACTS} speaks of arrays in {facts['arrays']!r}")
    arrays = folder / facts["arrays"]
    clients, examples = int(facts["clients"]), int(facts["examples"])
    sizes = counts(_mapped(arrays, "sizes", "<i8", (clients,)), "sizes.npy")
    if int(sizes.sum()) != examples:
        raise _BrokenError(f"sizes.npy adds up to {sizes.sum()} examples instead of {examples}")
    weights = None
    if facts["weights"]:
        weights = positive(_mapped(arrays, "weights", "<f8", (clients,)), clients, "weights.npy")
        if not abs(float(weights.sum()) - 1) < 1e-6:
            raise _BrokenError(f"weights.npy adds up to {weights.sum():g} instead of 1")
    fields = [
        _mapped(arrays, f"field{k}", field["dtype"], (examples, *field["shape"]))
        for k, field in enumerate(facts["fields"])
    ]
    return Store(
        path=folder,
        arrays=arrays,
        sizes=sizes,
        weights=weights,
        ids=_ids(arrays, facts["ids"], clients),
        names=tuple(str(field["name"]) for field in facts["fields"]),
        fields=tuple(fields),
        source=dict(facts["source"]),
    )


def _ids(folder: Path, kind: str, clients: int) -> Sequence[Hashable]:
    if kind == "none":
        return range(clients)
    if kind == "numbers":
        return StoredIds(_mapped(folder, "ids", "<i8", (clients,)))
    if kind != "text":
        raise _BrokenError(f"{FACTS} speaks of ids of the kind {kind!r}")
    offsets = _mapped(folder, "id_offsets", "<i8", (clients + 1,))
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise _BrokenError("id_offsets.npy does not ascend from 0")
    return StoredIds(_mapped(folder, "ids", "|u1", (int(offsets[-1]),)), offsets)


def _mapped(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array in a file, which must be of this dtype and shape, without reading it."""
    file = f"{name}.npy"
    want = np.dtype(dtype)
    if want.kind not in "biufc":
        raise _BrokenError(f"{FACTS} speaks of {dtype} values in {file}")
    if not (folder / file).is_file():
        raise _BrokenError(f"{file} is missing")
    with (folder / file).open("rb") as stream:
        try:
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("not of version 1.0")
            with warnings.catch_warnings():  # of Python's parser, and of numpy's second try
                warnings.simplefilter("ignore")
                header = np.lib.format.read_array_header_1_0(stream)
        except Exception as error:  # numpy reads it as Python code, which may go wrong in many ways
            raise _BrokenError(f"{file} is no array ({one_line(error):.80})") from error
        if header != (shape, False, want):
            found = f"{header[2]} {header[0]}" + " in Fortran's order" * header[1]
            raise _BrokenError(f"{file} holds {found} instead of {want} {shape}")
        begin = stream.tell()
        missing = begin + math.prod(shape) * want.itemsize
        missing -= os.fstat(stream.fileno()).st_size
        if missing:
            raise _BrokenError(
                f"{file} is {abs(missing)} bytes too {'short' if missing > 0 else 'long'}"
            )
        return np.ndarray(shape, want, buffer=_mapping(stream.fileno()), offset=begin)


def _mapping(file: int) -> mmap.mmap:
    """The file as memory that may be written to, as torch wants it, but never reaches the disk."""
    if sys.platform != "linux":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Without NORESERVE Linux refuses a mapping larger than its memory, lest all of it be written.
    common = platform.machine() in ("x86_64", "aarch64")
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if common else 0)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE | reserve, prot=protection)
