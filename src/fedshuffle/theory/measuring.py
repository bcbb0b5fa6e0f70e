"""Measuring at one point: gradients, products with Hessians, and what they cost. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle._terminal import Console
from fedshuffle.engines.base import gradients, named
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.theory.spectrum import Spectrum, lanczos


@final
@dataclass(frozen=True)
class Estimate:
    """A measured number and what is not sure about it."""

    value: float
    residual: float = 0.0
    """How far the iteration may still be from an eigenvalue."""
    standard_error: float = 0.0
    """From sampling clients and minibatches; 0 where all were seen."""
    note: str = ""
    """What else to know."""

    @property
    def uncertainty(self) -> float:
        """The residual and two standard errors."""
        return self.residual + 2.0 * self.standard_error

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.value:.4g} +- {self.uncertainty:.2g}{note}"


@final
@dataclass(frozen=True)
class Gradients:
    """What gradients say at one point, one number for each client seen."""

    apart: FloatArray
    """``|grad f_i - grad f-hat|^2``."""
    own: FloatArray
    """``|grad f_i|^2``."""
    variances: FloatArray
    """``mean_j |grad f_ij - grad f_i|^2``."""
    errors: FloatArray
    """The standard errors of those."""


@final
@dataclass(frozen=True)
class Curvatures:
    """What Hessians say at one point."""

    L_steps: Estimate
    L_clients: Estimate
    L_objective: Estimate
    mu: Estimate
    mu_objective: Estimate
    delta: Estimate


@final
@dataclass(frozen=True)
class Survey:
    """What to measure, and whom to ask."""

    oracle: Oracle
    chosen: IntArray
    """The clients asked, in the order in which they were drawn."""
    share: FloatArray
    """Their weights, summing to one."""
    steps: Sequence[Sequence[IntArray]]
    """Some minibatches of each, as positions among its examples."""
    seed: int
    iterations: int
    tolerance: float
    delta_clients: int

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.oracle.problem.federation)

    @property
    def sizes(self) -> list[int]:
        """The examples of those asked."""
        return [int(m) for m in self.oracle.problem.federation.sizes[self.chosen]]

    @property
    def sampled(self) -> bool:
        """Whether some are not asked."""
        return len(self.chosen) < self.n

    @property
    def most(self) -> int:
        """What a point costs at most, in gradients of examples."""
        everybody = sum(self.sizes)
        tried = sum(sum(map(len, steps)) for _, steps in self._in_steps())
        products = self.iterations * (2 * everybody + tried) + 2 * self.sampled * everybody
        for m in self.sizes[: self.delta_clients]:
            products += self.iterations * (everybody + m) + self.sampled * everybody
        return 2 * everybody + tried + 2 * products

    def error(self, values: FloatArray) -> float:
        """The standard error of the mean of one value for each client asked."""
        m = len(values)
        if not self.sampled:
            return 0.0
        if m == 1:
            return math.inf
        spread = float((self.share**2 * (values - float(self.share @ values)) ** 2).sum())
        return math.sqrt((1.0 - m / self.n) * m / (m - 1) * spread)

    def gradients(self, x: Tensor) -> Gradients:
        """First the mean, then how far each is from it: no more than two are kept."""
        mean = torch.zeros_like(x)
        for i, share in zip(self.chosen.tolist(), self.share.tolist(), strict=True):
            mean += share * self.oracle.gradient(x, i)
        in_steps = dict(self._in_steps())
        found = []
        for position, i in enumerate(self.chosen.tolist()):
            gradient = self.oracle.gradient(x, i)
            apart = [
                _square(self.oracle.gradient(x, i, rows) - gradient)
                for rows in in_steps.get(position, ())
            ]
            variance, error = self._variance(np.array(apart), position)
            found.append((_square(gradient - mean), _square(gradient), variance, error))
        return Gradients(*np.array(found).T)

    def curvatures(self, x: Tensor, point: int) -> Curvatures:
        """The ends of all the spectra at point number so and so."""
        everybody = partial(self._everybody, x)
        whole = self._spectrum(everybody, x, self._stream(3 * point, 0))
        in_steps = dict(self._in_steps())
        clients, single = [], []
        for position, i in enumerate(self.chosen.tolist()):
            stream = self._stream(3 * point + 1, i)
            own = self._spectrum(partial(self.oracle.product, x, i), x, stream)
            clients.append(own)
            single += [
                self._spectrum(partial(self.oracle.product, x, i, positions=rows), x, stream)
                for rows in in_steps.get(position, ())
            ] or [own]
        steep, flat = whole.norm, whole.low
        flattest = min((found.low for found in single), key=lambda end: end.value)
        note = self._note(len(self.chosen))
        return Curvatures(
            L_steps=_largest(single, note),
            L_clients=_largest(clients, note),
            L_objective=Estimate(
                abs(steep.value), steep.residual, self._rayleigh_error(x, steep.vector)
            ),
            mu=Estimate(flattest.value, flattest.residual),
            mu_objective=Estimate(flat.value, flat.residual, self._rayleigh_error(x, flat.vector)),
            delta=self._delta(x, point, everybody),
        )

    def _delta(self, x: Tensor, point: int, everybody: Callable[[Tensor], Tensor]) -> Estimate:
        found: list[Estimate] = []
        for i in self.chosen[: self.delta_clients].tolist():

            def difference(v: Tensor, i: int = i) -> Tensor:
                return self.oracle.product(x, i, v) - everybody(v)

            end = self._spectrum(difference, x, self._stream(3 * point + 2, i)).norm
            error = self._rayleigh_error(x, end.vector)
            note = self._note(self.delta_clients)
            found.append(Estimate(abs(end.value), end.residual, error, note))
        return max(found, key=lambda estimate: estimate.value)

    def _in_steps(self) -> Iterator[tuple[int, Sequence[IntArray]]]:
        """Who does more than one step an epoch, and its steps."""
        for position, (m, steps) in enumerate(zip(self.sizes, self.steps, strict=True)):
            if len(steps[0]) < m:
                yield position, steps

    def _variance(self, squares: FloatArray, position: int) -> tuple[float, float]:
        """The mean over some of a client's steps, and its standard error."""
        tried = len(squares)
        if not tried:
            return 0.0, 0.0
        missing = 1.0  # with minibatches, another epoch would have others
        if all(len(rows) == 1 for rows in self.steps[position]):
            missing -= tried / self.sizes[position]
        if not missing:
            return float(squares.mean()), 0.0
        spread = float(squares.var(ddof=1)) if tried > 1 else math.inf
        return float(squares.mean()), math.sqrt(missing * spread / tried)

    def _everybody(self, x: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for i, share in zip(self.chosen.tolist(), self.share.tolist(), strict=True):
            total += share * self.oracle.product(x, i, v)
        return total

    def _rayleigh_error(self, x: Tensor, u: Tensor) -> float:
        """The standard error of an eigenvalue of the objective, by the parts that clients have."""
        if not self.sampled:
            return 0.0
        parts = [float(u @ self.oracle.product(x, i, u)) for i in self.chosen.tolist()]
        return self.error(np.array(parts))

    def _stream(self, number: int, client: int) -> np.random.Generator:
        # Round 0 is for who is asked, and round 1 for their minibatches.
        return generator(self.seed, Purpose.CONSTANTS, round=2 + number, client=client)

    def _spectrum(
        self, product: Callable[[Tensor], Tensor], x: Tensor, rng: np.random.Generator
    ) -> Spectrum:
        start = torch.from_numpy(rng.normal(size=len(x))).to(x)
        return lanczos(product, start, iterations=self.iterations, tolerance=self.tolerance)

    def _note(self, seen: int) -> str:
        if seen == self.n:
            return ""
        share = 1.0 - 0.05 ** (1.0 / seen)
        return (
            f"the largest of {seen} of {self.n} clients: with 95% confidence no more than"
            f" {share:.0%} of the clients have more"
        )


@final
class Oracle:
    """Gradients and products with Hessians, of clients and of minibatches."""

    def __init__(self, problem: Problem, weight_decay: float, cost: Cost) -> None:
        self.problem = problem
        self._decay = weight_decay
        self._cost = cost
        self._parameters = list(problem.parameters.values())

    def gradient(self, x: Tensor, client: int, positions: IntArray | None = None) -> Tensor:
        """That of a client, or of these of its examples."""

        def one(batch: tuple[Tensor, ...]) -> Tensor:
            return _flat(gradients(self.problem.loss_at(x, batch), self._parameters))

        return self._mean(client, positions, one, 1) + self._decay * x

    def product(
        self, x: Tensor, client: int, v: Tensor, positions: IntArray | None = None
    ) -> Tensor:
        """The Hessian of a client, or of these of its examples, times v."""

        def one(batch: tuple[Tensor, ...]) -> Tensor:
            value = self.problem.loss_at(x, batch)
            first = torch.autograd.grad(
                value, self._parameters, create_graph=True, materialize_grads=True
            )
            along = torch.cat([part.reshape(-1) for part in first]) @ v
            if not along.requires_grad:  # the gradient is the same everywhere
                return torch.zeros_like(v)
            return _flat(torch.autograd.grad(along, self._parameters, materialize_grads=True))

        return self._mean(client, positions, one, 2) + self._decay * v

    def _mean(
        self,
        client: int,
        positions: IntArray | None,
        one: Callable[[tuple[Tensor, ...]], Tensor],
        price: int,
    ) -> Tensor:
        total = torch.zeros_like(self.problem.start)
        for rows, share in self.problem.pieces(client, positions):
            with named(self.problem, client, 0, "estimating constants"):
                part = one(self.problem.batch(rows))
            total += part * share
            self._cost.add(price * len(rows))
        if not torch.isfinite(total).all():
            raise FedShuffleError(
                f"the derivatives of client {self.problem.federation.ids[client]!r} are not finite"
                " at this point. Choose a model that has not diverged."
            )
        return total


@final
class Cost:
    """What was spent, and the bar that shows it."""

    def __init__(self, visible: bool) -> None:
        self.spent = 0
        self._bar = Progress(
            TextColumn("constants"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of at most {task.total:,.0f} gradients"),
            TimeElapsedColumn(),
            TextColumn("+"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not visible,
        )
        self._task = self._bar.add_task("", total=1)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, most: int) -> None:
        """It will not be more than this."""
        self._bar.update(self._task, total=most)

    def add(self, examples: int) -> None:
        self.spent += examples
        self._bar.update(self._task, completed=self.spent)


@contextmanager
def differentiable_twice(device: torch.device) -> Iterator[None]:
    """Keep torch from fast paths (of attention, of recurrent layers) without second derivatives."""
    recurrent = (
        torch.backends.cudnn.flags(enabled=False) if device.type == "cuda" else nullcontext()
    )
    with sdpa_kernel(SDPBackend.MATH), recurrent:
        yield


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _square(vector: Tensor) -> float:
    return float(vector.double().square().sum())


def _largest(spectra: Sequence[Spectrum], note: str) -> Estimate:
    end = max((found.norm for found in spectra), key=lambda end: abs(end.value))
    return Estimate(abs(end.value), end.residual, 0.0, note)
