"""Models and data for the tests of engines."""

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import Federation


def data(shape: tuple[int, ...], classes: int, sizes: list[int]) -> Federation:
    rng = np.random.default_rng(0)
    n = sum(sizes)
    x = rng.normal(size=(n, *shape))
    y = rng.integers(classes, size=n)
    return Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), sizes=sizes)


class Tokens(nn.Module):
    """Embedding and recurrent cell, with an input of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.cell = nn.Linear(4 + 5, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.zeros(tokens.shape[0], 5, dtype=self.out.weight.dtype)
        for k in range(tokens.shape[1]):
            hidden = self.cell(torch.cat([self.embedding(tokens[:, k]), hidden], dim=1)).tanh()
        logits: Tensor = self.out(hidden)
        return logits


def token_data(sizes: list[int]) -> Federation:
    rng = np.random.default_rng(1)
    n = sum(sizes)
    return Federation.from_arrays(
        rng.integers(7, size=(n, 4)), rng.integers(3, size=n), sizes=sizes
    )


def text_data(sizes: list[int]) -> Federation:
    text = np.random.default_rng(2).integers(7, size=(sum(sizes), 6))
    return Federation.from_arrays(text[:, :-1], text[:, 1:], sizes=sizes)


ENGINES = ["reference", "vectorized", "sequential", "sequential:2", "sequential:2:processes"]


SIZES = [2, 5, 9]
