"""Schedules with real clients: for whom the server waits, and for how long.

A deadline or over-selection leaves out slow clients. Who was in time is who replied, so what
corrects for it is ``response_probability``, given or estimated.
"""

import logging
import math
import time
from collections.abc import Iterable
from typing import Any, final

from flwr.app import Message
from flwr.serverapp import Grid

from fedshuffle._arrays import count
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower.exchange import POLL_SECONDS, Outbox, expired
from fedshuffle.sampling import Sampling
from fedshuffle.timing import (
    Asynchronous,
    Deadline,
    OverSelection,
    TrainingSchedule,
    resolve_schedule,
)

_log = logging.getLogger("flwr.fedshuffle")


def synchronous(schedule: str | TrainingSchedule) -> TrainingSchedule:
    """A schedule in rounds that real clients can keep.

    >>> synchronous("deadline:60")
    Deadline(seconds=60.0, partial=False)
    """
    found = resolve_schedule(schedule)
    if isinstance(found, Asynchronous):
        raise FedShuffleError(
            f"schedule {str(found)!r} has no rounds, and this strategy has: use ConsistentFedBuff,"
            " or 'deadline:SECONDS' or 'over:8of10'."
        )
    if isinstance(found, Deadline) and found.partial:
        raise FedShuffleError(
            f"schedule {str(found)!r}: a client cannot know how long its messages are under way, so"
            " it cannot stop in time for the server's deadline. Limit its work,"
            " client_app(seconds=...), and give a later deadline without '+partial'."
        )
    return found


def asked(schedule: TrainingSchedule, sampling: str | Sampling, clients: int) -> str | Sampling:
    """Who is asked: over-selection asks clients itself."""
    if not isinstance(schedule, OverSelection):
        return sampling
    ours = f"uniform:{count(schedule.ask, 'the number of clients to ask', most=clients)}"
    if str(sampling) not in ("full", ours):
        raise FedShuffleError(
            f"schedule {str(schedule)!r} asks {schedule.ask} clients itself, uniformly, so that"
            f" sampling {str(sampling)!r} has no say: leave out the sampling, or use a deadline."
        )
    return ours


def limits(
    schedule: TrainingSchedule, timeout: float, elapsed: float = 0.0
) -> tuple[float, int | None]:
    """For how many seconds more the server waits, and for how many replies, if not for all.

    >>> limits(Deadline(60.0), timeout=600, elapsed=20)
    (40.0, None)
    >>> limits(OverSelection(keep=8, ask=10), timeout=600)
    (600, 8)
    """
    if isinstance(schedule, Deadline):
        return min(timeout, max(schedule.seconds - elapsed, 0.0)), None
    return timeout, schedule.keep if isinstance(schedule, OverSelection) else None


def slow_clients_count_less(schedule: TrainingSchedule) -> str:
    """The warning where nothing corrects for clients that are left out."""
    return (
        f"schedule {str(schedule)!r} leaves out clients that are slow, so they count less than"
        ' meant. Use response_probability="estimate", or give the probability of each client to be'
        " in time, if you know it."
    )


@final
class ScheduledGrid:
    """Flower's grid, with replies to ``train`` as a schedule takes them.

    A reply belongs to the call that sent its message: one that is late is never seen again.
    """

    def __init__(self, grid: Grid, schedule: TrainingSchedule) -> None:
        self.grid, self.schedule = grid, schedule

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        """Send messages; returns the replies of those that are in time, or of the first."""
        sent = list(messages)
        if not sent or any(one.metadata.message_type != "train" for one in sent):
            return self.grid.send_and_receive(sent, timeout=timeout)
        seconds, first = limits(self.schedule, math.inf if timeout is None else timeout)
        for message in sent:  # nobody needs a later reply
            message.metadata.ttl = min(message.metadata.ttl, max(seconds, 1.0))
        end, outbox = time.monotonic() + seconds, Outbox[int](self.grid)
        outbox.push(range(len(sent)), sent.__getitem__)
        replies = _collect(outbox, end, first)
        _log.info(f"{self.schedule}: {len(replies)} of {len(sent)} clients were in time")
        return replies

    def __getattr__(self, name: str) -> Any:
        """All else is that of the grid."""
        return getattr(self.grid, name)


def _collect(outbox: Outbox[int], end: float, first: int | None) -> list[Message]:
    """The replies until an end, or until enough of them are no errors."""
    replies, good = [], 0
    while True:
        for _, reply in outbox.pull():
            if expired(reply):
                continue
            replies.append(reply)
            good += not reply.has_error()
            if good == first:
                return replies
        if not outbox.waiting or time.monotonic() >= end:
            return replies
        time.sleep(POLL_SECONDS)
