"""The largest values of quadratic functions, against another one and on a ball."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedshuffle._arrays import FloatArray

_RANK = 1e-12
"""Eigenvalues below this share of the largest count as zero."""

_NOTHING = 1e-20
"""A squared linear term below this share of its largest possible value counts as zero."""


class QuadraticForm(NamedTuple):
    """The function ``z -> z'Qz + 2 c'z + s``."""

    Q: FloatArray
    c: FloatArray
    s: float

    def scaled(self, factor: float) -> QuadraticForm:
        """The function times a factor."""
        return QuadraticForm(self.Q * factor, self.c * factor, self.s * factor)

    def max_on_ball(self, radius: float) -> float:
        """The largest value on a ball around zero, up to rounding.

        It is the smallest ``s + l r^2 + c' (l I - Q)^-1 c`` with ``l >= lambda_max(Q)^+`` (the dual
        of the trust-region problem has no gap).

            >>> concave = QuadraticForm(-np.eye(1), np.array([2.0]), 0.0)  # 4z - z^2
            >>> round(concave.max_on_ball(1.0), 9)
            3.0
        """
        if radius == 0.0 or not len(self.c):
            return self.s
        q, vectors = np.linalg.eigh(self.Q)
        gamma2 = (vectors.T @ self.c) ** 2
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
        return self.s + high * radius**2 + inverse(high, 1)


class QuadraticBounds:
    """Bounds ``t(y) <= a + b |y + shift|^2`` on a quadratic form t.

    With the eigenvalues ``theta_k`` of Q and the parts ``gamma_k`` of c along its eigenvectors,
    around ``-shift``, the smallest a is ``s + sum_k gamma_k^2 / (b - theta_k)``; there is none for
    ``b < theta_max``.

        >>> bounds = QuadraticBounds(QuadraticForm(np.eye(1), np.ones(1), 1.0), np.zeros(1))
        >>> bounds.smallest_b, bounds.smallest_a(2.0), bounds.smallest_a(1.0)
        (1.0, 2.0, inf)
    """

    def __init__(self, form: QuadraticForm, shift: FloatArray) -> None:
        theta, vectors = np.linalg.eigh(form.Q) if len(form.c) else (np.zeros(0), form.Q)
        self._theta = np.maximum(theta, 0.0)
        self._gamma2 = (vectors.T @ (form.c - form.Q @ shift)) ** 2
        s = form.s - 2.0 * float(form.c @ shift) + float(shift @ form.Q @ shift)
        self._s = max(s, 0.0)
        self.smallest_b = float(self._theta.max(initial=0.0))
        self._small = _NOTHING * self.smallest_b * self._s

    @property
    def default_b(self) -> float:
        """The smallest b, if it has a finite a for lack of a linear term; else twice that.

        Then ``a <= 2 s``, since ``(c'z)^2 <= s z'Qz`` and ``2 theta_max - theta >= theta``.
        """
        return self.smallest_b * (1.0 if (self._gamma2 <= self._small).all() else 2.0)

    def smallest_a(self, b: float) -> float:
        """The smallest a for this b; infinite if there is none."""
        gap = b - self._theta
        tight = gap <= _RANK * self.smallest_b
        matters = self._gamma2 > self._small
        if b < self.smallest_b * (1.0 - _RANK) or (tight & matters).any():
            return math.inf
        grown = float((self._gamma2[matters] / gap[matters]).sum())
        return max(0.0, self._s + grown)


def nonzero_axes(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The nonzero eigenvalues, and their eigenvectors.

    >>> values, vectors = nonzero_axes(np.diag([2.0, 0.0]))
    >>> values.tolist(), vectors.shape
    ([2.0], (2, 1))
    """
    values, vectors = np.linalg.eigh(matrix)
    kept = np.abs(values) > _RANK * max(float(np.abs(values).max()), np.finfo(float).tiny)
    return values[kept], vectors[:, kept]
