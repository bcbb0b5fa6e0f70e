"""The results of a comparison in numbers: methods, curves, and how every curve ends.

Three rules hold in every figure and table. A run that diverged counts in no mean: its method is
marked instead, and cannot be the best. An interrupted run counts in the curve as far as it came,
and not in the table. The standard deviation is that of a sample (n - 1), so one run has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.errors import FedShuffleError
from fedshuffle.reports.comparison.text import higher_is_better, metric_title, momentum_title
from fedshuffle.training.result import metrics_of


@dataclass(frozen=True)
class ComparedMethod:
    """A method of the comparison."""

    name: str
    """Unique: the label is added where one method has several."""
    label: str
    method: str
    """The registered method."""


@dataclass(frozen=True)
class Band:
    """A curve over the rounds in which at least one run has a value."""

    rounds: IntArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    runs: IntArray
    """The number of runs that each mean is over."""


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
    """Not the best, but at most the best one's standard deviation away from it."""
    client_steps: tuple[float, float] | None = None
    """The smallest and the largest step size of a client, where they are known."""
    edge: str = ""
    """``smallest`` or ``largest`` where the best step size is at that end of those tried."""
    hopeless: bool = False
    """Whether even the smallest step size that was tried diverged."""
    trivial: bool = False
    """Whether it is no better than always predicting the most common class."""

    @property
    def missing(self) -> int:
        """The number of runs still to be made."""
        return self.planned - self.finished - self.diverged


@dataclass(frozen=True)
class Line:
    """A method under one momentum in one group: its curve, and how it ends."""

    group: str
    momentum: str
    method: ComparedMethod
    data: Mapping[str, Any]
    """The curve as it stands in the results."""
    cell: Cell

    @property
    def title(self) -> str:
        """The method with its momentum, in words."""
        return f"{self.method.label}, {momentum_title(self.momentum)}"


