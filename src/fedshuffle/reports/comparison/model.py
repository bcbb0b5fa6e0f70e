"""The results of a comparison in numbers: methods, curves, and how every curve ends.

Two rules hold in every figure and table. A run that diverged counts in no mean: its method is
marked instead, and cannot be the best. The standard deviation is that of a sample (n - 1), so one
run has none.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.comparison.results import Curve, Results, RunRecord, check_results
from fedshuffle.methods import colour
from fedshuffle.reports.comparison.searches import SIZES, Search, tried_at

# The first is nearest to the colour of the FedNova variants.
_PALETTE = (
    *("#0072B2", "#D55E00", "#882255", "#CC79A7", "#E69F00", "#56B4E9", "#009E73"),
    *("#117733", "#332288", "#AA4499", "#661100", "#999999"),
)

_MARKERS = {
    "o": "M-1,0a1,1 0 1,0 2,0a1,1 0 1,0 -2,0z",
    "s": "M-.9,-.9h1.8v1.8h-1.8z",
    "^": "M0,-1.15L1.1,.85H-1.1z",
    "D": "M0,-1.25L1.25,0 0,1.25 -1.25,0z",
    "v": "M0,1.15L1.1,-.85H-1.1z",
    "*": "M0,-1.6L.42,-.5 1.52,-.49 .63,.2 .95,1.3 0,.65 -.95,1.3 -.63,.2 -1.52,-.49 -.42,-.5z",
    "<": "M-1.15,0L.85,1.1V-1.1z",
    "P": "M-.42,-1.2h.84v.78h.78v.84h-.78v.78h-.84v-.78h-.78v-.84h.78z",
    ">": "M1.15,0L-.85,1.1V-1.1z",
}
"""Matplotlib's name of a marker, and the same as an SVG path of radius one."""


@dataclass(frozen=True)
class ComparedMethod:
    """A method of the comparison, and how it looks."""

    name: str
    label: str
    index: int
    colour: str
    marker: str
    path: str  # the marker in SVG

    @property
    def style(self) -> dict[str, Any]:
        """Matplotlib's arguments for a line with markers."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": 9 if self.marker == "*" else 5.5,
            "linewidth": 1.6,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
        }


class Band(NamedTuple):
    """A curve over the rounds in which at least one run has a value."""

    rounds: IntArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    runs: IntArray  # the number of runs that each mean is over


@dataclass(frozen=True)
class Axis:
    """What curves are drawn over."""

    name: str
    key: str  # in records
    title: str
    unit: str


ROUNDS = Axis("rounds", "round", "round", "rounds")
STEPS = Axis("steps", "total_steps", "local steps of all clients", "local steps")
TIME = Axis("time", "time", "simulated seconds", "seconds")
AXES = (ROUNDS, STEPS, TIME)


class Line:
    """A method under one momentum in one group: its curve, and how it ends."""

    def __init__(self, curve: Curve, method: ComparedMethod, results: Results) -> None:
        self.curve, self.method, self.metric = curve, method, results["metric"]
        self.group, self.momentum = curve["group"], curve["momentum"]
        self.title = f"{method.label}, {momentum_title(self.momentum)}"
        self.step_size, self.client_steps = curve["step_size"], curve["client_step_sizes"]
        self.server_step_size = curve["server_step_size"]
        self.ended = [run for run in curve["runs"] if not self.lost(run)]
        self.planned = len(results["settings"]["seeds"])
        self.finished, self.diverged = len(self.ended), len(curve["runs"]) - len(self.ended)
        self.missing = self.planned - len(curve["runs"])
        self.mean, self.std = spread_of(final_value(run, self.metric) for run in self.ended)
        self.best = self.near = False
        """Near is not the best, but at most a standard deviation, its own or the best one's, away
        from it."""
        trials, higher = curve["tuning"], results["judge"]["higher_is_better"]
        self.searches = {
            key: Search(key, curve[key], tried_at(trials, [key], higher))  # type: ignore[literal-required]
            for key in SIZES
        }
        self.tried = tried_at(trials, list(SIZES), higher)
        """The best value of the trials at each pair of step sizes."""
        self.edge, self.server_edge = (search.edge for search in self.searches.values())
        self.edges = [search for search in self.searches.values() if search.edge]
        lowest = next(iter(self.searches["step_size"].tried.values()), None)
        none = all(isinstance(value, str) for value in self.tried.values())
        self.hopeless = lowest == "diverged" and none
        """Whether even the smallest step size that was tried diverged, and no other ended well."""
        self.shows_server = self.server_step_size != 1 or self.searches["server_step_size"].varied
        """Whether its server step size tells anything."""
        self.majority = results["majority"]
        # Less than a standard error above the class's share cannot be told from chance.
        limit = sum(self.majority.values()) if self.majority else -math.inf
        self.trivial = self.mean is not None and self.mean <= limit
        """Whether it is no better than always predicting the most common class."""

    @property
    def value(self) -> str:
        """Mean and deviation at the end, or why there is none."""
        if self.mean is not None:
            return spread_text(self.mean, self.std, self.metric)
        return "diverged" if self.diverged else "unfinished"

    @property
    def steps(self) -> str:
        """The step size, and the range of the clients' step sizes."""
        size, (low, high) = self.step_size, self.client_steps
        if math.isclose(low, size):
            return f"{size:g}" if math.isclose(high, size) else f"{size:g} to {high:g}"
        return f"{size:g} ({low:g} to {high:g})"

    def lost(self, run: RunRecord) -> bool:
        """Whether a run diverged, or the last value of its metric is not finite."""
        return run["diverged"] or final_value(run, self.metric) is None

    def band(self, metric: str) -> Band:
        """Mean, lowest and highest over the runs that did not diverge, round by round."""
        values: dict[int, list[float]] = {}
        for run in self.ended:
            for round, value in _values(run, metric):
                values.setdefault(round, []).append(value)
        found = dict(sorted(values.items())).values()
        mean, low, high = (np.array([f(x) for x in found]) for f in (np.mean, min, max))
        return Band(np.array(sorted(values)), mean, low, high, np.array([len(x) for x in found]))

    def along(self, axis: Axis, rounds: Any) -> FloatArray:
        """Where some rounds are on an axis, such as the local steps until then: the runs' mean."""
        if axis is ROUNDS:
            return np.asarray(rounds, dtype=np.float64)
        known: dict[int, list[float]] = {0: [0.0]}
        for run in self.curve["runs"]:
            for round, value in _values(run, axis.key):
                known.setdefault(round, []).append(value)
        at = sorted(known)
        return np.asarray(np.interp(rounds, at, [np.mean(known[round]) for round in at]))

    def stopped(self, metric: str) -> list[tuple[IntArray, FloatArray]]:
        """Rounds and values of the runs that diverged, as far as each had a value."""
        runs = [_values(run, metric) for run in self.curve["runs"] if self.lost(run)]
        return [(np.array([r for r, _ in x]), np.array([v for _, v in x])) for x in runs if x]


