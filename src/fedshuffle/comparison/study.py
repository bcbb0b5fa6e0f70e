"""The runs of a comparison and how they ended, as read from their folders.

DIR/runs/NAME/config.toml     the run, as for every run
DIR/runs/NAME/outcome.json    written last: finished, diverged or failed, and why
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshuffle import _files
from fedshuffle.comparison.spec import Comparison, Criterion, GridPoint, Pair, Trial
from fedshuffle.config import loader
from fedshuffle.errors import FedShuffleError
from fedshuffle.training.history import RECORD_KEYS
from fedshuffle.training.run_folder import RunFolder

OUTCOME = "outcome.json"


def write_outcome(folder: Path, outcome: str, reason: str = "") -> None:
    """Record how the run in a folder ended."""
    text = json.dumps({"outcome": outcome, "reason": reason}, indent=2)
    _files.write_file(folder / OUTCOME, text)


class Study:
    """The runs of a comparison in a folder, as far as they are known; ``judge`` ranks tuning."""

    def __init__(self, comparison: Comparison, out: Path, judge: Criterion) -> None:
        self.comparison, self.out, self._judge = comparison, out, judge
        self._trial = functools.cache(comparison.trial)
        seen: set[Trial] = set()
        while new := [trial for trial in self.trials() if trial not in seen]:
            for trial in new:  # their results decide which runs follow
                self.update(trial)
            seen.update(new)

    def folder(self, trial: Trial) -> Path:
        """The folder of a run."""
        return self.out / "runs" / trial.name

    def prepare(self, trial: Trial) -> None:
        """Write the config of a run; an existing one must be of the same run.

        A run that has ended may have been resumed for more rounds since.
        """
        folder = self.folder(trial)
        wanted = trial.config.pinned().override({})  # exactly as it will be read again
        if not (folder / "config.toml").exists():
            loader.save(wanted, folder, [f"The run {trial.name} of a comparison."])
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
        except (OSError, ValueError, KeyError) as error:
            raise FedShuffleError(
                f"{str(folder)!r} is damaged ({error}). Delete that folder, to repeat the run."
            ) from error

    def fail(self, trial: Trial, reason: str) -> None:
        """Give up a run until the comparison is started again."""
        write_outcome(self.folder(trial), "failed", reason)
        trial.outcome, trial.reason = "failed", reason

    def score(self, trial: Trial) -> float | None:
        """The final metric of a tuning run; None if it did not finish with a finite one."""
        if trial.outcome != "finished":
            return None
        value = float(trial.history[-1][self._judge.metric])
        return value if math.isfinite(value) else None

    def tuning(self, pair: Pair) -> tuple[list[Trial], GridPoint | None]:
        """The tuning runs of a method, and its best grid point once it is known.

        If the best point is at an end of the grid, the runs go beyond it.
        """
        points = list(self.comparison.grid)
        if not self.comparison.tuned:
            return [], next(iter(points), None)
        while True:
            trials = [self._trial(pair, point, None) for point in points]
            if not all(trial.outcome for trial in trials):
                return trials, None
            best = self._best(trials)
            diverged = {trial.point: trial.outcome == "diverged" for trial in trials}
            more = self.comparison.wider(diverged, best)
            if not more or any(trial.outcome == "failed" for trial in trials):
                return trials, best
            points += more

    def _best(self, trials: Sequence[Trial]) -> GridPoint:
        """The first of the best points; if none is any good, the smallest step size."""
        scores = {trial.point: self.score(trial) for trial in trials}
        known = {point: score for point, score in scores.items() if score is not None}
        if not known:
            return min(scores, key=lambda point: point.step_size)
        pick = max if self._judge.higher_is_better else min
        return pick(known, key=lambda point: known[point])

    def replicates(self) -> Iterator[tuple[Pair, str, GridPoint, list[Trial]]]:
        """The full runs of each method and group, one per seed, where the grid point is known."""
        comparison = self.comparison
        common = {f"common:{x:g}": comparison.common_point(x) for x in comparison.common_step_sizes}
        for pair in comparison.pairs:
            for group, point in {"own": self.tuning(pair)[1], **common}.items():
                if point is not None:
                    trials = [self._trial(pair, point, seed) for seed in comparison.seeds]
                    yield pair, group, point, trials

    def trials(self) -> list[Trial]:
        """All runs that are known by now, tuning runs first."""
        short = [trial for pair in self.comparison.pairs for trial in self.tuning(pair)[0]]
        full = [trial for *_, trials in self.replicates() for trial in trials]
        return list(dict.fromkeys(short + full))

    def unfinished(self) -> list[Trial]:
        """The runs that are known by now and have not ended."""
        return [trial for trial in self.trials() if not trial.outcome]

    def undecided(self) -> int:
        """At most how many runs follow once all grid points are chosen."""
        waiting = sum(self.tuning(pair)[1] is None for pair in self.comparison.pairs)
        return waiting * len(self.comparison.seeds) if self.comparison.grid else 0


def _history(folder: Path, rounds: int) -> list[dict[str, Any]]:
    facts = set(RECORD_KEYS) - {"round"}
    records = RunFolder(folder).metrics() if (folder / "run.json").exists() else []
    kept = [{k: v for k, v in record.items() if k not in facts} for record in records]
    return [record for record in kept if len(record) > 1 and record["round"] <= rounds]
