r"""The audit of asynchronous schedules: a client counts by its rate and its staleness.

In a server step, an update of client i moves the model by :math:`s\, a_i \gamma_i \tau_i` times its
gradient, to first order in the step size, where s is its staleness weight and :math:`a_i` what the
method makes of the buffer. With the share :math:`\rho_i` of client i in all arrivals,

.. math:: \hat w_i \propto \rho_i\, E[s\, a_i \gamma_i \tau_i \mid \text{an update of client } i].

A method that divides by :math:`K \rho_i E[s]` leaves the objective's weights. One that normalises
over the buffer keeps rate and staleness, in closed form where the buffer holds one update, or where
all count alike in it. If arrivals are independent (clients that loop with exponential times) and
:math:`s = 1`, the sum U of the other K - 1 weights has a Laplace transform, and

.. math:: E\Big[ \frac{u_i}{u_i + U} \Big]
          = \int_0^\infty u_i e^{-t u_i} \Big( \sum_j \rho_j e^{-t u_j} \Big)^{K-1} dt.

Elsewhere the schedule is simulated.
"""

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.effective_weights import contribution_table, contributions
from fedshuffle.auditing.estimation import BATCHES, error_of_mean
from fedshuffle.auditing.subject import Subject
from fedshuffle.methods.averaging import RatioOfSums
from fedshuffle.sampling import Buffers
from fedshuffle.timing.simulation import SimulatedSteps, simulate

_ENOUGH = 10_000  # times BATCHES: updates that are simulated for a large population
_SETTLES = 4  # times the concurrency: arrivals until the start is forgotten


def asynchronous_weights(
    subject: Subject, seed: int, draws: int
) -> tuple[FloatArray, str, FloatArray | None]:
    """Effective weights, not normalised; how they were found; and their standard errors."""
    assert isinstance(subject.sampling, Buffers)
    if (exact := _exact(subject, subject.sampling)) is not None:
        return *exact, None
    return _monte_carlo(subject, subject.sampling, seed, draws)


def long_run(subject: Subject) -> list[str]:
    """A note, if the method divides by means that it learns along the run."""
    buffers = subject.sampling
    assert isinstance(buffers, Buffers)
    known = buffers.staleness_weights is not None or subject.estimated is not None
    if known or not _divides(subject):
        return []
    return ["mean staleness weights are counted along the run: these are the weights of a long run"]


def _exact(subject: Subject, buffers: Buffers) -> tuple[FloatArray, str] | None:
    """By formula or quadrature; None if neither applies."""
    depends, schedule = subject.dependencies, buffers.schedule
    if depends.window or depends.others or depends.random:
        return None
    moved, ratio = contribution_table(subject, 0)
    chances, by_probability = buffers.tasks.possible[1], _divides(subject)
    # The steps of a task and its staleness are independent, or the steps do not matter.
    alone = schedule.staleness == 0 or buffers.tasks.independent_of_steps
    if not alone and not (by_probability and _constant(moved)):
        return None
    if by_probability:
        return moved @ chances * buffers.p / subject.probability, "closed form"
    stale = buffers.staleness_weights
    if ratio is None or stale is None:
        return None
    if schedule.buffer == 1:
        each = moved / ratio.u**ratio.power * (1.0 if ratio.v is None else ratio.v)
        return buffers.p * stale * (each @ chances), "closed form"
    if _constant(ratio.u.ravel()) and (ratio.v is None or _constant(ratio.v.ravel())):
        return buffers.p * stale * (moved @ chances), "closed form"
    independent = schedule.loops(len(buffers)) and buffers.tasks.law == "exponential"
    if not independent or schedule.staleness:
        return None
    return independent_arrivals(buffers.p, chances, moved, ratio, schedule.buffer), "quadrature"


