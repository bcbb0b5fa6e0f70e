"""The events of asynchronous schedules, against a naive simulation."""

import tracemalloc
from collections import deque
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import FedShuffleError, LocalWork
from fedshuffle.randomness import Purpose, generator, uniform, uniforms
from fedshuffle.timing import Asynchronous, Clock, LogNormal, Tasks
from fedshuffle.timing.events import Events
from fedshuffle.timing.simulation import simulate

REPEAT = 2**40
Step = list[tuple[int, int]]


def seconds(task: int, client: int) -> float:
    """Whole numbers, so that clients often arrive together."""
    return 1.0 + (7 * client + 3 * (task % REPEAT) + 5 * (task // REPEAT)) % 4


def naive(schedule: Asynchronous, n: int, steps: int, seed: int) -> list[Step]:
    """Second by second, with a list of everything: (client, address) of every server step."""
    size, at_a_time, draw = schedule.buffer, schedule.concurrency or n, schedule.draw
    queues: list[deque[int]] = [deque() for _ in range(n)]
    left, time, number, waiting = [0.0] * n, 0, 0, at_a_time
    version, sent, buffer, found = 0, list[tuple[int, int]](), Step(), list[Step]()
    freed: list[int] = list(range(n))
    while len(found) < steps:
        for k in range(waiting):
            u = float(uniforms(seed, Purpose.DISPATCH, round=number, client=0))
            idle = [i for i in range(n) if not queues[i]]
            if draw == "shuffled":
                order = generator(seed, Purpose.DISPATCH, round=number // n).permutation(n)
                client = int(order[number % n])
            elif draw == "queued":
                client = int(u * n)
            else:
                client = freed[k] if at_a_time == n else idle[int(u * len(idle))]
            number += 1
            task = version + REPEAT * sent.count((client, version))
            sent.append((client, version))
            queues[client].append(task)
            if len(queues[client]) == 1:
                left[client] = seconds(task, client)
        time, waiting, freed = time + 1, 0, []
        for i in range(n):
            left[i] -= 1
            if queues[i] and left[i] == 0:
                buffer.append((i, queues[i].popleft()))
                freed.append(i)
                waiting += 1
                left[i] = seconds(queues[i][0], i) if queues[i] else 0.0
                if len(buffer) == size:
                    found.append(buffer)
                    buffer, version = [], version + 1
    return found[:steps]


@given(st.data(), st.sampled_from(["idle", "queued", "shuffled"]), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_events_are_those_of_a_naive_simulation(
    data: st.DataObject, draw: Literal["idle", "queued", "shuffled"], n: int
) -> None:
    at_a_time = data.draw(st.integers(1, n if draw == "idle" else 8))
    schedule = Asynchronous(data.draw(st.integers(1, 5)), at_a_time, 0.5, draw)
    events, models = Events(schedule, n, 3, seconds), {0}
    for step, want in enumerate(naive(schedule, n, 12, 3)):
        found = events.arrivals(step)
        assert list(zip(found.clients, found.addresses, strict=True)) == want
        np.testing.assert_array_equal(found.versions, found.addresses % REPEAT)
        np.testing.assert_array_equal(found.staleness, step - found.versions)
        assert set(found.versions.tolist()) <= models  # what is released is not needed again
        models = (models - found.released) | {step + 1}
        assert len(models) <= at_a_time + schedule.buffer


def test_earlier_steps_can_be_asked_for_again() -> None:
    events = Events(Asynchronous(2, 3), 5, 1, seconds)
    first = [events.arrivals(step) for step in range(20)]
    for step in (19, 7, 8, 0, 15):
        np.testing.assert_array_equal(events.arrivals(step).addresses, first[step].addresses)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_looping_clients_all_at_once_are_those_event_by_event(
    times: list[int], buffer: int
) -> None:
    """Also where several arrive at an instant."""
    work, schedule = LocalWork().on(np.ones(len(times), dtype=np.int64)), Asynchronous(buffer)
    found = simulate(schedule, Tasks(Clock(times), work), 0, 10)
    events = Events(schedule, len(times), 0, lambda task, i: float(times[i]))
    for step in range(10):
        np.testing.assert_array_equal(found.clients[step], events.arrivals(step).clients)
        np.testing.assert_array_equal(found.staleness[step], events.arrivals(step).staleness)


@pytest.mark.parametrize("unit", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("at_a_time", [None, 2])
def test_the_unit_of_time_does_not_matter(unit: float, at_a_time: int | None) -> None:
    """Three times 0.1 s end with 0.3 s, though their sum is another number."""
    work, schedule = LocalWork().on(np.ones(3, dtype=np.int64)), Asynchronous(2, at_a_time)
    whole, parts = np.array([3.0, 1.0, 2.0]), np.array([3, 1, 2]) * unit
    events = Events(schedule, 3, 0, lambda task, i: float(parts[i]))
    of_parts, of_whole = (
        simulate(schedule, Tasks(Clock(seconds), work), 0, 5000) for seconds in (parts, whole)
    )
    np.testing.assert_array_equal(of_parts.clients, of_whole.clients)
    np.testing.assert_array_equal(of_parts.staleness, of_whole.staleness)
    for step in range(5000):
        np.testing.assert_array_equal(events.arrivals(step).clients, of_whole.clients[step])
        np.testing.assert_array_equal(events.arrivals(step).staleness, of_whole.staleness[step])


def test_equal_times_are_equal_whatever_rounding_does() -> None:
    events = Events(Asynchronous(2, 2), 2, 0, lambda task, i: 0.1 * 3 if i == 0 else 0.3)
    for step in range(100):
        assert events.arrivals(step).clients.tolist() == [0, 1]
        assert not events.arrivals(step).staleness.any()


@pytest.mark.parametrize("draw", ["idle", "queued"])
def test_memory_does_not_grow_with_the_population(draw: Literal["idle", "queued"]) -> None:
    tracemalloc.start()
    events = Events(Asynchronous(10, 100, draw=draw), 10**12, 0, lambda task, i: 1 + i * 1e-12)
    assert (events.arrivals(50).clients < 10**12).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_one_duration_is_an_entry_of_all() -> None:
    clock = Clock([0.1, 0.3], jitter=LogNormal(0.5), latency=0.2)
    some = clock.durations(5, 9, np.arange(2), np.array([3, 4]))
    assert [clock.duration(5, 9, i, 3 + i) for i in range(2)] == some.tolist()
    address = {"round": 2**41 + 3, "client": 2**33}
    numbers = uniforms(2**63 + 1, Purpose.CLOCK, **address, part=2)
    assert uniform(2**63 + 1, Purpose.CLOCK, **address, part=2) == numbers


def test_more_tasks_than_clients_need_queues() -> None:
    with pytest.raises(FedShuffleError, match=r"C is 5, but there are 3 clients.*'queued:C=5'"):
        Events(Asynchronous(1, 5), 3, 0, seconds).arrivals(0)
    assert len(Events(Asynchronous(7, 2), 3, 0, seconds).arrivals(0).clients) == 7
