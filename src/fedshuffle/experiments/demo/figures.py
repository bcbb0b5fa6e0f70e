"""The pictures of the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, FigureBase
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.experiments.demo.experiment import DemoResult
from fedshuffle.reports.drawing import data_uri, round_numbers, set_ticks
from fedshuffle.reports.style import LIGHT, Theme


def draw_federation(figure: FigureBase, demo: DemoResult, theme: Theme) -> None:
    """Sizes of the clients, and under each the digits it holds."""
    order = np.argsort(-demo.digits.federation.sizes, kind="stable")
    sizes = demo.digits.federation.sizes[order]
    mix = (demo.digits.label_counts[order] / sizes[:, None]).T
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1])
    shades = np.where(demo.digits.small[order], "#9db4c0", "#5c6b73")
    top.bar(np.arange(len(sizes)), sizes, color=shades, width=0.8)
    top.set_ylabel("examples")
    top.grid(axis="y")
    image = bottom.imshow(mix, aspect="auto", cmap=theme.greys, vmin=0, vmax=1, origin="lower")
    bottom.set_yticks(range(0, len(mix), 3))
    bottom.set(ylabel="digit", xlabel="client, from the largest to the smallest")
    bottom.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=bottom, pad=0.02, ticks=[0, 0.5, 1], label="share")
    bar.outline.set_visible(False)


def draw_weights(figure: FigureBase, demo: DemoResult, theme: Theme) -> None:
    """The effective over the intended weight of each client."""
    ratios = np.stack([m.audit.ratios for m in demo.methods])
    axes = _by_size(figure, demo, theme, ratios, "counts … times what you meant")
    axes.axhline(1, color=theme.axis, linewidth=1, zorder=0.5)
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, ratios)


def draw_payers(figure: FigureBase, demo: DemoResult, theme: Theme) -> None:
    """Each client's loss beside its loss at the optimum."""
    losses = np.stack([m.excess.mean(axis=0) for m in demo.methods])
    axes = _by_size(figure, demo, theme, losses, "loss above that at the optimum")
    axes.axhline(0, color=theme.axis, linewidth=1, zorder=0.5)


def _by_size(
    figure: FigureBase, demo: DemoResult, theme: Theme, values: FloatArray, what: str
) -> Axes:
    """A number of each method (row) and client, over the client's size."""
    axes, sizes = figure.subplots(), demo.digits.federation.sizes
    for m, numbers in zip(demo.methods, values, strict=True):
        axes.scatter(sizes, numbers, 25, theme.colour(m.name), label=m.label, alpha=0.75, lw=0)
    axes.set(xscale="log", xlabel="examples of the client", ylabel=what)
    _log_ticks(axes.xaxis, sizes)
    axes.legend(frameon=False)
    axes.grid(axis="y")
    return axes


def _log_ticks(axis: Axis, values: NDArray[Any]) -> None:
    set_ticks(axis, round_numbers((values.min() / 1.5, values.max() * 1.5), (1, 2, 3, 5)))


def draw_training(figure: FigureBase, demo: DemoResult, theme: Theme) -> None:
    """``f(x^r) - f*`` over the rounds, with the levels that the audit predicts."""
    axes = figure.subplots()
    lowest = min(float(m.suboptimality.min()) for m in demo.methods)
    # A level far below every curve would only squeeze the curves.
    levels = [m.predicted for m in demo.methods if m.predicted]
    bottom = max(min([*levels, lowest]), lowest / 30)
    for m in demo.methods:
        shade, runs = theme.colour(m.name), m.suboptimality
        axes.fill_between(demo.evaluated, runs.min(0), runs.max(0), color=shade, alpha=0.18, lw=0)
        axes.plot(demo.evaluated, runs.mean(0), color=shade, lw=1.8, label=m.label)
        if m.predicted >= bottom:
            axes.axhline(m.predicted, color=shade, linestyle=":", linewidth=1.6)
            below = m.left.mean() > m.predicted  # on the side away from the curve
            axes.annotate(
                f"predicted for {m.label}",
                (demo.rounds, m.predicted),
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


PICTURES: dict[str, tuple[str, Callable[[FigureBase, DemoResult, Theme], None]]] = {
    "federation": ("Who holds what", draw_federation),
    "weights": ("How much each client counts (audit)", draw_weights),
    "training": ("What is left to gain (training)", draw_training),
    "payers": ("Who pays", draw_payers),
}
"""Title and drawing of each picture; the page shows them one by one, the PNG all together."""


def write_picture(demo: DemoResult, title: str, path: Path) -> None:
    """All pictures on one sheet."""
    with matplotlib.rc_context(LIGHT.parameters):
        sheet = Figure(figsize=(12, 8.8), layout="constrained")
        sheet.suptitle(title, fontsize="x-large")
        parts = np.ravel(np.asarray(sheet.subfigures(2, 2, wspace=0.04, hspace=0.04)))
        for part, (name, draw) in zip(parts, PICTURES.values(), strict=True):
            part.suptitle(name, fontsize="large")
            draw(part, demo, LIGHT)
        # No software version in the file: the same numbers give the same bytes.
        sheet.savefig(path, dpi=130, metadata={"Software": None})


def embedded(name: str, demo: DemoResult, theme: Theme) -> str:
    """A picture as data URI, for a light or a dark page."""
    with matplotlib.rc_context(theme.parameters):
        figure = Figure(figsize=(5.6, 3.7), layout="constrained")
        PICTURES[name][1](figure, demo, theme)
        return data_uri(figure, "svg")
