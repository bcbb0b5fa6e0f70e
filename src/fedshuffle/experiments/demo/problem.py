"""The problem of the demo: scikit-learn's digits over very different clients, and its optima."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional

from fedshuffle import losses
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines import Problem
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator

DIGITS = 10
ALL, RARE, OTHER = "all digits", "digits of small clients", "other digits"
L2 = 0.01
"""Every loss has the penalty ``L2 / 2 |x|^2``."""

_TEST_SHARE = 0.2
_LARGE_SHARES = (4, 3, 2)
"""How the large clients share what the small ones leave."""
_SMALL_CLIENTS = 37
_SMALL_SIZES = (5, 50)
_MIXING = 1.5
"""How far labels stray between clients: 0 sorts the digits strictly, large numbers mix them all."""


@dataclass(frozen=True, eq=False)
class Digits:
    r"""The digits, split over clients, with a part held out; and logistic regression on them.

    .. math:: f_i(x) = \text{mean cross-entropy on client } i + \tfrac{l_2}{2} \|x\|^2

    It is strongly convex, so every objective over the clients has one optimum, which can be
    computed to many digits.
    """

    federation: Federation
    """Its fields are images (64 pixels, and a constant for the bias) and labels."""
    test_images: Tensor
    test_labels: Tensor
    small: NDArray[np.bool_]
    """Which clients are small."""

    @property
    def label_counts(self) -> IntArray:
        """Examples by client and digit."""
        one_hot = np.eye(DIGITS, dtype=np.int64)[self.federation.fields[1]]
        return np.add.reduceat(one_hot, self.federation.offsets[:-1])

    @property
    def rare_digits(self) -> list[int]:
        """The digits of which small clients hold more than half of the examples."""
        counts = self.label_counts
        most = 2 * counts[self.small].sum(0) > counts.sum(0)
        return np.flatnonzero(most).tolist()

    @property
    def problem(self) -> Problem:
        """The problem for an engine; the penalty is the weight decay of the local work."""
        model = nn.Linear(self.test_images.shape[1], DIGITS, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        return Problem(model, losses.cross_entropy, self.federation)

    def client_losses(self, models: Tensor) -> FloatArray:
        """``f_i(x)`` of every client, a row for each row x."""
        images, labels = self.federation.fields
        logits = images @ models.view(len(models), DIGITS, -1).mT
        targets = labels.expand(len(models), -1)
        each = functional.cross_entropy(logits.mT, targets, reduction="none")
        sums = np.add.reduceat(each.numpy(), self.federation.offsets[:-1], axis=1)
        penalty = L2 / 2 * models.square().sum(1, keepdim=True).numpy()
        return np.asarray(sums / self.federation.sizes + penalty)

    def suboptimality(self, models: Tensor, optimum: Tensor) -> FloatArray:
        """``f(x) - f*`` of each row x, where f counts every example the same."""
        gap = self.client_losses(models) - self.client_losses(optimum)
        return np.asarray(gap @ self.federation.weights)

    def optimum(self, weights: FloatArray) -> Tensor:
        """The model that minimises ``sum_i weights_i f_i``, as a row."""
        images, labels = self.federation.fields
        sizes = self.federation.sizes
        regression = LogisticRegression(
            C=1 / L2, fit_intercept=False, solver="newton-cg", tol=1e-10, max_iter=1000
        )
        regression.fit(images, labels, sample_weight=np.repeat(weights / sizes, sizes))
        return torch.tensor(regression.coef_.reshape(1, -1))

    def accuracies(self, models: Tensor) -> dict[str, FloatArray]:
        """Test accuracy of each row: on all digits, and by who mostly holds them."""
        logits = self.test_images @ models.view(len(models), DIGITS, -1).mT
        correct = np.asarray(logits.argmax(2) == self.test_labels)
        rare = np.isin(self.test_labels.numpy(), self.rare_digits)
        return {
            ALL: correct.mean(1),
            RARE: correct[:, rare].mean(1),
            OTHER: correct[:, ~rare].mean(1),
        }


def split(seed: int) -> Digits:
    """A few large clients with mostly low digits, many small ones with the others."""
    rng = generator(seed, Purpose.SPLIT)
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
    images = torch.hstack([images - images[rows].mean(0), torch.ones(len(images), 1)])
    targets = torch.tensor(labels, dtype=torch.int64)
    return Digits(
        federation=Federation.from_arrays(images[rows], targets[rows], sizes=sizes),
        test_images=images[test_rows],
        test_labels=targets[test_rows],
        small=np.arange(len(sizes)) >= len(large_sizes),
    )
