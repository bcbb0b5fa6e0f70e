import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedshuffle import Federation, FedShuffleError
from fedshuffle.sampling import (
    ApproximateIndependent,
    Full,
    Independent,
    Listed,
    One,
    Optimal,
    Sampling,
    Stratified,
    Uniform,
    importance,
    importance_probabilities,
    parse,
)
from tests import brute

probabilities = st.lists(st.one_of(st.floats(0.05, 1.0), st.just(1.0)), min_size=1, max_size=6).map(
    np.array
)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Any sampling of up to six clients."""
    p = draw(probabilities)
    n = len(p)
    b = draw(st.integers(1, n))
    kinds = ["full", "uniform", "independent", "one", "ais", "stratified", "table"]
    kind = draw(st.sampled_from(kinds))
    match kind:
        case "full":
            return Full(n)
        case "uniform":
            return Uniform(n, b)
        case "independent":
            return Independent(p)
        case "one":
            return One(p / p.sum())
        case "ais":
            least = ApproximateIndependent(p).k
            return ApproximateIndependent(p, draw(st.integers(least, n)))
        case "stratified":
            strata = draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))
            weights = draw(st.sampled_from([None, p]))
            return Stratified(strata, draw(st.integers(len(set(strata)), n)), weights)
    rows = [(tuple(range(n)), 1.0)]
    for _ in range(draw(st.integers(0, 4))):
        members = draw(st.sets(st.integers(0, n - 1)))
        rows.append((tuple(sorted(members)), draw(st.floats(0.1, 2.0))))
    total = sum(q for _, q in rows)
    return Listed(n, [(members, q / total) for members, q in rows])


every_sampling = samplings() | samplings().map(lambda pool: Optimal(pool, 1))


@given(every_sampling)
def test_probabilities_are_those_of_the_cohorts(sampling: Sampling) -> None:
    n = len(sampling)
    rows = brute.cohorts(sampling)
    assert sum(q for _, q in rows) == pytest.approx(1, abs=1e-12)
    pairs = np.zeros((n, n))
    for members, q in rows:
        pairs[np.ix_(members, members)] += q
    np.testing.assert_allclose(sampling.p, np.diag(pairs), atol=1e-12)
    np.testing.assert_allclose(sampling.pair_probabilities(), pairs, atol=1e-12)


@given(every_sampling, st.integers(0, 1000))
def test_expected_sums_are_those_of_the_pairs(sampling: Sampling, seed: int) -> None:
    v = np.random.default_rng(seed).random(len(sampling))
    np.testing.assert_allclose(
        sampling.expected_sums(v), sampling.pair_probabilities() @ v, atol=1e-12
    )


@given(every_sampling)
def test_s_satisfies_its_matrix_inequality(sampling: Sampling) -> None:
    gap = np.diag(sampling.p * sampling.s) - (
        sampling.pair_probabilities() - np.outer(sampling.p, sampling.p)
    )
    assert np.linalg.eigvalsh(gap)[0] >= -1e-12


@given(every_sampling, st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_draws_are_pure_sorted_and_possible(sampling: Sampling, seed: int, round: int) -> None:
    cohort = sampling.draw(seed, round)
    assert cohort.tolist() == sampling.draw(seed, round).tolist() == sorted(set(cohort.tolist()))
    chance = dict(brute.cohorts(sampling)).get(tuple(cohort.tolist()), 0.0)
    assert chance > 0


@given(probabilities)
def test_cohorts_follow_the_definitions(p: brute.Floats) -> None:
    n = len(p)
    sampling = ApproximateIndependent(p)
    cases: list[tuple[Sampling, list[tuple[tuple[int, ...], float]]]] = [
        (Independent(p), brute.independent(p)),
        (Uniform(n, max(1, n // 2)), brute.uniform(n, max(1, n // 2))),
        (sampling, brute.approximate(p, sampling.k)),
    ]
    for sampling_, rows in cases:
        want: dict[tuple[int, ...], float] = {}
        for cohort, q in rows:
            want[cohort] = want.get(cohort, 0.0) + q
        have = dict(brute.cohorts(sampling_))
        for cohort in want.keys() | have.keys():
            assert have.get(cohort, 0.0) == pytest.approx(want.get(cohort, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [
        Uniform(4, 2),
        Independent([0.2, 0.9, 1.0, 0.5]),
        importance([8, 1, 1, 4], 2),
        One([0.1, 0.2, 0.3, 0.4]),
        ApproximateIndependent([0.5, 0.25, 0.1, 0.4], 3),
        Stratified([0, 1, 0, 1, 1], 3),
        Optimal(Uniform(4, 2), 1),
        Listed(4, [((0, 1), 0.25), ((2, 3), 0.5), ((1, 2, 3), 0.125), ((), 0.125)]),
    ],
    ids=repr,
)
def test_draws_have_the_stated_distribution(sampling: Sampling) -> None:
    """Chi-square over whole cohorts. The seed is fixed, so the outcome is too."""
    rounds = 20_000
    rows = dict(brute.cohorts(sampling))
    seen = dict.fromkeys(rows, 0)
    for round in range(rounds):
        seen[tuple(sampling.draw(2024, round).tolist())] += 1
    expected = np.array([rows[cohort] * rounds for cohort in rows])
    observed = np.array([seen[cohort] for cohort in rows])
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_closed_forms_of_s() -> None:
    assert Full(3).s.tolist() == [0, 0, 0]
    np.testing.assert_allclose(Uniform(5, 2).s, 3 / 4)
    np.testing.assert_allclose(Independent([0.2, 0.7]).s, [0.8, 0.3])
    assert One([0.25, 0.75]).s.tolist() == [1, 1]
    # With every probability equal, approximate independent sampling is uniform sampling.
    np.testing.assert_allclose(ApproximateIndependent([0.5] * 4).s, Uniform(4, 2).s)


def test_importance_sampling_minimises_m() -> None:
    """Reading 6: M = max s_i w_i / p_i = (1 - b min w) / b for p = b w."""
    w = np.array([0.1, 0.2, 0.3, 0.4])
    sampling = importance(w, 2)
    np.testing.assert_allclose(sampling.p, 2 * w)
    assert (sampling.s * w / sampling.p).max() == pytest.approx((1 - 2 * 0.1) / 2)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_importance_caps_and_refills(sizes: list[int], data: st.DataObject) -> None:
    b = data.draw(st.integers(1, len(sizes)))
    p = importance_probabilities(sizes, b)
    assert p.sum() == pytest.approx(b)
    assert (p > 0).all()
    assert (p <= 1).all()
    open_ = p < 1 - 1e-12
    if open_.any():
        rate = (p / sizes)[open_]
        np.testing.assert_allclose(rate, rate[0])
        assert (rate[0] * np.array(sizes)[~open_] >= 1 - 1e-9).all()


@settings(max_examples=20)
@given(st.integers(1, 10**6))
def test_a_large_population_is_sampled_without_listing_it(seed: int) -> None:
    cohort = Uniform(10**6, 1000).draw(seed, 0)
    assert len(np.unique(cohort)) == 1000


FEDERATION = Federation.from_sizes([1, 2, 3])


def test_text_names_samplings() -> None:
    assert isinstance(parse("full", FEDERATION), Full)
    np.testing.assert_allclose(parse("uniform:2", FEDERATION).p, 2 / 3)
    np.testing.assert_allclose(parse("importance:1", FEDERATION).p, FEDERATION.weights)
    np.testing.assert_allclose(parse("independent:0.5,1,0.25", FEDERATION).p, [0.5, 1, 0.25])
    np.testing.assert_allclose(parse("one", FEDERATION).p, FEDERATION.weights)
    np.testing.assert_allclose(parse("ais:1", FEDERATION).p, FEDERATION.weights)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom:2", "Did you mean 'uniform'"),
        ("uniform:4", "clients .*is 4.*to 3"),
        ("uniform:0", "clients is 0"),
        ("uniform:x", "write 'uniform:B'"),
        ("uniform", "write 'uniform:B'"),
        ("full:2", "write 'full'"),
        ("importance:4", "clients .*is 4.*to 3"),
        ("independent:0.5,0,1", "inclusion probabilities: client 1 has 0"),
        ("independent:0.5,1.5,1", "inclusion probabilities: client 1 has 1.5"),
        ("independent:0.5,nan,1", "inclusion probabilities: client 1 has nan"),
        ("independent:0.5,1", "2 clients, but the federation has 3"),
        ("stratified:2", "write 'stratified:B:K"),
        ("stratified:2:2:2", "write 'stratified:B:K"),
        ("stratified:2:x", "write 'stratified:B:K"),
        ("stratified:2:4", "strata of 3 clients is 4"),
        ("stratified:2:0", "strata of 3 clients is 0"),
        ("stratified:1:2", "each of 2 strata.* is 1"),
        ("stratified:4:2", "clients .*is 4.*to 3"),
        ("optimal", "write 'optimal:B"),
        ("optimal:x", "write 'optimal:B"),
        ("optimal:0", "is 0, but must be a whole number"),
        ("optimal:4", "pool full .*is 4"),
        ("optimal:2:of:", "write 'optimal:B"),
        ("optimal:2:of:unifrom:2", "Did you mean 'uniform'"),
        ("optimal:2:of:uniform", "write 'uniform:B'"),
        ("optimal:2:of:uniform:1", "pool uniform:1 .*is 2"),
        ("optimal:1:of:optimal:1", "cannot have optimal:1 of full for its pool"),
        ("optimal-approximate:x:of:full", "write 'optimal-approximate:B"),
    ],
)
def test_bad_text_is_named(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        parse(text, FEDERATION)


def test_other_impossible_samplings_are_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"sum to 0\.6"):
        One([0.3, 0.3])
    with pytest.raises(FedShuffleError, match=r"k, .* is 1, .* from 2 to 3"):
        ApproximateIndependent([0.5, 0.5, 0.5], 1)
    with pytest.raises(FedShuffleError, match="different clients"):
        Listed(2, [((0, 0), 1.0)])
    with pytest.raises(FedShuffleError, match=r"sum to 0\.5"):
        Listed(2, [((0, 1), 0.5)])
    with pytest.raises(FedShuffleError, match="inclusion probabilities: client 1 has 0"):
        Listed(2, [((0,), 1.0)])
    with pytest.raises(FedShuffleError, match="does not fit in memory"):
        Uniform(10**6, 2).pair_probabilities()
