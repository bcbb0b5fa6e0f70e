"""What clients are asked, the checks of their replies, and the messages over Flower's grid.

Only a few messages and updates are in memory at a time, however large the cohort.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.protocol import Reply
from fedshuffle.flower.update_buffer import Update, UpdateBuffer
from fedshuffle.kernel import FullGradient

MAX_NORM = 1e18
"""Larger updates and gradients are refused: their squares overflow float32."""
POLL_SECONDS = 0.2
"""Between two polls for replies."""
NOT_FIRST = "was not among the first"
"""Why a client is missing if the server does not wait for everybody that it asks."""
_AT_ONCE = 16  # messages in memory at a time

Node = int
_Key = TypeVar("_Key")


_Replies = TypeVar("_Replies", UpdateBuffer, dict[int, dict[str, float]])


@dataclass(frozen=True)
class Exchange(Generic[_Replies]):
    """A question to some clients of a round: how to ask one of them, and to read its reply."""

    kind: str
    round: int
    clients: Sequence[int]
    write: Callable[[int], RecordDict]
    """The content of the message to a client."""
    read: Callable[[Reply, Message], Any]
    """What a reply says; raises a FedShuffleError if it is not valid."""
    replies: _Replies
    check: Callable[[Reply], None] = lambda fields: None
    """Raises a FedShuffleError if the fields of a reply are not valid."""
    bytes: Counter[str] = field(default_factory=Counter)
    """The sizes of all arrays sent ``down``, and of those in valid replies, ``up``."""

    def message(self, client: int, node: Node, ttl: float) -> Message:
        """The message to a client at a node."""
        content = self.write(client)
        self.bytes["down"] += protocol.nbytes(content)
        return Message(content, node, self.kind, ttl=ttl, group_id=str(self.round + 1))

    def accept(self, client: int, reply: Message) -> str:
        """Store a reply; returns why not, if it is not valid."""
        try:
            fields = self.checked(client, protocol.read(reply, Reply))
            if len(reply.content.array_records) > 1:
                raise FedShuffleError("the reply has more arrays than it was asked for.")
            content, size = self.read(fields, reply), protocol.nbytes(reply.content)
        except FedShuffleError as error:
            return f"failed: {error}"
        self.replies[client] = content  # an error here is not the client's
        self.bytes["up"] += size
        return ""

    def checked(self, client: int, fields: Reply) -> Reply:
        """The fields of a client's reply, if they are valid."""
        if fields.client != client:
            raise FedShuffleError(f"client {fields.client} replied for client {client}.")
        self.check(fields)
        return fields


def full_gradients(request: FullGradient) -> Exchange[UpdateBuffer]:
    """Full gradients at some points."""
    points, round = torch.stack(list(request.points)), request.round

    def read(fields: Reply, reply: Message) -> Update:
        values = protocol.vectors(reply, points.dtype, gradients=points.shape)["gradients"]
        return Update(check_size(values, "gradients"), fields.steps)

    clients, write = request.clients.tolist(), _query(round, request.seed, points=points)
    return Exchange(protocol.FULL_GRADIENT, round, clients, write, read, UpdateBuffer(points))


def evaluation(
    clients: Sequence[int], round: int, x: Tensor
) -> Exchange[dict[int, dict[str, float]]]:
    """The evaluation of a model by clients: their metrics."""

    def read(fields: Reply, reply: Message) -> dict[str, float]:
        records = list(reply.content.metric_records.values())
        numbers = dict(records[0]) if records else {}
        if not numbers or not all(isinstance(v, int | float) for v in numbers.values()):
            raise FedShuffleError("the reply has no metrics.")
        return {name: float(value) for name, value in numbers.items()}

    return Exchange(protocol.EVALUATE, round, clients, _query(round, 0, x=x), read, {})


def _query(round: int, seed: int, **arrays: Tensor) -> Callable[[int], RecordDict]:
    encoded = protocol.arrays(**arrays)
    return lambda client: protocol.content(protocol.Query(client, round, str(seed)), encoded)


