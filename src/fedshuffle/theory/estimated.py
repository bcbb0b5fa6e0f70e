r"""Constants of any model, loss and federation, measured at points. Needs torch.

A measurement shows the constants where it is made, and no further: L, mu and delta are those of the
Hessians at the points, G and sigma are the least that satisfy the assumptions at the points. Over
the whole space a neural network's constants are larger, and often infinite; along a training they
are what matters. With piecewise linear activations the Hessian is that of the pieces.

*Hessians* are known by products with vectors (the gradient of :math:`v^T \nabla f`), and their
extreme eigenvalues by the Lanczos method, which comes with a residual. What is largest among
clients or minibatches is the largest of those seen, so never more than the truth (but for
residuals).

*The objective* is that of the sampled clients, :math:`\sum_i v_i f_i` with :math:`v_i \propto
\hat w_i`. A mean :math:`\sum_i v_i q_i` over m of n clients, drawn uniformly without replacement,
has about the squared standard error :math:`(1 - \frac mn) \frac{m}{m - 1} \sum_i v_i^2
(q_i - \bar q)^2`. An eigenvalue is such a mean, of :math:`q_i = u^T \nabla^2 f_i\, u` (to first
order, and u is not free of the sampling itself), and so is the variance of gradients over clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fedshuffle._arrays import FloatArray, IntArray, count, number
from fedshuffle.engines.base import first_look
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.theory.measuring import (
    Cost,
    Curvatures,
    Estimate,
    Gradients,
    Oracle,
    Survey,
    differentiable_twice,
)
from fedshuffle.theory.problems import effective
from fedshuffle.theory.step_sizes import ProblemConstants

_CLIENTS = 50
"""So many clients are looked at if the caller does not say."""


@final
@dataclass(frozen=True, eq=False)
class EstimatedConstants:
    """The constants of a problem at the points where they were measured."""

    L: Estimate
    """The largest of the three that follow."""
    L_steps: Estimate
    """Of the losses of single steps, ``f_ij``."""
    L_clients: Estimate
    """Of the ``f_i``."""
    L_objective: Estimate
    """Of ``f-hat``."""
    mu: Estimate
    """The smallest eigenvalue of any ``f_ij`` seen; below zero: not convex there."""
    mu_objective: Estimate
    """The smallest eigenvalue of ``f-hat``."""
    delta: Estimate
    """``max_i |H_i - H|``."""
    G: Estimate
    """The least for B = 1; :meth:`problem_with` gives it for another B."""
    sigma: FloatArray
    """The least for P = 0, of every client; those not seen have the root mean square of the rest,
    which leaves ``sum_i w-hat_i sigma_i^2`` unbiased."""
    sigma_rms: Estimate
    """``sqrt(sum_i w-hat_i sigma_i^2)``."""
    clients: IntArray
    """Who was looked at."""
    points: int
    """At how many models."""
    w_hat: FloatArray
    """The effective weights of all clients."""
    gradient: FloatArray
    """``|grad f-hat|^2`` at each point, without what sampling adds to it."""
    variance: FloatArray
    """``sum_i w-hat_i |grad f_i - grad f-hat|^2`` at each point."""
    client_gradients: FloatArray
    """``|grad f_i|^2`` at each point for each client seen."""
    client_variances: FloatArray
    """``mean_j |grad f_ij - grad f_i|^2`` at each point for each client seen."""
    cost: int
    """Gradients of single examples that it took; a product with a Hessian counts as two."""

    @property
    def problem(self) -> ProblemConstants:
        """What the step-size advice needs, with B = 1 and P = 0."""
        return self.problem_with()

    def problem_with(self, *, B: float = 1.0, P: float = 0.0) -> ProblemConstants:  # noqa: N803
        """The same for another B and P: with the least G and sigma_i that hold at all points seen.

        mu is what is left of the estimate when the residual is taken off, if anything is.
        """
        if not 1.0 <= number(B, "B") < math.inf:
            raise FedShuffleError(f"B is {B}, but must be at least 1 and finite.")
        if not 0.0 <= number(P, "P") < math.inf:
            raise FedShuffleError(f"P is {P}, but must be at least 0 and finite.")
        g2 = float((self.variance - (B**2 - 1.0) * self.gradient).max())
        left = (self.client_variances - P**2 * self.client_gradients).max(axis=0)
        return ProblemConstants(
            L=self.L.value,
            G=math.sqrt(max(0.0, g2)),
            B=B,
            P=P,
            sigma=_filled(np.maximum(left, 0.0), self.clients, self.w_hat),
            mu=min(max(0.0, self.mu.value - self.mu.residual), self.L.value),
        )

    def __str__(self) -> str:
        seen = f"{len(self.clients)} of {len(self.w_hat)} clients, {self.points} point(s)"
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name:12} {value}" for name, value in named if isinstance(value, Estimate)]
        return "\n".join([seen, *shown])


def problem_constants(
    model: nn.Module,
    federation: Federation,
    loss: Loss,
    *,
    points: Sequence[Any] | Tensor | FloatArray | None = None,
    clients: int | Sequence[int] | None = None,
    w_hat: ArrayLike | None = None,
    batch_size: int = 1,
    weight_decay: float = 0.0,
    minibatches: int = 8,
    delta_clients: int = 8,
    iterations: int = 20,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: bool = False,
) -> EstimatedConstants:
    """Estimate the constants of a model and a loss on a federation, at given models.

    The examples are read client by client in pieces, so that they may exceed memory. The same seed
    gives the same numbers. The model is left as it is.

    Args:
        model: any torch module that draws no random numbers (call ``eval()`` where there is
            dropout).
        federation: in memory or on disk.
        loss: ``loss(model, *fields)``, as for training.
        points: models to measure at, each a flat vector of the trainable parameters or a module of
            the same kind; the model itself if not given.
        clients: at most so many, drawn uniformly by the seed (50 if not given); or who, and then
            errors and notes are as if they had been drawn.
        w_hat: the effective weights; the federation's own if not given.
        batch_size: examples per step: what an ``f_ij`` is.
        weight_decay: that of the local work.
        minibatches: at most so many for each client, for the variance and for L of single steps.
        delta_clients: at most so many for delta, since each costs as much as all for L.
        iterations: products with each Hessian at most; as many vectors are kept.
        tolerance: where to stop before, as a share of the norm.
        seed: of all that is drawn.
        progress: show a bar on the error stream.

    >>> from fedshuffle import losses
    >>> data = Federation.from_arrays(torch.eye(2), torch.ones(2, 1), sizes=[1, 1])
    >>> linear = nn.Linear(2, 1, bias=False)
    >>> found = problem_constants(linear, data, losses.squared_error)
    >>> round(found.L.value, 5), round(found.L_objective.value, 5), round(found.delta.value, 5)
    (1.0, 0.5, 0.5)
    """
    problem = Problem(model, loss, federation)
    if first_look(problem):
        raise FedShuffleError(
            "the model or the loss draws random numbers, so its constants are not defined. Call"
            " model.eval(), or leave out dropout."
        )
    seed = check_seed(seed)
    chosen = _chosen(clients, len(federation), seed)
    decay = number(weight_decay, "weight_decay")
    if not 0.0 <= decay < math.inf:
        raise FedShuffleError(f"weight_decay is {weight_decay}, but must be 0 or more.")
    if not 0.0 < number(tolerance, "tolerance") < 1.0:
        raise FedShuffleError(f"tolerance is {tolerance}, but must be between 0 and 1.")
    models = _models(points, problem)
    weights = effective(federation.weights, w_hat)
    sizes = federation.sizes[chosen]
    steps = [
        _minibatches(int(m), count(batch_size, "batch_size"), minibatches, seed, int(i))
        for i, m in zip(chosen, sizes, strict=True)
    ]
    with Cost(progress) as cost, differentiable_twice(problem.device):
        survey = Survey(
            oracle=Oracle(problem, decay, cost),
            chosen=chosen,
            share=weights[chosen] / float(weights[chosen].sum()),
            steps=steps,
            seed=seed,
            iterations=count(iterations, "iterations"),
            tolerance=tolerance,
            delta_clients=min(count(delta_clients, "delta_clients"), len(chosen)),
        )
        cost.plan(len(models) * survey.most)
        slopes = [survey.gradients(x) for x in models]
        bends = [survey.curvatures(x, k) for k, x in enumerate(models)]
    return _together(slopes, bends, survey, weights, cost.spent)


def _together(
    slopes: list[Gradients],
    bends: list[Curvatures],
    survey: Survey,
    w_hat: FloatArray,
    cost: int,
) -> EstimatedConstants:
    """The largest (for mu the smallest) over all points."""
    share = survey.share
    factor = _unbiased(share, w_hat)
    variance = np.array([factor * float(share @ at.apart) for at in slopes])
    steepest = np.array([float(share @ at.own) for at in slopes])
    k = int(variance.argmax())
    g = math.sqrt(float(variance[k]))

    variances = np.stack([at.variances for at in slopes])
    largest, where = variances.max(axis=0), variances.argmax(axis=0)
    errors = np.stack([at.errors for at in slopes])[where, np.arange(len(where))]
    rms = math.sqrt(float(share @ largest))
    rms_error = math.hypot(survey.error(largest), float(np.linalg.norm(share * errors)))

    steps, clients = _most([at.L_steps for at in bends]), _most([at.L_clients for at in bends])
    objective = _most([at.L_objective for at in bends])
    return EstimatedConstants(
        L=_most([steps, clients, objective]),
        L_steps=steps,
        L_clients=clients,
        L_objective=objective,
        mu=min((at.mu for at in bends), key=_value),
        mu_objective=min((at.mu_objective for at in bends), key=_value),
        delta=_most([at.delta for at in bends]),
        G=Estimate(g, 0.0, _root_error(g, factor * survey.error(slopes[k].apart))),
        sigma=_filled(largest, survey.chosen, w_hat),
        sigma_rms=Estimate(rms, 0.0, _root_error(rms, rms_error)),
        clients=survey.chosen,
        points=len(slopes),
        w_hat=w_hat,
        gradient=np.maximum(steepest - variance, 0.0),
        variance=variance,
        client_gradients=np.stack([at.own for at in slopes]),
        client_variances=variances,
        cost=cost,
    )


def _value(estimate: Estimate) -> float:
    return estimate.value


def _most(estimates: list[Estimate]) -> Estimate:
    return max(estimates, key=_value)


def _unbiased(share: FloatArray, w_hat: FloatArray) -> float:
    """By what a variance over some clients is multiplied, for that over all.

    For equal weights it is ``(n - 1) m / (n (m - 1))``; in general with effective numbers.

        >>> _unbiased(np.full(2, 0.5), np.full(4, 0.25))
        1.5
    """
    m, n = 1.0 / float(share @ share), 1.0 / float(w_hat @ w_hat)
    return max(1.0, (n - 1.0) * m / (n * (m - 1.0))) if m > 1.0 + 1e-9 else 1.0


def _root_error(root: float, error: float) -> float:
    """The standard error of a root from that of the square."""
    return error / (2.0 * root) if root > 0 else math.sqrt(error)


def _filled(squares: FloatArray, clients: IntArray, w_hat: FloatArray) -> FloatArray:
    """Roots for every client; those not seen get the root of the mean square."""
    share = w_hat[clients] / float(w_hat[clients].sum())
    result = np.full(len(w_hat), float(share @ squares))
    result[clients] = squares
    roots: FloatArray = np.sqrt(result)
    return roots


def _chosen(clients: int | Sequence[int] | None, n: int, seed: int) -> IntArray:
    if clients is None or np.ndim(clients) == 0:
        most = _CLIENTS if clients is None else count(clients, "the number of clients")
        if most >= n:
            return np.arange(n)
        # In the order in which they were drawn: the first ones are a sample as well.
        return generator(seed, Purpose.CONSTANTS).choice(n, size=most, replace=False)
    chosen = np.asarray(clients)
    whole = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
    if not whole or chosen.min() < 0 or chosen.max() >= n or len(np.unique(chosen)) < len(chosen):
        raise FedShuffleError(
            f"clients must be a number, or different numbers of clients from 0 to {n - 1}:"
            f" {clients!r:.60}."
        )
    return chosen.astype(np.int64)


def _minibatches(m: int, batch_size: int, most: int, seed: int, client: int) -> list[IntArray]:
    """Some of the minibatches of an epoch, as positions among the client's examples."""
    rng = generator(seed, Purpose.CONSTANTS, round=1, client=client)
    order = rng.permutation(m)
    steps = -(-m // batch_size)
    kept = min(steps, count(most, "minibatches"))
    some = np.sort(rng.choice(steps, size=kept, replace=False))
    return [order[k * batch_size : (k + 1) * batch_size] for k in some.tolist()]


def _models(points: Sequence[Any] | Tensor | FloatArray | None, problem: Problem) -> list[Tensor]:
    if points is None:
        return [problem.start.clone()]
    if isinstance(points, Tensor | np.ndarray) and points.ndim == 1:
        points = [points]
    result = []
    for k, point in enumerate(points):
        if isinstance(point, nn.Module):
            own = [p.detach().reshape(-1) for p in point.parameters() if p.requires_grad]
            point = torch.cat(own) if own else torch.zeros(0)
        try:
            vector = torch.as_tensor(point, dtype=problem.dtype, device=problem.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise FedShuffleError(f"point {k} is no vector of numbers: {error}.") from error
        if vector.shape != problem.start.shape:
            raise FedShuffleError(
                f"point {k} has shape {tuple(vector.shape)}, but the model has"
                f" {len(problem.start)} trainable parameters: give a flat vector of them."
            )
        if not torch.isfinite(vector).all():
            raise FedShuffleError(f"point {k} has NaN or infinity. Leave it out.")
        result.append(vector.clone())
    if not result:
        raise FedShuffleError("there are no points: give at least one, or None for the model's.")
    return result
