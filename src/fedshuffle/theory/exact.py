"""Exact constants of losses with affine gradients, such as quadratics (docs/explanation/theory.md).

On a ball B is 1 by default and P_i is 0; otherwise both are as :func:`smallest_bound` chooses.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, counts, number, vector
from fedshuffle.errors import FedShuffleError, error_context, unknown
from fedshuffle.theory.constants import ExactConstants, Validity

SimilarityForm = Literal["gradient", "convex"]

_RANK = 1e-12
"""Eigenvalues below this share of the largest count as zero."""


class ConstantsOptions(TypedDict, total=False):
    """Options of all functions for exact constants."""

    w_hat: ArrayLike | None
    """The effective weights of the clients; by default those of the federation."""
    batch_size: int
    """Examples per step; 1 by default."""
    form: SimilarityForm
    """The form of gradient similarity; ``gradient`` by default."""
    B: float | None
    """Find the smallest G for this B; each function explains its default."""
    P: float | None
    """Find the smallest sigma_i for this P, the same for all clients; likewise."""
    radius: float | None
    """Find constants for the ball of this radius around the optimum only."""


@dataclass(frozen=True)
class ConstantsRequest:
    """The options, checked."""

    w_hat: ArrayLike | None = None
    batch_size: int = 1
    form: SimilarityForm = "gradient"
    B: float | None = None
    P: float | None = None
    radius: float | None = None

    def __post_init__(self) -> None:
        count(self.batch_size, "batch_size")
        if self.form not in get_args(SimilarityForm):
            raise unknown("form of gradient similarity", self.form, get_args(SimilarityForm))
        for name, within in (("B", "[1, inf)"), ("P", "[0, inf)"), ("radius", "[0, inf)")):
            if getattr(self, name) is not None:
                number(getattr(self, name), name, within)

    def variance_factor(self, m: int) -> float:
        """The variance of minibatch gradients relative to that among a client's m examples.

        For s of them, drawn without replacement, ``(m - s) / (s (m - 1))``; the mean over an epoch.
        """
        if m == 1:
            return 0.0
        b = min(self.batch_size, m)
        whole, rest = divmod(m, b)
        total = whole * (m - b) / b + ((m - rest) / rest if rest else 0.0)
        return total / ((m - 1) * (whole + (rest > 0)))

    def batch_smoothness(self, smoothness: FloatArray, whole: float) -> float:
        """A bound on L of any minibatch: the mean of the largest L of as many examples, or
        ``whole``, that of all examples together, if one step takes them all.
        """
        if self.batch_size >= len(smoothness):
            return whole
        smallest = len(smoothness) % self.batch_size or self.batch_size
        return float(np.sort(smoothness)[-smallest:].mean())

    def step_validity(self, sizes: IntArray, reason: str) -> Validity:
        """Exact for steps of single examples or whole clients, else a bound for minibatches."""
        if ((self.batch_size == 1) | (sizes <= self.batch_size)).all():
            return Validity("exact", reason)
        return Validity("bound", f"{reason}; of a minibatch by those of its examples")


def normalised_weights(default: FloatArray, w_hat: ArrayLike | None) -> FloatArray:
    """The weights, summing to one."""
    if w_hat is None:
        return default
    checked = vector(w_hat, "w_hat", range(len(default)))
    return checked / float(checked.sum())


def quadratic_constants(
    hessians: ArrayLike,
    optima: ArrayLike,
    *,
    sizes: ArrayLike | None = None,
    **options: Unpack[ConstantsOptions],
) -> ExactConstants:
    r"""The constants of the quadratics ``f_ij(x) = 1/2 (x - m_ij)' A_ij (x - m_ij)``.

    Args:
        hessians: the matrices ``A_ij``, one for each row of ``optima``; or one for all; or a number
            for that multiple of the identity.
        optima: the points ``m_ij``, one per row.
        sizes: the number of rows of each client, in order; by default one row per client.
        options: :class:`~fedshuffle.theory.exact.ConstantsOptions`; weights are by size.

    >>> toy = quadratic_constants(1.0, np.eye(6), sizes=[1, 2, 3])
    >>> toy.L, toy.mu, toy.delta, toy.B, (6 * toy.x_star).round(9).tolist()
    (1.0, 1.0, 0.0, 1.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """
    points = _finite(optima, "optima")
    if points.ndim != 2 or not points.size:
        raise FedShuffleError(f"optima must be a table of points, got shape {points.shape}.")
    rows, d = points.shape
    matrices = _finite(hessians, "hessians")
    if matrices.ndim == 0:
        matrices = matrices * np.eye(d)
    if matrices.shape not in ((d, d), (rows, d, d)):
        raise FedShuffleError(
            f"hessians have shape {matrices.shape}, but {rows} optima of dimension {d} need"
            f" ({rows}, {d}, {d}), or ({d}, {d}) for one that all share, or a number."
        )
    if not np.allclose(matrices, np.swapaxes(matrices, -1, -2), rtol=1e-10, atol=0.0):
        raise FedShuffleError("the hessians must be symmetric.")
    values = np.linalg.eigvalsh(matrices)
    if values.min() < -1e-9 * np.abs(values).max():  # more than rounding
        raise FedShuffleError(
            f"a Hessian has the eigenvalue {values.min():g}: these losses are not convex, and have"
            " no minimum. Use positive semidefinite ones."
        )
    matrices = np.broadcast_to(matrices, (rows, d, d))
    owned = np.ones(rows, dtype=np.int64) if sizes is None else counts(sizes, "sizes")
    if owned.sum() != rows:
        raise FedShuffleError(f"sizes add up to {owned.sum()} rows, but there are {rows} optima.")
    request = ConstantsRequest(**options)
    w_hat = normalised_weights(owned / owned.sum(), request.w_hat)
    offsets = np.concatenate([[0], np.cumsum(owned)])

    def client(i: int) -> ClientLosses:
        mine = slice(int(offsets[i]), int(offsets[i + 1]))
        return _Quadratics(matrices[mine], points[mine])

    ends = {"L": "largest", "mu": "smallest"}
    reasons = {name: f"the {end} eigenvalue of any Hessian A_ij" for name, end in ends.items()}
    return affine_constants(client, owned, d, w_hat, request, reasons)


class QuadraticForm(NamedTuple):
    """The function ``z -> z'Qz + 2 c'z + s``."""

    Q: FloatArray
    c: FloatArray
    s: float


class _Quadratics:
    """The losses of one client."""

    def __init__(self, matrices: FloatArray, optima: FloatArray) -> None:
        self._matrices, self._optima = matrices, optima
        self.hessian: FloatArray = matrices.mean(axis=0)

    def at(self, x: FloatArray) -> tuple[float, FloatArray]:
        """The mean value and gradient."""
        away = x - self._optima
        gradients = self._gradients(x)
        return 0.5 * float((away * gradients).sum(axis=1).mean()), gradients.mean(axis=0)

    def variance(self, x: FloatArray, factor: float, axes: FloatArray) -> QuadraticForm:
        """``factor mean_j |grad f_ij - grad f_i|^2`` at ``x + axes y``, as a form in y."""
        gradients = self._gradients(x)
        rest = gradients - gradients.mean(axis=0)
        slopes = (self._matrices - self.hessian) @ axes
        each = factor / len(slopes)
        return QuadraticForm(
            each * np.einsum("jab,jac->bc", slopes, slopes),
            each * np.einsum("jab,ja->b", slopes, rest),
            each * float((rest**2).sum()),
        )

    def curvatures(self) -> tuple[FloatArray, float]:
        """The largest eigenvalue for each example, and the smallest for any."""
        values: FloatArray = np.asarray(np.linalg.eigvalsh(self._matrices), dtype=np.float64)
        return values[:, -1], max(0.0, float(values.min()))

    def _gradients(self, x: FloatArray) -> FloatArray:
        found: FloatArray = np.einsum("jab,jb->ja", self._matrices, x - self._optima)
        return found


class SquaredErrors:
    """The same for linear regression."""

    def __init__(self, features: FloatArray, targets: FloatArray, l2: float) -> None:
        self._a, self._t, self._l2 = features, targets, l2
        self._squares: FloatArray = (features**2).sum(axis=1)
        self._gram: FloatArray = features.T @ features / len(targets)
        self.hessian = self._gram + l2 * np.eye(len(self._gram))

    def at(self, x: FloatArray) -> tuple[float, FloatArray]:
        rest = self._a @ x - self._t
        value = 0.5 * float((rest**2).mean()) + 0.5 * self._l2 * float(x @ x)
        return value, self._a.T @ rest / len(rest) + self._l2 * x

    def variance(self, x: FloatArray, factor: float, axes: FloatArray) -> QuadraticForm:
        # grad f_ij - grad f_i = (a a' - gram) z + (a r - mean): the regularisation cancels.
        m = len(self._t)
        rest = self._a @ x - self._t
        mean = self._a.T @ rest / m
        along, slope = self._a @ axes, self._gram @ axes
        return QuadraticForm(
            factor * (along.T @ (self._squares[:, None] * along) / m - slope.T @ slope),
            factor * (along.T @ (self._squares * rest) / m - slope.T @ mean),
            factor * float((((self._a * rest[:, None]) - mean) ** 2).sum() / m),
        )

    def curvatures(self) -> tuple[FloatArray, float]:
        flat = float(self._squares.min()) if self._a.shape[1] == 1 else 0.0
        return self._squares + self._l2, flat + self._l2


ClientLosses = _Quadratics | SquaredErrors


def affine_constants(
    client: Callable[[int], ClientLosses],
    sizes: IntArray,
    d: int,
    w_hat: FloatArray,
    request: ConstantsRequest,
    reasons: dict[str, str],
) -> ExactConstants:
    """All constants, in passes over the clients that hold matrices of one client only."""

    def clients() -> Iterator[tuple[int, float, ClientLosses]]:
        for i, weight in enumerate(w_hat.tolist()):
            yield i, weight, client(i)

    hessian, x = np.zeros((d, d)), np.zeros(d)
    for _, weight, losses in clients():
        hessian += weight * losses.hessian
    values, vectors = nonzero_axes(hessian)
    for _ in range(2):  # once more, for the digits that the first solution lost
        gradient = sum((weight * losses.at(x)[1] for _, weight, losses in clients()), np.zeros(d))
        x = x - vectors @ ((vectors.T @ gradient) / values)

    n, f_star = len(sizes), 0.0
    L_steps, mu, delta, sigma, P = np.zeros((5, n))  # noqa: N806
    for i, weight, losses in clients():
        value, gradient = losses.at(x)
        f_star += weight * value
        each, flattest = losses.curvatures()
        own = np.linalg.eigvalsh(losses.hessian)
        L_steps[i] = request.batch_smoothness(each, float(own[-1]))
        mu[i] = max(0.0, own[0]) if len(each) <= request.batch_size else flattest
        delta[i] = np.abs(np.linalg.eigvalsh(losses.hessian - hessian)).max()
        factor, P[i] = request.variance_factor(len(each)), request.P or 0.0
        if factor > 0.0:
            form = partial(losses.variance, x, factor)
            bound = smallest_bound(form, losses.hessian, gradient, request.P, request.radius)
            sigma[i], P[i] = bound
        if math.isinf(sigma[i]):
            raise FedShuffleError(
                f"no sigma is enough for client {i} with P = {P[i]:g}: the variance among its"
                " examples grows faster with the distance. Use a larger P, or a radius."
            )
    L = float(L_steps.max())  # noqa: N806

    def similarity(axes: FloatArray) -> QuadraticForm:
        """``sum_i w-hat_i |grad f_i|^2`` at ``x + axes y``, as a form in y."""
        Q, c, s = np.zeros((axes.shape[1],) * 2), np.zeros(axes.shape[1]), 0.0  # noqa: N806
        for _, weight, losses in clients():
            slope, gradient = losses.hessian @ axes, losses.at(x)[1]
            Q += weight * slope.T @ slope  # noqa: N806
            c += weight * slope.T @ gradient
            s += weight * float(gradient @ gradient)
        return QuadraticForm(Q, c, s)

    convex, origin = request.form == "convex", np.zeros(d)
    root = vectors * np.sqrt(L * values) @ vectors.T if convex else hessian
    G, B = smallest_bound(similarity, root, origin, request.B, request.radius, least=1.0)  # noqa: N806
    if math.isinf(G):
        raise FedShuffleError(
            f"no G is enough with B = {B:g}: the gradients of clients grow faster than the"
            " objective's. Use a larger B, or a radius."
        )
    where = Validity("exact", "the smallest for this B (P_i): the maximum of a quadratic")
    if request.radius is not None:
        where = Validity("on the ball", "the maximum of a quadratic on a ball")
    return ExactConstants(
        L=L,
        mu=min(L, float(mu.min())),
        mu_objective=float(values.min()) if len(values) == d else 0.0,
        G=G,
        B=B,
        sigma=sigma,
        P=P,
        delta=float(delta.max()),
        x_star=x,
        f_star=f_star,
        w_hat=w_hat,
        validity={
            **{name: request.step_validity(sizes, why) for name, why in reasons.items()},
            **dict.fromkeys(("G", "B", "sigma", "P"), where),
            "delta": Validity("exact", "max_i |A_i - A|: the Hessians are the same everywhere"),
        },
    )


def _finite(values: ArrayLike, what: str) -> FloatArray:
    with error_context(lambda error: f"{what} must be numbers: {error}.", (TypeError, ValueError)):
        array = np.array(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise FedShuffleError(f"{what} must be finite.")
    return array


def smallest_bound(
    form: Callable[[FloatArray], QuadraticForm],
    R: FloatArray,  # noqa: N803
    g: FloatArray,
    given: float | None,
    radius: float | None = None,
    least: float = 0.0,
) -> tuple[float, float]:
    """The roots of the smallest a (or infinity) with ``t(z) <= a + b |R z + g|^2`` for all z, or on
    a ball; and of b, if it is not given.

    R is symmetric, and ``form(axes)`` is t at ``z = axes y`` as a form in y. With the eigenvalues
    ``theta_k`` of Q and the parts ``gamma_k`` of c along its eigenvectors, around ``-V'g``, the
    smallest a is ``s + sum_k gamma_k^2 / (b - theta_k)``. The default b is ``theta_max`` if there
    is no linear term, otherwise twice that, for which ``a <= 2 s``; on a ball it is ``least``.
    """
    if radius is not None:
        b = least if given is None else given**2
        Q, c, s = form(np.eye(len(R)))  # noqa: N806
        rest = QuadraticForm(Q - b * R @ R, c - b * R @ g, s - b * float(g @ g))
        return math.sqrt(max(0.0, max_on_ball(rest, radius))), math.sqrt(b)
    values, vectors = nonzero_axes(R)
    Q, c, s = form(vectors / values)  # noqa: N806
    shift = vectors.T @ g
    theta, axes = np.linalg.eigh(Q)
    theta, gamma2 = np.maximum(theta, 0.0), (axes.T @ (c - Q @ shift)) ** 2
    s = max(0.0, s - 2.0 * float(c @ shift) + float(shift @ Q @ shift))
    limit = float(theta.max(initial=0.0))
    matters = gamma2 > 1e-20 * limit * s  # the share of its largest value that rounding leaves
    b = max(least, limit * (2.0 if matters.any() else 1.0)) if given is None else given**2
    gap = b - theta[matters]
    if b < limit * (1.0 - _RANK) or (gap <= _RANK * limit).any():
        return math.inf, math.sqrt(b)
    return math.sqrt(s + float((gamma2[matters] / gap).sum())), math.sqrt(b)


def max_on_ball(form: QuadraticForm, radius: float) -> float:
    """The largest value on a ball around zero, up to rounding.

    It is the smallest ``s + l r^2 + c' (l I - Q)^-1 c`` with ``l >= lambda_max(Q)^+`` (the dual of
    the trust-region problem has no gap).
    """
    if radius == 0.0:
        return form.s
    q, vectors = np.linalg.eigh(form.Q)
    gamma2 = (vectors.T @ form.c) ** 2
    low = max(float(q[-1]), 0.0)
    q, gamma2 = q[gamma2 > 0.0], gamma2[gamma2 > 0.0]  # the rest would be zero by zero
    high = low + math.sqrt(float(gamma2.sum())) / radius
    step = 1e-14 * max(high, float(np.finfo(float).tiny))

    def inverse(multiplier: float, power: int) -> float:
        return float((gamma2 / np.maximum(multiplier - q, step) ** power).sum())

    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if inverse(middle, 2) > radius**2 else (low, middle)
    return form.s + high * radius**2 + inverse(high, 1)


def nonzero_axes(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The nonzero eigenvalues, and their eigenvectors."""
    values, vectors = np.linalg.eigh(matrix)
    kept = np.abs(values) > _RANK * max(float(np.abs(values).max()), np.finfo(float).tiny)
    return values[kept], vectors[:, kept]
