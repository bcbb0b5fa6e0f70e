r"""The four clients of the checks, and the mean of a method over all cohorts.

With quadratic clients (:class:`fedshuffle.auditing.simulation.QuadraticClients`) a round is an
affine map of the whole state of a run, :math:`s \leftarrow A_S s + b_S`, for nearly every method.
Cohorts do not depend on the past, so the expectation follows the mean map,
:math:`E s \leftarrow \bar A \, E s + \bar b`, exactly: nothing needs to be drawn.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.methods.servers import Average
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Cohorts, Sampling
from fedshuffle.sampling.base import MAX_COHORTS
from fedshuffle.state import State
from fedshuffle.testing.report import DoesNotApplyError, ensure
from fedshuffle.training.client_state import ClientState, ClientStateStore
from fedshuffle.training.rounds import Run

SIZES, WEIGHTS = (1, 2, 4, 5), (0.1, 0.3, 0.4, 0.2)
"""Four clients on which every cause of a bias shows: batches of two make (1, 1, 2, 3) steps."""
WORK = LocalWork(batch_size=2)


def sizes(method: Method) -> tuple[int, ...]:
    """Examples per client, such that the method is defined."""
    return (3, 3, 3, 3) if method.balanced_only else SIZES


def federation(method: Method, *fields: Any) -> Federation:
    """The four clients, with these examples if any."""
    if fields:
        return Federation.from_arrays(*fields, sizes=sizes(method), weights=WEIGHTS)
    return Federation.from_sizes(sizes(method), WEIGHTS)


def make_run(method: Method, sampling: str | Sampling, clients: Federation, **given: Any) -> Run:
    """A run of the method, without the local work that the method fixes; the check does not apply
    if the method is not defined.
    """
    if "work" in given:
        given["work"] = method.drop_fixed(given["work"])
    try:
        return Run(clients, method, sampling, **given)
    except FedShuffleError as reason:
        raise DoesNotApplyError(str(reason)) from reason


def without_server_optimiser(method: Method) -> Method:
    """The method with a server that only adds the update."""
    return dataclasses.replace(method, server=Average())


def quadratic_clients(
    run: Run, h: FloatArray, t: FloatArray, scaled: bool = True
) -> QuadraticClients:
    """Clients with these curvatures and, at zero, minus these gradients; pooled if the run is."""
    if run.method.pooled:  # one client with the mean objective over all examples
        share = np.array(SIZES) / sum(SIZES)
        h, t = (share @ h)[None], (share @ t)[None]
    return QuadraticClients(run, h, t, scaled)


def listed_cohorts(sampling: Sampling) -> Cohorts:
    """All cohorts; the check does not apply if there are too many."""
    cohorts = sampling.cohorts(MAX_COHORTS)
    if cohorts is None:
        raise DoesNotApplyError(f"{sampling!r} has too many cohorts to enumerate.")
    return cohorts


class NotAffineError(Exception):
    """A round is not an affine map of the state."""


@dataclass(frozen=True)
class MeanMap:
    """The mean over all cohorts of the map from (model, server state, client state) to the next."""

    matrix: FloatArray
    constant: FloatArray
    start: FloatArray  # the mean after the first round with a nonempty cohort
    d: int  # the model is the first d numbers

    def drift(self) -> FloatArray:
        """How far the model moves per round once the state has settled."""
        s = self.start
        for _ in range(3000):
            s = self.matrix @ s + self.constant
        moved: FloatArray = (self.matrix @ s + self.constant - s)[: self.d]
        return moved

    def fixed_point(self) -> FloatArray:
        """The model at the fixed point that is reached from the start.

        Some methods preserve a sum (SCAFFOLD: c - sum w_i c_i). So the fixed point must differ from
        the start by something in the range of I - A.
        """
        still = np.eye(len(self.matrix)) - self.matrix
        z = np.linalg.lstsq(still @ still, self.constant - still @ self.start, rcond=None)[0]
        s = self.start + still @ z
        fixed = np.allclose(self.matrix @ s + self.constant, s, rtol=1e-6, atol=1e-8)
        ensure(fixed, "the mean of the method over all cohorts has no fixed point.")
        x: FloatArray = s[: self.d]
        return x


def mean_map(clients: QuadraticClients) -> MeanMap:
    """The mean map of the run of these clients, read off its own rounds."""
    rounds = _FlatRounds(clients)
    width = len(rounds.start)
    matrix, constant = np.zeros((width, width)), np.zeros(width)
    for members, probability in rounds.cohorts:
        if not len(members):
            matrix += probability * np.eye(width)
            continue
        origin = rounds.after(members, np.zeros(width))
        columns = [rounds.after(members, unit) - origin for unit in np.eye(width)]
        map = np.stack(columns, axis=1)
        test = generator(0, Purpose.MONTE_CARLO).random(width)
        found, slack = rounds.after(members, test), 1e-9 * np.abs(origin).max()
        if not np.allclose(found, map @ test + origin, rtol=1e-9, atol=slack):
            raise NotAffineError
        matrix += probability * map
        constant += probability * origin
    return MeanMap(matrix, constant, rounds.start, rounds.d)


class _FlatRounds:
    """Rounds of given cohorts as maps between flat vectors. Of a two-phase sampling its pool
    counts, as who is asked depends on the updates, so that a round would not be affine.
    """

    def __init__(self, clients: QuadraticClients) -> None:
        assert clients.t is not None
        self.clients = copy.copy(clients)
        self.clients.run = run = copy.copy(clients.run)
        run.sampling = run.sampling.pool
        self.cohorts = listed_cohorts(run.sampling)
        self.n, self.d = len(run.federation), clients.t.shape[1]
        fresh = run.start(torch.zeros(self.d, dtype=torch.float64))
        self.store = None if fresh.clients is None else ClientStateStore(self.d, torch.float64)
        drawn = [(members, share) for members, share in self.cohorts if len(members)]
        firsts = [self._round(members, fresh) for members, _ in drawn]
        self.shapes = _shapes(firsts[0])
        if any(tensor.dtype != torch.float64 for _, tensor in _tensors(firsts[0])):
            raise NotAffineError
        flat = [self._flat(first) for first in firsts]
        self.start: FloatArray = np.average(flat, axis=0, weights=[share for _, share in drawn])

    def after(self, members: IntArray, s: FloatArray) -> FloatArray:
        return self._flat(self._round(members, self._state(s)))

    def _round(self, members: IntArray, state: State) -> State:
        return self.clients.run_round(state, cohort=self.clients.run.cohort(state.round, members))

    def _flat(self, state: State) -> FloatArray:
        if _shapes(state) != self.shapes:
            raise NotAffineError
        parts = [state.x, *(tensor.reshape(-1) for _, tensor in _tensors(state))]
        if state.clients is not None:
            parts.append(state.clients.rows(np.arange(self.n)).reshape(-1))
        return torch.cat(parts).numpy()

    def _state(self, s: FloatArray) -> State:
        lengths = [self.d, *(math.prod(shape) for shape in self.shapes.values())]
        x, *rest = torch.split(torch.from_numpy(s[: sum(lengths)].copy()), lengths)
        clients = None
        if self.store is not None:
            rows = torch.from_numpy(s[sum(lengths) :].copy()).reshape(self.n, self.d)
            clients = ClientState.empty(self.n, self.store).updated(np.arange(self.n), rows)
        both: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for ((owner, name), shape), part in zip(self.shapes.items(), rest, strict=True):
            both[owner][name] = part.reshape(shape)
        return State(x, *both, 1, clients)


def _tensors(state: State) -> list[tuple[tuple[int, str], Tensor]]:
    """The tensors of the direction (0) and of the server optimiser (1), by owner and name."""
    both = (state.method_state, state.optimiser_state)
    return [((k, name), both[k][name]) for k in (0, 1) for name in sorted(both[k])]


def _shapes(state: State) -> dict[tuple[int, str], tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _tensors(state)}
