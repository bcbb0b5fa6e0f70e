"""Whether a method costs what it says: gradients computed, vectors sent, trips to the clients."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.conformance.clients import WORK, Parabolas, bound, federation
from fedshuffle.conformance.problems import numbers, regression, sampled, states
from fedshuffle.conformance.report import ConformanceError, equal
from fedshuffle.engines import LoopEngine
from fedshuffle.kernel import Probe, Request, Steering, Walk
from fedshuffle.methods import Method
from fedshuffle.rounds import Run
from fedshuffle.state import State
from fedshuffle.training import train

_SETTLED = 4
"""By this round no method starts any more."""


def gradients(method: Method) -> None:
    """In a settled round a client computes ``gradients_per_step`` a step, and ``full_gradients``.

    They are counted by the loss, as the reference engine calls it.
    """
    calls = 0

    def counting(model: nn.Module, *fields: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return losses.squared_error(model, *fields)

    problem, clients = regression(method, counting)
    run = bound(method, sampled(method), clients, work=WORK, step_size=0.05)
    engine = LoopEngine(problem)
    counts = []
    for rounds in (1, _SETTLED, _SETTLED + 1):  # the first time engines also look at the model
        calls = 0
        states(problem, run, rounds, engine)
        counts.append(calls)
    cohort, direction = run.cohort(_SETTLED), run.method.direction
    stated = direction.gradients_per_step * cohort.done.sum()
    stated += direction.full_gradients * len(cohort.clients)
    found = counts[-1] - counts[-2]
    equal(found, stated, 0, f"gradients computed in round {_SETTLED + 1}, beside those stated")


def messages(method: Method) -> None:
    """What the history says was sent is what is stated, and that is enough for what is used."""
    problem, clients = regression(method)
    run = bound(method, sampled(method), clients, work=WORK)
    direction = method.direction
    result = train(
        problem.replica(),
        clients,
        loss=losses.squared_error,
        rounds=_SETTLED,
        method=method,
        sampling=sampled(method),
        work=WORK,
        step_size=0.05,
    )
    for record in result.history:
        size = len(problem.start) * problem.start.element_size() * record["clients"]
        for way, vectors in {"down": direction.down, "up": direction.up}.items():
            travels = 0 if method.pooled else round(vectors * size)
            equal(record[f"bytes_{way}"], travels, 0, f"bytes sent {way} in a round")
    _needed(method, run)


def _needed(method: Method, run: Run) -> None:
    """No walk uses a vector, and no trip is made, that the stated cost has no room for."""
    run = bound(method, run.sampling if not method.pooled else "full", federation(method))
    clients = Parabolas(run, np.ones(4), numbers(4, 4).numpy())
    state = run.start(numbers(4, seed=1))
    for _ in range(_SETTLED):
        state = clients.play(state)
    probes, walk = _asked(clients, state)
    steering = walk.orders[0].steering
    walks = bool(steering.alpha or steering.beta)  # else the server can take that step itself
    points = {id(point) for probe in probes for point in probe.points}
    down = max(1, len(points)) + (walks * _vectors(steering))
    up = int(walks or not probes) + 0.01 * bool(probes)
    answered = walks and bool(probes) and _uses_answers(clients, state, walk)
    trips = len(probes) + 1 if answered else 1
    direction = method.direction
    for name, least in {"down": down, "up": up, "trips": trips}.items():
        stated = getattr(direction, name)
        if stated < least or (name == "trips" and stated != least):
            what = "vectors to a client" if name == "down" else "vectors from a client"
            unit = "trips to the clients" if name == "trips" else what
            raise ConformanceError(
                f"{unit} in a round: expected at least {least:g} from what the walk needs, found"
                f" {name} = {stated:g} stated."
            )


def _vectors(steering: Steering) -> int:
    """How many vectors the steering is made of."""
    used = steering.v is not None and bool(steering.v.any())
    return int(used) + int(steering.scale is not None)


def _asked(clients: Parabolas, state: State) -> tuple[list[Probe], Walk]:
    seen: list[Request] = []
    clients.play(state, seen.append)
    walk = seen[-1]
    assert isinstance(walk, Walk)
    return [request for request in seen if isinstance(request, Probe)], walk


def _uses_answers(clients: Parabolas, state: State, walk: Walk) -> bool:
    """Whether the walk depends on what was probed in the same round."""
    requests = clients.run.round(state)
    request = next(requests)
    while isinstance(request, Probe):
        request = requests.send(2 * clients(request))
    return any(
        not _same(now.steering, then.steering)
        for now, then in zip(request.orders, walk.orders, strict=True)
    )


def _same(one: Steering, other: Steering) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a, b)
        return a is b or a == b

    names = [field.name for field in dataclasses.fields(Steering)]
    return all(equal(getattr(one, name), getattr(other, name)) for name in names)
