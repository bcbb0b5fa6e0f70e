"""Runs that survive: checkpoints, resuming, and what can go wrong with a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import MVR, Federation, FedShuffleError, GlobalMomentum, LocalWork, methods, train
from fedshuffle.runs import RunFolder
from fedshuffle.state import State
from tests.problems import Point, half_squared_distance, targets

FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])
MOMENTA = {"plain": None, "mvr": MVR(0.2), "global": GlobalMomentum(0.2)}


def go(out: Path | None, rounds: int = 20, momentum: str = "mvr", **settings: Any) -> Any:
    return train(
        Point(2),
        FEDERATION,
        **{
            "loss": half_squared_distance,
            "rounds": rounds,
            "method": methods.get("fedshuffle").with_momentum(MOMENTA[momentum]),
            "sampling": "independent:0.5,0.3,0.5,0.2",
            "work": LocalWork(batch_size=2),
            "seed": 3,
            "evaluate": lambda model: {"norm": float(model.x.norm())},
            "out": out,
            "checkpoint_every": 4,
            **settings,
        },
    )


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def without_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("stop", [0, 1, 4, 7, 19])
def test_a_run_interrupted_anywhere_ends_the_same(tmp_path: Path, momentum: str, stop: int) -> None:
    """Killed without a word after some evaluations: no chance to save anything."""
    whole = go(tmp_path / "whole", momentum=momentum)
    seen = 0

    class Killed(BaseException):
        pass

    def evaluate(model: Point) -> dict[str, float]:
        nonlocal seen
        if seen == stop:
            raise Killed
        seen += 1
        return {"norm": float(model.x.norm())}

    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        go(broken, momentum=momentum, evaluate=evaluate)
    resumed = go(broken, momentum=momentum, resume=True)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert without_time(resumed.history) == without_time(whole.history)
    assert without_time(RunFolder(broken).metrics()) == without_time(whole.history)
    assert torch.equal(vector(go(None, momentum=momentum).model), vector(whole.model))


def test_ctrl_c_saves_the_last_whole_round_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(model: Point) -> dict[str, float]:
        if len(RunFolder(tmp_path / "run").metrics()) == 6:
            raise KeyboardInterrupt
        return {"norm": float(model.x.norm())}

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", evaluate=evaluate)
    assert "resume=True" in capsys.readouterr().err
    whole = go(tmp_path / "whole")
    resumed = go(tmp_path / "run", resume=True)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert without_time(resumed.history) == without_time(whole.history)


PROGRAM = """
import sys, time
from pathlib import Path
from tests.test_runs import go
go(Path(sys.argv[1]), rounds=100000, checkpoint_every=3)
"""


@pytest.mark.parametrize("wait", [5, 23])
def test_kill_9_loses_nothing(tmp_path: Path, wait: int) -> None:
    """A real process, killed once it has done so many rounds, and then resumed."""
    out = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)], env=environment)
    deadline = time.monotonic() + 300
    try:
        while not (out / "metrics.jsonl").exists() or (
            (out / "metrics.jsonl").read_bytes().count(b"\n") < wait
        ):
            assert process.poll() is None
            assert time.monotonic() < deadline, "the process hangs"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    latest = RunFolder(out).latest()
    done = 0 if latest is None else latest.round
    assert done >= wait - 3
    resumed = go(out, rounds=done + 10, checkpoint_every=3, resume=True)
    whole = go(None, rounds=done + 10)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert without_time(resumed.history) == without_time(whole.history)


def test_a_finished_run_can_be_lengthened(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=7)
    longer = go(tmp_path / "a", rounds=15, resume=True)
    assert torch.equal(vector(longer.model), vector(go(None, rounds=15).model))
    again = go(tmp_path / "a", rounds=15, resume=True)  # nothing is left to do
    assert torch.equal(vector(again.model), vector(longer.model))


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    go(tmp_path / "a", keep=2)
    names = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert names == [
        "00000016.json",
        "00000016.safetensors",
        "00000020.json",
        "00000020.safetensors",
    ]
    settings = json.loads((tmp_path / "a" / "run.json").read_text())
    assert settings["method"] == "fedshuffle"
    assert settings["momentum"] == "mvr:0.2"
    assert settings["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "a"
    whole = go(out)
    newest = out / "checkpoints" / "00000020.safetensors"
    data = bytearray(newest.read_bytes())
    match damage:
        case "flip":
            data[-3] ^= 1
            newest.write_bytes(data)
        case "cut":
            newest.write_bytes(data[:-5])
        case "gone":
            newest.unlink()
        case "json":
            newest.with_suffix(".json").write_text("{")
    with pytest.warns(UserWarning, match=r"00000020.json is damaged"):
        resumed = go(out, resume=True)
    assert torch.equal(vector(resumed.model), vector(whole.model))


def test_a_folder_that_cannot_be_written_is_named_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    go(out, rounds=8)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedshuffle.runs.os.replace", full)
        with pytest.raises(FedShuffleError, match="No space left on device"):
            RunFolder(out).save(State(torch.zeros(2), {}, 12))
    latest = RunFolder(out).latest()
    assert latest is not None
    assert latest.round == 8
    (tmp_path / "file").write_text("")
    with pytest.raises(FedShuffleError, match="cannot write"):
        go(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 4}, "begun with seed 3, not 4"),
        ({"momentum": "plain"}, "begun with momentum 'mvr:0.2'"),
        ({"sampling": "full"}, "begun with sampling"),
        ({"work": LocalWork()}, "begun with work"),
        ({"step_size": 0.2}, "begun with step_size 0.1"),
        ({"engine": "lanes"}, "begun with engine 'loop'"),
    ],
)
def test_a_run_goes_on_only_with_its_own_settings(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    go(tmp_path / "a", rounds=4)
    with pytest.raises(FedShuffleError, match=message):
        go(tmp_path / "a", resume=True, **settings)


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=4)
    with pytest.raises(FedShuffleError, match="holds a run already"):
        go(tmp_path / "a")
    with pytest.raises(FedShuffleError, match="holds no run"):
        go(tmp_path / "b", resume=True)
    with pytest.raises(FedShuffleError, match="give it as out"):
        go(None, resume=True)
    with pytest.raises(FedShuffleError, match="checkpoint_every is 0"):
        go(tmp_path / "c", checkpoint_every=0)
