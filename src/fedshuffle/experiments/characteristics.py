"""The paper's table of characteristics, measured by running each method in each condition.

docs/research/characteristics.md defines each and says where the paper differs; ``python -m
fedshuffle.experiments.characteristics`` prints its table. All clients have parabolas (see
:mod:`fedshuffle.testing.problems`) and weights by size; the server optimiser is left out where it
is not in question, and a diagonal that rescales coordinates is divided out.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.state import State
from fedshuffle.testing import problems
from fedshuffle.testing.problems import OPTIMA, DoesNotApplyError, limit_point, measured_weights
from fedshuffle.training.rounds import Run

_CLIENTS = Federation.from_sizes((1, 2, 4, 5))
_CURVATURES = np.array([1.0, 3.0, 0.5, 2.0])
_EQUAL, _UNEQUAL = LocalWork(steps=2, batch_size=2), LocalWork(batch_size=2)
_ONE_STEP = LocalWork(steps=1, batch_size=1000)
_STRETCHED = np.array([1.0, -1.0, 2.0])
_TOLERANCE = 1e-3


def characteristics(method: str | Method) -> dict[str, bool]:
    """What a method can do, by running it; a setting that it refuses, it cannot do.

    >>> found = characteristics("fedavg-rr")
    >>> [name for name, able in found.items() if able]
    ['heterogeneous data', 'reshuffling', 'server step size']
    """
    found = dict.fromkeys(CHARACTERISTICS, False)
    for name, run in CHARACTERISTICS.items():
        with suppress(DoesNotApplyError):
            found[name] = run(methods.get(method))
    return found


def reaches_the_optimum(sampling: str, work: LocalWork, method: Method) -> bool:
    """In the limit of small steps, and in the mean over all cohorts."""
    plain = problems.without_server_optimiser(method)
    try:
        found = limit_point(plain, sampling, _CURVATURES, _CLIENTS, work)
    except DoesNotApplyError:  # no fixed point: compare the weights of the mean update instead
        run = problems.make_run(plain, sampling, _CLIENTS, work=work, step_size=2.0**-24)
        weights, errors = measured_weights(run)
        return bool((np.abs(weights - _CLIENTS.weights) <= _TOLERANCE + 5 * errors).all())
    return bool(np.abs(found - _optimum()).max() < _TOLERANCE)


def _optimum() -> float:
    curvatures = _CLIENTS.weights * _CURVATURES
    return float(curvatures @ OPTIMA[:, 0] / curvatures.sum())


def reshuffling(method: Method) -> bool:
    """A client's epoch visits each of its examples once, in another order every round."""
    run = _everyone(method, _UNEQUAL, Federation.from_sizes(problems.sizes(method)))
    clients = _quadratic(run, OPTIMA * _STRETCHED)
    state, orders = run.start(torch.zeros(3, dtype=torch.float64)), set()
    for _ in range(5):
        task = clients.local_training(state).tasks[-1]
        (epoch,) = task.minibatches.epochs()
        once = sorted(epoch.tolist()) == list(range(task.minibatches.size))
        if not (once and task.coefficients.alpha):
            return False
        orders.add(tuple(epoch.tolist()))
        state = clients.run_round(state)
    return len(orders) > 1


def variance_reduction(method: Method) -> bool:
    """At the optimum the clients' gradients g_i differ. There, once the state has settled, the
    clients' first steps u_i are smaller than their gradients at the same responsiveness:
    sum w_i |u_i|^2 < 1/2 rho^2 sum w_i |g_i|^2, with u_i per unit step size, and rho the share of a
    move of the model to which the mean of the u_i responds at once (1 for plain gradients).
    """
    clients = _quadratic(_everyone(method, _ONE_STEP), OPTIMA * _STRETCHED)
    weights = torch.tensor(clients.run.federation.weights)
    optimum = torch.full((3,), _optimum()).double() * torch.tensor(_STRETCHED)
    state = _settled(clients, optimum)
    moved = torch.tensor([1e-3, -1e-3, 1e-3], dtype=torch.float64)
    curvature = float(weights @ torch.tensor(clients.h, dtype=weights.dtype))
    noise = rho = 0.0
    rounds = 50  # some state never settles: take the mean
    for _ in range(rounds):
        steps = _steps(clients, state)
        after = _steps(clients, dataclasses.replace(state, x=optimum + moved))
        noise += float(weights @ steps.square().sum(1)) / rounds
        response = -(weights @ (after - steps)) @ moved / (curvature * moved @ moved)
        rho += float(response) / rounds
        state = dataclasses.replace(clients.run_round(state), x=optimum)
    plain = float(weights @ clients.gradients(optimum).square().sum(1))
    return noise < 0.5 * rho**2 * plain


