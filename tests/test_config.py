"""Runs from a file: reading it strictly, running it, and going on with what it left."""

from __future__ import annotations

import inspect
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedshuffle import (
    AtMost,
    EpochRange,
    Evaluation,
    FedShuffleError,
    LocalWork,
    MissLast,
    RandomStop,
    config,
    schedules,
    train,
)
from fedshuffle.config import Checkpoints, Config, Evaluating, Scheduled, Store, Use
from fedshuffle.config.reading import _SECTIONS, read
from fedshuffle.config.running import model as start
from fedshuffle.config.writing import plain, toml
from tests.processes import wait_for
from tests.test_cli import run as command

ROOT = Path(__file__).parent.parent

MODULE = """
import torch
from fedshuffle import Federation, methods

def model(width=2):
    return torch.nn.Linear(3, width)

def data(n=3):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(6 * n, 3, generator=generator), torch.arange(6 * n) % 2
    sizes = [k * 12 // (n + 1) for k in range(1, n + 1)]
    return Federation.from_arrays(inputs, labels, sizes=sizes)

def loss(model, inputs, labels, smoothing=0.0):
    return torch.nn.functional.cross_entropy(model(inputs), labels, label_smoothing=smoothing)

def needy(width):
    return torch.nn.Linear(3, width)

def failing():
    raise RuntimeError("no such disk\\nnor such cable")

def wrong():
    return 3

METHOD = methods.get("fedavg-rr")
"""

CONFIG = """
rounds = 7
seed = 3
sampling = "uniform:2"
step_size = 0.2
momentum = "mvr:0.5"
out = "run"

[model]
use = "mine:model"

[loss]
use = "mine:loss"

[data]
use = "mine:data"

[work]
epochs = "1..2"
batch_size = 2

[evaluation]
data = "training"
every = 2

[checkpoints]
every = 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config and a module, as a user would have it."""
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "mine.py").write_text(MODULE)
    (folder / "config.toml").write_text(CONFIG)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.endswith("seconds")} for line in lines
    ]


# Reading


def test_a_file_says_it_all(project: Path) -> None:
    assert config.load(project / "config.toml") == Config(
        rounds=7,
        model=Use("mine:model"),
        loss=Use("mine:loss"),
        data=Use("mine:data"),
        seed=3,
        momentum="mvr:0.5",
        sampling="uniform:2",
        step_size=0.2,
        work=LocalWork(epochs=EpochRange(1, 2), batch_size=2),
        evaluation=Evaluating("training", every=2),
        checkpoints=Checkpoints(every=3),
        out=project / "run",
        folder=project,
    )


