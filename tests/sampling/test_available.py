"""Samplings among those who are there, and client reshuffling: exact against enumeration."""

import contextlib
import itertools
import math

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
)
from fedshuffle.sampling import (
    AmongAvailable,
    Full,
    One,
    Optimal,
    Reshuffled,
    Sampling,
    Stratified,
    Uniform,
    among_available,
    parse,
)
from fedshuffle.sampling import (
    Independent as IndependentSampling,
)
from fedshuffle.sampling.poisson_binomial import PoissonBinomial
from fedshuffle.testing.problems import DoesNotApplyError
from fedshuffle.testing.sampling_checks import CHECKS
from tests import brute

Q = np.array([0.9, 0.5, 0.2, 1.0, 0.7])
LEAVE = [0.1, 0.0, 0.5, 0.3, 0.2]
SAMPLINGS = [
    Full(5),
    Uniform(5, 1),
    Uniform(5, 2),
    Uniform(5, 5),
    IndependentSampling([0.5, 1.0, 0.2, 0.9, 0.4]),
    Stratified([0, 0, 1, 1, 1], 3),
]
AVAILABILITIES = [
    Independent(Q),
    Markov(on=[0.1, 0.5, 0.9, 0.3, 0.2], off=[0.2, 0.5, 0.8, 0.0, 0.6]),
    Cyclic([0, 1, 2, 3, 0], period=4, share=0.5, day=0.9, night=0.2),
    Groups([0, 0, 1, 2, 1], Markov([0.2, 0.4, 0.7], [0.3, 0.3, 0.2])),
    Drifting(Q, Q[::-1], rounds=3),
    Trace(5, [0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [2, 3, 4, 4, 2]),
    Leaving(Independent(Q), LEAVE),
    Leaving(Groups([0, 0, 1, 2, 1], Cyclic([0, 1, 2], 3, 0.5)), LEAVE),
]


def by_definition(sampling: Sampling, availability: Availability) -> dict[tuple[int, ...], float]:
    """Cohorts with probabilities: over rounds, who is there, who is asked and who stays."""
    n, total = len(sampling), dict[tuple[int, ...], float]()
    leaves = np.zeros(n) if availability.leaves is None else availability.leaves
    groups, inner = np.arange(n), availability
    while hasattr(inner, "of"):
        groups, inner = inner.groups if isinstance(inner, Groups) else groups, inner.of
    strata = sampling.members if isinstance(sampling, Stratified) else [np.arange(n)]
    take = sampling.take.tolist() if isinstance(sampling, Stratified) else [n]
    take = [sampling.b] if isinstance(sampling, Uniform) else take
    keep = sampling.p if isinstance(sampling, IndependentSampling) else np.ones(n)
    stay = keep * (1 - leaves)
    for round in range(availability.period):
        q = inner.probability(round)
        for there in itertools.product([False, True], repeat=len(q)):
            chance = math.prod(q[g] if x else 1 - q[g] for g, x in enumerate(there))
            present = [[i for i in s.tolist() if there[groups[i]]] for s in strata]
            draws = [
                list(itertools.combinations(some, min(b, len(some))))
                for some, b in zip(present, take, strict=True)
            ]
            ways = list(itertools.product(*draws))
            for parts in ways:
                asked = sorted(itertools.chain(*parts))
                for stays in itertools.product([False, True], repeat=len(asked)):
                    each = [
                        stay[i] if s else 1 - stay[i] for i, s in zip(asked, stays, strict=True)
                    ]
                    cohort = tuple(i for i, s in zip(asked, stays, strict=True) if s)
                    share = chance / len(ways) * math.prod(each) / availability.period
                    total[cohort] = total.get(cohort, 0.0) + share
    return total


@pytest.mark.parametrize("availability", AVAILABILITIES, ids=repr)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_probabilities_are_those_of_the_definition(
    sampling: Sampling, availability: Availability
) -> None:
    found, want = AmongAvailable(sampling, availability), by_definition(sampling, availability)
    pairs = np.zeros((5, 5))
    for cohort, chance in want.items():
        pairs[np.ix_(cohort, cohort)] += chance
    np.testing.assert_allclose(found.p, np.diag(pairs), atol=1e-12)
    np.testing.assert_allclose(found.pair_probabilities(), pairs, atol=1e-12)
    listed = dict(brute.cohorts(found))
    for cohort in want.keys() | listed.keys():
        assert listed.get(cohort, 0.0) == pytest.approx(want.get(cohort, 0.0), abs=1e-12)
    v = np.arange(1.0, 6.0)
    np.testing.assert_allclose(found.expected_sums(v), pairs @ v, atol=1e-12)
    assert found.expected_updates == pytest.approx(np.trace(pairs))


@pytest.mark.parametrize("availability", AVAILABILITIES, ids=repr)
def test_draws_have_the_stated_distribution(availability: Availability) -> None:
    """Chi-square over whole cohorts, over seeds, as rounds are correlated."""
    sampling = AmongAvailable(Uniform(5, 2), availability)
    rows, draws = dict(brute.cohorts(sampling)), 3000 // availability.period
    seen = dict.fromkeys(rows, 0)
    for seed, round in itertools.product(range(draws), range(availability.period)):
        seen[tuple(sampling.draw(seed, round).tolist())] += 1
    expected = np.array([rows[cohort] for cohort in rows]) * draws * availability.period
    observed = np.array([seen[cohort] for cohort in rows])
    few = expected < 5
    pooled = [np.append(x[~few], x[few].sum()) for x in (observed, expected)]
    possible = pooled[1] > 1e-9
    assert stats.chisquare(pooled[0][possible], pooled[1][possible]).pvalue > 1e-4


def test_few_of_many_clients_are_drawn_uniformly_among_those_who_are_there() -> None:
    n, chain = 2000, Markov(np.full(2000, 0.1), np.full(2000, 0.3))
    sampling, often = AmongAvailable(Uniform(n, 20), chain), np.zeros(n)
    for seed in range(400):
        cohort = sampling.draw(seed, 7)
        assert len(cohort) == len(set(cohort.tolist())) == 20
        assert chain.available(seed, 7, cohort).all()
        often[cohort] += 1
    np.testing.assert_allclose(sampling.p, 20 / n, rtol=1e-9)
    assert stats.chisquare(often.reshape(100, 20).sum(axis=1)).pvalue > 1e-3


@pytest.mark.parametrize("n", [1, 2, 7, 60])
def test_numbers_that_are_there(n: int) -> None:
    """Against the distribution by convolution, one client and two left out."""
    rng = np.random.default_rng(n)
    q = np.concatenate([rng.random(n - n // 3), rng.choice([0.0, 0.5, 1.0], n // 3)])

    def f(m: np.ndarray) -> np.ndarray:
        return np.minimum(1.0, 3 / (1 + m))

    def mean(*left_out: int) -> float:
        chances = np.ones(1)
        for j in set(range(n)) - set(left_out):
            chances = np.convolve(chances, [1 - q[j], q[j]])
        return float(chances @ f(np.arange(len(chances))))

    there, v = PoissonBinomial(q), rng.random(n)
    np.testing.assert_allclose(there.without_one(f), [mean(i) for i in range(n)], atol=1e-13)
    sums = [sum(v[j] * mean(i, j) for j in range(n) if j != i) for i in range(n)]
    np.testing.assert_allclose(there.sums_without_two(f, v), sums, atol=1e-12)


def test_other_samplings_are_refused() -> None:
    for sampling in (One([0.5, 0.5]), Optimal(Uniform(2, 2), 1), Reshuffled(2, 1)):
        with pytest.raises(FedShuffleError, match="cannot draw among the clients"):
            AmongAvailable(sampling, Independent([0.5, 0.5]))


def test_a_client_that_is_never_there_is_refused_or_dropped_knowingly() -> None:
    clients = Federation.from_sizes([1, 2, 3])
    for text in ("independent:0.5,0,1", "markov:on=0.1,0,0.1,off=0.1", "cyclic:4:0"):
        with pytest.raises(FedShuffleError, match=r"never available.*cannot be minimised.*drop"):
            among_available(Full(3), text, clients)
    with pytest.raises(FedShuffleError, match="nobody is ever available"):
        among_available(Full(3), "independent:0+drop", clients)
    found = among_available(Uniform(3, 2), "independent:0.5,0,1+drop", clients)
    np.testing.assert_allclose(found.inclusion, [0.5, 0.0, 1.0], atol=1e-12)
    assert found.p[1] == 1  # never used: no cohort holds the client
    assert all(1 not in found.draw(0, round).tolist() for round in range(50))


# Kac ----------------------------------------------------------------------------------------------


def test_kac_the_mean_interval_between_participations_is_one_over_p() -> None:
    """On the enumerated chain, by solving for mean return times: no simulation."""
    on, off = np.array([0.1, 0.6, 0.8]), np.array([0.3, 0.2, 0.9])
    moves, cohorts, stationary = brute.markov(2, on, off)
    np.testing.assert_allclose(moves.sum(axis=1), 1)
    p = AmongAvailable(Uniform(3, 2), Markov(on, off)).p
    for client in range(3):
        inside = np.array([client in cohort for cohort in cohorts])
        assert stationary[inside].sum() == pytest.approx(p[client], abs=1e-12)
        # Mean rounds until the client takes part next, from states in which it does not.
        outside = moves[np.ix_(~inside, ~inside)]
        wait = np.linalg.solve(np.eye(len(outside)) - outside, np.ones(len(outside)))
        again = 1 + moves[np.ix_(inside, ~inside)] @ wait
        interval = stationary[inside] @ again / stationary[inside].sum()
        assert interval == pytest.approx(1 / p[client], rel=1e-10)


# Client reshuffling -------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "b"), [(6, 2), (7, 3), (5, 5), (5, 1), (1, 1), (10, 4), (9, 8)])
def test_every_client_takes_part_once_per_meta_epoch(n: int, b: int) -> None:
    sampling = Reshuffled(n, b)
    assert sampling.period == math.ceil(n / b)
    for seed, epoch in itertools.product((0, 9), (0, 3)):
        rounds = range(epoch * sampling.period, (epoch + 1) * sampling.period)
        cohorts = [sampling.draw(seed, round).tolist() for round in rounds]
        assert sorted(itertools.chain(*cohorts)) == list(range(n))
        assert all(1 <= len(cohort) <= b for cohort in cohorts)
        assert cohorts == [sampling.draw(seed, round).tolist() for round in rounds]
        assert sampling.draw(seed, rounds[-1]).tolist() == cohorts[-1]  # in any order
    if n % b == 0:
        assert sampling.p.tolist() == [b / n] * n
    rows = brute.cohorts(sampling)
    pairs = np.zeros((n, n))
    for members, q in rows:
        pairs[np.ix_(members, members)] += q
    np.testing.assert_allclose(sampling.pair_probabilities(), pairs, atol=1e-12)
    gap = np.diag(sampling.p * sampling.s) - (pairs - np.outer(sampling.p, sampling.p))
    assert np.linalg.eigvalsh(gap)[0] >= -1e-12


def test_orders_differ_between_meta_epochs_and_are_uniform() -> None:
    sampling = Reshuffled(4, 2)
    seen = [
        tuple(sampling.draw(seed, 2 * epoch).tolist()) for seed in range(60) for epoch in (0, 5)
    ]
    counts = [seen.count(pair) for pair in itertools.combinations(range(4), 2)]
    assert stats.chisquare(counts).pvalue > 1e-3
    assert parse("reshuffled:2", Federation.from_sizes([1] * 4)).period == 2
    with pytest.raises(FedShuffleError, match="number of sampled clients"):
        Reshuffled(4, 5)


def settled_error(text: str, step_size: float) -> float:
    """The mean squared distance from the optimum, at the ends of meta-epochs: eight clients with
    quadratic objectives, each with one step per round, weighted by w / p.
    """
    h = np.array([1.0, 0.5, 2.0, 1.5, 1.0, 0.8, 1.2, 0.6])
    optima = np.array([1.0, -1.0, 0.5, 2.0, -0.5, 0.0, 1.5, -2.0])
    clients = Federation.from_sizes([1, 2, 3, 4, 4, 3, 2, 1])
    sampling, w = parse(text, clients), clients.weights
    optimum, x, errors, rounds = (
        (w * h) @ optima / (w @ h),
        0.0,
        list[float](),
        int(160 / step_size),
    )
    for round in range(rounds):
        some = sampling.draw(0, round)
        x -= step_size * float((w * h / sampling.p)[some] @ (x - optima[some]))
        if round > rounds // 4 and round % 4 == 3:
            errors.append((x - optimum) ** 2)
    return float(np.mean(errors))


def test_reshuffled_clients_settle_closer_by_the_square_of_the_step_size() -> None:
    """Malinovsky et al. 2023; with independent cohorts the error goes with the step size."""
    uniform, reshuffled = (
        [settled_error(text, step_size) for step_size in (0.08, 0.02)]
        for text in ("uniform:2", "reshuffled:2")
    )
    assert 2 < uniform[0] / uniform[1] < 8  # a quarter of the step size
    assert reshuffled[0] / reshuffled[1] > 16
    assert reshuffled[0] < uniform[0] / 10


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    "sampling",
    [
        Reshuffled(6, 2),
        Reshuffled(7, 3),
        AmongAvailable(Uniform(5, 2), Independent(Q)),
        AmongAvailable(Stratified([0, 0, 1, 1, 1], 3), Leaving(Independent(Q), LEAVE)),
    ],
    ids=repr,
)
def test_the_conformance_suite_of_samplings(sampling: Sampling, name: str) -> None:
    with contextlib.suppress(DoesNotApplyError):
        CHECKS[name](sampling)
