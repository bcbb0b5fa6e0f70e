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
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.progress import TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedshuffle._files import one_writer, write_file
from fedshuffle._terminal import Console, interrupted_once, progress_bar
from fedshuffle.comparison import results
from fedshuffle.comparison.results import Results
from fedshuffle.comparison.spec import Comparison, Trial
from fedshuffle.comparison.study import Study
from fedshuffle.comparison.workers import Answer, WorkerPool
from fedshuffle.config import loader
from fedshuffle.errors import FedShuffleError

TICK = 0.5
"""Seconds between updates of the progress display."""

DEATHS = 2
"""A run has failed when its process has died this often."""

_TAIL = 1 << 16
"""The number of bytes that hold the last records of a run."""


def run(
    comparison: Comparison,
    folder: Path,
    jobs: int,
    progress: bool,
    command: str | None,
    annotate: Callable[[Results], None] | None,
) -> Results:
    """Do all runs of a comparison that are not done yet; see :meth:`Comparison.run`."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    before, start = _previous(folder), time.monotonic()

    def update() -> Results:
        """Write ``results.json``."""
        seconds = (before.get("seconds") or 0.0) + time.monotonic() - start
        repeat = command or before.get("command") or resuming(folder)
        found = results.assemble(study, facts, repeat, seconds)
        if annotate is not None:
            annotate(found)
        write_file(folder / "results.json", json.dumps(found, allow_nan=False))
        return found

    with one_writer(folder), interrupted_once():
        if progress:
            console.print("Loading the data and auditing the methods.")
        try:
            if not (folder / "compare.toml").exists():
                _save(comparison, folder)  # Ctrl-C may come while the data are loaded
            facts = results.facts(comparison)
            study = Study(comparison, folder, facts.judge)
            _save(comparison, folder)  # its runs have been checked to be those of this comparison
            return _work(study, jobs, progress, update)
        except KeyboardInterrupt:
            console.print(f"Stopped. Finished runs are kept. To resume, run: {resuming(folder)}")
            raise


def resuming(folder: Path) -> str:
    """The command that resumes the comparison in a folder."""
    return f"fedshuffle compare --resume {shlex.quote(str(folder))}"


def _previous(folder: Path) -> dict[str, Any]:
    """The results of an earlier call, if there are any."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _save(comparison: Comparison, folder: Path) -> None:
    """Write the comparison into its folder, so that it can be resumed without its file."""
    base = loader.relative(comparison.base.folder, folder)
    tables = {k: v for k, v in comparison.tables.items() if k != "out"} | {"folder": base}
    if comparison.tables:
        write_file(folder / "compare.toml", loader.toml(tables))


def _work(study: Study, jobs: int, progress: bool, update: Callable[[], Results]) -> Results:
    """Do the runs that have not ended, and update the results after each."""
    results, left = update(), study.unfinished()
    if not left:
        return results
    jobs = min(jobs, len(left) + study.undecided())
    running: dict[Future[Answer], Trial] = {}
    deaths: Counter[str] = Counter()
    shown = Progress(study, progress)
    with shown.bar, WorkerPool(jobs, study.out / "workers.log") as pool:
        while left:
            for trial in left:
                if len(running) < jobs and trial not in running.values():
                    study.prepare(trial)
                    running[pool.submit(study.folder(trial))] = trial
            shown.update({study.folder(t): t.config.rounds for t in running.values()})
            for future in wait(running, TICK, FIRST_COMPLETED).done:
                trial, answer = running.pop(future), future.result()
                if answer is None:
                    deaths[trial.name] += 1
                    if deaths[trial.name] < DEATHS:
                        continue
                    study.fail(trial, "its process died (out of memory?): see workers.log")
                elif answer:
                    raise FedShuffleError(
                        f"run {trial.name}: {' '.join(answer.split())} Finished runs are kept; to"
                        f" resume, run: {resuming(study.out)}"
                    )
                else:
                    study.update(trial)
                shown.ended(trial)
                results, left = update(), study.unfinished()
    return results


class Progress:
    """Finished and current runs, with rounds, losses and the time left.

    If the error stream is not a terminal, it prints one line for every run that ends.
    """

    def __init__(self, study: Study, visible: bool) -> None:
        self._study, self._visible = study, visible
        shown = visible and Console(stderr=True).is_terminal
        times = TimeElapsedColumn(), TimeRemainingColumn()
        self.bar = progress_bar(shown, "{task.fields[text]}", *times, transient=True, wide=True)
        self._all = self.bar.add_task("", completed=sum(self._rounds()[0]), text="")
        self._tasks: dict[Path, TaskID] = {}

    def ended(self, trial: Trial) -> None:
        """Print the result of a run."""
        if not self._visible:
            return
        last = trial.history[-1] if trial.history else {}
        found = ", ".join(f"{k} {v:.4g}" for k, v in last.items() if k != "round")
        text = found if trial.outcome == "finished" else f"{trial.outcome}: {trial.reason}"
        line = Text(f"{self._count()} {trial.name}: {text}")
        self.bar.console.print(line, highlight=False, soft_wrap=True)

    def update(self, running: Mapping[Path, int]) -> None:
        """Show how far the current runs are, given their folders and numbers of rounds."""
        for folder in self._tasks.keys() - running.keys():
            self.bar.remove_task(self._tasks.pop(folder))
        ended, total = (sum(rounds) for rounds in self._rounds())
        for folder, rounds in running.items() if not self.bar.disable else ():
            if folder not in self._tasks:
                self._tasks[folder] = self.bar.add_task(f"  {folder.name}", total=rounds, text="")
            round, text = tail(folder)
            self.bar.update(self._tasks[folder], completed=round, text=text)
            ended += round
        runs = f"{self._count()} runs"
        self.bar.update(self._all, description=runs, completed=ended, total=total)

    def _count(self) -> str:
        return "/".join(str(len(rounds)) for rounds in self._rounds())

    def _rounds(self) -> tuple[list[int], list[int]]:
        """The rounds of each run that has ended, and of each run that is planned."""
        trials, later = self._study.trials(), self._study.undecided()
        ended = [trial.config.rounds for trial in trials if trial.outcome]
        planned = [trial.config.rounds for trial in trials]
        return ended, planned + [self._study.comparison.base.rounds] * later


def tail(folder: Path) -> tuple[int, str]:
    """The last round of a run, and its last known loss as text."""
    round, text = 0, ""
    with suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        for line in file.read().split(b"\n")[:-1]:
            with suppress(ValueError):  # the first may be cut off
                record = json.loads(line)
                round = record["round"]
                for name in ("loss", "train_loss"):
                    if record.get(name) is not None:
                        text = f"{name} {record[name]:.4g}"
    return round, text
