"""Comparisons: what the grid picks, what a file may say, and going on after the worst."""

from __future__ import annotations

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
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import Evaluation, Federation, FedShuffleError, comparison, losses
from fedshuffle._terminal import Console
from fedshuffle.comparison import Setting
from fedshuffle.comparison.crew import claimed
from fedshuffle.comparison.plan import Plan
from fedshuffle.comparison.results import _majority
from fedshuffle.comparison.settings import next_step_size
from fedshuffle.comparison.showing import Show, print_table, tail
from fedshuffle.config import Evaluating, Use, running
from fedshuffle.config.writing import toml
from fedshuffle.evaluation import Evaluations
from fedshuffle.experiments import real
from tests.processes import PATIENCE, wait_for
from tests.test_cli import run as command

pytestmark = pytest.mark.xdist_group("comparison")  # what they share is made once

# Four clients with one example each: with full participation every method does gradient descent on
# 1/2 |x - x*|^2 and a constant. Beside it, ways to disturb the processes by putting a file there.
MODULE = """
import os, time
from pathlib import Path
import torch
from fedshuffle import Federation, methods

HERE, calls = Path(__file__).parent, 0

class Point(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

def data():
    points = [[0.0, 1.0], [2.0, 1.0], [1.0, 0.0], [1.0, 2.0]]
    return Federation.from_arrays(torch.tensor(points, dtype=torch.float64), sizes=[1] * 4)

def loss(model, points):
    global calls
    calls += 1
    hold, die = HERE / "hold", HERE / "die"
    if hold.exists() and calls > int(hold.read_text()):
        (HERE / f"held-{os.getpid()}").touch()
        time.sleep(600)
    if torch.is_grad_enabled() and die.exists() and int(die.read_text()):
        die.write_text(str(int(die.read_text()) - 1))
        os._exit(9)
    if torch.is_grad_enabled() and (HERE / "raise").exists():
        raise RuntimeError("no such cable")
    print("a user's module may print")
    return 0.5 * (model.x - points).square().sum(1).mean()

MINE = methods.get("fedshuffle")
"""

CONFIG = """
rounds = 12
out = "out"

[model]
use = "mine:Point"

[loss]
use = "mine:loss"

[data]
use = "mine:data"

[evaluation]
data = "training"
metrics = ["loss"]
every = 3
per_client = false
training = 2

[checkpoints]
every = 1

[compare]
methods = ["fedavg-rr", "fedshuffle"]
seeds = [0, 1]
step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]
common_step_sizes = [0.1, 4.0]

[compare.tune]
rounds = 6
"""

START, FLOOR = 1.5, 0.5
"""The loss at 0, and the part of it that no x can avoid; x* is (1, 1)."""


def closed_form(step_size: float, rounds: int) -> float:
    return FLOOR + (1 - step_size) ** (2 * rounds)


