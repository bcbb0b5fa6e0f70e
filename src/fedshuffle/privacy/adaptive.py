r"""Adaptive clipping: the threshold follows a quantile of the update norms, privately.

In a round with the threshold C, clients clip to C and send whether their update was short enough,
:math:`b_i = 1\{|u_i| \le C\}`. The server noises the sum and the count,

.. math:: \tilde U = U + N(0, (z_\Delta C A)^2 I), \qquad
          \bar b = \tfrac12 + \frac1m \Big(\sum_{i \in S} (b_i - \tfrac12) + N(0, \sigma_b^2)\Big),
          \qquad C \leftarrow C e^{-\eta (\bar b - \gamma)},

with A the largest aggregation weight and m the *expected* size of the cohort. Together they cost as
much as one sum with the noise multiplier z if
:math:`z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}`, since one client moves the count by 1/2.

Reference: Andrew et al., Differentially Private Learning with Adaptive Clipping, 2021.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle.errors import FedShuffleError
from fedshuffle.privacy.clipping import clipped
from fedshuffle.privacy.noise import with_noise
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdaptiveClip(Transform):
    """Clip to a threshold that the server learns, noise the sum, and update the threshold.

    ``Privacy(..., adaptive=AdaptiveClipping())`` makes one that fits the run.

    >>> AdaptiveClip(start=0.1, noise=1.0, largest_weight=0.5, expected_cohort=10).quantile
    0.5
    """

    start: float
    """The first threshold."""
    noise: float
    """z_delta: standard deviation of the noise on the sum, relative to its sensitivity."""
    largest_weight: float
    """A: the largest aggregation weight of a client, or 1 if ``weighted``."""
    expected_cohort: float
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 0.0
    weighted: bool = False
    any_layout = True
    mean = "model-dependent"
    every_round = private = True

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        weights = context.weights if self.weighted else None
        return clipped(updates, self.threshold(context.shared), weights, context.norms)

    def server(
        self, update: "Tensor", context: ServerContext
    ) -> "tuple[Tensor, Mapping[str, Tensor]]":
        import torch

        threshold, rng = self.threshold(context.state), context.generator()
        unclipped = 1.0 - context.metrics.get("clipped", np.empty(0))
        counted = float((unclipped - 0.5).sum()) + self.count_noise * rng.standard_normal()
        fraction = 0.5 + counted / self.expected_cohort
        after = threshold * math.exp(-self.rate * (fraction - self.quantile))
        noised = with_noise(update, self.noise * threshold * self.largest_weight, rng)
        return noised, {"clip": torch.tensor(after, dtype=torch.float64)}

    def threshold(self, state: "Mapping[str, Tensor]") -> float:
        """The threshold of a round, from the server's state before it."""
        return float(state["clip"]) if state else self.start


def sum_noise(noise: float, count_noise: float) -> float:
    """z_delta, the multiplier of the sum's noise such that sum and count together cost ``noise``.

    >>> round(sum_noise(1.0, 5.0), 4), sum_noise(1.0, math.inf)
    (1.005, 1.0)
    """
    if noise >= 2 * count_noise:
        raise FedShuffleError(
            f"adaptive clipping with count_noise {count_noise:g} leaves no budget for the updates:"
            f" a noise multiplier of {noise:g} needs a count_noise above {noise / 2:g}. Raise"
            " count_noise, or sample more clients per round."
        )
    return float((noise**-2 - (2 * count_noise) ** -2) ** -0.5)
