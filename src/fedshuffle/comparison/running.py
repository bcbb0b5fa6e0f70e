"""Doing a comparison: tune, train, and keep the results up to date. What is done stays done.

DIR/compare.toml    the comparison, enough to go on from
DIR/results.json    what is known so far; written after every run
DIR/runs/           one folder a run, see :mod:`fedshuffle.comparison.plan`
DIR/workers.log     what the processes said
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from pathlib import Path
from typing import Any, final

from fedshuffle._arrays import count
from fedshuffle._terminal import Console
from fedshuffle.comparison import results
from fedshuffle.comparison.crew import Answer, Crew, claimed
from fedshuffle.comparison.plan import Plan
from fedshuffle.comparison.settings import Comparison, Trial
from fedshuffle.comparison.showing import Show
from fedshuffle.config import writing
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import results_folder
from fedshuffle.runs import terminated_as_interrupted

TICK = 0.5
"""Seconds between looks at the runs that are being done."""

DEATHS = 2
"""A run whose process dies so often has failed."""


def run(
    comparison: Comparison,
    out: Path | str | None = None,
    *,
    jobs: int | None = None,
    progress: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Do all runs of a comparison that are not done yet, several at once.

    Args:
        comparison: what is compared.
        out: the folder, if not that of the config. Given again after an interruption, what is done
            there stays done, and the outcome is that of a comparison never interrupted.
        jobs: how many runs at once, each in a process of its own with one torch thread; by default
            as many as there are cores.
        progress: show what is going on, on the error stream.
        command: how to repeat it, for the record.

    Returns:
        What stands in ``results.json``.
    """
    place = comparison.base.out if out is None else Path(out)
    if place is None:
        raise FedShuffleError("the comparison needs a folder: give it as out.")
    jobs = _cores() if jobs is None else count(jobs, "jobs")
    folder = results_folder(place)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with claimed(folder) as keep, terminated_as_interrupted():
        if progress:
            console.print("Loading the data and auditing the methods.")
        try:
            session = _Session(comparison, folder, command)
            session.work(jobs, keep, progress)
        except KeyboardInterrupt:
            console.print(f"Stopped. What is done stays done. To go on, run: {resuming(folder)}")
            raise
    return session.known


def resuming(folder: Path) -> str:
    """The words that go on with the comparison in a folder."""
    return f"fedshuffle compare --resume {shlex.quote(str(folder))}"


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system tells
        return os.cpu_count() or 1


@final
class _Session:
    """One go at a comparison, from the start or from where the last one was left."""

    def __init__(self, comparison: Comparison, folder: Path, command: str | None) -> None:
        self.folder = folder
        if not (folder / "compare.toml").exists():
            _keep(comparison, folder)  # Ctrl-C may come while the data are loaded
        before = _before(folder)
        self._command = command or before.get("command") or resuming(folder)
        self._seconds, self._begun = float(before.get("seconds") or 0.0), time.monotonic()
        self.facts = results.facts(comparison)
        judge = self.facts.judge
        self.plan = Plan(comparison, folder, judge.metric, judge.higher_is_better)
        _keep(
            comparison, folder
        )  # now that the runs there are known to be those of this comparison
        self._deaths: Counter[str] = Counter()
        self.known: dict[str, Any] = {}
        self.write()

    def write(self) -> None:
        """Put what is known into the folder."""
        seconds = self._seconds + time.monotonic() - self._begun
        self.known = results.assembled(self.plan, self.facts, self._command, seconds)
        text = json.dumps(self.known, allow_nan=False)
        writing.write(self.folder / "results.json", text.encode())

    def work(self, jobs: int, keep: tuple[int, ...], progress: bool) -> None:
        """Do what is not done yet."""
        left = self._left()
        if not left:
            return
        log = self.folder / "workers.log"
        with (
            Show(self.plan, progress) as show,
            Crew(min(jobs, len(left) + self.plan.unknown()), log, keep) as crew,
        ):
            while left or crew.running:
                for trial in left:
                    if crew.free and self.plan.folder(trial) not in crew.running:
                        self.plan.begin(trial)
                        crew.give(self.plan.folder(trial))
                over = crew.wait(TICK)
                if over is not None:
                    trial = next(t for t in left if self.plan.folder(t) == over[0])
                    self._end(trial, over[1])
                    if self.plan.ended(trial):
                        show.ended(trial)
                        self.write()
                        left = self._left()
                show.update(crew.running)

    def _left(self) -> list[Trial]:
        return [trial for trial in self.plan.trials() if self.plan.ended(trial) is None]

    def _end(self, trial: Trial, answer: Answer) -> None:
        if answer is None:
            self._deaths[trial.name] += 1
            if self._deaths[trial.name] == DEATHS:
                self.plan.fail(trial, "its process died (out of memory?): see workers.log")
        elif "error" in answer:
            said = " ".join(answer["error"].split())
            raise FedShuffleError(
                f"run {trial.name}: {said} What is done stays done; to go on, run:"
                f" {resuming(self.folder)}"
            )
        else:
            self.plan.look(trial)


def _before(folder: Path) -> dict[str, Any]:
    """The results of the last go, if there was one."""
    try:
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(comparison: Comparison, folder: Path) -> None:
    """Write the comparison down, so that it can go on without its file."""
    home, here = comparison.base.folder, folder.resolve()
    inside = here.is_relative_to(home)  # the two can then be moved together
    base = Path(os.path.relpath(home, here)).as_posix() if inside else str(home)
    tables = {k: v for k, v in comparison.tables.items() if k != "out"} | {"folder": base}
    if comparison.tables:
        writing.write(folder / "compare.toml", writing.toml(tables).encode())
