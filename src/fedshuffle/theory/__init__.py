"""Convergence theory of a method on a federation. Estimates and advice need torch."""

from typing import TYPE_CHECKING

from fedshuffle._lazy import attach
from fedshuffle.theory.constants import (
    EstimatedConstants,
    ExactConstants,
    ProblemConstants,
    Validity,
)
from fedshuffle.theory.exact import quadratic_constants
from fedshuffle.theory.method_advice import (
    SamplingAdvice,
    StepAdvice,
    best_probabilities,
    compare_steps,
    nearest_constants,
    sampling_advice,
    step_advice,
)
from fedshuffle.theory.method_constants import MethodConstants, method_constants, smallest_s
from fedshuffle.theory.mvr import MVRRate
from fedshuffle.theory.rates import (
    Bound,
    ConvergenceRate,
    Quantity,
    Regime,
    StepLimit,
    drift_noise,
    largest_step_size,
)
from fedshuffle.theory.regression import linear_regression_constants, logistic_regression_constants
from fedshuffle.theory.reshuffling import reshuffled_bound

if TYPE_CHECKING:
    from fedshuffle.theory.advice import Advice, advise
    from fedshuffle.theory.estimation import problem_constants
    from fedshuffle.theory.problem import AdvisedRun

__all__ = [
    "Advice",
    "AdvisedRun",
    "Bound",
    "ConvergenceRate",
    "EstimatedConstants",
    "ExactConstants",
    "MVRRate",
    "MethodConstants",
    "ProblemConstants",
    "Quantity",
    "Regime",
    "SamplingAdvice",
    "StepAdvice",
    "StepLimit",
    "Validity",
    "advise",
    "best_probabilities",
    "compare_steps",
    "drift_noise",
    "largest_step_size",
    "linear_regression_constants",
    "logistic_regression_constants",
    "method_constants",
    "nearest_constants",
    "problem_constants",
    "quadratic_constants",
    "reshuffled_bound",
    "sampling_advice",
    "smallest_s",
    "step_advice",
]

__getattr__ = attach(__name__)
