r"""Exact constants of losses with affine gradients: quadratics, and linear regression.

With :math:`\nabla f_{ij}(x) = A_{ij} x - b_{ij}`, means :math:`A_i, b_i` over a client and
:math:`A = \sum_i \hat w_i A_i` over all, and :math:`z = x - x^\star`,

.. math:: \sum_i \hat w_i |\nabla f_i|^2 = \sum_i \hat w_i |A_i z + g_i|^2, \qquad
          |\nabla \hat f|^2 = |A z|^2, \qquad 2 L (\hat f - \hat f^\star) = L z^T A z,

where :math:`g_i = \nabla f_i(x^\star)`. So both sides of gradient similarity are quadratic, and so
are those of bounded variance. For every B (P_i) that is large enough the least G (sigma_i) has a
closed form (:mod:`fedshuffle.theory.forms`).

Which B, if none is given? The least that any G goes with, if there is one; in general there is
none, since G grows without bound as B falls to that limit. Then B^2 is twice the limit, for which
:math:`G^2 \le 2 \sum_i \hat w_i |g_i|^2`. P_i is chosen in the same way. On a ball every B and P_i
will do, and by default they are 1 and 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, counts
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.theory.forms import Form, Growth, axes, largest_on_ball
from fedshuffle.theory.problems import (
    Claim,
    ExactConstants,
    SimilarityForm,
    Table,
    Wanted,
    l2_checked,
)

_EXACT = 1e-9
"""How far below zero rounding may push an eigenvalue, as a share of the largest."""


def quadratic_constants(
    hessians: ArrayLike,
    optima: ArrayLike,
    *,
    sizes: ArrayLike | None = None,
    w_hat: ArrayLike | None = None,
    batch_size: int = 1,
    form: SimilarityForm = "gradient",
    B: float | None = None,  # noqa: N803
    P: ArrayLike | None = None,  # noqa: N803
    radius: float | None = None,
) -> ExactConstants:
    r"""The constants of the quadratics ``f_ij(x) = 1/2 (x - m_ij)' A_ij (x - m_ij)``.

    Args:
        hessians: the matrices ``A_ij``, one for each row of ``optima``; or one for all; or a number
            for that multiple of the identity.
        optima: the points ``m_ij``, a row each.
        sizes: how many rows belong to each client, in order; without it each is a client's own.
        w_hat: the effective weights; by size if not given.
        batch_size: examples per step.
        form: the form of gradient similarity (see :mod:`fedshuffle.theory.problems`).
        B: the least G for this B. By default see above.
        P: the least sigma_i for this P_i; one number or one for each client.
        radius: constants for the ball of this radius around the optimum only.

    >>> toy = quadratic_constants(1.0, np.eye(6), sizes=[1, 2, 3])
    >>> toy.L, toy.mu, toy.delta, toy.B, (6 * toy.x_star).round(9).tolist()
    (1.0, 1.0, 0.0, 1.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """
    points = _numbers(optima, "optima")
    if points.ndim != 2 or not points.size:
        raise FedShuffleError(f"optima must be a table of points, got shape {points.shape}.")
    rows, d = points.shape
    matrices = _numbers(hessians, "hessians")
    if matrices.ndim == 0:
        matrices = matrices * np.eye(d)
    if matrices.shape not in ((d, d), (rows, d, d)):
        raise FedShuffleError(
            f"hessians have shape {matrices.shape}, but {rows} optima of dimension {d} need"
            f" ({rows}, {d}, {d}), or ({d}, {d}) for one that all share, or a number."
        )
    if not np.allclose(matrices, np.swapaxes(matrices, -1, -2), rtol=1e-10, atol=0.0):
        raise FedShuffleError("the hessians must be symmetric.")
    matrices = np.broadcast_to(matrices, (rows, d, d))
    owned = np.ones(rows, dtype=np.int64) if sizes is None else counts(sizes, "sizes")
    if owned.sum() != rows:
        raise FedShuffleError(f"sizes add up to {owned.sum()} rows, but there are {rows} optima.")
    wanted = Wanted.checked(owned / owned.sum(), w_hat, batch_size, form, B, radius)
    offsets = np.concatenate([[0], np.cumsum(owned)])

    def client(i: int) -> _Losses:
        mine = slice(int(offsets[i]), int(offsets[i + 1]))
        return _Quadratics(matrices[mine], points[mine])

    reasons = {
        "L": "the largest eigenvalue of any Hessian A_ij",
        "mu": "the smallest eigenvalue of any Hessian A_ij",
    }
    return _constants(client, owned, d, wanted, P, reasons)


def linear_regression_constants(
    federation: Federation,
    *,
    l2: float = 0.0,
    bias: bool = False,
    w_hat: ArrayLike | None = None,
    batch_size: int = 1,
    form: SimilarityForm = "gradient",
    B: float | None = None,  # noqa: N803
    P: ArrayLike | None = None,  # noqa: N803
    radius: float | None = None,
) -> ExactConstants:
    r"""The constants of ``f_ij(x) = 1/2 (a_ij' x - t_ij)^2 + l2/2 |x|^2``.

    This is the loss of ``nn.Linear(d, 1)`` with :data:`fedshuffle.losses.squared_error`, and ``l2``
    is :class:`~fedshuffle.LocalWork`'s ``weight_decay``. The data are read one client at a time.

    Args:
        federation: with two fields, features and targets.
        l2: the regularisation.
        bias: whether there is one; it comes last in ``x``, and is regularised like the rest.
        w_hat: the effective weights; the federation's own if not given.
        batch_size: examples per step.
        form: the form of gradient similarity (see :mod:`fedshuffle.theory.problems`).
        B: the least G for this B. By default see above.
        P: the least sigma_i for this P_i; one number or one for each client.
        radius: constants for the ball of this radius around the optimum only.

    >>> data = Federation.from_arrays([[1.0], [2.0], [1.0]], [1.0, 2.0, 2.0], sizes=[2, 1])
    >>> found = linear_regression_constants(data, l2=1.0)
    >>> found.L, found.mu, found.x_star.round(6).tolist()
    (5.0, 2.0, [0.777778])
    """
    table = Table(federation, bias)
    l2 = l2_checked(l2)
    wanted = Wanted.checked(federation.weights, w_hat, batch_size, form, B, radius)

    def client(i: int) -> _Losses:
        return _Regression(*table.client(i), l2)

    reasons = {
        "L": "max_ij |a_ij|^2 + l2",
        "mu": "the smallest eigenvalue of any a_ij a_ij' + l2 I: l2, in more than one dimension",
    }
    return _constants(client, federation.sizes, table.width, wanted, P, reasons)


class _Losses(Protocol):
    """The losses of one client."""

    hessian: FloatArray
    """The mean over the examples."""

    def at(self, x: FloatArray) -> tuple[float, FloatArray]:
        """The mean value and gradient."""

    def spread(self, x: FloatArray, axes: FloatArray) -> Form:
        """``mean_j |grad f_ij - grad f_i|^2`` at ``x + axes y``, as a form in y."""

    def curvatures(self) -> tuple[FloatArray, float]:
        """The largest eigenvalue for each example, and the smallest for any."""


class _Quadratics:
    def __init__(self, matrices: FloatArray, optima: FloatArray) -> None:
        self._matrices, self._optima = matrices, optima
        self.hessian: FloatArray = matrices.mean(axis=0)

    def at(self, x: FloatArray) -> tuple[float, FloatArray]:
        away = x - self._optima
        gradients = self._gradients(x)
        return 0.5 * float((away * gradients).sum(axis=1).mean()), gradients.mean(axis=0)

    def spread(self, x: FloatArray, axes: FloatArray) -> Form:
        gradients = self._gradients(x)
        rest = gradients - gradients.mean(axis=0)
        slopes = (self._matrices - self.hessian) @ axes
        m = len(slopes)
        return Form(
            np.einsum("jab,jac->bc", slopes, slopes) / m,
            np.einsum("jab,ja->b", slopes, rest) / m,
            float((rest**2).sum() / m),
        )

    def curvatures(self) -> tuple[FloatArray, float]:
        values: FloatArray = np.asarray(np.linalg.eigvalsh(self._matrices), dtype=np.float64)
        if values.min() < -_EXACT * np.abs(values).max():
            raise FedShuffleError(
                f"a Hessian has the eigenvalue {values.min():g}: these losses are not convex, and"
                " have no minimum. Use positive semidefinite ones."
            )
        return values[:, -1], max(0.0, float(values.min()))

    def _gradients(self, x: FloatArray) -> FloatArray:
        found: FloatArray = np.einsum("jab,jb->ja", self._matrices, x - self._optima)
        return found


class _Regression:
    def __init__(self, features: FloatArray, targets: FloatArray, l2: float) -> None:
        self._a, self._t, self._l2 = features, targets, l2
        self._squares: FloatArray = (features**2).sum(axis=1)
        self._gram: FloatArray = features.T @ features / len(targets)
        self.hessian = self._gram + l2 * np.eye(len(self._gram))

    def at(self, x: FloatArray) -> tuple[float, FloatArray]:
        rest = self._a @ x - self._t
        value = 0.5 * float((rest**2).mean()) + 0.5 * self._l2 * float(x @ x)
        return value, self._a.T @ rest / len(rest) + self._l2 * x

    def spread(self, x: FloatArray, axes: FloatArray) -> Form:
        # grad f_ij - grad f_i = (a a' - gram) z + (a r - mean): the regularisation cancels.
        m = len(self._t)
        rest = self._a @ x - self._t
        mean = self._a.T @ rest / m
        along, slope = self._a @ axes, self._gram @ axes
        return Form(
            along.T @ (self._squares[:, None] * along) / m - slope.T @ slope,
            along.T @ (self._squares * rest) / m - slope.T @ mean,
            float((((self._a * rest[:, None]) - mean) ** 2).sum() / m),
        )

    def curvatures(self) -> tuple[FloatArray, float]:
        flat = float(self._squares.min()) if self._a.shape[1] == 1 else 0.0
        return self._squares + self._l2, flat + self._l2


class _Seen(NamedTuple):
    """What is kept of each client."""

    L: float
    L_steps: float
    mu: float
    delta: float
    sigma: float
    P: float


def _constants(
    client: Callable[[int], _Losses],
    sizes: IntArray,
    d: int,
    wanted: Wanted,
    P: ArrayLike | None,  # noqa: N803
    reasons: dict[str, str],
) -> ExactConstants:
    """All of it, in four passes over the clients that keep matrices of one client only."""
    n, w_hat, radius = len(sizes), wanted.w_hat, wanted.radius
    given = None if P is None else _per_client(P, n)

    def clients() -> Iterator[tuple[int, float, _Losses]]:
        for i, weight in enumerate(w_hat.tolist()):
            yield i, weight, client(i)

    hessian, gradient = np.zeros((d, d)), np.zeros(d)
    for _, weight, losses in clients():
        losses.curvatures()  # refuses what is not convex before anything is made of it
        hessian += weight * losses.hessian
        gradient += weight * losses.at(gradient * 0.0)[1]
    values, vectors = axes(hessian)

    def newton(gradient: FloatArray) -> FloatArray:
        step: FloatArray = vectors @ ((vectors.T @ gradient) / values)
        return step

    x = -newton(gradient)
    gradient = np.zeros(d)  # once more, for the digits that the first solution lost
    for _, weight, losses in clients():
        gradient += weight * losses.at(x)[1]
    x = x - newton(gradient)

    seen, f_star = [], 0.0
    for i, weight, losses in clients():
        f_star += weight * losses.at(x)[0]
        seen.append(_look(losses, x, hessian, wanted, None if given is None else float(given[i])))
        if math.isinf(seen[-1].sigma):
            raise FedShuffleError(
                f"no sigma is enough for client {i} with P = {seen[-1].P:g}: the variance among its"
                " examples grows faster with the distance. Use a larger P, or a radius."
            )
    L = max(one.L_steps for one in seen)  # noqa: N806

    roots = values if wanted.form == "gradient" else np.sqrt(L * values)
    scaled = vectors / roots if radius is None else np.eye(d)
    square, c, s = np.zeros((scaled.shape[1],) * 2), np.zeros(scaled.shape[1]), 0.0
    for _, weight, losses in clients():
        slope, at_optimum = losses.hessian @ scaled, losses.at(x)[1]
        square += weight * slope.T @ slope
        c += weight * slope.T @ at_optimum
        s += weight * float(at_optimum @ at_optimum)
    top = Form(square, c, s)
    if radius is None:
        growth = Growth(top, np.zeros(len(c)))
        b2 = max(1.0, growth.usual) if wanted.B is None else wanted.B**2
        g2 = growth.slack(b2)
        if math.isinf(g2):
            raise FedShuffleError(
                f"no G is enough with B = {math.sqrt(b2):g}: clients' gradients grow up to"
                f" {math.sqrt(growth.least):g} times as fast as the objective's. Use a larger B, or"
                " a radius."
            )
    else:
        b2 = 1.0 if wanted.B is None else wanted.B**2
        bottom = hessian @ hessian if wanted.form == "gradient" else L * hessian
        g2 = max(0.0, largest_on_ball(Form(square - b2 * bottom, c, s), radius))

    where: Claim
    if radius is None:
        where = Claim("exact", "the least for this B (P_i): the largest value of a quadratic")
    else:
        where = Claim("on the ball", "the largest value of a quadratic on a ball")
    return ExactConstants(
        L=L,
        L_clients=np.array([one.L for one in seen]),
        L_objective=float(values.max(initial=0.0)),
        mu=min(one.mu for one in seen),
        mu_objective=float(values.min()) if len(values) == d else 0.0,
        G=math.sqrt(g2),
        B=math.sqrt(b2),
        sigma=np.array([one.sigma for one in seen]),
        P=np.array([one.P for one in seen]),
        delta=max(one.delta for one in seen),
        delta_clients=np.array([one.delta for one in seen]),
        x_star=x,
        f_star=f_star,
        w_hat=w_hat,
        form=wanted.form,
        radius=radius,
        claims={
            "L": wanted.about_steps(
                sizes, reasons["L"], "of a minibatch, at most the mean of its examples'"
            ),
            "L_clients": Claim("exact", "the largest eigenvalue of each A_i"),
            "L_objective": Claim("exact", "the largest eigenvalue of A"),
            "mu": wanted.about_steps(
                sizes, reasons["mu"], "of a minibatch, at least that of its examples"
            ),
            "mu_objective": Claim("exact", "the smallest eigenvalue of A"),
            "G": where,
            "B": where,
            "sigma": where,
            "P": where,
            "delta": Claim("exact", "max_i |A_i - A|: the Hessians are the same everywhere"),
            "x_star": Claim("exact", "the solution of A x = b"),
            "f_star": Claim("exact", "f-hat(x*)"),
        },
    )


def _look(
    losses: _Losses, x: FloatArray, hessian: FloatArray, wanted: Wanted, given: float | None
) -> _Seen:
    each, flattest = losses.curvatures()
    own = np.linalg.eigvalsh(losses.hessian)
    sigma, p = _variance(losses, x, len(each), wanted, given)
    return _Seen(
        L=float(own[-1]),
        L_steps=wanted.steepest(each, float(own[-1])),
        mu=max(0.0, float(own[0])) if len(each) <= wanted.batch_size else flattest,
        delta=float(np.abs(np.linalg.eigvalsh(losses.hessian - hessian)).max()),
        sigma=sigma,
        P=p,
    )


def _variance(
    losses: _Losses, x: FloatArray, m: int, wanted: Wanted, given: float | None
) -> tuple[float, float]:
    """Sigma_i and P_i of one client."""
    share = wanted.spread(m)
    if share == 0.0:
        return 0.0, given or 0.0
    gradient = losses.at(x)[1]
    if wanted.radius is None:
        values, vectors = axes(losses.hessian)
        growth = Growth(_times(losses.spread(x, vectors / values), share), vectors.T @ gradient)
        p2 = growth.usual if given is None else given**2
        return math.sqrt(growth.slack(p2)), math.sqrt(p2)
    p2 = 0.0 if given is None else given**2
    top, own = _times(losses.spread(x, np.eye(len(x))), share), losses.hessian
    rest = Form(
        top.Q - p2 * own @ own,
        top.c - p2 * own @ gradient,
        top.s - p2 * float(gradient @ gradient),
    )
    return math.sqrt(max(0.0, largest_on_ball(rest, wanted.radius))), math.sqrt(p2)


def _times(form: Form, factor: float) -> Form:
    return Form(form.Q * factor, form.c * factor, form.s * factor)


def _numbers(values: ArrayLike, what: str) -> FloatArray:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedShuffleError(f"{what} must be numbers: {error}.") from error
    if not np.isfinite(array).all():
        raise FedShuffleError(f"{what} must be finite.")
    return array


def _per_client(values: ArrayLike, n: int) -> FloatArray:
    array = _numbers(values, "P")
    if array.shape not in ((), (n,)) or (array < 0).any():
        raise FedShuffleError(
            f"P must be one number of at least 0, or one for each of the {n} clients."
        )
    return np.broadcast_to(array, (n,))
