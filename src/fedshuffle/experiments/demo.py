"""The demo: three methods on real data, and the objective that each of them really minimises.

The images of handwritten digits that come with scikit-learn are split over clients of very
different sizes and label mixes. The audit says, before any training, which objective each method
minimises and so at which level it will stop; then the methods are trained, and one can see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from fedshuffle import losses, schedules
from fedshuffle._arrays import FloatArray, IntArray, count
from fedshuffle._terminal import Console
from fedshuffle.auditing import Audit, audit
from fedshuffle.engines import LanesEngine, Problem
from fedshuffle.experiments import results_folder
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.report import demo as report
from fedshuffle.rounds import Run, simulate

BoolArray = NDArray[np.bool_]

METHODS = ("fedavg-rr", "fednova-rr", "fedshuffle")
ROUNDS = 400
DIGITS = 10

_TEST_SHARE = 0.2
_LARGE_SHARES = (4, 3, 2)
"""How the large clients share what the small ones leave."""
_SMALL_CLIENTS = 37
_SMALL_SIZES = (5, 50)
_MIXING = 1.5
"""How far labels stray between clients: 0 sorts the digits strictly, large numbers mix them all."""


@final
@dataclass(frozen=True)
class Settings:
    """What the demo does; the same for every method."""

    rounds: int = ROUNDS
    seed: int = 0
    cohort: int = 10
    batch_size: int = 32
    l2: float = 0.01
    step_sizes: tuple[float, ...] = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
    """Each method gets the one that serves it best."""
    pilots: int = 2
    """Runs per step size to choose among them; they are not shown."""
    runs: int = 5
    """Runs to show, each with a seed of its own."""

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
        """One training run; all methods share cohorts and minibatches where they share a seed."""
        schedule = schedules.inverse_time(step_size, self.halved_after)
        return Run(federation, method, self.sampling, self.work, step_size=schedule, seed=seed)


# The federation -------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Digits:
    """The digits, split over clients, with a part held out."""

    federation: Federation
    """Its fields are images (64 pixels) and labels."""
    test_images: Tensor
    test_labels: Tensor
    rows: IntArray
    """Where the examples of the federation stand in scikit-learn's order."""
    test_rows: IntArray
    small: BoolArray
    """Which clients are small ones."""

    @property
    def label_counts(self) -> IntArray:
        """Examples by client and digit."""
        owner = np.repeat(np.arange(len(self.federation)), self.federation.sizes)
        counts = np.zeros((len(self.federation), DIGITS), dtype=np.int64)
        np.add.at(counts, (owner, self.federation.fields[1].numpy()), 1)
        return counts

    @property
    def rare_digits(self) -> IntArray:
        """The digits of which small clients hold more than half of the examples."""
        counts = self.label_counts
        return np.flatnonzero(2 * counts[self.small].sum(0) > counts.sum(0))


def split(seed: int) -> Digits:
    """A few large clients that mostly see the low digits, many small ones that see the others."""
    rng = generator(check_seed(seed), Purpose.SPLIT)
    pixels, labels = load_digits(return_X_y=True)
    shuffled = rng.permutation(len(labels))
    test_rows, rows = np.split(shuffled, [round(_TEST_SHARE * len(labels))])

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
    images = images - images[rows].mean(0)
    targets = torch.tensor(labels, dtype=torch.int64)
    return Digits(
        federation=Federation.from_arrays(images[rows], targets[rows], sizes=sizes),
        test_images=images[test_rows],
        test_labels=targets[test_rows],
        rows=rows,
        test_rows=test_rows,
        small=np.arange(len(sizes)) >= len(large_sizes),
    )


# The objective --------------------------------------------------------------------------------


