r"""The largest step sizes that the theorem on FedShuffleGen allows.

In the paper's notation client i walks with ``gamma_i = eta_l / c_i``; this project's ``step_size``
is that of a client with ``c_i = tau_max``, so ``eta_l = step_size * tau_max``. One round moves the
model by the effective step :math:`\tilde\eta = W \eta_g \eta_l` along f-hat, to first order.

Two bounds are offered.

``"theorem"``: the paper's, with :math:`\beta = 1 + M_2 + (1 + P) B + M_1 B^2`,

.. math:: \eta_l \max(1, W \eta_g) \le \frac{1}{4 \beta L}, \qquad c_i \ge \tau_i.

The paper prints :math:`\eta_l \eta_g`; its proof bounds :math:`\tilde\eta` and :math:`\eta_l`
themselves, and for ``W > 1`` the printed condition is not enough (docs/differences.md).

``"proof"``: the inequalities that the proof really needs, each with its own constants,

.. math:: 4 L \tilde\eta\, (1 + M_1 B^2) \le 1, \qquad
          \frac{12 L^2 \eta_l^2 B^2 A}{1 - 2 L^2 \eta_l^2 r^2} \le \frac{9}{10},

with :math:`r = \max_i \tau_i / c_i` and :math:`A = \max_i (\tau_i / c_i)^2 (1 + P_i^2 /
(3 k_i E_i^2))`. The first is for the progress of a round, the second for the drift of the clients.
docs/theory.md derives both; the second bound is never smaller than the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, expect, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import capped
from fedshuffle.sampling import Sampling
from fedshuffle.theory.constants import MethodConstants, method_constants

Bound = Literal["theorem", "proof"]


@final
@dataclass(frozen=True, eq=False)
class ProblemConstants:
    """What the theorem assumes of the losses.

    Args:
        L: every loss ``f_ij`` of one step is L-smooth.
        G: with B, ``sum_i w-hat_i |grad f_i|^2 <= G^2 + B^2 |grad f-hat|^2`` (gradient similarity;
            for convex losses ``2 L B^2 (f-hat - f-hat*)`` may stand for the last term). The weights
            are the effective ones, which are w for a consistent method.
        B: at least 1.
        P: with sigma, ``mean_j |grad f_ij - grad f_i|^2 <= sigma_i^2 + P_i^2 |grad f_i|^2``
            (bounded variance); one number, or one for each client.
        sigma: as P.
        mu: every loss is mu-strongly convex; 0 for convex ones, and without meaning for others.
    """

    L: float
    G: float = 0.0
    B: float = 1.0
    P: float | ArrayLike = 0.0
    sigma: float | ArrayLike = 0.0
    mu: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self.L, 0.0, "L", above=True)
        _at_least(self.G, 0.0, "G")
        _at_least(self.B, 1.0, "B")
        if _at_least(self.mu, 0.0, "mu") > self.L:
            raise FedShuffleError(f"mu is {self.mu}, but can be no more than L = {self.L}.")
        for name in ("P", "sigma"):
            for value in np.ravel(getattr(self, name)).tolist():
                _at_least(value, 0.0, name)

    def per_client(self, name: Literal["P", "sigma"], n: int) -> FloatArray:
        """P or sigma as a vector."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.shape not in ((), (n,)):
            raise FedShuffleError(
                f"{name} has shape {values.shape}: give one number, or one for each of the {n}"
                " clients."
            )
        return np.broadcast_to(values, (n,))


@final
@dataclass(frozen=True)
class StepLimit:
    """The largest step sizes that a bound allows, in each way of counting them."""

    eta_l: float
    """The paper's local step size; client i walks with ``eta_l / c_i``."""
    step_size: float
    """This project's: ``eta_l / tau_max``, that of a client with ``c_i = tau_max``."""
    largest_client_step: float
    """``eta_l / min c``, the largest that any client really takes."""
    server_step_size: float
    """``eta_g``, for which this is the limit."""
    effective: float
    """``W eta_g eta_l``: how far a round moves along the objective's gradient."""
    binding: str
    """Which condition stops it: the theorem's ``beta``, the round's ``progress``, or ``drift``."""