def project(folder: Path, config: str = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MODULE)
    (folder / "compare.toml").write_text(config)
    return folder / "compare.toml"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A comparison that nothing has disturbed."""
    file = project(tmp_path_factory.mktemp("done"))
    results = comparison.load(file).run(jobs=2)
    return file.parent / "out", results


def outcomes(out: Path) -> dict[str, str]:
    found = (out / "runs").glob("*/outcome.json")
    return {path.parent.name: json.loads(path.read_text())["outcome"] for path in found}


# What comes of it


def test_the_grid_picks_the_best_step_size(done: tuple[Path, dict[str, Any]]) -> None:
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


def test_what_diverges_is_recorded_and_ends_early(done: tuple[Path, dict[str, Any]]) -> None:
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


def test_the_results_say_it_all(done: tuple[Path, dict[str, Any]]) -> None:
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
    for run in curve["runs"]:
        assert (out / run["folder"] / "model.safetensors").exists()
        assert run["history"][0].keys() == {"round", "loss", "train_loss"}


def test_the_table(done: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Console(width=100), done[1])
    out = capsys.readouterr().out
    assert "own best" in out
    assert "0.5000" in out
    assert "2 of 2" in out  # diverged


@pytest.mark.slow
def test_every_client_of_every_full_run_is_left_and_json_is_printed(
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


def test_what_is_done_stays_done(
    done: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = done
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    monkeypatch.setattr(subprocess, "Popen", None)  # nobody is needed
    again = comparison.load(out.parent / "compare.toml").run()
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == before
    assert again["curves"] == results["curves"]
    kept = comparison.load(out / "compare.toml")
    assert replace(kept, base=replace(kept.base, out=out)) == comparison.load(
        out.parent / "compare.toml"
    )


def test_a_run_with_other_settings_is_not_taken_for_this_one(
    done: tuple[Path, dict[str, Any]],
) -> None:
    other = comparison.load(done[0].parent / "compare.toml", {"server_step_size": 0.5})
    with pytest.raises(FedShuffleError, match="holds a run with other settings"):
        other.run()


# A best value at an edge of the grid


def tuned(folder: Path, sizes: list[float], **changes: Any) -> dict[str, Any]:
    """The results of FedShuffle alone with this grid."""
    changes = {
        "compare.methods": ["fedshuffle"],
        "compare.step_sizes": sizes,
        "compare.seeds": [0],
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    text = CONFIG.replace("common_step_sizes = [0.1, 4.0]\n", "")
    return comparison.load(project(folder, text), changes).run(jobs=1)


def trials_of(results: dict[str, Any]) -> dict[float, bool]:
    """The step sizes that were tried, and whether each was added to the grid."""
    [curve] = results["curves"]
    return {entry["step_size"]: entry["added"] for entry in curve["tuning"]}


@pytest.mark.parametrize(
    ("sizes", "added"),
    [
        ([0.01, 0.1], [1.0, 10.0]),  # 1 arrives in one step, 10 diverges
        ([16.0, 64.0], [4.0, 1.0, 0.25]),  # both diverge: below them is something better
    ],
)
def test_the_grid_widens_until_the_best_is_inside(
    tmp_path: Path, sizes: list[float], added: list[float]
) -> None:
    results = tuned(tmp_path, sizes)
    [curve] = results["curves"]
    assert curve["step_size"] == 1.0
    assert trials_of(results) == dict.fromkeys(sizes, False) | dict.fromkeys(added, True)
    assert curve["runs"][0]["history"][-1]["loss"] == pytest.approx(FLOOR, rel=1e-12)
    assert results["warnings"] == []
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("outcome.json")}
    again = comparison.load(tmp_path / "out" / "compare.toml").run(tmp_path / "out", jobs=1)
    assert again["curves"] == results["curves"]  # all of it is read from the folders
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("outcome.json")} == stamps


@pytest.mark.slow
def test_the_grid_widens_no_further_than_it_is_allowed(tmp_path: Path) -> None:
    results = tuned(tmp_path, [0.001, 0.002], compare__tune__widen=4)
    assert list(trials_of(results)) == [0.001, 0.002, 0.004, 0.008]
    [warning] = results["warnings"]
    assert (warning["kind"], warning["method"]) == ("edge", "fedshuffle")
    assert "0.008" in warning["text"]
    shown = Console(record=True, width=100, file=io.StringIO())
    print_table(shown, results)
    said = shown.export_text()
    assert said.index("edge") < said.index("own best step size")  # above the table
    fixed = tuned(tmp_path / "fixed", [0.001, 0.002], compare__tune__widen=1)
    assert list(trials_of(fixed)) == [0.001, 0.002]


def test_all_that_is_varied_is_varied_beyond_the_grid(tmp_path: Path) -> None:
    compared = comparison.load(
        project(tmp_path), {"compare.step_sizes": [1, 3], "compare.clip": [5, "none"]}
    )
    best = compared.grid[0]
    healthy = dict.fromkeys(compared.grid, False)
    assert compared.wider(healthy, best) == [
        Setting(0.33, 0.0, 5.0),
        Setting(0.33, 0.0, math.inf),
    ]
    alone = comparison.load(
        project(tmp_path), {"compare.step_sizes": [1], "compare.clip": [5, "none"]}
    )
    assert alone.wider(dict.fromkeys(alone.grid, False), alone.grid[0]) == []  # it was meant


def test_a_best_value_above_one_that_diverged_is_not_trusted(tmp_path: Path) -> None:
    compared = comparison.load(project(tmp_path), {"compare.step_sizes": [1, 3, 9]})
    low, middle, high = compared.grid
    lost = {low: True, middle: False, high: True}
    assert [setting.step_size for setting in compared.wider(lost, middle)] == [0.33]
    assert compared.wider({**lost, low: False}, middle) == []


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=6, unique=True),
    st.floats(1, 1e6),
    st.booleans(),
)
def test_the_grid_grows_outwards_and_not_for_ever(
    sizes: list[float], widen: float, down: bool
) -> None:
    grid = set(sizes)
    tried, end = set(grid), min if down else max
    while (new := next_step_size(grid, tried, end(tried), widen)) is not None:
        assert (new < min(tried)) if down else (new > max(tried))
        ratio = min(grid) / new if down else new / max(grid)
        assert ratio <= 1.06 * widen  # two significant digits
        tried.add(new)
    assert len(tried - grid) <= math.log2(widen) + 1e-6
    assert len(grid) < 3 or next_step_size(grid, tried, sorted(tried)[1], widen) is None


def test_a_run_that_failed_widens_nothing(tmp_path: Path) -> None:
    compared = comparison.load(project(tmp_path), {"compare.step_sizes": [1, 2]})
    plan = Plan(compared, tmp_path / "out", "accuracy", True)
    pair = compared.pairs[0]
    for trial in plan.tuning(pair):
        plan.begin(trial)
        plan.fail(trial, "out of memory")
    assert len(plan.tuning(pair)) == 2


# What a reader must know first

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
def test_a_model_no_better_than_the_commonest_class_is_named(tmp_path: Path) -> None:
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
    results = comparison.load(file).run(jobs=1)
    share = 4 / 6
    assert results["majority"]["share"] == pytest.approx(share)
    assert results["majority"]["standard_error"] == pytest.approx(
        math.sqrt(share * (1 - share) / 6)
    )
    found = [(warning["kind"], warning["method"]) for warning in results["warnings"]]
    assert found == [("majority", "fedavg-rr"), ("majority", "fedshuffle")]
    # Two clients with 1 and 5 steps: FedShuffle's one-step client takes five times the step size.
    sizes = [curve["client_step_sizes"] for curve in results["curves"]]
    assert sizes == [[0.01, 0.01], pytest.approx([0.01, 0.05])]
    shown = Console(record=True, width=100, file=io.StringIO())
    print_table(shown, results)
    assert "0.01 to 0.05" in shown.export_text()


def test_the_share_of_the_commonest_class_counts_as_the_evaluation_does() -> None:
    targets = torch.tensor([[0, 1, -100], [1, -100, -100], [0, 0, 0]])
    data = Federation.from_arrays(torch.zeros(3, 1), targets, sizes=[1, 2], weights=[3, 1])
    found = _majority(Evaluation(data, ["accuracy"], prefix="test_"), "test_accuracy")
    assert found is not None

    class Always(torch.nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            self.k = k

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.eye(2)[self.k].reshape(1, 2, 1).expand(len(x), 2, 3)

    best = max(Evaluation(data, ["accuracy"])(Always(k))["accuracy"] for k in (0, 1))
    assert found["share"] == pytest.approx(best, rel=1e-12)
    assert _majority(Evaluation(data, ["loss"], loss=losses.cross_entropy), "loss") is None


# The worst


@pytest.mark.slow
def test_stopped_and_killed_it_ends_the_same(
    done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Ctrl-C, then kill -9 of everything, in the middle of runs; then once more to the end."""
    file, out = project(tmp_path), tmp_path / "out"
    (tmp_path / "hold").write_text("150")  # calls of the loss before a worker is held
    words = [sys.executable, "-m", "fedshuffle.cli", "compare", str(file), "--jobs", "2"]

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
    assert "To go on, run: fedshuffle compare --resume" in said
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
def test_a_process_that_dies_is_given_another_chance(tmp_path: Path) -> None:
    file, out = project(tmp_path, SMALL), tmp_path / "out"
    (tmp_path / "die").write_text("2")
    results = comparison.load(file).run(jobs=1)
    assert outcomes(out) == {"mine_step1.0_seed0": "failed", "mine_step1.0_seed1": "finished"}
    assert results["complete"] is False
    assert [run["seed"] for run in results["curves"][0]["runs"]] == [1]
    (tmp_path / "die").write_text("1")
    assert comparison.load(file).run(jobs=1)["complete"] is True
    assert set(outcomes(out).values()) == {"finished"}


