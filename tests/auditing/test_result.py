"""Audits as JSON, in a notebook and as a picture."""

import itertools
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from numpy.typing import NDArray

from fedshuffle import Audit, Federation, Method, audit, methods
from fedshuffle.auditing import audit_server
from fedshuffle.methods import (
    CohortMoments,
    Direction,
    LocalPlan,
    RoundContext,
    StepCoefficients,
    Steps,
)
from fedshuffle.sampling import Independent
from tests.brute import Floats

THREE = Federation.from_sizes([1, 2, 3])


class Ignoring(Direction):
    """Says that the first client does not count."""

    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients())
        return context.state

    def effective_weights(self, moments: CohortMoments) -> Floats:
        return moments.contribution * (np.arange(len(moments.contribution)) > 0)


def ignoring() -> Audit:
    method = Method("ignoring", "", methods.get("fedshuffle").averaging, Ignoring())
    return audit(THREE, method)


def strict(data: object) -> object:
    """As JSON and back, without the words that JSON does not have."""
    return json.loads(json.dumps(data, allow_nan=False))


def test_what_is_infinite_is_null_in_json() -> None:
    result = ignoring()
    assert result.largest_ratio == np.inf
    data = strict(result.to_dict())
    assert isinstance(data, dict)
    assert data["largest_ratio"] is None
    assert data["client_ids"] == [0, 1, 2]
    keys = {"method", "momentum", "sampling", "objective_weights", "effective_weights", "exact"}
    assert keys <= data.keys()


def test_a_black_box_audit_is_json_too() -> None:
    def last(clients: object, sizes: object, updates: Floats) -> Floats:
        return np.asarray(updates[-1])

    assert strict(
        audit_server(last, Federation.from_sizes([1] * 4), "uniform:2", draws=64).to_dict()
    )


@pytest.mark.parametrize("clients", [3, 5000])
def test_an_audit_has_a_short_repr(clients: int) -> None:
    text = repr(audit(Federation.from_sizes(np.arange(1, clients + 1)), "fedavg-rr", "uniform:2"))
    assert len(text) < 300
    assert "fedavg-rr" in text
    assert "not consistent" in text


