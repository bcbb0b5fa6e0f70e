"""The examples: scikit-learn's digits, dealt to clients of very different sizes.

A real client reads what lies on its own machine instead: change ``load_data`` to do so.
"""

import numpy as np
import torch
from flwr.app import Context
from sklearn.datasets import load_digits
from torch import Tensor

from fedshuffle.data import partition


def load_data(context: Context) -> tuple[Tensor, Tensor]:
    """This client's own images and labels."""
    client = int(context.node_config["partition-id"])
    clients = int(context.node_config["num-partitions"])
    images, labels = _digits(held_out=False)
    mine = torch.from_numpy(partition.lognormal(len(labels), clients, spread=3.0) == client)
    return images[mine], labels[mine]


def load_test() -> tuple[Tensor, Tensor]:
    """Every fifth digit: no client trains on these, the server evaluates by them."""
    return _digits(held_out=True)


def _digits(held_out: bool) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    rows = (np.arange(len(labels)) % 5 == 0) == held_out
    return torch.tensor(images[rows] / 16, dtype=torch.float32), torch.tensor(labels[rows])
