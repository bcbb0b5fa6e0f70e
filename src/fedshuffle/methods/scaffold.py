r"""SCAFFOLD: every client corrects its gradient by what it knows of its own and of everybody's.

Client i keeps a control variate :math:`c_i`, an old gradient of its own objective, and the server
:math:`c = \sum_i w_i c_i`. Clients walk by :math:`g(y) - c_i + c`, and those who took part renew

.. math:: c_i \leftarrow \nabla f_i(x) \quad \text{(refresh "gradient")}, \qquad
          c_i \leftarrow c_i - c + \frac{x - y_i}{\tau_i \gamma_i} \quad \text{(refresh "walk")}.

The second costs nothing: it is the mean gradient along the walk. All control variates start at
zero, not at the model's weights. Where they have settled, every client walks along the whole
gradient, so the objective is the one you meant however clients are weighed, and with full gradients
convergence is to the true optimum.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
2020 (options I and II). There w is 1/n and the server averages over a uniform cohort; here any
weights and any sampling, by inclusion probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import unknown
from fedshuffle.kernel import Probe, Steering
from fedshuffle.methods.averaging import (
    FedShuffleGen,
    InclusionProbability,
    objective_weight,
    steps_of_the_longest,
)
from fedshuffle.methods.directions import Direction, Heading, Memory, Moments, RoundStart, Steps
from fedshuffle.methods.method import Method

RULE = FedShuffleGen(steps_of_the_longest, objective_weight, InclusionProbability())
"""One step size for all, and weights w/p."""


@final
@dataclass(frozen=True)
class ControlVariates(Direction):
    """The gradient, corrected by control variates."""

    refresh: str = "walk"
    down, up = 2, 2  # the model and c; the update and the change of c_i
    client_state = True

    def __post_init__(self) -> None:
        if self.refresh not in ("walk", "gradient"):
            raise unknown("way to refresh control variates", self.refresh, ("walk", "gradient"))

    @property
    def full_gradients(self) -> int:  # type: ignore[override]
        return int(self.refresh == "gradient")

    def round(self, start: RoundStart) -> Steps:
        x, cohort, own = start.x, start.cohort, start.memory.clients
        assert own is not None
        c = start.memory.server.get("c", x.new_zeros(x.shape))
        each = np.eye(len(own))
        if self.refresh == "gradient":
            gradients = yield Probe((x,), cohort.clients, each, cohort.round)
            yield Heading([Steering(v=c - c_i) for c_i in own])
            renewed = gradients[:, 0]
        else:
            updates = yield Heading([Steering(v=c - c_i) for c_i in own], report=each)
            walked = x.new_tensor(cohort.done * start.step_sizes)
            renewed = own - c - updates / walked[:, None]
        return Memory({"c": c + x.new_tensor(cohort.weight) @ (renewed - own)}, renewed)

    def pull(self, moments: Moments) -> FloatArray:
        """Every client walks along c - c_i + g_i, which is the whole gradient."""
        return moments.total * moments.weights


METHODS = (
    Method(
        "scaffold",
        "control variates, renewed from the walk (option II)",
        RULE,
        direction=ControlVariates("walk"),
        reference="Karimireddy et al. 2020",
    ),
    Method(
        "scaffold-i",
        "control variates, renewed by a full gradient (option I)",
        RULE,
        direction=ControlVariates("gradient"),
        reference="Karimireddy et al. 2020",
    ),
)
