"""Gradients of clients at a model, products with their Hessians, and spectra. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import IntArray
from fedshuffle.engines.base import client_context, gradients
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError


@dataclass(frozen=True)
class Derivatives:
    """Derivatives of the clients' losses with weight decay, over examples in pieces."""

    problem: Problem
    weight_decay: float

    def value(self, x: Tensor, client: int) -> float:
        """The loss of a client."""
        value = float(self._mean(x, client, None, lambda loss: [loss]))
        return value + 0.5 * self.weight_decay * float(x.double().square().sum())

    def gradient(self, x: Tensor, client: int, rows: IntArray | None = None) -> Tensor:
        """The gradient of a client, or of some of its examples."""
        parameters = list(self.problem.parameters.values())
        found = self._mean(x, client, rows, lambda loss: gradients(loss, parameters))
        return found + self.weight_decay * x

    def product(self, x: Tensor, client: int, v: Tensor, rows: IntArray | None = None) -> Tensor:
        """The Hessian of a client, or of some of its examples, times v."""
        parameters = list(self.problem.parameters.values())

        def along(loss: Tensor) -> Sequence[Tensor]:
            first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            slope = _flat(first) @ v
            if not slope.requires_grad:  # the gradient is the same everywhere
                return [torch.zeros_like(v)]
            return torch.autograd.grad(slope, parameters, materialize_grads=True)

        return self._mean(x, client, rows, along) + self.weight_decay * v

    def _mean(
        self,
        x: Tensor,
        client: int,
        rows: IntArray | None,
        of: Callable[[Tensor], Sequence[Tensor]],
    ) -> Tensor:
        total = x.new_zeros(1)
        for piece, share in self.problem.pieces(client, rows):
            with client_context(self.problem, client, 0, "estimating constants"):
                parts = of(self.problem.loss_at(x, self.problem.batch(piece)))
            total = total + share * _flat(parts).detach()
        if not torch.isfinite(total).all():
            raise FedShuffleError(
                f"the derivatives of client {self.problem.federation.ids[client]!r} are not finite"
                " at this point. Choose a model that has not diverged."
            )
        return total


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


class SpectrumEnd(NamedTuple):
    """A Ritz value, its residual ``|H u - theta u|`` (an eigenvalue is as near), and its vector."""

    value: float
    residual: float
    vector: Tensor


def spectrum_ends(
    product: Callable[[Tensor], Tensor], start: Tensor, iterations: int, tolerance: float
) -> tuple[SpectrumEnd, SpectrumEnd]:
    """The lower and the upper end of a symmetric matrix's spectrum, by the Lanczos method.

    Both are approached from within, to a tolerance relative to the norm or for some iterations.
    (ARPACK would give nothing before it has converged.)
    """
    from scipy.linalg import eigh_tridiagonal  # slow to import: only when needed

    most, small = min(iterations, len(start)), 10.0 * torch.finfo(start.dtype).eps
    basis, diagonal, beside = start.new_empty(most, len(start)), list[float](), list[float]()
    moved, rest = start, float(start.norm())
    for k in range(most):
        basis[k] = moved / rest
        moved = product(basis[k])
        diagonal.append(float(moved @ basis[k]))
        length = float(moved.norm())
        for _ in range(2):  # once leaves an error of the size of rounding times the norm
            moved = moved - (basis[: k + 1] @ moved) @ basis[: k + 1]
        rest = float(moved.norm())
        values, vectors = eigh_tridiagonal(diagonal, beside)
        scale = float(np.abs(values).max())
        residuals = rest * np.abs(vectors[-1]) + small * scale
        if rest <= small * max(scale, length) or residuals[[0, -1]].max() <= tolerance * scale:
            break
        beside.append(rest)

    def end(j: int) -> SpectrumEnd:
        weights = torch.from_numpy(vectors[:, j].copy()).to(basis)
        return SpectrumEnd(float(values[j]), float(residuals[j]), weights @ basis[: k + 1])

    return end(0), end(-1)
