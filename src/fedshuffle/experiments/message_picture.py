"""The picture of the README and the home page: what small clients count, and what it costs them.

Every number is the demo's own. ``make docs-pictures`` draws it.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedshuffle._terminal import progress_bar
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo import experiment
from fedshuffle.experiments.demo.experiment import RARE, DemoResult
from fedshuffle.experiments.pages import write_picture
from fedshuffle.reports.rendering import LIGHT

SHOWN = ("fedavg-rr", "fedshuffle")


def draw(result: DemoResult) -> Figure:
    """What small clients count, meant and really; how well their digits are read."""
    small, found = result.digits.small, {method.name: method for method in result.methods}
    meant = float(result.digits.federation.weights[small].sum())
    counts = [found[name].count_of(small) for name in SHOWN]
    reached = [float(found[name].rare.mean()) for name in SHOWN]
    possible = float(result.optimal_accuracies[RARE].mean())
    data = (
        f"handwritten digits, {experiment.COHORT} random clients per round, mean of"
        f" {experiment.RUNS} runs (make demo)"
    )
    with matplotlib.rc_context(LIGHT.parameters | {"font.size": 14}):
        figure = Figure(figsize=(11, 4), layout=ConstrainedLayoutEngine(w_pad=0.25, h_pad=0.12))
        left, right = figure.subplots(1, 2)
        question = f"{small.sum()} of {len(small)} clients are small. Do they count?"
        figure.suptitle(question, fontsize=20, fontweight="bold")
        _bars(left, "Their share of the objective", "you meant", [meant, *counts])
        _bars(right, "Accuracy on their digits", "at the optimum", [possible, *reached])
        figure.supxlabel(data, fontsize=11)
    return figure


def _bars(axes: Axes, title: str, first: str, shares: list[float]) -> None:
    """What is wanted as a hollow bar, then a bar for each method."""
    names, places = [first, *map(experiment.LABELS.__getitem__, SHOWN)], np.arange(len(shares))
    colours = ["white", *map(LIGHT.colour, SHOWN)]
    axes.barh(places, shares, 0.72, color=colours, edgecolor=[LIGHT.axis, *colours[1:]])
    axes.axvline(shares[0], color=LIGHT.axis, linestyle=":", zorder=0.5)
    look: dict[str, Any] = {"ha": "right", "va": "center", "fontweight": "bold", "fontsize": 17}
    for place, share in zip(places, shares, strict=True):
        ink = "white" if place else LIGHT.ink
        axes.annotate(
            f"{share:.0%}", (share, place), (-8, 0), textcoords="offset points", color=ink, **look
        )
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.02 * max(shares)), xticks=[])
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=15)


def write(docs: Path) -> None:
    """Run the demo, and draw ``docs/images/message.png``."""
    with one_thread(), progress_bar(False) as bars:
        result = experiment.audit_and_train(experiment.ROUNDS, seed=0, bars=bars)
    write_picture(draw(result), docs / "images" / "message.png", dpi=120)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
