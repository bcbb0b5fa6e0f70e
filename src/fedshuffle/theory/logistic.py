r"""Constants of logistic regression, binary or with many classes.

The losses of one example with features a, with logits :math:`z = W a`, are :math:`\ell(z, y) +
\frac{\lambda}{2} |W|^2`. All that counts of :math:`\ell` are three numbers:

=========================================================  ============  ==========
number                                                     binary        softmax
=========================================================  ============  ==========
slope, the supremum of :math:`|\nabla \ell|`               1             sqrt 2
curvature, the supremum of :math:`\|\nabla^2 \ell\|`       1/4           1/2
twist, a Lipschitz constant of :math:`\nabla^2 \ell`       1/(6 sqrt 3)  1/sqrt 2
=========================================================  ============  ==========

The last of softmax: along u the variance :math:`Var_p(v)` changes by
:math:`E[(v - \bar v)^2 (u - \bar u)] \le \sqrt 2 \cdot \frac12` for unit vectors u and v.

The regularisation is the same for all, so it cancels wherever gradients or Hessians are compared.
With :math:`\Sigma_i` the mean of :math:`a a^T` over client i, :math:`\Sigma = \sum_i \hat w_i
\Sigma_i` and :math:`\kappa` the curvature:

*Hessian similarity.* :math:`0 \preceq \nabla^2 \ell_i \preceq \kappa I \otimes \Sigma_i`, and
client i is itself a part of the whole, so that everywhere

.. math:: \delta_i \le \kappa \max\big( (1 - \hat w_i) \lambda_{max}(\Sigma_i),
          \lambda_{max}(\Sigma - \hat w_i \Sigma_i) \big).

Within r of the optimum the curvature of an example changes by at most :math:`d_{ij} = \min(\kappa,
\text{twist} \cdot |a_{ij}| r)`, so that with :math:`T_i` the mean of :math:`d a a^T` and :math:`T`
that over all

.. math:: \delta_i \le \|\nabla^2 f_i(x^\star) - \nabla^2 \hat f(x^\star)\|
          + \lambda_{max}(T + (1 - 2 \hat w_i) T_i).

*Gradient similarity* holds with B = 1. Its G^2 is the variance of :math:`\nabla \ell_i` over
clients, which is at most :math:`\sum_i \hat w_i (\text{slope} \cdot mean_j |a_{ij}|)^2` everywhere,
and at most :math:`\big( \sqrt{\sum_i \hat w_i |g_i|^2} + r \sqrt{\sum_i \hat w_i \delta_i^2}
\big)^2` within r of the optimum, where :math:`g_i = \nabla f_i(x^\star)`. In the form for convex
losses :math:`G^2 = \frac{B^2}{B^2 - 1} \sum_i \hat w_i |g_i|^2` for any B > 1: by Young's
inequality, and :math:`\sum_i \hat w_i |\nabla f_i(x) - g_i|^2 \le 2 L (\hat f(x) - \hat f^\star)`.

*Bounded variance* holds with P = 0: :math:`\sigma_i^2 \le \text{slope}^2\, mean_j |a_{ij}|^2`
everywhere, and :math:`\sigma_i \le \sigma_i(x^\star) + r \kappa \sqrt{mean_j |a_{ij}|^4}` within r
of the optimum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, count
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.theory.forms import axes
from fedshuffle.theory.problems import (
    Claim,
    ExactConstants,
    SimilarityForm,
    Table,
    Wanted,
    l2_checked,
)

_PARAMETERS = 2000
"""So many parameters a Hessian may have rows for."""

_STEPS = 100
"""So many Newton steps: where an optimum exists, a dozen do."""


def logistic_regression_constants(
    federation: Federation,
    *,
    l2: float = 0.0,
    classes: int | None = None,
    bias: bool = False,
    w_hat: ArrayLike | None = None,
    batch_size: int = 1,
    form: SimilarityForm = "gradient",
    B: float | None = None,  # noqa: N803
    radius: float | None = None,
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
        classes: how many, from 0 on; None for two with a single logit.
        bias: whether there is one; it is regularised like the rest.
        w_hat: the effective weights; the federation's own if not given.
        batch_size: examples per step.
        form: the form of gradient similarity (see :mod:`fedshuffle.theory.problems`).
        B: 1 by default, and sqrt 2 in the form for convex losses.
        radius: constants for the ball of this radius around the optimum only.

    >>> data = Federation.from_arrays([[2.0], [1.0], [-1.0]], [1, 0, 0], sizes=[2, 1])
    >>> found = logistic_regression_constants(data, l2=0.1)
    >>> found.L, found.mu, found.x_star.round(4).tolist()
    (1.1, 0.1, [0.5943])
    """
    table = Table(federation, bias)
    l2 = l2_checked(l2)
    wanted = Wanted.checked(federation.weights, w_hat, batch_size, form, B, radius)
    model = _Model(table, l2, None if classes is None else count(classes, "classes"))
    gram = model.gram(wanted)
    x, f_star, hessian = model.optimum(wanted, gram)

    n, r = len(table), math.inf if radius is None else float(radius)
    kappa, w = model.curvature, wanted.w_hat
    twisted = np.zeros_like(gram)
    for i in range(n):
        twisted += w[i] * model.twisted(i, r)
    at_optimum, delta, sigma, L_steps, far, steep = (np.zeros(n) for _ in range(6))  # noqa: N806
    for i in range(n):
        a, labels = model.client(i)
        squares = (a**2).sum(axis=1)
        own = a.T @ a / len(a)
        steep[i] = kappa * _largest(own) + l2
        L_steps[i] = wanted.steepest(kappa * squares + l2, float(steep[i]))
        near = model.at(x, a, labels)
        at_optimum[i] = float(near.gradient @ near.gradient)
        far[i] = model.slope * float(np.sqrt(squares).mean())
        delta[i] = kappa * max((1 - w[i]) * _largest(own), _largest(gram - w[i] * own))
        scale = math.sqrt(wanted.spread(len(a)))
        sigma[i] = scale * model.slope * math.sqrt(float(squares.mean()))
        if radius is not None:
            change = _largest(twisted + (1 - 2 * w[i]) * model.twisted(i, r))
            apart = float(np.abs(np.linalg.eigvalsh(near.hessian - hessian)).max())
            delta[i] = min(delta[i], apart + change)
            moved = r * kappa * math.sqrt(float((squares**2).mean()))
            sigma[i] = min(sigma[i], scale * (math.sqrt(near.variance) + moved))

    b2, g2 = _similarity(wanted, float(w @ at_optimum), float(w @ far**2), float(w @ delta**2))
    flat = float(np.linalg.eigvalsh(hessian)[0]) - _largest(twisted) if radius is not None else l2
    everywhere: Any = "bound" if radius is None else "on the ball"
    attained = model.attained
    return ExactConstants(
        L=float(L_steps.max()),
        L_clients=steep,
        L_objective=kappa * _largest(gram) + l2,
        mu=l2,
        mu_objective=max(l2, flat),
        G=math.sqrt(g2),
        B=math.sqrt(b2),
        sigma=sigma,
        P=np.zeros(n),
        delta=float(delta.max()),
        delta_clients=delta,
        x_star=model.in_order(x),
        f_star=f_star,
        w_hat=w,
        form=form,
        radius=radius,
        claims={
            "L": wanted.about_steps(
                federation.sizes,
                "curvature max_ij |a_ij|^2 + l2",
                "of a minibatch, at most the mean of its examples'",
            ),
            "L_clients": Claim(attained, "curvature lambda_max(Sigma_i) + l2"),
            "L_objective": Claim(attained, "curvature lambda_max(Sigma) + l2"),
            "mu": Claim("exact", "l2: far away the losses are as good as linear"),
            "mu_objective": Claim("exact", "l2: far away the losses are as good as linear")
            if radius is None
            else Claim("on the ball", "lambda_min at x*, less by what Hessians change, or l2"),
            "G": Claim(everywhere, "the variance of clients' gradients (see the module)"),
            "B": Claim(everywhere, "see G"),
            "sigma": Claim(everywhere, "gradients of bounded length (see the module)"),
            "P": Claim(everywhere, "see sigma"),
            "delta": Claim(everywhere, "Hessians between 0 and curvature Sigma_i (see the module)"),
            "x_star": Claim("exact", "Newton's method, until its steps are rounding"),
            "f_star": Claim("exact", "f-hat(x*)"),
        },
    )


