"""Handwritten digits, split over clients that hold different ones: the data of small studies.

The images come with scikit-learn. Clients take them from a line that is roughly sorted by digit,
from 9 down to 0, so the first clients hold high digits and the last low ones.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator

PIXELS, DIGITS = 16, 10
_MIXING = 1.5  # how far labels stray between clients: 0 sorts the digits strictly


def clients(shares: FloatArray, part: str = "train") -> Federation:
    """The digits by client, by its share; every third example of a client is for testing."""
    rows, owner, tested = split(shares)
    chosen = tested == (part != "train")
    images, labels = _digits()
    sizes = np.bincount(owner[chosen], minlength=len(shares))
    return Federation.from_arrays(images[rows[chosen]], labels[rows[chosen]], sizes=sizes)


def split(shares: FloatArray) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Examples by client, the client of each, and whether it is for testing."""
    labels = _digits()[1].numpy()
    rng, n = generator(0, Purpose.SPLIT), len(labels)
    bounds = np.round(n * np.cumsum(shares) / shares.sum())
    owner = np.searchsorted(bounds, np.arange(n), side="right")
    line = np.argsort(-labels + _MIXING * rng.standard_normal(n), kind="stable")
    shuffled = np.lexsort((rng.random(n), owner))
    place = np.arange(n) - np.searchsorted(owner, owner)  # within the client
    return line[shuffled], owner, place % 3 == 2


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # an extra

    pixels, labels = load_digits(return_X_y=True)
    small = pixels.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, PIXELS)
    return torch.tensor(small / 16, dtype=torch.float32), torch.tensor(labels)


def model() -> nn.Module:
    """Logistic regression, from zero."""
    linear = nn.Linear(PIXELS, DIGITS)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
