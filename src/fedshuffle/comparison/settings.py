"""What a comparison compares, as plain data, and the runs that follow from it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final

from fedshuffle._arrays import count, number
from fedshuffle.config import Config, Evaluating, Scheduled, Store, Use
from fedshuffle.config.settings import at
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import check_seed

SHORT = "tune_"
"""How the names of the short runs begin."""

CLIENTS = 100
"""Tuning by the training loss takes it on so many clients."""

WIDEN = 1000.0
"""How far beyond either end of the grid step sizes are tried, while the best is at that end."""


@final
@dataclass(frozen=True)
class Setting:
    """A point of the grid."""

    step_size: float
    weight_decay: float
    clip: float


@final
@dataclass(frozen=True)
class Tuning:
    """The short runs by which each method gets its setting."""

    rounds: int
    seed: int = 0
    metric: str = "loss"
    """A name of ``fedshuffle.Evaluation``, or the import path of a ``Metric``."""
    data: Use | Store | Literal["training"] = "training"
    clients: int | None = CLIENTS
    every: int = 1
    widen: float = WIDEN
    """The grid grows by at most this factor beyond either end; 1 keeps it as it is."""

    def __post_init__(self) -> None:
        count(self.rounds, "compare.tune.rounds")
        if not number(self.widen, "compare.tune.widen") >= 1:
            raise FedShuffleError(
                f"compare.tune.widen is {self.widen}, but must be a factor of 1 (the grid stays as"
                " it is) or more."
            )
        with at("compare.tune"):
            check_seed(self.seed)

    def evaluating(self, batch_size: int) -> Evaluating:
        """How a short run is evaluated; by the loss too, which tells when it is lost."""
        metrics = tuple(dict.fromkeys([self.metric, "loss"]))
        return Evaluating(self.data, metrics, self.every, False, batch_size, self.clients)


Pair = tuple[str, str | None]
"""A method and a momentum; None is the method's own."""


@final
@dataclass(frozen=True)
class Trial:
    """One run of a comparison, in the folder of its name."""

    name: str
    config: Config
    setting: Setting


@final
@dataclass(frozen=True)
class Comparison:
    """Methods with and without momentum, over seeds, each with the setting that suits it best.

    Args:
        base: the run that all others are variations of.
        methods: names or import paths.
        momentum: such as ``"none"`` and ``"global:0.1"``; None is that of the method itself.
        seeds: those of the runs compared.
        grid: the settings from which every method gets its own; empty for none.
        common: step sizes at which all methods are run as well.
        tuning: how the setting is chosen.
        metric: what is compared; the accuracy if there is one, else the first metric.
        title: for the report.
        text: the file.
        tables: the file as plain data, after what was changed.
    """

    base: Config
    methods: tuple[str, ...]
    momentum: tuple[str | None, ...] = (None,)
    seeds: tuple[int, ...] = (0,)
    grid: tuple[Setting, ...] = ()
    common: tuple[float, ...] = ()
    tuning: Tuning = field(default_factory=lambda: Tuning(1))
    metric: str | None = None
    title: str = "Comparison"
    text: str = field(default="", compare=False)
    tables: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.base.evaluation is None:
            raise FedShuffleError(
                "evaluation is missing: add a section [evaluation], so that there is something to"
                " compare."
            )
        words = [_word(method) for method in self.methods]
        for k, word in enumerate(words):
            if word in words[:k]:
                raise FedShuffleError(
                    f"compare.methods: both {self.methods[words.index(word)]!r} and"
                    f" {self.methods[k]!r} would be called {word!r}. Rename one."
                )
        for method in self.methods:
            with at("compare.methods"):
                replace(self.base, method=method)
        for momentum in self.momentum:
            with at("compare.momentum"):
                replace(self.base, momentum=momentum)
        for seed in self.seeds:
            with at("compare.seeds"):
                check_seed(seed)
        for setting in [*self.grid, *map(self.at_common, self.common)]:
            with at("compare"):
                self.trial((self.methods[0], None), setting, None)
        if not self.grid and not self.common:
            raise FedShuffleError("there is no setting to run: give a grid or common step sizes.")

    @property
    def pairs(self) -> list[Pair]:
        """Every method with every momentum."""
        return list(itertools.product(self.methods, self.momentum))

    @property
    def tuned(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.grid) > 1

    def wider(self, tried: Mapping[Setting, bool], best: Setting) -> list[Setting]:
        """What to try next, where the best step size is an end of those tried; else nothing.

        Where the smallest diverged, no best above it is to be trusted: smaller ones come next.

        Args:
            tried: whether a run with the setting diverged.
            best: the best of them.
        """
        sizes = {setting.step_size for setting in tried}
        lost = all(d for setting, d in tried.items() if setting.step_size == min(sizes))
        beyond = next_step_size(
            {setting.step_size for setting in self.grid},
            sizes,
            min(sizes) if lost else best.step_size,
            self.tuning.widen,
        )
        rest = dict.fromkeys((setting.weight_decay, setting.clip) for setting in self.grid)
        return [] if beyond is None else [Setting(beyond, *point) for point in rest]

    def at_common(self, step_size: float) -> Setting:
        """The base's setting at a step size common to all."""
        return Setting(step_size, self.base.work.weight_decay, self.base.work.clip)

    def trial(self, pair: Pair, setting: Setting, seed: int | None) -> Trial:
        """The run of a method with a setting and a seed; without a seed, the short one."""
        method, momentum = pair
        base, work = self.base, self.base.work
        assert base.evaluation is not None
        size: float | Scheduled = setting.step_size
        if isinstance(base.step_size, Scheduled):
            arguments = {**base.step_size.arguments, "step_size": setting.step_size}
            size = Scheduled(base.step_size.name, arguments)
        config = replace(
            base,
            method=method,
            momentum=momentum,
            step_size=size,
            work=replace(work, weight_decay=setting.weight_decay, clip=setting.clip),
            seed=self.tuning.seed if seed is None else seed,
            out=None,
        )
        words = [_word(method), *([] if momentum is None else [_word(momentum)])]
        words.append(f"step{float(setting.step_size)!r}")
        if setting.weight_decay != work.weight_decay:
            words.append(f"decay{float(setting.weight_decay)!r}")
        if setting.clip != work.clip:
            words.append(f"clip{float(setting.clip)!r}")
        if seed is not None:
            return Trial("_".join([*words, f"seed{seed}"]), config, setting)
        short = replace(
            config,
            rounds=self.tuning.rounds,
            evaluation=self.tuning.evaluating(base.evaluation.batch_size),
        )
        return Trial(SHORT + "_".join(words), short, setting)

    def run(
        self,
        out: Path | str | None = None,
        *,
        jobs: int | None = None,
        progress: bool = False,
        command: str | None = None,
    ) -> dict[str, Any]:
        """Do all runs that are not done yet; see :func:`fedshuffle.comparison.running.run`."""
        from fedshuffle.comparison.running import run

        return run(self, out, jobs=jobs, progress=progress, command=command)


