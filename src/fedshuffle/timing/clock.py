r"""A clock: how long each client's device and network take for a task.

A task of client i with :math:`\tau` local steps takes

.. math:: T_i = m \ell_i + \frac{b_\mathrm{down}}{d_i} + \frac{b_\mathrm{up}}{u_i}
          + (g \tau + f e_i) s_i J

seconds: the latency of each of m trips, the model on its way down and the update on its way up, by
their bytes and bandwidths, and the steps, ``s_i`` seconds each, times a factor J with mean one that
is drawn for every task. For most methods m = g = 1 and f = 0; others, as MIME, ask twice per round,
or compute g gradients per step and f full gradients besides, of ``e_i`` steps each, those of an
epoch. The clock is virtual: nobody waits. It sends the second request to each client at once, as if
the server needed no answers of the others for it.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, expect, frozen, vector
from fedshuffle.availability.base import BoolArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, uniform, uniforms
from fedshuffle.timing.jitter import Jitter, NoJitter

_PART_OF_STEP = 1e-9  # steps that end this close to a deadline are in time
_NO_TIME = 1e-200  # of the steps of a method that computes full gradients only


class MessageSizes(NamedTuple):
    """The bytes that clients receive and send for a task: for all the same, or an array.

    >>> Clock([1.0], up=10.0).network(np.arange(1), MessageSizes(up=40.0)).tolist()
    [4.0]
    """

    down: float | FloatArray = 0.0
    up: float | FloatArray = 0.0


NO_BYTES = MessageSizes()
"""Messages that take no time."""


class Clock:
    """The time that each client needs for a task.

    Args:
        seconds: of each client, for a local step, or for a whole task.
        per: ``"step"``, or ``"task"`` if its steps do not matter.
        jitter: how the computation varies from task to task.
        latency: seconds that a task of each client takes besides.
        down: bytes per second from the server to each client.
        up: bytes per second from each client to the server.

    >>> from fedshuffle.timing import Exponential
    >>> clock = Clock([0.1, 0.4], jitter=Exponential())
    >>> clock.mean(np.arange(2), steps=np.array([10, 10])).tolist()
    [1.0, 4.0]
    >>> clock.in_time(2.0, np.arange(2), steps=np.array([10, 10])).round(3).tolist()
    [0.865, 0.393]
    """

    def __init__(
        self,
        seconds: ArrayLike,
        per: Literal["step", "task"] = "step",
        jitter: Jitter | None = None,
        latency: ArrayLike = 0.0,
        down: ArrayLike = np.inf,
        up: ArrayLike = np.inf,
    ) -> None:
        self.per, self.jitter = per, NoJitter() if jitter is None else jitter
        expect(self.jitter, Jitter, "the jitter of a clock")
        if per not in ("step", "task"):
            raise FedShuffleError(f"a clock counts per 'step' or per 'task', not {per!r}.")
        n = max(1, np.size(seconds))
        self.seconds = _each(seconds, "seconds", n, "[1e-100, 1e100]")  # rates are finite, too
        self.latency = _each(latency, "latency", n, "[0, inf)")
        self.down = _each(down, "down", n, "(0, inf]")
        self.up = _each(up, "up", n, "(0, inf]")
        self._gradients, self._before = 1, np.zeros(n)

    def __len__(self) -> int:
        return len(self.seconds)

    def __repr__(self) -> str:
        low, high = self.seconds.min(), self.seconds.max()
        span = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        jitter = "" if isinstance(self.jitter, NoJitter) else f", jitter {self.jitter}"
        return f"{span} seconds per {self.per}{jitter}"

    @property
    def has_bandwidths(self) -> bool:
        """Whether the bytes of messages matter."""
        return bool(np.isfinite(self.down).any() or np.isfinite(self.up).any())

    def network(self, clients: IntArray | int, sizes: MessageSizes = NO_BYTES) -> FloatArray:
        """The seconds that messages of these clients are on their way."""
        on_the_way = sizes.down / self.down[clients] + sizes.up / self.up[clients]
        return np.asarray(self.latency[clients] + on_the_way)

    def computing(
        self, clients: IntArray | int, steps: IntArray | int, share: float | FloatArray = 1.0
    ) -> FloatArray:
        """The mean seconds that these clients compute, up to a share of their steps."""
        if self.per == "task":
            return np.asarray(self.seconds[clients] * share)
        done = self._gradients * steps * share + self._before[clients]
        return np.asarray(self.seconds[clients] * done)

    def mean(
        self, clients: IntArray, steps: IntArray, sizes: MessageSizes = NO_BYTES
    ) -> FloatArray:
        """The mean seconds of a task."""
        return self.network(clients, sizes) + self.computing(clients, steps)

    def durations(
        self,
        seed: int,
        task: int | IntArray,
        clients: IntArray,
        steps: IntArray,
        sizes: MessageSizes = NO_BYTES,
    ) -> FloatArray:
        """The seconds that a task takes: a pure function of (seed, task, client).

        The task is the round, or another number that tells a client's tasks apart; or one for each.
        """
        factor = self._factor(seed, task, clients)
        return self.network(clients, sizes) + self.computing(clients, steps) * factor

    def duration(
        self, seed: int, task: int, client: int, steps: int, sizes: MessageSizes = NO_BYTES
    ) -> float:
        """The seconds that one task of one client takes: an entry of :meth:`durations`."""
        u = np.float64(uniform(seed, Purpose.CLOCK, round=task, client=client))
        factor = self.jitter.quantile(np.asarray(u))
        return float(self.network(client, sizes) + self.computing(client, steps) * factor)

    def in_time(
        self,
        deadline: float | FloatArray,
        clients: IntArray,
        steps: IntArray,
        sizes: MessageSizes = NO_BYTES,
        share: float | FloatArray = 1.0,
    ) -> FloatArray:
        """The probability that a task, or a share of its steps, ends before the deadline: the
        distribution of ``T_i``.
        """
        left, most = self._most(deadline, clients, steps, sizes, share)
        return np.where(left > 0, self.jitter.cdf(most), 0.0)

    def density(
        self, time: FloatArray, clients: IntArray, steps: IntArray, sizes: MessageSizes = NO_BYTES
    ) -> FloatArray:
        """The density of the seconds that a task takes, if they vary."""
        left = time - self.network(clients, sizes)
        mean = self.computing(clients, steps)
        return np.where(left > 0, self.jitter.density(np.maximum(left, 0.0) / mean) / mean, 0.0)

    def finished(
        self,
        deadline: float,
        seed: int,
        task: int,
        clients: IntArray,
        steps: IntArray,
        sizes: MessageSizes = NO_BYTES,
    ) -> BoolArray:
        """Whether a task ends before the deadline."""
        left, most = self._most(deadline, clients, steps, sizes)
        return np.asarray((left > 0) & (self._factor(seed, task, clients) <= most))

    def steps_by(
        self,
        deadline: float,
        seed: int,
        task: int,
        clients: IntArray,
        planned: IntArray,
        sizes: MessageSizes = NO_BYTES,
    ) -> FloatArray:
        """The number of steps that each client would have done when it must send them."""
        left = np.asarray(deadline - self.network(clients, sizes)) * (1 + _PART_OF_STEP)
        before = self.computing(clients, planned, share=0.0)
        left = left / self._factor(seed, task, clients) - before
        steps = np.maximum(self.computing(clients, planned) - before, _NO_TIME)
        return np.where(left > 0, np.floor(left / steps * planned), 0.0)

    def _most(
        self,
        deadline: float | FloatArray,
        clients: IntArray,
        steps: IntArray,
        sizes: MessageSizes,
        share: float | FloatArray = 1.0,
    ) -> tuple[FloatArray, FloatArray]:
        """The time left to compute before a deadline, and the largest factor that is in time."""
        left = np.asarray(deadline - self.network(clients, sizes))
        # A task that takes exactly as long as it may is in time, whatever rounding does.
        return left, left / self.computing(clients, steps, share) * (1 + _PART_OF_STEP)

    def _factor(self, seed: int, task: int | IntArray, clients: IntArray) -> FloatArray:
        return self.jitter.quantile(uniforms(seed, Purpose.CLOCK, round=task, client=clients))

    def changed(self, **parts: Any) -> "Clock":
        """The same clock with other parts, named as in its arguments.

        >>> Clock([0.1, 0.4]).changed(latency=2).network(np.arange(2)).tolist()
        [2.0, 2.0]
        """
        names = ("seconds", "per", "jitter", "latency", "down", "up")
        return Clock(**{name: getattr(self, name) for name in names} | parts)

    def charged(self, gradients: int, before: IntArray, trips: int) -> "Clock":
        """The same devices for tasks of ``trips`` messages each way, with this many gradients per
        step and, of each client, ``before`` its first step.

            >>> clock = Clock([0.1, 0.4], latency=1).charged(2, np.array([5, 5]), trips=2)
            >>> clock.mean(np.arange(2), steps=np.array([10, 10])).tolist()  # 2 + 25 gradients
            [4.5, 12.0]
        """
        found = self.changed(latency=trips * self.latency)
        found._gradients, found._before = gradients, before.astype(np.float64)
        return found


def _each(values: ArrayLike, name: str, n: int, within: str) -> FloatArray:
    """A number in an interval for each of n clients; one stands for all."""
    found = vector(np.atleast_1d(np.asarray(values)), f"{name} of a clock", within=within)
    if len(found) not in (1, n):
        raise FedShuffleError(
            f"the clock has {len(found)} numbers for {name} of {n} clients: give one for each, or"
            " one for all."
        )
    return frozen(np.broadcast_to(found, n).copy())