def _similarity(
    wanted: Wanted, at_optimum: float, far: float, delta2: float
) -> tuple[float, float]:
    """B^2 and G^2."""
    variance = far
    if wanted.radius is not None:
        variance = min(far, (math.sqrt(at_optimum) + wanted.radius * math.sqrt(delta2)) ** 2)
    if wanted.form == "gradient":
        return (1.0 if wanted.B is None else wanted.B**2), variance
    b2 = 2.0 if wanted.B is None else wanted.B**2
    return b2, min(variance, b2 / (b2 - 1.0) * at_optimum) if b2 > 1.0 else variance


class _At(NamedTuple):
    """A client's losses at a point."""

    value: float
    gradient: FloatArray
    hessian: FloatArray
    variance: float
    """``mean_j |grad f_ij - grad f_i|^2``."""


@final
class _Model:
    """The losses, with parameters in the order (logit, feature)."""

    def __init__(self, table: Table, l2: float, classes: int | None) -> None:
        self._table, self._l2, self._classes = table, l2, classes
        if classes == 1:
            raise FedShuffleError("classes is 1, but there must be two or more to tell apart.")
        self._logits = 1 if classes is None else classes
        self.parameters = self._logits * table.width
        if self.parameters > _PARAMETERS:
            raise FedShuffleError(
                f"{self.parameters} parameters are too many for exact constants: at most"
                f" {_PARAMETERS} are possible. Use problem_constants, which estimates."
            )
        binary = classes is None
        self.slope = 1.0 if binary else math.sqrt(2.0)
        self.curvature = 0.25 if binary else 0.5
        self.twist = 1.0 / (6.0 * math.sqrt(3.0)) if binary else math.sqrt(0.5)
        # At zero both of two classes are equally likely; of more, the bias can rule out the rest.
        self.attained: Any = "exact" if self._logits <= 2 or table.bias else "bound"

    def client(self, i: int) -> tuple[FloatArray, FloatArray]:
        """Features, and the probability of each class (or of the label 1)."""
        a, labels = self._table.client(i)
        if self._classes is None:
            known = np.isin(labels, (0.0, 1.0)) | (labels == -1.0)
            wanted = "0 or 1 (or -1 and 1). Use classes= for more"
        else:
            known = np.isin(labels, np.arange(self._classes))
            wanted = f"whole numbers from 0 to {self._classes - 1}"
        if not known.all():
            raise FedShuffleError(
                f"client {self._table.federation.ids[i]!r} has the label"
                f" {labels[~known][0]:g}, but labels must be {wanted}."
            )
        if self._classes is None:
            return a, (labels > 0).astype(np.float64)[:, None]
        return a, np.eye(self._classes)[labels.astype(np.int64)]

    def gram(self, wanted: Wanted) -> FloatArray:
        """``Sigma``; every label is checked on the way."""
        gram = np.zeros((self._table.width,) * 2)
        for i, weight in enumerate(wanted.w_hat.tolist()):
            a, _ = self.client(i)
            gram += weight * (a.T @ a) / len(a)
        return gram

    def twisted(self, i: int, radius: float) -> FloatArray:
        """``T_i``."""
        a, _ = self.client(i)
        change = np.minimum(self.curvature, self.twist * np.sqrt((a**2).sum(axis=1)) * radius)
        result: FloatArray = a.T @ (change[:, None] * a) / len(a)
        return result

    def at(self, x: FloatArray, a: FloatArray, labels: FloatArray) -> _At:
        """Value, gradient, Hessian and variance of one client."""
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
        return _At(
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

    def whole(self, x: FloatArray, wanted: Wanted) -> _At:
        """The same of f-hat (without the variance)."""
        value, gradient, hessian = 0.0, np.zeros(len(x)), np.zeros((len(x), len(x)))
        for i, weight in enumerate(wanted.w_hat.tolist()):
            one = self.at(x, *self.client(i))
            value += weight * one.value
            gradient += weight * one.gradient
            hessian += weight * one.hessian
        return _At(value, gradient, hessian, 0.0)

    def optimum(self, wanted: Wanted, gram: FloatArray) -> tuple[FloatArray, float, FloatArray]:
        """Where f-hat is smallest, its value and its Hessian there: Newton, with halved steps."""
        basis = self._free(gram)
        x = np.zeros(self.parameters)
        here = self.whole(x, wanted)
        last = math.inf
        for _ in range(_STEPS):
            inner = basis.T @ here.hessian @ basis
            spectrum = np.linalg.eigvalsh(inner)
            if spectrum[0] <= 1e-13 * spectrum[-1]:
                break
            step = basis @ np.linalg.solve(inner, basis.T @ here.gradient)
            length = float(np.linalg.norm(step))
            if length <= 1e-7 * (1.0 + float(np.linalg.norm(x))) and length >= 0.5 * last:
                return x, here.value, here.hessian  # steps no longer shrink: this is rounding
            last, slope, size = length, float(here.gradient @ step), 1.0
            there = self.whole(x - step, wanted)
            # Near the optimum values agree to the last digit, and whole steps are right.
            while there.value > here.value - 0.1 * size * slope and length > 1e-5 and size > 1e-9:
                size *= 0.5
                there = self.whole(x - size * step, wanted)
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
        if self._classes is not None:  # the same added to all logits changes nothing
            logits = axes(np.eye(self._logits) - 1.0 / self._logits)[1]
        basis: FloatArray = np.asarray(np.kron(logits, axes(gram)[1]), dtype=np.float64)
        return basis

    def in_order(self, x: FloatArray) -> FloatArray:
        """In the order of a linear layer: all weights, then all biases."""
        rows = x.reshape(self._logits, -1)
        if not self._table.bias:
            return rows.reshape(-1)
        return np.concatenate([rows[:, :-1].reshape(-1), rows[:, -1]])


def _largest(matrix: FloatArray) -> float:
    return max(0.0, float(np.linalg.eigvalsh(matrix)[-1]))
