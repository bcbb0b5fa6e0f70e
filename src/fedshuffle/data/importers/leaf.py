"""JSON as LEAF writes it: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ijson
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fedshuffle.data.importers.files import FORMATS, Read, distinct, find_files
from fedshuffle.errors import FedShuffleError, error_context, unknown

_STEPS = {"all_data", "rem_user_data", "sampled_data", "test", "train"}
"""Folders that LEAF's scripts make of the same data, one after the other."""
_MAX_DEPTH = 64
"""Most lists and objects that a file may nest."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_clients(
    source: Path,
    fields: Sequence[str] | None,
    dtype: Mapping[str, DTypeLike],
    read: Read | None,
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    """One client after the other; ``users`` and ``num_samples`` must agree with the data."""
    names = distinct(fields or ("x", "y"))

    def arrays(raw: Mapping[str, Any]) -> Mapping[str, ArrayLike]:
        if read is not None:
            return read(raw)
        return {name: _numbers(values, name in dtype) for name, values in raw.items()}

    for path in _paths(source):
        listed, found = _listed(path), set()
        for user, data in _items(path, "user_data"):
            found.add(user)
            known = data if isinstance(data, dict) else {}
            for name in names:
                if name not in known:
                    raise unknown(f"field of user {user!r}", name, known)
            raw = {name: known[name] for name in names}
            said, lengths = listed.get(user), [len(v) for v in raw.values() if isinstance(v, list)]
            if said is not None and lengths and said not in lengths:
                raise FedShuffleError(
                    f"user {user!r} of {str(path)!r} has {lengths[0]} examples, but 'num_samples'"
                    f" says {said}. Get the file again, or correct the number."
                )
            yield user, arrays(raw)
        if not found:
            raise FedShuffleError(
                f"{str(path)!r} has no users under 'user_data', as LEAF files do."
            )
        for user in [user for user in listed if user not in found]:
            if listed[user] != 0:
                raise FedShuffleError(
                    f"{str(path)!r} lists user {user!r} with {listed[user] or 'some'} examples, but"
                    " has none of them under 'user_data'. Get the file again, or take that user"
                    " from the list."
                )
            yield user, arrays({name: [] for name in names})


def _paths(source: Path) -> list[Path]:
    """The files, unless they are of several steps of LEAF, which hold the same examples or more."""
    paths = find_files(source, FORMATS["leaf"])
    folders = {part for path in paths for part in path.relative_to(source).parts[:-1]}
    steps = sorted(folders & _STEPS)
    if len(steps) > 1:
        one = next(path.parent for path in reversed(paths) if steps[-1] in path.parts)
        raise FedShuffleError(
            f"{str(source)!r} holds {', '.join(steps[:-1])} and {steps[-1]}, which must not be"
            f" merged. Give one of them, such as {str(one)!r}."
        )
    return paths


def _listed(path: Path) -> dict[str, int | None]:
    """The listed users and their numbers of examples, which LEAF writes before the data."""
    users: Any = next(_items(path, "users"), [])
    counts = next(_items(path, "num_samples"), None)
    if not (isinstance(users, list) and all(isinstance(user, str) for user in users)):
        raise FedShuffleError(f"{str(path)!r} has 'users' that are no names.")
    if counts is None:
        return dict.fromkeys(users)
    if not (isinstance(counts, list) and all(isinstance(number, int) for number in counts)):
        raise FedShuffleError(f"{str(path)!r} has 'num_samples' that are no whole numbers.")
    if len(users) != len(counts):
        raise FedShuffleError(
            f"{str(path)!r} has {len(users)} 'users', but {len(counts)} 'num_samples'."
        )
    return dict(zip(users, counts, strict=True))


def _items(path: Path, key: str) -> Iterator[Any]:
    """The value of a key, read no further than needed; that of ``user_data`` user by user."""
    parse = ijson.kvitems if key == "user_data" else ijson.items

    def message(error: Exception) -> str:
        what = str(error).partition("\n")[0].rstrip(". ")  # the next lines draw the place
        return f"cannot read {str(path)!r} as JSON: {what}. If it is damaged, get it again."

    with path.open("rb") as file, error_context(message, (ijson.JSONError, OSError)):
        yield from parse(_DepthLimit(file, path), key, use_float=True)


class _DepthLimit:
    """A JSON file that may not nest deeply: ijson's memory grows with the square of the depth."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._depth = 0
        self._string = b""
        """The beginning of a string that continues in the next block."""

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        text, quote, string = _STRING.sub(b"", self._string + block).partition(b'"')
        escaped = (len(string) - len(string.rstrip(b"\\"))) % 2
        self._string = quote + b"\\" * escaped
        brackets = np.frombuffer(text.translate(None, _NO_BRACKETS), np.uint8)
        if len(brackets):
            depths = self._depth + np.cumsum(np.where(np.isin(brackets, list(b"[{")), 1, -1))
            if depths.max() > _MAX_DEPTH:
                raise FedShuffleError(
                    f"{str(self._path)!r} nests more than {_MAX_DEPTH} lists, as no LEAF file does."
                    " If it is damaged, get it again."
                )
            self._depth = int(depths[-1])
        return block


def _numbers(values: Any, as_is: bool) -> ArrayLike:
    """float32 unless it is a label or has a requested dtype: JSON does not tell 1.0 from 1."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal lengths, which the store will name
        return values  # type: ignore[no-any-return]
    label = array.ndim == 1 and array.dtype.kind in "biu"
    if as_is or label or array.dtype.kind not in "biuf":
        return array
    with np.errstate(over="ignore"):  # the store refuses infinity
        return array.astype(np.float32)
