"""Momentum: directions for any averaging method (:meth:`Method.with_momentum`)."""

from __future__ import annotations

from dataclasses import dataclass

from fedshuffle._arrays import FloatArray, number
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods.directions import (
    CohortMoments,
    Direction,
    LocalPlan,
    MethodState,
    RoundContext,
    Steps,
    gradient_weights,
)


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
    needs_joint = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, context: RoundContext) -> Steps:
        m = yield from updated_mvr(self.a, context)
        b = 1 - self.a
        yield LocalPlan(StepCoefficients(alpha=1.0, beta=b, v=b * m.shared["momentum"]))
        return m

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """At one point, the direction is ``a g_i + (1-a) m`` with m from this cohort and others."""
        assert moments.joint is not None
        along = self.a * moments.joint + (1 - self.a) * moments.total * moments.weights
        return self.a * moments.contribution + (1 - self.a) * along


def updated_mvr(a: float, context: RoundContext) -> Steps:
    """The MVR momentum from full gradients of this round, and the model they were taken at."""
    x, before = context.x, context.state.shared
    if not before:
        ((m,),) = yield context.gradient(x)
    else:
        ((now, then),) = yield context.gradient(x, before["previous"])
        m = a * now + (1 - a) * (before["momentum"] + now - then)
    return MethodState({"momentum": m, "previous": x})


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
    needs_estimate = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, context: RoundContext) -> Steps:
        m = context.state.shared.get("momentum", context.x.new_zeros(context.x.shape))
        weights = gradient_weights(context.cohort, context.normaliser)
        report = -weights / (context.cohort.done * context.step_sizes)
        directions = yield LocalPlan(StepCoefficients(alpha=self.a, v=(1 - self.a) * m), report)
        # The sum of the clients' directions holds (1-a) m as often as the weights sum to.
        return MethodState({"momentum": directions + (1 - self.a) * (1 - float(weights.sum())) * m})

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        assert moments.estimate is not None
        return self.a * moments.contribution + (1 - self.a) * moments.total * moments.estimate


def check_share(a: float) -> None:
    """Refuse a momentum parameter outside (0, 1]."""
    number(a, "momentum parameter a (the share of the new gradient: 0.1 for 0.9)", within="(0, 1]")
