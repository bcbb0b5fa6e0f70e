"""The mean round under dropout, by brute force; updates in memory and on disk."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower.client_round import ClientRound
from fedshuffle.flower.update_buffer import Update, UpdateBuffer
from fedshuffle.kernel import FullGradient, LocalTraining
from fedshuffle.state import State
from fedshuffle.training.rounds import Run
from tests.flower.grid import LocalGrid
from tests.flower.helpers import apps, same, simulated, start, strategy
from tests.problems import unit_vectors

pytestmark = pytest.mark.usefixtures("server_process")


def expected_update(run: Run, answers: np.ndarray, done: np.ndarray) -> np.ndarray:
    """The mean update of a round, over all cohorts and all subsets of them that may reply."""
    d = len(run.federation)
    state = State(torch.zeros(d, dtype=torch.float64))
    cohorts = run.sampling.cohorts(1000)
    assert cohorts is not None
    mean = np.zeros(d)
    for members, chance in cohorts:
        for pattern in itertools.product([True, False], repeat=len(members)):
            there = dict(zip(members.tolist(), pattern, strict=True))
            odds = np.prod([answers[i] if t else 1 - answers[i] for i, t in there.items()])
            if odds and there:  # nobody moves nothing
                mean += chance * odds * update(run, state, answers, there, done)
    return mean


def update(
    run: Run, state: State, answers: np.ndarray, there: dict[int, bool], done: np.ndarray
) -> np.ndarray:
    """The update of one round in which only some reply; client i moves along axis i."""
    members = np.array(list(there), dtype=np.int64)
    drawn = ClientRound(run, state, answers)
    drawn.cohort = replace(
        run.cohort(0),
        clients=members,
        weight=run.federation.weights[members],
        probability=run.sampling.p[members],
        planned=run.workload.possible_steps[0][members, 0],
        done=run.workload.possible_steps[0][members, 0],
    )
    request = drawn.next()
    assert isinstance(request, LocalTraining)
    buffer = UpdateBuffer(state.x[None])
    for task in request.tasks:
        i = task.minibatches.client
        if there[i]:
            axis = torch.eye(len(state.x), dtype=torch.float64)[i]
            steps = min(int(done[i]), task.minibatches.steps)
            buffer[i] = Update(axis[None] * steps * task.step_size, steps)
    drawn.add_training(buffer)
    after = drawn.next()
    assert isinstance(after, State)
    return (after.x - state.x).numpy()


@pytest.mark.parametrize("sampling", ["full", "uniform:2", "importance:2", "independent:.3,.9,.5"])
@pytest.mark.parametrize("most", [100, 2])
def test_mean_round_is_unbiased_under_the_dropout_model(sampling: str, most: int) -> None:
    """Brute force: the mean over all cohorts and replies is the update of all clients with all
    their steps.
    """
    federation = unit_vectors([2, 5, 3]).federation
    run = Run(federation, "fedshuffle-gen", sampling, step_size=0.1)
    answers = np.array([0.6, 1.0, 0.25])
    mean = expected_update(run, answers, np.full(3, most))
    assert np.allclose(mean, federation.weights * 0.1 * 5, rtol=1e-12)


def test_mean_round_is_biased_without_a_dropout_model() -> None:
    federation = unit_vectors([2, 5, 3]).federation
    run = Run(federation, "fedshuffle-gen", "uniform:2", step_size=0.1)
    state, there = State(torch.zeros(3, dtype=torch.float64)), {0: True, 1: False}
    moved = update(run, state, np.ones(3), there, np.full(3, 100))
    assert np.allclose(moved, [federation.weights[0] / (2 / 3) * 0.1 * 5, 0, 0])


def test_momentum_is_unbiased_under_the_dropout_model() -> None:
    """The momentum of exact MVR, over all who may reply with gradients and then with updates."""
    federation = unit_vectors([2, 5, 3]).federation
    run = Run(federation, "fedshuffle-mvr", "full", step_size=0.1)
    answers, state = np.array([0.6, 1.0, 0.25]), State(torch.zeros(3, dtype=torch.float64))
    axes = torch.eye(3, dtype=torch.float64)
    mean = torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.product(itertools.product([True, False], repeat=3), repeat=2):
        odds = 1.0
        for i in range(3):
            odds *= answers[i] if first[i] else 1 - answers[i]
            if first[i]:
                odds *= answers[i] if second[i] else 1 - answers[i]
            elif second[i]:
                odds = 0.0  # not asked
        if not odds:
            continue
        drawn = ClientRound(run, state, answers)
        assert isinstance(drawn.next(), FullGradient)
        buffer = UpdateBuffer(axes[:1])
        for i in range(3):
            if first[i]:
                buffer[i] = Update(axes[i : i + 1], 0)
        drawn.add_gradients(buffer)
        request = drawn.next()
        assert isinstance(request, LocalTraining)
        buffer = UpdateBuffer(axes[:1])
        for task in request.tasks:
            if second[i := task.minibatches.client]:
                buffer[i] = Update(axes[i : i + 1], task.minibatches.steps)
        drawn.add_training(buffer)
        after = drawn.next()
        assert isinstance(after, State)
        mean += odds * after.method_state.get("momentum", torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(mean, torch.tensor(federation.weights), rtol=1e-12)


# Updates in memory and on disk


@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-mvr"])
def test_updates_on_disk_count_as_those_in_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedshuffle.flower.update_buffer.MAX_BYTES", 43 * 4)  # one update
    result = strategy(method=name, sampling="full").start(LocalGrid(apps()), start(), 2)
    assert same(result.arrays, simulated(2, method=name, sampling="full"))


def test_full_disk_is_not_a_client_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise FedShuffleError("the disk is full")

    monkeypatch.setattr(UpdateBuffer, "__setitem__", full)
    with pytest.raises(FedShuffleError, match="full"):
        strategy(response_probability=0.9).start(LocalGrid(apps()), start(), 1)
