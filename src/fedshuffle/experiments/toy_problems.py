r"""Clients with quadratic losses, many runs on them in lockstep, and the experiments' problems.

The loss of an example is :math:`f_{ij}(x) = \frac12 (x - m_{ij})^T Diag(a_{ij}) (x - m_{ij})`, so
that optima, constants of the theory and effective objectives are known exactly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle._arrays import FloatArray
from fedshuffle._terminal import progress_bar
from fedshuffle.engines import Engine, Problem, VectorizedEngine
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator
from fedshuffle.testing.problems import Point
from fedshuffle.theory import ExactConstants, quadratic_constants
from fedshuffle.training.rounds import Run, simulate


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Clients with quadratic losses: curvatures and an optimum for each example."""

    sizes: tuple[int, ...]
    curvatures: FloatArray  # one row per example: a number per direction, or one for all directions
    optima: FloatArray
    start: FloatArray

    @property
    def constants(self) -> ExactConstants:
        """L, mu, G, B, sigma, P, delta and the optimum, exactly."""
        hessians = self.curvatures[:, :, None] * np.eye(self.optima.shape[1])
        return quadratic_constants(hessians, self.optima, sizes=self.sizes)

    @property
    def hessian(self) -> FloatArray:
        """The diagonal of the objective's Hessian; every example has the same weight."""
        return np.asarray(np.broadcast_to(self.curvatures, self.optima.shape).mean(axis=0))

    @property
    def problem(self) -> Problem:
        """The problem for an engine.

        With one curvature for all directions it is a linear regression on the number ``sqrt(a)``,
        which the vectorized engine solves in closed form: several times as fast.
        """
        a, m = torch.from_numpy(self.curvatures), torch.from_numpy(self.optima)
        start = torch.from_numpy(self.start)
        if self.curvatures.shape[1] == 1:
            federation = Federation.from_arrays(a.sqrt(), a.sqrt() * m, sizes=self.sizes)
            line = nn.Linear(1, len(start), bias=False, dtype=torch.float64)
            line.weight = nn.Parameter(start[:, None].clone())
            return Problem(line, losses.squared_error, federation)
        return Problem(Point(start), half_squares, Federation.from_arrays(a, m, sizes=self.sizes))


def half_squares(model: Point, curvatures: Tensor, optima: Tensor) -> Tensor:
    """The mean over examples of half the weighted squared distance to their optima."""
    values: Tensor = curvatures * (model.x - optima).square()
    return values.sum() / (2 * len(optima))


def trajectory(engine: Engine, runs: Sequence[Run], rounds: int) -> Iterator[Tensor]:
    """The models of all runs, one row each: at the start, and after each round in lockstep."""
    yield engine.problem.start.expand(len(runs), -1)
    for states in simulate(engine, runs, rounds):
        yield torch.stack([state.x for state in states])


def squared_distances(
    problem: Problem, runs: Sequence[Run], rounds: int, optimum: Tensor | float, progress: bool
) -> FloatArray:
    """``|x - optimum|^2`` for each run (a row) after each round."""
    models = trajectory(VectorizedEngine(problem), runs, rounds)
    text = f"{len(runs)} runs in R^{len(problem.start)}"
    with progress_bar(progress, MofNCompleteColumn(), "rounds", TimeRemainingColumn()) as bars:
        after = bars.track(islice(models, 1, None), rounds, description=text)
        return np.stack([(x - optimum).square().sum(1).numpy() for x in after], axis=-1)


# The problems of the experiments ----------------------------------------------------------------

_DIMENSIONS = 16  # errors are sums over this many directions, which is cheaper than as many seeds
_SIZES, _ROWS = (2, 4, 6), np.split(np.arange(12), [2, 6])
"""Of three clients: how many examples, and which."""


def toy(sizes: Sequence[int]) -> Quadratics:
    """The paper's toy problem: clients share the canonical basis, all curvatures are 1."""
    basis = np.eye(sum(sizes))
    return Quadratics(tuple(sizes), np.ones_like(basis), basis, start=np.zeros(len(basis)))


