"""Tiny problems for real engines: a point with squared distances, and a linear model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines import Engine, Loss, Problem, SequentialEngine
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.randomness import Purpose, generator
from fedshuffle.state import State
from fedshuffle.testing.clients import federation, make_run, sizes
from fedshuffle.training import Result, train
from fedshuffle.training.rounds import Run, simulate


class Point(nn.Module):
    """A model that is just a vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


def half_squared_distance(model: Point, targets: Tensor) -> Tensor:
    """Mean of 1/2 |x - target|^2."""
    return 0.5 * (model.x - targets).square().sum(1).mean()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, always the same."""
    return torch.from_numpy(np.asarray(generator(seed, Purpose.START).normal(size=shape)))


def point_problem(clients: Federation, start: Tensor) -> Problem:
    """Half the squared distance of a point to its examples."""
    return Problem(Point(start), half_squared_distance, clients)


def regression(method: Method, loss: Loss = losses.squared_error) -> tuple[Problem, Federation]:
    """A linear model of 3 parameters on noisy examples; the federation before any pooling."""
    examples = sum(sizes(method))
    clients = federation(method, numbers(examples, 2), numbers(examples, 1, seed=1))
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=2 + k))
    return Problem(model, loss, method.clients(clients)), clients


def states(problem: Problem, run: Run, rounds: int, engine: Engine | None = None) -> list[State]:
    """The states after each round."""
    engine = SequentialEngine(problem) if engine is None else engine
    return [state for (state,) in simulate(engine, [run], rounds)]


def partial_sampling(method: Method) -> str:
    """Partial participation, if the method is defined for it."""
    return "full" if method.balanced_only or method.pooled else "uniform:2"


def trained(method: Method, rounds: int, work: LocalWork, **more: Any) -> Result:
    """The result of training the linear model, with partial participation where possible."""
    problem, clients = regression(method)
    make_run(method, partial_sampling(method), clients, work=work)
    return train(
        problem.replica(),
        clients,
        loss=losses.squared_error,
        rounds=rounds,
        method=copy.deepcopy(method),  # a new process has none of the old one's objects
        sampling=partial_sampling(method),
        work=method.drop_fixed(work),
        step_size=0.05,
        **more,
    )
