"""Array types and the checks that every layer needs."""

from __future__ import annotations

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


def counts(values: ArrayLike, what: str) -> IntArray:
    """A vector of whole numbers of at least one, or an error that names the first bad entry."""
    array = np.asarray(values)
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
            f"{what}: entry {i} is {array[i]}, but every entry must be a whole number of at least"
            f" 1. Leave out clients without examples."
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
