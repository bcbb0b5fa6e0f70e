"""JSON as LEAF writes it: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.populations.chunks import import_chunks
from fedshuffle.populations.sources import Read, distinct, files, optional

_STEPS = {"all_data", "rem_user_data", "sampled_data", "test", "train"}
"""Folders that LEAF's scripts make of the same data, one after the other."""
_DEEPEST = 64
"""Lists and objects within each other that a file may have."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_REST = bytes(set(range(256)) - set(b"[]{}"))


def import_leaf(
    source: str | Path,
    out: str | Path,
    *,
    fields: Sequence[str] | None = None,
    dtype: Mapping[str, DTypeLike] | None = None,
    read: Read | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Federation:
    """Import a LEAF file, or a folder of them, one client at a time.

    What a file says under ``users`` and ``num_samples`` has to agree with its data.

    Args:
        source: the file or folder.
        out: the folder of the store.
        fields: which fields, in the order in which the loss takes them; ``x`` and ``y`` if not
            given.
        dtype: what to store a field as, by its name. JSON does not tell 1.0 from 1, so by default
            one whole number an example (a label) is stored as int64, and all else as float32.
        read: makes numbers of fields that are not, such as text: is given a client's fields by name
            and returns arrays by name, all with one row an example.
        overwrite: replace the store that is there.
        progress: show a bar.
    """
    ijson = optional("ijson")
    return import_chunks(
        _chunks(ijson, _paths(source), distinct(fields or ("x", "y")), dtype or {}, read),
        out,
        dtype=dtype,
        source={"file": Path(source).name, "format": "leaf"},
        overwrite=overwrite,
        progress=progress,
    )


def _paths(source: str | Path) -> list[Path]:
    """The files, unless they are of several steps of LEAF, which hold the same examples or more."""
    found = files(source, (".json",))
    folders = {part for path in found for part in path.relative_to(source).parts[:-1]}
    steps = sorted(folders & _STEPS)
    if len(steps) > 1:
        one = next(path.parent for path in reversed(found) if steps[-1] in path.parts)
        raise FedShuffleError(
            f"{str(source)!r} holds {', '.join(steps[:-1])} and {steps[-1]}, which are not to be"
            f" merged. Give one of them, such as {str(one)!r}."
        )
    return found


def _chunks(
    ijson: Any,
    paths: Sequence[Path],
    fields: Sequence[str],
    dtype: Mapping[str, DTypeLike],
    read: Read | None,
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    def arrays(raw: Mapping[str, Any]) -> Mapping[str, ArrayLike]:
        if read is not None:
            return read(raw)
        return {name: _numbers(values, name in dtype) for name, values in raw.items()}

    for path in paths:
        listed = _listed(ijson, path)
        missing, found = set(listed), False
        for user, data in _items(ijson, path, "user_data"):
            found = True
            missing.discard(user)
            if not isinstance(data, dict):
                raise FedShuffleError(f"user {user!r} of {str(path)!r} is no object.")
            for name in fields:
                if name not in data:
                    raise unknown(f"field of user {user!r}", name, data)
            raw = {name: data[name] for name in fields}
            said, lengths = listed.get(user), [len(v) for v in raw.values() if isinstance(v, list)]
            if said is not None and lengths and said not in lengths:
                raise FedShuffleError(
                    f"user {user!r} of {str(path)!r} has {lengths[0]} examples, but 'num_samples'"
                    f" says {said}. Get the file again, or put the number right."
                )
            yield user, arrays(raw)
        if not found:
            raise FedShuffleError(
                f"{str(path)!r} has no users under 'user_data', as LEAF's files have."
            )
        for user in (user for user in listed if user in missing):
            said = listed[user]
            if said != 0:
                raise FedShuffleError(
                    f"{str(path)!r} lists user {user!r}"
                    + ("" if said is None else f" with {said} examples")
                    + ", but holds none of its examples under 'user_data'. Get the file again, or"
                    " take that user from the list."
                )
            yield user, arrays({name: [] for name in fields})


def _listed(ijson: Any, path: Path) -> dict[str, int | None]:
    """The users that a file lists, and how many examples it says they have.

    Both lists lie before the data in LEAF's own files, so that little is read for them.
    """
    users = next(_items(ijson, path, "users"), None)
    if users is None:
        return {}
    if not (isinstance(users, list) and all(isinstance(user, str) for user in users)):
        raise FedShuffleError(f"{str(path)!r} has 'users' that are no names.")
    counts = next(_items(ijson, path, "num_samples"), None)
    if counts is None:
        return dict.fromkeys(users)
    if not (isinstance(counts, list) and all(isinstance(count, int) for count in counts)):
        raise FedShuffleError(f"{str(path)!r} has 'num_samples' that are no whole numbers.")
    if len(users) != len(counts):
        raise FedShuffleError(
            f"{str(path)!r} has {len(users)} 'users', but {len(counts)} 'num_samples'."
        )
    return dict(zip(users, counts, strict=True))


def _items(ijson: Any, path: Path, key: str) -> Iterator[Any]:
    """The value of a key, read no further than needed; that of ``user_data`` user by user."""
    with path.open("rb") as file:
        try:
            yield from (ijson.kvitems if key == "user_data" else ijson.items)(
                _Shallow(file, path), key, use_float=True
            )
        except (ijson.JSONError, OSError) as error:
            what = str(error).partition("\n")[0].rstrip(". ")  # what follows draws the place
            raise FedShuffleError(
                f"cannot read {str(path)!r} as JSON: {what}. If it is damaged, get it again."
            ) from error


@final
class _Shallow:
    """A JSON file without deep nesting, on which ijson spends memory by the square of the depth."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._depth = 0
        self._string = b""
        """How a string began that goes on in the next block."""

    def read(self, size: int = -1) -> bytes:
        """The next bytes, unless they nest too deeply."""
        block = self._file.read(size)
        text, quote, string = _STRING.sub(b"", self._string + block).partition(b'"')
        escaped = (len(string) - len(string.rstrip(b"\\"))) % 2
        self._string = quote + b"\\" * escaped
        brackets = np.frombuffer(text.translate(None, _REST), np.uint8)
        if len(brackets):
            depths = self._depth + np.cumsum(np.where(np.isin(brackets, list(b"[{")), 1, -1))
            if depths.max() > _DEEPEST:
                raise FedShuffleError(
                    f"{str(self._path)!r} nests more than {_DEEPEST} lists, as no LEAF file does."
                    " If it is damaged, get it again."
                )
            self._depth = int(depths[-1])
        return block


def _numbers(values: Any, as_told: bool) -> ArrayLike:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal lengths, which the store will name
        return values  # type: ignore[no-any-return]
    label = array.ndim == 1 and array.dtype.kind in "biu"
    if as_told or label or array.dtype.kind not in "biuf":
        return array
    with np.errstate(over="ignore"):  # the store refuses infinity
        return array.astype(np.float32)
