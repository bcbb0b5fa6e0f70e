"""Estimated constants of any model, loss and federation, at given models. Needs torch.

They hold at the points where they are estimated: L, mu and delta are those of the Hessians there, G
and sigma the smallest that satisfy the assumptions there. A maximum over clients or minibatches is
the largest of those seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from rich.progress import TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from fedshuffle._arrays import FloatArray, IntArray, count, number
from fedshuffle._terminal import progress_bar
from fedshuffle.engines.base import check_model
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.theory.constants import ProblemConstants
from fedshuffle.theory.estimator import ConstantEstimate, Estimator, twice_differentiable
from fedshuffle.theory.exact import normalised_weights

_MAX_CLIENTS = 50
"""Default of the largest number of clients to sample."""


@dataclass(frozen=True, eq=False)
class EstimatedConstants:
    """The constants of a problem at the points where they were estimated."""

    L: ConstantEstimate
    """The largest of the three that follow."""
    L_steps: ConstantEstimate
    """Of the losses of single steps, ``f_ij``."""
    L_clients: ConstantEstimate
    """Of the ``f_i``."""
    L_objective: ConstantEstimate
    """Of ``f-hat``."""
    mu: ConstantEstimate
    """The smallest eigenvalue of any ``f_ij`` seen; negative: not convex there."""
    mu_objective: ConstantEstimate
    """The smallest eigenvalue of ``f-hat``."""
    delta: ConstantEstimate
    """``max_i |H_i - H|``."""
    G: ConstantEstimate
    """The smallest for B = 1; :meth:`problem_with` gives it for another B."""
    sigma: FloatArray
    """The smallest for P = 0, per client; clients not seen get the root mean square of the rest,
    which leaves ``sum_i w-hat_i sigma_i^2`` unbiased."""
    sigma_rms: ConstantEstimate
    """``sqrt(sum_i w-hat_i sigma_i^2)``."""
    clients: IntArray
    """The clients seen."""
    points: int
    """The number of models."""
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
    """Gradients of single examples computed; a product with a Hessian counts as two."""

    @property
    def problem(self) -> ProblemConstants:
        """The inputs of the step-size advice, with B = 1 and P = 0."""
        return self.problem_with()

    def problem_with(self, *, B: float = 1.0, P: float = 0.0) -> ProblemConstants:  # noqa: N803
        """For another B and P: the smallest G and sigma_i that hold at all points seen.

        mu is the estimate minus its residual, if that is positive.
        """
        number(B, "B", "[1, inf)")
        number(P, "P", "[0, inf)")
        g2 = float((self.variance - (B**2 - 1.0) * self.gradient).max())
        left = (self.client_variances - P**2 * self.client_gradients).max(axis=0)
        return ProblemConstants(
            L=self.L.value,
            G=math.sqrt(max(0.0, g2)),
            B=B,
            P=P,
            sigma=_for_all_clients(np.maximum(left, 0.0), self.clients, self.w_hat),
            mu=min(max(0.0, self.mu.value - self.mu.residual), self.L.value),
        )

    def __str__(self) -> str:
        seen = f"{len(self.clients)} of {len(self.w_hat)} clients, {self.points} point(s)"
        pairs = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name:12} {v}" for name, v in pairs if isinstance(v, ConstantEstimate)]
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

    Examples are read client by client in pieces, so they may exceed memory. The same seed gives the
    same numbers. The model is not changed.

    Args:
        model: any torch module that draws no random numbers (call ``eval()`` if it has dropout).
        federation: in memory or on disk.
        loss: ``loss(model, *fields)``, as for training.
        points: models to estimate at, each a flat vector of the trainable parameters or a module of
            the same kind; by default the model itself.
        clients: largest number of clients, drawn uniformly by the seed (default 50); or which ones,
            and then errors and notes are as if they had been drawn.
        w_hat: the effective weights; by default the federation's.
        batch_size: examples per step: what an ``f_ij`` is.
        weight_decay: that of the local work.
        minibatches: largest number per client, for the variance and for L of single steps.
        delta_clients: largest number of clients for delta; each costs as much as all for L.
        iterations: largest number of products with each Hessian; one vector is stored for each.
        tolerance: when to stop earlier, relative to the norm.
        seed: determines everything random.
        progress: show a progress bar on the error stream.

    >>> from fedshuffle import losses
    >>> data = Federation.from_arrays(torch.eye(2), torch.ones(2, 1), sizes=[1, 1])
    >>> linear = nn.Linear(2, 1, bias=False)
    >>> found = problem_constants(linear, data, losses.squared_error)
    >>> round(found.L.value, 5), round(found.L_objective.value, 5), round(found.delta.value, 5)
    (1.0, 0.5, 0.5)
    """
    problem = Problem(model, loss, federation)
    if check_model(problem):
        raise FedShuffleError(
            "the model or the loss draws random numbers, so its constants are not defined. Call"
            " model.eval(), or leave out dropout."
        )
    seed = check_seed(seed)
    chosen = _sampled_clients(clients, len(federation), seed)
    decay = number(weight_decay, "weight_decay", "[0, inf)")
    number(tolerance, "tolerance", "(0, 1)")
    models = _points(points, problem)
    weights = normalised_weights(federation.weights, w_hat)
    size, most = count(batch_size, "batch_size"), count(minibatches, "minibatches")
    cost = "{task.completed:,.0f} of at most {task.total:,.0f} gradients"
    bar = progress_bar(progress, cost, TimeElapsedColumn(), "+", TimeRemainingColumn())
    task = bar.add_task("constants", total=1)
    share = weights[chosen] / float(weights[chosen].sum())
    estimator = Estimator(
        problem=problem,
        weight_decay=decay,
        chosen=chosen,
        share=share,
        steps=[
            _minibatches(m, size, most, seed, i)
            for i, m in zip(chosen.tolist(), federation.sizes[chosen].tolist(), strict=True)
        ],
        seed=seed,
        iterations=count(iterations, "iterations"),
        tolerance=tolerance,
        delta_clients=min(count(delta_clients, "delta_clients"), len(chosen)),
        on_cost=lambda spent: bar.update(task, completed=spent),
    )
    with bar, twice_differentiable(problem.device):
        bar.update(task, total=len(models) * estimator.largest_cost)
        slopes = [estimator.gradients(x) for x in models]
        bends = [estimator.curvatures(x, k) for k, x in enumerate(models)]

    # The largest (for mu the smallest) over all points.
    factor = _variance_correction(share, weights)
    variance = np.array([factor * float(share @ apart) for apart, *_ in slopes])
    squares = np.array([float(share @ own) for _, own, *_ in slopes])
    _, own, variances, errors = (np.stack(part) for part in zip(*slopes, strict=True))
    k = int(variance.argmax())
    g = math.sqrt(float(variance[k]))
    largest, where = variances.max(axis=0), variances.argmax(axis=0)
    rms = math.sqrt(float(share @ largest))
    local = float(np.linalg.norm(share * errors[where, np.arange(len(where))]))
    found = {
        name: (min if name.startswith("mu") else max)((at[name] for at in bends), key=_value)
        for name in bends[0]
    }
    rms_error = math.hypot(estimator.error(largest), local)
    return EstimatedConstants(
        L=max(found["L_steps"], found["L_clients"], found["L_objective"], key=_value),
        **found,
        G=ConstantEstimate(g, 0.0, _root_error(g, factor * estimator.error(slopes[k][0]))),
        sigma=_for_all_clients(largest, chosen, weights),
        sigma_rms=ConstantEstimate(rms, 0.0, _root_error(rms, rms_error)),
        clients=chosen,
        points=len(models),
        w_hat=weights,
        gradient=np.maximum(squares - variance, 0.0),
        variance=variance,
        client_gradients=own,
        client_variances=variances,
        cost=estimator.cost,
    )


