"""The chain of transforms between real clients and the server.

Clients are sent the transforms as text, such as ``topk:0.01+ef`` or ``Halve {}``, and make them
from a list of known classes; no object travels. A client runs the chain up to the channel and sends
the channel's arrays. The server decodes them, and runs what follows the channel, such as the
clipping of differential privacy. Without a channel the client runs the whole chain.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle.engines.base import OneWorker
from fedshuffle.errors import FedShuffleError, check_known, error_context
from fedshuffle.kernel import ClientTask, LocalTraining
from fedshuffle.privacy import AdaptiveClip, Clip, GaussianNoise, TreeNoise
from fedshuffle.transforms import NO_TRANSFORMS, Chain, Channel, ClientContext, Message, Transform
from fedshuffle.transforms import channel as channel_of

_Class = TypeVar("_Class", bound=type[Transform])
_KNOWN: dict[str, type[Transform]] = {}


def register(transform: _Class) -> _Class:
    """Let clients run a transform of your own: a dataclass with plain fields. Import its module on
    the server and in the client app.

    >>> @register
    ... @dataclass(frozen=True)
    ... class Halve(Transform):
    ...     def client(self, updates, state, context):
    ...         return Message(updates / 2)
    >>> to_text(Halve())
    'Halve {}'
    >>> from_text("Halve {}")
    Halve()
    """
    if not dataclasses.is_dataclass(transform):
        raise FedShuffleError(f"{transform.__name__} is not a dataclass, so it has no text form.")
    _KNOWN[transform.__name__] = transform
    return transform


def to_text(transform: Transform) -> str:
    """The text from which a client makes a transform.

    >>> to_text(channel_of("topk:0.01+ef"))
    'topk:0.01+ef'
    """
    name, remedy = type(transform).__name__, "Use fedshuffle.flower.chain.register on its class."
    if isinstance(transform, Channel):
        text = str(transform)
    elif transform.needs_average:
        raise FedShuffleError(
            f"{name} corrects the model at the server, which works in simulations only. Train LoRA"
            " adapters by ffa(model), whose averages are exact as they are."
        )
    elif name not in _KNOWN:
        raise FedShuffleError(f"clients do not know the transform {transform!r:.60}. {remedy}")
    else:
        with error_context(f"{name} cannot be sent to clients", (TypeError, ValueError)):
            text = f"{name} {json.dumps(_fields(transform))}"
    if from_text(text) != transform:
        raise FedShuffleError(f"{transform!r:.60} is not equal to what its text {text!r} makes.")
    return text


def from_text(text: str) -> Transform:
    """The transform of a text."""
    name, _, fields = text.partition(" ")
    if not fields:
        found = channel_of(text)
        if found is None:
            raise FedShuffleError(f"{text!r} is no transform.")
        return found
    check_known("transform", name, _KNOWN)
    with error_context(f"the transform {text!r:.60}", (TypeError, ValueError)):
        return _KNOWN[name](**json.loads(fields))


def _fields(transform: Any) -> dict[str, Any]:
    return {field.name: getattr(transform, field.name) for field in dataclasses.fields(transform)}


for _ours in (Clip, AdaptiveClip, GaussianNoise, TreeNoise):
    register(_ours)


@dataclass(frozen=True)
class Sent:
    """What a client sends."""

    values: Tensor
    """The update after the transforms before the channel."""
    state: Tensor | None
    """What the client keeps."""
    metrics: dict[str, float]
    encoded: dict[str, NDArray[Any]] | None = None
    """The channel's arrays, which are sent instead of the values."""


