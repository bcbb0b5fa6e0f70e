"""Running a comparison: results, warnings, interruptions and failures."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedshuffle import Evaluation, Federation, FedShuffleError, comparison, losses
from fedshuffle._files import one_writer
from fedshuffle._terminal import Console
from fedshuffle.comparison.results import Results, collect_facts, majority
from fedshuffle.comparison.runner import Progress, Study, _history, tail
from fedshuffle.comparison.spec import Criterion
from fedshuffle.config import runner as config_runner
from fedshuffle.reports.comparison.tables import print_results
from fedshuffle.reports.comparison.warnings import annotate
from tests.cli.test_cli import run as command
from tests.comparison.project import (
    CONFIG,
    FLOOR,
    MODULE,
    closed_form,
    outcomes,
    project,
    write_run,
)
from tests.processes import PATIENCE, wait_for

pytestmark = pytest.mark.xdist_group("comparison")  # they share one comparison


def test_tuning_picks_the_best_step_size(done: tuple[Path, Results]) -> None:
    for curve in done[1]["curves"]:
        if curve["group"] != "own":
            assert curve["tuning"] == []
            continue
        assert curve["step_size"] == 1.0  # arrives in one step
        values = {entry["step_size"]: entry["value"] for entry in curve["tuning"]}
        assert list(values) == [0.1, 1.9, 1.0, 4.0, 1e200]
        for size in (0.1, 1.9, 1.0):
            assert values[size] == pytest.approx(closed_form(size, 6), rel=1e-12)
        for run in curve["runs"]:
            assert [record["round"] for record in run["history"]] == [3, 6, 9, 12]
            assert run["history"][-1]["loss"] == pytest.approx(FLOOR, rel=1e-12)


def test_divergence_is_recorded_and_ends_a_run_early(done: tuple[Path, Results]) -> None:
    out, results = done
    own = results["curves"][0]["tuning"]
    assert [entry["diverged"] for entry in own] == [False, False, False, True, True]
    assert [entry["value"] for entry in own[3:]] == [None, None]
    # (1 - 4)^2 multiplies the distance every round: the loss is hopeless at the first look.
    reason = json.loads((out / "runs/tune_fedshuffle_step4.0/outcome.json").read_text())["reason"]
    assert "the loss is 9.5, " not in reason  # after one round, which is not ten times the start
    assert "at the start 1.5" in reason
    lines = (out / "runs/tune_fedshuffle_step4.0/metrics.jsonl").read_text().splitlines()
    assert len(lines) < 6
    common = [curve for curve in results["curves"] if curve["group"] == "common:4"]
    assert len(common) == 2
    for curve in common:
        assert [run["diverged"] for run in curve["runs"]] == [True, True]


def test_results(done: tuple[Path, Results]) -> None:
    out, results = done
    assert json.loads((out / "results.json").read_text()) == results
    assert results["complete"] is True
    assert results["rounds"] == 12
    assert results["metric"] == "loss"
    assert results["federation"] == {"clients": 4, "examples": 4, "sizes": [1, 1, 1, 1]}
    assert tomllib.loads(results["config"]) == tomllib.loads(CONFIG)
    assert results["settings"]["seeds"] == [0, 1]
    assert results["settings"]["parameters"] == 2
    assert results["versions"].keys() >= {"fedshuffle", "torch"}
    groups = [(curve["method"], curve["group"]) for curve in results["curves"]]
    kinds = ("own", "common:0.1", "common:4")
    assert groups == [(method, kind) for method in ("fedavg-rr", "fedshuffle") for kind in kinds]
    curve = results["curves"][3]
    assert curve["label"] == "FedShuffle"
    assert curve["momentum"] == "none"
    assert curve["clip"] is None  # infinite
    assert curve["audit"]["consistent"] is True
    assert curve["audit"]["effective_weights"] == pytest.approx([0.25] * 4)
    totals = ("total_steps", "total_bytes_down", "total_bytes_up")
    free = (*totals, "train_loss", "update_norm", "update_norm_max")
    for run in curve["runs"]:
        assert (out / run["folder"] / "model.safetensors").exists()
        assert run["history"][0].keys() == {"round", "loss", "training_loss", *free}


def test_only_evaluated_rounds_are_compared(tmp_path: Path) -> None:
    """Every record has a training loss, and with privacy an epsilon."""
    sums = {"steps": 5, "bytes_down": 3, "bytes_up": 2}
    record = {"train_loss": 1.0, "epsilon": 0.5, **sums, "seconds": 0.1}
    lines = [json.dumps({"round": r, **record}) for r in (1, 2)]
    lines.append(json.dumps({"round": 3, **record, "loss": 0.25, "evaluation_seconds": 0.1}))
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    numbers = {"round": 3, "train_loss": 1.0, "epsilon": 0.5, "loss": 0.25}
    assert _history(tmp_path, 3) == [
        numbers | {"total_steps": 15, "total_bytes_down": 9, "total_bytes_up": 6}
    ]


def test_what_is_on_the_way_is_checked_audited_and_listed(tmp_path: Path) -> None:
    file = project(tmp_path)
    way = {"channel": "topk:0.5", "privacy": {"clip": 1.0, "noise": 1.0}}
    with pytest.raises(FedShuffleError, match=r"^compare.methods: fedavg-rr divides by"):
        collect_facts(comparison.load(file, way))
    way["compare.methods"] = ["fedshuffle", "fedprox+fedshuffle"]
    found = collect_facts(comparison.load(file, way))
    settings = found.common["settings"]
    assert settings["channel"] == "topk:0.5"
    assert settings["privacy"].startswith("clip 1.0, noise 1.0")
    assert "down_channel" not in settings
    assert [facts["audit"]["consistent"] for facts in found.variants.values()] == [False, False]


def test_what_cannot_be_audited_is_compared(tmp_path: Path) -> None:
    """The audit of a method that remembers has no formula, and no simulation, under drift."""
    way = {"availability": "drifting:0.9:0.2", "compare.methods": ["fedshuffle", "mifa"]}
    audits = [
        facts["audit"]
        for facts in collect_facts(comparison.load(project(tmp_path), way)).variants.values()
    ]
    assert [one["consistent"] for one in audits] == [True, None]
    assert audits[1]["effective_weights"] is None
    assert "mifa" in audits[1]["unknown"]
    assert "unknown" not in audits[0]


def test_printed_table(done: tuple[Path, Results], capsys: pytest.CaptureFixture[str]) -> None:
    print_results(Console(width=100), done[1], Path())
    out = capsys.readouterr().out
    assert "own best" in out
    assert "0.5000" in out
    assert "2 of 2" in out  # diverged


@pytest.mark.slow
def test_clients_csv_and_json_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(project(tmp_path / "here"))
    words = ["rounds=2", "evaluation.per_client=true", "compare.seeds=[0]", "compare.tune.rounds=1"]
    words += ["compare.step_sizes=[0.1, 0.2]", "compare.common_step_sizes=[0.2]"]
    words += ["compare.tune.widen=1"]
    changes = [part for word in words for part in ("--set", word)]
    assert command(monkeypatch, "compare", file, "--jobs", "1", "--json", *changes) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"]
    assert {row["method"] for row in found["results"]} == {"fedavg-rr", "fedshuffle"}
    assert all(row["step_size"] == 0.2 for row in found["results"])
    tables = list((Path(found["out"]) / "runs").glob("*/clients.csv"))
    assert len(tables) == 2  # of the short runs none
    assert tables[0].read_text().splitlines()[0] == "client,examples,loss"
    assert Path(found["report"]).exists()


def test_finished_runs_are_not_repeated(
    done: tuple[Path, Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = done
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    monkeypatch.setattr("fedshuffle.comparison.workers.WorkerProcess", None)  # nobody is needed
    again = comparison.load(out.parent / "compare.toml").run()
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == before
    assert again["curves"] == results["curves"]
    kept = comparison.load(out / "compare.toml")
    assert replace(kept, base=replace(kept.base, out=out)) == comparison.load(
        out.parent / "compare.toml"
    )


def test_a_run_with_other_settings_is_refused(
    done: tuple[Path, Results],
) -> None:
    other = comparison.load(done[0].parent / "compare.toml", {"server_step_size": 0.5})
    with pytest.raises(FedShuffleError, match="settings"):
        other.run()


# Warnings

CLASSES = """
import torch
from fedshuffle import Federation

