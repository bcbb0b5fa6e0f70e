"""What the importers share: formats, optional packages, files in folders, how labels are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle.errors import FedShuffleError

FORMATS = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".csv.gz"),
    "tsv": (".tsv", ".tsv.gz"),
    "leaf": (".json",),
    "hdf5": (".h5", ".hdf5"),
}
"""The formats, and by which suffixes they are recognised."""

Read = Callable[[Mapping[str, Any]], Mapping[str, ArrayLike]]
"""From one client's fields as they are in the file to its arrays of numbers, by name."""


def optional(module: str) -> Any:
    """A module of the ``data`` extra, or how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise FedShuffleError(
            f"reading this kind of data needs {package}: pip install 'fedshuffle[data]'."
        ) from error


def files(source: str | Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The source itself, or, if it is a folder, the files in it with such a suffix, sorted."""
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FedShuffleError(f"there is no file or folder {str(source)!r}.")
    found = sorted(file for file in path.rglob("*") if file.name.lower().endswith(suffixes))
    if not found:
        raise FedShuffleError(f"no file in {str(source)!r} ends with {' or '.join(suffixes)}.")
    return found


def wide_labels(array: NDArray[Any]) -> NDArray[Any]:
    """One whole number an example is a label, and torch's losses want those as int64.

    >>> wide_labels(np.array([1, 2], dtype=np.uint8)).dtype, wide_labels(np.eye(2)).dtype
    (dtype('int64'), dtype('float64'))
    """
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "biu" else array


def distinct(fields: Sequence[str]) -> list[str]:
    """Names of fields, each of them once."""
    if len(set(fields)) != len(fields):
        raise FedShuffleError(f"a field is named twice in {', '.join(fields)}.")
    return list(fields)


def guess(source: str | Path) -> str:
    """The format that the suffix of a file, or of the files in a folder, stands for."""
    path = Path(source)
    if not path.exists():
        raise FedShuffleError(f"there is no file or folder {str(source)!r}.")
    names = [path.name.lower()]
    if path.is_dir():
        names = [file.name.lower() for file in path.rglob("*") if file.is_file()]
    found = {
        kind for kind, suffixes in FORMATS.items() if any(name.endswith(suffixes) for name in names)
    }
    if len(found) != 1:
        has = f"files of the formats {' and '.join(sorted(found))}" if found else "no known suffix"
        raise FedShuffleError(
            f"{str(source)!r} has {has}. Say the format: {', '.join(sorted(FORMATS))}."
        )
    return found.pop()
