"""Tuning a config: the command tune, and run --tune."""

import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedshuffle import FedShuffleError, config, tune
from fedshuffle.cli.tune import tune as cli_tune
from fedshuffle.tuning import DEFAULT_SHARE
from fedshuffle.tuning.short_runs import ShortRuns
from fedshuffle.tuning.step_sizes import MIN_ROUNDS, MIN_TRIALS
from tests.cli.test_cli import run as command
from tests.config.project import CONFIG, equal, metrics, weights


@pytest.fixture
def file(project: Path) -> Path:
    """A config with a schedule."""
    made = project / "config.toml"
    made.write_text(CONFIG.replace("step_size = 0.2", 'step_size = "warmup:2+cosine:0.2"'))
    return made


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_the_command_prints_what_to_paste_and_to_run(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", str(file), "--set", "work.batch_size=3"]
    assert command(monkeypatch, *words, "--json") == 0
    found = printed(capsys)
    assert list(found) == [
        "step_size", "server_step_size", "start", "loss", "tried", "rounds_spent", "share",
        "local_steps", "complete", "largest_scale", "config", "command",
    ]  # fmt: skip
    assert found["loss"] < found["start"]
    assert found["share"] == found["rounds_spent"] / 7

    assert command(monkeypatch, *words) == 0  # from the journal
    shown = capsys.readouterr().out
    lines = tomllib.loads("\n".join(re.findall(r"^  (\w*step_size = .*)$", shown, re.MULTILINE)))
    assert lines["step_size"] == f"warmup:2+cosine:{found['step_size']:g}"
    assert lines["server_step_size"] == found["server_step_size"]
    assert found["command"] in shown

    program, *rest = shlex.split(found["command"])
    assert program == "fedshuffle"
    assert command(monkeypatch, *rest, "--json") == 0
    out = tomllib.loads((file.parent / "run" / "config.toml").read_text())
    assert out["step_size"]["step_size"] == found["step_size"]
    assert out["work"]["batch_size"] == 3


@pytest.mark.parametrize(("most", "advised"), [(10, False), (11, True)])
def test_a_cap_is_advised_where_steps_differ_much(
    most: int,
    advised: bool,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = f"work={{epochs=[1, 1, {most}], batch_size=9}}"  # the last client has the most examples
    words = ["tune", str(file), "--set", "method='fedshuffle'", "--set", work]
    assert command(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert ("fedshuffle-capped:rho=2" in shown) == advised
    assert (f"{most} times as large" in shown) == advised


def test_a_table_stays_a_table(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "step_size={schedule = 'drops', step_size = 0.2, at = [0.5], factor = 0.5}"
    assert command(monkeypatch, "tune", str(file), "--set", table, "--json") == 0
    found = printed(capsys)
    assert tomllib.loads(f"step_size = {found['config']['step_size']}")["step_size"] == {
        "schedule": "drops",
        "step_size": found["step_size"],
        "at": [0.5],
        "factor": 0.5,
    }


def test_tune_then_train(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "run", str(file), "--tune", "--share", "1", "--json") == 0
    found = printed(capsys)
    tuning, out = found["tuning"], file.parent / "run"
    assert tuning["rounds_spent"] <= MIN_TRIALS * MIN_ROUNDS  # 7 rounds are fewer
    assert (out / "tuning.jsonl").read_text().count("\n") == len(tuning["tried"])
    saved = config.load(out / "config.toml")
    assert f"step_size {tuning['step_size']:g}" in (out / "config.toml").read_text()
    assert saved.server_step_size == tuning["server_step_size"]

    changes = {
        "step_size": f"warmup:2+cosine:{tuning['step_size']}",
        "server_step_size": tuning["server_step_size"],
    }
    config.load(file, changes).run(file.parent / "same")
    assert equal(weights(out), weights(file.parent / "same"))

    assert command(monkeypatch, "run", "--resume", str(out), "--rounds", "9", "--json") == 0
    assert "tuning" not in printed(capsys)
    assert len(metrics(out)) == 9


def test_held_out_data_do_not_matter(file: Path) -> None:
    (file.parent / "other.py").write_text("def data():\n    raise RuntimeError('it was read')\n")
    found = config.load(file).tune(file.parent / "own")
    unread = config.load(file, {"evaluation.data": "other:data"})
    assert unread.tune(file.parent / "unread") == found
    (file.parent / "alike.py").write_text(
        "from mine import *\n"
        "def data():\n"
        "    return Federation.from_arrays(torch.ones(4, 3), torch.arange(4) % 2, sizes=[1, 3])\n"
    )
    shared = config.load(file, {"evaluation.data": "alike:data"}).inputs()  # as run --tune does
    assert config.load(file).tune(file.parent / "shared", inputs=shared) == found


def test_the_default_cost_is_the_same_everywhere(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for function in (tune, config.Config.tune, cli_tune):
        assert inspect.signature(function).parameters["share"].default == DEFAULT_SHARE
    shares = []

    def noting(self: config.Config, *_: Any, share: float = DEFAULT_SHARE, **__: Any) -> Any:
        shares.append(share)
        raise FedShuffleError("enough.")

    monkeypatch.setattr(config.Config, "tune", noting)
    assert command(monkeypatch, "run", str(file), "--tune") == 2
    assert command(monkeypatch, "tune", str(file)) == 2
    assert shares == [DEFAULT_SHARE] * 2
    capsys.readouterr()


def test_one_line_says_what_was_found(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "run", str(file), "--tune") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("Found step_size ")
    assert "% of a run" in shown[0]
    assert shown[1] == "7 rounds are done."


@pytest.mark.parametrize(
    ("start", "said"),
    [("0.2", ""), ("1e-30", "hardly"), ("1e-9", "hardly"), ("1e-6", "The largest that were tried")],
)
def test_it_says_where_larger_step_sizes_should_be_tried(
    start: str,
    said: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, "tune", str(file), "--set", f"step_size={start}") == 0
    shown = capsys.readouterr().out
    assert said in shown
    assert ("give a larger step_size" in shown) == bool(said)


def test_an_interruption_while_tuning_is_resumed_by_the_same_command(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = list[tuple[float, ...]]()
    try_out = ShortRuns.try_out

    def interrupted(self: ShortRuns, *point: Any) -> Any:
        tries.append(point)
        if len(tries) == 3:
            raise KeyboardInterrupt
        return try_out(self, *point)

    monkeypatch.setattr(ShortRuns, "try_out", interrupted)
    for words in (["run", str(file), "--tune"], ["tune", str(file)]):
        tries.clear()
        assert command(monkeypatch, *words) == 130
        errors = capsys.readouterr().err
        assert "repeat the command" in errors.splitlines()[-1]
        assert "nothing was saved" not in errors
        (file.parent / "run" / "tuning.jsonl").unlink()
    tries.clear()
    assert command(monkeypatch, "run", str(file), "--tune") == 130
    assert command(monkeypatch, "run", str(file), "--tune") == 0
    assert len(set(tries)) == len(tries) - 1  # only the one that was interrupted was begun twice


def test_ctrl_c_while_data_are_loaded_leaves_no_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "slow.py").write_text("def data():\n    raise KeyboardInterrupt\n")
    assert command(monkeypatch, "run", str(file), "--tune", "--set", "data=slow:data") == 130
    assert capsys.readouterr().err == "Interrupted while tuning: nothing was saved.\n"
    assert not (file.parent / "run").exists()
    file.write_text(file.read_text().replace('out = "run"\n', ""))
    assert command(monkeypatch, "tune", str(file), "--set", "data=slow:data") == 130
    assert "--out" in capsys.readouterr().err


INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from fedshuffle.cli import main
main()
"""


def test_ctrl_c_while_torch_is_imported_is_one_line(file: Path) -> None:
    line = [sys.executable, "-c", INTERRUPTED_IMPORT, "tune", str(file)]
    ended = subprocess.run(line, capture_output=True, text=True)
    assert ended.stderr == "Interrupted while tuning: nothing was saved.\n"
    assert ended.returncode == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "nowhere.toml"], "nowhere.toml"),
        (["tune", "FILE", "--share", "0"], "--share is 0"),
        (["tune", "FILE", "--share", "nan"], "--share is nan"),
        (["tune", "FILE", "--set", "privacy={clip = 1.0, noise = 1.0, delta = 1e-3}"], "private"),
        (["run", "FILE", "--tune", "--share", "-1"], "--share is -1"),
        (["run", "FILE", "--share", "0.3"], "--tune"),
        (["run", "FILE", "--tune", "--set", "privacy={clip = 1.0, noise = 1.0}"], "private"),
        (["run", "--resume", "run", "--tune"], "--resume takes only"),
    ],
)
def test_mistakes_are_one_line(
    file: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, *(str(file) if word == "FILE" else word for word in words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (file.parent / "run").exists()


def test_a_folder_with_a_run_is_refused_before_tuning(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "run", str(file)) == 0
    capsys.readouterr()
    assert command(monkeypatch, "run", str(file), "--tune") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert not (file.parent / "run" / "tuning.jsonl").exists()


def test_another_config_is_not_mixed_with_the_journal(file: Path) -> None:
    config.load(file).tune()
    with pytest.raises(FedShuffleError, match="another run"):
        config.load(file, {"work.batch_size": 3}).tune()


def test_an_adaptive_server_starts_from_its_usual_step_size(file: Path) -> None:
    plain = {"momentum": "none", "method": "fedadam"}
    assert config.load(file, plain).tune().tried[0].server_step_size == 0.01
    given = config.load(file, {**plain, "server_step_size": 0.3})
    assert given.tune(file.parent / "other").tried[0].server_step_size == 0.3
