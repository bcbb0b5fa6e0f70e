r"""Directions: which way clients step, as the coefficients of the one kernel.

A direction is a generator that follows a round: it may first ask for full gradients, then gives the
local plan, receives the sums of updates it asked for, and returns the state to keep. Here are the
gradient itself and the momenta, directions for any averaging method (:meth:`Method.with_momentum`).
"""

import abc
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedshuffle._arrays import FloatArray, IntArray, number
from fedshuffle.kernel import FullGradient, StepCoefficients
from fedshuffle.methods.averaging import Cohort, FedShuffleGen, InclusionProbability, Normaliser
from fedshuffle.transforms import NO_TRANSFORMS, Chain, Transform

if TYPE_CHECKING:
    from torch import Tensor


MethodState = Mapping[str, "Tensor"]
"""Named vectors that a direction keeps at the server; empty before the first round."""

OfState = Callable[[int, "Tensor"], StepCoefficients]
"""The coefficients of a client, from its place in the cohort and the vector that it keeps."""


@dataclass(frozen=True, slots=True)
class OwnModels:
    """Clients start from models that they keep, and keep the server's next one."""

    groups: "Sequence[tuple[IntArray, Tensor]]"
    """Places in the cohort, with the model of the clients there."""
    mean: "Tensor"
    """The model that the server moves from."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """How clients train in a round, what they keep, and which further sums the direction wants."""

    coefficients: StepCoefficients | Sequence[StepCoefficients] | OfState
    """One for all, one for each client of the cohort, or a function of what a client keeps."""
    report: FloatArray | None = None
    """A weight per client, for one more sum of what clients send."""
    keep: Transform | None = None
    """For directions with client state: makes the vector that a client keeps for the next round
    from its update and the last vector."""
    state_weights: FloatArray | None = None
    """A weight per client, for the sum of the changes of what clients keep."""
    add: "Tensor | None" = None
    """A vector that the server adds to the aggregated update."""
    factors: FloatArray | None = None
    """A factor per client on its aggregation weight."""
    own: OwnModels | None = None
    """If clients do not start from the server's model."""

    def each(
        self, n: int, places: IntArray | None = None, states: "Tensor | None" = None
    ) -> Sequence[StepCoefficients]:
        """The coefficients of n clients: all of the cohort, or those at some places in it."""
        if isinstance(self.coefficients, StepCoefficients):
            return [self.coefficients] * n
        where = range(n) if places is None else places.tolist()
        if not callable(self.coefficients):
            return [self.coefficients[k] for k in where]
        assert states is not None
        return [self.coefficients(k, own) for k, own in zip(where, states, strict=True)]


@dataclass(frozen=True, slots=True)
class Reported:
    """The sums that a local plan asked for."""

    updates: "Tensor | None" = None
    """``sum_i report_i`` times what client i sent."""
    state_change: "Tensor | None" = None
    """``sum_i state_weights_i`` times the change of what client i keeps."""


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What is known when a round starts."""

    x: "Tensor"
    state: MethodState
    cohort: Cohort
    step_sizes: FloatArray
    """The step size of each client of the cohort."""
    averaging: FedShuffleGen
    step_size: float
    """The step size that those of the clients are multiples of."""
    kept: "Callable[[IntArray], Tensor]"
    """What some clients keep, a row each."""

    @property
    def normaliser(self) -> Normaliser:
        """The q of the averaging rule."""
        return self.averaging.normaliser

    def gradient(self, *points: "Tensor", through: Chain = NO_TRANSFORMS) -> FullGradient:
        """Ask for ``sum_i w_i / p_i grad f_i(point)`` over the cohort, at one point or more; at a
        single point, clients may send their gradients through transforms.
        """
        cohort = self.cohort
        weights = (cohort.weight / cohort.probability)[:, None]
        return FullGradient(points, cohort.clients, weights, cohort.round, chain=through)


@dataclass(frozen=True, slots=True)
class CohortMoments:
    """What the audit knows of a method's cohorts S, where client i moves the model by
    ``contribution_i(S)`` times its local direction: expectations, one entry per client.
    """

    weights: FloatArray
    """The objective's w, but 0 for a client that never takes part."""
    cohort_gradient: FloatArray
    """``E[1{i in S} w_i / p_i]``, which is w unless a client never takes part or p is estimated."""
    anybody: float
    """The probability that the cohort is not empty."""
    contribution: FloatArray
    """``E[1{i in S} contribution_i]``."""
    joint: FloatArray | None = None
    """``E[1{i in S} w_i / p_i * (the contribution of all S)]``, if the direction needs it."""
    estimate: FloatArray | None = None
    """``E[1{i in S} c_i]`` with the c that weights gradients, if the direction needs it."""

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
    needs_linear: bool = False
    """Whether it reads gradients off the updates, which no adaptive local optimiser allows."""
    needs_joint: bool = False
    needs_estimate: bool = False
    needs_independent_rounds: bool = False
    """Whether ``effective_weights`` holds only if cohorts do not depend on earlier ones."""
    remembers: bool = False
    """Whether a client counts in every round, or for all rounds since its last, so that it does
    not matter how often it takes part. An averaging behind a '+' then lends its step sizes and
    weights, but not its q, and ``effective_weights`` is told the moments with ``q = p``."""
    every_round: bool = False
    """Whether the model also moves in rounds in which nobody takes part."""
    own_models: bool = False
    """Whether clients start from models of their own (:attr:`LocalPlan.own`)."""
    stale_models: bool = False
    """Whether clients may start from old models, at their own times: they need nothing else."""

    @abc.abstractmethod
    def round(self, context: RoundContext) -> Steps:
        """Yield any number of :class:`FullGradient`, each answered by a tensor of shape
        (sums, points, d), and then one :class:`LocalPlan`, answered by the sums it asked for
        (:class:`Reported`); return the state to keep.
        """

    def effective_weights(self, moments: CohortMoments) -> FloatArray | None:
        """The weights, not normalised, of the objective that the mean round descends, to first
        order in the step size and once the state has settled; None where no formula is known, and
        then the audit simulates the method.
        """
        return None


