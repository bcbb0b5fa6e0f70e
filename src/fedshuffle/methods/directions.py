r"""Directions: which way clients step, as the coefficients of the one kernel.

A direction is a generator that follows a round: it may first ask for full gradients, then gives the
local plan, receives the sums of updates it asked for, and returns the state to keep.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import FullGradient, StepCoefficients
from fedshuffle.methods.averaging import Cohort, InclusionProbability, Normaliser

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MethodState:
    """What a direction keeps between rounds."""

    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """Named vectors at the server; empty before the first round."""
    per_client: Tensor | None = None
    """A row for each client of the cohort, zero for a client that takes part for the first time;
    None for directions without client state."""

    def __post_init__(self) -> None:
        if not isinstance(self.shared, Mapping):
            raise FedShuffleError(f"MethodState.shared is {shown(self.shared)}: give a mapping.")
        check_tensors(self.shared, "MethodState.shared")


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """How clients train in a round, and which further sums of their updates the direction wants."""

    coefficients: StepCoefficients | Sequence[StepCoefficients]
    """One for all, or one for each client of the cohort."""
    report: FloatArray | None = None
    """A weight per client for one more sum, or a row per client and a column per sum; the identity
    matrix asks for the update of every client."""

    def __post_init__(self) -> None:
        for one in self.each(1):
            if not isinstance(one, StepCoefficients):
                raise FedShuffleError(f"LocalPlan has {shown(one)}: give StepCoefficients.")

    def each(self, n: int) -> Sequence[StepCoefficients]:
        """The coefficients of each of n clients."""
        same = isinstance(self.coefficients, StepCoefficients)
        return [self.coefficients] * n if same else self.coefficients  # type: ignore[list-item,return-value]


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What is known when a round starts."""

    x: Tensor
    state: MethodState
    cohort: Cohort
    step_sizes: FloatArray
    """The step size of each client of the cohort."""
    normaliser: Normaliser

    def gradient(self, *points: Tensor) -> FullGradient:
        """Ask for ``sum_i w_i / p_i grad f_i(point)`` over the cohort, at one point or more."""
        cohort = self.cohort
        weights = (cohort.weight / cohort.probability)[:, None]
        return FullGradient(points, cohort.clients, weights, cohort.round)


@dataclass(frozen=True, slots=True)
class CohortMoments:
    """What the audit knows of a method's cohorts S, where client i moves the model by
    ``contribution_i(S)`` times its local direction: expectations, one entry per client.
    """

    weights: FloatArray
    """The objective's w."""
    anybody: float
    """The probability that the cohort is not empty."""
    contribution: FloatArray
    """``E[1{i in S} contribution_i]``."""
    joint: FloatArray | None = None
    """``E[1{i in S} w_i / p_i * (the contribution of all S)]``, if the direction needs it."""
    estimate: FloatArray | None = None
    """``E[1{i in S} c_i]`` with the c of :func:`gradient_weights`, if the direction needs it."""

    @property
    def total(self) -> float:
        """The expected contribution of a cohort that is not empty."""
        return float(self.contribution.sum()) / self.anybody


Steps = Generator[FullGradient | LocalPlan, Any, MethodState]
"""The requests of a direction in a round, and the state that it returns."""


class Direction(abc.ABC):
    """How the local direction is made, and what it costs."""

    down: float = 1
    """Vectors of the model's size that a client receives per round."""
    up: float = 1
    """Vectors of the model's size that a client sends per round."""
    trips: int = 1
    """How often the server asks each client of the cohort per round, and waits for its answer."""
    gradients_per_step: int = 1
    """Minibatch gradients per local step."""
    full_gradients: int = 0
    """Full gradients that a client computes per round besides."""
    client_state: bool = False
    """Whether clients keep a vector from round to round."""
    needs_joint: bool = False
    needs_estimate: bool = False

    @abc.abstractmethod
    def round(self, context: RoundContext) -> Steps:
        """Yield any number of :class:`FullGradient`, each answered by a tensor of shape
        (sums, points, d), and then one :class:`LocalPlan`, answered by the sums it asked for, or
        None; return the state to keep.
        """

    def effective_weights(self, moments: CohortMoments) -> FloatArray | None:
        """The weights, not normalised, of the objective that the mean round descends, to first
        order in the step size and once the state has settled; None where no formula is known, and
        then the audit simulates the method.
        """
        return None


