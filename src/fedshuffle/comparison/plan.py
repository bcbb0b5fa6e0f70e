"""Which runs a comparison asks for, which have ended and how: all is read from their folders.

DIR/runs/NAME/config.toml     the run, as for every run
DIR/runs/NAME/outcome.json    written last: finished, diverged or failed, and why
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from fedshuffle import config as configs
from fedshuffle.comparison.settings import Comparison, Pair, Setting, Trial
from fedshuffle.config import writing
from fedshuffle.errors import FedShuffleError
from fedshuffle.runs import FACTS, RunFolder

OUTCOME = "outcome.json"


@final
@dataclass(frozen=True)
class Ended:
    """How a run ended, and all that was evaluated."""

    outcome: str
    reason: str
    history: list[dict[str, Any]]


@final
@dataclass(frozen=True)
class Curve:
    """Runs that differ in their seeds only."""

    pair: Pair
    group: str
    setting: Setting
    trials: tuple[Trial, ...]


def end(folder: Path, outcome: str, reason: str = "") -> None:
    """Say how the run in a folder ended."""
    text = json.dumps({"outcome": outcome, "reason": reason}, indent=2)
    writing.write(folder / OUTCOME, text.encode())


@final
class Plan:
    """The runs of a comparison in a folder, as far as they are known.

    Args:
        comparison: what is compared.
        out: the folder.
        metric: the name of what short runs are judged by.
        higher_is_better: which end of it is the good one.
    """

    def __init__(
        self,
        comparison: Comparison,
        out: Path,
        metric: str = "loss",
        higher_is_better: bool = False,
    ) -> None:
        self.comparison = comparison
        self.out = out
        self._metric = metric
        self._sign = -1.0 if higher_is_better else 1.0
        self._made: dict[tuple[Pair, Setting, int | None], Trial] = {}
        self._ended: dict[str, Ended] = {}
        seen: set[str] = set()
        while new := [trial for trial in self.trials() if trial.name not in seen]:
            for trial in new:  # those that have ended tell which come after them
                self.look(trial)
            seen.update(trial.name for trial in new)

    def folder(self, trial: Trial) -> Path:
        """Where a run lies."""
        return self.out / "runs" / trial.name

    def begin(self, trial: Trial) -> None:
        """Make the folder of a run ready; one that is there must be of the same run.

        A run that has ended here may have gone on for more rounds since.
        """
        folder = self.folder(trial)
        wanted = trial.config.pinned().override({})  # as it will be read again
        if not (folder / "config.toml").exists():
            writing.copy(wanted, folder, [f"The run {trial.name} of a comparison."])
            return
        found = replace(configs.load(folder / "config.toml"), folder=wanted.folder)
        if (folder / OUTCOME).exists() and found.rounds > wanted.rounds:
            found = replace(found, rounds=wanted.rounds)
        if found != wanted:
            raise FedShuffleError(
                f"{str(folder)!r} holds a run with other settings than those wanted now. Choose"
                " another folder for this comparison, or put the settings back."
            )

    def look(self, trial: Trial) -> None:
        """See whether a run has ended."""
        folder = self.folder(trial)
        if not (folder / OUTCOME).exists():
            return
        self.begin(trial)  # only to compare the settings
        try:
            told = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
            if told["outcome"] != "failed":  # which may go better this time
                history = _history(folder, trial.config.rounds)
                last = history[-1]["round"] if history else 0
                if told["outcome"] == "finished" and last < trial.config.rounds:
                    raise ValueError(f"its last evaluation is that of round {last}")
                self._ended[trial.name] = Ended(told["outcome"], told["reason"], history)
        except (OSError, ValueError, KeyError) as error:
            raise FedShuffleError(
                f"{str(folder)!r} is damaged ({error}). Delete that folder: the run is then done"
                " again."
            ) from error

    def fail(self, trial: Trial, reason: str) -> None:
        """Give up a run until the comparison is begun again."""
        end(self.folder(trial), "failed", reason)
        self._ended[trial.name] = Ended("failed", reason, [])

    def ended(self, trial: Trial) -> Ended | None:
        """How a run ended; None if it has not."""
        return self._ended.get(trial.name)

    def tuning(self, pair: Pair) -> list[Trial]:
        """The short runs by which a method's setting is chosen.

        Where the best step size is an end of those tried, one beyond it is tried next.
        """
        settings = list(self.comparison.grid) if self.comparison.tuned else []
        while True:
            trials = [self._trial(pair, setting, None) for setting in settings]
            best = self._best(trials)
            how = [ended.outcome for ended in map(self.ended, trials) if ended]
            if best is None or "failed" in how:
                return trials
            lost = [outcome == "diverged" for outcome in how]
            more = self.comparison.wider(dict(zip(settings, lost, strict=True)), best)
            if not more:
                return trials
            settings += more

    def value(self, trial: Trial) -> float | None:
        """What a short run came to; None if it did not end well."""
        ended = self.ended(trial)
        if ended is None or ended.outcome != "finished":
            return None
        value = float(ended.history[-1][self._metric])
        return value if math.isfinite(value) else None

    def chosen(self, pair: Pair) -> Setting | None:
        """The setting of a method, once it is known."""
        if not self.comparison.tuned:
            return next(iter(self.comparison.grid), None)
        return self._best(self.tuning(pair))

    def _best(self, trials: Sequence[Trial]) -> Setting | None:
        """The best setting of short runs, once all are done; of equals the first.

        Where none ended well, the smallest step size.
        """
        if not trials or not all(self.ended(trial) for trial in trials):
            return None
        costs = [math.inf if (v := self.value(t)) is None else self._sign * v for t in trials]
        if all(cost == math.inf for cost in costs):
            return min((trial.setting for trial in trials), key=lambda s: s.step_size)
        return trials[costs.index(min(costs))].setting

    def curves(self) -> Iterator[Curve]:
        """All curves whose setting is known by now."""
        comparison = self.comparison
        for pair in comparison.pairs:
            own = self.chosen(pair)
            groups = {} if own is None else {"own": own}
            groups |= {f"common:{size:g}": comparison.at_common(size) for size in comparison.common}
            for group, setting in groups.items():
                trials = [self._trial(pair, setting, seed) for seed in comparison.seeds]
                yield Curve(pair, group, setting, tuple(trials))

    def trials(self) -> list[Trial]:
        """All runs that are known by now, the short ones first."""
        full = [trial for curve in self.curves() for trial in curve.trials]
        return list({trial.name: trial for trial in self._short() + full}.values())

    def unknown(self) -> int:
        """How many runs come to these at most, once all settings are chosen."""
        waiting = sum(self.chosen(pair) is None for pair in self.comparison.pairs)
        return waiting * len(self.comparison.seeds) if self.comparison.grid else 0

    def _short(self) -> list[Trial]:
        return [trial for pair in self.comparison.pairs for trial in self.tuning(pair)]

    def _trial(self, pair: Pair, setting: Setting, seed: int | None) -> Trial:
        key = (pair, setting, seed)
        if key not in self._made:
            self._made[key] = self.comparison.trial(pair, setting, seed)
        return self._made[key]


def _history(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """What was evaluated in the planned rounds of a run, and after which of them."""
    facts = set(FACTS) - {"round"}
    records = RunFolder(folder).metrics() if (folder / "run.json").exists() else []
    kept = [{k: v for k, v in record.items() if k not in facts} for record in records]
    return [record for record in kept if len(record) > 1 and record["round"] <= rounds]
