"""The paper's table of characteristics, found by running each method in each condition.

Each function says what exactly is asked. All clients have parabolas (see
:mod:`fedshuffle.conformance.clients`), their weights go by size, a server optimiser is left out
where it is not in question, and a diagonal that rescales coordinates is divided out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle.conformance.clients import Parabolas, averaged, bound, sizes
from fedshuffle.conformance.problems import numbers, sampled
from fedshuffle.conformance.report import DoesNotApplyError
from fedshuffle.conformance.weighing import OPTIMA, effective_weights, resting_point
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.rounds import Run
from fedshuffle.state import State

_CURVATURES = np.array([1.0, 3.0, 0.5, 2.0])
_EQUAL, _UNEQUAL = LocalWork(steps=2, batch_size=2), LocalWork(batch_size=2)
_ONE_STEP = LocalWork(steps=1, batch_size=1000)
_STRETCHED = np.array([1.0, -1.0, 2.0])
_TOLERANCE = 1e-3


def _clients() -> Federation:
    return Federation.from_sizes((1, 2, 4, 5))


def characteristics(method: str | Method) -> dict[str, bool]:
    """What a method can do, by running it; a setting that it refuses, it cannot do.

    >>> found = characteristics("fedavg-rr")
    >>> [name for name, able in found.items() if able]
    ['heterogeneous data', 'reshuffling', 'server step size']
    """
    found = methods.get(method)
    return {name: _able(run, found) for name, run in CHARACTERISTICS.items()}


def _able(run: Callable[[Method], bool], method: Method) -> bool:
    try:
        return run(method)
    except DoesNotApplyError:
        return False


# Where it rests --------------------------------------------------------------------------------


def heterogeneous_data(method: Method) -> bool:
    """Clients have different optima and curvatures, all take part, with equal numbers of steps: in
    the limit of small steps the method rests at the optimum of the objective.
    """
    return _rests_at_the_optimum(method, "full", _EQUAL)


def client_sampling(method: Method) -> bool:
    """It rests there still when two of four clients are drawn uniformly, in the mean over all
    cohorts.
    """
    return _rests_at_the_optimum(method, "uniform:2", _EQUAL)


def unequal_steps(method: Method) -> bool:
    """It rests there still when all take part with different numbers of steps."""
    return _rests_at_the_optimum(method, "full", _UNEQUAL)


def _rests_at_the_optimum(method: Method, sampling: str, work: LocalWork) -> bool:
    plain, clients = averaged(method), _clients()
    run = bound(plain, sampling, clients, work=work, step_size=2.0**-24)
    try:
        found = resting_point(plain, sampling, _CURVATURES, clients, work)
    except DoesNotApplyError:  # no fixed point can be found: see what the mean update weighs
        weights, errors = effective_weights(run)
        return bool((np.abs(weights - clients.weights) <= _TOLERANCE + 5 * errors).all())
    return bool(np.abs(found - _optimum(clients)).max() < _TOLERANCE)


def _optimum(clients: Federation) -> float:
    pull = clients.weights * _CURVATURES
    return float(pull @ OPTIMA[:, 0] / pull.sum())


# How it walks ----------------------------------------------------------------------------------


def reshuffling(method: Method) -> bool:
    """A client's epoch visits each of its examples once, in another order every round."""
    clients = Federation.from_sizes(sizes(method))
    run = bound(averaged(method), "full", clients, work=_UNEQUAL)
    parabolas = _parabolas(run, OPTIMA * _STRETCHED)
    state, orders = run.start(torch.zeros(3, dtype=torch.float64)), set()
    for _ in range(5):
        order = parabolas.walk(state).orders[-1]
        (epoch,) = order.minibatches.epochs()
        once = sorted(epoch.tolist()) == list(range(order.minibatches.size))
        if not (once and order.steering.alpha):
            return False
        orders.add(tuple(epoch.tolist()))
        state = parabolas.play(state)
    return len(orders) > 1


