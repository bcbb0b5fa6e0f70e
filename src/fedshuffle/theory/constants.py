r"""The constants by which a sampling and an averaging rule enter the convergence theorem.

The paper's theorem on FedShuffleGen is about

.. math:: \hat f = \sum_i \hat w_i f_i, \qquad \hat w_i = \frac{\tilde w_i \tau_i}{W q_i c_i},
          \qquad W = \sum_i \frac{\tilde w_i \tau_i}{q_i c_i}, \qquad
          \frac{1}{q_i} = E\Big[ \frac{1\{i \in S\}}{q_i^S} \Big],

and sampling adds variance through the second moments

.. math:: H_{ij} = E\Big[ \frac{q_i q_j}{q_i^S q_j^S} 1\{i, j \in S\} \Big], \qquad h = diag(H),
          \qquad H - e e^T \preceq Diag(h_1 s_1, \dots, h_n s_n).

With :math:`q_i^S = p_i` all of this has a closed form: :math:`q_i = 1`, :math:`H_{ij} = p_{ij} /
(p_i p_j)`, :math:`h_i = 1 / p_i`, and the inequality is that of the sampling, :math:`P - p p^T
\preceq Diag(p_i s_i)`. Otherwise every cohort is listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, IntArray, expect, positive
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods import FedShuffleGen, InclusionProbability, Method, Participants, Plain
from fedshuffle.methods.servers import Average
from fedshuffle.sampling import Full, One, Optimal, Sampling, resolve

_COHORTS = 4096
"""So many cohorts are listed where no formula applies."""

_CLIENTS = 1000
"""So many rows a matrix of second moments may have where its eigenvalues are wanted."""

_TOLERANCE = 1e-9
"""How far below zero rounding may push an eigenvalue."""


@final
@dataclass(frozen=True, eq=False)
class MethodConstants:
    """The constants of the paper's theorem on FedShuffleGen, for one setting.

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
    """``max_i h_i s_i w-hat_i``: the variance that sampling adds."""
    M_2: float
    """``(sum_i tau_i) max_i w-tilde_i / (W q_i c_i)``: at least 1, and 1 only where every step of
    every client counts the same. The theorem needs no more than 1 in its place (docs/theory.md)."""
    c: FloatArray
    """The step normalisation of every client."""
    tau: IntArray
    """The steps that every client does."""
    steps_per_epoch: IntArray
    """``k_i``, in the place of the paper's ``|D_i|``."""
    longest: int
    """``tau_max``, the most steps that any client may be asked for."""
    how: str
    """closed form, enumeration, or (in advice) eigenvalue."""
    obstacle: str
    """Why the theorem does not cover this local work; empty where it does."""

    @property
    def M(self) -> float:  # noqa: N802
        """``max_i s_i w_i / p_i``, the main theorem's name for ``M_1`` where q = p, w-hat = w."""
        return self.M_1

    @property
    def shares(self) -> FloatArray:
        """``tau_i / c_i``: how far each client walks, relative to ``eta_l``. The theorem asks for
        ``c_i >= tau_i``, that is, at most 1.
        """
        return self.tau / self.c


