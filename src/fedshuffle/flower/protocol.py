"""The messages between server and clients: fields as JSON, and arrays that are never unpickled.

What a client does depends on the message and its own data alone.

    query.info           who are you?     ->  number, parameters, and the size unless withheld
    train                local training   ->  the message for the update y - x, and the steps done
    train.full_gradient  points           ->  the full gradient at each of them
    evaluate             a model          ->  its metrics

Models are flat vectors: the trainable parameters in their order, as everywhere in this library.
Arrays are in records of a message: ``arrays`` of the model's shape, ``shared``, the server state of
the chain of transforms, and ``message``, what its channel encodes.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle.errors import FedShuffleError, error_context, one_line

PROTOCOL = 5
"""Both sides must use the same version; raise it with every change of this file."""

INFO, TRAIN, FULL_GRADIENT = "query.info", "train", "train.full_gradient"
EVALUATE = "evaluate"

_FIELDS, _ARRAYS = "fedshuffle", "arrays"  # the names of records of a message
SHARED, MESSAGE = "shared", "message"
_FLOATS = (np.float16, np.float32, np.float64)


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """How a client introduces itself."""

    client: int
    """Its number among all clients, from 0 on."""
    parameters: Mapping[str, Sequence[int]]
    """Names and shapes of what it trains, in order."""
    dtype: str
    frozen: Mapping[str, str]
    """Digests of the rest of its model: all that it does not train, by name."""
    tied: Mapping[str, str]
    """Further names of what it trains, and the first."""
    size: int | None = None
    """Its number of examples; None if withheld."""
    secure_aggregation: bool = False
    """Whether it sends updates only with secure aggregation."""


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Local training for one client; comes with the arrays ``x``, ``v`` and ``scale``."""

    client: int
    round: int
    seed: str
    """As text: it may exceed the range of the other integers."""
    steps: int
    """The steps planned; if sizes are withheld, the epochs."""
    batch_size: int
    order: str
    step_size: float
    """Of a step; if sizes are withheld, of an epoch, to be divided among its steps."""
    alpha: float
    beta: float
    mu: float
    clip: float
    weight_decay: float
    optimiser: str
    """The local optimiser, as a config writes it."""
    own_gradient: bool
    """Whether the client subtracts its full gradient at x in every step."""
    send_gradient: bool
    """Whether the reply has the full gradient at x as well."""
    weight: float
    """The client's aggregation weight."""
    chain: Sequence[str]
    """The transforms of the update, as :mod:`fedshuffle.flower.chain` writes them."""
    state_after: int | None = None
    """After how many rounds the state of the chain is that of the last reply that the server got
    from this client, 0 before the first; None if clients keep no state."""
    size: int | None = None
    """The number of examples for which the steps were planned; None if sizes are withheld."""
    clipping_range: float | None = None
    """With secure aggregation, the largest coordinate of the weighted update."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request for full gradients, with the array ``points``, or for an evaluation, with ``x``."""

    client: int
    round: int
    seed: str = "0"
    """Of the examples' transform; a text, as it may not fit into a number of 64 bits with a sign.
    """


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply, with the array ``update`` or ``gradients``, or an encoded message."""

    client: int
    steps: int
    """The steps done. If sizes are withheld, the epochs planned: the client has already rescaled
    its update.
    """
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


_Fields = TypeVar("_Fields", ClientInfo, TrainRequest, Query, Reply)


def arrays(**named: Tensor | None) -> ArrayRecord:
    """Arrays by name, without those that are None. Messages may share the result."""
    given = {name: value for name, value in named.items() if value is not None}
    return raw_arrays({name: value.numpy(force=True) for name, value in given.items()})


def raw_arrays(named: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Arrays of any kind by name."""
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in named.items()})


def content(
    fields: _Fields, record: ArrayRecord | None = None, **others: ArrayRecord
) -> RecordDict:
    """The content of a message."""
    payload = json.dumps(dataclasses.asdict(fields))
    records = {_FIELDS: ConfigRecord({"protocol": PROTOCOL, "payload": payload})}
    named = {_ARRAYS: record, **others}
    return RecordDict(records | {name: arrays for name, arrays in named.items() if arrays})


def join(fields: Mapping[str, Any], arrays: Mapping[tuple[str, str], Array]) -> RecordDict:
    """The content of a message from what :func:`split` gives."""
    records = {record: ArrayRecord() for record, _ in arrays}
    for (record, name), array in arrays.items():
        records[record][name] = array
    return RecordDict({_FIELDS: ConfigRecord(dict(fields)), **records})


def split(content: RecordDict) -> tuple[dict[str, Any], dict[tuple[str, str], Array]]:
    """The encoded fields of a message, and its arrays by record and name."""
    arrays = {
        (record, name): array
        for record, named in content.array_records.items()
        for name, array in named.items()
    }
    return dict(content.config_records[_FIELDS]), arrays


