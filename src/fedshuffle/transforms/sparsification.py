"""Sparsification: compressors that send some of the coordinates."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IntArray, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.transforms import wire
from fedshuffle.transforms.compressor import Compressor, Drawn, drawn_table
from fedshuffle.transforms.wire import Arrays, Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def kept(share: float, d: int) -> int:
    """The number of coordinates that a share of them is: at least one.

    >>> kept(0.01, 1000), kept(0.01, 3)
    (10, 1)
    """
    return max(1, round(share * d))


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest coordinates by absolute value, a share of all; the first of equals is sent.

    The places are sent as a list of ``ceil(log2 d)`` bits each or as one bit per coordinate,
    whichever is shorter. Bound: ``log2 (d choose k)`` bits for the places, values as they are.

    >>> import torch
    >>> TopK(0.5).compress(torch.tensor([[1.0, -4.0, 2.0, 0.5]]), [None])
    (tensor([[ 0., -4.,  2.,  0.]]), array([9]))
    """

    share: float

    def __post_init__(self) -> None:
        share = number(self.share, "the share of topk", within="(0, 1]")
        object.__setattr__(self, "share", share)

    def __str__(self) -> str:
        return f"topk:{self.share}"

    def omega(self, d: int) -> float:
        return 1 - kept(self.share, d) / d

    def compress(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, IntArray]":
        keep = _largest(rows, kept(self.share, rows.shape[1]))
        return rows.where(keep, 0), wire.sizes(len(rows), self._layout(rows.shape[1], rows.dtype))

    def encode(self, vector: "Tensor", drawn: Drawn) -> Arrays:
        d = len(vector)
        keep = _largest(vector[None], kept(self.share, d))[0]
        places = keep.nonzero()[:, 0].cpu().numpy()
        mask = keep.cpu().numpy().astype(np.uint8)
        packed = wire.pack(*((mask, 1) if self._as_mask(d) else (places, _index_bits(d))))
        return {"places": packed, "values": vector[keep].cpu().numpy()}

    def decode(self, arrays: Arrays, d: int, dtype: "torch.dtype", drawn: Drawn) -> "Tensor":
        wire.check(arrays, self._layout(d, dtype), self)
        k, packed = kept(self.share, d), arrays["places"]
        if self._as_mask(d):
            places = np.flatnonzero(wire.unpack(packed, d, 1))
        else:
            places = wire.unpack(packed, k, _index_bits(d))
        if len(places) != k or places[-1] >= d or (np.diff(places) <= 0).any():
            raise FedShuffleError(f"a message for {self} does not name {k} places below {d}.")
        return _placed(arrays["values"], places, d)

    def entropy_bits(self, arrays: Arrays, d: int) -> float:
        k = kept(self.share, d)
        ways = math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)
        return ways / math.log(2) + 8 * arrays["values"].nbytes

    def _as_mask(self, d: int) -> bool:
        return d <= kept(self.share, d) * _index_bits(d)

    def _layout(self, d: int, dtype: "torch.dtype") -> Layout:
        k = kept(self.share, d)
        bits = min(d, k * _index_bits(d))
        return {
            "places": (np.uint8, wire.packed_length(bits, 1)),
            "values": (wire.numpy_dtype(dtype), k),
        }


@dataclass(frozen=True)
class RandK(Compressor):
    """A share of the coordinates at random, times d/k. The receiver draws the same places from the
    seed, so that only values are sent.

    >>> import torch
    >>> RandK(0.5).compress(torch.tensor([[1.0, -4.0, 2.0, 0.5]]), [np.array([0, 3])])
    (tensor([[2., 0., 0., 1.]]), array([8]))
    """

    share: float
    mean = "unbiased"

    def __post_init__(self) -> None:
        share = number(self.share, "the share of randk", within="(0, 1]")
        object.__setattr__(self, "share", share)

    def __str__(self) -> str:
        return f"randk:{self.share}"

    def omega(self, d: int) -> float:
        return d / kept(self.share, d) - 1

    def draw(self, d: int, generator: np.random.Generator) -> Drawn:
        places = generator.choice(d, kept(self.share, d), replace=False, shuffle=False)
        return np.sort(places)

    def compress(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, IntArray]":
        import torch

        d = rows.shape[1]
        k = kept(self.share, d)
        places = drawn_table(drawn, len(rows), k, torch.int64).to(rows.device)
        out = torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places) * (d / k))
        return out, wire.sizes(len(rows), self._layout(d, rows.dtype))

    def encode(self, vector: "Tensor", drawn: Drawn) -> Arrays:
        return {"values": vector.cpu().numpy()[drawn]}

    def decode(self, arrays: Arrays, d: int, dtype: "torch.dtype", drawn: Drawn) -> "Tensor":
        wire.check(arrays, self._layout(d, dtype), self)
        assert drawn is not None
        return _placed(arrays["values"], drawn, d) * (d / kept(self.share, d))

    def _layout(self, d: int, dtype: "torch.dtype") -> Layout:
        return {"values": (wire.numpy_dtype(dtype), kept(self.share, d))}


def _largest(rows: "Tensor", k: int) -> "Tensor":
    """Which k coordinates of each row have the largest absolute values, the first of equals."""
    # NaN counts as largest, so that the server sees it.
    sizes = rows.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    least = sizes.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    keep = sizes >= least
    if int(keep.sum()) > k * len(rows):
        above, equal = sizes > least, sizes == least
        room = k - above.sum(dim=1, keepdim=True)
        keep = above | (equal & (equal.cumsum(dim=1) <= room))
    return keep


def _index_bits(d: int) -> int:
    return max(1, (d - 1).bit_length())


def _placed(values: NDArray[Any], places: NDArray[Any], d: int) -> "Tensor":
    import torch

    out = np.zeros(d, dtype=values.dtype)
    out[places] = values
    return torch.from_numpy(out)
