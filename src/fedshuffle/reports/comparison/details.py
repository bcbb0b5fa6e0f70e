"""Audits, client sizes, and the changes of each client in a comparison."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.reports.comparison.model import Compared, ComparedMethod, Line
from fedshuffle.reports.comparison.text import value_text

_POINTS = 600
"""The largest number of dots per method; more cannot be told apart."""


@dataclass(frozen=True)
class Audited:
    """The audit of a method, for all momenta under which it is the same."""

    method: ComparedMethod
    momenta: list[str]
    consistent: bool | None
    wrong: float
    """The share of the weight that is in the wrong place."""
    largest: float
    """The largest factor between a client's effective and intended weight, either way."""
    points: FloatArray
    """Distinct rows of size and ``w-hat_i / w_i``."""


def audits(comparison: Compared) -> list[Audited]:
    """All audits, one per method and per effect of momentum."""
    found: dict[tuple[Any, ...], Audited] = {}
    sizes = np.array(comparison.results["federation"]["sizes"])
    # The step size changes nothing in the audit: it is the same in all groups.
    for line in sorted(comparison.lines, key=lambda x: (x.method.index, x.momentum != "none")):
        audit = line.curve["audit"]
        meant = np.array(audit["objective_weights"])
        effective = np.array(audit["effective_weights"])
        ratios = effective / meant
        key = (line.method, audit["consistent"], ratios.round(6).tobytes())
        if key not in found:
            positive = ratios[ratios > 0]
            largest = float(np.maximum(positive, 1 / positive).max(initial=0)) or math.inf
            wrong = 0.5 * float(np.abs(effective - meant).sum())
            points = _points(sizes, ratios)
            found[key] = Audited(line.method, [], audit["consistent"], wrong, largest, points)
        if line.momentum not in found[key].momenta:
            found[key].momenta.append(line.momentum)
    return list(found.values())


def _points(sizes: Any, ratios: FloatArray) -> FloatArray:
    """Clients of the same size and ratio are one dot; a ratio of zero has no place on the axis."""
    there = ratios > 0
    rows = np.stack([sizes[there], [float(f"{ratio:.3g}") for ratio in ratios[there]]], 1)
    rows = np.unique(rows.astype(np.float64), axis=0)
    some: FloatArray = rows[np.linspace(0, len(rows) - 1, min(len(rows), _POINTS)).astype(int)]
    return some


def ratio_limits(found: Sequence[Audited]) -> tuple[float, float]:
    """The ends of the axis of ratios, with one in it and room to both sides."""
    ratios = [float(ratio) for audited in found for ratio in audited.points[:, 1]]
    return min([0.7, *ratios]) / 1.25, max([1.4, *ratios]) * 1.25


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


class Gains(NamedTuple):
    """Who gains and who loses with a method against the first one; means over the seeds."""

    line: Line
    reference: Line
    metric: str
    better: int
    worse: int
    same: int
    gains_most: str
    loses_most: str


def gains(comparison: Compared, out: Path) -> list[Gains]:
    """Every method against the first one of its column, from the ``clients.csv`` of the runs."""
    metric = comparison.metric.removesuffix("_mean").removesuffix("_worst_decile")
    sign = 1 if comparison.results["higher_is_better"] else -1
    references: dict[tuple[str, str], tuple[Line, dict[str, float]]] = {}
    found = []
    for line in comparison.lines:
        if not (after := _clients(line, metric, out)):
            continue
        reference, before = references.setdefault((line.group, line.momentum), (line, after))
        if reference is line or after.keys() != before.keys():
            continue
        change = {name: sign * (after[name] - before[name]) for name in before}
        counts = Counter(np.sign(list(change.values())).tolist())
        ends = []
        for pick, there in ((max, counts[1]), (min, counts[-1])):
            name = pick(change, key=lambda name: change[name])
            texts = (value_text(values[name], metric) for values in (before, after))
            ends.append(f"{name}: {' to '.join(texts)}" if there else "nobody")
        found.append(Gains(line, reference, metric, counts[1], counts[-1], counts[0], *ends))
    return found


def _clients(line: Line, metric: str, out: Path) -> dict[str, float]:
    """Per client the mean over the finished runs; empty if one of them did not measure it."""
    folders = [out / run["folder"] for run in line.curve["runs"] if not line.lost(run)]
    tables = [_read(folder / "clients.csv", metric) for folder in folders]
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
