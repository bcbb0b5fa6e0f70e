r"""Directions: which way clients walk, as the constants of the one kernel.

A direction is written as it happens in a round: a generator that may first ask for probes, then
gives the steering, receives the extra sum it asked for, and returns what the server must remember
until the next round.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from fedshuffle._arrays import FloatArray, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Probe, Steering
from fedshuffle.methods.averaging import InclusionProbability, Normaliser, Participants

if TYPE_CHECKING:
    from torch import Tensor

Memory = Mapping[str, "Tensor"]
"""What the server remembers between rounds: named vectors, ready to be saved."""


@final
@dataclass(frozen=True, slots=True)
class Heading:
    """The steering of a round, and the weights of one more sum of the updates if it is wanted."""

    steering: Steering
    report: FloatArray | None = None


@final
@dataclass(frozen=True, slots=True)
class RoundStart:
    """What is known when a round starts."""

    x: Tensor
    memory: Memory
    cohort: Participants
    step_sizes: FloatArray
    """The step size of each client of the cohort."""
    normaliser: Normaliser


Steps = Generator[Probe | Heading, Any, Memory]


class Direction(abc.ABC):
    """How the local direction is made."""

    down: int
    """Vectors of the model's size that a client receives in a round."""
    up: int
    """Vectors of the model's size that a client sends in a round."""

    @abc.abstractmethod
    def round(self, start: RoundStart) -> Steps:
        """Yield probes, each answered by a row per point, and then one heading, answered by the
        extra sum of updates, or None; return the memory.
        """


@final
@dataclass(frozen=True)
class Plain(Direction):
    """The gradient itself."""

    down, up = 1, 1

    def round(self, start: RoundStart) -> Steps:
        yield Heading(Steering())
        return start.memory


@final
@dataclass(frozen=True)
class MVR(Direction):
    r"""Exact momentum variance reduction (the paper's equations for FedShuffleMVR).

    Before local work, the cohort sends full gradients at the current and the previous model, and

    .. math:: m^r = a \hat g(x^r) + (1-a) (m^{r-1} + \hat g(x^r) - \hat g(x^{r-1})), \quad
              \hat g(x) = \sum_{i \in S} \frac{w_i}{p_i} \nabla f_i(x),

    starting with :math:`m^0 = \hat g(x^0)`. The local direction is
    :math:`g(y) - (1-a) g(x) + (1-a) m^r`. "Momentum 0.9" is ``a = 0.1``.

    Reference: Horvath et al. 2022; the technique is from Cutkosky and Orabona 2019.
    """

    a: float = 0.1
    down, up = 3, 3  # both models and the momentum; two gradients and the update

    def __post_init__(self) -> None:
        _check_share(self.a)

    def round(self, start: RoundStart) -> Steps:
        x, memory, cohort = start.x, start.memory, start.cohort
        weights = cohort.weight / cohort.probability
        points = (x, memory["previous"]) if memory else (x,)
        now, *before = yield Probe(points, cohort.clients, weights, cohort.round)
        m = now
        if memory:
            m = self.a * now + (1 - self.a) * (memory["momentum"] + now - before[0])
        yield Heading(Steering(alpha=1.0, beta=1 - self.a, v=(1 - self.a) * m))
        return {"momentum": m, "previous": x}


@final
@dataclass(frozen=True)
class GlobalMomentum(Direction):
    r"""The cheap momentum: no probe, no extra message.

    The local direction is :math:`a g(y) + (1-a) m`. A client's mean gradient along its walk,
    :math:`\bar g_i`, follows from what it sends back, since
    :math:`-(y_i - x) / (\tau_i \gamma_i) = a \bar g_i + (1-a) m`; after the round

    .. math:: m \leftarrow a \sum_{i \in S} c_i \bar g_i + (1-a) m,

    with :math:`c_i = w_i / p_i`, or :math:`w_i / \sum_{j \in S} w_j` for methods that do not
    aggregate by inclusion probability. It starts with m = 0.
    """

    a: float = 0.1
    down, up = 2, 1  # the model and the momentum; the update

    def __post_init__(self) -> None:
        _check_share(self.a)

    def round(self, start: RoundStart) -> Steps:
        m = start.memory["momentum"] if start.memory else start.x.new_zeros(start.x.shape)
        weights = gradient_weights(start.cohort, start.normaliser)
        steering = Steering(alpha=self.a, v=(1 - self.a) * m)
        directions = yield Heading(
            steering, report=-weights / (start.cohort.done * start.step_sizes)
        )
        # The sum of the clients' directions holds (1-a) m as often as the weights sum to.
        return {"momentum": directions + (1 - self.a) * (1 - float(weights.sum())) * m}


def gradient_weights(cohort: Participants, normaliser: Normaliser) -> FloatArray:
    """How the cheap momentum weighs the clients of a cohort to estimate grad f."""
    if isinstance(normaliser, InclusionProbability):
        return cohort.weight / cohort.probability
    return cohort.weight / float(cohort.weight.sum())


def _check_share(a: float) -> None:
    if not 0 < number(a, "momentum parameter a") <= 1:
        raise FedShuffleError(
            f"momentum parameter a = {a} is outside (0, 1]. It is the share of the new gradient:"
            " momentum 0.9 means a = 0.1."
        )
