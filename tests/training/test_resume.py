"""Runs that survive: interruption, checkpoints, and resuming with the same settings."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import (
    MVR,
    Evaluation,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    config,
    fingerprint,
    losses,
    methods,
    train,
)
from fedshuffle._arrays import IntArray
from fedshuffle.local_work import Interruption
from fedshuffle.sampling import Independent
from fedshuffle.state import State
from fedshuffle.training.run_folder import RunFolder
from tests.problems import Point, half_squared_distance, targets
from tests.processes import wait_for

FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])
MOMENTA = {"plain": None, "mvr": MVR(0.2), "global": GlobalMomentum(0.2)}


def go(
    out: Path | RunFolder | None, rounds: int = 20, momentum: str = "mvr", **settings: Any
) -> Any:
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


def done(out: Path) -> int:
    """The number of rounds in the metrics."""
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def without_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in history]


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("stop", [0, 1, 4, 7, 19])
def test_a_run_interrupted_anywhere_ends_the_same(tmp_path: Path, momentum: str, stop: int) -> None:
    """Killed after some evaluations, without a chance to save anything."""
    whole = go(tmp_path / "whole", momentum=momentum)
    seen = 0

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


def test_ctrl_c_saves_the_last_complete_round_and_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(model: Point) -> dict[str, float]:
        if done(tmp_path / "run") == 6:
            raise KeyboardInterrupt
        return {"norm": float(model.x.norm())}

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", evaluate=evaluate)
    said = capsys.readouterr().err
    assert "round 6" in said
    assert f"out={str(tmp_path / 'run')!r}, resume=True" in said
    whole = go(tmp_path / "whole")
    resumed = go(tmp_path / "run", resume=True)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert without_time(resumed.history) == without_time(whole.history)


def test_a_second_ctrl_c_does_not_disturb_the_last_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunFolder.save

    def disturbed(self: RunFolder, state: State) -> None:
        if state.round == 6:  # no checkpoint is due: it is the last save
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        save(self, state)

    def evaluate(model: Point) -> dict[str, float]:
        if done(tmp_path / "run") == 6:
            os.kill(os.getpid(), signal.SIGTERM)  # the first: it stops the run
        return {"norm": float(model.x.norm())}

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(RunFolder, "save", disturbed)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", evaluate=evaluate)
    assert "round 6" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    latest = RunFolder(tmp_path / "run").latest()
    assert latest is not None
    assert latest.round == 6


def test_sigterm_stops_a_run_with_a_folder_as_ctrl_c_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(model: Point) -> dict[str, float]:
        if done(tmp_path / "run") == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"norm": float(model.x.norm())}

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        go(RunFolder(tmp_path / "run", resume_hint="write to the author"), evaluate=evaluate)
    assert signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().err.endswith("write to the author.\n")
    resumed = go(tmp_path / "run", resume=True)
    assert without_time(resumed.history) == without_time(go(None).history)


@pytest.mark.parametrize("where", ["evaluation", "training"])
def test_a_failure_is_named_and_the_round_before_is_saved(tmp_path: Path, where: str) -> None:
    """Checkpoints are far apart, and still only the round that failed is lost."""
    settings: dict[str, Any] = {"checkpoint_every": 100, "sampling": "full", "momentum": "plain"}
    whole = go(None, **settings)
    mended = False

    def evaluate(model: Point) -> dict[str, float]:
        if where == "evaluation" and done(tmp_path) == 6 and not mended:
            raise ZeroDivisionError("of the user")
        return {"norm": float(model.x.norm())}

    def loss(model: Point, points: Tensor) -> Tensor:
        if where == "training" and done(tmp_path) == 6 and not mended:
            raise ZeroDivisionError("of the user")
        return half_squared_distance(model, points)

    message = {
        "evaluation": r"^evaluation after round 7: ZeroDivisionError: of the user",
        "training": r"^round 6, client 0, local training: ZeroDivisionError: of the user",
    }
    with pytest.raises(FedShuffleError, match=message[where]):
        go(tmp_path, evaluate=evaluate, loss=loss, **settings)
    latest = RunFolder(tmp_path).latest()
    assert latest is not None
    assert latest.round == 6
    mended = True
    resumed = go(tmp_path, resume=True, evaluate=evaluate, loss=loss, **settings)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert without_time(resumed.history) == without_time(whole.history)


class Killed(BaseException):
    """As kill -9: no chance to save anything."""


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed], ids=["saved", "killed"])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_the_same_rounds_are_evaluated_after_resuming(
    tmp_path: Path, stop: int, how: type[BaseException]
) -> None:
    stopped = False

    def loss(model: Point, points: Tensor) -> Tensor:
        nonlocal stopped
        if done(tmp_path) == stop and not stopped:
            stopped = True
            raise how
        return half_squared_distance(model, points)

    evaluation = Evaluation(FEDERATION, ["loss"])
    settings: dict[str, Any] = {
        "rounds": 8,
        "evaluate_every": 3,
        "evaluate": evaluation,
        "sampling": "full",
    }
    whole = go(None, **settings)
    with pytest.raises(how):
        go(tmp_path, loss=loss, **settings)
    resumed = go(tmp_path, resume=True, loss=loss, **settings)
    assert without_time(resumed.history) == without_time(whole.history)
    assert [r["round"] for r in resumed.history if "loss" in r] == [3, 6, 8]


def test_values_that_are_not_finite_are_null_on_disk_and_nan_in_python(tmp_path: Path) -> None:
    values = iter([1.5, float("inf"), float("nan"), -float("inf")])
    with pytest.warns(UserWarning, match="after round 2"):
        result = go(tmp_path, rounds=4, evaluate=lambda model: {"loss": next(values)})
    assert result.diverged is not None
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [record["loss"] for record in records] == [1.5, None, None, None]
    for history in (result.history, RunFolder(tmp_path).metrics()):
        assert [str(record["loss"]) for record in history] == ["1.5", "nan", "nan", "nan"]


@pytest.mark.parametrize(
    ("values", "warned", "diverged"),
    [
        ([1, 2, 9], False, None),
        ([1, 11, 12], True, "the loss is 12 after round 3, and was 1 after round 1"),
        ([1, 11, 0.5], True, None),
        ([-1, 50, 0.5], False, None),
    ],
)
def test_divergence_is_judged_by_the_last_loss(
    values: list[float], warned: bool, diverged: str | None
) -> None:
    """A function of the user's is not asked about the start, so its first loss is the measure."""
    losses = iter(values)
    with pytest.warns(UserWarning, match="diverges") if warned else nullcontext():
        result = go(None, rounds=3, evaluate=lambda model: {"loss": next(losses)})
    assert result.diverged == diverged


