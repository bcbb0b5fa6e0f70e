"""Arrow's side of tables: files as batches of rows, and batches as owners and arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError, one_line
from fedshuffle.populations.sources import optional, wide_labels
from fedshuffle.populations.writing import Id

_ROWS = 8192
"""Rows of a Parquet file that are read at a time."""


def open_files(paths: Sequence[Path], base: Path, format: str, types: Mapping[str, Any]) -> Any:
    """The files as one table, with the types of text columns as told, else as they look.

    Below the base, folders of the form ``name=value`` make a column.
    """
    datasets, csv = optional("pyarrow.dataset"), optional("pyarrow.csv")
    # Else the whole file would be fetched ahead and kept until its end.
    scan = datasets.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
    reader = datasets.ParquetFileFormat(default_fragment_scan_options=scan)
    if format != "parquet":
        delimiter = "\t" if format == "tsv" else ","
        reader = datasets.CsvFileFormat(
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types=types),
        )
    with _reading(paths):
        files = [str(path) for path in paths]
        dataset = datasets.dataset(
            files, format=reader, partitioning="hive", partition_base_dir=str(base)
        )
        _ = dataset.schema.names  # which must be text
    return dataset


def count_rows(dataset: Any, paths: Sequence[Path]) -> int:
    """How many rows there are, by what the files say of themselves."""
    with _reading(paths):
        return int(dataset.count_rows())


def batches(dataset: Any, columns: Sequence[str], paths: Sequence[Path]) -> Iterator[Any]:
    """The rows in the order of the files, some thousands at a time."""
    columns = list(dict.fromkeys(columns))
    with _reading(paths, dataset.schema.names):
        found = dataset.to_batches(
            columns=columns, batch_size=_ROWS, batch_readahead=4, fragment_readahead=1
        )
        yield from (batch for batch in found if batch.num_rows)


def owners_of(column: Any, client: str, before: int) -> tuple[list[Id], IntArray]:
    """The clients of a batch, and whose each row is."""
    arrow = optional("pyarrow")
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    encoded = column.dictionary_encode()
    clients = encoded.dictionary.to_pylist()
    if column.null_count or "" in clients:
        row = next(k for k, name in enumerate(column.to_pylist()) if name in (None, ""))
        raise FedShuffleError(
            f"row {before + row + 1} has no client: column {client!r} is empty there. Fill it in,"
            " or drop that row."
        )
    return clients, encoded.indices.to_numpy().astype(np.int64)


def array_of(batch: Any, column: str | list[str], before: int) -> NDArray[Any]:
    """One field of a batch: a column, or several side by side."""
    if isinstance(column, list):
        return np.stack([_numbers(batch.column(name), name, before) for name in column], axis=1)
    return wide_labels(_numbers(batch.column(column), column, before))


def _numbers(column: Any, name: str, before: int, per_row: int = 1) -> NDArray[Any]:
    """A column as an array, missing numbers as NaN; lists, all of one length, become axes."""
    arrow = optional("pyarrow")
    if is_list(column.type):
        lengths = np.asarray(column.value_lengths().fill_null(0))
        other = np.flatnonzero(lengths != lengths[:1])
        if other.size:
            row = before + int(other[0]) // per_row + 1
            raise FedShuffleError(
                f"column {name!r} holds lists of {lengths[0]} and, in row {row}, of"
                f" {lengths[other[0]]} values. Pad or cut them to one length."
            )
        width = int(lengths[0])
        inner = _numbers(column.flatten(), name, before, per_row * width)
        return inner.reshape(len(column), width, *inner.shape[1:])
    if arrow.types.is_decimal(column.type) or column.null_count:
        column = column.cast(arrow.float64())
    found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found


def is_number(kind: Any) -> bool:
    types = optional("pyarrow").types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(test(kind) for test in tests)


def is_list(kind: Any) -> bool:
    """Whether a type is one of lists."""
    types = optional("pyarrow").types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in tests)


@contextmanager
def _reading(paths: Sequence[Path], columns: Sequence[str] = ()) -> Iterator[None]:
    """Turn what Arrow says of a file into one clear error; names the column, if it is known."""
    try:
        yield
    except (OSError, UnicodeDecodeError, optional("pyarrow").ArrowException) as error:
        where = paths[0] if len(paths) == 1 else paths[0].parent
        what = one_line(error)
        if bad := re.search(r"column #(\d+): (?:Row #(\d+): )?.*invalid value '(.*)'", what):
            column, row, value = bad.groups()
            if len(paths) == 1 and columns:  # several files may differ in the order of columns
                line = "" if row is None else f" in row {row}"
                what = f"column {columns[int(column)]!r} holds {value!r}{line}"
            what += f". {_remedy(value)}"
        raise FedShuffleError(f"cannot read {str(where)!r}: {what}.") from error


def _remedy(value: str) -> str:
    """What to do about a value that is not of the kind that the file's beginning looked like."""
    try:
        float(value)
    except ValueError:
        return "Put a number there, or leave the column out"
    return "Say the dtype of that field, such as float32"