def _value(estimate: ConstantEstimate) -> float:
    return estimate.value


def _variance_correction(share: FloatArray, w_hat: FloatArray) -> float:
    """The factor from a variance over some clients to that over all.

    For equal weights it is ``(n - 1) m / (n (m - 1))``; in general with effective numbers.

        >>> _variance_correction(np.full(2, 0.5), np.full(4, 0.25))
        1.5
    """
    m, n = 1.0 / float(share @ share), 1.0 / float(w_hat @ w_hat)
    return max(1.0, (n - 1.0) * m / (n * (m - 1.0))) if m > 1.0 + 1e-9 else 1.0


def _root_error(root: float, error: float) -> float:
    """The standard error of a root from that of the square."""
    return error / (2.0 * root) if root > 0 else math.sqrt(error)


def _for_all_clients(squares: FloatArray, clients: IntArray, w_hat: FloatArray) -> FloatArray:
    """Roots for every client; those not seen get the root of the mean square."""
    share = w_hat[clients] / float(w_hat[clients].sum())
    result = np.full(len(w_hat), float(share @ squares))
    result[clients] = squares
    roots: FloatArray = np.sqrt(result)
    return roots


def _sampled_clients(clients: int | Sequence[int] | None, n: int, seed: int) -> IntArray:
    if clients is None or np.ndim(clients) == 0:
        most = _MAX_CLIENTS if clients is None else count(clients, "the number of clients")
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
    some = np.sort(rng.choice(steps, size=min(steps, most), replace=False))
    return [order[k * batch_size : (k + 1) * batch_size] for k in some.tolist()]


def _points(points: Sequence[Any] | Tensor | FloatArray | None, problem: Problem) -> list[Tensor]:
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
            raise FedShuffleError(f"point {k} is not a vector of numbers: {error}.") from error
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
