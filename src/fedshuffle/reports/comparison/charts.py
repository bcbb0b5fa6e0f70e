"""Small charts of the page, drawn without scripts: here are their places, templates draw them.

One chart per method shows the step sizes that were tried, another one what each client gets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from fedshuffle._arrays import FloatArray
from fedshuffle.reports.comparison.clients import ClientRow, Column
from fedshuffle.reports.comparison.model import Compared, Line, is_share, value_text
from fedshuffle.reports.comparison.searches import Search
from fedshuffle.reports.comparison.warnings import WIDEN
from fedshuffle.reports.rendering import round_numbers, spread

WIDTH, HEIGHT = 320, 214
LEFT, RIGHT, TOP, BOTTOM = 62, 302, 12, 172  # right of it is room for half a label
_STRIP = 24  # the height of the strip for what diverged
_LABEL = 36  # the width of a label of the horizontal axis
_POINTS = 400  # the largest number of dots; more cannot be told apart

Tick = tuple[float, str]
"""The place of a label, and its text."""


@dataclass(frozen=True)
class Scale:
    """Where the values of an axis are."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (x - low) / (high - low) * (self.end - self.start), 1)


def _ticks(scale: Scale) -> list[float]:
    ends = (scale.low, scale.high)
    if scale.log and len(found := round_numbers(ends)) > 1:
        return found if len(found) < 6 else (round_numbers(ends, (1,)) or found[::2])
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(*ends)
    return [float(tick) for tick in ticks if ends[0] <= tick <= ends[1]]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * abs(low) or 0.5
    return low - room, high + room


# Step sizes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchChart:
    """What a method reached at each value of a step size that was tried."""

    line: Line
    search: Search
    xticks: list[Tick]
    yticks: list[Tick]
    dots: list[tuple[float, float]]
    best: tuple[float, float] | None
    """Where the step size that won is, unless every one diverged."""
    beyond: int
    """Where a better one may be: -1 left of the best one, 1 right of it, 0 nowhere."""
    diverged: list[float]  # where a cross is
    unfinished: list[float]
    strip: float | None  # the middle of the strip for what has no value, if there is any
    text: str  # all of it in words

    @property
    def urgent(self) -> bool:
        """Whether the search did not end well."""
        return bool(self.line.hopeless or self.search.edge)

    @property
    def notes(self) -> list[str]:
        """What the reader must know."""
        found = []
        if self.urgent:
            smaller = "even the smallest diverged: try smaller ones"
            found.append(smaller if self.line.hopeless else WIDEN)
        if lost := len(self.diverged):
            found.append(f"{lost} diverged")
        if self.unfinished:
            found.append(f"{len(self.unfinished)} unfinished")
        return found


def search(
    comparison: Compared, group: str, momentum: str, key: str = "step_size"
) -> list[SearchChart]:
    """A chart for each method of a column whose step size of this key was tuned, with the same
    axes for all.
    """
    lines = [line for line in comparison.of(group, momentum) if line.searches[key].varied]
    if not lines:
        return []
    tried = [line.searches[key].tried for line in lines]
    sizes = sorted({size for values in tried for size in values})
    judge = comparison.results["judge"]
    every = [v for values in tried for v in values.values() if not isinstance(v, str)]
    lost = any(isinstance(v, str) for values in tried for v in values.values())
    top, bottom, strip = TOP, BOTTOM, None
    if lost and judge["higher_is_better"]:
        bottom, strip = BOTTOM - _STRIP, BOTTOM - _STRIP / 2
    elif lost:
        top, strip = TOP + _STRIP, TOP + _STRIP / 2
    log = bool(every) and min(every) > 0 and max(every) > 20 * min(every)
    ends = _padded(every or [0.0])
    if log:
        ends = (min(every) / 1.3, max(every) * 1.3)
    place = Scale(*ends, bottom, top, log)
    across = Scale(0, max(1, len(sizes) - 1), LEFT + 26, RIGHT - 26)
    yticks = [(place(v), _plain(v, judge["metric"])) for v in _ticks(place)] if every else []
    rest = sizes, across, place, yticks, strip, judge["metric"]
    return [_search(line, line.searches[key], *rest) for line in lines]


