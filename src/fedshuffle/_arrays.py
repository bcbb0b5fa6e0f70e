"""Array types, and checks of arguments."""

import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle.errors import FedShuffleError, error_context, one_line

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

IGNORED = -100
"""The class of targets that losses and metrics ignore, as in torch."""


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Mark an array read-only, so that what is shared cannot change."""
    array.setflags(write=False)
    return array


def jsonable(value: Any) -> Any:
    """Plain data for JSON, which has neither NaN nor infinity: None stands for them.

    >>> jsonable({"loss": np.float32("nan"), "sizes": np.array([1, 2]), "pair": (0.5, "a")})
    {'loss': None, 'sizes': [1, 2], 'pair': [0.5, 'a']}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def count(value: Any, what: str, least: int = 1, most: int | None = None) -> int:
    """A whole number of at least one, or in another range, or a clear error.

    >>> count(4, "the number of clients", most=9)
    4
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most) or isinstance(value, bool):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise FedShuffleError(f"{what} is {value!r}, but must be a whole number {span}.")
    return number


def number(value: Any, what: str, within: str = "") -> float:
    """A number, in an interval if one is given, or a clear error.

    >>> number("0.5", "the share", within="(0, 1]")
    0.5
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise FedShuffleError(f"{what} is {value!r}, but must be a number.") from None
    if within and not _inside(found, within):
        raise FedShuffleError(f"{what} is {value!r}, but must be in {within}.")
    return found


def shortest(value: float) -> str:
    """A number as the shortest text that reads as the same number.

    >>> shortest(60.0), shortest(1e6), shortest(1234567), shortest(0.1)
    ('60', '1e+06', '1234567', '0.1')
    """
    brief = f"{value:g}"
    return brief if float(brief) == value else str(value)


def _inside(values: Any, within: str) -> Any:
    """Whether a number is, or which of an array are, in an interval such as "(0, 1]"."""
    low, high = map(float, within[1:-1].split(","))
    above = values >= low if within[0] == "[" else values > low
    return above & (values <= high if within[-1] == "]" else values < high)


def expect(value: Any, kind: type, what: str) -> None:
    """Refuse a value of the wrong type."""
    if not isinstance(value, kind):
        shown = " ".join(repr(value).split())  # an array takes many lines
        raise FedShuffleError(
            f"{what} must be of type {kind.__name__}, not {type(value).__name__}: {shown:.60}."
        )


def numeric(values: Any, what: str, remedy: str) -> NDArray[Any]:
    """An array of numbers, or an error that names the first value that is not a number.

    Numbers may be Python objects, as in a pandas table with columns of several dtypes. Such a table
    becomes float64, and so does a table of booleans.

    >>> numeric(np.array([[1.5, True], [2, False]], dtype=object), "x", "").tolist()
    [[1.5, 1.0], [2.0, 0.0]]
    """
    array = as_array(values, what)
    columns = getattr(values, "columns", None) if array.ndim == 2 else None
    if array.dtype.kind in "OSU":
        for place, value in np.ndenumerate(array):
            if not isinstance(value, Number | np.bool_):
                where = f"row {place[0]}" if place else "it"
                where += "" if columns is None else f" of column {columns[place[1]]!r}"
                raise FedShuffleError(f"{what} holds {_kind(value)} in {where}. {remedy}")
        inferred = np.array(array.tolist())
        keep = array.ndim < 2 and inferred.dtype != object
        array = inferred if keep else array.astype(np.float64)
    if array.dtype.kind not in "biufc":
        raise FedShuffleError(f"{what} holds {array.dtype} values. {remedy}")
    return array.astype(np.float64) if columns is not None and array.dtype == bool else array


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Values as an array, or a clear error."""
    with error_context(
        lambda error: f"{what} has rows of different lengths: {one_line(error)}.", ValueError
    ):
        return np.asarray(values)


def _kind(value: Any) -> str:
    """The kind of a value that is not a number."""
    if isinstance(value, str | bytes):
        text = str(value) if isinstance(value, str) else bytes(value)  # not those of numpy
        return f"text ({text!r:.40})"
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return "a missing value (null)"
    return f"a value of type {type(value).__name__}"


def common_length(arrays: Sequence[Any], who: str = "") -> int:
    """The number of rows of all arrays or tensors, or an error that shows how they differ."""
    if not arrays:
        raise FedShuffleError("give at least one array of examples.")
    lengths = {int(array.shape[0]) if len(array.shape) else -1 for array in arrays}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays)
        raise FedShuffleError(f"all fields{who} need one row per example, got shapes {shapes}.")
    return lengths.pop()


def counts(values: ArrayLike, what: str, remedy: str = "") -> IntArray:
    """A vector of whole numbers of at least one, or an error that names the first bad entry."""
    array = as_array(values, what)
    if array.ndim != 1 or array.size == 0:
        raise FedShuffleError(
            f"{what} must be a non-empty list of whole numbers, got shape {array.shape}."
        )
    if array.dtype.kind not in "iuf":
        raise FedShuffleError(f"{what} must be whole numbers, got {array.dtype} values.")
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    for i in np.flatnonzero((whole != array) | (whole < 1)).tolist():
        raise FedShuffleError(
            f"{what}: client {i} has {array[i]:g}, but every client must have a whole number of at"
            f" least 1.{remedy}"
        )
    return whole


def vector(
    values: ArrayLike,
    what: str,
    clients: Sequence[int] | None = None,
    within: str = "(0, inf)",
    remedy: str = "",
) -> FloatArray:
    """A number in an interval for each of these clients, or of one and more, or an error that names
    the first bad one.

    >>> vector([1, 2], "weights").tolist()
    [1.0, 2.0]
    """
    with error_context(lambda error: f"{what} must be numbers: {error}.", (TypeError, ValueError)):
        array = np.array(values, dtype=np.float64)
    n = max(1, array.size) if clients is None else len(clients)
    if array.shape != (n,):
        who = "client" if clients is None else f"of the {n} clients"
        raise FedShuffleError(f"{what} must be one number for each {who}, got shape {array.shape}.")
    for i in np.flatnonzero(~_inside(array, within)).tolist():
        client = i if clients is None else clients[i]
        raise FedShuffleError(
            f"{what}: client {client} has {array[i]:g}, but all must be in {within}.{remedy}"
        )
    return array


def wide_labels(array: NDArray[Any]) -> NDArray[Any]:
    """Labels (one whole number per example) as int64, as torch's losses need them."""
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "biu" else array


def distinct(fields: Sequence[str]) -> list[str]:
    """The names of fields, none of them twice."""
    if len(set(fields)) != len(fields):
        raise FedShuffleError(f"a field is named twice in {', '.join(fields)}.")
    return list(fields)


def histogram(sizes: Sequence[int], most: int = 24) -> list[tuple[int, int, int]]:
    """First size, last size and number of clients of each bar; bars widen where sizes differ much.

    >>> histogram([1, 2, 2, 3])
    [(1, 1, 1), (2, 2, 2), (3, 3, 1)]
    >>> histogram([1, 100], most=4)
    [(1, 2, 1), (3, 9, 0), (10, 31, 0), (32, 100, 1)]
    """
    low, high = min(sizes), max(sizes)
    space = np.geomspace if high > 20 * low else np.linspace
    inner = np.round(space(low, high + 1, min(most, high + 1 - low) + 1)).astype(int)
    edges = np.unique([low, *inner, high + 1])
    counts = np.histogram(sizes, edges)[0].tolist()
    return list(zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts, strict=True))
