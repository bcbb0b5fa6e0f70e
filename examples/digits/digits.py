"""Handwritten digits over clients of very different sizes: the model and data of this example."""

import functools

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedshuffle import Federation
from fedshuffle.randomness import Purpose, generator


def network(hidden: int = 32) -> nn.Module:
    """A small network. Its first parameters follow from the seed of the run."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def clients(number: int = 20, spread: float = 1.0, seed: int = 0) -> Federation:
    """What the clients train on."""
    return _split(number, spread, seed)[0]


def held_out(number: int = 20, spread: float = 1.0, seed: int = 0) -> Federation:
    """The fifth of every client's digits that is only for evaluation."""
    return _split(number, spread, seed)[1]


@functools.cache
def _split(number: int, spread: float, seed: int) -> tuple[Federation, Federation]:
    """Deal the digits to clients with log-normal sizes, and hold back a fifth at each client."""
    images, labels = load_digits(return_X_y=True)
    rng = generator(seed, Purpose.SPLIT)
    share = rng.lognormal(sigma=spread, size=number)
    # Five digits for everyone, so that there is one to hold back; the rest by share.
    spare = len(labels) - 5 * number
    sizes = 5 + np.floor(spare * share / share.sum()).astype(np.int64)
    sizes[np.argmax(sizes)] += len(labels) - sizes.sum()

    dealt = rng.permutation(len(labels))
    owner = np.repeat(np.arange(number), sizes)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    back = place < np.repeat(sizes // 5, sizes)
    pixels = torch.tensor(images[dealt] / 16, dtype=torch.float32)
    digits = torch.tensor(labels[dealt])
    return (
        Federation.from_arrays(pixels[~back], digits[~back], client_ids=owner[~back]),
        Federation.from_arrays(pixels[back], digits[back], client_ids=owner[back]),
    )
