r"""FedProx: local steps are held back by a spring to the global model.

.. math:: y \leftarrow y - \gamma (g(y) + \mu (y - x))

Each client walks towards the minimum of :math:`f_i(y) + \frac{\mu}{2} |y - x|^2`. That limits how
far clients drift apart, and does not mend what they are weighed by: the objective is FedAvg's.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedshuffle._arrays import FloatArray, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Steering
from fedshuffle.methods import fedavg
from fedshuffle.methods.directions import Direction, Heading, Memory, Moments, RoundStart, Steps
from fedshuffle.methods.method import Method


@final
@dataclass(frozen=True)
class Proximal(Direction):
    """The gradient, and a pull back to the global model of strength mu."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= number(self.mu, "mu") < float("inf"):
            raise FedShuffleError(
                f"mu = {self.mu}: the pull to the global model must be finite and 0 or more."
            )

    def round(self, start: RoundStart) -> Steps:
        largest = float(start.step_sizes.max())
        if self.mu * largest >= 2:
            raise FedShuffleError(
                f"mu = {self.mu:g} with a step size of {largest:g}: the pull alone makes a client"
                " overshoot more with every step. Keep mu times the step size below 1."
            )
        yield Heading(Steering(mu=self.mu))
        return Memory()

    def pull(self, moments: Moments) -> FloatArray:
        """That of the gradient: at the first step there is nothing to pull back from."""
        return moments.mass


METHODS = (
    Method(
        "fedprox",
        "FedAvg with a proximal term, mu = 0.01",
        fedavg.RULE,
        direction=Proximal(),
        reference="Li et al. 2020",
    ),
)