def method_constants(
    federation: Federation,
    method: str | Method | FedShuffleGen,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
) -> MethodConstants:
    """The constants of a method, or of an averaging rule, on a federation.

    Closed forms where the normaliser is the inclusion probability, for any number of clients; a
    list of all cohorts otherwise, with the ``s`` for which ``M_1`` is smallest.

        >>> clients = Federation.from_sizes([1, 2, 3])
        >>> found = method_constants(clients, "fedavg-rr")
        >>> (14 * found.w_hat).round(6).tolist(), found.M_1
        ([1.0, 4.0, 9.0], 0.0)
    """
    expect(federation, Federation, "federation")
    sampling = resolve(sampling, federation)
    if isinstance(sampling, Optimal):
        raise FedShuffleError(
            f"the theorem on FedShuffleGen does not cover sampling {sampling!r}, which depends on"
            " the updates. Use its pool, for the clients that walk."
        )
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if isinstance(method, FedShuffleGen):
        rule = method
    else:
        method = methods.get(method)
        _check_plain(method)
        rule, work = method.averaging, method.local_work(work)
    workload = work.on(federation.sizes)
    if isinstance(method, Method):
        method.check(workload, sampling)

    planned, done = _steps(workload, sampling)
    clients = Participants(
        clients=np.arange(len(federation)),
        weight=federation.weights,
        probability=sampling.p,
        planned=planned,
        done=done,
        longest=workload.longest,
    )
    c = workload.longest / rule.step_scale(clients)
    weight = rule.weight(clients)
    if isinstance(rule.normaliser, InclusionProbability):
        how, per_step = "closed form", weight / c
        h, s = 1.0 / sampling.p, sampling.s
    else:
        how = "enumeration"
        inverse_q, moments = _moments(rule, weight, clients, sampling)
        per_step = weight * inverse_q / c
        h = np.diag(moments).copy()
        s = smallest_s(moments, per_step * done / float(per_step @ done))
    total = float(per_step @ done)
    w_hat = per_step * done / total
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
        longest=workload.longest,
        how=how,
        obstacle=_obstacle(workload, done),
    )


