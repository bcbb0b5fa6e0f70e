"""The demo's computation: an audit before any training, then training to see whether it is right.

The images of handwritten digits that come with scikit-learn are split over clients of very
different sizes and label mixes. The audit computes the objective that each method minimises, and so
the level at which it will stop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional

from fedshuffle import losses, schedules
from fedshuffle._arrays import FloatArray, IntArray, jsonable
from fedshuffle.auditing import Audit, audit
from fedshuffle.engines import Problem, VectorizedEngine
from fedshuffle.experiments.toy_problems import trajectory
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.randomness import Purpose, generator
from fedshuffle.training.rounds import Run

LABELS = {"fedavg-rr": "FedAvg", "fednova-rr": "FedNova", "fedshuffle": "FedShuffle"}
"""The methods and what the demo calls them; the first two shuffle, as frameworks run them."""
METHODS = tuple(LABELS)
ROUNDS = 400
COHORT, BATCH_SIZE = 10, 32
L2 = 0.01
"""Every loss has the penalty ``L2 / 2 |x|^2``."""
SAMPLING = f"uniform:{COHORT}"
WORK = LocalWork(epochs=1, batch_size=BATCH_SIZE, weight_decay=L2)
STEP_SIZES = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Each method gets the best of these; after a twentieth of the rounds it has halved."""
PILOTS, RUNS = 2, 5
"""Runs per step size to choose among them, and runs to show, each with another seed."""

DIGITS = 10
ALL, RARE, OTHER = "all digits", "digits of small clients", "other digits"
_TEST_SHARE = 0.2
_LARGE_SHARES = (4, 3, 2)  # how the large clients share what the small ones leave
_SMALL_CLIENTS, _SMALL_SIZES = 37, (5, 50)
_MIXING = 1.5
"""How far labels stray between clients: 0 sorts the digits strictly, large numbers mix them all."""


