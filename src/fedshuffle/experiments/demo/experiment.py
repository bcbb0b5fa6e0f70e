"""The demo's computation: an audit before any training, then training to see whether it is right.

The images of handwritten digits that come with scikit-learn are split over clients of very
different sizes and label mixes. The audit computes the objective that each method minimises, and so
the level at which it will stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor

from fedshuffle import methods, schedules
from fedshuffle._arrays import FloatArray, IntArray, jsonable
from fedshuffle.auditing import Audit, audit
from fedshuffle.engines import VectorizedEngine
from fedshuffle.experiments.demo.problem import L2, RARE, Digits, split
from fedshuffle.experiments.quadratics import trajectory
from fedshuffle.local_work import LocalWork
from fedshuffle.training.rounds import Run

METHODS = ("fedavg-rr", "fednova-rr", "fedshuffle")
ROUNDS = 400
COHORT, BATCH_SIZE = 10, 32
SAMPLING = f"uniform:{COHORT}"
WORK = LocalWork(epochs=1, batch_size=BATCH_SIZE, weight_decay=L2)
STEP_SIZES = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Each method gets the best of these; after a twentieth of the rounds it has halved."""
PILOTS, RUNS = 2, 5
"""Runs per step size to choose among them, and runs to show, each with another seed."""


@dataclass(frozen=True, eq=False)
class MethodResult:
    """One method: its audit, and its runs (a row for each)."""

    audit: Audit
    predicted: float
    """``f(x-hat*) - f*``: where the method stops, as the audit predicts."""
    step_size: float
    pilots: dict[float, float]
    """``f - f*`` at the end of the pilots, by step size."""
    suboptimality: FloatArray
    """``f(x^r) - f*``, a column per evaluated round."""
    excess: FloatArray
    """``f_i(x) - f_i(x*)`` of the last model, a column per client."""
    accuracies: dict[str, FloatArray]
    """Test accuracies of the last model."""

    @property
    def name(self) -> str:
        return self.audit.name

    @property
    def label(self) -> str:
        return methods.label(self.name)

    @property
    def left(self) -> FloatArray:
        """What each run has left to gain after the last round."""
        return self.suboptimality[:, -1]

    @property
    def rare(self) -> FloatArray:
        """Each run's accuracy on the digits that mostly small clients hold."""
        return self.accuracies[RARE]

    def excess_of(self, clients: NDArray[np.bool_]) -> float:
        """How much higher the loss of these clients is than at the optimum."""
        weights = self.audit.objective_weights[clients]
        return float(np.average(self.excess.mean(0)[clients], weights=weights))


@dataclass(frozen=True, eq=False)
class DemoResult:
    """All that the demo computes: its page, its picture and its summary are made from it."""

    rounds: int
    seed: int
    digits: Digits
    optimal_value: float
    optimal_accuracies: dict[str, FloatArray]
    """Test accuracies of the optimum of the intended objective."""
    evaluated: IntArray
    """The rounds in which models are evaluated."""
    methods: tuple[MethodResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = vars(self) | {
            "digits": {
                "sizes": self.digits.federation.sizes,
                "small": self.digits.small,
                "label_counts": self.digits.label_counts,
                "rare_digits": self.digits.rare_digits,
                "test_examples": len(self.digits.test_labels),
            },
            "methods": [vars(m) | {"audit": m.audit.to_dict()} for m in self.methods],
        }
        plain: dict[str, Any] = jsonable(data)
        return plain


def seeds(seed: int) -> tuple[list[int], list[int]]:
    """Seeds of the pilots and of the runs shown: no run is judged by what chose it."""
    every = [(seed + k) % (1 << 64) for k in range(PILOTS + RUNS)]
    return every[:PILOTS], every[PILOTS:]


def audit_and_train(rounds: int, seed: int, bars: Progress) -> DemoResult:
    """Audit, compute the optima, choose the step sizes, train."""
    digits = split(seed)
    federation, weights = digits.federation, digits.federation.weights
    audits = [audit(federation, method, SAMPLING, WORK) for method in METHODS]
    if not bars.disable:
        shares = ", ".join(f"{methods.label(a.name)} {a.total_variation:.1%}" for a in audits)
        line = f"Audit, before any training: weight in the wrong place: {shares}."
        bars.console.print(line, highlight=False)
    optimum = digits.optimum(weights)
    engine = VectorizedEngine(digits.problem)

    def train(
        step_sizes: Sequence[Sequence[float]], seeds: Sequence[int], evaluated: IntArray, text: str
    ) -> tuple[FloatArray, Tensor]:
        """``f - f*`` by method, step size, seed and evaluated round; and the last models.

        With the same seed all methods get the same cohorts and minibatches.
        """
        runs = [
            Run(
                federation,
                method,
                SAMPLING,
                WORK,
                schedules.inverse_time(size, rounds / 20),
                seed=k,
            )
            for method, mine in zip(METHODS, step_sizes, strict=True)
            for size in mine
            for k in seeds
        ]
        task, columns = bars.add_task(text, total=rounds), []
        for r, models in enumerate(trajectory(engine, runs, rounds)):
            if r in evaluated:
                columns.append(digits.suboptimality(models, optimum))
            bars.update(task, completed=r)
        shape = (len(METHODS), len(step_sizes[0]), len(seeds), len(evaluated))
        return np.stack(columns, axis=1).reshape(shape), models

    pilot_seeds, run_seeds = seeds(seed)
    ending = np.arange(rounds - rounds // 10, rounds + 1)
    pilots, _ = train([STEP_SIZES] * len(METHODS), pilot_seeds, ending, "Choosing step sizes")
    scores = pilots.mean(axis=(2, 3))
    chosen = [STEP_SIZES[k] for k in scores.argmin(axis=1)]
    evaluated = np.unique(np.linspace(0, rounds, min(rounds, 100) + 1).round().astype(np.int64))
    curves, models = train([[size] for size in chosen], run_seeds, evaluated, "Training")
    by_method = models.chunk(len(METHODS))
    return DemoResult(
        rounds=rounds,
        seed=seed,
        digits=digits,
        optimal_value=float(digits.client_losses(optimum)[0] @ weights),
        optimal_accuracies=digits.accuracies(optimum),
        evaluated=evaluated,
        methods=tuple(
            MethodResult(
                audit=found,
                predicted=predicted_level(digits, found, optimum),
                step_size=chosen[k],
                pilots=dict(zip(STEP_SIZES, scores[k].tolist(), strict=True)),
                suboptimality=curves[k, 0],
                excess=digits.client_losses(by_method[k]) - digits.client_losses(optimum),
                accuracies=digits.accuracies(by_method[k]),
            )
            for k, found in enumerate(audits)
        ),
    )


def predicted_level(digits: Digits, found: Audit, optimum: Tensor) -> float:
    """``f(x-hat*) - f*``, where x-hat* minimises the effective objective of the audit."""
    if found.consistent:  # the same optimum
        return 0.0
    effective = digits.optimum(found.effective_weights)
    return float(digits.suboptimality(effective, optimum)[0])
