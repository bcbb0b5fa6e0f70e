"""A federation on disk: a folder of plain arrays that are memory-mapped, not read, when opened.

    DIR/federation.json           version, numbers of clients and examples, fields, origin, and
                                  which folder holds the arrays
    DIR/arrays-1/sizes.npy        number of examples of each client
    DIR/arrays-1/weights.npy      objective weights, only if they are not proportional to size
    DIR/arrays-1/ids.npy          client ids: whole numbers, or text as concatenated UTF-8
    DIR/arrays-1/id_offsets.npy   where each text id begins; neither file if ids count from 0
    DIR/arrays-1/field0.npy ...   the packed examples, one array per field, sorted by client

Overwriting writes ``arrays-2``, then replaces ``federation.json``, then removes ``arrays-1``.
:mod:`fedshuffle.data.storage.writer` guarantees what opening does not check: that all numbers are
finite and that every row belongs to its client.
"""

from __future__ import annotations

import bisect
import json
import math
import mmap
import os
import platform
import re
import sys
import warnings
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray, counts, positive
from fedshuffle.errors import FedShuffleError, one_line

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
    """Client ids that are read from disk one by one: whole numbers, or text with offsets.

    >>> StoredIds(np.frombuffer(b"annbob", np.uint8), np.array([0, 3, 6]))[1]
    'bob'
    """

    def __init__(self, values: NDArray[Any], offsets: IntArray | None = None) -> None:
        self._values = values
        self._offsets = offsets
        self._length = len(values) if offsets is None else len(offsets) - 1

    def __len__(self) -> int:
        return self._length

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
    """Map a store's arrays after checking that every file exists and has the right length."""
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
        weights = positive(_map(arrays, "weights", "<f8", (clients,)), clients, "weights.npy")
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
        _require(
            excess == 0, f"{file} is {abs(excess)} bytes too {'short' if excess < 0 else 'long'}"
        )
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
