"""Asynchronous schedules without training: who arrives in which order, and how stale."""

from functools import partial
from typing import NamedTuple

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.timing.events import ROUNDING, Events
from fedshuffle.timing.jitter import NoJitter
from fedshuffle.timing.schedule import Asynchronous
from fedshuffle.timing.tasks import Tasks


class SimulatedSteps(NamedTuple):
    """The buffers of many server steps: a row for each."""

    clients: IntArray
    staleness: IntArray
    alternatives: IntArray
    """Which of its possible numbers of steps a client was given."""


def simulate(schedule: Asynchronous, tasks: Tasks, seed: int, steps: int) -> SimulatedSteps:
    """The first server steps of a schedule.

    >>> from fedshuffle import LocalWork
    >>> from fedshuffle.timing import Clock
    >>> tasks = Tasks(Clock([1.0, 3.0]), LocalWork().on(np.ones(2, dtype=int)))
    >>> found = simulate(Asynchronous(), tasks, seed=0, steps=4)
    >>> found.clients.ravel().tolist(), found.staleness.ravel().tolist()
    ([0, 0, 0, 1], [0, 0, 0, 3])
    """
    if schedule.loops(len(tasks)):
        return _looping(schedule.buffer, tasks, seed, steps)
    events = Events(schedule, len(tasks), seed, partial(tasks.draw, seed))
    found = [events.arrivals(step) for step in range(steps)]
    clients, addresses = (
        np.array([getattr(a, k) for a in found]) for k in ("clients", "addresses")
    )
    which = np.zeros_like(clients)
    if len(tasks.possible[1]) > 1:
        pairs = zip(addresses.ravel().tolist(), clients.ravel().tolist(), strict=True)
        each = [tasks.alternative(seed, address, client) for address, client in pairs]
        which = np.array(each).reshape(which.shape)
    return SimulatedSteps(clients, np.array([a.staleness for a in found]), which)


def _looping(buffer: int, tasks: Tasks, seed: int, steps: int) -> SimulatedSteps:
    """Clients that loop do not know of each other: the tasks of each at once, then all sorted."""
    needed = steps * buffer
    horizon, found = needed / (1 / tasks.mean).sum(), list[tuple[IntArray, FloatArray]]()
    while sum(len(ends) for _, ends in found) < needed:
        horizon *= 1.1
        found = [_tasks(tasks, seed, client, horizon) for client in range(len(tasks))]
    clients = np.repeat(np.arange(len(found)), [len(ends) for _, ends in found])
    which, when = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(when, kind="stable")
    clients, which, when = clients[order], which[order], when[order]
    instant = np.cumsum(np.diff(when, prepend=0.0) > ROUNDING * when)
    order = np.lexsort((clients, instant))[:needed]
    clients, which, instant = clients[order], which[order], instant[order]
    # All that arrive at an instant are received before anybody starts again.
    versions = np.searchsorted(instant, instant, side="right") // buffer
    by_client = np.argsort(clients, kind="stable")
    started = np.roll(versions[by_client], 1)
    started[np.flatnonzero(np.diff(clients[by_client], prepend=-1))] = 0
    staleness = np.empty(needed, dtype=np.int64)
    staleness[by_client] = by_client // buffer - started
    return SimulatedSteps(*(a.reshape(steps, buffer) for a in (clients, staleness, which)))


def _tasks(tasks: Tasks, seed: int, client: int, horizon: float) -> tuple[IntArray, FloatArray]:
    """The tasks of a client that end before a time: which numbers of steps, and when they end."""
    count = int(1.2 * horizon / tasks.mean[client]) + 10
    fixed = isinstance(tasks.clock.jitter, NoJitter)
    while True:
        which, seconds = tasks.sample(seed, client, count)
        ends = _sums(seconds) if fixed else np.cumsum(seconds)
        if ends[-1] > horizon:
            return which[ends <= horizon], ends[ends <= horizon]
        count *= 2


def _sums(seconds: FloatArray) -> FloatArray:
    """Sums so far of few different numbers, by how often each came: rounding does not add up."""
    values, which = np.unique(seconds, return_inverse=True)
    return np.asarray(np.cumsum(which[:, None] == np.arange(len(values)), axis=0) @ values)
