r"""Compressed updates, with or without memory.

With an update :math:`u`, a compressor :math:`Q` and a vector :math:`h` that the client keeps, zero
at first, the client sends one compressed message, from which the server decodes :math:`m`:

===========  =============  ===================  ==================  ==============
channel      is compressed  server decodes m     then h becomes      mean of m
===========  =============  ===================  ==================  ==============
``Q``        u              Q(u)                 (none)              as Q's
``Q+ef``     u + h          c Q(u + h)           u + h - m           restored
``Q+ef21``   u - h          h + c Q(u - h)       m                   restored
``Q+diana``  u - h          h + Q(u - h)         h + alpha Q(u - h)  unbiased
===========  =============  ===================  ==================  ==============

Here :math:`c = 1 / (1 + \omega)` for an unbiased compressor, which makes it a contraction, as error
feedback and EF21 need, and 1 for a biased one; DIANA takes unbiased ones, with
:math:`\alpha = 1 / (1 + \omega)` by default.

**On the wire.** In simulation ``Channel.client`` gives the decoded message at once. Where client
and server are apart, the client calls :meth:`Channel.encode`, sends the arrays, and keeps the
state; the server calls :meth:`Channel.decode` and gets bit for bit the same values. Both pass a
``ClientContext`` with one client, and the same seed, round, client and ``part``: the places of
random coordinates follow from these. For EF21 and DIANA the server keeps each client's h as well
(:attr:`Channel.shared_memory`). Both sides start from zero, and stay equal as long as both drop the
new state of a message that did not arrive.

References: Seide et al. 2014 and Karimireddy et al. 2019 (error feedback), Richtarik et al. 2021
(EF21), Mishchenko et al. 2019 (DIANA).
"""

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedshuffle._arrays import expect, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.transforms.base import ClientContext, MeanUpdate, Message, Transform
from fedshuffle.transforms.compressor import Compressor
from fedshuffle.transforms.wire import Arrays

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Channel(Transform):
    """Compresses updates. ``str`` gives the text that names it."""

    compressor: Compressor
    shared_memory: ClassVar[bool] = False
    """Whether the server needs the client's state to decode, and keeps it too."""

    def __post_init__(self) -> None:
        expect(self.compressor, Compressor, "the compressor")

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        d = updates.shape[1]
        drawn = (self.compressor.draw(d, generator) for generator in context.generators())
        target, sizes = self._target(updates, state), None
        if target is updates and context.norms is not None:
            sent, sizes = updates, self.compressor.compress_in_place(updates, context.norms)
        if sizes is None:
            sent, sizes = self.compressor.compress(target, drawn)
        values, kept = self._values(sent, state), self._state(target, sent, state)
        return Message(values, kept, {"bytes_up": sizes.astype(float)})

    def encode(
        self, update: "Tensor", state: "Tensor | None", context: ClientContext
    ) -> "tuple[Arrays, Tensor | None]":
        """The arrays that a client sends for its update, and its next state."""
        d, target = len(update), self._target(update, state)
        drawn = self.compressor.draw(d, next(context.generators()))
        arrays = self.compressor.encode(target, drawn)
        sent = self.compressor.decode(arrays, d, target.dtype, drawn).to(target.device)
        return arrays, self._state(target, sent, state)

    def decode(
        self, arrays: Arrays, like: "Tensor", state: "Tensor | None", context: ClientContext
    ) -> "tuple[Tensor, Tensor | None]":
        """The update that the server decodes, like the model in length and dtype, and the client's
        next state if the server shares it; it is ``state`` now.
        """
        drawn = self.compressor.draw(len(like), next(context.generators()))
        sent = self.compressor.decode(arrays, len(like), like.dtype, drawn).to(like.device)
        kept = self._state(sent, sent, state) if self.shared_memory else None
        return self._values(sent, state), kept

    @abc.abstractmethod
    def _target(self, updates: "Tensor", state: "Tensor | None") -> "Tensor":
        """What is compressed."""

    @abc.abstractmethod
    def _values(self, sent: "Tensor", state: "Tensor | None") -> "Tensor":
        """What the server makes of the compressed vector."""

    @abc.abstractmethod
    def _state(self, target: "Tensor", sent: "Tensor", state: "Tensor | None") -> "Tensor | None":
        """What the client keeps. If memory is shared, it does not depend on ``target``."""


