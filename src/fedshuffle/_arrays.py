"""Array types and the checks that every layer needs."""

from __future__ import annotations

import operator
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle.errors import FedShuffleError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Mark an array read-only, so that what is shared cannot change."""
    array.setflags(write=False)
    return array


def count(value: Any, what: str) -> int:
    """A whole number of at least one, or a clear error."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise FedShuffleError(f"{what} is {value!r}, but must be a whole number of at least 1.")
    return number


def number(value: Any, what: str) -> float:
    """A number, or a clear error."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise FedShuffleError(f"{what} is {value!r}, but must be a number.") from None


def expect(value: Any, kind: type, what: str) -> None:
    """Refuse a value of the wrong type."""
    if not isinstance(value, kind):
        raise FedShuffleError(
            f"{what} must be of type {kind.__name__}, not {type(value).__name__}: {value!r:.60}."
        )


def numeric(values: Any, what: str, remedy: str) -> NDArray[Any]:
    """An array of numbers, or an error that names the first value that is none.

    Numbers may come as Python objects. That is how pandas hands out a table whose columns are of
    different kinds, such as those of ``get_dummies`` beside others; it becomes float64, and so does
    a table of nothing but True and False.

    >>> numeric(np.array([[1.5, True], [2, False]], dtype=object), "x", "").tolist()
    [[1.5, 1.0], [2.0, 0.0]]
    """
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise FedShuffleError(f"{what} is no array of equal rows: {error}.") from error
    columns = getattr(values, "columns", None) if array.ndim == 2 else None
    if array.dtype.kind in "OSU":
        for place, value in np.ndenumerate(array):
            if not isinstance(value, Number | np.bool_):
                where = f"row {place[0]}" if place else "it"
                where += "" if columns is None else f" of column {columns[place[1]]!r}"
                raise FedShuffleError(f"{what} holds {_kind(value)} in {where}. {remedy}")
        inferred = np.array(array.tolist())
        array = (
            inferred if array.ndim < 2 and inferred.dtype != object else array.astype(np.float64)
        )
    if array.dtype.kind not in "biufc":
        raise FedShuffleError(f"{what} holds {array.dtype} values. {remedy}")
    return array.astype(np.float64) if columns is not None and array.dtype == bool else array


def _kind(value: Any) -> str:
    """What a value is that is no number."""
    if isinstance(value, str | bytes):
        return f"text ({value!r:.40})"
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return "a missing value (null)"
    return f"a value of type {type(value).__name__}"


def counts(values: ArrayLike, what: str, remedy: str = "") -> IntArray:
    """A vector of whole numbers of at least one, or an error that names the first bad entry."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise FedShuffleError(f"{what} must be one list of whole numbers: {error}.") from error
    if array.ndim != 1 or array.size == 0:
        raise FedShuffleError(
            f"{what} must be a non-empty list of whole numbers, got shape {array.shape}."
        )
    if array.dtype.kind not in "iuf":
        raise FedShuffleError(f"{what} must be whole numbers, got {array.dtype} values.")
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    bad = np.flatnonzero((whole != array) | (whole < 1))
    if bad.size:
        i = int(bad[0])
        raise FedShuffleError(
            f"{what}: client {i} has {array[i]:g}, but every client must have a whole number of at"
            f" least 1.{remedy}"
        )
    return whole


def positive(values: ArrayLike, n: int, what: str) -> FloatArray:
    """A vector of n positive finite numbers, or an error that names the first bad entry."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedShuffleError(f"{what} must be numbers: {error}.") from error
    if array.shape != (n,):
        raise FedShuffleError(
            f"{what} must be one number for each of the {n} clients, got shape {array.shape}."
        )
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if bad.size:
        i = int(bad[0])
        raise FedShuffleError(
            f"{what}: client {i} has {array[i]}, but every entry must be positive and finite."
        )
    return array
