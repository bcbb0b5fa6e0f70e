"""Importing files of any supported format, and chunks of examples from Python."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedshuffle._arrays import common_length, distinct, numeric
from fedshuffle.data.storage.writer import Batch, write_store
from fedshuffle.errors import FedShuffleError, check_known, optional_import
from fedshuffle.federation import Federation

FORMATS = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".csv.gz"),
    "tsv": (".tsv", ".tsv.gz"),
    "leaf": (".json",),
    "hdf5": (".h5", ".hdf5"),
}
"""The formats, and the suffixes by which they are recognised."""

Read = Callable[[Mapping[str, Any]], Mapping[str, ArrayLike]]
"""Turns one client's fields, as they are in the file, into arrays of numbers by name."""

_BUFFER_BYTES = 1 << 22  # small chunks are collected up to this size and written together


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
    read: Read | None = None,
    format: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Federation:
    r"""Import a file, or a folder of files, of one of the :data:`FORMATS`.

    Tables (Parquet, CSV, TSV) have a client column; the rows of a client may be anywhere. Give
    either ``fields``, and each of these columns becomes a field; or ``label`` and, if needed,
    ``input``, and the input columns become one matrix, the field ``input``, and the label column
    the field ``label``. A column of lists, all of one length, becomes an array field. A missing
    value counts as NaN, and is refused.

    LEAF (JSON) and HDF5 as TensorFlow Federated publishes it name the clients themselves. The
    default is the fields ``x`` and ``y`` (LEAF) or the only field (HDF5).

    Args:
        source: the file or folder.
        out: the folder of the store.
        client: tables: the column with the client's id, text or whole numbers.
        fields: the columns or fields to import, in the order in which the loss takes them.
        input: tables: the columns that form the input; by default all other columns of numbers.
        label: tables: the label column.
        standardise: tables: give every input column mean 0 and standard deviation 1 over these
            rows; or the store of the training rows, to scale held-out rows in the same way.
        dtype: the dtype to store a field as, by its name. By default labels (one whole number per
            example) are int64; matrices of tables, real numbers in text files and all other numbers
            of LEAF files are float32; everything else is stored as in the file.
        read: LEAF and HDF5: turns fields that hold no numbers, such as text, into arrays: takes one
            client's fields by name and returns arrays by name, all with one row per example.
        format: one of the formats; by default guessed from the suffix.
        overwrite: replace an existing store.
        progress: show a progress bar.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     table = Path(folder, "visits.csv")
    ...     _ = table.write_text("clinic,age,ill\nA,50,1\nB,61,0\nA,47,0\n")
    ...     clinics = import_file(table, Path(folder, "store"), client="clinic", label="ill")
    ...     clinics.sizes.tolist()
    [2, 1]
    """
    path = Path(source)
    kind = _guess(path) if format is None else format
    check_known("format", kind, FORMATS)
    if kind != "leaf":
        optional("h5py" if kind == "hdf5" else "pyarrow")
    options: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "progress": progress}
    table = kind not in ("leaf", "hdf5")
    misplaced = {"read": read} if table else {"client": client, "standardise": standardise or None}
    for option, value in misplaced.items():
        if value is not None:
            raise FedShuffleError(f"{option} is of no use for {kind} files: leave {option} out.")
    if table:
        if client is None:
            raise FedShuffleError("say which column of the table holds the client: client.")
        from fedshuffle.data.importers.tables import import_table

        import_table(path, out, kind, client, fields, input, label, standardise, **options)
        return Federation.open(out)
    if fields is None and (input or label):
        fields = [*(input or ()), *([] if label is None else [label])]
    from fedshuffle.data.importers.clients import leaf_arrays, read_hdf5, read_leaf

    if kind == "hdf5":
        clients = read_hdf5(path, fields, all_fields=read is not None)
    else:
        clients = read_leaf(path, fields)
        read = read or partial(leaf_arrays, given=dtype or {})
    chunks = ((name, raw if read is None else read(raw)) for name, raw in clients)
    return import_chunks(chunks, out, origin={"file": path.name, "format": kind}, **options)


