"""The study of stragglers: its population, tables, picture and files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import stragglers
from fedshuffle.experiments.stragglers import CHOICES, CLIENTS, SLOW
from fedshuffle.experiments.studies import csv_of
from tests.cli.test_cli import run as command
from tests.experiments.test_step_sizes import cells
from tests.reports.examples import curve, results, run


def test_slow_clients_hold_as_many_examples_and_other_digits() -> None:
    training, seconds = stragglers.clients(), stragglers.seconds()
    assert set(training.sizes.tolist()) == {20}
    assert (np.diff(seconds) < 0).all()
    assert np.log(seconds).mean() == pytest.approx(0)
    assert np.log(seconds).std() == pytest.approx(1, abs=0.05)
    digits = np.asarray(training.fields[1])
    first = training.offsets[SLOW]
    assert digits[:first].mean() > 6 > 4 > digits[first:].mean()


def test_the_accuracy_of_slow_clients_is_that_of_their_examples() -> None:
    test = stragglers.clients("test")
    slow = int(test.offsets[SLOW])
    labels = torch.as_tensor(np.asarray(test.fields[1]))
    outputs = torch.eye(10)[torch.where(torch.arange(len(labels)) < slow, labels, -1)]
    weights = np.ones(len(labels))
    assert stragglers.SLOW_ACCURACY.compute(outputs, labels, weights) == 1.0
    assert stragglers.SLOW_ACCURACY.compute(outputs.flip(1), labels, weights) < 0.5


@pytest.mark.parametrize("name", CHOICES)
def test_every_schedule_is_a_comparison(name: str, tmp_path: Path) -> None:
    found = stragglers.load(name, tmp_path)
    assert [variant.name for variant in found.variants] == list(CHOICES[name].methods)
    assert found.base.rounds == CHOICES[name].rounds
    clock = (tmp_path / "clock.csv").read_text(encoding="utf-8").splitlines()
    assert len(clock) == 1 + CLIENTS


def study() -> Any:
    """FedAvg with two seeds, and a method that diverged."""
    found = results(
        curve("fedavg", run(1, 0.5, folder="a"), run(2, 0.7, folder="b"), label="FedAvg"),
        curve("fedshuffle", run(1, 0.9, folder="c", diverged=True), label="FedShuffle"),
    )
    for one in found["curves"]:
        one["audit"]["objective_weights"] = [1 / CLIENTS] * CLIENTS
        one["audit"]["effective_weights"] = [0.5 / CLIENTS] * SLOW + [1.25 / CLIENTS] * (
            CLIENTS - SLOW
        )
        for ended in one["runs"]:
            last = ended["history"][-1]
            last |= {"time": 10.0 * ended["seed"], "accuracy_slow": last["accuracy"] / 2}
            last |= {"training_loss": 1.0}
    return found


def test_a_line_per_run_and_a_table_of_their_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "TARGET", 0.5)
    found = list(stragglers.summary("over", study()))
    runs = [line for _, line in found]
    curves = [line for history, _ in found for line in history]
    assert [line["slow_ratio"] for line in runs] == pytest.approx([0.5] * 3)
    assert [line["wrong"] for line in runs] == pytest.approx([1 / 6] * 3)
    _, fedavg, lost = cells(stragglers.table(runs, curves))
    assert fedavg[:4] == ["over-selection", "FedAvg", "17%", "0.50"]
    assert fedavg[5:] == ["60.0 ± 14.1", "30.0 ± 7.1", "15 ± 7"]
    assert lost[5:7] == ["diverged"] * 2
    for axes in stragglers.draw(curves).axes:
        assert len(axes.lines) == 2  # over-selection with FedAvg, and its end


def test_write_what_the_docs_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "draw", lambda curves: Figure())
    folder, docs = tmp_path / "study", tmp_path / "docs"
    with pytest.raises(FedShuffleError, match="reproduce stragglers"):
        stragglers.write(folder, docs)
    found = list(stragglers.summary("over", study()))
    runs, curves = [line for _, line in found], [line for history, _ in found for line in history]
    (docs / "research").mkdir(parents=True)
    folder.mkdir()
    for name, lines in zip(stragglers.FILES, (runs, curves, runs), strict=True):
        (folder / name).write_text(csv_of(lines), encoding="utf-8")
    page = docs / "research" / "stragglers.md"
    page.write_text("<!-- generated: table -->\nold\n<!-- end -->\n", encoding="utf-8")
    stragglers.write(folder, docs)
    assert stragglers.table(runs, curves) in page.read_text(encoding="utf-8")
    assert (docs / "images" / "stragglers.png").exists()
    for name in stragglers.FILES:
        assert (docs / "research" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "stragglers", "--scale", "smoke", "--jobs", "1", "--out", str(tmp_path)]
    assert command(monkeypatch, *words, "--json") == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["schedule"], line["method"]) for line in lines] == [
        (name, method) for name, choice in CHOICES.items() for method in choice.methods
    ]
    for line in lines:
        assert line["wrong"] == pytest.approx(0, abs=1e-6) or line["method"] == "FedAvg"
