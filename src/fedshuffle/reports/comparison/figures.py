"""The figures of a comparison: the paper's, one per group, and the audits behind the last one."""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle._arrays import histogram as histogram
from fedshuffle.comparison.results import effective_weights
from fedshuffle.reports.comparison import model
from fedshuffle.reports.comparison.model import Axis, Compared, ComparedMethod, Line
from fedshuffle.reports.comparison.searches import SIZES, Search
from fedshuffle.reports.rendering import LIGHT, clean, round_numbers, set_ticks, spread

_POINTS = 600  # the largest number of dots per method; more cannot be told apart


def curves(comparison: Compared, group: str, axis: Axis = model.ROUNDS) -> Figure:
    """Metric and training loss over the rounds, the local steps of all clients or the time; a row
    per momentum, plain training first.
    """
    momenta, metrics = comparison.momenta_of(group), comparison.pair
    figure = Figure(figsize=(5.4 * len(metrics), 3.3 * len(momenta) + 1.0), layout="constrained")
    title = f"{comparison.results['title']}: {model.group_title(group)}"
    _headline(figure, title)
    grid = figure.subplots(len(momenta), len(metrics), sharex=True, sharey="col", squeeze=False)
    for k, metric in enumerate(metrics):
        for momentum, axes in zip(momenta, grid[:, k], strict=True):
            _panel(axes, comparison, group, momentum, metric, axis)
            axes.set_title(_plain(model.momentum_title(momentum)), loc="left", fontsize=10.5)
            axes.set_ylabel(_plain(comparison.title(metric)))
        grid[-1, k].set_xlabel(axis.title)
    seeds = len(comparison.seeds)
    text = f"mean over {seeds} seeds; band: lowest to highest run" if seeds > 1 else "one run each"
    if any(line.diverged for line in comparison.of(group)):
        text += "; thin with a cross: a run that diverged"
    edges = [line.title for line in comparison.of(group) if line.edges]
    if edges:
        edge = f"best step size at the edge of those tried: {'; '.join(edges)}"
        text = "\n".join([text, *textwrap.wrap(edge, int(14 * figure.get_figwidth()))])
    _legend(figure, [method for method, _ in comparison.rows(group)], "-", text)
    return figure


def _panel(
    axes: Axes, comparison: Compared, group: str, momentum: str, metric: str, axis: Axis
) -> None:
    low, high = comparison.limits(group, metric)
    for line in comparison.of(group, momentum):
        method = line.method
        front = 3 if method.name.startswith("fedshuffle") else 2
        paint: dict[str, Any] = {"color": method.colour, "zorder": front}
        found, x = line.band(metric), partial(line.along, axis)
        axes.fill_between(x(found.rounds), found.low, found.high, alpha=0.2, lw=0, **paint)
        every = _every(len(found.rounds), method.index, len(comparison.methods))
        axes.plot(x(found.rounds), found.mean, markevery=every, **method.style, zorder=front)
        for rounds, values in line.stopped(metric):
            axes.plot(x(rounds), values, linewidth=0.9, alpha=0.8, **paint)
            end, value = where_lost(rounds, values, (low, high))
            axes.plot(x([end]), [value], "x", ms=7, mew=2, clip_on=False, **paint)
    if not any(np.size(drawn.get_xdata()) for drawn in axes.lines):
        axes.text(0.5, 0.5, "nothing evaluated yet", ha="center", transform=axes.transAxes)
    axes.set(xlim=(0, 1.012 * comparison.end(axis, group)), ylim=(low, high))
    whole = axis is not model.TIME
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole))
    axes.tick_params(labelbottom=True)
    if model.is_share(metric):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    _calm(axes)


