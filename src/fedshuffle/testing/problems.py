"""The four clients of the checks: with quadratic objectives, or with examples for real engines."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.engines import Engine, Loss, Problem, SequentialEngine
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.methods.servers import Average
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Sampling
from fedshuffle.state import State
from fedshuffle.testing.report import DoesNotApplyError
from fedshuffle.training import Result, train
from fedshuffle.training.rounds import Run, simulate

SIZES, WEIGHTS = (1, 2, 4, 5), (0.1, 0.3, 0.4, 0.2)
"""Four clients on which every cause of a bias shows: batches of two make (1, 1, 2, 3) steps."""
WORK = LocalWork(batch_size=2)


def sizes(method: Method) -> tuple[int, ...]:
    """Examples per client, such that the method is defined."""
    return (3, 3, 3, 3) if method.balanced_only else SIZES


def federation(method: Method, *fields: Any) -> Federation:
    """The four clients, with these examples if any."""
    if fields:
        return Federation.from_arrays(*fields, sizes=sizes(method), weights=WEIGHTS)
    return Federation.from_sizes(sizes(method), WEIGHTS)


def partial_sampling(method: Method) -> str:
    """Partial participation, if the method is defined for it."""
    return "full" if method.balanced_only or method.pooled else "uniform:2"


def make_run(method: Method, sampling: str | Sampling, clients: Federation, **given: Any) -> Run:
    """A run of the method, without the local work that the method fixes; the check does not apply
    if the method is not defined.
    """
    if "work" in given:
        given["work"] = method.drop_fixed(given["work"])
    with error_context(lambda reason: DoesNotApplyError(str(reason)), FedShuffleError):
        return Run(clients, method, sampling, **given)


def without_server_optimiser(method: Method) -> Method:
    """The method with a server that only adds the update."""
    return dataclasses.replace(method, server=Average())


def quadratic_clients(
    run: Run, h: FloatArray, t: FloatArray, scaled: bool = True
) -> QuadraticClients:
    """Clients with these curvatures and, at zero, minus these gradients; pooled if the run is."""
    if run.method.pooled:  # one client with the mean objective over all examples
        share = np.array(SIZES) / sum(SIZES)
        h, t = (share @ h)[None], (share @ t)[None]
    return QuadraticClients(run, h, t, scaled)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, always the same."""
    return torch.from_numpy(np.asarray(generator(seed, Purpose.START).normal(size=shape)))


class Point(nn.Module):
    """A model that is just a vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


def half_squared_distance(model: Point, targets: Tensor) -> Tensor:
    """Mean of 1/2 |x - target|^2."""
    return 0.5 * (model.x - targets).square().sum(1).mean()


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


def tensors(state: State) -> dict[str, Tensor]:
    """All tensors of a state: its fields, with the names of tensors in mappings."""
    found = {"x": state.x}
    for owner in ("method_state", "optimiser_state"):
        parts = getattr(state, owner)
        found |= {f"{owner} {name}": parts[name] for name in sorted(parts)}
    if state.clients is not None:
        found["clients"] = state.clients.rows(np.arange(len(state.clients)))
    return found


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
