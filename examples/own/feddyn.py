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

from fedshuffle import FedShuffleError, Method, methods
from fedshuffle.methods import (
    CohortMoments,
    Direction,
    LocalPlan,
    MethodState,
    RoundContext,
    StepCoefficients,
    Steps,
)


@dataclass(frozen=True)
class Dynamic(Direction):
    strength: float = 0.5
    down, up = 2, 1  # the model and h; the update
    client_state = True

    def round(self, context: RoundContext) -> Steps:
        x, cohort, own = context.x, context.cohort, context.state.per_client
        assert own is not None  # a row for each client of the cohort
        if not 0 < self.strength <= cohort.planned.min():
            raise FedShuffleError(f"strength = {self.strength}: use a number from 0 to 1.")
        h = context.state.shared.get("h", x.new_zeros(x.shape))
        alpha = self.strength / (context.step_sizes * cohort.planned)
        each = [StepCoefficients(mu=a, v=h - h_i) for a, h_i in zip(alpha.tolist(), own)]
        updates = yield LocalPlan(each, report=np.eye(len(own)))
        renewed = own - h - x.new_tensor(alpha)[:, None] * updates
        return MethodState({"h": h + x.new_tensor(cohort.weight) @ (renewed - own)}, renewed)

    def effective_weights(self, moments: CohortMoments) -> np.ndarray:
        """Once the h_i have settled, every client follows the global gradient."""
        return moments.total * moments.weights


AVERAGING = methods.get("fedshuffle").averaging
METHOD = methods.register(
    Method("feddyn", "objectives corrected towards the common optimum", AVERAGING, Dynamic())
)
