"""Schedules: when the server sends the model, and for whose updates it waits.

A schedule is an object or the text that names one, which :func:`parse` reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, number, shortest
from fedshuffle.errors import FedShuffleError, check_known, unknown

_DRAWS = ("idle", "queued", "shuffled")
_OPTIONS = {"K": "buffer", "C": "concurrency", "a": "staleness"}


@dataclass(frozen=True)
class Wait:
    """The server waits for the whole cohort: a round takes as long as its slowest client.

    >>> parse("wait")
    Wait()
    """

    def __str__(self) -> str:
        return "wait"


@dataclass(frozen=True)
class Deadline:
    """A round ends after this many seconds. Who is late is dropped, or, with ``partial``, sends
    what it has done by then.

        >>> parse("deadline:60+partial")
        Deadline(seconds=60.0, partial=True)
    """

    seconds: float
    partial: bool = False

    def __post_init__(self) -> None:
        number(self.seconds, "the deadline in seconds", within="(0, inf)")

    def __str__(self) -> str:
        return f"deadline:{shortest(self.seconds)}{'+partial' * self.partial}"


@dataclass(frozen=True)
class OverSelection:
    """The server asks ``ask`` clients, uniformly, and takes the first ``keep`` updates.

    >>> parse("over:8of10")
    OverSelection(keep=8, ask=10)
    """

    keep: int
    ask: int

    def __post_init__(self) -> None:
        count(self.ask, "the number of clients to ask")
        count(self.keep, "the number of updates to take", most=self.ask)

    def __str__(self) -> str:
        return f"over:{self.keep}of{self.ask}"


@dataclass(frozen=True)
class Asynchronous:
    r"""The server steps after every ``buffer`` updates, K, while ``concurrency`` clients, C, train.

    An update that began :math:`\theta` server steps ago counts :math:`(1 + \theta)^{-a}` times,
    with ``staleness`` a. When an update arrives, another client starts from the current model:

    - if all clients train at a time (the default), the same one again: clients loop;
    - ``"idle"``: one that is drawn uniformly among those who do not train;
    - ``"queued"``: one that is drawn uniformly among all; a busy one does its tasks one by one
      (Generalized AsyncSGD, Leconte et al. 2024);
    - ``"shuffled"``: the next one of a random order of all, drawn for each pass; a busy one does
      its tasks one by one (shuffled asynchronous SGD, Islamov et al. 2024).

    FedAsync (Xie et al. 2019) is a buffer of 1, FedBuff (Nguyen et al. 2022) a larger one.

        >>> parse("fedbuff:K=10,C=100,a=0.5")
        Asynchronous(buffer=10, concurrency=100, staleness=0.5, draw='idle')
        >>> print(parse("fedasync:a=0.5"))
        fedasync:a=0.5
    """

    buffer: int = 1
    concurrency: int | None = None
    staleness: float = 0.0
    draw: Literal["idle", "queued", "shuffled"] = "idle"

    def __post_init__(self) -> None:
        count(self.buffer, "the buffer K")
        if self.concurrency is not None:
            count(self.concurrency, "the concurrency C")
        number(self.staleness, "the staleness exponent a", within="[0, inf)")
        if self.draw not in _DRAWS:
            raise unknown("draw of an asynchronous schedule", self.draw, _DRAWS)
        if self.draw != "idle" and self.concurrency is None:
            raise FedShuffleError(
                f"{self.draw!r} needs to know how many tasks are under way: give the concurrency,"
                f" as in '{self.draw}:C=10'."
            )

    def weight(self, staleness: FloatArray | IntArray) -> FloatArray:
        r""":math:`s(\theta) = (1 + \theta)^{-a}`: how much updates of this staleness count.

        >>> Asynchronous(staleness=0.5).weight(np.array([0, 3])).tolist()
        [1.0, 0.5]
        """
        return np.asarray(np.power(1.0 + staleness, -self.staleness))

    def at_a_time(self, clients: int) -> int:
        """How many of this number of clients train at a time."""
        if self.concurrency is None:
            return clients
        if self.draw == "idle" and self.concurrency > clients:
            raise FedShuffleError(
                f"the concurrency C is {self.concurrency}, but there are {clients} clients, and"
                f" each has one task at a time: give at most C={clients}, or a schedule with"
                f" queues, 'queued:C={self.concurrency}'."
            )
        return self.concurrency

    def loops(self, clients: int) -> bool:
        """Whether each of this number of clients starts again when its update has arrived."""
        return self.draw == "idle" and self.at_a_time(clients) == clients

    def __str__(self) -> str:
        name = self.draw if self.draw != "idle" else "fedasync" if self.buffer == 1 else "fedbuff"
        values = {"K": self.buffer, "C": self.concurrency, "a": self.staleness}
        unset = {"K": 1, "C": None, "a": 0.0}
        told = [f"{k}={shortest(v)}" for k, v in values.items() if v is not None and v != unset[k]]
        return ":".join([name, *([",".join(told)] if told else [])])


TrainingSchedule = Wait | Deadline | OverSelection | Asynchronous
"""When the server sends the model, and for whose updates it waits."""

_FORMS = {
    "wait": "wait",
    "deadline": "deadline:SECONDS or deadline:SECONDS+partial",
    "over": "over:8of10",
    "fedasync": "fedasync or fedasync:a=0.5,C=10",
    "fedbuff": "fedbuff:K=10,C=100,a=0.5",
    "queued": "queued:C=10",
    "shuffled": "shuffled:C=10",
}


def parse(text: str) -> TrainingSchedule:
    """The schedule that a text names.

    =============================  ==========================================================
    ``wait``                       the server waits for the whole cohort
    ``deadline:60``                who is late is dropped; ``+partial``: sends what it has
    ``over:8of10``                 asks 10 clients, takes the first 8 updates
    ``fedasync:a=0.5``             a step for every update; stale ones count less
    ``fedbuff:K=10,C=100``         a step for every 10 updates, 100 clients train at a time
    ``queued:C=10``                clients are drawn among all, and do their tasks one by one
    ``shuffled:C=10``              clients in random order, each once per pass
    =============================  ==========================================================

        >>> parse("over:12of10")
        Traceback (most recent call last):
        fedshuffle.errors.FedShuffleError: schedule 'over:12of10': the number of updates to take ...
    """
    name, _, argument = text.strip().partition(":")
    check_known("schedule", name, _FORMS)
    try:
        return _MAKERS[name](argument)
    except FedShuffleError as error:
        raise FedShuffleError(f"schedule {text!r}: {error}") from error
    except (ValueError, TypeError) as error:
        raise FedShuffleError(f"schedule {text!r} cannot be read: write {_FORMS[name]}.") from error


def resolve(schedule: str | TrainingSchedule | None) -> TrainingSchedule:
    """A schedule, given as text or as it is; by default the server waits for all.

    >>> resolve(None), resolve("over:8of10")
    (Wait(), OverSelection(keep=8, ask=10))
    """
    if schedule is None:
        return Wait()
    if isinstance(schedule, str):
        return parse(schedule)
    if not isinstance(schedule, TrainingSchedule):
        raise FedShuffleError(
            f"schedule is {schedule!r:.60}, but must be a text, such as 'fedbuff:K=10,C=100', or an"
            " object of fedshuffle.timing."
        )
    return schedule


def _wait(argument: str) -> Wait:
    if argument:
        raise ValueError(argument)
    return Wait()


def _deadline(argument: str) -> Deadline:
    seconds = argument.removesuffix("+partial")
    return Deadline(float(seconds), partial=seconds != argument)


def _over(argument: str) -> OverSelection:
    keep, ask = argument.split("of")
    return OverSelection(int(keep), int(ask))


def _asynchronous(
    draw: Literal["idle", "queued", "shuffled"], needs_buffer: bool = False
) -> Callable[[str], Asynchronous]:
    def make(argument: str) -> Asynchronous:
        values: dict[str, Any] = {}
        for word in argument.split(",") if argument else ():
            key, value = (part.strip() for part in word.split("="))
            check_known("option", key, _OPTIONS)
            if _OPTIONS[key] in values:
                raise FedShuffleError(f"{key} is given twice: leave out one of them.")
            given = float(value)
            values[_OPTIONS[key]] = int(given) if given.is_integer() else given
        if needs_buffer and "buffer" not in values:
            raise ValueError(argument)
        return Asynchronous(**values, draw=draw)

    return make


_MAKERS: dict[str, Callable[[str], TrainingSchedule]] = {
    "wait": _wait,
    "deadline": _deadline,
    "over": _over,
    "fedasync": _asynchronous("idle"),
    "fedbuff": _asynchronous("idle", needs_buffer=True),
    "queued": _asynchronous("queued"),
    "shuffled": _asynchronous("shuffled"),
}