def nbytes(content: RecordDict) -> int:
    """The size of the arrays of a message."""
    arrays = split(content)[1].values()
    with error_context("the size of an array cannot be read", TypeError):
        return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def read(message: Message, kind: type[_Fields]) -> _Fields:
    """The fields of a message, if they are valid and of this protocol; or the error of its node."""
    if message.has_error():
        raise FedShuffleError(error_of(message))
    record = message.content.config_records.get(_FIELDS)
    if record is None:
        raise FedShuffleError(
            "this is not a message of fedshuffle's exact option: client_app needs"
            " FedShuffleStrategy, and ConsistentFedAvg a train function of your own."
        )
    return parse(record, kind)


def parse(record: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    """Encoded fields, if they are valid and of this protocol."""
    if (protocol := record.get("protocol")) != PROTOCOL:
        raise FedShuffleError(
            f"the message is of protocol {protocol!r}, and here is {PROTOCOL}. Install the same"
            " version of fedshuffle on the server and on all clients."
        )
    with error_context(lambda error: f"the message is not valid: {one_line(error)}.", Exception):
        fields = kind(**json.loads(record["payload"]))
        for field in dataclasses.fields(kind):
            value = getattr(fields, field.name)
            if not _VALID[field.type](value):
                name = getattr(field.type, "__name__", field.type)
                raise ValueError(f"{field.name} is {value!r:.40}, which is no {name}")
    return fields


def error_of(message: Message) -> str:
    """The error that a node sent instead of a reply."""
    return f"{reason_of(message)} (Flower's error {message.error.code})"


def reason_of(message: Message) -> str:
    """Why a node sent an error, in one line; of a traceback the exception."""
    lines = ((message.error.reason or "").strip() or "no reason given").split("\n")
    begin = max(k for k, line in enumerate(lines) if line[:1].strip())
    return " ".join(" ".join(lines[begin:]).split())[:300]


def is_foreign(reply: Message) -> bool:
    """Whether a reply shows that the node runs a client app that is not ours."""
    if reply.has_error():  # Flower's own, where an app has no function for a message
        return "function registered with name" in (reply.error.reason or "")
    return _FIELDS not in reply.content.config_records


def vectors(message: Message, dtype: torch.dtype, **shapes: Sequence[int]) -> dict[str, Tensor]:
    """The arrays of a message in this precision: those named, of which the first is required, all
    finite and of these shapes (-1 is any number).
    """
    found = {}
    for name, array in message.content.array_records.get(_ARRAYS, {}).items():
        if name not in shapes:
            raise FedShuffleError(f"the message has an array {name!r}, which is not expected.")
        with error_context(lambda error: f"the array {name!r} cannot be read: {error}.", Exception):  # noqa: B023
            values = read_array(array)
        wanted = tuple(shapes[name])
        fits = len(values.shape) == len(wanted) and all(
            w in (-1, s) for s, w in zip(values.shape, wanted)
        )
        if values.dtype not in _FLOATS or not fits:
            raise FedShuffleError(
                f"the array {name!r} has shape {values.shape} and {values.dtype}, but the model"
                f" asks for {wanted} and floating point. Are the models the same?"
            )
        found[name] = torch.from_numpy(values).to(dtype)
        if not found[name].isfinite().all():
            raise FedShuffleError(
                f"the array {name!r} is not finite. The step size is probably too large: lower it."
            )
    if (required := next(iter(shapes))) not in found:
        raise FedShuffleError(f"the message lacks the array {required!r}.")
    return found


def raw(message: Message, record: str) -> dict[str, NDArray[Any]]:
    """The arrays of a record of a message as they are, for a reader that checks them."""
    named = message.content.array_records.get(record, {})
    with error_context(lambda error: f"the {record} cannot be read: {error}.", Exception):
        return {name: read_array(array) for name, array in named.items()}


def read_array(array: Array) -> NDArray[Any]:
    """What an array holds, if that has the type and the shape by which its size is counted."""
    values: NDArray[Any] = np.require(array.numpy(), requirements="W")  # of Flower: without pickle
    said, found = (array.dtype, tuple(array.shape)), (str(values.dtype), values.shape)
    if said != found:
        raise ValueError(f"it is said to be {said}, and is {found}")
    return values


def withheld(client: int) -> FedShuffleError:
    """The error for a client whose size is needed."""
    return FedShuffleError(
        f"client {client} withholds its size. Let it share it (share_size=True), or give the"
        ' strategy sizes="withheld".'
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_mapping(value: object, valid: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(valid, value.values()))


_VALID: dict[Any, Callable[[object], bool]] = {
    int: _is_count,
    int | None: lambda value: value is None or _is_count(value),
    float: lambda value: isinstance(value, float),
    float | None: lambda value: value is None or isinstance(value, float),
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    Sequence[str]: lambda value: (
        isinstance(value, list) and all(isinstance(text, str) for text in value)
    ),
    Mapping[str, float]: lambda value: _is_mapping(value, lambda n: isinstance(n, float)),
    Mapping[str, str]: lambda value: _is_mapping(value, lambda text: isinstance(text, str)),
    Mapping[str, Sequence[int]]: lambda value: _is_mapping(
        value, lambda shape: isinstance(shape, list) and all(map(_is_count, shape))
    ),
}
"""Whether a value is of a type."""
