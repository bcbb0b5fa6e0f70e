"""Populations from a Python iterator: whatever you can read, you can import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.populations.writing import StoreWriter


def import_chunks(
    chunks: Iterable[Sequence[Any]],
    out: str | Path,
    *,
    names: Sequence[str] | None = None,
    dtype: Mapping[str, DTypeLike] | None = None,
    source: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    total: int | None = None,
) -> Federation:
    """Import chunks ``(client, x, y, ...)``: some examples of one client, one array a field.

    A client may come in several chunks, near each other or not. A chunk may also hold its arrays in
    a tuple, ``(client, (x, y))``, or by name, ``(client, {"x": x, "y": y})``. The iterator is read
    once.

    Args:
        chunks: the examples; clients are named by text or by whole numbers.
        out: the folder of the store.
        names: the fields' names, for those who look at the store.
        dtype: what to store a field as, by its name; as in the first chunk if not given.
        source: where the data is from, in your words; kept with the store.
        overwrite: replace the store that is there.
        progress: show a bar.
        total: rows to come, for the bar.

    Examples:
        >>> import tempfile
        >>> chunks = [("bob", [[1.0]], [0]), ("ann", [[2.0]], [1]), ("bob", [[3.0]], [1])]
        >>> import_chunks(chunks, tempfile.mkdtemp() + "/people", names=["x", "y"])
        Federation(2 clients, 3 examples, (3, 1), (3,))
    """
    with StoreWriter(
        out, names=names, dtype=dtype, overwrite=overwrite, progress=progress, total=total
    ) as store:
        store.source.update(source or {})
        for chunk in chunks:
            if not isinstance(chunk, Sequence) or isinstance(chunk, str) or len(chunk) < 2:
                raise FedShuffleError(
                    f"a chunk is (client, array, ...), but one of type {type(chunk).__name__} came:"
                    f" {chunk!r:.60}."
                )
            client, *fields = chunk
            if len(fields) == 1 and isinstance(fields[0], tuple):
                fields = list(fields[0])
            store.add(client, *fields)
    return Federation.open(out)
