"""One TOML file describes a run: read it, vary it, run it, resume it.

In short:

    config = fedshuffle.config.load("config.toml")
    result = config.run("out")
    longer = fedshuffle.config.resume("out", rounds=200)
"""

from typing import TYPE_CHECKING

from fedshuffle._lazy import attach
from fedshuffle.config.loader import load, setting
from fedshuffle.config.schema import (
    Checkpoints,
    Config,
    EvaluationSpec,
    ImportSpec,
    ScheduleSpec,
    StorePath,
)

if TYPE_CHECKING:
    from fedshuffle.config.runner import resume

__all__ = [
    "Checkpoints",
    "Config",
    "EvaluationSpec",
    "ImportSpec",
    "ScheduleSpec",
    "StorePath",
    "load",
    "resume",
    "setting",
]

__getattr__ = attach(__name__)  # only resuming a run needs torch
