"""Running a config: its folder, interruptions and resuming, and the parts of the user."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshuffle import Federation, FedShuffleError, config
from fedshuffle.config import StorePath
from fedshuffle.config.runner import initial_model as start
from tests.cli.test_cli import run as command
from tests.config.project import CONFIG, MODULE, ROOT, equal, metrics, weights
from tests.processes import wait_for


def test_files_and_output_of_a_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.parent)
    words = [str(project / "config.toml"), "--rounds", "5", "--seed", "9"]
    assert command(monkeypatch, "run", *words, "--set", "model.width=4") == 0
    out = project / "run"
    printed = capsys.readouterr().out
    assert "5 rounds are done." in printed
    assert "accuracy 0." in printed
    assert f"fedshuffle run --resume '{out}' --rounds 10" in printed
    assert f"load_model('{out}')" in printed

    model = torch.nn.Linear(3, 4)
    model.load_state_dict(weights(out))
    assert [record["round"] for record in metrics(out)] == [1, 2, 3, 4, 5]
    assert ["loss" in record for record in metrics(out)] == [False, True, False, True, True]
    copied = (out / "config.toml").read_text()
    assert "# From config.toml with rounds=5 with seed=9 with model.width=4." in copied
    assert tomllib.loads(copied)["folder"] == ".."
    again = config.load(out / "config.toml")
    want = config.load(project / "config.toml", {"rounds": 5, "seed": 9, "model.width": 4})
    assert again == replace(want, out=None)


def test_json_output(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = project / "elsewhere"
    words = [str(project / "config.toml"), "--out", str(out), "--json"]
    assert command(monkeypatch, "run", *words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == ""
    assert found["rounds"] == 7
    assert found["out"] == str(out)
    assert Path(found["model"]).exists()
    assert found["metrics"].keys() >= {"loss", "accuracy"}
    assert not found["metrics"].keys() & {"round", "seconds", "cohort"}
    assert not (project / "run").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it goes on in another place, after the file changed and the project moved."""
    schedule = "step_size={schedule = 'drops', step_size = 0.2, rounds = 7}"
    short = "step_size={schedule = 'drops', step_size = 0.2}"  # over the rounds of the run: 7
    (project / "config.toml").write_text(CONFIG.replace("every = 2", "every = 1"))
    file = str(project / "config.toml")
    whole = ["run", file, "--out", str(project / "whole"), "--set", schedule, "--rounds", "12"]
    assert command(monkeypatch, *whole) == 0
    assert command(monkeypatch, "run", file, "--set", short) == 0
    (project / "config.toml").unlink()
    moved = project.parent / "moved"
    shutil.move(project, moved)
    monkeypatch.chdir(moved.parent)
    assert command(monkeypatch, "run", "--resume", "moved/run", "--rounds", "12") == 0
    assert equal(weights(moved / "run"), weights(moved / "whole"))
    assert metrics(moved / "run") == metrics(moved / "whole")
    copied = config.load(moved / "run" / "config.toml")
    assert copied.rounds == 12
    assert "# Resumed with rounds = 12." in (moved / "run" / "config.toml").read_text()

    monkeypatch.chdir(moved / "run")
    assert command(monkeypatch, "run", "--resume", ".") == 0  # nothing is left to do
    assert equal(weights(moved / "run"), weights(moved / "whole"))


