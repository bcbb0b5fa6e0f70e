"""The charts of the page: the step sizes tried, and who gains and loses; in figures and words."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle.evaluation import ClientTable
from fedshuffle.reports.comparison import charts, clients, figures, write
from fedshuffle.reports.comparison.model import Compared
from fedshuffle.reports.comparison.warnings import WIDEN
from fedshuffle.reports.rendering import encoded
from tests.accessibility import problems, unseen_focus
from tests.chromium import Browser
from tests.reports.examples import curve, results, run, trial, whole

pytestmark = pytest.mark.xdist_group("comparison report")  # what they share is made once

NAMES, SIZES = ["<north>", "south, east", "west", "up"], [1, 2, 3, 10]
ACCURACIES = {"fedavg": [0.2, 0.6, 0.5, 0.9], "fedshuffle": [0.8, 0.5, 0.5, 0.9]}
LOSS = {"judge": {"metric": "loss", "higher_is_better": False}}


def grid(**facts: Any) -> Any:
    """One method best at the largest step size, one in the middle, one that always diverged."""
    narrow = [trial(0.1, 2.0), trial(0.3, 1.5), trial(1.0, 1.0)]
    wide = [trial(0.1, 2.0), trial(0.3, 0.5), trial(1.0, None, diverged=True)]
    lost = [trial(0.1, None, diverged=True), trial(0.3, None, diverged=True), trial(1.0, None)]
    return results(
        curve("fedavg", run(1, 0.5), run(2, 0.5), step_size=1.0, tuning=narrow),
        curve("fedshuffle", run(1, 0.7), run(2, 0.7), step_size=0.3, tuning=wide),
        curve("fednova", run(1, 0.1, diverged=True, rounds=2), step_size=0.1, tuning=lost),
        **{**LOSS, **facts},
    )


def measured(out: Path, *, metric: str = "accuracy") -> Any:
    """Two methods whose runs measured every client."""
    curves = []
    for method, values in ACCURACIES.items():
        runs = [run(seed, 0.5, folder=f"runs/{method}-{seed}") for seed in (1, 2)]
        curves.append(curve(method, *runs))
        for seed, shift in ((1, 0.05), (2, -0.05)):
            place = out / f"runs/{method}-{seed}"
            place.mkdir(parents=True)
            table = {metric: np.array(values) + shift}
            ClientTable(NAMES, np.array(SIZES), table, {metric: True}).to_csv(place / "clients.csv")
    return results(*curves, metric=metric)


# The step sizes tried


def test_a_search_shows_its_best_its_edge_and_what_diverged() -> None:
    edge, inner, hopeless = charts.search(Compared(grid()), "own", "none")
    assert edge.best == edge.dots[-1]  # the last one is the lowest loss, so it is drawn lowest
    assert edge.best[1] == max(y for _, y in edge.dots)
    assert (edge.beyond, edge.notes) == (1, [WIDEN])
    assert (inner.beyond, inner.notes, inner.best) == (0, ["1 diverged"], inner.dots[1])
    assert inner.diverged == [edge.dots[-1][0]]  # all charts have the same axes
    assert (hopeless.best, hopeless.dots, len(hopeless.diverged)) == (None, [], 2)
    assert hopeless.notes[0].startswith("even the smallest diverged")
    assert "1 unfinished" in hopeless.notes
    assert inner.text.endswith("0.1: 2.000; 0.3: 0.5000, the best; 1: diverged.")
    # What diverged has a strip of its own, at the end where values are worse.
    assert edge.strip is None
    assert inner.strip is not None
    assert inner.strip < min(y for _, y in edge.dots)


def test_a_small_step_size_that_diverged_hides_no_edge() -> None:
    tried = [trial(0.1, None, diverged=True), trial(0.3, 2.0), trial(1.0, 1.0)]
    (chart,) = charts.search(
        Compared(results(curve("fedavg", run(1, 0.5), step_size=1.0, tuning=tried), **LOSS)),
        *("own", "none"),
    )
    assert (chart.beyond, chart.notes) == (1, [WIDEN, "1 diverged"])
    # Where nothing has a value, there is no best one, so none at an edge.
    tried = [trial(0.1, None), trial(0.3, None)]
    found = Compared(results(curve("fedavg", step_size=0.1, tuning=tried), **LOSS))
    (chart,) = charts.search(found, "own", "none")
    assert (chart.beyond, chart.notes) == (0, ["2 unfinished"])


def test_high_values_may_be_the_good_ones() -> None:
    found = Compared(grid(judge={"metric": "accuracy", "higher_is_better": True}))
    first, second, _ = charts.search(found, "own", "none")
    assert second.strip is not None
    assert second.strip > max(y for _, y in first.dots)


def test_labels_of_many_step_sizes_do_not_overlap_and_name_the_best() -> None:
    tried = [trial(10.0**k, 1 + abs(k)) for k in range(-9, 9)]
    found = Compared(results(curve("fedavg", run(1, 0.5), step_size=1.0, tuning=tried), **LOSS))
    (chart,) = charts.search(found, "own", "none")
    assert len(chart.dots) == 18
    assert "1" in [label for _, label in chart.xticks]
    assert all(after - before > 30 for (before, _), (after, _) in pairwise(chart.xticks))


@pytest.mark.usefixtures("unpainted")
def test_each_step_size_that_was_tuned_has_a_chart(tmp_path: Path) -> None:
    tried = [trial(0.3, v, server_step_size=s) for s, v in ((0.5, 2.0), (1.0, 1.0), (2.0, 0.5))]
    server = curve("fedavg", run(1, 0.5), server_step_size=2.0, tuning=tried)
    more = [trial(0.1, 3.0, server_step_size=2.0), trial(1.0, None, True, server_step_size=2.0)]
    both = curve("fednova", run(1, 0.5), server_step_size=2.0, tuning=[*tried, *more])
    compared = Compared(results(server, both, **LOSS))
    (by_step,) = charts.search(compared, "own", "none", "step_size")
    assert by_step.line.method.name == "fednova"
    assert (len(by_step.dots), by_step.notes) == (2, ["1 diverged"])
    by_server = charts.search(compared, "own", "none", "server_step_size")
    assert [chart.line.method.name for chart in by_server] == ["fedavg", "fednova"]
    assert [chart.notes for chart in by_server] == [[WIDEN], [WIDEN]]
    assert by_server[0].text.endswith(
        "by server step size. 0.5: 2.000; 1: 1.000; 2: 0.5000, the best."
    )
    figure = figures.step_sizes(compared)
    assert figure is not None
    assert [axes.get_xlabel() for axes in figure.axes] == ["step size", "server step size"]
    assert [len(axes.texts) for axes in figure.axes] == [0, 2]
    text = write(compared.results, tmp_path)[-1].read_text()
    assert "fednova: loss by step size (columns)" in text.replace("FedNova", "fednova")
    assert "FedAvg: loss by step size (columns)" not in text


@pytest.mark.usefixtures("unpainted")
def test_without_a_search_there_is_no_chart_of_it(tmp_path: Path) -> None:
    found = Compared(results(curve("fedavg", run(1, 0.5))))
    assert charts.search(found, "own", "none") == []
    assert figures.step_sizes(found) is None
    assert "The step sizes tried" not in write(found.results, tmp_path)[-1].read_text()


def test_the_static_figures_show_edges_and_divergence() -> None:
    found = Compared(grid())
    figure = figures.step_sizes(found)
    assert figure is not None
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["§"]
    crosses = [drawn for drawn in axes.lines if drawn.get_marker() == "x"]
    assert [len(np.atleast_1d(drawn.get_xdata())) for drawn in crosses] == [1, 2]
    (legend,) = figure.legends
    assert "widen the grid" in legend.get_title().get_text()
    (legend,) = figures.curves(found, "own").legends
    told = legend.get_title().get_text()
    assert "at the edge of those tried: FedAvg, no momentum" in told
    assert "diverged" in told
    assert "FedShuffle" not in told


def test_long_titles_and_labels_are_not_cut_off() -> None:
    found = grid(title="A very long title of a comparison " * 9)
    for one in found["curves"]:
        one["label"] = f"{one['method']} with a very long label " * 9
    compared = Compared(found)
    drawn = [figures.curves(compared, "own"), figures.step_sizes(compared)]
    for figure in drawn:
        assert figure is not None
        encoded(figure, "png", 50)
        title = figure._suptitle  # type: ignore[attr-defined]
        for text in (title, *figure.legends[0].get_texts()):
            ends = text.get_window_extent()
            assert ends.x0 >= 0
            assert ends.x1 <= figure.bbox.width


# Who gains and who loses


@pytest.mark.usefixtures("unpainted")
def test_who_gains_and_who_loses(tmp_path: Path) -> None:
    """Against the first method, client by client, as means over the seeds."""
    comparison = Compared(measured(tmp_path))
    (column,) = clients.columns(comparison, tmp_path)
    reference, row = column.rows
    labels = [one.line.method.label for one in (reference, row)]
    assert labels == ["FedAvg", "FedShuffle"]
    assert (row.better, row.worse, row.same) == (1, 1, 2)
    assert row.gains_most == "<north>: 20.00 to 80.00"
    assert row.loses_most == "south, east: 60.00 to 50.00"
    # By hand: the worst tenth of four clients is one; the small one has one example.
    assert (reference.worst, row.worst) == pytest.approx((0.2, 0.5))
    assert (reference.small, row.small) == pytest.approx((0.2, 0.8))
    assert (row.large, row.mean) == pytest.approx((0.9, 0.675))
    assert (column.small, column.large) == (1, 5)
    (chart,) = charts.client_charts(column)
    assert len(chart.dots) == 4
    assert [np.sign(round(chart.same - y, 6)) for _, y in chart.dots] == [1, -1, 0, 0]
    told = "1 of 4 clients better off, 1 worse, 2 the same; small clients 20.00% to 80.00%"
    assert chart.caption == f"{told}; worst tenth 20.00% to 50.00%."
    text = write(comparison.results, tmp_path)[-1].read_text()
    assert "Who gains and who loses" in text
    assert "&lt;north&gt;: 20.00 to 80.00" in text
    assert clients.columns(comparison, tmp_path / "elsewhere") == []


def test_a_lower_loss_is_a_gain(tmp_path: Path) -> None:
    (column,) = clients.columns(Compared(measured(tmp_path, metric="loss")), tmp_path)
    reference, row = column.rows
    assert (row.better, row.worse, row.same) == (1, 1, 2)
    assert row.gains_most == "south, east: 0.6000 to 0.5000"
    assert (reference.worst, row.worst) == pytest.approx((0.9, 0.9))


@pytest.mark.parametrize(
    "table",
    [
        "",
        b"\xff\xfe\x00",
        "client,examples\nwest,3\n",
        "client,examples,accuracy\nwest\n",
        f"client,examples,accuracy\n{'w' * 200_000},3,0.5\n",
        "client,examples,accuracy\nwest,0,0.5\n",
        "client,examples,accuracy\nwest,3,-inf\n",
        "client,examples,accuracy\nwest,3,NaN\n",
    ],
)
def test_a_broken_table_of_clients_counts_as_none(tmp_path: Path, table: str | bytes) -> None:
    found = measured(tmp_path)
    text = table if isinstance(table, bytes) else table.encode()
    (tmp_path / "runs/fedavg-1/clients.csv").write_bytes(text)
    assert clients.columns(Compared(found), tmp_path) == []


@pytest.mark.usefixtures("unpainted")
def test_methods_that_cannot_be_shown_are_named(tmp_path: Path) -> None:
    """The reference of a column is its first method that can be, and each column names it."""
    found = measured(tmp_path)
    lost = [run(1, 0.5, folder="runs/none"), run(2, 0.5, folder="runs/none")]
    found["curves"].insert(0, curve("fednova", *lost))
    (column,) = clients.columns(Compared(found), tmp_path)
    assert column.left_out == ["FedNova"]
    text = write(found, tmp_path)[-1].read_text()
    assert "no momentum: against FedAvg</h3>" in text
    assert "Not shown: FedNova," in text


def test_many_clients_are_drawn_as_far_as_they_can_be_told_apart(tmp_path: Path) -> None:
    found = measured(tmp_path)
    for file in tmp_path.glob("runs/*/clients.csv"):
        values = np.random.default_rng(len(str(file))).random(1000)
        sizes = np.arange(1000) + 1
        table = ClientTable(list(range(1000)), sizes, {"accuracy": values}, {"accuracy": True})
        table.to_csv(file)
    (chart,) = charts.client_charts(clients.columns(Compared(found), tmp_path)[0])
    assert len(chart.dots) == 400
    assert all(x + 3.5 * len(label) <= charts.WIDTH for x, label in chart.xticks)  # not cut off
    assert len(write(found, tmp_path)[-1].read_bytes()) < 1_000_000


def test_the_page_says_that_clients_were_not_measured(page: Path) -> None:
    assert "per_client = true" in page.read_text(encoding="utf-8")


# In a browser


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every part: an edge, divergence, clients, several groups and momenta."""
    out = tmp_path_factory.mktemp("everything")
    found = whole()
    extra = grid()["curves"]
    found["curves"] += [{**one, "momentum": "mvr:0.1"} for one in extra]
    for one in found["curves"]:
        for k, ran in enumerate(one["runs"]):
            name = re.sub(r"\W", "", one["method"] + one["group"] + one["momentum"])
            ran["folder"] = f"runs/{name}-{k}"
            (out / ran["folder"]).mkdir(parents=True)
            values = np.linspace(0.1 * k, 0.9, len(NAMES)) + 0.01 * len(name)
            table = ClientTable(NAMES, np.array(SIZES), {"accuracy": values}, {"accuracy": True})
            table.to_csv(out / ran["folder"] / "clients.csv")
    return write(json.loads(json.dumps(found)), out)[-1]


