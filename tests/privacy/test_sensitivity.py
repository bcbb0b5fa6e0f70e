"""How far one client moves the sum: by enumeration of cohorts and of clients to leave out."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import EpochRange, Federation, LocalWork, MissLast, RandomStop, methods
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.local_work import Interruption
from fedshuffle.methods import Cohort, FedShuffleGen, InclusionProbability, Method
from fedshuffle.methods.averaging import (
    objective_weight,
    own_steps,
    steps_of_the_longest,
    weight_per_share_done,
    weight_per_step,
)
from fedshuffle.privacy import Clip, Privacy, bind
from fedshuffle.privacy.mechanism import largest_weights
from fedshuffle.sampling import Full, Independent, Sampling, Uniform
from fedshuffle.transforms import ClientContext

SIZES = [1, 2, 6]
SAMPLINGS = {
    "full": Full(3),
    "uniform": Uniform(3, 2),
    "independent": Independent([0.3, 0.9, 0.5]),
}
WORKS = {
    "epochs": LocalWork(),
    "range": LocalWork(epochs=EpochRange(1, 3)),
    "missed": LocalWork(epochs=2, interruption=MissLast(1)),
    "stopped": LocalWork(epochs=2, interruption=RandomStop(0.5)),
}
RULES = {
    "objective": FedShuffleGen(own_steps, objective_weight, InclusionProbability()),
    "per step": FedShuffleGen(steps_of_the_longest, weight_per_step, InclusionProbability()),
    "per share": FedShuffleGen(own_steps, weight_per_share_done, InclusionProbability()),
    "capped": methods.get("fedshuffle-capped").averaging,
}


def method(rule: FedShuffleGen) -> Method:
    return replace(methods.get("fedshuffle"), name="own", averaging=rule)


def context(clients: IntArray, weights: FloatArray) -> ClientContext:
    return ClientContext(0, 0, clients, np.ones_like(clients), np.ones(len(clients)), weights)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_client_moves_the_sum_by_more(
    sampling: str, work: str, rule: str, weighted: bool
) -> None:
    """Every cohort, every client left out, updates that try to do harm: at most the sensitivity,
    and where steps are not random it is reached.
    """
    drawn, own, federation = SAMPLINGS[sampling], method(RULES[rule]), Federation.from_sizes(SIZES)
    workload = own.local_work(WORKS[work]).on(federation.sizes)
    privacy = Privacy(clip=0.7, noise=1.0, weighted=weighted)
    mechanism = bind(privacy, own, federation, drawn, workload, rounds=1)
    cohorts = drawn.cohorts(100)
    assert cohorts is not None
    largest, contributions = np.zeros(3), mechanism.budget.contributions * mechanism.sensitivity
    for (clients, _), seed in itertools.product(cohorts, range(12)):
        if not len(clients):
            continue
        steps = workload.plan(clients, seed, round=0)
        cohort = Cohort.of(federation, drawn, workload, clients, steps)
        weights = own.averaging.aggregation_weights(cohort)
        rng = np.random.default_rng(seed)
        for scale in (0.1, 1.0, 1e6):
            updates = torch.from_numpy(scale * rng.choice([-1.0, 1.0], (len(clients), 4)))
            for one in mechanism.transforms:
                updates = one.client(updates, None, context(clients, weights)).values
            sent = torch.from_numpy(weights)[:, None] * updates
            for k, client in enumerate(clients.tolist()):
                moved = float((sent.sum(0) - sent[np.arange(len(clients)) != k].sum(0)).norm())
                largest[client] = max(largest[client], moved)
    assert (largest <= contributions * (1 + 1e-9)).all()
    if work != "stopped":
        assert largest == pytest.approx(contributions)
        assert mechanism.sensitivity == pytest.approx(largest.max())


def test_the_sensitivity_is_not_that_of_equal_weights() -> None:
    """Noise of z C / n, as for an unweighted mean, would be half of what is needed."""
    federation, own = Federation.from_sizes(SIZES), methods.get("fedshuffle")
    workload = own.local_work(LocalWork()).on(federation.sizes)
    found = bind(Privacy(clip=1.0, noise=1.0), own, federation, Full(3), workload, 1)
    assert found.sensitivity == pytest.approx(6 / 9)
    assert found.noise_std == pytest.approx(2.0 * 1.0 / 3)
    assert found.budget.contributions == pytest.approx([1 / 6, 2 / 6, 1.0])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.sampled_from(sorted(RULES)),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_no_round_has_a_larger_weight(
    sizes: list[int], rule: str, low: int, more: int, seed: int
) -> None:
    federation, own = Federation.from_sizes(sizes), method(RULES[rule])
    drawn: Sampling = Independent(np.linspace(0.2, 1.0, len(sizes)))
    stop = RandomStop(0.7) if more % 2 else None
    work = LocalWork(epochs=EpochRange(low, low + more), interruption=stop)
    workload = own.local_work(work).on(federation.sizes)
    clients = np.arange(len(sizes))
    most = largest_weights(own, federation, drawn, workload)
    for round in range(5):
        steps = workload.plan(clients, seed, round)
        cohort = Cohort.of(federation, drawn, workload, clients, steps)
        assert (own.averaging.aggregation_weights(cohort) <= most * (1 + 1e-12)).all()


class LateStop(Interruption):
    """Clients do all steps in the first rounds, and one step later."""

    random = False

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return planned if round < 100 else np.ones_like(planned)


@pytest.mark.parametrize("rule", RULES)
def test_an_interruption_of_one_s_own_may_change_with_the_round(rule: str) -> None:
    federation, own = Federation.from_sizes(SIZES), method(RULES[rule])
    workload = own.local_work(LocalWork(interruption=LateStop())).on(federation.sizes)
    most = largest_weights(own, federation, Full(3), workload)
    for round in (0, 100):
        steps = workload.plan(np.arange(3), seed=0, round=round)
        cohort = Cohort.of(federation, Full(3), workload, np.arange(3), steps)
        assert (own.averaging.aggregation_weights(cohort) <= most * (1 + 1e-12)).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_clipping_scales_down_and_nothing_else(
    values: list[float], threshold: float, weight: float
) -> None:
    before = torch.tensor(values, dtype=torch.float64).view(2, 3)
    weights = np.array([1.0, weight])
    for weighted in (False, True):
        message = Clip(threshold, weighted).client(
            before.clone(), None, context(np.arange(2), weights)
        )
        for row, sent, a, was in zip(before, message.values, weights, message.metrics["clipped"]):
            norm = float(row.norm()) * (a if weighted else 1.0)
            scale = 1.0 if norm <= threshold else threshold / norm
            assert torch.allclose(sent, scale * row, rtol=1e-12, atol=0)
            assert float(was) == (norm > threshold)


def test_clip_has_the_layout_and_the_mean_of_the_seam() -> None:
    clip = Clip(1.0)
    assert (clip.any_layout, clip.mean, clip.keeps_state, clip.every_round) == (
        True, "model-dependent", False, False,
    )  # fmt: skip
