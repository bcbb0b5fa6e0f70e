"""Gradients and Hessians of sampled clients and minibatches at a model. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines.base import client_context
from fedshuffle.engines.base import gradients as autograd_gradients
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator


@dataclass(frozen=True)
class ConstantEstimate:
    """An estimated constant and its uncertainty."""

    value: float
    residual: float = 0.0
    """How far the iteration may still be from an eigenvalue."""
    standard_error: float = 0.0
    """From sampling clients and minibatches; 0 where all were seen."""
    note: str = ""

    @property
    def uncertainty(self) -> float:
        """The residual and two standard errors."""
        return self.residual + 2.0 * self.standard_error

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.value:.4g} +- {self.uncertainty:.2g}{note}"


@dataclass(frozen=True)
class SpectrumEnd:
    """One end of a spectrum: the Ritz value, its residual, its vector."""

    value: float
    residual: float
    vector: Tensor


@dataclass(eq=False)
class Estimator:
    """Gradients and curvatures of sampled clients, at one model after another."""

    problem: Problem
    weight_decay: float
    chosen: IntArray
    """The sampled clients, in the order in which they were drawn."""
    share: FloatArray
    """Their weights, summing to one."""
    steps: list[list[IntArray]]
    """Some minibatches of each sampled client, as positions among its examples."""
    seed: int
    iterations: int
    tolerance: float
    delta_clients: int
    on_cost: Callable[[int], None]
    cost: int = 0

    def __post_init__(self) -> None:
        federation = self.problem.federation
        self.n, self.sizes = len(federation), federation.sizes[self.chosen].tolist()
        self.parameters = list(self.problem.parameters.values())
        self.pairs = list(zip(self.chosen.tolist(), self.share.tolist(), strict=True))
        # The minibatches of clients that take more than one step per epoch.
        self.tried = [
            steps if len(steps[0]) < m else []
            for m, steps in zip(self.sizes, self.steps, strict=True)
        ]
        self.sampled = len(self.chosen) < self.n

    @property
    def largest_cost(self) -> int:
        """The largest cost of a point, in gradients of examples."""
        all_clients = sum(self.sizes)
        tried = sum(len(rows) for steps in self.tried for rows in steps)
        products = self.iterations * (2 * all_clients + tried) + 2 * self.sampled * all_clients
        for m in self.sizes[: self.delta_clients]:
            products += self.iterations * (all_clients + m) + self.sampled * all_clients
        return int(2 * all_clients + tried + 2 * products)

    def gradients(self, x: Tensor) -> tuple[FloatArray, ...]:
        """For each client ``|grad f_i - grad f-hat|^2``, ``|grad f_i|^2``, the variance of its
        steps and its standard error. Stores at most two gradients: the mean comes first.
        """
        mean = torch.zeros_like(x)
        for i, share in self.pairs:
            mean += share * self._gradient(x, i)
        found = []
        for i, m, steps in zip(self.chosen.tolist(), self.sizes, self.tried, strict=True):
            gradient = self._gradient(x, i)
            squares = np.array([_square(self._gradient(x, i, rows) - gradient) for rows in steps])
            variance = error = 0.0
            if steps:
                variance, unseen = float(squares.mean()), 1.0
                if all(len(rows) == 1 for rows in steps):  # minibatches differ between epochs
                    unseen -= len(steps) / m
                spread = float(squares.var(ddof=1)) if len(steps) > 1 else math.inf
                error = math.sqrt(unseen * spread / len(steps)) if unseen else 0.0
            found.append((_square(gradient - mean), _square(gradient), variance, error))
        return tuple(np.array(found).T)

    def curvatures(self, x: Tensor, point: int) -> dict[str, ConstantEstimate]:
        """The ends of all spectra at one of the points."""
        low, high = self._ends(partial(self._mean_product, x), self._rng(3 * point, 0))
        clients, single = [], []
        for i, steps in zip(self.chosen.tolist(), self.tried, strict=True):
            rng = self._rng(3 * point + 1, i)
            clients.append(self._ends(partial(self._product, x, i), rng))
            products = [partial(self._product, x, i, positions=rows) for rows in steps]
            single += [self._ends(product, rng) for product in products] or clients[-1:]
        apart = []
        for i in self.chosen[: self.delta_clients].tolist():

            def difference(v: Tensor, i: int = i) -> Tensor:
                return self._product(x, i, v) - self._mean_product(x, v)

            end = _norm(self._ends(difference, self._rng(3 * point + 2, i)))
            error, note = self._eigenvalue_error(x, end), self._note(self.delta_clients)
            apart.append(ConstantEstimate(abs(end.value), end.residual, error, note))
        flattest = min((ends[0] for ends in single), key=lambda end: end.value)
        note, steep = self._note(len(self.chosen)), _norm((low, high))
        error, low_error = (self._eigenvalue_error(x, end) for end in (steep, low))
        L_steps, L_clients = (  # noqa: N806
            ConstantEstimate(abs(end.value), end.residual, 0.0, note)
            for end in (max(map(_norm, spectra), key=_size) for spectra in (single, clients))
        )
        return {
            "L_steps": L_steps,
            "L_clients": L_clients,
            "L_objective": ConstantEstimate(abs(steep.value), steep.residual, error),
            "mu": ConstantEstimate(flattest.value, flattest.residual),
            "mu_objective": ConstantEstimate(low.value, low.residual, low_error),
            "delta": max(apart, key=lambda estimate: estimate.value),
        }

    def _ends(
        self, product: Callable[[Tensor], Tensor], rng: np.random.Generator
    ) -> tuple[SpectrumEnd, SpectrumEnd]:
        x = self.problem.start
        start = torch.from_numpy(rng.normal(size=len(x))).to(x)
        return spectrum_ends(product, start, iterations=self.iterations, tolerance=self.tolerance)

    def _rng(self, stage: int, client: int) -> np.random.Generator:
        # Round 0 draws the clients, and round 1 their minibatches.
        return generator(self.seed, Purpose.CONSTANTS, round=2 + stage, client=client)

    def error(self, values: FloatArray) -> float:
        """The standard error of the mean ``sum_i v_i q_i`` of one value per sampled client, about
        the root of ``(1 - m/n) m / (m - 1) sum_i v_i^2 (q_i - mean)^2``.
        """
        m = len(values)
        if not self.sampled:
            return 0.0
        if m == 1:
            return math.inf
        spread = float((self.share**2 * (values - float(self.share @ values)) ** 2).sum())
        return math.sqrt((1.0 - m / self.n) * m / (m - 1) * spread)

    def _eigenvalue_error(self, x: Tensor, end: SpectrumEnd) -> float:
        """The standard error of an eigenvalue, to first order the mean of ``u' H_i u``."""
        if not self.sampled:
            return 0.0
        u = end.vector
        return self.error(np.array([float(u @ self._product(x, i, u)) for i, _ in self.pairs]))

    def _note(self, seen: int) -> str:
        if seen == self.n:
            return ""
        share = 1.0 - 0.05 ** (1.0 / seen)
        return (
            f"the largest of {seen} of {self.n} clients: with 95% confidence no more than"
            f" {share:.0%} of the clients have more"
        )

    # Derivatives ------------------------------------------------------------------------------

    def _gradient(self, x: Tensor, client: int, positions: IntArray | None = None) -> Tensor:
        """The gradient of a client, or of some of its examples."""

        def one(batch: tuple[Tensor, ...]) -> Tensor:
            return _flat(autograd_gradients(self.problem.loss_at(x, batch), self.parameters))

        return self._mean(client, positions, one, 1) + self.weight_decay * x

    def _product(
        self, x: Tensor, client: int, v: Tensor, positions: IntArray | None = None
    ) -> Tensor:
        """The Hessian of a client, or of some of its examples, times v."""

        def one(batch: tuple[Tensor, ...]) -> Tensor:
            value = self.problem.loss_at(x, batch)
            first = torch.autograd.grad(
                value, self.parameters, create_graph=True, materialize_grads=True
            )
            along = torch.cat([part.reshape(-1) for part in first]) @ v
            if not along.requires_grad:  # the gradient is the same everywhere
                return torch.zeros_like(v)
            return _flat(torch.autograd.grad(along, self.parameters, materialize_grads=True))

        return self._mean(client, positions, one, 2) + self.weight_decay * v

    def _mean_product(self, x: Tensor, v: Tensor) -> Tensor:
        """The Hessian of the objective times v."""
        total = torch.zeros_like(v)
        for i, share in self.pairs:
            total += share * self._product(x, i, v)
        return total

    def _mean(
        self,
        client: int,
        positions: IntArray | None,
        one: Callable[[tuple[Tensor, ...]], Tensor],
        cost: int,
    ) -> Tensor:
        """The mean over a client's examples, computed in pieces."""
        total = torch.zeros_like(self.problem.start)
        for rows, share in self.problem.pieces(client, positions):
            with client_context(self.problem, client, 0, "estimating constants"):
                part = one(self.problem.batch(rows))
            total += part * share
            self.cost += cost * len(rows)
            self.on_cost(self.cost)
        if not torch.isfinite(total).all():
            raise FedShuffleError(
                f"the derivatives of client {self.problem.federation.ids[client]!r} are not finite"
                " at this point. Choose a model that has not diverged."
            )
        return total


