"""A table of metrics per client."""

import csv
import io
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle import _files
from fedshuffle._arrays import FloatArray, IntArray, jsonable
from fedshuffle._terminal import html_table
from fedshuffle.errors import check_known, optional_import, visible

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20
"""Largest number of rows that a terminal or a notebook shows."""


@dataclass(frozen=True, eq=False, repr=False)
class ClientTable:
    """One row per client, in the order of the federation: its name, its examples, each metric.

    A metric may be undefined for a client, such as AUC where all examples are of one class. It is
    then None in :attr:`rows`, empty in the CSV file, and :attr:`notes` say why.

    >>> table = ClientTable(["ann", "bob"], np.array([3, 5]), {"accuracy": np.array([1.0, 0.6])},
    ...     {"accuracy": True})
    >>> table
    client  examples  accuracy
    ann            3         1
    bob            5       0.6
    >>> table.worst(1).rows
    [('bob', 5, 0.6)]
    """

    clients: Sequence[Hashable]
    """The clients' names."""
    examples: IntArray
    metrics: Mapping[str, FloatArray]
    """Per metric a value for each client; NaN where it is undefined or not finite."""
    higher_is_better: Mapping[str, bool]
    undefined: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Per metric the rows for which it is undefined, and why."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return ("client", "examples", *self.metrics)

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The rows; None where a metric is undefined."""
        columns = []
        for name, values in self.metrics.items():
            undefined = self.undefined.get(name, {})
            columns.append([None if k in undefined else v for k, v in enumerate(values.tolist())])
        return list(zip(self.clients, self.examples.tolist(), *columns, strict=True))

    @property
    def notes(self) -> list[str]:
        """Where a metric is undefined, and why."""
        return [
            f"{name} is undefined for {number} client{'s' * (number > 1)}: {why}."
            for name, reasons in self.undefined.items()
            for why, number in Counter(reasons.values()).items()
        ]

    @property
    def ranking_metric(self) -> str:
        """The metric that ranks clients: accuracy if it was measured, or else the first."""
        return next((k for k in self.metrics if k.endswith("accuracy")), next(iter(self.metrics)))

    def worst(self, number: int = 5, metric: str | None = None) -> "ClientTable":
        """The clients with the worst values of a metric, the worst first; NaN is worst of all.

        The metric is :attr:`ranking_metric` by default; clients without it are left out.
        """
        metric = self.ranking_metric if metric is None else metric
        check_known("metric", metric, self.metrics)
        values, undefined = self.metrics[metric], self.undefined.get(metric, {})
        badness = values if self.higher_is_better[metric] else -values
        order = np.lexsort((badness, ~np.isnan(values))).tolist()
        rows = [k for k in order if k not in undefined][:number]
        return ClientTable(
            [self.clients[k] for k in rows],
            self.examples[rows],
            {name: column[rows] for name, column in self.metrics.items()},
            self.higher_is_better,
            {
                name: {place: why[k] for place, k in enumerate(rows) if k in why}
                for name, why in self.undefined.items()
            },
        )

    def spread(self, metric: str) -> tuple[float, float, int]:
        """The mean of a metric over clients, its mean over the worst tenth of them (rounded up),
        and the number of clients for which it is undefined.
        """
        undefined = self.undefined.get(metric, {})
        defined = np.delete(self.metrics[metric], list(undefined))
        if not len(defined):
            return np.nan, np.nan, len(undefined)
        worst = self.worst(-(-len(defined) // 10), metric).metrics[metric]
        with np.errstate(all="ignore"):  # a perplexity may be infinite
            return float(defined.mean()), float(worst[::-1].mean()), len(undefined)

    def frame(self) -> "pd.DataFrame":
        """The table as a pandas data frame, with the clients' names as its index."""
        pandas = optional_import("pandas", "a data frame", "frame", "or read rows and columns")
        index = pandas.Index(list(self.clients), name="client")
        frame: pd.DataFrame = pandas.DataFrame({"examples": self.examples, **self.metrics}, index)
        return frame

    def to_csv(self, path: Path | str) -> None:
        """Write the table as a CSV file, completely or not at all."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        _files.write_file(Path(path), text.getvalue())

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data for JSON, which has no NaN: None stands for it."""
        return [jsonable(dict(zip(self.columns, row, strict=True))) for row in self.rows]

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        texts = [self.columns, *self._texts()]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = []
        for first, *others in texts:
            cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
        return "\n".join([*lines, *self._below()])

    def _repr_html_(self) -> str:
        below = "".join(f"<p>{escape(line)}</p>" for line in self._below())
        return html_table(self.columns, self._texts()) + below

    def _texts(self) -> list[list[str]]:
        """The first rows, as texts that are safe for a terminal."""
        return [
            [visible(str(client)), str(examples)]
            + ["undefined" if value is None else f"{value:.4g}" for value in values]
            for client, examples, *values in self.rows[:_SHOWN]
        ]

    def _below(self) -> list[str]:
        more = [f"... and {len(self) - _SHOWN} more clients"] if len(self) > _SHOWN else []
        return more + self.notes
