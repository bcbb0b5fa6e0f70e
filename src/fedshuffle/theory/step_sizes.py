r"""The largest step sizes that the theorem on FedShuffleGen allows (derived in docs/theory.md).

In the paper's notation client i uses ``gamma_i = eta_l / c_i``; this project's ``step_size`` is
that of a client with ``c_i = tau_max``, so ``eta_l = step_size * tau_max``. To first order a round
moves the model by the effective step :math:`\tilde\eta = W \eta_g \eta_l` along f-hat.

``bound="theorem"``, with :math:`\beta = 1 + M_2 + (1 + P) B + M_1 B^2`, is the paper's limit (it
omits W, which is needed: docs/differences.md); ``bound="proof"`` is what its proof needs:

.. math:: \eta_l \max(1, W \eta_g) \le \frac{1}{4 \beta L}; \qquad
          4 L \tilde\eta\, (1 + M_1 B^2) \le 1, \quad
          \frac{12 L^2 \eta_l^2 B^2 A}{1 - 2 L^2 \eta_l^2 r^2} \le \frac{9}{10},

with :math:`r = \max_i \tau_i / c_i` and :math:`A = \max_i (\tau_i / c_i)^2 (1 + P_i^2 /
(3 k_i E_i^2))`: the progress of a round, and the drift of the clients. It is never smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fedshuffle._arrays import FloatArray, expect, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.theory.constants import MethodConstants, ProblemConstants

Bound = Literal["theorem", "proof"]


@dataclass(frozen=True)
class StepLimit:
    """The largest step sizes that a bound allows, in each parametrisation."""

    step_size: float
    """This project's: ``eta_l / tau_max``, that of a client with ``c_i = tau_max``."""
    eta_l: float
    """The paper's local step size; client i uses ``eta_l / c_i``."""
    largest_client_step: float
    """``eta_l / min c``, the largest step that any client takes."""
    effective: float
    """``W eta_g eta_l``: how far a round moves along the objective's gradient."""
    server_step_size: float
    """``eta_g``, for which this is the limit."""
    binding: str
    """The condition that limits it: the theorem's ``beta``, ``progress``, or ``drift``."""


def largest_step_size(
    constants: MethodConstants,
    problem: ProblemConstants,
    *,
    server_step_size: float = 1.0,
    bound: Bound = "theorem",
) -> StepLimit:
    """The largest local step size for a server step size.

    >>> from fedshuffle import Federation
    >>> from fedshuffle.theory import method_constants
    >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
    >>> largest_step_size(found, ProblemConstants(L=1.0)).eta_l == 1 / 12
    True
    """
    _check(constants, problem, bound)
    eta_g = number(server_step_size, "server_step_size", "(0, inf)")
    spread, b2 = _drift_factor(constants, problem, bound), problem.B**2
    if bound == "theorem":
        p = math.sqrt(spread - 1.0)
        beta = 1.0 + constants.M_2 + (1.0 + p) * problem.B + constants.M_1 * b2
        both = 1.0 / (4.0 * beta * problem.L)
        eta_l, binding = both / max(1.0, constants.W * eta_g), "beta"
    else:
        reach = float(constants.shares.max())
        by_progress = progress_limit(problem.L, constants.M_1, b2) / (constants.W * eta_g)
        by_drift = drift_limit(problem.L, b2, spread, reach)
        eta_l = min(by_progress, by_drift)
        binding = "drift" if by_drift < by_progress else "progress"
    return StepLimit(
        step_size=eta_l / constants.longest,
        eta_l=eta_l,
        largest_client_step=eta_l / float(constants.c.min()),
        effective=constants.W * eta_g * eta_l,
        server_step_size=eta_g,
        binding=binding,
    )


def progress_limit(L: float, M: float, B2: float) -> float:  # noqa: N803
    """The effective step with ``4 L eta (1 + M_1 B^2) = 1``."""
    return 1.0 / (4.0 * L * (1.0 + M * B2))


def drift_limit(L: float, B2: float, spread: float, reach: float) -> float:  # noqa: N803
    """The eta_l with ``12 B^2 A e = 9/10 (1 - 2 r^2 e)`` for ``e = (L eta_l)^2``."""
    return math.sqrt(0.9 / (12.0 * B2 * spread + 1.8 * reach**2)) / L


def drift_noise(
    constants: MethodConstants, problem: ProblemConstants, *, bound: Bound = "theorem"
) -> float:
    """The noise N from the clients' drift, which adds ``9 L eta eta_l^2 N`` to a round at most.

    ``(1 + P^2) G^2 + sigma^2`` by the theorem, with ``P^2 = max_i P_i^2 / (3 k_i E_i^2)`` and
    ``sigma^2 = sum_i w-hat_i sigma_i^2 / (3 k_i E_i^2)``. By the proof, where client i drifts only
    ``tau_i / c_i`` as far, ``A G^2 + sum_i w-hat_i (tau_i / c_i)^2 sigma_i^2 / (3 k_i E_i^2)``.
    """
    _check(constants, problem, bound)
    sigma = problem.per_client("sigma", len(constants.tau))
    shrink = constants.shares**2 if bound == "proof" else 1.0
    local = float(constants.w_hat @ (shrink * sigma**2 / _visits(constants)))
    return _drift_factor(constants, problem, bound) * problem.G**2 + local


def _visits(constants: MethodConstants) -> FloatArray:
    """``3 k_i E_i^2``, with ``E_i = tau_i / k_i``."""
    visits: FloatArray = 3.0 * constants.tau.astype(np.float64) ** 2 / constants.steps_per_epoch
    return visits


def _drift_factor(constants: MethodConstants, problem: ProblemConstants, bound: Bound) -> float:
    """``1 + P^2`` by the theorem; A by the proof, with the factors ``tau_i / c_i``."""
    p = problem.per_client("P", len(constants.tau))
    factor = 1.0 + p**2 / _visits(constants)
    return float((factor if bound == "theorem" else constants.shares**2 * factor).max())


def _check(constants: MethodConstants, problem: ProblemConstants, bound: str) -> None:
    expect(constants, MethodConstants, "constants")
    expect(problem, ProblemConstants, "problem")
    if bound not in get_args(Bound):
        raise unknown("bound", bound, get_args(Bound))
    if constants.obstacle:
        raise FedShuffleError(f"no step size can be advised: {constants.obstacle}.")
    short = np.flatnonzero(constants.shares > 1.0 + 1e-12)
    if bound == "theorem" and short.size:
        i = int(short[0])
        raise FedShuffleError(
            f"the theorem asks for c_i >= tau_i, but client {i} has c = {constants.c[i]:g} and"
            f" {constants.tau[i]} steps. Use a larger c, or bound='proof'."
        )
