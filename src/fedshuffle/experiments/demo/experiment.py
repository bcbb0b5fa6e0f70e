"""The demo: three methods on real data, and the objective that each of them really minimises.

The images of handwritten digits that come with scikit-learn are split over clients of very
different sizes and label mixes. Before any training, the audit computes the objective that each
method minimises, and so the level at which it will stop; training then shows whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from fedshuffle import schedules
from fedshuffle._arrays import FloatArray, IntArray, count, jsonable
from fedshuffle.auditing import Audit, audit
from fedshuffle.engines import Engine, VectorizedEngine
from fedshuffle.experiments.demo.problem import ACCURACIES, BoolArray, Objective, split
from fedshuffle.experiments.quadratics import trajectory
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import label
from fedshuffle.randomness import check_seed
from fedshuffle.training.rounds import Run

METHODS = ("fedavg-rr", "fednova-rr", "fedshuffle")
ROUNDS = 400


@dataclass(frozen=True)
class Settings:
    """What the demo does; the same for every method."""

    rounds: int = ROUNDS
    seed: int = 0
    cohort: int = 10
    batch_size: int = 32
    l2: float = 0.01
    step_sizes: tuple[float, ...] = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
    """Each method gets the best of these."""
    pilots: int = 2
    """Runs per step size to choose among them; they are not shown."""
    runs: int = 5
    """Runs to show, each with another seed."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        count(self.rounds, "rounds")

    @property
    def sampling(self) -> str:
        return f"uniform:{self.cohort}"

    @property
    def work(self) -> LocalWork:
        return LocalWork(epochs=1, batch_size=self.batch_size)

    @property
    def halved_after(self) -> float:
        """The round at which the step size has halved."""
        return self.rounds / 20

    def seeds(self) -> tuple[list[int], list[int]]:
        """Seeds of the pilots and of the runs shown: no run is judged by what chose it."""
        every = [(self.seed + k) % (1 << 64) for k in range(self.pilots + self.runs)]
        return every[: self.pilots], every[self.pilots :]

    def run(self, federation: Federation, method: str, step_size: float, seed: int) -> Run:
        """One training run; with the same seed all methods get the same cohorts and batches."""
        schedule = schedules.inverse_time(step_size, self.halved_after)
        return Run(federation, method, self.sampling, self.work, step_size=schedule, seed=seed)


Results = dict[str, Any]
"""The plain data of ``results.json``: the numbers behind the page and its pictures.

Each method has its ``audit``, the ``predicted`` level ``f(x-hat*) - f*``, ``f - f*`` at the end of
the ``pilots`` by step size, and with a row per run: the ``suboptimality`` ``f(x^r) - f*`` (a column
per evaluated round), the ``excess`` ``f_i(x) - f_i(x*)`` of the last model (a column per client),
and its test accuracy."""