class Compared:
    """The results of a comparison, checked, and what is computed from them."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        _check(results)
        self.results = results
        self.rounds = count(results["rounds"], "rounds of the results")
        self.metric: str = results["metric"]
        curves: list[Mapping[str, Any]] = results["curves"]
        self.groups = list(dict.fromkeys(str(curve["group"]) for curve in curves))
        momenta = dict.fromkeys(str(curve["momentum"]) for curve in curves)
        self.momenta = sorted(momenta, key=lambda momentum: momentum != "none")
        planned = results["settings"].get("seeds")
        known = set(planned) if isinstance(planned, list) else set()
        self.seeds = sorted(known | {run["seed"] for curve in curves for run in curve["runs"]})
        self.metrics = _metrics(curves, self.metric)
        named = _by_method(curves)
        self.methods = list(dict.fromkeys(method for *_, method in named))
        self.lines: list[Line] = []
        for group in self.groups:
            for momentum in self.momenta:
                places = [(group, momentum, method) for method in self.methods]
                column = {place[2]: named[place] for place in places if place in named}
                for method, cell in self._cells(column).items():
                    self.lines.append(Line(group, momentum, method, column[method], cell))
        self.limits = cache(self._limits)

    def of(self, group: str, momentum: str | None = None) -> list[Line]:
        """The lines of a group, or of one momentum in it."""
        return [x for x in self.lines if x.group == group and momentum in (None, x.momentum)]

    def momenta_of(self, group: str) -> list[str]:
        """The momenta for which the group has a curve."""
        return list(dict.fromkeys(line.momentum for line in self.of(group)))

    def methods_of(self, group: str) -> list[ComparedMethod]:
        """The methods for which the group has a curve."""
        found = {line.method for line in self.of(group)}
        return [method for method in self.methods if method in found]

    def cell(self, group: str, momentum: str, method: ComparedMethod) -> Cell | None:
        """How a curve ends, if there is one."""
        return next((x.cell for x in self.of(group, momentum) if x.method == method), None)

    def title(self, metric: str) -> str:
        """A metric in words."""
        return metric_title(metric, any(name.startswith("train_") for name in self.metrics))

    def high(self, metric: str) -> bool:
        """Whether higher is better; results may say so about their own metric."""
        said = self.results.get("higher_is_better")
        if metric == self.metric and isinstance(said, bool):
            return said
        return higher_is_better(metric)

    def pair(self) -> list[str]:
        """The metrics of the paper's figure: the compared one, and the training loss."""
        second = [name for name in ("train_loss", "loss") if name in self.metrics]
        return list(dict.fromkeys([self.metric, *second[:1]]))

    def _limits(self, group: str, metric: str) -> tuple[float, float]:
        """The ends of a group's axis, the same for all momenta: outliers are cut off."""
        lines = self.of(group)
        bands = [self.band(line, metric) for line in lines]
        found = [np.concatenate([band.low, band.mean, band.high]) for band in bands]
        if not any(len(values) for values in found):
            found = [value for line in lines for _, value in self.stopped(line, metric)]
        return _limits(np.concatenate([np.zeros(0), *found]))

    def _cells(
        self, column: Mapping[ComparedMethod, Mapping[str, Any]]
    ) -> dict[ComparedMethod, Cell]:
        """How the curves of a column end, with the best ones marked."""
        cells = {method: self._cell(curve) for method, curve in column.items()}
        ranked = [c for c in cells.values() if c.mean is not None and not c.diverged]
        if not ranked:
            return cells
        sign = 1 if self.high(self.metric) else -1
        first = max(ranked, key=lambda cell: sign * (cell.mean or 0.0))
        for method, cell in cells.items():
            if cell.mean is not None and first.mean is not None and not cell.diverged:
                best = cell.mean == first.mean
                near = not best and abs(cell.mean - first.mean) <= (first.std or 0.0)
                cells[method] = replace(cell, best=best, near=near)
        return cells

    def _cell(self, curve: Mapping[str, Any]) -> Cell:
        runs = curve["runs"]
        ended = [final_value(run, self.metric) for run in runs if self.finished(run)]
        values = np.array([value for value in ended if value is not None])
        mean = float(values.mean()) if len(values) else None
        tried = curve.get("tuning") or []
        least = min((trial["step_size"] for trial in tried), default=None)
        ends = [finite(size) for size in curve.get("client_step_sizes") or ()]
        return Cell(
            step_size=float(curve["step_size"]),
            finished=len(values),
            diverged=sum(self.diverged(run) for run in runs),
            planned=max(len(self.seeds), len(runs)),
            mean=mean,
            std=float(values.std(ddof=1)) if len(values) > 1 else None,
            client_steps=tuple(ends) if len(ends) == 2 and None not in ends else None,  # type: ignore[arg-type]
            edge=edge(curve),
            hopeless=bool(tried) and all(t["diverged"] for t in tried if t["step_size"] == least),
            trivial=mean is not None and mean <= self.trivial,
        )

    @property
    def trivial(self) -> float:
        """The value up to which the metric is no better than predicting the most common class.

        It is one standard error above that class's share: less cannot be told from chance.
        """
        found = self.results.get("majority")
        return float(found["share"] + found["standard_error"]) if found else -math.inf

    def diverged(self, run: Mapping[str, Any]) -> bool:
        """Whether a run says that it diverged, or the last value of its metric is not finite."""
        known = [record[self.metric] for record in run["history"] if self.metric in record]
        return bool(run["diverged"]) or (bool(known) and finite(known[-1]) is None)

    def finished(self, run: Mapping[str, Any]) -> bool:
        """Whether a run reached its last round without diverging."""
        history = run["history"]
        return bool(history) and history[-1]["round"] >= self.rounds and not self.diverged(run)

    def band(self, line: Line, metric: str) -> Band:
        """Mean, lowest and highest over the runs that did not diverge, round by round."""
        runs = [_values(run, metric) for run in line.data["runs"] if not self.diverged(run)]
        rounds = np.unique(np.concatenate([np.zeros(0, np.int64), *(at for at, _ in runs)]))
        if not rounds.size:
            nothing = np.zeros(0)
            return Band(rounds, nothing, nothing, nothing, rounds)
        values = np.full((len(runs), len(rounds)), np.nan)
        for row, (at, found) in zip(values, runs, strict=True):
            row[np.searchsorted(rounds, at)] = found
        low, high, mean = np.nanmin(values, 0), np.nanmax(values, 0), np.nanmean(values, 0)
        return Band(rounds, mean, low, high, np.isfinite(values).sum(0))

    def stopped(self, line: Line, metric: str) -> list[tuple[IntArray, FloatArray]]:
        """The runs that diverged, as far as each had a value."""
        runs = [_values(run, metric) for run in line.data["runs"] if self.diverged(run)]
        return [(rounds, values) for rounds, values in runs if len(rounds)]


