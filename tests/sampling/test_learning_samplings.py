"""Stratified and optimal client sampling against their definitions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedshuffle import Federation, FedShuffleError, audit
from fedshuffle.auditing.quadrature import expected_ratio, nonempty_probability
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import (
    Full,
    Independent,
    One,
    Optimal,
    Sampling,
    Stratified,
    Uniform,
    approximate_probabilities,
    check,
    optimal_probabilities,
    parse,
    strata_by_size,
)
from fedshuffle.sampling.stratified import allocate
from tests import brute
from tests.sampling.test_sampling import samplings

Floats = brute.Floats

# Strata -----------------------------------------------------------------------------------------


@st.composite
def stratified(draw: st.DrawFn) -> Stratified:
    n = draw(st.integers(1, 7))
    strata = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    b = draw(st.integers(len(set(strata)), n))
    weights = draw(st.none() | st.lists(st.floats(0.1, 9), min_size=n, max_size=n))
    return Stratified(strata, b, weights)


@given(stratified())
def test_cohorts_are_all_choices_from_every_stratum(sampling: Stratified) -> None:
    n, b = len(sampling), sampling.b
    quota = dict(enumerate(sampling.take.tolist()))
    want = [
        cohort
        for cohort in itertools.combinations(range(n), b)
        if all(sum(sampling.strata[i] == k for i in cohort) == quota[k] for k in quota)
    ]
    have = dict(brute.cohorts(sampling))
    assert sorted(have) == sorted(want)
    np.testing.assert_allclose(list(have.values()), 1 / len(want))
    assert sampling.cohorts(len(want) - 1) is None


def test_closed_forms_by_hand() -> None:
    sampling = Stratified([5, 5, -1, 5, 5, 2, 2], 4)
    assert sampling.strata.tolist() == [2, 2, 0, 2, 2, 1, 1]
    assert sampling.take.tolist() == [1, 1, 2]
    assert sampling.p.tolist() == [0.5, 0.5, 1, 0.5, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(sampling.s, [2 / 3, 2 / 3, 0, 2 / 3, 2 / 3, 1, 1])
    pairs = sampling.pair_probabilities()
    assert pairs[0, 1] == pytest.approx(1 / 6)  # two of four
    assert pairs[5, 6] == 0  # one of two
    assert pairs[0, 5] == 0.25
    assert pairs[0, 2] == 0.5
    assert (Stratified([0, 0, 1], 3).s == 0).all()


@given(st.integers(1, 6), st.data())
def test_one_stratum_is_uniform_sampling(n: int, data: st.DataObject) -> None:
    b = data.draw(st.integers(1, n))
    one, uniform = Stratified([3] * n, b), Uniform(n, b)
    assert (one.p == uniform.p).all()
    np.testing.assert_allclose(one.s, uniform.s)
    assert one.draw(4, 2).tolist() == uniform.draw(4, 2).tolist()


def test_strata_are_drawn_independently() -> None:
    """Pairs across strata, in drawn cohorts. The seed is fixed, so the outcome is too."""
    sampling = Stratified([0, 0, 1, 1], 2)
    rounds = 4000
    both = sum({0, 2} <= set(sampling.draw(11, round).tolist()) for round in range(rounds))
    assert abs(both / rounds - 1 / 4) < 4 * math.sqrt(3 / 16 / rounds)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), min_size=1, max_size=6), st.data()
)
@example([(1, 1), (3, 3), (1, 1)], None)
def test_allocation_is_bounded_proportional_and_complete(
    strata: list[tuple[int, int]], data: st.DataObject | None
) -> None:
    most = np.array([n for n, _ in strata])
    measure = np.array([float(m) for _, m in strata])
    total = int(most.sum())
    b = 3 if data is None else data.draw(st.integers(len(strata), total))
    taken = allocate(measure, b, most)
    assert taken.sum() == b
    assert (taken >= 1).all()
    assert (taken <= most).all()
    assert taken.tolist() == allocate(measure, b, most).tolist()
    # No allocation is further than one from the exact share with the same bounds.
    exact = exact_shares([m for _, m in strata], b, most.tolist())
    for have, share in zip(taken.tolist(), exact, strict=True):
        assert math.floor(share) <= have <= math.ceil(share)
    # Who is rounded up has no smaller remainder than who is rounded down.
    up = [share % 1 for have, share in zip(taken.tolist(), exact, strict=True) if have > share]
    down = [share % 1 for have, share in zip(taken.tolist(), exact, strict=True) if have < share]
    assert not up or not down or min(up) >= max(down)


def exact_shares(measure: list[int], b: int, most: list[int]) -> list[Fraction]:
    """``min(max(t m, 1), most)`` with sum b in fractions, by trying every linear piece."""

    def shares(t: Fraction) -> list[Fraction]:
        return [min(max(t * m, Fraction(1)), Fraction(n)) for m, n in zip(measure, most)]

    points = sorted({Fraction(k, m) for m, n in zip(measure, most) for k in (1, n)})
    for left, right in itertools.pairwise([Fraction(0), *points]):
        low, high = sum(shares(left)), sum(shares(right))
        if low <= b <= high:
            t = right if low == high else left + (right - left) * (b - low) / (high - low)
            return shares(t)
    raise AssertionError("there is always a piece")


def test_ties_go_to_the_first() -> None:
    assert allocate(np.array([3.0, 3.0]), 3, np.array([3, 3])).tolist() == [2, 1]
    assert allocate(np.array([1.0, 3.0, 5.0]), 5, np.array([1, 3, 5])).tolist() == [1, 2, 2]
    thirds = np.array([0.1 + 0.2, 0.3, 0.3])  # equal but for rounding
    assert allocate(thirds, 4, np.array([9, 9, 9])).tolist() == [2, 1, 1]


def test_allocation_by_weight() -> None:
    strata = [0] * 8 + [1] * 2
    assert Stratified(strata, 5).take.tolist() == [4, 1]
    assert Stratified(strata, 5, [1] * 8 + [12] * 2).take.tolist() == [3, 2]  # no more than two
    for tiny, huge in ((1e-9, 1), (5e-324, 1), (1e-300, 1e308)):
        assert Stratified(strata, 3, [huge] * 8 + [tiny] * 2).take.tolist() == [2, 1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_strata_of_like_size(sizes: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(sizes)))
    strata = strata_by_size(sizes, k)
    assert sorted(set(strata.tolist())) == list(range(k))
    members = [[sizes[i] for i in range(len(sizes)) if strata[i] == j] for j in range(k)]
    for smaller, larger in itertools.pairwise(members):
        assert max(smaller) <= min(larger)
    if len(set(sizes)) >= k:  # equal sizes stay together
        assert all(max(a) < min(b) for a, b in itertools.pairwise(members))
    else:  # different ones are never mixed
        assert all(len(set(stratum)) == 1 for stratum in members)


def test_strata_are_quantiles_where_sizes_differ() -> None:
    sizes = np.random.default_rng(1).permutation(np.arange(1, 13))
    for k in (2, 3, 4, 6):
        want = (sizes - 1) * k // 12
        assert strata_by_size(sizes, k).tolist() == want.tolist()
    assert strata_by_size([1, 1, 1, 2, 3, 4], 3).tolist() == [0, 0, 0, 1, 2, 2]


def test_stratified_text() -> None:
    federation = Federation.from_sizes([1, 1, 1, 1, 9, 9])
    by_number = parse("stratified:3:2", federation)
    assert isinstance(by_number, Stratified)
    assert by_number.take.tolist() == [2, 1]
    by_weight = parse("stratified:3:2:weight", federation)
    assert isinstance(by_weight, Stratified)
    assert by_weight.take.tolist() == [1, 2]


def test_other_strata_are_another_sampling_to_a_resumed_run() -> None:
    first, second = Stratified([0, 0, 1, 1], 2), Stratified([0, 1, 0, 1], 2)
    assert first.p.tolist() == second.p.tolist()
    assert repr(first) != repr(second)
    assert repr(first) == repr(Stratified([4, 4, 7, 7], 2))
    assert repr(first).startswith("stratified:2 over 2 strata (")


@pytest.mark.parametrize(
    ("strata", "b", "message"),
    [
        ([0, 0, 1], 1, "each of 2 strata.* is 1.*from 2 to 3"),
        ([0, 0, 1], 4, "clients .* is 4"),
        ([0, 0, 1], 1.5, "clients .* is 1.5"),
        ([], 1, "strata must be a non-empty list"),
        ([[0, 1]], 1, "strata must be a non-empty list"),
        ([[0, 1], [0]], 1, "strata has rows of different lengths"),
        ([0.5, 1.0], 1, "one whole number for each client"),
        (["a", "b"], 2, "one whole number for each client"),
    ],
)
def test_impossible_strata_are_refused(strata: list[int], b: int, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        Stratified(strata, b)


def test_bad_weights_and_large_matrices_are_refused() -> None:
    with pytest.raises(FedShuffleError, match="client 1 has 0"):
        Stratified([0, 1], 2, [1, 0])
    with pytest.raises(FedShuffleError, match="one number for each of the 2 clients"):
        Stratified([0, 1], 2, [1, 1, 1])
    with pytest.raises(FedShuffleError, match="does not fit in memory"):
        Stratified(np.arange(30_000) % 2, 2).pair_probabilities()


def test_a_large_population_in_strata() -> None:
    sizes = np.random.default_rng(3).integers(1, 1000, 200_000)
    sampling = Stratified(strata_by_size(sizes, 10), 1000)
    cohort = sampling.draw(5, 0)
    assert len(np.unique(cohort)) == 1000
    assert np.bincount(sampling.strata[cohort]).tolist() == sampling.take.tolist()
    assert sampling.cohorts(10**6) is None
    # The sum over all clients is E[(sum of v) |S|] = b E[sum of v].
    v = np.random.default_rng(4).random(len(sizes))
    total = sampling.expected_sums(v).sum()
    assert total == pytest.approx(1000 * float(sampling.p @ v), rel=1e-12)


# The audit's expectations -----------------------------------------------------------------------


@settings(max_examples=40)
@given(stratified(), st.integers(0, 10**6), st.integers(1, 2), st.booleans(), st.integers(1, 2))
def test_expectations_over_strata_equal_enumeration(
    sampling: Stratified, seed: int, alternatives: int, numerator: bool, power: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (len(sampling), alternatives)
    u = np.exp(rng.choice([0.1, 1.0, 4.0]) * rng.normal(size=shape))
    c = rng.random(shape) + 0.1
    v = rng.random(shape) + 0.1 if numerator else None
    chances = rng.dirichlet(np.ones(alternatives))
    have = expected_ratio(sampling, u, c=c, v=v, power=power, chances=chances)
    assert have is not None
    want = brute.expected_ratio(brute.cohorts(sampling), u, c, v, power, chances)
    np.testing.assert_allclose(have, want, rtol=1e-10)
    assert nonempty_probability(sampling) == 1


def test_more_strata_than_are_integrated_are_left_to_others() -> None:
    many = Stratified(np.arange(40), 40)
    assert expected_ratio(many, np.ones((40, 1))) is None
    assert nonempty_probability(many) == 1


def test_the_shares_of_many_clients_sum_to_one() -> None:
    sizes = np.random.default_rng(2).integers(1, 500, 20_000)
    sampling = Stratified(strata_by_size(sizes, 5), 200)
    u = (sizes / sizes.sum())[:, None]
    shares = expected_ratio(sampling, u, c=u)
    assert shares is not None
    assert shares.sum() == pytest.approx(1, abs=1e-9)


@settings(max_examples=25)
@given(samplings(), st.integers(0, 10**6))
def test_expectations_of_optimal_sampling_are_those_of_the_pool(pool: Sampling, seed: int) -> None:
    u = np.exp(np.random.default_rng(seed).normal(size=(len(pool), 1)))
    have, want = (expected_ratio(sampling, u) for sampling in (Optimal(pool, 1), pool))
    assert have is not None
    assert want is not None
    assert have.tolist() == want.tolist()
    assert nonempty_probability(Optimal(pool, 1)) == nonempty_probability(pool)


def test_the_audit_of_strata_is_exact() -> None:
    """FedAvg takes one of the two small clients and the large one: 2 cohorts of 4 examples."""
    result = audit(Federation.from_sizes([1, 1, 3]), "fedavg-rr", Stratified([0, 0, 1], 2))
    assert result.exact
    # Contribution w/w_S times steps: 1/4 for the small one, 3/4 * 3 for the large one.
    weights = np.array([1 / 8, 1 / 8, 9 / 4])
    np.testing.assert_allclose(result.effective_weights, weights / weights.sum(), rtol=1e-9)
    fair = audit(Federation.from_sizes([1, 1, 3]), "fedshuffle", Stratified([0, 0, 1], 2))
    assert fair.consistent


# Optimal client sampling ------------------------------------------------------------------------

norm = st.just(0.0) | st.floats(1e-3, 1e3)
pools = st.lists(norm, min_size=1, max_size=8).map(np.array)


def variance(p: Floats, u: Floats) -> float:
    """``sum (1/p - 1) u^2``, where a client without an update adds nothing."""
    here = u > 0
    with np.errstate(divide="ignore"):
        return float(((1 / p[here] - 1) * u[here] ** 2).sum())


@given(pools, st.integers(1, 9))
def test_optimal_probabilities_are_feasible_and_satisfy_kkt(u: Floats, m: int) -> None:
    p = optimal_probabilities(u, m)
    positive = int((u > 0).sum())
    assert ((p >= 0) & (p <= 1)).all()
    assert p.sum() == pytest.approx(min(m, positive))
    assert ((p > 0) == (u > 0)).all()
    # Stationarity: the slope u^2/p^2 is one number below the cap, and no smaller at the cap.
    below, capped = (p < 1 - 1e-12) & (u > 0), p >= 1 - 1e-12
    if below.any():
        slope = u[below] / p[below]
        np.testing.assert_allclose(slope, slope[0], rtol=1e-9)
        assert (u[capped] >= slope[0] * (1 - 1e-9)).all()


@given(pools, st.integers(1, 8), st.integers(0, 10**6))
def test_no_other_probabilities_have_less_variance(u: Floats, m: int, seed: int) -> None:
    n = len(u)
    m = min(m, n)
    p = optimal_probabilities(u, m)
    least = variance(p, u) * (1 - 1e-9) - 1e-9 * float(u @ u)
    assert least <= variance(np.full(n, m / n), u)
    rng = np.random.default_rng(seed)
    for spread in (1e-3, 0.03, 0.3, 3.0):
        for start in (p, np.full(n, m / n)):
            tried = np.maximum(start * np.exp(spread * rng.normal(size=n)), 1e-9)
            assert least <= variance(fill(tried, m), u)


def fill(p: Floats, m: int) -> Floats:
    """Probabilities of sum m, by mixing with ones or by shrinking: feasible, and not optimal."""
    p = np.minimum(p, 1.0)
    total = float(p.sum())
    if total > m:
        return p * (m / total)
    room = float((1 - p).sum())
    return p if room == 0 else p + (1 - p) * ((m - total) / room)


@given(pools, st.integers(1, 8))
def test_the_approximation_comes_from_below_and_arrives(u: Floats, m: int) -> None:
    exact = optimal_probabilities(u, m)
    before = np.zeros(len(u))
    for iterations in range(1, len(u) + 1):
        p = approximate_probabilities(u, m, iterations)
        assert (p >= before - 1e-12).all()
        assert (p <= exact * (1 + 1e-9)).all()
        assert p.sum() <= m * (1 + 1e-12)
        assert ((p > 0) == (u > 0)).all()
        before = p
    np.testing.assert_allclose(before, exact, rtol=1e-9)


@given(pools, st.integers(1, 8))
def test_without_caps_the_first_guess_is_exact(u: Floats, m: int) -> None:
    if not m * u.max() < u.sum():
        u = np.concatenate([u, np.full(m, u.max() + 1.0)])
    if m * u.max() < u.sum():
        np.testing.assert_allclose(approximate_probabilities(u, m, 1), m * u / u.sum())
        np.testing.assert_allclose(optimal_probabilities(u, m), m * u / u.sum())


def test_the_approximation_by_hand() -> None:
    """Each rescaling caps the next of 8, 4, 2; the rest of the budget goes to 1 and 1."""
    u = np.array([8.0, 4, 2, 1, 1])
    # 4u/16 = 2, 1, 1/2, 1/4, 1/4; then C = (4-5+3)/1 = 2, which caps the third.
    np.testing.assert_allclose(approximate_probabilities(u, 4, 1), [1, 1, 1, 0.5, 0.5])
    np.testing.assert_allclose(optimal_probabilities(u, 4), [1, 1, 1, 0.5, 0.5])
    # 2u/16 = 1, 1/2, 1/4, 1/8, 1/8: the sum is 2 at once.
    np.testing.assert_allclose(approximate_probabilities(u, 2), u / 8)
    # 3, 1, 1, 1 of which two: 1, 1/3, 1/3, 1/3 is both 2u/6 and optimal.
    np.testing.assert_allclose(optimal_probabilities([3, 1, 1, 1], 2), [1, 1 / 3, 1 / 3, 1 / 3])


@given(
    st.lists(norm, min_size=1, max_size=5).map(np.array),
    st.integers(1, 5),
    st.sampled_from([optimal_probabilities, approximate_probabilities]),
)
def test_the_mean_over_all_choices_is_the_sum_over_the_pool(
    u: Floats, m: int, probabilities: object
) -> None:
    assert callable(probabilities)
    p = probabilities(u, m)
    share = np.divide(u, p, out=np.zeros_like(u), where=p > 0)
    mean = second = 0.0
    for picks in itertools.product([False, True], repeat=len(u)):
        mask = np.array(picks)
        chance = float(np.where(mask, p, 1 - p).prod())
        mean += chance * float(share[mask].sum())
        second += chance * float(share[mask].sum()) ** 2
    assert mean == pytest.approx(float(u.sum()), rel=1e-9)
    spread = second - mean**2
    assert spread == pytest.approx(variance(p, u), rel=1e-6, abs=1e-7 * (1 + mean**2))


def test_norms_of_zero_and_of_any_size() -> None:
    assert optimal_probabilities([0, 0, 0], 2).tolist() == [0, 0, 0]
    assert approximate_probabilities([0, 0, 0], 2).tolist() == [0, 0, 0]
    assert optimal_probabilities([], 2).tolist() == approximate_probabilities([], 2).tolist() == []
    for probabilities in (optimal_probabilities, approximate_probabilities):
        for m in (2, 3):  # no more than m have anything to say
            np.testing.assert_allclose(probabilities([0, 5, 0, 1e-3], m), [0, 1, 0, 1])
        assert probabilities([3, 3], 9).tolist() == [1, 1]
        np.testing.assert_allclose(probabilities([1e308] * 4, 2), 0.5)
        np.testing.assert_allclose(probabilities([5e-324] * 4, 2), 0.5)
        np.testing.assert_allclose(probabilities([1e99, 1e-99, 1e-99], 2), [1, 0.5, 0.5])
        assert probabilities([1e300, 1e-300], 1).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_a_bad_norm_names_its_client(bad: float) -> None:
    for probabilities in (optimal_probabilities, approximate_probabilities):
        with pytest.raises(FedShuffleError, match=f"norms .*client 1 has {bad:g}"):
            probabilities([1.0, bad, 1.0], 2)
    with pytest.raises(FedShuffleError, match=rf"norms .*client 17 has {bad:g}.*smaller step size"):
        Optimal(Full(20), 2).select([1.0, bad], 0, 0, [3, 17])


def test_other_mistakes_are_named() -> None:
    with pytest.raises(FedShuffleError, match="must be numbers"):
        optimal_probabilities(["a"], 1)
    with pytest.raises(FedShuffleError, match=r"\(1, 2\)"):
        optimal_probabilities([[1.0, 2.0]], 1)
    with pytest.raises(FedShuffleError, match="the number of clients to ask is 0"):
        optimal_probabilities([1.0], 0)
    with pytest.raises(FedShuffleError, match="the number of iterations is 0"):
        approximate_probabilities([1.0], 1, 0)
    with pytest.raises(FedShuffleError, match="each of the 3 clients"):
        Optimal(Full(5), 2).select([1.0, 2.0], 0, 0, [0, 1, 2])
    with pytest.raises(FedShuffleError, match="pool of optimal sampling must be of type Sampling"):
        Optimal("uniform:2", 1)  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match="unknown kind of optimal sampling 'exakt'"):
        Optimal(Full(3), 1, "exakt")  # type: ignore[arg-type]
    for pool, most in ((One([0.5, 0.5]), 1), (Uniform(9, 3), 3), (Stratified([0, 1, 1], 2), 2)):
        with pytest.raises(FedShuffleError, match=f"pool .*from 1 to {most}"):
            Optimal(pool, most + 1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_selection_is_a_pure_function_of_seed_round_and_client(
    seed: int, round: int, shift: int
) -> None:
    rng = np.random.default_rng(shift)
    clients = np.sort(rng.choice(50, 8, replace=False))
    norms = rng.random(8)
    sampling = Optimal(Full(50), 3)
    asked, p = sampling.select(norms, seed, round, clients)
    again, _ = sampling.select(norms, seed, round, clients)
    assert asked.dtype == bool
    assert asked.tolist() == again.tolist()
    np.testing.assert_allclose(p, optimal_probabilities(norms, 3))
    # Each client has a coin of its own, whoever else is there and in which order.
    order = rng.permutation(8)
    mixed, _ = sampling.select(norms[order], seed, round, clients[order])
    assert mixed.tolist() == asked[order].tolist()
    coins = [
        generator(seed, Purpose.SELECTION, round=round, client=int(i)).random() for i in clients
    ]
    assert asked.tolist() == (np.array(coins) < p).tolist()


@pytest.mark.parametrize("how", ["exact", "approximate"])
def test_selection_has_the_stated_frequencies(how: str) -> None:
    """The seed is fixed, so the outcome is too."""
    sampling = Optimal(Full(6), 2, how)  # type: ignore[arg-type]
    rounds, clients = 4000, np.arange(6)
    norms = np.array([5.0, 1, 2, 0, 1, 0.1])
    masks = np.stack([sampling.select(norms, 9, round, clients)[0] for round in range(rounds)])
    p = sampling.select(norms, 9, 0, clients)[1]
    off = np.abs(masks.mean(axis=0) - p)
    assert (off <= 4 * np.sqrt(p * (1 - p) / rounds)).all()
    both = (masks[:, 1] & masks[:, 2]).mean()  # independent of one another
    chance = p[1] * p[2]
    assert abs(both - chance) <= 4 * math.sqrt(chance * (1 - chance) / rounds)


def test_an_empty_pool_sends_nothing() -> None:
    asked, p = Optimal(Independent([0.1, 0.1]), 1).select([], 0, 0, [])
    assert asked.shape == p.shape == (0,)


def test_optimal_text() -> None:
    federation = Federation.from_sizes([1] * 20)
    for text, shown in [
        ("optimal:4", "optimal:4 of full"),
        ("optimal:4:of:uniform:16", "optimal:4 of uniform:16"),
        ("optimal-approximate:4", "optimal-approximate:4 of full"),
        ("optimal-approximate:2:of:importance:5", "optimal-approximate:2 of independent, 5 of 20"),
    ]:
        sampling = parse(text, federation)
        assert isinstance(sampling, Optimal)
        assert repr(sampling).startswith(shown)
        check(text)
    with pytest.raises(FedShuffleError, match="Did you mean 'uniform'"):
        check("optimal:2:of:unifrom:4")
