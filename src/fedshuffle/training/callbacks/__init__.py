"""Callbacks: what happens around the rounds of :func:`fedshuffle.train`.

>>> import torch
>>> from fedshuffle import Federation, callbacks, losses, train
>>> federation = Federation.from_arrays(torch.ones(4, 1), torch.eye(4), sizes=[1, 3])
>>> result = train(
...     torch.nn.Linear(1, 4),
...     federation,
...     loss=losses.squared_error,
...     rounds=1000,
...     evaluate=lambda model: {"bias": float(model.bias.abs().sum())},
...     callbacks=[callbacks.EarlyStopping("bias", patience=3, mode="max")],
... )
>>> len(result.history) < 1000, result.stopped.split()[0]
(True, 'EarlyStopping')
"""

from fedshuffle.training.callbacks.base import Callback, TrainingContext
from fedshuffle.training.callbacks.plateau import EarlyStopping, ReduceOnPlateau
from fedshuffle.training.callbacks.progress import Progress
from fedshuffle.training.callbacks.saving import Checkpointing, TensorBoard
from fedshuffle.training.callbacks.trackers import MLflow, Tracker, WandB

__all__ = [
    "Callback",
    "Checkpointing",
    "EarlyStopping",
    "MLflow",
    "Progress",
    "ReduceOnPlateau",
    "TensorBoard",
    "Tracker",
    "TrainingContext",
    "WandB",
]
