"""What was measured for every client, as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedshuffle import _files, _html
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError, unknown, visible

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20
"""Largest number of rows that a terminal or a notebook shows."""


@final
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
        return [self._row(k) for k in range(len(self))]

    @property
    def notes(self) -> list[str]:
        """Where a metric is undefined, and why."""
        found = []
        for name, rows in self.undefined.items():
            for why in dict.fromkeys(rows.values()):
                number = sum(reason == why for reason in rows.values())
                clients = f"{number} client" + "s" * (number > 1)
                found.append(f"{name} is undefined for {clients}: {why}.")
        return found

    @property
    def judged_by(self) -> str:
        """The metric that clients are ranked by: accuracy if it was measured, or else the first."""
        return next((k for k in self.metrics if k.endswith("accuracy")), next(iter(self.metrics)))

    def worst(self, number: int = 5, metric: str | None = None) -> ClientTable:
        """The clients that a metric is worst for, the worst first; those without it are left out.

        Without a metric, that of :attr:`judged_by`.
        """
        metric = self.judged_by if metric is None else metric
        if metric not in self.metrics:
            raise unknown("metric", metric, self.metrics)
        values = self.metrics[metric]
        order = np.argsort(values if self.higher_is_better[metric] else -values, kind="stable")
        order = np.concatenate([order[np.isnan(values[order])], order[~np.isnan(values[order])]])
        without = self.undefined.get(metric, {})
        return self._take([k for k in order.tolist() if k not in without][:number])

    def frame(self) -> pd.DataFrame:
        """The table as a pandas data frame, with the clients' names as its index."""
        try:
            import pandas as pd
        except ImportError as error:
            raise FedShuffleError(
                f"a data frame needs pandas ({error}). Install it with"
                " pip install 'fedshuffle[frame]', or read the rows and columns."
            ) from error
        columns = {"examples": self.examples, **self.metrics}
        return pd.DataFrame(columns, index=pd.Index(list(self.clients), name="client"))

    def to_csv(self, path: Path | str) -> None:
        """Write the table as a CSV file, which is there wholly or not at all."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        try:
            _files.replace(Path(path), text.getvalue().encode())
        except OSError as error:
            raise FedShuffleError(
                f"cannot write {str(path)!r}: {error.strerror}. Choose another place."
            ) from error

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as plain data for JSON, which has no NaN: None stands for it."""
        return [
            {name: None if cell != cell else cell for name, cell in zip(self.columns, row)}
            for row in self.rows
        ]

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        texts = [list(self.columns), *self._texts()]
        wide = [max(len(row[k]) for row in texts) for k in range(len(self.columns))]
        lines = []
        for row in texts:
            cells = [row[0].ljust(wide[0]), *(t.rjust(w) for t, w in zip(row[1:], wide[1:]))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *self._below()])

    def _repr_html_(self) -> str:
        below = "".join(map(_html.paragraph, self._below()))
        return _html.table(self.columns, self._texts()) + below

    def _row(self, k: int) -> tuple[Any, ...]:
        values = (
            None if k in self.undefined.get(name, {}) else float(column[k])
            for name, column in self.metrics.items()
        )
        return (self.clients[k], int(self.examples[k]), *values)

    def _take(self, rows: Sequence[int]) -> ClientTable:
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

    def _texts(self) -> list[list[str]]:
        """The first rows as texts."""
        shown = [self._row(k) for k in range(min(len(self), _SHOWN))]
        return [
            [visible(str(client)), str(examples)]
            + ["undefined" if value is None else f"{value:.4g}" for value in values]
            for client, examples, *values in shown
        ]

    def _below(self) -> list[str]:
        more = [f"... and {len(self) - _SHOWN} more clients"] if len(self) > _SHOWN else []
        return more + self.notes
