"""Frames of pandas and polars, and datasets of Hugging Face, as arrays and the client of each row.

None of these libraries is imported: whoever has such a table has its library.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import as_array, expect, numeric
from fedshuffle._sources.columns import (
    LIST,
    NUMBER,
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
from fedshuffle._sources.images import pixels
from fedshuffle.errors import FedShuffleError, check_known, error_context, one_line, user_error

Encode = Mapping[str, Callable[[list[Any]], ArrayLike] | Mapping[Any, int]]
"""By column, a function from the list of its values to numbers, or the number of each value."""


class Table(Protocol):
    """Columns of a frame or a dataset."""

    names: list[str]

    def __len__(self) -> int: ...

    def kind(self, name: str) -> Any:
        """The Arrow type of a column."""

    def column(self, name: str) -> Any:
        """A column as an Arrow array."""

    def values(self, name: str) -> list[Any]:
        """The values of a column as Python objects."""

    def images(self, name: str) -> Iterable[Any] | None:
        """The images of a column; None if it holds something else."""


def open_frame(frame: Any) -> Table:
    """The columns of a frame of pandas or polars."""
    library = type(frame).__module__.partition(".")[0]
    if library == "polars" and type(frame).__name__ == "LazyFrame":
        raise FedShuffleError("the frame is lazy. Give frame.collect().")
    if library == "polars" and hasattr(frame, "get_column"):
        return _Polars(frame)
    if hasattr(frame, "iloc") and hasattr(frame, "columns"):
        return _Pandas(frame)
    raise FedShuffleError(
        f"a frame is a DataFrame of pandas or polars, not a {type(frame).__name__}. Use"
        " Federation.from_arrays for arrays, from_huggingface for a dataset of Hugging Face."
    )


def open_dataset(dataset: Any) -> Table:
    """The columns of a dataset of Hugging Face."""
    kind = type(dataset).__name__
    if kind in ("DatasetDict", "IterableDatasetDict"):
        splits = [repr(name) for name in dataset]
        raise FedShuffleError(
            f"the dataset has the splits {', '.join(splits)}. Give one: dataset[{splits[0]}]."
        )
    if kind == "IterableDataset":
        raise FedShuffleError(
            "the dataset is a stream. Load it without streaming=True, or write it to disk with"
            " fedshuffle.data.import_chunks."
        )
    if not (hasattr(dataset, "features") and hasattr(dataset, "with_format")):
        raise FedShuffleError(f"a dataset of Hugging Face is needed, not a {kind}.")
    if dataset.format["type"] == "custom":
        raise FedShuffleError(
            "the dataset has a transform (set_transform), which would be lost. Take it away with"
            " dataset.with_format(None), and give it as transform, for every minibatch, or as"
            " encode, once."
        )
    return _HuggingFace(dataset)


def open_partitions(partitioner: Any) -> tuple[Table, list[int], list[Any] | None, str | None]:
    """All partitions one after another, their sizes; and if they go by a column of natural ids,
    their ids and that column.
    """
    for name in ("load_partition", "num_partitions"):
        if not hasattr(type(partitioner), name):
            whole = hasattr(type(partitioner), "partitioners")  # a FederatedDataset
            remedy = ' Give one of its own, such as dataset.partitioners["train"].' if whole else ""
            raise FedShuffleError(
                "a partitioner of flwr_datasets is needed, not a"
                f" {type(partitioner).__name__}.{remedy}"
            )
    assigned = getattr(partitioner, "is_dataset_assigned", lambda: True)
    if not assigned():
        raise FedShuffleError(
            "the partitioner has no dataset. Assign it: partitioner.dataset = dataset; or take it"
            " from the FederatedDataset once a partition was loaded."
        )
    from datasets import concatenate_datasets

    with error_context(
        lambda error: (
            f"the partitioner fails: {user_error(error)}. Check its settings; it may be asked for"
            " more partitions than the dataset allows."
        )
    ):
        numbered = range(partitioner.num_partitions)
        parts = [partitioner.load_partition(k) for k in numbered]
    names = getattr(partitioner, "partition_id_to_natural_id", None)
    ids = [names[k] for k in numbered] if names else None
    natural = names or hasattr(partitioner, "partition_id_to_natural_ids")  # of groups
    client = getattr(partitioner, "_partition_by", None) if natural else None
    for k, part in enumerate(parts):
        if not len(part):
            raise FedShuffleError(
                f"partition {k} has no examples. Ask for fewer partitions, or for a least size"
                " (min_partition_size)."
            )
        if part.column_names != parts[0].column_names:
            raise FedShuffleError(
                "the partitions have different columns. Clients share their columns here: use a"
                " partitioner that divides rows."
            )
    return open_dataset(concatenate_datasets(parts)), [len(part) for part in parts], ids, client


def read(
    table: Table,
    client: str | None,
    fields: Names,
    input: Names,
    label: str | None,
    encode: Encode | None,
    other: str | None = None,
) -> tuple[NDArray[Any] | None, list[NDArray[Any]]]:
    """The client of each row, if a column holds it, and one array per field.

    The ``other`` column is no input unless it is named.
    """
    if not all(isinstance(name, str) for name in table.names):
        raise FedShuffleError("the names of the columns must be text: rename them.")
    for name in (name for name in table.names if table.names.count(name) > 1):
        raise FedShuffleError(f"several columns have the name {name!r}: rename all but one.")
    if not len(table):
        raise FedShuffleError("there are no examples: the table has no rows.")
    encode = {} if encode is None else encode
    expect(encode, Mapping, "encode")

    def kind(name: str) -> Any:
        found = table.kind(name)
        return found if name not in encode or is_one_of(found, LIST) else pa.int64()

    columns = choose(table.names, kind, client or other, fields, input, label)
    used = flat(columns)
    for name in encode:
        check_known("column to encode", name, used)
    ids = None
    if client is not None:
        column = table.column(client)
        check_client(column.type, client)
        clients, of_row = owners(column, client)
        ids = np.array(clients)[of_row]
    array = partial(_array, table, encode)
    arrays = [
        joined(names, array).astype(np.float32) if isinstance(names, list) else joined(names, array)
        for names in columns.values()
    ]
    return ids, arrays


def _array(table: Table, encode: Encode, name: str) -> NDArray[Any]:
    if name in encode:
        return _encoded(table.values(name), encode[name], name)
    if (images := table.images(name)) is not None:
        return pixels(images, f"column {name!r}")
    column = table.column(name)
    if pa.types.is_dictionary(column.type):  # classes in an order of their own
        if column.null_count:
            raise FedShuffleError(f"column {name!r} has missing values. Drop those rows.")
        return np.asarray(column.indices, dtype=np.int64)
    kind = innermost(column.type)
    if not is_one_of(kind, NUMBER):
        raise no_numbers(name, kind, _remedy(table, name))
    array = numbers(column, name)
    if array.dtype.kind == "f" and not (good := np.isfinite(array.reshape(len(array), -1))).all():
        row = int(good.all(axis=1).argmin()) + 1
        raise FedShuffleError(
            f"column {name!r} has a missing value, NaN or infinity in row {row}. Fill it in, or"
            " drop that row."
        )
    return array


def _remedy(table: Table, name: str) -> str:
    """How to give text as numbers, with the column's own values."""
    texts = sorted({value for value in table.values(name)[:1000] if isinstance(value, str)})
    shown = {text[:20]: k for k, text in enumerate(texts[:2])}
    return (
        "If these are classes, give each its number, the same for training and held-out data:"
        f" encode={{{name!r}: {shown or {'a': 0, 'b': 1}}}}. Else encode takes a function of the"
        " list of all values that returns numbers, such as a tokeniser's."
    )


