"""The problem of a run: its constants, exact where the losses are recognised, else estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses, schedules
from fedshuffle._arrays import FloatArray
from fedshuffle.engines import Loss, Problem, SequentialEngine
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.engines.problem import GRADIENT_ROWS
from fedshuffle.errors import DivergedError, FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.theory.constants import ProblemConstants
from fedshuffle.theory.derivatives import Derivatives
from fedshuffle.theory.estimation import ConstantEstimate, EstimatedConstants, problem_constants
from fedshuffle.theory.exact import ExactConstants, SimilarityForm
from fedshuffle.theory.logistic import logistic_regression_constants
from fedshuffle.theory.quadratic import linear_regression_constants
from fedshuffle.theory.rates import Regime
from fedshuffle.training.rounds import Run, simulate

_MAX_PARAMETERS = 1000
"""Largest number of parameters for exact constants."""

_MAX_CLIENTS = 2000
"""Largest number of clients for exact constants."""

_MAX_ROUNDS_BETWEEN = 10
"""Largest number of training rounds from one point of estimation to the next."""

_RADIUS = 2.0
"""Radius, in starting distances, of the ball for constants that do not hold everywhere."""


@dataclass(frozen=True, eq=False)
class AdvisedRun:
    """The run to advise on: the model at its start and the settings of training."""

    model: nn.Module
    loss: Loss
    federation: Federation
    method: Method
    sampling: Sampling
    work: LocalWork
    rounds: int
    step_size: Schedule
    server_step_size: Schedule = 1.0
    seed: int = 0

    @property
    def first_step_sizes(self) -> tuple[float, float]:
        """The step size and the server step size of the first round."""
        local = schedules.value(self.step_size, 0, "step size")
        return local, schedules.value(self.server_step_size, 0, "server step size")

    def training(
        self, problem: Problem, step_size: Schedule, server_step_size: Schedule
    ) -> tuple[SequentialEngine, Run]:
        """An engine and the settings of training with these step sizes."""
        parts = self.federation, self.method, self.sampling, self.work
        run = Run(*parts, step_size, server_step_size, self.seed)
        return SequentialEngine(Problem(problem.replica(), self.loss, run.federation)), run


@dataclass(frozen=True)
class StartingPoint:
    """The start of training, in the quantities of the bounds."""

    distance: float
    """``|x^0 - x*|^2``; infinite where the optimum is not known."""
    gap: float
    """``f(x^0) - f*``; an unknown f* is taken to be 0."""
    gradient: float
    """``|grad f(x^0)|^2``."""

    def of(self, regime: Regime) -> tuple[float, float]:
        """What a bound starts from, and the bounded quantity at the start."""
        if regime == "non-convex":
            return self.gap, self.gradient
        return self.distance, self.gap


@dataclass(frozen=True)
class ProblemSummary:
    """The constants of the losses, and how they were found."""

    how: str
    """exact or estimated."""
    what: str
    regimes: tuple[Regime, ...]
    constants: dict[str, ConstantEstimate]
    start: StartingPoint
    notes: tuple[str, ...]


class RegressionKind(NamedTuple):
    """A model and a loss with exact constants."""

    name: str
    classes: int | None
    """None for linear regression."""
    bias: bool


class ExactProblem:
    """A problem with exact constants, for any objective f-hat."""

    def __init__(self, kind: RegressionKind, problem: Problem, work: LocalWork) -> None:
        self.kind, self.federation, self.l2 = kind, problem.federation, work.weight_decay
        self.batch_size = work.on(self.federation.sizes).batch_size
        losses, x = Derivatives(problem, self.l2), problem.start
        self.x = x.double().cpu().numpy()
        self.values = np.array([losses.value(x, i) for i in range(len(self.federation))])
        slope = sum(w * losses.gradient(x, i) for i, w in enumerate(self.federation.weights))
        self.gradient = float(torch.as_tensor(slope).double().square().sum())
        self.regimes: tuple[Regime, ...] = ("strongly-convex", "convex", "non-convex")
        if self.l2 == 0:
            self.regimes = self.regimes[1:]
        self._cache: dict[tuple[bytes, str, float | None], ExactConstants] = {}

    def constants(
        self,
        w_hat: FloatArray | None = None,
        form: SimilarityForm = "convex",
        radius: float | None = None,
    ) -> ExactConstants:
        """The constants of the objective with these weights."""
        weights = self.federation.weights if w_hat is None else w_hat
        key = (weights.round(12).tobytes(), form, radius)
        if key not in self._cache:
            constants = linear_regression_constants
            if self.kind.classes is not None:
                constants = partial(logistic_regression_constants, classes=self.kind.classes)
            self._cache[key] = constants(
                self.federation,
                l2=self.l2,
                bias=self.kind.bias,
                w_hat=weights,
                batch_size=self.batch_size,
                form=form,
                radius=radius,
            )
        return self._cache[key]

    def problem(self, regime: Regime, w_hat: FloatArray | None = None) -> ProblemConstants:
        """The inputs of the general theorem in a regime."""
        return self.constants(w_hat, "gradient" if regime == "non-convex" else "convex").problem

    def mvr(self) -> tuple[ProblemConstants, float, tuple[str, ...]]:
        """The inputs of the theorem on FedShuffleMVR (B = 1, P = 0), delta, and notes."""
        if self.kind.classes is not None:
            found = self.constants(form="gradient")
            return found.problem, found.delta, ()
        radius = _RADIUS * math.sqrt(self.start().distance)
        found = self.constants(form="gradient", radius=radius)
        return found.problem, found.delta, (f"G and sigma hold within {radius:.3g} of the optimum",)

    def start(self, w_hat: FloatArray | None = None) -> StartingPoint:
        """The start of training, for the objective with these weights."""
        found = self.constants(w_hat)
        away = self.x - found.x_star
        gap = float(found.w_hat @ self.values) - found.f_star
        return StartingPoint(float(away @ away), max(0.0, gap), self.gradient)

    def summary(self) -> ProblemSummary:
        """The constants of the intended objective, each with the reason why it holds."""
        exact = self.constants()
        values = {
            **{name: getattr(exact, name) for name in ("L", "mu", "G", "B", "delta")},
            "sigma": math.sqrt(float(exact.w_hat @ exact.sigma**2)),
            "P": float(exact.P.max()),
        }
        constants = {
            name: ConstantEstimate(value, note=str(exact.validity[name]))
            for name, value in values.items()
        }
        notes = ("for the objective that was meant, in the form for convex losses",)
        return ProblemSummary("exact", self.kind.name, self.regimes, constants, self.start(), notes)


@dataclass(frozen=True, eq=False)
class EstimatedProblem:
    """A problem with constants estimated at some models."""

    estimate: EstimatedConstants
    first: StartingPoint
    reason: str
    """Why the constants are not exact."""
    notes: tuple[str, ...]
    regimes: tuple[Regime, ...] = ("non-convex",)

    def problem(self, regime: Regime, w_hat: FloatArray | None = None) -> ProblemConstants:
        """The inputs of the general theorem; G is that of the intended objective."""
        return self.estimate.problem

    def mvr(self) -> tuple[ProblemConstants, float, tuple[str, ...]]:
        """The inputs of the theorem on FedShuffleMVR, delta, and notes."""
        return self.estimate.problem, self.estimate.delta.value, ()

    def start(self, w_hat: FloatArray | None = None) -> StartingPoint:
        """The start of training."""
        return self.first

    def summary(self) -> ProblemSummary:
        """The constants with their uncertainties."""
        seen = self.estimate
        chosen = "chosen; G and sigma are the smallest for it"
        constants = {
            **{name: getattr(seen, name) for name in ("L", "mu", "G", "delta")},
            "sigma": seen.sigma_rms,
            "B": ConstantEstimate(1.0, note=chosen),
            "P": ConstantEstimate(0.0, note=chosen),
        }
        sample = f"{len(seen.clients)} of {len(seen.w_hat)} clients, {len(seen.variance)} point(s)"
        notes = (sample, *self.notes, "f* is taken to be 0 or more")
        what = f"measured, since {self.reason}"
        return ProblemSummary("estimated", what, self.regimes, constants, self.first, notes)


def recognise(model: nn.Module, loss: Loss, federation: Federation) -> RegressionKind | str:
    """Linear or logistic regression, if it is one; otherwise why not."""
    layers = list(model.modules())
    plain = (nn.Sequential, nn.Linear, nn.Flatten, nn.Identity)
    trained = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(trained) != 1 or not all(isinstance(layer, plain) for layer in layers):
        return "the model is not a single linear layer"
    linear = trained[0]
    if not all(parameter.requires_grad for parameter in linear.parameters()):
        return "some parameters are not trained"
    if sum(parameter.numel() for parameter in linear.parameters()) > _MAX_PARAMETERS:
        return f"the model has more than {_MAX_PARAMETERS} parameters"
    if len(federation) > _MAX_CLIENTS:
        return f"there are more than {_MAX_CLIENTS} clients"
    bias = linear.bias is not None
    if loss is losses.squared_error and linear.out_features == 1:
        return RegressionKind("linear regression", None, bias)
    targets = federation.fields[-1]
    whole = "int" in str(targets.dtype) and targets.ndim == 1
    if loss is losses.cross_entropy and linear.out_features > 1 and whole:
        return RegressionKind("softmax regression", linear.out_features, bias)
    return "the loss is neither cross_entropy of classes nor squared_error of one number"


def find_problem(
    run: AdvisedRun, *, clients: int, points: int, progress: bool
) -> ExactProblem | EstimatedProblem:
    """The constants of a run's problem: exact where the losses are recognised, else estimated."""
    problem = Problem(run.model, run.loss, run.federation)
    with threads_for(problem, GRADIENT_ROWS):
        kind = recognise(run.model, run.loss, run.federation)
        if isinstance(kind, RegressionKind):
            exact = ExactProblem(kind, problem, run.work)
            try:
                exact.constants()
            except FedShuffleError as error:
                kind = str(error).rstrip(".")
            else:
                return exact
        models, notes = _models_on_the_way(run, problem, points)
        seen = problem_constants(
            run.model,
            run.federation,
            run.loss,
            points=models,
            clients=clients,
            batch_size=run.work.on(run.federation.sizes).batch_size,
            weight_decay=run.work.weight_decay,
            seed=run.seed,
            progress=progress,
        )
        at_start = Derivatives(problem, run.work.weight_decay)
        values = [at_start.value(problem.start, i) for i in seen.clients.tolist()]
        gap = float(np.average(values, weights=seen.w_hat[seen.clients]))
        first = StartingPoint(math.inf, gap, float(seen.gradient[0]))
        return EstimatedProblem(seen, first, kind, notes)


def _models_on_the_way(
    run: AdvisedRun, problem: Problem, points: int
) -> tuple[list[Tensor], tuple[str, ...]]:
    """The start, and models on the way of the run's own training."""
    models = [problem.start.clone()]
    if points == 1:
        return models, ("measured at the start only: elsewhere the constants may be larger",)
    between = max(1, min(_MAX_ROUNDS_BETWEEN, run.rounds // (points - 1)))
    engine, training = run.training(problem, run.step_size, run.server_step_size)
    try:
        for k, (state,) in enumerate(simulate(engine, [training], between * (points - 1)), 1):
            if not torch.isfinite(state.x).all():
                return models, (f"training with the run's step size diverged in round {k}",)
            if k % between == 0:
                models.append(state.x.clone())
    except DivergedError as error:
        return models, (f"training with the run's step size diverged: {error}",)
    trained = " and ".join(str(between * k) for k in range(1, points))
    return models, (f"measured at the start and after {trained} rounds of the run's training",)
