r"""Transforms: what happens to one client's update on its way to the server.

A chain of transforms stands between local training and aggregation:

.. math:: u_i = y_i - x, \qquad (m_i, h_i) \leftarrow T(u_i, h_i), \qquad
          U = \sum_{i \in S} a_i m_i, \qquad x \leftarrow \mathrm{server}(x, R(U)).

:math:`T` runs at the client (:meth:`Transform.client`), where the update is made; :math:`m_i` is
what the server decodes, and :math:`h_i` a vector that the client keeps from round to round.
:math:`R` runs at the server (:meth:`Transform.server`), on the aggregated update. Clients are rows
of a table, and rows never mix: engines that train many clients at once transform them at once.
"""

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Union

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError, user_error
from fedshuffle.randomness import Purpose, ReusableGenerator, generator

if TYPE_CHECKING:
    from torch import Tensor

    from fedshuffle.local_work import Workload

MeanUpdate = Literal["unchanged", "unbiased", "restored", "biased", "model-dependent"]
"""What a transform does to the mean of an update: nothing, nothing in expectation, something that
its state makes good over the rounds, something that stays, or something that depends on the update
itself, as clipping does."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The clients whose updates a transform sees: one entry per row."""

    seed: int
    round: int
    clients: IntArray
    """The clients' numbers in the federation."""
    steps: IntArray
    """Local steps done."""
    step_sizes: FloatArray
    weights: FloatArray
    """Aggregation weights ``a_i``."""
    shared: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The transform's state at the server, which clients are sent."""
    full_gradients: "Callable[[], Tensor] | None" = None
    """Computes each client's full gradient at the global model, a row each; None for a chain that
    takes updates in any layout."""
    norms: "Tensor | None" = None
    """The norms of the updates, if they are known: for the first transform of a chain."""
    part: int = 0
    """The transform's place in the chain, by which its random numbers differ from others'."""

    def generators(self) -> Iterator[np.random.Generator]:
        """A random generator per row, a function of (seed, round, client, place in the chain);
        each is valid until the next is taken.
        """
        draw = ReusableGenerator()
        for client in self.clients.tolist():
            yield draw(
                self.seed, Purpose.TRANSFORM, round=self.round, client=client, part=self.part
            )


Numbers = Union["Tensor", FloatArray, Sequence[float]]
"""One number per row."""


@dataclass(frozen=True, slots=True)
class Message:
    """What clients send, as the server decodes it: a row per client."""

    vectors: "Tensor"
    """What is sent, up to ``factors``."""
    state: "Tensor | None" = None
    """The vectors that clients keep; None if the transform keeps no state."""
    metrics: "Mapping[str, Numbers]" = field(default_factory=dict)
    """Numbers by name, one per row: ``bytes_up`` is the size of the message, ``clipped`` is 1 for
    an update that was clipped and 0 otherwise."""
    factors: FloatArray | None = None
    """A number per row that multiplies its vector; None for ones. So a transform that only scales,
    as clipping does, need not touch the vectors."""

    @property
    def values(self) -> "Tensor":
        """What the server decodes."""
        return self.vectors if self.factors is None else scaled(self.vectors.clone(), self.factors)


def scaled(vectors: "Tensor", factors: FloatArray) -> "Tensor":
    """Rows times a number each, in place: the one way in which engines and clients do it."""
    if len(factors) == 1:
        return vectors if factors[0] == 1 else vectors.mul_(float(factors[0]))
    return vectors.mul_(vectors.new_tensor(factors)[:, None])


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What a transform knows at the server, after the updates are summed."""

    seed: int
    round: int
    state: "Mapping[str, Tensor]"
    """What the transform kept at the server; empty before the first round."""
    metrics: Mapping[str, FloatArray]
    """The numbers of the round by name, one per client of the cohort."""
    part: int = 0
    model: "Tensor | None" = None
    """The global model before the round; None where there is none, as in an audit."""
    step_size: float = 1.0
    """The server step size of the round."""
    observed: dict[str, float] = field(default_factory=dict)
    """What the transform measures at the server, by name: for the record of the round."""

    def generator(self) -> np.random.Generator:
        """The server's random generator, a function of (seed, round, place in the chain)."""
        return generator(self.seed, Purpose.SERVER_TRANSFORM, round=self.round, part=self.part)


class Transform(abc.ABC):
    """One link of the chain: what a client sends, and what the server does with the sum."""

    keeps_state: bool = False
    """Whether clients keep a vector of the model's size from round to round."""
    any_layout: bool = False
    """Whether the result does not depend on the order of the coordinates. Engines may then pass
    updates in an order of their own, which is faster."""
    mean: MeanUpdate = "model-dependent"
    """What it does to the mean update; the audit reports it."""
    server_only: bool = False
    """Whether clients send their updates as they are, so that only the server part matters."""
    every_round: bool = False
    """Whether the server part also runs in a round without clients, as noise must."""
    needs_average: bool = False
    """Whether the server must add the aggregated update to the model that all clients started from:
    no server optimiser, no stale models and no updates of earlier rounds."""
    restart: bool = False
    """Whether the server gives parameters new values in every round, so that nothing fits any more
    that was kept from earlier rounds."""
    private: bool = False
    """Whether nothing but the aggregated update may leave: any other sum would have no noise."""

    numbers_sent: int | None = None
    """How many numbers clients send, if fewer than the model has."""

    def check(self, workload: "Workload") -> None:
        """Refuse local work under which the transform would do something else than it says."""
        return

    @abc.abstractmethod
    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        """What clients send for their updates, one row each. ``updates`` may be overwritten;
        ``state``, zero in a client's first round and None unless ``keeps_state``, may not.
        """

    def server(
        self, update: "Tensor", context: ServerContext
    ) -> "tuple[Tensor, Mapping[str, Tensor]]":
        """The aggregated update as the server uses it, and the transform's next server state."""
        return update, context.state


