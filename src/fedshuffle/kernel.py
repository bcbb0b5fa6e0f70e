r"""The one kernel, and the requests that methods send to engines.

Every method is one local step

.. math:: y \leftarrow y - \gamma D
          (\alpha g(y; B) - \beta g(x; B) + v - \kappa \nabla f_i(x) + \mu (y - x))

where :math:`x` is the global model, :math:`B` the minibatch, :math:`g(z; B)` the gradient of its
loss at z, clipped to a largest norm and with weight decay :math:`\lambda z` added, and the step
size :math:`\gamma`, the scalars :math:`\alpha, \beta, \mu`, the vector :math:`v` and the diagonal
matrix :math:`D` (the identity, except for adaptive methods) are fixed for the round; FedLin alone
subtracts the client's full gradient at x. A local optimiser other than plain SGD takes the step
instead, with this direction as its gradient (:mod:`fedshuffle.local_optimisers`). A method sends
two kinds of requests, :class:`FullGradient` and :class:`LocalTraining`; an engine answers them, and
passes what each client computes through the request's chain of transforms
(:mod:`fedshuffle.transforms`) before it is summed. Methods and engines know nothing else of each
other. Models are flat vectors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.local_work import Minibatches
from fedshuffle.randomness import Address
from fedshuffle.transforms.base import NO_TRANSFORMS, Chain

if TYPE_CHECKING:
    from torch import Tensor


_AFTER_STEPS = 1 << 53  # a part of a client's random numbers that no local step uses


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """The constants of the kernel in one round."""

    alpha: float = 1.0
    beta: float = 0.0
    mu: float = 0.0
    v: "Tensor | None" = None
    scale: "Tensor | None" = None
    """The diagonal of D, one positive number per parameter; None for ones."""
    own_gradient: bool = False
    """Whether kappa is one: the client computes its full gradient at x and subtracts it."""


@dataclass(frozen=True, slots=True)
class ClientTask:
    """What one client does in one round, and the weight of its update in each of the sums."""

    minibatches: Minibatches
    step_size: float
    coefficients: StepCoefficients
    weights: Sequence[float] | FloatArray
    clip: float = math.inf
    weight_decay: float = 0.0
    optimiser: LocalOptimiser | None = None
    """What takes the step along the direction; None for the kernel itself, plain SGD."""


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Train every client from ``start``, and pass its update through the chain.

    The answer has a row ``sum_i weights_i[k] message_i`` for every k, where the message is the
    update ``y_i - start`` unless the chain changes it.
    """

    start: "Tensor"
    tasks: Sequence[ClientTask]
    sums: int
    chain: Chain = NO_TRANSFORMS
    shared: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The chain's state at the server, which clients are sent."""
    states: "Tensor | None" = None
    """The vectors that clients keep, a row per task, if the chain keeps state."""
    state_weights: FloatArray | None = None
    """A weight per task for the sum of the changes of the clients' states; None if not wanted."""


@dataclass(frozen=True, slots=True)
class FullGradient:
    """Full gradients over the clients' data. The answer has for every k and every point a row
    ``sum_i weights_i[k] (grad f_i(point) + weight_decay point)``: its shape is (sums, points, d).
    With a chain there is one point, and the chain's messages are summed instead of the gradients.
    """

    points: "Sequence[Tensor]"
    clients: IntArray
    weights: FloatArray
    """A row per client, a column per sum."""
    round: int
    weight_decay: float = 0.0
    chain: Chain = NO_TRANSFORMS
    states: "Tensor | None" = None
    """The vectors that clients keep, a row per client, if the chain keeps state."""
    seed: int = 0
    """Of the random numbers of the chain, and of the examples' transform."""
    stream_id: int | None = None
    """Whose random numbers these are, where they are not those of the number in ``clients``."""

    def address(self, client: int) -> Address:
        """Where the random numbers of a client's examples are drawn: apart from those of its local
        steps, and the same at every point.
        """
        own = client if self.stream_id is None else self.stream_id
        return Address(self.seed, self.round, own, _AFTER_STEPS)

    def __post_init__(self) -> None:
        if np.ndim(self.weights) != 2 or len(self.weights) != len(self.clients):
            raise FedShuffleError(
                f"FullGradient of {len(self.clients)} clients has weights of shape"
                f" {np.shape(self.weights)}: give a row per client and a column per sum, as"
                " weights[:, None] for one sum."
            )
        if self.chain and len(self.points) != 1:
            raise FedShuffleError(
                f"FullGradient has {len(self.points)} points and a transform: ask for the gradient"
                " at one point."
            )


Request = FullGradient | LocalTraining


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's answer to a request."""

    sums: "Tensor"
    """The weighted sums, in the shape that the request says."""
    states: "Tensor | None" = None
    """The clients' new states, in the order of the request, if its chain keeps state."""
    state_change: "Tensor | None" = None
    """``sum_i state_weights_i (new state_i - old state_i)``, if it was asked for."""
    metrics: Mapping[str, FloatArray] = field(default_factory=dict)
    """Numbers by name, one per task: ``train_loss`` (the mean over the local steps; NaN if no
    gradient was taken there), ``update_norm`` (before the chain), and those of the chain."""


def joined_metrics(
    parts: Sequence[Mapping[str, FloatArray]], lengths: Sequence[int]
) -> dict[str, FloatArray]:
    """The metrics of parts of the tasks, of these lengths, as those of all; NaN where a part lacks
    one.

    >>> joined_metrics([{"clipped": np.ones(1)}, {}], [1, 2])
    {'clipped': array([ 1., nan, nan])}
    """
    missing = [np.full(length, math.nan) for length in lengths]
    return {
        name: np.concatenate(
            [part.get(name, none) for part, none in zip(parts, missing, strict=True)]
        )
        for name in dict.fromkeys(name for part in parts for name in part)
    }


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
    return y - step_size * direction(y, x, gradient, gradient_at_x, alpha, beta, mu, v, scale)


def direction(
    y: "Tensor",
    x: "Tensor",
    gradient: "Tensor",
    gradient_at_x: "Tensor | None",
    alpha: "float | Tensor",
    beta: "float | Tensor",
    mu: "float | Tensor",
    v: "Tensor | None",
    scale: "Tensor | None" = None,
) -> "Tensor":
    """What a local step descends along: the gradient that a local optimiser gets."""
    along = alpha * gradient
    if gradient_at_x is not None:
        along = along - beta * gradient_at_x
    if v is not None:
        along = along + v
    if not isinstance(mu, float) or mu != 0.0:
        along = along + mu * (y - x)
    return along if scale is None else scale * along
