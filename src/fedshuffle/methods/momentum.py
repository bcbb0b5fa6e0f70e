"""Momentum: directions that any averaging method can be given (:meth:`Method.with_momentum`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedshuffle._arrays import FloatArray, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Probe, Steering
from fedshuffle.methods.directions import (
    Direction,
    Heading,
    Memory,
    Moments,
    RoundStart,
    Steps,
    gradient_weights,
)


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
    down, up, trips = 3, 3, 2  # both models and the momentum; two gradients and the update
    gradients_per_step, full_gradients = 2, 2
    needs_joint = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, start: RoundStart) -> Steps:
        m = yield from renewed(self.a, start)
        yield Heading(Steering(alpha=1.0, beta=1 - self.a, v=(1 - self.a) * m.server["momentum"]))
        return m

    def pull(self, moments: Moments) -> FloatArray:
        """At one point, the direction is ``a g_i + (1-a) m`` with m from this cohort and others."""
        assert moments.joint is not None
        along = self.a * moments.joint + (1 - self.a) * moments.total * moments.weights
        return self.a * moments.mass + (1 - self.a) * along


def renewed(a: float, start: RoundStart) -> Steps:
    """The MVR momentum after the probe of this round, and the model it was renewed at."""
    x, before, cohort = start.x, start.memory.server, start.cohort
    weights = (cohort.weight / cohort.probability)[:, None]
    points = (x, before["previous"]) if before else (x,)
    ((now, *then),) = yield Probe(points, cohort.clients, weights, cohort.round)
    m = now
    if before:
        m = a * now + (1 - a) * (before["momentum"] + now - then[0])
    return Memory({"momentum": m, "previous": x})


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
    down = 2  # the model and the momentum
    needs_estimate = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, start: RoundStart) -> Steps:
        m = start.memory.server.get("momentum", start.x.new_zeros(start.x.shape))
        weights = gradient_weights(start.cohort, start.normaliser)
        steering = Steering(alpha=self.a, v=(1 - self.a) * m)
        directions = yield Heading(
            steering, report=-weights / (start.cohort.done * start.step_sizes)
        )
        # The sum of the clients' directions holds (1-a) m as often as the weights sum to.
        return Memory({"momentum": directions + (1 - self.a) * (1 - float(weights.sum())) * m})

    def pull(self, moments: Moments) -> FloatArray:
        assert moments.estimate is not None
        return self.a * moments.mass + (1 - self.a) * moments.total * moments.estimate


def check_share(a: float) -> None:
    """Refuse a momentum parameter outside (0, 1]."""
    if not 0 < number(a, "momentum parameter a") <= 1:
        raise FedShuffleError(
            f"momentum parameter a = {a} is outside (0, 1]. It is the share of the new gradient:"
            " momentum 0.9 means a = 0.1."
        )