@pytest.mark.parametrize("evaluate", [None, lambda model: {"accuracy": 0.5}])
@pytest.mark.parametrize("step_size", [0.1, 40.0])
def test_divergence_is_noticed_without_an_evaluated_loss(step_size: float, evaluate: Any) -> None:
    diverges = step_size > 1
    with pytest.warns(UserWarning, match="diverges") if diverges else nullcontext():
        result = go(
            None,
            rounds=3,
            work=LocalWork(batch_size=12),
            step_size=step_size,
            evaluate=evaluate,
        )
    assert (result.diverged is not None) == diverges


def test_divergence_after_resuming_is_measured_against_the_start(tmp_path: Path) -> None:
    """The first record has diverged already; another model is no measure of the start."""

    def one(start: float, rounds: int, resume: bool) -> Any:
        model = Point(2)
        nn.init.constant_(model.x, start)
        with pytest.warns(UserWarning, match="diverges") if start == 0 else nullcontext():
            return train(
                model,
                FEDERATION,
                loss=half_squared_distance,
                rounds=rounds,
                step_size=40.0,
                work=LocalWork(batch_size=12),
                evaluate=Evaluation(FEDERATION, ["loss"], per_client=False),
                out=tmp_path,
                resume=resume,
            )

    first = one(0, 1, resume=False)
    assert first.diverged is not None
    assert first.diverged.endswith("at the start")
    again = one(0, 2, resume=True)
    assert again.diverged is not None
    assert again.diverged.endswith("at the start")
    other = one(1e9, 2, resume=True)
    assert "after round 1" in str(other.diverged)


def test_a_record_holds_the_costs_and_if_asked_the_cohort(tmp_path: Path) -> None:
    assert not any("cohort" in record for record in go(None, rounds=6).history)
    result = go(tmp_path, rounds=6, record_cohorts=True)
    records = RunFolder(tmp_path).metrics()
    assert records == result.history
    for r, record in enumerate(records):
        members = Independent([0.5, 0.3, 0.5, 0.2]).draw(3, r).tolist()
        assert record["cohort"] == members
        assert record["clients"] == len(members)
        assert record["steps"] == sum([1, 1, 2, 3][i] for i in members)
        assert record["bytes_up"] % max(1, 16 * len(members)) == 0
        assert record["seconds"] >= 0
        assert record["evaluation_seconds"] >= 0


