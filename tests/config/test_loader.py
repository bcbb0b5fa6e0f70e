"""Reading and writing config files: every key, and every mistake."""

import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import (
    AtMost,
    EpochRange,
    Evaluation,
    FedShuffleError,
    LocalWork,
    MissLast,
    Privacy,
    RandomStop,
    config,
    schedules,
    train,
)
from fedshuffle.config import (
    Checkpoints,
    Config,
    EvaluationSpec,
    ImportSpec,
    ScheduleSpec,
    StorePath,
)
from fedshuffle.config.loader import read
from fedshuffle.config.writer import plain, toml
from fedshuffle.privacy import AdaptiveClipping
from tests.cli.test_cli import run as command
from tests.config.project import ROOT


def test_load(project: Path) -> None:
    assert config.load(project / "config.toml") == Config(
        rounds=7,
        model=ImportSpec("mine:model"),
        loss=ImportSpec("mine:loss"),
        data=ImportSpec("mine:data"),
        seed=3,
        momentum="mvr:0.5",
        sampling="uniform:2",
        step_size=0.2,
        work=LocalWork(epochs=EpochRange(1, 2), batch_size=2),
        evaluation=EvaluationSpec("training", every=2),
        checkpoints=Checkpoints(every=3),
        out=project / "run",
        folder=project,
    )


BASE = Config(
    rounds=3,
    model=ImportSpec("a:b"),
    loss=ImportSpec("cross_entropy"),
    data=ImportSpec("a:c"),
    folder=ROOT,
)


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
            {"step_size": ScheduleSpec("drops", {"step_size": 0.3, "at": [0.5]})},
        ),
        (
            "step_size",
            "warmup:2+cosine:0.3",
            {"step_size": ScheduleSpec("warmup:2+cosine", {"step_size": 0.3})},
        ),
        ("engine", "sequential:2", {"engine": "sequential:2"}),
        ("device", "cuda:1", {"device": "cuda:1"}),
        ("tensorboard", True, {"tensorboard": True}),
        ("record_cohorts", True, {"record_cohorts": True}),
        ("record_clients", True, {"record_clients": True}),
        ("out", "there", {"out": ROOT / "there"}),
        ("model", "x.y:z", {"model": ImportSpec("x.y:z")}),
        ("model.width", 4, {"model": ImportSpec("a:b", {"width": 4})}),
        ("loss", "squared_error", {"loss": ImportSpec("squared_error")}),
        ("loss.smoothing", 0.1, {"loss": ImportSpec("cross_entropy", {"smoothing": 0.1})}),
        ("data", {"store": "my data"}, {"data": StorePath("my data")}),
        ("data", {"store": "s", "transform": "a:flip"}, {"data": StorePath("s", "a:flip")}),
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
        ("evaluation", {"data": "training"}, {"evaluation": EvaluationSpec("training")}),
        (
            "evaluation",
            {"data": {"use": "a:d", "n": 3}, "metrics": ["loss"], "every": 4, "per_client": False},
            {"evaluation": EvaluationSpec(ImportSpec("a:d", {"n": 3}), ("loss",), 4, False)},
        ),
        ("evaluation", {"data": {"store": "s"}}, {"evaluation": EvaluationSpec(StorePath("s"))}),
        (
            "evaluation",
            {"data": "training", "clients": 3, "training": 4},
            {"evaluation": EvaluationSpec("training", clients=3, training=4)},
        ),
        ("checkpoints.keep", 9, {"checkpoints": Checkpoints(keep=9)}),
        ("availability", "cyclic:24:0.5", {"availability": "cyclic:24:0.5"}),
        ("clock", "fixed:0.1", {"clock": "fixed:0.1"}),
        ("channel", "topk:0.01+ef", {"channel": "topk:0.01+ef"}),
        ("down_channel", "qsgd:8", {"down_channel": "qsgd:8"}),
        (
            "transforms",
            ["a:T", {"use": "a:U", "n": 3}],
            {"transforms": (ImportSpec("a:T"), ImportSpec("a:U", {"n": 3}))},
        ),
        (
            "privacy",
            {"clip": 2, "epsilon": 1.5, "delta": 1e-5, "weighted": True, "server_draws": False},
            {"privacy": Privacy(2, None, 1.5, 1e-5, weighted=True, server_draws=False)},
        ),
        (
            "privacy",
            {"clip": 1.0, "noise": 2.0, "min_separation": 9},
            {"privacy": Privacy(1.0, 2.0, min_separation=9)},
        ),
        (
            "privacy",
            {"clip": 1.0, "noise": 2.0, "adaptive": {"rate": 0.1, "count_noise": 3.0}},
            {"privacy": Privacy(1.0, 2.0, adaptive=AdaptiveClipping(0.5, 0.1, 3.0))},
        ),
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
def test_toml_round_trip(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml(tables)) == tables


