"""Constants of a problem in closed form, and why each of them holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, expect, number, positive
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.theory.constants import ProblemConstants

SimilarityForm = Literal["gradient", "convex"]
Status = Literal["exact", "bound", "on the ball"]


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


class ConstantsOptions(TypedDict, total=False):
    """Options of all functions for exact constants."""

    w_hat: ArrayLike | None
    """The effective weights of the clients; by default those of the federation."""
    batch_size: int
    """Examples per step; 1 by default."""
    form: SimilarityForm
    """The form of gradient similarity; ``gradient`` by default."""
    B: float | None
    """Find the smallest G for this B; each function explains its default."""
    P: float | None
    """Find the smallest sigma_i for this P, the same for all clients; likewise."""
    radius: float | None
    """Find constants for the ball of this radius around the optimum only."""


@dataclass(frozen=True)
class ConstantsRequest:
    """The options, checked."""

    w_hat: ArrayLike | None = None
    batch_size: int = 1
    form: SimilarityForm = "gradient"
    B: float | None = None
    P: float | None = None
    radius: float | None = None

    def __post_init__(self) -> None:
        count(self.batch_size, "batch_size")
        if self.form not in get_args(SimilarityForm):
            raise unknown("form of gradient similarity", self.form, get_args(SimilarityForm))
        for name, within in (("B", "[1, inf)"), ("P", "[0, inf)"), ("radius", "[0, inf)")):
            if getattr(self, name) is not None:
                number(getattr(self, name), name, within)

    def variance_factor(self, m: int) -> float:
        """The variance of minibatch gradients relative to that among a client's m examples.

        For s of them, drawn without replacement, ``(m - s) / (s (m - 1))``; the mean over an epoch.
        """
        if m == 1:
            return 0.0
        b = min(self.batch_size, m)
        whole, rest = divmod(m, b)
        total = whole * (m - b) / b + ((m - rest) / rest if rest else 0.0)
        return total / ((m - 1) * (whole + (rest > 0)))

    def batch_smoothness(self, smoothness: FloatArray, whole: float) -> float:
        """A bound on L of any minibatch: the mean of the largest L of as many examples, or
        ``whole``, that of all examples together, if one step takes them all.
        """
        if self.batch_size >= len(smoothness):
            return whole
        smallest = len(smoothness) % self.batch_size or self.batch_size
        return float(np.sort(smoothness)[-smallest:].mean())

    def step_validity(self, sizes: IntArray, reason: str) -> Validity:
        """Exact for steps of single examples or whole clients, else a bound for minibatches."""
        if ((self.batch_size == 1) | (sizes <= self.batch_size)).all():
            return Validity("exact", reason)
        return Validity("bound", f"{reason}; of a minibatch by those of its examples")


def normalised_weights(default: FloatArray, w_hat: ArrayLike | None) -> FloatArray:
    """The weights, summing to one."""
    if w_hat is None:
        return default
    checked = positive(w_hat, len(default), "w_hat")
    return checked / float(checked.sum())


class RegressionData:
    """Features and targets of the clients, read one client at a time."""

    def __init__(self, federation: Federation, bias: bool) -> None:
        expect(federation, Federation, "federation")
        if len(federation.fields) != 2:
            raise FedShuffleError(
                f"the federation has {len(federation.fields)} fields, but a regression needs two:"
                " features and targets. Use Federation.from_arrays(features, targets, ...)."
            )
        inputs, targets = (tuple(field.shape) for field in federation.fields)
        if math.prod(targets[1:]) != 1:
            raise FedShuffleError(f"the targets have shape {targets}, not one number per example.")
        self.federation, self.bias = federation, bias
        self.width = math.prod(inputs[1:]) + bias

    def client(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Features (with a last column of ones for the bias) and targets of one client."""
        parts: Any = self.federation.client(i)
        if hasattr(parts[0], "detach"):
            parts = [part.detach().cpu() for part in parts]
        features, targets = (np.asarray(part, dtype=np.float64) for part in parts)
        features = features.reshape(len(targets), -1)
        if self.bias:
            features = np.hstack([features, np.ones((len(targets), 1))])
        return features, targets.reshape(-1)
