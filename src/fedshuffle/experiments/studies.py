"""What the studies of the docs share: a comparison that is part of one, and its runs as tables."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedshuffle._files import write_file
from fedshuffle.comparison import Comparison
from fedshuffle.comparison.results import Curve, Results, effective_weights
from fedshuffle.errors import FedShuffleError
from fedshuffle.reports.comparison import write as write_report
from fedshuffle.reports.comparison.warnings import annotate

Line = dict[str, Any]
"""A line of a CSV file, by the names of its columns."""


def run_part(
    part: Comparison, out: Path, name: str, experiment: str, jobs: int | None, progress: bool
) -> Results:
    """Run a comparison that is part of a study into a folder of ``out``, and write its report."""
    command = f"fedshuffle reproduce {experiment} --out {out}"
    results = part.run(out / name, jobs=jobs, progress=progress, command=command, annotate=annotate)
    write_report(results, out / name)
    if not results["complete"]:
        raise FedShuffleError(
            f"some runs in {str(out / name)!r} failed: its report says which. The same command"
            " tries them again."
        )
    return results


@dataclass(frozen=True)
class Row:
    """A method at its own best step sizes."""

    name: str
    curve: Curve
    wrong: float
    """The share of the objective in the wrong place, by the audit."""

    def values(self, metric: str) -> list[float]:
        """The last value of each run that did not diverge."""
        runs = [run for run in self.curve["runs"] if not run["diverged"]]
        if metric.endswith("_small_decile"):
            found = [run["small_decile"].get(metric.removesuffix("_small_decile")) for run in runs]
        else:
            found = [run["history"][-1].get(metric) for run in runs]
        return [value for value in found if value is not None]


def rows_of(results: Results) -> list[Row]:
    """The methods of a comparison at their own best step sizes, in order."""
    rows = []
    for curve in results["curves"]:
        if curve["group"] == "own":
            audit = curve["audit"]
            gap = np.abs(effective_weights(audit) - audit["objective_weights"]).sum()
            rows.append(Row(curve["label"], curve, 0.5 * float(gap)))
    return rows


def mean_and_deviation(values: Sequence[float], scale: float, digits: int) -> str:
    """The mean of some runs and, of several, their standard deviation.

    >>> mean_and_deviation([0.25, 0.75], scale=100, digits=1)
    '50.0 ± 35.4'
    """
    spread = f" ± {scale * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * np.mean(values):.{digits}f}{spread}"


def run_lines(name: str, results: Results) -> Iterable[Line]:
    """One line per run: what the tables are made of."""
    for row in rows_of(results):
        for run in row.curve["runs"]:
            last = run["history"][-1] if run["history"] else {}
            small = run["small_decile"]
            yield {
                "data": name,
                "method": row.name,
                **{f"own_{key}": value for key, value in row.curve["settings"].items()},
                "step_size": row.curve["step_size"],
                "server_step_size": row.curve["server_step_size"],
                "seed": run["seed"],
                "diverged": run["diverged"],
                **{key: value for key, value in last.items() if not key.startswith("total_bytes")},
                **{f"{key}_small_decile": value for key, value in small.items()},
            }


def tuning_lines(name: str, results: Results) -> Iterable[Line]:
    """One line per short run: what the step sizes were chosen by."""
    for row in rows_of(results):
        for trial in row.curve["tuning"]:
            chosen = all(row.curve[k] == trial[k] for k in ("step_size", "server_step_size"))
            yield {
                "data": name,
                "method": row.name,
                "step_size": trial["step_size"],
                "server_step_size": trial["server_step_size"],
                "training_loss": trial["value"],
                "diverged": trial["diverged"],
                "chosen": chosen,
            }


def csv_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV; a key that a row does not have is empty."""
    found = list(rows)
    written = io.StringIO()
    names = list(dict.fromkeys(key for row in found for key in row))
    writer = csv.DictWriter(written, names, lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return written.getvalue()


def published(study: Path, docs: Path, experiment: str, names: Sequence[str]) -> list[list[Line]]:
    """Copy the CSV files of a study to the docs; the lines of each, as texts."""
    if not (study / names[0]).exists():
        raise FedShuffleError(
            f"{str(study)!r} holds no results of the study: run fedshuffle reproduce {experiment}"
            f" --out {study} first."
        )
    texts = [(study / name).read_text(encoding="utf-8") for name in names]
    for name, text in zip(names, texts, strict=True):
        write_file(docs / "research" / name, text)
    return [list(csv.DictReader(io.StringIO(text))) for text in texts]
