"""The study of step sizes: its tables, files and picture, and the runs at step sizes of tune."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedshuffle import config
from fedshuffle.comparison import Comparison, Variant
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import real, step_sizes
from fedshuffle.experiments.studies import csv_of, run_lines, tuning_lines
from fedshuffle.training import Simulation
from fedshuffle.tuning.short_runs import ShortRuns
from tests.cli.test_cli import run as command
from tests.config.project import CONFIG, MODULE
from tests.reports.examples import curve, results, run, trial

VALUES = 0.1, 0.2, 0.3


@pytest.fixture(autouse=True)
def two_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the study tunes by default, here these."""
    names = "FedAvg", "FedShuffle (rho = inf)"
    data = step_sizes.DATA_SETS | step_sizes.HELD_OUT
    monkeypatch.setattr(step_sizes, "DEFAULT_METHODS", dict.fromkeys(data, names))


def made(seed: int, last: float, **facts: Any) -> dict[str, Any]:
    return run(seed, *VALUES, last, **facts)


def study() -> Any:
    """Two methods with two seeds, one of which diverged, and one that always diverged."""
    tried = [trial(0.3, 0.7), trial(3.0, None, True), trial(0.3, 0.9, server_step_size=0.1)]
    lost = made(2, 0.9, diverged=True)
    small = {"accuracy": 0.25, "loss": None}
    return results(
        curve("fedavg", made(1, 0.5), lost, label="FedAvg", tuning=tried),
        curve(
            "fedshuffle",
            made(1, 0.5, small_decile=small),
            made(2, 0.7, small_decile=small),
            label="FedShuffle (rho = inf)",
            step_size=0.032,
            settings={"sampling": "importance:5"},
        ),
        curve("fednova", made(1, 0.2, diverged=True), label="FedNova (sum)"),
        curve("fedavg", made(1, 0.1), label="FedAvg", group="common:0.1"),
    )


