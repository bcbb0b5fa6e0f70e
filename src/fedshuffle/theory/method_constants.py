"""The constants of the theorem on FedShuffleGen for a method (docs/explanation/theory.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, IntArray, expect, vector
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods import Cohort, FedShuffleGen, Method, Plain
from fedshuffle.methods.servers import Average
from fedshuffle.sampling import Full, One, Sampling, resolve
from fedshuffle.sampling.base import MAX_COHORTS, Cohorts

MAX_MATRIX_CLIENTS = 1000
"""Largest number of clients for which a matrix of second moments is built."""


@dataclass(frozen=True, eq=False)
class MethodConstants:
    """The constants of the theorem on FedShuffleGen for a method, a sampling and a federation.

    >>> clients = Federation.from_sizes([1, 2, 3])
    >>> found = method_constants(clients, "fedshuffle", "uniform:2")
    >>> found.W, round(found.M_1, 6), round(found.M_2, 6), found.obstacle
    (1.0, 0.375, 1.0, '')
    """

    W: float
    """``W = sum_i w-tilde_i tau_i / (q_i c_i)``: a round moves ``eta_g W eta_l`` along f-hat."""
    w_hat: FloatArray
    """``w-hat_i = w-tilde_i tau_i / (W q_i c_i)``, the weights of the objective f-hat."""
    h: FloatArray
    """``h_i = E[1{i in S} (q_i / q_i^S)^2]``, the diagonal of H; ``1 / p_i`` where q = p."""
    s: FloatArray
    """A vector with ``H - e e^T <= Diag(h_i s_i)`` (general variance lemma)."""
    M_1: float
    """``max_i h_i s_i w-hat_i``: the variance that sampling adds; the main theorem's M if q = p."""
    M_2: float
    """``(sum_i tau_i) max_i w-tilde_i / (W q_i c_i)``: 1 if all steps count alike, else more."""
    c: FloatArray
    """The step normalisation of every client."""
    tau: IntArray
    """The local steps of every client."""
    steps_per_epoch: IntArray
    """``k_i``, in place of the paper's ``|D_i|``."""
    max_steps: int
    """``tau_max``, the largest number of steps of any client."""
    how: str
    """closed form, enumeration, or (in advice) eigenvalue."""
    obstacle: str
    """Why the theorem does not cover this local work; empty if it does."""
    notes: tuple[str, ...] = ()
    """In advice, how the case differs from the one that was asked for."""
    covered: bool = True
    """Whether the theorem covers the one that was asked for."""

    @property
    def shares(self) -> FloatArray:
        """``tau_i / c_i``, the length of a path relative to ``eta_l``; at most 1 in the theorem."""
        return self.tau / self.c


def method_constants(
    federation: Federation,
    method: str | Method | FedShuffleGen,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
) -> MethodConstants:
    """The constants of a method, or of an averaging rule, on a federation.

    Closed forms where the normaliser is the inclusion probability, for any number of clients;
    otherwise an enumeration of all cohorts, with the ``s`` that makes ``M_1`` smallest.

        >>> clients = Federation.from_sizes([1, 2, 3])
        >>> found = method_constants(clients, "fedavg-rr")
        >>> (14 * found.w_hat).round(6).tolist(), found.M_1
        ([1.0, 4.0, 9.0], 0.0)
    """
    expect(federation, Federation, "federation")
    sampling = resolve(sampling, federation)
    if sampling.two_phase:
        raise FedShuffleError(
            f"the theorem on FedShuffleGen does not cover sampling {sampling!r}, which depends on"
            " the updates. Use its pool, the clients that train."
        )
    for client in np.flatnonzero(sampling.inclusion == 0).tolist():
        raise FedShuffleError(
            f"client {federation.ids[client]} never takes part ({sampling!r}), and the theorem is"
            " for clients that do: leave it out of the federation."
        )
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if isinstance(method, FedShuffleGen):
        rule = method
    else:
        method = methods.get(method)
        plain = isinstance(method.direction, Plain) and isinstance(method.server, Average)
        if not plain or method.pooled:
            raise FedShuffleError(
                f"the theorem on FedShuffleGen does not cover {method.name!r}: it is for clients"
                " that follow their gradient and a server that adds the average. Give the averaging"
                " rule (method.averaging) to see the constants without the rest."
            )
        rule, work = method.averaging, method.local_work(work)
    workload = work.on(federation.sizes)
    if not workload.optimiser.plain:
        raise FedShuffleError(
            "the theorem on FedShuffleGen is for local steps of plain SGD, not for the local"
            f" optimiser {workload.optimiser}. Find step sizes by fedshuffle.tune."
        )
    if isinstance(method, Method):
        method.check(workload, sampling)

    everyone, (planned, done) = np.arange(len(federation)), _steps(workload, sampling)
    clients = Cohort.of(federation, sampling, workload, everyone, (planned, done))
    c = workload.max_steps / rule.step_scale(clients)
    weight = rule.weight(clients)
    closed = rule.by_probability
    inverse_q, moments = (1.0, None) if closed else _moments(rule, weight, clients, sampling)
    per_step = weight * inverse_q / c
    total = float(per_step @ done)
    w_hat = per_step * done / total
    if moments is None:
        h, s = 1.0 / sampling.p, sampling.s
    else:
        h, s = np.diag(moments).copy(), _smallest_s(moments, w_hat)
    return MethodConstants(
        W=total,
        w_hat=w_hat,
        h=h,
        s=s,
        M_1=float((h * s * w_hat).max()),
        M_2=float(done.sum()) * float(per_step.max()) / total,
        c=c,
        tau=done,
        steps_per_epoch=workload.steps_per_epoch,
        max_steps=workload.max_steps,
        how="closed form" if closed else "enumeration",
        obstacle=_obstacle(workload, done),
    )