def test_what_is_wrong_with_the_users_code_stops_it_all(tmp_path: Path) -> None:
    file = project(tmp_path, SMALL)
    (tmp_path / "raise").touch()
    with pytest.raises(FedShuffleError, match=r"run mine_step1.0_seed0: .*no such cable.*--resume"):
        comparison.load(file).run(jobs=1)


@pytest.mark.parametrize("stage", ["evaluation", "rule"])
def test_a_failure_of_the_users_before_any_run_is_one_line(tmp_path: Path, stage: str) -> None:
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


def test_a_run_that_went_on_is_read_up_to_its_planned_rounds(
    done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(done[0].parent, tmp_path / "copy")
    out = tmp_path / "copy" / "out"
    run = out / "runs" / "fedshuffle_step1.0_seed0"
    running.resume(run, rounds=20)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20
    results = comparison.load(out / "compare.toml").run(out, jobs=1)
    assert results["curves"] == done[1]["curves"]
    other = comparison.load(out / "compare.toml", {"server_step_size": 0.5})
    with pytest.raises(FedShuffleError, match="holds a run with other settings"):
        other.run(out)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:11], *lines[12:]]) + "\n")
    with pytest.raises(FedShuffleError, match="Delete that folder"):  # the 12th round is gone
        comparison.load(out / "compare.toml").run(out, jobs=1)


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        claimed(tmp_path),
        pytest.raises(FedShuffleError, match="another comparison is at work"),
        claimed(tmp_path, seconds=0),
    ):
        pass