def settings(
    base: Config, sizes: Sequence[float], decays: Sequence[float], clips: Sequence[float]
) -> tuple[Setting, ...]:
    """The grid; what is not varied is as in the base."""
    return tuple(
        Setting(*map(float, point))
        for point in itertools.product(
            sizes, decays or [base.work.weight_decay], clips or [base.work.clip]
        )
    )


def next_step_size(grid: Set[float], tried: Set[float], best: float, widen: float) -> float | None:
    """The step size beyond the end of those tried at which the best one is; None if at neither.

    The grid goes on with its own mean spacing, but at least by 2 and at most by 10, with two
    significant digits, up to ``widen`` times beyond its end. One step size alone is no grid: it
    was meant.

    >>> grid = {0.01, 0.03, 0.1}
    >>> next_step_size(grid, grid, 0.01, 1000), next_step_size(grid, grid | {0.0032}, 0.1, 1000)
    (0.0032, 0.32)
    >>> next_step_size(grid, grid, 0.03, 1000), next_step_size(grid, grid, 0.1, 1)
    (None, None)
    """
    low, high = min(grid), max(grid)
    if len(grid) < 2 or min(tried) < best < max(tried):
        return None
    spacing = min(max((high / low) ** (1 / (len(grid) - 1)), 2.0), 10.0)
    down = best == min(tried)
    beyond = 1 + sum(size < low if down else size > high for size in tried)
    factor = spacing**beyond
    if factor > widen * (1 + 1e-9):
        return None
    return float(f"{low / factor if down else high * factor:.2g}")


def _word(text: str) -> str:
    """A method or momentum as part of a folder's name.

    >>> _word("global:0.1"), _word("package.module:FEDAVG_MIN"), _word("fedprox:mu=0.1")
    ('global-0.1', 'fedavg-min', 'fedprox-mu-0.1')
    >>> _word("package.module:METHOD")
    'module'
    """
    if "=" in text:  # options of a method, which tell it from others of its name
        return re.sub(r"[^a-z0-9.]+", "-", text.lower())
    kind, _, name = text.partition(":")
    if name == "METHOD":  # where a module holds one method, the module has its name
        kind, name = kind.rpartition(".")[2], ""
    number = re.fullmatch(r"[\d.eE+-]+", name)
    return f"{kind}-{name}" if number else re.sub(r"[^a-z0-9.]+", "-", (name or kind).lower())
