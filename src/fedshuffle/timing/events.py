r"""Asynchronous schedules, event by event: who arrives when, and from which model it started.

This is bookkeeping: it knows times and numbers of models, no tensors. C tasks are under way. At
each instant (times that differ by rounding alone are one), the server

1. receives the updates that arrive, in the order of the clients' numbers, into a buffer; whenever
   it holds K, it makes a step, from the model of version r to that of version r + 1;
2. sends the current model to one client for each update that arrived.

So if all clients train (K = C = n) and take equally long, every step is a synchronous round.

References: Xie et al., Asynchronous Federated Optimization, 2019 (FedAsync, K = 1); Nguyen et al.,
Federated Learning with Buffered Asynchronous Aggregation, 2022 (FedBuff); Leconte et al.,
Queueing Dynamics of Asynchronous Federated Learning, 2024 (Generalized AsyncSGD, draw "queued");
Islamov et al., AsGrad: A Sharp Unified Analysis of Asynchronous-SGD Algorithms, 2024 ("shuffled").
"""

import abc
import heapq
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from fedshuffle._arrays import IntArray
from fedshuffle.randomness import Purpose, generator, uniforms
from fedshuffle.timing.schedule import Asynchronous

Duration = Callable[[int, int], float]
"""The seconds of a task, from its address and its client."""

_REPEAT = 1 << 40  # apart are the addresses of tasks that a client starts from the same model
ROUNDING = 1e-12
"""Relative to the time: what ends closer together ends at the same instant, as rounding decides."""
_BLOCK = 1024  # random numbers that are drawn at a time


_client = attrgetter("client")


