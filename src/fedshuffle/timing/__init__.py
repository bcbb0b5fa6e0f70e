"""Time: how long clients take (:class:`Clock`), and whom the server waits for (schedules).

Both are objects or texts. A clock as text (:func:`parse_clock`), where one number stands for all
clients:

===================================  =========================================================
``fixed:0.1`` or ``fixed:0.1,0.4``   seconds per local step
``lognormal:0.1:1``                  log-normal seconds per step: median 0.1, sigma 1
``classes:0.7x0.1,0.3x1``            70% of the devices take 0.1 s per step, 30% take 1 s
``table:FILE``                       as measured: a CSV file with ``client,seconds`` and, if you
                                     like, ``latency,down,up``
``rates:4,2,1,0.5``                  tasks per second, exponential, whatever their steps
===================================  =========================================================

After each, ``+jitter:exponential`` or ``+jitter:lognormal:0.5`` lets tasks vary, ``+latency:0.2``
adds seconds, and ``+down:1e7`` and ``+up:1e6`` are bytes per second. Schedules are those of
:func:`parse_schedule`.
"""

from fedshuffle.timing.clock import NO_BYTES, Clock, MessageSizes
from fedshuffle.timing.clock_text import parse as parse_clock
from fedshuffle.timing.clock_text import resolve as resolve_clock
from fedshuffle.timing.deadline import InTime, UntilDeadline
from fedshuffle.timing.jitter import Exponential, Jitter, LogNormal, NoJitter
from fedshuffle.timing.schedule import (
    Asynchronous,
    Deadline,
    OverSelection,
    TrainingSchedule,
    Wait,
)
from fedshuffle.timing.schedule import parse as parse_schedule
from fedshuffle.timing.schedule import resolve as resolve_schedule
from fedshuffle.timing.settings import Timing
from fedshuffle.timing.tasks import Tasks

__all__ = [
    "NO_BYTES",
    "Asynchronous",
    "Clock",
    "Deadline",
    "Exponential",
    "InTime",
    "Jitter",
    "LogNormal",
    "MessageSizes",
    "NoJitter",
    "OverSelection",
    "Tasks",
    "Timing",
    "TrainingSchedule",
    "UntilDeadline",
    "Wait",
    "parse_clock",
    "parse_schedule",
    "resolve_clock",
    "resolve_schedule",
]
