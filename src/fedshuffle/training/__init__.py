"""Training: the loop, its rounds, callbacks, checkpoints and client state."""

from fedshuffle.training.loop import Evaluate, train
from fedshuffle.training.result import Result
from fedshuffle.training.simulation import Simulation

__all__ = ["Evaluate", "Result", "Simulation", "train"]
