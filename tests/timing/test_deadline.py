"""Deadlines: who is in time, with which probability, and how much is done by then."""

from typing import Any

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError, LocalWork
from fedshuffle.availability import Independent, Leaving
from fedshuffle.local_work import EpochRange, Workload
from fedshuffle.sampling import AmongAvailable, Full, Sampling, Uniform, scheduled
from fedshuffle.timing import (
    Clock,
    Exponential,
    InTime,
    LogNormal,
    MessageSizes,
    Timing,
    UntilDeadline,
)

CLIENTS = Federation.from_sizes([4, 8, 12])
CLOCK = Clock([0.1, 0.2, 0.3], jitter=Exponential(), latency=[0.0, 0.2, 0.4], up=[10.0, 5.0, 5.0])
SIZES = MessageSizes(up=1.0)  # 0.1, 0.2 and 0.2 seconds
LEFT = 2 - np.array([0.1, 0.4, 0.6])


def bound(
    schedule: str, work: LocalWork, sampling: Sampling, clock: Clock = CLOCK
) -> tuple[AmongAvailable, Workload]:
    timing = Timing.of(schedule, clock, CLIENTS, SIZES)
    found, workload = scheduled(sampling, timing, work.on(CLIENTS.sizes), CLIENTS.ids)
    assert isinstance(found, AmongAvailable)
    return found, workload


def in_time(epochs: int) -> Any:
    return 1 - np.exp(-LEFT / (np.array([0.1, 0.2, 0.3]) * epochs * CLIENTS.sizes))


def test_probability_is_that_of_being_in_time() -> None:
    found, _ = bound("deadline:2", LocalWork(), Uniform(3, 2))
    np.testing.assert_allclose(found.p, 2 / 3 * in_time(1), rtol=1e-8)
    found, _ = bound("deadline:2", LocalWork(epochs=EpochRange(1, 2)), Full(3))
    both = np.stack([in_time(1), in_time(2)], axis=1) / 2
    np.testing.assert_allclose(found.p, both.sum(axis=1), rtol=1e-8)
    assert found.step_chances is not None
    np.testing.assert_allclose(found.step_chances, both / both.sum(axis=1)[:, None])


def test_composes_with_availability_and_with_clients_that_leave() -> None:
    there = Leaving(Independent([0.9, 0.5, 0.7]), [0.1, 0.2, 0.3])
    among = AmongAvailable(Uniform(3, 2), there)
    found, _ = bound("deadline:2", LocalWork(), among)
    np.testing.assert_allclose(found.p, among.p * in_time(1), rtol=1e-8)
    leaves = 1 - np.array([0.9, 0.8, 0.7]) * in_time(1)
    same = AmongAvailable(Uniform(3, 2), Leaving(Independent([0.9, 0.5, 0.7]), leaves))
    np.testing.assert_allclose(found.pair_probabilities(), same.pair_probabilities(), rtol=1e-7)


@pytest.mark.parametrize("schedule", ["deadline:2", "deadline:2+partial"])
def test_those_in_time_take_part_of_those_that_are_asked_anyway(schedule: str) -> None:
    """The server asks the same clients as one that waits, so that runs can be compared."""
    work = LocalWork(epochs=EpochRange(1, 2))
    found, _ = bound(schedule, work, Uniform(3, 2))
    rounds, count = 600, np.zeros(3)
    for round in range(rounds):
        asked = found.asked(1, round)
        np.testing.assert_array_equal(asked, Uniform(3, 2).draw(1, round))
        planned = work.on(CLIENTS.sizes).planned(asked, 1, round)
        steps = planned if schedule == "deadline:2" else np.ones_like(planned)
        # A share of the task takes this share of its computation.
        network = CLOCK.network(asked, SIZES)
        whole = CLOCK.durations(1, round, asked, planned, SIZES) - network
        late = network + whole * steps / planned > 2
        np.testing.assert_array_equal(found.draw(1, round), asked[~late])
        count[asked[~late]] += 1
    error = np.sqrt(found.p * (1 - found.p) / rounds)
    assert (np.abs(count / rounds - found.p) < 4 * error).all()


@pytest.mark.parametrize(("per", "before"), [("step", 0), ("task", 0), ("step", 1)])
def test_unfinished_work_has_the_stated_chances(per: Any, before: int) -> None:
    clock = Clock([0.3, 0.2, 0.3], per=per, jitter=LogNormal(0.8), latency=1.6)
    clock = clock.charged(1, np.full(3, before), trips=1)
    _, workload = bound("deadline:2+partial", LocalWork(), Full(3), clock)
    stop = workload.work.interruption
    assert isinstance(stop, UntilDeadline)
    chances = stop.chances(CLIENTS.sizes)
    np.testing.assert_allclose(chances.sum(axis=1), stop.first_step()[:, 0])
    everyone, rounds, seen = np.arange(3), 1000, np.zeros(chances.shape)
    for round in range(rounds):
        some = everyone[stop.finished(3, round, everyone)]
        done = workload.plan(some, 3, round).done
        seen[some, done - 1] += 1
    assert (np.abs(seen / rounds - chances) <= 4 * np.sqrt(chances / rounds) + 1e-12).all()


def test_a_round_on_time_is_in_time_whatever_rounding_does() -> None:
    clock = Clock([0.1, 0.1, 0.1])
    timing = Timing.of("deadline:1.2", clock, CLIENTS)
    found, _ = scheduled(Full(3), timing, LocalWork().on(CLIENTS.sizes), CLIENTS.ids)
    assert isinstance(found, AmongAvailable)
    assert isinstance(found.availability, InTime)
    assert found.p.tolist() == [1, 1, 1]
    assert found.draw(0, 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            "deadline:1",
            r"client 2 needs 3.6 seconds and is never .*add '\+partial'.*later deadline",
        ),
        ("deadline:0.2+partial", "client 2 needs 3.6 seconds and is never in time.*: set a later"),
        ("deadline:0.05", "client 2 needs 3.6 seconds and, like 2 others, is never in time"),
    ],
)
def test_who_can_never_be_in_time_is_an_error(schedule: str, message: str) -> None:
    timing = Timing.of(schedule, "fixed:0.1,0.1,0.3", CLIENTS)
    with pytest.raises(FedShuffleError, match=message):
        scheduled(Full(3), timing, LocalWork().on(CLIENTS.sizes), CLIENTS.ids)
