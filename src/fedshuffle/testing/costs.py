"""Whether a method's stated costs are true: gradients, vectors sent, round trips."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.engines import ReferenceEngine
from fedshuffle.kernel import FullGradient, LocalTraining, Request, StepCoefficients
from fedshuffle.methods import Method
from fedshuffle.state import State
from fedshuffle.testing.clients import WORK, federation, make_run, quadratic_clients
from fedshuffle.testing.problems import numbers, partial_sampling, regression, states, trained
from fedshuffle.testing.report import ensure, equal
from fedshuffle.training.rounds import drive

_SETTLED = 4  # by this round every method has settled


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
        for way, vectors in {"down": direction.down, "up": direction.up}.items():
            sent = 0 if method.pooled else round(vectors * size)
            equal(record[f"bytes_{way}"], sent, 0, f"bytes sent {way} per round")
    for name, least in _needed(method).items():
        stated = getattr(direction, name)
        unit = {"down": "vectors to a client", "up": "vectors from a client"}.get(name, name)
        ensure(
            stated == least if name == "trips" else stated >= least,
            f"{unit} per round: expected at least {least:g} for the local training, found"
            f" {name} = {stated:g} stated.",
        )


def _needed(method: Method) -> dict[str, float]:
    """The smallest costs with which a settled round is possible."""
    run = make_run(method, partial_sampling(method), federation(method))
    clients = quadratic_clients(run, np.ones(4), numbers(4, 4).numpy())
    state = run.start(numbers(4, seed=1))
    for _ in range(_SETTLED):
        state = clients.run_round(state)
    seen: list[Request] = []
    clients.run_round(state, seen.append)
    asked = [request for request in seen if isinstance(request, FullGradient)]
    training = seen[-1]
    assert isinstance(training, LocalTraining)
    used = training.tasks[0].coefficients
    trains = bool(used.alpha or used.beta)  # else the server can take that step itself
    points = {id(point) for request in asked for point in request.points}
    vectors = int(used.v is not None and bool(used.v.any())) + int(used.scale is not None)
    answered = trains and bool(asked) and _uses_answers(clients, state, training)
    return {
        "down": max(1, len(points)) + trains * vectors,
        "up": int(trains or not asked) + 0.01 * bool(asked),
        "trips": len(asked) + 1 if answered else 1,
    }


def _uses_answers(clients: QuadraticClients, state: State, training: LocalTraining) -> bool:
    """Whether local training depends on the full gradients of the same round."""
    seen: list[Request] = []

    def doubled(request: Request) -> Tensor:
        seen.append(request)
        return 2 * clients(request)

    drive(clients.run.round(state), doubled)
    assert isinstance(seen[-1], LocalTraining)
    pairs = zip(seen[-1].tasks, training.tasks, strict=True)
    return any(not _same(now.coefficients, then.coefficients) for now, then in pairs)


def _same(one: StepCoefficients, other: StepCoefficients) -> bool:
    names = [field.name for field in dataclasses.fields(StepCoefficients)]
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)
