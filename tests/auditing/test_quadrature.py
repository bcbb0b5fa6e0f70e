"""Expectations by quadrature against enumeration of every cohort."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle.auditing.quadrature import expected_ratio, nonempty_probability
from fedshuffle.sampling import ApproximateIndependent, Full, Independent, Sampling, Uniform
from tests import brute
from tests.sampling.test_sampling import samplings


@settings(max_examples=150)
@given(
    samplings(),
    st.integers(0, 10**6),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(1, 2),
)
def test_expectations_equal_enumeration(
    sampling: Sampling, seed: int, spread: float, alternatives: int, numerator: bool, power: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (len(sampling), alternatives)
    u = np.exp(spread * rng.normal(size=shape))
    c = rng.random(shape) + 0.1
    v = rng.random(shape) + 0.1 if numerator else None
    chances = rng.dirichlet(np.ones(alternatives))
    have = expected_ratio(sampling, u, c=c, v=v, power=power, chances=chances)
    if have is None:  # a table of cohorts with random numbers: the audit samples there
        assert alternatives > 1
        return
    want = brute.expected_ratio(brute.cohorts(sampling), u, c, v, power, chances)
    np.testing.assert_allclose(have, want, rtol=1e-10)


@settings(max_examples=60)
@given(samplings(), st.integers(0, 10**6))
def test_clients_that_must_be_absent(sampling: Sampling, seed: int) -> None:
    rng = np.random.default_rng(seed)
    u = np.exp(rng.normal(size=(len(sampling), 1)))
    u[rng.random(len(sampling)) < 0.4] = np.inf
    ones = np.ones_like(u)
    have = expected_ratio(sampling, u)
    assert have is not None
    want = brute.expected_ratio(brute.cohorts(sampling), u, ones, None, 1, np.ones(1))
    np.testing.assert_allclose(have, want, rtol=1e-10, atol=1e-14)


@given(samplings())
def test_probability_of_anybody(sampling: Sampling) -> None:
    want = sum(q for cohort, q in brute.cohorts(sampling) if cohort)
    assert nonempty_probability(sampling) == pytest.approx(want, abs=1e-10)


def test_cohorts_of_many_independent_clients_are_too_many_to_list() -> None:
    assert Independent([0.5] * 5000).cohorts(2**20) is None


@pytest.mark.slow
@pytest.mark.parametrize("b", [1, 10, 1000, 100_000])
def test_a_million_clients_obey_the_sum_rule(b: int) -> None:
    """The shares of sum-one aggregation sum to 1 - P(empty), whatever the sizes."""
    n = 1_000_000
    sizes = np.maximum(1, np.round(np.exp(np.random.default_rng(1).normal(4, 1, n))))
    u = (sizes / sizes.sum())[:, None]
    p = np.minimum(1, b * u[:, 0])
    for sampling in (Uniform(n, b), Independent(p), ApproximateIndependent(p)):
        shares = expected_ratio(sampling, u, c=u)
        assert shares is not None
        assert shares.sum() == pytest.approx(nonempty_probability(sampling), abs=1e-9)


def test_full_participation_and_equal_clients_by_hand() -> None:
    ones = np.ones((6, 1))
    cases: list[tuple[Sampling, brute.Floats, float]] = [
        (Full(3), np.array([[1.0], [2.0], [5.0]]), 1 / 8),
        (Uniform(6, 4), ones, 1 / 6),
        # E[1{i in S}/|S|] for independent coins with equal p is (1 - (1-p)^n) / n.
        (Independent([0.3] * 6), ones, (1 - 0.7**6) / 6),
    ]
    for sampling, u, want in cases:
        have = expected_ratio(sampling, u)
        assert have is not None
        np.testing.assert_allclose(have, want, rtol=1e-12)


@pytest.mark.parametrize("ratio", [1e3, 1e9, 1e12, 1e20])
@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_weights_of_any_spread(ratio: float, b: int) -> None:
    """Exact fractions are the truth where weights lie many orders of magnitude apart."""
    u = [Fraction(1), Fraction(ratio), Fraction(0.7 * ratio), Fraction(3), Fraction(ratio) / 1000]
    cohorts = list(itertools.combinations(range(5), b))
    want = [
        float(sum(1 / sum(u[j] for j in cohort) for cohort in cohorts if i in cohort))
        / len(cohorts)
        for i in range(5)
    ]
    have = expected_ratio(Uniform(5, b), np.array([[float(value)] for value in u]))
    assert have is not None
    np.testing.assert_allclose(have, want, rtol=1e-11)