def independent_arrivals(
    p: FloatArray, chances: FloatArray, moved: FloatArray, ratio: RatioOfSums, buffer: int
) -> FloatArray:
    r"""``p_i E[moved_i / q]`` with a buffer that client i and independent others fill.

    With :math:`1/q = V / U^k`, sums over the buffer,
    :math:`U^{-k} = \int t^{k-1} e^{-tU} dt / (k-1)!`, and the trapezoidal rule in log t.

    >>> u = np.array([[1.0], [3.0]])
    >>> ratio, p, one = RatioOfSums(u), np.array([1.0, 1.0]), np.ones(1)
    >>> independent_arrivals(p, one, u, ratio, buffer=2).round(6).tolist()  # 1 of 2 or of 4
    [0.375, 0.625]
    """
    u, v, share = ratio.u, ratio.v, p[:, None] * chances / buffer
    x = np.arange(np.log(1e-18 / u.max()), np.log(800 / u.min()), 1 / 16)
    found = np.zeros(moved.shape)
    for t in np.exp(x).tolist():
        fade = np.exp(-t * u)
        others = float((share * fade).sum())
        over = np.full(u.shape, others ** (buffer - 1))
        if v is not None:
            one = float((share * fade * v).sum())
            over = v * over + (buffer - 1) * one * others ** (buffer - 2)
        found += t**ratio.power * fade * over / 16
    return p * ((moved * found) @ chances)


def _monte_carlo(
    subject: Subject, buffers: Buffers, seed: int, draws: int
) -> tuple[FloatArray, str, FloatArray]:
    """From simulated server steps, in batches of successive ones.

    Shares of arrivals are known, so only what an update counts is estimated. The errors are those
    of both: few updates show too little of the spread of staleness weights.
    """
    schedule, at_a_time = buffers.schedule, buffers.schedule.at_a_time(len(buffers))
    least = BATCHES * max(at_a_time, min(len(buffers), _ENOUGH))
    each = -(-max(draws, least) // (BATCHES * schedule.buffer))
    settles = max(BATCHES * each // 10, _SETTLES * at_a_time // schedule.buffer)
    found = simulate(schedule, buffers.tasks, seed, settles + BATCHES * each)
    found = SimulatedSteps(*(part[settles:] for part in found))
    stale = schedule.weight(found.staleness)
    moves = _moves(subject, found) * stale
    clients, n = found.clients.reshape(BATCHES, -1), len(buffers)
    if _divides(subject):
        seen = np.bincount(clients.ravel(), minlength=n)
        total = np.bincount(clients.ravel(), weights=stale.ravel(), minlength=n)
        moves = moves * (seen / np.maximum(total, 1e-300))[found.clients]
    rows = zip(clients, moves.reshape(BATCHES, -1), strict=True)
    sums = np.stack([np.bincount(some, weights=by, minlength=n) for some, by in rows])
    shares = sums / sums.sum(axis=1, keepdims=True)
    errors = error_of_mean(shares)
    # A client that hardly ever arrived shows no spread, so its error is at least its weight.
    rare = np.count_nonzero(shares, axis=0) < BATCHES // 2
    errors[rare] = np.maximum(errors, subject.federation.weights)[rare]
    per_update = sums.sum(axis=0) / np.maximum(np.bincount(clients.ravel(), minlength=n), 1)
    return buffers.p * per_update, f"Monte Carlo, {clients.size} simulated updates", errors


def _moves(subject: Subject, found: SimulatedSteps) -> FloatArray:
    """What each update of each simulated buffer moves, but for its staleness."""
    depends, (moved, ratio) = subject.dependencies, contribution_table(subject, 0)
    who = found.clients, found.alternatives
    if _divides(subject) and not depends.window:
        return np.asarray(moved[who] / subject.probability[found.clients])
    if ratio is not None and not (depends.window or depends.others):
        over = 1.0 if ratio.v is None else ratio.v[who].sum(axis=1, keepdims=True)
        sums = ratio.u[who].sum(axis=1, keepdims=True)
        return np.asarray(moved[who] * over / sums**ratio.power)
    planned = subject.workload.possible_steps[0][who]
    cohorts = (
        subject.cohort(clients, steps, round=step % (depends.window or 1))
        for step, (clients, steps) in enumerate(zip(found.clients, planned, strict=True))
    )
    return np.stack([contributions(subject.method, cohort) for cohort in cohorts])


def _divides(subject: Subject) -> bool:
    return subject.method.averaging.by_probability


def _constant(values: FloatArray) -> bool:
    """Whether all entries of a row are the same."""
    return bool((np.ptp(values, axis=-1) <= 1e-12 * np.abs(values).max(axis=-1)).all())