def _every(points: int, k: int, of: int) -> list[int]:
    """About seven markers, at other rounds than those of other curves, and one at the end."""
    step = max(1, points // 7)
    places = range(k * step // of, max(points - step // 2, 0), step)
    return [*places, *([points - 1] if points else [])]


def where_lost(
    rounds: IntArray, values: FloatArray, limits: tuple[float, float]
) -> tuple[float, float]:
    """Where a run that diverged leaves the picture for good, and gets its cross."""
    inside = np.flatnonzero((values >= limits[0]) & (values <= limits[1]))
    last = int(inside[-1]) if inside.size else -1
    if last == len(values) - 1 or last < 0:
        return float(rounds[last]), float(np.clip(values[last], *limits))
    edge = float(np.clip(values[last + 1], *limits))
    share = (edge - values[last]) / (values[last + 1] - values[last])
    return float(rounds[last] + share * (rounds[last + 1] - rounds[last])), edge


def step_sizes(comparison: Compared) -> Figure | None:
    """What each method reached at the step sizes tried; None if not tuned.

    A column per momentum, and a row for each of the two step sizes if both were tuned.
    """
    columns: dict[str, list[Line]] = {}
    for line in comparison.lines:
        if any(search.varied for search in line.searches.values()):
            title = f"{model.group_title(line.group)}, {model.momentum_title(line.momentum)}"
            columns.setdefault(title, []).append(line)
    if not columns:
        return None
    tuned = [line for lines in columns.values() for line in lines]
    keys = [key for key in SIZES if any(line.searches[key].varied for line in tuned)]
    size = max(5.4 * len(columns), 7.2), 3.6 * len(keys) + 1.0
    figure = Figure(figsize=size, layout="constrained")
    _headline(figure, f"{comparison.results['title']}: the step sizes tried")
    grid = figure.subplots(len(keys), len(columns), sharey=True, squeeze=False)
    for key, row in zip(keys, grid, strict=True):
        for (title, lines), axes in zip(columns.items(), row, strict=True):
            found = {x.method: x.searches[key] for x in lines if x.searches[key].varied}
            _searches(axes, title, found, SIZES[key])
    judge = comparison.results["judge"]["metric"]
    for axes in grid[:, 0]:
        axes.set_ylabel(_plain(f"{judge} of the tuning run"))
    text = "ring: the best one; cross: diverged; § at the edge of those tried: widen the grid"
    _legend(figure, list(dict.fromkeys(line.method for line in tuned)), "-", text)
    return figure


def _searches(axes: Axes, title: str, found: dict[ComparedMethod, Search], name: str) -> None:
    """The searches of all methods of a panel, along one step size."""
    lost = [method for method, search in found.items() if "diverged" in search.tried.values()]
    for method, search in found.items():
        _trials(axes, method, search, 1.03 + 0.045 * lost.index(method) if method in lost else 0)
    above = "\n" * (1 + len(lost) // 2) if lost else ""  # crosses stand above the panel
    axes.set_title(_plain(title) + above, loc="left", fontsize=10.5)
    tried = [search.tried for search in found.values()]
    values = [v for some in tried for v in some.values() if not isinstance(v, str)]
    wide = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    axes.set(xscale="log", xlabel=name, yscale="log" if wide else "linear")
    _calm(axes)
    sizes = sorted({size for some in tried for size in some})
    set_ticks(axes.xaxis, sizes[:: 1 + len(sizes) // 8])


def _trials(axes: Axes, method: ComparedMethod, search: Search, height: float) -> None:
    """The trials of a method: its values, the best one, the edge, and crosses for the diverged."""
    dots = {size: v for size, v in search.tried.items() if not isinstance(v, str)}
    axes.plot(list(dots), list(dots.values()), **method.style)
    if (best := dots.get(search.won)) is not None:
        place = [search.won], [best]
        axes.plot(*place, "o", mfc="none", mec=LIGHT.ink, ms=13, mew=1.4, zorder=4)
        if search.edge:
            shift, side = (13, "left") if search.edge == "largest" else (-13, "right")
            axes.annotate(
                *("§", (search.won, best), (shift, -4)),
                textcoords="offset points",
                ha=side,
                color=method.colour,
                size=13,
            )
    if gone := [size for size, value in search.tried.items() if value == "diverged"]:
        above, paint = axes.get_xaxis_transform(), method.colour
        heights = [height] * len(gone)
        axes.plot(gone, heights, "x", transform=above, clip_on=False, ms=6, mew=2, color=paint)


@dataclass(frozen=True)
class Audited:
    """The audit of a method, for all momenta under which it is the same."""

    method: ComparedMethod
    momenta: list[str]
    consistent: bool | None
    unknown: str  # why the weights could not be computed, else empty
    wrong: float  # the share of the weight that is in the wrong place
    largest: float
    """The largest factor between a client's effective and intended weight, either way."""
    points: FloatArray  # distinct rows of size and `w-hat_i / w_i`


def audits(comparison: Compared) -> list[Audited]:
    """All audits, one per method and per effect of momentum."""
    found: dict[tuple[Any, ...], Audited] = {}
    sizes = np.array(comparison.results["federation"]["sizes"])
    # The step size changes nothing in the audit: it is the same in all groups.
    for line in sorted(comparison.lines, key=lambda x: (x.method.index, x.momentum != "none")):
        audit = line.curve["audit"]
        meant = np.array(audit["objective_weights"])
        effective = effective_weights(audit)
        ratios = effective / meant
        key = (line.method, audit["consistent"], ratios.round(6).tobytes())
        if key not in found:
            positive = ratios[ratios > 0]
            largest = float(np.maximum(positive, 1 / positive).max(initial=0)) or math.inf
            wrong = 0.5 * float(np.abs(effective - meant).sum())
            points = _points(sizes, ratios)
            told = audit["consistent"], audit.get("unknown", "")
            found[key] = Audited(line.method, [], *told, wrong, largest, points)
        if line.momentum not in found[key].momenta:
            found[key].momenta.append(line.momentum)
    return list(found.values())


def _points(sizes: Any, ratios: FloatArray) -> FloatArray:
    """Clients of the same size and ratio are one dot; a ratio of zero has no place on the axis."""
    there = ratios > 0
    rows = np.stack([sizes[there], [float(f"{ratio:.3g}") for ratio in ratios[there]]], 1)
    rows = np.unique(rows.astype(np.float64), axis=0)
    return np.asarray(rows[spread(len(rows), _POINTS)])


def ratio_limits(found: Sequence[Audited]) -> tuple[float, float]:
    """The ends of the axis of ratios, with one in it and room to both sides."""
    ratios = [float(ratio) for audited in found for ratio in audited.points[:, 1]]
    return min([0.7, *ratios]) / 1.25, max([1.4, *ratios]) * 1.25


def weights(comparison: Compared, found: Sequence[Audited]) -> Figure | None:
    """The effective over the intended weight of each client; None without an audit."""
    shown = [audited for audited in found if len(audited.points)]
    if not shown:
        return None
    alike = all(set(audited.momenta) == set(shown[0].momenta) for audited in shown)
    momenta = [m for m in comparison.momenta if any(m in audited.momenta for audited in shown)]
    panels = momenta[:1] if alike else momenta  # one is enough where momentum changes nothing
    figure = Figure(figsize=(1.6 + 5.8 * len(panels), 4.6), layout="constrained")
    row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, momentum in zip(row, panels, strict=True):
        axes.axhline(1, color=LIGHT.axis, linewidth=1)
        for audited in shown:
            if momentum in audited.momenta:
                dots = {**audited.method.style, "linestyle": "none", "markeredgewidth": 0}
                axes.plot(*audited.points.T, alpha=0.75, **dots)
        if len(panels) > 1:
            axes.set_title(_plain(model.momentum_title(momentum)), loc="left", fontsize=10.5)
        axes.set(xscale="log", yscale="log", ylim=ratio_limits(found))
        axes.set_xlabel("examples of the client")
        _calm(axes)
    row[0].set_ylabel("counts ... times what was meant")
    for axis, ends in ((row[0].xaxis, row[0].get_xlim()), (row[0].yaxis, row[0].get_ylim())):
        ticks = round_numbers(ends)
        ticks = ticks if len(ticks) < 13 else round_numbers(ends, multiples=(1,))
        set_ticks(axis, ticks[:: 1 + len(ticks) // 12])
    _legend(figure, list(dict.fromkeys(audited.method for audited in shown)), "none", "")
    return figure


def _headline(figure: Figure, title: str) -> None:
    lines = textwrap.wrap(title, int(9 * figure.get_figwidth()), max_lines=3, placeholder=" …")
    figure.suptitle(_plain("\n".join(lines)), fontsize=13)


def _legend(figure: Figure, methods: Sequence[ComparedMethod], linestyle: str, title: str) -> None:
    handles = [Line2D([], [], **{**m.style, "linestyle": linestyle}) for m in methods]
    # matplotlib leaves out a label that begins with an underscore.
    most = int(9 * figure.get_figwidth())  # letters in a line
    short = [x if len(x) <= most else f"{x[: most - 1]}…" for x in (m.label for m in methods)]
    labels = [_plain(re.sub("^_", " _", label)) for label in short]
    width = sum(0.085 * len(label) + 0.75 for label in labels)  # in inches, as the font has it
    columns = -(-len(labels) // -(-width // figure.get_figwidth()))
    place = figure.legend(
        handles, labels, loc="outside lower center", ncols=int(columns), frameon=False, title=title
    )
    place.get_title().set(text=_plain(title), fontsize=9, color="#555555", ha="center")


def _plain(text: str) -> str:
    """Text in which a dollar is a dollar and no formula."""
    return text.replace("$", r"\$")


def _calm(axes: Axes) -> None:
    clean(axes)
    axes.spines[["left", "bottom"]].set_color(LIGHT.axis)
    axes.tick_params(colors=LIGHT.ink, which="both", length=3)
