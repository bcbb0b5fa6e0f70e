"""Lists of different lengths as one array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import count, numeric
from fedshuffle.errors import FedShuffleError


def padded(lists: Sequence[ArrayLike], value: float = 0, length: int | None = None) -> NDArray[Any]:
    """Lists of numbers, such as tokens, as rows of one length.

    Args:
        lists: one list per example.
        value: fills the end of shorter lists; -100 for targets, which our losses then ignore.
        length: the length of all rows, where longer lists are cut; by default that of the longest.

    >>> padded([[1, 2, 3], [4]], value=-100)
    array([[   1,    2,    3],
           [   4, -100, -100]])
    """
    arrays = [numeric(one, f"list {k}", "Give numbers.") for k, one in enumerate(lists)]
    for k, array in enumerate(arrays):
        if array.ndim != 1:
            raise FedShuffleError(f"list {k} has shape {array.shape}: give a list of numbers.")
    longest = max((len(array) for array in arrays), default=0)
    width = longest if length is None else count(length, "length")
    kinds = [array.dtype for array in arrays if len(array)]  # an empty list has no kind
    result = np.full((len(arrays), width), value, np.result_type(*kinds, type(value)))
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array[:width]
    return result
