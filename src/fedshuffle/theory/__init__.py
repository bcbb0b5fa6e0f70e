"""What the convergence theory says of a method on a federation. Needs no torch."""

from __future__ import annotations

from fedshuffle.theory.constants import (
    MethodConstants,
    is_valid_s,
    method_constants,
    second_moments,
    smallest_s,
)
from fedshuffle.theory.step_sizes import (
    Bound,
    ProblemConstants,
    RhoLimits,
    StepLimit,
    drift_noise,
    largest_step_size,
    limit_over_rho,
    round_bound,
)

__all__ = [
    "Bound",
    "MethodConstants",
    "ProblemConstants",
    "RhoLimits",
    "StepLimit",
    "drift_noise",
    "is_valid_s",
    "largest_step_size",
    "limit_over_rho",
    "method_constants",
    "round_bound",
    "second_moments",
    "smallest_s",
]
