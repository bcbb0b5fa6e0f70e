"""Whether a method moves where it should: nowhere, the same way for all, down the gradient."""

from __future__ import annotations

import numpy as np
import torch

from fedshuffle._arrays import FloatArray
from fedshuffle.conformance.clients import Parabolas, averaged, bound, federation, sizes
from fedshuffle.conformance.problems import drawn_to, numbers, states
from fedshuffle.conformance.report import ConformanceError, equal, shown
from fedshuffle.federation import Federation
from fedshuffle.kernel import Request, Walk
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.rounds import Run
from fedshuffle.sampling import Sampling

_STEP_SIZE = 2.0**-10
_FULL_GRADIENT = LocalWork(steps=1, batch_size=1000)


def rest(method: Method, sampling: str | Sampling) -> None:
    """Every client is at its optimum and no gradient is left, so the model stays where it is."""
    optimum = torch.tensor([1.0, -20.0, 300.0], dtype=torch.float64)
    examples = optimum.repeat(sum(sizes(method)), 1)
    clients = federation(method, examples)
    run = bound(method, sampling, clients, work=LocalWork(epochs=2, batch_size=2))
    problem = drawn_to(examples, run.federation, optimum)
    for state in states(problem, run, 4):
        what = f"no client moves, and yet after round {state.round} the model does"
        equal(state.x, optimum, 1e-9, what)


def order(method: Method) -> None:
    """The clients in another order give the same model, at full participation."""
    permuted = [2, 0, 3, 1]
    targets = numbers(4, 3)
    found = []
    for turn in ([0, 1, 2, 3], permuted):
        each, weights = np.array(sizes(method))[turn], federation(method).weights[turn]
        # Each client holds copies of one example, so that it does not matter in which order.
        rows = targets[turn].repeat_interleave(torch.tensor(each), dim=0)
        if method.pooled:  # there the order of the examples is random: make them all the same
            rows = targets[:1].repeat(int(each.sum()), 1)
        clients = Federation.from_arrays(rows, sizes=each, weights=weights)
        run = bound(method, "full", clients, work=LocalWork(batch_size=2))
        problem = drawn_to(rows, run.federation, numbers(3, seed=1))
        found.append(states(problem, run, 4)[-1].x)
    equal(found[1], found[0], 1e-9, f"the clients in the order {permuted}")


def descent(method: Method) -> None:
    """With full participation, one local step and full gradients it is gradient descent on f.

    Exactly so if it remembers nothing. A method with a memory is one in the long run: where the
    gradient is the same everywhere, its mean move settles at minus the step size times that
    gradient. Of a method with a server optimiser this holds for the update that the optimiser is
    given, and that in turn moves the model to the same side. A diagonal that rescales coordinates
    is divided out.
    """
    plain = averaged(method)
    clients = federation(method)
    run = bound(plain, "full", clients, work=_FULL_GRADIENT, step_size=_STEP_SIZE)
    _settles(Parabolas(run, np.zeros(4), -numbers(4, 4).numpy()))
    if not _remembers(run, numbers(4, 4).numpy()):
        _descends(plain)
    _server(method)


def _settles(clients: Parabolas) -> None:
    rounds, last = 500, 200
    state = clients.run.start(torch.zeros(4, dtype=torch.float64))
    weights = torch.tensor(clients.run.federation.weights)
    gradient = weights @ clients.gradients(state.x)
    moves = []
    for _ in range(rounds):
        walks: list[Request] = []
        after = clients.play(state, walks.append)
        moves.append((after.x - state.x) / _scale(walks[-1], state.x) / _STEP_SIZE)
        state = after
    late = torch.stack(moves[-last:])
    # What a method owes, and pays later, is less than its moves vary, however long one waits.
    spread = float((late - late.mean(0)).abs().max())
    what = "the mean move with full gradients at full participation, over the step size"
    equal(late.mean(0), -gradient, 1e-9 + 4 * spread / last, what)


def _scale(walk: Request, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(walk, Walk)
    scale = walk.orders[0].steering.scale
    return torch.ones_like(x) if scale is None else scale


def _remembers(run: Run, t: FloatArray) -> bool:
    after = Parabolas(run, np.ones(4), t).play(run.start(torch.zeros(4, dtype=torch.float64)))
    return bool(after.memory) or after.clients is not None


def _descends(method: Method) -> None:
    """A few steps by an engine, against gradient descent on the same examples by hand."""
    each = torch.tensor(sizes(method))
    rows = numbers(4, 3).repeat_interleave(each, dim=0)
    if method.local_work(_FULL_GRADIENT).order == "replacement" and method.pooled:
        rows = rows[:1].repeat(len(rows), 1)  # else no draw of examples is a full gradient
    clients = federation(method, rows)
    run = bound(method, "full", clients, work=_FULL_GRADIENT, step_size=0.3)
    objective = run.federation  # pooled, every example counts equally
    targets = torch.stack([part.mean(0) for part in torch.split(rows, objective.sizes.tolist())])
    optimum = torch.tensor(objective.weights) @ targets
    x = start = numbers(3, seed=1)
    for state in states(drawn_to(rows, objective, start), run, 3):
        x = x - 0.3 * (x - optimum)
        what = f"gradient descent with full gradients, round {state.round}"
        equal(state.x, x, 1e-9, what)


def _server(method: Method) -> None:
    """From a fresh start, every coordinate moves to the side to which the update points."""
    x, update = numbers(4), torch.tensor([0.5, -0.25, 0.0, 2.0], dtype=torch.float64)
    given = x.clone(), update.clone()
    after, _ = method.server.step(x, update, 0.25, {})
    if not (torch.equal(x, given[0]) and torch.equal(update, given[1])):
        raise ConformanceError("the server optimiser changes the model or the update it is given.")
    if not torch.equal((after - x).sign(), update.sign()):
        raise ConformanceError(
            f"the server is given the update {shown(update)}: expected a move of these signs,"
            f" found {shown(after - x)}."
        )