@pytest.mark.parametrize("stop", [None, 6])
def test_tensorboard_shows_every_round_once(tmp_path: Path, stop: int | None) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def evaluate(model: Point) -> dict[str, float]:
        if stop is not None and done(tmp_path) == stop:
            raise Killed
        return {"norm": float(model.x.norm())}

    if stop is not None:
        with pytest.raises(Killed):
            go(tmp_path, evaluate=evaluate, tensorboard=True)
    result = go(tmp_path, resume=stop is not None, tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    shown = EventAccumulator(str(events)).Reload()
    names = {"clients", "steps", "bytes_down", "bytes_up", "seconds", "norm", "evaluation_seconds"}
    training = {"train_loss", "update_norm", "update_norm_max"}  # not of a round without clients
    assert set(shown.Tags()["scalars"]) == names | training
    for name in names | training:
        found = [(event.step, event.value) for event in shown.Scalars(name)]
        rounds = [record["round"] for record in result.history if name in record]
        assert [step for step, _ in found] == rounds
        assert name in training or rounds == list(range(1, 21))
        wanted = [record[name] for record in result.history if name in record]
        assert [value for _, value in found] == pytest.approx(wanted, rel=1e-6)


PROGRAM = """
import sys, time
from pathlib import Path
from tests.training.test_resume import go
go(Path(sys.argv[1]), rounds=100000, checkpoint_every=3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait", [5, 23])
def test_kill_9_loses_nothing(tmp_path: Path, wait: int) -> None:
    """A real process, killed after some rounds, and then resumed."""
    out = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)], env=environment)
    lines = out / "metrics.jsonl"
    try:
        wait_for(
            lambda: lines.exists() and lines.read_bytes().count(b"\n") >= wait, "rounds", process
        )
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


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "a"
    whole = go(out)
    newest = out / "checkpoints" / "00000020.safetensors"
    data = bytearray(newest.read_bytes())
    match damage:
        case "cut":
            newest.write_bytes(data[:-5])
        case "gone":
            newest.unlink()
    with pytest.warns(UserWarning, match=r"00000020.json is damaged"):
        resumed = go(out, resume=True)
    assert torch.equal(vector(resumed.model), vector(whole.model))


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_a_damaged_checkpoint_does_not_outlive_the_new_ones(tmp_path: Path) -> None:
    whole = go(None)
    go(tmp_path, keep=2)
    newest = tmp_path / "checkpoints" / "00000020.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])

    def evaluate(model: Point) -> dict[str, float]:
        if done(tmp_path) == 17:
            raise KeyboardInterrupt
        return {"norm": float(model.x.norm())}

    with (
        pytest.warns(UserWarning, match=r"00000020.json is damaged"),
        pytest.raises(KeyboardInterrupt),
    ):
        go(tmp_path, resume=True, evaluate=evaluate, keep=2)
    assert checkpoints(tmp_path) == [
        "00000016.json",
        "00000016.safetensors",
        "00000017.json",
        "00000017.safetensors",
        "00000020.json.damaged",
        "00000020.safetensors.damaged",
    ]
    resumed = go(tmp_path, resume=True, keep=2)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert without_time(resumed.history) == without_time(whole.history)


@pytest.mark.parametrize("damage", ["cut", "folder"])
def test_a_run_without_a_valid_checkpoint_is_refused_and_left_as_it_is(
    tmp_path: Path, damage: str
) -> None:
    go(tmp_path, rounds=4, keep=1)
    file = tmp_path / "checkpoints" / "00000004.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        shutil.rmtree(tmp_path / "checkpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FedShuffleError, match="checkpoint"):
            go(tmp_path, resume=True)
    assert done(tmp_path) == 4
    assert file.exists() == (damage == "cut")


@pytest.mark.parametrize("stop", [0, 2])
def test_the_start_is_saved_so_a_resumed_run_does_not_depend_on_the_model_passed(
    tmp_path: Path, stop: int
) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        if done(tmp_path) == stop:
            raise Killed
        return {}

    def one(seed: int, **settings: Any) -> Tensor:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2, dtype=torch.float64)
        return vector(train(model, pairs, loss=losses.squared_error, rounds=4, **settings).model)

    pairs = Federation.from_arrays(targets(6, 2), targets(6, 2, seed=1), sizes=[1, 5])
    with pytest.raises(Killed):
        one(1, out=tmp_path, evaluate=evaluate)
    assert checkpoints(tmp_path) == ["00000000.json", "00000000.safetensors"]
    assert torch.equal(one(2, out=tmp_path, resume=True), one(1))


def test_checkpoints_of_a_run_without_settings_are_not_mixed_up(tmp_path: Path) -> None:
    go(tmp_path, rounds=4)
    (tmp_path / "run.json").unlink()
    with pytest.raises(FedShuffleError, match=r"run\.json"):
        go(tmp_path)
    assert done(tmp_path) == 4


def layered(seed: int, hidden: str = "first") -> nn.Module:
    """A random layer that is frozen, a table that never changes, and a layer that is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module(hidden, nn.Linear(2, 3).requires_grad_(False))
    model.add_module("last", nn.Linear(3, 2))
    model.register_buffer("table", torch.arange(3.0))
    torch.manual_seed(0)
    nn.init.normal_(model.get_parameter("last.weight"))
    return model


def test_frozen_parts_must_be_the_same(tmp_path: Path) -> None:
    pairs = Federation.from_arrays(targets(6, 2), targets(6, 2, seed=1), sizes=[1, 5])

    def one(model: nn.Module, rounds: int = 3, resume: bool = True) -> None:
        train(model, pairs, loss=losses.squared_error, rounds=rounds, out=tmp_path, resume=resume)

    one(layered(1), 2, resume=False)
    with pytest.raises(FedShuffleError, match="frozen"):
        one(layered(2))
    other = layered(1)
    other.get_buffer("table")[0] = 7
    with pytest.raises(FedShuffleError, match="frozen"):
        one(other)
    with pytest.raises(FedShuffleError, match="names, shapes"):
        one(layered(1, hidden="second"))
    one(layered(1))


def test_a_state_is_loaded_to_the_device_of_the_model(tmp_path: Path) -> None:
    """A device without values stands for another one."""
    go(tmp_path, rounds=2)
    there = RunFolder(tmp_path).latest("meta")
    assert there is not None
    assert [t.device.type for t in (there.x, *there.method_state.values())] == ["meta"] * 3
    assert there.round == 2


def test_integers_of_numpy_are_accepted(tmp_path: Path) -> None:
    two: Any = np.int64(2)
    go(tmp_path, rounds=two, seed=two, checkpoint_every=two, keep=two, evaluate_every=two)
    go(tmp_path, rounds=3, seed=2, checkpoint_every=2, resume=True)


def test_fewer_rounds_than_are_done_are_refused(tmp_path: Path) -> None:
    go(tmp_path, rounds=8)
    with pytest.raises(FedShuffleError, match="rounds is 5"):
        go(tmp_path, rounds=5, resume=True)
    assert done(tmp_path) == 8


def test_a_config_is_not_rewritten_for_fewer_rounds_than_are_done(tmp_path: Path) -> None:
    text = """
rounds = 8
model.use = "somewhere:model"
loss.use = "cross_entropy"
data.use = "somewhere:data"
"""
    go(tmp_path, rounds=8)
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(FedShuffleError, match="rounds is 5"):
        config.resume(tmp_path, rounds=5)
    assert (tmp_path / "config.toml").read_text() == text


def test_a_folder_that_cannot_be_written_is_named_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    go(out, rounds=8)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(FedShuffleError, match="No space left on device"):
            RunFolder(out).save(State(torch.zeros(2), round=12))
    latest = RunFolder(out).latest()
    assert latest is not None
    assert latest.round == 8
    (tmp_path / "file").write_text("")
    with pytest.raises(FedShuffleError, match="cannot write"):
        go(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 4}, "seed 3"),
        ({"momentum": "plain"}, "momentum 'mvr:0.2'"),
        ({"sampling": "full"}, "sampling"),
        ({"work": LocalWork()}, "work"),
        ({"step_size": 0.2}, "step_size 0.1"),
        ({"engine": "vectorized"}, "engine 'sequential'"),
    ],
)
def test_a_run_is_resumed_only_with_its_own_settings(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    go(tmp_path / "a", rounds=4)
    with pytest.raises(FedShuffleError, match=message):
        go(tmp_path / "a", resume=True, **settings)


def decays(round: int) -> float:
    return 0.1 if round < 3 else 0.05


class Whole(Interruption):
    """A user's interruption without a repr."""

    random = False

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return planned


class AlsoWhole(Whole):
    pass


def scaled(model: Point, points: Tensor, factor: float) -> Tensor:
    return factor * half_squared_distance(model, points)


MANY = Federation.from_arrays(targets(2000, 2), sizes=[1] * 2000)
ONES = np.ones(2000, dtype=int)
OTHERS = np.where((np.arange(2000) > 5) & (np.arange(2000) < 1990), 7, 1)
MOVED = targets(12, 2)
MOVED[5, 1] += 1


@pytest.mark.parametrize(
    ("begun", "again", "message"),
    [
        (
            {"step_size": decays},
            {"step_size": lambda r: 0.1},
            "0.05 in round 4",
        ),
        ({"step_size": decays}, {"step_size": lambda r: decays(r)}, None),
        ({"step_size": decays}, {"step_size": 0.1}, "step_size"),
        (
            {"server_step_size": decays},
            {"server_step_size": lambda r: 0.2},
            "server_step_size",
        ),
        (
            {"work": LocalWork(interruption=Whole())},
            {"work": LocalWork(interruption=Whole())},
            None,
        ),
        (
            {"work": LocalWork(interruption=Whole())},
            {"work": LocalWork(interruption=AlsoWhole())},
            "work .*Whole",
        ),
        ({"work": LocalWork(epochs=[1, 2, 1, 1])}, {"work": LocalWork(epochs=2)}, "with work"),
        (
            {"work": LocalWork(epochs=[1, 2, 1, 1])},
            {"work": LocalWork(epochs=np.array([1, 2, 1, 1]))},  # type: ignore[arg-type]
            None,
        ),
        (
            {"loss": half_squared_distance},
            {"loss": lambda m, p: p.sum()},
            "'half_squared_distance'",
        ),
        (
            {"loss": lambda m, p: half_squared_distance(m, p)},
            {"loss": lambda m, p: half_squared_distance(m, p)},
            None,
        ),
        (
            {"loss": functools.partial(scaled, factor=2.0)},
            {"loss": functools.partial(scaled, factor=3.0)},
            "factor=2.0",
        ),
        (
            {},
            {"federation": Federation.from_arrays(MOVED, sizes=[1, 2, 3, 6])},
            "other data",
        ),
        (
            {},
            {"federation": Federation.from_arrays(targets(12, 2).numpy(), sizes=[1, 2, 3, 6])},
            None,
        ),
    ],
)
def test_settings_that_count_as_the_same(
    tmp_path: Path, begun: dict[str, Any], again: dict[str, Any], message: str | None
) -> None:
    def one(rounds: int, federation: Federation = FEDERATION, **settings: Any) -> None:
        model = Point(2)
        settings = {"loss": half_squared_distance} | settings
        train(model, federation, rounds=rounds, out=tmp_path, **settings)

    one(5, **begun)
    refused = nullcontext() if message is None else pytest.raises(FedShuffleError, match=message)
    with refused:
        one(6, resume=True, **(begun | again))


def test_many_epochs_are_not_abbreviated(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"loss": half_squared_distance, "sampling": "uniform:5"}
    train(Point(2), MANY, rounds=1, out=tmp_path, work=LocalWork(epochs=ONES), **settings)  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match="work"):
        train(
            Point(2),
            MANY,
            rounds=2,
            out=tmp_path,
            resume=True,
            work=LocalWork(epochs=OTHERS),  # type: ignore[arg-type]
            **settings,
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_the_digest_of_data_reads_some_rows_of_every_field(
    tmp_path: Path, kind: torch.dtype
) -> None:
    field = torch.arange(5000).remainder(2).to(kind)
    sizes = [2500, 2500]
    here = fingerprint.data(Federation.from_arrays(torch.ones(5000, 2), field, sizes=sizes))
    field[-1] = 0
    there = fingerprint.data(Federation.from_arrays(torch.ones(5000, 2), field, sizes=sizes))
    assert here != there
    wider = Federation.from_arrays(torch.ones(5000, 2, 1), field, sizes=sizes)
    assert fingerprint.data(wider) != there
    if kind != torch.bfloat16:
        Federation.from_arrays(torch.ones(5000, 2), field, sizes=sizes).save(tmp_path / "stored")
        assert fingerprint.data(Federation.open(tmp_path / "stored")) == there


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    go(tmp_path / "a", rounds=4)
    with pytest.raises(FedShuffleError, match="already holds a run"):
        go(tmp_path / "a")
    with pytest.raises(FedShuffleError, match="holds no run"):
        go(tmp_path / "b", resume=True)
    with pytest.raises(FedShuffleError, match="resume"):
        go(None, resume=True)
    with pytest.raises(FedShuffleError, match="tensorboard"):
        go(None, tensorboard=True)
    with pytest.raises(FedShuffleError, match="turn the key"):
        go(RunFolder(tmp_path / "a", resume_hint="turn the key"))
    with pytest.raises(FedShuffleError, match="checkpoint_every is 0"):
        go(tmp_path / "c", checkpoint_every=0)


def test_a_missing_tensorboard_is_named_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(FedShuffleError, match=r"\[tensorboard\]"):
        go(tmp_path / "a", tensorboard=True)
    assert not (tmp_path / "a").exists()