def cells(table: str) -> list[list[str]]:
    """The cells of a table in Markdown, without the line below its head."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert set("".join(lines[1])) <= set("-:")
    return [lines[0], *lines[2:]]


def test_the_table_has_means_spreads_and_what_diverged() -> None:
    head, fedavg, fedshuffle, fednova = cells(step_sizes.table(study()))
    titles = ["method", "wrong", "step sizes", "accuracy", "small clients", "training loss"]
    assert head == [*titles, "local steps"]
    # 1/2 (1/6 - 1/14 + 1/3 - 4/14 + 9/14 - 1/2) = 1/7
    assert fedavg == [
        *("FedAvg", "14.3%", "0.3, 1", "50.00 (1 diverged)", "", "1.250"),
        "20",
    ]
    spread = 100 * 0.2 / np.sqrt(2)
    assert fedshuffle == [
        *("FedShuffle (rho = inf)", "0", "0.032, 1", f"60.00 ± {spread:.2f}", "25.00 ± 0.00"),
        *(f"1.150 ± {spread / 100:.3f}", "30"),
    ]
    assert fednova[3:] == ["diverged"] * 3 + [""]


def test_a_summary_has_a_line_per_run() -> None:
    lines = list(run_lines("plays", study()))
    assert [(x["method"], x["seed"], x["diverged"]) for x in lines] == [
        *(("FedAvg", 1, False), ("FedAvg", 2, True), ("FedShuffle (rho = inf)", 1, False)),
        *(("FedShuffle (rho = inf)", 2, False), ("FedNova (sum)", 1, True)),
    ]
    assert lines[3] == {
        "data": "plays",
        "method": "FedShuffle (rho = inf)",
        "own_sampling": "importance:5",
        "step_size": 0.032,
        "server_step_size": 1.0,
        "seed": 2,
        "diverged": False,
        "round": 4,
        "total_steps": 40,
        "accuracy": 0.7,
        "loss": pytest.approx(1.3),
        "training_loss": pytest.approx(1.05),
        "accuracy_small_decile": 0.25,
        "loss_small_decile": None,
    }


def test_a_run_without_an_evaluation_has_a_line() -> None:
    early = results(curve("fedavg", {**made(1, 0.5), "diverged": True, "history": []}))
    (line,) = run_lines("plays", early)
    assert line["diverged"] is True
    assert "accuracy" not in line


def test_tuning_has_a_line_per_point_and_marks_the_chosen() -> None:
    lines = list(tuning_lines("plays", study()))
    assert [tuple(line.values()) for line in lines] == [
        ("plays", "FedAvg", 0.3, 1.0, 0.7, False, True),
        ("plays", "FedAvg", 3.0, 1.0, None, True, False),
        ("plays", "FedAvg", 0.3, 0.1, 0.9, False, False),
    ]


def test_csv_has_all_keys_and_six_digits() -> None:
    text = csv_of([{"a": 1 / 3, "b": "x, y"}, {"a": 12, "c": None, "d": True}])
    assert text == 'a,b,c,d\n0.333333,"x, y",,\n12,,,True\n'
    assert csv_of([]) == "\n"


def defaults(**changes: Any) -> list[dict[str, Any]]:
    capped = "FedShuffle (rho = inf)"
    row = {"data": "plays", "seed": 0, "step_size": 0.32, "server_step_size": 1.0, "share": 0.9}
    row |= {"diverged": False}
    return [
        {**row, "method": "FedAvg", "accuracy": 0.5},
        {**row, "method": "FedAvg", "accuracy": 0.6, "step_size": 0.1},
        {**row, "method": "FedAvg", "accuracy": 0.7},
        {**row, "method": capped, "accuracy": 0.4, **changes},
        {**row, "method": capped, "accuracy": None, "diverged": True},
        {**row, "data": "cifar100", "method": capped, "accuracy": 0.4},
    ]


def read(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_of(rows))))


def test_the_default_stands_beside_the_best_of_the_study() -> None:
    _, fedavg, capped = cells(step_sizes.default_table(read(defaults()), {"plays": study()}))
    # The method with the highest mean of those that never diverged.
    best = "60.00 ± 14.14 (FedShuffle (rho = inf))"
    assert fedavg[:3] == ["Plays", "FedAvg", "0.32, 1; 0.1, 1"]
    assert fedavg[3:] == ["60.00 ± 10.00", "50.00", "+10.00", best]
    assert capped[1:3] == ["FedShuffle (rho = inf)", "0.32, 1"]
    assert capped[3:] == ["40.00 (1 diverged)", "60.00 ± 14.14", "-20.00", best]


def test_a_default_that_diverged_or_has_no_rival_has_no_difference() -> None:
    rows = read(defaults(diverged=True, accuracy=None))
    own = results(curve("fedavg", made(1, 0.5, diverged=True), label="FedAvg"))
    _, fedavg, capped = cells(step_sizes.default_table(rows, {"plays": own}))
    assert fedavg[3:] == ["60.00 ± 10.00", "", "", ""]
    assert capped[3:] == ["diverged", "", "", ""]


PAGE = """# Step sizes

Before <!-- generated: plays -->
an old table
<!-- end -->

<!-- generated: cifar100 -->
stays
<!-- end -->

<!-- generated: default -->
<!-- end -->

