"""What server and clients write to each other: plain numbers, and arrays that are never unpickled.

Three requests, each with an answer. All that a client does follows from what stands in the message
and from its own data.

    query.hello    who are you?        ->  number, parameters, and the size unless it is withheld
    train          a walk              ->  the update y - x, and the steps really done
    train.probe    points              ->  the full gradient at each of them

Models are flat vectors: the trainable parameters in their order, as everywhere in this library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedshuffle.errors import FedShuffleError

PROTOCOL = 1
"""Both sides must speak the same; raise it with every change of what stands here."""

HELLO, WALK, PROBE, EVALUATE = "query.hello", "train", "train.probe", "evaluate"

_WORDS, _ARRAYS = "fedshuffle", "arrays"
"""Under which names the numbers and the arrays of a message stand."""
_FLOATS = (np.float16, np.float32, np.float64)


@final
@dataclass(frozen=True, slots=True)
class Hello:
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
    """How many examples it has; None if it does not tell."""


@final
@dataclass(frozen=True, slots=True)
class Task:
    """A walk as one client is told it, besides the arrays ``x``, ``v`` and ``scale``."""

    client: int
    round: int
    seed: str
    """As text, since it may be too large for a signed number."""
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
    size: int | None = None
    """With how many examples the steps were planned; None if sizes are withheld."""


@final
@dataclass(frozen=True, slots=True)
class Question:
    """A probe as one client is told it, besides the array ``points``, one row each; or, besides
    ``x``, an evaluation.
    """

    client: int
    round: int


@final
@dataclass(frozen=True, slots=True)
class Done:
    """What comes with an array ``update``, of a walk, or ``gradients``, of a probe."""

    client: int
    steps: int
    """The steps done; if sizes are withheld, the epochs planned: the client repaired the rest."""


_Words = TypeVar("_Words", Hello, Task, Question, Done)


def arrays(**named: Tensor | None) -> ArrayRecord:
    """Arrays by name; those that are None are left out. Messages may share what this returns."""
    given = {name: value for name, value in named.items() if value is not None}
    return ArrayRecord({name: Array(value.numpy(force=True)) for name, value in given.items()})


def content(words: Hello | Task | Question | Done, record: ArrayRecord | None = None) -> RecordDict:
    """The content of a message."""
    plain: dict[str, Any] = {"protocol": PROTOCOL}
    for field in dataclasses.fields(words):
        value = getattr(words, field.name)
        if value is not None:
            plain[field.name] = json.dumps(value) if isinstance(value, Mapping) else value
    parts = {_WORDS: ConfigRecord(plain)}
    return RecordDict(parts if record is None else parts | {_ARRAYS: record})


def read(message: Message, kind: type[_Words]) -> _Words:
    """The words of a message, if they are of this kind and of this protocol."""
    found = message.content.config_records.get(_WORDS)
    if found is None:
        raise FedShuffleError("the message has no words of fedshuffle: is it another app's?")
    plain = dict(found)
    if (protocol := plain.pop("protocol", None)) != PROTOCOL:
        raise FedShuffleError(
            f"the message is of protocol {protocol!r}, and here is {PROTOCOL}. Install the same"
            " version of fedshuffle on the server and on all clients."
        )
    given = {}
    for field in dataclasses.fields(kind):
        if field.name in plain:
            given[field.name] = _checked(plain.pop(field.name), str(field.type), field.name)
        elif field.default is dataclasses.MISSING:
            raise FedShuffleError(f"the message lacks {field.name!r}.")
    if plain:
        raise FedShuffleError(f"the message has {min(plain)!r}, which nobody reads.")
    return kind(**given)


def vectors(message: Message, dtype: torch.dtype, **shapes: Sequence[int]) -> dict[str, Tensor]:
    """The arrays of a message in this precision: only those named, finite, and of these shapes (-1
    is any number).
    """
    found = {}
    for name, array in message.content.array_records.get(_ARRAYS, {}).items():
        if name not in shapes:
            raise FedShuffleError(f"the message has an array {name!r}, which nobody reads.")
        try:
            values = array.numpy()  # of Flower: np.load without pickle
        except Exception as error:  # by bytes of others, anything can be raised
            raise FedShuffleError(f"the array {name!r} cannot be read: {error}.") from error
        if not isinstance(values, np.ndarray):
            raise FedShuffleError(f"the array {name!r} cannot be read: it is no array.")
        wanted = tuple(shapes[name])
        if values.dtype not in _FLOATS or not _fits(values.shape, wanted):
            raise FedShuffleError(
                f"the array {name!r} has shape {values.shape} and {values.dtype}, but the model"
                f" asks for {wanted} and floating point. Are the models the same?"
            )
        found[name] = torch.from_numpy(np.require(values, requirements="W")).to(dtype)
        if not found[name].isfinite().all():
            raise FedShuffleError(
                f"the array {name!r} is not finite. The step size is probably too large: lower it."
            )
    return found


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted))


def _checked(value: Any, kind: str, name: str) -> Any:
    """A word, if it is of its kind."""
    if kind.startswith("Mapping"):
        try:
            plain = json.loads(value).items()
            read: Any = str if kind == "Mapping[str, str]" else lambda shape: list(map(int, shape))
            return {key: read(entry) for key, entry in plain}
        except Exception as error:  # as above
            raise FedShuffleError(f"{name} cannot be read: {error}.") from error
    wanted: Any = {"int": int, "int | None": int, "float": (int, float), "str": str}[kind]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise FedShuffleError(f"{name} is {value!r:.40}, but must be of kind {kind}.")
    if isinstance(value, int) and kind != "float" and not 0 <= value < 2**63:
        raise FedShuffleError(f"{name} is {value}, which is out of range.")
    return float(value) if kind == "float" else value
