"""Tables with a column that says whose row it is: Parquet or CSV, one file or a folder of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.populations.arrow import (
    array_of,
    batches,
    count_rows,
    is_list,
    is_number,
    open_files,
    owners_of,
)
from fedshuffle.populations.draft import checked_dtype
from fedshuffle.populations.scaling import KEY, Scaling
from fedshuffle.populations.sources import FORMATS, distinct, files, guess, optional
from fedshuffle.populations.writing import Id, StoreWriter

TABLES = ("parquet", "csv", "tsv")

Columns = dict[str, str | list[str]]
"""The fields by name: each is a column, or several columns side by side."""


def import_table(
    source: str | Path,
    out: str | Path,
    *,
    client: str,
    fields: Sequence[str] | None = None,
    input: Sequence[str] | None = None,
    label: str | None = None,
    standardise: bool | str | Path = False,
    dtype: Mapping[str, DTypeLike] | None = None,
    format: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Federation:
    """Import a table with a client column; the rows of a client may lie anywhere in it.

    Say either ``fields``, and each of these columns becomes a field; or ``label`` and perhaps
    ``input``, and the input columns become one matrix, the field ``input``, and the label column
    the field ``label``. A column of lists, all of one length, becomes an array field. A missing
    value counts as NaN, and is refused.

    Args:
        source: the file, or a folder of such files.
        out: the folder of the store.
        client: the column that says whose row it is, by text or by whole numbers.
        fields: columns that become a field each, in the order in which the loss takes them.
        input: columns that form the input; all other columns of numbers if not given.
        label: the column of the label.
        standardise: give every input column mean 0 and standard deviation 1 over these rows; or the
            store of the training rows, by whose means and deviations held-out rows are scaled.
        dtype: what to store a field as, by its name. By default a matrix is float32, one whole
            number a row is int64, and all else is as in the file; real numbers that the file gives
            as text are float32.
        format: ``"parquet"``, ``"csv"`` or ``"tsv"``; by the suffix if not given.
        overwrite: replace the store that is there.
        progress: show a bar.
    """
    format = guess(source) if format is None else format
    if format not in TABLES:
        raise unknown("format of a table", format, TABLES)
    paths = files(source, FORMATS[format])
    base = Path(source) if Path(source).is_dir() else Path(source).parent
    told = {name: checked_dtype(name, kind) for name, kind in (dtype or {}).items()}
    schema = open_files(paths, base, format, {}).schema
    columns = _chosen(schema, client, fields, input, label)
    _check_columns(schema, columns, format)
    dataset = open_files(paths, base, format, _types(schema, columns, client, told))
    _check_client(dataset.schema, client)
    kinds = _kinds(dataset.schema, columns, format) | told
    scaling = None
    if standardise is not False:
        scaling = _scaling(standardise, dataset, columns, paths)
        kinds.setdefault("input", np.dtype(np.float32))
    total = count_rows(dataset, paths) if progress and format == "parquet" else None
    names = list(columns)
    with StoreWriter(
        out, names=names, dtype=kinds, overwrite=overwrite, progress=progress, total=total
    ) as store:
        used = {client, *_flat(columns)}
        store.source.update(
            file=Path(source).name,
            format=format,
            client=client,
            columns=columns,
            left_out=[name for name in schema.names if name not in used],
        )
        if scaling is not None:
            store.source[KEY] = scaling.to_dict()
        store.settle = None if format == "parquet" else whole_numbers
        for batch in batches(dataset, [client, *_flat(columns)], paths):
            clients, owners = owners_of(batch.column(client), client, store.rows)
            arrays = [array_of(batch, column, store.rows) for column in columns.values()]
            if scaling is not None:
                arrays[0] = scaling(arrays[0])  # the input comes first
            store.add_rows(clients, owners, *arrays)
    return Federation.open(out)


def _scaling(
    standardise: bool | str | Path, dataset: Any, columns: Columns, paths: Sequence[Path]
) -> Scaling:
    """The scaling of the input: that of these rows, or of another store."""
    if "input" not in columns:
        raise FedShuffleError("standardise scales the input: say label, and perhaps input.")
    column = columns["input"]
    if not isinstance(standardise, bool):
        return Scaling.of(standardise, column)
    found = batches(dataset, _flat({"input": column}), paths)
    return Scaling.fitted(array_of(batch, column, 0) for batch in found)


def whole_numbers(ids: list[Id]) -> list[Id]:
    """Ids that were read as text, as whole numbers if all of them are so written.

    >>> whole_numbers(["10", "9"]), whole_numbers(["10", "09"])
    ([10, 9], ['10', '09'])
    """
    plain = re.compile("0|-?[1-9][0-9]{0,17}")
    if all(isinstance(name, str) and plain.fullmatch(name) for name in ids):
        return [int(name) for name in ids]
    return ids


def _chosen(
    schema: Any,
    client: str,
    fields: Sequence[str] | None,
    input: Sequence[str] | None,
    label: str | None,
) -> Columns:
    """Which columns become which field."""
    for name in (client, *(fields or ()), *(input or ()), *([] if label is None else [label])):
        if name not in schema.names:
            raise unknown("column", name, schema.names)
    if (fields is None) == (input is None and label is None):
        names = ", ".join([*schema.names[:12], *["..."] * (len(schema.names) > 12)])
        raise FedShuffleError(
            f"the table has the columns {names}. Say which hold the examples:"
            " either fields, or label and, if not all others, input."
        )
    if fields is not None:
        return {name: name for name in distinct(fields)}
    others = [name for name in schema.names if name not in (client, label)]
    if input is None:
        lists = [name for name in others if is_list(schema.field(name).type)]
        input = [name for name in others if is_number(schema.field(name).type)] or lists[:1]
        if lists and input != lists:
            raise FedShuffleError(
                f"the columns {', '.join(lists)} hold lists, which do not mix with others. Name the"
                " input."
            )
    if not input:
        raise FedShuffleError("no other column holds numbers for the input.")
    lists = [name for name in input if is_list(schema.field(name).type)]
    if lists and len(input) > 1:
        raise FedShuffleError(
            f"column {lists[0]!r} holds lists and cannot be set beside other columns. Give it alone"
            " as the input, or use fields."
        )
    chosen: Columns = {"input": lists[0] if lists else distinct(input)}
    return chosen if label is None else chosen | {"label": label}


def _types(
    schema: Any, columns: Columns, client: str, told: Mapping[str, np.dtype[Any]]
) -> dict[str, Any]:
    """How columns of text files are to be read, whatever their beginning looks like.

    Ids are text, so that 007 and 7 stay two clients; numbers that may have a fraction are real.
    """
    arrow = optional("pyarrow")
    types = {client: arrow.string()}
    for name, column in columns.items():
        real = name in told and told[name].kind == "f"
        matrix = isinstance(column, list) and name not in told
        for part in _flat({name: column}):
            kind = schema.field(part).type
            if real or (matrix and not arrow.types.is_boolean(kind)) or arrow.types.is_null(kind):
                types[part] = arrow.float64()
    return types


def _check_client(schema: Any, client: str) -> None:
    types = optional("pyarrow").types
    kind = schema.field(client).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
        raise FedShuffleError(
            f"the client column {client!r} holds {kind} values. Clients are named by text or by"
            " whole numbers."
        )


def _check_columns(schema: Any, columns: Columns, format: str) -> None:
    """Refuse columns that hold no numbers; one of a text file may begin with missing ones."""
    types = optional("pyarrow").types
    for name in _flat(columns):
        kind = schema.field(name).type
        while is_list(kind):
            kind = kind.value_type
        if not (is_number(kind) or (types.is_null(kind) and format != "parquet")):
            text = types.is_string(kind) or types.is_large_string(kind)
            what = "text" if text else f"{kind} values"
            raise FedShuffleError(
                f"column {name!r} holds {what}. Turn it into numbers first (pandas: get_dummies for"
                " inputs, factorize for labels), or leave the column out."
            )


def _kinds(schema: Any, columns: Columns, format: str) -> dict[str, np.dtype[Any]]:
    """What fields are stored as unless told."""
    single = np.dtype(np.float32)
    kinds = {name: single for name, column in columns.items() if isinstance(column, list)}
    if format != "parquet":
        types = optional("pyarrow").types
        for name, column in columns.items():
            if isinstance(column, str) and types.is_floating(schema.field(column).type):
                kinds[name] = single
    return kinds


def _flat(columns: Columns) -> list[str]:
    return [
        name
        for column in columns.values()
        for name in (column if isinstance(column, list) else [column])
    ]
