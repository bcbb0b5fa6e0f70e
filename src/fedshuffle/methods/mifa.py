r"""MIFA: the server remembers the last update of every client, and all count in every round.

Client i of the cohort trains from x to :math:`y_i`. The server moves along the mean of the last
updates of *all* clients,

.. math:: G_i \leftarrow \frac{\tilde w_i}{w_i} \frac{y_i - x}{\eta} \quad (i \in S), \qquad
          x \leftarrow x + \eta_g \eta \sum_{i=1}^n w_i G_i,

so how often and when a client takes part does not matter for what is minimised, and no
inclusion probability is needed. Updates are remembered per unit step size :math:`\eta`, so that a
schedule treats old and new ones alike. As in the memory-efficient variant of the authors, each
client keeps its own :math:`G_i` and sends the change, and the server keeps the sum.

A client that has never taken part counts by a zero update. The authors let all take part in the
first round; here that is not needed, but until everybody came the objective is not the one you
meant. In a round without clients the server repeats the remembered updates.

Reference: Gu, Huang, Zhang and Huang, Fast Federated Learning in the Presence of Arbitrary Device
Unavailability, 2021. There w is 1/n and all take the same number of steps.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods.averaging import (
    FedShuffleGen,
    Unnormalised,
    objective_weight,
    steps_of_the_longest,
)
from fedshuffle.methods.directions import CohortMoments, Direction, LocalPlan, RoundContext, Steps
from fedshuffle.methods.method import Family, Method
from fedshuffle.transforms import ClientContext, Message, Transform

if TYPE_CHECKING:
    from torch import Tensor

RULE = FedShuffleGen(steps_of_the_longest, objective_weight, Unnormalised())
"""One step size for all, and weights w."""


@dataclass(frozen=True)
class LastUpdates(Direction):
    """The gradient; the aggregated update is the remembered mean plus what the cohort changes."""

    client_state = remembers = every_round = True

    def round(self, context: RoundContext) -> Steps:
        cohort, eta = context.cohort, context.step_size
        memory = context.state.get("memory", context.x.new_zeros(context.x.shape))
        units = context.averaging.client_weights(cohort) / (cohort.weight * eta)
        answer = yield LocalPlan(
            StepCoefficients(),
            keep=Remember(cohort.clients, units),
            state_weights=cohort.weight,
            add=eta * memory,
        )
        return {"memory": memory + answer.state_change}

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """Every client counts by what it sends when it takes part."""
        return moments.contribution


@dataclass(frozen=True)
class Remember(Transform):
    """Keeps a client's update, in units of its own; what is sent is the change of it."""

    clients: IntArray
    """The cohort, in ascending order."""
    units: FloatArray
    """The factor of each client's update before it is kept."""
    keeps_state, mean = True, "restored"

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        assert state is not None
        unit = self.units[np.searchsorted(self.clients, context.clients)]
        units = updates.new_tensor(unit)[:, None]
        return Message(updates - state / units, units * updates)


METHODS = (
    Method(
        "mifa",
        "the last update of every client, in every round",
        RULE,
        LastUpdates(),
        reference="Gu et al. 2021",
        family=Family("mifa", "MIFA", {"mifa": ("MIFA", "#0072B2")}),
    ),
)