@dataclass(frozen=True, eq=False)
class Digits:
    r"""The digits, split over clients, with a part held out; and logistic regression on them.

    .. math:: f_i(x) = \text{mean cross-entropy on client } i + \tfrac{l_2}{2} \|x\|^2

    It is strongly convex, so every objective over the clients has one optimum, which can be
    computed to many digits.
    """

    federation: Federation
    """Its fields are images (64 pixels, and a constant for the bias) and labels."""
    test_images: Tensor
    test_labels: Tensor
    small: NDArray[np.bool_]  # which clients are small

    @property
    def label_counts(self) -> IntArray:
        """Examples by client and digit."""
        one_hot = np.eye(DIGITS, dtype=np.int64)[self.federation.fields[1]]
        return np.add.reduceat(one_hot, self.federation.offsets[:-1])

    @property
    def rare_digits(self) -> list[int]:
        """The digits of which small clients hold more than half of the examples."""
        counts = self.label_counts
        most = 2 * counts[self.small].sum(0) > counts.sum(0)
        return np.flatnonzero(most).tolist()

    @property
    def problem(self) -> Problem:
        """The problem for an engine; the penalty is the weight decay of the local work."""
        model = nn.Linear(self.test_images.shape[1], DIGITS, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        return Problem(model, losses.cross_entropy, self.federation)

    def client_losses(self, models: Tensor) -> FloatArray:
        """``f_i(x)`` of every client, a row for each row x."""
        images, labels = self.federation.fields
        logits = images @ models.view(len(models), DIGITS, -1).mT
        targets = labels.expand(len(models), -1)
        each = functional.cross_entropy(logits.mT, targets, reduction="none")
        sums = np.add.reduceat(each.numpy(), self.federation.offsets[:-1], axis=1)
        penalty = L2 / 2 * models.square().sum(1, keepdim=True).numpy()
        return np.asarray(sums / self.federation.sizes + penalty)

    def suboptimality(self, models: Tensor, optimum: Tensor) -> FloatArray:
        """``f(x) - f*`` of each row x, where f counts every example the same."""
        gap = self.client_losses(models) - self.client_losses(optimum)
        return np.asarray(gap @ self.federation.weights)

    def optimum(self, weights: FloatArray) -> Tensor:
        """The model that minimises ``sum_i weights_i f_i``, as a row."""
        images, labels = self.federation.fields
        sizes = self.federation.sizes
        regression = LogisticRegression(
            C=1 / L2, fit_intercept=False, solver="newton-cg", tol=1e-10, max_iter=1000
        )
        regression.fit(images, labels, sample_weight=np.repeat(weights / sizes, sizes))
        return torch.tensor(regression.coef_.reshape(1, -1))

    def accuracies(self, models: Tensor) -> dict[str, FloatArray]:
        """Test accuracy of each row: on all digits, and by who mostly holds them."""
        logits = self.test_images @ models.view(len(models), DIGITS, -1).mT
        correct = np.asarray(logits.argmax(2) == self.test_labels)
        rare = np.isin(self.test_labels.numpy(), self.rare_digits)
        return {
            ALL: correct.mean(1),
            RARE: correct[:, rare].mean(1),
            OTHER: correct[:, ~rare].mean(1),
        }


def split(seed: int) -> Digits:
    """A few large clients with mostly low digits, many small ones with the others."""
    rng = generator(seed, Purpose.SPLIT)
    pixels, labels = load_digits(return_X_y=True)
    test_rows, rows = np.split(rng.permutation(len(labels)), [round(_TEST_SHARE * len(labels))])

    low, high = np.log(_SMALL_SIZES)
    small_sizes = np.exp(rng.uniform(low, high, _SMALL_CLIENTS)).round().astype(np.int64)
    left = len(rows) - int(small_sizes.sum())
    large_sizes = left * np.array(_LARGE_SHARES) // sum(_LARGE_SHARES)
    large_sizes[0] += left - int(large_sizes.sum())
    sizes = np.concatenate([large_sizes, small_sizes])

    # Clients take their examples from a line that is roughly sorted by digit, large clients first.
    place = labels[rows] + _MIXING * rng.standard_normal(len(rows))
    rows = rows[np.argsort(place, kind="stable")]

    images = torch.tensor(pixels / 16, dtype=torch.float64)
    images = torch.hstack([images - images[rows].mean(0), torch.ones(len(images), 1)])
    targets = torch.tensor(labels, dtype=torch.int64)
    return Digits(
        federation=Federation.from_arrays(images[rows], targets[rows], sizes=sizes),
        test_images=images[test_rows],
        test_labels=targets[test_rows],
        small=np.arange(len(sizes)) >= len(large_sizes),
    )


@dataclass(frozen=True, eq=False)
class MethodResult:
    """One method: its audit, and its runs (a row for each)."""

    audit: Audit
    predicted: float  # `f(x-hat*) - f*`: where the method stops, as the audit predicts
    step_size: float
    pilots: dict[float, float]  # `f - f*` at the end of the pilots, by step size
    suboptimality: FloatArray  # `f(x^r) - f*`, a column per evaluated round
    excess: FloatArray  # `f_i(x) - f_i(x*)` of the last model, a column per client
    accuracies: dict[str, FloatArray]  # test accuracies of the last model

    @property
    def name(self) -> str:
        return self.audit.name

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @property
    def left(self) -> FloatArray:
        """What each run has left to gain after the last round."""
        return self.suboptimality[:, -1]

    @property
    def rare(self) -> FloatArray:
        """Each run's accuracy on the digits that mostly small clients hold."""
        return self.accuracies[RARE]

    @property
    def mostly_bias(self) -> bool:
        """Whether the audit predicts at least half of what is left to gain."""
        return self.predicted >= 0.5 * float(self.left.mean())

    def count_of(self, clients: NDArray[np.bool_]) -> float:
        """How much these clients count together."""
        return float(self.audit.effective_weights[clients].sum())

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
    evaluated: IntArray  # the rounds in which models are evaluated
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
        return dict(jsonable(data))


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
        shares = ", ".join(f"{LABELS[a.name]} {a.total_variation:.1%}" for a in audits)
        line = f"Audit before any training, weight in the wrong place: {shares}."
        bars.console.print(line, highlight=False)
    optimum = digits.optimum(weights)
    engine = VectorizedEngine(digits.problem)

    def run(method: str, size: float, seed: int) -> Run:
        """With the same seed all methods get the same cohorts and minibatches."""
        step_size = schedules.inverse_time(size, rounds / 20)
        return Run(federation, method, SAMPLING, WORK, step_size, seed=seed)

    def train(runs: Sequence[Run], evaluated: IntArray, text: str) -> tuple[FloatArray, Tensor]:
        """``f - f*`` by method, run and evaluated round; and the last models."""
        task, columns = bars.add_task(text, total=rounds), []
        for r, models in enumerate(trajectory(engine, runs, rounds)):
            if r in evaluated:
                columns.append(digits.suboptimality(models, optimum))
            bars.update(task, completed=r)
        return np.stack(columns, axis=1).reshape(len(METHODS), -1, len(evaluated)), models

    pilot_seeds, run_seeds = seeds(seed)
    pilots = [run(m, size, k) for m in METHODS for size in STEP_SIZES for k in pilot_seeds]
    ending = np.arange(rounds - rounds // 10, rounds + 1)
    curves, _ = train(pilots, ending, "Choosing step sizes")
    scores = curves.reshape(len(METHODS), len(STEP_SIZES), -1).mean(axis=2)
    chosen = [STEP_SIZES[k] for k in scores.argmin(axis=1)]
    runs = [run(m, size, k) for m, size in zip(METHODS, chosen, strict=True) for k in run_seeds]
    evaluated = np.unique(np.linspace(0, rounds, min(rounds, 100) + 1).round().astype(np.int64))
    curves, models = train(runs, evaluated, "Training")
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
                suboptimality=curves[k],
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
