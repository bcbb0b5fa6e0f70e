"""Over-selection: inclusion probabilities against enumeration, integration and closed forms."""

import contextlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate

from fedshuffle import Federation, FedShuffleError, LocalWork
from fedshuffle.availability import Independent
from fedshuffle.local_work import EpochRange, MissLast
from fedshuffle.sampling import (
    AmongAvailable,
    Full,
    OverSelected,
    Sampling,
    Uniform,
    scheduled,
)
from fedshuffle.testing.problems import DoesNotApplyError
from fedshuffle.testing.sampling_checks import CHECKS
from fedshuffle.timing import Clock, Exponential, LogNormal, OverSelection, Tasks, Timing
from tests.brute import Floats

RATES = np.array([4.0, 2.0, 1.0, 1.0, 0.5])
ONE = LocalWork(steps=1).on(np.ones(5, dtype=np.int64))


def over(keep: int, ask: int, clock: Clock, work: LocalWork | None = None) -> OverSelected:
    sizes = np.ones(len(clock), dtype=np.int64)
    workload = (LocalWork(steps=1) if work is None else work).on(sizes)
    return OverSelected(OverSelection(keep, ask), Tasks(clock, workload))


def one_after_another(rates: Floats, keep: int, ask: int) -> Floats:
    """Exponential times: the next to be done is client i by its rate among those who are not."""
    found = np.zeros(len(rates))
    asked = list(itertools.combinations(range(len(rates)), ask))
    for some in asked:
        for order in itertools.permutations(some, keep):
            left, chance = list(some), 1.0
            for client in order:
                chance *= rates[client] / rates[left].sum()
                left.remove(client)
            found[list(order)] += chance / len(asked)
    return found


@pytest.mark.parametrize(("keep", "ask"), [(1, 2), (2, 4), (3, 3), (4, 5)])
def test_exponential_times_against_their_closed_form(keep: int, ask: int) -> None:
    sampling = over(keep, ask, Clock(1 / RATES, jitter=Exponential()))
    np.testing.assert_allclose(sampling.p, one_after_another(RATES, keep, ask), atol=1e-8)
    assert sampling.p.sum() == pytest.approx(keep)
    pairs = sampling.pair_probabilities()
    np.testing.assert_allclose(np.diag(pairs), sampling.p, atol=1e-8)
    np.testing.assert_allclose(pairs.sum(axis=1), keep * sampling.p, atol=1e-7)


def test_other_times_against_integration() -> None:
    """Two of three are asked: client i counts if the other one is later."""
    clock = Clock([1.0, 2.0, 0.5], jitter=LogNormal(0.7), latency=[0.0, 0.1, 1.5])
    found = over(1, 2, clock).p

    def cdf(t: float, i: int) -> float:
        return float(clock.in_time(t, np.array([i]), np.ones(1, dtype=np.int64))[0])

    for i in range(3):
        others = [j for j in range(3) if j != i]

        def later(u: float, i: int = i, others: list[int] = others) -> float:
            t = float(clock.latency[i] + clock.seconds[i] * clock.jitter.quantile(np.array(u)))
            return sum(1 - cdf(t, j) for j in others)

        want, _ = integrate.quad(later, 0, 1, epsabs=1e-10, limit=500)
        assert found[i] == pytest.approx(want / 3, abs=2e-8)


@pytest.mark.parametrize("epochs", [1, EpochRange(1, 3)])
def test_fixed_times_against_enumeration(epochs: Any) -> None:
    """Ties are broken by the clients' numbers."""
    seconds, keep, ask = np.array([2.0, 1.0, 1.0, 0.5]), 2, 3
    steps = [1] if epochs == 1 else [1, 2, 3]
    want, ways = np.zeros(4), math.comb(4, ask) * len(steps) ** 4
    for asked in itertools.combinations(range(4), ask):
        for planned in itertools.product(steps, repeat=4):
            first = sorted(asked, key=lambda i: (seconds[i] * planned[i], i))[:keep]
            want[first] += 1 / ways
    sampling = over(keep, ask, Clock(seconds), LocalWork(epochs=epochs))
    np.testing.assert_allclose(sampling.p, want, atol=1e-12)
    assert sampling.step_chances is not None
    np.testing.assert_allclose(sampling.step_chances.sum(axis=1), want > 0)


def test_equal_clients_count_equally_however_many() -> None:
    sampling = over(30, 40, Clock(np.full(150, 0.3), jitter=LogNormal(0.2)))
    np.testing.assert_allclose(sampling.p, 30 / 150, atol=1e-8)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_it_is_a_sampling(check: Any) -> None:
    clock = Clock(1 / RATES, jitter=LogNormal(0.5), latency=[0, 0, 0.2, 0.2, 0.4])
    with contextlib.suppress(DoesNotApplyError):
        check(over(2, 4, clock))


@pytest.mark.parametrize(
    ("sampling", "schedule", "work", "message"),
    [
        (Uniform(5, 2), "over:2of4", LocalWork(), "asks 4 clients itself"),
        (AmongAvailable(Full(5), Independent([0.5] * 5)), "over:2of4", LocalWork(), "availability"),
        (Full(5), "over:2of6", LocalWork(), "the number of clients that over:2of6 asks is 6"),
        (Full(5), "over:1of4", LocalWork(), "client 3 needs 3 seconds and, like 2 others"),
        (Full(5), "over:2of4", LocalWork(steps="min"), "its own epochs or steps"),
        (Full(5), "over:2of4", LocalWork(interruption=MissLast()), "leave out one of them"),
    ],
)
def test_bad_input(sampling: Sampling, schedule: str, work: LocalWork, message: str) -> None:
    clients = Federation.from_sizes([1] * 5)
    timing = Timing.of(schedule, "fixed:1,2,2.5,3,0.5", clients)
    with pytest.raises(FedShuffleError, match=message):
        scheduled(sampling, timing, work.on(clients.sizes), clients.ids)
