"""The results of a comparison on a terminal, or as JSON for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedshuffle._terminal import Console
from fedshuffle.reports.comparison.model import Compared
from fedshuffle.reports.comparison.tables import cell_text, mark, notes, step_text
from fedshuffle.reports.comparison.text import group_title, is_share
from fedshuffle.reports.comparison.warnings import headlines


def summary(results: Mapping[str, Any], report: Sequence[Path], out: Path) -> dict[str, Any]:
    """The table as plain data."""
    found = Compared(results)
    return {
        "complete": results["complete"],
        "metric": found.metric,
        "rounds": found.rounds,
        "warnings": [text for _, texts in headlines(found) for text in texts],
        "results": [
            {"method": x.method.name, "momentum": x.momentum, "group": x.group, **asdict(x.cell)}
            for x in found.lines
        ],
        "out": str(out),
        "report": str(report[-1]) if report else None,
    }


def print_results(
    console: Console, results: Mapping[str, Any], report: Sequence[Path], out: Path
) -> None:
    """Print the table, what is missing, and where the rest is."""
    print_table(console, results)
    lines = [f"Runs and results are in {out}."]
    if report:
        lines.append(f"The report: {report[-1]}")
    if not results["complete"]:
        lines.append(f"Some runs failed: see {out / 'workers.log'}. The same command tries again.")
    for line in lines:
        _print(console, line)


def print_table(console: Console, results: Mapping[str, Any]) -> None:
    """Print how every method ends: mean and deviation over the seeds, the best in bold."""
    found = Compared(results)
    for title, texts in headlines(found):
        _print(console, f"! {title}.", "bold yellow")
        for text in texts:
            _print(console, f"  - {text}")
    unit = " in %" if is_share(found.metric) else ""
    for group in found.groups:
        title = f"{found.title(found.metric)}{unit} after {found.rounds} rounds"
        table = Table(title=f"{title}, {group_title(group)}", title_justify="left")
        table.add_column("method")
        for name in ("momentum", "step size", found.metric, "diverged"):
            table.add_column(name, justify="right")
        for momentum in found.momenta_of(group):
            for line in found.of(group, momentum):
                cell, style = line.cell, "bold" if line.cell.best else ""
                value = Text(cell_text(cell, found.metric) + mark(cell), style=style)
                lost = f"{cell.diverged} of {cell.planned}" if cell.diverged else ""
                label = Text(line.method.label, style=style)
                table.add_row(label, momentum, step_text(cell), value, lost)
            table.add_section()
        console.print(table)
        for note in notes(found, group):
            _print(console, note, "dim")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), highlight=False, soft_wrap=True)
