r"""Compressors: a vector in fewer bytes.

A compressor :math:`Q` has a relative error :math:`\omega`, for every vector :math:`u`:

.. math:: E |Q(u) - u|^2 \le \omega |u|^2 .

An *unbiased* one has :math:`E Q(u) = u`, and :math:`\omega` may exceed 1: then
:math:`Q / (1 + \omega)` is closer to u than zero is. A *biased* one has :math:`\omega < 1` by
itself. Error feedback and EF21 need such a contraction, hence :meth:`Compressor.damping`.

===========  ====================================================  ========  =====================
name         what is sent                                          mean      omega
===========  ====================================================  ========  =====================
``topk:p``   the k = max(1, round(p d)) largest, and their places  biased    1 - k/d
``randk:p``  k random ones; places follow from the seed            unbiased  d/k - 1
``qsgd:b``   levels of b bits, and the norm                        unbiased  min(d/4s^2, sqrt(d)/s)
``sign``     signs, and the mean size                              biased    1 - 1/d
``float16``  half-precision numbers, and an exponent               biased    2^-22 + d 2^-42
===========  ====================================================  ========  =====================

All randomness of a message is one array that :meth:`Compressor.draw` makes; the rest is a function
of the vector and this array.
"""

import abc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IntArray
from fedshuffle.transforms.wire import Arrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Drawn = NDArray[Any] | None


class Compressor(abc.ABC):
    """A vector in fewer bytes. ``str`` gives the text that names it in a channel."""

    mean: Literal["unbiased", "biased"] = "biased"
    any_layout: bool = False
    """Whether the result does not depend on the order of the coordinates."""

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def encode(self, vector: "Tensor", drawn: Drawn) -> Arrays:
        """The arrays that are sent."""

    @abc.abstractmethod
    def decode(self, arrays: Arrays, d: int, dtype: "torch.dtype", drawn: Drawn) -> "Tensor":
        """The vector as the receiver knows it, on the CPU; ``drawn`` is the sender's."""

    @abc.abstractmethod
    def omega(self, d: int) -> float:
        """The relative error for vectors of length d: ``E |Q(u) - u|^2 <= omega |u|^2``."""

    def draw(self, d: int, generator: np.random.Generator) -> Drawn:
        """The random part of a message; None if there is none."""
        return None

    def compress(self, rows: "Tensor", drawn: Iterable[Drawn]) -> "tuple[Tensor, IntArray]":
        """What the receiver decodes for each row, and the bytes sent: bit for bit and byte for byte
        what :meth:`encode` and :meth:`decode` give, which a subclass may compute faster.
        """
        out, sizes = rows.new_empty(rows.shape), np.zeros(len(rows), dtype=np.int64)
        for i, own in zip(range(len(rows)), drawn, strict=False):
            arrays = self.encode(rows[i], own)
            out[i] = self.decode(arrays, rows.shape[1], rows.dtype, own)
            sizes[i] = sum(array.nbytes for array in arrays.values())
        return out, sizes

    def compress_in_place(self, rows: "Tensor", norms: "Tensor") -> IntArray | None:
        """Put what the receiver decodes in the place of the rows, whose norms are known, and return
        the bytes; None, and nothing done, if there is no such way.
        """
        return None

    def damping(self, d: int) -> float:
        """The factor that makes it a contraction: ``1 / (1 + omega)`` if unbiased, 1 otherwise."""
        return 1 / (1 + self.omega(d)) if self.mean == "unbiased" else 1.0

    def entropy_bits(self, arrays: Arrays, d: int) -> float:
        """A bound for the bits of a message with an ideal entropy code, for comparison with the
        literature. No such code is used: what is sent are the bytes of the arrays.
        """
        return 8.0 * sum(array.nbytes for array in arrays.values())


def drawn_table(drawn: Iterable[Drawn], rows: int, columns: int, dtype: "torch.dtype") -> "Tensor":
    """What was drawn for each row, as one table."""
    import torch

    table = torch.empty(rows, columns, dtype=dtype)
    for row, own in zip(table.numpy(), drawn, strict=False):
        row[:] = own
    return table