<!-- generated: held-out-default -->
<!-- end -->
After
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of the study, with one data set, and that of the docs."""
    made, docs = tmp_path / "study", tmp_path / "docs"
    for folder in (made / "plays", made / "default", docs / "research"):
        folder.mkdir(parents=True)
    (made / "plays" / "results.json").write_text(json.dumps(study()))
    (made / "plays" / "curves.csv").write_text("method,round\nFedAvg,1\n")
    (made / "default" / "default.csv").write_text(csv_of(defaults()))
    (docs / "research" / "step-sizes.md").write_text(PAGE, encoding="utf-8")
    return made, docs


def test_write_what_the_docs_show(folders: tuple[Path, Path]) -> None:
    made, docs = folders
    step_sizes.write(*folders)
    research = docs / "research"
    page = (research / "step-sizes.md").read_text(encoding="utf-8")
    default = step_sizes.default_table(read(defaults()), {"plays": study()})
    want = PAGE.replace("an old table", step_sizes.table(study()))
    begin = "<!-- generated: default -->\n"
    assert page == want.replace(begin, f"{begin}{default}\n")
    assert sorted(path.name for path in research.iterdir()) == [
        *("step-sizes-default.csv", "step-sizes-plays-curves.csv", "step-sizes-plays-tuning.csv"),
        *("step-sizes-plays.csv", "step-sizes.md"),
    ]
    for name, rows in [("", run_lines), ("-tuning", tuning_lines)]:
        text = (research / f"step-sizes-plays{name}.csv").read_text(encoding="utf-8")
        assert text == csv_of(rows("plays", study()))
    copies = {"step-sizes-plays-curves.csv": "plays/curves.csv"}
    copies["step-sizes-default.csv"] = "default/default.csv"
    for copy, original in copies.items():
        assert (research / copy).read_bytes() == (made / original).read_bytes()
    with Image.open(docs / "images" / "step-sizes.png") as image:
        assert min(image.size) > 300
    before = page
    step_sizes.write(*folders)  # again, over what was written
    assert (research / "step-sizes.md").read_text(encoding="utf-8") == before


def test_held_out_data_have_files_and_a_table_of_their_own(folders: tuple[Path, Path]) -> None:
    made, docs = folders
    folder, rows = made / "held-out", [{**row, "data": "synthetic"} for row in defaults()]
    for name in ("synthetic", "synthetic-network", "default"):
        (folder / name).mkdir(parents=True)
        (folder / name / "results.json").write_text(json.dumps(study()))
    (folder / "default" / "default.csv").write_text(csv_of(rows))
    step_sizes.write(made, docs)
    research = docs / "research"
    lines = (research / "step-sizes-held-out.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [
        name for name in ("synthetic", "synthetic-network") for _ in run_lines(name, study())
    ]
    assert (research / "step-sizes-held-out-default.csv").read_text() == csv_of(rows)
    assert (research / "step-sizes-held-out-tuning.csv").exists()
    page = (research / "step-sizes.md").read_text(encoding="utf-8")
    _, table = page.split("<!-- generated: held-out-default -->\n")
    (_, *found) = cells(table.split("\n<!-- end -->")[0])
    assert [row[:2] for row in found] == [
        ["linear", "FedAvg"],
        ["linear", "FedShuffle (rho = inf)"],
    ]
    assert found[0][5] == "+10.00"  # 60 against 50, the mean of the run that did not diverge


def test_a_page_keeps_what_was_not_run(folders: tuple[Path, Path]) -> None:
    made, docs = folders
    (made / "default" / "default.csv").unlink()
    step_sizes.write(made, docs)
    page = (docs / "research" / "step-sizes.md").read_text(encoding="utf-8")
    assert page == PAGE.replace("an old table", step_sizes.table(study()))


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="steps-shakespeare"):
        step_sizes.write(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs").exists()


def test_the_picture_has_curves_over_rounds_and_over_local_steps() -> None:
    figure = step_sizes.draw({"cifar100": study(), "plays": study()})
    axes: Any = np.array(figure.axes, dtype=object).reshape(2, 2)
    assert [one.get_title() for one in axes[0]] == ["CIFAR-100", "Plays"]
    for one in axes.T:
        over_rounds, over_steps = one
        assert [line.get_label() for line in over_rounds.lines] == [
            *("FedAvg", "FedShuffle (rho = inf)"),
        ]
        assert over_rounds.lines[0].get_ydata() == pytest.approx([10, 20, 30, 50])
        assert over_rounds.lines[1].get_ydata() == pytest.approx([10, 20, 30, 60])
        assert over_rounds.lines[1].get_xdata() == pytest.approx([1, 2, 3, 4])
        assert over_steps.lines[1].get_xdata() == pytest.approx([7.5, 15, 22.5, 30])  # the mean
        looks = {(line.get_color(), line.get_linestyle()) for line in over_rounds.lines}
        assert len(looks) == 2


# Runs at the step sizes that tune finds


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run in place of the study's, and where the results go."""
    (tmp_path / "mine.py").write_text(MODULE)
    text = CONFIG.replace('momentum = "mvr:0.5"\nout = "run"\n', "").replace(
        "every = 3", "every = 1"
    )
    text = text.replace("step_size = 0.2", 'step_size = "drops:0.2"')
    (tmp_path / "config.toml").write_text(text.replace("every = 2", "every = 2\ntraining = 2"))
    one = Variant("fedavg-rr", named="FedAvg")
    other = Variant("fedshuffle", named="FedShuffle (rho = inf)", changes=(("sampling", "full"),))
    base = config.load(tmp_path / "config.toml")
    made, asked = Comparison(base, methods=(one, other), step_sizes=(0.2,)), []

    def load(*words: Any) -> Any:
        asked.append(words)
        return made

    monkeypatch.setattr(real, "load", load)
    monkeypatch.setattr(step_sizes, "SEEDS", (0, 1))
    return tmp_path / "out"


