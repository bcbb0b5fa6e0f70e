"""Run a comparison: tune, train, and keep the results up to date. Finished runs are not repeated.

DIR/compare.toml    the comparison, complete enough to resume from
DIR/results.json    the results so far; written after every run
DIR/runs/           one folder per run, see :mod:`fedshuffle.comparison.study`
DIR/workers.log     the output of the worker processes
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from rich.progress import TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedshuffle import _files
from fedshuffle._arrays import count
from fedshuffle._files import one_writer, results_folder
from fedshuffle._terminal import Console, interrupted_once, progress_bar
from fedshuffle.comparison import results
from fedshuffle.comparison.spec import Comparison, Trial
from fedshuffle.comparison.study import Study
from fedshuffle.comparison.workers import Answer, WorkerPool
from fedshuffle.config import loader
from fedshuffle.engines.cpu_tuning import available_cores
from fedshuffle.errors import FedShuffleError

Annotate = Callable[[dict[str, Any]], None]

TICK = 0.5
"""Seconds between updates of the progress display."""

DEATHS = 2
"""A run has failed when its process has died this often."""

_TAIL = 1 << 16
"""The number of bytes that hold the last records of a run."""


def run(
    comparison: Comparison,
    out: Path | str | None = None,
    *,
    jobs: int | None = None,
    progress: bool = False,
    command: str | None = None,
    annotate: Annotate | None = None,
) -> dict[str, Any]:
    """Do all runs of a comparison that are not done yet, several at once.

    Args:
        comparison: the comparison.
        out: the folder, if not that of the config. Given again after an interruption, finished runs
            are not repeated, and the results are those of a comparison never interrupted.
        jobs: the number of runs at once, each in its own process with one torch thread; by
            default the number of cores.
        progress: whether to show progress on the error stream.
        command: the command that repeats it, for the record.
        annotate: adds to the results before they are written, after every run;
            :func:`fedshuffle.reports.comparison.warnings.annotate` adds warnings.

    Returns:
        The content of ``results.json``.
    """
    place = comparison.base.out if out is None else out
    if place is None:
        raise FedShuffleError("the comparison needs a folder: give it as out.")
    jobs = available_cores() if jobs is None else count(jobs, "jobs")
    folder = results_folder(place)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with one_writer(folder), interrupted_once():
        if progress:
            console.print("Loading the data and auditing the methods.")
        try:
            session = _Session(comparison, folder, command, annotate)
            session.work(jobs, progress)
        except KeyboardInterrupt:
            console.print(f"Stopped. Finished runs are kept. To resume, run: {resuming(folder)}")
            raise
    return session.results


def resuming(folder: Path) -> str:
    """The command that resumes the comparison in a folder."""
    return f"fedshuffle compare --resume {shlex.quote(str(folder))}"


class _Session:
    """One call of :func:`run`, which starts a comparison or resumes it."""

    def __init__(
        self, comparison: Comparison, folder: Path, command: str | None, annotate: Annotate | None
    ) -> None:
        self.folder = folder
        self._annotate = annotate
        if not (folder / "compare.toml").exists():
            _save(comparison, folder)  # Ctrl-C may come while the data are loaded
        before = _previous(folder)
        self._command = command or before.get("command") or resuming(folder)
        self._seconds, self._start = float(before.get("seconds") or 0.0), time.monotonic()
        self._facts = results.facts(comparison)
        self.study = Study(comparison, folder, self._facts.judge)
        _save(comparison, folder)  # its runs have been checked to be those of this comparison
        self._deaths: Counter[str] = Counter()
        self.results: dict[str, Any] = {}
        self.write()

    def write(self) -> None:
        """Update ``results.json``."""
        seconds = self._seconds + time.monotonic() - self._start
        self.results = results.assemble(self.study, self._facts, self._command, seconds)
        if self._annotate is not None:
            self._annotate(self.results)
        _files.write_file(self.folder / "results.json", json.dumps(self.results, allow_nan=False))

    def work(self, jobs: int, progress: bool) -> None:
        """Do the runs that have not ended."""
        study, left = self.study, self.study.unfinished()
        if not left:
            return
        jobs = min(jobs, len(left) + study.undecided())
        running: dict[Future[Answer], Trial] = {}
        shown = Progress(study, progress)
        with shown.bar, WorkerPool(jobs, self.folder / "workers.log") as pool:
            while left:
                for trial in left:
                    if len(running) < jobs and trial not in running.values():
                        study.prepare(trial)
                        running[pool.submit(study.folder(trial))] = trial
                shown.update({study.folder(t): t.config.rounds for t in running.values()})
                done, _ = wait(running, TICK, FIRST_COMPLETED)
                for future in done:
                    trial = running.pop(future)
                    self._end(trial, future.result())
                    if study.result(trial):
                        shown.ended(trial)
                        self.write()
                        left = study.unfinished()

    def _end(self, trial: Trial, answer: Answer) -> None:
        if answer is None:
            self._deaths[trial.name] += 1
            if self._deaths[trial.name] == DEATHS:
                self.study.fail(trial, "its process died (out of memory?): see workers.log")
        elif answer:
            raise FedShuffleError(
                f"run {trial.name}: {' '.join(answer.split())} Finished runs are kept; to resume,"
                f" run: {resuming(self.folder)}"
            )
        else:
            self.study.update(trial)


def _previous(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _save(comparison: Comparison, folder: Path) -> None:
    """Write the comparison into its folder, so that it can be resumed without its file."""
    base = loader.relative(comparison.base.folder, folder)
    tables = {k: v for k, v in comparison.tables.items() if k != "out"} | {"folder": base}
    if comparison.tables:
        _files.write_file(folder / "compare.toml", loader.toml(tables))


class Progress:
    """Finished and current runs, with rounds, losses and the time left.

    If the error stream is not a terminal, it prints one line for every run that ends.
    """

    def __init__(self, study: Study, visible: bool) -> None:
        self._study, self._visible = study, visible
        shown = visible and Console(stderr=True).is_terminal
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.bar = progress_bar(shown, "{task.fields[text]}", *times, transient=True, wide=True)
        self._all = self.bar.add_task("", completed=self._rounds()[0], text="")
        self._tasks: dict[Path, TaskID] = {}

    def ended(self, trial: Trial) -> None:
        """Print the result of a run."""
        result = self._study.result(trial)
        if not self._visible or result is None:
            return
        last = result.history[-1] if result.history else {}
        found = ", ".join(f"{k} {v:.4g}" for k, v in last.items() if k != "round")
        text = found if result.outcome == "finished" else f"{result.outcome}: {result.reason}"
        line = Text(f"{self._count()} {trial.name}: {text}")
        self.bar.console.print(line, highlight=False, soft_wrap=True)

    def update(self, running: Mapping[Path, int]) -> None:
        """Show how far the current runs are, given their folders and numbers of rounds."""
        for folder in self._tasks.keys() - running.keys():
            self.bar.remove_task(self._tasks.pop(folder))
        done, total = self._rounds()
        for folder, rounds in running.items() if not self.bar.disable else ():
            if folder not in self._tasks:
                self._tasks[folder] = self.bar.add_task(f"  {folder.name}", total=rounds, text="")
            round, text = tail(folder)
            self.bar.update(self._tasks[folder], completed=round, text=text)
            done += round
        runs = f"{self._count()} runs"
        self.bar.update(self._all, description=runs, completed=done, total=total)

    def _count(self) -> str:
        trials, left = self._study.trials(), self._study.unfinished()
        return f"{len(trials) - len(left)}/{len(trials) + self._study.undecided()}"

    def _rounds(self) -> tuple[int, int]:
        """The rounds of runs that have ended, and of all runs."""
        total = sum(trial.config.rounds for trial in self._study.trials())
        left = sum(trial.config.rounds for trial in self._study.unfinished())
        later = self._study.undecided() * self._study.comparison.base.rounds
        return total - left, total + later


def tail(folder: Path) -> tuple[int, str]:
    """The last round of a run, and its last known loss as text."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0, ""
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:  # the first may be cut off
            continue
    known = [
        f"{name} {record[name]:.4g}"
        for record in reversed(records)
        for name in ("train_loss", "loss")
        if record.get(name) is not None
    ]
    return (records[-1]["round"] if records else 0), next(iter(known), "")
