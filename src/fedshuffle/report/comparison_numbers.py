"""What a comparison says in numbers: who takes part, its curves, and how every curve ends.

Three rules hold in every figure and table. A run that diverged counts in no mean: its method is
marked instead, and cannot be the best. A run that was interrupted counts in the curve as far as it
came, and not in the table. The deviation is that of a sample (n - 1), so one run has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.errors import FedShuffleError
from fedshuffle.report.look import colour
from fedshuffle.runs import FACTS

_TOP = {"title": str, "command": str, "config": str, "metric": str, "curves": list}
_CURVE = {"method": str, "label": str, "momentum": str, "group": str, "runs": list}

# What look.py has not given to a method; the first is the nearest to the FedNovas' own.
_SPARE = (
    *("#0072B2", "#D55E00", "#882255", "#CC79A7", "#E69F00", "#56B4E9", "#009E73"),
    *("#117733", "#332288", "#AA4499", "#661100", "#999999"),
)

MARKERS = {
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


@final
@dataclass(frozen=True)
class Entrant:
    """A method of the comparison, and how it looks everywhere."""

    name: str
    """Unlike those of all others."""
    label: str
    colour: str
    marker: str


@final
@dataclass(frozen=True)
class Band:
    """A curve over those rounds in which at least one run has a value."""

    rounds: IntArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    runs: IntArray
    """How many runs the mean is over."""


@final
@dataclass(frozen=True)
class Cell:
    """How a curve ends."""

    step_size: float
    finished: int
    diverged: int
    planned: int
    mean: float | None
    std: float | None
    best: bool = False
    near: bool = False
    """Not the best, but no further from it than the best one's standard deviation."""
    client_steps: tuple[float, float] | None = None
    """The smallest and the largest step size of a client, where they are known."""
    edge: str = ""
    """``smallest`` or ``largest`` where the best step size is that of several tried."""
    hopeless: bool = False
    """Whether even the smallest step size that was tried diverged."""
    trivial: bool = False
    """Whether it is no better than always predicting the commonest class."""

    @property
    def missing(self) -> int:
        return self.planned - self.finished - self.diverged


# Words ----------------------------------------------------------------------------------------


def momentum_title(momentum: str) -> str:
    """A momentum in words; ``a`` is the share of the new gradient.

    >>> momentum_title("none"), momentum_title("global:0.1"), momentum_title("mvr:0.1")
    ('no momentum', 'momentum 0.9', 'exact momentum (MVR) 0.9')
    """
    kind, _, share = momentum.partition(":")
    words = {"global": "momentum", "mvr": "exact momentum (MVR)"}
    if momentum == "none":
        return "no momentum"
    try:
        return f"{words[kind]} {1 - float(share):.6g}"
    except (KeyError, ValueError):
        return momentum


def group_title(group: str) -> str:
    """What curves share.

    >>> group_title("own"), group_title("common:0.1")
    ('own best step size', 'common step size 0.1')
    """
    kind, _, size = group.partition(":")
    if group == "own":
        return "own best step size"
    return f"common step size {size}" if kind == "common" and size else group


def metric_title(metric: str, trained: bool) -> str:
    """A metric in words; ``trained`` says that others carry ``train_``, so that this is a test's.

    >>> metric_title("accuracy", trained=True), metric_title("train_loss", trained=True)
    ('test accuracy', 'train loss')
    >>> metric_title("accuracy_worst_decile", trained=False)
    'accuracy, worst tenth of the clients'
    """
    where, name = ("test ", metric) if trained else ("", metric)
    for prefix in ("train", "test", "validation"):
        if metric.startswith(f"{prefix}_"):
            where, name = f"{prefix} ", metric.removeprefix(f"{prefix}_")
    for end, words in (
        ("_worst_decile", "worst tenth of the clients"),
        ("_mean", "mean of clients"),
    ):
        if name.endswith(end):
            return f"{where}{name.removesuffix(end)}, {words}"
    return where + name


def is_share(metric: str) -> bool:
    """Whether a metric is a share of examples, which people read in percent.

    >>> is_share("test_top-5_mean"), is_share("train_loss")
    (True, False)
    """
    return re.search(r"(^|_)(accuracy|top-[0-9]+)(_|$)", metric) is not None


def higher_is_better(metric: str) -> bool:
    """Which end of a metric is the good one, by its name; of one's own metric, the high end.

    >>> higher_is_better("accuracy"), higher_is_better("train_loss")
    (True, False)
    """
    return re.search(r"(^|[_-])(loss|perplexity|error)([_-]|$)", metric) is None


