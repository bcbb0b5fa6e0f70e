"""The file of a comparison, and those of the paper's experiments."""

import json
import math
import os
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedshuffle import FedShuffleError, comparison, methods
from fedshuffle.comparison import GridPoint, Variant
from fedshuffle.comparison.results import collect_facts
from fedshuffle.config import EvaluationSpec, ImportSpec, ScheduleSpec
from fedshuffle.config.writer import toml
from fedshuffle.experiments import plays, real
from tests.cli.test_cli import run as command
from tests.comparison.project import (
    CONFIG,
    MODULE,
    project,
)

pytestmark = pytest.mark.xdist_group("comparison")  # they share one comparison


def test_load(tmp_path: Path) -> None:
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
    variant = Variant("fedavg-rr", "global:0.1")
    grid = compared.grid(variant)
    assert grid == [GridPoint(1.0, 1.0, d, c) for d in (0.0, 1e-4) for c in (5.0, math.inf)]
    assert len(compared.variants) == 4
    short = compared.trial(variant, grid[2], None)
    assert short.name == "tune_fedavg-rr_global-0.1_step1.0_decay0.0001_clip5.0"
    config = short.config
    assert (config.rounds, config.seed, config.momentum) == (2, 9, "global:0.1")
    assert (config.work.weight_decay, config.work.clip) == (1e-4, 5.0)
    assert config.evaluation == EvaluationSpec(ImportSpec("mine:data"), ("loss",), 1, False)
    plain = Variant("fedavg-rr", "none")
    full = compared.trial(plain, compared.common_point(plain, 0.5), 1)
    assert full.name == "fedavg-rr_none_step0.5_seed1"
    assert full.config.evaluation == compared.base.evaluation
    assert full.config.step_size.arguments["step_size"] == 0.5  # type: ignore[union-attr]
    again = tmp_path / "again.toml"
    again.write_text(toml(compared.tables))
    assert comparison.load(again) == compared


def test_a_server_step_size_may_have_a_schedule(tmp_path: Path) -> None:
    compared = comparison.load(
        project(tmp_path), {"server_step_size": "cosine:2", "compare.server_step_sizes": [1, 2]}
    )
    variant = compared.variants[0]
    one, two = (compared.trial(variant, point, 0) for point in compared.grid(variant)[:2])
    assert one.name == "fedavg-rr_step0.1_server1.0_seed0"
    assert two.name == "fedavg-rr_step0.1_seed0"
    for trial, size in ((one, 1.0), (two, 2.0)):
        assert trial.config.server_step_size == ScheduleSpec("cosine", {"step_size": size})
    assert compared.common_point(variant, 0.1).server_step_size == 2.0
    assert collect_facts(compared).common["settings"]["server_step_size"] == "schedule cosine"


def test_the_default_step_size_is_that_of_the_run(tmp_path: Path) -> None:
    tables = tomllib.loads(CONFIG)
    tables["compare"] = {"methods": ["fedshuffle"]}
    file = project(tmp_path, toml(tables))
    compared = comparison.load(file, {"step_size": 0.3})
    [variant] = compared.variants
    assert [point.step_size for point in compared.grid(variant)] == [0.3]
    assert not compared.tuned(variant)
    assert compared.seeds == (0,)
    drops = {"schedule": "drops", "step_size": 0.7}
    assert comparison.load(file, {"step_size": drops}).grid(variant)[0].step_size == 0.7
    common = comparison.load(file, {"compare.common_step_sizes": [1]})
    assert common.grid(variant) == []
    assert not common.tuned(variant)


