"""Training: the loop, its rounds, checkpoints, client state and progress."""

from fedshuffle.training.loop import Evaluate, Result, train

__all__ = ["Evaluate", "Result", "train"]
