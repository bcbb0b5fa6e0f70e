"""Messages to many nodes and their replies, a few at a time, so that memory does not grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedshuffle.errors import FedShuffleError

_AT_ONCE = 16
"""Messages in memory at a time."""
_PAUSE = 0.2
"""Seconds between two polls for replies."""

Node = int
_Item = TypeVar("_Item")
_Reply = TypeVar("_Reply")


def send(
    grid: Grid,
    clients: Iterable[int],
    nodes_of: Callable[[Sequence[int]], Mapping[int, Node | None]],
    write: Callable[[int, Node, float], Message],
    read: Callable[[int, Message], _Reply],
    store: Callable[[int, _Reply], None],
    *,
    timeout: float,
    retries: int = 0,
) -> dict[int, str]:
    """Send each client a message and store the replies; returns the clients without one, and why.

    Args:
        grid: Flower's grid.
        clients: the clients to ask.
        nodes_of: the node of each client, without waiting; None for one that is not connected,
            no entry for one that is not known yet.
        write: the message to a client at a node, with its time to live in seconds.
        read: decodes a reply; raises a FedShuffleError if it is invalid.
        store: takes what was decoded; an error here is not the client's.
        timeout: seconds to wait in all.
        retries: how often a client that failed, or is not connected, is asked again.
    """
    attempts = dict.fromkeys(clients, retries + 1)
    waiting = dict.fromkeys(attempts, "")
    sent: dict[str, int] = {}
    missing: dict[int, str] = {}

    def failed(client: int, why: str) -> None:
        attempts[client] -= 1
        (waiting if attempts[client] > 0 else missing)[client] = why

    end = time.monotonic() + timeout
    too_late = f"did not reply within {timeout:g} seconds"
    while True:
        left = end - time.monotonic()
        found = nodes_of(list(waiting)) if waiting else {}
        for client in [client for client, node in found.items() if node is None]:
            waiting[client] = waiting[client] or "is not connected"
            if not retries:
                missing[client] = waiting.pop(client)
        for batch in batches([(c, node) for c, node in found.items() if node is not None]):
            messages = [write(client, node, max(left, 1.0)) for client, node in batch]
            for (client, _), id in zip(batch, push(grid, messages), strict=True):
                del waiting[client]
                if id is None:
                    failed(client, "could not be asked: the SuperLink refused the message")
                else:
                    sent[id] = client
        for ids in batches(list(sent)):
            for reply in grid.pull_messages(ids):
                id = reply.metadata.reply_to_message_id
                if id not in sent:  # a second reply
                    continue
                client = sent.pop(id)
                if expired(reply):
                    failed(client, too_late)
                    continue
                try:
                    refuse_errors(reply)
                    decoded = read(client, reply)
                except FedShuffleError as error:
                    failed(client, f"failed: {error}")
                else:
                    store(client, decoded)
        if not sent and not waiting:
            return missing
        if time.monotonic() >= end:
            away = {client: why or "is not connected" for client, why in waiting.items()}
            return missing | dict.fromkeys(sent.values(), too_late) | away
        time.sleep(_PAUSE)


def push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages; the id of each, or None if the SuperLink did not take it."""
    taken = set(grid.push_messages(messages))  # grids differ in what they return for refused ones
    ids = [message.metadata.message_id for message in messages]
    return [id if id and id in taken else None for id in ids]


def expired(reply: Message) -> bool:
    """Whether Flower says that no reply came in time."""
    return reply.has_error() and reply.error.code in (
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    )


def refuse_errors(reply: Message) -> None:
    """Raise the error of the node, if the reply carries one."""
    if reply.has_error():
        reason = (reply.error.reason or "no reason given").strip().split("\n")[-1][:300]
        raise FedShuffleError(f"{reason} (Flower's error {reply.error.code})")


def batches(items: Sequence[_Item]) -> Iterable[Sequence[_Item]]:
    """Consecutive parts of a sequence, small enough to be in memory."""
    return (items[begin : begin + _AT_ONCE] for begin in range(0, len(items), _AT_ONCE))
