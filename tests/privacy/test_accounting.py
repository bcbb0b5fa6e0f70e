"""Epsilon against closed forms, numerical integrals and direct calls of dp_accounting."""

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.privacy import accounting
from fedshuffle.privacy.accounting import (
    Amplification,
    Budget,
    calibrated,
    gaussian_epsilon,
    poisson_epsilon,
    uniform_epsilon,
)

DELTA = 1e-5
GRID = np.linspace(-40.0, 40.0, 400_001)


def budget(
    noise: float,
    p: FloatArray | None = None,
    contributions: FloatArray | None = None,
    amplification: Amplification = "none",
    epsilon: float | None = None,
    separation: int = 1,
) -> Budget:
    p = np.full(3, 0.1) if p is None else p
    each = np.ones(len(p)) if contributions is None else contributions
    return Budget(DELTA, noise, each, p, amplification, min_separation=separation, epsilon=epsilon)


def analytic(noise: float) -> float:
    """Theorem 8 of Balle and Wang 2018, for sensitivity 1 and standard deviation ``noise``."""

    def excess(epsilon: float) -> float:
        above = norm.cdf(0.5 / noise - epsilon * noise)
        below = math.exp(epsilon + norm.logcdf(-0.5 / noise - epsilon * noise))
        return float(above - below - DELTA)

    return float(brentq(excess, 0.0, 500.0, xtol=1e-12))


def divergence(first: FloatArray, second: FloatArray, epsilon: float) -> float:
    """The integral of max(0, first - e^epsilon second) over GRID: the delta of this pair."""
    return float(np.trapezoid(np.maximum(0.0, first - math.exp(epsilon) * second), GRID))


def mixture(q: float, here: float, there: float, noise: float) -> FloatArray:
    """(1-q) N(here, noise^2) + q N(there, noise^2) on GRID."""
    found = (1 - q) * norm.pdf(GRID, here, noise) + q * norm.pdf(GRID, there, noise)
    return np.asarray(found)


@pytest.mark.parametrize("rounds", [1, 7, 100])
@pytest.mark.parametrize("noise", [0.8, 3.0, 40.0])
def test_full_participation_is_the_gaussian_closed_form(noise: float, rounds: int) -> None:
    expected = analytic(noise / rounds**0.5)
    assert budget(noise).spent(rounds) == pytest.approx(expected, rel=1e-6)


def test_no_rounds_cost_nothing() -> None:
    assert budget(1.0).spent(0) == 0.0
    assert budget(1.0, amplification="poisson").per_client(0).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("p", "noise", "rounds"), [(0.01, 1.0, 500), (0.2, 2.0, 50), (1e-3, 3.0, 900)]
)
def test_equal_clients_cost_what_dp_accounting_says_of_poisson_sampling(
    p: float, noise: float, rounds: int
) -> None:
    event = dp_accounting.PoissonSampledDpEvent(p, dp_accounting.GaussianDpEvent(noise))
    tight, renyi = PLDAccountant(), RdpAccountant([1 + k / 10 for k in range(10, 200)])
    for accountant in (tight, renyi):
        accountant.compose(event, rounds)
    found = budget(noise, np.full(5, p), amplification="poisson")
    assert found.spent(rounds) == pytest.approx(tight.get_epsilon(DELTA), rel=0.01)
    assert found.spent(rounds) <= renyi.get_epsilon(DELTA)
    assert found.per_client(rounds).tolist() == [found.spent(rounds)] * 5


@pytest.mark.parametrize(("b", "noise", "rounds"), [(10, 4.0, 500)])
def test_equal_clients_cost_what_dp_accounting_says_of_uniform_sampling(
    b: int, noise: float, rounds: int
) -> None:
    """With the sensitivity of a replacement, twice that of one client."""
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation)
    gaussian = dp_accounting.GaussianDpEvent(noise / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, b, gaussian), rounds)
    found = budget(noise, np.full(1000, b / 1000), amplification="uniform").spent(rounds)
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=0.01)
    assert found < budget(noise).spent(rounds)


def test_uniform_sampling_never_costs_more_than_none() -> None:
    found = budget(1.0, np.full(10, 0.9), amplification="uniform")
    assert found.spent(10) == budget(1.0).spent(10)


@pytest.mark.parametrize(("q", "noise"), [(0.1, 1.0), (0.5, 2.0)])
def test_one_round_of_poisson_sampling_by_integration(q: float, noise: float) -> None:
    with_client, without = mixture(q, 0.0, 1.0, noise), mixture(q, 0.0, 0.0, noise)
    epsilon = poisson_epsilon(q, noise, 1, DELTA)
    worst = max(
        divergence(with_client, without, epsilon), divergence(without, with_client, epsilon)
    )
    assert worst == pytest.approx(DELTA, rel=0.02)


@pytest.mark.parametrize(("q", "noise"), [(0.1, 1.0), (0.25, 1.5)])
def test_one_round_of_uniform_sampling_by_integration(q: float, noise: float) -> None:
    """If client i is not drawn, another is, whose update may be its opposite: as if the sum moved
    from -1 to 1 instead of from -1 to 0. The figure of Poisson sampling would be too small.
    """
    with_client, without = mixture(q, -1.0, 1.0, noise), mixture(q, -1.0, 0.0, noise)

    def worst(epsilon: float) -> float:
        return max(
            divergence(with_client, without, epsilon), divergence(without, with_client, epsilon)
        )

    assert worst(uniform_epsilon(q, noise / 2, 1, DELTA)) <= DELTA
    assert worst(poisson_epsilon(q, noise, 1, DELTA)) > 1.2 * DELTA


