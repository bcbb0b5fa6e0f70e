"""Adapters of the black-box audit: functions, logs of rounds, and Flower strategies."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError, LocalWork, audit
from fedshuffle.auditing import audit_server
from fedshuffle.auditing.adapters import FlowerAggregator, FunctionAggregator, read_log
from fedshuffle.sampling import resolve
from tests.auditing.servers import FEDERATION, WORK, fedavg, server_of

ROOT = Path(__file__).parents[2]
HEADER = "round,client,size,steps,weight\n"


def test_functions_have_a_name() -> None:
    assert FunctionAggregator(server_of("fedavg", FEDERATION, WORK)).name == "aggregate"
    assert FunctionAggregator(fedavg, name="mine").name == "mine"


def write(folder: Path, text: str, name: str = "rounds.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_log_of_full_participation(tmp_path: Path) -> None:
    lines = [f"{r},{c},{c + 1},{c + 1},{(c + 1) / 6}\n" for r in range(8) for c in range(3)]
    found, federation = read_log(write(tmp_path, HEADER + "".join(lines)))
    np.testing.assert_allclose(found.effective_weights, np.array([1, 4, 9]) / 14)
    assert federation.sizes.tolist() == [1, 2, 3]
    assert found.exact
    assert found.consistent is False
    assert found.properties.form == "by size"
    assert any("1 to 3" in finding.what for finding in found.findings)


def test_log_with_step_sizes_that_make_up_for_steps(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"round": r, "client": f"c{c}", "size": c, "steps": c, "weight": c, "step_size": 1 / c}
        )
        for r in range(8)
        for c in (1, 2, 3)
    ]
    found, federation = read_log(write(tmp_path, "\n".join(lines), "rounds.jsonl"))
    assert federation.ids == ("c1", "c2", "c3")
    assert found.consistent is True


def test_log_of_sampled_rounds(tmp_path: Path) -> None:
    federation = Federation.from_sizes([2, 4, 6, 9])
    sampling = resolve("uniform:2", federation)
    lines = []
    for r in range(400):
        cohort = sampling.draw(5, r)
        whole = federation.sizes[cohort].sum()
        lines += [
            f"{r},{c},{federation.sizes[c]},3,{float(federation.sizes[c] / whole)!r}\n"
            for c in cohort
        ]
    found, _ = read_log(write(tmp_path, HEADER + "".join(lines)))
    truth = audit(federation, "fedavg", "uniform:2", LocalWork(steps=3)).effective_weights
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()
    assert found.properties.sums_to == pytest.approx(1)
    assert found.inclusion_probabilities.sum() == pytest.approx(2)


def test_log_with_other_objective_weights(tmp_path: Path) -> None:
    lines = [f"{r},{c},{c},1,0.5\n" for r in range(8) for c in (10, 9)]
    path = write(tmp_path, HEADER + "".join(lines))
    assert read_log(path, weights=[1, 1])[0].consistent is True
    assert read_log(path)[1].ids == ("9", "10")  # by number, not as text


def test_a_log_of_a_few_equal_rounds_proves_nothing(tmp_path: Path) -> None:
    rows = [f"{r},{c},{c + 1},{c + 1},{(c + 1) / 6}" for r in range(9) for c in range(3)]
    for rounds, sure in ((2, None), (9, False)):
        path = tmp_path / f"{rounds}.csv"
        path.write_text("\n".join(["round,client,size,steps,weight", *rows[: 3 * rounds]]))
        found, _ = read_log(path)
        assert found.consistent is sure


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rounds"),
        (HEADER, "no rounds"),
        ("round,client,size,weight\n0,a,1,1\n", "'steps'"),
        (HEADER + "0,a,1,1,1\n0,b,1,1\n", "line 3: weight"),
        (HEADER + "0,a,1,1,1\n0,b,1,1,1,1\n", "line 3: more entries"),
        (HEADER + "0,a,1,x,1\n", "line 2: steps is 'x'"),
        (HEADER + "0,a,0,1,1\n", "line 2: size is '0'"),
        (HEADER + "0,a,1,1.5,1\n", "line 2: steps is '1.5'"),
        (HEADER + "0,a,1,1,nan\n", "line 2: weight is 'nan'"),
        (HEADER + "0,a,1,1,-1\n", "line 2: weight is '-1'"),
        (HEADER + "0,,1,1,1\n", "line 2: client is ''"),
        (HEADER + "0,a,1,1,1\n\n0,a,1,1,1\n", "line 4: client a .* line 2"),
        (HEADER + "0,a,1,1,1\n1,a,2,1,1\n", "line 3: client a .* line 2"),
        (HEADER + "0,a,1,1,0\n", "sum to 0"),
        ('{"round": 0}\n', "line 1: .*'client'"),
        ('{"round": 0\n', "line 1: no JSON"),
        ('{"round":0,"client":"a","size":1,"steps":1,"weight":1}\n[]\n', "line 2"),
        (
            '{"round":0,"client":null,"size":1,"steps":1,"weight":1}\n',
            "line 1: client is None",
        ),
        (
            '{"round":0,"client":"a","size":true,"steps":1,"weight":1}\n',
            "line 1: size is True",
        ),
        ("round,client,size,steps,weight,weight\n", "'weight'"),
        (HEADER + f"0,a,{10**30},1,1\n", "line 2: size"),
        (
            '{"round":0,"client":"a","size":' + "9" * 400 + ',"steps":1,"weight":1}\n',
            "line 1: size is 9",
        ),
        ('{"round":' + "9" * 5000 + "}\n", "line 1: no JSON"),
        ('{"round":' + "[" * 100_000 + "\n", "line 1: no JSON"),
    ],
)
def test_broken_logs_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        read_log(write(tmp_path, text))


def test_spaces_and_empty_lines_of_a_log_do_not_matter(tmp_path: Path) -> None:
    text = "round, client, size, steps, weight\n0, a, 1, 1, 1 \n  \n0, b, 2, 1, 1\n\n"
    assert read_log(write(tmp_path, text))[1].ids == ("a", "b")


def test_clients_may_have_very_long_names(tmp_path: Path) -> None:
    long = "9" * 5000
    assert read_log(write(tmp_path, HEADER + f"0,{long},1,1,1\n"))[1].ids == (long,)


def test_missing_and_binary_logs(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="cannot read the log"):
        read_log(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedShuffleError, match="cannot read the log"):
        read_log(tmp_path / "b.csv")


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