def smallest_s(sampling: Sampling, weights: ArrayLike | None = None) -> FloatArray:
    r"""The smallest ``s`` with ``H - e e^T <= Diag(h_i s_i)`` for a sampling with q = p.

    Without weights, the smallest one that is equal for all clients: the largest eigenvalue of
    :math:`D^{-1/2} (H - e e^T) D^{-1/2}` with :math:`D = Diag(h)`. With the weights w-hat, the one
    with the smallest ``M_1``: the largest eigenvalue of
    :math:`(\sqrt{\hat w_i} (H_{ij} - 1) \sqrt{\hat w_j})`.

        >>> from fedshuffle.sampling import Uniform
        >>> smallest_s(Uniform(3, 2)).round(9).tolist()
        [0.5, 0.5, 0.5]
    """
    expect(sampling, Sampling, "sampling")
    n, p = len(sampling), sampling.p
    if n > MAX_MATRIX_CLIENTS:
        raise FedShuffleError(
            f"eigenvalues for {n} clients take too long: at most {MAX_MATRIX_CLIENTS} are possible."
            " Use the sampling's own s, and methods that weight by inclusion probability."
        )
    moments = sampling.pair_probabilities() / np.outer(p, p)
    scale = 1.0 / np.diag(moments) if weights is None else vector(weights, "weights", range(n))
    return _smallest_s(moments, scale)


def _smallest_s(moments: FloatArray, scale: FloatArray) -> FloatArray:
    """The s with ``H - e e^T <= Diag(h_i s_i)`` and the smallest ``max_i h_i s_i scale_i``."""
    root, h = np.sqrt(scale), np.diag(moments)
    largest = float(np.linalg.eigvalsh(root[:, None] * (moments - 1.0) * root)[-1])
    # Without any variance, rounding leaves an eigenvalue of the order of the matrix's accuracy.
    noise = len(h) * float(np.finfo(float).eps) * float(np.abs(h * scale).max())
    return (largest if largest > noise else 0.0) / (h * scale)


def _steps(workload: Workload, sampling: Sampling) -> tuple[IntArray, IntArray]:
    """Steps planned and done, if they are the same in every round."""
    values, chances = workload.possible_steps
    work, planned, changes = workload.work, values[:, 0], ""
    if len(chances) > 1:
        changes = "a range of epochs is not: give a number"
    elif isinstance(sampling, Full):
        planned = workload.cohort_steps(planned)
    elif isinstance(work.steps, str) and np.ptp(planned) > 0 and not isinstance(sampling, One):
        changes = f"steps {work.steps!r} depends on the cohort: give a number of steps, or epochs"
    stop = work.interruption
    if stop is not None and stop.random:
        changes = changes or f"{stop!r} is random: use MissLast, AtMost, or none"
    if changes:
        covered = "the theorem on FedShuffleGen is for steps that are the same in every round"
        raise FedShuffleError(f"{covered}, but {changes}.")
    done = planned if stop is None else stop.done(planned, np.arange(len(planned)), 0, 0)
    return planned, done


def _obstacle(workload: Workload, done: IntArray) -> str:
    work = workload.work
    if work.order != "reshuffled":
        return f"the theorem is for the order 'reshuffled', not {work.order!r}"
    if np.isfinite(work.clip):
        return "the theorem is for gradients that are not clipped"
    if (done % workload.steps_per_epoch).any():
        return "the theorem is for whole epochs, and some client ends in the middle of one"
    return ""


def listed_cohorts(sampling: Sampling) -> Cohorts | None:
    """All cohorts with their probabilities, unless there are too many."""
    return sampling.cohorts(MAX_COHORTS) if len(sampling) <= MAX_MATRIX_CLIENTS else None


def _moments(
    rule: FedShuffleGen, weight: FloatArray, clients: Cohort, sampling: Sampling
) -> tuple[FloatArray, FloatArray]:
    """``1 / q`` and the matrix H, over every cohort."""
    n, cohorts = len(sampling), listed_cohorts(sampling)
    if cohorts is None:
        raise FedShuffleError(
            f"sampling {sampling!r} of {n} clients has too many cohorts to list, as the constants"
            f" of {type(rule.normaliser).__name__} need (at most {MAX_COHORTS}, and"
            f" {MAX_MATRIX_CLIENTS} clients). Use a method that weights by inclusion probability."
        )
    mean, second = np.zeros(n), np.zeros((n, n))
    for members, probability in cohorts:
        if len(members):
            cohort = clients.only(members, clients.probability)
            inverse = rule.aggregation_weights(cohort) / weight[members]
            mean[members] += probability * inverse
            second[np.ix_(members, members)] += probability * np.outer(inverse, inverse)
    return mean, second / np.outer(mean, mean)
