"""What a comparison shows: how far it is while it goes, and a table at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, final

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fedshuffle._terminal import Console
from fedshuffle.comparison.plan import Plan
from fedshuffle.comparison.settings import Trial
from fedshuffle.report.comparison_numbers import Compared, group_title, is_share
from fedshuffle.report.comparison_tables import cell_text, mark, notes, step_text
from fedshuffle.report.comparison_warnings import headlines

_TAIL = 1 << 16
"""The last records of a run stand within so many bytes."""


@final
class Show:
    """Runs done of all, those at work with their round and loss, and the time left.

    Where the error stream is no terminal, it is one line for every run that ends.
    """

    def __init__(self, plan: Plan, visible: bool) -> None:
        self._plan, self._visible = plan, visible
        self._console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.fields[runs]} runs"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[times]}"),
            expand=True,
        )
        self._task = self._bar.add_task("", total=1, runs="", times="")
        self._live: Live | None = None
        self._begun, self._before = time.monotonic(), self._rounds([])[0]

    def __enter__(self) -> Self:
        if self._visible and self._console.is_terminal:
            self._live = Live(self._bar, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def ended(self, trial: Trial) -> None:
        """Another run is over."""
        ended = self._plan.ended(trial)
        if not self._visible or ended is None:
            return
        last = ended.history[-1] if ended.history else {}
        found = ", ".join(f"{k} {v:.4g}" for k, v in last.items() if k != "round")
        how = found if ended.outcome == "finished" else f"{ended.outcome}: {ended.reason}"
        self._console.print(f"{self._count()} {trial.name}: {how}")

    def update(self, running: Sequence[Path]) -> None:
        """Show how far the runs are that are being done."""
        if self._live is None:
            return
        tails = [tail(folder) for folder in running]
        done, total = self._rounds([round for round, _ in tails])
        gone = time.monotonic() - self._begun
        pace = (done - self._before) / gone
        left = f", {_clock((total - done) / pace)} left" if pace > 0 else ""
        self._bar.update(
            self._task, completed=done, total=total, runs=self._count(), times=_clock(gone) + left
        )
        lines = [
            Text(f"  {folder.name}: round {round}{loss}", no_wrap=True)
            for folder, (round, loss) in zip(running, tails, strict=True)
        ]
        self._live.update(Group(self._bar, *lines))

    def _count(self) -> str:
        trials = self._plan.trials()
        done = sum(self._plan.ended(trial) is not None for trial in trials)
        return f"{done}/{len(trials) + self._plan.unknown()}"

    def _rounds(self, running: Sequence[int]) -> tuple[int, int]:
        """Rounds that are done, and those of all runs."""
        trials = self._plan.trials()
        ended = [trial.config.rounds for trial in trials if self._plan.ended(trial)]
        unknown = self._plan.unknown() * self._plan.comparison.base.rounds
        return sum(ended) + sum(running), sum(t.config.rounds for t in trials) + unknown


def tail(folder: Path) -> tuple[int, str]:
    """The round that a run has done last, and the last known loss in words."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return 0, ""
    records = []
    for line in lines[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:  # the first may be cut off
            continue
    for record in reversed(records):
        for name in ("train_loss", "loss"):
            if (value := record.get(name)) is not None:
                return records[-1]["round"], f", {name} {value:.4g}"
    return (records[-1]["round"] if records else 0), ""


def summary(results: Mapping[str, Any], report: Sequence[Path], out: Path) -> dict[str, Any]:
    """What the table says, for a program."""
    found = Compared(results)
    rows = [
        {"method": name, "momentum": momentum, "group": group, **asdict(cell)}
        for group in found.groups
        for momentum in found.momenta_of(group)
        for name, cell in found.cells(group, momentum).items()
    ]
    return {
        "complete": results["complete"],
        "metric": found.metric,
        "rounds": found.rounds,
        "warnings": [text for _, texts in headlines(found) for text in texts],
        "results": rows,
        "out": str(out),
        "report": str(report[-1]) if report else None,
    }


def print_results(
    console: Console, results: Mapping[str, Any], report: Sequence[Path], out: Path
) -> None:
    """The table, what is missing, and where the rest is."""
    print_table(console, results)
    lines = [f"Runs and results are in {out}."]
    if report:
        lines.append(f"The report: {report[-1]}")
    if not results["complete"]:
        lines.append(f"Some runs failed: see {out / 'workers.log'}. The same command tries again.")
    for line in lines:
        console.print(Text(line), highlight=False, soft_wrap=True)


def print_table(console: Console, results: Mapping[str, Any]) -> None:
    """How every method ends: mean and deviation over the seeds, the best in bold."""
    found = Compared(results)
    for title, texts in headlines(found):
        console.print(Text(f"! {title}.", style="bold yellow"), highlight=False, soft_wrap=True)
        for text in texts:
            console.print(Text(f"  - {text}"), highlight=False, soft_wrap=True)
    unit = " in %" if is_share(found.metric) else ""
    for group in found.groups:
        title = f"{found.title(found.metric)}{unit} after {found.rounds} rounds"
        table = Table(title=f"{title}, {group_title(group)}", title_justify="left")
        table.add_column("method")
        for name in ("momentum", "step size", found.metric, "diverged"):
            table.add_column(name, justify="right")
        for momentum in found.momenta_of(group):
            cells = found.cells(group, momentum)
            for method in found.methods_of(group):
                if (cell := cells.get(method.name)) is None:
                    continue
                style = "bold" if cell.best else ""
                value = Text(cell_text(cell, found.metric) + mark(cell), style=style)
                lost = f"{cell.diverged} of {cell.planned}" if cell.diverged else ""
                label = Text(method.label, style=style)
                table.add_row(label, momentum, step_text(cell), value, lost)
            table.add_section()
        console.print(table)
        for note in notes(found, group):
            console.print(Text(note, style="dim"), highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    """Seconds for a person.

    >>> _clock(59), _clock(3725)
    ('0:59', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
