"""The model and the data of config.toml. Replace both by your own.

The data are scikit-learn's 569 tumours with 30 measurements each, malignant or benign, as if they
came from ten clinics that differ in size and in how many of their tumours are malignant.
"""

import functools

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from fedshuffle import Federation
from fedshuffle.data import partition


def model(hidden: int = 16) -> nn.Module:
    """The model. Its first parameters follow from the seed of the run."""
    return nn.Sequential(nn.Linear(30, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def clients() -> Federation:
    """What the clients train on."""
    return _split(held_out=False)


def held_out() -> Federation:
    """A quarter of every clinic's tumours, only for evaluation."""
    return _split(held_out=True)


@functools.cache
def _split(held_out: bool) -> Federation:
    measurements, labels = load_breast_cancer(return_X_y=True)
    # Standardise the columns: a step size that suits one of them should suit all.
    measurements = (measurements - measurements.mean(axis=0)) / measurements.std(axis=0)
    owners = partition.dirichlet(labels, clients=10, alpha=1.0)
    rows = np.zeros(len(labels), dtype=bool)
    for client in range(10):
        own = np.flatnonzero(owners == client)
        rows[own[::4]] = True
    if not held_out:
        rows = ~rows
    return Federation.from_arrays(
        torch.tensor(measurements[rows], dtype=torch.float32),
        torch.tensor(labels[rows]),
        client_ids=[f"clinic {owner}" for owner in owners[rows]],
    )
