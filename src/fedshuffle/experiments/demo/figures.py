"""The pictures of the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from fedshuffle.experiments.demo.experiment import Results, Summary
from fedshuffle.experiments.demo.words import headline
from fedshuffle.methods import label
from fedshuffle.reports.drawing import data_uri, round_numbers, set_ticks
from fedshuffle.reports.style import LIGHT, Theme


def draw_federation(figure: FigureBase, results: Results, theme: Theme) -> None:
    """Sizes of the clients, and under each the digits it holds."""
    sizes = np.array(results["federation"]["sizes"])
    order = np.argsort(-sizes, kind="stable")
    sizes = sizes[order]
    mix = (np.array(results["federation"]["label_counts"])[order] / sizes[:, None]).T
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1])
    shades = np.where(np.array(results["federation"]["small"])[order], "#9db4c0", "#5c6b73")
    top.bar(np.arange(len(sizes)), sizes, color=shades, width=0.8)
    top.set_ylabel("examples")
    top.grid(axis="y")
    image = bottom.imshow(mix, aspect="auto", cmap=theme.greys, vmin=0, vmax=1, origin="lower")
    bottom.set_yticks(range(0, len(mix), 3))
    bottom.set(ylabel="digit", xlabel="client, from the largest to the smallest")
    bottom.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=bottom, pad=0.02, ticks=[0, 0.5, 1], label="share")
    bar.outline.set_visible(False)


def draw_weights(figure: FigureBase, results: Results, theme: Theme) -> None:
    """The effective over the intended weight of each client."""
    audits = [method["audit"] for method in results["methods"]]
    ratios = {
        audit["method"]: np.divide(audit["effective_weights"], audit["objective_weights"])
        for audit in audits
    }
    axes = _by_size(figure, results, theme, ratios, 1)
    axes.set(yscale="log", ylabel="counts … times what you meant")
    _log_ticks(axes.yaxis, np.concatenate(list(ratios.values())))


def draw_payers(figure: FigureBase, results: Results, theme: Theme) -> None:
    """Each client's loss beside its loss at the optimum."""
    losses = {m["audit"]["method"]: np.mean(m["excess"], axis=0) for m in results["methods"]}
    axes = _by_size(figure, results, theme, losses, 0)
    axes.set_ylabel("loss above that at the optimum")


def _by_size(
    figure: FigureBase, results: Results, theme: Theme, values: dict[str, Any], neutral: float
) -> Axes:
    """A number of each client and method, over the client's size."""
    axes = figure.subplots()
    sizes = results["federation"]["sizes"]
    axes.axhline(neutral, color=theme.axis, linewidth=1)
    look: dict[str, Any] = {"markersize": 5, "alpha": 0.75, "markeredgewidth": 0}
    for method, numbers in values.items():
        axes.plot(sizes, numbers, "o", color=theme.colour(method), label=label(method), **look)
    axes.set(xscale="log", xlabel="examples of the client")
    _log_ticks(axes.xaxis, sizes)
    axes.legend(frameon=False)
    axes.grid(axis="y")
    return axes


def _log_ticks(axis: Any, values: Any) -> None:
    set_ticks(axis, round_numbers((np.min(values) / 1.5, np.max(values) * 1.5), (1, 2, 3, 5)))


def draw_training(figure: FigureBase, results: Results, theme: Theme) -> None:
    """``f(x^r) - f*`` over the rounds, with the levels that the audit predicts."""
    axes = figure.subplots()
    rounds, methods = results["rounds"], results["methods"]
    lowest = min(float(np.min(method["suboptimality"])) for method in methods)
    # A level far below every curve would only squeeze the curves.
    levels = [method["predicted"] for method in methods if method["predicted"]]
    bottom = max(min([*levels, lowest]), lowest / 30)
    for method in methods:
        shade, name = (f(method["audit"]["method"]) for f in (theme.colour, label))
        runs, predicted = np.array(method["suboptimality"]), method["predicted"]
        axes.fill_between(rounds, runs.min(0), runs.max(0), color=shade, alpha=0.18, lw=0)
        axes.plot(rounds, runs.mean(0), color=shade, lw=1.8, label=name)
        if predicted >= bottom:
            axes.axhline(predicted, color=shade, linestyle=":", linewidth=1.6)
            below = runs[:, -1].mean() > predicted  # on the side away from the curve
            axes.annotate(
                f"predicted for {name}",
                (rounds[-1], predicted),
                xytext=(0, -5 if below else 5),
                textcoords="offset points",
                ha="right",
                va="top" if below else "bottom",
                color=shade,
                fontsize="small",
                bbox={"facecolor": theme.page, "alpha": 0.7, "linewidth": 0, "pad": 1},
            )
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom / 2.5)
    axes.set(xlabel="round", ylabel="$f(x) - f^*$, what is left to gain")
    axes.legend(frameon=False)
    axes.grid(axis="y")


PICTURES: dict[str, tuple[str, Callable[[FigureBase, Results, Theme], None]]] = {
    "federation": ("Who holds what", draw_federation),
    "weights": ("How much each client counts (audit)", draw_weights),
    "training": ("What is left to gain (training)", draw_training),
    "payers": ("Who pays", draw_payers),
}
"""Title and drawing of each picture; the page shows them one by one, the PNG all together."""


def write_picture(results: Results, summary: Summary, path: Path) -> None:
    """All pictures on one sheet."""
    with matplotlib.rc_context(LIGHT.parameters):
        sheet = Figure(figsize=(12, 8.8), layout="constrained")
        sheet.suptitle(headline(summary), fontsize="x-large")
        parts = np.ravel(np.asarray(sheet.subfigures(2, 2, wspace=0.04, hspace=0.04)))
        for part, (title, draw) in zip(parts, PICTURES.values(), strict=True):
            part.suptitle(title, fontsize="large")
            draw(part, results, LIGHT)
        # No software version in the file: the same numbers give the same bytes.
        sheet.savefig(path, dpi=130, metadata={"Software": None})


def embedded(name: str, results: Results, theme: Theme) -> str:
    """A picture as data URI, for a light or a dark page."""
    with matplotlib.rc_context(theme.parameters):
        figure = Figure(figsize=(5.6, 3.7), layout="constrained")
        PICTURES[name][1](figure, results, theme)
        return data_uri(figure, "svg")
