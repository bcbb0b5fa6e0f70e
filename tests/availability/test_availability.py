"""Who is there: pure functions of (seed, round, client), with the stated probabilities."""

import itertools
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedshuffle import Federation, FedShuffleError
from fedshuffle.availability import (
    Availability,
    Cyclic,
    Drifting,
    Groups,
    Independent,
    Leaving,
    Markov,
    Trace,
    parse,
    pinned,
    resolve,
)
from fedshuffle.randomness import Purpose, uniforms
from fedshuffle.sampling import AmongAvailable, Uniform

EVERY = [
    Independent([0.9, 0.5, 0.2, 1.0]),
    Markov(on=[0.1, 0.5, 0.9, 0.3], off=[0.2, 0.5, 0.8, 0.0]),
    Cyclic([0, 1, 2, 5], period=6, share=0.5, day=0.9, night=0.1),
    Groups([0, 1, 1, 0], Markov([0.2, 0.4], [0.3, 0.3])),
    Drifting([0.9, 0.5, 0.2, 0.1], [0.1, 0.5, 0.9, 0.3], rounds=50),
    Trace(4, [0, 1, 2, 3, 0], [0, 2, 4, 0, 8], [4, 6, 9, 10, 10]),
    Leaving(Independent([0.9, 0.5, 0.2, 1.0]), [0.1, 0.2, 0.0, 0.5]),
]


@pytest.mark.parametrize("availability", EVERY, ids=repr)
def test_is_a_pure_function_of_seed_round_and_client(availability: Availability) -> None:
    everyone = np.arange(4)
    for seed, round in itertools.product((0, 2**64 - 1), (0, 7, 1000)):
        together = availability.available(seed, round, everyone)
        alone = [availability.available(seed, round, np.array([i]))[0] for i in (3, 1, 0, 2)]
        assert together[[3, 1, 0, 2]].tolist() == alone


@pytest.mark.parametrize("availability", EVERY, ids=repr)
@pytest.mark.parametrize("round", [0, 3, 40])
def test_is_there_as_often_as_stated(availability: Availability, round: int) -> None:
    """Over seeds, in every round: a chain starts in its stationary distribution."""
    seeds, q = 1500, availability.probability(round)
    found = sum(availability.available(seed, round, np.arange(4)) for seed in range(seeds)) / seeds
    np.testing.assert_array_less(np.abs(found - q), 4.5 * np.sqrt(q * (1 - q) / seeds) + 1e-12)
    np.testing.assert_array_equal(availability.at(round).probability(5), q)


@pytest.mark.parametrize(
    ("on", "off"), [(0.1, 0.2), (0.7, 0.5), (0.9, 0.8), (0.5, 0.5), (0.02, 0.01), (0.3, 0.0)]
)
@pytest.mark.parametrize("begin", [0, 8, 31, 998])
def test_a_chain_takes_each_path_as_often_as_its_rates_say(
    on: float, off: float, begin: int
) -> None:
    """All paths of five rounds, which also cross the blocks of about 1 / (on + off) rounds."""
    clients = np.arange(20_000)
    chain = Markov(np.full(len(clients), on), np.full(len(clients), off))
    seen = np.array([chain.available(5, begin + t, clients) for t in range(5)])
    found = np.bincount(2 ** np.arange(5) @ seen, minlength=32).tolist()
    steps, q = np.array([[1 - on, on], [off, 1 - off]]), on / (on + off)
    for code in range(32):
        path = [code >> t & 1 for t in range(5)]
        chance = (q if path[0] else 1 - q) * math.prod(steps[a, b] for a, b in pairwise(path))
        assert stats.binomtest(found[code], len(clients), chance).pvalue > 1e-6, path