class Reader(HTMLParser):
    """The rows of a table, and every tag that was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_a_notebook_shows_a_table_with_names_that_cannot_inject_anything() -> None:
    ids = ["<script>x</script>", "a & b", "ünï"]
    clients = Federation.from_arrays(np.zeros(6), client_ids=np.repeat(ids, [1, 2, 3]))
    result = audit(clients, "fedavg-rr", "uniform:2")
    reader = Reader()
    reader.feed(result._repr_html_())
    assert not reader.open
    assert "script" not in reader.tags
    assert [row[0] for row in reader.rows[1:]] == list(clients.ids)
    column = reader.rows[0].index("really / meant")
    found = [float(row[column]) for row in reader.rows[1:]]
    np.testing.assert_allclose(found, result.ratios, atol=5e-4)
    assert "color:" not in result._repr_html_().replace("background:", "")  # the theme's own


def test_large_federations_are_shown_in_groups() -> None:
    reader = Reader()
    reader.feed(audit(Federation.from_sizes(np.arange(1, 1001)), "fedavg-rr")._repr_html_())
    assert len(reader.rows) == 11


def bars(axes: Axes) -> dict[str, list[float]]:
    """The heights of the bars, by what the legend calls them."""
    names = axes.get_legend_handles_labels()[1]
    groups = [part for part in axes.containers if isinstance(part, BarContainer)]
    return {
        name: [bar.get_height() for bar in group] for name, group in zip(names, groups, strict=True)
    }


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_picture_shows_what_was_meant_and_what_happens() -> None:
    result = audit(THREE, "fedavg-rr", "uniform:2")
    axes = result.plot()
    drawn = bars(axes)
    np.testing.assert_allclose(drawn["you meant"], result.objective_weights)
    np.testing.assert_allclose(drawn["really"], result.effective_weights)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]
    assert axes.get_title(loc="left") == "9.85% of the objective is in the wrong place"
    factors = [f"{ratio:.2g}×" for ratio in result.ratios]  # noqa: RUF001
    assert texts(axes) == [*factors, "fedavg-rr on 3 clients, sampling uniform:2"]
    assert result.plot(axes) is axes
    assert result.plot(ax=None) is not axes
    assert axes.figure in [pyplot.figure(k) for k in pyplot.get_fignums()]  # a notebook shows it
    axes.figure.canvas.draw()
    pyplot.close("all")
    fair = audit(THREE, "fedshuffle", "uniform:2").plot()
    assert fair.get_title(loc="left") == "It minimises the objective you meant"
    assert bars(fair)["really"] == pytest.approx(bars(fair)["you meant"])
    pyplot.close("all")


@pytest.mark.parametrize("clients", [40, 10_000])
def test_a_picture_of_many_clients_shows_ten_groups_by_size(clients: int) -> None:
    result = audit(Federation.from_sizes(np.arange(clients) % 50 + 1), "fedavg-rr", "uniform:5")
    axes = result.plot()
    drawn = bars(axes)
    for heights, weights in (
        (drawn["you meant"], result.objective_weights),
        (drawn["really"], result.effective_weights),
    ):
        assert len(heights) == 10
        assert sum(heights) == pytest.approx(weights.sum())
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks[0] == ("1 to 4 (4)" if clients == 40 else "1 to 5 (1,000)")
    assert axes.get_xlabel() == "examples of a client (number of such clients)"
    assert f"{clients:,} clients" in texts(axes)[-1]
    pyplot.close("all")


def test_clients_of_few_sizes_are_grouped_by_size() -> None:
    result = audit(Federation.from_sizes([12] * 30 + [3] * 4 + [300]), "fedavg-rr", "uniform:5")
    axes = result.plot()
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["3 (4)", "12 (30)", "300 (1)"]
    meant = np.array([12, 360, 300]) / 672
    np.testing.assert_allclose(bars(axes)["you meant"], meant)
    pyplot.close("all")
    reader = Reader()
    reader.feed(result._repr_html_())
    assert [row[:2] for row in reader.rows[1:]] == [["4", "3"], ["30", "12"], ["1", "300"]]


def test_a_picture_shows_intervals_and_what_is_unknown() -> None:
    axes = ignoring().plot()
    axes.figure.canvas.draw()
    pyplot.close("all")

    def noisy(clients: NDArray[np.int64], sizes: Floats, updates: Floats) -> Floats:
        scale = 1 + 0.1 * np.random.default_rng(int(clients.sum())).standard_normal()
        return np.asarray(scale * sizes @ updates / sizes.sum())

    rarely = Independent([0.5] * 19 + [1e-9])
    result = audit_server(noisy, Federation.from_sizes(range(1, 21)), rarely, draws=64)
    axes = result.plot()
    assert result.intervals is not None
    unknown = ~np.isfinite(result.intervals[:, 1])
    assert unknown.any()
    assert not unknown.all()
    assert [text == "?" for text in texts(axes)[:-1]] == unknown.tolist()
    (lines,) = (part for part in axes.containers if isinstance(part, ErrorbarContainer))
    ends = np.array([segment[:, 1] for segment in lines[2][0].get_segments()])
    np.testing.assert_allclose(ends[~unknown], result.intervals[~unknown])
    pyplot.close("all")


@pytest.mark.parametrize("size", [(7, 4), (12, 3)])
def test_pictures_side_by_side_do_not_run_into_each_other(size: tuple[float, float]) -> None:
    result = audit(Federation.from_sizes(range(1, 21)), "fedavg-rr", "uniform:3")
    figure, row = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    for axes in row:
        result.plot(axes)
    figure.canvas.draw()
    first, second = row
    for text in (first._left_title, *first.texts):
        assert text.get_window_extent().x1 < second.get_window_extent().x0
        assert text.get_window_extent().y1 <= figure.bbox.height
    boxes = [text.get_window_extent() for text in first.texts[:-1]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    pyplot.close("all")


def test_names_in_a_picture_are_shown_as_they_are() -> None:
    ids = ["\x1b[31mred", "$a_b$", "a very long name indeed"]
    axes = audit(Federation.from_arrays(np.zeros(3), client_ids=ids), "fedavg-rr").plot()
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown == ["\\x1b[31mred", "$a_b$", "a very long nam…"]
    assert not any(label.get_parse_math() for label in axes.get_xticklabels())
    axes.figure.canvas.draw()
    pyplot.close("all")


def test_the_representation_of_an_audit_shows_control_characters_of_names() -> None:
    import torch

    from fedshuffle import Federation, audit

    names = ["\x1b[31mred"] * 2 + ["other"] * 6
    shown = repr(audit(Federation.from_arrays(torch.zeros(8, 1), client_ids=names), "fedavg"))
    assert "red counts" in shown
    assert "\x1b" not in shown
