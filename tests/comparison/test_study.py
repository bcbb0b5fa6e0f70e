"""Which runs a comparison needs: tuning, wider grids and the best point."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedshuffle import FedShuffleError, comparison
from fedshuffle._terminal import Console
from fedshuffle.comparison import GridPoint
from fedshuffle.comparison.results import Results
from fedshuffle.comparison.runner import Study
from fedshuffle.comparison.spec import Criterion
from fedshuffle.reports.comparison.tables import print_results
from fedshuffle.reports.comparison.warnings import annotate
from fedshuffle.tuning.search import Point
from tests.comparison.project import (
    CONFIG,
    FLOOR,
    closed_form,
    project,
    write_run,
)

pytestmark = pytest.mark.xdist_group("comparison")  # they share one comparison


def tuned(
    folder: Path,
    sizes: list[float],
    annotate: Callable[[Results], None] = annotate,
    **changes: Any,
) -> Results:
    """The results of FedShuffle alone with this grid."""
    changes = {
        "compare.methods": ["fedshuffle"],
        "compare.step_sizes": sizes,
        "compare.seeds": [0],
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    text = CONFIG.replace("common_step_sizes = [0.1, 4.0]\n", "")
    return comparison.load(project(folder, text), changes).run(jobs=1, annotate=annotate)


def trials_of(results: Results) -> dict[float, bool]:
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
def test_the_grid_widens_up_to_its_limit(tmp_path: Path) -> None:
    results = tuned(tmp_path, [0.001, 0.002], compare__tune__widen=4)
    assert list(trials_of(results)) == [0.001, 0.002, 0.004, 0.008]
    [warning] = results["warnings"]
    assert (warning["kind"], warning["method"]) == ("edge", "fedshuffle")
    assert "0.008" in warning["text"]
    shown = Console(record=True, width=100, file=io.StringIO())
    print_results(shown, results, Path())
    said = shown.export_text()
    assert said.index("edge") < said.index("own best step size")  # above the table
    fixed = tuned(tmp_path / "fixed", [0.001, 0.002], compare__tune__widen=1)
    assert list(trials_of(fixed)) == [0.001, 0.002]


BOTH: dict[str, Any] = {"compare__server_step_sizes": [1], "compare__tune__search": "descent"}


def test_a_descent_tunes_both_step_sizes(tmp_path: Path) -> None:
    """Each round multiplies the distance by 1 - step size * server step size."""
    results = tuned(tmp_path, [0.1], **BOTH)
    [curve] = results["curves"]
    trials = {(t["step_size"], t["server_step_size"]): t for t in curve["tuning"]}
    assert list(trials) == [
        (0.1, 1.0),
        *((0.032, 1.0), (0.32, 1.0), (0.1, 0.32), (0.32, 0.32), (0.1, 3.2), (0.032, 3.2)),
        *((1.0, 1.0), (1.0, 0.32), (0.32, 3.2)),
        *((3.2, 1.0), (3.2, 0.32), (1.0, 3.2)),
    ]
    for (step, server), trial in trials.items():
        assert trial["diverged"] == (step * server > 3)
        if not trial["diverged"]:
            assert trial["value"] == pytest.approx(closed_form(step * server, 6), rel=1e-6)
        assert trial["added"] == ((step, server) != (0.1, 1.0))
    assert (curve["step_size"], curve["server_step_size"]) == (1.0, 1.0)
    assert [run["folder"] for run in curve["runs"]] == ["runs/fedshuffle_step1.0_seed0"]
    assert (tmp_path / "out/runs/tune_fedshuffle_step0.32_server3.2/outcome.json").exists()
    assert "server_step_size" not in results["settings"]
    assert results["warnings"] == []
    steps = [record["total_steps"] for record in curve["runs"][0]["history"]]
    assert steps == [4 * record["round"] for record in curve["runs"][0]["history"]]


@pytest.mark.slow
def test_a_descent_resumes_after_an_interruption(tmp_path: Path) -> None:
    whole = tuned(tmp_path / "whole", [0.1], **BOTH)
    calls = 0

    def interrupt(results: Results) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "rest", [0.1], interrupt, **BOTH)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "rest").rglob("outcome.json")}
    assert 4 <= len(stamps) < 12
    rest = tuned(tmp_path / "rest", [0.1], **BOTH)
    assert rest["curves"] == whole["curves"]
    assert rest["complete"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


@pytest.mark.parametrize(("search", "trials"), [("grid", 0), ("descent", 2)])
def test_a_single_step_size_is_tuned_only_by_a_descent(
    tmp_path: Path, search: str, trials: int
) -> None:
    changes = {"compare.step_sizes": [1], "compare.tune.search": search}
    compared = comparison.load(project(tmp_path), changes)
    variant = compared.variants[0]
    assert compared.tuned(variant) == bool(trials)
    assert [point.step_size for point in compared.grid(variant)] == [1]
    assert len(compared.lattice(variant).untried({(1.0, 1.0, 0.0, math.inf): 2.0})) == trials
    fixed = comparison.load(project(tmp_path), {**changes, "compare.tune.widen": 1})
    assert not fixed.tuned(variant)  # there is nothing else to try


def test_a_descent_starts_in_the_middle_of_the_grid(tmp_path: Path) -> None:
    changes = {"compare.step_sizes": [1, 10, 100], "compare.server_step_sizes": [1, 2]}
    compared = comparison.load(project(tmp_path), {**changes, "compare.tune.search": "descent"})
    variant = compared.variants[0]
    assert compared.grid(variant) == [GridPoint(10.0, 2.0, 0.0, math.inf)]
    assert len(compared.given(variant)) == 6


@pytest.mark.parametrize("search", ["grid", "descent"])
def test_weight_decay_and_clipping_are_varied_at_the_best_step_size(
    tmp_path: Path, search: str
) -> None:
    compared = comparison.load(
        project(tmp_path),
        {"compare.step_sizes": [1, 3], "compare.clip": [5, "none"], "compare.tune.search": search},
    )
    lattice = compared.lattice(compared.variants[0])
    tried = [(s, 1.0, 0.0, clip) for s in (0.33, 1.0, 3.0) for clip in (5.0, math.inf)]
    losses: dict[Point, float | None] = dict.fromkeys(tried, 2.0)
    assert lattice.untried({**losses, (3.0, 1.0, 0.0, 5.0): 1.0}) == [(9.0, 1.0, 0.0, 5.0)]
    del losses[1.0, 1.0, 0.0, math.inf]
    assert lattice.untried({**losses, (1.0, 1.0, 0.0, 5.0): 1.0}) == [(1.0, 1.0, 0.0, math.inf)]


def test_a_failed_run_does_not_widen_the_grid(tmp_path: Path) -> None:
    compared = comparison.load(project(tmp_path), {"compare.step_sizes": [1, 2]})
    study = Study(compared, tmp_path / "out", Criterion("accuracy", True))
    variant = compared.variants[0]
    for trial in study.tuning(variant)[0]:
        study.prepare(trial)
        study.fail(trial, "out of memory")
    assert len(study.tuning(variant)[0]) == 2


# The choice, from folders made by hand


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
def test_the_best_point_is_chosen(
    tmp_path: Path, found: list[Any], higher: bool, want: float
) -> None:
    sizes = {"compare.step_sizes": [1, 2, 3], "compare.tune.metric": "accuracy"}
    compared = comparison.load(project(tmp_path), {**sizes, "compare.tune.widen": 1})
    variant = compared.variants[0]
    study = Study(compared, tmp_path / "out", Criterion("accuracy", higher))
    for trial, value in zip(study.tuning(variant)[0], found, strict=True):
        assert study.tuning(variant)[1] is None
        lost = value == "diverged"
        write_run(study, trial, "diverged" if lost else "finished", None if lost else value)
        study.update(trial)
    again = Study(compared, tmp_path / "out", Criterion("accuracy", higher))  # all from the folders
    chosen = again.tuning(variant)[1]
    assert chosen is not None
    assert chosen.step_size == want
    assert [group for _, group, *_ in again.replicates()].count("own") == 1
    assert again.undecided() == 2  # those of the other method


def test_a_damaged_folder(tmp_path: Path) -> None:
    compared = comparison.load(project(tmp_path))
    study = Study(compared, tmp_path / "out", Criterion("loss", False))
    trial = study.trials()[0]
    study.prepare(trial)
    (study.folder(trial) / "outcome.json").write_text("{")
    with pytest.raises(FedShuffleError, match="is damaged"):
        Study(compared, tmp_path / "out", Criterion("loss", False))


@pytest.mark.slow
def test_a_search_uses_runs_that_another_one_left(tmp_path: Path) -> None:
    """Such as those of a search from another point, which this one meets only later."""
    tuned(tmp_path, [0.32], **BOTH)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("outcome.json")}
    results = tuned(tmp_path, [0.032], **BOTH)
    met = {(t["step_size"], t["server_step_size"]) for t in results["curves"][0]["tuning"]}
    assert (0.32, 3.2) in met
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


@pytest.mark.slow
def test_a_point_counts_by_the_mean_of_its_repeats(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sampling": "uniform:2", "compare__tune__widen": 1}
    one, other = (
        tuned(tmp_path / str(seed), [0.1, 0.3], **changes, compare__tune__seed=seed)
        for seed in (5, 6)
    )
    changes |= {"compare__tune__seed": 5, "compare__tune__repeats": 2}
    both = tuned(tmp_path / "both", [0.1, 0.3], **changes)
    [[first], [second], [mean]] = ([c["tuning"] for c in x["curves"]] for x in (one, other, both))
    assert [t["step_size"] for t in mean] == [0.1, 0.3]
    for a, b, found in zip(first, second, mean, strict=True):
        values = [x["value"] for x in (a, b) if x["value"] is not None]
        assert values[0] != values[1]
        assert found["value"] == pytest.approx(sum(values) / 2, rel=1e-12)
    assert (tmp_path / "both/out/runs/tune_fedshuffle_step0.1_repeat1/outcome.json").exists()


def test_a_point_diverges_with_one_of_its_repeats(tmp_path: Path) -> None:
    text = CONFIG.replace("common_step_sizes = [0.1, 4.0]\n", "")
    changes = {"compare.methods": ["fedshuffle"], "compare.tune.repeats": 2}
    compared = comparison.load(project(tmp_path, text), changes)
    study = Study(compared, tmp_path, Criterion("loss", False))
    variant, point = compared.variants[0], compared.grid(compared.variants[0])[0]
    fine, lost = (compared.trial(variant, point, None, repeat) for repeat in (0, 1))
    fine.outcome, fine.history = "finished", [{"loss": 1.0}]
    lost.outcome = "diverged"
    assert study.scores([fine]) == {point: 1.0}
    assert study.scores([fine, lost]) == {point: None}
