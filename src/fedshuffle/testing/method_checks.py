"""What every method must do, whatever it minimises: rest at the optimum, descend the gradient, be
reproducible, and cost what it states.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import engines, losses
from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.engines import ReferenceEngine
from fedshuffle.federation import Federation
from fedshuffle.kernel import Answer, FullGradient, LocalTraining, Request, StepCoefficients
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling
from fedshuffle.state import State
from fedshuffle.testing.problems import (
    WORK,
    ensure,
    equal,
    federation,
    make_run,
    needs_linear_steps,
    numbers,
    partial_sampling,
    point_problem,
    quadratic_clients,
    regression,
    short,
    sizes,
    states,
    tensors,
    trained,
    without_server_optimiser,
)
from fedshuffle.training.rounds import Run, drive, run_round

_SMALL_STEP = 2.0**-10
_ONE_STEP = LocalWork(steps=1, batch_size=1000)  # along the full gradient
_TWO_EPOCHS = LocalWork(epochs=2, batch_size=2)
_ROUNDS = 6
_SETTLED = 4  # by this round every method has settled


def rest(method: Method, sampling: str | Sampling) -> None:
    """Every client is at its optimum, so the model does not move."""
    optimum = torch.tensor([1.0, -20.0, 300.0], dtype=torch.float64)
    clients = federation(method, optimum.repeat(sum(sizes(method)), 1))
    run = make_run(method, sampling, clients, work=_TWO_EPOCHS)
    needs_linear_steps(run)
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
        run = make_run(method, "full", clients, work=WORK)
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
    run = make_run(plain, "full", federation(method), work=_ONE_STEP, step_size=_SMALL_STEP)
    needs_linear_steps(run)
    start = run.start(torch.zeros(4, dtype=torch.float64))
    stateless = len(tensors(quadratic_clients(run, np.ones(4), t).run_round(start))) == 1
    # Without state the first rounds are like all others.
    _settles(quadratic_clients(run, np.zeros(4), -t), *((3, 3) if stateless else (500, 200)))
    if stateless:
        _descends(plain)
    _server_moves_along(method)


def _settles(clients: QuadraticClients, rounds: int, last: int) -> None:
    state = clients.run.start(torch.zeros(4, dtype=torch.float64))
    gradient = torch.tensor(clients.run.federation.weights) @ clients.gradients(state.x)
    moves = []
    for _ in range(rounds):
        scale = clients.local_training(state).tasks[0].coefficients.scale
        after = clients.run_round(state)
        moves.append((after.x - state.x) / (1.0 if scale is None else scale) / _SMALL_STEP)
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
    run = make_run(method, "full", clients, work=_ONE_STEP, step_size=0.3)
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


def resume(method: Method) -> None:
    """Stopped in the middle and resumed from the checkpoint, it ends with the same bits."""

    def final(rounds: int, out: Path, resume: bool = False) -> Tensor:
        model = trained(method, rounds, _TWO_EPOCHS, seed=3, out=out, resume=resume).model
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    with tempfile.TemporaryDirectory() as folder:
        whole = final(_ROUNDS, Path(folder, "whole"))
        final(_ROUNDS // 2, Path(folder, "parts"))
        parts = final(_ROUNDS, Path(folder, "parts"), resume=True)
    equal(parts, whole, 0.0, "resumed in the middle, the model after the last round")


def workers(method: Method) -> None:
    """Split over two threads or two processes, it gives the same model up to rounding."""
    _agree(method, "sequential", ("sequential:2", "sequential:2:processes"), "full")


def agreement(method: Method) -> None:
    """Every engine agrees with the reference, with sampled clients and unequal steps."""
    others = ("sequential", "vectorized", "sequential:2")
    _agree(method, "reference", others, partial_sampling(method))


def _agree(method: Method, reference: str, others: tuple[str, ...], sampling: str) -> None:
    problem, clients = regression(method)
    run = make_run(method, sampling, clients, work=_TWO_EPOCHS, step_size=0.05, seed=1)

    def final(engine: str) -> dict[str, Tensor]:
        return tensors(states(problem, run, _ROUNDS, engines.make(engine, problem))[-1])

    expected = final(reference)
    for name in others:
        found = final(name)
        for part, value in expected.items():
            what = f"{part} after {_ROUNDS} rounds by the engine {name}, against {reference}"
            equal(found.get(part, torch.nan), value, 1e-10 * (1 + float(value.abs().max())), what)


def purity(method: Method) -> None:
    """The same seed gives the same bits, another seed another model if anything is random; and a
    round leaves the state before it as it was.
    """
    problem, clients = regression(method)

    def run_of(seed: int) -> Run:
        given = {"work": _TWO_EPOCHS, "step_size": 0.05, "seed": seed}
        return make_run(method, partial_sampling(method), clients, **given)

    def trajectory(seed: int, elsewhere: int) -> Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(elsewhere)  # must not matter
            return torch.stack([state.x for state in states(problem, run_of(seed), _ROUNDS)])

    first, other = trajectory(0, 1), trajectory(1, 1)
    equal(trajectory(0, 2), first, 0.0, "the models of another run with the same seed")
    if _drawn(run_of(0)) == _drawn(run_of(1)):
        equal(other, first, 0.0, "nothing is random, but with another seed the models")
    else:
        ensure(
            not torch.equal(first, other),
            "another seed draws other clients or minibatches: expected another model, found the"
            " same.",
        )
    run = run_of(0)
    before = states(problem, run, 2)[-1]
    copies = {part: tensor.clone() for part, tensor in tensors(before).items()}
    run_round(engines.make("sequential", problem), [run], [before])
    for part, tensor in tensors(before).items():
        equal(tensor, copies[part], 0.0, f"a round must not change the state before it: {part}")


def _drawn(run: Run) -> list[object]:
    """All cohorts, and the minibatches of their clients."""
    drawn: list[object] = []
    for round in range(_ROUNDS):
        cohort = run.cohort(round)
        for client, steps in zip(cohort.clients.tolist(), cohort.done.tolist(), strict=True):
            stream = run.workload.minibatches(client, steps, run.seed, round)
            drawn.append((client, [batch.tolist() for batch in stream]))
    return drawn


def gradients(method: Method) -> None:
    """In a settled round a client computes ``gradients_per_step`` per step, and ``full_gradients``.

    They are counted by the loss, as the reference engine calls it.
    """
    calls = 0

    def counting(model: nn.Module, *fields: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return losses.squared_error(model, *fields)

    problem, clients = regression(method, counting)
    run = make_run(method, partial_sampling(method), clients, work=WORK, step_size=0.05)
    engine = ReferenceEngine(problem)
    counts = []
    for rounds in (1, _SETTLED, _SETTLED + 1):  # at first, engines also try the model
        calls = 0
        states(problem, run, rounds, engine)
        counts.append(calls)
    cohort, direction = run.cohort(_SETTLED), run.method.direction
    stated = direction.gradients_per_step * cohort.done.sum()
    stated += direction.full_gradients * len(cohort.clients)
    found = counts[-1] - counts[-2]
    equal(found, stated, 0, f"gradients computed in round {_SETTLED + 1}, against those stated")


def messages(method: Method) -> None:
    """The bytes in the history are those stated, and the stated vectors are enough for local
    training, which uses no other vector and makes no other trip.
    """
    direction, model = method.direction, regression(method)[0].start
    for record in trained(method, _SETTLED, WORK).history:
        size = len(model) * model.element_size() * record["clients"]
        for way in ("down", "up"):
            sent = 0 if method.pooled else round(getattr(direction, way) * size)
            equal(record[f"bytes_{way}"], sent, 0, f"bytes sent {way} per round")
    units = {"down": "vectors to a client", "up": "vectors from a client", "trips": "trips"}
    for name, least in _needed(method).items():
        stated = getattr(direction, name)
        ensure(
            stated == least if name == "trips" else stated >= least,
            f"{units[name]} per round: expected at least {least:g} for the local training, found"
            f" {name} = {stated:g} stated.",
        )


def _needed(method: Method) -> dict[str, float]:
    """The smallest costs with which a settled round is possible."""
    run = make_run(method, partial_sampling(method), federation(method))
    clients = quadratic_clients(run, np.ones(4), numbers(4, 4).numpy())
    state = run.start(numbers(4, seed=1))
    for _ in range(_SETTLED):
        state = clients.run_round(state)
    asked, training = _requests(clients, state)
    used = training.tasks[0].coefficients
    trains = bool(used.alpha or used.beta)  # else the server can take that step itself
    points = {id(point) for request in asked for point in request.points}
    vectors = int(used.v is not None and bool(used.v.any())) + int(used.scale is not None)
    # Whether local training depends on the full gradients of the same round.
    others = _requests(clients, state, times=2.0)[1].tasks
    pairs = zip(others, training.tasks, strict=True)
    depends = any(not _same(now.coefficients, then.coefficients) for now, then in pairs)
    return {
        "down": max(1, len(points)) + trains * vectors,
        "up": int(trains or not asked) + 0.01 * bool(asked),
        "trips": len(asked) + 1 if trains and depends else 1,
    }


def _requests(
    clients: QuadraticClients, state: State, times: float = 1.0
) -> tuple[list[FullGradient], LocalTraining]:
    """The requests of the next round, where answers are this many times the right ones."""
    seen: list[Request] = []

    def answer(request: Request) -> Answer:
        seen.append(request)
        right = clients(request)
        return dataclasses.replace(right, sums=times * right.sums)

    drive(clients.run.round(state), answer)
    assert isinstance(seen[-1], LocalTraining)
    return [request for request in seen if isinstance(request, FullGradient)], seen[-1]


def _same(one: StepCoefficients, other: StepCoefficients) -> bool:
    names = [field.name for field in dataclasses.fields(StepCoefficients)]
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)