# The choice, from folders made by hand


def write_run(plan: Plan, trial: Any, outcome: str, value: float | None) -> None:
    plan.begin(trial)
    folder = plan.folder(trial)
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(
        json.dumps({"round": trial.config.rounds, "steps": 1, "accuracy": value}) + "\n"
    )
    (folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "reason": "so"}))


@pytest.mark.parametrize(
    ("found", "higher", "want"),
    [
        ([0.1, 0.3, 0.2], True, 2.0),
        ([0.1, 0.3, 0.2], False, 1.0),
        ([0.3, 0.3, 0.2], True, 1.0),  # of equals the first
        ([None, "diverged", 0.2], True, 3.0),
        (["diverged", "diverged", None], False, 1.0),  # the smallest, if none is any good
    ],
)
def test_the_best_is_chosen(tmp_path: Path, found: list[Any], higher: bool, want: float) -> None:
    sizes = {"compare.step_sizes": [1, 2, 3], "compare.tune.metric": "accuracy"}
    compared = comparison.load(project(tmp_path), {**sizes, "compare.tune.widen": 1})
    pair = compared.pairs[0]
    plan = Plan(compared, tmp_path / "out", "accuracy", higher)
    for trial, value in zip(plan.tuning(pair), found, strict=True):
        assert plan.chosen(pair) is None
        lost = value == "diverged"
        write_run(plan, trial, "diverged" if lost else "finished", None if lost else value)
        plan.look(trial)
    again = Plan(compared, tmp_path / "out", "accuracy", higher)  # all from the folders
    chosen = again.chosen(pair)
    assert chosen is not None
    assert chosen.step_size == want
    assert len([curve for curve in again.curves() if curve.group == "own"]) == 1
    assert again.unknown() == 2  # those of the other method


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    compared = comparison.load(project(tmp_path))
    plan = Plan(compared, tmp_path / "out")
    trial = plan.trials()[0]
    plan.begin(trial)
    (plan.folder(trial) / "outcome.json").write_text("{")
    with pytest.raises(FedShuffleError, match="is damaged"):
        Plan(compared, tmp_path / "out")