class Compared:
    """The results of a comparison, checked, and what is computed from them."""

    def __init__(self, results: Results) -> None:
        check_results(results)
        self.results, self.metric, self.rounds = results, results["metric"], results["rounds"]
        self.seeds: list[int] = results["settings"]["seeds"]
        curves = results["curves"]
        methods = _looks({curve["method"]: curve["label"] for curve in curves})
        self.methods = list(methods.values())
        self.groups = list(dict.fromkeys(curve["group"] for curve in curves))
        momenta = dict.fromkeys(curve["momentum"] for curve in curves)
        self.momenta = sorted(momenta, key=lambda momentum: momentum != "none")
        records = [r for curve in curves for run in curve["runs"] for r in run["history"]]
        seen = dict.fromkeys(k for record in records for k, v in record.items() if v is not None)
        losses = [name for name in ("training_loss", "loss") if name in seen]
        self.pair = list(dict.fromkeys([self.metric, *losses[:1]]))  # of the paper's figure
        self.axes = [axis for axis in AXES if axis.key in seen] or [ROUNDS]
        """What the curves can be drawn over; the first one is the rounds."""
        seen = {name: None for name in seen if name not in [axis.key for axis in AXES]}
        self.metrics = list(dict.fromkeys([self.metric, *losses, *seen]))
        self.lines: list[Line] = []
        for group, momentum in itertools.product(self.groups, self.momenta):
            column = [c for c in curves if (c["group"], c["momentum"]) == (group, momentum)]
            lines = [Line(curve, methods[curve["method"]], results) for curve in column]
            self._rank(lines)
            self.lines += sorted(lines, key=lambda line: line.method.index)
        self.limits = cache(self._limits)

    def of(self, group: str, momentum: str | None = None) -> list[Line]:
        """The lines of a group, or of one momentum in it."""
        return [x for x in self.lines if x.group == group and momentum in (None, x.momentum)]

    def end(self, axis: Axis, group: str) -> float:
        """Where the last of a group's curves ends on an axis."""
        return max(float(line.along(axis, self.rounds)) for line in self.of(group)) or 1.0

    def shows_server(self, group: str) -> bool:
        """Whether a table of the group has server step sizes."""
        return any(line.shows_server for line in self.of(group))

    def momenta_of(self, group: str) -> list[str]:
        """The momenta for which the group has a curve."""
        return list(dict.fromkeys(line.momentum for line in self.of(group)))

    def rows(self, group: str) -> list[tuple[ComparedMethod, list[Line | None]]]:
        """The table of a group: its methods, each with its line for every momentum."""
        momenta = self.momenta_of(group)
        found = {(line.method, line.momentum): line for line in self.of(group)}
        methods = [m for m in self.methods if any((m, momentum) in found for momentum in momenta)]
        return [(m, [found.get((m, momentum)) for momentum in momenta]) for m in methods]

    def title(self, metric: str) -> str:
        """A metric in words."""
        return metric_title(metric, any(name.startswith("training_") for name in self.metrics))

    def _limits(self, group: str, metric: str) -> tuple[float, float]:
        """The ends of a group's axis; what lies further out than the bulk is wide is cut off."""
        lines = self.of(group)
        found = [x for line in lines for x in line.band(metric)[1:4]]
        if not any(len(values) for values in found):
            found = [values for line in lines for _, values in line.stopped(metric)]
        values = np.concatenate([np.zeros(0), *found])
        if not values.size:
            return 0.0, 1.0
        low, high = (float(end) for end in np.quantile(values, [0.02, 0.98]))
        reach = high - low
        low, high = max(float(values.min()), low - reach), min(float(values.max()), high + reach)
        room = 0.04 * (high - low) or 0.05 * abs(low) or 0.5
        return low - room, high + room

    def _rank(self, column: Iterable[Line]) -> None:
        """Mark the best lines of a column."""
        means = {x: x.mean for x in column if x.mean is not None and not x.diverged}
        if means:
            pick = max if self.results["higher_is_better"] else min
            first = pick(means, key=lambda line: means[line])
            for line, mean in means.items():
                gap = abs(mean - means[first])
                line.best = gap == 0
                line.near = 0 < gap <= max(first.std or 0.0, line.std or 0.0)