BASE = Config(rounds=3, model=Use("a:b"), loss=Use("cross_entropy"), data=Use("a:c"), folder=ROOT)


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        ("rounds", 5, {"rounds": 5}),
        ("seed", 2**64 - 1, {"seed": 2**64 - 1}),
        ("method", "nastya", {"method": "nastya"}),
        ("method", "a:METHOD", {"method": "a:METHOD"}),
        ("momentum", "global:0.2", {"momentum": "global:0.2"}),
        ("sampling", "importance:2", {"sampling": "importance:2"}),
        ("step_size", 1, {"step_size": 1}),
        ("server_step_size", 2.5, {"server_step_size": 2.5}),
        (
            "step_size",
            {"schedule": "drops", "step_size": 0.3, "at": [0.5]},
            {"step_size": Scheduled("drops", {"step_size": 0.3, "at": [0.5]})},
        ),
        (
            "step_size",
            "warmup:2+cosine:0.3",
            {"step_size": Scheduled("warmup:2+cosine", {"step_size": 0.3})},
        ),
        ("engine", "lean:2", {"engine": "lean:2"}),
        ("device", "cuda:1", {"device": "cuda:1"}),
        ("tensorboard", True, {"tensorboard": True}),
        ("out", "there", {"out": ROOT / "there"}),
        ("model", "x.y:z", {"model": Use("x.y:z")}),
        ("model.width", 4, {"model": Use("a:b", {"width": 4})}),
        ("loss", "squared_error", {"loss": Use("squared_error")}),
        ("loss.smoothing", 0.1, {"loss": Use("cross_entropy", {"smoothing": 0.1})}),
        ("data", {"store": "my data"}, {"data": Store("my data")}),
        ("work.epochs", 3, {"work": LocalWork(epochs=3)}),
        ("work.epochs", "2..5", {"work": LocalWork(epochs=EpochRange(2, 5))}),
        ("work.epochs", [1, 2], {"work": LocalWork(epochs=(1, 2))}),
        ("work.steps", 4, {"work": LocalWork(steps=4)}),
        ("work.steps", "mean", {"work": LocalWork(steps="mean")}),
        ("work.order", "once", {"work": LocalWork(order="once")}),
        ("work.clip", 1.5, {"work": LocalWork(clip=1.5)}),
        ("work.weight_decay", 1, {"work": LocalWork(weight_decay=1)}),
        ("work.interruption", "miss-last:2", {"work": LocalWork(interruption=MissLast(2))}),
        ("work.interruption", "at-most:9", {"work": LocalWork(interruption=AtMost(9))}),
        (
            "work.interruption",
            "random-stop:0.1",
            {"work": LocalWork(interruption=RandomStop(0.1))},
        ),
        ("evaluation", {"data": "training"}, {"evaluation": Evaluating("training")}),
        (
            "evaluation",
            {"data": {"use": "a:d", "n": 3}, "metrics": ["loss"], "every": 4, "per_client": False},
            {"evaluation": Evaluating(Use("a:d", {"n": 3}), ("loss",), 4, False)},
        ),
        ("evaluation", {"data": {"store": "s"}}, {"evaluation": Evaluating(Store("s"))}),
        (
            "evaluation",
            {"data": "training", "clients": 3, "training": 4},
            {"evaluation": Evaluating("training", clients=3, training=4)},
        ),
        ("checkpoints.keep", 9, {"checkpoints": Checkpoints(keep=9)}),
    ],
)
def test_every_key_is_read_and_written(key: str, value: Any, changed: dict[str, Any]) -> None:
    want = replace(BASE, **changed)
    assert BASE.override({key: value}) == want
    assert read(tomllib.loads(toml(plain(want))), Path("elsewhere")) == want


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@hypothesis.settings(max_examples=50)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES))
def test_what_is_written_is_read(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml(tables)) == tables


def test_dates_are_written_as_toml_writes_them() -> None:
    text = "day = 2022-04-21\nhour = 12:30:00\nboth = 2022-04-21T12:30:00+02:00\n"
    assert toml(tomllib.loads(text)) == text
    with pytest.raises(FedShuffleError, match=r"None cannot be written"):
        toml({"model": {"width": None}})


def test_the_page_shows_every_key_with_its_default() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    found = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    shown, commented = tomllib.loads(found[1]), {}
    section = ""
    for line in found[1].split("\n"):
        section = line[1 : line.index("]")] if line.startswith("[") else section
        if line.startswith("# "):
            key = f"{section}.".lstrip(".") + line[2:].partition(" ")[0]
            (commented[key],) = tomllib.loads(line[2:]).values()

    keys = {f"{name}." if name else "": set(readers) for name, readers in _SECTIONS.items()}
    every = {section + key for section, names in keys.items() for key in names}
    sections = {"model", "loss", "data", "work", "evaluation", "checkpoints"}
    stand = {k for k in shown if k not in sections} | sections | commented.keys()
    stand |= {f"{s}.{k}" for s in ("work", "evaluation", "checkpoints") for k in shown[s]}
    assert stand - {"data.store"} == every

    written = read(shown, ROOT)
    needed = {key: getattr(written, key) for key in ("rounds", "model", "loss", "data")}
    assert written.evaluation is not None
    evaluation = Evaluating(written.evaluation.data)
    assert written == Config(**needed, evaluation=evaluation, folder=ROOT)
    for key, value in commented.items():
        changed = {"data": {"store": value}} if key == "data.store" else {key: value}
        assert written.override(changed) != written or key == "folder"