@dataclass(frozen=True)
class Compressed(Channel):
    """A compressor without memory: m = Q(u).

    >>> from fedshuffle.transforms import RandK, TopK
    >>> Compressed(TopK(0.1)).mean, Compressed(RandK(0.1)).mean
    ('biased', 'unbiased')
    """

    def __str__(self) -> str:
        return str(self.compressor)

    @property
    def mean(self) -> MeanUpdate:  # type: ignore[override]
        return self.compressor.mean

    @property
    def any_layout(self) -> bool:  # type: ignore[override]
        return self.compressor.any_layout

    def _target(self, updates: "Tensor", state: "Tensor | None") -> "Tensor":
        return updates

    def _values(self, sent: "Tensor", state: "Tensor | None") -> "Tensor":
        return sent

    def _state(self, target: "Tensor", sent: "Tensor", state: "Tensor | None") -> None:
        return None


@dataclass(frozen=True)
class ErrorFeedback(Channel):
    """What a message leaves out is added to the client's next update.

    So all messages of a client and its residual sum to all of its updates, exactly.

    >>> from fedshuffle.transforms import TopK
    >>> str(ErrorFeedback(TopK(0.01)))
    'topk:0.01+ef'
    """

    keeps_state = True
    mean = "restored"

    def __str__(self) -> str:
        return f"{self.compressor}+ef"

    def _target(self, updates: "Tensor", state: "Tensor | None") -> "Tensor":
        assert state is not None
        return updates + state

    def _values(self, sent: "Tensor", state: "Tensor | None") -> "Tensor":
        return _damped(self.compressor, sent)

    def _state(self, target: "Tensor", sent: "Tensor", state: "Tensor | None") -> "Tensor":
        return target - _damped(self.compressor, sent)


@dataclass(frozen=True)
class EF21(Channel):
    """The server follows each client's update by compressed corrections.

    >>> from fedshuffle.transforms import TopK
    >>> EF21(TopK(0.01)).shared_memory
    True
    """

    keeps_state = True
    shared_memory = True
    mean = "restored"

    def __str__(self) -> str:
        return f"{self.compressor}+ef21"

    def _target(self, updates: "Tensor", state: "Tensor | None") -> "Tensor":
        assert state is not None
        return updates - state

    def _values(self, sent: "Tensor", state: "Tensor | None") -> "Tensor":
        assert state is not None
        return state + _damped(self.compressor, sent)

    def _state(self, target: "Tensor", sent: "Tensor", state: "Tensor | None") -> "Tensor":
        return self._values(sent, state)


@dataclass(frozen=True)
class Diana(Channel):
    """Unbiased messages whose variance falls as the shift learns the client's update.

    The shift moves by ``alpha`` times the message, ``1 / (1 + omega)`` unless given.

    >>> from fedshuffle.transforms import QSGD
    >>> str(Diana(QSGD(4))), str(Diana(QSGD(4), alpha=0.5))
    ('qsgd:4+diana', 'qsgd:4+diana:0.5')
    """

    alpha: float | None = None
    keeps_state = True
    shared_memory = True
    mean = "unbiased"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            alpha = number(self.alpha, "alpha of diana", within="(0, 1]")
            object.__setattr__(self, "alpha", alpha)
        if self.compressor.mean != "unbiased":
            raise FedShuffleError(
                f"'{self}' cannot work: DIANA needs an unbiased compressor, and {self.compressor}"
                f" is biased. Use '{self.compressor}+ef21'."
            )

    def __str__(self) -> str:
        alpha = "" if self.alpha is None else f":{self.alpha}"
        return f"{self.compressor}+diana{alpha}"

    def _target(self, updates: "Tensor", state: "Tensor | None") -> "Tensor":
        assert state is not None
        return updates - state

    def _values(self, sent: "Tensor", state: "Tensor | None") -> "Tensor":
        assert state is not None
        return state + sent

    def _state(self, target: "Tensor", sent: "Tensor", state: "Tensor | None") -> "Tensor":
        assert state is not None
        damping = self.compressor.damping(sent.shape[-1])
        return state + (damping if self.alpha is None else self.alpha) * sent


def _damped(compressor: Compressor, sent: "Tensor") -> "Tensor":
    """A compressed vector as a contraction."""
    factor = compressor.damping(sent.shape[-1])
    return sent if factor == 1 else sent * factor
