"""What a message consists of on the wire: named numpy arrays of known dtypes and lengths."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    import torch

Arrays = dict[str, NDArray[Any]]
Layout = Mapping[str, tuple[DTypeLike, int]]
"""The dtype and the length of each array of a message."""


def size(layout: Layout) -> int:
    """The bytes of a message.

    >>> size({"values": (np.float32, 10), "scale": (np.float32, 1)})
    44
    """
    return sum(np.dtype(dtype).itemsize * length for dtype, length in layout.values())


def sizes(rows: int, layout: Layout) -> IntArray:
    """The bytes of each of some messages of one layout."""
    return np.full(rows, size(layout), dtype=np.int64)


def check(arrays: Arrays, layout: Layout, who: object) -> None:
    """Refuse a message whose arrays are not those of the layout: it may come from anybody."""
    found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    expected = {name: (np.dtype(dtype), (length,)) for name, (dtype, length) in layout.items()}
    if found != expected:
        raise FedShuffleError(
            f"a message for {who} has arrays {_describe(found)} instead of {_describe(expected)}:"
            " client and server must use the same channel and the same model."
        )


def _describe(arrays: Mapping[str, tuple[Any, tuple[int, ...]]]) -> str:
    shown = (f"{name} ({dtype}, {'x'.join(map(str, n))})" for name, (dtype, n) in arrays.items())
    return ", ".join(shown) or "(none)"


def numpy_dtype(dtype: "torch.dtype") -> np.dtype[Any]:
    """The numpy dtype of a model's parameters."""
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        raise FedShuffleError(
            f"a model of {dtype} cannot be compressed, since numpy has no such numbers: use"
            " float64, float32 or float16."
        ) from None


def scale_dtype(dtype: "torch.dtype") -> np.dtype[Any]:
    """The dtype of scales: a norm of float16 parameters may be too large for float16."""
    return np.promote_types(numpy_dtype(dtype), np.float32)


def packed_length(count: int, bits: int) -> int:
    """The number of bytes for a number of values of some bits each."""
    return (count * bits + 7) // 8


def pack(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Whole numbers of some bits each, without gaps.

    >>> pack(np.array([1, 2, 3], dtype=np.uint32), bits=2).tolist()  # 01, 10 and 11 from the right
    [57]
    """
    places = np.arange(bits, dtype=values.dtype)
    return np.packbits(((values[:, None] >> places) & 1).astype(np.uint8), bitorder="little")


def unpack(packed: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.int64]:
    """The numbers that :func:`pack` packed.

    >>> unpack(np.array([57], dtype=np.uint8), count=3, bits=2).tolist()
    [1, 2, 3]
    """
    table = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return table @ (1 << np.arange(bits, dtype=np.int64))


def entropy(values: NDArray[Any]) -> float:
    """The bits that the values need with the best code for their own frequencies, each value by
    itself; the code's table is not counted.

    >>> entropy(np.array([0, 0, 1, 1]))
    4.0
    """
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) + 0.0