def test_scales(tmp_path: Path) -> None:
    scales = '[scale.small]\nrounds = 2\n[scale.small.compare]\nseeds = [5]\nclip = ["none"]\n'
    file = project(tmp_path, CONFIG + scales)
    assert comparison.load(file).base.rounds == 12
    small = comparison.load(file, scale="small")
    assert (small.base.rounds, small.seeds) == (2, (5,))
    assert len(small.grid(small.variants[0])) == 5
    with pytest.raises(FedShuffleError, match="'smal'"):
        comparison.load(file, scale="smal")
    with pytest.raises(FedShuffleError, match=r"write \[scale.NAME\]"):
        comparison.load(project(tmp_path, "scale = 3\n" + CONFIG))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("compare.metods", ["fedavg"], "'compare.methods'"),
        ("compare.methods", [], "compare.methods is"),
        ("compare.methods", "fedavg", "compare.methods"),
        ("compare.methods", ["fedavg", "fedavg"], "compare.methods"),
        ("compare.methods", ["fedavgg"], "'fedavgg'"),
        ("compare.momentum", ["mvr:2"], "compare.momentum: "),
        ("compare.seeds", [-1], "compare.seeds: seed is -1"),
        ("compare.seeds", [0.5], "compare.seeds is 0.5"),
        ("compare.step_sizes", [0.1, 0], "compare: step_size"),
        ("compare.common_step_sizes", [-1], "compare: step_size: "),
        ("compare.weight_decay", [-1], "compare: .*weight.decay"),
        ("compare.clip", ["no"], "compare.clip is 'no'"),
        ("compare.tune.rounds", 0, "compare.tune.rounds is 0"),
        ("compare.tune.seed", -1, "compare.tune: seed is -1"),
        ("compare.tune.widen", 0.5, "widen"),
        ("compare.tune.search", "decent", "'descent'"),
        ("compare.tune.search", 3, "compare.tune.search is 3"),
        ("compare.server_step_sizes", [1, -1], "compare: server_step_size: "),
        ("compare.server_step_sizes", [1, 1], "compare.server_step_sizes has 1 twice"),
        ("compare.tune.round", 3, "'compare.tune.rounds'"),
        ("compare.tune.data", {"folder": "x"}, "compare.tune.data.use"),
        ("compare", 3, "compare is 3"),
        ("work.batch_size", 0, "work: batch size is 0"),
    ],
)
def test_mistakes_are_reported_before_any_work(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        comparison.load(project(tmp_path), {key: value})


def test_nothing_is_tuned_on_the_data_that_are_reported(tmp_path: Path) -> None:
    file, held_out = project(tmp_path), {"use": "mine:data", "part": "test"}
    for data, refused in ((held_out, True), ({"use": "mine:data", "part": "check"}, False)):
        changes = {"evaluation.data": held_out, "compare.tune.data": data}
        with pytest.raises(FedShuffleError, match="chosen by") if refused else nullcontext():
            comparison.load(file, changes)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[compare]", "fedshuffle run"),
        ("[evaluation]", "evaluation"),
    ],
)
def test_missing_sections(tmp_path: Path, section: str, message: str) -> None:
    tables = tomllib.loads(CONFIG)
    del tables[section[1:-1]]
    with pytest.raises(FedShuffleError, match=message):
        comparison.load(project(tmp_path, toml(tables)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compare.metric": "los"}, "'los'"),
        ({"compare.tune.metric": "mine:loss"}, "compare.tune"),
        ({"data.use": "mine:date"}, "'date'"),
        ({"sampling": "uniform:9"}, "sampling: "),
        ({"compare.methods": ["mine:MINE", "fedshuffle"]}, "are called 'fedshuffle'"),
    ],
)
def test_mistakes_in_the_users_parts_are_reported_before_any_run(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        comparison.load(project(tmp_path), changes).run()
    assert not (tmp_path / "out" / "runs").exists()


FIXED = """
FIXED = methods.Method("mine", "", MINE.averaging, work={"order": "replacement", "clip": 5.0})
"""


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedavg", {"work.order": "once"}, "fedavg .*order"),
        ("mine:FIXED", {"work.order": "once"}, "mine .*order"),
        ("mine:FIXED", {"work.clip": 3}, "mine .*clip"),
        ("mine:FIXED", {"compare.clip": ["none", 5]}, "mine .*clip"),
    ],
)
def test_a_part_of_the_work_that_a_method_fixes_otherwise_is_refused_before_any_run(
    tmp_path: Path, method: str, changes: dict[str, Any], message: str
) -> None:
    file = project(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE + FIXED)
    changes = {"compare.methods": ["fedshuffle", method], **changes}
    with pytest.raises(FedShuffleError, match=f"compare.methods: {message}"):
        comparison.load(file, changes).run()
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize("order", [None, "replacement"])
def test_a_part_that_is_not_set_is_left_to_each_method(tmp_path: Path, order: str | None) -> None:
    changes = {} if order is None else {"work.order": order}
    compared = comparison.load(
        project(tmp_path), {"compare.methods": ["fedavg", "fedshuffle"], **changes}
    )
    used = [
        methods.get(one.method).local_work(
            compared.trial(one, compared.grid(one)[0], 0).config.work
        )
        for one in compared.variants
    ]
    assert [work.order for work in used] == ["replacement", order or "reshuffled"]


