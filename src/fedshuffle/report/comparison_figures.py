"""The figures of a comparison: the paper's, one for each group, and what the audits found."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fedshuffle.report.comparison_details import Audited, ratio_limits
from fedshuffle.report.comparison_numbers import (
    Compared,
    Entrant,
    group_title,
    is_share,
    momentum_title,
    where_lost,
)

_INK, _GREY, _GRID = "#222222", "#8a8f98", "#e6e8eb"


def curves(comparison: Compared, group: str) -> Figure:
    """Metric and training loss over the rounds; a row for each momentum, plain training first."""
    momenta, metrics = comparison.momenta_of(group), comparison.pair()
    figure = Figure(figsize=(5.4 * len(metrics), 3.3 * len(momenta) + 1.0), layout="constrained")
    figure.suptitle(_plain(f"{comparison.results['title']}: {group_title(group)}"), fontsize=13)
    grid = figure.subplots(len(momenta), len(metrics), sharex=True, sharey="col", squeeze=False)
    for k, metric in enumerate(metrics):
        for momentum, axes in zip(momenta, grid[:, k], strict=True):
            _panel(axes, comparison, group, momentum, metric)
            axes.set_title(_plain(momentum_title(momentum)), loc="left", fontsize=10.5)
            axes.set_ylabel(_plain(comparison.title(metric)))
        grid[-1, k].set_xlabel("round")
    _legend(figure, comparison.methods_of(group), "-", _reading(comparison, group))
    return figure


def _reading(comparison: Compared, group: str) -> str:
    """How to read the lines of a figure."""
    seeds = len(comparison.seeds)
    text = f"mean over {seeds} seeds; band: lowest to highest run" if seeds > 1 else "one run each"
    curves = [curve for curve in comparison.results["curves"] if curve["group"] == group]
    lost = any(comparison.diverged(run) for curve in curves for run in curve["runs"])
    return f"{text}; thin with a cross: a run that diverged" if lost else text


def _panel(axes: Axes, comparison: Compared, group: str, momentum: str, metric: str) -> None:
    low, high = comparison.limits(group, metric)
    methods = comparison.methods
    for k, method in enumerate(methods):
        curve = comparison.curve(group, momentum, method.name)
        if curve is None:
            continue
        front = 3 if method.name.startswith("fedshuffle") else 2
        paint: dict[str, Any] = {"color": method.colour, "zorder": front}
        found = comparison.band(curve, metric)
        axes.fill_between(found.rounds, found.low, found.high, alpha=0.2, lw=0, **paint)
        every = _every(len(found.rounds), k, len(methods))
        axes.plot(found.rounds, found.mean, markevery=every, **paint, **_look(method))
        for rounds, values in comparison.stopped(curve, metric):
            axes.plot(rounds, values, linewidth=0.9, alpha=0.8, **paint)
            end, value = where_lost(rounds, values, (low, high))
            axes.plot([end], [value], "x", ms=7, mew=2, clip_on=False, **paint)
    if not any(np.size(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "nothing evaluated yet", ha="center", transform=axes.transAxes)
    axes.set(xlim=(0, 1.012 * comparison.rounds), ylim=(low, high))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.tick_params(labelbottom=True)
    if is_share(metric):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    _calm(axes)


def _every(points: int, k: int, of: int) -> list[int]:
    """Some seven markers, at other rounds than those of other curves, and one at the end."""
    step = max(1, points // 7)
    places = range(k * step // of, max(points - step // 2, 0), step)
    return [*places, *([points - 1] if points else [])]


def weights(comparison: Compared, found: Sequence[Audited]) -> Figure | None:
    """How many times too much each client counts; None without an audit."""
    shown = [audited for audited in found if len(audited.points)]
    if not shown:
        return None
    alike = all(set(audited.momenta) == set(shown[0].momenta) for audited in shown)
    momenta = [m for m in comparison.momenta if any(m in audited.momenta for audited in shown)]
    panels = momenta[:1] if alike else momenta  # one does where momentum changes nothing
    figure = Figure(figsize=(1.6 + 5.8 * len(panels), 4.6), layout="constrained")
    row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, momentum in zip(row, panels, strict=True):
        axes.axhline(1, color=_GREY, linewidth=1)
        for audited in shown:
            if momentum in audited.momenta:
                look = {**_look(audited.method), "linestyle": "none", "markeredgewidth": 0}
                axes.plot(*audited.points.T, color=audited.method.colour, alpha=0.75, **look)
        if len(panels) > 1:
            axes.set_title(_plain(momentum_title(momentum)), loc="left", fontsize=10.5)
        axes.set(xscale="log", yscale="log", ylim=ratio_limits(found))
        axes.set_xlabel("examples of the client")
        _calm(axes)
    row[0].set_ylabel("counts ... times what was meant")
    for name in ("x", "y"):
        _plain_ticks(row[0], name)
    methods = list(dict.fromkeys(audited.method for audited in shown))
    _legend(figure, methods, "none", "")
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path`` with .png and .pdf; the same numbers give the same bytes."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # letters stay letters in a paper
        figure.savefig(files[0], dpi=160, metadata={"Software": None})
        figure.set_layout_engine("none")  # laid out once is enough
        figure.savefig(files[1], metadata={"CreationDate": None})
    return files


def png(figure: Figure) -> bytes:
    """The figure for a page."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120, metadata={"Software": None})
    return drawn.getvalue()


def _look(method: Entrant) -> dict[str, Any]:
    return {
        "marker": method.marker,
        "markersize": 9 if method.marker == "*" else 5.5,
        "linewidth": 1.6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def _legend(figure: Figure, methods: Sequence[Entrant], linestyle: str, title: str) -> None:
    handles = [
        Line2D([], [], color=method.colour, **{**_look(method), "linestyle": linestyle})
        for method in methods
    ]
    # matplotlib leaves out a label that begins with an underscore.
    labels = [_plain(re.sub("^_", " _", method.label)) for method in methods]
    width = sum(0.085 * len(label) + 0.75 for label in labels)  # in inches, as the font has it
    columns = -(-len(labels) // -(-width // figure.get_figwidth()))
    place = figure.legend(
        handles, labels, loc="outside lower center", ncols=int(columns), frameon=False, title=title
    )
    place.get_title().set(fontsize=9, color="#555555")


def _plain(text: str) -> str:
    """Text in which a dollar is a dollar and no formula."""
    return text.replace("$", r"\$")


def _calm(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, which="both", length=3)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _plain_ticks(axes: Axes, which: str) -> None:
    """1, 2, 5, 10, ... on a logarithmic axis."""
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    steps = [m * 10.0**k for k in range(-6, 9) for m in (1, 2, 5)]
    ticks = [tick for tick in steps if low <= tick <= high]
    ticks = ticks if len(ticks) < 13 else [10.0**k for k in range(-6, 9) if low <= 10.0**k <= high]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(
        ticks[:: 1 + len(ticks) // 12], labels=[f"{t:g}" for t in ticks[:: 1 + len(ticks) // 12]]
    )
    axis.set_minor_locator(NullLocator())