def largest_step_size(
    constants: MethodConstants,
    problem: ProblemConstants,
    *,
    server_step_size: float = 1.0,
    bound: Bound = "theorem",
) -> StepLimit:
    """The largest local step size for a server step size.

    >>> clients = Federation.from_sizes([1, 2, 3])
    >>> found = method_constants(clients, "fedshuffle")
    >>> largest_step_size(found, ProblemConstants(L=1.0)).eta_l == 1 / 12
    True
    """
    _check(constants, problem, bound)
    eta_g = _at_least(server_step_size, 0.0, "server_step_size", above=True)
    if bound == "theorem":
        both = 1.0 / (4.0 * _beta(constants, problem) * problem.L)
        eta_l, binding = both / max(1.0, constants.W * eta_g), "beta"
    else:
        progress = 1.0 / (4.0 * problem.L * (1.0 + constants.M_1 * problem.B**2))
        by_progress = progress / (constants.W * eta_g)
        # 12 B^2 A e <= 9/10 (1 - 2 r^2 e) for e = (L eta_l)^2, solved for e.
        r = float(constants.shares.max())
        spread = _drift_factor(constants, problem, bound)
        drift = math.sqrt(0.9 / (12.0 * problem.B**2 * spread + 1.8 * r**2)) / problem.L
        eta_l = min(by_progress, drift)
        binding = "drift" if drift < by_progress else "progress"
    return StepLimit(
        eta_l=eta_l,
        step_size=eta_l / constants.longest,
        largest_client_step=eta_l / float(constants.c.min()),
        server_step_size=eta_g,
        effective=constants.W * eta_g * eta_l,
        binding=binding,
    )


def drift_noise(
    constants: MethodConstants, problem: ProblemConstants, *, bound: Bound = "theorem"
) -> float:
    r"""The noise that the clients' drift leaves: N in the bound of :func:`round_bound`.

    ``(1 + P^2) G^2 + sigma^2`` by the theorem, with ``P^2 = max_i P_i^2 / (3 k_i E_i^2)`` and
    ``sigma^2 = sum_i w-hat_i sigma_i^2 / (3 k_i E_i^2)``. By the proof, where client i drifts only
    ``tau_i / c_i`` as far, ``A G^2 + sum_i w-hat_i (tau_i / c_i)^2 sigma_i^2 / (3 k_i E_i^2)``.
    """
    _check(constants, problem, bound)
    sigma = problem.per_client("sigma", len(constants.tau))
    shrink = constants.shares**2 if bound == "proof" else 1.0
    local = float(constants.w_hat @ (shrink * sigma**2 / _visits(constants)))
    return _drift_factor(constants, problem, bound) * problem.G**2 + local


def round_bound(
    constants: MethodConstants,
    problem: ProblemConstants,
    limit: StepLimit,
    *,
    distance: float,
    gap: float,
    bound: Bound = "theorem",
) -> float:
    r"""What the proof says of ``E |x^+ - x*|^2`` after one round, for convex losses.

    .. math:: \Big(1 - \frac{\mu \tilde\eta}{2}\Big) |x - \hat x|^2
              - \frac{\tilde\eta}{10} (\hat f(x) - \hat f^\star)
              + 2 \tilde\eta^2 M_1 G^2 + 9 L \tilde\eta \eta_l^2 N

    with ``distance`` = :math:`|x - \hat x|^2`, ``gap`` = :math:`\hat f(x) - \hat f^\star` and N
    from :func:`drift_noise`: the two lemmas of the general theorem's proof, added (the paper drops
    the L).
    """
    noise = drift_noise(constants, problem, bound=bound)
    moved = limit.effective
    return (
        (1.0 - problem.mu * moved / 2.0) * distance
        - moved / 10.0 * gap
        + 2.0 * moved**2 * constants.M_1 * problem.G**2
        + 9.0 * problem.L * moved * limit.eta_l**2 * noise
    )


@final
@dataclass(frozen=True, eq=False)
class RhoLimits:
    """Step-size limits of the family between FedNova and FedShuffle, one entry for every rho."""

    rho: FloatArray
    eta_l: FloatArray
    """The limit in the paper's parametrisation. By the theorem it is the same for every rho."""
    step_size: FloatArray
    """``eta_l / tau_max``: the limit in this project's parametrisation (the same again)."""
    largest_client_step: FloatArray
    """``step_size * min(rho, tau_max / tau_min)``: the largest step that any client really takes
    at that limit. This does grow with rho."""
    drift_noise: FloatArray
    """The noise that drift leaves at that limit (see the function of this name)."""