@final
@dataclass(frozen=True)
class WireChain:
    """A chain, divided at its channel."""

    chain: Chain = NO_TRANSFORMS

    def __post_init__(self) -> None:
        if len(channels := [one for one in self.chain.transforms if isinstance(one, Channel)]) > 1:
            raise FedShuffleError(
                f"{channels[0]} and {channels[1]} are both channels, and an update is sent once."
                " Leave one of them out."
            )
        if any(one.keeps_state for one in self._after.transforms):
            raise FedShuffleError(
                f"after {self.channel} the chain runs at the server, where no client keeps state."
                " Put transforms with state before the channel."
            )

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> "WireChain":
        """The chain that a client is sent."""
        return cls(Chain(tuple(map(from_text, texts))))

    @property
    def texts(self) -> list[str]:
        """What clients are sent; transforms after a channel are not their concern."""
        mine = self.chain.transforms[: self._place + 1]
        return [to_text(one) for one in mine]

    @cached_property
    def _place(self) -> int:
        """The channel's place in the chain; its length if there is none."""
        found = [k for k, one in enumerate(self.chain.transforms) if isinstance(one, Channel)]
        return found[0] if found else len(self.chain.transforms)

    @property
    def channel(self) -> Channel | None:
        """What encodes the message, if anything does."""
        found = self.chain.transforms[self._place : self._place + 1]
        return found[0] if found and isinstance(found[0], Channel) else None

    @property
    def _before(self) -> Chain:
        return Chain(self.chain.transforms[: self._place])

    @property
    def _after(self) -> Chain:
        return Chain(self.chain.transforms[self._place + 1 :])

    @property
    def shares_memory(self) -> bool:
        """Whether the server keeps the clients' states too."""
        return self.channel is not None and self.channel.shared_memory

    def run(
        self,
        engine: OneWorker,
        x: Tensor,
        task: ClientTask,
        shared: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> "Sent":
        """At the client: train, and pass the update through the chain up to its channel."""
        first, before = self._before, NO_TRANSFORMS
        if first:
            before = Chain((_First(first, self.chain.any_layout),))
        request = LocalTraining(
            x,
            [task],
            len(task.weights),
            before,
            {f"0.{name}": value for name, value in shared.items()},
            state[None] if state is not None and before.keeps_state else None,
        )
        answer = engine.local_training([request])[0]
        values, metrics = answer.sums[-1], {k: float(v[0]) for k, v in answer.metrics.items()}
        if self.channel is None:
            after = None if answer.states is None else answer.states[0]
            return Sent(values, after, metrics)
        own = state if self.channel.keeps_state else None
        context = replace(context_of(task, shared), part=self._place)
        encoded, after = self.channel.encode(values, own, context)
        if own is None and answer.states is not None:
            after = answer.states[0]
        return Sent(values, after, metrics, encoded)

    def metrics(self, context: ClientContext, like: Tensor) -> set[str]:
        """At the server: the names of the metrics that the chain gives at a client."""
        some = torch.ones_like(like)[None]
        state = torch.zeros_like(some) if self._before.keeps_state else None
        context = replace(context, full_gradients=lambda: some.clone())
        return {*self._before.client(some.clone(), state, context).metrics}

    def decode(
        self,
        arrays: Mapping[str, NDArray[Any]],
        like: Tensor,
        state: Tensor | None,
        context: ClientContext,
    ) -> tuple[Tensor, Tensor | None, Mapping[str, Any]]:
        """At the server: the message, the client's next state if it is shared, and metrics of the
        transforms after the channel.
        """
        assert self.channel is not None
        here = replace(context, part=self._place)
        values, kept = self.channel.decode(dict(arrays), like, state, here)
        begin = self._place + 1
        here = replace(context, part=begin, shared=_from_place(context.shared, begin))
        message = self._after.client(values[None], None, here)
        return message.values[0], kept, message.metrics


@final
@dataclass(frozen=True)
class _First(Transform):
    """The first transforms of a chain, in the layout in which the whole chain would run."""

    chain: Chain
    any_layout: bool

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]
        return self.chain.keeps_state

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return self.chain.client(updates, state, context)


def _from_place(state: Mapping[str, Tensor], begin: int) -> dict[str, Tensor]:
    """The server state of a chain from this place on, which becomes 0."""
    pairs = ((name.partition("."), value) for name, value in state.items())
    return {f"{int(k) - begin}.{rest}": v for (k, _, rest), v in pairs if int(k) >= begin}


def context_of(task: ClientTask, shared: Mapping[str, Tensor]) -> ClientContext:
    """What transforms know of a task's client."""
    stream = task.minibatches
    client = stream.client if stream.stream_id is None else stream.stream_id
    return ClientContext(
        stream.seed,
        stream.round,
        np.array([client]),
        np.array([stream.steps]),
        np.array([task.step_size]),
        np.array([task.weights[0]]),
        shared,
    )
