"""The strategy: the simulator's model on Flower's clients, resumed runs and settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from torch import Tensor, nn

from fedshuffle import LocalWork, _files, losses, methods
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import client_app
from fedshuffle.local_work import AtMost
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import channel
from tests.flower.grid import LocalGrid
from tests.flower.helpers import (
    FEDERATION,
    WORK,
    apps,
    data,
    model,
    same,
    simulated,
    start,
    strategy,
    warnings,
)

pytestmark = pytest.mark.usefixtures("server_process")


DEPLOYABLE = [
    method.name
    for method in methods.available()
    if not (
        method.pooled
        or method.balanced_only
        or method.direction.own_models
        or method.name == "fedlin-sparse"
    )
]


@pytest.mark.parametrize("name", DEPLOYABLE)
def test_model_is_that_of_the_simulator(name: str) -> None:
    options: dict[str, Any] = {"method": name, "work": methods.get(name).drop_fixed(WORK)}
    result = strategy(**options).start(LocalGrid(apps()), start(), 3)
    assert same(result.arrays, simulated(3, **options))


def test_clients_with_models_of_their_own_are_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"fedawe start from models of their own.*Use mifa"):
        strategy(method="fedawe")


@pytest.mark.parametrize("name", ["train_config", "evaluate_config"])
def test_configs_for_clients_are_refused(name: str) -> None:
    with pytest.raises(FedShuffleError, match=f"{name} has 'lr'.*ConsistentFedAvg"):
        strategy().start(LocalGrid(apps()), start(), 1, **{name: ConfigRecord({"lr": 0.1})})


def test_step_size_and_epochs_may_vary() -> None:
    options: dict[str, Any] = {
        "work": LocalWork(epochs=[1, 2, 1, 3], batch_size=2, order="once", clip=0.5),
        "step_size": lambda round: 0.1 / (1 + round),
        "server_step_size": 1.5,
        "sampling": "importance:2",
        "seed": 2**64 - 1,
    }
    result = strategy(**options).start(LocalGrid(apps()), start(), 3)
    assert same(result.arrays, simulated(3, **options))


@pytest.mark.parametrize(
    "wrap",
    [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping],
)
def test_wrapper_is_refused(wrap: Any) -> None:
    with pytest.raises(FedShuffleError, match=r"no other strategy can wrap it.*privacy="):
        wrap(strategy(), 1.0, 1.0, 2).start(LocalGrid(apps()), start(), 1)


def test_frozen_values_must_be_those_of_the_server() -> None:
    def half() -> nn.Module:
        made = model()
        made.get_parameter("0.weight").requires_grad = False
        return made

    grid = LocalGrid([client_app(half, data, losses.cross_entropy)] * 4)
    other = half().state_dict()
    other["0.weight"] = other["0.weight"] * 2
    with pytest.raises(FedShuffleError, match=r"0\.weight"):
        strategy().start(grid, ArrayRecord(other), 1)
    del other["0.weight"]  # who does not need it need not have it
    assert list(strategy().start(grid, ArrayRecord(other), 1).arrays) == list(other)


def test_sizes_may_be_an_array() -> None:
    result = strategy(sizes=FEDERATION.sizes).start(LocalGrid(apps()), start(), 1)
    assert same(result.arrays, simulated(1))


def test_numbers_may_be_numpy_scalars() -> None:
    work = replace(WORK, batch_size=np.int64(2))  # type: ignore[arg-type]
    result = strategy(work=work).start(LocalGrid(apps()), start(), 1)
    assert same(result.arrays, simulated(1))


def test_frozen_parameters_do_not_change() -> None:
    def half() -> nn.Module:
        made = model()
        made.get_parameter("0.weight").requires_grad = False
        return made

    app = client_app(half, data, losses.cross_entropy)
    result = strategy().start(LocalGrid([app] * 4), ArrayRecord(half().state_dict()), 2)
    assert same(result.arrays, simulated(2, make=half))


def test_tied_parameters_are_trained_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.second(torch.tanh(self.first(x)))
            return found

    app = client_app(Tied, data, losses.cross_entropy)
    result = strategy().start(LocalGrid([app] * 4), ArrayRecord(Tied().state_dict()), 2)
    assert same(result.arrays, simulated(2, make=Tied))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedavg", "inclusion probability"),
        ("fednova", "inclusion probability"),
        ("fedshuffle-mvr", "mean round of fedshuffle-mvr"),
        ("fedlin", "mean round of fedlin"),
        ("mime-lite", ""),
        ("fedshuffle-gen", ""),
    ],
)
def test_summary_warns_of_methods_biased_by_dropout(
    name: str, said: str, log: pytest.LogCaptureFixture
) -> None:
    strategy(method=name).summary()
    assert not warnings(log)
    strategy(method=name, response_probability=0.9).summary()
    assert said in warnings(log)
    assert bool(said) == bool(warnings(log))


def test_server_and_clients_need_the_same_model() -> None:
    with pytest.raises(FedShuffleError, match=r"0\.weight"):
        strategy().start(LocalGrid(apps()), ArrayRecord(nn.Linear(4, 3).state_dict()), 1)
    wider = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    with pytest.raises(FedShuffleError, match=r"0\.weight.* \(6, 4\) .* \(5, 4\)"):
        strategy().start(LocalGrid(apps()), ArrayRecord(wider.state_dict()), 1)


@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-mvr", "fedadam", "scaffold"])
def test_resumed_run_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == 3:
            raise KilledError
        return MetricRecord({"loss": 0.5})

    options = {"method": name, "out": tmp_path / "run", "checkpoint_every": 2}
    with pytest.raises(KilledError):
        strategy(**options).start(LocalGrid(apps()), start(), 5, evaluate_fn=evaluate)
    other = ArrayRecord({k: v * 0 for k, v in model().state_dict().items()})  # it is not looked at
    result = strategy(**options, resume=True).start(LocalGrid(apps()), other, 5)
    assert same(result.arrays, simulated(5, method=name))
    assert [record["round"] for record in RunFolder(tmp_path / "run").metrics()] == [1, 2, 3, 4, 5]


def test_resumed_run_needs_the_same_settings(tmp_path: Path) -> None:
    nobody = LocalGrid([])  # who is not waited for
    with pytest.raises(FedShuffleError, match="no run"):
        strategy(out=tmp_path / "run", resume=True).start(nobody, start(), 1)
    strategy(out=tmp_path / "run").start(LocalGrid(apps()), start(), 1)
    with pytest.raises(FedShuffleError, match="already"):
        strategy(out=tmp_path / "run").start(nobody, start(), 2)
    with pytest.raises(FedShuffleError, match="seed"):
        strategy(out=tmp_path / "run", resume=True, seed=4).start(LocalGrid(apps()), start(), 2)
    with pytest.raises(FedShuffleError, match="response"):
        strategy(out=tmp_path / "run", resume=True, response_probability=0.5).start(
            LocalGrid(apps()), start(), 2
        )


def test_only_one_server_writes_to_a_run(tmp_path: Path) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        with (
            pytest.raises(FedShuffleError, match="written"),
            _files.one_writer(tmp_path / "run"),
        ):
            raise AssertionError
        return MetricRecord({"rounds": round})

    strategy(out=tmp_path / "run").start(LocalGrid(apps()), start(), 1, evaluate_fn=evaluate)
    strategy(out=tmp_path / "run", resume=True).start(LocalGrid(apps()), start(), 2)


def test_metrics_that_are_infinite_or_take_a_name(tmp_path: Path) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": float("inf"), "replied": 9.0, "steps": 9})

    strategy(out=tmp_path / "run").start(LocalGrid(apps()), start(), 1, evaluate_fn=evaluate)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert np.isnan(record["loss"])
    assert (record["replied"], record["evaluated_replied"]) == (2, 9)
    assert record["evaluated_steps"] == 9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "fedlin-sparse"}, "fedlin-sparse"),
        ({"method": "scaffold", "transforms": [channel("float16")]}, "float16"),
        ({"transforms": [channel("sign"), channel("float16")]}, "both channels"),
        ({"transforms": [channel("sign+ef")], "resume": True, "out": "x"}, "cannot be resumed"),
        ({"method": "pooled-rr", "sampling": "full"}, "pooled-rr"),
        ({"sampling": "optimal:2"}, "optimal"),
        ({"sampling": "uniform"}, "incomplete"),
        ({"work": LocalWork(interruption=AtMost(1))}, "interruption"),
        ({"method": "fednova", "sizes": "withheld"}, "fednova"),
        ({"sizes": "withheld", "work": LocalWork(steps=3)}, "epochs"),
        ({"sizes": "withheld", "sampling": "importance:2"}, "importance"),
        ({"sizes": "guessed"}, "guessed"),
        ({"sizes": [1, 2]}, "2 sizes"),
        ({"sizes": [1, 2, 0, 4]}, "client 2"),
        ({"clients": None}, "clients=100"),
        ({"response_probability": 0.0}, "response_probability"),
        ({"response_probability": [1, 1, 1]}, "response_probability"),
        ({"response_probability": 1.5}, "response_probability"),
        ({"timeout": 0}, "timeout"),
        ({"resume": True}, "folder"),
        ({"retries": -1}, "retries"),
        ({"nodes": {"100": 0}}, "nodes"),
        ({"weights": [1, 2]}, "weights"),
        ({"sampling": "uniform:9"}, "clients is 9"),
        ({"method": "fedavg-min+fedshuffle", "sizes": "withheld"}, "epochs"),
    ],
)
def test_invalid_settings_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FedShuffleError, match=said):
        strategy(**options)