@pytest.mark.slow
def test_resume_after_kill_9(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path(sys.executable).parent / "fedshuffle"
    out = project / "run"
    words = [str(program), "run", "config.toml", "--rounds", "1000000"]
    process = subprocess.Popen(words, cwd=project, stderr=subprocess.DEVNULL)
    lines = out / "metrics.jsonl"
    try:
        wait_for(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 5, "rounds", process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    saved = sorted((out / "checkpoints").glob("*.json"))
    rounds = str(int(saved[-1].stem) + 4)
    assert command(monkeypatch, "run", "--resume", str(out), "--rounds", rounds) == 0
    whole = project / "whole"
    words = ["run", str(project / "config.toml"), "--rounds", rounds, "--out", str(whole)]
    assert command(monkeypatch, *words) == 0
    assert equal(weights(out), weights(whole))
    assert metrics(out) == metrics(whole)


def interrupted_at(
    project: Path, monkeypatch: pytest.MonkeyPatch, call: int, by: str = "raise KeyboardInterrupt"
) -> int:
    """The exit code of the command, when the user's loss is interrupted at some call."""
    code = MODULE.replace(
        "def loss(model, inputs, labels, smoothing=0.0):",
        "calls = []\n\ndef loss(model, inputs, labels, smoothing=0.0):\n"
        f"    calls.append(1)\n    if len(calls) == {call}:\n        {by}",
    )
    (project / "mine.py").write_text(code)
    shutil.rmtree(project / "__pycache__", ignore_errors=True)
    return command(monkeypatch, "run", str(project / "config.toml"))


def test_resume_after_ctrl_c(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted_at(project, monkeypatch, call=100) == 130
    printed = capsys.readouterr()
    assert f"fedshuffle run --resume '{project / 'run'}'" in printed.err
    assert "Traceback" not in printed.err
    assert 0 < len(metrics(project / "run")) < 7
    assert not (project / "run" / "model.safetensors").exists()

    (project / "mine.py").write_text(MODULE)
    shutil.rmtree(project / "__pycache__", ignore_errors=True)
    assert command(monkeypatch, "run", "--resume", str(project / "run")) == 0
    whole = ["run", str(project / "config.toml"), "--out", str(project / "whole")]
    assert command(monkeypatch, *whole) == 0
    assert equal(weights(project / "run"), weights(project / "whole"))


def test_ctrl_c_before_the_first_round_leaves_no_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "slow.py").write_text("def data():\n    raise KeyboardInterrupt\n")
    words = [str(project / "config.toml"), "--set", "data=slow:data"]
    assert command(monkeypatch, "run", *words) == 130
    assert capsys.readouterr().err == "Interrupted before the first round: nothing was saved.\n"
    assert not (project / "run").exists()


def test_resume_after_a_kill_before_the_first_round(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed while it loads its data: there is nothing but the config."""
    file = str(project / "config.toml")
    assert command(monkeypatch, "run", file) == 0
    shutil.copytree(project / "run", project / "killed")
    for path in (project / "killed").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "config.toml":
            path.unlink()
    capsys.readouterr()
    assert command(monkeypatch, "run", file, "--out", str(project / "killed")) == 2
    assert "config.toml" in capsys.readouterr().err
    assert command(monkeypatch, "run", "--resume", str(project / "killed")) == 0
    assert equal(weights(project / "killed"), weights(project / "run"))


def test_an_update_that_is_not_finite_is_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "loss=squared_error", "--set", "model.width=1", "--set", "step_size=1e30"]
    (project / "mine.py").write_text(
        MODULE.replace("torch.arange(6 * n) % 2", "torch.randn(6 * n, 1)")
    )
    words += ["--set", "evaluation.metrics=['loss']"]
    assert command(monkeypatch, "run", str(project / "config.toml"), *words) == 2
    errors = capsys.readouterr().err
    assert "lower" in errors.splitlines()[-1]
    assert errors.splitlines()[-1].startswith("error: round ")
    assert f"fedshuffle run --resume '{project / 'run'}'" in errors
    assert "Traceback" not in errors


def test_a_large_finite_loss_is_divergence(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All numbers are finite, also those of the first round, and the model is worthless."""
    file = str(project / "config.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert command(monkeypatch, "run", file, "--set", "step_size=1000") == 1
    printed = capsys.readouterr()
    losses = [record["loss"] for record in metrics(project / "run") if "loss" in record]
    headline = printed.out.splitlines()[0]
    assert headline.startswith("Diverged: the loss is")
    assert f"{losses[-1]:.4g}" in headline
    assert "step size" in headline
    assert "diverges" in printed.err
    assert "--rounds" not in printed.out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resume = ["run", "--resume", str(project / "run"), "--rounds", "8", "--json"]
        assert command(monkeypatch, *resume) == 1
    assert "loss" in json.loads(capsys.readouterr().out)["diverged"]

    assert command(monkeypatch, "run", file, "--out", str(project / "good"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["diverged"] is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys\nsys.exit()\ndef model(): ...", {"model": "bad:model"}),
        ("import argparse\nargparse.ArgumentParser(exit_on_error=False).exit()", {"data": "bad:d"}),
        ("import sys\ndef model():\n    sys.exit(0)", {"model": "bad:model"}),
        ("def data():\n    exit()", {"data": "bad:data"}),
        ("import sys\ndef loss(model, *fields):\n    sys.exit('enough')", {"loss": "bad:loss"}),
        (
            "import sys\nfrom fedshuffle import Metric\n"
            "def each(*_):\n    sys.exit()\nM = Metric('m', each, higher_is_better=True)",
            {"evaluation.metrics": "['loss', 'bad:M']"},
        ),
    ],
    ids=["import", "argparse", "model", "data", "loss", "metric"],
)
def test_sys_exit_in_the_users_code_is_an_error(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    words: dict[str, str],
) -> None:
    (project / "bad.py").write_text(code)
    changes = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
    assert command(monkeypatch, "run", str(project / "config.toml"), *changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sys.exit(" in line
    assert "bad.py, line" in line


@pytest.mark.parametrize("code", ["raise SystemExit", "return 1 / 0"])
@pytest.mark.parametrize("search_rounds", ["0", "2"])
def test_a_failing_loss_is_one_line_of_advise(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    search_rounds: str,
) -> None:
    (project / "bad.py").write_text(f"def loss(model, *fields):\n    {code}")
    words = [
        "advise",
        str(project / "config.toml"),
        "--set",
        "loss=bad:loss",
        "--search-rounds",
        search_rounds,
    ]
    assert command(monkeypatch, *words, "--json") == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert "sys.exit(" in line or "ZeroDivisionError" in line
    assert not shown.out


def test_resume_after_sys_exit_in_the_loss(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted_at(project, monkeypatch, call=100, by="raise SystemExit") == 2
    errors = capsys.readouterr().err
    assert "Stopped after round" in errors
    assert "sys.exit" in errors.splitlines()[-1]
    (project / "mine.py").write_text(MODULE)
    shutil.rmtree(project / "__pycache__", ignore_errors=True)
    assert command(monkeypatch, "run", "--resume", str(project / "run")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_ctrl_c_twice(project: Path, monkeypatch: pytest.MonkeyPatch, gap: float) -> None:
    """The second comes while the run is saved, or while Python ends: neither may matter."""
    program = Path(sys.executable).parent / "fedshuffle"
    words = [str(program), "run", "config.toml", "--rounds", "1000000", "--json"]
    process = subprocess.Popen(words, cwd=project, stderr=subprocess.PIPE, text=True)
    lines = project / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 5, "rounds", process)
        process.send_signal(signal.SIGINT)
        time.sleep(gap)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT)  # the latter once Python is gone
    (line,) = errors.splitlines()
    assert line.startswith("Stopped after round")
    saved = sorted((project / "run" / "checkpoints").glob("*.json"))
    rounds = str(int(saved[-1].stem) + 2)
    resume = ["run", "--resume", str(project / "run"), "--rounds", rounds]
    assert command(monkeypatch, *resume) == 0


@pytest.mark.slow
def test_one_command_at_a_time_resumes_a_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(sys.executable).parent / "fedshuffle"
    words = [str(program), "run", "config.toml", "--rounds", "1000000", "--json"]
    process = subprocess.Popen(words, cwd=project)
    lines = project / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 5, "rounds", process)
        resume = ["run", "--resume", str(project / "run"), "--rounds", "2000000"]
        assert command(monkeypatch, *resume) == 2
        assert f"process {process.pid}" in capsys.readouterr().err
        assert "rounds = 1000000" in (project / "run" / "config.toml").read_text()
    finally:
        process.kill()
        process.wait()
    saved = sorted((project / "run" / "checkpoints").glob("*.json"))  # and a kill frees the folder
    resume[-1] = str(int(saved[-1].stem) + 30)
    assert command(monkeypatch, *resume) == 0
    rounds = [record["round"] for record in metrics(project / "run")]
    assert rounds == list(range(1, len(rounds) + 1))


def test_a_folder_with_a_run_is_refused_before_data_are_loaded(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(project / "config.toml")
    assert command(monkeypatch, "run", file) == 0
    capsys.readouterr()
    assert command(monkeypatch, "run", file, "--set", "data=mine:failing") == 2
    found = capsys.readouterr().err
    assert "already holds a run" in found
    assert f"fedshuffle run --resume '{project / 'run'}'" in found
    # Nor is the config itself, in its own folder, written over.
    assert command(monkeypatch, "run", file, "--out", str(project)) == 2
    assert (project / "config.toml").read_text() == CONFIG


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a config file, or --resume"),
        (["config.toml", "--resume", "run"], "give either a config file"),
        (["--resume", "run", "--seed", "3"], "--resume takes only --rounds"),
        (["--resume", "run", "--out", "x"], "--resume takes only --rounds"),
        (["--resume", "run"], "'run' holds no config.toml"),
        (["none.toml"], "'none.toml'"),
        (["config.toml", "--out", "mine.py"], "cannot write to 'mine.py'"),
    ],
)
def test_options_that_exclude_each_other(
    words: list[str],
    message: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    assert command(monkeypatch, "run", *words) == 2
    assert message in capsys.readouterr().err


def test_out_is_required(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "config.toml").write_text(CONFIG.replace('out = "run"', ""))
    assert command(monkeypatch, "run", str(project / "config.toml")) == 2
    assert "out is missing: add it, or give --out" in capsys.readouterr().err


def test_a_project_that_moved(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = project.parent / "out"
    assert command(monkeypatch, "run", str(project / "config.toml"), "--out", str(out)) == 0
    shutil.move(project, project.parent / "moved")
    assert command(monkeypatch, "run", "--resume", str(out), "--rounds", "9") == 2
    assert f"folder: there is no folder '{project}'" in capsys.readouterr().err
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace(f'"{project}"', '"../moved"'))
    assert command(monkeypatch, "run", "--resume", str(out), "--rounds", "9") == 0


def test_the_initial_model_is_a_function_of_the_seed(project: Path) -> None:
    code = """
import random
import numpy as np
import torch

def model():
    model = torch.nn.Linear(3, 2)
    model.register_buffer("drawn", torch.tensor([random.random(), np.random.random()]))
    return model
"""
    (project / "drawing.py").write_text(code)
    chosen = config.load(project / "config.toml", {"model": "drawing:model"})
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)
    first = start(chosen).state_dict()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    np.testing.assert_equal(np.random.get_state(legacy=True), before[2])
    torch.manual_seed(2)
    assert equal(start(chosen).state_dict(), first)
    other = start(replace(chosen, seed=4)).state_dict()
    assert all((other[name] != first[name]).any() for name in first)


def test_data_are_the_same_for_every_seed(project: Path) -> None:
    code = MODULE.replace("generator=generator", "generator=None")
    (project / "mine.py").write_text(code)
    chosen = config.load(project / "config.toml")
    fields = [replace(chosen, seed=seed).inputs().federation.fields[0] for seed in (1, 2)]
    assert torch.equal(*fields)


def test_method_loss_metric_and_model_of_the_user(project: Path) -> None:
    """A method, a loss with arguments, a metric, and tied parameters from a nested name."""
    code = """
import torch
from fedshuffle import Metric

ONES = Metric("ones", lambda outputs, targets: targets == 1, higher_is_better=True)

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(self.first(inputs))

    class Inner:
        make = staticmethod(lambda: Tied())
"""
    (project / "other.py").write_text(code)
    changes = {"model": "other:Tied.Inner.make", "method": "mine:METHOD", "loss.smoothing": 0.5}
    changes["evaluation.metrics"] = ["loss", "other:ONES"]
    chosen = config.load(project / "config.toml", changes | {"momentum": "none"})
    result = chosen.run(project / "out")
    assert json.loads((project / "out" / "run.json").read_text())["method"] == "fedavg-rr"
    plain_loss = config.load(project / "config.toml", changes | {"loss": "mine:loss"})
    other = replace(plain_loss, momentum="none", out=None).run()
    assert result.history[-1]["loss"] != other.history[-1]["loss"]
    assert result.history[-1]["ones"] == 0.5
    assert weights(project / "out").keys() == {"first.weight", "second.weight"}
    result.model.load_state_dict(weights(project / "out"))


def test_data_from_a_store_pass_through_a_transform(project: Path) -> None:
    (project / "augment.py").write_text("def twice(x, y):\n    return 2 * x, y\n")
    chosen = replace(config.load(project / "config.toml"), evaluation=None, out=None)
    people = chosen.inputs().federation
    people.save(project / "people")
    x, y = people.tensors()
    Federation.from_arrays(2 * x, y, sizes=people.sizes).save(project / "doubled")
    stored = replace(chosen, data=StorePath("people", "augment:twice"))
    have = stored.run(project / "stored").model.state_dict()
    want = replace(chosen, data=StorePath("doubled")).run().model.state_dict()
    torch.testing.assert_close(have, want)
    assert len(config.resume(project / "stored", rounds=9).history) == 9
    with pytest.raises(FedShuffleError, match=r"data\.transform: .*nothing"):
        replace(chosen, data=StorePath("people", "augment:nothing")).run()


def test_data_from_a_store(project: Path) -> None:
    chosen = config.load(project / "config.toml")
    whole = chosen.run()
    chosen.inputs().federation.save(project / "people")
    store = {"store": "people"}
    stored = chosen.override({"data": store, "evaluation.data": store, "out": "stored"}).run()
    assert equal(stored.model.state_dict(), whole.model.state_dict())
    assert metrics(project / "stored") == metrics(project / "run")
    longer = config.resume(project / "stored", rounds=9)
    again = replace(chosen, rounds=9, out=None).run()
    assert equal(longer.model.state_dict(), again.model.state_dict())


def test_the_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "examples" / "digits" / "config.toml")
    assert command(monkeypatch, "run", file, "--out", str(tmp_path / "a"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["accuracy"] > 0.9
    assert found["rounds"] == 60


def test_the_example_splits_every_digit_once() -> None:
    chosen = config.load(ROOT / "examples" / "digits" / "config.toml")
    assert chosen.evaluation is not None
    held = replace(chosen, data=chosen.evaluation.data)  # type: ignore[arg-type]
    kept, test = chosen.inputs().federation, held.inputs().federation
    assert len(kept) == len(test) == 20
    assert kept.sizes.sum() + test.sizes.sum() == 1797
    assert (kept.sizes + test.sizes).min() >= 5
    assert (test.sizes == (kept.sizes + test.sizes) // 5).all()
    assert kept.sizes.max() > 10 * kept.sizes.min()
