"""Audits, the search for step sizes, and the changes of each client in a comparison."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.reports.comparison.model import Compared, ComparedMethod, Line, edge, finite
from fedshuffle.reports.comparison.text import higher_is_better, value_text

_POINTS = 600
"""The largest number of dots per method; more cannot be told apart."""


@dataclass(frozen=True)
class Audited:
    """The audit of a method, for all momenta under which it is the same."""

    method: ComparedMethod
    momenta: tuple[str, ...]
    consistent: bool | None
    wrong: float
    """The share of the weight that is in the wrong place."""
    largest: float
    """The largest factor between a client's effective and intended weight, either way."""
    points: FloatArray
    """Distinct rows of size and ``w-hat_i / w_i``."""


def audits(comparison: Compared) -> list[Audited]:
    """All audits, one per method and per effect of momentum."""
    found: list[Audited] = []
    sizes = np.array(comparison.results["federation"]["sizes"])
    for method in comparison.methods:
        own: list[tuple[Audited, FloatArray]] = []
        for momentum in comparison.momenta:
            # The step size changes nothing in the audit: that of any group will do.
            lines = [x for x in comparison.lines if (x.method, x.momentum) == (method, momentum)]
            audit = next((x.data["audit"] for x in lines if x.data.get("audit")), None)
            if audit is None:
                continue
            ratios, wrong = _ratios(audit, method, len(sizes))
            for k, (other, others) in enumerate(own):
                if other.consistent == audit["consistent"] and np.allclose(others, ratios, 1e-6):
                    own[k] = replace(other, momenta=(*other.momenta, momentum)), others
                    break
            else:
                positive = ratios[ratios > 0]
                largest = float(np.maximum(positive, 1 / positive).max(initial=0)) or math.inf
                points = _points(sizes, ratios)
                one = Audited(method, (momentum,), audit["consistent"], wrong, largest, points)
                own.append((one, ratios))
        found += [audited for audited, _ in own]
    return found


def _ratios(
    audit: Mapping[str, Any], method: ComparedMethod, clients: int
) -> tuple[FloatArray, float]:
    try:
        meant = np.array(audit["objective_weights"], np.float64)
        effective = np.array(audit["effective_weights"], np.float64)
        whole = meant.shape == effective.shape == (clients,) and bool((meant > 0).all())
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or "consistent" not in audit or not np.isfinite(effective).all():
        raise FedShuffleError(
            f"the audit of {method.label!r} in the results needs 'consistent', and a number for"
            f" each of the {clients} clients in objective_weights and effective_weights."
        )
    return effective / meant, 0.5 * float(np.abs(effective - meant).sum())


def _points(sizes: Any, ratios: FloatArray) -> FloatArray:
    """Clients of the same size and ratio are one dot; a ratio of zero has no place on the axis."""
    there = ratios > 0
    rows = np.stack([sizes[there], [float(f"{ratio:.3g}") for ratio in ratios[there]]], 1)
    rows = np.unique(rows.astype(np.float64), axis=0)
    return (
        rows[np.unique(np.linspace(0, len(rows) - 1, _POINTS).astype(int))] if len(rows) else rows
    )


def ratio_limits(found: Sequence[Audited]) -> tuple[float, float]:
    """The ends of the axis of ratios, with one in it and room to both sides."""
    ratios = [float(ratio) for audited in found for ratio in audited.points[:, 1]]
    return min([0.7, *ratios]) / 1.25, max([1.4, *ratios]) * 1.25


# The search for step sizes ----------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """The search for a method's step size."""

    method: ComparedMethod
    values: dict[float, float | None]
    """The best value for each step size that was tried; None where there is none."""
    lost: frozenset[float]
    """The step sizes with which every trial diverged."""
    chosen: float
    weight_decay: float | None
    clip: float | None
    edge: str
    """``largest`` or ``smallest`` where the chosen one is at that end of those tried."""


def judge(results: Mapping[str, Any]) -> tuple[str, bool | None]:
    """The metric that trials were judged by, if known, and whether higher is better."""
    judge = results.get("judge")
    if not isinstance(judge, Mapping) or not isinstance(judge.get("metric"), str):
        return "", None
    high = judge.get("higher_is_better")
    return judge["metric"], high if isinstance(high, bool) else higher_is_better(judge["metric"])


def tuning(comparison: Compared, group: str, momentum: str) -> list[Tuned]:
    """The search of each method that made one."""
    high = judge(comparison.results)[1]
    lines = comparison.of(group, momentum)
    return [_tuned(line.method, line.data, high) for line in lines if line.data.get("tuning")]


