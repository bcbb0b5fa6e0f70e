"""Run a comparison: tune, train, and keep the results up to date. Finished runs are not repeated.

docs/reference/files.md lists the files in its folder; ``outcome.json`` is the last file of a run.
"""

import functools
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedshuffle._arrays import jsonable
from fedshuffle._files import one_writer, write_file
from fedshuffle._terminal import Console, interrupted_once, progress_bar
from fedshuffle.comparison.results import Facts, Results, collect_facts
from fedshuffle.comparison.small_clients import small_decile
from fedshuffle.comparison.spec import Comparison, Criterion, GridPoint, Trial
from fedshuffle.comparison.variants import Variant
from fedshuffle.comparison.workers import OUTCOME, Answer, WorkerPool, write_outcome
from fedshuffle.config import loader, writer
from fedshuffle.errors import FedShuffleError
from fedshuffle.training.monitoring import RECORD_KEYS, evaluated, is_evaluated
from fedshuffle.training.run_folder import RunFolder

TICK = 0.5  # seconds between updates of the progress display
DEATHS = 2  # a run has failed when its process has died this often
_ENDED = ("finished", "diverged")  # outcomes that count; a run that failed is tried again
_TAIL = 1 << 16  # the number of bytes that hold the last records of a run


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
        found = study.results(facts.common, facts.variants, repeat, seconds)
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
            facts = collect_facts(comparison)
            study = Study(comparison, folder, facts.judge, facts.training_sizes)
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
    base = writer.relative(comparison.base.folder, folder)
    tables = {k: v for k, v in comparison.tables.items() if k != "out"} | {"folder": base}
    if comparison.tables:
        write_file(folder / "compare.toml", writer.toml(tables))