def _search(
    line: Line,
    search: Search,
    sizes: list[float],
    across: Scale,
    place: Scale,
    yticks: list[Tick],
    strip: float | None,
    metric: str,
) -> SearchChart:
    at = {size: across(k) for k, size in enumerate(sizes)}
    dots = {s: (at[s], place(v)) for s, v in search.tried.items() if not isinstance(v, str)}
    step = math.ceil(len(sizes) * _LABEL / (RIGHT - LEFT))
    won = sizes.index(search.won) if search.won in at else 0  # its label is always there
    words = []
    for size, value in search.tried.items():
        told = value if isinstance(value, str) else value_text(value, metric)
        won_it = ", the best" if size == search.won and size in dots else ""
        words.append(f"{size:g}: {told}{won_it}")
    return SearchChart(
        line=line,
        search=search,
        xticks=[(x, f"{s:g}") for k, (s, x) in enumerate(at.items()) if (k - won) % step == 0],
        yticks=yticks,
        dots=list(dots.values()),
        best=dots.get(search.won),
        beyond={"smallest": -1, "largest": 1}.get(search.edge, 0),
        diverged=[at[size] for size, value in search.tried.items() if value == "diverged"],
        unfinished=[at[size] for size, value in search.tried.items() if value == "unfinished"],
        strip=strip if len(dots) < len(search.tried) else None,
        text=f"{line.title}, {metric} by {search.name}. {'; '.join(words)}.",
    )


def _plain(value: float, metric: str) -> str:
    return f"{100 * value:g}%" if is_share(metric) else f"{value:g}"


# Clients ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientChart:
    """How much better off each client is than with the reference, by its size."""

    row: ClientRow
    column: Column
    xticks: list[Tick]
    yticks: list[Tick]
    dots: list[tuple[float, float]]
    same: float  # where there is no difference
    small: float  # where the small clients end

    @property
    def text(self) -> str:
        """All of it in words."""
        reference, metric = self.column.reference.line.method.label, self.column.metric
        what = f"{self.row.line.title}, {metric} of each client against {reference}"
        return f"{what}, by its examples. {self.caption}"

    @property
    def caption(self) -> str:
        """Who gains and who loses, in a sentence."""
        row, unit = self.row, "%" if is_share(self.column.metric) else ""
        others = f"{row.worse} worse, {row.same} the same"
        parts = [f"{row.better} of {len(row.values)} clients better off, {others}"]
        for name, then, now in (
            ("small clients", self.column.reference.small, row.small),
            ("worst tenth", self.column.reference.worst, row.worst),
        ):
            told = (value_text(value, self.column.metric) for value in (then, now))
            parts.append(f"{name} {f'{unit} to '.join(told)}{unit}")
        return f"{'; '.join(parts)}."


def client_charts(column: Column) -> list[ClientChart]:
    """A chart for each method but the reference, with the same axes for all."""
    rows, sizes = column.rows[1:], column.sizes
    changes = [column.sign * (row.values - column.reference.values) for row in rows]
    if not rows:
        return []
    ends = _padded([0.0, *np.concatenate(changes).tolist()])
    place = Scale(*ends, BOTTOM, TOP)
    across = Scale(float(sizes.min()) / 1.15, float(sizes.max()) * 1.15, LEFT, RIGHT, log=True)
    share = 100 if is_share(column.metric) else 1
    ticks = [t for t in _ticks(across) if t >= 1] or [float(sizes.min())]
    return [
        ClientChart(
            row=row,
            column=column,
            xticks=[(across(tick), f"{tick:g}") for tick in ticks],
            yticks=[(place(tick), f"{share * tick:+g}" if tick else "0") for tick in _ticks(place)],
            dots=[(across(x), place(y)) for x, y in _thinned(sizes, change)],
            same=place(0),
            small=across(column.small),
        )
        for row, change in zip(rows, changes, strict=True)
    ]


def _thinned(sizes: FloatArray, change: FloatArray) -> list[tuple[float, float]]:
    """Distinct dots, at most as many as can be told apart, from all sizes."""
    rows = np.unique(np.stack([sizes, change], 1), axis=0)
    return [(float(x), float(y)) for x, y in rows[spread(len(rows), _POINTS)]]


def dots_path(dots: Sequence[tuple[float, float]]) -> str:
    """Dots as one path, which a round line cap makes visible."""
    return "".join(f"M{x:g},{y:g}h0" for x, y in dots)


def curve_path(dots: Sequence[tuple[float, float]]) -> str:
    """Dots joined by lines."""
    return "".join(f"{'L' if k else 'M'}{x:g},{y:g}" for k, (x, y) in enumerate(dots))
