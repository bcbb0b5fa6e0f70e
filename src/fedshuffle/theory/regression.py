"""Constants of linear and of logistic regression (derived in docs/research/proofs.md)."""

import math
from typing import Any, Unpack

import numpy as np

from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle._links import page
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.theory.constants import ExactConstants, Status, Validity
from fedshuffle.theory.exact import (
    ClientLosses,
    ConstantsOptions,
    ConstantsRequest,
    SquaredErrors,
    affine_constants,
    nonzero_axes,
    normalised_weights,
)

_DERIVED = page("explanation/theory", "the-constants-of-a-problem")

_MAX_PARAMETERS = 2000
"""Largest number of parameters for which a Hessian is built."""


class RegressionData:
    """Features and targets of the clients, read one client at a time."""

    def __init__(self, federation: Federation, bias: bool) -> None:
        expect(federation, Federation, "federation")
        if federation.transform is not None:
            raise FedShuffleError(
                "a transform changes the federation's examples, and exact constants need them as"
                " they are. Give federation.with_transform(None), or estimate the constants."
            )
        if len(federation.fields) != 2:
            raise FedShuffleError(
                f"the federation has {len(federation.fields)} fields, but a regression needs two:"
                " features and targets. Use Federation.from_arrays(features, targets, ...)."
            )
        inputs, targets = (tuple(field.shape) for field in federation.fields)
        if math.prod(targets[1:]) != 1:
            raise FedShuffleError(f"the targets have shape {targets}, not one number per example.")
        self.federation, self.bias = federation, bias
        self.width = math.prod(inputs[1:]) + bias

    def client(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Features (with a last column of ones for the bias) and targets of one client."""
        parts: Any = self.federation.client(i)
        if hasattr(parts[0], "detach"):
            parts = [part.detach().cpu() for part in parts]
        features, targets = (np.asarray(part, dtype=np.float64) for part in parts)
        features = features.reshape(len(targets), -1)
        if self.bias:
            features = np.hstack([features, np.ones((len(targets), 1))])
        return features, targets.reshape(-1)


def linear_regression_constants(
    federation: Federation,
    *,
    l2: float = 0.0,
    bias: bool = False,
    **options: Unpack[ConstantsOptions],
) -> ExactConstants:
    r"""The constants of ``f_ij(x) = 1/2 (a_ij' x - t_ij)^2 + l2/2 |x|^2``.

    This is the loss of ``nn.Linear(d, 1)`` with :data:`fedshuffle.losses.squared_error`, and ``l2``
    is :class:`~fedshuffle.LocalWork`'s ``weight_decay``. The data are read one client at a time.

    Args:
        federation: with two fields, features and targets.
        l2: the regularisation.
        bias: whether there is one; it comes last in ``x`` and is regularised too.
        options: :class:`~fedshuffle.theory.exact.ConstantsOptions`.

    >>> data = Federation.from_arrays([[1.0], [2.0], [1.0]], [1.0, 2.0, 2.0], sizes=[2, 1])
    >>> found = linear_regression_constants(data, l2=1.0)
    >>> found.L, found.mu, found.x_star.round(6).tolist()
    (5.0, 2.0, [0.777778])
    """
    data = RegressionData(federation, bias)
    l2 = number(l2, "l2", "[0, inf)")
    request = ConstantsRequest(**options)
    w_hat = normalised_weights(federation.weights, request.w_hat)

    def client(i: int) -> ClientLosses:
        return SquaredErrors(*data.client(i), l2)

    flattest = "the smallest eigenvalue of any a_ij a_ij' + l2 I: l2, in more than one dimension"
    reasons = {"L": "max_ij |a_ij|^2 + l2", "mu": flattest}
    return affine_constants(client, federation.sizes, data.width, w_hat, request, reasons)


def logistic_regression_constants(
    federation: Federation,
    *,
    l2: float = 0.0,
    classes: int | None = None,
    bias: bool = False,
    **options: Unpack[ConstantsOptions],
) -> ExactConstants:
    """The constants of logistic regression with ``l2/2 |x|^2``, and its optimum.

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
        options: :class:`~fedshuffle.theory.exact.ConstantsOptions`. B is 1 by default, sqrt 2
            in the form for convex losses; P is always 0.

    >>> data = Federation.from_arrays([[2.0], [1.0], [-1.0]], [1, 0, 0], sizes=[2, 1])
    >>> found = logistic_regression_constants(data, l2=0.1)
    >>> found.L, found.mu, found.x_star.round(4).tolist()
    (1.1, 0.1, [0.5943])
    """
    data, l2 = RegressionData(federation, bias), number(l2, "l2", "[0, inf)")
    request = ConstantsRequest(**options)
    if request.P is not None:
        raise FedShuffleError("P must not be given for logistic regression: it is 0.")
    w, n = normalised_weights(federation.weights, request.w_hat), len(federation)
    model = _LogisticModel(data, l2, classes, w)
    gram = model.mean_gram()
    x, f_star, hessian = model.optimum(gram)

    radius, kappa = request.radius, model.curvature
    changes = model.mean_gram(radius)
    at_optimum, delta, sigma, L_steps, far = np.zeros((5, n))  # noqa: N806
    for i in range(n):
        a, labels = model.client(i)
        squares = (a**2).sum(axis=1)
        own = model.gram(a)
        L_steps[i] = request.batch_smoothness(kappa * squares + l2, kappa * _largest(own) + l2)
        _, gradient, own_hessian, variance = model.at(x, a, labels)
        at_optimum[i] = float(gradient @ gradient)
        far[i] = model.slope * float(np.sqrt(squares).mean())
        delta[i] = kappa * max((1 - w[i]) * _largest(own), _largest(gram - w[i] * own))
        scale = math.sqrt(request.variance_factor(len(a)))
        sigma[i] = scale * model.slope * math.sqrt(float(squares.mean()))
        if radius is not None:
            change = _largest(changes + (1 - 2 * w[i]) * model.gram(a, radius))
            apart = float(np.abs(np.linalg.eigvalsh(own_hessian - hessian)).max())
            delta[i] = min(delta[i], apart + change)
            moved = radius * kappa * math.sqrt(float((squares**2).mean()))
            sigma[i] = min(sigma[i], scale * (math.sqrt(variance) + moved))

    b2 = request.B**2 if request.B is not None else 1.0 if request.form == "gradient" else 2.0
    g2, optimal = float(w @ far**2), float(w @ at_optimum)
    if radius is not None:
        g2 = min(g2, (math.sqrt(optimal) + radius * math.sqrt(float(w @ delta**2))) ** 2)
    if request.form == "convex" and b2 > 1.0:
        g2 = min(g2, b2 / (b2 - 1.0) * optimal)
    status: Status = "bound" if radius is None else "on the ball"
    smallest = float(np.linalg.eigvalsh(hessian)[0]) - _largest(changes)
    return ExactConstants(
        L=float(L_steps.max()),
        mu=l2,
        mu_objective=l2 if radius is None else max(l2, smallest),
        G=math.sqrt(g2),
        B=math.sqrt(b2),
        sigma=sigma,
        P=np.zeros(n),
        delta=float(delta.max()),
        x_star=model.in_order(x),
        f_star=f_star,
        w_hat=w,
        validity={
            "L": request.step_validity(federation.sizes, "curvature max_ij |a_ij|^2 + l2"),
            "mu": Validity("exact", "l2: far away the losses are almost linear"),
            "G": Validity(status, f"the variance of clients' gradients ({_DERIVED})"),
            "B": Validity(status, "see G"),
            "sigma": Validity(status, f"gradients of bounded length ({_DERIVED})"),
            "P": Validity(status, "see sigma"),
            "delta": Validity(status, f"Hessians between 0 and curvature Sigma_i ({_DERIVED})"),
        },
    )


class _LogisticModel:
    """The losses, with parameters in the order (logit, feature).

    With a single logit, that of label 0 is always zero.
    """

    def __init__(
        self, data: RegressionData, l2: float, classes: int | None, w_hat: FloatArray
    ) -> None:
        self.data, self.l2, self.w_hat, self.binary = data, l2, w_hat.tolist(), classes is None
        self.classes = 2 if classes is None else count(classes, "classes")
        if self.classes == 1:
            raise FedShuffleError("classes is 1, but there must be two or more to tell apart.")
        self.logits = 1 if self.binary else self.classes
        self.parameters = self.logits * data.width
        if self.parameters > _MAX_PARAMETERS:
            raise FedShuffleError(
                f"{self.parameters} parameters are too many for exact constants: at most"
                f" {_MAX_PARAMETERS} are possible. Use problem_constants, which estimates."
            )
        # Bounds on the gradient, the Hessian, and the change of the Hessian by the logits.
        self.slope = 1.0 if self.binary else math.sqrt(2.0)
        self.curvature = 0.25 if self.binary else 0.5
        self.twist = 1.0 / (6.0 * math.sqrt(3.0)) if self.binary else math.sqrt(0.5)

    def client(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Features, and the probability of each class; label 1 of two comes first."""
        a, labels = self.data.client(i)
        known, allowed = list(range(self.classes)), f"whole numbers from 0 to {self.classes - 1}"
        if self.binary:
            known, allowed = [-1, 0, 1], "0 or 1 (or -1 and 1). Use classes= for more"
        wrong = labels[~np.isin(labels, known)]
        if wrong.size:
            raise FedShuffleError(
                f"client {self.data.federation.ids[i]!r} has the label {wrong[0]:g}, but labels"
                f" must be {allowed}."
            )
        column = np.where(labels > 0, 0, 1) if self.binary else labels.astype(np.int64)
        return a, np.eye(self.classes)[column]

    def gram(self, a: FloatArray, radius: float | None = None) -> FloatArray:
        """The mean of ``a a'``; with a radius, of that times the largest change of an example's
        curvature within it.
        """
        weight = np.ones(len(a))
        if radius is not None:
            lengths = np.sqrt((a**2).sum(axis=1))
            weight = np.minimum(self.curvature, self.twist * radius * lengths)
        return _mean_square(a, weight)

    def mean_gram(self, radius: float | None = None) -> FloatArray:
        """The same over all clients."""
        total = np.zeros((self.data.width,) * 2)
        for i, share in enumerate(self.w_hat):
            total += share * self.gram(self.client(i)[0], radius)
        return total

    def at(
        self, x: FloatArray, a: FloatArray, labels: FloatArray
    ) -> tuple[float, FloatArray, FloatArray, float]:
        """The loss of one client, its gradient and Hessian, and the examples' variance."""
        m, k, d = len(a), self.logits, self.parameters
        z = np.zeros((m, self.classes))
        z[:, :k] = a @ x.reshape(k, -1).T
        z -= z.max(axis=1, keepdims=True)
        logs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        chances = np.exp(logs[:, :k])
        rest = chances - labels[:, :k]
        gradient = (rest.T @ a).reshape(-1) / m
        hessian = np.empty((k, a.shape[1], k, a.shape[1]))
        for p in range(k):
            for q in range(p, k):
                weight = chances[:, p] * (float(p == q) - chances[:, q])
                hessian[p, :, q] = hessian[q, :, p] = _mean_square(a, weight)
        value = 0.5 * self.l2 * float(x @ x) - float((labels * logs).sum(axis=1).mean())
        squares = float(((rest**2).sum(axis=1) * (a**2).sum(axis=1)).mean())
        variance = max(0.0, squares - float(gradient @ gradient))
        whole = hessian.reshape(d, d) + self.l2 * np.eye(d)
        return value, gradient + self.l2 * x, whole, variance

    def objective(self, x: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """The value, gradient and Hessian of f-hat."""
        value, gradient, hessian = 0.0, np.zeros(len(x)), np.zeros((len(x), len(x)))
        for i, weight in enumerate(self.w_hat):
            own_value, own_gradient, own_hessian, _ = self.at(x, *self.client(i))
            value += weight * own_value
            gradient += weight * own_gradient
            hessian += weight * own_hessian
        return value, gradient, hessian

    def optimum(self, gram: FloatArray) -> tuple[FloatArray, float, FloatArray]:
        """The minimiser of f-hat, its value and Hessian: Newton's method with halved steps."""
        basis: FloatArray = np.eye(self.parameters)
        if self.l2 == 0:  # directions in which the loss is constant are left out
            logits = np.eye(self.logits) - (0.0 if self.binary else 1.0 / self.logits)
            basis = np.kron(nonzero_axes(logits)[1], nonzero_axes(gram)[1]).astype(np.float64)
        x, last = np.zeros(self.parameters), math.inf
        value, gradient, hessian = self.objective(x)
        for _ in range(100):  # where an optimum exists, a dozen suffice
            inner = basis.T @ hessian @ basis
            spectrum = np.linalg.eigvalsh(inner)
            if spectrum[0] <= 1e-13 * spectrum[-1]:
                break
            step = basis @ np.linalg.solve(inner, basis.T @ gradient)
            length, slope, size = float(np.linalg.norm(step)), float(gradient @ step), 1.0
            if length <= 1e-7 * (1.0 + float(np.linalg.norm(x))) and length >= 0.5 * last:
                return x, value, hessian  # steps no longer shrink: this is rounding
            there, visible = self.objective(x - step), slope > 1e-13 * (1.0 + value)
            # Near the optimum values agree to the last digit, and whole steps are right.
            while visible and there[0] > value - 0.1 * size * slope and size > 1e-9:
                size *= 0.5
                there = self.objective(x - size * step)
            x, last, (value, gradient, hessian) = x - size * step, length, there
        raise FedShuffleError(
            "the loss has no minimum that can be found: the classes can (almost) be separated."
            " Regularise it: use l2 > 0."
        )

    def in_order(self, x: FloatArray) -> FloatArray:
        """In the order of a linear layer: all weights, then all biases."""
        rows = x.reshape(self.logits, -1)
        return np.concatenate([rows[:, :-1].ravel(), rows[:, -1]]) if self.data.bias else x


def _mean_square(a: FloatArray, weight: FloatArray) -> FloatArray:
    total: FloatArray = a.T @ (weight[:, None] * a)
    return total / len(a)


def _largest(matrix: FloatArray) -> float:
    return max(0.0, float(np.linalg.eigvalsh(matrix)[-1]))