def spread_of(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the values that are known, as far as there are any."""
    known = np.array([value for value in values if value is not None])
    std = float(known.std(ddof=1)) if len(known) > 1 else None
    return (float(known.mean()) if len(known) else None), std


def final_value(run: RunRecord, metric: str) -> float | None:
    """The last evaluation; None if it was not finite, or there was none."""
    return next((r[metric] for r in reversed(run["history"]) if metric in r), None)


def _values(run: RunRecord, metric: str) -> list[tuple[int, float]]:
    """The rounds and values of a run in which it has one."""
    return [(r["round"], r[metric]) for r in run["history"] if r.get(metric) is not None]


def _looks(labels: Mapping[str, str]) -> dict[str, ComparedMethod]:
    """A method for each name and label: its usual colour if it is free, else a spare one.

    Where methods have the same label, their names tell them apart.
    """
    colours: dict[str, str] = {}
    for name in labels:
        if (usual := colour(name)) in _PALETTE and usual not in colours.values():
            colours[name] = usual
    spare = [paint for paint in _PALETTE if paint not in colours.values()] or list(_PALETTE)
    for k, name in enumerate([name for name in labels if name not in colours]):
        colours[name] = spare[k % len(spare)]
    shapes = list(_MARKERS.items())
    return {
        name: ComparedMethod(name, label, k, colours[name], *shapes[k % len(shapes)])
        for k, (name, label) in enumerate(zip(labels, _distinct(labels), strict=True))
    }


def _distinct(labels: Mapping[str, str]) -> list[str]:
    found = list(labels.values())
    return [f"{x} ({name})" if found.count(x) > 1 else x for name, x in labels.items()]


# In words -----------------------------------------------------------------------------------------


def momentum_title(momentum: str) -> str:
    """A momentum in words; ``a`` is the share of the new gradient."""
    kind, _, share = momentum.partition(":")
    words = {"global": "momentum", "mvr": "exact momentum (MVR)"}
    return f"{words[kind]} {1 - float(share):.6g}" if kind in words else "no momentum"


def group_title(group: str) -> str:
    """What the curves of a group share."""
    kind, _, size = group.partition(":")
    return "own best step size" if kind == "own" else f"common step size {size}"


_TITLES = {
    "total_steps": "local steps so far",
    "train_loss": "loss along the local steps",
    "update_norm": "norm of updates, mean of clients",
    "update_norm_max": "largest norm of an update",
    "clipped": "share of clipped updates",
    "epsilon": "epsilon spent so far",
    "total_bytes_down": "bytes received by clients so far",
    "total_bytes_up": "bytes sent by clients so far",
}
"""Metrics that training itself gives."""


def metric_title(metric: str, trained: bool) -> str:
    """A metric in words; an evaluated one is on test data if others are on training data
    (``training_``).
    """
    if metric in _TITLES:
        return _TITLES[metric]
    words = re.sub("_worst_decile$", ", worst tenth of the clients", metric)
    words = re.sub("^training_", "train ", re.sub("_mean$", ", mean of clients", words))
    return f"test {words}" if trained and not metric.startswith("training_") else words


def is_share(metric: str) -> bool:
    """Whether a metric is a share of examples, which is shown in percent."""
    return re.search(r"(^|_)(accuracy|top-[0-9]+)(_|$)", metric) is not None


def value_text(value: float, metric: str, near: float | None = None) -> str:
    """A value for a person: percent without the sign, or four significant digits (of ``near``)."""
    if is_share(metric):
        return f"{100 * value:.2f}"
    size = abs(value if near is None else near)
    if size == 0:
        return f"{value:.3g}"
    digits = 3 - math.floor(math.log10(size))
    return f"{value:.{digits}f}" if 0 <= digits <= 7 else f"{value:.3e}"


def spread_text(mean: float, std: float | None, metric: str) -> str:
    """Mean and standard deviation."""
    text = value_text(mean, metric)
    return text if std is None else f"{text} ± {value_text(std, metric, mean)}"
