r"""Whether the mean update over all cohorts has the audit's weights.

With quadratic clients (:class:`fedshuffle.auditing.simulation.QuadraticClients`) a round is an
affine map of the whole state of a run, :math:`s \leftarrow A_S s + b_S`, for nearly every method.
Cohorts do not depend on the past, so the expectation follows the mean map,
:math:`E s \leftarrow \bar A \, E s + \bar b`, exactly: nothing needs to be drawn.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing import Audit, audit
from fedshuffle.auditing.simulation import QuadraticClients, simulated_weights
from fedshuffle.auditing.subject import Subject
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Full, Sampling, resolve
from fedshuffle.state import State
from fedshuffle.testing.problems import (
    WORK,
    federation,
    make_run,
    numbers,
    quadratic_clients,
    tensors,
    without_server_optimiser,
)
from fedshuffle.testing.report import DoesNotApplyError, ensure, equal
from fedshuffle.testing.sampling_checks import listed_cohorts
from fedshuffle.training.client_state import ClientState, ClientStateStore
from fedshuffle.training.rounds import Run, drive

_SMALL = 2.0**-24  # a step size at which only effects of first order are seen
_DRAWS = 1024  # rounds to simulate where nothing exact is possible
_SIGMAS = 5.0
OPTIMA = np.array([[1.0], [-2.0], [5.0], [0.5]])


class NotAffineError(Exception):
    """A round is not an affine map of the state."""


class MeanMap:
    """The mean over all cohorts of the map from (model, server state, client state) to the next,
    read off the rounds of a run.

    Of a two-phase sampling its pool counts, as who is asked depends on the updates, so that a round
    would not be affine.
    """

    def __init__(self, clients: QuadraticClients) -> None:
        assert clients.t is not None
        self.clients = copy.copy(clients)
        self.clients.run = run = copy.copy(clients.run)
        run.sampling = run.sampling.pool
        cohorts = listed_cohorts(run.sampling)
        drawn = [(members, share) for members, share in cohorts if len(members)]
        self.d = clients.t.shape[1]
        self.store = ClientStateStore(self.d, torch.float64)
        fresh = run.start(torch.zeros(self.d, dtype=torch.float64))
        firsts = [self._round(members, fresh) for members, _ in drawn]
        self.shapes = {name: tensor.shape for name, tensor in tensors(firsts[0]).items()}
        flat = [self._flat(first) for first in firsts]
        # The mean after the first round with a nonempty cohort.
        self.start = np.average(flat, axis=0, weights=[share for _, share in drawn])
        width = len(self.start)
        empty = sum(share for members, share in cohorts if not len(members))
        self.matrix, self.constant = empty * np.eye(width), np.zeros(width)
        test = generator(0, Purpose.MONTE_CARLO).random(width)
        for members, share in drawn:
            origin = self._after(members, np.zeros(width))
            columns = [self._after(members, unit) - origin for unit in np.eye(width)]
            matrix, slack = np.stack(columns, axis=1), 1e-9 * np.abs(origin).max()
            found = self._after(members, test)
            if not np.allclose(found, matrix @ test + origin, rtol=1e-9, atol=slack):
                raise NotAffineError
            self.matrix += share * matrix
            self.constant += share * origin

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

    def _after(self, members: IntArray, s: FloatArray) -> FloatArray:
        """The flat state after a round of these clients from a flat state."""
        return self._flat(self._round(members, self._state(s)))

    def _round(self, members: IntArray, state: State) -> State:
        return self.clients.run_round(state, cohort=self.clients.run.cohort(state.round, members))

    def _flat(self, state: State) -> FloatArray:
        parts = tensors(state)
        floats = all(tensor.dtype == torch.float64 for tensor in parts.values())
        if not floats or self.shapes != {name: tensor.shape for name, tensor in parts.items()}:
            raise NotAffineError
        return torch.cat([tensor.reshape(-1) for tensor in parts.values()]).numpy()

    def _state(self, s: FloatArray) -> State:
        pieces = torch.split(torch.tensor(s), [shape.numel() for shape in self.shapes.values()])
        shapes = self.shapes.items()
        parts = {name: x.reshape(shape) for (name, shape), x in zip(shapes, pieces, strict=True)}
        x, rows, clients = parts.pop("x"), parts.pop("clients", None), None
        if rows is not None:
            everyone = np.arange(len(rows))
            clients = ClientState.empty(len(rows), self.store).updated(everyone, rows)
        kept: dict[str, dict[str, Tensor]] = {"method_state": {}, "optimiser_state": {}}
        for name, tensor in parts.items():
            owner, _, key = name.partition(" ")
            kept[owner][key] = tensor
        return State(x, kept["method_state"], kept["optimiser_state"], 1, clients)


def expectation(method: Method, sampling: str | Sampling) -> None:
    """The expected update over all cohorts, with settled state, has the audit's weights.

    The clients are linear, ``f_i(x) = x_i``, so that the weights can be read off the update. A
    method without an affine round is simulated instead, with standard errors. The update is the one
    that the server gets, and a diagonal that rescales coordinates is divided out.
    """
    plain = without_server_optimiser(method)
    run = make_run(plain, sampling, federation(method), work=WORK, step_size=_SMALL)
    audited, audit_errors = _audit(plain, sampling)
    found, errors = measured_weights(run)
    slack = 1e-6 + _SIGMAS * (audit_errors + errors)
    what = f"effective weights under {run.sampling!r}, against the audit's"
    equal(found, audited.effective_weights, slack, what)
    if run.sampling.two_phase:
        _selection_is_unbiased(run)


def _audit(method: Method, sampling: str | Sampling) -> tuple[Audit, FloatArray]:
    """The audit with its standard errors; under optimal sampling that of its pool, as the selection
    is checked separately.
    """
    clients, work = federation(method), method.drop_fixed(WORK)
    found = audit(clients, method, resolve(sampling, clients).pool, work, draws=_DRAWS)
    errors = found.standard_errors
    return found, np.zeros(len(clients)) if errors is None else errors


def measured_weights(run: Run) -> tuple[FloatArray, FloatArray]:
    """The weights of the expected update, by running the method; and their standard errors."""
    try:
        clients = quadratic_clients(run, np.zeros(4), -np.eye(4), scaled=False)
        drift = -MeanMap(clients).drift()
        return drift / drift.sum(), np.zeros(4)
    except NotAffineError:
        subject = Subject(run.federation, run.method, run.sampling.pool, run.workload)
        raw, errors = simulated_weights(subject, seed=run.seed, rounds=_DRAWS)
        return raw / raw.sum(), errors


def _selection_is_unbiased(run: Run) -> None:
    """The mean update over all selections from a pool is the update of the pool."""
    optimal = run.sampling
    members = next(members for members, _ in listed_cohorts(optimal.pool) if len(members))
    clients = quadratic_clients(run, np.ones(4), numbers(4, 4).numpy())
    start = run.start(torch.zeros(4, dtype=torch.float64))
    norms: list[FloatArray] = []

    def after(asked: NDArray[np.bool_], p: FloatArray) -> Tensor:
        def select(found: FloatArray) -> tuple[NDArray[np.bool_], FloatArray]:
            norms.append(found)
            return asked, p

        cohort = run.cohort(0, members)
        requests = run.method.round(start, cohort, run.workload, run.seed, 0.1, 1.0, select)
        return drive(requests, clients).x

    of_pool = after(np.ones(len(members), dtype=np.bool_), np.ones(len(members)))
    _, p = optimal.select(norms[0], run.seed, 0, members)
    mean = torch.zeros_like(of_pool)
    for coins in itertools.product([False, True], repeat=len(members)):
        if (chance := float(np.where(coins, p, 1 - p).prod())) > 0:
            mean += chance * after(np.array(coins), p)
    equal(mean, of_pool, 1e-10, f"the mean over selections of {optimal!r}, against its pool's")


def fixed_point(method: Method, sampling: str | Sampling) -> None:
    """If all clients have the same Hessian, small steps converge to the weighted mean of the
    clients' optima, with the audit's weights.

    The mean map over all cohorts is solved for its fixed point at two step sizes and extrapolated
    to zero. If it is not affine, the method is run at full participation until it settles.
    """
    plain, clients = without_server_optimiser(method), federation(method)
    make_run(plain, sampling, clients, work=WORK)
    audited, errors = _audit(plain, sampling)
    slack = 1e-3 + _SIGMAS * float(np.ptp(OPTIMA)) * float(errors.sum())
    want = audited.effective_weights @ OPTIMA
    found = limit_point(plain, sampling, np.ones(4), clients)
    what = f"fixed point under {audited.sampling!r}, against the mean of the optima by the audit"
    equal(found, np.full_like(found, want[0]), slack, what)


def limit_point(
    method: Method,
    sampling: str | Sampling,
    h: FloatArray,
    clients: Federation,
    work: LocalWork = WORK,
) -> FloatArray:
    """The point where the method settles in the limit of small steps, on quadratics of curvature h
    with their optima at ``OPTIMA``; once, or in several coordinates that must agree.
    """

    def at(step_size: float, optima: FloatArray) -> QuadraticClients:
        run = make_run(method, sampling, clients, work=work, step_size=step_size)
        return quadratic_clients(run, h, h[:, None] * optima, scaled=False)

    try:
        coarse, fine = (MeanMap(at(step, OPTIMA)).fixed_point() for step in (2e-3, 1e-3))
    except NotAffineError:
        if not isinstance(resolve(sampling, clients), Full):
            raise DoesNotApplyError(
                "a round is not an affine map of the method's state, so its fixed point is computed"
                " only at full participation."
            ) from None
        stretched = np.array([1.0, -1.0, 2.0])  # one coordinate would leave nothing to choose from
        coarse, fine = (
            _run_to_rest(at(step, OPTIMA * stretched), step) / stretched for step in (0.02, 0.01)
        )
    return 2 * fine - coarse


def _run_to_rest(clients: QuadraticClients, step_size: float) -> FloatArray:
    """The mean of the model over the last of many rounds."""
    assert clients.t is not None
    state = clients.run.start(torch.zeros(clients.t.shape[1], dtype=torch.float64))
    rounds, last = round(20 / step_size), 100
    total = np.zeros(len(state.x))
    for k in range(rounds):
        state = clients.run_round(state)
        if k >= rounds - last:
            total += state.x.numpy() / last
    return total
