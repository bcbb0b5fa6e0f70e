"""The constants of the problem that a config describes: known if they can be, measured if not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.config.settings import Config, Scheduled
from fedshuffle.engines import LeanEngine, Loss, Problem
from fedshuffle.engines.base import gradients, named
from fedshuffle.engines.machine import threads_for
from fedshuffle.engines.problem import PROBE_ROWS
from fedshuffle.errors import DivergedError, FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.rounds import Run, simulate
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.theory.estimated import EstimatedConstants, problem_constants
from fedshuffle.theory.logistic import logistic_regression_constants
from fedshuffle.theory.problems import ExactConstants, SimilarityForm
from fedshuffle.theory.quadratics import linear_regression_constants
from fedshuffle.theory.rates import Regime
from fedshuffle.theory.step_sizes import ProblemConstants

_PARAMETERS = 1000
"""So many parameters a model may have whose Hessians are made whole."""

_CLIENTS = 2000
"""So many clients are read one by one for exact constants."""

_BETWEEN = 10
"""So many rounds are trained, at most, from one point of measurement to the next."""

_AWAY = 2.0
"""Where constants hold on a ball only, its radius is so many times the first distance."""


@final
@dataclass(frozen=True)
class Start:
    """Where training starts, as the bounds count it."""

    distance: float
    """``|x^0 - x*|^2``; infinite where the optimum is not known."""
    gap: float
    """``f(x^0) - f*``; of an f* that is not known, 0 is taken."""
    gradient: float
    """``|grad f(x^0)|^2``."""

    def of(self, regime: Regime) -> float:
        """What a bound starts from."""
        return self.gap if regime == "non-convex" else self.distance

    def measured(self, regime: Regime) -> float:
        """What a bound is about, at the start."""
        return self.gradient if regime == "non-convex" else self.gap


@final
@dataclass(frozen=True)
class Kind:
    """A model and a loss whose constants can be known."""

    name: str
    classes: int | None
    """None for linear regression."""
    bias: bool


@final
@dataclass(eq=False)
class Known:
    """A problem whose constants are known; asked for every objective f-hat anew."""

    kind: Kind
    federation: Federation
    l2: float
    batch_size: int
    x: FloatArray
    """The start."""
    values: FloatArray
    """What each client's loss is there, with the regularisation."""
    gradient: float
    """``|grad f|^2`` there."""
    _found: dict[tuple[bytes, str, float | None], ExactConstants] = field(default_factory=dict)

    how = "exact"

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """The regimes that the losses belong to; what is convex is also covered by the last."""
        convex: tuple[Regime, ...] = ("convex", "non-convex")
        return ("strongly-convex", *convex) if self.l2 > 0 else convex

    def constants(
        self,
        w_hat: FloatArray | None = None,
        form: SimilarityForm = "convex",
        radius: float | None = None,
    ) -> ExactConstants:
        """For the objective with these weights."""
        weights = self.federation.weights if w_hat is None else w_hat
        key = (weights.round(12).tobytes(), form, radius)
        if key not in self._found:
            common = {
                "l2": self.l2,
                "bias": self.kind.bias,
                "w_hat": weights,
                "batch_size": self.batch_size,
                "form": form,
                "radius": radius,
            }
            if self.kind.classes is None:
                found = linear_regression_constants(self.federation, **common)  # type: ignore[arg-type]
            else:
                found = logistic_regression_constants(
                    self.federation,
                    classes=self.kind.classes,
                    **common,  # type: ignore[arg-type]
                )
            self._found[key] = found
        return self._found[key]

    def problem(self, regime: Regime, w_hat: FloatArray | None = None) -> ProblemConstants:
        """What the general theorem needs in a regime."""
        return self.constants(w_hat, "gradient" if regime == "non-convex" else "convex").problem

    def mvr(self) -> tuple[ProblemConstants, float, str]:
        """What the theorem on FedShuffleMVR needs (B = 1, P = 0), delta, and where it holds."""
        if self.kind.classes is not None:
            found = self.constants(form="gradient")
            return found.problem, found.delta, ""
        radius = _AWAY * math.sqrt(self.start().distance)
        found = self.constants(form="gradient", radius=radius)
        return found.problem, found.delta, f"G and sigma hold within {radius:.3g} of the optimum"

    def start(self, w_hat: FloatArray | None = None) -> Start:
        """Where training starts, for the objective with these weights."""
        found = self.constants(w_hat)
        away = self.x - found.x_star
        gap = float(found.w_hat @ self.values) - found.f_star
        return Start(float(away @ away), max(0.0, gap), self.gradient)


@final
@dataclass(frozen=True, eq=False)
class Measured:
    """A problem whose constants were measured at some models."""

    estimate: EstimatedConstants
    first: Start
    why: str
    """Why they are not known."""
    notes: tuple[str, ...]

    how = "estimated"
    regimes: tuple[Regime, ...] = ("non-convex",)

    def problem(self, regime: Regime, w_hat: FloatArray | None = None) -> ProblemConstants:
        """What the general theorem needs; G is that of the objective that was meant."""
        return self.estimate.problem

    def mvr(self) -> tuple[ProblemConstants, float, str]:
        """What the theorem on FedShuffleMVR needs, delta, and where it holds."""
        return self.estimate.problem, self.estimate.delta.value, ""

    def start(self, w_hat: FloatArray | None = None) -> Start:
        """Where training starts."""
        return self.first


