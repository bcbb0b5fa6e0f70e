"""fedshuffle: federated learning that optimises the objective you meant."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fedshuffle.auditing import Audit, audit
from fedshuffle.errors import FedShuffleError, TrainingError
from fedshuffle.federation import Federation
from fedshuffle.local_work import AtMost, EpochRange, LocalWork, MissLast, RandomStop
from fedshuffle.methods import MVR, FedShuffleGen, GlobalMomentum, Method
from fedshuffle.sampling import Sampling

if TYPE_CHECKING:
    from fedshuffle.config.loading import load_model
    from fedshuffle.evaluation import Evaluation, Metric
    from fedshuffle.training import Result, train

__all__ = [
    "MVR",
    "AtMost",
    "Audit",
    "EpochRange",
    "Evaluation",
    "FedShuffleError",
    "FedShuffleGen",
    "Federation",
    "GlobalMomentum",
    "LocalWork",
    "Method",
    "Metric",
    "MissLast",
    "RandomStop",
    "Result",
    "Sampling",
    "TrainingError",
    "__version__",
    "audit",
    "load_model",
    "train",
]

__version__ = version("fedshuffle")

_NEEDS_TORCH = {
    "Evaluation": "fedshuffle.evaluation",
    "Metric": "fedshuffle.evaluation",
    "Result": "fedshuffle.training",
    "load_model": "fedshuffle.config.loading",
    "train": "fedshuffle.training",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something that trains is asked for."""
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
