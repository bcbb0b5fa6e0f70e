"""Saving a federation that lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.populations.draft import Draft, blocks, checked_dtype, encoded_ids
from fedshuffle.populations.store import Field, open_store

if TYPE_CHECKING:
    from fedshuffle.federation import Federation


def save(
    federation: Federation,
    out: str | Path,
    weights: FloatArray | None,
    names: Sequence[str] | None,
    overwrite: bool,
) -> None:
    """Write a federation as it is: its examples are packed and checked already."""
    ids = None if isinstance(federation.ids, range) else federation.ids
    encoded_ids(ids)  # refuses what it cannot keep, before anything is written
    if names is None and federation.path is not None:
        names = open_store(federation.path).names
    names = names or [f"field{k}" for k in range(len(federation.fields))]
    if len(names) != len(federation.fields):
        raise FedShuffleError(
            f"there are {len(names)} names for {len(federation.fields)} fields: give one for each."
        )
    with Draft(out, overwrite) as draft:
        for name, values in zip(names, federation.fields, strict=True):
            kind = _array(values[:1], name).dtype
            draft.field(Field(name, checked_dtype(name, kind), tuple(values.shape[1:])))
        begin = 0
        rows = int(federation.offsets[-1]) if federation.fields else 0
        for length in blocks(rows, sum(field.bytes for field in draft.fields)):
            part = slice(begin, begin + length)
            draft.append(_array(v[part], n) for n, v in zip(names, federation.fields))
            begin += length
        draft.finish(federation.sizes, ids, weights)


def _array(rows: Any, name: str) -> NDArray[Any]:
    """Rows of an array or a tensor as they lie on disk."""
    if hasattr(rows, "detach"):
        try:
            rows = rows.detach().cpu().numpy()
        except TypeError as error:
            raise FedShuffleError(
                f"field {name!r} is of {rows.dtype}, which numpy lacks. Convert it first."
            ) from error
    return np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))