def test_the_tail_of_a_run(tmp_path: Path) -> None:
    assert tail(tmp_path) == (0, "")
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"round": 1, "loss": 2.5}\n{"round": 2}\n{"round": 3, "lo')
    assert tail(tmp_path) == (2, ", loss 2.5")
    wide = json.dumps({"round": 1, "loss": 1.0, "cohort": [7] * 50_000}) + "\n"
    file.write_text(wide + '{"round": 2}\n')
    assert tail(tmp_path) == (2, "")


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = comparison.load(project(tmp_path))
    plan = Plan(compared, tmp_path / "out", "accuracy", True)
    trial = plan.trials()[0]
    with Show(plan, True) as show:
        write_run(plan, trial, "finished", 0.25)
        plan.look(trial)
        show.ended(trial)
        show.update([plan.folder(trial)])
    assert capsys.readouterr().err == "1/22 tune_fedavg-rr_step0.1: accuracy 0.25\n"


# A part of the clients


def test_a_part_of_the_clients() -> None:
    whole = Federation.from_arrays(torch.arange(6.0), sizes=[1, 2, 3], weights=[1, 2, 5])
    part = whole.subset([2, 0])
    assert part.ids == (0, 2)
    assert part.sizes.tolist() == [1, 3]
    assert part.weights.tolist() == pytest.approx([1 / 6, 5 / 6])
    assert part.fields[0].tolist() == [0, 3, 4, 5]
    for wrong in ([], [3], [-1]):
        with pytest.raises(FedShuffleError, match="numbered from 0 to 2"):
            whole.subset(wrong)
    assert whole.sample(3) is whole
    assert whole.sample(2).ids == whole.sample(2).ids
    drawn = {whole.sample(1, seed).ids for seed in range(20)}
    assert drawn == {(0,), (1,), (2,)}


def test_several_evaluations_are_one() -> None:
    data = Federation.from_arrays(torch.eye(2), torch.tensor([0, 0]), sizes=[1, 1])
    accuracy = Evaluation(data, ["accuracy"])
    trained = Evaluation(data, ["loss"], prefix="train_", per_client=False)
    both = Evaluations(accuracy, trained).with_loss(losses.cross_entropy)
    found = both(torch.nn.Identity())
    assert found["accuracy"] == 0.5
    assert found["train_loss"] == pytest.approx(math.log(1 + math.e) - 0.5)
    assert list(found) == both.names == [*accuracy.names, "train_loss"]
    assert both.higher_is_better == dict.fromkeys(accuracy.names, True) | {"train_loss": False}
    with pytest.raises(FedShuffleError, match="'accuracy': give one a prefix"):
        Evaluations(accuracy, accuracy)


# The file


def test_a_file_says_it_all(tmp_path: Path) -> None:
    file = project(tmp_path)
    compared = comparison.load(
        file,
        {
            "compare.momentum": ["none", "global:0.1"],
            "compare.weight_decay": [0, 1e-4],
            "compare.clip": [5, "none"],
            "compare.tune": {"data": {"use": "mine:data"}, "metric": "loss", "seed": 9},
            "step_size": {"schedule": "drops", "step_size": 3.0},
            "compare.step_sizes": [1],
        },
    )
    assert compared.grid == tuple(
        Setting(1.0, decay, clip) for decay in (0.0, 1e-4) for clip in (5.0, float("inf"))
    )
    assert len(compared.pairs) == 4
    short = compared.trial(("fedavg-rr", "global:0.1"), compared.grid[2], None)
    assert short.name == "tune_fedavg-rr_global-0.1_step1.0_decay0.0001_clip5.0"
    config = short.config
    assert (config.rounds, config.seed, config.momentum) == (2, 9, "global:0.1")
    assert (config.work.weight_decay, config.work.clip) == (1e-4, 5.0)
    assert config.evaluation == Evaluating(Use("mine:data"), ("loss",), 1, False)
    full = compared.trial(("fedavg-rr", "none"), compared.at_common(0.5), 1)
    assert full.name == "fedavg-rr_none_step0.5_seed1"
    assert full.config.evaluation == compared.base.evaluation
    assert full.config.step_size.arguments["step_size"] == 0.5  # type: ignore[union-attr]
    again = tmp_path / "again.toml"
    again.write_text(toml(compared.tables))
    assert comparison.load(again) == compared


def test_the_step_size_of_the_run_is_the_default(tmp_path: Path) -> None:
    tables = tomllib.loads(CONFIG)
    tables["compare"] = {"methods": ["fedshuffle"]}
    file = project(tmp_path, toml(tables))
    compared = comparison.load(file, {"step_size": 0.3})
    assert [setting.step_size for setting in compared.grid] == [0.3]
    assert not compared.tuned
    assert compared.seeds == (0,)
    drops = {"schedule": "drops", "step_size": 0.7}
    assert comparison.load(file, {"step_size": drops}).grid[0].step_size == 0.7
    assert comparison.load(file, {"compare.common_step_sizes": [1]}).grid == ()


def test_scales(tmp_path: Path) -> None:
    scales = '[scale.small]\nrounds = 2\n[scale.small.compare]\nseeds = [5]\nclip = ["none"]\n'
    file = project(tmp_path, CONFIG + scales)
    assert comparison.load(file).base.rounds == 12
    small = comparison.load(file, scale="small")
    assert (small.base.rounds, small.seeds, len(small.grid)) == (2, (5,), 5)
    with pytest.raises(FedShuffleError, match=r"unknown scale 'smal'. Did you mean 'small'"):
        comparison.load(file, scale="smal")
    with pytest.raises(FedShuffleError, match=r"write \[scale.NAME\]"):
        comparison.load(project(tmp_path, "scale = 3\n" + CONFIG))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("compare.metods", ["fedavg"], "unknown key 'compare.metods'. Did you mean"),
        ("compare.methods", [], "compare.methods is .*must be a list"),
        ("compare.methods", "fedavg", "compare.methods is 'fedavg', but must be a list"),
        ("compare.methods", ["fedavg", "fedavg"], "compare.methods names 'fedavg' twice"),
        ("compare.methods", ["fedavgg"], "compare.methods: unknown method 'fedavgg'"),
        ("compare.methods", ["a:M", "b:M"], "would be called 'm'"),
        ("compare.momentum", ["mvr:2"], "compare.momentum: "),
        ("compare.seeds", [-1], "compare.seeds: seed -1"),
        ("compare.seeds", [0.5], "compare.seeds: the seed is 0.5, but must be a whole number"),
        ("compare.step_sizes", [0.1, 0], "compare: step_size: the step size in round 0 is 0.0"),
        ("compare.common_step_sizes", [-1], "compare: step_size: "),
        ("compare.weight_decay", [-1], "compare: .*weight.decay"),
        ("compare.clip", ["no"], "compare.clip is 'no', but must be a number"),
        ("compare.tune.rounds", 0, "compare.tune.rounds is 0"),
        ("compare.tune.seed", -1, "compare.tune.seed: seed -1"),
        ("compare.tune.widen", 0.5, "compare.tune.widen is 0.5"),
        ("compare.tune.round", 3, "unknown key 'compare.tune.round'"),
        ("compare.tune.data", {"folder": "x"}, "compare.tune.data says nothing"),
        ("compare", 3, "compare is 3, but must be a table"),
        ("work.batch_size", 0, "work.batch_size is 0"),
    ],
)
def test_mistakes_are_named_before_any_work(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        comparison.load(project(tmp_path), {key: value})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[compare]", "fedshuffle run"),
        ("[evaluation]", "evaluation is missing: add a section"),
    ],
)
def test_what_is_needed_is_asked_for(tmp_path: Path, section: str, message: str) -> None:
    tables = tomllib.loads(CONFIG)
    del tables[section[1:-1]]
    with pytest.raises(FedShuffleError, match=message):
        comparison.load(project(tmp_path, toml(tables)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compare.metric": "los"}, "compare: unknown metric 'los'. Did you mean 'loss'"),
        ({"compare.tune.metric": "mine:loss"}, "compare.tune: .*a function alone"),
        ({"data.use": "mine:date"}, "'mine' has no 'date'. Did you mean 'data'"),
        ({"sampling": "uniform:9"}, "sampling: "),
        ({"compare.methods": ["mine:MINE", "fedshuffle"]}, "are called 'fedshuffle'"),
    ],
)
def test_mistakes_that_show_with_the_data_are_named_before_any_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        comparison.load(project(tmp_path), changes).run()
    assert not (tmp_path / "out" / "runs").exists()