def _normal(shape: tuple[int, ...], stream: int) -> FloatArray:
    return generator(0, Purpose.START, round=stream).normal(size=shape) / math.sqrt(shape[-1])


def alike() -> Quadratics:
    """Three clients with one optimum, the origin: G = 0, and all noise is that of the examples.

    Half of the examples are steep (curvature 1) with optima on one side, half are flat (1/2) with
    optima on the other. Curvature and optimum are correlated, as in the worst case of the theorem;
    with equal curvatures reshuffling would leave even less, eta^3.
    """
    side = np.tile([1.0, -1.0], 6)[:, None]
    curvatures = np.where(side > 0, 1.0, 0.5)
    optima = side / curvatures * _normal((1, _DIMENSIONS), 0) + _normal((12, _DIMENSIONS), 1)
    for mine in _ROWS:
        a = curvatures[mine]
        optima[mine] -= (a * optima[mine]).sum(axis=0) / a.sum()
    return Quadratics(_SIZES, curvatures, optima, start=np.zeros(_DIMENSIONS))


def apart() -> Quadratics:
    """Three clients that differ in their optima and curvatures: they drift."""
    curvatures = np.array([1, 1, 1, 0.5, 1, 0.5, *[0.5] * 6])[:, None]
    optima = 0.5 * _normal((12, _DIMENSIONS), 2)
    for mine, own in zip(_ROWS, _normal((3, _DIMENSIONS), 3), strict=True):
        optima[mine] += own
    optima -= (curvatures * optima).sum(axis=0) / curvatures.sum()
    return Quadratics(_SIZES, curvatures, optima, start=np.zeros(_DIMENSIONS))


def many() -> Quadratics:
    """A hundred clients with 1 to 8 examples, the larger the fewer; all curvatures are 1."""
    sizes = tuple(int(size) for size in np.repeat([1, 2, 4, 8], [40, 30, 20, 10]))
    own = _normal((len(sizes), _DIMENSIONS), 4)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    optima = np.repeat(own, sizes, axis=0) + 0.25 * _normal((sum(sizes), _DIMENSIONS), 5)
    optima -= optima.mean(axis=0)
    away = _normal((_DIMENSIONS,), 6)
    return Quadratics(sizes, np.ones((sum(sizes), 1)), optima, start=away / np.linalg.norm(away))


def equal() -> Quadratics:
    """Ten clients with eight examples each, which differ in all optima and curvatures."""
    draw = generator(0, Purpose.START, round=8)
    curvatures = draw.uniform(0.25, 1.0, size=(80, _DIMENSIONS))
    optima = np.repeat(_normal((10, _DIMENSIONS), 9), 8, axis=0) + _normal((80, _DIMENSIONS), 10)
    optima -= (curvatures * optima).sum(axis=0) / curvatures.sum(axis=0)
    away = _normal((_DIMENSIONS,), 6)
    return Quadratics((8,) * 10, curvatures, optima, start=away / np.linalg.norm(away))


def similar(delta: float) -> Quadratics:
    """Three clients whose Hessians differ by delta, with curvatures from 1 down to 1/256.

    The steepest direction is the same for all, and makes L = 1, which limits MVR without local
    steps. Elsewhere Hessians differ by delta, or by nine tenths of the curvature. Every direction
    has the same share of f at the start.
    """
    sizes, sign = (1, 1, 2), np.array([1.0, 1.0, -1.0])
    steepness = 2.0 ** -np.arange(9)
    apart = np.where(steepness < 1, np.minimum(delta, 0.9 * steepness), 0.0)
    gradients = _normal((4, 9), 7)  # of the examples, at the optimum
    gradients = 0.1 * (gradients - gradients.mean(axis=0))
    curvatures = np.repeat(steepness + sign[:, None] * apart, sizes, axis=0)
    return Quadratics(sizes, curvatures, gradients / curvatures, start=1 / np.sqrt(steepness))
