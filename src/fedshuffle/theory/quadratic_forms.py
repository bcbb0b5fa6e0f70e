"""The largest values of quadratic functions, against another one and on a ball."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def smallest_bound(
    form: Callable[[FloatArray], QuadraticForm],
    R: FloatArray,  # noqa: N803
    g: FloatArray,
    *,
    b: float | None,
    least: float = 0.0,
    radius: float | None = None,
) -> tuple[float, float]:
    """The smallest a with ``t(z) <= a + b |R z + g|^2`` for all z or on a ball, and b.

    R is symmetric, ``form(axes)`` is t at ``z = axes y`` as a form in y, and a is infinite if there
    is none. Without a ball, write ``|y + V'g|`` for the length on the right. With the eigenvalues
    ``theta_k`` of Q and the parts ``gamma_k`` of c along its eigenvectors, around ``-V'g``, the
    smallest a is ``s + sum_k gamma_k^2 / (b - theta_k)``. The default b is ``theta_max`` if it has
    a finite a for lack of a linear term; otherwise twice that, for which ``a <= 2 s``. It is at
    least ``least``, which is the default on a ball.

        >>> shifted = QuadraticForm(np.eye(1), np.ones(1), 1.0)  # (z + 1)^2
        >>> smallest_bound(lambda axes: shifted, np.eye(1), np.zeros(1), b=None)
        (2.0, 2.0)
    """
    if radius is not None:
        b = least if b is None else b
        Q, c, s = form(np.eye(len(R)))  # noqa: N806
        rest = QuadraticForm(Q - b * R @ R, c - b * R @ g, s - b * float(g @ g))
        return max(0.0, max_on_ball(rest, radius)), b
    values, vectors = nonzero_axes(R)
    Q, c, s = form(vectors / values)  # noqa: N806
    shift = vectors.T @ g
    theta, axes = np.linalg.eigh(Q)
    theta, gamma2 = np.maximum(theta, 0.0), (axes.T @ (c - Q @ shift)) ** 2
    s = max(0.0, s - 2.0 * float(c @ shift) + float(shift @ Q @ shift))
    limit = float(theta.max(initial=0.0))
    matters = gamma2 > _NOTHING * limit * s
    if b is None:
        b = max(least, limit * (2.0 if matters.any() else 1.0))
    gap = b - theta[matters]
    if b < limit * (1.0 - _RANK) or (gap <= _RANK * limit).any():
        return math.inf, b
    return s + float((gamma2[matters] / gap).sum()), b


def max_on_ball(form: QuadraticForm, radius: float) -> float:
    """The largest value on a ball around zero, up to rounding.

    It is the smallest ``s + l r^2 + c' (l I - Q)^-1 c`` with ``l >= lambda_max(Q)^+`` (the dual of
    the trust-region problem has no gap).

        >>> concave = QuadraticForm(-np.eye(1), np.array([2.0]), 0.0)  # 4z - z^2
        >>> round(max_on_ball(concave, 1.0), 9)
        3.0
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
    """The nonzero eigenvalues, and their eigenvectors.

    >>> values, vectors = nonzero_axes(np.diag([2.0, 0.0]))
    >>> values.tolist(), vectors.shape
    ([2.0], (2, 1))
    """
    values, vectors = np.linalg.eigh(matrix)
    kept = np.abs(values) > _RANK * max(float(np.abs(values).max()), np.finfo(float).tiny)
    return values[kept], vectors[:, kept]
