"""The problem of a run: its constants, exact where the losses are recognised, else estimated."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses, schedules
from fedshuffle._arrays import FloatArray
from fedshuffle.engines import Loss, Problem
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.engines.problem import GRADIENT_ROWS
from fedshuffle.errors import DivergedError, FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.privacy import Privacy
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.theory.constants import ConstantEstimate, ExactConstants, ProblemConstants
from fedshuffle.theory.estimation import Derivatives, problem_constants
from fedshuffle.theory.rates import Regime
from fedshuffle.theory.regression import linear_regression_constants, logistic_regression_constants
from fedshuffle.training import Simulation

_MAX_PARAMETERS, _MAX_CLIENTS = 1000, 2000
"""Largest numbers of parameters and of clients for exact constants."""


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
    privacy: Privacy | None = None

    @property
    def first_step_sizes(self) -> tuple[float, float]:
        """The step size and the server step size of the first round."""
        local = schedules.value(self.step_size, 0, "step size")
        return local, schedules.value(self.server_step_size, 0, "server step size")

    def simulation(self, step_size: Schedule, server_step_size: Schedule) -> Simulation:
        """Training with these step sizes, and without privacy."""
        return Simulation(
            self.model,
            self.federation,
            loss=self.loss,
            method=self.method,
            sampling=self.sampling,
            work=self.work,
            step_size=step_size,
            server_step_size=server_step_size,
            seed=self.seed,
        )


@dataclass(frozen=True)
class StartingPoint:
    """The start of training, in the quantities of the bounds."""

    distance: float
    """``|x^0 - x*|^2``; infinite where the optimum is not known."""
    gap: float
    """``f(x^0) - f*``; an unknown f* is taken to be 0."""
    gradient: float
    """``|grad f(x^0)|^2``."""


@dataclass(frozen=True, eq=False)
class AdvisedProblem:
    """The constants of the losses of a run, and how they were found."""

    how: str
    """exact or estimated."""
    what: str
    regimes: tuple[Regime, ...]
    constants: dict[str, ConstantEstimate]
    """Of the intended objective."""
    start: StartingPoint
    notes: tuple[str, ...]
    of: Callable[..., tuple[ProblemConstants, float, StartingPoint]]
    """Constants, delta and start of any objective, by ``regime``, ``w_hat`` and ``radius``."""


def recognise(
    model: nn.Module, loss: Loss, federation: Federation
) -> tuple[str, Callable[..., ExactConstants]] | str:
    """Linear or logistic regression with the function for its constants; otherwise why not."""
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
    if federation.transform is not None:
        return "a transform changes the examples"
    bias = linear.bias is not None
    if loss is losses.squared_error and linear.out_features == 1:
        return "linear regression", partial(linear_regression_constants, bias=bias)
    targets = federation.fields[-1]
    whole = "int" in str(targets.dtype) and targets.ndim == 1
    if loss is losses.cross_entropy and linear.out_features > 1 and whole:
        constants = partial(logistic_regression_constants, classes=linear.out_features, bias=bias)
        return "softmax regression", constants
    return "the loss is neither cross_entropy of classes nor squared_error of one number"


def find_problem(run: AdvisedRun, *, clients: int, points: int, progress: bool) -> AdvisedProblem:
    """The constants of a run's problem: exact where the losses are recognised, else estimated."""
    problem = Problem(run.model, run.loss, run.federation)
    with threads_for(problem, GRADIENT_ROWS):
        kind = recognise(run.model, run.loss, run.federation)
        if not isinstance(kind, str):
            try:
                return _exact(run, problem, *kind)
            except FedShuffleError as error:
                kind = str(error).rstrip(".")
        return _estimated(run, problem, kind, clients, points, progress)