def value_text(value: float, metric: str, near: float | None = None) -> str:
    """A value for a person: percent without the sign, or four digits that count (those of near).

    >>> value_text(0.59571, "accuracy"), value_text(1.23456, "loss"), value_text(0.01, "loss", 1.2)
    ('59.57', '1.235', '0.010')
    """
    if is_share(metric):
        return f"{100 * value:.2f}"
    size = abs(value if near is None else near)
    if size == 0:
        return f"{value:.3g}"
    digits = 3 - math.floor(math.log10(size))
    return f"{value:.{digits}f}" if 0 <= digits <= 7 else f"{value:.3e}"


def spread_text(cell: Cell, metric: str) -> str:
    """Mean and deviation of a cell that has a mean."""
    assert cell.mean is not None
    text = value_text(cell.mean, metric)
    return text if cell.std is None else f"{text} ± {value_text(cell.std, metric, cell.mean)}"


# The comparison -------------------------------------------------------------------------------


@final
class Compared:
    """The results of a comparison, checked, and what is computed from them."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        _check(results)
        self.results = results
        self.rounds = count(results["rounds"], "rounds of the results")
        self.metric: str = results["metric"]
        curves: list[Mapping[str, Any]] = results["curves"]
        self.names = _names(curves)
        self.methods = _entrants(curves, self.names)
        self.groups = list(dict.fromkeys(str(curve["group"]) for curve in curves))
        momenta = dict.fromkeys(str(curve["momentum"]) for curve in curves)
        self.momenta = sorted(momenta, key=lambda momentum: momentum != "none")
        planned = results["settings"].get("seeds")
        known = set(planned) if isinstance(planned, list) else set()
        self.seeds = sorted(known | {run["seed"] for curve in curves for run in curve["runs"]})
        self.metrics = _metrics(curves, self.metric)
        self._ends: dict[tuple[str, str], tuple[float, float]] = {}
        self._curves: dict[tuple[str, str, str], Mapping[str, Any]] = {}
        for curve, name in zip(curves, self.names, strict=True):
            place = (curve["group"], curve["momentum"], name)
            if place in self._curves:
                raise FedShuffleError(
                    f"the results hold two curves of {name!r} for momentum {place[1]!r} and group"
                    f" {place[0]!r}: give one of them another label."
                )
            self._curves[place] = curve

    def curve(self, group: str, momentum: str, method: str) -> Mapping[str, Any] | None:
        """The curve of a method, where it was run."""
        return self._curves.get((group, momentum, method))

    def momenta_of(self, group: str) -> list[str]:
        """The momenta for which the group has a curve."""
        return [m for m in self.momenta if any((group, m) == place[:2] for place in self._curves)]

    def methods_of(self, group: str) -> list[Entrant]:
        """The methods of which the group has a curve."""
        found = {place[2] for place in self._curves if place[0] == group}
        return [method for method in self.methods if method.name in found]

    def title(self, metric: str) -> str:
        """A metric in words."""
        return metric_title(metric, any(name.startswith("train_") for name in self.metrics))

    def high(self, metric: str) -> bool:
        """Whether higher is better; results may say so of their own metric."""
        said = self.results.get("higher_is_better")
        return (
            said if metric == self.metric and isinstance(said, bool) else higher_is_better(metric)
        )

    def pair(self) -> list[str]:
        """The metrics of the paper's figure: the one compared by, and the loss in training."""
        second = [name for name in ("train_loss", "loss") if name in self.metrics]
        return list(dict.fromkeys([self.metric, *second[:1]]))

    def limits(self, group: str, metric: str) -> tuple[float, float]:
        """The ends of the axis for a group: all momenta alike, and no single outlier decides."""
        if (group, metric) in self._ends:
            return self._ends[group, metric]
        curves = [curve for place, curve in self._curves.items() if place[0] == group]
        bands = [self.band(curve, metric) for curve in curves]
        found = [np.concatenate([one.low, one.mean, one.high]) for one in bands]
        if not any(len(values) for values in found):
            found = [value for curve in curves for _, value in self.stopped(curve, metric)]
        ends = self._ends[group, metric] = _limits(np.concatenate([np.zeros(0), *found]))
        return ends

    def cells(self, group: str, momentum: str) -> dict[str, Cell]:
        """How the curves of a column end, with the best marked."""
        column: dict[str, Cell] = {}
        for method in self.methods:
            curve = self.curve(group, momentum, method.name)
            if curve is not None:
                column[method.name] = self._cell(curve)
        return _marked(column, self.high(self.metric))

    def _cell(self, curve: Mapping[str, Any]) -> Cell:
        runs = curve["runs"]
        ended = [final_value(run, self.metric) for run in runs if self.finished(run)]
        values = np.array([value for value in ended if value is not None])
        mean = float(values.mean()) if len(values) else None
        tried = curve.get("tuning") or []
        least = min((trial["step_size"] for trial in tried), default=None)
        return Cell(
            step_size=float(curve["step_size"]),
            finished=len(values),
            diverged=sum(self.diverged(run) for run in runs),
            planned=max(len(self.seeds), len(runs)),
            mean=mean,
            std=float(values.std(ddof=1)) if len(values) > 1 else None,
            client_steps=_range(curve.get("client_step_sizes")),
            edge=edge(curve),
            hopeless=bool(tried) and all(t["diverged"] for t in tried if t["step_size"] == least),
            trivial=mean is not None and mean <= self.trivial,
        )

    @property
    def trivial(self) -> float:
        """Up to which value the metric is no better than always predicting the commonest class.

        That is one standard error above it: less cannot be told from chance.
        """
        found = self.results.get("majority")
        return float(found["share"] + found["standard_error"]) if found else -math.inf

    def diverged(self, run: Mapping[str, Any]) -> bool:
        """Whether a run is lost: it says so, or what it is compared by is not finite at last."""
        known = [record[self.metric] for record in run["history"] if self.metric in record]
        return bool(run["diverged"]) or (bool(known) and finite(known[-1]) is None)

    def finished(self, run: Mapping[str, Any]) -> bool:
        """Whether a run came to its last round in good health."""
        history = run["history"]
        return bool(history) and history[-1]["round"] >= self.rounds and not self.diverged(run)

    def band(self, curve: Mapping[str, Any], metric: str) -> Band:
        """Mean, lowest and highest over the runs that did not diverge, round by round."""
        lines = [line(run, metric) for run in curve["runs"] if not self.diverged(run)]
        rounds = np.unique(np.concatenate([np.zeros(0, np.int64), *(at for at, _ in lines)]))
        if not rounds.size:
            nothing = np.zeros(0)
            return Band(rounds, nothing, nothing, nothing, rounds)
        values = np.full((len(lines), len(rounds)), np.nan)
        for row, (at, found) in zip(values, lines, strict=True):
            row[np.searchsorted(rounds, at)] = found
        low, high, mean = np.nanmin(values, 0), np.nanmax(values, 0), np.nanmean(values, 0)
        return Band(rounds, mean, low, high, np.isfinite(values).sum(0))

    def stopped(self, curve: Mapping[str, Any], metric: str) -> list[tuple[IntArray, FloatArray]]:
        """The runs that diverged, each as far as it had a value."""
        lines = [line(run, metric) for run in curve["runs"] if self.diverged(run)]
        return [(rounds, values) for rounds, values in lines if len(rounds)]


