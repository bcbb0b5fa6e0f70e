"""Estimated probabilities against their definitions, by enumeration and in closed form."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fedshuffle import FedShuffleError
from fedshuffle._arrays import FloatArray
from fedshuffle.availability import Markov
from fedshuffle.experiments import day_and_night
from fedshuffle.probabilities import (
    BetaRate,
    Estimate,
    MovingRate,
    Participation,
    TruncatedIntervals,
    parse,
    resolve,
)

Table = NDArray[np.bool_]
RULES = [TruncatedIntervals(3), MovingRate(0.2), BetaRate(), BetaRate(1, 4)]
FIRST = np.array([0])


def past_of(there: Sequence[Sequence[bool]], rule: Estimate) -> Participation:
    """The participation of a table with a row per round and a column per client."""
    table = np.asarray(there)
    return Participation(table.shape[1], rule, lambda round: np.flatnonzero(table[round]))


def mean_weight(rule: Estimate, p: float, rounds: int) -> tuple[float, float, float]:
    """Over all histories of one client: the means of ``1 / p-hat``, ``p-hat`` and ``p-hat^2``."""
    total = np.zeros(3)
    for history in itertools.product([False, True], repeat=rounds):
        chance = math.prod(p if there else 1 - p for there in history)
        past = past_of([*([there] for there in history), [True]], rule)
        found = past.probabilities(rounds, FIRST).item()
        total += chance * np.array([1 / found, found, found**2])
    return tuple(total.tolist())  # type: ignore[return-value]


# FedAU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cutoff", [1, 2, 3, 7, 1000])
def test_truncated_intervals_are_those_of_the_paper(cutoff: int) -> None:
    """Its algorithm step by step, in which every round costs as much as all clients."""
    chances = [0.9, 0.5, 0.2, 0.03, 1.0]
    table = np.random.default_rng(cutoff).random((120, 5)) < chances
    past = past_of(table.tolist(), TruncatedIntervals(cutoff))
    since, intervals = [0] * 5, [list[int]() for _ in chances]
    for round, there in enumerate(table):
        cohort = np.flatnonzero(there)
        weights = [float(np.mean(intervals[i] or [1])) for i in cohort.tolist()]
        found = 1 / past.probabilities(round, cohort)
        np.testing.assert_allclose(found, np.array(weights))
        for i in range(5):
            since[i] += 1
            if there[i] or since[i] == cutoff:
                intervals[i].append(since[i])
                since[i] = 0


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("cutoff", [1, 2, 10, 50])
def test_moments_of_a_cut_interval(p: float, cutoff: int) -> None:
    q, k = 1 - p, cutoff
    lengths = np.arange(1, k + 1)
    chance = p * q ** (lengths - 1.0)
    chance[-1] = q ** (k - 1)  # cut
    first = (1 - q**k) / p
    second = first + 2 * q * (1 - k * q ** (k - 1) + (k - 1) * q**k) / p**2
    assert chance @ lengths == pytest.approx(first)
    assert chance @ lengths**2 == pytest.approx(second)
    assert 1 / TruncatedIntervals(k).limit(np.array([p])).item() == pytest.approx(first)


def test_the_limit_of_truncated_intervals_for_a_chain() -> None:
    """``E[T] / E[ceil(T / K)]``, where the client returns at once or is away for a geometric time:
    far from the limit of independent rounds. Kac: ``E[T] = 1 / p``.
    """
    on, off, cutoff, rounds = 0.04, 0.1, 10, 40_000
    mean = 1 + off / on
    assert mean == pytest.approx(1 / Markov([on], [off]).probability(0).item())
    pieces = 1 + off * (1 - on) ** (cutoff - 1) / (1 - (1 - on) ** cutoff)
    u = np.random.default_rng(0).random(rounds)
    there, table = True, []
    for number in u.tolist():
        there = number < (1 - off if there else on)
        table.append([there])
    past = past_of([*table, [True]], TruncatedIntervals(cutoff))
    found = 1 / past.probabilities(rounds, FIRST).item()
    assert found == pytest.approx(mean / pieces, rel=0.03)
    assert mean / pieces < 0.9 / TruncatedIntervals(cutoff).limit(np.array([1 / mean])).item()


@pytest.mark.parametrize(("h", "m", "times"), [(5, 4, 6), (20, 10, 30)])
def test_fedau_is_wrong_when_participation_drifts(h: int, m: int, times: int) -> None:
    """A client that comes in each of h rounds, then in every m-th, counts
    ``h (m - 1) (H(h + J - 1) - H(h - 1))`` too little over the next J participations, H harmonic.
    """
    table = [[True]] * h + ([[False]] * (m - 1) + [[True]]) * times
    past = past_of(table, TruncatedIntervals(50))
    counted = sum(
        1 / past.probabilities(round, FIRST).item() for round, [there] in enumerate(table) if there
    )
    harmonic = sum(1 / k for k in range(h, h + times))
    assert counted == pytest.approx(len(table) - h * (m - 1) * harmonic)
    assert counted < 0.8 * len(table)  # what was meant: as one who is always there


# The other rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("b", [0.0, 1.0, 4.0])
def test_the_bias_of_counting(p: float, b: float) -> None:
    for rounds in (0, 1, 7):
        found, _, _ = mean_weight(BetaRate(1, b), p, rounds)
        want = (1 + b + rounds) / (1 + rounds) * (1 - (1 - p) ** (rounds + 1))
        assert p * found == pytest.approx(want, rel=1e-12)


def test_counting_starts_from_the_rate_of_all_clients() -> None:
    """So a first round is weighted as if all clients came alike, and scales are right at once."""
    past = past_of([[True, False, False, True]] * 3, BetaRate())
    np.testing.assert_allclose(past.probabilities(0, np.array([0, 3])), 0.5)
    np.testing.assert_allclose(past.probabilities(2, np.array([0, 3])), 3 / 4)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("p", [0.2, 0.7])
def test_the_moments_of_a_moving_rate(p: float, share: float) -> None:
    """From a rate of p on; ``rate`` is that of the history, so the rule is asked itself."""
    rounds, keep, rule = 9, 1 - share, MovingRate(share)
    mean = square = 0.0
    for history in itertools.product([0, 1], repeat=rounds):
        chance, score, last = 1.0, np.zeros(1), -1
        for round, there in enumerate(history):
            chance *= p if there else 1 - p
            if there:
                score, last = rule.updated(score, np.array([round - last])), round
        found = rule.probability(score, np.array([rounds - last]), rounds, rate=p).item()
        mean, square = mean + chance * found, square + chance * found**2
    assert mean == pytest.approx(p + share * (1 - p), rel=1e-12)
    settled = keep**2 * share / (2 - share) * p * (1 - p)
    assert square - mean**2 == pytest.approx(settled * (1 - keep ** (2 * rounds)), rel=1e-9)


@pytest.mark.parametrize("p", [0.05, 0.4, 1.0])
def test_the_limit_of_a_moving_rate(p: float) -> None:
    """``E[1 / p-hat]`` over all histories; and to first order if the share is small."""
    share, rounds = 0.5, 16
    bits = (np.arange(2**rounds)[:, None] >> np.arange(rounds)) & 1
    rate = share + bits @ (share * (1 - share) ** np.arange(1, rounds + 1))
    chance = np.where(bits, p, 1 - p).prod(axis=1)
    found = MovingRate(share).limit(np.array([p])).item()
    assert 1 / found == pytest.approx(float(chance @ (1 / rate)), rel=2e-4)
    small = MovingRate(1e-3).limit(np.array([p])).item()
    assert p / small == pytest.approx(1 - 1e-3 * (1 - p) / (2 * p), abs=2e-4)


# All of them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_estimates_are_positive_and_a_function_of_the_rounds_before(rule: Estimate) -> None:
    table = np.random.default_rng(1).random((60, 6)) < np.linspace(0.05, 1, 6)
    past = past_of(table.tolist(), rule)
    cohorts = [np.flatnonzero(there) for there in table]
    once = [past.probabilities(round, cohort) for round, cohort in enumerate(cohorts)]
    for round in (3, 50, 0, 59, 59):  # back and forth
        np.testing.assert_array_equal(past.probabilities(round, cohorts[round]), once[round])
    for found in once:
        assert ((found > 0) & (found <= 1 + 1e-12)).all()


@pytest.mark.parametrize("rule", [BetaRate(), BetaRate(2, 3), TruncatedIntervals(10**6)], ids=repr)
def test_estimates_tend_to_the_probabilities(rule: Estimate) -> None:
    chances = np.array([0.1, 0.4, 1.0])
    table = np.random.default_rng(2).random((8000, 3)) < chances
    past = past_of([*table.tolist(), [True] * 3], rule)
    found = past.probabilities(8000, np.arange(3))
    np.testing.assert_allclose(found, chances, atol=4 * math.sqrt(0.25 / 8000))
    np.testing.assert_allclose(rule.limit(chances), chances, rtol=1e-9)


def test_texts() -> None:
    assert parse("estimate") == parse("estimate:bayes") == BetaRate()
    assert parse("estimate:bayes:1,4") == BetaRate(1, 4)
    assert parse("estimate:fedau") == TruncatedIntervals(50)
    assert parse(" estimate:ewma:0.1 ") == MovingRate(0.1)
    assert resolve(MovingRate(0.1)) == MovingRate(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("known", "write 'estimate'"),
        ("estimate:fedua", "fedau"),
        ("estimate:fedau:x", "estimate:fedau:50"),
        ("estimate:fedau:0", "cutoff"),
        ("estimate:fedau:1,2", "estimate:fedau:50"),
        ("estimate:ewma:1", "moving rate"),
        ("estimate:ewma:x", "must be a number"),
        ("estimate:bayes:0", "Beta prior"),
        ("estimate:bayes:1,-1", "Beta prior"),
        ("estimate:bayes:", "Beta prior"),
    ],
)
def test_bad_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        parse(text)


# Drift ------------------------------------------------------------------------------------------


def drifts(table: Table) -> float:
    return past_of(table.tolist(), BetaRate()).drift(len(table))


def markov(rng: np.random.Generator, rounds: int, on: FloatArray, off: float | FloatArray) -> Table:
    there, rows = rng.random(len(on)) < on / (on + off), []
    for u in rng.random((rounds, len(on))):
        there = u < np.where(there, 1 - off, on)
        rows.append(there)
    return np.array(rows)


@pytest.mark.parametrize("rounds", [50, 70, 100])
def test_counts_of_a_rare_client_do_not_look_like_a_drift_by_chance(rounds: int) -> None:
    """Few pairs of small counts may agree exactly, which is no proof."""
    tables = np.random.default_rng(rounds).random((400, rounds, 1)) < 0.3
    assert sum(drifts(table) > 1 for table in tables) <= 4


@pytest.mark.parametrize("clients", [1, 3, 30])
def test_a_stationary_population_is_hardly_ever_called_a_drifting_one(clients: int) -> None:
    """Also if clients stay for rounds, as long as blocks (here of 16 rounds) are longer."""
    rng, p = np.random.default_rng(clients), np.linspace(0.1, 0.9, clients)
    tables = [rng.random((200, clients)) < p for _ in range(60)]
    tables += [markov(rng, 200, 0.4 * p, 0.3) for _ in range(60)]
    assert sum(drifts(table) > 1 for table in tables) <= 2


def test_clients_that_stay_for_longer_than_a_block_are_no_drift() -> None:
    """A chain forgets in 20 rounds here, and blocks have 16: by the variance of blocks that seems
    to be a drift in most tables.
    """
    rng, p = np.random.default_rng(0), np.linspace(0.05, 0.9, 50)
    slow = [markov(rng, 240, 0.05 * p, 0.05 * (1 - p)) for _ in range(40)]
    assert sum(drifts(table) > 1 for table in slow) <= 2
    t = np.linspace(-0.5, 0.5, 240)[:, None] * 0.3 * np.where(np.arange(50) % 2, 1, -1)
    moving = [rng.random((240, 50)) < np.clip(p + t, 0, 1) for _ in range(20)]
    assert all(drifts(table) > 1 for table in moving)


def test_drifts_are_found() -> None:
    rng, t = np.random.default_rng(0), np.linspace(0, 1, 400)[:, None]
    first, last = np.linspace(0.1, 0.9, 20), np.linspace(0.9, 0.1, 20)
    assert drifts(rng.random((400, 20)) < first + (last - first) * t) > 1
    halves = np.repeat([[True, False], [False, True]], 128, axis=0)
    assert drifts(halves) == np.inf
    assert drifts(np.ones((100, 2), dtype=bool)) == 0
    assert drifts(halves[112:144]) == 0  # too few rounds to tell
    assert drifts(halves[::-1]) == np.inf


def test_day_and_night_are_no_drift_over_many_days() -> None:
    t, zones = np.arange(24 * 20)[:, None], np.arange(24)
    assert drifts((t + zones) % 24 < 12) < 1


def test_a_drift_shows_through_day_and_night() -> None:
    """The populations of docs/research/availability.md, and what the server sees of them."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for population in day_and_night.POPULATIONS:
            there = day_and_night.there(population)
            there = np.tile(there, (240 // len(there), 1))
            table = np.zeros_like(there)
            for seen, row in zip(table, there, strict=True):
                came = np.flatnonzero(row)
                seen[rng.permutation(came)[:10]] = True
            assert (drifts(table) > 1) == (population == "drift")


def test_nobody_in_the_first_rounds_is_no_error() -> None:
    past = past_of([[False, False], [False, True]], BetaRate())
    assert past.probabilities(0, np.array([], dtype=np.int64)).tolist() == []
    assert past.probabilities(1, np.array([1])).tolist() == [0.2]
