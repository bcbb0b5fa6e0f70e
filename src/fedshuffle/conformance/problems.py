"""Tiny problems for real engines: a point that is drawn to its examples, and a linear model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.conformance.clients import federation, sizes
from fedshuffle.engines import Engine, LeanEngine, Loss, Problem
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.randomness import Purpose, generator
from fedshuffle.rounds import Run, simulate
from fedshuffle.state import State


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
    drawn = generator(seed, Purpose.START).normal(size=shape)
    return torch.from_numpy(np.asarray(drawn))


def drawn_to(targets: Tensor, clients: Federation, start: Tensor) -> Problem:
    """The point starts there, and each example draws it to its target."""
    assert len(targets) == clients.offsets[-1] or len(clients) == 1
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
    engine = LeanEngine(problem) if engine is None else engine
    return [state for (state,) in simulate(engine, [run], rounds)]


def sampled(method: Method) -> str:
    """Partial participation, where the method is defined for it."""
    return "full" if method.balanced_only or method.pooled else "uniform:2"
