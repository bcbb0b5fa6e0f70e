r"""FedProx: a proximal term draws local steps back to the global model.

.. math:: y \leftarrow y - \gamma (g(y) + \mu (y - x))

Each client approaches the minimum of :math:`f_i(y) + \frac{\mu}{2} |y - x|^2`. That limits how far
clients drift apart, but not how they are weighted: the objective is FedAvg's.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, 2020.
"""

from dataclasses import dataclass

from fedshuffle._arrays import FloatArray, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods import fedavg
from fedshuffle.methods.directions import CohortMoments, Direction, LocalPlan, RoundContext, Steps
from fedshuffle.methods.method import Family, Method


@dataclass(frozen=True)
class Proximal(Direction):
    """The gradient and a proximal term of strength mu."""

    mu: float = 0.01
    stale_models = True

    def __post_init__(self) -> None:
        number(self.mu, "mu", within="[0, inf)")

    def round(self, context: RoundContext) -> Steps:
        largest = float(context.step_sizes.max())
        if self.mu * largest >= 2:
            raise FedShuffleError(
                f"mu = {self.mu:g} with a step size of {largest:g}: the proximal term alone makes"
                " a client overshoot more with every step. Keep mu times the step size below 1."
            )
        yield LocalPlan(StepCoefficients(mu=self.mu))
        return context.state

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """That of the gradient: the proximal term is zero at the first step."""
        return moments.contribution


_FAMILY = Family("fedprox", "FedProx", {"fedprox": ("FedProx", "#0072B2")})
METHODS = (
    Method(
        "fedprox",
        "FedAvg with a proximal term",
        fedavg.RULE,
        direction=Proximal(),
        reference="Li et al. 2020",
        family=_FAMILY,
    ),
)
