"""Training: the loop, its rounds, checkpoints, client state and progress."""

from fedshuffle.training.loop import Evaluate, train
from fedshuffle.training.result import Result

__all__ = ["Evaluate", "Result", "train"]
