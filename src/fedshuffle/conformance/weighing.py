"""Whether clients count for what the audit says, in the mean over all cohorts."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing import audit
from fedshuffle.auditing.audit import Audit, _Setting
from fedshuffle.auditing.playing import played
from fedshuffle.conformance.clients import (
    WORK,
    Forced,
    NotAffineError,
    Parabolas,
    averaged,
    bound,
    federation,
    mean_map,
)
from fedshuffle.conformance.problems import numbers
from fedshuffle.conformance.report import DoesNotApplyError, equal
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.rounds import Run
from fedshuffle.sampling import Full, Optimal, Sampling, resolve

_SMALL = 2.0**-24
"""A step size at which only effects of first order are seen."""
_DRAWS = 1024
"""Rounds that are played where nothing exact is possible."""
_SIGMAS = 5.0
OPTIMA = np.array([[1.0], [-2.0], [5.0], [0.5]])


def expectation(method: Method, sampling: str | Sampling) -> None:
    """The expected update over all cohorts, with the memory settled, has the audit's weights.

    The clients are linear, ``f_i(x) = x_i``, so that the weights can be read off the update. A
    method whose round is no affine map of its memory is played long enough to have standard errors
    instead. What is judged is the update that the server is given, with the diagonal that rescales
    coordinates divided out.
    """
    plain = averaged(method)
    run = bound(plain, sampling, federation(method), work=WORK, step_size=_SMALL)
    said = _said(plain, sampling)
    found, errors = effective_weights(run)
    slack = _SIGMAS * (_errors(said) + errors)
    what = f"effective weights under {run.sampling!r}, beside the audit's"
    equal(found, said.effective_weights, 1e-6 + slack, what)
    if isinstance(run.sampling, Optimal):
        _asked(run)


def _said(method: Method, sampling: str | Sampling) -> Audit:
    return audit(federation(method), method, _pool(sampling, method), WORK, draws=_DRAWS)


def _pool(sampling: str | Sampling, method: Method) -> Sampling:
    """The sampling; of optimal sampling its pool, since who of it is asked is checked apart.

    Who is asked depends on the updates, so that a round would be no affine map of what a method
    remembers.
    """
    drawn = resolve(sampling, federation(method))
    return drawn.pool if isinstance(drawn, Optimal) else drawn


def _errors(said: Audit) -> FloatArray:
    errors = said.standard_errors
    return np.zeros(len(said.objective_weights)) if errors is None else errors


def effective_weights(run: Run) -> tuple[FloatArray, FloatArray]:
    """The weights of the expected update, by running the method; and their standard errors."""
    try:
        drift = -mean_map(Parabolas(run, np.zeros(4), -np.eye(4), scaled=False)).drift()
        return drift / drift.sum(), np.zeros(4)
    except NotAffineError:
        drawn = run.sampling.pool if isinstance(run.sampling, Optimal) else run.sampling
        setting = _Setting(run.federation, run.method, drawn, run.workload)
        pull, errors = played(setting, seed=run.seed, rounds=_DRAWS)
        return pull / pull.sum(), errors


def _asked(run: Run) -> None:
    """Of all ways in which a pool's clients are asked, the mean update is that of the pool."""
    optimal = run.sampling
    assert isinstance(optimal, Optimal)
    cohorts = optimal.pool.cohorts(4096)
    if cohorts is None:
        raise DoesNotApplyError(f"the cohorts of {optimal!r} are too many to go through.")
    members = next(members for members, _ in cohorts if len(members))
    run.sampling = Forced(optimal.pool, members)
    clients = Parabolas(run, np.ones(4), numbers(4, 4).numpy())
    start = run.start(torch.zeros(4, dtype=torch.float64))
    norms: list[FloatArray] = []

    def after(asked: NDArray[np.bool_], p: FloatArray) -> Tensor:
        def select(found: FloatArray) -> tuple[NDArray[np.bool_], FloatArray]:
            norms.append(found)
            return asked, p

        cohort = run.cohort(0)
        steps = run.method.round(start, cohort, run.workload, run.seed, 0.1, 1.0, select)
        return clients.follow(steps).x

    everybody = after(np.ones(len(members), dtype=np.bool_), np.ones(len(members)))
    _, p = optimal.select(norms[0], run.seed, 0, members)
    mean = torch.zeros_like(everybody)
    for coins in itertools.product([False, True], repeat=len(members)):
        if (chance := float(np.where(coins, p, 1 - p).prod())) > 0:
            mean += chance * after(np.array(coins), p)
    equal(mean, everybody, 1e-10, f"the mean over who is asked in {optimal!r}, beside its pool's")


def fixed_point(method: Method, sampling: str | Sampling) -> None:
    """Where all clients have the same Hessian, small steps come to rest at the weighted mean of
    the clients' optima, with the audit's weights.

    The mean map over all cohorts is solved for its fixed point at two step sizes and extrapolated
    to none. Where it is not affine the method is run at full participation until it rests.
    """
    plain = averaged(method)
    bound(plain, sampling, federation(method), work=WORK)
    said = _said(plain, sampling)
    spread = float(np.ptp(OPTIMA))
    slack = _SIGMAS * spread * float(_errors(said).sum())
    want = said.effective_weights @ OPTIMA
    found = resting_point(plain, sampling, np.ones(4), federation(method))
    what = f"fixed point under {said.sampling!r}, beside the mean of the optima by the audit"
    equal(found, np.full_like(found, want[0]), 1e-3 + slack, what)


def resting_point(
    method: Method,
    sampling: str | Sampling,
    h: FloatArray,
    clients: Federation,
    work: LocalWork = WORK,
) -> FloatArray:
    """Where the method comes to rest in the limit of small steps, on parabolas of curvature h with
    their optima at ``OPTIMA``; once, or in several coordinates that must agree.
    """

    def runs(*steps: float) -> list[Run]:
        return [bound(method, sampling, clients, work=work, step_size=step) for step in steps]

    try:
        coarse, fine = (mean_map(_parabolas(run, h, OPTIMA)).rest() for run in runs(2e-3, 1e-3))
    except NotAffineError:
        if not isinstance(resolve(sampling, clients), Full):
            raise DoesNotApplyError(
                "a round is no affine map of what the method remembers, and so a fixed point is"
                " looked for only at full participation."
            ) from None
        stretched = np.array([1.0, -1.0, 2.0])  # one coordinate would leave nothing to choose from
        coarse, fine = (
            _run_down(_parabolas(run, h, OPTIMA * stretched)) / stretched
            for run in runs(0.02, 0.01)
        )
    return 2 * fine - coarse


def _parabolas(run: Run, h: FloatArray, optima: FloatArray) -> Parabolas:
    return Parabolas(run, h, h[:, None] * optima, scaled=False)


def _run_down(clients: Parabolas) -> FloatArray:
    """The mean of the model over the last of many rounds."""
    state = clients.run.start(torch.zeros(clients.t.shape[1], dtype=torch.float64))
    rounds, last = round(20 / float(clients.run.step_size)), 100  # type: ignore[arg-type]
    total = np.zeros(len(state.x))
    for k in range(rounds):
        state = clients.play(state)
        if k >= rounds - last:
            total += state.x.numpy() / last
    return total