def edge(curve: Mapping[str, Any]) -> str:
    """``smallest`` or ``largest`` if the chosen step size is that of several tried, or nothing."""
    sizes = {float(trial["step_size"]) for trial in curve.get("tuning") or ()}
    if len(sizes) < 2:
        return ""
    return {min(sizes): "smallest", max(sizes): "largest"}.get(float(curve["step_size"]), "")


def final_value(run: Mapping[str, Any], metric: str) -> float | None:
    """What was evaluated last."""
    known = [finite(record[metric]) for record in run["history"] if metric in record]
    return known[-1] if known else None


def finite(value: Any) -> float | None:
    """A number, unless it is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def line(run: Mapping[str, Any], metric: str) -> tuple[IntArray, FloatArray]:
    """Rounds and finite values of one run."""
    known = [(record["round"], finite(record.get(metric))) for record in run["history"]]
    kept = [(round, value) for round, value in known if value is not None]
    return np.array([r for r, _ in kept], np.int64), np.array([v for _, v in kept], np.float64)


def where_lost(
    rounds: IntArray, values: FloatArray, limits: tuple[float, float]
) -> tuple[float, float]:
    """Where a run that diverged leaves the picture for good: there it gets its cross.

    >>> where_lost(np.array([10, 20]), np.array([1.0, 5.0]), (0.0, 3.0))
    (15.0, 3.0)
    """
    inside = np.flatnonzero((values >= limits[0]) & (values <= limits[1]))
    last = int(inside[-1]) if inside.size else -1
    if last == len(values) - 1 or last < 0:
        return float(rounds[last]), float(np.clip(values[last], *limits))
    edge = float(np.clip(values[last + 1], *limits))
    share = (edge - values[last]) / (values[last + 1] - values[last])
    return float(rounds[last] + share * (rounds[last + 1] - rounds[last])), edge


def _range(sizes: Any) -> tuple[float, float] | None:
    known = [finite(size) for size in sizes or ()]
    return (known[0], known[1]) if len(known) == 2 and None not in known else None  # type: ignore[return-value]


def _marked(column: dict[str, Cell], high: bool) -> dict[str, Cell]:
    healthy = [cell for cell in column.values() if cell.mean is not None and not cell.diverged]
    if not healthy:
        return column
    sign = 1 if high else -1
    first = max(healthy, key=lambda cell: sign * (cell.mean or 0.0))

    def mark(cell: Cell) -> Cell:
        if cell.mean is None or first.mean is None or cell.diverged:
            return cell
        best = cell.mean == first.mean
        near = not best and abs(cell.mean - first.mean) <= (first.std or 0.0)
        return replace(cell, best=best, near=near)

    return {name: mark(cell) for name, cell in column.items()}


def _limits(values: FloatArray) -> tuple[float, float]:
    """The ends of an axis; what lies further out than the whole bulk is wide is cut off."""
    if not values.size:
        return 0.0, 1.0
    low, high = (float(end) for end in np.quantile(values, [0.02, 0.98]))
    reach = high - low
    low, high = max(float(values.min()), low - reach), min(float(values.max()), high + reach)
    room = 0.04 * (high - low) or 0.05 * abs(low) or 0.5
    return low - room, high + room


# Reading --------------------------------------------------------------------------------------


def _check(results: Mapping[str, Any]) -> None:
    """Refuse what is no result of a comparison, with the first thing that is missing."""
    expect(results, Mapping, "results")
    _keys(results, _TOP, "the results")
    _keys(results, dict.fromkeys(("complete", "rounds", "seconds"), object), "the results")
    _keys(results, dict.fromkeys(("federation", "settings", "versions"), Mapping), "the results")
    _keys(results["federation"], {"sizes": list}, "the federation of the results")
    for curve in results["curves"]:
        expect(curve, Mapping, "a curve of the results")
        _keys(curve, _CURVE, "a curve of the results")
        what = f"curve {curve['label']!r} of the results"
        if finite(curve.get("step_size")) is None:
            raise FedShuffleError(f"{what} has no step_size: write the file anew.")
        for run in curve["runs"]:
            expect(run, Mapping, f"a run of {what}")
            _keys(run, {"seed": int, "diverged": bool, "history": list}, f"a run of {what}")
            if not all(isinstance(record.get("round"), int) for record in run["history"]):
                raise FedShuffleError(f"a run of {what} has a record without its round.")


def _keys(found: Mapping[str, Any], kinds: Mapping[str, type], what: str) -> None:
    for key, kind in kinds.items():
        if key not in found:
            raise FedShuffleError(
                f"{key!r} is missing from {what}: is this the results.json of a comparison?"
            )
        expect(found[key], kind, f"{key!r} of {what}")


def _names(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each curve's method; its label is added where one method has several."""
    labels: dict[str, set[str]] = {}
    for curve in curves:
        labels.setdefault(curve["method"], set()).add(curve["label"])
    return [
        curve["method"]
        if len(labels[curve["method"]]) == 1
        else f"{curve['method']}/{curve['label']}"
        for curve in curves
    ]


def _entrants(curves: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Entrant]:
    first = dict(reversed(list(zip(names, curves, strict=True))))
    order = list(dict.fromkeys(names))
    colours: dict[str, str] = {}
    for name in order:
        known = colour(first[name]["method"])
        if known in _SPARE and known not in colours.values():
            colours[name] = known
    spare = [paint for paint in _SPARE if paint not in colours.values()] or list(_SPARE)
    for k, name in enumerate([name for name in order if name not in colours]):
        colours[name] = spare[k % len(spare)]
    shapes = list(MARKERS)
    return [
        Entrant(name, first[name]["label"], colours[name], shapes[k % len(shapes)])
        for k, name in enumerate(order)
    ]


def _metrics(curves: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """Everything that was evaluated: the metric compared by first, then as in the histories."""
    names = dict.fromkeys([metric, "train_loss", "loss"], False)
    for curve in curves:
        for run in curve["runs"]:
            for record in run["history"]:
                for name in record:
                    if name not in FACTS and (names.get(name) is not True):
                        names[name] = finite(record[name]) is not None
    return [name for name, seen in names.items() if seen or name == metric]