def test_reading_a_comparison_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fedshuffle import comparison; comparison.load(sys.argv[1]);"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(project(tmp_path))], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare"], "give either a file"),
        (["compare", "{file}", "--resume", "x"], "give either a file"),
        (["compare", "--resume", "{here}"], "holds no comparison to go on with"),
        (["compare", "--resume", "{here}", "--set", "a=1"], "takes only --jobs"),
        (["compare", "{file}", "--jobs", "0"], "jobs is 0"),
        (["compare", "{file}", "--scale", "x"], "unknown scale 'x'"),
        (["reproduce", "shakespeare", "--out", "{here}", "--scale", "x"], "unknown scale 'x'"),
        (["reproduce", "shakespeare", "--out", "{here}", "--rounds", "3"], "--rounds changes"),
        (["reproduce", "quadratic", "--out", "{here}", "--scale", "paper"], "--scale changes"),
        (["reproduce", "quadratic", "--out", "{here}", "--jobs", "2"], "--jobs changes"),
        (["reproduce", "theory", "--out", "{here}", "--rounds", "3"], "--rounds changes"),
        (["reproduce", "theory", "--out", "{here}", "--data", "x"], "--data changes"),
    ],
)
def test_words_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    file = project(tmp_path)
    places = {"file": str(file), "here": str(tmp_path / "nothing")}
    assert command(monkeypatch, *(word.format(**places) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_a_comparison_without_out_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = project(tmp_path, CONFIG.replace('out = "out"\n', ""))
    assert command(monkeypatch, "compare", str(file)) == 2
    assert "out is missing" in capsys.readouterr().err
    with pytest.raises(FedShuffleError, match="needs a folder"):
        comparison.load(file).run()


# The paper's experiments


@pytest.mark.parametrize("scale", ["paper", "laptop", "smoke"])
@pytest.mark.parametrize("experiment", ["shakespeare", "cifar100"])
def test_the_experiments_can_be_read(tmp_path: Path, experiment: str, scale: str) -> None:
    compared = real.load(experiment, scale, tmp_path / "out", tmp_path)
    config = compared.trial(compared.pairs[0], compared.grid[0], 0).config
    assert config.work.batch_size == 32
    assert config.work.clip == 5
    assert compared.momentum == ("none", "global:0.1")
    assert compared.base.folder == tmp_path / "out"
    assert compared.base.data.arguments["folder"] == str(tmp_path)  # type: ignore[union-attr]
    if scale == "paper":
        assert (config.rounds, config.sampling, len(compared.seeds)) == (1000, "uniform:16", 3)
        assert {setting.step_size for setting in compared.grid} == {0.1, 0.01, 0.001}
        assert len(compared.grid) == 12
        assert not compared.common
    with pytest.raises(FedShuffleError, match="unknown experiment"):
        real.load("cubic", scale, tmp_path)


def data_for(name: str) -> None:
    folder = os.environ.get("FEDSHUFFLE_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"set FEDSHUFFLE_DATA to a folder that holds {name!r}")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["shakespeare", "cifar100"])
def test_an_experiment_at_smoke_scale(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    experiment: str,
) -> None:
    data_for(experiment)
    out = tmp_path / "out"
    words = ["reproduce", experiment, "--scale", "smoke", "--out", str(out)]
    assert command(monkeypatch, *words) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["complete"] is True
    assert results["command"].startswith(f"fedshuffle reproduce {experiment} --scale smoke")
    assert len(results["curves"]) == 8
    for curve in results["curves"]:
        assert [run["diverged"] for run in curve["runs"]] == [False]
        assert curve["runs"][0]["history"][-1].keys() >= {"accuracy", "loss", "train_loss"}
    assert (out / "report.html").exists()
    assert "FedShuffle" in capsys.readouterr().out