def test_every_client_has_its_own_epsilon() -> None:
    p, each = np.array([0.1, 0.02, 1.0, 0.1]), np.array([1.0, 0.5, 0.25, 1.0])
    found = budget(1.5, p, each, "poisson").per_client(20)
    expected = [
        poisson_epsilon(0.1, 1.5, 20, DELTA),
        poisson_epsilon(0.02, 3.0, 20, DELTA),
        gaussian_epsilon(6.0 / 20**0.5, DELTA),
    ]
    assert found == pytest.approx([*expected, expected[0]], rel=1e-9)

    found = budget(4.0, np.full(4, 0.1), each, "uniform").per_client(20)
    for one, contribution in zip(found, each, strict=True):
        pair = uniform_epsilon(0.1, 4.0 / (1.0 + contribution), 20, DELTA)
        alone = gaussian_epsilon(4.0 / contribution / 20**0.5, DELTA)
        assert one == pytest.approx(min(pair, alone), rel=1e-9)

    found = budget(4.0, p, each).per_client(20)
    assert found == pytest.approx([analytic(4.0 / a / 20**0.5) for a in each], rel=1e-6)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 0.5), st.floats(0.05, 1.0)), min_size=1, max_size=4))
def test_the_worst_client_is_the_largest_of_all(clients: list[tuple[float, float]]) -> None:
    p, each = map(np.array, zip(*clients, strict=True))
    found = budget(2.0, p, each / each.max(), "poisson")
    largest = float(found.per_client(5).max())
    assert largest * (1 - 1e-9) <= found.spent(5) <= largest * 1.03


def test_the_worst_client_may_be_at_the_end_of_a_range() -> None:
    found = budget(2.0, np.array([0.1, 0.11, 0.3]), np.array([1.0, 0.3, 0.25]), "poisson")
    first, second, third = found.per_client(5)
    assert first > third > second
    assert found.spent(5) == first


def test_a_million_clients_are_a_few_classes() -> None:
    p, each = np.full(10**6, 0.01), np.ones(10**6)
    p[::2], each[::2] = 0.02, 0.5
    found = budget(1.0, p, each, "poisson").per_client(10)
    assert found[1] == pytest.approx(poisson_epsilon(0.01, 1.0, 10, DELTA))
    assert np.unique(found[::2]).tolist() == [pytest.approx(poisson_epsilon(0.02, 2.0, 10, DELTA))]


def test_many_different_clients_are_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_MAX_CLASSES", 30)
    p = np.linspace(0.1, 0.5, 100)
    rounded = budget(6.0, p, amplification="poisson").per_client(4)
    assert 10 < len(np.unique(rounded)) <= 30
    for k in (0, 50, 99):
        exact = poisson_epsilon(float(p[k]), 6.0, 4, DELTA)
        assert exact * (1 - 1e-3) <= rounded[k] <= exact * 1.2


@pytest.mark.parametrize(
    "amplification", ["none", "poisson", pytest.param("uniform", marks=pytest.mark.slow)]
)
def test_calibrated_noise_is_just_enough(amplification: Amplification) -> None:
    wanted = budget(1.0, np.full(4, 0.05), amplification=amplification, epsilon=0.5)
    found = calibrated(wanted, 30)
    assert 0.5 * 0.99 < found.spent(30) <= 0.5
    assert replace(found, noise=found.noise * 0.99).spent(30) > 0.5
    assert found.affordable() >= 30
    assert found.spent(found.affordable() + 1) > 0.5


def test_clients_that_are_rarely_drawn_may_spend_nothing() -> None:
    """With p below delta, even a noise multiplier of 1 costs an epsilon of zero."""
    rare = replace(budget(1.0, np.full(4, 0.04), amplification="poisson"), delta=0.05)
    assert rare.spent(1) == 0
    found = calibrated(replace(rare, epsilon=0.5), 2)
    assert 0.3 <= found.noise < 1
    assert found.spent(2) <= 0.5


def test_clients_equal_up_to_rounding_are_one_class() -> None:
    p = np.array([0.3, 0.7])
    found = budget(1.0, p, np.array([1.0, 1 - 2e-16]), "poisson")
    assert found._worst == ([0.7], [1.0])


def test_without_amplification_probabilities_make_no_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two classes are enough for contributions that hardly differ, whatever p is."""
    monkeypatch.setattr(accounting, "_MAX_CLASSES", 2)
    each = np.array([0.5, 0.501, 1.0])
    found = budget(3.0, np.array([0.1, 0.9, 0.5]), each).per_client(2)
    assert found == pytest.approx([analytic(3.0 / a / 2**0.5) for a in each], rel=0.03)


def test_calibrated_noise_of_a_tree() -> None:
    found = calibrated(budget(1.0, epsilon=2.0, separation=8), 20)
    assert found.noise == pytest.approx(
        dp_accounting.get_sigma_gaussian(2.0, DELTA) * (2 * 4 + 3) ** 0.5, rel=1e-6
    )


def test_a_tree_costs_what_dp_accounting_says() -> None:
    """One tree of 100 rounds, in which every client is once; Renyi bounds are a bit larger."""
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(5.0, 100))
    found = budget(5.0, separation=100).spent(100)
    assert found == pytest.approx(analytic(5.0 / 7**0.5), rel=1e-6)
    assert found <= accountant.get_epsilon(DELTA) <= 1.15 * found


def test_the_rounds_that_an_epsilon_affords() -> None:
    found = budget(10.0)
    rounds = found.affordable(3.0)
    assert found.spent(rounds) <= 3.0 < found.spent(rounds + 1)
    assert found.affordable(1e-3) == 0
    with pytest.raises(FedShuffleError, match="no epsilon limits"):
        found.affordable()
    with pytest.raises(FedShuffleError, match="number of rounds is -1"):
        found.spent(-1)