def _tuned(method: ComparedMethod, curve: Mapping[str, Any], high: bool | None) -> Tuned:
    chosen = float(curve["step_size"])
    trials: dict[float, list[Mapping[str, Any]]] = {}
    for trial in sorted(curve["tuning"], key=lambda trial: float(trial["step_size"])):
        trials.setdefault(float(trial["step_size"]), []).append(trial)
    done = {
        size: [t for t in tried if finite(t["value"]) is not None and not t["diverged"]]
        for size, tried in trials.items()
    }
    if high is None:  # the winner shows which end is the good one
        known = [trial["value"] for found in done.values() for trial in found]
        high = bool(known) and max(known) in [trial["value"] for trial in done.get(chosen, [])]
    pick = max if high else min
    best = {size: pick(found, key=lambda t: t["value"]) for size, found in done.items() if found}
    winner = {**best.get(chosen, {}), **curve}
    return Tuned(
        method=method,
        values={size: finite(best[size]["value"]) if size in best else None for size in trials},
        lost=frozenset(size for size in trials if all(t["diverged"] for t in trials[size])),
        chosen=chosen,
        weight_decay=finite(winner.get("weight_decay")),
        clip=finite(winner.get("clip")),
        edge=edge(curve),
    )


def searched(comparison: Compared, key: str) -> bool:
    """Whether the search also went over weight decay or clipping."""
    curves = comparison.results["curves"]
    return len({t.get(key) for curve in curves for t in curve.get("tuning") or ()}) > 1


# Clients ----------------------------------------------------------------------------------------


def histogram(sizes: Sequence[int], most: int = 24) -> list[tuple[int, int, int]]:
    """First size, last size and number of clients of each bar; bars widen where sizes differ much.

    >>> histogram([1, 2, 2, 3])
    [(1, 1, 1), (2, 2, 2), (3, 3, 1)]
    >>> histogram([1, 100], most=4)
    [(1, 2, 1), (3, 9, 0), (10, 31, 0), (32, 100, 1)]
    """
    low, high = min(sizes), max(sizes)
    space = np.geomspace if high > 20 * low else np.linspace
    inner = np.round(space(low, high + 1, min(most, high + 1 - low) + 1)).astype(int)
    edges = np.unique([low, *inner, high + 1])
    counts = np.histogram(sizes, edges)[0].tolist()
    return list(zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts, strict=True))


@dataclass(frozen=True)
class Gains:
    """Who gains and who loses with a method against the first one; means over the seeds."""

    group: str
    momentum: str
    reference: str
    method: str
    metric: str
    better: int
    worse: int
    same: int
    gains_most: str
    loses_most: str


def gains(comparison: Compared, out: Path) -> list[Gains]:
    """Every method against the first one of its column, from the ``clients.csv`` of the runs."""
    metric = comparison.metric.removesuffix("_mean").removesuffix("_worst_decile")
    found = []
    for group in comparison.groups:
        for momentum in comparison.momenta_of(group):
            lines = comparison.of(group, momentum)
            clients = {line.method.label: _clients(comparison, line, metric, out) for line in lines}
            measured = [(label, values) for label, values in clients.items() if values]
            for label, values in measured[1:]:
                reference, first = measured[0]
                if values.keys() == first.keys():
                    change = _change(comparison, first, values)
                    found.append(Gains(group, momentum, reference, label, metric, *change))
    return found


def _change(
    comparison: Compared, first: Mapping[str, float], other: Mapping[str, float]
) -> tuple[int, int, int, str, str]:
    sign = 1.0 if comparison.high(comparison.metric) else -1.0
    names = list(first)
    change = sign * np.array([other[name] - first[name] for name in names])

    def text(k: int) -> str:
        before, after = (value_text(t[names[k]], comparison.metric) for t in (first, other))
        return f"{names[k]}: {before} to {after}"

    better, worse, same = (int(chosen.sum()) for chosen in (change > 0, change < 0, change == 0))
    most = text(int(change.argmax())) if better else "nobody"
    least = text(int(change.argmin())) if worse else "nobody"
    return better, worse, same, most, least


def _clients(comparison: Compared, line: Line, metric: str, out: Path) -> dict[str, float]:
    """Per client the mean over the finished runs; empty if one of them did not measure it."""
    runs = [r for r in line.data["runs"] if comparison.finished(r) and r.get("folder")]
    tables = [_read(out / run["folder"] / "clients.csv", metric) for run in runs]
    if not tables or not all(table.keys() == tables[0].keys() for table in tables):
        return {}
    return {name: float(np.mean([table[name] for table in tables])) for name in tables[0]}


def _read(file: Path, metric: str) -> dict[str, float]:
    """The clients of a run for which the metric is defined."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            return {row["client"]: float(row[metric]) for row in rows if row[metric]}
    except (OSError, KeyError, TypeError, ValueError):  # not measured, or not by this metric
        return {}