@pytest.mark.parametrize(("on", "off"), [(0.9, 0.5), (0.8, 0.9), (0.3, 0.3), (0.5, 0.5)])
def test_clients_leave_whatever_brought_them(on: float, off: float) -> None:
    """Who leaves does not depend on what the chain has drawn."""
    clients = np.arange(20_000)
    chain = Markov(np.full(len(clients), on), np.full(len(clients), off))
    leaving, chance = Leaving(chain, np.full(len(clients), 0.6)), on / (on + off) * 0.4
    for round in (0, 1, 6, 7, 21):
        stays = leaving.available(3, round, clients) & leaving.answers(3, round, clients)
        assert stats.binomtest(int(stays.sum()), len(clients), chance).pvalue > 1e-4


def test_a_slow_chain_forgets_as_its_rates_say() -> None:
    """The correlation of two rounds is (1 - on - off) to the power of their distance."""
    clients, rate = np.arange(40_000), 1e-4
    chain = Markov(np.full(len(clients), rate), np.full(len(clients), rate))
    now = chain.available(3, 50_000, clients)
    for distance in (1, 1000, 5000, 20_000):
        before = chain.available(3, 50_000 - distance, clients)
        expected = (1 + (1 - 2 * rate) ** distance) / 2
        spread = math.sqrt(expected * (1 - expected) / len(clients))
        assert abs((now == before).mean() - expected) < 5 * spread


