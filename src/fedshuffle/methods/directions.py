r"""Directions: which way clients walk, as the constants of the one kernel.

A direction is written as it happens in a round: a generator that may first ask for probes, then
gives the steering, receives the sums of updates it asked for, and returns what the server and the
clients must remember until their next round.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from fedshuffle._arrays import FloatArray
from fedshuffle.kernel import Probe, Steering
from fedshuffle.methods.averaging import InclusionProbability, Normaliser, Participants

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered between rounds."""

    server: Mapping[str, Tensor] = field(default_factory=dict)
    """By the server: named vectors; nothing before the first round."""
    clients: Tensor | None = None
    """By the clients of the cohort: a row each, zero for one that takes part for the first time;
    None for directions without client state."""


@final
@dataclass(frozen=True, slots=True)
class Heading:
    """The steering of a round, and the weights of further sums of the updates that are wanted."""

    steering: Steering | Sequence[Steering]
    """One for all, or one for each client of the cohort."""
    report: FloatArray | None = None
    """A weight per client for one more sum, or a row per client and a column per sum; the identity
    matrix asks for the update of every client."""


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


@final
@dataclass(frozen=True, slots=True)
class Moments:
    """What the audit knows of a method's cohorts S, where client i moves the model by ``mass_i(S)``
    times the direction it walks in: expectations, one entry per client.
    """

    weights: FloatArray
    """The objective's w."""
    anybody: float
    """The probability that anybody takes part."""
    mass: FloatArray
    """``E[1{i in S} mass_i]``."""
    joint: FloatArray | None = None
    """``E[1{i in S} w_i / p_i * (the mass of all S)]``, if the direction needs it."""
    estimate: FloatArray | None = None
    """``E[1{i in S} c_i]`` with the c of :func:`gradient_weights`, if the direction needs it."""

    @property
    def total(self) -> float:
        """The expected mass of a round in which somebody takes part."""
        return float(self.mass.sum()) / self.anybody


Steps = Generator[Probe | Heading, Any, Memory]


class Direction(abc.ABC):
    """How the local direction is made, and what it costs."""

    down: float = 1
    """Vectors of the model's size that a client receives in a round."""
    up: float = 1
    """Vectors of the model's size that a client sends in a round."""
    trips: int = 1
    """How often the server asks each client of the cohort in a round, and waits for the answer."""
    gradients_per_step: int = 1
    """Gradients of a minibatch in a local step."""
    full_gradients: int = 0
    """Gradients over all its data that a client computes in a round besides."""
    client_state: bool = False
    """Whether clients keep a vector from round to round."""
    needs_joint: bool = False
    needs_estimate: bool = False

    @abc.abstractmethod
    def round(self, start: RoundStart) -> Steps:
        """Yield probes, each answered by gradients of shape (sums, points, d), and then one
        heading, answered by the sums it asked for, or None; return what to remember.
        """

    def pull(self, moments: Moments) -> FloatArray | None:
        """The weights, not normalised, of the objective down which the mean round walks, to first
        order in the step size and once the memory has settled; None where no formula is known, and
        then the audit lets the method play.
        """
        return None


@final
@dataclass(frozen=True)
class Plain(Direction):
    """The gradient itself."""

    def round(self, start: RoundStart) -> Steps:
        yield Heading(Steering())
        return start.memory

    def pull(self, moments: Moments) -> FloatArray:
        return moments.mass


def gradient_weights(cohort: Participants, normaliser: Normaliser) -> FloatArray:
    """How a method weighs the clients of a cohort to estimate grad f from what they send."""
    if isinstance(normaliser, InclusionProbability):
        return cohort.weight / cohort.probability
    return cohort.weight / float(cohort.weight.sum())
