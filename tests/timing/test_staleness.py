"""How often and how stale clients arrive: closed forms against enumeration and simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import LocalWork
from fedshuffle._arrays import FloatArray
from fedshuffle.local_work import EpochRange
from fedshuffle.timing import (
    Asynchronous,
    Clock,
    Exponential,
    Jitter,
    LogNormal,
    NoJitter,
    Tasks,
)
from fedshuffle.timing.rates import among_idle, rate_shares
from fedshuffle.timing.simulation import simulate
from fedshuffle.timing.staleness import looping_exponential, mean_weights

FOUR = np.array([0.25, 0.5, 1.0, 2.0])
ODD = np.exp([0.3, 0.5, 1.1, 2.3])  # no common multiples


def times(seconds: FloatArray, jitter: Jitter | None = None) -> Tasks:
    work = LocalWork().on(np.ones(len(seconds), dtype=np.int64))
    return Tasks(Clock(seconds, jitter=jitter), work)


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_shares_of_idle_draws_are_symmetric_polynomials(
    logs: list[float], data: st.DataObject
) -> None:
    theta, busy = np.exp(logs), data.draw(st.integers(1, len(logs) - 1))
    sets = [
        itertools.combinations(np.delete(theta, i).tolist(), busy - 1) for i in range(len(theta))
    ]
    want = np.array([sum(np.prod(some) for some in each) for each in sets])
    found = among_idle(theta, busy)
    np.testing.assert_allclose(found / found.sum(), want / want.sum(), rtol=1e-9)


@pytest.mark.parametrize("busy", [1, 2, 3, 4])
def test_shares_solve_the_markov_chain_of_busy_clients(busy: int) -> None:
    sets = list(itertools.combinations(range(4), busy))
    rates = np.zeros((len(sets), len(sets)))
    for a, b in itertools.product(range(len(sets)), repeat=2):
        ended, started = set(sets[a]) - set(sets[b]), set(sets[b]) - set(sets[a])
        if len(ended) == len(started) == 1:  # who ends is idle, too, when the next one is drawn
            rates[a, b] = 1 / FOUR[ended.pop()] / (4 - busy + 1)
    balance = np.vstack([(rates - np.diag(rates.sum(axis=1))).T, np.ones(len(sets))])
    stationary = np.linalg.lstsq(balance, np.eye(len(sets) + 1)[-1], rcond=None)[0]
    arrivals = np.zeros(4)
    for some, chance in zip(sets, stationary, strict=True):
        arrivals[list(some)] += chance / FOUR[list(some)]
    found = rate_shares(Asynchronous(concurrency=busy), times(FOUR, Exponential()))
    np.testing.assert_allclose(found, arrivals / arrivals.sum(), rtol=1e-9)


def test_shares_in_the_limits() -> None:
    assert rate_shares(Asynchronous(5, 5), times(np.full(5, 0.3))).tolist() == [0.2] * 5
    np.testing.assert_allclose(rate_shares(Asynchronous(1, 1), times(FOUR)), 0.25)
    np.testing.assert_allclose(
        rate_shares(Asynchronous(), times(FOUR)), np.array([8, 4, 2, 1]) / 15
    )
    np.testing.assert_allclose(rate_shares(Asynchronous(1, 9, draw="queued"), times(FOUR)), 0.25)


@pytest.mark.parametrize("jitter", [NoJitter(), LogNormal(1.0)], ids=repr)
def test_shares_of_idle_draws_depend_on_mean_times_only(jitter: Jitter) -> None:
    """With fixed times, several clients arrive at an instant."""
    law, schedule = times(np.array([1.0, 1.0, 2.0, 4.0]), jitter), Asynchronous(concurrency=3)
    found = simulate(schedule, law, 0, 16_000).clients.reshape(16, -1)
    shares = np.stack([np.bincount(row, minlength=4) for row in found]) / 1000
    errors = shares.std(axis=0, ddof=1) / 4
    assert (np.abs(shares.mean(axis=0) - rate_shares(schedule, law)) < 5 * errors).all()


@given(st.floats(0.05, 0.95), st.integers(1, 6), st.floats(0, 3))
@settings(max_examples=50, deadline=None)
def test_mean_weight_of_exponential_times_is_its_series(p: float, buffer: int, a: float) -> None:
    others = np.arange(1200)
    chances = p * (1 - p) ** others
    each = [((1.0 + (b + others) // buffer) ** -a) @ chances for b in range(buffer)]
    found = looping_exponential(np.array([p]), buffer, a)
    np.testing.assert_allclose(found, np.mean(each), rtol=1e-11)


def test_mean_weights_in_the_limits() -> None:
    law = times(FOUR, Exponential())
    assert mean_weights(Asynchronous(3), law).tolist() == [1] * 4  # type: ignore[union-attr]
    assert mean_weights(Asynchronous(staleness=2), times(FOUR[:1], Exponential())) == 1
    np.testing.assert_allclose(looping_exponential(np.array([0.3]), 10**6, 2.0), 1, rtol=1e-5)
    np.testing.assert_allclose(  # of a million clients, stale by a million steps
        looping_exponential(np.array([1e-6]), 1, 1.0), 1e-6 * np.log(1e6), rtol=1e-5
    )
    for exponent in (100.0, 400.0, 1e9):  # only what is not stale counts
        np.testing.assert_allclose(looping_exponential(np.array([0.3]), 1, exponent), 0.3)
    # Times with a common multiple: what is exact for others is not for these, by some permille.
    steps = 0.1 * np.array([53, 59, 61])
    # Rates that add up: the first client is in time with the second exactly when with the third.
    adding = 1 / np.array([1.0, 2**0.5, 1 + 2**0.5])
    for unknown in (times(FOUR), times(steps), times(adding), times(FOUR, LogNormal(1.0))):
        assert mean_weights(Asynchronous(staleness=1), unknown) is None


@pytest.mark.parametrize("buffer", [1, 3])
@pytest.mark.parametrize("jitter", [Exponential(), NoJitter()], ids=repr)
def test_mean_weights_are_those_of_a_simulation(buffer: int, jitter: Jitter) -> None:
    schedule, law = Asynchronous(buffer, staleness=0.7), times(ODD, jitter)
    found = simulate(schedule, law, 1, 200_000)
    weights = schedule.weight(found.staleness).reshape(20, -1)
    rows = list(zip(found.clients.reshape(20, -1), weights, strict=True))
    sums = np.stack([np.bincount(who, by, minlength=4) for who, by in rows])
    means = sums / np.stack([np.bincount(who, minlength=4) for who, _ in rows])
    errors = means.std(axis=0, ddof=1) / np.sqrt(20) + 1e-5
    want = mean_weights(schedule, law)
    assert want is not None
    assert (np.abs(means.mean(axis=0) - want) < 5 * errors).all()


def test_random_epochs_take_random_times() -> None:
    work = LocalWork(epochs=EpochRange(1, 3)).on(np.array([2, 4]))
    law = Tasks(Clock([0.5, 1.0]), work)
    assert law.mean.tolist() == [2, 8]
    assert law.law is None
    which, seconds = law.sample(0, 1, 3000)
    np.testing.assert_array_equal(seconds, 4.0 * (1 + which))
    assert np.bincount(which).min() > 900
    assert law.draw(0, 5, 1) == 4.0 * (1 + law.alternative(0, 5, 1))
