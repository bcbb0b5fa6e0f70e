r"""The one kernel, and the requests that methods send to engines.

Every method is one local step

.. math:: y \leftarrow y - \gamma D (\alpha g(y; B) - \beta g(x; B) + v + \mu (y - x))

where :math:`x` is the global model, :math:`B` the minibatch, :math:`g(z; B)` the gradient of its
loss at z, clipped to a largest norm and with weight decay :math:`\lambda z` added, and the step
size :math:`\gamma`, the scalars :math:`\alpha, \beta, \mu`, the vector :math:`v` and the diagonal
matrix :math:`D` (the identity, except for adaptive methods) are fixed for the round. A method sends
two kinds of requests, :class:`FullGradient` and :class:`LocalTraining`; an engine answers them.
Methods and engines know nothing else of each other. Models are flat vectors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import Minibatches

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """The constants of the kernel in one round."""

    alpha: float = 1.0
    beta: float = 0.0
    mu: float = 0.0
    v: "Tensor | None" = None
    scale: "Tensor | None" = None
    """The diagonal of D, one positive number per parameter; None for ones."""


@dataclass(frozen=True, slots=True)
class ClientTask:
    """What one client does in one round, and the weight of its update in each of the sums."""

    minibatches: Minibatches
    step_size: float
    coefficients: StepCoefficients
    weights: Sequence[float] | FloatArray
    clip: float = math.inf
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Train every client from ``start``; the answer has a row ``sum_i weights_i[k] (y_i - start)``
    for every k.
    """

    start: "Tensor"
    tasks: Sequence[ClientTask]
    sums: int


@dataclass(frozen=True, slots=True)
class FullGradient:
    """Full gradients over the clients' data. The answer has for every k and every point a row
    ``sum_i weights_i[k] (grad f_i(point) + weight_decay point)``: its shape is (sums, points, d).
    """

    points: "Sequence[Tensor]"
    clients: IntArray
    weights: FloatArray
    """A row per client, a column per sum."""
    round: int
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if np.ndim(self.weights) != 2 or len(self.weights) != len(self.clients):
            raise FedShuffleError(
                f"FullGradient of {len(self.clients)} clients has weights of shape"
                f" {np.shape(self.weights)}: give a row per client and a column per sum, as"
                " weights[:, None] for one sum."
            )


Request = FullGradient | LocalTraining


def adjusted(
    gradient: "Tensor", point: "Tensor", clip: "float | Tensor", weight_decay: "float | Tensor"
) -> "Tensor":
    """The gradient at a point, clipped to a largest norm, plus weight decay (rows like columns)."""
    if isinstance(clip, float) and clip == math.inf and weight_decay == 0:
        return gradient
    norm = gradient.norm(dim=-1, keepdim=True).clamp_min(1e-30)  # a zero gradient stays zero
    scale: Tensor = (clip / norm).clamp_max(1.0)
    return gradient * scale + weight_decay * point


def step(
    y: "Tensor",
    x: "Tensor",
    gradient: "Tensor",
    gradient_at_x: "Tensor | None",
    step_size: "float | Tensor",
    alpha: "float | Tensor",
    beta: "float | Tensor",
    mu: "float | Tensor",
    v: "Tensor | None",
    scale: "Tensor | None" = None,
) -> "Tensor":
    """One local step. Scalars may be columns, one row per client, with models as rows."""
    direction = alpha * gradient
    if gradient_at_x is not None:
        direction = direction - beta * gradient_at_x
    if v is not None:
        direction = direction + v
    if not isinstance(mu, float) or mu != 0.0:
        direction = direction + mu * (y - x)
    if scale is not None:
        direction = scale * direction
    return y - step_size * direction
