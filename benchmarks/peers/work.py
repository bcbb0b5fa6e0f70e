"""The work that every contestant does: the same arrays, client sizes and cohorts, from one seed.

It needs numpy alone, so that it runs in the environment of every peer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIENTS, COHORT, EPOCHS, BATCH, STEP_SIZE = 200, 16, 2, 32, 0.05
CLASSES, VOCABULARY, LENGTH, SMALLEST = 62, 90, 80, 8
SEED = 2022

DATA = {"logreg": "images", "mlp": "images", "cnn": "images", "lstm": "text"}
"""Which arrays each work takes; its keys are the works."""

SIZES = {"images": (64, 600), "text": (20, 200)}
"""Mean and maximum of the clients' sizes."""


@dataclass(frozen=True)
class Data:
    """All examples, client after client: client i owns rows ``starts[i]:starts[i + 1]``."""

    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def rows(self, client: int) -> slice:
        return slice(int(self.starts[client]), int(self.starts[client + 1]))


def sizes(kind: str) -> NDArray[np.int64]:
    """Log-normal client sizes, scaled so that their mean is as stated after clipping."""
    mean, largest = SIZES[kind]
    spread = np.random.default_rng([SEED, 0]).lognormal(0.0, 0.9, CLIENTS)

    def scaled(scale: float) -> NDArray[np.int64]:
        return np.clip(np.round(scale * spread), SMALLEST, largest).astype(np.int64)

    low, high = 0.0, float(largest)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if scaled(middle).mean() > mean else (middle, high)
    return scaled(low)


def make(kind: str) -> Data:
    """Random images with labels, or random texts with their next characters."""
    rng = np.random.default_rng([SEED, 1])
    owned = sizes(kind)
    n = int(owned.sum())
    if kind == "images":
        images = rng.standard_normal((n, 784), dtype=np.float32)
        return Data(images, rng.integers(CLASSES, size=n), owned)
    text = rng.integers(VOCABULARY, size=(n, LENGTH + 1))
    return Data(np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:]), owned)


def save(folder: Path) -> None:
    """Write all arrays, to be read by :func:`load` in other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in SIZES:
        for name, array in vars(make(kind)).items():
            np.save(folder / f"{kind}-{name}.npy", array)


def load(folder: Path | str, work: str) -> Data:
    """The arrays of a work; images have the shape (1, 28, 28) for the convolutions."""
    arrays = [
        np.load(Path(folder) / f"{DATA[work]}-{name}.npy", allow_pickle=False)
        for name in ("inputs", "labels", "sizes")
    ]
    data = Data(*arrays)
    return data if work != "cnn" else Data(data.inputs.reshape(-1, 1, 28, 28), *arrays[1:])


def cohort(round: int) -> NDArray[np.int64]:
    """Who takes part in a round, where a contestant lets itself be told."""
    rng = np.random.default_rng([SEED, 2, round])
    return np.sort(rng.choice(CLIENTS, COHORT, replace=False))


def steps(owned: NDArray[np.int64]) -> int:
    """Local steps of clients of these sizes: two epochs of batches, the last one smaller."""
    return EPOCHS * int(np.ceil(owned / BATCH).sum())
