r"""Clients with quadratic losses, and many runs on them in lockstep.

The loss of an example is :math:`f_{ij}(x) = \frac12 (x - m_{ij})^T Diag(a_{ij}) (x - m_{ij})`, so
that optima, constants of the theory and effective objectives are known exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle._arrays import FloatArray
from fedshuffle.engines import Engine, Problem
from fedshuffle.federation import Federation
from fedshuffle.testing.problems import Point
from fedshuffle.theory import ExactConstants, quadratic_constants
from fedshuffle.training.rounds import Run, simulate


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Clients with quadratic losses: curvatures and an optimum for each example."""

    sizes: tuple[int, ...]
    curvatures: FloatArray
    """One row per example: a number per direction, or one for all directions."""
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


def toy(sizes: Sequence[int]) -> Quadratics:
    """The paper's toy problem: clients share the canonical basis, all curvatures are 1."""
    basis = np.eye(sum(sizes))
    return Quadratics(tuple(sizes), np.ones_like(basis), basis, start=np.zeros(len(basis)))


def half_squares(model: Point, curvatures: Tensor, optima: Tensor) -> Tensor:
    """The mean over examples of half the weighted squared distance to their optima."""
    values: Tensor = curvatures * (model.x - optima).square()
    return values.sum() / (2 * len(optima))


def trajectory(engine: Engine, runs: Sequence[Run], rounds: int) -> Iterator[Tensor]:
    """The models of all runs, one row each: at the start, and after each round in lockstep."""
    yield engine.problem.start.expand(len(runs), -1)
    for states in simulate(engine, runs, rounds):
        yield torch.stack([state.x for state in states])
