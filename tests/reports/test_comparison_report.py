"""The report of a comparison: its numbers, its words, and its page in a real browser."""

import copy
import csv
import io
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import FedShuffleError
from fedshuffle.evaluation import ClientTable
from fedshuffle.methods import colour
from fedshuffle.reports.comparison import answers, gains, tables, write
from fedshuffle.reports.comparison.figures import audits, histogram
from fedshuffle.reports.comparison.model import Compared
from fedshuffle.reports.comparison.warnings import headlines, warnings
from tests.chromium import Browser

pytestmark = pytest.mark.xdist_group("comparison report")  # what they share is made once

ROUNDS = 4
EVIL = "<script>document.title='owned'</script>"
NASTY = f"""A & B | 50% of $x$ _{{i}}_ "'`*~^#\\ {EVIL}"""


def run(seed: int, *values: float | None, rounds: int = ROUNDS, **facts: Any) -> dict[str, Any]:
    """A run evaluated in its last rounds, with these accuracies."""
    history: list[dict[str, Any]] = [{"round": k} for k in range(1, rounds + 1)]
    for record, value in zip(history[rounds - len(values) :], values, strict=True):
        loss = None if value is None else 2 - value
        record.update(accuracy=value, loss=loss, training_loss=loss and loss - 0.25)
    return {"seed": seed, "folder": f"runs/{seed}", "diverged": False, "history": history, **facts}


def curve(method: str, *runs: dict[str, Any], **facts: Any) -> dict[str, Any]:
    label = {"fedavg": "FedAvg", "fedshuffle": "FedShuffle", "fednova": "FedNova"}.get(
        method, method
    )
    consistent = method == "fedshuffle"
    return {
        "method": method,
        "label": label,
        "momentum": "none",
        "group": "own",
        "step_size": facts.get("step_size", 0.3),
        "client_step_sizes": [facts.get("step_size", 0.3)] * 2,
        "weight_decay": 0.0,
        "clip": None,
        "tuning": [],
        "audit": {
            "consistent": consistent,
            "objective_weights": [1 / 6, 2 / 6, 3 / 6],
            "effective_weights": [1 / 6, 2 / 6, 3 / 6] if consistent else [1 / 14, 4 / 14, 9 / 14],
        },
        "runs": list(runs),
        **facts,
    }


def results(*curves: dict[str, Any], **facts: Any) -> Any:
    seeds = sorted({run["seed"] for curve in curves for run in curve["runs"]})
    metric = facts.get("metric", "accuracy")
    return {
        "title": "A comparison",
        "command": "fedshuffle compare compare.toml --out out",
        "config": "[compare]\nseeds = [1, 2]\n",
        "complete": True,
        "seconds": 61.0,
        "rounds": ROUNDS,
        "metric": metric,
        "higher_is_better": metric == "accuracy",
        "majority": None,
        "judge": {"metric": metric, "higher_is_better": metric == "accuracy"},
        "federation": {"clients": 3, "examples": 6, "sizes": [1, 2, 3]},
        "settings": {"work": "batch_size 32", "seeds": seeds, "tuning": "loss"},
        "versions": {"fedshuffle": "0.1.0"},
        "curves": list(curves),
        "warnings": [],
        **facts,
    }


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
        )
    )
    text = tables.markdown(compared)
    assert row(text, "FedAvg")[0] == "*39.50 ± 0.71*"
    assert row(text, "FedNova")[0] == "39.00 ± 0.00"
    assert "\\underline{39.50 $\\pm$ 0.71}" in tables.latex(compared)
    [(_, [sentence])] = answers(compared)
    best, near = sentence.split(";")
    assert "FedShuffle" in best
    assert "42.00 ± 2.83%" in best
    assert "FedAvg" in near
    assert "FedNova" not in sentence


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


def misleading() -> Any:
    """One method at an edge of the grid, one that diverged, one no better than guessing."""
    tried = [trial(0.1, 0.4), trial(0.3, 0.5)]
    return results(
        curve("fedavg", run(1, 0.9), tuning=tried, client_step_sizes=[0.3, 0.3]),
        curve("fednova", run(1, 0.9, diverged=True)),
        curve("fedshuffle", run(1, 0.73), client_step_sizes=[0.3, 13.2]),
        majority={"share": 0.72, "standard_error": 0.02},
    )


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