def _exact(
    run: AdvisedRun, problem: Problem, what: str, constants: Callable[..., ExactConstants]
) -> AdvisedProblem:
    federation, l2, x = run.federation, run.work.weight_decay, problem.start
    options = {"l2": l2, "batch_size": run.work.on(federation.sizes).batch_size}
    cache: dict[tuple[bytes, str, float | None], ExactConstants] = {}

    def find(
        regime: Regime, w_hat: FloatArray = federation.weights, radius: float | None = None
    ) -> ExactConstants:
        form = "gradient" if regime == "non-convex" else "convex"
        key = w_hat.round(12).tobytes(), form, radius
        if key not in cache:
            parts = {"w_hat": w_hat, "form": form, "radius": radius}
            cache[key] = constants(federation, **options, **parts)
        return cache[key]

    exact, losses = find("convex"), Derivatives(problem, l2)
    values = np.array([losses.value(x, i) for i in range(len(federation))])
    slope = sum(w * losses.gradient(x, i) for i, w in enumerate(federation.weights))
    gradient = float(torch.as_tensor(slope).double().square().sum())

    def of(regime: Regime, *args: Any) -> tuple[ProblemConstants, float, StartingPoint]:
        found = find(regime, *args)
        away = x.double().cpu().numpy() - found.x_star
        gap = max(0.0, float(found.w_hat @ values) - found.f_star)
        return found.problem, found.delta, StartingPoint(float(away @ away), gap, gradient)

    shown = {name: getattr(exact, name) for name in ("L", "mu", "G", "B", "delta")}
    shown["sigma"] = math.sqrt(float(exact.w_hat @ exact.sigma**2))
    shown["P"] = float(exact.P.max())
    return AdvisedProblem(
        "exact",
        what,
        get_args(Regime)[l2 == 0 :],  # strongly convex with weight decay only
        {name: ConstantEstimate(v, note=str(exact.validity[name])) for name, v in shown.items()},
        of("convex")[2],
        ("for the objective that was meant, in the form for convex losses",),
        of,
    )


def _estimated(
    run: AdvisedRun, problem: Problem, reason: str, clients: int, points: int, progress: bool
) -> AdvisedProblem:
    models, note = _models_on_the_way(run, problem, points)
    decay = run.work.weight_decay
    seen = problem_constants(
        run.model,
        run.federation,
        run.loss,
        points=models,
        clients=clients,
        batch_size=run.work.on(run.federation.sizes).batch_size,
        weight_decay=decay,
        seed=run.seed,
        progress=progress,
    )
    losses, own = Derivatives(problem, decay), seen.clients
    values = [losses.value(problem.start, i) for i in own.tolist()]
    gap = float(np.average(values, weights=seen.w_hat[own]))
    start = StartingPoint(math.inf, gap, float(seen.gradient[0]))
    chosen = "chosen; G and sigma are the smallest for it"
    sample = f"{len(own)} of {len(seen.w_hat)} clients, {len(models)} point(s)"
    known = seen.problem, seen.delta.value, start  # G of the intended objective, also for others
    return AdvisedProblem(
        "estimated",
        f"measured, since {reason}",
        ("non-convex",),
        {
            **{name: getattr(seen, name) for name in ("L", "mu", "G", "delta")},
            "sigma": seen.sigma_rms,
            "B": ConstantEstimate(1.0, note=chosen),
            "P": ConstantEstimate(0.0, note=chosen),
        },
        start,
        (sample, note, "f* is taken to be 0 or more"),
        lambda *args: known,
    )


def _models_on_the_way(run: AdvisedRun, problem: Problem, points: int) -> tuple[list[Tensor], str]:
    """The start and models on the way of the run's own training, and what they are."""
    models = [problem.start.clone()]
    if points == 1:
        return models, "measured at the start only: elsewhere the constants may be larger"
    between = max(1, min(10, run.rounds // (points - 1)))
    simulation = run.simulation(run.step_size, run.server_step_size)
    state = simulation.init()
    try:
        for k in range(1, between * (points - 1) + 1):
            state, _ = simulation.step(state)
            if not torch.isfinite(state.x).all():
                return models, f"training with the run's step size diverged in round {k}"
            if k % between == 0:
                models.append(state.x.clone())
    except DivergedError as error:
        return models, f"training with the run's step size diverged: {error}"
    trained = " and ".join(str(between * k) for k in range(1, points))
    return models, f"measured at the start and after {trained} rounds of the run's training"
