"""Adaptive clipping: the paper's update, and where the threshold goes."""

import math

import numpy as np
import pytest
import torch

from fedshuffle import Federation, LocalWork, methods
from fedshuffle.errors import FedShuffleError
from fedshuffle.privacy import AdaptiveClip, AdaptiveClipping, Mechanism, Privacy, bind
from fedshuffle.privacy.adaptive import sum_noise
from fedshuffle.sampling import Full, Independent, among_available
from fedshuffle.transforms import ClientContext, ServerContext

QUIET = AdaptiveClip(2.0, noise=1e-9, largest_weight=1.0, expected_cohort=4.0, rate=0.5)


def context(clients: int, shared: dict[str, torch.Tensor], weights: float = 1.0) -> ClientContext:
    ones = np.ones(clients)
    return ClientContext(
        0, 0, np.arange(clients), ones.astype(np.int64), ones, weights * ones, shared=shared
    )


def test_the_threshold_moves_by_the_paper_s_rule() -> None:
    """C <- C exp(-eta (b - gamma)), b = 1/2 + sum (b_i - 1/2) / m, with the *unclipped* b_i."""
    metrics = {"clipped": np.array([1.0, 0.0, 0.0])}
    _, state = QUIET.server(torch.zeros(2), ServerContext(0, 0, {}, metrics))
    b = 0.5 + (-0.5 + 0.5 + 0.5) / 4.0
    assert float(state["clip"]) == pytest.approx(2.0 * math.exp(-0.5 * (b - 0.5)), rel=1e-14)

    _, state = QUIET.server(torch.zeros(2), ServerContext(0, 1, state, {"clipped": np.ones(4)}))
    grown = 2.0 * math.exp(-0.5 * (b - 0.5)) * math.exp(0.5 * 0.5)
    assert float(state["clip"]) == pytest.approx(grown, rel=1e-14)  # all clipped: it must rise


def test_an_empty_cohort_moves_the_threshold_as_half_of_the_expected_one() -> None:
    _, state = QUIET.server(torch.zeros(2), ServerContext(0, 0, {}, {}))
    assert float(state["clip"]) == 2.0  # b = 1/2, the quantile


def test_clients_clip_to_the_threshold_that_the_server_sends() -> None:
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64)
    shared = {"clip": torch.tensor(1.0, dtype=torch.float64)}
    first = QUIET.client(updates.clone(), None, context(2, {}))
    later = QUIET.client(updates.clone(), None, context(2, shared))
    assert first.values.norm(dim=1).tolist() == pytest.approx([2.0, 0.5])
    assert later.values.norm(dim=1).tolist() == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_without_noise_the_threshold_finds_the_quantile(quantile: float) -> None:
    norms = np.random.default_rng(0).lognormal(1.0, 1.0, 500)
    updates = torch.from_numpy(norms)[:, None] * torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    adaptive = AdaptiveClip(0.01, 1e-9, 1.0, 500.0, quantile, rate=0.2)
    state: dict[str, torch.Tensor] = {}
    for round in range(400):
        clipped = adaptive.client(updates.clone(), None, context(500, state)).metrics["clipped"]
        metrics = {"clipped": np.asarray(clipped)}
        _, after = adaptive.server(torch.zeros(2), ServerContext(0, round, state, metrics))
        state = dict(after)
    reached = float((norms <= float(state["clip"])).mean())
    assert reached == pytest.approx(quantile, abs=0.005)


def test_the_count_has_its_noise() -> None:
    noisy = AdaptiveClip(1.0, 1e-9, 1.0, expected_cohort=10.0, rate=1.0, count_noise=3.0)
    contexts = [ServerContext(seed, 0, {}, {}) for seed in range(2000)]
    states = [noisy.server(torch.zeros(1), one)[1] for one in contexts]
    counts = np.array([-math.log(float(state["clip"])) * 10.0 for state in states])
    assert counts.std() == pytest.approx(3.0, rel=0.08)  # five standard errors
    assert abs(counts.mean()) < 5 * 3.0 / 2000**0.5


def mechanism(privacy: Privacy, n: int = 100) -> Mechanism:
    federation, method = Federation.from_sizes([5] * n), methods.get("fedshuffle")
    workload = method.local_work(LocalWork()).on(federation.sizes)
    return bind(privacy, method, federation, Independent([0.4] * n), workload, rounds=5)


def test_sum_and_count_together_cost_the_noise_multiplier() -> None:
    """One client moves the sum by its sensitivity and the count by 1/2."""
    found = mechanism(Privacy(clip=0.1, noise=1.2, adaptive=AdaptiveClipping()))
    (transform,) = found.transforms
    assert isinstance(transform, AdaptiveClip)
    assert transform.count_noise == pytest.approx(40 / 20)
    assert transform.noise == sum_noise(1.2, 2.0)
    moved = math.hypot(1 / transform.noise, 0.5 / transform.count_noise)
    assert 1 / moved == pytest.approx(1.2)
    plain = mechanism(Privacy(clip=0.1, noise=1.2))
    assert found.budget.spent(5) == pytest.approx(plain.budget.spent(5))


def test_clients_that_were_dropped_are_not_expected() -> None:
    federation, method = Federation.from_sizes([5] * 4), methods.get("fedshuffle")
    sampling = among_available(Full(4), "independent:0.5,0.5,0,0+drop", federation)
    workload = method.local_work(LocalWork()).on(federation.sizes)
    privacy = Privacy(clip=0.1, noise=1.2, adaptive=AdaptiveClipping(count_noise=1.0))
    (transform,) = bind(privacy, method, federation, sampling, workload, rounds=5).transforms
    assert isinstance(transform, AdaptiveClip)
    assert transform.expected_cohort == pytest.approx(0.5 + 0.5)


def test_a_count_that_takes_all_of_the_budget_is_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"needs a count_noise above 2\.5"):
        mechanism(Privacy(clip=0.1, noise=5.0, adaptive=AdaptiveClipping()))
    small = AdaptiveClipping(count_noise=0.2)
    with pytest.raises(FedShuffleError, match="on the count alone"):
        mechanism(Privacy(clip=0.1, epsilon=0.5, delta=1e-5, adaptive=small))
