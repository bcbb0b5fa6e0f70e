"""Step sizes that suit a run: the search for them, by short runs."""

from typing import TYPE_CHECKING

from fedshuffle._lazy import attach

if TYPE_CHECKING:
    from fedshuffle.tuning.short_runs import Trial
    from fedshuffle.tuning.step_sizes import TunedStepSizes, tune

__all__ = ["Trial", "TunedStepSizes", "tune"]

DEFAULT_SHARE = 3.0
"""The largest cost of tuning unless another is given, as a share of the rounds of the run."""
JOURNAL = "tuning.jsonl"
"""The file of finished short runs in the folder of a run."""

__getattr__ = attach(__name__)  # only the runs need torch
