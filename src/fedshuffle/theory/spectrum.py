r"""The ends of the spectrum of a symmetric matrix of which only products with vectors are known.

The Lanczos method: power iteration that forgets nothing. From the vectors
:math:`v, H v, H^2 v, \dots` it takes the best approximations that their span allows, so after the
same number of products it is never further from :math:`\|H\|` than power iteration is, and it finds
the other end without a shift. Both ends are approached from within. A Ritz pair with the residual
:math:`|H u - \theta u|` has an eigenvalue within the residual of theta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class End:
    """One end of a spectrum: the Ritz value, its residual, its vector."""

    value: float
    residual: float
    vector: Tensor


@final
@dataclass(frozen=True)
class Spectrum:
    """Both ends of a spectrum, and how many products they cost."""

    low: End
    high: End
    products: int

    @property
    def norm(self) -> End:
        """The end that is further from zero."""
        return max(self.high, self.low, key=lambda end: abs(end.value))


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int, tolerance: float
) -> Spectrum:
    """Both ends, to the tolerance as a share of the norm, or as near as so many products bring.

    It keeps as many vectors as it does iterations, each made orthogonal to all before it.

        >>> ends = lanczos(
        ...     lambda v: torch.tensor([3.0, -1.0, 0.5]) * v, torch.ones(3), iterations=9,
        ...     tolerance=1e-6,
        ... )
        >>> round(ends.high.value, 5), round(ends.low.value, 5), ends.products
        (3.0, -1.0, 3)
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    small = 10.0 * torch.finfo(start.dtype).eps
    while True:
        moved = product(basis[-1])
        diagonal.append(float(moved @ basis[-1]))
        length = float(moved.norm())
        for _ in range(2):  # once leaves an error of the size of rounding times the norm
            for vector in basis:
                moved = moved - (moved @ vector) * vector
        rest = float(moved.norm())
        tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(tridiagonal)
        residuals = rest * np.abs(vectors[-1])
        scale = float(np.abs(values).max())
        full = len(basis) == min(iterations, len(start)) or rest <= small * max(scale, length)
        if full or max(residuals[0], residuals[-1]) <= tolerance * scale:
            break
        beside.append(rest)
        basis.append(moved / rest)

    def end(k: int) -> End:
        weights = vectors[:, k].tolist()
        vector = torch.zeros_like(start)
        for weight, part in zip(weights, basis, strict=True):
            vector += weight * part
        return End(float(values[k]), float(residuals[k]) + small * scale, vector)

    return Spectrum(low=end(0), high=end(-1), products=len(basis))
