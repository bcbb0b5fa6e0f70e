"""What the theorems assume of a problem: its constants, exact, bounded or estimated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, number
from fedshuffle.errors import FedShuffleError

Status = Literal["exact", "bound", "on the ball"]


@dataclass(frozen=True, eq=False)
class ProblemConstants:
    """What the theorem assumes of the losses.

    Args:
        L: every loss ``f_ij`` of one step is L-smooth.
        G: with B, ``sum_i w-hat_i |grad f_i|^2 <= G^2 + B^2 |grad f-hat|^2`` (gradient similarity;
            for convex losses ``2 L B^2 (f-hat - f-hat*)``, which is never smaller, may replace the
            last term). The weights are the effective ones, equal to w for a consistent method.
        B: at least 1.
        P: with sigma, ``mean_j |grad f_ij - grad f_i|^2 <= sigma_i^2 + P_i^2 |grad f_i|^2``
            (bounded variance); one number, or one per client.
        sigma: as P.
        mu: every loss is mu-strongly convex; 0 for convex losses, unused for others.

    >>> ProblemConstants(L=2.0, G=1.0, mu=0.1).B
    1.0
    """

    L: float
    G: float = 0.0
    B: float = 1.0
    P: float | ArrayLike = 0.0
    sigma: float | ArrayLike = 0.0
    mu: float = 0.0

    def __post_init__(self) -> None:
        number(self.L, "L", "(0, inf)")
        number(self.G, "G", "[0, inf)")
        number(self.B, "B", "[1, inf)")
        if number(self.mu, "mu", "[0, inf)") > self.L:
            raise FedShuffleError(f"mu is {self.mu}, but must be at most L = {self.L}.")
        for name in ("P", "sigma"):
            for value in np.ravel(getattr(self, name)).tolist():
                number(value, name, "[0, inf)")

    def per_client(self, name: Literal["P", "sigma"], n: int) -> FloatArray:
        """P or sigma as a vector."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.shape not in ((), (n,)):
            wanted = f"give one number, or one for each of the {n} clients"
            raise FedShuffleError(f"{name} has shape {values.shape}: {wanted}.")
        return np.broadcast_to(values, (n,))


@dataclass(frozen=True)
class Validity:
    """Where a constant holds, and why."""

    status: Status
    """``exact``: the smallest (for mu the largest) that holds everywhere, up to rounding;
    ``bound``: holds everywhere; ``on the ball``: holds where ``|x - x*| <= radius``."""
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


@dataclass(frozen=True, eq=False)
class ExactConstants:
    """The constants of a problem with losses in closed form.

    L, mu, G, B, sigma and P are as for :class:`~fedshuffle.theory.ProblemConstants`.

    >>> from fedshuffle.theory import quadratic_constants
    >>> found = quadratic_constants(1.0, [[0.0], [3.0]], sizes=[1, 1])
    >>> found.x_star.tolist(), found.f_star, found.L, found.G, found.delta
    ([1.5], 1.125, 1.0, 1.5, 0.0)
    >>> print(found.validity["L"])
    exact: the largest eigenvalue of any Hessian A_ij
    """

    L: float
    mu: float
    G: float
    B: float
    sigma: FloatArray
    P: FloatArray
    delta: float
    """``max_i |H_i - H|``, the Hessian similarity."""
    mu_objective: float
    """Of ``f-hat``; never smaller than ``mu``."""
    x_star: FloatArray
    """The minimiser of ``f-hat`` (the one nearest to zero, if there are several)."""
    f_star: float
    """``f-hat(x*)``."""
    w_hat: FloatArray
    """The weights of ``f-hat``."""
    validity: Mapping[str, Validity]
    """Where each constant holds, and why."""

    @property
    def problem(self) -> ProblemConstants:
        """The inputs of the step-size advice."""
        return ProblemConstants(self.L, self.G, self.B, self.P, self.sigma, self.mu)


@dataclass(frozen=True)
class ConstantEstimate:
    """An estimated constant and its uncertainty."""

    value: float
    residual: float = 0.0
    """How far the iteration may still be from an eigenvalue."""
    standard_error: float = 0.0
    """From sampling clients and minibatches; 0 where all were seen."""
    note: str = ""

    @property
    def uncertainty(self) -> float:
        """The residual and two standard errors."""
        return self.residual + 2.0 * self.standard_error


@dataclass(frozen=True, eq=False)
class EstimatedConstants:
    """The constants of a problem at some points, from the clients and minibatches seen there."""

    L: ConstantEstimate
    """Of every loss of one step ``f_ij``, of every ``f_i``, and of ``f-hat``."""
    L_objective: ConstantEstimate
    """Of ``f-hat``."""
    mu: ConstantEstimate
    """The smallest eigenvalue of any ``f_ij`` seen; negative: not convex there."""
    delta: ConstantEstimate
    """``max_i |H_i - H|``."""
    G: ConstantEstimate
    """The smallest for B = 1; :meth:`problem_with` gives it for another B."""
    sigma_rms: ConstantEstimate
    """``sqrt(sum_i w-hat_i sigma_i^2)``, with the smallest sigma_i for P = 0."""
    clients: IntArray
    """The clients seen."""
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

    @property
    def problem(self) -> ProblemConstants:
        """The inputs of the step-size advice, with B = 1 and P = 0."""
        return self.problem_with()

    def problem_with(self, *, B: float = 1.0, P: float = 0.0) -> ProblemConstants:  # noqa: N803
        """For another B and P: the smallest G and sigma_i that hold at all points seen.

        Clients not seen get the root mean square of the others' sigma_i, which leaves
        ``sum_i w-hat_i sigma_i^2`` unbiased. mu is the estimate minus its residual, if positive.
        """
        number(B, "B", "[1, inf)")
        number(P, "P", "[0, inf)")
        g2 = float((self.variance - (B**2 - 1.0) * self.gradient).max())
        seen = np.maximum((self.client_variances - P**2 * self.client_gradients).max(axis=0), 0.0)
        squares = np.full(len(self.w_hat), np.average(seen, weights=self.w_hat[self.clients]))
        squares[self.clients] = seen
        return ProblemConstants(
            L=self.L.value,
            G=math.sqrt(max(0.0, g2)),
            B=B,
            P=P,
            sigma=np.sqrt(squares),
            mu=min(max(0.0, self.mu.value - self.mu.residual), self.L.value),
        )