def test_hashed_numbers_are_uniform_and_independent() -> None:
    numbers = uniforms(
        7, Purpose.AVAILABILITY, round=np.arange(200)[:, None], client=np.arange(500)
    )
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    for other in (numbers[1:], numbers[:, 1:]):  # the next round, the next client
        here = numbers[: len(other), : other.shape[1]]
        assert abs(np.corrcoef(here.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(here.size)
    others = [
        uniforms(8, Purpose.AVAILABILITY, round=0, client=np.arange(1000)),
        uniforms(7, Purpose.COHORT, round=0, client=np.arange(1000)),
        uniforms(7, Purpose.AVAILABILITY, round=0, client=np.arange(1000), part=1),
    ]
    first = uniforms(7, Purpose.AVAILABILITY, round=0, client=np.arange(1000))
    for one in others:
        assert not np.isin(one, first).any()
    bits = (first[:, None] * 2.0 ** np.arange(1, 33)).astype(np.int64) % 2
    assert (np.abs(bits.mean(axis=0) - 0.5) < 0.08).all()


@pytest.mark.parametrize("slow", [1, 1e-3])
def test_a_round_of_a_million_markov_clients_looks_at_few(
    slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the numbers that are drawn; benchmarks/population.py measures the time."""
    drawn = 0

    def counted(*arguments: Any, **places: Any) -> Any:
        nonlocal drawn
        numbers = uniforms(*arguments, **places)
        drawn += numbers.size
        return numbers

    monkeypatch.setattr("fedshuffle.availability.markov.uniforms", counted)
    n = 10**6
    chain = Markov(np.full(n, slow * 0.05), np.repeat([slow * 0.05, slow * 0.1], n // 2))
    sampling = AmongAvailable(Uniform(n, 100), chain)
    for round in range(100_000, 100_010):
        assert len(sampling.draw(1, round)) == 100
    assert drawn / 10 < n / 100
    assert sampling.p.sum() == pytest.approx(100, abs=1e-9)


# Texts --------------------------------------------------------------------------------------------

THREE = Federation.from_sizes([1, 2, 3])


def test_texts_name_availabilities(tmp_path: Path) -> None:
    def q(text: str, round: int = 0) -> list[float]:
        found = parse(text, THREE, rounds=3, folder=tmp_path).probability(round)
        return [float(value) for value in found.round(9)]

    (tmp_path / "week.csv").write_text("client, begin, end\n0,0,2\n1,1,3\n2,0,3\n")
    assert q("independent:0.9,0.5,0.2") == [0.9, 0.5, 0.2]
    assert q("independent:0.5") == [0.5] * 3
    assert q("markov:on=0.1,off=0.1,0.3,0.4") == [0.5, 0.25, 0.2]
    assert q("markov:off=0.1,on=0.3,0.1,0.1") == [0.75, 0.5, 0.5]
    assert q("cyclic:4:0.5:0,1,2", round=1) == [1.0, 0.0, 0.0]
    assert q("groups:0,0,1:independent:0.9,0.5") == [0.9, 0.9, 0.5]
    assert q("groups:2:independent:0.9,0.5") == [0.9, 0.9, 0.5]
    assert q("drifting:0.9,0.5,0.1:0.1,0.5,0.9", round=1) == [0.5] * 3
    assert q("drifting:0.9:0.1:9", round=4) == [0.5] * 3
    assert q("trace:week.csv", round=2) == [0.0, 1.0, 1.0]
    (tmp_path / "shifts.csv").write_text("client,begin,end\n0,0,1\n1,2,3\n")
    assert q("groups:0,1,0:trace:shifts.csv+gaps", round=1) == [0.0] * 3
    leaving = parse("independent:0.5+leaves:0.1,0.2,0.3+drop", THREE)
    assert leaving.leaves is not None
    assert leaving.leaves.tolist() == [0.1, 0.2, 0.3]
    assert leaving.drop
    zones = parse("cyclic:24:0.25", THREE)
    assert isinstance(zones, Cyclic)
    assert zones.share == 0.25
    assert pinned("groups:2:drifting:0.9:0.1", 7) == "groups:2:drifting:0.9:0.1:7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sometimes:0.5", "unknown availability"),
        ("independent", "incomplete"),
        ("independent:0.9,0.5", "2 numbers for 3 clients"),
        ("independent:0.9,0.5,1.5", "client 2 has 1.5"),
        ("independent:0.9,half,1", "'half'"),
        ("independent:-0.1", "client 0 has -0.1"),
        ("independent:nan", "client 0 has nan"),
        ("markov:on=-0.1,off=0.2", "on rates: client 0 has -0.1"),
        ("markov:on=0.1,off=1.2", "off rates: client 0 has 1.2"),
        ("markov:on=0.1", "write 'markov"),
        ("markov:0.1,0.2", "write 'markov"),
        ("markov:on=0,off=0", "neither comes nor goes"),
        ("markov:on=0.5,1,0.5,off=1", "client 1 always changes.*cyclic:2:0.5"),
        ("markov:on=0.1,off=0.2,up=3", "write 'markov"),
        ("cyclic:0:0.5", "period"),
        ("cyclic:24:1.5", "share of a day"),
        ("cyclic:1000000000:0.5", "in rounds, is 1000000000.*from 1 to 1000000"),
        ("cyclic:24", "write 'cyclic"),
        ("groups:0,0,5:independent:0.5,0.5", "2 numbers for 6 clients"),
        ("groups:-1,0,0:independent:0.5", "groups go from -1"),
        ("groups:2", "write 'groups:LABELS:KIND'"),
        ("drifting:0.9:0.1", "give rounds"),
        ("drifting:0.9:0.1:1", "rounds of the drift"),
        ("drifting:0.9:0.1:1000000000", "rounds of the drift is 1000000000"),
        ("trace:none.csv", "cannot read the trace"),
        ("independent:0.5+leaves", "leaves:0.1"),
        ("independent:0.5+leaves:1", "client 0 has 1"),
        ("independent:0.5+gaps", "gaps"),
        ("independent:0.5+often", "unknown option"),
        ("independent:0.5+leaves:0.1+leaves:0.9", "give 'leaves' once"),
        ("markov:on=0.1,on=0.9,off=0.5", "'on' is given twice"),
    ],
)
def test_bad_texts_name_the_remedy(text: str, words: str) -> None:
    with pytest.raises(FedShuffleError, match=words) as error:
        resolve(text, THREE)
    assert str(error.value).count(f"availability {text!r}") == 1


def test_availability_must_fit_the_federation() -> None:
    with pytest.raises(FedShuffleError, match="for 2 clients, but the federation has 3"):
        resolve(Independent([0.5, 0.5]), THREE)
    with pytest.raises(FedShuffleError, match="must be of type Availability"):
        resolve(0.5, THREE)  # type: ignore[arg-type]


def test_a_day_has_the_share_of_rounds_that_was_given() -> None:
    """Also where share times period is rounded up: 0.07 * 100 > 7."""
    for period in (24, 100):
        for rounds in range(period + 1):
            world = Cyclic(np.arange(period), period, rounds / period)
            assert world.probability(0).sum() == rounds
    assert Cyclic(np.arange(100), 100, 0.07).probability(3).sum() == 7


def test_nothing_is_lost_when_availabilities_are_nested() -> None:
    there = Independent([0.5, 0.9])
    with pytest.raises(FedShuffleError, match=r"Leaving\(Groups"):
        Groups([0, 0, 1], Leaving(there, [0.5, 0.5]))
    with pytest.raises(FedShuffleError, match="leave already"):
        Leaving(Leaving(there, [0.5, 0.5]), [0.1, 0.1])
    there.drop = True
    assert Leaving(Groups([0, 1], there), [0.1, 0.1]).drop


# Traces -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("0,0,5\n0,4,9\n1,0,9\n2,0,9\n", "two intervals of client 0 overlap.*0 to 5 and 4 to 9"),
        ("0,0,5\n1,0,5\n2,8,9\n", "gap: nobody is there in rounds 5 to 7"),
        ("0,1,5\n", "gap: nobody is there in round 0"),
        ("0,0,5\n7,0,5\n", "line 3: there is no client '7'"),
        ("0,-1,5\n", "line 2: begin is '-1'"),
        ("0,5,5\n", "line 2: end is '5'"),
        ("0,5,nan\n", "line 2: end is 'nan'"),
        ("0,zero,5\n", "line 2: begin is 'zero'"),
        ("0,0,1\n0,1600000000,1700000000\n", "until round 1.7e.09.*in rounds, not in seconds"),
        ("0,1\n", "line 2: give as many entries"),
        ("0,1,2,3\n", "line 2: give as many entries"),
        ("", "no intervals"),
    ],
)
def test_broken_traces_name_the_line_or_the_client(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,begin,end\n" + lines)
    with pytest.raises(FedShuffleError, match=words):
        Trace.read(path, range(3))


def test_clients_of_a_trace_are_numbers() -> None:
    with pytest.raises(FedShuffleError, match="whole numbers from 0 to 1"):
        Trace(2, [0.7, 1], [0, 0], [3, 3])


def test_traces_without_header_or_with_gaps(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,0,5\n")
    with pytest.raises(FedShuffleError, match="no column 'client'"):
        Trace.read(path, range(3))
    path.write_text("client,begin,end,end\n0,0,5,9\n")
    with pytest.raises(FedShuffleError, match="two columns 'end'"):
        Trace.read(path, range(3))
    path.write_text("client,begin,end\n0,0,2\n1,4,5\n")
    found = parse(f"trace:{path}+gaps", Federation.from_sizes([1, 1]))
    assert [found.probability(r).tolist() for r in (1, 2, 4, 6)] == [[1, 0], [0, 0], [0, 1], [1, 0]]


def test_a_trace_is_there_in_its_intervals_and_repeats() -> None:
    rng = np.random.default_rng(0)
    edges = [np.sort(rng.choice(40, 6, replace=False)) for _ in range(50)]
    rows = [(i, a, b) for i, e in enumerate(edges) for a, b in e.reshape(3, 2)]
    rng.shuffle(rows)
    trace = Trace(50, *np.array(rows).T, allow_gaps=True)
    for round in range(2 * trace.period):
        time = round % trace.period
        want = [any(a <= time < b for j, a, b in rows if j == i) for i in range(50)]
        assert trace.available(0, round, np.arange(50)).tolist() == want


def test_gaps_are_the_rounds_without_anybody() -> None:
    """Against every round, with intervals that hold no beginning of a round, too."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        clients = np.arange(rng.integers(1, 6))
        begins = rng.integers(0, 60, len(clients)) / 3
        ends = begins + rng.integers(1, 12, len(clients)) / 3
        trace = Trace(len(clients), clients, begins, ends, allow_gaps=True)
        empty = [r for r in range(trace.period) if not trace.probability(r).any()]
        assert [round for gap in trace.gaps for round in gap] == empty