def test_the_defaults_are_those_of_train() -> None:
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(train).parameters.items()
        if parameter.default is not parameter.empty
    }
    same = ("seed", "method", "sampling", "step_size", "server_step_size", "tensorboard", "device")
    for name in same:
        assert getattr(BASE, name) == given[name]
    assert BASE.engine == given["engine"]
    assert BASE.checkpoints == Checkpoints(given["checkpoint_every"], given["keep"])
    assert Evaluating("training").every == given["evaluate_every"]
    evaluation = inspect.signature(Evaluation).parameters
    for name in ("metrics", "per_client", "batch_size"):
        assert getattr(Evaluating("training"), name) == evaluation[name].default


def test_every_schedule_can_be_named() -> None:
    helpers = {"value", "describe", "read", "parameters", "made", "over", "warmed_up"}
    public = {
        name
        for name, made in vars(schedules).items()
        if getattr(made, "__module__", "") == schedules.__name__ and not name.startswith("_")
    }
    assert public - helpers == set(schedules.SCHEDULES)


# Mistakes


MISTAKES = [
    # What is set, and what the message must hold.
    ("work.batchsize=16", "unknown key 'work.batchsize'. Did you mean 'work.batch_size'?"),
    ("lr=0.1", "unknown key 'lr'. Did you mean 'step_size'?"),
    ("work.lr=0.1", "unknown key 'work.lr'. Did you mean 'step_size'?"),
    ("local_epochs=3", "Did you mean 'work.epochs'?"),
    ("loss=mse", "Did you mean 'squared_error'?"),
    ("round=16", "unknown key 'round'. Did you mean 'rounds'?"),
    ("work.rounds=16", "unknown key 'work.rounds'. It stands above the first [section]."),
    ("clip=16", "unknown key 'clip'. It stands below [work]."),
    ("every=16", "It stands below [evaluation] or below [checkpoints]."),
    ("checkpoints.kep=1", "'checkpoints.keep'"),
    ("evaluation.metric=['loss']", "'evaluation.metrics'"),
    ("rounds=0", "rounds is 0, but must be a whole number of at least 1"),
    ("rounds=1.5", "rounds is 1.5"),
    ("rounds=true", "rounds is True"),
    ("rounds=many", "rounds is 'many'"),
    ("seed=1.5", "seed is 1.5, but must be a whole number"),
    ("seed=-1", "seed -1"),
    ("method=fedshufle", "unknown method 'fedshufle'. Did you mean 'fedshuffle'?"),
    ("method=3", "method is 3, but must be a text"),
    ("momentum=mvr:2", "momentum parameter a = 2.0 is outside"),
    ("momentum=nesterov", "unknown momentum 'nesterov'"),
    ("momentum=0.9", "momentum is 0.9, but must be a text"),
    ("sampling=5", "sampling is 5, but must be a text"),
    ("engine=[]", "engine is [], but must be a text"),
    ("step_size=-1", "step_size: the step size in round 0 is -1"),
    ("step_size=nan", "step_size: the step size in round 0 is nan"),
    ("step_size=big", "step_size: unknown schedule 'big'"),
    ("step_size=true", "step_size is True"),
    ("server_step_size=0", "server_step_size: the server step size in round 0 is 0"),
    ("step_size=cosine", "step_size: "),
    ("device=gpu", "device: unknown device 'gpu'"),
    ("step_size={step_size = 1}", "step_size.schedule is missing"),
    ("step_size={schedule = 'drop'}", "unknown schedule 'drop'. Did you mean 'drops'?"),
    ("step_size={schedule = 'drops'}", "schedule 'drops' needs 'step_size'"),
    ("step_size={schedule = 'drops', step_size = 1, by = 2}", "unknown argument of schedule"),
    ("step_size={schedule = 'drops', step_size = 1, factor = -1}", "in round 4 is -1"),
    ("step_size={schedule = 'drops', step_size = 'x'}", "step_size: "),
    (
        "step_size={schedule = 'inverse_time', step_size = 1, halved_after = 0}",
        "step_size: the schedule cannot be computed: ",
    ),
    ("tensorboard=1", "tensorboard is 1, but must be true or false"),
    ("out=3", "out is 3"),
    ("out=''", "out is ''"),
    ("folder=nowhere", "folder: there is no folder"),
    ("model=3", "model.use is missing"),
    ("model={width = 3}", "model.use is missing"),
    ("model=mine", "model: 'mine' is no import path: write 'package.module:attribute'"),
    ("model.use=3", "model.use is 3"),
    ("model.use='mine:'", "model.use: 'mine:' is no import path"),
    ("loss=3", "loss.use is missing"),
    ("data={n = 3}", 'data says nothing: give data.use = "module:function", or data.store'),
    ("data={store = 3}", "data.store is 3"),
    ("data={store = 'x', n = 3}", "unknown key 'data.n'"),
    ("data.store=x", "data has both use and store"),
    ("work=3", "work is 3, but must be a table: write [work]"),
    ("work.batch_size=0", "work.batch_size is 0, but must be a whole number of at least 1"),
    ("work.batch_size=2.0", "work.batch_size is 2.0"),
    ("work.batch_size='16'", "work.batch_size is '16'"),
    ("work.epochs=0", "work.epochs is 0"),
    ("work.epochs=5..2", "work.epochs: the range of epochs 5..2 is empty"),
    ("work.epochs=1-2", "work.epochs is '1-2', but a range is written like"),
    ("work.epochs=[1, 0]", "work.epochs: epochs: client 1 has 0"),
    ("work.epochs=[1, 0.5]", "work.epochs is 0.5"),
    ("work.epochs=[]", "work.epochs: "),
    ("work.steps=max", "work.steps: unknown number of steps 'max'"),
    ("work.steps=0", "work.steps is 0"),
    ("work.order=shuffled", "work.order: unknown order 'shuffled'. Did you mean 'reshuffled'?"),
    ("work.clip=0", "work.clip: clip is 0"),
    ("work.clip='1'", "work.clip is '1', but must be a number"),
    ("work.weight_decay=-1", "work.weight_decay: "),
    ("work.interruption=misslast:2", "work.interruption: unknown interruption 'misslast'"),
    ("work.interruption=at-most", "work.interruption: 'at-most' cannot be read"),
    ("work.interruption=at-most:0", "work.interruption: the most steps a client can do is 0"),
    ("work.interruption=random-stop:2", "work.interruption: the probability"),
    ("evaluation={every = 2}", "evaluation.data is missing"),
    ("evaluation.data=testing", "evaluation.data: 'testing' is no import path"),
    ("evaluation.every=0", "evaluation.every is 0"),
    ("evaluation.batch_size=0", "evaluation.batch_size is 0"),
    ("evaluation.per_client=1", "evaluation.per_client is 1"),
    ("evaluation.metrics=loss", "evaluation.metrics is 'loss', but must be a list"),
    ("evaluation.metrics=[]", "evaluation.metrics is []"),
    ("evaluation.metrics=[1]", "evaluation.metrics is 1"),
    ("checkpoints.every=0", "checkpoints.every is 0"),
    ("checkpoints.keep=-1", "checkpoints.keep is -1"),
    ("rounds.all=1", "rounds.all cannot be set, since rounds is 7, no table"),
    ("rounds", "'rounds' sets nothing: write it like work.batch_size=16"),
    ("=3", "sets nothing"),
    # What needs the user's modules.
    ("model.use=mien:model", "model: 'mien:model': there is no module 'mien', neither in"),
    ("model.use=mien:model", "Did you mean 'mine'?"),
    ("model.use=mine.sub:model", "there is no module 'mine.sub'"),
    ("model.use=mine:modle", "model: 'mine:modle': 'mine' has no 'modle'. Did you mean 'model'?"),
    ("model.use=mine:torch.x", "has no 'torch.x'"),
    ("model.use=mine:METHOD", "which cannot be called"),
    ("model.use=mine:needy", "model: 'mine:needy' needs 'width': add that key"),
    ("model.widht=3", "takes no 'widht'. Did you mean 'width'? It takes: width."),
    ("data.use=mine:failing", "data: 'mine:failing' failed: RuntimeError: no such disk nor such"),
    ("data.use=mine:failing", "(mine.py, line 21)."),
    ("model.use=mine:failing", "model: 'mine:failing' failed: RuntimeError"),
    ("model.use=mine:wrong", "model: what 'mine:wrong' returns must be of type Module, not int"),
    ("data.use=mine:wrong", "data: what 'mine:wrong' returns must be of type Federation"),
    ("data.n=0", "data: 'mine:data' failed: "),
    ("evaluation.data=mine:wrong", "evaluation.data: what 'mine:wrong' returns must be"),
    ("evaluation.data=mine:nothing", "evaluation.data: 'mine:nothing': 'mine' has no"),
    ("evaluation.metrics=['acuracy']", "Did you mean 'accuracy'?"),
    ("evaluation.metrics=['mine:x']", "evaluation.metrics: 'mine:x'"),
    ("loss=cross_entrpy", "loss: unknown loss 'cross_entrpy'. Did you mean 'cross_entropy'?"),
    ("loss=mine:los", "loss: 'mine:los': 'mine' has no 'los'. Did you mean 'loss'?"),
    ("loss.smooth=0.1", "takes no 'smooth'. Did you mean 'smoothing'?"),
    ("method=mine:METH", "method: 'mine:METH': 'mine' has no 'METH'"),
    ("method=mine:model", "method: 'mine:model' must be of type Method"),
    ("sampling=unifrom:2", "sampling: unknown sampling 'unifrom'. Did you mean 'uniform'?"),
    ("sampling=uniform:9", "sampling: "),
    ("engine=lop", "unknown engine 'lop'"),
    ("data={store = 'nowhere'}", "data.store: "),
]


