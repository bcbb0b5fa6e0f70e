r"""The audit of a method without a formula: let it play, and watch where it goes.

With clients whose objectives are linear, :math:`f_i(x) = x_i`, every gradient is known and the same
everywhere: :math:`\nabla f_i = e_i`. So the method itself, run with its memory over many rounds on
drawn cohorts, moves on average along :math:`-\sum_i \hat w_i e_i`, and :math:`\hat w` can be read
off the model. The answers to its requests are formulas; nothing is trained.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Probe, Request, Walk
from fedshuffle.rounds import Run
from fedshuffle.state import State

if TYPE_CHECKING:
    from fedshuffle.auditing.audit import _Setting

_BATCHES = 32
"""The rounds are split in so many parts to find the standard error."""

_STEP_SIZE = 2.0**-20
"""So small that only effects of first order are seen; a power of two, which rounds nothing."""


def answer(request: Request, clients: int) -> Tensor:
    """What clients with the objectives ``f_i(x) = x_i`` answer to a request."""
    if isinstance(request, Probe):
        gradients = torch.zeros(clients, request.weights.shape[1], dtype=torch.float64)
        gradients[torch.from_numpy(request.clients)] = torch.from_numpy(request.weights)
        return torch.stack([gradients.T] * len(request.points), dim=1)
    return _walked(request)


def _walked(walk: Walk) -> Tensor:
    sums = walk.start.new_zeros(walk.sums, len(walk.start))
    for order in walk.orders:
        steering = order.steering
        direction = torch.zeros_like(walk.start) if steering.v is None else steering.v.clone()
        direction[order.minibatches.client] += steering.alpha - steering.beta
        if steering.scale is not None:
            direction = direction * steering.scale
        # With a pull back, a walk of k steps is as long as 1 + r + ... + r^(k-1) steps without.
        r = 1 - order.step_size * steering.mu
        steps = order.minibatches.steps
        length = steps if r == 1 else (1 - r**steps) / (1 - r)
        update = -order.step_size * length * direction
        for total, weight in zip(sums, order.weights, strict=True):
            if weight:
                total += weight * update
    return sums


def play(run: Run, state: State) -> State:
    """One round of a run whose clients have linear objectives."""
    requests = run.round(state)
    reply = None
    try:
        while True:
            reply = answer(requests.send(reply), len(run.federation))
    except StopIteration as stop:
        after: State = stop.value
        return after


def played(setting: _Setting, seed: int, rounds: int) -> tuple[FloatArray, FloatArray]:
    """The pull of a method found by playing, and the standard error of the effective weights."""
    if rounds < _BATCHES:
        raise FedShuffleError(f"{rounds} rounds are too few to judge by: use at least {_BATCHES}.")
    method = setting.method
    work = dataclasses.replace(setting.workload.work, weight_decay=0.0, clip=math.inf)
    run = Run(setting.federation, method, setting.sampling, work, _STEP_SIZE, 1.0, seed)
    state = run.start(torch.zeros(len(run.federation), dtype=torch.float64))
    each = rounds // _BATCHES
    for _ in range(each):  # let the memory settle
        state = play(run, state)
    moves = []
    for _ in range(_BATCHES):
        before = state.x
        for _ in range(each):
            state = play(run, state)
        moves.append((before - state.x).numpy() / (each * _STEP_SIZE))
    mean = np.mean(moves, axis=0)
    if not mean.sum() > 0:
        raise FedShuffleError(
            f"{method.name} does not walk downhill: over {rounds} rounds with linear clients the"
            " model did not move along their gradients."
        )
    shares = np.stack(moves) / mean.sum()
    errors: FloatArray = shares.std(axis=0, ddof=1) / np.sqrt(_BATCHES)
    return mean, errors