def test_toml_refuses_none() -> None:
    with pytest.raises(FedShuffleError, match="None"):
        toml({"model": {"width": None}})


def test_the_config_of_the_guide_is_read() -> None:
    page = (ROOT / "docs" / "how-to" / "config-file.md").read_text(encoding="utf-8")
    found = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    shown = read(tomllib.loads(found[1]), ROOT)
    assert shown.model == ImportSpec("task:model", {"hidden": 16})
    rows = re.findall(r"\| `(\w+ = .*?)` \|", page)
    assert len(rows) == 4
    for row in rows:
        assert shown.override(tomllib.loads(row)) != shown


def test_defaults_equal_those_of_train() -> None:
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(train).parameters.items()
        if parameter.default is not parameter.empty
    }
    same = [
        *("seed", "method", "sampling", "step_size", "server_step_size", "tensorboard", "device"),
        *("transforms", "privacy", "record_cohorts", "record_clients"),
    ]
    for name in same:
        assert getattr(BASE, name) == given[name]
    assert BASE.engine == given["engine"]
    assert BASE.checkpoints == Checkpoints(given["checkpoint_every"], given["keep"])
    assert EvaluationSpec("training").every == given["evaluate_every"]
    evaluation = inspect.signature(Evaluation).parameters
    for name in ("metrics", "per_client", "batch_size"):
        assert getattr(EvaluationSpec("training"), name) == evaluation[name].default


def test_every_schedule_has_a_name() -> None:
    helpers = {"value", "describe", "parse", "parameters", "make", "resolve", "warmed_up"}
    helpers |= {"NamedSchedule", "text", "size", "resized", "shortened"}
    public = {
        name
        for name, made in vars(schedules).items()
        if getattr(made, "__module__", "") == schedules.__name__ and not name.startswith("_")
    }
    assert public - helpers == set(schedules.SCHEDULES)