def limit_over_rho(
    federation: Federation,
    sampling: str | Sampling,
    problem: ProblemConstants,
    rhos: Sequence[float] | FloatArray,
    work: LocalWork | None = None,
    *,
    server_step_size: float = 1.0,
    bound: Bound = "theorem",
) -> RhoLimits:
    r"""The step-size limit of the family with capped steps, as a function of the cap rho.

    The family: ``c_i = max(tau_i, tau_max / rho)``, so that no client's step is more than rho times
    that of the longest; ``w-tilde_i = w_i c_i / tau_i`` and ``q = p``, so that the objective is the
    one that was meant for every rho. ``rho = 1`` is FedNova with inclusion probabilities,
    ``rho = inf`` FedShuffle.

    What the theorem says of it is less than one might hope. The cap enters only by ``c``, and what
    a client's single step counts is ``w-tilde_i / c_i = w_i / tau_i`` for every rho. Hence W = 1,
    w-hat = w, M_1, M_2 and beta do not depend on rho, nor does the limit on ``eta_l`` (or on
    ``step_size``). What changes is the size of the step that a short client takes *within* that
    limit: up to rho times ``step_size``. The theorem permits it; it promises nothing in return, for
    the rate it proves is the same. Kept as fine as the proof allows (``bound="proof"``), the limit
    never grows with rho (it falls only where some short client's P_i is large), and the noise from
    drift never falls with rho. The gain that FedShuffle can have is one that norms cannot see:
    docs/theory.md shows it.

        >>> limits = limit_over_rho(
        ...     Federation.from_sizes([1, 2, 4]), "full", ProblemConstants(L=1.0), [1, 2, np.inf]
        ... )
        >>> (limits.eta_l * 12).round(9).tolist()
        [1.0, 1.0, 1.0]
        >>> (limits.largest_client_step / limits.step_size).round(9).tolist()
        [1.0, 2.0, 4.0]
    """
    caps = np.array([_at_least(rho, 1.0, "rho", finite=False) for rho in rhos])
    limits, noises = [], []
    for rho in caps.tolist():
        constants = method_constants(federation, capped.rule(rho), sampling, work)
        limits.append(
            largest_step_size(constants, problem, server_step_size=server_step_size, bound=bound)
        )
        noises.append(drift_noise(constants, problem, bound=bound))
    return RhoLimits(
        rho=caps,
        eta_l=np.array([limit.eta_l for limit in limits]),
        step_size=np.array([limit.step_size for limit in limits]),
        largest_client_step=np.array([limit.largest_client_step for limit in limits]),
        drift_noise=np.array(noises),
    )


def _visits(constants: MethodConstants) -> FloatArray:
    """``3 k_i E_i^2``, with ``E_i = tau_i / k_i``."""
    visits: FloatArray = 3.0 * constants.tau.astype(np.float64) ** 2 / constants.steps_per_epoch
    return visits


def _drift_factor(constants: MethodConstants, problem: ProblemConstants, bound: Bound) -> float:
    """``1 + P^2`` by the theorem; A by the proof, which leaves ``tau_i / c_i`` in place."""
    p = problem.per_client("P", len(constants.tau))
    factor = 1.0 + p**2 / _visits(constants)
    return float((factor if bound == "theorem" else constants.shares**2 * factor).max())


def _beta(constants: MethodConstants, problem: ProblemConstants) -> float:
    p = math.sqrt(_drift_factor(constants, problem, "theorem") - 1.0)
    return 1.0 + constants.M_2 + (1.0 + p) * problem.B + constants.M_1 * problem.B**2


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


def _at_least(
    value: float, least: float, what: str, *, above: bool = False, finite: bool = True
) -> float:
    checked = number(value, what)
    if not (checked > least if above else checked >= least) or (finite and checked == math.inf):
        raise FedShuffleError(
            f"{what} is {value}, but must be {'more than' if above else 'at least'} {least:g}"
            f"{' and finite' if finite else ''}."
        )
    return checked
