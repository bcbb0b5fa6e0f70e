r"""Constants of a problem that are known, not measured, and by what right each of them holds.

The assumptions of the paper, with the effective weights :math:`\hat w` in the place of w (they are
what the general theorem uses, and the same for a consistent method):

.. math:: \mu I \preceq \nabla^2 f_{ij} \preceq L I, \qquad
          \sum_i \hat w_i |\nabla f_i|^2 \le G^2 + B^2 |\nabla \hat f|^2, \qquad
          \frac1{k_i} \sum_j |\nabla f_{ij} - \nabla f_i|^2 \le \sigma_i^2 + P_i^2 |\nabla f_i|^2,
          \qquad \|\nabla^2 f_i - \nabla^2 \hat f\| \le \delta.

For convex losses :math:`2 L B^2 (\hat f - \hat f^\star)` may stand for
:math:`B^2 |\nabla \hat f|^2` (``form="convex"``); it is never less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, expect, number, positive
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.theory.step_sizes import ProblemConstants

SimilarityForm = Literal["gradient", "convex"]

Status = Literal["exact", "bound", "on the ball"]


@final
@dataclass(frozen=True)
class Claim:
    """By what right a constant holds."""

    status: Status
    """``exact``: the least (for mu the largest) that holds everywhere, but for rounding; ``bound``:
    holds everywhere, and may be more (for mu less) than need be; ``on the ball``: holds where
    ``|x - x*| <= radius``."""
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


@final
@dataclass(frozen=True, eq=False)
class ExactConstants:
    """The constants of a problem whose losses are known in closed form.

    >>> from fedshuffle.theory.quadratics import quadratic_constants
    >>> found = quadratic_constants(1.0, [[0.0], [3.0]], sizes=[1, 1])
    >>> found.x_star.tolist(), found.f_star, found.problem.L, found.problem.G, found.delta
    ([1.5], 1.125, 1.0, 1.5, 0.0)
    >>> print(found.claims["L"])
    exact: the largest eigenvalue of any Hessian A_ij
    """

    L: float
    """Of every loss of one step, ``f_ij``."""
    L_clients: FloatArray
    """Of every ``f_i``."""
    L_objective: float
    """Of ``f-hat``."""
    mu: float
    """Of every ``f_ij``, as the theorem asks."""
    mu_objective: float
    """Of ``f-hat``; never less than ``mu``."""
    G: float
    B: float
    sigma: FloatArray
    """One for each client."""
    P: FloatArray
    """One for each client."""
    delta: float
    """``max_i |H_i - H|``, the Hessian similarity."""
    delta_clients: FloatArray
    x_star: FloatArray
    """Where ``f-hat`` is smallest (the nearest such point to zero, where there are many)."""
    f_star: float
    """``f-hat(x*)``."""
    w_hat: FloatArray
    """The weights of ``f-hat``."""
    form: SimilarityForm
    """Which form of gradient similarity G and B are for."""
    radius: float | None
    """On which ball around ``x*`` what is said holds; None: everywhere."""
    claims: Mapping[str, Claim]
    """By what right each constant holds."""

    @property
    def problem(self) -> ProblemConstants:
        """What the step-size advice needs."""
        return ProblemConstants(
            L=self.L, G=self.G, B=self.B, P=self.P, sigma=self.sigma, mu=min(self.mu, self.L)
        )


@final
@dataclass(frozen=True)
class Wanted:
    """What all the functions for known losses are asked in the same way, checked.

    Args:
        w_hat: the effective weights of the clients.
        batch_size: examples per step.
        form: which form of gradient similarity.
        B: for which G is wanted; None: a choice that is explained where it is made.
        radius: claim things for the ball of this radius around the optimum only.
    """

    w_hat: FloatArray
    batch_size: int
    form: SimilarityForm
    B: float | None
    radius: float | None

    @classmethod
    def checked(
        cls,
        default: FloatArray,
        w_hat: ArrayLike | None,
        batch_size: int,
        form: str,
        B: float | None,  # noqa: N803
        radius: float | None,
    ) -> Wanted:
        if form not in get_args(SimilarityForm):
            raise unknown("form of gradient similarity", form, get_args(SimilarityForm))
        if B is not None and not 1.0 <= number(B, "B") < math.inf:
            raise FedShuffleError(f"B is {B}, but must be at least 1 and finite.")
        if radius is not None and not 0.0 <= number(radius, "radius") < math.inf:
            raise FedShuffleError(f"radius is {radius}, but must be at least 0 and finite.")
        weights = effective(default, w_hat)
        return cls(weights, count(batch_size, "batch_size"), form, B, radius)  # type: ignore[arg-type]

    def spread(self, m: int) -> float:
        r"""By what the variance among a client's m examples is multiplied for minibatches.

        A minibatch of s of them, drawn without replacement, has :math:`\frac{m - s}{s (m - 1)}`
        times their variance; this is the mean over an epoch's steps.

            >>> wanted = Wanted(np.ones(1), 2, "gradient", None, None)
            >>> [wanted.spread(m) for m in (1, 2, 4)]
            [0.0, 0.0, 0.3333333333333333]
        """
        if m == 1:
            return 0.0
        b = min(self.batch_size, m)
        whole, rest = divmod(m, b)
        total = whole * (m - b) / b + ((m - rest) / rest if rest else 0.0)
        return total / ((m - 1) * (whole + (rest > 0)))

    def steepest(self, smoothness: FloatArray, whole: float) -> float:
        """A bound on L of any minibatch: the mean of the largest L of as many examples.

        ``whole`` is L of all examples together, for a client that takes them all in one step.
        """
        m = len(smoothness)
        if self.batch_size >= m:
            return whole
        fewest = m % self.batch_size or self.batch_size
        return float(np.sort(smoothness)[-fewest:].mean())

    def about_steps(self, sizes: IntArray, reason: str, otherwise: str) -> Claim:
        """``reason`` is why a number is exact for single examples, ``otherwise`` why it is a bound
        for minibatches.
        """
        if ((self.batch_size == 1) | (sizes <= self.batch_size)).all():
            return Claim("exact", reason)
        return Claim("bound", f"{reason}; {otherwise}")


def effective(default: FloatArray, w_hat: ArrayLike | None) -> FloatArray:
    """The weights, summing to one."""
    if w_hat is None:
        return default
    checked = positive(w_hat, len(default), "w_hat")
    return checked / float(checked.sum())


def l2_checked(value: float) -> float:
    """The factor of the regularisation."""
    if not 0.0 <= number(value, "l2") < math.inf:
        raise FedShuffleError(f"l2 is {value}, but must be at least 0 and finite.")
    return float(value)


@final
class Table:
    """Features and targets of the clients, read one client at a time."""

    def __init__(self, federation: Federation, bias: bool) -> None:
        expect(federation, Federation, "federation")
        if len(federation.fields) != 2:
            raise FedShuffleError(
                f"the federation has {len(federation.fields)} fields, but a regression needs two:"
                " features and targets. Use Federation.from_arrays(features, targets, ...)."
            )
        self.federation = federation
        self.bias = bool(bias)
        shape = tuple(federation.fields[0].shape)
        self.width = math.prod(shape[1:]) + self.bias
        rest = math.prod(tuple(federation.fields[1].shape)[1:])
        if rest != 1:
            raise FedShuffleError(
                f"the targets have shape {tuple(federation.fields[1].shape)}, but must be one"
                " number for each example."
            )

    def __len__(self) -> int:
        return len(self.federation)

    def client(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Features (with a last column of ones for the bias) and targets of one client."""
        features, targets = (_floats(part) for part in self.federation.client(i))
        features = features.reshape(len(targets), -1)
        if self.bias:
            features = np.hstack([features, np.ones((len(targets), 1))])
        return features, targets.reshape(-1)


def _floats(part: Any) -> FloatArray:
    if hasattr(part, "detach"):
        part = part.detach().cpu()
    return np.asarray(part, dtype=np.float64)
