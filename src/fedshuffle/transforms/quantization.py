"""Quantization: compressors that send every coordinate in a few bits."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IntArray, count
from fedshuffle.errors import FedShuffleError
from fedshuffle.transforms import wire
from fedshuffle.transforms.compressor import Compressor, Drawn, drawn_table
from fedshuffle.transforms.wire import Arrays, Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class QSGD(Compressor):
    r"""Random rounding to levels (Alistarh et al. 2017): some bits per coordinate, sign included.

    With :math:`s = 2^{bits - 1} - 1`, coordinate j becomes :math:`|u| \, sign(u_j) \, l_j / s`,
    where :math:`l_j` is :math:`s |u_j| / |u|` rounded up with the probability of its fraction, and
    down otherwise. Signed levels are sent in ``bits`` bits each, with the norm. Bound: the
    empirical entropy of the signed levels.

    >>> import torch
    >>> QSGD(3).compress(torch.tensor([[3.0, -4.0]]), [np.array([0.9, 0.1])])  # s = 3, norm 5
    (tensor([[ 1.6667, -5.0000]]), array([5]))
    """

    bits: int
    mean = "unbiased"

    def __post_init__(self) -> None:
        count(self.bits, "the number of bits of qsgd", least=2, most=16)

    def __str__(self) -> str:
        return f"qsgd:{self.bits}"

    @property
    def levels(self) -> int:
        """The largest level, s."""
        return int(2 ** (self.bits - 1) - 1)

    def omega(self, d: int) -> float:
        return min(d / (4 * self.levels**2), math.sqrt(d) / self.levels)

    def draw(self, d: int, generator: np.random.Generator) -> Drawn:
        return generator.random(d)

    def compress(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, IntArray]":
        norms, levels = self._round(rows, drawn)
        out = (levels * (norms / self.levels)).to(rows.dtype)
        return out, wire.sizes(len(rows), self._layout(rows.shape[1], rows.dtype))

    def encode(self, vector: "Tensor", drawn: Drawn) -> Arrays:
        norms, levels = self._round(vector[None], [drawn])
        # A NaN is in the norm as well, which is enough for the receiver to see it.
        offset = levels[0].nan_to_num(nan=0.0).cpu().numpy() + self.levels
        return {
            "norm": norms[0].cpu().numpy(),
            "levels": wire.pack(offset.astype(np.uint32), self.bits),
        }

    def decode(self, arrays: Arrays, d: int, dtype: "torch.dtype", drawn: Drawn) -> "Tensor":
        import torch

        wire.check(arrays, self._layout(d, dtype), self)
        levels = self._unpacked(arrays, d)
        if levels.max() > self.levels:
            raise FedShuffleError(f"a message for {self} has a level above {self.levels}.")
        norm = torch.from_numpy(arrays["norm"])
        return (torch.from_numpy(levels).to(norm.dtype) * (norm / self.levels)).to(dtype)

    def entropy_bits(self, arrays: Arrays, d: int) -> float:
        return wire.entropy(self._unpacked(arrays, d)) + 8 * arrays["norm"].nbytes

    def _round(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, Tensor]":
        """The norm of each row, and its signed levels."""
        import torch

        norms = _per_row(rows, torch.linalg.vector_norm)
        sizes = rows.abs().to(norms.dtype) / norms.where(norms > 0, 1)
        sizes = (sizes * self.levels).clamp_max_(self.levels)  # rounding may exceed it
        levels = sizes.floor()
        thresholds = drawn_table(drawn, len(rows), rows.shape[1], torch.float64).to(rows.device)
        levels += thresholds < sizes - levels
        return norms, levels.copysign_(rows).add_(0.0)  # on the wire there is no -0

    def _unpacked(self, arrays: Arrays, d: int) -> NDArray[np.int64]:
        return wire.unpack(arrays["levels"], d, self.bits) - self.levels

    def _layout(self, d: int, dtype: "torch.dtype") -> Layout:
        levels = np.uint8, wire.packed_length(d, self.bits)
        return {"norm": (wire.scale_dtype(dtype), 1), "levels": levels}


@dataclass(frozen=True)
class Sign(Compressor):
    """The sign of each coordinate, times the mean of their absolute values; zero is positive.

    The error is exactly ``|u|^2 - |u|_1^2 / d``. Bound: the empirical entropy of the signs.

    >>> import torch
    >>> Sign().compress(torch.tensor([[3.0, -1.0]]), [None])
    (tensor([[ 2., -2.]]), array([5]))
    """

    def __str__(self) -> str:
        return "sign"

    def omega(self, d: int) -> float:
        return 1 - 1 / d

    def compress(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, IntArray]":
        scales = _mean_sizes(rows).to(rows.dtype)
        out = scales.where(rows >= 0, -scales)
        return out, wire.sizes(len(rows), self._layout(rows.shape[1], rows.dtype))

    def encode(self, vector: "Tensor", drawn: Drawn) -> Arrays:
        positive = (vector >= 0).cpu().numpy()
        scale = _mean_sizes(vector[None])[0].cpu().numpy()
        return {"scale": scale, "signs": np.packbits(positive, bitorder="little")}

    def decode(self, arrays: Arrays, d: int, dtype: "torch.dtype", drawn: Drawn) -> "Tensor":
        import torch

        wire.check(arrays, self._layout(d, dtype), self)
        scale = torch.from_numpy(arrays["scale"]).to(dtype)
        positive = np.unpackbits(arrays["signs"], count=d, bitorder="little").astype(bool)
        return scale.where(torch.from_numpy(positive), -scale)

    def entropy_bits(self, arrays: Arrays, d: int) -> float:
        signs = np.unpackbits(arrays["signs"], count=d, bitorder="little")
        return wire.entropy(signs) + 8 * arrays["scale"].nbytes

    def _layout(self, d: int, dtype: "torch.dtype") -> Layout:
        return {
            "scale": (wire.scale_dtype(dtype), 1),
            "signs": (np.uint8, wire.packed_length(d, 1)),
        }


@dataclass(frozen=True)
class Float16(Compressor):
    """Half precision, rounded to nearest. A vector whose norm is not in [2^-4, 2^15) is multiplied
    by a power of two before: small updates do not underflow, and large ones do not overflow. The
    power is from 2^-100 to 2^100, so the bound of the error holds for norms from 2^-90 to 2^110.

    >>> import torch
    >>> Float16().compress(torch.tensor([[1e-9, 1e-6]]), [None])
    (tensor([[1.0004e-09, 1.0002e-06]]), array([5]))
    """

    any_layout = True

    def __str__(self) -> str:
        return "float16"

    def omega(self, d: int) -> float:
        return float(2.0**-22 + d * 2.0**-42)

    def compress(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, IntArray]":
        exponents, half = self._round(rows)
        sizes = wire.sizes(len(rows), self._layout(rows.shape[1], rows.dtype))
        back = _powers(exponents, rows)
        return half.to(back.dtype).mul_(back).to(rows.dtype), sizes

    def compress_in_place(self, rows: "Tensor", norms: "Tensor") -> IntArray | None:
        import torch

        if not _fits(norms).all():
            return None
        rows.copy_(rows.to(torch.float16))
        return np.full(len(rows), 2 * rows.shape[1] + 1)  # half-precision numbers, and an exponent

    def encode(self, vector: "Tensor", drawn: Drawn) -> Arrays:
        exponents, half = self._round(vector[None])
        return {"exponent": exponents, "values": half[0].cpu().numpy()}

    def decode(self, arrays: Arrays, d: int, dtype: "torch.dtype", drawn: Drawn) -> "Tensor":
        import torch

        wire.check(arrays, self._layout(d, dtype), self)
        half = torch.from_numpy(arrays["values"])
        back = _powers(arrays["exponent"], torch.empty(0, dtype=dtype))[0]
        return half.to(back.dtype).mul_(back).to(dtype)

    def _round(self, rows: "Tensor") -> "tuple[NDArray[np.int8], Tensor]":
        """The exponent of each row, and its numbers in half precision, divided by that power."""
        import torch

        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        fits = _fits(torch.linalg.vector_norm(rows, dim=1, dtype=wide))
        largest = rows.abs().amax(dim=1).cpu().numpy()
        exponents = np.frexp(largest)[1] - 15  # of infinity and NaN any will do
        exponents = np.where(fits, 0, np.clip(exponents, -100, 100)).astype(np.int8)
        return exponents, (rows * _powers(-exponents, rows)).to(torch.float16)

    def _layout(self, d: int, dtype: "torch.dtype") -> Layout:
        return {"exponent": (np.int8, 1), "values": (np.float16, d)}


def _fits(norms: "Tensor") -> NDArray[np.bool_]:
    """Whether vectors of these norms need no exponent in half precision."""
    sizes = norms.cpu().numpy()
    return (sizes >= 2.0**-4) & (sizes < 2.0**15)


def _per_row(rows: "Tensor", reduce: Any) -> "Tensor":
    """A number for each row, as a column: one by one, since a sum over a table may round otherwise
    than the same sum over one of its rows.
    """
    import torch

    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    numbers = [reduce(row.contiguous(), dtype=torch.float64) for row in rows]
    return torch.stack(numbers)[:, None].to(dtype) if numbers else rows.new_zeros(0, 1, dtype=dtype)


def _mean_sizes(rows: "Tensor") -> "Tensor":
    import torch

    return _per_row(rows.abs(), torch.mean)


def _powers(exponents: NDArray[Any], like: "Tensor") -> "Tensor":
    """Powers of two as a column, in the dtype of scales for such a tensor."""
    import torch

    one = wire.scale_dtype(like.dtype).type(1)
    return torch.from_numpy(np.ldexp(one, exponents)[:, None]).to(like.device)
