"""Federations from the data of other libraries: frames, datasets, partitioners, images.

These functions are class methods of :class:`fedshuffle.Federation`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle.errors import optional_import

if TYPE_CHECKING:
    from fedshuffle._sources.frames import Encode, Table
    from fedshuffle.federation import Federation

ExampleTransform = Callable[..., Any]
"""``transform(*fields)``: the fields that the loss takes, made of those of a minibatch."""


def from_frame(
    cls: "type[Federation]",
    frame: Any,
    *,
    client: str,
    fields: Sequence[str] | None = None,
    input: Sequence[str] | None = None,
    label: str | None = None,
    encode: "Encode | None" = None,
    weights: ArrayLike | None = None,
    transform: ExampleTransform | None = None,
) -> "Federation":
    """A table in memory with a client column: a ``DataFrame`` of pandas or polars.

    As for :func:`fedshuffle.data.import_file`, give either ``fields``, and each of these
    columns becomes a field; or ``label`` and, if needed, ``input``, and the input columns
    become one matrix. A column of lists of one length becomes an array. Categories become
    their numbers (polars: those of an ``Enum``).

    Args:
        frame: the table.
        client: the column with the client's id, text or whole numbers.
        fields: the columns in the order in which the loss takes them.
        input: the columns that form the input; by default all others of numbers, or with encode.
        label: the label column.
        encode: for columns that hold no numbers: by column, a function from the list of its
            values to an array with a row for each, or the number of each value.
        weights: of the clients, in the order of their ids; proportional to size by default.
        transform: what every minibatch passes through (see :meth:`Federation.with_transform`).

    >>> import pandas
    >>> from fedshuffle import Federation
    >>> rows = {"clinic": ["B", "A", "B"], "age": [50, 61, 47], "ill": ["yes", "no", "no"]}
    >>> clinics = Federation.from_frame(
    ...     pandas.DataFrame(rows),
    ...     client="clinic",
    ...     label="ill",
    ...     encode={"ill": {"no": 0, "yes": 1}},
    ... )
    >>> clinics.ids, clinics.fields[0].tolist(), clinics.fields[1].tolist()
    (('A', 'B'), [[61.0], [50.0], [47.0]], [0, 1, 0])
    """
    optional_import("pyarrow", "Federation.from_frame", "data")
    from fedshuffle._sources.frames import open_frame

    columns = client, fields, input, label, encode
    return _from_table(cls, open_frame(frame), columns, weights, transform)


def from_huggingface(
    cls: "type[Federation]",
    dataset: Any,
    *,
    client: str,
    fields: Sequence[str] | None = None,
    input: Sequence[str] | None = None,
    label: str | None = None,
    encode: "Encode | None" = None,
    weights: ArrayLike | None = None,
    transform: ExampleTransform | None = None,
) -> "Federation":
    """A ``datasets.Dataset`` of Hugging Face with a client column.

    The arguments are those of :meth:`Federation.from_frame`. Images become numbers from 0 to 1 of
    shape (colours, height, width), and a ``ClassLabel`` the number of the class. Text needs
    ``encode``, such as a tokeniser that pads (see :func:`fedshuffle.data.padded`).

    >>> import datasets  # doctest: +SKIP
    >>> from fedshuffle import Federation
    >>> from fedshuffle.data import padded
    >>> rows = {"user": ["bob", "ann"], "text": ["so it is", "no"], "label": [1, 0]}
    >>> def letters(texts):
    ...     return padded([[ord(letter) for letter in text] for text in texts])
    >>> Federation.from_huggingface(  # doctest: +SKIP
    ...     datasets.Dataset.from_dict(rows),
    ...     client="user",
    ...     fields=["text", "label"],
    ...     encode={"text": letters},
    ... )
    Federation(2 clients, 2 examples, (2, 8), (2,))
    """
    optional_import("pyarrow", "Federation.from_huggingface", "data")
    from fedshuffle._sources.frames import open_dataset

    columns = client, fields, input, label, encode
    return _from_table(cls, open_dataset(dataset), columns, weights, transform)


def from_partitioner(
    cls: "type[Federation]",
    partitioner: Any,
    *,
    fields: Sequence[str] | None = None,
    input: Sequence[str] | None = None,
    label: str | None = None,
    encode: "Encode | None" = None,
    weights: ArrayLike | None = None,
    transform: ExampleTransform | None = None,
) -> "Federation":
    """The partitions of a partitioner of ``flwr_datasets``, which has its dataset.

    Client ``i`` is partition ``i``; a natural id, where there is one, is its id. The other
    arguments are those of :meth:`Federation.from_frame`.

    >>> import datasets  # doctest: +SKIP
    >>> from fedshuffle import Federation
    >>> from flwr_datasets.partitioner import IidPartitioner  # doctest: +SKIP
    >>> partitioner = IidPartitioner(num_partitions=3)  # doctest: +SKIP
    >>> rows = {"x": [[0.0, 1.0]] * 6, "y": [0, 1] * 3}
    >>> partitioner.dataset = datasets.Dataset.from_dict(rows)  # doctest: +SKIP
    >>> Federation.from_partitioner(partitioner, fields=["x", "y"])  # doctest: +SKIP
    Federation(3 clients, 6 examples, (6, 2), (6,))
    """
    optional_import("pyarrow", "Federation.from_partitioner", "data")
    from fedshuffle._sources.frames import open_partitions, read

    table, sizes, ids, other = open_partitions(partitioner)
    found = read(table, None, fields, input, label, encode, other)[1]
    names = None if ids is None else tuple(ids)
    return cls._build(found, np.array(sizes), weights, names, transform)._check_finite()


def from_image_folder(
    cls: "type[Federation]",
    folder: str | Path,
    *,
    size: tuple[int, int] | None = None,
    mode: str = "RGB",
    classes: Sequence[str] | None = None,
    weights: ArrayLike | None = None,
    transform: ExampleTransform | None = None,
) -> "Federation":
    """A folder of images per client, in folders of classes: ``folder/CLIENT/CLASS/*.png``.

    The fields are the images, as numbers from 0 to 1 of shape (colours, height, width), and
    their classes, numbered in the order of ``classes``.

    Args:
        folder: the folder of the clients.
        size: height and width to which images are scaled; without it all must have one size.
        mode: ``"RGB"``, ``"L"`` (grey) or ``"RGBA"``.
        classes: names of all classes; by default those found, sorted. Give the same for
            training and held-out images.
        weights: of the clients, in the order of their names; proportional to size by default.
        transform: what every minibatch passes through (see :meth:`Federation.with_transform`).

    >>> import tempfile
    >>> from PIL import Image
    >>> from fedshuffle import Federation
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("ann/cat/1.png", "ann/dog/7.png", "bob/dog/3.png"):
    ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
    ...     Image.new("RGB", (6, 4)).save(folder / name)
    >>> Federation.from_image_folder(folder)
    Federation(2 clients, 3 examples, (3, 3, 4, 6), (3,))
    """
    from fedshuffle._sources.images import read_folder

    ids, sizes, *found = read_folder(folder, size, mode, classes)
    return cls._build(found, np.array(sizes), weights, tuple(ids), transform)


def _from_table(
    cls: "type[Federation]",
    table: "Table",
    columns: Any,
    weights: ArrayLike | None,
    transform: ExampleTransform | None,
) -> "Federation":
    from fedshuffle._sources.frames import read

    ids, fields = read(table, *columns)
    return cls.from_arrays(*fields, client_ids=ids, weights=weights, transform=transform)
