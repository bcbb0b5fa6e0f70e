"""Tables with a client column, read by Arrow: Parquet, CSV or TSV, one file or a folder of them.

The store's writer sorts the rows by client, since Arrow can sort a table only in memory.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
from numpy.typing import DTypeLike, NDArray
from pyarrow import types

from fedshuffle._arrays import FloatArray
from fedshuffle._sources.columns import (
    NUMBER,
    Columns,
    Names,
    check_client,
    choose,
    flat,
    innermost,
    is_one_of,
    joined,
    no_numbers,
    numbers,
    owners,
)
from fedshuffle.data.importers.files import FORMATS, find_files
from fedshuffle.data.storage.store import checked_dtype, open_store
from fedshuffle.data.storage.writer import Batch, write_store
from fedshuffle.errors import FedShuffleError, error_context, one_line

_ROWS = 8192  # rows of a Parquet file that are read at a time
_SCALING = "standardised"  # key of the statistics of standardised inputs in the origin of a store


def import_table(
    source: Path,
    out: str | Path,
    format: str,
    client: str,
    fields: Names,
    input: Names,
    label: str | None,
    standardise: bool | str | Path,
    dtype: Mapping[str, DTypeLike] | None,
    **options: bool,
) -> None:
    """Import a table; for the arguments see :func:`fedshuffle.data.import_file`."""
    kinds = {name: checked_dtype(name, kind) for name, kind in (dtype or {}).items()}
    schema = _Table(source, format).schema
    columns = choose(
        schema.names, lambda name: schema.field(name).type, client, fields, input, label
    )
    table = _Table(source, format, _check_types(schema, columns, client, kinds, format))
    for name, column in columns.items():
        if isinstance(column, list) or (
            format != "parquet" and types.is_floating(table.schema.field(column).type)
        ):
            kinds.setdefault(name, np.dtype(np.float32))
    used = [client, *flat(columns)]
    origin = {"file": source.name, "format": format, "client": client, "columns": columns}
    origin["left_out"] = [name for name in schema.names if name not in used]
    scaling = None
    if standardise is not False:
        if "input" not in columns:
            raise FedShuffleError("standardise scales the input: give label, and input if needed.")
        column = columns["input"]
        if isinstance(standardise, bool):
            batches = table.batches(flat({"input": column}))
            scaling = statistics(_array(batch, column, 0) for batch in batches)
        else:
            scaling = _stored_statistics(standardise, column)
        kinds.setdefault("input", np.dtype(np.float32))
        origin[_SCALING] = {"mean": scaling[0].tolist(), "deviation": scaling[1].tolist()}

    def rows() -> Iterator[Batch]:
        before = 0
        for batch in table.batches(used):
            clients, of_row = owners(batch.column(client), client, before)
            arrays = {name: _array(batch, column, before) for name, column in columns.items()}
            if scaling is not None:
                arrays["input"] = (arrays["input"] - scaling[0]) / scaling[1]
            yield clients, of_row, arrays
            before += batch.num_rows

    write_store(rows(), out, dtype=kinds, origin=origin, parse_ids=format != "parquet", **options)


class _Table:
    """Files as one Arrow dataset; below the source, folders ``name=value`` are a column."""

    def __init__(self, source: Path, format: str, column_types: Any = None) -> None:
        self._paths = find_files(source, FORMATS[format])
        self._names: list[str] = []
        # Without these options the whole file would be fetched ahead and kept until its end.
        scan = pa.dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
        reader = pa.dataset.ParquetFileFormat(default_fragment_scan_options=scan)
        if format != "parquet":
            delimiter = "\t" if format == "tsv" else ","
            reader = pa.dataset.CsvFileFormat(
                parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                convert_options=pa.csv.ConvertOptions(column_types=column_types),
            )
        base = source if source.is_dir() else source.parent
        folders = {"partitioning": "hive", "partition_base_dir": str(base)}
        with self._reading():
            paths = list(map(str, self._paths))
            self._dataset = pa.dataset.dataset(paths, format=reader, **folders)
            self.schema = self._dataset.schema
            self._names = self.schema.names  # which must be text

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """The rows in the order of the files, some thousands at a time."""
        options = {"batch_size": _ROWS, "batch_readahead": 4, "fragment_readahead": 1}
        with self._reading():
            batches = self._dataset.to_batches(columns=list(dict.fromkeys(columns)), **options)
            yield from (batch for batch in batches if batch.num_rows)

    def _reading(self) -> AbstractContextManager[None]:
        """Turn an error of Arrow into one line that names the column, if it is known."""

        def message(error: Exception) -> str:
            alone = len(self._paths) == 1  # several files may order their columns differently
            what = one_line(error)
            if bad := re.search(r"column #(\d+): (?:Row #(\d+): )?.*invalid value '(.*)'", what):
                column, row, value = bad.groups()
                if alone and self._names:
                    line = "" if row is None else f" in row {row}"
                    what = f"column {self._names[int(column)]!r} holds {value!r}{line}"
                what += (
                    ". Put a number there, leave the column out, or say the dtype of that field,"
                    " such as float32"
                )
            where = self._paths[0] if alone else self._paths[0].parent
            return f"cannot read {str(where)!r}: {what}."

        return error_context(message, (OSError, UnicodeDecodeError, pa.ArrowException))


def _check_types(
    schema: Any, columns: Columns, client: str, kinds: Mapping[str, np.dtype[Any]], format: str
) -> dict[str, Any]:
    """Refuse columns without numbers; the types to read those of a text file as.

    These do not depend on how the file begins: ids are text, so that 007 and 7 stay two clients,
    and numbers that may have a fraction are real.
    """
    if format == "parquet":
        check_client(schema.field(client).type, client)
    chosen = {client: pa.string()}
    for name, column in columns.items():
        real = kinds[name].kind == "f" if name in kinds else isinstance(column, list)
        for part in flat({name: column}):
            kind = innermost(schema.field(part).type)
            empty = format != "parquet" and types.is_null(kind)  # there may be values later
            if not (empty or is_one_of(kind, NUMBER)):
                remedy = (
                    "Turn it into numbers first (pandas: get_dummies for inputs, factorize for"
                    " labels), or leave the column out."
                )
                raise no_numbers(part, kind, remedy)
            if empty or (real and not types.is_boolean(kind)):
                chosen[part] = pa.float64()
    return chosen


def _array(batch: Any, column: str | list[str], before: int) -> NDArray[Any]:
    return joined(column, lambda name: numbers(batch.column(name), name, before))


def statistics(batches: Iterable[NDArray[Any]]) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation of every column, where that of a constant column is 1.

    Ignores rows that are not finite: the writer of the store refuses them.
    """
    rows, mean, squares = 0, np.zeros(1), np.zeros(1)
    for batch in batches:
        if batch.ndim != 2:
            raise FedShuffleError(
                f"an input of shape {batch.shape[1:]} cannot be standardised: scale it before."
            )
        finite = batch[np.isfinite(batch).all(1)].astype(np.float64)
        if len(finite):
            centre, rows = finite.mean(0), rows + len(finite)
            shift, share = centre - mean, len(finite) / rows
            squares = squares + ((finite - centre) ** 2).sum(0)
            squares = squares + shift**2 * (1 - share) * len(finite)
            mean = mean + shift * share
    deviation = np.sqrt(squares / max(rows, 1))
    rounding = rows * np.finfo(np.float64).eps * np.abs(mean)  # all that a constant column has
    return mean, np.where(deviation > rounding, deviation, 1.0)


def _stored_statistics(
    store: str | Path, columns: str | list[str]
) -> tuple[FloatArray, FloatArray]:
    """Those of the input of another store, which must have the same input columns."""
    origin = open_store(store).origin
    if _SCALING not in origin:
        raise FedShuffleError(f"'{store}' is not standardised. Import it with standardise first.")
    theirs = origin["columns"]["input"]
    if theirs != columns:
        raise FedShuffleError(f"name the same input columns as '{store}': {theirs}, not {columns}.")
    return np.array(origin[_SCALING]["mean"]), np.array(origin[_SCALING]["deviation"])