# What stands beside the curves


def test_audits_follow_from_the_weights() -> None:
    both = [
        curve(method, run(1, 0.5), momentum=momentum, group=group)
        for method in ("fedavg", "fedshuffle")
        for momentum in ("none", "global:0.1")
        for group in ("own", "common:1")
    ]
    first, second = audits(Compared(results(*both)))  # the same for all momenta, so once
    assert first.momenta == ["none", "global:0.1"]
    # (1, 4, 9) / 14 instead of (1, 2, 3) / 6, by hand
    assert first.wrong == pytest.approx(9 / 14 - 1 / 2)
    assert first.largest == pytest.approx((1 / 6) / (1 / 14))
    assert first.points == pytest.approx(np.array([[1, 3 / 7], [2, 6 / 7], [3, 9 / 7]]), rel=1e-2)
    assert (first.consistent, second.consistent) == (False, True)
    assert (second.wrong, second.largest) == pytest.approx((0, 1))


def test_different_audits_are_separate_rows() -> None:
    other = {"consistent": None, "objective_weights": [1 / 3] * 3}
    audit = {**other, "effective_weights": [0.5, 0.5, 0.0]}
    found = results(
        curve("fedavg", run(1, 0.5)), curve("fedavg", run(1, 0.5), momentum="mvr:0.1", audit=audit)
    )
    one, two = audits(Compared(found))
    assert (one.momenta, two.momenta) == (["none"], ["mvr:0.1"])
    assert two.consistent is None
    assert len(two.points) == 2  # a client that counts nothing has no place on the axis


def trial(step_size: float, value: float | None, diverged: bool = False, **facts: Any) -> Any:
    facts = {"weight_decay": 0.0, "clip": None, "added": False, **facts}
    return {"step_size": step_size, "value": value, "diverged": diverged, **facts}


def test_the_search_shows_the_winner() -> None:
    tried = [
        trial(1.0, 0.5, clip=5.0),
        trial(1.0, 0.25),
        trial(0.1, 0.4),
        trial(3.0, None, diverged=True),
        trial(3.0, None, diverged=True),
        trial(10.0, None, diverged=True),
        trial(10.0, None),
    ]
    found = results(curve("fedavg", run(1, 0.5), step_size=1.0, tuning=tried))
    [line] = Compared(found).lines
    lost = {3.0: "diverged", 10.0: "unfinished"}
    assert line.tried == {0.1: 0.4, 1.0: 0.5, **lost}
    assert line.edge == ""


def test_the_search_may_be_judged_by_another_metric() -> None:
    tried = [trial(0.1, 2.0), trial(0.3, 1.5), trial(0.3, 1.0, clip=5.0)]
    only = curve("fedavg", run(1, 0.5), step_size=0.3, tuning=tried)
    [line] = Compared(results(only, judge={"metric": "loss", "higher_is_better": False})).lines
    assert line.tried == {0.1: 2.0, 0.3: 1.0}
    assert line.edge == "largest"


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_the_histogram_counts_everyone_once(sizes: list[int]) -> None:
    bars = histogram(sizes)
    assert len(bars) <= 25
    assert [first for first, _, _ in bars[1:]] == [last + 1 for _, last, _ in bars[:-1]]
    for first, last, clients in bars:
        assert clients == sum(first <= size <= last for size in sizes)
    assert sum(clients for _, _, clients in bars) == len(sizes)


def test_every_method_has_a_colour_and_a_marker_of_its_own() -> None:
    names = ["mine", "fedavg-rr", "fedshuffle-so", "fedshuffle", "fednova-original", "other"]
    found = Compared(results(*(curve(name, run(1, 0.5)) for name in names))).methods
    assert len({method.colour for method in found}) == len(names)
    assert len({method.marker for method in found}) == len(names)
    known = {method.name: method.colour for method in found}
    assert known["fedshuffle"] == colour("fedshuffle")
    assert known["fedavg-rr"] == colour("fedavg-rr")


