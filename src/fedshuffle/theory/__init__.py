"""What the convergence theory says of a method on a federation. Needs torch only for estimates."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedshuffle.theory.advice import (
    Setting,
    StepAdvice,
    StepComparison,
    compare_steps,
    method_setting,
    step_advice,
)
from fedshuffle.theory.constants import (
    MethodConstants,
    is_valid_s,
    method_constants,
    second_moments,
    smallest_s,
)
from fedshuffle.theory.logistic import logistic_regression_constants
from fedshuffle.theory.mvr import (
    MVRSetting,
    MVRStep,
    mvr_bound,
    mvr_limit,
    mvr_setting,
    mvr_tune,
)
from fedshuffle.theory.problems import Claim, ExactConstants
from fedshuffle.theory.quadratics import linear_regression_constants, quadratic_constants
from fedshuffle.theory.rates import (
    Quantity,
    Recursion,
    Regime,
    Tuned,
    rounds_to,
    tune,
    upper_bound,
)
from fedshuffle.theory.sampling_advice import (
    Option,
    SamplingAdvice,
    best_probabilities,
    sampling_advice,
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

if TYPE_CHECKING:
    from fedshuffle.theory.estimated import EstimatedConstants, problem_constants
    from fedshuffle.theory.measuring import Estimate

__all__ = [
    "Bound",
    "Claim",
    "Estimate",
    "EstimatedConstants",
    "ExactConstants",
    "MVRSetting",
    "MVRStep",
    "MethodConstants",
    "Option",
    "ProblemConstants",
    "Quantity",
    "Recursion",
    "Regime",
    "RhoLimits",
    "SamplingAdvice",
    "Setting",
    "StepAdvice",
    "StepComparison",
    "StepLimit",
    "Tuned",
    "best_probabilities",
    "compare_steps",
    "drift_noise",
    "is_valid_s",
    "largest_step_size",
    "limit_over_rho",
    "linear_regression_constants",
    "logistic_regression_constants",
    "method_constants",
    "method_setting",
    "mvr_bound",
    "mvr_limit",
    "mvr_setting",
    "mvr_tune",
    "problem_constants",
    "quadratic_constants",
    "round_bound",
    "rounds_to",
    "sampling_advice",
    "second_moments",
    "smallest_s",
    "step_advice",
    "tune",
    "upper_bound",
]

_NEEDS_TORCH = {
    "Estimate": "fedshuffle.theory.measuring",
    "EstimatedConstants": "fedshuffle.theory.estimated",
    "problem_constants": "fedshuffle.theory.estimated",
}


def __getattr__(name: str) -> Any:
    """Import torch only when an estimate is asked for."""
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
