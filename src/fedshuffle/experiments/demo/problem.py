"""The problem of the demo: scikit-learn's digits over very different clients, and its optima."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from fedshuffle import losses
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines import Problem
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, check_seed, generator

BoolArray = NDArray[np.bool_]

DIGITS = 10
ACCURACIES = ("accuracy", "accuracy_rare", "accuracy_other")

_TEST_SHARE = 0.2
_LARGE_SHARES = (4, 3, 2)
"""How the large clients share what the small ones leave."""
_SMALL_CLIENTS = 37
_SMALL_SIZES = (5, 50)
_MIXING = 1.5
"""How far labels stray between clients: 0 sorts the digits strictly, large numbers mix them all."""


@dataclass(frozen=True, eq=False)
class Digits:
    """The digits, split over clients, with a part held out."""

    federation: Federation
    """Its fields are images (64 pixels) and labels."""
    test_images: Tensor
    test_labels: Tensor
    rows: IntArray
    """The places of the federation's examples in scikit-learn's order."""
    test_rows: IntArray
    small: BoolArray
    """Which clients are small."""

    @property
    def label_counts(self) -> IntArray:
        """Examples by client and digit."""
        owner = np.repeat(np.arange(len(self.federation)), self.federation.sizes)
        counts = np.zeros((len(self.federation), DIGITS), dtype=np.int64)
        np.add.at(counts, (owner, self.federation.fields[1].numpy()), 1)
        return counts

    @property
    def rare_digits(self) -> IntArray:
        """The digits of which small clients hold more than half of the examples."""
        counts = self.label_counts
        return np.flatnonzero(2 * counts[self.small].sum(0) > counts.sum(0))

    def accuracies(self, correct: BoolArray) -> dict[str, FloatArray]:
        """Test accuracy on all digits, on those that mostly small clients hold, and on the rest."""
        rare = np.isin(self.test_labels.numpy(), self.rare_digits)
        parts = (rare | ~rare, rare, ~rare)
        return {n: correct[..., part].mean(-1) for n, part in zip(ACCURACIES, parts, strict=True)}


def split(seed: int) -> Digits:
    """A few large clients with mostly low digits, many small ones with the others."""
    rng = generator(check_seed(seed), Purpose.SPLIT)
    pixels, labels = load_digits(return_X_y=True)
    test_rows, rows = np.split(rng.permutation(len(labels)), [round(_TEST_SHARE * len(labels))])

    low, high = np.log(_SMALL_SIZES)
    small_sizes = np.exp(rng.uniform(low, high, _SMALL_CLIENTS)).round().astype(np.int64)
    left = len(rows) - int(small_sizes.sum())
    large_sizes = left * np.array(_LARGE_SHARES) // sum(_LARGE_SHARES)
    large_sizes[0] += left - int(large_sizes.sum())
    sizes = np.concatenate([large_sizes, small_sizes])

    # Clients take their examples from a line that is roughly sorted by digit, large clients first.
    place = labels[rows] + _MIXING * rng.standard_normal(len(rows))
    rows = rows[np.argsort(place, kind="stable")]

    images = torch.tensor(pixels / 16, dtype=torch.float64)
    images = images - images[rows].mean(0)
    targets = torch.tensor(labels, dtype=torch.int64)
    return Digits(
        federation=Federation.from_arrays(images[rows], targets[rows], sizes=sizes),
        test_images=images[test_rows],
        test_labels=targets[test_rows],
        rows=rows,
        test_rows=test_rows,
        small=np.arange(len(sizes)) >= len(large_sizes),
    )


class Objective:
    r"""Multinomial logistic regression on a federation, with a quadratic penalty.

    .. math:: f_i(x) = \text{mean cross-entropy on client } i + \tfrac{l_2}{2} \|x\|^2

    It is strongly convex, so every objective over the clients has one optimum, which can be
    computed to many digits.
    """

    def __init__(self, federation: Federation, l2: float) -> None:
        self.l2 = l2
        model = nn.Linear(federation.fields[0].shape[1], DIGITS, dtype=torch.float64)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        self.problem = Problem(model, self.loss, federation)
        self._sizes = torch.tensor(federation.sizes)
        self._owner = torch.repeat_interleave(torch.arange(len(federation)), self._sizes)

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """What clients minimise: the mean over a minibatch, with the penalty."""
        return losses.cross_entropy(model, images, labels) + self._penalty(model)

    def _penalty(self, model: nn.Module) -> Tensor:
        squares = [parameter.square().sum() for parameter in model.parameters()]
        return 0.5 * self.l2 * torch.stack(squares).sum()

    def client_losses(self, x: Tensor) -> Tensor:
        """``f_i(x)`` of every client."""
        model = self.problem.load(x)
        images, labels = self.problem.fields
        each = functional.cross_entropy(model(images), labels, reduction="none")
        total = each.new_zeros(len(self._sizes)).index_add(0, self._owner, each)
        return total / self._sizes + self._penalty(model)

    def value(self, x: Tensor, weights: FloatArray) -> float:
        """``sum_i weights_i f_i(x)``."""
        with torch.no_grad():
            return float(torch.tensor(weights) @ self.client_losses(x))

    def gradient(self, x: Tensor, weights: FloatArray) -> Tensor:
        """The gradient of :meth:`value`."""
        value = torch.tensor(weights) @ self.client_losses(x)
        parts = torch.autograd.grad(value, list(self.problem.parameters.values()))
        return torch.cat([part.flatten() for part in parts])

    def optimum(self, weights: FloatArray) -> Tensor:
        """The model that minimises the objective with these weights."""

        def value_and_gradient(point: FloatArray) -> tuple[float, FloatArray]:
            x = torch.tensor(point)
            return self.value(x, weights), self.gradient(x, weights).numpy()

        found = minimize(
            value_and_gradient,
            self.problem.start.numpy(),
            jac=True,
            method="L-BFGS-B",
            options={"gtol": 1e-9, "ftol": 0, "maxcor": 50, "maxiter": 10_000, "maxfun": 20_000},
        )
        return torch.tensor(found.x)

    def correct(self, x: Tensor, digits: Digits) -> BoolArray:
        """Which of the test images the model reads correctly."""
        with torch.no_grad():
            guesses = self.problem.load(x)(digits.test_images).argmax(1)
        return np.asarray(guesses == digits.test_labels)