@dataclass(frozen=True)
class Plain(Direction):
    """The gradient itself.

    >>> from fedshuffle import methods
    >>> methods.get("fedavg").direction
    Plain()
    """

    stale_models = True

    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients())
        return context.state

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        return moments.contribution


@dataclass(frozen=True)
class MVR(Direction):
    r"""Exact momentum variance reduction (the paper's equations for FedShuffleMVR).

    Before local work, the cohort sends full gradients at the current and the previous model, and

    .. math:: m^r = a \hat g(x^r) + (1-a) (m^{r-1} + \hat g(x^r) - \hat g(x^{r-1})), \quad
              \hat g(x) = \sum_{i \in S} \frac{w_i}{p_i} \nabla f_i(x),

    starting with :math:`m^0 = \hat g(x^0)`. The local direction is
    :math:`g(y) - (1-a) g(x) + (1-a) m^r`. "Momentum 0.9" is ``a = 0.1``.

    >>> from fedshuffle import methods
    >>> methods.get("fedshuffle").with_momentum(MVR(0.1)).direction
    MVR(a=0.1)

    Reference: Horvath et al. 2022; the technique is from Cutkosky and Orabona 2019.
    """

    a: float = 0.1
    down, up, trips = 3, 3, 2  # both models and the momentum; two gradients and the update
    gradients_per_step, full_gradients = 2, 2
    needs_joint = needs_independent_rounds = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, context: RoundContext) -> Steps:
        m = yield from updated_mvr(self.a, context)
        b = 1 - self.a
        yield LocalPlan(StepCoefficients(alpha=1.0, beta=b, v=b * m["momentum"]))
        return m

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """At one point, the direction is ``a g_i + (1-a) m`` with m from this cohort and others."""
        assert moments.joint is not None
        along = self.a * moments.joint + (1 - self.a) * moments.total * moments.cohort_gradient
        return self.a * moments.contribution + (1 - self.a) * along


def updated_mvr(a: float, context: RoundContext) -> Steps:
    """The MVR momentum from full gradients of this round, and the model they were taken at."""
    x, before = context.x, context.state
    if not before:
        ((m,),) = yield context.gradient(x)
    else:
        ((now, then),) = yield context.gradient(x, before["previous"])
        m = a * now + (1 - a) * (before["momentum"] + now - then)
    return {"momentum": m, "previous": x}


@dataclass(frozen=True)
class GlobalMomentum(Direction):
    r"""The cheap momentum: no full gradient, no extra message.

    The local direction is :math:`a g(y) + (1-a) m`. A client's mean gradient over its local steps,
    :math:`\bar g_i`, follows from its update, since
    :math:`-(y_i - x) / (\tau_i \gamma_i) = a \bar g_i + (1-a) m`; after the round

    .. math:: m \leftarrow a \sum_{i \in S} c_i \bar g_i + (1-a) m,

    with :math:`c_i = w_i / p_i`, or :math:`w_i / \sum_{j \in S} w_j` for methods that do not
    aggregate by inclusion probability. It starts with m = 0.

    >>> from fedshuffle import methods
    >>> methods.get("fedavg").with_momentum(GlobalMomentum(0.2)).direction
    GlobalMomentum(a=0.2)
    """

    a: float = 0.1
    down = 2  # the model and the momentum
    needs_estimate = needs_linear = needs_independent_rounds = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, context: RoundContext) -> Steps:
        m = context.state.get("momentum", context.x.new_zeros(context.x.shape))
        weights = gradient_weights(context.cohort, context.normaliser)
        report = -weights / (context.cohort.done_length * context.step_sizes)
        answer = yield LocalPlan(StepCoefficients(alpha=self.a, v=(1 - self.a) * m), report)
        # The sum of the clients' directions holds (1-a) m as often as the weights sum to.
        missing = (1 - self.a) * (1 - float(weights.sum())) * m
        return {"momentum": answer.updates + missing}

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        assert moments.estimate is not None
        return self.a * moments.contribution + (1 - self.a) * moments.total * moments.estimate


def check_share(a: float) -> None:
    """Refuse a momentum parameter outside (0, 1]."""
    number(a, "momentum parameter a (the share of the new gradient: 0.1 for 0.9)", within="(0, 1]")


def gradient_weights(cohort: Cohort, normaliser: Normaliser) -> FloatArray:
    """How a method weights the clients of a cohort to estimate grad f from what they send."""
    if isinstance(normaliser, InclusionProbability):
        return cohort.weight / cohort.probability
    return cohort.weight / float(cohort.weight.sum())
