"""Who gains and who loses: what each client gets from a method, beside the first method.

It is read from the ``clients.csv`` of the runs, which they write if the evaluation is per client.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.reports.comparison.model import (
    Compared,
    Line,
    final_value,
    spread_of,
    spread_text,
    value_text,
)


@dataclass(frozen=True, eq=False)
class ClientRow:
    """What the clients get from a method; means over its finished runs."""

    line: Line
    values: FloatArray  # of each client
    mean: float
    worst: float  # the mean over the worst tenth of the clients
    small: float  # over the quarter with the fewest examples
    large: float  # over the quarter with the most
    better: int = 0
    """Clients that are better off than with the reference."""
    worse: int = 0
    same: int = 0
    gains_most: str = ""
    loses_most: str = ""


@dataclass(frozen=True, eq=False)
class Column:
    """The methods of one group and momentum; the first one is the reference."""

    group: str
    momentum: str
    metric: str
    sign: int  # 1 where higher is better, -1 where lower is
    names: list[str]
    sizes: FloatArray  # the evaluated examples of each client
    small: int  # a small client has at most this number of examples
    large: int  # a large one at least this
    rows: list[ClientRow]
    left_out: list[str]
    """Methods without a finished run that measured the same clients."""

    @property
    def reference(self) -> ClientRow:
        """The first method."""
        return self.rows[0]


GROUPS = {"mean of clients": "_mean", "worst tenth": "_worst_decile", "smallest tenth": ""}
"""Groups of clients, and the ends of the names of their metrics."""


def client_metric(comparison: Compared) -> str:
    """The metric of a client that is nearest to the one to rank by."""
    return comparison.metric.removesuffix("_mean").removesuffix("_worst_decile")


def group_values(line: Line | None, metric: str) -> list[str]:
    """The metric over each group of clients after the last round, mean and deviation over runs."""
    found = []
    for end in GROUPS.values():
        values = [
            final_value(run, metric + end) if end else run["small_decile"].get(metric)
            for run in (line.ended if line else [])
        ]
        mean, std = spread_of(values)
        found.append("" if mean is None else spread_text(mean, std, metric))
    return found


def columns(comparison: Compared, out: Path) -> list[Column]:
    """All groups and momenta in which at least two methods measured the same clients."""
    metric = client_metric(comparison)
    sign = 1 if comparison.results["higher_is_better"] else -1
    found = []
    for group in comparison.groups:
        for momentum in comparison.momenta_of(group):
            column: Column | None = None
            left_out: list[str] = []
            for line in comparison.of(group, momentum):
                measured = _measured(line, metric, out)
                if measured is not None and column is None:
                    names, sizes, _ = measured
                    low, high = np.quantile(sizes, [0.25, 0.75])
                    facts = (group, momentum, metric, sign, names, sizes)
                    column = Column(*facts, math.floor(low), math.ceil(high), [], left_out)
                if measured is not None and column is not None and measured[0] == column.names:
                    column.rows.append(_row(column, line, measured[2]))
                else:
                    left_out.append(line.method.label)
            if column is not None and len(column.rows) > 1:
                found.append(column)
    return found


def _row(column: Column, line: Line, runs: FloatArray) -> ClientRow:
    values, tenth = runs.mean(axis=0), -(-runs.shape[1] // 10)
    worst = np.sort(column.sign * runs, axis=1)[:, :tenth].mean()

    def over(clients: NDArray[np.bool_]) -> float:
        return float(values[clients].mean())

    row = ClientRow(
        line=line,
        values=values,
        mean=float(values.mean()),
        worst=float(column.sign * worst),
        small=over(column.sizes <= column.small),
        large=over(column.sizes >= column.large),
    )
    return _against(column, row) if column.rows else row


def _against(column: Column, row: ClientRow) -> ClientRow:
    """The row with who gains and who loses against the reference."""
    before = column.reference.values
    change = column.sign * (row.values - before)
    better, worse = int((change > 0).sum()), int((change < 0).sum())

    def extreme(pick: Callable[[FloatArray], np.intp], clients: int) -> str:
        k = int(pick(change))
        told = (value_text(values[k], column.metric) for values in (before, row.values))
        return f"{column.names[k]}: {' to '.join(told)}" if clients else "nobody"

    return ClientRow(
        row.line,
        *(row.values, row.mean, row.worst, row.small, row.large),
        *(better, worse, len(change) - better - worse),
        *(extreme(np.argmax, better), extreme(np.argmin, worse)),
    )


def _measured(
    line: Line, metric: str, out: Path
) -> tuple[list[str], FloatArray, FloatArray] | None:
    """Names and sizes of the clients, and the metric of each run (row) and client."""
    folders = [out / run["folder"] for run in line.ended]
    tables = [_read(folder / "clients.csv", metric) for folder in folders]
    if not tables or not tables[0] or any(t.keys() != tables[0].keys() for t in tables):
        return None
    names = list(tables[0])
    sizes = np.array([tables[0][name][0] for name in names])
    return names, sizes, np.array([[table[name][1] for name in names] for table in tables])


def _read(file: Path, metric: str) -> dict[str, tuple[float, float]]:
    """Examples and metric of the clients of a run for which the metric is defined."""
    found = {}
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                examples, value = float(row["examples"]), float(row[metric] or "nan")
                if examples > 0 and math.isfinite(value):
                    found[row["client"]] = examples, value
    except (OSError, KeyError, TypeError, ValueError, csv.Error):  # not measured, or broken
        return {}
    return found
