"""The report of a comparison: what stands beside the curves, and its files."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import FedShuffleError
from fedshuffle.comparison.results import check_results
from fedshuffle.methods import colour
from fedshuffle.reports.comparison import write
from fedshuffle.reports.comparison.figures import audits, curves, histogram
from fedshuffle.reports.comparison.model import ROUNDS, STEPS, Compared
from fedshuffle.reports.comparison.tables import csv_text
from fedshuffle.reports.comparison.warnings import headlines, notes
from tests.reports.examples import EVIL, NASTY, curve, results, run, trial

pytestmark = pytest.mark.xdist_group("comparison report")  # what they share is made once

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


def test_a_method_without_an_audit_says_why(tmp_path: Path) -> None:
    why = "no formula is known for mifa, and a drift cannot be simulated."
    audit = {"consistent": None, "effective_weights": None, "objective_weights": [1 / 3] * 3}
    found = results(
        curve("fedavg", run(1, 0.5)), curve("mifa", run(1, 0.5), audit={**audit, "unknown": why})
    )
    check_results(found)
    assert [one.unknown for one in audits(Compared(found))] == ["", why]
    assert [len(one.points) for one in audits(Compared(found))] == [3, 0]
    assert [note for note in notes(Compared(found), "own") if why in note]
    assert why in write(found, tmp_path)[-1].read_text(encoding="utf-8")


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
    assert line.searches["step_size"].tried == {0.1: 0.4, 1.0: 0.5, **lost}
    assert line.searches["step_size"].edge == ""
    assert not line.searches["server_step_size"].varied


def test_the_search_may_be_judged_by_another_metric() -> None:
    tried = [trial(0.1, 2.0), trial(0.3, 1.5), trial(0.3, 1.0, clip=5.0)]
    only = curve("fedavg", run(1, 0.5), step_size=0.3, tuning=tried)
    [line] = Compared(results(only, judge={"metric": "loss", "higher_is_better": False})).lines
    search = line.searches["step_size"]
    assert search.tried == {0.1: 2.0, 0.3: 1.0}
    assert search.edge == line.edge == "largest"


def test_both_step_sizes_are_searched() -> None:
    tried = [
        *(trial(0.1, 0.4), trial(0.3, 0.5), trial(1.0, None, diverged=True)),
        *(trial(0.3, 0.2, server_step_size=0.5), trial(0.3, 0.6, server_step_size=2.0)),
        trial(0.3, 0.55, server_step_size=2.0, clip=5.0),
    ]
    only = curve("fedavg", run(1, 0.5), step_size=0.3, server_step_size=2.0, tuning=tried)
    [line] = Compared(results(only)).lines
    assert line.searches["step_size"].tried == {0.1: 0.4, 0.3: 0.6, 1.0: "diverged"}
    assert line.searches["server_step_size"].tried == {0.5: 0.2, 1.0: 0.5, 2.0: 0.6}
    assert line.tried == {
        (0.1, 1.0): 0.4,
        (0.3, 0.5): 0.2,
        (0.3, 1.0): 0.5,
        (0.3, 2.0): 0.6,
        (1.0, 1.0): "diverged",
    }
    assert (line.edge, line.server_edge) == ("", "largest")
    [(_, [text])] = headlines(Compared(results(only)))
    assert "its best server step size, 2, is the largest tried" in text
    assert "its best step size" not in text


def test_steps_are_an_axis_and_no_metric() -> None:
    """Five steps per round with seed 1, ten with seed 2."""
    both = curve("fedavg", run(1, 0.1, 0.2, 0.3, 0.4), run(2, 0.2, 0.3, diverged=True, rounds=2))
    compared = Compared(results(both))
    [line] = compared.lines
    assert line.along(STEPS, [0, 1, 2, 3, 4]).tolist() == [0, 7.5, 15, 15, 20]
    assert compared.end(STEPS, "own") == 20
    assert "total_steps" not in compared.metrics
    assert compared.title("total_steps") == "local steps so far"
    for record in both["runs"][0]["history"] + both["runs"][1]["history"]:
        del record["total_steps"]
    assert Compared(results(both)).axes == [ROUNDS]


def test_curves_may_be_drawn_over_local_steps_and_time() -> None:
    timed = run(1, 0.1, 0.2, 0.3, 0.4)
    for record in timed["history"]:
        record["time"] = 0.5 * record["round"]
    compared = Compared(results(curve("fedavg", timed)))
    assert "time" not in compared.metrics
    assert "round,total_steps,time,accuracy" in csv_text(compared)
    expected: list[list[float]] = [[1, 2, 3, 4], [5, 10, 15, 20], [0.5, 1, 1.5, 2]]
    for axis, xs in zip(compared.axes, expected, strict=True):
        axes = curves(compared, "own", axis).axes[0]
        assert axes.get_xlabel() == axis.title
        assert np.asarray(axes.lines[0].get_xdata()).tolist() == xs
        assert axes.get_xlim()[1] == pytest.approx(1.012 * xs[-1])


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


def test_every_file_is_written(written: list[Path], folder: Path) -> None:
    names = [path.name for path in written]
    figures = ["figure-own", "figure-common-0.1", "weights"]
    figures += ["figure-own-steps", "figure-common-0.1-steps", "step-sizes"]
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
    assert data["axes"]["steps"]["ends"] == {"own": 150.0, "common:0.1": 150.0}
    drawn = data["curves"][0]["metrics"]["accuracy"]
    assert (drawn["rounds"][-1], drawn["steps"][-1]) == (20, 150)
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
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {8}
    latex = next(path for path in written if path.name == "table.tex").read_text(encoding="utf-8")
    line = next(line for line in latex.splitlines() if line.startswith("A \\&"))
    assert "50\\% of \\$x\\$ \\_\\{i\\}\\_" in line
    assert len(re.findall(r"(?<!\\)&", line)) == 6


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
