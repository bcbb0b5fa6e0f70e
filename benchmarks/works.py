"""The works that the benchmarks measure: a model, its clients, and how they train."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import Federation, LocalWork, losses
from fedshuffle.engines import Loss, Problem
from fedshuffle.models import CharLSTM, ResNet
from fedshuffle.training.rounds import Run
from fedshuffle.transforms import Transform

STEP_SIZE = 0.05


@dataclass(frozen=True)
class Work:
    """What to train, and on what: 2 local epochs of plain SGD, averaged."""

    model: Callable[[], nn.Module]
    clients: Callable[[], Federation]
    batch_size: int = 32
    sampling: str = "uniform:16"
    loss: Loss = losses.cross_entropy
    runs: int = 1
    """Number of runs in lockstep, as in a comparison over seeds."""

    def build(self, transforms: Sequence[Transform] = ()) -> tuple[Problem, list[Run]]:
        torch.manual_seed(0)
        problem = Problem(self.model(), self.loss, self.clients())
        work = LocalWork(epochs=2, batch_size=self.batch_size)
        settings = "fedavg-rr", self.sampling, work, STEP_SIZE
        runs = [
            Run(problem.federation, *settings, seed=seed, transforms=transforms)
            for seed in range(self.runs)
        ]
        return problem, runs


def sizes(
    clients: int, mean: float, largest: int = 600
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Log-normal client sizes, from 8 on."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(mean) - 0.4, 0.9, clients).astype(np.int64), 8, largest)


def images(shape: tuple[int, ...], classes: int, clients: int, mean: float) -> Federation:
    """Random images or rows over clients of log-normal sizes."""
    rng, of = np.random.default_rng(1), sizes(clients, mean)
    n = int(of.sum())
    return Federation.from_arrays(
        rng.standard_normal((n, *shape), dtype=np.float32), rng.integers(classes, size=n), sizes=of
    )


def texts(clients: int, mean: float) -> Federation:
    """Random sequences of 80 characters with the next character as the label at each position."""
    rng, of = np.random.default_rng(1), sizes(clients, mean, 200)
    text = rng.integers(90, size=(int(of.sum()), 81))
    return Federation.from_arrays(text[:, :-1], text[:, 1:], sizes=of)


def points() -> Federation:
    """The paper's toy problem: unit vectors, owned by clients of 1, 2 and 3 examples."""
    return Federation.from_arrays(np.eye(6, dtype=np.float32), sizes=[1, 2, 3])


class Point(nn.Module):
    """A model that is just a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(6))


def half_squared_distance(model: Point, targets: Tensor) -> Tensor:
    """Mean of ``1/2 |x - target|^2``."""
    return 0.5 * (model.x - targets).square().sum(1).mean()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 62),
    )


def mlp(hidden: int = 200, features: int = 784) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 62))


flat = functools.partial(images, (784,), 62, 200, 64)

WORKS = {
    "toy quadratic": Work(Point, points, 1, "full", loss=half_squared_distance, runs=64),
    "digits logreg 64-10": Work(
        lambda: nn.Linear(64, 10), lambda: images((64,), 10, 100, 18), 8, "full"
    ),
    "logreg 784-62": Work(lambda: nn.Linear(784, 62), flat),
    "mlp 784-200-62": Work(mlp, flat),
    "small cnn": Work(cnn, lambda: images((1, 28, 28), 62, 50, 64), sampling="uniform:4"),
    "lstm 2x256": Work(lambda: CharLSTM(hidden=256), lambda: texts(50, 48), sampling="uniform:12"),
    "resnet-18 gn": Work(ResNet, lambda: images((3, 32, 32), 100, 30, 16), sampling="uniform:12"),
}