def import_chunks(
    chunks: Iterable[Sequence[Any]],
    out: str | Path,
    *,
    names: Sequence[str] | None = None,
    dtype: Mapping[str, DTypeLike] | None = None,
    origin: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Federation:
    """Import chunks ``(client, x, y, ...)``: examples of one client, one array per field.

    A client may come in several chunks, in any order. A chunk may also hold its arrays in a tuple,
    ``(client, (x, y))``, or by name, ``(client, {"x": x, "y": y})``. Clients have text or whole
    numbers as ids. The iterator is read once.

        >>> import tempfile
        >>> chunks = [("bob", [[1.0]], [0]), ("ann", [[2.0]], [1]), ("bob", [[3.0]], [1])]
        >>> import_chunks(chunks, tempfile.mkdtemp() + "/people", names=["x", "y"])
        Federation(2 clients, 3 examples, (3, 1), (3,))

    Args:
        chunks: an iterable of chunks, such as a generator.
        out: the folder of the store.
        names: names of the fields; ``field0``, ``field1``, ... by default.
        dtype: dtype to store a field as, by name; by default that of the first rows.
        origin: where the data is from, in your words; stored with it.
        overwrite: replace an existing store.
        progress: show a progress bar.
    """
    options: Any = {"dtype": dtype, "origin": origin, "overwrite": overwrite, "progress": progress}
    write_store(_batches(chunks, names and distinct(names)), out, **options)
    return Federation.open(out)


def _batches(chunks: Iterable[Sequence[Any]], names: Sequence[str] | None) -> Iterator[Batch]:
    """Chunks collected to some megabytes, as long as they have the same dtypes and shapes."""
    clients: list[Any] = []
    rows: list[int] = []
    parts: list[list[NDArray[Any]]] = []
    size, layout = 0, None

    def joined() -> Batch:
        fields = map(np.concatenate, zip(*parts, strict=True))
        owners = np.repeat(np.arange(len(clients)), rows)
        return clients, owners, dict(zip(names or (), fields, strict=True))

    for chunk in chunks:
        client, arrays = _checked_chunk(chunk, names)
        names, values = list(arrays), list(arrays.values())
        same = [(array.dtype, array.shape[1:]) for array in values]
        if clients and (same != layout or size > _BUFFER_BYTES):
            yield joined()
            clients, rows, parts, size = [], [], [], 0
        clients.append(client)
        rows.append(common_length(values, f" of client {client!r}"))
        parts.append([array.copy() for array in values])  # an iterator may fill them again
        size, layout = size + sum(array.nbytes for array in values), same
    if clients:
        yield joined()


def _checked_chunk(chunk: Any, names: Sequence[str] | None) -> tuple[Any, dict[str, NDArray[Any]]]:
    """The client of a chunk, and its fields as arrays of numbers by name."""
    if not isinstance(chunk, Sequence) or isinstance(chunk, str) or len(chunk) < 2:
        raise FedShuffleError(f"a chunk is (client, array, ...), but got {chunk!r:.60}.")
    client, *fields = chunk
    if len(fields) == 1 and isinstance(fields[0], tuple):
        fields = list(fields[0])
    if len(fields) == 1 and isinstance(fields[0], Mapping):
        named = dict(fields[0])
    elif names and len(names) == len(fields):
        named = dict(zip(names, fields, strict=True))
    else:
        named = {f"field{k}": field for k, field in enumerate(fields)}
    if names and named.keys() != set(names):
        raise FedShuffleError(
            f"client {client!r} has the fields {', '.join(named)} instead of {', '.join(names)}."
            " Give the same fields for every client."
        )
    remedy = "Convert it to numbers first (in Python, a function read can), or drop that example."
    return client, {
        name: numeric(named[name], f"field {name!r} of client {client!r}", remedy)
        for name in names or named
    }


def optional(module: str) -> Any:
    """A module of the ``data`` extra, or an error that says how to install it."""
    return optional_import(module, "reading this kind of data", "data")


def find_files(source: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the files in a folder that end with one of the suffixes, sorted."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FedShuffleError(f"there is no file or folder {str(source)!r}.")
    files = sorted(file for file in source.rglob("*") if file.name.lower().endswith(suffixes))
    if not files:
        raise FedShuffleError(f"no file in {str(source)!r} ends with {' or '.join(suffixes)}.")
    return files


def _guess(source: Path) -> str:
    """The format that the suffix of a file, or of the files in a folder, stands for."""
    known = [suffix for suffixes in FORMATS.values() for suffix in suffixes]
    names = [file.name.lower() for file in find_files(source, tuple(known))]
    found = [k for k, ends in sorted(FORMATS.items()) if any(n.endswith(ends) for n in names)]
    if len(found) != 1:
        has = f"the formats {' and '.join(found)}" if found else "no known suffix"
        raise FedShuffleError(
            f"{str(source)!r} has {has}. Say the format: {', '.join(sorted(FORMATS))}."
        )
    return found[0]