def variance_reduction(method: Method) -> bool:
    """At the optimum clients pull in different directions, and there, once the memory has settled,
    the clients' first steps u_i are smaller than their gradients g_i at the same readiness to move:
    sum w_i |u_i|^2 < 1/2 rho^2 sum w_i |g_i|^2, with u_i per unit step size, and rho how much of a
    move of the model the mean of the u_i answers at once (of plain gradients: all of it, rho = 1).
    """
    run = bound(averaged(method), "full", _clients(), work=_ONE_STEP)
    clients = _parabolas(run, OPTIMA * _STRETCHED)
    weights = torch.tensor(run.federation.weights)
    optimum = torch.full((3,), _optimum(_clients())).double() * torch.tensor(_STRETCHED)
    state = _settled(clients, optimum)
    moved = torch.tensor([1e-3, -1e-3, 1e-3], dtype=torch.float64)
    curvature = float(weights @ clients.h[:, 0])
    noise = rho = 0.0
    rounds = 50  # a memory of what is owed never settles: take the mean
    for _ in range(rounds):
        steps = _steps(clients, state)
        after = _steps(clients, dataclasses.replace(state, x=optimum + moved))
        noise += float(weights @ steps.square().sum(1)) / rounds
        answer = -(weights @ (after - steps)) @ moved / (curvature * moved @ moved)
        rho += float(answer) / rounds
        state = dataclasses.replace(clients.play(state), x=optimum)
    plain = float(weights @ clients.gradients(optimum).square().sum(1))
    return noise < 0.5 * rho**2 * plain


def global_momentum(method: Method) -> bool:
    """The server carries vectors from round to round, and the weighted mean of the clients' first
    steps depends on the gradients of earlier rounds.
    """
    run = bound(averaged(method), "full", _clients(), work=_ONE_STEP)
    one, other = (_parabolas(run, numbers(4, 3, seed=seed).numpy()) for seed in (1, 2))
    x = numbers(3, seed=3)
    weights = torch.tensor(run.federation.weights)
    states = [_settled(clients, x, rounds=3) for clients in (one, other)]
    if not states[0].memory:
        return False
    means = [weights @ _steps(one, state) for state in states]
    return bool((means[0] - means[1]).abs().max() > 1e-9)


def server_step_size(method: Method) -> bool:
    """A server step size of 2 moves the model twice as far in the first round."""
    start = numbers(3, seed=3)
    moves = []
    for size in (1.0, 2.0):
        given = {"work": _EQUAL, "server_step_size": size}
        run = bound(method, sampled(method), _clients(), **given)
        parabolas = _parabolas(run, OPTIMA * _STRETCHED)
        moves.append(parabolas.play(run.start(start)).x - start)
    return bool(torch.allclose(moves[1], 2 * moves[0], rtol=1e-9, atol=1e-12))


def _parabolas(run: Run, optima: FloatArray) -> Parabolas:
    return Parabolas(run, _CURVATURES, _CURVATURES[:, None] * optima, scaled=False)


def _settled(clients: Parabolas, x: Tensor, rounds: int = 250) -> State:
    """The state at a model once it was there for many rounds."""
    state = clients.run.start(x)
    for _ in range(rounds):
        state = dataclasses.replace(clients.play(state), x=x)
    return state


def _steps(clients: Parabolas, state: State) -> Tensor:
    """The first step of every client, per unit step size."""
    walk = clients.walk(state)
    return torch.stack([clients.update(one, walk.start) / one.step_size for one in walk.orders])


CHARACTERISTICS: dict[str, Callable[[Method], bool]] = {
    "heterogeneous data": heterogeneous_data,
    "client sampling": client_sampling,
    "reshuffling": reshuffling,
    "unequal steps": unequal_steps,
    "variance reduction": variance_reduction,
    "global momentum": global_momentum,
    "server step size": server_step_size,
}
