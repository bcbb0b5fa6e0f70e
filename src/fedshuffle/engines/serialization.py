"""What travels to workers in other processes and on other machines: the problem, then requests.

The model and the loss are pickled, with their code where no module has it, as in a notebook. Frozen
parameters and the data travel as tensors, which the workers of a machine share. All of this travels
once, when workers start. Tensors of requests travel apart from the requests, each only once. Those
that all workers need, such as the model at the start of the round, become one object that a cluster
sends to each machine once.
"""

import hashlib
import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import IO, Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from fedshuffle import fingerprint
from fedshuffle.engines.base import Engine
from fedshuffle.engines.copies import shareable
from fedshuffle.engines.gradients import check_gradient_norm, gradient_norm
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError, TrainingError, error_context
from fedshuffle.federation import Federation
from fedshuffle.kernel import Answer
from fedshuffle.transforms import Chain, Transform


class Flat(NamedTuple):
    """A tensor as plain bytes, since numpy does not know all of torch's dtypes.

    >>> Flat.of(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)).tensor()
    tensor([[1., 2.]], dtype=torch.bfloat16)
    """

    bits: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Flat":
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(bits, tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """The tensor on the same memory, which may be shared: do not write to it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self.bits).view(self.dtype).view(self.shape)


def share_memory(tensors: Sequence[Tensor]) -> IO[bytes]:
    """Put tensors into memory that processes share: a file without a name.

    >>> with share_memory([torch.tensor([1, 2]), torch.tensor([[3.0]])]) as file:
    ...     from_shared_memory(file.fileno())
    [tensor([1, 2]), tensor([[3.]])]
    """
    if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
        file: IO[bytes] = os.fdopen(os.memfd_create("fedshuffle"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115  closed by the caller
    whole = [t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for t in tensors]
    torch.save(whole, file)
    file.flush()
    return file


def from_shared_memory(handle: int) -> list[Tensor]:
    """The tensors in shared memory; nobody else sees what is written to them."""
    found: list[Tensor] = torch.load(f"/dev/fd/{handle}", mmap=True, weights_only=True)
    return found


def dump_problem(problem: Problem) -> tuple[bytes, list[Tensor]]:
    """The problem for workers, pickled without frozen parameters and data in memory; and these, as
    tensors that workers can share.
    """
    federation, fields = problem.federation, list[Tensor]()
    if federation.path is None:
        federation, fields = replace(federation, fields=()), list(problem.fields)
    precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    data, norm = (federation, _stamp(federation)), gradient_norm(problem)
    with error_context(
        lambda error: (
            f"the model or the loss cannot be sent to workers: {error}. Make them in a"
            " module, of parts that can be pickled."
        ),
        Exception,
    ):
        model = problem.replica().cpu()
        frozen = list(shareable(model).values())
        numbers = {id(parameter): number for number, parameter in enumerate(frozen)}
        content = precision, model, problem.loss, data, norm, problem.tried, len(frozen)
        buffer = io.BytesIO()
        pickler = _CodePickler(buffer, protocol=5)
        pickler.replace = lambda part: numbers.get(id(part))
        pickler.dump(content)
    return buffer.getvalue(), [*(parameter.detach() for parameter in frozen), *fields]


def load_problem(
    dumped: bytes, tensors: Sequence[Tensor], device: torch.device | str = "cpu"
) -> Problem:
    """The problem and torch's settings where it was dumped; the tensors stay where they are."""
    unpickler = _Unpickler(io.BytesIO(dumped))
    unpickler.replace = lru_cache(maxsize=None)(lambda k: nn.Parameter(tensors[k], False))
    try:
        content = unpickler.load()
        (dtype, precision), model, loss, (federation, stamp), norm, tried, frozen = content
    except (ImportError, AttributeError) as error:
        raise FedShuffleError(
            "a worker cannot import what the model or the loss needs"
            f" ({type(error).__name__}: {error}). Install the same code on every"
            " machine of the cluster, or make it importable there by PYTHONPATH."
        ) from error
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    if _stamp(federation) != stamp:
        raise FedShuffleError(
            f"the store {str(federation.path)!r} holds other data for a worker than for the run."
            " Copy it to every machine of the cluster once more."
        )
    if federation.path is None:
        federation = replace(federation, fields=tuple(tensors[frozen:]))
    problem = Problem(model.to(device), loss, federation)
    problem.tried = tried  # all workers compute in the same way
    check_gradient_norm(problem, norm)
    return problem


def _stamp(federation: Federation) -> str:
    """Tells whether another process opens the same store."""
    if federation.path is None:
        return ""
    sizes = hashlib.sha256(federation.sizes.tobytes()).hexdigest()
    return f"{fingerprint.data(federation)} {sizes}"


Tensors = Mapping[int, Flat]
"""Tensors by the numbers that stand for them in pickled requests."""


class Packed(NamedTuple):
    """The requests of one worker, and the tensors that only it needs."""

    requests: bytes
    own: Tensors

    def unpack(self, shared: Tensors, device: torch.device) -> Any:
        """The requests, with all their tensors on a device."""
        tensors = {k: flat.tensor().to(device) for k, flat in {**shared, **self.own}.items()}

        def load(number: int | bytes) -> Any:
            return unpickled(number) if isinstance(number, bytes) else tensors[number]

        def unpickled(text: bytes) -> Any:
            unpickler = _Unpickler(io.BytesIO(text))
            unpickler.replace = load
            return unpickler.load()

        return unpickled(self.requests)


def pack(requests: Sequence[Any]) -> tuple[Tensors, list[Packed]]:
    """The tensors that all workers need, and the requests of each worker.

    >>> x, y = torch.zeros(2), torch.ones(3)
    >>> shared, (one, two) = pack([{"start": x, "v": y}, {"start": x}])
    >>> len(shared), len(one.own), len(two.own)
    (1, 1, 0)
    >>> one.unpack(shared, torch.device("cpu"))
    {'start': tensor([0., 0.]), 'v': tensor([1., 1., 1.])}
    """
    pickled = [_without_tensors(request) for request in requests]
    common = set.intersection(*(set(tensors) for _, tensors in pickled))
    shared = {k: Flat.of(pickled[0][1][k]) for k in common}
    return shared, [
        Packed(text, {k: Flat.of(tensor) for k, tensor in tensors.items() if k not in common})
        for text, tensors in pickled
    ]


# From Python 3.13 on these methods cannot be set on a pickler, only defined in its class.
class _Pickler(pickle.Pickler):
    replace: Callable[[Any], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.replace(obj)


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    replace: Callable[[Any], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.replace(obj)


class _Unpickler(pickle.Unpickler):
    replace: Callable[[Any], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.replace(pid)


def _without_tensors(request: Any) -> tuple[bytes, dict[int, Tensor]]:
    """A pickled request in which numbers stand for its tensors, and these.

    Transforms and classes of optimisers may be of the user, so they are pickled with their code
    where no module has it.
    """
    tensors: dict[int, Tensor] = {}

    def number(thing: Any) -> int | bytes | None:
        if isinstance(thing, Tensor):
            tensors[id(thing)] = thing  # referenced, so that its id stays unique
            return id(thing)
        if isinstance(thing, Transform) and not isinstance(thing, Chain):
            return pickled(_CodePickler, thing, skip=thing)
        if isinstance(thing, type) and issubclass(thing, Optimizer):
            return pickled(_CodePickler, thing, skip=thing)
        return None

    def pickled(kind: Any, thing: Any, skip: Any = None) -> bytes:
        buffer = io.BytesIO()
        pickler = kind(buffer, protocol=5)
        pickler.replace = lambda part: None if part is skip else number(part)
        pickler.dump(thing)
        return buffer.getvalue()

    return pickled(_Pickler, request), tensors


def answer(engine: Engine, what: str, packed: Packed, shared: Tensors) -> tuple[bool, Any]:
    """A worker's answer to its requests: (True, tensors as bytes) or (False, the error)."""
    try:
        answers = getattr(engine, what)(packed.unpack(shared, engine.problem.device))
        return True, [_dump_answer(answer) for answer in answers]
    except Exception as error:
        return False, sendable(error)


_Dumped = tuple[list[Flat | None], Mapping[str, Any]]


def _dump_answer(answer: Answer) -> _Dumped:
    tensors = answer.sums, answer.states, answer.state_change
    return [None if one is None else Flat.of(one) for one in tensors], answer.metrics


def load_answer(dumped: _Dumped, device: torch.device | str = "cpu") -> Answer:
    """A worker's answer, with its tensors on a device."""
    flats, metrics = dumped
    sums, states, change = [None if one is None else one.tensor().to(device) for one in flats]
    assert sums is not None
    return Answer(sums, states, change, metrics)


def sendable(error: Exception, where: str = "") -> FedShuffleError:
    """An error that can be pickled, and perhaps where it happened."""
    if not isinstance(error, FedShuffleError):
        return FedShuffleError(f"{type(error).__name__} in a worker: {error}")
    if where and not isinstance(error, TrainingError):
        return FedShuffleError(f"{error} (In {where}.)")
    return error