def recognised(model: nn.Module, loss: Loss, federation: Federation) -> Kind | str:
    """Linear or logistic regression, if it is one; or else why not."""
    layers = list(model.modules())
    shapes = (nn.Flatten, nn.Identity)
    plain = all(isinstance(layer, (nn.Sequential, nn.Linear, *shapes)) for layer in layers)
    trained = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(trained) != 1 or not plain:
        return "the model is no single linear layer"
    linear = trained[0]
    if not all(parameter.requires_grad for parameter in linear.parameters()):
        return "some parameters are not trained"
    if sum(parameter.numel() for parameter in linear.parameters()) > _PARAMETERS:
        return f"the model has more than {_PARAMETERS} parameters"
    if len(federation) > _CLIENTS:
        return f"there are more than {_CLIENTS} clients"
    bias = linear.bias is not None
    if loss is losses.squared_error and linear.out_features == 1:
        return Kind("linear regression", None, bias)
    targets = federation.fields[-1]
    whole = "int" in str(targets.dtype) and targets.ndim == 1
    if loss is losses.cross_entropy and linear.out_features > 1 and whole:
        return Kind("softmax regression", linear.out_features, bias)
    return "the loss is neither cross_entropy of classes nor squared_error of one number"


def know(
    config: Config,
    federation: Federation,
    model: nn.Module,
    loss: Loss,
    method: Method,
    sampling: Sampling,
    *,
    clients: int,
    points: int,
    progress: bool,
) -> Known | Measured:
    """The constants of the problem; known where the losses are recognised, else measured."""
    work, decay = config.work, config.work.weight_decay
    problem = Problem(model, loss, federation)
    with threads_for(problem, PROBE_ROWS):
        found = recognised(model, loss, federation)
        if isinstance(found, Kind):
            values, slope = _look(problem, np.arange(len(federation)), federation.weights, decay)
            known = Known(
                found,
                federation,
                decay,
                work.batch_size,
                problem.start.double().cpu().numpy(),
                values,
                float(slope.double().square().sum()),
            )
            try:
                known.constants()
            except FedShuffleError as error:
                found = str(error).rstrip(".")
            else:
                return known
        models, notes = _along(config, federation, problem, method, sampling, points)
        seen = problem_constants(
            model,
            federation,
            loss,
            points=models,
            clients=clients,
            batch_size=work.batch_size,
            weight_decay=decay,
            seed=config.seed,
            progress=progress,
        )
        share = seen.w_hat[seen.clients]
        share = share / float(share.sum())
        values, _ = _look(problem, seen.clients, share, decay)
        first = Start(math.inf, float(share @ values), float(seen.gradient[0]))
        return Measured(seen, first, found, notes)


def _look(
    problem: Problem, clients: IntArray, weights: FloatArray, decay: float
) -> tuple[FloatArray, Tensor]:
    """The loss of each of some clients at the start, and the gradient of all with weights."""
    x, parameters = problem.start, list(problem.parameters.values())
    values, slope = np.zeros(len(clients)), decay * x
    for k, (i, weight) in enumerate(zip(clients.tolist(), weights.tolist(), strict=True)):
        for rows, share in problem.pieces(i):
            with named(problem, i, 0, "first look at the loss"):
                loss = problem.loss_at(x, problem.batch(rows))
            values[k] += share * float(loss.detach())
            flat = [piece.reshape(-1) for piece in gradients(loss, parameters)]
            slope = slope + weight * share * torch.cat(flat).detach()
    if not np.isfinite(values).all():
        raise FedShuffleError("the loss is not finite at the start. Choose another model.")
    return values + 0.5 * decay * float(x.double().square().sum()), slope


def _along(
    config: Config,
    federation: Federation,
    problem: Problem,
    method: Method,
    sampling: Sampling,
    points: int,
) -> tuple[list[Tensor], tuple[str, ...]]:
    """The start, and models on the way that the config's own training takes."""
    models = [problem.start.clone()]
    if points == 1:
        return models, ("measured at the start only: elsewhere the constants may be larger",)
    between = max(1, min(_BETWEEN, config.rounds // (points - 1)))
    run = Run(
        federation,
        method,
        sampling,
        config.work,
        _schedule(config, config.step_size),
        _schedule(config, config.server_step_size),
        config.seed,
    )
    engine = LeanEngine(Problem(problem.replica(), problem.loss, run.federation))
    try:
        for k, (state,) in enumerate(simulate(engine, [run], between * (points - 1)), 1):
            if not torch.isfinite(state.x).all():
                return models, (f"training with the config's step size diverged in round {k}",)
            if k % between == 0:
                models.append(state.x.clone())
    except DivergedError as error:
        return models, (f"training with the config's step size diverged: {error}",)
    trained = " and ".join(str(between * k) for k in range(1, points))
    return models, (f"measured at the start and after {trained} rounds of the config's training",)


def _schedule(config: Config, size: float | Scheduled) -> Schedule:
    return size.over(config.rounds) if isinstance(size, Scheduled) else size