def global_momentum(method: Method) -> bool:
    """The server carries vectors from round to round, and the weighted mean of the clients' first
    steps depends on the gradients of earlier rounds.
    """
    x = problems.numbers(3, seed=3)
    run = _everyone(method, _ONE_STEP)
    both = [_quadratic(run, problems.numbers(4, 3, seed=seed).numpy()) for seed in (1, 2)]
    states = [_settled(clients, x, rounds=3) for clients in both]
    if not states[0].method_state:
        return False
    weights = torch.tensor(run.federation.weights)
    means = [weights @ _steps(both[0], state) for state in states]
    return bool((means[0] - means[1]).abs().max() > 1e-9)


def server_step_size(method: Method) -> bool:
    """A server step size of 2 moves the model twice as far in the first round."""
    start, sampling, moves = problems.numbers(3, seed=3), problems.partial_sampling(method), []
    for size in (1.0, 2.0):
        run = problems.make_run(method, sampling, _CLIENTS, work=_EQUAL, server_step_size=size)
        moves.append(_quadratic(run, OPTIMA * _STRETCHED).run_round(run.start(start)).x - start)
    return bool(torch.allclose(moves[1], 2 * moves[0], rtol=1e-9, atol=1e-12))


def _everyone(method: Method, work: LocalWork, federation: Federation = _CLIENTS) -> Run:
    """All clients take part; without a server optimiser."""
    plain = problems.without_server_optimiser(method)
    return problems.make_run(plain, "full", federation, work=work)


def _quadratic(run: Run, optima: FloatArray) -> QuadraticClients:
    """Clients with these optima."""
    return problems.quadratic_clients(run, _CURVATURES, _CURVATURES[:, None] * optima, scaled=False)


def _settled(clients: QuadraticClients, x: Tensor, rounds: int = 250) -> State:
    """The state at a model after many rounds there."""
    state = clients.run.start(x)
    for _ in range(rounds):
        state = dataclasses.replace(clients.run_round(state), x=x)
    return state


def _steps(clients: QuadraticClients, state: State) -> Tensor:
    """The first step of every client, per unit step size."""
    request = clients.local_training(state)
    updates = [clients.update(task, request.start) / task.step_size for task in request.tasks]
    return torch.stack(updates)


CHARACTERISTICS: dict[str, Callable[[Method], bool]] = {
    "heterogeneous data": partial(reaches_the_optimum, "full", _EQUAL),
    "client sampling": partial(reaches_the_optimum, "uniform:2", _EQUAL),
    "reshuffling": reshuffling,
    "unequal steps": partial(reaches_the_optimum, "full", _UNEQUAL),
    "variance reduction": variance_reduction,
    "global momentum": global_momentum,
    "server step size": server_step_size,
}

PAPER: dict[str, str] = {
    "fednova": "yynynny",
    "fedlin": "ynnyynn",
    "mime": "yynnyyn",
    "fedrr": "ynynnnn",
    "fedavg-rr": "yyynnny",
    "fednova-rr": "yyyynny",
    "fedshuffle": "yyyynny",
    "fedshuffle-mvr": "yyyyyyy",
}
"""The paper's own table: yes or no for each characteristic, in order."""


def measured() -> dict[str, dict[str, bool]]:
    """The characteristics of all registered methods, by name."""
    return {method.name: characteristics(method) for method in methods.available()}


def differences(found: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, str]]:
    """The marks that differ from the paper's, as (method, characteristic)."""
    return [
        (method, name)
        for method, marks in found.items()
        for name, said in zip(CHARACTERISTICS, PAPER.get(method, ""))
        if marks[name] != (said == "y")
    ]


def table(found: Mapping[str, Mapping[str, bool]]) -> str:
    """The characteristics as a Markdown table; a star marks a difference from the paper.

    >>> print(table({"mine": {"reshuffling": True, "unequal steps": False}}))
    | method | reshuffling | unequal steps |
    |---|:-:|:-:|
    | `mine` | yes |  |
    """
    names = list(next(iter(found.values())))
    other = set(differences(found))
    lines = [f"| method | {' | '.join(names)} |", f"|---{'|:-:' * len(names)}|"]
    for method, marks in found.items():
        words = {True: ("yes", "yes\\*"), False: ("", "no\\*")}
        cells = [words[marks[name]][(method, name) in other] for name in names]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measured()))