def test_the_default_is_tuned_then_trained(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = step_sizes.reproduce_default(tiny, data_sets=["plays"])
    methods = list(step_sizes.DEFAULT_METHODS["plays"])
    assert [(row["data"], row["method"], row["seed"]) for row in rows] == [
        ("plays", method, seed) for method in methods for seed in (0, 1)
    ]
    assert len(capsys.readouterr().err.splitlines()) == len(rows)
    assert (tiny / "default.csv").read_text() == csv_of(rows)
    first = config.load(tiny / "plays" / "FedAvg" / "seed0" / "config.toml")
    tried = (tiny / "plays" / "FedAvg" / "tuning.jsonl").read_text().splitlines()
    assert json.loads(tried[0])["step_size"] == step_sizes.FIRST_STEP_SIZE
    assert first.method == "fedavg-rr"
    other = config.load(tiny / "plays" / "FedShuffle-rho-inf-" / "seed1" / "config.toml")
    assert (other.method, other.sampling) == ("fedshuffle", "full")  # as in the study
    assert isinstance(first.step_size, config.ScheduleSpec)
    assert first.step_size.name == "drops"
    assert first.step_size.arguments["step_size"] == rows[0]["step_size"]
    last = (tiny / "plays" / "FedAvg" / "seed0" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["accuracy"] == rows[0]["accuracy"]
    assert json.loads(last)["training_loss"] == rows[0]["training_loss"]
    assert not any(row["diverged"] for row in rows)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("this was done before")

    monkeypatch.setattr(ShortRuns, "try_out", never)
    monkeypatch.setattr(Simulation, "__init__", never)
    assert step_sizes.reproduce_default(tiny, data_sets=["plays"], progress=False) == rows
    assert capsys.readouterr().err == ""


def test_held_out_data_are_compared_then_tuned(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def run_part(part: Comparison, out: Path, name: str, *options: Any) -> None:
        compared.append((name, *options))

    monkeypatch.setattr(step_sizes, "run_part", run_part)
    monkeypatch.setattr(step_sizes, "DEFAULT_METHODS", {})  # so all methods
    monkeypatch.setattr(step_sizes, "SEEDS", (0,))
    rows = step_sizes.reproduce_held_out(tiny, "smoke", 1, progress=False)
    names = list(step_sizes.HELD_OUT)
    assert compared == [(name, "steps-held-out --scale smoke", 1, False) for name in names]
    methods = "FedAvg", "FedShuffle (rho = inf)"
    assert [(row["data"], row["method"]) for row in rows] == [
        (name, method) for name in names for method in methods
    ]
    assert (tiny / "default" / "default.csv").exists()


def test_an_interrupted_default_goes_on_where_it_was(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step_sizes.reproduce_default(tiny / "whole", data_sets=["plays"])
    run, begun = config.Config.run, []

    def interrupted(self: config.Config, out: Path, **options: Any) -> Any:
        begun.append(out)
        found = run(self, out, **options)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(config.Config, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step_sizes.reproduce_default(tiny / "other", data_sets=["plays"])
    assert step_sizes.reproduce_default(tiny / "other", data_sets=["plays"]) == whole
    assert len(begun) == len(set(begun)) == len(whole)


def test_the_command_prints_the_rows(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_sizes, "SEEDS", (0,))
    words = ["reproduce", "steps-default", "--out", str(tiny)]
    assert command(monkeypatch, *words, "--json") == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["data"] for row in rows] == [name for name in step_sizes.DATA_SETS for _ in "12"]
    assert captured.err == ""
    assert command(monkeypatch, *words) == 0
    assert capsys.readouterr().out == csv_of(rows)
    assert command(monkeypatch, *words, "--scale", "smoke") == 2
    assert "--scale changes" in capsys.readouterr().err
