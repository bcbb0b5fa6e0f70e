"""FedDyn: every client's objective is bent until all clients agree on the optimum of the whole.

Client i keeps h_i, what it knows of its own gradient, and the server keeps h = sum_i w_i h_i.

    y_i  <-  a walk from x down  f_i(y) + <h - h_i, y> + alpha/2 |y - x|^2
    h_i  <-  h_i - h - alpha (y_i - x)                       for the clients of the cohort S
    x    <-  x + sum_{i in S} w_i / p_i (y_i - x)

where alpha = strength / (step size * planned steps), which is the same for all clients, as their
step sizes are scaled like FedShuffle's. In the paper's box x - h / alpha goes by the name of the
server's model; walks that reach their minimum are the same.

Reference: Acar et al., Federated Learning Based on Dynamic Regularization, 2021.
"""

from dataclasses import dataclass

import numpy as np

from fedshuffle import FedShuffleError, Method, methods
from fedshuffle.methods import Direction, Heading, Memory, Moments, RoundStart, Steering, Steps


@dataclass(frozen=True)
class Dynamic(Direction):
    strength: float = 0.5
    down, up = 2, 1  # the model and h; the update
    client_state = True

    def round(self, start: RoundStart) -> Steps:
        x, cohort, own = start.x, start.cohort, start.memory.clients
        assert own is not None  # client_state: a row for each client of the cohort
        if not 0 < self.strength <= cohort.planned.min():
            raise FedShuffleError(f"strength = {self.strength}: use a number from 0 to 1.")
        h = start.memory.server.get("h", x.new_zeros(x.shape))
        alpha = self.strength / (start.step_sizes * cohort.planned)
        steering = [Steering(mu=a, v=h - h_i) for a, h_i in zip(alpha.tolist(), own)]
        updates = yield Heading(steering, report=np.eye(len(own)))
        renewed = own - h - x.new_tensor(alpha)[:, None] * updates
        return Memory({"h": h + x.new_tensor(cohort.weight) @ (renewed - own)}, renewed)

    def pull(self, moments: Moments) -> np.ndarray:
        """Once the h_i have settled, every client walks along the whole gradient."""
        return moments.total * moments.weights


METHOD = methods.register(
    Method(
        "feddyn",
        "objectives bent towards the common optimum",
        methods.get("fedshuffle").averaging,
        direction=Dynamic(),
        reference="Acar et al. 2021",
    )
)
