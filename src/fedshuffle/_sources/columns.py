"""Columns of a table as arrays: which of them form the fields, and what each must hold.

Columns are those of Arrow, so that a file, a frame and a dataset of Hugging Face are read alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from fedshuffle._arrays import IntArray, distinct, wide_labels
from fedshuffle.errors import FedShuffleError, check_known

LIST = (types.is_list, types.is_large_list, types.is_fixed_size_list)
NUMBER = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
TEXT = (types.is_string, types.is_large_string, types.is_string_view)

Names = Sequence[str] | None
Columns = dict[str, str | list[str]]
"""The fields by name: each is a column, or several columns side by side."""


def choose(
    names: Sequence[str],
    kind: Callable[[str], Any],
    client: str | None,
    fields: Names,
    input: Names,
    label: str | None,
) -> Columns:
    """The columns of each field, given the names of all and a function for the type of each."""
    for what, several in {"fields": fields, "input": input}.items():
        if isinstance(several, str):
            raise FedShuffleError(f"{what} is the text {several!r}: give a list, [{several!r}].")
    for what, name in {"client": client, "label": label}.items():
        if name is not None:
            check_known(f"{what} column", name, names)
    for name in [*(fields or ()), *(input or ())]:
        check_known("column", name, names)
    if (fields is None) == (input is None and label is None):
        some = ", ".join([*names[:12], *["..."] * (len(names) > 12)])
        raise FedShuffleError(f"choose by fields, or by label and input, among the columns {some}.")
    if fields is not None:
        return {name: name for name in distinct(fields)}
    if input is None:
        others = [name for name in names if name not in (client, label)]
        input = [name for name in others if is_one_of(kind(name), (*NUMBER, *LIST))]
    if not input:
        raise FedShuffleError("no other column holds numbers for the input.")
    lists = [name for name in input if is_one_of(kind(name), LIST)]
    if lists and len(input) > 1:
        raise FedShuffleError(
            f"lists ({', '.join(lists)}) do not fit beside others: name one alone, or use fields."
        )
    chosen: Columns = {"input": lists[0] if lists else distinct(input)}
    return chosen if label is None else chosen | {"label": label}


def check_client(kind: Any, client: str) -> None:
    """Refuse ids that are neither text nor whole numbers."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not is_one_of(kind, (types.is_integer, *TEXT)):
        raise FedShuffleError(
            f"column {client!r} holds {kind}, but ids are text or whole numbers. Convert it; if"
            " numbers are missing, drop those rows first."
        )


def owners(column: Any, client: str, before: int = 0) -> tuple[list[Any], IntArray]:
    """The clients of some rows, and the index of each row's client among them."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    encoded = column.dictionary_encode()
    clients = encoded.dictionary.to_pylist()
    if column.null_count or "" in clients:
        row = next(k for k, name in enumerate(column.to_pylist()) if name in (None, ""))
        raise FedShuffleError(
            f"row {before + row + 1} has no client in column {client!r}. Fill it in, or drop it."
        )
    return clients, encoded.indices.to_numpy().astype(np.int64)


def joined(columns: str | list[str], array: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """A field of one column, or a matrix of several."""
    if isinstance(columns, str):
        return wide_labels(array(columns))
    arrays = {name: array(name) for name in columns}
    for name, one in arrays.items():
        if one.ndim != 1:
            raise FedShuffleError(
                f"column {name!r} becomes an array of shape {one.shape}, but an input column has"
                " one number per row: use fields."
            )
    return np.stack(list(arrays.values()), axis=1)


def numbers(column: Any, name: str, before: int = 0, per_row: int = 1) -> NDArray[Any]:
    """A column as an array, missing numbers as NaN; lists, all of one length, become axes."""
    if is_one_of(column.type, LIST):
        lengths = np.asarray(column.value_lengths().fill_null(0))
        if not lengths.any():
            raise FedShuffleError(f"column {name!r} holds no values: its lists are empty.")
        other = np.flatnonzero(lengths != lengths[:1])
        if other.size:
            row = before + int(other[0]) // per_row + 1
            raise FedShuffleError(
                f"column {name!r} holds lists of {lengths[0]} and, in row {row}, of"
                f" {lengths[other[0]]} values. Pad or cut them to one length."
            )
        width = int(lengths[0])
        inner = numbers(column.flatten(), name, before, per_row * width)
        return inner.reshape(len(column), width, *inner.shape[1:])
    if types.is_decimal(column.type) or column.null_count:
        column = column.cast(pa.float64())
    array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array


def innermost(kind: Any) -> Any:
    """The type of the values of a column, also within lists."""
    while is_one_of(kind, LIST):
        kind = kind.value_type
    return kind


def no_numbers(name: str, kind: Any, remedy: str) -> FedShuffleError:
    """The error for a column that holds something else."""
    what = "text" if is_one_of(kind, TEXT) else f"{kind} values"
    return FedShuffleError(f"column {name!r} holds {what}. {remedy}")


def is_one_of(kind: Any, tests: Sequence[Callable[[Any], bool]]) -> bool:
    """Whether an Arrow type passes one of the tests."""
    return any(test(kind) for test in tests)


def flat(columns: Columns) -> list[str]:
    """The names of all columns that form the fields."""
    nested = ([column] if isinstance(column, str) else column for column in columns.values())
    return [name for names in nested for name in names]
