"""The runs of a comparison and how they ended, as read from their folders.

DIR/runs/NAME/config.toml     the run, as for every run
DIR/runs/NAME/outcome.json    written last: finished, diverged or failed, and why
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedshuffle import _files
from fedshuffle.comparison.spec import Comparison, Criterion, GridPoint, Pair, Trial
from fedshuffle.config import loader
from fedshuffle.errors import FedShuffleError
from fedshuffle.training.result import RECORD_KEYS
from fedshuffle.training.run_folder import RunFolder

OUTCOME = "outcome.json"


@dataclass(frozen=True)
class TrialResult:
    """How a run ended, and its evaluations."""

    outcome: str
    reason: str
    history: list[dict[str, Any]]

    @property
    def diverged(self) -> bool:
        return self.outcome == "diverged"


class Replicates(NamedTuple):
    """The runs of a method that differ in their seeds only."""

    pair: Pair
    group: str
    point: GridPoint
    trials: tuple[Trial, ...]


def write_outcome(folder: Path, outcome: str, reason: str = "") -> None:
    """Record how the run in a folder ended."""
    text = json.dumps({"outcome": outcome, "reason": reason}, indent=2)
    _files.write_file(folder / OUTCOME, text)


class Study:
    """The runs of a comparison in a folder, as far as they are known; ``judge`` ranks tuning."""

    def __init__(self, comparison: Comparison, out: Path, judge: Criterion) -> None:
        self.comparison, self.out, self._judge = comparison, out, judge
        self._trials: dict[tuple[Pair, GridPoint, int | None], Trial] = {}
        self._results: dict[str, TrialResult] = {}
        seen: set[str] = set()
        while new := [trial for trial in self.trials() if trial.name not in seen]:
            for trial in new:  # their results decide which runs follow
                self.update(trial)
            seen.update(trial.name for trial in new)

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
            self._results[trial.name] = TrialResult(found["outcome"], found["reason"], history)
        except (OSError, ValueError, KeyError) as error:
            raise FedShuffleError(
                f"{str(folder)!r} is damaged ({error}). Delete that folder, to repeat the run."
            ) from error

    def fail(self, trial: Trial, reason: str) -> None:
        """Give up a run until the comparison is started again."""
        write_outcome(self.folder(trial), "failed", reason)
        self._results[trial.name] = TrialResult("failed", reason, [])

    def result(self, trial: Trial) -> TrialResult | None:
        """How a run ended; None if it has not."""
        return self._results.get(trial.name)

    def score(self, trial: Trial) -> float | None:
        """The final metric of a tuning run; None if it did not finish with a finite one."""
        result = self.result(trial)
        if result is None or result.outcome != "finished":
            return None
        value = float(result.history[-1][self._judge.metric])
        return value if math.isfinite(value) else None

    def tuning(self, pair: Pair) -> list[Trial]:
        """The tuning runs of a method, which go beyond the grid if its best point is at an end."""
        points = list(self.comparison.grid) if self.comparison.tuned else []
        while True:
            trials = [self._trial(pair, point, None) for point in points]
            best = self._best(trials)
            results = [result for trial in trials if (result := self.result(trial))]
            if best is None or any(result.outcome == "failed" for result in results):
                return trials
            diverged = [result.diverged for result in results]
            more = self.comparison.wider(dict(zip(points, diverged, strict=True)), best)
            if not more:
                return trials
            points += more

    def best(self, pair: Pair) -> GridPoint | None:
        """The grid point of a method, once it is known."""
        if not self.comparison.tuned:
            return next(iter(self.comparison.grid), None)
        return self._best(self.tuning(pair))

    def _best(self, trials: Sequence[Trial]) -> GridPoint | None:
        """The first of the best points, once all have ended; else the smallest step size."""
        if not trials or not all(self.result(trial) for trial in trials):
            return None
        sign = -1 if self._judge.higher_is_better else 1
        costs = [math.inf if (v := self.score(t)) is None else sign * v for t in trials]
        if all(cost == math.inf for cost in costs):
            return min((trial.point for trial in trials), key=lambda point: point.step_size)
        return trials[costs.index(min(costs))].point

    def replicates(self) -> Iterator[Replicates]:
        """The full runs of each method and group, where the grid point is known."""
        comparison = self.comparison
        for pair in comparison.pairs:
            own = self.best(pair)
            groups = {} if own is None else {"own": own}
            for size in comparison.common_step_sizes:
                groups[f"common:{size:g}"] = comparison.common_point(size)
            for group, point in groups.items():
                trials = tuple(self._trial(pair, point, seed) for seed in comparison.seeds)
                yield Replicates(pair, group, point, trials)

    def trials(self) -> list[Trial]:
        """All runs that are known by now, tuning runs first."""
        short = [trial for pair in self.comparison.pairs for trial in self.tuning(pair)]
        full = [trial for replicates in self.replicates() for trial in replicates.trials]
        return list({trial.name: trial for trial in short + full}.values())

    def unfinished(self) -> list[Trial]:
        """The runs that are known by now and have not ended."""
        return [trial for trial in self.trials() if self.result(trial) is None]

    def undecided(self) -> int:
        """At most how many runs follow once all grid points are chosen."""
        waiting = sum(self.best(pair) is None for pair in self.comparison.pairs)
        return waiting * len(self.comparison.seeds) if self.comparison.grid else 0

    def _trial(self, pair: Pair, point: GridPoint, seed: int | None) -> Trial:
        key = (pair, point, seed)
        if key not in self._trials:
            self._trials[key] = self.comparison.trial(pair, point, seed)
        return self._trials[key]


def _history(folder: Path, rounds: int) -> list[dict[str, Any]]:
    facts = set(RECORD_KEYS) - {"round"}
    records = RunFolder(folder).metrics() if (folder / "run.json").exists() else []
    kept = [{k: v for k, v in record.items() if k not in facts} for record in records]
    return [record for record in kept if len(record) > 1 and record["round"] <= rounds]
