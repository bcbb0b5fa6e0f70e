"""The model and the data of the app, and the settings of its runs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import LocalWork

SIZES = [5, 40, 17]
SETTINGS: dict[str, Any] = {
    "sampling": "uniform:2",
    "work": LocalWork(epochs=2, batch_size=4),
    "step_size": 0.05,
    "seed": 7,
}


def model() -> nn.Module:
    """With dropout, so that the clients' own randomness shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def everything() -> tuple[Tensor, Tensor]:
    """The data of all clients, one after another."""
    draw = np.random.default_rng(0)
    inputs = torch.from_numpy(draw.normal(size=(sum(SIZES), 8)).astype(np.float32))
    return inputs, torch.from_numpy(draw.integers(3, size=sum(SIZES)))


def own(client: int) -> tuple[Tensor, ...]:
    """The data of one client."""
    return tuple(torch.split(field, SIZES)[client] for field in everything())