def edge(curve: Mapping[str, Any]) -> str:
    """``smallest`` or ``largest`` if the chosen step size is at that end of those tried."""
    sizes = {float(trial["step_size"]) for trial in curve.get("tuning") or ()}
    if len(sizes) < 2:
        return ""
    return {min(sizes): "smallest", max(sizes): "largest"}.get(float(curve["step_size"]), "")


def final_value(run: Mapping[str, Any], metric: str) -> float | None:
    """The last evaluation."""
    known = [finite(record[metric]) for record in run["history"] if metric in record]
    return known[-1] if known else None


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _values(run: Mapping[str, Any], metric: str) -> tuple[IntArray, FloatArray]:
    """Rounds and finite values of one run."""
    known = [(record["round"], finite(record.get(metric))) for record in run["history"]]
    found = [(round, value) for round, value in known if value is not None]
    return np.array([r for r, _ in found], np.int64), np.array([v for _, v in found], np.float64)


def _limits(values: FloatArray) -> tuple[float, float]:
    """The ends of an axis; what lies further out than the bulk is wide is cut off."""
    if not values.size:
        return 0.0, 1.0
    low, high = (float(end) for end in np.quantile(values, [0.02, 0.98]))
    reach = high - low
    low, high = max(float(values.min()), low - reach), min(float(values.max()), high + reach)
    room = 0.04 * (high - low) or 0.05 * abs(low) or 0.5
    return low - room, high + room


_TOP = {
    **dict.fromkeys(("title", "command", "config", "metric"), str),
    "curves": list,
    **dict.fromkeys(("complete", "rounds", "seconds"), object),
    **dict.fromkeys(("federation", "settings", "versions"), Mapping),
}
_CURVE = {**dict.fromkeys(("method", "label", "momentum", "group"), str), "runs": list}
_RUN = {"seed": int, "diverged": bool, "history": list}


def _check(results: Mapping[str, Any]) -> None:
    """Refuse anything but the results of a comparison; name the first thing that is missing."""
    _keys(results, _TOP, "the results")
    _keys(results["federation"], {"sizes": list}, "the federation of the results")
    for curve in results["curves"]:
        _keys(curve, _CURVE, "a curve of the results")
        what = f"curve {curve['label']!r} of the results"
        if finite(curve.get("step_size")) is None:
            raise FedShuffleError(f"{what} has no step_size: write the file again.")
        for run in curve["runs"]:
            _keys(run, _RUN, f"a run of {what}")
            if not all(isinstance(record.get("round"), int) for record in run["history"]):
                raise FedShuffleError(f"a run of {what} has a record without its round.")


def _keys(found: Any, kinds: Mapping[str, type], what: str) -> None:
    expect(found, Mapping, what)
    for key, kind in kinds.items():
        if key not in found:
            raise FedShuffleError(
                f"{key!r} is missing from {what}: is this the results.json of a comparison?"
            )
        expect(found[key], kind, f"{key!r} of {what}")


def _by_method(
    curves: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str, ComparedMethod], Mapping[str, Any]]:
    """The curves by group, momentum and method."""
    labels: dict[str, dict[str, None]] = {}
    for curve in curves:
        labels.setdefault(curve["method"], {})[curve["label"]] = None
    found: dict[tuple[str, str, ComparedMethod], Mapping[str, Any]] = {}
    for curve in curves:
        method, label = curve["method"], curve["label"]
        name = method if len(labels[method]) == 1 else f"{method}/{label}"
        place = (curve["group"], curve["momentum"], ComparedMethod(name, label, method))
        if place in found:
            raise FedShuffleError(
                f"the results hold two curves of {name!r} for momentum {place[1]!r} and group"
                f" {place[0]!r}: give one of them another label."
            )
        found[place] = curve
    return found


def _metrics(curves: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """All metrics evaluated: the compared one first, then the losses, then as in the histories."""
    records = [record for curve in curves for run in curve["runs"] for record in run["history"]]
    seen = dict.fromkeys(
        name for r in records for name, v in metrics_of(r).items() if finite(v) is not None
    )
    first = [metric, *(name for name in ("train_loss", "loss") if name in seen)]
    return list(dict.fromkeys([*first, *seen]))