MISTAKES = [
    # What is set, and the word at fault, or the one to write instead.
    ("work.batchsize=16", "'work.batch_size'"),
    ("lr=0.1", "'step_size'"),
    ("work.lr=0.1", "'step_size'"),
    ("local_epochs=3", "'work.epochs'"),
    ("loss=mse", "'squared_error'"),
    ("round=16", "'rounds'"),
    ("work.rounds=16", "above the first [section]"),
    ("clip=16", "[work]"),
    ("every=16", "below [evaluation] or below [checkpoints]"),
    ("checkpoints.kep=1", "'checkpoints.keep'"),
    ("evaluation.metric=['loss']", "'evaluation.metrics'"),
    ("rounds=0", "rounds is 0"),
    ("rounds=1.5", "rounds is 1.5"),
    ("rounds=true", "rounds is True"),
    ("rounds=many", "rounds is 'many'"),
    ("seed=1.5", "seed is 1.5"),
    ("seed=-1", "seed is -1"),
    ("method=fedshufle", "'fedshuffle'"),
    ("method=3", "method is 3"),
    ("momentum=mvr:2", "momentum"),
    ("momentum=nesterov", "'nesterov'"),
    ("momentum=0.9", "momentum is 0.9"),
    ("sampling=5", "sampling is 5"),
    ("engine=[]", "engine is []"),
    ("step_size=-1", "step_size: the step size in round 0 is -1"),
    ("step_size=nan", "step_size: the step size in round 0 is nan"),
    ("step_size=big", "step_size: unknown step-size schedule 'big'"),
    ("step_size=true", "step_size is True"),
    ("server_step_size=0", "server_step_size: the server step size in round 0 is 0"),
    ("step_size=cosine", "step_size: "),
    ("device=gpu", "device: unknown device 'gpu'"),
    ("step_size={step_size = 1}", "step_size.schedule"),
    ("step_size={schedule = 'drop'}", "'drops'"),
    ("step_size={schedule = 'drops'}", "'step_size'"),
    ("step_size={schedule = 'drops', step_size = 1, by = 2}", "'by'"),
    ("step_size={schedule = 'drops', step_size = 1, factor = -1}", "in round 5 is -1"),
    ("step_size={schedule = 'drops', step_size = 'x'}", "step_size: "),
    ("step_size={schedule = 'inverse_time', step_size = 1, halved_after = 0}", "step_size: "),
    ("tensorboard=1", "tensorboard is 1"),
    ("out=3", "out is 3"),
    ("out=''", "out is ''"),
    ("folder=nowhere", "folder: "),
    ("model=3", "model.use"),
    ("model={width = 3}", "model.use"),
    ("model=mine", "model: 'mine'"),
    ("model.use=3", "model.use is 3"),
    ("model.use='mine:'", "model: 'mine:'"),
    ("loss=3", "loss.use"),
    ("data={n = 3}", "data.store"),
    ("data={store = 3}", "data.store is 3"),
    ("data={store = 'x', n = 3}", "'data.n'"),
    ("data.store=x", "data.store"),
    ("work=3", "[work]"),
    ("work.batch_size=0", "work: batch size is 0"),
    ("work.batch_size=2.0", "work.batch_size is 2.0"),
    ("work.batch_size='16'", "work.batch_size is '16'"),
    ("work.epochs=0", "work.epochs is 0"),
    ("work.epochs=5..2", "work.epochs: "),
    ("work.epochs=1-2", "work.epochs is '1-2'"),
    ("work.epochs=[1, 0]", "work: epochs: client 1 has 0"),
    ("work.epochs=[1, 0.5]", "work.epochs is 0.5"),
    ("work.epochs=[]", "work: epochs"),
    ("work.steps=max", "work: unknown number of steps 'max'"),
    ("work.steps=0", "work.steps is 0"),
    ("work.order=shuffled", "'reshuffled'"),
    ("work.clip=0", "work: clip is 0"),
    ("work.clip='1'", "work.clip is '1'"),
    ("work.weight_decay=-1", "work: weight_decay is -1"),
    ("work.interruption=misslast:2", "'misslast'"),
    ("work.interruption=at-most", "'at-most:STEPS'"),
    ("work.interruption=at-most:0", "work.interruption: "),
    ("work.interruption=random-stop:2", "work.interruption: "),
    ("evaluation={every = 2}", "evaluation.data"),
    ("evaluation.data=testing", "evaluation.data: 'testing'"),
    ("evaluation.every=0", "evaluation.every is 0"),
    ("evaluation.batch_size=0", "evaluation.batch_size is 0"),
    ("evaluation.per_client=1", "evaluation.per_client is 1"),
    ("evaluation.metrics=loss", "evaluation.metrics is 'loss'"),
    ("evaluation.metrics=[]", "evaluation.metrics is []"),
    ("evaluation.metrics=[1]", "evaluation.metrics is 1"),
    ("checkpoints.every=0", "checkpoints.every is 0"),
    ("checkpoints.keep=-1", "checkpoints.keep is -1"),
    ("availability=markv:on=0.1", "0.1': unknown availability 'markv'. Did you mean"),
    ("schedule=deadlin:3", "schedule: unknown schedule 'deadlin'. Did you mean"),
    (
        "schedule=deadline:3",
        "with schedule=deadline:3: schedule 'deadline:3' goes by time, and there is no clock",
    ),
    ("clock=fixed", "with clock=fixed: clock 'fixed': it is incomplete"),
    ("availability=markov", "with availability=markov: availability 'markov': it is incomplete"),
    ("channel=3", "channel is 3"),
    ("channel=tpk:0.1", "channel: unknown compressor 'tpk'. Did you mean 'topk'?"),
    ("channel=topk:0", "channel: the share of topk is 0"),
    ("channel=topk:0.1+ef+diana", "ef+diana: channel "),
    ("down_channel=qsgd:4+ef", "down_channel: "),
    ("transforms=mine:Freeze", "transforms is 'mine:Freeze'"),
    ("transforms=[]", "transforms is []"),
    ("privacy=3", "[privacy]"),
    ("privacy={noise = 1.0}", ": privacy has no clip"),
    ("privacy={clip = 1.0}", ": privacy has neither noise nor epsilon"),
    ("privacy={clip = '1', noise = 1.0}", "privacy.clip is '1'"),
    ("privacy={clip = 1.0, noise = 0.0}", "privacy: the noise of privacy is 0.0"),
    ("privacy={clip = 1.0, nose = 1.0}", "'privacy.noise'"),
    ("privacy={clip = 1.0, epsilon = 1.0}", "without delta"),
    ("privacy={clip = 1.0, noise = 1.0, adaptive = true}", "[privacy.adaptive]"),
    ("privacy.adaptive.quantile=2", "privacy.adaptive: the quantile"),
    ("privacy.quantile=0.5", "below [privacy.adaptive]"),
    ("quantile=0.5", "below [privacy.adaptive]"),
    ("epsilon=1", "below [privacy]"),
    ("rounds.all=1", "rounds is 7"),
    ("rounds", "'rounds'"),
    ("=3", "'=3'"),
    # Mistakes that show once the user's modules are imported.
    ("model.use=mien:model", "'mine'"),
    ("model.use=mine.sub:model", "'mine.sub'"),
    ("model.use=mine:modle", "'model'"),
    ("model.use=mine:torch.x", "'torch.x'"),
    ("model.use=mine:METHOD", "cannot be called"),
    ("model.use=mine:needy", "'width'"),
    ("model.widht=3", "'width'"),
    ("data.use=mine:failing", "data: 'mine:failing' failed: RuntimeError: no such disk nor such"),
    ("data.use=mine:failing", "(mine.py, line 21)."),
    ("model.use=mine:failing", "model: 'mine:failing' failed: RuntimeError"),
    ("model.use=mine:wrong", "model: what 'mine:wrong' returns"),
    ("data.use=mine:wrong", "data: what 'mine:wrong' returns"),
    ("data.n=0", "data: 'mine:data' failed: "),
    ("evaluation.data=mine:wrong", "evaluation.data: what 'mine:wrong' returns"),
    ("evaluation.data=mine:nothing", "evaluation.data: 'mine:nothing'"),
    ("evaluation.metrics=['acuracy']", "'accuracy'"),
    ("evaluation.metrics=['mine:x']", "evaluation.metrics: 'mine:x'"),
    ("loss=cross_entrpy", "'cross_entropy'"),
    ("loss=mine:los", "'loss'"),
    ("loss.smooth=0.1", "'smoothing'"),
    ("method=mine:METH", "method: 'mine:METH'"),
    ("method=mine:model", "method: 'mine:model'"),
    ("sampling=unifrom:2", "'uniform'"),
    ("sampling=uniform:9", "sampling: "),
    ("engine=lop", "'lop'"),
    ("data={store = 'nowhere'}", "data.store: "),
    ("transforms=['mine:model']", "transforms: what 'mine:model' returns"),
    ("transforms=['mine:modle']", "transforms: 'mine:modle'"),
    ("transforms=[{use = 'mine:model', widht = 2}]", "'width'"),
    ("privacy={clip = 1.0, noise = 1.0}", "leave without noise"),  # the momentum is MVR
]