def test_who_gains_and_who_loses(tmp_path: Path) -> None:
    """Against the first method, client by client, as means over the seeds."""
    names = ["<north>", "south, east", "west"]
    accuracies = {"fedavg": [0.2, 0.6, 0.5], "fedshuffle": [0.8, 0.5, 0.5]}
    curves = []
    for method, values in accuracies.items():
        runs = [run(seed, 0.5, folder=f"runs/{method}-{seed}") for seed in (1, 2)]
        curves.append(curve(method, *runs))
        for seed, shift in ((1, 0.1), (2, -0.1)):
            place = tmp_path / f"runs/{method}-{seed}"
            place.mkdir(parents=True)
            sizes = np.array([1, 2, 3])
            table = ClientTable(
                names, sizes, {"accuracy": np.array(values) + shift}, {"accuracy": True}
            )
            table.to_csv(place / "clients.csv")
    comparison = Compared(results(*curves))
    (found,) = gains(comparison, tmp_path)
    labels = [line.method.label for line in (found.reference, found.line)]
    assert labels == ["FedAvg", "FedShuffle"]
    assert (found.better, found.worse, found.same) == (1, 1, 1)
    assert found.gains_most == "<north>: 20.00 to 80.00"
    assert found.loses_most == "south, east: 60.00 to 50.00"
    (page,) = (path for path in write(comparison.results, tmp_path) if "html" in path.name)
    text = page.read_text()
    assert "Who gains and who loses" in text
    assert "&lt;north&gt;: 20.00 to 80.00" in text
    assert gains(Compared(results(*curves)), tmp_path / "elsewhere") == []