@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_everybody_can_read_the_page(
    browser: Browser, everything: Path, width: int, dark: bool
) -> None:
    browser.window(width, 800, dark=dark, phone=width == 420)
    browser.open(everything)
    assert problems(browser) == []


def test_the_focus_is_seen(browser: Browser, everything: Path) -> None:
    browser.window(420, 800, phone=True)
    browser.open(everything)
    assert unseen_focus(browser) == []


def test_edges_and_divergence_are_shown(browser: Browser, everything: Path) -> None:
    browser.window(420, 800, phone=True)
    browser.open(everything)
    text = browser.run("document.querySelector('main').innerText")
    assert text.index("Runs diverged") < text.index("In short")
    assert text.index("at an edge") < text.index("In short")
    seen = "[...document.querySelectorAll('.search .badge')].map(b => b.innerText)"
    badges = browser.run(seen)
    assert WIDEN in badges
    assert "1 diverged" in badges
    widths = browser.run(
        "[...document.querySelectorAll('.charts svg[role=img]')].map(s => s.clientWidth)"
    )
    assert min(widths) > 300
    assert browser.run("document.querySelectorAll('.search .crosses').length") > 0
    assert browser.run("document.querySelectorAll('.search .beyond').length") == 1
    assert browser.run("document.querySelectorAll('.gains .clients').length") > 0
