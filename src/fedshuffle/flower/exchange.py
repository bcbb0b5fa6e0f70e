"""What clients are asked, the checks of their replies, and the messages over Flower's grid.

Only a few messages and updates are in memory at a time, however large the cohort.
"""

import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from fedshuffle.engines.base import add_weight_decay, nonzero_weights
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.flower import protocol
from fedshuffle.kernel import FullGradient, LocalTraining, Request

MAX_NORM = 1e18
"""Larger updates and gradients are refused: their squares overflow float32."""
MAX_BYTES = 256 * 2**20
"""Bytes of updates held in memory; more go to a temporary file."""
POLL_SECONDS = 0.2
"""Between two polls for replies."""
_AT_ONCE = 16  # messages in memory at a time

Node = int
Update = tuple[Tensor, int]
"""What a client computed, and its number of steps."""
_Key = TypeVar("_Key")


class UpdateBuffer:
    """The updates of clients, all shaped as one that is given.

    >>> buffer = UpdateBuffer(torch.zeros(2))
    >>> buffer[7] = torch.tensor([1.0, 2.0]), 4
    >>> buffer.steps, buffer[7].tolist()
    ({7: 4}, [1.0, 2.0])
    """

    def __init__(self, like: Tensor) -> None:
        self.steps: dict[int, int] = {}
        """The steps that each client did."""
        self._positions: dict[int, int] = {}
        self._one = torch.empty(like.shape, dtype=like.dtype)
        self._bytes = self._one.view(-1).view(torch.uint8).numpy().data
        """The memory of the one array that is written or was read."""
        self._file = tempfile.SpooledTemporaryFile(MAX_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def __setitem__(self, client: int, update: Update) -> None:
        values, self.steps[client] = update
        self._one.copy_(values)
        with self._position(client):
            self._file.write(self._bytes)

    def __getitem__(self, client: int) -> Tensor:
        """The update of a client; valid until the next is read or stored."""
        with self._position(client):
            self._file.readinto(self._bytes)
        return self._one

    def sums(self, request: Request) -> Tensor:
        """The weighted sums that a request asks for, over clients that have all replied."""
        if isinstance(request, LocalTraining):
            number = request.sums
            rows = [(task.minibatches.client, task.weights) for task in request.tasks]
        else:
            number = request.weights.shape[1]
            rows = list(zip(request.clients.tolist(), request.weights, strict=True))
        sums = self._one.new_zeros(number, *self._one.shape)
        for client, weights in rows:
            values = self[client]
            for k, weight in nonzero_weights(weights):
                sums[k].add_(values, alpha=weight)
        return sums if isinstance(request, LocalTraining) else add_weight_decay(request, sums)

    @contextmanager
    def _position(self, client: int) -> Iterator[None]:
        """Where the file holds the update of a client; errors of the disk get a remedy."""
        cannot = f"cannot store updates of {len(self._bytes)} bytes in a temporary file"
        remedy = "Make room, or set TMPDIR to another folder."
        with error_context(lambda error: f"{cannot}: {error.strerror}. {remedy}", OSError):
            position = self._positions.setdefault(client, len(self._positions))
            self._file.seek(position * len(self._bytes))
            yield


_Replies = TypeVar("_Replies", UpdateBuffer, dict[int, dict[str, float]])


@dataclass(frozen=True)
class Exchange(Generic[_Replies]):
    """A question to some clients of a round: how to ask one of them, and to read its reply."""

    kind: str
    round: int
    clients: Sequence[int]
    write: Callable[[int], RecordDict]
    """The content of the message to a client."""
    read: Callable[[int, int, Message], Any]
    """What the reply of a client says, after this many steps; raises a FedShuffleError if it is
    not valid."""
    replies: _Replies

    @property
    def group(self) -> str:
        """Flower's group id of the messages; replies carry it too."""
        return str(self.round + 1)

    def message(self, client: int, node: Node, ttl: float) -> Message:
        """The message to a client at a node."""
        return Message(self.write(client), node, self.kind, ttl=ttl, group_id=self.group)

    def accept(self, client: int, reply: Message) -> str:
        """Store a reply; returns why not, if it is not valid."""
        try:
            fields = protocol.read(reply, protocol.Reply)
            if fields.client != client:
                raise FedShuffleError(f"client {fields.client} replied for client {client}.")
            content = self.read(client, fields.steps, reply)
        except FedShuffleError as error:
            return f"failed: {error}"
        self.replies[client] = content  # an error here is not the client's
        return ""


def local_training(
    request: LocalTraining,
    round: int,
    batch_size: int,
    withheld: bool,
    clipping_range: float | None = None,
) -> Exchange[UpdateBuffer]:
    """Local training; ``withheld`` says whether clients withhold their sizes, ``clipping_range`` is
    that of secure aggregation.
    """
    tasks = {task.minibatches.client: task for task in request.tasks}
    encode = lru_cache(1)(protocol.arrays)  # once for all clients that get the same

    def write(client: int) -> RecordDict:
        task = tasks[client]
        minibatches, step = task.minibatches, task.coefficients
        fields = protocol.TrainRequest(
            client=client,
            round=round,
            seed=str(minibatches.seed),
            steps=minibatches.steps,
            batch_size=batch_size,
            order=minibatches.order,
            step_size=float(task.step_size),
            alpha=float(step.alpha),
            beta=float(step.beta),
            mu=float(step.mu),
            clip=float(task.clip),
            weight_decay=float(task.weight_decay),
            weight=float(task.weights[0]),
            clipping_range=clipping_range,
            size=None if withheld else minibatches.size,
        )
        return protocol.content(fields, encode(x=request.start, v=step.v, scale=step.scale))

    def read(client: int, steps: int, reply: Message) -> Update:
        planned = tasks[client].minibatches.steps
        if not 1 <= steps <= planned:
            raise FedShuffleError(f"it says that it did {steps} of {planned} steps.")
        return _array(reply, "update", request.start), steps

    return Exchange(protocol.TRAIN, round, list(tasks), write, read, UpdateBuffer(request.start))


def full_gradients(request: FullGradient) -> Exchange[UpdateBuffer]:
    """Full gradients at some points."""
    points, round = torch.stack(list(request.points)), request.round

    def read(client: int, steps: int, reply: Message) -> Update:
        return _array(reply, "gradients", points), steps

    clients, write = request.clients.tolist(), _query(round, points=points)
    return Exchange(protocol.FULL_GRADIENT, round, clients, write, read, UpdateBuffer(points))


def evaluation(
    clients: Sequence[int], round: int, x: Tensor
) -> Exchange[dict[int, dict[str, float]]]:
    """The evaluation of a model by clients: their metrics."""

    def read(client: int, steps: int, reply: Message) -> dict[str, float]:
        records = list(reply.content.metric_records.values())
        numbers = dict(records[0]) if records else {}
        if not numbers or not all(isinstance(v, int | float) for v in numbers.values()):
            raise FedShuffleError("the reply has no metrics.")
        return {name: float(value) for name, value in numbers.items()}

    return Exchange(protocol.EVALUATE, round, clients, _query(round, x=x), read, {})


def _query(round: int, **arrays: Tensor) -> Callable[[int], RecordDict]:
    encoded = protocol.arrays(**arrays)
    return lambda client: protocol.content(protocol.Query(client, round), encoded)


def _array(reply: Message, name: str, like: Tensor) -> Tensor:
    values = protocol.vectors(reply, like.dtype, **{name: like.shape})[name]
    if (norm := float(values.double().norm())) > MAX_NORM:
        raise FedShuffleError(
            f"its {name} is too large (norm {norm:.0e}). The step size is probably too large:"
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
) -> dict[int, str]:
    """Do an exchange; returns the clients without a valid reply within the timeout, and why.

    A client that fails, or is not connected, is asked again ``retries`` times. ``nodes_of`` gives
    the node of each client, without waiting: None for one that is not connected, no entry for one
    that is not known yet.
    """
    attempts = dict.fromkeys(exchange.clients, retries + 1)
    to_ask = dict.fromkeys(attempts, "")  # with the reason why the last attempt failed
    missing: dict[int, str] = {}
    outbox = Outbox[int](grid)

    def failed(client: int, why: str) -> None:
        attempts[client] -= 1
        (to_ask if attempts[client] > 0 else missing)[client] = why

    end = time.monotonic() + timeout
    too_late = f"did not reply within {timeout:g} seconds"
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
        if not outbox.waiting and not to_ask:
            return missing
        if time.monotonic() >= end:
            away = {client: why or "is not connected" for client, why in to_ask.items()}
            return missing | dict.fromkeys(outbox.waiting.values(), too_late) | away
        time.sleep(POLL_SECONDS)


def expired(reply: Message) -> bool:
    """Whether Flower says that no reply came in time."""
    return reply.has_error() and reply.error.code in (
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    )