def _encoded(
    values: list[Any], how: Callable[[list[Any]], ArrayLike] | Mapping[Any, int], name: str
) -> NDArray[Any]:
    made: Any
    if isinstance(how, Mapping):
        with error_context(
            lambda error: f"encode of column {name!r} needs a function: {one_line(error)}.",
            TypeError,  # lists
        ):
            unknown = [value for value in values if value not in how]
        for value in unknown:
            raise FedShuffleError(
                f"column {name!r} holds {value!r:.40}, for which encode has no number: add"
                " it there, or leave out its rows."
            )
        made = [how[value] for value in values]
    else:
        with error_context(f"encode of column {name!r}"):
            made = how(values)
    if isinstance(made, Mapping):  # a tokeniser's
        keys = ", ".join(map(str, made))
        raise FedShuffleError(
            f"encode of column {name!r} returned {keys} by name: return one of them, as"
            f" lambda texts: tokenizer(texts, padding=True)[{next(iter(made), 'input_ids')!r}]."
        )
    what, remedy = f"what encode makes of column {name!r}", "Return numbers only."
    with error_context(
        lambda error: f"{one_line(error)}. Pad them, such as by fedshuffle.data.padded.",
        FedShuffleError,
    ):
        as_array(made, what)
    array = numeric(made, what, remedy)
    if array.shape[:1] != (len(values),):
        raise FedShuffleError(
            f"{what} has shape {array.shape} for {len(values)} rows. Return one row for each."
        )
    return array


