"""Estimates from who was asked and who replied, against those of each client by itself."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedshuffle.probabilities import (
    BetaRate,
    Estimate,
    MovingRate,
    Participation,
    Replies,
    TruncatedIntervals,
)

Table = NDArray[np.bool_]
ALL = np.arange(3)


def tables(rounds: int, seed: int, clients: int = 3) -> tuple[Table, Table]:
    """Who is asked in each round, and who of them replies."""
    rng = np.random.default_rng(seed)
    asked = rng.random((rounds, clients)) < rng.random(clients)
    return asked, asked & (rng.random((rounds, clients)) < rng.random(clients))


def after(asked: Table, replied: Table, rule: Estimate) -> Replies:
    found = Replies(rule, asked.shape[1])
    for questions, answers in zip(asked, replied, strict=True):
        found.add(np.flatnonzero(questions), np.flatnonzero(answers))
    return found


@given(rounds=st.integers(0, 40), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_client_is_estimated_by_the_rounds_in_which_it_was_asked(rounds: int, seed: int) -> None:
    asked, replied = tables(rounds, seed)
    for rule in (TruncatedIntervals(3), BetaRate(1, 4)):
        found = after(asked, replied, rule).probabilities(ALL)
        for i, estimate in enumerate(found.tolist()):
            own = [np.arange(int(there)) for there in replied[asked[:, i], i]]
            alone = Participation(1, rule, own.__getitem__)
            assert estimate == pytest.approx(alone.probabilities(len(own), np.array([0])).item())
    rate, share = (1 + replied.sum()) / (1 + asked.sum()), 0.2
    by_hand = np.full(3, rate)
    for questions, answers in zip(asked, replied, strict=True):
        by_hand[questions] += share * (answers[questions] - by_hand[questions])
    found = after(asked, replied, MovingRate(share)).probabilities(ALL)
    np.testing.assert_allclose(found, share + (1 - share) * by_hand)
    times, answers = asked.sum(axis=0), replied.sum(axis=0)
    found = after(asked, replied, BetaRate()).probabilities(ALL)
    np.testing.assert_allclose(found, (1 + answers) / (1 / rate + times))


def test_state_is_all_there_is_also_as_json_and_with_more_clients() -> None:
    asked, replied = tables(150, 1, clients=5)
    asked[:100, 3:] = replied[:100, 3:] = False  # they join later
    whole = after(asked, replied, BetaRate())
    first = after(asked[:100, :3], replied[:100, :3], BetaRate())
    state = {name: array.tolist() for name, array in first.state().items()}
    resumed = Replies(BetaRate(), 3)
    resumed.restore(json.loads(json.dumps(state)))
    resumed.grow(5)
    for questions, answers in zip(asked[100:], replied[100:], strict=True):
        resumed.add(np.flatnonzero(questions), np.flatnonzero(answers))
    np.testing.assert_array_equal(
        resumed.probabilities(np.arange(5)), whole.probabilities(np.arange(5))
    )
    assert resumed.drift() == whole.drift()


def test_drift_is_that_of_replies_not_of_questions() -> None:
    rng, first = np.random.default_rng(0), np.linspace(0.1, 0.9, 20)
    t = np.linspace(0, 1, 400)[:, None]
    asked = rng.random((400, 20)) < first + (first[::-1] - first) * t  # which drifts
    u, called = rng.random((20, 400, 20)), 0
    for draws in u:
        called += after(asked, asked & (draws < first), BetaRate()).drift() > 1
    assert called <= 1
    drifting = asked & (u[0] < first + (first[::-1] - first) * t)
    assert after(asked, drifting, BetaRate()).drift() > 1
    late = np.repeat([[True, False], [True, True]], 128, axis=0)  # a client joins, and stays
    assert after(late, late, BetaRate()).drift() == 0
    thirds = np.ones((192, 1), dtype=bool)
    assert after(thirds, np.arange(192)[:, None] % 3 == 0, BetaRate()).drift() < 1
