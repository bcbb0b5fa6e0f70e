"""Who gains and who loses: the clients of a comparison, from the ``clients.csv`` of its runs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from fedshuffle.report.comparison_numbers import Compared, value_text


@final
@dataclass(frozen=True)
class Gains:
    """What a method changes for the clients, against the first method; means over the seeds."""

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
    """Every method against the first one of its group; nothing where clients were not measured."""
    metric = comparison.metric.removesuffix("_mean").removesuffix("_worst_decile")
    found = []
    for group in comparison.groups:
        for momentum in comparison.momenta_of(group):
            tables = {
                method.label: table
                for method in comparison.methods_of(group)
                if (curve := comparison.curve(group, momentum, method.name))
                and (table := _over_seeds(comparison, curve, metric, out))
            }
            (reference, first), *others = tables.items() if tables else [("", {})]
            for label, table in others:
                if table.keys() == first.keys():
                    words = (group, momentum, reference, label, metric)
                    found.append(_against(comparison, words, first, table))
    return found


def _against(
    comparison: Compared,
    words: tuple[str, str, str, str, str],
    first: Mapping[str, float],
    other: Mapping[str, float],
) -> Gains:
    sign = 1.0 if comparison.high(comparison.metric) else -1.0
    names = list(first)
    change = sign * np.array([other[name] - first[name] for name in names])
    most, least = int(change.argmax()), int(change.argmin())

    def told(k: int) -> str:
        before, after = (value_text(t[names[k]], comparison.metric) for t in (first, other))
        return f"{names[k]}: {before} to {after}"

    return Gains(
        *words,
        better=int((change > 0).sum()),
        worse=int((change < 0).sum()),
        same=int((change == 0).sum()),
        gains_most=told(most) if change[most] > 0 else "nobody",
        loses_most=told(least) if change[least] < 0 else "nobody",
    )


def _over_seeds(
    comparison: Compared, curve: Mapping[str, Any], metric: str, out: Path
) -> dict[str, float]:
    """Per client the mean over the runs that ended well; empty if one does not tell."""
    runs = [run for run in curve["runs"] if comparison.finished(run) and run.get("folder")]
    tables = [_clients(out / run["folder"] / "clients.csv", metric) for run in runs]
    if not tables or not all(table.keys() == tables[0].keys() for table in tables):
        return {}
    return {name: float(np.mean([table[name] for table in tables])) for name in tables[0]}


def _clients(file: Path, metric: str) -> dict[str, float]:
    """The clients of a run for which the metric is defined."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            return {
                row["client"]: float(row[metric]) for row in csv.DictReader(lines) if row[metric]
            }
    except (OSError, KeyError, TypeError, ValueError):  # not measured, or not by this metric
        return {}
