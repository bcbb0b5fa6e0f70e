"""Adapters of the black-box audit: functions and Flower strategies."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError, audit
from fedshuffle.auditing import audit_server
from fedshuffle.auditing.adapters import FlowerAggregator, FunctionAggregator
from tests.auditing.servers import FEDERATION, WORK, fedavg, server_of

ROOT = Path(__file__).parents[2]


def test_functions_have_a_name() -> None:
    assert FunctionAggregator(server_of("fedavg", FEDERATION, WORK)).name == "aggregate"
    assert FunctionAggregator(fedavg, name="mine").name == "mine"


def test_missing_flower_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(FedShuffleError, match=r"fedshuffle\[flower\]"):
        FlowerAggregator(object(), 3)


@pytest.fixture
def flower() -> Any:
    return importlib.import_module("flwr.serverapp.strategy")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["full", "uniform:2"])
def test_flower_averages_as_fedavg(flower: Any, sampling: str) -> None:
    truth = audit(FEDERATION, "fedavg-rr", sampling).effective_weights
    for make in (flower.FedAvg, flower.FedAdam, lambda: flower.FedProx(proximal_mu=0.1)):
        found = audit_server(FlowerAggregator(make, len(FEDERATION)), FEDERATION, sampling)
        np.testing.assert_allclose(found.effective_weights, truth, rtol=1e-6)
        assert found.consistent is False
        assert found.properties.form == "by size"


@pytest.mark.slow
def test_flower_momentum_is_simulated(flower: Any) -> None:
    strategy = flower.FedAvgM(server_momentum=0.5)
    found = audit_server(
        FlowerAggregator(strategy, len(FEDERATION)), FEDERATION, "uniform:2", draws=400
    )
    truth = audit(FEDERATION, "fedavg-rr", "uniform:2").effective_weights
    assert found.properties.long_run_gain == pytest.approx(2, rel=1e-6)
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4.5 * found.standard_errors).all()
    assert strategy.momentum_vector is None  # the strategy given is never used itself


@pytest.mark.slow
def test_unsuitable_flower_strategies_are_refused(flower: Any) -> None:
    with pytest.raises(FedShuffleError, match="min_available_nodes"):
        audit_server(
            FlowerAggregator(lambda: flower.FedAvg(min_available_nodes=9), 2),
            Federation.from_sizes([1, 2]),
        )
    with pytest.raises(FedShuffleError, match="QFedAvg"):
        FlowerAggregator(flower.QFedAvg, 3)
    with pytest.raises(FedShuffleError, match="aggregate_train"):
        FlowerAggregator(dict, 3)
    with pytest.raises(FedShuffleError, match="strategy"):
        FlowerAggregator(3, 3)


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "flower_strategies", ROOT / "benchmarks" / "flower_strategies.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedMedian", "FedTrimmedAvg, 0.2"])
def test_the_flower_table_of_the_docs_is_what_is_measured(script: Any, name: str) -> None:
    line = script.row(name, script.strategies()[name])
    assert line in script.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("row", [("server", "fixed", "1, 2, 6"), ("client", "adaptive", "20 of 1")])
def test_the_privacy_table_of_the_docs_is_what_is_measured(script: Any, row: Any) -> None:
    line = script.privacy_row(*row)
    assert line in script.PAGE.read_text(encoding="utf-8").splitlines()
