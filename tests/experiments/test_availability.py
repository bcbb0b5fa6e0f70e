"""The study of clients that come and go: its population, tables, picture and files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedshuffle import config
from fedshuffle.availability import Trace
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import availability, day_and_night, digits, studies
from fedshuffle.experiments.day_and_night import CLIENTS, DAY, DAYS, hours, night
from tests.cli.test_cli import run as command
from tests.experiments.test_step_sizes import cells
from tests.reports.examples import curve, results, run


def test_clients_are_there_for_their_hours_of_every_day() -> None:
    there = day_and_night.trace("day-and-night")
    assert there.period == DAY
    by_hour = np.array([there.probability(hour) for hour in range(DAY)])
    assert (by_hour.sum(axis=0) == hours()).all()
    dark = np.r_[0:8, 20:DAY]
    assert by_hour[dark][:, night()].sum() > 0.75 * by_hour[:, night()].sum()


def test_a_drift_ends_with_the_hours_that_it_began_without() -> None:
    there = day_and_night.there("drift")
    assert there.shape == (DAYS * DAY, CLIENTS)
    assert there.any(axis=1).all()
    by_day = there.reshape(DAYS, DAY, CLIENTS).sum(axis=1)
    assert (by_day[0] == hours()[::-1]).all()
    assert (by_day[-1] == hours()).all()
    assert (np.diff(by_day[:, night()], axis=0) <= 0).all()


def test_night_clients_hold_fewer_examples_and_other_digits() -> None:
    training, test = day_and_night.clients(), day_and_night.clients("test")
    assert training.sizes.sum() + test.sizes.sum() == 1797
    assert np.abs(training.sizes - 2 * test.sizes).max() <= 2
    assert np.corrcoef(training.sizes, hours())[0, 1] > 0.9
    by_night = np.repeat(night(), training.sizes)
    labels = np.asarray(training.fields[1])
    assert labels[by_night].mean() > 6 > 4.5 > labels[~by_night].mean()
    # Nothing is in both parts.
    rows, _, tested = digits.split(hours())
    assert not set(rows[tested]) & set(rows[~tested])


def test_all_methods_meet_the_population_and_tuning_sees_no_test_data(tmp_path: Path) -> None:
    compared = availability.load("drift", tmp_path)
    names = {variant.name: compared.config(variant) for variant in compared.variants}
    assert {one.availability for one in names.values()} == {"trace:trace.csv"}
    assert names["FedShuffle, counted p"].probabilities == "estimate:bayes"
    assert names["FedShuffle, known p"].probabilities is None
    assert not {100, 101} & set(compared.seeds)
    assert (compared.tune.seed, compared.tune.repeats, compared.tune.data) == (100, 2, "training")
    assert compared.short.rounds == compared.base.rounds == DAYS * DAY  # a drift is seen in whole
    trace = Trace.read(tmp_path / "trace.csv", range(CLIENTS))
    there = [trace.probability(round) for round in range(DAYS * DAY)]
    assert (np.array(there) == day_and_night.there("drift")).all()


def study(folder: Path) -> Any:
    """FedAvg with two seeds, and a method that diverged; night clients are right half as often."""
    found = results(
        curve("fedavg", run(1, 0.5, folder="a"), run(2, 0.7, folder="b"), label="FedAvg"),
        curve("fedshuffle", run(1, 0.9, folder="c", diverged=True), label="FedShuffle, counted p"),
    )
    for name, share in {"a": 0.4, "b": 0.8}.items():
        lines = ["client,examples,accuracy"]
        lines += [f"{i},{1 + i % 2},{share if by else 1.0}" for i, by in enumerate(night())]
        (folder / name).mkdir(parents=True)
        (folder / name / "clients.csv").write_text("\n".join(lines))
    return found


def test_a_line_per_run_and_a_table_of_their_means(tmp_path: Path) -> None:
    lines = availability.summary("drift", study(tmp_path), tmp_path)
    assert [line["diverged"] for line in lines] == [False, False, True]
    assert [line.get("accuracy_night") for line in lines] == pytest.approx([0.4, 0.8, None])
    assert lines[0]["accuracy_day"] == 1.0
    for line in lines:
        line["accuracy_worst_decile"] = 0.25
    head, fedavg, lost = cells(availability.table(lines, "drift"))
    assert head[3:] == list(availability.COLUMNS.values())
    assert fedavg[:5] == ["FedAvg", "14%", "0.3, 1", "60.0 ± 14.1", "60.0 ± 28.3"]
    assert lost[3:] == ["diverged"] * 4
    assert len(cells(availability.table(lines, "day-and-night"))) == 1


def lines_of(*accuracies: float) -> list[dict[str, Any]]:
    """A run of each method of the picture."""
    common = {"population": "day-and-night", "diverged": False, "accuracy_day": 0.9}
    common |= dict.fromkeys(("step_size", "server_step_size", "wrong", "training_loss"), 1.0)
    common |= {"accuracy": 0.5, "accuracy_worst_decile": 0.1}
    names = zip(availability.SHOWN, accuracies, strict=True)
    return [{**common, "method": name, "accuracy_night": value} for name, value in names]


def test_the_picture_shows_who_counts_before_and_after() -> None:
    presence, counts, by_night, _ = availability.draw(lines_of(0.6, 0.8)).axes
    assert sum(bar.get_width() for bar in presence.patches) == hours().sum()  # type: ignore[attr-defined]
    before, after = (np.asarray(one.get_offsets())[:, 0] for one in counts.collections)
    assert after == pytest.approx(np.ones(CLIENTS))
    weights = day_and_night.clients().weights
    assert before @ weights == pytest.approx(1)
    assert (before * weights)[night()].sum() < 0.5 * weights[night()].sum()
    assert [text.get_text() for text in by_night.texts] == ["60%", "80%"]


def test_write_what_the_docs_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "draw", lambda lines: Figure())
    study, docs = tmp_path / "study", tmp_path / "docs"
    with pytest.raises(FedShuffleError, match="reproduce availability"):
        availability.write(study, docs)
    lines = lines_of(0.6, 0.8)
    (docs / "research").mkdir(parents=True)
    study.mkdir()
    for name in availability.FILES:
        (study / name).write_text(studies.csv_of(lines))
    page = docs / "research" / "availability.md"
    page.write_text("<!-- generated: day-and-night -->\nold\n<!-- end -->\n")
    availability.write(study, docs)
    assert availability.table(lines, "day-and-night") in page.read_text(encoding="utf-8")
    assert "old" not in page.read_text(encoding="utf-8")
    for name in availability.FILES:
        assert (docs / "research" / name).read_bytes() == (study / name).read_bytes()
    with Image.open(docs / "images" / "availability.png") as image:
        assert image.format == "PNG"


@pytest.mark.slow
def test_the_command_runs_and_a_run_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "availability", "--scale", "smoke", "--jobs", "1", "--out"]
    assert command(monkeypatch, *words, str(tmp_path / "a"), "--json") == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["population"], line["method"]) for line in lines] == [
        (population, method)
        for population in day_and_night.POPULATIONS
        for method in availability.SHOWN
    ]
    assert command(monkeypatch, *words, str(tmp_path / "a")) == 0  # nothing is left to do
    assert capsys.readouterr().out == (tmp_path / "a" / "tables.md").read_text(encoding="utf-8")
    assert command(monkeypatch, *words, str(tmp_path / "a"), "--rounds", "3") == 2
    (cell,) = (tmp_path / "a" / "drift" / "runs").glob("FedShuffle*_seed0")
    again = config.load(cell / "config.toml").run()
    assert again.history[-1]["accuracy"] == lines[-1]["accuracy"]
    assert again.history[-1]["training_loss"] == lines[-1]["training_loss"]