@dataclass(frozen=True)
class Chain(Transform):
    """Transforms one after another; at most one of them keeps state at clients.

    >>> Chain().keeps_state, bool(Chain())
    (False, False)
    """

    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        for one in self.transforms:
            if not isinstance(one, Transform):
                raise FedShuffleError(f"{one!r:.60} is not a Transform.")
        keep = [one for one in self.transforms if one.keeps_state]
        if len(keep) > 1:
            raise FedShuffleError(
                f"{keep[0]!r} and {keep[1]!r} both keep a vector at every client, and there is"
                " room for one. Leave one of them out."
            )

    def __bool__(self) -> bool:
        return bool(self.transforms)

    @property
    def flat(self) -> tuple[Transform, ...]:
        """Its transforms, and those of chains among them, one after another."""
        parts = (one.flat if isinstance(one, Chain) else (one,) for one in self.transforms)
        return tuple(itertools.chain.from_iterable(parts))

    def check_with_client_state(self, method: str, client_state: bool) -> None:
        """Refuse a chain that keeps state with a method that does so as well."""
        if client_state and self.keeps_state:
            memory = next(one for one in self.transforms if one.keeps_state)
            raise FedShuffleError(
                f"{method} keeps a vector at every client, made from the client's update, and so"
                f" does {memory}. Use a channel without error feedback, or another method."
            )

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]
        return any(one.keeps_state for one in self.transforms)

    @property
    def any_layout(self) -> bool:  # type: ignore[override]
        return all(one.any_layout for one in self.transforms) and not self.keeps_state

    @property
    def every_round(self) -> bool:  # type: ignore[override]
        return any(one.every_round for one in self.transforms)

    @property
    def private(self) -> bool:  # type: ignore[override]
        return any(one.private for one in self.transforms)

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        kept: Tensor | None = None
        factors: FloatArray | None = None
        metrics: dict[str, Numbers] = {}
        for part, one in enumerate(self.transforms):
            if one.server_only:
                continue
            own, there = state if one.keeps_state else None, context
            if part or context.shared:
                shared = _part_of(context.shared, part)
                norms = None if part else context.norms  # the first may have changed the updates
                there = replace(context, shared=shared, norms=norms, part=context.part + part)
            if factors is not None:
                updates = scaled(updates, factors)
            try:  # a context manager would cost more than some transforms
                message = one.client(updates, own, there)
            except (Exception, SystemExit) as error:
                raise _named(one, error) from error
            _check_message(one, message, updates)
            if len(self.transforms) == 1 and message.state is None:
                return message
            updates, factors = message.vectors, message.factors
            metrics = {**metrics, **message.metrics}
            if message.state is not None:
                # What is sent may be overwritten by the next transform.
                same = message.state.data_ptr() == updates.data_ptr()
                kept = message.state.clone() if same else message.state
        return Message(updates, kept, metrics, factors)

    def server(
        self, update: "Tensor", context: ServerContext
    ) -> "tuple[Tensor, Mapping[str, Tensor]]":
        after: dict[str, Tensor] = {}
        for part, one in enumerate(self.transforms):
            own = replace(context, state=_part_of(context.state, part), part=context.part + part)
            try:
                update, state = one.server(update, own)
            except (Exception, SystemExit) as error:
                raise _named(one, error, f"round {context.round}: ") from error
            after |= {f"{part}.{name}": value for name, value in state.items()}
        return update, after


NO_TRANSFORMS = Chain()
"""The chain that changes nothing."""


def _named(transform: Transform, error: BaseException, where: str = "") -> FedShuffleError:
    """What a transform's code raised, with its name; a clear error stays as it is."""
    if isinstance(error, FedShuffleError):
        return error
    return FedShuffleError(f"{where}the transform {type(transform).__name__}: {user_error(error)}.")


def _check_message(transform: Transform, message: Message, updates: "Tensor") -> None:
    """Refuse a message without the rows that it must have."""
    wrong, like = "", (updates.shape, updates.dtype)
    if not isinstance(message, Message):
        wrong = f"gives a {type(message).__name__} instead of a Message"
    elif (message.state is None) == transform.keeps_state:
        found = "no state" if transform.keeps_state else "a state for clients to keep"
        wrong = f"gives {found}, but its keeps_state is {transform.keeps_state}"
    else:
        for what, rows in ("vectors", message.vectors), ("state", message.state):
            if rows is not None and rows is not updates and (rows.shape, rows.dtype) != like:
                wrong = (
                    f"gives {what} of {tuple(rows.shape)} and {rows.dtype}, but must give"
                    f" {tuple(like[0])} and {like[1]}, as it was given: a row for each client"
                )
        for name, values in message.metrics.items():
            if np.shape(values) != like[0][:1]:
                wrong = f"gives {np.shape(values)} values of {name!r} for {like[0][0]} clients"
    if wrong:
        raise FedShuffleError(f"the transform {type(transform).__name__} {wrong}.")


def _part_of(state: "Mapping[str, Tensor]", part: int) -> "dict[str, Tensor]":
    """The state of one transform of a chain, in which names begin with its place."""
    prefix = f"{part}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
