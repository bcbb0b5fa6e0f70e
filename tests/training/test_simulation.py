"""A loop of one's own, and the metrics that training gives for nothing."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import Federation, FedShuffleError, LocalWork, Simulation, train
from fedshuffle.engines import ReferenceEngine
from fedshuffle.methods import Cohort
from fedshuffle.training.monitoring import DivergenceMonitor
from fedshuffle.training.simulation import reduced
from fedshuffle.transforms import ClientContext, Message, Transform
from tests.problems import Point, copies, half_squared_distance, targets

FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])
SETTINGS: dict[str, Any] = {
    "loss": half_squared_distance,
    "sampling": "uniform:2",
    "work": LocalWork(batch_size=2),
    "seed": 3,
}


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def without_time(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "sequential:2"])
@pytest.mark.parametrize("method", ["fedshuffle", "fedshuffle-mvr", "scaffold"])
def test_a_loop_of_ones_own_is_train_bit_for_bit(method: str, engine: str) -> None:
    settings = {**SETTINGS, "method": method, "engine": engine}
    result = train(Point(2), FEDERATION, rounds=6, **settings)
    with Simulation(Point(2), FEDERATION, **settings) as simulation:
        state = simulation.init()
        for wanted in result.history:
            state, record = simulation.step(state)
            assert without_time(record) == without_time(wanted)
            assert record["seconds"] >= 0
        assert torch.equal(vector(simulation.model(state)), vector(result.model))


@pytest.mark.parametrize("method", ["fedshuffle-mvr", "scaffold"])
def test_a_state_never_changes(method: str) -> None:
    """A step can be done again from any state, also after others."""
    simulation = Simulation(Point(2), FEDERATION, method=method, **SETTINGS)
    states = [simulation.init()]
    for _ in range(5):
        states.append(simulation.step(states[-1])[0])
    for before, after in itertools.pairwise(states):
        assert torch.equal(simulation.step(before)[0].x, after.x)


def test_a_step_factor_is_that_of_the_step_size() -> None:
    whole = Simulation(Point(2), FEDERATION, step_size=lambda r: 0.2 / (r + 1), **SETTINGS)
    half = Simulation(Point(2), FEDERATION, step_size=lambda r: 0.1 / (r + 1), **SETTINGS)
    state, other = whole.init(), half.init()
    for _ in range(3):
        state, record = whole.step(state, step_factor=0.5)
        other, _ = half.step(other)
        assert record["step_factor"] == 0.5
        assert torch.equal(state.x, other.x)
    with pytest.raises(FedShuffleError, match="step_factor is 0"):
        whole.step(state, step_factor=0)


def test_the_engine_is_closed_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = 0

    def close(self: ReferenceEngine) -> None:
        nonlocal closed
        closed += 1

    monkeypatch.setattr(ReferenceEngine, "close", close)
    settings = {**SETTINGS, "engine": "reference"}
    with Simulation(Point(2), FEDERATION, **settings) as simulation:
        state, _ = simulation.step(simulation.init())
    assert closed == 1
    assert simulation.step(state)[0].round == 2
    simulation.close()
    simulation.close()
    assert closed == 2


def test_a_schedule_by_name_needs_the_number_of_rounds() -> None:
    for name in ("step_size", "server_step_size"):
        with pytest.raises(FedShuffleError, match=rf"^{name} is .*schedules.resolve\('cosine:0.1'"):
            Simulation(Point(2), FEDERATION, **SETTINGS | {name: "cosine:0.1"})


def cohort(weight: list[float], probability: list[float]) -> Cohort:
    clients = np.arange(len(weight))
    steps = np.ones_like(clients)
    return Cohort(clients, np.array(weight), np.array(probability), steps, steps, 1)


def test_metrics_of_clients_are_reduced() -> None:
    """w/p = 1, 4, 2: the loss of the third is not known."""
    nan, inf = math.nan, math.inf
    metrics = {
        "train_loss": np.array([3.0, 0.5, nan]),
        "update_norm": np.array([1.0, 2.0, 6.0]),
        "clipped": np.array([0.0, 0.0, 1.0]),
        "bytes_up": np.array([7.0, 7.0, 7.0]),
        "mine": np.array([nan, nan, nan]),
        "infinite": np.array([1.0, inf, 1.0]),
    }
    found = reduced(metrics, cohort([0.5, 1.0, 0.2], [0.5, 0.25, 0.1]))
    assert found.pop("train_loss") == pytest.approx((1 * 3.0 + 4 * 0.5) / 5)
    assert found.pop("clipped") == pytest.approx(1 / 3)
    assert math.isnan(found.pop("infinite"))
    assert found == {"update_norm": 3.0, "update_norm_max": 6.0}
    assert reduced({}, cohort([], [])) == {}


def test_the_training_loss_estimates_the_objective() -> None:
    """Numerator and denominator are unbiased: the mean over all cohorts, by enumeration."""
    weights, probability, losses = [0.5, 0.3, 0.2], 2 / 3, np.array([1.0, 4.0, 9.0])
    above = below = 0.0
    for members in itertools.combinations(range(3), 2):  # each with probability 1/3
        part = cohort([weights[i] for i in members], [probability] * 2)
        scale = float((part.weight / part.probability).sum())
        above += reduced({"train_loss": losses[list(members)]}, part)["train_loss"] * scale / 3
        below += scale / 3
    assert below == pytest.approx(1.0)
    assert above == pytest.approx(float(np.dot(weights, losses)))


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "sequential:2"])
def test_records_hold_the_metrics_of_the_round(engine: str) -> None:
    """In closed form: client i owns copies of b_i, and its step sizes are 0.2 and 0.1."""
    points = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    federation = copies([1, 2], points)
    (record,) = train(
        Point(2), federation, loss=half_squared_distance, rounds=1, step_size=0.1, engine=engine
    ).history
    losses = [25 / 2, (4 / 2 + 0.9**2 * 4 / 2) / 2]  # at the start of each local step
    norms = [0.2 * 5, (1 - 0.9**2) * 2]
    assert record["train_loss"] == pytest.approx((losses[0] + 2 * losses[1]) / 3)
    assert record["update_norm"] == pytest.approx(sum(norms) / 2)
    assert record["update_norm_max"] == pytest.approx(max(norms))
    assert (record["bytes_up"], record["bytes_down"]) == (2 * 2 * 8, 2 * 2 * 8)
    assert "clipped" not in record
    assert "per_client" not in record


class Sparse(Transform):
    """Sends the first coordinate in eight bytes, and says that client 3 was clipped."""

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        updates[:, 1:] = 0
        numbers = context.clients.astype(np.float64)
        clipped = (numbers == 3).astype(np.float64)
        told = {"bytes_up": 8 + numbers, "clipped": clipped, "mine": 2 * numbers}
        return Message(updates, None, told)


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "sequential:2"])
def test_records_hold_the_metrics_of_transforms(engine: str) -> None:
    settings = {**SETTINGS, "engine": engine, "sampling": "uniform:3"}
    result = train(
        Point(2), FEDERATION, rounds=4, transforms=[Sparse()], record_clients=True, **settings
    )
    for record in result.history:
        cohort = record["cohort"]
        assert record["bytes_up"] == sum(8 + i for i in cohort)
        assert record["clipped"] == pytest.approx((3 in cohort) / 3)
        assert record["mine"] == pytest.approx(2 * sum(cohort) / 3)
        names = {"train_loss", "update_norm", "clipped", "mine", "bytes_up", "bytes_down"}
        assert record["per_client"].keys() == names
        assert record["per_client"]["mine"] == [2 * i for i in cohort]
    assert result.metrics == ["mine", "train_loss", "update_norm", "update_norm_max", "clipped"]
    assert float(vector(result.model)[1]) == 0
    settings |= {"transforms": [Sparse()], "evaluate": lambda model: {"mine": 1.0}}
    with pytest.raises(FedShuffleError, match="may not return 'mine'"):
        train(Point(2), FEDERATION, rounds=1, **settings)


def test_a_round_without_clients_has_no_metrics_of_them() -> None:
    settings = {**SETTINGS, "sampling": "independent:1e-9,1e-9,1e-9,1e-9"}
    (record,) = train(Point(2), FEDERATION, rounds=1, record_clients=True, **settings).history
    record.pop("seconds")
    costs = dict.fromkeys(("clients", "steps", "bytes_down", "bytes_up"), 0)
    assert record == {"round": 1, **costs, "cohort": [], "per_client": {}}


def test_a_growing_training_loss_calls_for_a_measurement() -> None:
    monitor = DivergenceMonitor(None)
    losses = [1.0, 9.0, 11.0, 100.0, 200.0, 5.0]
    records = [{"round": r, "train_loss": loss} for r, loss in enumerate(losses, 1)]
    assert [monitor.suspects(record) for record in records] == [
        *(False, False, True),  # more than ten times the first
        *(False, True, False),  # and ten times that
    ]
    monitor.measured(5.0, start=1.0, round=3)
    assert monitor.diverged is None
    with pytest.warns(UserWarning, match="the loss is 50 after round 5, and was 1 at the start"):
        monitor.measured(50.0, start=1.0, round=5)
    monitor.measured(60.0, start=1.0, round=6)  # once is enough
    assert monitor.diverged is not None
    # A loss that is evaluated is proof by itself.
    evaluated = DivergenceMonitor(("loss", 1.0))
    assert not any(evaluated.suspects(record) for record in records)