@pytest.mark.parametrize(("setting", "message"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_are_named_before_any_work(
    setting: str,
    message: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    before = sorted(path.name for path in project.iterdir())
    assert command(monkeypatch, "run", "config.toml", "--set", setting) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    after = sorted(path.name for path in project.iterdir() if path.name != "__pycache__")
    assert after == before


@pytest.mark.parametrize("key", ["rounds", "model", "loss", "data"])
def test_what_is_needed_is_asked_for(key: str) -> None:
    tables = plain(BASE)
    del tables[key]
    with pytest.raises(FedShuffleError, match=f"^{key} is missing: add "):
        read(tables, ROOT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = 3\nmethod = fedshuffle\n", r"c.toml: broken TOML: .*line 2.*'method = fedsh"),
        (b"rounds = 3\nrounds = 4\n", "line 2"),
        (b"[model", "broken TOML"),
        (b"rounds = \xff", "cannot be read"),
        (b"", "c.toml: rounds is missing"),
        (b"\xef\xbb\xbfrounds = 3\r\n", "model is missing"),  # as some editors save it
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(FedShuffleError, match=message):
        config.load(tmp_path / "c.toml")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match=r"there is no config '.*nothing\.toml'"):
        config.load(tmp_path / "nothing.toml")
    with pytest.raises(FedShuffleError, match="cannot be read"):
        config.load(tmp_path)


def test_a_config_made_in_python_is_checked_too() -> None:
    for wrong in [{"rounds": 0}, {"seed": -1}, {"method": "x"}, {"step_size": 0}, {"work": 3}]:
        with pytest.raises(FedShuffleError):
            replace(BASE, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import not_there",
            "cannot be imported: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("x = (", "cannot be imported: SyntaxError"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(bad.py, line 1\)"),
    ],
)
def test_a_module_that_fails_is_named(project: Path, code: str, message: str) -> None:
    (project / "bad.py").write_text(code)
    changed = config.load(project / "config.toml", {"model": "bad:model"})
    with pytest.raises(FedShuffleError, match=f"model: 'bad:model' {message}|{message}"):
        changed.task()


def test_a_module_that_hides_another_is_named(project: Path) -> None:
    (project / "json.py").write_text("")
    changed = config.load(project / "config.toml", {"model": "json:model"})
    with pytest.raises(FedShuffleError, match=r"json.py' has the name of a module .* Rename yours"):
        changed.task()


# Running


def test_a_run_leaves_all_that_it_takes(
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


def test_json_for_a_program(
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


def test_a_resumed_run_is_the_run_never_interrupted(
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
def test_kill_9_of_the_command_loses_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_ctrl_c_says_how_to_go_on(
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


def test_ctrl_c_before_the_first_round_leaves_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "slow.py").write_text("def data():\n    raise KeyboardInterrupt\n")
    words = [str(project / "config.toml"), "--set", "data=slow:data"]
    assert command(monkeypatch, "run", *words) == 130
    assert capsys.readouterr().err == "Interrupted before the first round: nothing was saved.\n"
    assert not (project / "run").exists()


def test_a_run_killed_before_its_first_round_can_go_on(
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
    assert "holds a config.toml already" in capsys.readouterr().err
    assert command(monkeypatch, "run", "--resume", str(project / "killed")) == 0
    assert equal(weights(project / "killed"), weights(project / "run"))


def test_training_that_diverges_ends_in_one_line(
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


def test_a_loss_far_above_that_of_the_start_is_called_divergence(
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
def test_a_module_that_exits_does_not_pass_for_success(
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
@pytest.mark.parametrize("probe", ["0", "2"])
def test_a_loss_that_fails_ends_advice_in_one_line(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    probe: str,
) -> None:
    (project / "bad.py").write_text(f"def loss(model, *fields):\n    {code}")
    words = ["advise", str(project / "config.toml"), "--set", "loss=bad:loss", "--probe", probe]
    assert command(monkeypatch, *words, "--json") == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert "sys.exit(" in line or "ZeroDivisionError" in line
    assert not shown.out


def test_a_loss_that_exits_after_some_rounds_loses_nothing(
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
@pytest.mark.parametrize("gap", [0.0, 0.01, 0.1])
def test_ctrl_c_twice_ends_in_one_line_and_loses_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, gap: float
) -> None:
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
def test_two_commands_cannot_go_on_with_one_run(
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


def test_a_folder_that_holds_a_run_is_refused_before_data_are_loaded(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(project / "config.toml")
    assert command(monkeypatch, "run", file) == 0
    capsys.readouterr()
    assert command(monkeypatch, "run", file, "--set", "data=mine:failing") == 2
    found = capsys.readouterr().err
    assert "holds a run already" in found
    assert f"fedshuffle run --resume '{project / 'run'}'" in found
    # Nor is the config itself, in its own folder, written over.
    assert command(monkeypatch, "run", file, "--out", str(project)) == 2
    assert (project / "config.toml").read_text() == CONFIG


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a config file to run, or --resume"),
        (["config.toml", "--resume", "run"], "give either a config file"),
        (["--resume", "run", "--seed", "3"], "--resume takes only --rounds"),
        (["--resume", "run", "--out", "x"], "--resume takes only --rounds"),
        (["--resume", "run"], "'run' holds no config.toml"),
        (["none.toml"], "there is no config 'none.toml'"),
        (["config.toml", "--out", "mine.py"], "cannot write to 'mine.py'"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str],
    message: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    assert command(monkeypatch, "run", *words) == 2
    assert message in capsys.readouterr().err


def test_a_config_without_out_asks_for_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "config.toml").write_text(CONFIG.replace('out = "run"', ""))
    assert command(monkeypatch, "run", str(project / "config.toml")) == 2
    assert "out is missing: add it, or give --out" in capsys.readouterr().err


def test_a_folder_that_moved_away_is_named(
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


# The user's modules


def test_a_run_leaves_no_trace_in_python(project: Path, tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    other = tmp_path / "other"
    other.mkdir()
    (other / "helper").mkdir()
    (other / "helper" / "parts.py").write_text("WIDTH = 5\n")
    code = MODULE.replace("width=2", "width=WIDTH")
    (other / "mine.py").write_text("from helper.parts import WIDTH\n" + code)
    (other / "config.toml").write_text(CONFIG)
    first = config.load(project / "config.toml").run()
    second = config.load(other / "config.toml").run()
    shapes = [dict(run.model.named_parameters())["weight"].shape for run in (first, second)]
    assert shapes == [(2, 3), (5, 3)]
    assert sys.path == path
    new = sys.modules.keys() - modules
    assert not {name for name in new if name.partition(".")[0] in ("mine", "helper")}


def test_a_module_is_loaded_once_a_run(project: Path) -> None:
    log = project / "log.txt"
    line = f"with open({str(log)!r}, 'a') as log:\n    log.write('loaded ')\n"
    (project / "mine.py").write_text(line + MODULE)
    chosen = config.load(project / "config.toml")
    chosen.run()
    assert log.read_text() == "loaded "
    with chosen.importable():
        task = chosen.task()
        for size in (0.1, 0.2):
            replace(chosen, out=None, step_size=size).run(task=task)
    assert log.read_text() == "loaded loaded "


def test_a_module_that_fails_leaves_no_trace_either(project: Path) -> None:
    path = list(sys.path)
    with pytest.raises(FedShuffleError):
        config.load(project / "config.toml", {"data": "mine:failing"}).task()
    assert sys.path == path
    assert "mine" not in sys.modules


def test_the_start_is_a_function_of_the_seed(project: Path) -> None:
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
    fields = [replace(chosen, seed=seed).task().federation.fields[0] for seed in (1, 2)]
    assert torch.equal(*fields)


def test_parts_of_the_user(project: Path) -> None:
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


def test_data_from_a_store(project: Path) -> None:
    chosen = config.load(project / "config.toml")
    whole = chosen.run()
    chosen.task().federation.save(project / "people")
    store = {"store": "people"}
    stored = chosen.override({"data": store, "evaluation.data": store, "out": "stored"}).run()
    assert equal(stored.model.state_dict(), whole.model.state_dict())
    assert metrics(project / "stored") == metrics(project / "run")
    longer = config.resume(project / "stored", rounds=9)
    again = replace(chosen, rounds=9, out=None).run()
    assert equal(longer.model.state_dict(), again.model.state_dict())


def test_reading_a_config_needs_no_torch(project: Path) -> None:
    code = f"""
import sys
from fedshuffle import config
config.load({str(project / "config.toml")!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# The example


def test_the_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "examples" / "digits" / "config.toml")
    assert command(monkeypatch, "run", file, "--out", str(tmp_path / "a"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["accuracy"] > 0.9
    assert found["rounds"] == 60


def test_the_example_deals_every_digit_once() -> None:
    chosen = config.load(ROOT / "examples" / "digits" / "config.toml")
    assert chosen.evaluation is not None
    held = replace(chosen, data=chosen.evaluation.data)  # type: ignore[arg-type]
    kept, test = chosen.task().federation, held.task().federation
    assert len(kept) == len(test) == 20
    assert kept.sizes.sum() + test.sizes.sum() == 1797
    assert (kept.sizes + test.sizes).min() >= 5
    assert (test.sizes == (kept.sizes + test.sizes) // 5).all()
    assert kept.sizes.max() > 10 * kept.sizes.min()
