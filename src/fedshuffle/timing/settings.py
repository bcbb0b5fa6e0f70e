"""A schedule and the clock that it goes by, for a federation."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedshuffle._arrays import IntArray, vector
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.timing import clock_text
from fedshuffle.timing import schedule as schedules
from fedshuffle.timing.clock import NO_BYTES, Clock, MessageSizes
from fedshuffle.timing.schedule import Asynchronous, Deadline, TrainingSchedule, Wait


@dataclass(frozen=True)
class Timing:
    """For whom the server waits, and how long clients take.

    >>> Timing.of("deadline:2", "fixed:0.1,0.4", Federation.from_sizes([10, 20]))
    deadline:2, 0.1 to 0.4 seconds per step
    """

    schedule: TrainingSchedule = field(default_factory=Wait)
    clock: Clock | None = None
    """None if time does not matter."""
    sizes: MessageSizes = NO_BYTES
    """The bytes of a message, where they must be known before it is sent."""

    @classmethod
    def of(
        cls,
        schedule: str | TrainingSchedule | None,
        clock: str | Clock | None,
        federation: Federation,
        sizes: MessageSizes = NO_BYTES,
        folder: Path | None = None,
    ) -> "Timing":
        """From texts or objects; every schedule but ``wait`` needs a clock."""
        chosen = schedules.resolve(schedule)
        devices = clock_text.resolve(clock, federation, folder)
        check(chosen, devices)
        return cls(chosen, devices, sizes)

    @property
    def asynchronous(self) -> bool:
        """Whether clients start from different models."""
        return isinstance(self.schedule, Asynchronous)

    def __repr__(self) -> str:
        return ", ".join([str(self.schedule), *([] if self.clock is None else [repr(self.clock)])])

    def check_link(self, down_link: object) -> None:
        """Refuse a down channel where the bytes of its messages must be known before."""
        if down_link is None or self.clock is None or isinstance(self.schedule, Wait):
            return
        if np.isfinite(self.clock.down).any():
            raise FedShuffleError(
                f"schedule {str(self.schedule)!r} must know how long a message takes before it is"
                " sent, and what a down channel sends depends on who was there before: leave out"
                " the down channel, or '+down' of the clock, or use schedule 'wait'."
            )

    def check_sizes(self) -> None:
        """Refuse bytes that are no lengths, as a message that never arrives is waited for without
        end, and bandwidths without bytes, where messages would seem to take no time.
        """
        if self.clock is None or isinstance(self.schedule, Wait):
            return
        for way, each in zip(self.sizes._fields, self.sizes, strict=True):
            vector(np.atleast_1d(each), f"message sizes, {way}", within="[0, inf)")
        if self.clock.has_bandwidths and self.sizes is NO_BYTES:
            raise FedShuffleError(
                "the clock has bandwidths, but nothing says how long messages are: give"
                " message_sizes=MessageSizes(down, up) (--message-bytes DOWN,UP) in bytes, or leave"
                " out '+down' and '+up'."
            )

    def seconds(
        self,
        seed: int,
        round: int,
        clients: IntArray,
        steps: IntArray,
        sizes: MessageSizes,
        complete: bool = True,
    ) -> float:
        """How long a round takes in which these clients take part; not ``complete`` if somebody
        whom the server waits for does not.
        """
        if isinstance(self.schedule, Deadline) and not complete:
            return self.schedule.seconds
        if self.clock is None or not len(clients):
            return 0.0
        slowest = float(self.clock.durations(seed, round, clients, steps, sizes).max())
        return min(slowest, getattr(self.schedule, "seconds", math.inf))

    def describe(self) -> dict[str, str | None]:
        """What a trajectory depends on, as plain data."""
        if self.clock is None:
            return {"schedule": None, "clock": None, "clock_sha256": None}
        parts = (getattr(self.clock, name) for name in ("seconds", "latency", "down", "up"))
        digest = hashlib.sha256(b"".join(part.tobytes() for part in parts))
        return {
            "schedule": str(self.schedule),
            "clock": repr(self.clock),
            "clock_sha256": digest.hexdigest(),
        }


def check(schedule: TrainingSchedule, clock: object) -> None:
    """Refuse a schedule that needs a clock, without one."""
    if clock is None and not isinstance(schedule, Wait):
        raise FedShuffleError(
            f"schedule {str(schedule)!r} goes by time, and there is no clock: give one, such as"
            " clock 'lognormal:0.1:1', in seconds per local step."
        )
