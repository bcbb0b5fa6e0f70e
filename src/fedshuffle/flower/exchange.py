"""Messages to many nodes and their answers, a few at a time, so that memory does not grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedshuffle.errors import FedShuffleError

_AT_ONCE = 16
"""So many messages are in memory at a time."""
_PAUSE = 0.2
"""Seconds between two looks for answers."""

Node = int
_Thing = TypeVar("_Thing")
_Answer = TypeVar("_Answer")


def ask(
    grid: Grid,
    whom: Iterable[int],
    places: Callable[[Sequence[int]], Mapping[int, Node | None]],
    write: Callable[[int, Node, float], Message],
    read: Callable[[int, Message], _Answer],
    keep: Callable[[int, _Answer], None],
    *,
    timeout: float,
    retries: int = 0,
) -> dict[int, str]:
    """Ask everybody, and take the answers as they come; those who gave none, and why.

    Args:
        grid: Flower's.
        whom: whoever is asked, by number.
        places: at which node each is, without waiting; None for those that are not connected, and
            nothing for those of whom it is not known yet.
        write: the message to somebody at a node that is worth so many seconds.
        read: reads an answer, and raises a FedShuffleError if it is no good.
        keep: takes what was read; what goes wrong here is not the fault of who answered.
        timeout: seconds after which nobody waits any more.
        retries: how often somebody who failed, or is not connected, is asked again.
    """
    chances = dict.fromkeys(whom, retries + 1)
    to_ask = dict.fromkeys(chances, "")
    sent: dict[str, int] = {}
    missing: dict[int, str] = {}

    def failed(who: int, why: str) -> None:
        chances[who] -= 1
        if chances[who] > 0:
            to_ask[who] = why
        else:
            missing[who] = why

    end = time.monotonic() + timeout
    too_late = f"did not answer within {timeout:g} seconds"
    while True:
        left = end - time.monotonic()
        found = places(list(to_ask)) if to_ask else {}
        for who in [who for who, place in found.items() if place is None]:
            to_ask[who] = to_ask[who] or "is not connected"
            if not retries:
                missing[who] = to_ask.pop(who)
        for some in pieces([(who, place) for who, place in found.items() if place is not None]):
            notes = [write(who, place, max(left, 1.0)) for who, place in some]
            for (who, _), id in zip(some, push(grid, notes), strict=True):
                del to_ask[who]
                if id is None:
                    failed(who, "could not be asked: the SuperLink refused the message")
                else:
                    sent[id] = who
        for some_ids in pieces(list(sent)):
            for reply in grid.pull_messages(some_ids):
                id = reply.metadata.reply_to_message_id
                if id not in sent:  # a second answer
                    continue
                who = sent.pop(id)
                if expired(reply):
                    failed(who, too_late)
                    continue
                try:
                    refuse_errors(reply)
                    answer = read(who, reply)
                except FedShuffleError as error:
                    failed(who, f"failed: {error}")
                else:
                    keep(who, answer)
        if not sent and not to_ask:
            return missing
        if time.monotonic() >= end:
            away = {who: why or "is not connected" for who, why in to_ask.items()}
            return missing | dict.fromkeys(sent.values(), too_late) | away
        time.sleep(_PAUSE)


def push(grid: Grid, notes: Sequence[Message]) -> list[str | None]:
    """Send messages; the id of each, or None if the SuperLink did not take it."""
    taken = set(grid.push_messages(notes))  # grids differ in what stands there for the others
    ids = [note.metadata.message_id for note in notes]
    return [id if id and id in taken else None for id in ids]


def expired(reply: Message) -> bool:
    """Whether Flower says that no answer came while the message was good."""
    return reply.has_error() and reply.error.code in (
        ErrorCode.MESSAGE_UNAVAILABLE,
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    )


def refuse_errors(reply: Message) -> None:
    """Raise what went wrong at the node, if anything did."""
    if reply.has_error():
        reason = (reply.error.reason or "no reason given").strip().split("\n")[-1][:300]
        raise FedShuffleError(f"{reason} (Flower's error {reply.error.code})")


def pieces(things: Sequence[_Thing]) -> Iterable[Sequence[_Thing]]:
    """A few at a time."""
    return (things[begin : begin + _AT_ONCE] for begin in range(0, len(things), _AT_ONCE))