def spectrum_ends(
    product: Callable[[Tensor], Tensor], start: Tensor, *, iterations: int, tolerance: float
) -> tuple[SpectrumEnd, SpectrumEnd]:
    r"""The lower and the upper end of a symmetric matrix's spectrum, by the Lanczos method.

    Both are approached from within, to a tolerance relative to the norm or for some iterations, and
    never further from :math:`\|H\|` than by power iteration. An eigenvalue lies within the residual
    :math:`|H u - \theta u|` of a Ritz value. Stores one vector per iteration.

        >>> low, high = spectrum_ends(
        ...     lambda v: torch.tensor([3.0, -1.0, 0.5]) * v, torch.ones(3), iterations=9,
        ...     tolerance=1e-6,
        ... )
        >>> round(high.value, 5), round(low.value, 5)
        (3.0, -1.0)
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

    def end(k: int) -> SpectrumEnd:
        vector = torch.zeros_like(start)
        for weight, part in zip(vectors[:, k].tolist(), basis, strict=True):
            vector += weight * part
        return SpectrumEnd(float(values[k]), float(residuals[k]) + small * scale, vector)

    return end(0), end(-1)


@contextmanager
def twice_differentiable(device: torch.device) -> Iterator[None]:
    """Avoid torch's fast paths (attention, recurrent layers) that have no second derivatives."""
    cuda = device.type == "cuda"
    recurrent = torch.backends.cudnn.flags(enabled=False) if cuda else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), recurrent:
        yield


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _square(vector: Tensor) -> float:
    return float(vector.double().square().sum())


def _size(end: SpectrumEnd) -> float:
    return abs(end.value)


def _norm(ends: tuple[SpectrumEnd, SpectrumEnd]) -> SpectrumEnd:
    """The end that is further from zero."""
    return max(reversed(ends), key=_size)
