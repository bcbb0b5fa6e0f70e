"""One door for all files: the importer that a suffix asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.populations.hdf5 import import_hdf5
from fedshuffle.populations.leaf import import_leaf
from fedshuffle.populations.sources import FORMATS, guess
from fedshuffle.populations.tables import TABLES, import_table


def import_file(
    source: str | Path,
    out: str | Path,
    *,
    client: str | None = None,
    fields: Sequence[str] | None = None,
    input: Sequence[str] | None = None,
    label: str | None = None,
    standardise: bool | str | Path = False,
    dtype: Mapping[str, DTypeLike] | None = None,
    format: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Federation:
    """Import a file, or a folder of files, of one of the formats.

    The options are those of :func:`import_table`. LEAF and HDF5 have no client column, and there
    ``input`` and ``label`` are but another way to say ``fields``.
    """
    kind = guess(source) if format is None else format
    if kind not in FORMATS:
        raise unknown("format", kind, FORMATS)
    rest: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "progress": progress}
    if kind in TABLES:
        if client is None:
            raise FedShuffleError("say which column of the table holds the client: client.")
        rest |= {"fields": fields, "input": input, "label": label, "standardise": standardise}
        return import_table(source, out, client=client, format=kind, **rest)
    if client is not None:
        raise FedShuffleError(f"{kind} files name the clients themselves: leave client out.")
    if standardise is not False:
        raise FedShuffleError(f"only the columns of tables can be standardised, not {kind} files.")
    if fields is None and (input or label):
        fields = [*(input or ()), *([] if label is None else [label])]
    importer = import_hdf5 if kind == "hdf5" else import_leaf
    return importer(source, out, fields=fields, **rest)
