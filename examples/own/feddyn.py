"""FedDyn: linear corrections of the clients' objectives, so that all share one optimum.

Client i stores h_i, an estimate of its own gradient, and the server stores h = sum_i w_i h_i.

    y_i  <-  local steps from x on f_i(y) + <h - h_i, y> + alpha/2 |y - x|^2
    h_i  <-  h_i - h - alpha (y_i - x)                       for the clients of the cohort S
    x    <-  x + sum_{i in S} w_i / p_i (y_i - x)

where alpha = strength / (step size * planned steps), the same for all clients, since their step
sizes are scaled as in FedShuffle.

Reference: Acar et al., Federated Learning Based on Dynamic Regularization, 2021.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedshuffle import FedShuffleError, Method, methods
from fedshuffle.methods import (
    CohortMoments,
    Direction,
    LocalPlan,
    RoundContext,
    StepCoefficients,
    Steps,
)
from fedshuffle.transforms import ClientContext, Message, Transform


@dataclass(frozen=True)
class Dynamic(Direction):
    strength: float = 0.5
    down, up = 2, 1  # the model and h; the update
    client_state = True

    def round(self, context: RoundContext) -> Steps:
        x, cohort = context.x, context.cohort
        if not 0 < self.strength <= cohort.planned.min():
            raise FedShuffleError(f"strength = {self.strength}: use a number from 0 to 1.")
        h = context.state.get("h", x.new_zeros(x.shape))
        alpha = (self.strength / (context.step_sizes * cohort.planned)).tolist()
        answer = yield LocalPlan(
            lambda k, h_i: StepCoefficients(mu=alpha[k], v=h - h_i),
            keep=Renew(h, dict(zip(cohort.clients.tolist(), alpha))),
            state_weights=cohort.weight,
        )
        return {"h": h + answer.state_change}

    def effective_weights(self, moments: CohortMoments) -> np.ndarray:
        """Once the h_i have settled, every client follows the global gradient."""
        return moments.total * moments.weights


@dataclass(frozen=True)
class Renew(Transform):
    """h_i after the round; the update is sent as it is."""

    h: Tensor
    alpha: dict[int, float]
    keeps_state, mean = True, "unchanged"

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        assert state is not None  # a row for each of the clients
        alpha = updates.new_tensor([self.alpha[client] for client in context.clients.tolist()])
        return Message(updates, state - self.h - alpha[:, None] * updates)


AVERAGING = methods.get("fedshuffle").averaging
METHOD = methods.register(
    Method("feddyn", "objectives corrected towards the common optimum", AVERAGING, Dynamic())
)