def test_outliers_do_not_set_the_axis_limits() -> None:
    values = np.linspace(1, 2, 100).tolist()
    calm = results(curve("fedavg", run(1, *values, rounds=100)), rounds=100)
    wild = copy.deepcopy(calm)
    wild["curves"][0]["runs"][0]["history"][50]["accuracy"] = 1e9
    low, high = Compared(calm).limits("own", "accuracy")
    assert low < 1 < 2 < high < 2.1
    assert Compared(wild).limits("own", "accuracy")[1] < 4


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("curves"), "'curves' is missing"),
        (lambda r: r.pop("federation"), "'federation' is missing"),
        (lambda r: r["curves"][0].pop("label"), "'label' is missing"),
        (lambda r: r["curves"][0]["audit"].pop("consistent"), "'consistent' is missing"),
        (lambda r: r["curves"][0]["runs"][0].pop("history"), "'history' is missing"),
    ],
)
def test_invalid_results_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    found = results(curve("fedavg", run(1, 0.5)))
    change(found)
    with pytest.raises(FedShuffleError, match=message):
        write(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FedShuffleError, match="another folder"):
        write(results(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


# The files


def whole() -> Any:
    """Three methods, two momenta, two groups, two seeds, and texts that want to break out."""
    rounds = 20
    curves = []
    for group in ("own", "common:0.1"):
        for momentum in ("none", "global:0.1"):
            for k, method in enumerate(("fedavg", "fedshuffle", f"mine,{EVIL}")):
                base = 0.3 + 0.1 * k + 0.05 * (momentum != "none")
                runs = [
                    run(
                        seed,
                        *(base * (1 - 0.8**r) + 0.01 * seed for r in range(1, rounds + 1)),
                        rounds=rounds,
                        folder=f"runs/{EVIL}",
                    )
                    for seed in (1, 2)
                ]
                if k == 0 and momentum != "none":
                    runs[1] = run(2, 0.2, 0.1, None, rounds=10, diverged=True)
                label = NASTY if k == 2 else ("FedAvg", "_FedShuffle$")[k]
                tried = [trial(0.1, 0.2), trial(0.3, 0.3, clip=5.0), trial(1.0, None, True)]
                facts = {"momentum": momentum, "group": group, "label": label, "tuning": tried}
                curves.append(curve(method, *runs, **facts))
    return results(
        *curves,
        title=f"Everything {EVIL}",
        command=f"fedshuffle compare '{EVIL}'",
        config=f"# {EVIL}\n</code></pre></script>",
        settings={EVIL: EVIL, "seeds": [1, 2], "tuning": EVIL},
        versions={EVIL: EVIL},
        rounds=rounds,
        complete=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def written(folder: Path) -> list[Path]:
    return write(json.loads(json.dumps(whole())), folder)


@pytest.fixture(scope="module")
def page(written: list[Path]) -> Path:
    return written[-1]


def test_every_file_is_written(written: list[Path], folder: Path) -> None:
    names = [path.name for path in written]
    figures = ["figure-own", "figure-common-0.1", "weights"]
    pictures = [f"{name}.{kind}" for name in figures for kind in ("png", "pdf")]
    assert names == [*pictures, "table.md", "table.tex", "curves.csv", "report.html"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for path in written:
        starts = {".png": b"\x89PNG", ".pdf": b"%PDF"}
        assert path.read_bytes().startswith(starts.get(path.suffix, b""))


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    found = results(curve("fedavg", run(1, 0.3, 0.4), run(2, 0.2, 0.5)))
    one, two = (write(found, tmp_path / name) for name in ("deep/down", "up"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


class Tags(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = tag == "script"

    def handle_data(self, data: str) -> None:
        if self._script:
            self.data.append(data)
            self._script = False


def test_the_page_is_self_contained_and_escaped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    assert "://" not in text
    found = Tags(text)
    assert [facts.get("type") for tag, facts in found.tags if tag == "script"] == [
        "application/json",
        None,
    ]
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "base")]
    sources = [
        value or "" for _, facts in found.tags for key, value in facts.items() if key == "src"
    ]
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    data = json.loads(found.data[0])
    assert [method["label"] for method in data["methods"]] == ["FedAvg", "_FedShuffle$", NASTY]
    assert "default-src 'none'" in text


def test_the_page_says_that_it_is_not_complete(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.index("This comparison is not complete") < text.index("<h2>")
    done = write(results(), tmp_path)[-1].read_text(encoding="utf-8")
    assert "not complete" not in done


def test_tables_escape_all_text(written: list[Path]) -> None:
    text = next(path for path in written if path.name == "table.md").read_text(encoding="utf-8")
    assert "<script>" not in re.sub(r"\\.", "", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {6}
    latex = next(path for path in written if path.name == "table.tex").read_text(encoding="utf-8")
    line = next(line for line in latex.splitlines() if line.startswith("A \\&"))
    assert "50\\% of \\$x\\$ \\_\\{i\\}\\_" in line
    assert len(re.findall(r"(?<!\\)&", line)) == 4


@pytest.mark.parametrize(
    "found",
    [
        results(complete=False),
        results(
            curve("fedavg"),
            curve("fedshuffle", {**run(1), "history": [], "diverged": True}),
            complete=False,
        ),
        results(curve("fedavg", run(1, None, diverged=True))),
    ],
    ids=["nothing", "nothing evaluated", "diverged at once"],
)
def test_reports_of_nearly_empty_results(found: Any, tmp_path: Path) -> None:
    text = write(found, tmp_path)[-1].read_text(encoding="utf-8")
    assert "A comparison" in text
    assert "fedshuffle compare compare.toml" in text


# The page in a browser


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.window(1200, 900)
    browser.open(page)
    return browser


def drawn(browser: Browser, where: str = "#chart") -> list[str]:
    """The methods whose curves are to be seen."""
    found = browser.run(
        f"[...document.querySelectorAll('{where} [data-method]')].map(g => g.dataset.method)"
    )
    return sorted(found)


def shown(browser: Browser) -> list[str]:
    """The values beside the names of the methods."""
    found: list[str] = browser.run(
        "[...document.querySelectorAll('.method output')].map(o => o.innerText)"
    )
    return found


METHODS = sorted(["fedavg", "fedshuffle", f"mine,{EVIL}"])


def test_the_page_works_without_network_or_errors(opened: Browser, page: Path) -> None:
    assert drawn(opened) == drawn(opened, "#weights") == METHODS
    assert opened.run("document.title") == f"Everything {EVIL}"  # not owned
    asked = opened.requests()
    assert asked[0] == page.as_uri()
    assert all(address.startswith("data:") for address in asked[1:])
    assert opened.complaints() == []
    assert opened.run("getComputedStyle(document.querySelector('.static')).display") == "none"


def test_final_values_equal_those_of_the_table(opened: Browser) -> None:
    mean = 0.4 * (1 - 0.8**20) + 0.015
    assert shown(opened)[1].split()[0] == f"{100 * mean:.2f}%"
    cells = opened.run("[...document.querySelectorAll('tbody tr')][1].innerText")
    assert f"{100 * mean:.2f}" in cells


@pytest.mark.parametrize(
    ("fragment", "methods"),
    [
        ("#methods=fedshuffle&momentum=none", ["fedshuffle"]),
        ("#methods=fedshuffle,fedavg&group=common:0.1", ["fedavg", "fedshuffle"]),
        ("#methods=", []),
        ("#methods=%zz&metric=no&group=%00&momentum=&scale=log", []),
        ("#metric=training_loss&momentum=global%3A0.1", METHODS),
    ],
)
def test_the_address_selects_what_is_shown(
    browser: Browser, page: Path, fragment: str, methods: list[str]
) -> None:
    browser.open(page, fragment)
    assert drawn(browser) == drawn(browser, "#weights") == methods
    assert browser.complaints() == []
    title = "train loss" if "training_loss" in fragment else "test accuracy"
    assert title in browser.run("document.getElementById('chart').textContent")
    crosses = browser.run("document.querySelectorAll('#chart .cross').length")
    assert crosses == ("global" in fragment)


def test_a_click_hides_a_method_and_updates_the_address(opened: Browser, page: Path) -> None:
    place = opened.run(
        "(() => { const box = document.querySelector('input[value=fedavg]');"
        " box.scrollIntoView({block: 'center'}); const at = box.getBoundingClientRect();"
        " return [at.x + at.width / 2, at.y + at.height / 2]; })()"
    )
    opened.mouse("mousePressed", *place)
    opened.mouse("mouseReleased", *place)
    rest = [name for name in METHODS if name != "fedavg"]
    assert drawn(opened) == drawn(opened, "#weights") == rest
    opened.open(page, opened.run("location.hash"))
    assert drawn(opened) == rest
    opened.run("document.querySelector('button[data-all=no]').click()")
    assert drawn(opened) == []
    assert "No method is chosen." in opened.run("document.getElementById('chart').textContent")
    opened.open(page, opened.run("location.hash"))
    assert drawn(opened) == []
    opened.run("document.querySelector('button[data-all=yes]').click()")
    assert drawn(opened) == METHODS


def test_the_page_works_by_keyboard(opened: Browser) -> None:
    reached = []
    for _ in range(12):
        opened.key("Tab")
        reached.append(opened.run("document.activeElement.id || document.activeElement.name"))
        if reached[-1] == "chart":
            break
    assert reached == ["group", "momentum", "metric", "scale", "chart"]
    opened.key("Home")
    assert opened.run("document.getElementById('round').textContent") == "at round 1"
    opened.key("ArrowRight")
    assert opened.run("document.getElementById('round').textContent") == "at round 2"
    at_two = 0.4 * (1 - 0.8**2) + 0.015
    assert shown(opened)[1].split()[0] == f"{100 * at_two:.2f}%"
    spoken = opened.run("document.getElementById('chart').getAttribute('aria-valuetext')")
    assert spoken.startswith("round 2: FedAvg ")
    for _ in range(3):  # two buttons and then the first method
        opened.key("Tab")
    opened.key(" ")
    assert drawn(opened) == [name for name in METHODS if name != "fedavg"]


def test_pointing_shows_the_values_of_a_round(opened: Browser) -> None:
    left, top, width, height = opened.run(
        "(() => { const chart = document.getElementById('chart');"
        " chart.scrollIntoView({block: 'center'}); const at = chart.getBoundingClientRect();"
        " return [at.left, at.top, at.width, at.height]; })()"
    )
    opened.mouse("mouseMoved", left + width / 2, top + height / 2)
    text = opened.run("document.getElementById('round').textContent")
    assert 5 < int(text.removeprefix("at round ")) < 15
    assert opened.run("document.querySelectorAll('#chart .pointer .marker').length") == 3
    opened.mouse("mouseMoved", 2, 2)
    assert opened.run("document.getElementById('round').textContent") == "at round 20"


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.window(360, 740, dark=dark, phone=True)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth <= 360")
    assert browser.run("document.getElementById('chart').getBoundingClientRect().right <= 360")
    ground = browser.run("getComputedStyle(document.querySelector('main')).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 150) is dark


def test_without_scripts_figures_and_tables_are_shown(browser: Browser, page: Path) -> None:
    browser.window(1000, 900)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    widths = browser.run("[...document.querySelectorAll('.static img')].map(i => i.clientWidth)")
    assert len(widths) == 3
    assert min(widths) > 500
    assert browser.run("document.querySelectorAll('tbody tr').length") > 6
    assert browser.run("document.getElementById('controls').clientHeight") == 0
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