def check_size(values: Tensor, what: str) -> Tensor:
    """Refuse a vector that is not finite or too large."""
    norm = float(values.double().norm())
    if not norm <= MAX_NORM:
        raise FedShuffleError(
            f"its {what} is too large (norm {norm:.0e}). The step size is probably too large:"
            " lower it."
        )
    return values


class Outbox(Generic[_Key]):
    """Messages that wait for a reply, each with a key that says to whom it went."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, _Key] = {}
        """Keys by message id."""

    def push(self, keys: Sequence[_Key], write: Callable[[_Key], Message]) -> list[_Key]:
        """Send a message for each key; returns the keys of those that the SuperLink refused."""
        refused = []
        for begin in range(0, len(keys), _AT_ONCE):
            messages = {key: write(key) for key in keys[begin : begin + _AT_ONCE]}
            # Grids differ in what they return for refused ones.
            taken = {id for id in self.grid.push_messages(messages.values()) if id}
            for key, message in messages.items():
                if (id := message.metadata.message_id) in taken:
                    self.waiting[id] = key
                else:
                    refused.append(key)
        return refused

    def pull(self) -> Iterator[tuple[_Key, Message]]:
        """The replies that have come so far, with their keys."""
        ids = list(self.waiting)
        for begin in range(0, len(ids), _AT_ONCE):
            for reply in self.grid.pull_messages(ids[begin : begin + _AT_ONCE]):
                if (id := reply.metadata.reply_to_message_id) in self.waiting:  # not a second reply
                    yield self.waiting.pop(id), reply


def send(
    grid: Grid,
    exchange: Exchange[_Replies],
    nodes_of: Callable[[Sequence[int]], Mapping[int, Node | None]],
    timeout: float,
    retries: int = 0,
    first: int | None = None,
) -> dict[int, str]:
    """Do an exchange; returns the clients without a valid reply within the timeout, and why.

    A client that fails, or is not connected, is asked again ``retries`` times. ``nodes_of`` gives
    the node of each client, without waiting: None for one that is not connected, no entry for one
    that is not known yet. If only the ``first`` few valid replies are taken, nobody waits for
    the others; of those that come at the same time, clients that were asked first are.
    """
    attempts = dict.fromkeys(exchange.clients, retries + 1)
    to_ask = dict.fromkeys(attempts, "")  # with the reason why the last attempt failed
    missing: dict[int, str] = {}
    outbox = Outbox[int](grid)

    def failed(client: int, why: str) -> None:
        attempts[client] -= 1
        (to_ask if attempts[client] > 0 else missing)[client] = why

    def left_out(why: str) -> dict[int, str]:
        away = {client: said or "is not connected" for client, said in to_ask.items()}
        return missing | dict.fromkeys(outbox.waiting.values(), why) | away

    end, taken = time.monotonic() + timeout, 0
    too_late = f"did not reply within {round(timeout, 2):g} seconds"
    while True:
        ttl = max(end - time.monotonic(), 1.0)
        nodes: dict[int, Node] = {}
        for client, node in nodes_of(list(to_ask)).items() if to_ask else ():
            why = to_ask.pop(client)
            if node is not None:
                nodes[client] = node
            else:
                (to_ask if retries else missing)[client] = why or "is not connected"
        for client in outbox.push(list(nodes), lambda c: exchange.message(c, nodes[c], ttl)):  # noqa: B023
            failed(client, "could not be asked: the SuperLink refused the message")
        for client, reply in outbox.pull():
            if why := too_late if expired(reply) else exchange.accept(client, reply):
                failed(client, why)
            elif (taken := taken + 1) == first:
                return left_out(NOT_FIRST)
        if not outbox.waiting and not to_ask:
            return missing
        if time.monotonic() >= end:
            return left_out(too_late)
        time.sleep(POLL_SECONDS)


def expired(reply: Message) -> bool:
    """Whether Flower says that no reply came in time."""
    return reply.has_error() and reply.error.code in (
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    )
