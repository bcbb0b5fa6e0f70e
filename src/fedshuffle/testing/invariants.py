"""Whether a method rests at the optimum, ignores the order of clients and descends the gradient."""

from __future__ import annotations

import numpy as np
import torch

from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.federation import Federation
from fedshuffle.kernel import LocalTraining, Request
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling
from fedshuffle.testing.clients import (
    federation,
    make_run,
    quadratic_clients,
    sizes,
    without_server_optimiser,
)
from fedshuffle.testing.problems import numbers, point_problem, states
from fedshuffle.testing.report import ensure, equal, short

_STEP_SIZE = 2.0**-10
_FULL_GRADIENT = LocalWork(steps=1, batch_size=1000)


def rest(method: Method, sampling: str | Sampling) -> None:
    """Every client is at its optimum, so the model does not move."""
    optimum = torch.tensor([1.0, -20.0, 300.0], dtype=torch.float64)
    clients = federation(method, optimum.repeat(sum(sizes(method)), 1))
    run = make_run(method, sampling, clients, work=LocalWork(epochs=2, batch_size=2))
    for state in states(point_problem(run.federation, optimum), run, 4):
        what = f"no client moves, and yet after round {state.round} the model does"
        equal(state.x, optimum, 1e-9, what)


def order(method: Method) -> None:
    """The clients in another order give the same model, at full participation."""
    permuted = [2, 0, 3, 1]
    targets = numbers(4, 3)
    found = []
    for turn in ([0, 1, 2, 3], permuted):
        each, weights = np.array(sizes(method))[turn], federation(method).weights[turn]
        # Each client holds copies of one example, so that the order of examples does not matter.
        rows = targets[turn].repeat_interleave(torch.tensor(each), dim=0)
        if method.pooled:  # there the order of the examples is random: make them all the same
            rows = targets[:1].repeat(int(each.sum()), 1)
        clients = Federation.from_arrays(rows, sizes=each, weights=weights)
        run = make_run(method, "full", clients, work=LocalWork(batch_size=2))
        problem = point_problem(run.federation, numbers(3, seed=1))
        found.append(states(problem, run, 4)[-1].x)
    equal(found[1], found[0], 1e-9, f"the clients in the order {permuted}")


def descent(method: Method) -> None:
    """With full participation, one local step and full gradients it is gradient descent on f.

    This is exact for a method without state. A method with state is tested in the long run: with a
    constant gradient, its mean move settles at minus the step size times that gradient. For a
    method with a server optimiser this holds for the update that the optimiser gets, and the
    optimiser moves every coordinate to the same side. A diagonal that rescales coordinates is
    divided out.
    """
    plain, t = without_server_optimiser(method), numbers(4, 4).numpy()
    run = make_run(plain, "full", federation(method), work=_FULL_GRADIENT, step_size=_STEP_SIZE)
    _settles(quadratic_clients(run, np.zeros(4), -t))
    start = run.start(torch.zeros(4, dtype=torch.float64))
    after = quadratic_clients(run, np.ones(4), t).run_round(start)
    if not after.method_state and not after.optimiser_state and after.clients is None:
        _descends(plain)
    _server_moves_along(method)


def _settles(clients: QuadraticClients) -> None:
    rounds, last = 500, 200
    state = clients.run.start(torch.zeros(4, dtype=torch.float64))
    gradient = torch.tensor(clients.run.federation.weights) @ clients.gradients(state.x)
    moves = []
    for _ in range(rounds):
        seen: list[Request] = []
        after = clients.run_round(state, seen.append)
        assert isinstance(seen[-1], LocalTraining)
        scale = seen[-1].tasks[0].coefficients.scale
        moves.append((after.x - state.x) / (1.0 if scale is None else scale) / _STEP_SIZE)
        state = after
    late = torch.stack(moves[-last:])
    # A delayed update leaves an error of at most the spread of the moves.
    spread = float((late - late.mean(0)).abs().max())
    what = "the mean move with full gradients at full participation, over the step size"
    equal(late.mean(0), -gradient, 1e-9 + 4 * spread / last, what)


def _descends(method: Method) -> None:
    """A few steps by an engine, against gradient descent on the same examples by hand."""
    rows = numbers(4, 3).repeat_interleave(torch.tensor(sizes(method)), dim=0)
    if method.work.get("order") == "replacement" and method.pooled:
        rows = rows[:1].repeat(len(rows), 1)  # else no draw of examples is a full gradient
    clients = federation(method, rows)
    run = make_run(method, "full", clients, work=_FULL_GRADIENT, step_size=0.3)
    objective = run.federation  # pooled, every example counts equally
    targets = torch.stack([part.mean(0) for part in torch.split(rows, objective.sizes.tolist())])
    optimum = torch.tensor(objective.weights) @ targets
    x = start = numbers(3, seed=1)
    for state in states(point_problem(objective, start), run, 3):
        x = x - 0.3 * (x - optimum)
        equal(state.x, x, 1e-9, f"gradient descent with full gradients, round {state.round}")


def _server_moves_along(method: Method) -> None:
    """From a fresh start, every coordinate moves to the side to which the update points."""
    x, update = numbers(4), torch.tensor([0.5, -0.25, 0.0, 2.0], dtype=torch.float64)
    before = x.clone(), update.clone()
    after, _ = method.server.step(x, update, 0.25, {})
    ensure(
        torch.equal(x, before[0]) and torch.equal(update, before[1]),
        "the server optimiser changes the model or the update it is given.",
    )
    ensure(
        torch.equal((after - x).sign(), update.sign()),
        f"the server is given the update {short(update)}: expected a move of these signs, found"
        f" {short(after - x)}.",
    )
