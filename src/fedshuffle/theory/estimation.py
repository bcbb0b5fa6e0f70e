"""Estimated constants of any model, loss and federation, at given models. Needs torch."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from rich.progress import TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedshuffle._arrays import FloatArray, IntArray, count, number
from fedshuffle._terminal import progress_bar
from fedshuffle.engines.base import check_model, client_context, gradients
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.theory.constants import ConstantEstimate, EstimatedConstants
from fedshuffle.theory.exact import normalised_weights


def problem_constants(
    model: nn.Module,
    federation: Federation,
    loss: Loss,
    *,
    points: Sequence[Any] | FloatArray | None = None,
    clients: int = 50,
    w_hat: ArrayLike | None = None,
    batch_size: int = 1,
    weight_decay: float = 0.0,
    minibatches: int = 8,
    delta_clients: int = 8,
    iterations: int = 20,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: bool = False,
) -> EstimatedConstants:
    """Estimate the constants of a model and a loss on a federation, at given models.

    Examples are read client by client in pieces, so they may exceed memory. The same seed gives the
    same numbers. The model is not changed.

    Args:
        model: any torch module that draws no random numbers (call ``eval()`` if it has dropout).
        federation: in memory or on disk.
        loss: ``loss(model, *fields)``, as for training.
        points: models to estimate at, each a flat vector of the trainable parameters or a module of
            the same kind; by default the model itself.
        clients: largest number of clients, drawn uniformly by the seed.
        w_hat: the effective weights; by default the federation's.
        batch_size: examples per step: what an ``f_ij`` is.
        weight_decay: that of the local work.
        minibatches: largest number per client, for the variance and for L of single steps.
        delta_clients: largest number of clients for delta; each costs as much as all for L.
        iterations: largest number of products with each Hessian; one vector is stored for each.
        tolerance: when to stop earlier, relative to the norm.
        seed: determines everything random.
        progress: show a progress bar on the error stream.

    >>> from fedshuffle import losses
    >>> data = Federation.from_arrays(torch.eye(2), torch.ones(2, 1), sizes=[1, 1])
    >>> linear = nn.Linear(2, 1, bias=False)
    >>> found = problem_constants(linear, data, losses.squared_error)
    >>> round(found.L.value, 5), round(found.L_objective.value, 5), round(found.delta.value, 5)
    (1.0, 0.5, 0.5)
    """
    problem = Problem(model, loss, federation)
    if check_model(problem):
        raise FedShuffleError(
            "the model or the loss draws random numbers, so its constants are not defined. Call"
            " model.eval(), or leave out dropout."
        )
    weights, seed = normalised_weights(federation.weights, w_hat), check_seed(seed)
    chosen = np.arange(len(federation))
    if count(clients, "clients") < len(chosen):  # in the order drawn: the first are a sample too
        chosen = generator(seed, Purpose.CONSTANTS).choice(len(chosen), clients, replace=False)
    size, steps = count(batch_size, "batch_size"), count(minibatches, "minibatches")
    estimator = _Estimator(
        Derivatives(problem, number(weight_decay, "weight_decay", "[0, inf)")),
        clients={i: _minibatches(federation, i, size, steps, seed) for i in chosen.tolist()},
        share=weights[chosen] / float(weights[chosen].sum()),
        delta_clients=chosen[: count(delta_clients, "delta_clients")].tolist(),
        iterations=count(iterations, "iterations"),
        tolerance=number(tolerance, "tolerance", "(0, 1)"),
        seed=seed,
    )
    models = _points(points, problem)
    bar = progress_bar(progress, TimeElapsedColumn(), "+", TimeRemainingColumn())
    passes = 2 + len(estimator.delta_clients)
    task = bar.add_task("constants", total=len(models) * passes * len(chosen))
    # Fast attention and recurrent layers of cuDNN have no second derivatives.
    with bar, sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        first = np.stack([estimator.gradients(x) for x in models])
        advance = partial(bar.advance, task)
        second = [estimator.curvatures(x, k, advance) for k, x in enumerate(models)]

    # The largest (for mu the smallest) over all points.
    apart, squares, variances, errors = np.moveaxis(first, 2, 0)
    share, factor = estimator.share, _variance_correction(estimator.share, weights)
    variance = factor * apart @ share
    worst, where = variance.argmax(), variances.argmax(axis=0)[None]
    largest = np.take_along_axis(variances, where, 0)[0]
    local = float(np.linalg.norm(share * np.take_along_axis(errors, where, 0)))
    return EstimatedConstants(
        L=_largest(at["L"] for at in second),
        L_objective=_largest(at["L_objective"] for at in second),
        mu=min((at["mu"] for at in second), key=lambda one: one.value),
        delta=_largest(at["delta"] for at in second),
        G=_root(float(variance[worst]), factor * estimator.error(apart[worst])),
        sigma_rms=_root(float(share @ largest), math.hypot(estimator.error(largest), local)),
        clients=chosen,
        w_hat=weights,
        gradient=np.maximum(squares @ share - variance, 0.0),
        variance=variance,
        client_gradients=squares,
        client_variances=variances,
    )


def _points(points: Sequence[Any] | FloatArray | None, problem: Problem) -> list[Tensor]:
    result = []
    for k, point in enumerate([problem.start] if points is None else points):
        if isinstance(point, nn.Module):
            point = nn.utils.parameters_to_vector(p for p in point.parameters() if p.requires_grad)
        with error_context(f"point {k} is not a vector of numbers"):
            vector = torch.as_tensor(point, dtype=problem.dtype, device=problem.device).detach()
        if vector.shape != problem.start.shape or not torch.isfinite(vector).all():
            raise FedShuffleError(
                f"point {k} of shape {tuple(vector.shape)} must be a flat vector of the"
                f" {len(problem.start)} trainable parameters of the model, all of them finite."
            )
        result.append(vector.clone())
    if not result:
        raise FedShuffleError("there are no points: give at least one, or None for the model's.")
    return result


def _minibatches(
    federation: Federation, client: int, batch_size: int, most: int, seed: int
) -> list[IntArray]:
    """Some minibatches of an epoch, as positions among the examples; none if one step takes all."""
    m = int(federation.sizes[client])
    rng, steps = generator(seed, Purpose.CONSTANTS, round=1, client=client), -(-m // batch_size)
    order = rng.permutation(m)
    some = np.sort(rng.choice(steps, size=min(steps, most), replace=False)).tolist()
    return [order[k * batch_size : (k + 1) * batch_size] for k in some] if steps > 1 else []


def _variance_correction(share: FloatArray, w_hat: FloatArray) -> float:
    """The factor from a variance over m clients to that over all n, with effective numbers."""
    m, n = 1.0 / float(share @ share), 1.0 / float(w_hat @ w_hat)
    return max(1.0, (n - 1.0) * m / (n * (m - 1.0))) if m > 1.0 + 1e-9 else 1.0


def _root(square: float, error: float) -> ConstantEstimate:
    """The root of an estimate with this standard error."""
    root = math.sqrt(square)
    return ConstantEstimate(root, 0.0, error / (2.0 * root) if root > 0 else math.sqrt(error))


def _largest(estimates: Iterable[ConstantEstimate]) -> ConstantEstimate:
    return max(estimates, key=lambda one: one.value)


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
        for piece in self.problem.pieces(client, rows):
            with client_context(self.problem, client, 0, "estimating constants"):
                batch = self.problem.batch(piece.rows, piece.address)
                parts = of(self.problem.loss_at(x, batch))
            total = total + piece.share * _flat(parts).detach()
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


@dataclass(frozen=True, eq=False)
class _Estimator:
    """Gradients and curvatures of sampled clients, at one model after another."""

    losses: Derivatives
    clients: dict[int, list[IntArray]]
    """The sampled clients with some of their minibatches, in the order in which they were drawn."""
    share: FloatArray
    """Their weights, summing to one."""
    delta_clients: list[int]
    iterations: int
    tolerance: float
    seed: int

    def gradients(self, x: Tensor) -> FloatArray:
        """For each client ``|grad f_i - grad f-hat|^2``, ``|grad f_i|^2``, the variance of its
        steps and its standard error. Stores at most two gradients: the mean comes first.
        """
        mean = self._mean(partial(self.losses.gradient, x))
        found = []
        for i, steps in self.clients.items():
            gradient = self.losses.gradient(x, i)
            variance = error = 0.0
            if steps:
                parts = (self.losses.gradient(x, i, rows) for rows in steps)
                squares = np.array([_square(part - gradient) for part in parts])
                variance, unseen = float(squares.mean()), 1.0
                if all(len(rows) == 1 for rows in steps):  # minibatches differ between epochs
                    unseen -= len(steps) / int(self.losses.problem.federation.sizes[i])
                spread = float(squares.var(ddof=1)) if len(steps) > 1 else math.inf
                error = math.sqrt(unseen * spread / len(steps)) if unseen else 0.0
            found.append((_square(gradient - mean), _square(gradient), variance, error))
        return np.array(found)

    def curvatures(
        self, x: Tensor, point: int, advance: Callable[[float], None]
    ) -> dict[str, ConstantEstimate]:
        """The ends of all spectra at one of the points."""
        product = partial(self.losses.product, x)

        def mean_product(v: Tensor) -> Tensor:
            return self._mean(lambda i: product(i, v))

        def difference(i: int, v: Tensor) -> Tensor:
            return product(i, v) - mean_product(v)

        def rng(stage: int, client: int = 0) -> np.random.Generator:
            # Round 0 draws the clients, and round 1 their minibatches.
            round = 2 + 3 * point + stage
            return generator(self.seed, Purpose.CONSTANTS, round=round, client=client)

        objective = _norm(self._ends(mean_product, rng(0)))
        advance(len(self.clients))
        steep, flat, apart = [], [], []
        for i, steps in self.clients.items():
            own = rng(1, i)
            ends = [self._ends(partial(product, i), own)]
            ends += [self._ends(partial(product, i, rows=rows), own) for rows in steps]
            steep += [self._estimate(_norm(pair), len(self.clients)) for pair in ends]
            flat += [low for low, _ in ends[bool(steps) :]]
            advance(1)
        for i in self.delta_clients:
            end = _norm(self._ends(partial(difference, i), rng(2, i)))
            error = self._eigenvalue_error(product, end)
            apart.append(self._estimate(end, len(self.delta_clients), error))
            advance(len(self.clients))
        error = self._eigenvalue_error(product, objective)
        whole = ConstantEstimate(abs(objective.value), objective.residual, error)
        flattest = min(flat, key=lambda end: end.value)
        return {
            "L": _largest([*steep, whole]),
            "L_objective": whole,
            "mu": ConstantEstimate(flattest.value, flattest.residual),
            "delta": _largest(apart),
        }

    def error(self, values: FloatArray) -> float:
        """The standard error of a weighted mean of one value per sampled client."""
        m, n = len(self.clients), len(self.losses.problem.federation)
        if m in (1, n):
            return 0.0 if m == n else math.inf
        spread = float((self.share**2 * (values - float(self.share @ values)) ** 2).sum())
        return math.sqrt((1.0 - m / n) * m / (m - 1) * spread)

    def _eigenvalue_error(self, product: Callable[..., Tensor], end: SpectrumEnd) -> float:
        """The standard error of an eigenvalue, to first order the mean of ``u' H_i u``."""
        if len(self.clients) == len(self.losses.problem.federation):
            return 0.0
        u = end.vector
        return self.error(np.array([float(u @ product(i, u)) for i in self.clients]))

    def _estimate(self, end: SpectrumEnd, seen: int, error: float = 0.0) -> ConstantEstimate:
        """An eigenvalue of one of the clients that were seen."""
        n, share = len(self.losses.problem.federation), f"{1.0 - 0.05 ** (1.0 / seen):.0%}"
        note = f"largest of {seen} of {n} clients: with 95% confidence at most {share} have more"
        return ConstantEstimate(abs(end.value), end.residual, error, note if seen < n else "")

    def _mean(self, vector: Callable[[int], Tensor]) -> Tensor:
        total = torch.zeros_like(self.losses.problem.start)
        for i, share in zip(self.clients, self.share.tolist(), strict=True):
            total += share * vector(i)
        return total

    def _ends(
        self, product: Callable[[Tensor], Tensor], rng: np.random.Generator
    ) -> tuple[SpectrumEnd, SpectrumEnd]:
        x = self.losses.problem.start
        start = torch.from_numpy(rng.normal(size=len(x))).to(x)
        return spectrum_ends(product, start, self.iterations, self.tolerance)


def _square(vector: Tensor) -> float:
    return float(vector.double().square().sum())


def _norm(ends: tuple[SpectrumEnd, SpectrumEnd]) -> SpectrumEnd:
    """The end that is further from zero."""
    return max(reversed(ends), key=lambda end: abs(end.value))