def audit_and_train(settings: Settings, bars: Progress) -> Results:
    """Audit, compute the optima, choose the step sizes, train."""
    digits = split(settings.seed)
    federation, weights = digits.federation, digits.federation.weights
    audits = [audit(federation, method, settings.sampling, settings.work) for method in METHODS]
    if not bars.disable:
        shares = ", ".join(f"{label(a.name)} {100 * a.total_variation:.1f}%" for a in audits)
        line = f"Audit, before any training: weight in the wrong place: {shares}."
        bars.console.print(line, highlight=False)
    objective = Objective(federation, settings.l2)
    optimum = objective.optimum(weights)
    best = objective.value(optimum, weights)

    def suboptimality(x: Tensor) -> float:
        return objective.value(x, weights) - best

    engine, last = VectorizedEngine(objective.problem), settings.rounds
    pilot_seeds, seeds = settings.seeds()
    pilots = [
        settings.run(federation, method, step_size, seed)
        for method in METHODS
        for step_size in settings.step_sizes
        for seed in pilot_seeds
    ]
    ending = np.arange(last - last // 10, last + 1)
    curves, _ = _watch(engine, pilots, ending, suboptimality, bars, "Choosing step sizes")
    scores = curves.reshape(len(METHODS), len(settings.step_sizes), -1).mean(2)
    chosen = [settings.step_sizes[int(k)] for k in scores.argmin(1)]

    runs = [
        settings.run(federation, method, step_size, seed)
        for method, step_size in zip(METHODS, chosen, strict=True)
        for seed in seeds
    ]
    rounds = np.unique(np.linspace(0, last, min(last, 100) + 1).round().astype(np.int64))
    curves, models = _watch(engine, runs, rounds, suboptimality, bars, "Training")
    with torch.no_grad():
        clients = [objective.client_losses(x).numpy() for x in (optimum, *models)]
    correct = np.stack([objective.correct(x, digits) for x in models])
    per_run = {
        "suboptimality": curves,
        "excess": np.stack(clients[1:]) - clients[0],
        **digits.accuracies(correct),
    }
    per_method: dict[str, Any] = {
        "pilots": [dict(zip(map(str, settings.step_sizes), row, strict=True)) for row in scores],
        "step_size": chosen,
        **{name: np.split(values, len(METHODS)) for name, values in per_run.items()},
    }
    results: Results = jsonable(
        {
            "settings": asdict(settings),
            "federation": {
                "sizes": federation.sizes,
                "small": digits.small,
                "label_counts": digits.label_counts,
                "test_examples": len(digits.test_labels),
                "rare_digits": digits.rare_digits,
            },
            "optimum": {"value": best, **digits.accuracies(objective.correct(optimum, digits))},
            "rounds": rounds,
            "methods": [
                {
                    "audit": found.to_dict(),
                    "predicted": predicted_level(objective, found, optimum),
                    **{name: values[k] for name, values in per_method.items()},
                }
                for k, found in enumerate(audits)
            ],
        }
    )
    return results


def predicted_level(objective: Objective, audit: Audit, optimum: Tensor) -> float:
    """``f(x-hat*) - f*``, where x-hat* minimises the effective objective of the audit."""
    if audit.consistent:  # the same optimum
        return 0.0
    weights = audit.objective_weights
    effective = objective.optimum(audit.effective_weights)
    return objective.value(effective, weights) - objective.value(optimum, weights)


def _watch(
    engine: Engine,
    runs: Sequence[Run],
    rounds: IntArray,
    measure: Callable[[Tensor], float],
    bars: Progress,
    description: str,
) -> tuple[FloatArray, Tensor]:
    """A measure of all runs in the given rounds (a row per run), and the last models."""
    models, wanted, columns = trajectory(engine, runs, int(rounds[-1])), set(rounds.tolist()), []
    start = next(models)
    after = bars.track(models, total=float(rounds[-1]), description=description)
    for round, x in enumerate(chain([start], after)):
        if round in wanted:
            columns.append([measure(one) for one in x])
    return np.array(columns).T, x


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over runs."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: FloatArray) -> Spread:
        return cls(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class MethodSummary:
    """One method in numbers."""

    method: str
    total_variation: float
    """The share of the objective that is in the wrong place."""
    largest_ratio: float
    small_weight: float
    """The effective weight of the small clients together."""
    consistent: bool | None
    findings: tuple[str, ...]
    """What is wrong and what to change."""
    step_size: float
    predicted: float
    """The suboptimality at which it settles, as the audit predicts."""
    early: Spread
    """The suboptimality after a tenth of the rounds."""
    reached: Spread
    """The suboptimality after the last round."""
    accuracy: Spread
    accuracy_rare: Spread
    """Test accuracy on the digits that mostly small clients hold."""
    accuracy_other: Spread
    excess_small: float
    """How much higher the loss of the small clients is than at the optimum."""
    excess_large: float

    @property
    def label(self) -> str:
        return label(self.method)


@dataclass(frozen=True)
class Files:
    """The files that the demo writes."""

    page: Path
    picture: Path
    results: Path

    @classmethod
    def under(cls, out: Path) -> Files:
        return cls(out / "report.html", out / "picture.png", out / "results.json")


@dataclass(frozen=True)
class Summary:
    """The demo in numbers."""

    rounds: int
    early_round: int
    seed: int
    runs: int
    clients: int
    sampling: str
    rare_digits: tuple[int, ...]
    small_weight: float
    """The intended weight of the small clients together: their share of the examples."""
    best_accuracy: float
    """Test accuracy of the optimum of the intended objective."""
    best_accuracy_rare: float
    best_accuracy_other: float
    methods: tuple[MethodSummary, ...]
    files: Files

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**asdict(self), "files": {name: str(p) for name, p in vars(self.files).items()}}


def summarise(results: Results, files: Files) -> Summary:
    """The numbers to remember."""
    settings, rounds = Settings(**results["settings"]), results["rounds"]
    small = np.array(results["federation"]["small"])
    weights = np.array(results["methods"][0]["audit"]["objective_weights"])
    early = int(np.searchsorted(rounds, settings.rounds / 10, side="right")) - 1

    def excess(found: Results, clients: BoolArray) -> float:
        """The mean over the examples of some clients and over the runs."""
        rows = np.array(found["excess"])[:, clients]
        return float((rows @ weights[clients]).mean() / weights[clients].sum())

    def summary(found: Results) -> MethodSummary:
        audit, curves = found["audit"], np.array(found["suboptimality"])
        known = ("method", "total_variation", "largest_ratio", "consistent")
        numbers: dict[str, Any] = {name: audit[name] for name in known}
        numbers |= {name: Spread.of(np.array(found[name])) for name in ACCURACIES}
        return MethodSummary(
            **numbers,
            small_weight=float(np.array(audit["effective_weights"])[small].sum()),
            findings=tuple(f"{finding['what']} {finding['fix']}" for finding in audit["findings"]),
            step_size=found["step_size"],
            predicted=found["predicted"],
            early=Spread.of(curves[:, early]),
            reached=Spread.of(curves[:, -1]),
            excess_small=excess(found, small),
            excess_large=excess(found, ~small),
        )

    return Summary(
        rounds=settings.rounds,
        early_round=rounds[early],
        seed=settings.seed,
        runs=settings.runs,
        clients=len(small),
        sampling=settings.sampling,
        rare_digits=tuple(results["federation"]["rare_digits"]),
        small_weight=float(weights[small].sum()),
        **{f"best_{name}": results["optimum"][name] for name in ACCURACIES},
        methods=tuple(map(summary, results["methods"])),
        files=files,
    )
