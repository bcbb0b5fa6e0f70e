r"""By how much one quadratic function outgrows another: what the assumptions ask of quadratics.

For losses with affine gradients, gradient similarity and bounded variance both read

.. math:: t(z) = z^T Q z + 2 c^T z + s \;\le\; a + b\, |R z + g|^2 \qquad \text{for all } z,

and the least a for a given b is the maximum of a quadratic function.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

import numpy as np

from fedshuffle._arrays import FloatArray

_RANK = 1e-12
"""Eigenvalues below this share of the largest are taken for zero."""

_NOTHING = 1e-20
"""A squared linear term below this share of what it could be is taken for zero."""


class Form(NamedTuple):
    """The function ``z -> z'Qz + 2 c'z + s``."""

    Q: FloatArray
    c: FloatArray
    s: float


def axes(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The eigenvalues that are not zero, and their eigenvectors.

    >>> values, vectors = axes(np.diag([2.0, 0.0]))
    >>> values.tolist(), vectors.shape
    ([2.0], (2, 1))
    """
    values, vectors = np.linalg.eigh(matrix)
    kept = np.abs(values) > _RANK * max(float(np.abs(values).max()), np.finfo(float).tiny)
    return values[kept], vectors[:, kept]


@final
class Growth:
    r"""How a form grows against ``|y + shift|^2 + rest``, where y are coordinates with R = 1.

    Around the minimum of the latter let :math:`\theta_k` be the eigenvalues of Q and
    :math:`\gamma_k` the parts of c along its eigenvectors. Then for :math:`b > \theta_{max}`

    .. math:: a(b) = \max_y \big( t(y) - b |y|^2 \big) = s + \sum_k \frac{\gamma_k^2}{b - \theta_k},

    and for :math:`b < \theta_{max}` no a is enough.

        >>> growth = Growth(Form(np.eye(1), np.ones(1), 1.0), np.zeros(1))  # (y + 1)^2 and y^2
        >>> growth.least, growth.slack(2.0), growth.slack(1.0)
        (1.0, 2.0, inf)
    """

    def __init__(self, top: Form, shift: FloatArray, floor: float | None = None) -> None:
        """``floor`` is the other function at y = 0, if it is more than ``|shift|^2``."""
        theta, vectors = np.linalg.eigh(top.Q) if len(top.c) else (np.zeros(0), top.Q)
        self._theta = np.maximum(theta, 0.0)
        self._gamma2 = (vectors.T @ (top.c - top.Q @ shift)) ** 2
        s = top.s - 2.0 * float(top.c @ shift) + float(shift @ top.Q @ shift)
        self._s = max(s, 0.0)
        self._rest = 0.0 if floor is None else max(0.0, floor - float(shift @ shift))
        self.least = float(self._theta.max(initial=0.0))
        self._small = _NOTHING * self.least * self._s

    @property
    def usual(self) -> float:
        """The least b, if a finite a belongs to it for lack of a linear term; else twice that.

        Twice, because then ``a <= 2 s``: by the Cauchy-Schwarz inequality
        ``(c'z)^2 <= s z'Qz``, and ``2 theta_max - theta >= theta``.
        """
        return self.least if (self._gamma2 <= self._small).all() else 2.0 * self.least

    def slack(self, b: float) -> float:
        """The least a for this b; infinite where none is enough."""
        gap = b - self._theta
        tight = gap <= _RANK * self.least
        counts = self._gamma2 > self._small
        if b < self.least * (1.0 - _RANK) or (tight & counts).any():
            return math.inf
        grown = float((self._gamma2[counts] / gap[counts]).sum())
        return max(0.0, self._s + grown - b * self._rest)


def largest_on_ball(form: Form, radius: float) -> float:
    r"""The largest value of a form on a ball, from above (and exact but for rounding).

    For every :math:`\lambda \ge \lambda_{max}(Q)^+` the value is at most :math:`s + \lambda r^2 +
    c^T (\lambda I - Q)^{-1} c`, and for the best one it is equal (the dual of the trust-region
    problem has no gap).

        >>> round(largest_on_ball(Form(-np.eye(1), np.array([2.0]), 0.0), 1.0), 9)  # 4z - z^2
        3.0
    """
    if radius == 0.0 or not len(form.c):
        return form.s
    q, vectors = np.linalg.eigh(form.Q)
    gamma2 = (vectors.T @ form.c) ** 2
    low = max(float(q[-1]), 0.0)
    q, gamma2 = q[gamma2 > 0.0], gamma2[gamma2 > 0.0]  # the rest would be zero by zero
    high = low + math.sqrt(float(gamma2.sum())) / radius
    step = 1e-14 * max(high, float(np.finfo(float).tiny))

    def inverse(multiplier: float, power: int) -> float:
        gap = np.maximum(multiplier - q, step)
        return float((gamma2 / gap**power).sum())

    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if inverse(middle, 2) > radius**2 else (low, middle)
    return form.s + high * radius**2 + inverse(high, 1)
