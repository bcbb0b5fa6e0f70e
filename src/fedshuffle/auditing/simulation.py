r"""Clients with closed-form replies, and the audit by simulation for methods without a formula.

The objective of client i is :math:`f_i(x) = \frac{h_i}{2} |x|^2 - \langle t_i, x \rangle`, linear
if :math:`h_i = 0`. Its gradient is :math:`h_i x - t_i`, so local training by the one kernel is a
geometric sum, and no engine is needed.

With :math:`f_i(x) = x_i` the gradients are :math:`e_i` everywhere. So a method, run with its state
over many rounds on drawn cohorts, moves on average along :math:`-\sum_i \hat w_i e_i`, and
:math:`\hat w` can be read off the model.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshuffle import kernel
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.estimation import BATCHES, errors_of_shares
from fedshuffle.auditing.subject import Subject
from fedshuffle.engines.base import Gathered, transformed_gradients
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining, Request
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.methods import Cohort
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, drive

_STEP_SIZE = 2.0**-20  # only effects of first order are seen; a power of two rounds nothing


class QuadraticClients:
    """Answers the requests of a run by formula.

    Client i has the curvature ``h[i]``, and at zero the gradient ``-t[i]``; without these it is
    linear with the gradient ``e_i``. If not ``scaled``, no diagonal rescales the directions.
    """

    def __init__(
        self,
        run: Run,
        h: FloatArray | None = None,
        t: FloatArray | None = None,
        scaled: bool = True,
    ) -> None:
        self.run, self.scaled = run, scaled
        self.h = [0.0] * len(run.federation) if h is None else h.tolist()
        self.t = None if t is None else torch.tensor(t)

    def gradients(self, x: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        """Of these clients, or of all, at one model, a row each."""
        clients = range(len(self.h)) if clients is None else clients
        return torch.stack([self._gradient(client, x) for client in clients])

    def _gradient(self, client: int, x: Tensor) -> Tensor:
        if self.t is not None:
            return self.h[client] * x - self.t[client]
        gradient = torch.zeros_like(x)
        gradient[client] = 1.0
        return gradient

    def __call__(self, request: Request) -> Answer:
        if isinstance(request, FullGradient):
            rows = [self.gradients(x, request.clients.tolist()) for x in request.points]
            if request.chain:
                return transformed_gradients(request, rows[0])
            weights = torch.from_numpy(request.weights).T
            return Answer(torch.stack([weights @ each for each in rows], dim=1))
        x = request.start
        gathered = Gathered(request, lambda tasks: self.gradients(x, _members(tasks)))
        for k, task in enumerate(request.tasks):
            update = self.update(task, x)
            gathered.observe([k], update_norm=float(update.norm()))
            gathered.add([k], update[None])
        return gathered.answer()

    def update(self, task: ClientTask, x: Tensor) -> Tensor:
        """The update of a client after its local training from x."""
        if task.optimiser is not None:
            return self._update_by(task.optimiser, task, x)
        client, coefficients = task.minibatches.client, task.coefficients
        along = coefficients.alpha - coefficients.beta - coefficients.own_gradient
        direction = along * self._gradient(client, x)
        if coefficients.v is not None:
            direction += coefficients.v
        # Each step multiplies the distance so far by 1 - lost, and adds the first step again.
        lost: Any = task.step_size * (coefficients.alpha * self.h[client] + coefficients.mu)
        length: Any = task.minibatches.steps
        scale: Any = coefficients.scale if self.scaled else None
        scale = 1.0 if scale is None else scale
        if lost:
            lost = lost * scale
            length = (1 - (1 - lost) ** length) / lost
        move: Tensor = -task.step_size * length * (direction * scale)
        return move

    def _update_by(self, optimiser: LocalOptimiser, task: ClientTask, x: Tensor) -> Tensor:
        """The update by a local optimiser, step by step."""
        client, c, y = task.minibatches.client, task.coefficients, x.clone()
        at_x, scale = self._gradient(client, x), c.scale if self.scaled else None
        v = c.v
        if c.own_gradient:
            v = -at_x if v is None else v - at_x
        made = optimiser.make([y], task.step_size)
        for _ in range(task.minibatches.steps):
            here = self._gradient(client, y)
            y.grad = kernel.direction(y, x, here, at_x, c.alpha, c.beta, c.mu, v, scale)
            made.step()
        return y - x

    def run_round(
        self,
        state: State,
        watch: Callable[[Request], None] | None = None,
        cohort: Cohort | None = None,
    ) -> State:
        """The state after the next round, with the drawn cohort unless one is given."""

        def answer(request: Request) -> Answer:
            if watch is not None:
                watch(request)
            return self(request)

        return drive(self.run.round(state, cohort), answer)

    def local_training(self, state: State) -> LocalTraining:
        """The request for local training in the next round."""
        seen: list[Request] = []
        self.run_round(state, seen.append)
        assert isinstance(seen[-1], LocalTraining)
        return seen[-1]


def _members(tasks: Sequence[ClientTask]) -> list[int]:
    return [task.minibatches.client for task in tasks]


def simulated_weights(subject: Subject, seed: int, rounds: int) -> tuple[FloatArray, FloatArray]:
    """Effective weights of a method by simulation, not normalised, and their standard errors."""
    work = dataclasses.replace(subject.workload.work, weight_decay=0.0, clip=math.inf)
    run = Run(subject.federation, subject.method, subject.sampling, work, _STEP_SIZE, 1.0, seed)
    clients = QuadraticClients(run)
    state = run.start(torch.zeros(len(run.federation), dtype=torch.float64))
    each = rounds // BATCHES
    moves = []
    for _ in range(1 + BATCHES):
        before = state.x
        for _ in range(each):
            state = clients.run_round(state)
        moves.append((before - state.x).numpy() / (each * _STEP_SIZE))
    moves = moves[1:]  # in the first batch the state settles
    return np.mean(moves, axis=0), errors_of_shares(np.stack(moves))
