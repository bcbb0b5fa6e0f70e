r"""Constants of logistic regression, binary or with many classes (derived in docs/theory.md).

With :math:`\kappa` the curvature, :math:`\Sigma_i` the mean of :math:`a a^T` over client i,
:math:`\Sigma = \sum_i \hat w_i \Sigma_i`, and :math:`T_i` (:math:`T` over all) the mean of
:math:`\min(\kappa, \text{twist} \cdot |a| r) a a^T`, everywhere and within r of the optimum

.. math:: \delta_i \le \kappa \max\big( (1 - \hat w_i) \lambda_{max}(\Sigma_i),
          \lambda_{max}(\Sigma - \hat w_i \Sigma_i) \big), \qquad
          \delta_i \le \|\nabla^2 (f_i - \hat f)(x^\star)\|
          + \lambda_{max}(T + (1 - 2 \hat w_i) T_i).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

import numpy as np

from fedshuffle._arrays import FloatArray, count, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.theory.exact import (
    ConstantsOptions,
    ConstantsRequest,
    ExactConstants,
    RegressionData,
    Status,
    Validity,
    normalised_weights,
)
from fedshuffle.theory.quadratic_forms import nonzero_axes

_MAX_PARAMETERS = 2000
"""Largest number of parameters for which a Hessian is built."""

_MAX_NEWTON_STEPS = 100
"""Largest number of Newton steps: where an optimum exists, a dozen suffice."""


def logistic_regression_constants(
    federation: Federation,
    *,
    l2: float = 0.0,
    classes: int | None = None,
    bias: bool = False,
    **options: Unpack[ConstantsOptions],
) -> ExactConstants:
    """The constants of logistic regression with ``l2/2 |x|^2``, and its optimum by Newton's method.

    With ``classes`` this is the loss of ``nn.Linear(d, classes)`` with
    :data:`fedshuffle.losses.cross_entropy`, and ``x_star`` has the order of its parameters: the
    weights, class by class, then the biases. Without, labels are 0 and 1 (or -1 and 1) and there
    is one logit. ``l2`` is :class:`~fedshuffle.LocalWork`'s ``weight_decay``. The data are read one
    client at a time.

    Args:
        federation: with two fields, features and labels.
        l2: the regularisation.
        classes: their number, from 0 on; None for two with a single logit.
        bias: whether there is one; it is regularised too.
        options: :class:`~fedshuffle.theory.exact.ConstantsOptions`. B is 1 by default, and sqrt 2
            in the form for convex losses; P is always 0.

    >>> data = Federation.from_arrays([[2.0], [1.0], [-1.0]], [1, 0, 0], sizes=[2, 1])
    >>> found = logistic_regression_constants(data, l2=0.1)
    >>> found.L, found.mu, found.x_star.round(4).tolist()
    (1.1, 0.1, [0.5943])
    """
    data = RegressionData(federation, bias)
    l2 = number(l2, "l2", "[0, inf)")
    request = ConstantsRequest(**options)
    if request.P is not None:
        raise FedShuffleError("P must not be given for logistic regression: it is 0.")
    w, n = normalised_weights(federation.weights, request.w_hat), len(federation)
    radius = request.radius
    model = _LogisticModel(data, l2, None if classes is None else count(classes, "classes"), w)
    gram = model.gram()
    x, f_star, hessian = model.optimum(gram)

    r = math.inf if radius is None else float(radius)
    kappa = model.curvature
    changes = sum((w[i] * model.hessian_change(i, r) for i in range(n)), np.zeros_like(gram))
    at_optimum, delta, sigma, L_steps, far, L_clients = np.zeros((6, n))  # noqa: N806
    for i in range(n):
        a, labels = model.client(i)
        squares = (a**2).sum(axis=1)
        own = a.T @ a / len(a)
        L_clients[i] = kappa * _largest(own) + l2
        L_steps[i] = request.batch_smoothness(kappa * squares + l2, float(L_clients[i]))
        near = model.at(x, a, labels)
        at_optimum[i] = float(near.gradient @ near.gradient)
        far[i] = model.slope * float(np.sqrt(squares).mean())
        delta[i] = kappa * max((1 - w[i]) * _largest(own), _largest(gram - w[i] * own))
        scale = math.sqrt(request.variance_factor(len(a)))
        sigma[i] = scale * model.slope * math.sqrt(float(squares.mean()))
        if radius is not None:
            change = _largest(changes + (1 - 2 * w[i]) * model.hessian_change(i, r))
            apart = float(np.abs(np.linalg.eigvalsh(near.hessian - hessian)).max())
            delta[i] = min(delta[i], apart + change)
            moved = r * kappa * math.sqrt(float((squares**2).mean()))
            sigma[i] = min(sigma[i], scale * (math.sqrt(near.variance) + moved))

    b2, g2 = _similarity(request, float(w @ at_optimum), float(w @ far**2), float(w @ delta**2))
    smallest = l2
    status: Status = "bound"
    mu = mu_objective = Validity("exact", "l2: far away the losses are almost linear")
    if radius is not None:
        smallest, status = float(np.linalg.eigvalsh(hessian)[0]) - _largest(changes), "on the ball"
        mu_objective = Validity(status, "lambda_min at x* minus the change of Hessians, or l2")
    reasons: dict[str, tuple[Status, str]] = {
        "L_clients": (model.attained, "curvature lambda_max(Sigma_i) + l2"),
        "L_objective": (model.attained, "curvature lambda_max(Sigma) + l2"),
        "G": (status, "the variance of clients' gradients (docs/theory.md)"),
        "B": (status, "see G"),
        "sigma": (status, "gradients of bounded length (docs/theory.md)"),
        "P": (status, "see sigma"),
        "delta": (status, "Hessians between 0 and curvature Sigma_i (docs/theory.md)"),
        "x_star": ("exact", "Newton's method, up to rounding"),
        "f_star": ("exact", "f-hat(x*)"),
    }
    return ExactConstants(
        L=float(L_steps.max()),
        L_clients=L_clients,
        L_objective=kappa * _largest(gram) + l2,
        mu=l2,
        mu_objective=max(l2, smallest),
        G=math.sqrt(g2),
        B=math.sqrt(b2),
        sigma=sigma,
        P=np.zeros(n),
        delta_clients=delta,
        x_star=model.in_order(x),
        f_star=f_star,
        w_hat=w,
        form=request.form,
        radius=radius,
        validity={
            "L": request.step_validity(
                federation.sizes,
                "curvature max_ij |a_ij|^2 + l2",
                "of a minibatch, at most the mean of its examples'",
            ),
            "mu": mu,
            "mu_objective": mu_objective,
            **{name: Validity(*reason) for name, reason in reasons.items()},
        },
    )


def _similarity(
    request: ConstantsRequest, at_optimum: float, far: float, delta2: float
) -> tuple[float, float]:
    """B^2 and G^2."""
    variance = far
    if request.radius is not None:
        variance = min(far, (math.sqrt(at_optimum) + request.radius * math.sqrt(delta2)) ** 2)
    if request.form == "gradient":
        return (1.0 if request.B is None else request.B**2), variance
    b2 = 2.0 if request.B is None else request.B**2
    return b2, min(variance, b2 / (b2 - 1.0) * at_optimum) if b2 > 1.0 else variance


class _LossesAt(NamedTuple):
    """Losses at a point."""

    value: float
    gradient: FloatArray
    hessian: FloatArray
    variance: float
    """``mean_j |grad f_ij - grad f_i|^2``."""


class _LogisticModel:
    """The losses, with parameters in the order (logit, feature)."""

    def __init__(
        self, data: RegressionData, l2: float, classes: int | None, w_hat: FloatArray
    ) -> None:
        self._data, self._l2, self._classes, self._w_hat = data, l2, classes, w_hat.tolist()
        if classes == 1:
            raise FedShuffleError("classes is 1, but there must be two or more to tell apart.")
        self._logits = 1 if classes is None else classes
        self.parameters = self._logits * data.width
        if self.parameters > _MAX_PARAMETERS:
            raise FedShuffleError(
                f"{self.parameters} parameters are too many for exact constants: at most"
                f" {_MAX_PARAMETERS} are possible. Use problem_constants, which estimates."
            )
        binary = classes is None
        self.slope = 1.0 if binary else math.sqrt(2.0)
        self.curvature = 0.25 if binary else 0.5
        self.twist = 1.0 / (6.0 * math.sqrt(3.0)) if binary else math.sqrt(0.5)
        # At zero two classes are equally likely; with more, the bias can rule out the rest.
        self.attained: Status = "exact" if self._logits <= 2 or data.bias else "bound"

    def client(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Features, and the probability of each class (or of the label 1)."""
        a, labels = self._data.client(i)
        if self._classes is None:
            known, allowed = [-1, 0, 1], "0 or 1 (or -1 and 1). Use classes= for more"
        else:
            known = list(range(self._classes))
            allowed = f"whole numbers from 0 to {self._classes - 1}"
        wrong = labels[~np.isin(labels, known)]
        if wrong.size:
            raise FedShuffleError(
                f"client {self._data.federation.ids[i]!r} has the label {wrong[0]:g}, but labels"
                f" must be {allowed}."
            )
        if self._classes is None:
            return a, (labels > 0).astype(np.float64)[:, None]
        return a, np.eye(self._classes)[labels.astype(np.int64)]

    def gram(self) -> FloatArray:
        """``Sigma``; checks every label."""
        gram = np.zeros((self._data.width,) * 2)
        for i, weight in enumerate(self._w_hat):
            a, _ = self.client(i)
            gram += weight * (a.T @ a) / len(a)
        return gram

    def hessian_change(self, i: int, radius: float) -> FloatArray:
        """``T_i``."""
        a, _ = self.client(i)
        change = np.minimum(self.curvature, self.twist * np.sqrt((a**2).sum(axis=1)) * radius)
        result: FloatArray = a.T @ (change[:, None] * a) / len(a)
        return result

    def at(self, x: FloatArray, a: FloatArray, labels: FloatArray) -> _LossesAt:
        """The losses of one client."""
        m, k = len(a), self._logits
        chances, value = self._chances(a @ x.reshape(k, -1).T, labels)
        rest = chances - labels
        gradient = (rest.T @ a).reshape(-1) / m
        hessian = np.empty((k, a.shape[1], k, a.shape[1]))
        for p in range(k):
            for q in range(p, k):
                if self._classes is None:
                    weight = chances[:, 0] * (1.0 - chances[:, 0])
                else:
                    weight = chances[:, p] * (float(p == q) - chances[:, q])
                hessian[p, :, q] = hessian[q, :, p] = a.T @ (weight[:, None] * a) / m
        d = self.parameters
        squares = float(((rest**2).sum(axis=1) * (a**2).sum(axis=1)).mean())
        return _LossesAt(
            value + 0.5 * self._l2 * float(x @ x),
            gradient + self._l2 * x,
            hessian.reshape(d, d) + self._l2 * np.eye(d),
            max(0.0, squares - float(gradient @ gradient)),
        )

    def _chances(self, z: FloatArray, labels: FloatArray) -> tuple[FloatArray, float]:
        if self._classes is None:
            chances = 0.5 * (1.0 + np.tanh(0.5 * z))
            return chances, float((np.logaddexp(0.0, z) - labels * z).mean())
        z = z - z.max(axis=1, keepdims=True)
        total = np.log(np.exp(z).sum(axis=1, keepdims=True))
        return np.exp(z - total), float((total[:, 0] - (labels * z).sum(axis=1)).mean())

    def _objective(self, x: FloatArray) -> _LossesAt:
        """The objective f-hat (without the variance)."""
        value, gradient, hessian = 0.0, np.zeros(len(x)), np.zeros((len(x), len(x)))
        for i, weight in enumerate(self._w_hat):
            one = self.at(x, *self.client(i))
            value += weight * one.value
            gradient += weight * one.gradient
            hessian += weight * one.hessian
        return _LossesAt(value, gradient, hessian, 0.0)

    def optimum(self, gram: FloatArray) -> tuple[FloatArray, float, FloatArray]:
        """The minimiser of f-hat, its value and Hessian: Newton's method with halved steps."""
        basis = self._free(gram)
        x = np.zeros(self.parameters)
        here = self._objective(x)
        last = math.inf
        for _ in range(_MAX_NEWTON_STEPS):
            inner = basis.T @ here.hessian @ basis
            spectrum = np.linalg.eigvalsh(inner)
            if spectrum[0] <= 1e-13 * spectrum[-1]:
                break
            step = basis @ np.linalg.solve(inner, basis.T @ here.gradient)
            length = float(np.linalg.norm(step))
            if length <= 1e-7 * (1.0 + float(np.linalg.norm(x))) and length >= 0.5 * last:
                return x, here.value, here.hessian  # steps no longer shrink: this is rounding
            last, slope, size = length, float(here.gradient @ step), 1.0
            there = self._objective(x - step)
            # Near the optimum values agree to the last digit, and whole steps are right.
            while there.value > here.value - 0.1 * size * slope and length > 1e-5 and size > 1e-9:
                size *= 0.5
                there = self._objective(x - size * step)
            x, here = x - size * step, there
            if length == 0.0:
                return x, here.value, here.hessian
        raise FedShuffleError(
            "the loss has no minimum that can be found: the classes can (almost) be separated."
            " Regularise it: use l2 > 0."
        )

    def _free(self, gram: FloatArray) -> FloatArray:
        """A basis of all directions in which the loss is not constant."""
        if self._l2 > 0:
            return np.eye(self.parameters)
        logits: FloatArray = np.eye(self._logits)
        if self._classes is not None:  # the same shift of all logits changes nothing
            logits = nonzero_axes(np.eye(self._logits) - 1.0 / self._logits)[1]
        return np.asarray(np.kron(logits, nonzero_axes(gram)[1]), dtype=np.float64)

    def in_order(self, x: FloatArray) -> FloatArray:
        """In the order of a linear layer: all weights, then all biases."""
        rows = x.reshape(self._logits, -1)
        if not self._data.bias:
            return rows.reshape(-1)
        return np.concatenate([rows[:, :-1].reshape(-1), rows[:, -1]])


def _largest(matrix: FloatArray) -> float:
    return max(0.0, float(np.linalg.eigvalsh(matrix)[-1]))