@dataclass(frozen=True)
class Plain(Direction):
    """The gradient itself."""

    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients())
        return context.state

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        return moments.contribution


def gradient_weights(cohort: Cohort, normaliser: Normaliser) -> FloatArray:
    """How a method weighs the clients of a cohort to estimate grad f from what they send."""
    if isinstance(normaliser, InclusionProbability):
        return cohort.weight / cohort.probability
    return cohort.weight / float(cohort.weight.sum())


# Checks: a mistake in a direction or a server has one clear error ---------------------------------


def checked_round(direction: Direction, context: RoundContext) -> Steps:
    """A round of a direction, with every request and the state checked against the context."""

    def wrong(what: str) -> FedShuffleError:
        return FedShuffleError(f"{type(direction).__name__}.round {what}.")

    n, planned, answer = len(context.cohort.clients), False, None
    steps = direction.round(context)
    if not isinstance(steps, Generator):
        raise wrong(f"gives {shown(steps)}: write it as a generator, with 'yield LocalPlan(...)'")
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as stop:
            state: MethodState = stop.value
            break
        if planned:
            raise wrong("yields again after its LocalPlan, which must be its last request")
        if isinstance(request, FullGradient):
            for point in request.points:
                check_like(point, context.x, f"{type(direction).__name__}.round: a point")
        elif isinstance(request, LocalPlan):
            planned, each = True, request.each(n)
            if len(each) != n:
                raise wrong(f"gives {len(each)} StepCoefficients for {n} clients: give 1 or {n}")
            for one in each:
                for name in ("v", "scale"):
                    if (vector := getattr(one, name)) is not None:
                        check_like(vector, context.x, f"{type(direction).__name__}.round: {name}")
            if request.report is not None and (
                np.ndim(request.report) not in (1, 2) or len(request.report) != n
            ):
                raise wrong(
                    f"asks for a report with weights of shape {np.shape(request.report)} from"
                    f" {n} clients: give a number, or a row, for each of them"
                )
        else:
            raise wrong(f"yields {shown(request)}: yield a FullGradient or a LocalPlan")
        answer = yield request
    if not planned:
        raise wrong("ends without a LocalPlan: yield one")
    if not isinstance(state, MethodState):
        raise wrong(f"returns {shown(state)}: return a MethodState")
    if state.per_client is not None and not direction.client_state:
        raise wrong("returns rows for clients to keep: set client_state = True in its class")
    wanted = (n, *context.x.shape)
    if state.per_client is not None and tuple(state.per_client.shape) != wanted:
        raise wrong(
            f"returns {shown(state.per_client)} for clients to keep: give a row for each client of"
            f" the cohort, shape {wanted}"
        )
    return state


def check_like(value: object, x: Tensor, what: str) -> None:
    """Refuse what is not a tensor like the model."""
    from torch import Tensor

    if not isinstance(value, Tensor) or value.shape != x.shape or value.dtype != x.dtype:
        raise FedShuffleError(
            f"{what} is {shown(value)}: it must be like the model, a tensor of shape"
            f" {tuple(x.shape)} and {x.dtype}."
        )


def check_tensors(values: Mapping[str, object], what: str) -> None:
    """Refuse what cannot be kept in a checkpoint."""
    from torch import Tensor

    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise FedShuffleError(f"{what} has {shown(value)} as {name!r}: keep tensors.")


def shown(value: object) -> str:
    """A value in a few words."""
    if value is None:
        return "nothing (None)"
    if hasattr(value, "shape"):
        dtype = getattr(value, "dtype", None)
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {dtype}"
    return f"a {type(value).__name__}, {value!r:.40}"