class _Pandas:
    def __init__(self, frame: Any) -> None:
        self._frame, self.names = frame, list(frame.columns)

    def __len__(self) -> int:
        return len(self._frame)

    def kind(self, name: str) -> Any:
        try:
            return self.column(name).type
        except FedShuffleError:  # objects of any kind
            return pa.null()

    def column(self, name: str) -> Any:
        with _reading(name):
            return _whole(pa.array(self._frame[name], from_pandas=True))

    def values(self, name: str) -> list[Any]:
        found: list[Any] = self._frame[name].tolist()
        return found

    def images(self, name: str) -> None:
        return None


class _Polars:
    def __init__(self, frame: Any) -> None:
        self._frame, self.names = frame, list(frame.columns)

    def __len__(self) -> int:
        return len(self._frame)

    def kind(self, name: str) -> Any:
        return self.column(name).type

    def column(self, name: str) -> Any:
        with _reading(name):
            column = self._frame.get_column(name)
            if type(column.dtype).__name__ == "Categorical":  # numbered in the order of appearance
                column = column.cast(str)
            return _whole(column.to_arrow())

    def values(self, name: str) -> list[Any]:
        found: list[Any] = self._frame.get_column(name).to_list()
        return found

    def images(self, name: str) -> None:
        return None


class _HuggingFace:
    def __init__(self, dataset: Any) -> None:
        self._dataset, self.names = dataset.with_format(None), list(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def kind(self, name: str) -> Any:
        if self.images(name) is not None:
            return pa.list_(pa.uint8())
        return self.column(name).type

    def column(self, name: str) -> Any:
        with _reading(name):
            alone = self._dataset.select_columns([name]).with_format("arrow")
            return _whole(alone[:].column(name))

    def values(self, name: str) -> list[Any]:
        return list(self._dataset[name])

    def images(self, name: str) -> Iterable[Any] | None:
        image = type(self._dataset.features[name]).__name__ == "Image"
        return iter(self._dataset[name]) if image else None


def _whole(column: Any) -> Any:
    """One Arrow array, of the type that stores its values."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return column.storage if isinstance(column.type, pa.ExtensionType) else column


def _reading(name: str) -> Any:
    return error_context(
        lambda error: (
            f"column {name!r} cannot be read ({one_line(error)}). Give its values one type, or"
            f" turn them into numbers by encode={{{name!r}: function}}."
        ),
        (pa.ArrowException, TypeError),
    )
