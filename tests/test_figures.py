"""Pictures of results look like those of the reports."""

import sys

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgba

from fedshuffle import Federation, _figures, audit, methods
from fedshuffle.errors import FedShuffleError
from fedshuffle.reports.rendering import LIGHT


def test_colours_are_those_of_the_reports() -> None:
    assert (LIGHT.ink, LIGHT.axis, LIGHT.grid) == (_figures.INK, _figures.AXIS, _figures.GRID)
    axes = audit(Federation.from_sizes([1, 2]), "fedavg-rr").plot()
    assert axes.patches[-1].get_facecolor() == to_rgba(methods.colour("fedavg-rr"))
    pyplot.close("all")


def test_every_result_gets_a_colour_of_its_own() -> None:
    axes = _figures.axes_to_draw(None)
    for _ in _figures.COLOURS:
        axes.plot([0, 1], color=_figures.next_colour(axes))
    assert [line.get_color() for line in axes.get_lines()] == list(_figures.COLOURS)
    assert _figures.next_colour(axes) in _figures.COLOURS
    pyplot.close("all")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(FedShuffleError, match=r"fedshuffle\[report\]"):
        audit(Federation.from_sizes([1, 2]), "fedavg").plot()
