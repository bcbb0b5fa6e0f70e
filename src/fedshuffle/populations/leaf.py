"""JSON as LEAF writes it: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.populations.chunks import import_chunks
from fedshuffle.populations.sources import Read, distinct, files, optional


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
    paths = files(source, (".json",))
    return import_chunks(
        _chunks(ijson, paths, distinct(fields or ("x", "y")), dtype or {}, read),
        out,
        dtype=dtype,
        source={"file": Path(source).name, "format": "leaf"},
        overwrite=overwrite,
        progress=progress,
    )


def _chunks(
    ijson: Any,
    paths: Sequence[Path],
    fields: Sequence[str],
    dtype: Mapping[str, DTypeLike],
    read: Read | None,
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    for path in paths:
        with path.open("rb") as file:
            users = ijson.kvitems(file, "user_data", use_float=True)
            found = False
            while True:
                try:
                    user, data = next(users)
                except StopIteration:
                    break
                except (ijson.JSONError, OSError) as error:
                    raise FedShuffleError(f"cannot read {str(path)!r} as JSON: {error}.") from error
                found = True
                if not isinstance(data, dict):
                    raise FedShuffleError(f"user {user!r} of {str(path)!r} is no object.")
                for name in fields:
                    if name not in data:
                        raise unknown(f"field of user {user!r}", name, data)
                raw = {name: data[name] for name in fields}
                if read is not None:
                    yield user, read(raw)
                else:
                    yield user, {name: _numbers(v, name in dtype) for name, v in raw.items()}
            if not found:
                raise FedShuffleError(
                    f"{str(path)!r} has no users under 'user_data', as LEAF's files have."
                )


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
