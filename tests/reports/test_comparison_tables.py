"""The tables of a comparison, its warnings, and its curves as CSV."""

import csv
import io
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle.reports.comparison import answers, clients, tables, write
from fedshuffle.reports.comparison.model import Compared
from fedshuffle.reports.comparison.warnings import headlines, warnings
from tests.reports.examples import ROUNDS, curve, misleading, results, run, trial


def row(text: str, label: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")][1:]


# The table


def test_means_and_deviations_are_those_of_the_last_values() -> None:
    # By hand: (40 + 44) / 2 = 42, deviation sqrt(2^2 + 2^2) = 2.83; 30 and 31: 30.5 and 0.71.
    compared = Compared(
        results(
            curve("fedavg", run(1, 0.9, 0.30), run(2, 0.9, 0.31), step_size=10.0),
            curve("fedshuffle", run(1, 0.1, 0.40), run(2, 0.2, 0.44)),
        )
    )
    text = tables.markdown(compared)
    assert row(text, "FedAvg") == ["30.50 ± 0.71", "10"]
    assert row(text, "FedShuffle") == ["**42.00 ± 2.83**", "0.3"]
    assert (
        "Test accuracy (%) after 4 rounds, mean ± standard deviation (n - 1) over 2 seeds" in text
    )
    written = tables.latex(compared)
    assert "FedAvg & 30.50 $\\pm$ 0.71 & 10 \\\\" in written
    assert "FedShuffle & \\textbf{42.00 $\\pm$ 2.83} & 0.3 \\\\" in written
    assert written.count("\\begin{table}") == written.count("\\end{table}") == 1


def test_those_within_a_deviation_of_the_best_are_marked() -> None:
    compared = Compared(
        results(
            curve("fedshuffle", run(1, 0.40), run(2, 0.44)),  # 42 +- 2.83
            curve("fedavg", run(1, 0.39), run(2, 0.40)),  # 39.5, and 42 - 39.5 < 2.83
            curve("fednova", run(1, 0.39), run(2, 0.39)),  # 39, and 42 - 39 > 2.83
            curve("noisy", run(1, 0.30), run(2, 0.40)),  # 35, and 42 - 35 < 7.07, its own deviation
        )
    )
    text = tables.markdown(compared)
    assert row(text, "FedAvg")[0] == "*39.50 ± 0.71*"
    assert row(text, "FedNova")[0] == "39.00 ± 0.00"
    assert "\\underline{39.50 $\\pm$ 0.71}" in tables.latex(compared)
    [(_, [sentence])] = answers(compared)
    assert sentence.startswith("No momentum: FedShuffle is best, 42.00 ± 2.83%, but not clearly")
    assert "ahead of FedAvg and noisy:" in sentence
    assert "FedNova" not in sentence


@pytest.mark.usefixtures("unpainted")
def test_one_method_is_not_called_the_best(tmp_path: Path) -> None:
    found = results(curve("fedavg", run(1, 0.5), momentum="mvr:0.2"))
    told = "Exact momentum (MVR) 0.8: FedAvg reaches 50.00%."
    assert answers(Compared(found)) == [("Own best step size", [told])]
    assert "may be chance" not in write(found, tmp_path)[-1].read_text()


@pytest.mark.usefixtures("unpainted")
def test_one_seed_says_that_a_gap_may_be_chance(tmp_path: Path) -> None:
    found = results(curve("fedavg", run(1, 0.5)), curve("fedshuffle", run(1, 0.5001)))
    assert "a gap between methods may be chance" in write(found, tmp_path)[-1].read_text()


def test_a_comparison_without_finished_runs_does_not_speak_of_divergence() -> None:
    found = results(curve("fedavg"), curve("fedshuffle"), complete=False)
    assert answers(Compared(found))[0][1] == ["No momentum: no method has finished yet."]


def test_methods_with_the_same_label_are_told_apart() -> None:
    curves = [curve("a", run(1, 0.5), label="Mine"), curve("b", run(1, 0.6), label="Mine")]
    assert answers(Compared(results(*curves)))[0][1] == ["No momentum: Mine (b) is best, 60.00%."]


def test_the_lowest_loss_is_the_best_one() -> None:
    found = results(curve("fedavg", run(1, 0.5)), curve("fedshuffle", run(1, 0.75)), metric="loss")
    text = tables.markdown(Compared(found))
    assert row(text, "FedAvg")[0] == "1.500"
    assert row(text, "FedShuffle")[0] == "**1.250**"
    assert "lower is better" in text
    assert "one seed" in text


def test_results_may_define_whether_higher_is_better() -> None:
    curves = [curve("fedavg", run(1, 0.5)), curve("fedshuffle", run(1, 0.75))]
    assert row(tables.markdown(Compared(results(*curves))), "FedShuffle")[0] == "**75.00**"
    turned = Compared(results(*curves, higher_is_better=False))
    assert row(tables.markdown(turned), "FedAvg")[0] == "**50.00**"


def test_ties_are_all_best() -> None:
    compared = Compared(results(curve("fedavg", run(1, 0.5)), curve("fedshuffle", run(1, 0.5))))
    assert [line.best for line in compared.lines] == [True, True]
    assert answers(compared)[0][1] == ["No momentum: FedAvg and FedShuffle are best, 50.00%."]


def test_diverged_runs_are_excluded_from_means_and_ranks() -> None:
    lost = run(2, 0.99, diverged=True, rounds=2)
    compared = Compared(
        results(
            curve("fedavg", run(1, 0.9), lost, run(3, 0.8)),
            curve("fednova", *(run(seed, None) for seed in (1, 2, 3))),  # says nothing, but is
            curve("fedshuffle", run(1, 0.5), run(2, 0.5), run(3, 0.5)),
        )
    )
    text = tables.markdown(compared)
    assert row(text, "FedAvg")[0] == "85.00 ± 7.07 †"
    assert row(text, "FedNova")[0] == "diverged †"
    assert row(text, "FedShuffle")[0] == "**50.00 ± 0.00**"
    assert "† FedAvg, no momentum: 1 of 3 runs diverged" in text
    assert "† FedNova, no momentum: 3 of 3 runs diverged" in text
    assert "85.00 $\\pm$ 7.07$^\\dagger$" in tables.latex(compared)


def test_runs_that_have_not_ended_are_missing() -> None:
    both = {"settings": {"seeds": [1, 2], "tuning": ""}}
    done = curve("fedavg", run(1, 0.3, 0.4, 0.5, 0.6))
    compared = Compared(results(done, curve("fedshuffle"), complete=False, **both))
    text = tables.markdown(compared)
    assert row(text, "FedAvg")[0] == "**60.00** ‡"
    assert row(text, "FedShuffle")[0] == "unfinished ‡"
    assert "‡ FedAvg, no momentum: 1 of 2 runs have not finished." in text
    assert "‡ FedShuffle, no momentum: 2 of 2 runs have not finished." in text
    assert "not complete" in text
    assert "not complete" in tables.latex(compared)


def test_planned_seeds_without_a_run_are_missing() -> None:
    found = results(curve("fedavg", run(1, 0.5)), settings={"seeds": [1, 2, 3], "tuning": ""})
    assert Compared(found).lines[0].missing == 2


def test_a_table_has_a_column_for_each_momentum() -> None:
    compared = Compared(
        results(
            curve("fedavg", run(1, 0.3), momentum="global:0.1"),
            curve("fedshuffle", run(1, 0.4)),
            curve("fedshuffle", run(1, 0.2), momentum="global:0.1", step_size=1.0),
            curve("fedshuffle", run(1, 0.1), group="common:0.1", step_size=0.1),
        )
    )
    text = tables.markdown(compared)
    assert "| method | no momentum | step size | momentum 0.9 | step size |" in text
    assert row(text, "FedAvg") == ["", "", "**30.00**", "0.3"]
    assert row(text, "FedShuffle") == ["**40.00**", "0.3", "20.00", "1"]
    common = text[text.index("## Common step size 0.1") :]
    assert row(common, "FedShuffle") == ["**10.00**", "0.1"]


def test_a_server_step_size_is_shown_if_it_tells_anything() -> None:
    plain = curve("fedavg", run(1, 0.3))
    tuned = [trial(0.3, 0.2, server_step_size=0.5), trial(0.3, 0.3), trial(0.3, 0.1)]
    for other in ({"server_step_size": 2.0}, {"tuning": tuned}):
        compared = Compared(results(plain, curve("fedshuffle", run(1, 0.4), **other)))
        text = tables.markdown(compared)
        assert "| method | no momentum | step size | server |" in text
        assert row(text, "FedAvg") == ["30.00", "0.3", "1"]
        size = f"{other.get('server_step_size', 1.0):g}"
        assert row(text, "FedShuffle")[:3] == [row(text, "FedShuffle")[0], "0.3", size]
        assert f"& 0.3 & {size} \\\\" in tables.latex(compared)
    assert "server" not in tables.markdown(Compared(results(plain)))
    assert tables.summary(compared.results, Path())["results"][0]["server_step_size"] == 1.0


def test_the_settings_of_a_variant_are_told() -> None:
    own = {"method": "fedavg", "sampling": "importance:10", "work.clip": "inf"}
    found = results(
        curve("by size", run(1, 0.4), settings=own),
        curve("again", run(1, 0.3), settings={"method": "fedavg"}),
        curve("fedavg", run(1, 0.3)),
    )
    text = tables.markdown(Compared(found))
    assert "- by size is fedavg with sampling importance:10, work.clip inf." in text
    assert "- again is fedavg." in text
    assert text.count(" is fedavg") == 2


@pytest.mark.usefixtures("unpainted")
def test_groups_of_clients(tmp_path: Path) -> None:
    """By hand: mean and deviation over the runs that ended."""
    runs = []
    for seed, mean, worst, small in ((1, 0.5, 0.1, 0.2), (2, 0.6, 0.2, 0.4), (3, 0.9, 0.9, 0.9)):
        one = run(seed, 0.5, diverged=seed == 3, small_decile={"accuracy": small, "auc": None})
        one["history"][-1].update(accuracy_mean=mean, accuracy_worst_decile=worst)
        runs.append(one)
    compared = Compared(results(curve("fedavg", *runs), curve("fednova", run(1, 0.5))))
    first, second = compared.lines
    wanted = ["55.00 ± 7.07", "15.00 ± 7.07", "30.00 ± 14.14"]
    assert clients.group_values(first, "accuracy") == wanted
    assert clients.group_values(second, "accuracy") == ["", "", ""]
    page = write(compared.results, tmp_path)[-1].read_text(encoding="utf-8")
    assert page.index("Groups of clients") < page.index("30.00 ± 14.14")
    lines = list(csv.DictReader(io.StringIO(tables.csv_text(compared))))
    assert [line["accuracy_small_decile"] for line in lines[:4]] == ["", "", "", "0.2"]
    assert lines[0]["server_step_size"] == "1.0"
    assert [line["total_steps"] for line in lines[4:8]] == ["10", "20", "30", "40"]
    without = write(results(curve("fedavg", run(1, 0.5))), tmp_path / "other")[-1]
    assert "Groups of clients" not in without.read_text(encoding="utf-8")


@pytest.mark.usefixtures("unpainted")
def test_warnings_come_before_the_ranking(tmp_path: Path) -> None:
    compared = Compared(misleading())
    found = [(kind, line.method.name) for kind, line, _ in warnings(compared)]
    assert found == [("diverged", "fednova"), ("edge", "fedavg"), ("majority", "fedshuffle")]
    write(misleading(), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for kind, word in (("diverged", "1 of 1 runs diverged"), ("edge", "largest"), ("", "72.00%")):
        assert page.index(word) < page.index("is best"), kind
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text.index("largest tried") < text.index("| method |")
    assert row(text, "FedAvg") == ["**90.00** §", "0.3"]
    assert row(text, "FedShuffle") == ["73.00 ¶", "0.3 to 13.2"]
    assert "$^\\S$" in (tmp_path / "table.tex").read_text(encoding="utf-8")
    lines = csv.DictReader(io.StringIO((tmp_path / "curves.csv").read_text(encoding="utf-8")))
    assert {line["method"]: line["warnings"] for line in lines} == {
        "fedavg": "edge",
        "fednova": "diverged",
        "fedshuffle": "majority",
    }


def test_a_search_in_which_all_trials_diverged_is_not_an_edge() -> None:
    lost = [trial(0.1, None, diverged=True), trial(0.3, None, diverged=True)]
    found = results(curve("fedavg", run(1, 0.5), tuning=lost, step_size=0.1))
    [(kind, _, text)] = warnings(Compared(found))
    assert kind == "diverged"
    assert "even the smallest" in text


def test_a_single_step_size_is_reported_as_untuned() -> None:
    def found(*tuning: Any) -> list[tuple[str, list[str]]]:
        tried = {"tuning": list(tuning)} if tuning else {}
        both = [curve(name, run(1, 0.9), **tried) for name in ("fedavg", "fedshuffle")]
        return headlines(Compared(results(*both)))

    [(title, [text])] = found()
    assert "tuned" in title
    assert "0.3" in text
    assert found(trial(0.1, 0.4), trial(0.3, 0.5), trial(1.0, 0.4)) == []


@pytest.mark.usefixtures("unpainted")
def test_healthy_results_have_no_warnings(tmp_path: Path) -> None:
    tried = [trial(0.1, 0.4), trial(0.3, 0.5), trial(1.0, 0.4)]
    good = results(
        curve("fedavg", run(1, 0.9), tuning=tried),
        majority={"share": 0.72, "standard_error": 0.02},
    )
    assert warnings(Compared(good)) == []
    assert 'role="note"' not in write(good, tmp_path)[-1].read_text(encoding="utf-8")


@given(
    st.lists(
        st.lists(st.none() | st.floats(-1e3, 1e3), min_size=ROUNDS, max_size=ROUNDS),
        min_size=1,
        max_size=4,
    )
)
def test_bands_contain_every_run(values: list[list[float | None]]) -> None:
    runs = [run(seed, *some) for seed, some in enumerate(values)]
    for one in runs:  # whatever happens to the metric in between, the run ends well
        one["history"][-1]["accuracy"] = 0.5
    compared = Compared(results(curve("fedavg", *runs)))
    [line] = compared.lines
    band = line.band("accuracy")
    for k, round in enumerate(band.rounds.tolist()):
        there = [one["history"][round - 1]["accuracy"] for one in runs]
        known = [value for value in there if value is not None]
        assert band.runs[k] == len(known)
        assert band.mean[k] == pytest.approx(statistics.fmean(known))
        assert (band.low[k], band.high[k]) == (min(known), max(known))


def test_csv_has_every_round_of_every_run() -> None:
    nasty = curve("fedavg", run(1, 0.3, None), run(2, 0.25, diverged=True), label='a "b", c')
    compared = Compared(results(nasty, curve("fedshuffle", run(1, 0.5))))
    lines = list(csv.DictReader(io.StringIO(tables.csv_text(compared))))
    assert len(lines) == 3 * ROUNDS
    assert lines[0]["label"] == 'a "b", c'
    assert [line["accuracy"] for line in lines] == ["", "", "0.3", ""] + 3 * [""] + ["0.25"] + 3 * [
        ""
    ] + ["0.5"]
    assert lines[2]["loss"] == "1.7"
    assert [line["diverged"] for line in lines[3::4]] == ["true", "true", "false"]