class Constant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    def forward(self, x):
        return self.bias.expand(len(x), 2)

def data():
    labels = torch.tensor([0, 0, 0, 1, 0, 1])
    return Federation.from_arrays(torch.zeros(6, 1), labels, sizes=[1, 5])
"""


@pytest.mark.slow
def test_a_model_no_better_than_the_most_common_class(tmp_path: Path) -> None:
    text = (
        CONFIG.replace('"mine:Point"', '"other:Constant"')
        .replace('"mine:loss"', '"cross_entropy"')
        .replace('"mine:data"', '"other:data"')
        .replace('metrics = ["loss"]', 'metrics = ["accuracy", "loss"]')
        .replace("common_step_sizes = [0.1, 4.0]\n", "")
        .replace("step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]", "step_sizes = [0.01]")
    )
    file = project(tmp_path, text)
    (tmp_path / "other.py").write_text(CLASSES)
    results = comparison.load(file).run(jobs=1, annotate=annotate)
    share, majority = 4 / 6, results["majority"]
    assert majority is not None
    assert majority["share"] == pytest.approx(share)
    assert majority["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 6))
    found = [(warning["kind"], warning["method"]) for warning in results["warnings"]]
    assert found == [("majority", "fedavg-rr"), ("majority", "fedshuffle")]
    # Two clients with 1 and 5 steps: FedShuffle's one-step client takes five times the step size.
    sizes = [curve["client_step_sizes"] for curve in results["curves"]]
    assert sizes == [[0.01, 0.01], pytest.approx([0.01, 0.05])]
    shown = Console(record=True, width=100, file=io.StringIO())
    print_results(shown, results, Path())
    assert "0.01 to 0.05" in shown.export_text()


def test_majority_counts_as_the_evaluation_does() -> None:
    targets = torch.tensor([[0, 1, -100], [1, -100, -100], [0, 0, 0]])
    data = Federation.from_arrays(torch.zeros(3, 1), targets, sizes=[1, 2], weights=[3, 1])
    found = majority(Evaluation(data, ["accuracy"], prefix="test_"), "test_accuracy")
    assert found is not None

    class Always(torch.nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.eye(2)[self.k].reshape(1, 2, 1).expand(len(x), 2, 3)

    best = max(Evaluation(data, ["accuracy"])(Always(k))["accuracy"] for k in (0, 1))
    assert found["share"] == pytest.approx(best, rel=1e-12)
    assert majority(Evaluation(data, ["loss"], loss=losses.cross_entropy), "loss") is None


# Interruptions and failures


@pytest.mark.slow
def test_resume_after_ctrl_c_and_kill_9(done: tuple[Path, Results], tmp_path: Path) -> None:
    """Ctrl-C, then kill -9 of everything, in the middle of runs; then once more to the end."""
    file, out = project(tmp_path), tmp_path / "out"
    (tmp_path / "hold").write_text("150")  # calls of the loss before a worker is held
    words = [sys.executable, "-m", "fedshuffle", "compare", str(file), "--jobs", "2"]

    def held() -> set[str]:
        return {path.name for path in tmp_path.glob("held-*")}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    process = start()
    wait_for(lambda: len(held()) == 2, "two workers", process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "fedshuffle compare --resume" in said
    first = outcomes(out)
    assert 2 <= len(first) < 22
    assert json.loads((out / "results.json").read_text())["complete"] is False

    saved = {path: path.read_bytes() for path in out.glob("runs/*/metrics.jsonl")}
    assert any(path.parent.name not in first and text for path, text in saved.items())
    process = start()
    wait_for(lambda: len(held()) == 4, "two more", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert len(outcomes(out)) > len(first)
    stamps = {name: (out / "runs" / name / "outcome.json").stat().st_mtime_ns for name in first}

    (tmp_path / "hold").unlink()
    results = comparison.load(out / "compare.toml").run(out, jobs=2)
    assert results["curves"] == done[1]["curves"]
    assert results["command"] == f"fedshuffle compare {file}"  # that of the first go
    assert outcomes(out) == outcomes(done[0])
    for name in outcomes(out):
        assert model(out, name) == model(done[0], name)
    for name, stamp in stamps.items():  # done once
        assert (out / "runs" / name / "outcome.json").stat().st_mtime_ns == stamp
    for path, text in saved.items():  # what was begun went on, its first rounds are as they were
        assert path.read_bytes().startswith(text)


def model(out: Path, name: str) -> bytes | None:
    path = out / "runs" / name / "model.safetensors"
    return path.read_bytes() if path.exists() else None


SMALL = (
    CONFIG.replace("step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]", "step_sizes = [1.0]")
    .replace("common_step_sizes = [0.1, 4.0]\n", "")
    .replace('["fedavg-rr", "fedshuffle"]', '["mine:MINE"]')
)


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_once(tmp_path: Path) -> None:
    file, out = project(tmp_path, SMALL), tmp_path / "out"
    (tmp_path / "die").write_text("2")
    results = comparison.load(file).run(jobs=1)
    assert outcomes(out) == {
        "mine-MINE_step1.0_seed0": "failed",
        "mine-MINE_step1.0_seed1": "finished",
    }
    assert results["complete"] is False
    assert [run["seed"] for run in results["curves"][0]["runs"]] == [1]
    (tmp_path / "die").write_text("1")
    assert comparison.load(file).run(jobs=1)["complete"] is True
    assert set(outcomes(out).values()) == {"finished"}


def test_an_error_of_the_users_code_stops_the_comparison(tmp_path: Path) -> None:
    file = project(tmp_path, SMALL)
    (tmp_path / "raise").touch()
    with pytest.raises(FedShuffleError, match="no such cable"):
        comparison.load(file).run(jobs=1)


@pytest.mark.parametrize("stage", ["evaluation", "rule"])
def test_an_error_of_the_users_code_before_any_run_is_one_line(tmp_path: Path, stage: str) -> None:
    file = project(tmp_path, SMALL)
    broken = 'raise ZeroDivisionError("no\\nsuch\\ncable")'
    code = MODULE.replace("    global calls\n", f"    {broken}\n    global calls\n")
    if stage == "rule":
        code = MODULE + (
            "from dataclasses import replace\n"
            f"def rule(clients):\n    {broken}\n"
            "MINE = replace(MINE, averaging=replace(MINE.averaging, weight=rule))\n"
        )
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(FedShuffleError, match=r"no such cable.*mine\.py") as error:
        comparison.load(file).run(jobs=1)
    assert "\n" not in str(error.value)


def test_a_run_resumed_for_more_rounds_is_read_up_to_its_planned_rounds(
    done: tuple[Path, Results], tmp_path: Path
) -> None:
    shutil.copytree(done[0].parent, tmp_path / "copy")
    out = tmp_path / "copy" / "out"
    run = out / "runs" / "fedshuffle_step1.0_seed0"
    config_runner.resume(run, rounds=20)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20
    results = comparison.load(out / "compare.toml").run(out, jobs=1)
    assert results["curves"] == done[1]["curves"]
    other = comparison.load(out / "compare.toml", {"server_step_size": 0.5})
    with pytest.raises(FedShuffleError, match="settings"):
        other.run(out)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:11], *lines[12:]]) + "\n")
    with pytest.raises(FedShuffleError, match="Delete that folder"):  # the 12th round is gone
        comparison.load(out / "compare.toml").run(out, jobs=1)


def test_one_comparison_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    compared = comparison.load(project(tmp_path))
    with one_writer(tmp_path / "out"), pytest.raises(FedShuffleError, match="is being written"):
        compared.run(tmp_path / "out")


def test_tail(tmp_path: Path) -> None:
    assert tail(tmp_path) == (0, "")
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"round": 1, "loss": 2.5}\n{"round": 2}\n{"round": 3, "lo')
    assert tail(tmp_path) == (2, "loss 2.5")
    wide = json.dumps({"round": 1, "loss": 1.0, "cohort": [7] * 50_000}) + "\n"
    file.write_text(wide + '{"round": 2}\n')
    assert tail(tmp_path) == (2, "")


def test_progress_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = comparison.load(project(tmp_path))
    study = Study(compared, tmp_path / "out", Criterion("accuracy", True))
    trial = study.trials()[0]
    show = Progress(study, True)
    with show.bar:
        write_run(study, trial, "finished", 0.25)
        study.update(trial)
        show.ended(trial)
        show.update({study.folder(trial): 6})
    assert capsys.readouterr().err == "1/22 tune_fedavg-rr_step0.1: accuracy 0.25\n"
