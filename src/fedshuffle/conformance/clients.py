r"""Clients whose answers are formulas, and the mean of a method over all cohorts.

The objective of client i is the parabola :math:`f_i(x) = \frac{h_i}{2} |x|^2 - \langle t_i, x
\rangle`, a straight line if :math:`h_i = 0`. Its gradient is :math:`h_i x - t_i`, so a walk by the
one kernel is a geometric sum, and what follows is what the method does, with nothing of an engine.

With such clients a round is an affine map of all that a run remembers, :math:`s \leftarrow A_S s +
b_S`, for nearly every method. Cohorts do not depend on the past, so the expectation follows the
mean map, :math:`E s \leftarrow \bar A \, E s + \bar b`, exactly: no need to draw anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.client_memory import ClientMemory, Shelf
from fedshuffle.conformance.report import ConformanceError, DoesNotApplyError
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.kernel import Order, Probe, Request, Walk
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.methods.servers import Average
from fedshuffle.randomness import Purpose, generator
from fedshuffle.rounds import Run
from fedshuffle.sampling import Cohorts, Optimal, Sampling
from fedshuffle.state import State

SIZES, WEIGHTS = (1, 2, 4, 5), (0.1, 0.3, 0.4, 0.2)
"""Four clients on which every cause of a bias shows: batches of two make (1, 1, 2, 3) steps."""
WORK = LocalWork(batch_size=2)
_COHORTS = 4096


def sizes(method: Method) -> tuple[int, ...]:
    """Examples per client, such that the method is defined."""
    return (3, 3, 3, 3) if method.balanced_only else SIZES


def federation(method: Method, *fields: Any) -> Federation:
    """The four clients, with these examples if any."""
    if fields:
        return Federation.from_arrays(*fields, sizes=sizes(method), weights=WEIGHTS)
    return Federation.from_sizes(sizes(method), WEIGHTS)


def bound(method: Method, sampling: str | Sampling, clients: Federation, **given: Any) -> Run:
    """A run of the method; where it says that it is not defined, so does the check."""
    try:
        return Run(clients, method, sampling, **given)
    except FedShuffleError as reason:
        raise DoesNotApplyError(str(reason)) from reason


def averaged(method: Method) -> Method:
    """The method whose server only adds the update: what is left is the update itself."""
    return dataclasses.replace(method, server=Average())


@final
class Parabolas:
    """Answers the requests of a run by formula.

    Args:
        run: the clients' number and weights are taken from it.
        h: the curvature of each client.
        t: minus the gradient of each client at zero, a row each.
        scaled: whether to follow the diagonal of the steering; without it, what is seen is the
            direction that a method then rescales.
    """

    def __init__(self, run: Run, h: FloatArray, t: FloatArray, scaled: bool = True) -> None:
        if run.method.pooled:  # one client, whose objective is the mean over all examples
            share = np.array(SIZES) / sum(SIZES)
            h, t = (share @ h)[None], (share @ t)[None]
        self.run, self.scaled = run, scaled
        self.h, self.t = torch.tensor(h)[:, None], torch.tensor(t)

    def gradients(self, x: Tensor) -> Tensor:
        """Of all clients at one model, a row each."""
        return self.h * x - self.t

    def __call__(self, request: Request) -> Tensor:
        if isinstance(request, Probe):
            rows = [self.gradients(x)[request.clients.tolist()] for x in request.points]
            weights = torch.tensor(request.weights).T
            return torch.stack([weights @ row for row in rows], dim=1)
        updates = torch.stack([self.update(order, request.start) for order in request.orders])
        weights = request.start.new_tensor([list(order.weights) for order in request.orders])
        return weights.reshape(len(updates), request.sums).T @ updates

    def update(self, order: Order, x: Tensor) -> Tensor:
        """How far a client has walked from x at the end."""
        client, steering = order.minibatches.client, order.steering
        h, g = self.h[client], self.h[client] * x - self.t[client]
        size = x.new_tensor(order.step_size)
        if self.scaled and steering.scale is not None:
            size = size * steering.scale
        step = -size * ((steering.alpha - steering.beta) * g)
        if steering.v is not None:
            step = step - size * steering.v
        # Each step multiplies the distance walked so far by r, and adds the first one again.
        lost = size * (steering.alpha * h + steering.mu)
        steps = order.minibatches.steps
        length = torch.where(lost == 0, float(steps), (1 - (1 - lost) ** steps) / lost)
        return step * length

    def play(self, state: State, watch: Callable[[Request], None] | None = None) -> State:
        """One round."""
        return self.follow(self.run.round(state), watch)

    def follow(
        self,
        requests: Generator[Request, Any, State],
        watch: Callable[[Request], None] | None = None,
    ) -> State:
        """Answer all requests of a round; the state after it."""
        reply = None
        try:
            while True:
                request = requests.send(reply)
                if watch is not None:
                    watch(request)
                reply = self(request)
        except StopIteration as stop:
            after: State = stop.value
            return after

    def walk(self, state: State) -> Walk:
        """What the clients are asked to walk in the next round."""
        seen: list[Request] = []
        self.play(state, seen.append)
        walk = seen[-1]
        assert isinstance(walk, Walk)
        return walk


class Forced(Sampling):
    """Draws the cohort it is told to, with the probabilities of another sampling."""

    def __init__(self, sampling: Sampling, cohort: IntArray) -> None:
        self.p, self.other, self.cohort = sampling.p, sampling, cohort

    @property
    def s(self) -> FloatArray:
        return self.other.s

    def pair_probabilities(self) -> FloatArray:
        return self.other.pair_probabilities()

    def expected_sums(self, v: FloatArray) -> FloatArray:
        return self.other.expected_sums(v)

    def draw(self, seed: int, round: int) -> IntArray:
        return self.cohort

    def cohorts(self, limit: int) -> Cohorts:
        return Cohorts.of([(tuple(self.cohort.tolist()), 1.0)])


class NotAffineError(Exception):
    """A round is no affine map of what is remembered."""


@final
@dataclass(frozen=True)
class MeanMap:
    """The mean over all cohorts of what a round makes of (model, server memory, client memory)."""

    matrix: FloatArray
    constant: FloatArray
    start: FloatArray
    """The mean after the first round in which anybody takes part."""
    d: int
    """The model is the first d numbers."""

    def drift(self) -> FloatArray:
        """How far the model moves in a round once the memory has settled."""
        s = self.start
        for _ in range(3000):
            s = self.matrix @ s + self.constant
        after = self.matrix @ s + self.constant
        moved: FloatArray = (after - s)[: self.d]
        return moved

    def rest(self) -> FloatArray:
        """The model at the fixed point that is reached from the start.

        Some methods preserve a sum (SCAFFOLD: c - sum w_i c_i). So the fixed point is looked for
        among what differs from the start by something in the range of I - A.
        """
        still = np.eye(len(self.matrix)) - self.matrix
        z = np.linalg.lstsq(still @ still, self.constant - still @ self.start, rcond=None)[0]
        s = self.start + still @ z
        if not np.allclose(self.matrix @ s + self.constant, s, rtol=1e-6, atol=1e-8):
            raise ConformanceError("the mean of the method over all cohorts has no fixed point.")
        x: FloatArray = s[: self.d]
        return x


def mean_map(clients: Parabolas) -> MeanMap:
    """The mean map of the run of these clients, read off its own rounds."""
    run, d = clients.run, clients.t.shape[1]
    cohorts = run.sampling.cohorts(_COHORTS)
    if cohorts is None:
        raise DoesNotApplyError(f"the cohorts of {run.sampling!r} are too many to go through.")
    pack = _Packing(clients, [cohort for cohort in cohorts if len(cohort[0])])
    width = len(pack.start)
    matrix, constant = np.zeros((width, width)), np.zeros(width)
    for members, probability in cohorts:
        if not len(members):
            matrix += probability * np.eye(width)
            continue
        after = pack.rounds(members)
        origin = after(np.zeros(width))
        columns = np.stack([after(unit) - origin for unit in np.eye(width)], axis=1)
        try_at = generator(0, Purpose.MONTE_CARLO).random(width)
        predicted = columns @ try_at + origin
        if not np.allclose(after(try_at), predicted, rtol=1e-9, atol=1e-9 * np.abs(origin).max()):
            raise NotAffineError
        matrix += probability * columns
        constant += probability * origin
    return MeanMap(matrix, constant, pack.start, d)


class _Packing:
    """Between states and flat vectors."""

    def __init__(self, clients: Parabolas, cohorts: list[tuple[IntArray, float]]) -> None:
        run = clients.run
        self.clients, self.sampling = clients, run.sampling
        self.pool = self.sampling.pool if isinstance(self.sampling, Optimal) else self.sampling
        self.d = clients.t.shape[1]
        self.n = len(run.federation)
        fresh = run.start(torch.zeros(self.d, dtype=torch.float64))
        self.shelf = None if fresh.clients is None else Shelf(self.d, torch.float64)
        firsts = [self._play(members, fresh) for members, _ in cohorts]
        self.memory = _shapes(firsts[0])
        if any(value.dtype != torch.float64 for value in firsts[0].memory.values()):
            raise NotAffineError
        self.start: FloatArray = np.average(
            [self.flat(first) for first in firsts], axis=0, weights=[share for _, share in cohorts]
        )

    def _play(self, members: IntArray, state: State) -> State:
        run = self.clients.run
        run.sampling = Forced(self.pool, members)
        try:
            return self.clients.play(state)
        finally:
            run.sampling = self.sampling

    def rounds(self, members: IntArray) -> Callable[[FloatArray], FloatArray]:
        """A round of this cohort, from vector to vector."""
        return lambda s: self.flat(self._play(members, self.state(s)))

    def flat(self, state: State) -> FloatArray:
        if _shapes(state) != self.memory:
            raise NotAffineError
        parts = [state.x, *(state.memory[name].reshape(-1) for name in self.memory)]
        if state.clients is not None:
            parts.append(state.clients.rows(np.arange(self.n)).reshape(-1))
        return torch.cat(parts).numpy()

    def state(self, s: FloatArray) -> State:
        lengths = [self.d, *(math.prod(shape) for shape in self.memory.values())]
        x, *rest = torch.split(torch.from_numpy(s[: sum(lengths)].copy()), lengths)
        clients = None
        if self.shelf is not None:
            rows = torch.from_numpy(s[sum(lengths) :].copy()).reshape(self.n, self.d)
            clients = ClientMemory.empty(self.n, self.shelf).updated(np.arange(self.n), rows)
        kept = zip(self.memory.items(), rest, strict=True)
        return State(x, {name: part.reshape(shape) for (name, shape), part in kept}, 1, clients)


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.memory.items()}
