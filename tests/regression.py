"""Least squares over clients that disagree, with every gradient also in numpy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle import Federation, LocalWork, Method, methods
from fedshuffle.engines import Problem, ReferenceEngine
from fedshuffle.local_work import Minibatches
from fedshuffle.methods import Cohort
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, simulate
from tests.problems import Point

Floats = NDArray[np.float64]
Direction = Callable[[int, Floats, Any], Floats]
"""Of client i, at its model y, on the rows of a minibatch."""

SEED = 5


def squared_residual(model: Point, rows: Tensor, values: Tensor) -> Tensor:
    """Mean of 1/2 (<row, x> - value)^2."""
    return 0.5 * (rows @ model.x - values).square().mean()


@dataclass(frozen=True)
class Clients:
    """Client i owns the rows ``a[i]`` and the values ``t[i]``; its weight is ``w[i]``."""

    a: list[Floats]
    t: list[Floats]
    w: Floats

    @classmethod
    def drawn(cls, sizes: list[int], weights: list[float], d: int = 3, seed: int = 0) -> "Clients":
        """Well conditioned each, with different Hessians and different minimisers."""
        rng = np.random.default_rng(seed)
        a = []
        for i, m in enumerate(sizes):
            noise = 0.3 * rng.normal(size=(m, d))
            a.append((0.6 + 0.2 * i) * (np.sqrt(d) * np.eye(d)[np.arange(m) % d] + noise))
        t = [rows @ (2 * rng.normal(size=d)) for rows in a]
        return cls(a, t, np.array(weights) / np.sum(weights))

    @property
    def d(self) -> int:
        return int(self.a[0].shape[1])

    @property
    def federation(self) -> Federation:
        return Federation.from_arrays(
            torch.from_numpy(np.concatenate(self.a)),
            torch.from_numpy(np.concatenate(self.t)),
            sizes=[len(t) for t in self.t],
            weights=self.w,
        )

    def problem(self) -> Problem:
        return Problem(Point(self.d), squared_residual, self.federation)

    def gradient(self, i: int, x: Floats, rows: Any = slice(None)) -> Floats:
        a, t = self.a[i][rows], self.t[i][rows]
        gradient: Floats = a.T @ (a @ x - t) / len(t)
        return gradient

    def hessian(self, i: int) -> Floats:
        hessian: Floats = self.a[i].T @ self.a[i] / len(self.t[i])
        return hessian

    def minimiser(self, i: int) -> Floats:
        at = np.linalg.solve(self.hessian(i), -self.gradient(i, np.zeros(self.d)))
        return np.asarray(at, dtype=np.float64)

    @property
    def optimum(self) -> Floats:
        """Where ``sum_i w_i grad f_i = 0``."""
        h = sum(w * self.hessian(i) for i, w in enumerate(self.w))
        g = sum(w * self.gradient(i, np.zeros(self.d)) for i, w in enumerate(self.w))
        return np.linalg.solve(h, -np.asarray(g))

    def estimate(self, cohort: Cohort, x: Floats) -> Floats:
        """``sum_S w/p grad f_i(x)``."""
        shares = zip(cohort.clients, cohort.weight / cohort.probability, strict=True)
        return np.asarray(sum(share * self.gradient(i, x) for i, share in shares))

    def local_steps(
        self, x: Floats, minibatches: Minibatches, gamma: float, direction: Direction
    ) -> Floats:
        """The model of a client after local steps along a direction."""
        y = x
        for rows in minibatches:
            y = y - gamma * direction(minibatches.client, y, rows)
        return y


def whole(epochs: int | list[int]) -> LocalWork:
    """Steps with full gradients: one an epoch."""
    return LocalWork(epochs=epochs, batch_size=100)


def make_run(
    clients: Clients,
    method: str | Method,
    sampling: Any = "full",
    work: LocalWork | None = None,
    step: Any = 0.05,
    server: Any = 1.0,
) -> Run:
    method = methods.get(method)
    work = None if work is None else method.drop_fixed(work)
    return Run(clients.federation, method, sampling, work, step, server, SEED)


def trained(clients: Clients, run: Run, rounds: int) -> list[State]:
    """The states after each round, by the reference engine."""
    problem = Problem(Point(clients.d), squared_residual, run.federation)
    return [state for (state,) in simulate(ReferenceEngine(problem), [run], rounds)]


def models(states: list[State]) -> Floats:
    return np.stack([state.x.numpy() for state in states])


def streams(run: Run, cohort: Cohort) -> list[Minibatches]:
    """The minibatches of each client of a cohort; the library's, tested elsewhere."""
    return [
        run.workload.minibatches(int(i), int(steps), SEED, cohort.round)
        for i, steps in zip(cohort.clients, cohort.done, strict=True)
    ]


def kept(state: State) -> Floats:
    """What all clients keep."""
    assert state.clients is not None
    rows: Floats = state.clients.rows(np.arange(len(state.clients))).numpy()
    return rows