class Task(NamedTuple):
    """A client at work; tasks are ordered by when they end."""

    ends: float
    client: int
    address: int
    """The round that its random numbers are drawn for: the version of the model that it starts
    from, and another number if the client has started from that one before."""

    @property
    def version(self) -> int:
        """The number of server steps before the model that it starts from."""
        return self.address % _REPEAT


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The buffer of a server step: an entry for each update, in the order in which they came."""

    clients: IntArray
    versions: IntArray
    """Of the models that the updates started from."""
    addresses: IntArray
    """The rounds that random numbers were drawn for."""
    staleness: IntArray
    """The number of server steps since then."""
    time: float
    """When the server makes the step."""
    released: frozenset[int]
    """Versions that no update will start from or come back to after this step."""


class Events:
    """The server steps of an asynchronous schedule: a pure function of (seed, step).

    Steps are made one after another; asking for one before the last two begins again. Memory grows
    with the number of tasks under way, not with the number of clients.

        >>> times = [1.0, 3.0]  # two clients that loop
        >>> events = Events(Asynchronous(), 2, seed=0, duration=lambda task, i: times[i])
        >>> found = [events.arrivals(step) for step in range(4)]
        >>> [(int(a.clients[0]), int(a.staleness[0]), a.time) for a in found]
        [(0, 0, 1.0), (0, 0, 2.0), (0, 0, 3.0), (1, 3, 3.0)]
    """

    def __init__(self, schedule: Asynchronous, clients: int, seed: int, duration: Duration) -> None:
        self.schedule, self._n, self._seed, self._duration = schedule, clients, seed, duration
        self._restart()

    def _restart(self) -> None:
        self._done, self._steps, self._last = 0, self._run(), deque[Arrivals](maxlen=2)

    def arrivals(self, step: int) -> Arrivals:
        """The buffer of a server step, numbered from 0."""
        if step < self._done - len(self._last):
            self._restart()
        while self._done <= step:
            self._last.append(next(self._steps))
            self._done += 1
        return self._last[step - self._done]

    def _run(self) -> Iterator[Arrivals]:
        draw, freed = drawing(self.schedule, self._n, self._seed)
        time, version, buffer = 0.0, 0, list[Task]()
        under_way: list[Task] = []  # a heap
        free_at: dict[int, float] = {}  # when busy clients will have done all their tasks
        started = Counter[int]()  # tasks of each client from the current version
        needed = Counter[int]()  # updates to come from each version
        while True:
            for _ in range(freed):
                client = draw.start()
                address = version + started[client] * _REPEAT
                begins = max(time, free_at.get(client, 0.0))  # a client does tasks one by one
                free_at[client] = begins + self._duration(address, client)
                heapq.heappush(under_way, Task(free_at[client], client, address))
                started[client] += 1
                needed[version] += 1
            arrived, until = list[Task](), under_way[0].ends * (1 + ROUNDING)
            while under_way and under_way[0].ends <= until:
                arrived.append(heapq.heappop(under_way))
            time, freed = arrived[-1].ends, len(arrived)
            for task in sorted(arrived, key=_client):
                if free_at[task.client] == task.ends:
                    del free_at[task.client]
                draw.end(task.client)
                buffer.append(task)
                if len(buffer) == self.schedule.buffer:
                    yield _received(buffer, version, time, needed)
                    started.clear()
                    buffer, version = [], version + 1


def _received(buffer: list[Task], version: int, time: float, needed: Counter[int]) -> Arrivals:
    """The arrivals of a server step; they are needed no more."""
    clients = np.array([task.client for task in buffer])
    addresses = np.array([task.address for task in buffer])
    versions = addresses % _REPEAT
    used = Counter(versions.tolist())
    needed.subtract(used)
    released = frozenset(v for v in (version, *used) if not needed[v])
    for v in released:
        del needed[v]
    return Arrivals(clients, versions, addresses, version - versions, time, released)


# Who starts next ----------------------------------------------------------------------------------


class Draw(abc.ABC):
    """Which client starts the next task."""

    def __init__(self, n: int, seed: int) -> None:
        self._n, self._seed, self._number = n, seed, 0

    @abc.abstractmethod
    def start(self) -> int:
        """The client that starts."""

    def end(self, client: int) -> None:  # noqa: B027  # not all draws mind
        """A task of this client has ended."""

    def _below(self, most: int) -> int:
        """A random whole number below another: the next one of a stream."""
        block, place = divmod(self._number, _BLOCK)
        if not place:
            numbers = block * _BLOCK + np.arange(_BLOCK)
            self._uniforms = uniforms(self._seed, Purpose.DISPATCH, round=numbers, client=0)
        self._number += 1
        return int(self._uniforms[place] * most)


class Looping(Draw):
    """The client whose task has ended; at first all."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(n, seed)
        self._free = deque(range(n))

    def start(self) -> int:
        return self._free.popleft()

    def end(self, client: int) -> None:
        self._free.append(client)


class AmongIdle(Draw):
    """Uniformly among those without a task."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(n, seed)
        self._busy: list[int] = []  # sorted

    def start(self) -> int:
        rank = self._below(self._n - len(self._busy))
        # busy[k] - k clients below busy[k] are idle.
        before = bisect_right(range(len(self._busy)), rank, key=lambda k: self._busy[k] - k)
        self._busy.insert(before, rank + before)
        return rank + before

    def end(self, client: int) -> None:
        del self._busy[bisect_left(self._busy, client)]


class AmongAll(Draw):
    """Uniformly among all, busy or not."""

    def start(self) -> int:
        return self._below(self._n)


class InRandomOrder(Draw):
    """Everybody once, in random order, then again in another. It holds one order of all."""

    def start(self) -> int:
        passes, place = divmod(self._number, self._n)
        if not place:
            self._order = generator(self._seed, Purpose.DISPATCH, round=passes).permutation(self._n)
        self._number += 1
        return int(self._order[place])


_DRAWS: dict[str, type[Draw]] = {
    "idle": AmongIdle,
    "queued": AmongAll,
    "shuffled": InRandomOrder,
}


def drawing(schedule: Asynchronous, n: int, seed: int) -> tuple[Draw, int]:
    """Who starts next, and how many train at a time."""
    at_a_time = schedule.at_a_time(n)
    kind = Looping if schedule.loops(n) else _DRAWS[schedule.draw]
    return kind(n, seed), at_a_time