class Study:
    """The runs of a comparison in a folder, as far as they are known.

    Args:
        judge: what ranks tuning runs.
        training_sizes: the training examples of the clients that are evaluated.
    """

    def __init__(
        self,
        comparison: Comparison,
        out: Path,
        judge: Criterion,
        training_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.comparison, self.out, self._judge = comparison, out, judge
        self._training_sizes = training_sizes or {}
        self._trial = functools.cache(self._known)
        self.trials()  # refuses runs with other settings

    def _known(
        self, variant: Variant, point: GridPoint, seed: int | None, repeat: int = 0
    ) -> Trial:
        """A run with its result, if it has ended: in a search the results decide what follows."""
        trial = self.comparison.trial(variant, point, seed, repeat)
        self.update(trial)
        return trial

    def folder(self, trial: Trial) -> Path:
        return self.out / "runs" / trial.name

    def prepare(self, trial: Trial) -> None:
        """Write the config of a run; an existing one must be of the same run.

        A run that has ended may have been resumed for more rounds since.
        """
        folder = self.folder(trial)
        wanted = trial.config.pinned().override({})  # exactly as it will be read again
        if not (folder / "config.toml").exists():
            writer.save(wanted, folder, [f"The run {trial.name} of a comparison."])
            return
        found = replace(loader.load(folder / "config.toml"), folder=wanted.folder)
        if (folder / OUTCOME).exists() and found.rounds > wanted.rounds:
            found = replace(found, rounds=wanted.rounds)
        if found != wanted:
            raise FedShuffleError(
                f"{str(folder)!r} holds a run with other settings than those wanted now. Choose"
                " another folder for this comparison, or put the settings back."
            )

    def update(self, trial: Trial) -> None:
        """Read the result of a run, if it has ended; one that failed is tried again."""
        folder = self.folder(trial)
        if not (folder / OUTCOME).exists():
            return
        self.prepare(trial)  # only to compare the settings
        try:
            found = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
            if found["outcome"] == "failed":
                return
            history = _history(folder, trial.config.rounds)
            last = history[-1]["round"] if history else 0
            if found["outcome"] == "finished" and last < trial.config.rounds:
                raise ValueError(f"its last evaluation is that of round {last}")
            trial.outcome, trial.reason = found["outcome"], found["reason"]
            trial.history = history
            if tail(folder)[0] == trial.config.rounds:  # else its clients.csv is that of later ones
                trial.small = small_decile(folder / "clients.csv", self._training_sizes)
        except (OSError, ValueError, KeyError) as error:
            raise FedShuffleError(
                f"{str(folder)!r} is damaged ({error}). Delete that folder, to repeat the run."
            ) from error

    def fail(self, trial: Trial, reason: str) -> None:
        """Give up a run until the comparison is started again."""
        write_outcome(self.folder(trial), "failed", reason)
        trial.outcome, trial.reason = "failed", reason

    def scores(self, trials: Iterable[Trial]) -> dict[GridPoint, float | None]:
        """The mean of the final metric of the tuning runs at each point; None if one of them did
        not finish with a finite one.
        """
        found: dict[GridPoint, list[float]] = {}
        for trial in trials:
            done = trial.outcome == "finished"
            value = float(trial.history[-1][self._judge.metric]) if done else math.nan
            found.setdefault(trial.point, []).append(value)
        means = {point: fmean(values) for point, values in found.items()}
        return {point: mean if math.isfinite(mean) else None for point, mean in means.items()}

    def tuning(self, variant: Variant) -> tuple[list[Trial], GridPoint | None]:
        """The tuning runs of a variant, and its best grid point once it is known."""
        comparison = self.comparison
        points = comparison.grid(variant)
        if not comparison.tuned(variant):
            return [], next(iter(points), None)
        lattice, trials = comparison.lattice(variant), list[Trial]()
        while True:
            repeats = range(comparison.tune.repeats)
            trials += [self._trial(variant, point, None, k) for point in points for k in repeats]
            if not all(trial.outcome for trial in trials):
                return trials, None
            sign = -1 if self._judge.higher_is_better else 1
            scores = self.scores(trials).items()
            losses = {astuple(p): None if x is None else sign * x for p, x in scores}
            points = [GridPoint(*point) for point in lattice.untried(losses)]
            if not points or any(trial.outcome == "failed" for trial in trials):
                return trials, GridPoint(*lattice.best(losses))

    def replicates(self) -> Iterator[tuple[Variant, str, GridPoint, list[Trial]]]:
        """The full runs of each variant and group, one per seed, where the grid point is known."""
        comparison = self.comparison
        for variant in comparison.variants:
            common = {
                f"common:{x:g}": comparison.common_point(variant, x)
                for x in comparison.common_step_sizes
            }
            for group, point in {"own": self.tuning(variant)[1], **common}.items():
                if point is not None:
                    trials = [self._trial(variant, point, seed) for seed in comparison.seeds]
                    yield variant, group, point, trials

    def trials(self) -> list[Trial]:
        """All runs that are known by now, tuning runs first."""
        short = [trial for one in self.comparison.variants for trial in self.tuning(one)[0]]
        full = [trial for *_, trials in self.replicates() for trial in trials]
        return list(dict.fromkeys(short + full))

    def unfinished(self) -> list[Trial]:
        """The runs that are known by now and have not ended."""
        return [trial for trial in self.trials() if not trial.outcome]

    def undecided(self) -> int:
        """At most how many runs follow once all grid points are chosen."""
        comparison = self.comparison
        own = [variant for variant in comparison.variants if comparison.grid(variant)]
        return sum(self.tuning(one)[1] is None for one in own) * len(comparison.seeds)

    def results(
        self, common: Facts, facts: Mapping[Variant, Facts], command: str, seconds: float
    ) -> Results:
        """The results of all runs that have ended."""
        done = all(trial.outcome in _ENDED for trial in self.trials())
        found: Results = jsonable(
            {
                **common,
                "command": command,
                "complete": done and not self.undecided(),
                "seconds": seconds,
                "curves": [self._curve(facts[x[0]], *x) for x in self.replicates()],
                "warnings": [],
            }
        )
        return found

    def _curve(
        self, facts: Facts, variant: Variant, group: str, point: GridPoint, trials: list[Trial]
    ) -> dict[str, Any]:
        scales, given = facts["client_step_sizes"], self.comparison.given(variant)
        tried = self.tuning(variant)[0] if group == "own" else []
        lost = {trial.point for trial in tried if trial.outcome == "diverged"}
        return {
            **facts,
            "group": group,
            **vars(point),
            "client_step_sizes": [point.step_size * scale for scale in scales],
            "tuning": [
                {
                    **vars(one),
                    "added": one not in given,
                    "value": value,
                    "diverged": one in lost,
                }
                for one, value in self.scores(tried).items()
            ],
            "runs": [
                {
                    "seed": trial.config.seed,
                    "folder": f"runs/{trial.name}",
                    "diverged": trial.outcome == "diverged",
                    "history": trial.history,
                    "small_decile": trial.small,
                }
                for trial in trials
                if trial.outcome in _ENDED
            ],
        }


def _history(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The metrics in the rounds that were evaluated, and the steps and bytes until then."""
    facts = set(RECORD_KEYS) - {"round", "time"}
    records = RunFolder(folder).metrics() if (folder / "run.json").exists() else []
    totals, kept = dict.fromkeys(("steps", "bytes_down", "bytes_up"), 0), []
    for record in records:
        totals = {name: total + record.get(name, 0) for name, total in totals.items()}
        if is_evaluated(record) and record["round"] <= rounds:
            metrics = {name: value for name, value in record.items() if name not in facts}
            kept.append(metrics | {f"total_{name}": total for name, total in totals.items()})
    return kept


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
        metrics = {k: v for k, v in evaluated(last).items() if not k.startswith("total_")}
        found = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
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
                for name in ("train_loss", "training_loss", "loss"):
                    if record.get(name) is not None:
                        text = f"{name} {record[name]:.4g}"
    return round, text