@final
class Objective:
    r"""Multinomial logistic regression on a federation, with a quadratic penalty.

    .. math:: f_i(x) = \text{mean cross-entropy on client } i + \tfrac{l_2}{2} \|x\|^2

    It is strongly convex, so every objective over the clients has one optimum, and it can be found
    to many digits.
    """

    def __init__(self, federation: Federation, l2: float) -> None:
        self.l2 = l2
        model = nn.Linear(federation.fields[0].shape[1], DIGITS, dtype=torch.float64)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        self.problem = Problem(model, self.loss, federation)
        self._sizes = torch.tensor(federation.sizes)
        self._owner = torch.repeat_interleave(torch.arange(len(federation)), self._sizes)

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """What clients minimise: the mean over a minibatch, with the penalty."""
        return losses.cross_entropy(model, images, labels) + self._penalty(model)

    def _penalty(self, model: nn.Module) -> Tensor:
        squares = [parameter.square().sum() for parameter in model.parameters()]
        return 0.5 * self.l2 * torch.stack(squares).sum()

    def client_losses(self, x: Tensor) -> Tensor:
        """``f_i(x)`` of every client."""
        model = self.problem.load(x)
        images, labels = self.problem.fields
        each = functional.cross_entropy(model(images), labels, reduction="none")
        total = each.new_zeros(len(self._sizes)).index_add(0, self._owner, each)
        return total / self._sizes + self._penalty(model)

    def value(self, x: Tensor, weights: FloatArray) -> float:
        """``sum_i weights_i f_i(x)``."""
        with torch.no_grad():
            return float(torch.tensor(weights) @ self.client_losses(x))

    def gradient(self, x: Tensor, weights: FloatArray) -> Tensor:
        """The gradient of :meth:`value`."""
        value = torch.tensor(weights) @ self.client_losses(x)
        parts = torch.autograd.grad(value, list(self.problem.parameters.values()))
        return torch.cat([part.flatten() for part in parts])

    def optimum(self, weights: FloatArray) -> Tensor:
        """The model that minimises the objective with these weights."""

        def value_and_gradient(point: FloatArray) -> tuple[float, FloatArray]:
            x = torch.tensor(point)
            return self.value(x, weights), self.gradient(x, weights).numpy()

        found = minimize(
            value_and_gradient,
            self.problem.start.numpy(),
            jac=True,
            method="L-BFGS-B",
            options={"gtol": 1e-9, "ftol": 0, "maxcor": 50, "maxiter": 10_000, "maxfun": 20_000},
        )
        return torch.tensor(found.x)

    def correct(self, x: Tensor, images: Tensor, labels: Tensor) -> BoolArray:
        """Which of the images the model gets right."""
        with torch.no_grad():
            guesses = self.problem.load(x)(images).argmax(1)
        right: BoolArray = (guesses == labels).numpy()
        return right


# What came out --------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """One method: what the audit says of it, and what training shows."""

    audit: Audit
    predicted: float
    """``f(x-hat*) - f*``: what the optimum of the effective objective leaves to gain."""
    pilots: FloatArray
    """``f - f*`` at the end of the pilots, one number per step size."""
    step_size: float
    suboptimality: FloatArray
    """``f(x^r) - f*``: a row per run, a column per round looked at."""
    excess: FloatArray
    """``f_i(x) - f_i(x*)`` of the last models: a row per run, a column per client."""
    correct: BoolArray
    """A row per run, a column per test image."""

    @property
    def method(self) -> str:
        return self.audit.method.name


