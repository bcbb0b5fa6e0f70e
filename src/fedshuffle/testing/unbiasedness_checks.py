"""Whether a method minimises what the audit says: its mean update, and where it settles."""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing import Audit, audit
from fedshuffle.methods import Method
from fedshuffle.methods.round import RoundSettings
from fedshuffle.sampling import Sampling, resolve
from fedshuffle.testing.problems import (
    DRAWS,
    OPTIMA,
    WORK,
    DoesNotApplyError,
    equal,
    federation,
    limit_point,
    listed_cohorts,
    make_run,
    measured_weights,
    needs_linear_steps,
    numbers,
    quadratic_clients,
    without_server_optimiser,
)
from fedshuffle.training.rounds import Run, drive

_TINY_STEP = 2.0**-24  # at which only effects of first order are seen
_SIGMAS = 5.0


def expectation(method: Method, sampling: str | Sampling) -> None:
    """The expected update over all cohorts, with settled state, has the audit's weights.

    The clients are linear, ``f_i(x) = x_i``, so that the weights can be read off the update. A
    method without an affine round is simulated instead, with standard errors. The update is the one
    that the server gets, and a diagonal that rescales coordinates is divided out.
    """
    plain = without_server_optimiser(method)
    run = make_run(plain, sampling, federation(method), work=WORK, step_size=_TINY_STEP)
    if plain.direction.needs_independent_rounds and not run.sampling.independent_rounds:
        raise DoesNotApplyError(
            f"{method.name} remembers earlier cohorts, on which those of {run.sampling!r} depend."
        )
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
    found = audit(clients, method, resolve(sampling, clients).pool, work, draws=DRAWS)
    errors = found.standard_errors
    return found, np.zeros(len(clients)) if errors is None else errors


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
        settings = RoundSettings(run.workload, run.seed, 0.1, 1.0, select=select)
        return drive(run.method.round(start, cohort, settings), clients).x

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
    needs_linear_steps(make_run(plain, sampling, clients, work=WORK))
    audited, errors = _audit(plain, sampling)
    slack = 1e-3 + _SIGMAS * float(np.ptp(OPTIMA)) * float(errors.sum())
    want = audited.effective_weights @ OPTIMA
    found = limit_point(plain, sampling, np.ones(4), clients, WORK)
    what = f"fixed point under {audited.sampling!r}, against the mean of the optima by the audit"
    equal(found, np.full_like(found, want[0]), slack, what)
