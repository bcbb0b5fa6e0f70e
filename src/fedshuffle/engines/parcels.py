"""What travels to workers in other processes and on other machines: the problem, then requests.

The model and the loss are pickled, with their code where no module has it, as in a notebook. Data
on disk are opened by every worker, data in memory are shared by all on a machine.

In requests, tensors travel apart from the orders, each only once: what stands in the requests of
all workers, such as the model at the start of the round, becomes one object that a cluster carries
to each machine once, however many workers share it there.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle import _identity
from fedshuffle.engines.agreement import check_digest, digest
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation

_ALIGNED = 64
"""Tensors in shared memory begin at multiples of so many bytes."""


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


Places = list[tuple[int, torch.dtype, tuple[int, ...]]]
"""Where tensors lie in shared memory, their dtypes and shapes."""


@final
class Shared:
    """Tensors in memory that processes share: a file without a name, gone with its last reader.

    >>> shared = Shared([torch.tensor([1, 2]), torch.tensor([[3.0]])])
    >>> opened(shared.file.fileno(), shared.places)
    [tensor([1, 2]), tensor([[3.]])]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.file = (
            os.fdopen(os.memfd_create("fedshuffle"), "w+b")
            if hasattr(os, "memfd_create")
            else tempfile.TemporaryFile()  # noqa: SIM115  closed with this
        )
        weakref.finalize(self, self.file.close)
        self.places: Places = []
        for tensor in tensors:
            flat = Flat.of(tensor)
            self.places.append((self.file.tell(), flat.dtype, flat.shape))
            self.file.write(flat.bits.data)
            self.file.write(bytes(_ALIGNED - flat.bits.nbytes % _ALIGNED))
        self.file.flush()


def opened(handle: int, places: Places) -> list[Tensor]:
    """The tensors that lie in shared memory; nobody else sees what is written to them."""
    memory = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
    found = []
    for begin, dtype, shape in places:
        size = dtype.itemsize * int(np.prod(shape))
        found.append(Flat(np.frombuffer(memory, np.uint8, size, begin), dtype, shape).tensor())
    return found


def sent(problem: Problem) -> bytes:
    """The problem for workers, but for data in memory: they follow as tensors."""
    federation = problem.federation
    stored = federation.path is not None
    settings = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    data = (federation, _stamp(federation)) if stored else (replace(federation, fields=()), "")
    checks = digest(problem), problem.tried
    try:
        task: bytes = cloudpickle.dumps(
            (settings, problem.replica().cpu(), problem.loss, data, checks)
        )
    except Exception as error:
        raise FedShuffleError(
            f"the model or the loss cannot be sent to workers: {error}. Make them in a module, of"
            " parts that can be pickled."
        ) from error
    return task


def received(task: bytes, fields: Sequence[Tensor], device: torch.device | str = "cpu") -> Problem:
    """The problem that was sent, and torch's settings as they were there; the fields are the data
    unless they lie on disk.
    """
    try:
        (dtype, precision), model, loss, (federation, stamp), checks = pickle.loads(task)
    except (ImportError, AttributeError) as error:
        missing = getattr(error, "name", None)
        what = repr(missing) if isinstance(error, ImportError) and missing else "a module"
        raise FedShuffleError(
            f"a worker cannot import {what}, which the model or the loss is of"
            f" ({type(error).__name__}: {error}). Install the same code on every machine of the"
            " cluster, or put it where PYTHONPATH leads there."
        ) from error
    except pickle.UnpicklingError as error:
        raise FedShuffleError(f"the model or the loss cannot be read: {error}.") from error
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    if federation.path is None:
        federation = replace(federation, fields=tuple(fields))
    elif _stamp(federation) != stamp:
        raise FedShuffleError(
            f"the store {str(federation.path)!r} holds other data for a worker than for the run."
            " Copy it to every machine of the cluster once more."
        )
    problem = Problem(model.to(device), loss, federation)
    wanted, problem.tried = checks  # all workers go the same way, which was said already
    check_digest(problem, wanted)
    return problem


def _stamp(federation: Federation) -> str:
    """By what a store is known to be the same for another process."""
    sizes = hashlib.sha256(federation.sizes.tobytes()).hexdigest()
    return f"{_identity.data(federation)} {sizes}"


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