@pytest.mark.parametrize(("setting", "message"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_are_reported_before_any_work(
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
def test_missing_keys(key: str) -> None:
    tables = plain(BASE)
    del tables[key]
    with pytest.raises(FedShuffleError, match=f"^{key} is missing"):
        read(tables, ROOT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = 3\nmethod = fedshuffle\n", "c.toml.*line 2"),
        (b"rounds = 3\nrounds = 4\n", "line 2"),
        (b"[model", "broken TOML"),
        (b"rounds = \xff", "cannot be read"),
        (b"", "c.toml: rounds"),
        (b"\xef\xbb\xbfrounds = 3\r\n", "model is missing"),  # as some editors save it
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(FedShuffleError, match=message):
        config.load(tmp_path / "c.toml")


def test_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.toml", tmp_path):
        with pytest.raises(FedShuffleError, match=re.escape(str(path))):
            config.load(path)


def test_a_config_made_in_python_is_checked() -> None:
    for wrong in [{"rounds": 0}, {"seed": -1}, {"method": "x"}, {"step_size": 0}]:
        with pytest.raises(FedShuffleError):
            replace(BASE, **wrong)  # type: ignore[arg-type]


def test_reading_a_config_needs_no_torch(project: Path) -> None:
    code = f"""
import sys
from fedshuffle import config
config.load({str(project / "config.toml")!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