def second_moments(sampling: Sampling) -> FloatArray:
    """``H_ij = P(i, j in S) / (p_i p_j)``, the matrix H where q = p.

    >>> second_moments(Full(2)).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    expect(sampling, Sampling, "sampling")
    _check_number(len(sampling))
    return sampling.pair_probabilities() / np.outer(sampling.p, sampling.p)


def smallest_s(moments: Sampling | ArrayLike, weights: ArrayLike | None = None) -> FloatArray:
    r"""The smallest ``s`` with ``H - e e^T <= Diag(h_i s_i)``, by an eigenvalue.

    There is no single smallest vector. Without weights this is the smallest that is the same for
    all clients, the largest eigenvalue of :math:`D^{-1/2} (H - e e^T) D^{-1/2}` with
    :math:`D = Diag(h)`. With the weights w-hat it is the one for which the theorem's ``M_1`` is
    smallest: ``h_i s_i w-hat_i`` is then the same for all, and it is the largest eigenvalue of
    :math:`(\sqrt{\hat w_i} (H_{ij} - 1) \sqrt{\hat w_j})`.

        >>> from fedshuffle.sampling import Uniform
        >>> smallest_s(Uniform(3, 2)).round(9).tolist()
        [0.5, 0.5, 0.5]
    """
    matrix = _matrix(moments)
    h = np.diag(matrix)
    scale = 1.0 / h if weights is None else positive(weights, len(h), "weights")
    root = np.sqrt(scale)
    largest = float(np.linalg.eigvalsh(root[:, None] * (matrix - 1.0) * root)[-1])
    # Where nothing varies, rounding leaves an eigenvalue of the order of the matrix's accuracy.
    noise = len(h) * float(np.finfo(float).eps) * float(np.abs(h * scale).max())
    return (largest if largest > noise else 0.0) / (h * scale)


def is_valid_s(s: ArrayLike, moments: Sampling | ArrayLike) -> bool:
    """Whether ``H - e e^T <= Diag(h_i s_i)``, up to rounding.

    >>> from fedshuffle.sampling import Independent
    >>> half = Independent([0.5, 0.5])
    >>> is_valid_s([0.5, 0.5], half), is_valid_s([0.5, 0.4], half)
    (True, False)
    """
    matrix = _matrix(moments)
    try:
        vector = np.array(s, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedShuffleError(f"s must be numbers: {error}.") from error
    if vector.shape != (len(matrix),):
        raise FedShuffleError(
            f"s must be one number for each of the {len(matrix)} clients, got shape {vector.shape}."
        )
    root = 1.0 / np.sqrt(np.diag(matrix))
    gap = np.diag(vector) - root[:, None] * (matrix - 1.0) * root
    return bool(np.linalg.eigvalsh(gap)[0] >= -_TOLERANCE)


def _matrix(moments: Sampling | ArrayLike) -> FloatArray:
    if isinstance(moments, Sampling):
        return second_moments(moments)
    try:
        matrix = np.array(moments, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedShuffleError(f"the second moments H must be numbers: {error}.") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise FedShuffleError(
            f"the second moments H must be a square matrix, got shape {matrix.shape}."
        )
    if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T):
        raise FedShuffleError("the second moments H must be finite and symmetric.")
    if not (np.diag(matrix) > 0).all():
        raise FedShuffleError(
            "the second moments H need a positive diagonal: leave out clients that never take part."
        )
    _check_number(len(matrix))
    return matrix


def _check_number(n: int) -> None:
    if n > _CLIENTS:
        raise FedShuffleError(
            f"eigenvalues for {n} clients take too long: at most {_CLIENTS} are possible. Use the"
            " sampling's own s, and methods that weigh by inclusion probability."
        )


def _check_plain(method: Method) -> None:
    """The theorem is for gradients as they are, averaged as they come."""
    plain = isinstance(method.direction, Plain) and isinstance(method.server, Average)
    if not plain or method.pooled:
        raise FedShuffleError(
            f"the theorem on FedShuffleGen does not cover {method.name!r}: it is for clients"
            " that walk along the gradient and a server that adds the average. Give the averaging"
            " rule (method.averaging) to see the constants without the rest."
        )


def _steps(workload: Workload, sampling: Sampling) -> tuple[IntArray, IntArray]:
    """Steps planned and done, where they are the same in every round."""
    values, chances = workload.alone
    work = workload.work
    if len(chances) > 1:
        raise FedShuffleError(
            "the theorem on FedShuffleGen is for numbers of epochs that do not change from round to"
            " round: give a number instead of a range."
        )
    planned = values[:, 0]
    if isinstance(sampling, Full):
        planned = workload.together(planned)
    elif isinstance(work.steps, str) and np.ptp(planned) > 0 and not isinstance(sampling, One):
        raise FedShuffleError(
            f"the theorem on FedShuffleGen is for numbers of steps that do not depend on the"
            f" cohort, but steps {work.steps!r} does: give a number of steps, or epochs."
        )
    if work.interruption is None:
        return planned, planned
    if work.interruption.random:
        raise FedShuffleError(
            "the theorem on FedShuffleGen is for numbers of steps that do not change from round to"
            f" round, but {work.interruption!r} is random: use MissLast, AtMost, or none."
        )
    return planned, work.interruption.done(planned, np.arange(len(planned)), 0, 0)


def _obstacle(workload: Workload, done: IntArray) -> str:
    work = workload.work
    if work.order != "reshuffled":
        return f"the theorem is for the order 'reshuffled', not {work.order!r}"
    if np.isfinite(work.clip):
        return "the theorem is for gradients that are not clipped"
    if (done % workload.steps_per_epoch).any():
        return "the theorem is for whole epochs, and some client ends in the middle of one"
    return ""


def _moments(
    rule: FedShuffleGen, weight: FloatArray, clients: Participants, sampling: Sampling
) -> tuple[FloatArray, FloatArray]:
    """``1 / q`` and the matrix H, over every cohort."""
    n = len(sampling)
    cohorts = sampling.cohorts(_COHORTS) if n <= _CLIENTS else None
    if cohorts is None or len(cohorts) > _COHORTS:
        raise FedShuffleError(
            f"the constants of {type(rule.normaliser).__name__} need a list of all cohorts, and"
            f" sampling {sampling!r} of {n} clients has too many (at most {_COHORTS} cohorts of"
            f" {_CLIENTS} clients). Use a method that weighs by inclusion probability, or fewer"
            " clients."
        )
    mean, second = np.zeros(n), np.zeros((n, n))
    for members, probability in cohorts:
        if not len(members):
            continue
        cohort = Participants(
            clients=members,
            weight=clients.weight[members],
            probability=clients.probability[members],
            planned=clients.planned[members],
            done=clients.done[members],
            longest=clients.longest,
        )
        inverse = rule.aggregation_weights(cohort) / weight[members]
        mean[members] += probability * inverse
        second[np.ix_(members, members)] += probability * np.outer(inverse, inverse)
    return mean, second / np.outer(mean, mean)
