"""What a run gives the clients with the fewest training examples."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import Federation, comparison
from fedshuffle.comparison.small_clients import small_decile, training_sizes
from fedshuffle.config import runner as config_runner
from fedshuffle.evaluation import ClientTable
from tests.comparison.project import CONFIG, MODULE, project

pytestmark = pytest.mark.xdist_group("comparison")  # they share one comparison


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-9, 9)), min_size=1, max_size=40))
def test_it_is_the_mean_over_the_smallest_tenth(
    tmp_path_factory: pytest.TempPathFactory, clients: list[tuple[int, float]]
) -> None:
    file = tmp_path_factory.mktemp("run") / "clients.csv"
    names = [f"client {k}" for k in range(len(clients))]
    values = np.array([value for _, value in clients])
    ClientTable(names, np.ones(len(names), int), {"loss": values}, {"loss": False}).to_csv(file)
    sizes = dict(zip(names, (size for size, _ in clients), strict=True))
    number = -(-len(clients) // 10)
    smallest = sorted(range(len(clients)), key=lambda k: (clients[k][0], k))[:number]
    want = statistics.fmean(clients[k][1] for k in smallest)
    assert small_decile(file, sizes) == {"loss": pytest.approx(want, rel=1e-12, abs=1e-12)}


def test_clients_that_are_not_known_or_undefined_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "clients.csv"
    file.write_text("client,examples,auc,loss\na,9,,1.5\nb,9,0.25,2.5\nstranger,9,0.5,9.0\n")
    assert small_decile(file, {"a": 1, "b": 5, "c": 1}) == {"auc": 0.25, "loss": 1.5}
    file.write_text("client,examples,auc\na,9,\n")
    assert small_decile(file, {"a": 1}) == {}
    assert small_decile(file, {"b": 1}) == {}
    assert small_decile(file, {}) == {}
    assert small_decile(tmp_path / "none.csv", {"a": 1}) == {}


def test_clients_are_matched_by_id() -> None:
    rows = torch.zeros(6, 1)
    training = Federation.from_arrays(rows, client_ids=[7, 8, 8, 9, 9, 9])
    held_out = Federation.from_arrays(rows[:3], client_ids=[9, 10, 7])
    assert training_sizes(training, held_out) == {"7": 1, "9": 3}
    numbered = Federation.from_arrays(rows, sizes=[1, 2, 3])
    alike = Federation.from_arrays(rows, sizes=[4, 1, 1])
    assert training_sizes(numbered, alike) == {"0": 1, "1": 2, "2": 3}
    assert training_sizes(numbered, alike.subset([2])) == {"2": 3}
    other = Federation.from_arrays(rows, sizes=[6])  # one test set for all
    assert training_sizes(numbered, other) == {}


MORE = """
def people():
    sizes = [3, 1, 4, 2]
    points = torch.arange(20, dtype=torch.float64).reshape(10, 2) / 10
    return Federation.from_arrays(points, sizes=sizes)
"""


def test_a_comparison_records_it_for_every_full_run(tmp_path: Path) -> None:
    text = (
        CONFIG.replace("per_client = false", "per_client = true")
        .replace('"mine:data"', '"mine:people"')
        .replace("step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]\n", "", 1)
        .replace("common_step_sizes = [0.1, 4.0]", "common_step_sizes = [0.1]")
    )
    file = project(tmp_path, text)
    (tmp_path / "mine.py").write_text(MODULE + MORE)
    results = comparison.load(file).run(jobs=1)
    for curve in results["curves"]:
        for run in curve["runs"]:
            lines = (tmp_path / "out" / run["folder"] / "clients.csv").read_text().splitlines()
            assert lines[2].startswith("1,1,")  # the client with one example
            assert run["small_decile"] == {"loss": float(lines[2].split(",")[2])}
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    run_folder = tmp_path / "out" / results["curves"][0]["runs"][0]["folder"]
    config_runner.resume(run_folder, rounds=20)  # now its clients.csv is that of round 20
    again = comparison.load(file).run(jobs=1)
    assert again["curves"][0]["runs"][0]["small_decile"] == {}
    assert again["curves"][0]["runs"][1] == results["curves"][0]["runs"][1]


def test_without_measured_clients_there_is_none(tmp_path: Path) -> None:
    text = CONFIG.replace("step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]\n", "", 1).replace(
        "common_step_sizes = [0.1, 4.0]", "common_step_sizes = [0.1]"
    )
    results = comparison.load(project(tmp_path, text), {"compare.seeds": [0]}).run(jobs=1)
    assert [run["small_decile"] for c in results["curves"] for run in c["runs"]] == [{}, {}]
