"""A generated federation whose clients differ in size, inputs and labels.

It is Synthetic(1, 1) of Li et al. (Federated Optimization in Heterogeneous Networks, 2020) with
log-normal sizes: a client draws normal inputs around a mean of its own, and labels them by a linear
model of its own. Nothing is downloaded, so anybody can repeat what was found on it.
"""

import numpy as np
from scipy import special
from torch import nn

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator

CLIENTS, FEATURES, LABELS = 100, 60, 10
TESTS = 4  # examples for testing, for each one to train on
_MEDIAN, _SPREAD = 8, 1.3  # of the sizes, and the deviation of their logarithms


def sizes() -> IntArray:
    """How many examples each client trains on: from 1 to 228."""
    places = (np.arange(CLIENTS) + 0.5) / CLIENTS
    return np.asarray(np.ceil(_MEDIAN * np.exp(_SPREAD * special.ndtri(places))), dtype=np.int64)


def clients(part: str = "train") -> Federation:
    """The examples by client to train on, or others of the same clients to test on."""
    counts = sizes() * (1 if part == "train" else TESTS)
    made = [_examples(client, part, int(count)) for client, count in enumerate(counts)]
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
    return Federation.from_arrays(inputs.astype(np.float32), labels, sizes=counts)


def _examples(client: int, part: str, count: int) -> tuple[FloatArray, IntArray]:
    rng = generator(0, Purpose.SPLIT, client=client)
    of_model, of_inputs = rng.standard_normal(2)
    weights = of_model + rng.standard_normal((FEATURES, LABELS))
    bias = of_model + rng.standard_normal(LABELS)
    middle = of_inputs + rng.standard_normal(FEATURES)
    deviations = np.arange(1, FEATURES + 1) ** -0.6
    drawn = generator(0, Purpose.SPLIT, client=client, part=1 + (part != "train"))
    inputs = middle + deviations * drawn.standard_normal((count, FEATURES))
    return inputs, (inputs @ weights + bias).argmax(axis=1)


def network(hidden: int) -> nn.Module:
    """A network with one hidden layer."""
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, LABELS))
