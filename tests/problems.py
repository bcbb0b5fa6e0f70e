"""Small problems with known answers, for tests of training."""

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import Federation
from fedshuffle.engines import Problem


class Point(nn.Module):
    """A model that is just a vector."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d, dtype=torch.float64))


def half_squared_distance(model: Point, targets: Tensor) -> Tensor:
    """Mean of 1/2 |x - target|^2."""
    return 0.5 * (model.x - targets).square().sum(1).mean()


def minus_inner_product(model: Point, directions: Tensor) -> Tensor:
    """Mean of -<direction, x>: the gradient is the same everywhere."""
    return -(directions @ model.x).mean()


def copies(sizes: list[int], points: Tensor, weights: list[float] | None = None) -> Federation:
    """Client i owns ``sizes[i]`` copies of ``points[i]``: local training has no randomness left."""
    rows = torch.repeat_interleave(points, torch.tensor(sizes), dim=0)
    return Federation.from_arrays(rows, sizes=sizes, weights=weights)


def quadratic(federation: Federation) -> Problem:
    """The sum of squared distances to the examples."""
    d = federation.fields[0].shape[1]
    return Problem(Point(d), half_squared_distance, federation)


def unit_vectors(sizes: list[int], weights: list[float] | None = None) -> Problem:
    """Client i always moves along the i-th axis, by exactly its steps times its step size."""
    federation = copies(sizes, torch.eye(len(sizes), dtype=torch.float64), weights)
    return Problem(Point(len(sizes)), minus_inner_product, federation)


def targets(n: int, d: int, seed: int = 0) -> Tensor:
    """Random points, one per client."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))
