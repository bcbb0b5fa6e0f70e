"""Whether the mean update over all cohorts has the audit's weights."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing import Audit, audit
from fedshuffle.auditing.simulation import QuadraticClients, simulated_weights
from fedshuffle.auditing.subject import Subject
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Full, Sampling, resolve
from fedshuffle.testing.clients import (
    WORK,
    NotAffineError,
    federation,
    listed_cohorts,
    make_run,
    mean_map,
    quadratic_clients,
    without_server_optimiser,
)
from fedshuffle.testing.problems import numbers
from fedshuffle.testing.report import DoesNotApplyError, equal
from fedshuffle.training.rounds import Run, drive

_SMALL = 2.0**-24  # a step size at which only effects of first order are seen
_DRAWS = 1024  # rounds to simulate where nothing exact is possible
_SIGMAS = 5.0
OPTIMA = np.array([[1.0], [-2.0], [5.0], [0.5]])


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
        drift = -mean_map(clients).drift()
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
        coarse, fine = (mean_map(at(step, OPTIMA)).fixed_point() for step in (2e-3, 1e-3))
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