@final
@dataclass(frozen=True, eq=False)
class Outcome:
    """All that the demo found."""

    settings: Settings
    digits: Digits
    rounds: IntArray
    """The rounds looked at, from 0 to the last."""
    best: float
    """``f*``, the minimum of the objective meant."""
    best_correct: BoolArray
    """Which test images its optimum gets right."""
    trials: tuple[Trial, ...]

    @property
    def early(self) -> int:
        """Which of the rounds looked at is the last of the first tenth."""
        return int(np.searchsorted(self.rounds, self.settings.rounds / 10, side="right")) - 1

    @property
    def rare(self) -> BoolArray:
        """The test images of digits that mostly small clients hold."""
        return np.isin(self.digits.test_labels.numpy(), self.digits.rare_digits)

    def excess(self, trial: Trial, clients: BoolArray) -> float:
        """The mean of ``f_i(x) - f_i(x*)`` over the examples of some clients and over the runs."""
        weights = self.digits.federation.weights[clients]
        return float((trial.excess[:, clients] @ weights).mean() / weights.sum())

    def summary(self, files: Files) -> Summary:
        """The numbers to remember."""
        small, rare = self.digits.small, self.rare
        return Summary(
            rounds=self.settings.rounds,
            early_round=int(self.rounds[self.early]),
            seed=self.settings.seed,
            runs=self.settings.runs,
            clients=len(self.digits.federation),
            sampling=self.settings.sampling,
            rare_digits=tuple(self.digits.rare_digits.tolist()),
            small_weight=float(self.digits.federation.weights[small].sum()),
            best_accuracy=float(self.best_correct.mean()),
            best_accuracy_rare=float(self.best_correct[rare].mean()),
            best_accuracy_other=float(self.best_correct[~rare].mean()),
            methods=tuple(
                MethodSummary(
                    method=trial.method,
                    total_variation=trial.audit.total_variation,
                    largest_ratio=trial.audit.largest_ratio,
                    small_weight=float(trial.audit.effective_weights[small].sum()),
                    consistent=trial.audit.consistent,
                    findings=tuple(f"{f.what} {f.fix}" for f in trial.audit.findings),
                    step_size=trial.step_size,
                    predicted=trial.predicted,
                    early=Spread.of(trial.suboptimality[:, self.early]),
                    reached=Spread.of(trial.suboptimality[:, -1]),
                    accuracy=Spread.of(trial.correct.mean(1)),
                    accuracy_rare=Spread.of(trial.correct[:, rare].mean(1)),
                    accuracy_other=Spread.of(trial.correct[:, ~rare].mean(1)),
                    excess_small=self.excess(trial, small),
                    excess_large=self.excess(trial, ~small),
                )
                for trial in self.trials
            ),
            files=files,
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers behind the pictures, as plain data."""
        federation = self.digits.federation
        return {
            "settings": asdict(self.settings),
            "federation": {
                "sizes": federation.sizes.tolist(),
                "small": self.digits.small.tolist(),
                "label_counts": self.digits.label_counts.tolist(),
                "test_examples": len(self.digits.test_labels),
                "rare_digits": self.digits.rare_digits.tolist(),
            },
            "optimum": {
                "value": self.best,
                "accuracy": float(self.best_correct.mean()),
                "accuracy_rare": float(self.best_correct[self.rare].mean()),
                "accuracy_other": float(self.best_correct[~self.rare].mean()),
            },
            "rounds": self.rounds.tolist(),
            "methods": [
                {
                    "audit": trial.audit.to_dict(),
                    "predicted": trial.predicted,
                    "pilots": dict(zip(map(str, self.settings.step_sizes), trial.pilots.tolist())),
                    "step_size": trial.step_size,
                    "suboptimality": trial.suboptimality.tolist(),
                    "excess": trial.excess.tolist(),
                    "accuracy": trial.correct.mean(1).tolist(),
                    "accuracy_rare": trial.correct[:, self.rare].mean(1).tolist(),
                    "accuracy_other": trial.correct[:, ~self.rare].mean(1).tolist(),
                }
                for trial in self.trials
            ],
        }


@final
@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over runs."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: FloatArray) -> Spread:
        return cls(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


@final
@dataclass(frozen=True)
class MethodSummary:
    """One method in numbers."""

    method: str
    total_variation: float
    """The share of the objective that is in the wrong place."""
    largest_ratio: float
    small_weight: float
    """How much the small clients count together."""
    consistent: bool | None
    findings: tuple[str, ...]
    """What is wrong and what to change."""
    step_size: float
    predicted: float
    """The suboptimality at which the audit says it will settle."""
    early: Spread
    """The suboptimality after a tenth of the rounds."""
    reached: Spread
    """The suboptimality after the last round."""
    accuracy: Spread
    accuracy_rare: Spread
    """Test accuracy on the digits that mostly small clients hold."""
    accuracy_other: Spread
    """Test accuracy on the other digits."""
    excess_small: float
    """How much higher the loss of the small clients is than at the optimum."""
    excess_large: float


@final
@dataclass(frozen=True)
class Files:
    """What the demo leaves."""

    page: Path
    picture: Path
    results: Path

    @classmethod
    def under(cls, out: Path) -> Files:
        return cls(out / "report.html", out / "picture.png", out / "results.json")


@final
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
    """How much the small clients were meant to count together: their share of the examples."""
    best_accuracy: float
    """Test accuracy of the optimum of the objective meant."""
    best_accuracy_rare: float
    best_accuracy_other: float
    methods: tuple[MethodSummary, ...]
    files: Files

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = asdict(self)
        plain["files"] = {name: str(path) for name, path in plain["files"].items()}
        return plain


# The demo -------------------------------------------------------------------------------------


def demo(out: Path, *, rounds: int = ROUNDS, seed: int = 0, progress: bool = True) -> Summary:
    """Audit and train three methods; leave a report, a picture and the numbers in ``out``."""
    settings = Settings(rounds, seed)
    files = Files.under(results_folder(out))
    with one_thread(), _Bars(progress) as bars:
        outcome = experiment(settings, bars)
    summary = outcome.summary(files)
    report.write_picture(outcome, summary, files.picture)
    report.write_page(outcome, summary, files.page)
    files.results.write_text(json.dumps(outcome.to_dict(), indent=1) + "\n", encoding="utf-8")
    return summary


def experiment(settings: Settings, bars: _Bars) -> Outcome:
    """Audit, find the optima, choose the step sizes, train."""
    digits = split(settings.seed)
    federation = digits.federation
    audits = [audit(federation, method, settings.sampling, settings.work) for method in METHODS]
    bars.say(report.audit_line(audits))

    objective = Objective(federation, settings.l2)
    weights = federation.weights
    optimum = objective.optimum(weights)
    best = objective.value(optimum, weights)
    with torch.no_grad():
        best_losses = objective.client_losses(optimum).numpy()

    def suboptimality(x: Tensor) -> float:
        return objective.value(x, weights) - best

    engine = LanesEngine(objective.problem)
    last = settings.rounds
    pilot_seeds, seeds = settings.seeds()

    pilots = [
        settings.run(federation, method, step_size, seed)
        for method in METHODS
        for step_size in settings.step_sizes
        for seed in pilot_seeds
    ]
    ending = np.arange(last - last // 10, last + 1)
    curves, _ = _watch(
        engine, pilots, ending, suboptimality, bars.ticks("Choosing step sizes", last)
    )
    scores = curves.reshape(len(METHODS), len(settings.step_sizes), -1).mean(2)
    chosen = [settings.step_sizes[int(k)] for k in scores.argmin(1)]

    runs = [
        settings.run(federation, method, step_size, seed)
        for method, step_size in zip(METHODS, chosen, strict=True)
        for seed in seeds
    ]
    looked_at = np.unique(np.linspace(0, last, min(last, 100) + 1).round().astype(np.int64))
    curves, models = _watch(engine, runs, looked_at, suboptimality, bars.ticks("Training", last))

    with torch.no_grad():
        excess = np.stack([objective.client_losses(x).numpy() for x in models]) - best_losses
    correct = np.stack(
        [objective.correct(x, digits.test_images, digits.test_labels) for x in models]
    )
    by_method = [slice(k * len(seeds), (k + 1) * len(seeds)) for k in range(len(METHODS))]
    return Outcome(
        settings=settings,
        digits=digits,
        rounds=looked_at,
        best=best,
        best_correct=objective.correct(optimum, digits.test_images, digits.test_labels),
        trials=tuple(
            Trial(
                audit=audits[k],
                predicted=predicted_level(objective, audits[k], optimum),
                pilots=scores[k],
                step_size=chosen[k],
                suboptimality=curves[own],
                excess=excess[own],
                correct=correct[own],
            )
            for k, own in enumerate(by_method)
        ),
    )


def predicted_level(objective: Objective, audit: Audit, optimum: Tensor) -> float:
    """``f(x-hat*) - f*``, where x-hat* minimises the effective objective of the audit."""
    if audit.consistent:  # one and the same optimum
        return 0.0
    weights = audit.objective_weights
    effective = objective.optimum(audit.effective_weights)
    return objective.value(effective, weights) - objective.value(optimum, weights)


def _watch(
    engine: LanesEngine,
    runs: Sequence[Run],
    rounds: IntArray,
    measure: Callable[[Tensor], float],
    tick: Callable[[], None],
) -> tuple[FloatArray, list[Tensor]]:
    """All runs in lockstep: what is measured in the given rounds (a row per run), last models."""
    wanted = set(rounds.tolist())
    models = [engine.problem.start for _ in runs]
    columns = [[measure(x) for x in models]] if 0 in wanted else []
    for states in simulate(engine, runs, int(rounds[-1])):
        models = [state.x for state in states]
        if states[0].round in wanted:
            columns.append([measure(x) for x in models])
        tick()
    return np.array(columns).T, models


class _Bars:
    """Progress on the error stream, or silence."""

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not visible,
        )

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        if self._visible:
            self._bars.console.print(line, highlight=False)

    def ticks(self, description: str, total: int) -> Callable[[], None]:
        """A new bar; call what comes back once a round."""
        task = self._bars.add_task(description, total=total)
        return lambda: self._bars.advance(task)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors here are so small that threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
