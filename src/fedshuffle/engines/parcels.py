"""Requests on their way to other machines: tensors apart from the orders, each sent only once.

What stands in the requests of all workers, such as the model at the start of the round, becomes one
object that a cluster carries to each machine once, however many workers share it there.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Flat(NamedTuple):
    """A tensor as plain bytes, since numpy does not know all of torch's numbers.

    >>> Flat.of(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)).tensor()
    tensor([[1., 2.]], dtype=torch.bfloat16)
    """

    bits: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Flat:
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(bits, tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """The tensor, on the same memory; nobody may write to it, since others may read it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self.bits).view(self.dtype).view(self.shape)


Tensors = Mapping[int, Flat]
"""Tensors by the numbers that stand for them in the orders."""


@final
class Parcel(NamedTuple):
    """What one worker is asked: its orders, and the tensors that only it needs."""

    orders: bytes
    own: Tensors

    def opened(self, shared: Tensors, device: torch.device) -> Any:
        """The requests, with all their tensors on a device."""
        flat = {**shared, **self.own}
        tensors = {number: one.tensor().to(device) for number, one in flat.items()}
        return _Unpickler(io.BytesIO(self.orders), tensors).load()


def pack(requests: Sequence[Any]) -> tuple[Tensors, list[Parcel]]:
    """The tensors that stand in the requests of all workers, and a parcel for each of them.

    >>> x, y = torch.zeros(2), torch.ones(3)
    >>> shared, (one, two) = pack([{"start": x, "v": y}, {"start": x}])
    >>> len(shared), len(one.own), len(two.own)
    (1, 1, 0)
    >>> one.opened(shared, torch.device("cpu"))
    {'start': tensor([0., 0.]), 'v': tensor([1., 1., 1.])}
    """
    found = []
    for request in requests:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(request)
        found.append((buffer.getvalue(), pickler.tensors))
    common = set.intersection(*(set(tensors) for _, tensors in found))
    everything = {number: tensor for _, tensors in found for number, tensor in tensors.items()}
    shared = {number: Flat.of(everything[number]) for number in common}
    return shared, [
        Parcel(orders, {n: Flat.of(t) for n, t in tensors.items() if n not in common})
        for orders, tensors in found
    ]


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and remembers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        self.tensors[id(thing)] = thing  # kept, so that no other can get the same number
        return id(thing)


class _Unpickler(pickle.Unpickler):
    """Puts tensors back in."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]