def test_reading_a_comparison_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fedshuffle import comparison; comparison.load(sys.argv[1]);"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(project(tmp_path))], check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare"], "give either a config file"),
        (["compare", "{file}", "--resume", "x"], "give either a config file"),
        (["compare", "--resume", "{here}"], "holds no comparison"),
        (["compare", "--resume", "{here}", "--set", "a=1"], "takes only --jobs"),
        (["compare", "{file}", "--jobs", "0"], "jobs is 0"),
        (["compare", "{file}", "--scale", "x"], "unknown scale 'x'"),
        (["reproduce", "shakespeare", "--out", "{here}", "--scale", "x"], "unknown scale 'x'"),
        (["reproduce", "shakespeare", "--out", "{here}", "--rounds", "3"], "--rounds changes"),
        (["reproduce", "quadratic", "--out", "{here}", "--scale", "paper"], "--scale changes"),
        (["reproduce", "quadratic", "--out", "{here}", "--jobs", "2"], "--jobs changes"),
        (["reproduce", "steps-plays", "--out", "{here}", "--rounds", "3"], "--rounds changes"),
        (["reproduce", "steps-default", "--out", "{here}", "--jobs", "2"], "--jobs changes"),
        (["reproduce", "theory", "--out", "{here}", "--rounds", "3"], "--rounds changes"),
        (["reproduce", "theory", "--out", "{here}", "--data", "x"], "--data changes"),
    ],
)
def test_options_that_exclude_each_other(
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


def test_out_is_required(
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
def test_load_experiments(tmp_path: Path, experiment: str, scale: str) -> None:
    compared = real.load(experiment, scale, tmp_path / "out", tmp_path)
    grid = compared.grid(compared.variants[0])
    config = compared.trial(compared.variants[0], grid[0], 0).config
    assert config.work.batch_size == 32
    assert config.work.clip == 5
    assert compared.momentum == ("none", "global:0.1")
    assert compared.base.folder == tmp_path / "out"
    assert compared.base.data.arguments["folder"] == str(tmp_path)  # type: ignore[union-attr]
    if scale == "paper":
        assert (config.rounds, config.sampling, len(compared.seeds)) == (1000, "uniform:16", 3)
        assert {point.step_size for point in grid} == {0.1, 0.01, 0.001}
        assert len(grid) == 12
        assert not compared.common_step_sizes


STEPS = {"steps-shakespeare": 2, "steps-cifar100": 1, "steps-plays": 2}
"""The experiments that tune both step sizes, and their methods at smoke scale."""
HELD_OUT = {"steps-synthetic": 1, "steps-synthetic-network": 1}
"""The same, on data that are generated; together they are steps-held-out."""


@pytest.mark.parametrize("scale", ["laptop", "smoke"])
@pytest.mark.parametrize("experiment", STEPS | HELD_OUT)
def test_load_experiments_that_tune_both_step_sizes(
    tmp_path: Path, experiment: str, scale: str
) -> None:
    data = None if experiment in HELD_OUT else tmp_path
    compared = real.load(experiment, scale, tmp_path / "out", data)
    assert compared.tune.search == "descent"
    assert compared.base.data.arguments.get("folder") == (data and str(data))  # type: ignore[union-attr]
    names = [variant.name for variant in compared.variants]
    assert len(names) == len(set(names)) >= (STEPS | HELD_OUT)[experiment]
    for variant in compared.variants:
        (start,), given = compared.grid(variant), compared.given(variant)
        assert start in given
        assert len({point.step_size for point in given}) == 2
        assert len({point.server_step_size for point in given}) == 2
        config = compared.trial(variant, start, 0).config
        assert isinstance(config.step_size, ScheduleSpec)
        assert config.step_size.arguments["step_size"] == start.step_size
        repeats = range(compared.tune.repeats)
        short = [compared.trial(variant, start, None, repeat).config for repeat in repeats]
        assert {one.seed for one in short}.isdisjoint(compared.seeds)
        assert {one.evaluation and one.evaluation.data for one in short} == {"training"}
    if scale == "laptop":  # what the picture and the default of the study need
        assert {"FedAvg", "rho = 1", "FedShuffle (rho = inf)"} <= set(names)
        assert len(compared.seeds) == 3
    with pytest.raises(FedShuffleError, match="unknown scale 'paper'"):
        real.load(experiment, "paper", tmp_path / "out")


DATA = {"plays": plays.FILE}  # a file of another data set's folder


def data_for(name: str) -> None:
    folder = os.environ.get("FEDSHUFFLE_DATA")
    if not folder or not (Path(folder) / DATA.get(name, name)).exists():
        pytest.skip(f"set FEDSHUFFLE_DATA to a folder that holds {DATA.get(name, name)!r}")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["shakespeare", "cifar100", *STEPS])
def test_an_experiment_at_smoke_scale(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    experiment: str,
) -> None:
    data_for(experiment.removeprefix("steps-"))
    out = tmp_path / "out"
    words = ["reproduce", experiment, "--scale", "smoke", "--out", str(out)]
    assert command(monkeypatch, *words) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["complete"] is True
    assert results["command"].startswith(f"fedshuffle reproduce {experiment} --scale smoke")
    assert len(results["curves"]) == STEPS.get(experiment, 8)
    for curve in results["curves"]:
        assert [run["diverged"] for run in curve["runs"]] == [False]
        assert curve["runs"][0]["history"][-1].keys() >= {"accuracy", "loss", "training_loss"}
    assert (out / "report.html").exists()
    assert "FedAvg" in capsys.readouterr().out
    for curve in results["curves"] if experiment in STEPS else []:
        sizes = {(trial["step_size"], trial["server_step_size"]) for trial in curve["tuning"]}
        assert all(len(set(axis)) > 1 for axis in zip(*sizes, strict=True))


@pytest.mark.slow
def test_held_out_data_at_smoke_scale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["reproduce", "steps-held-out", "--scale", "smoke", "--out", str(tmp_path), "--json"]
    assert command(monkeypatch, *words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["data"] for row in rows} == {name.removeprefix("steps-") for name in HELD_OUT}
    assert not any(row["diverged"] for row in rows)
