r"""SCAFFOLD and VRL-SGD: old gradients of its own and of all clients correct a client's gradient.

Client i keeps a control variate :math:`c_i`, an old gradient of its own objective, and the server
:math:`c = \sum_i w_i c_i`. Clients step along :math:`g(y) - c_i + c`; the cohort then updates

.. math:: c_i \leftarrow \nabla f_i(x) \quad \text{(refresh "gradient")}, \qquad
          c_i \leftarrow c_i - c + \frac{x - y_i}{\tau_i \gamma_i} \quad \text{(refresh "update")}.

The second costs nothing: it is the mean gradient over the local steps. All control variates start
at zero. Once they have settled, every client follows the whole gradient, so the objective is the
one you meant however clients are weighted, and with full gradients convergence is to the optimum.

VRL-SGD corrects each client's gradient by how its updates have differed from the mean,

.. math:: y \leftarrow y - \gamma (g(y) - \Delta_i), \qquad
          \Delta_i \leftarrow \Delta_i + \frac{x^+ - y_i}{\tau \gamma}

with :math:`x^+` the mean of all :math:`y_i`. Written with :math:`\Delta_i = c_i - c` these are
SCAFFOLD's control variates from the local update, at full participation and with server step size
1, and are implemented as such. Under sampling :math:`\sum_i w_i \Delta_i = 0` would be lost by the
formula above and the method would stop anywhere; the control variates preserve it.

References: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
2020 (options I and II). There w is 1/n and the server averages over a uniform cohort; here any
weights and any sampling, by inclusion probability. Liang et al., Variance Reduced Local SGD with
Lower Communication Complexity, 2019.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import check_known
from fedshuffle.kernel import StepCoefficients
from fedshuffle.local_optimisers import SGD, LocalOptimiser
from fedshuffle.methods.averaging import (
    FedShuffleGen,
    InclusionProbability,
    objective_weight,
    steps_of_the_longest,
)
from fedshuffle.methods.directions import CohortMoments, Direction, LocalPlan, RoundContext, Steps
from fedshuffle.methods.method import Family, Method
from fedshuffle.transforms import ClientContext, Message, Transform

if TYPE_CHECKING:
    from torch import Tensor

RULE = FedShuffleGen(steps_of_the_longest, objective_weight, InclusionProbability())
"""One step size for all, and weights w/p."""


@dataclass(frozen=True)
class ControlVariates(Direction):
    """The gradient, corrected by control variates."""

    refresh: str = "update"
    down, up = 2, 2  # the model and c; the update and the change of c_i
    client_state = True

    def __post_init__(self) -> None:
        check_known("refresh of control variates", self.refresh, ("update", "gradient"))

    @property
    def full_gradients(self) -> int:  # type: ignore[override]
        return int(self.refresh == "gradient")

    @property
    def needs_linear(self) -> bool:  # type: ignore[override]
        return self.refresh == "update"

    def round(self, context: RoundContext) -> Steps:
        x = context.x
        c = context.state.get("c", x.new_zeros(x.shape))
        answer = yield LocalPlan(
            lambda _, c_i: StepCoefficients(v=c - c_i),
            keep=Refresh(c, self.refresh, context.cohort.optimiser),
            state_weights=context.cohort.weight,
        )
        return {"c": c + answer.state_change}

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """Every client steps along c - c_i + g_i, which is the whole gradient."""
        return moments.total * moments.weights


@dataclass(frozen=True)
class Refresh(Transform):
    """A client's next control variate; its update is sent as it is."""

    c: "Tensor"
    refresh: str
    optimiser: LocalOptimiser = SGD
    keeps_state, mean = True, "unchanged"

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        assert state is not None
        assert context.full_gradients is not None
        if self.refresh == "gradient":
            return Message(updates, context.full_gradients())
        length = updates.new_tensor(self.optimiser.lengths(context.steps) * context.step_sizes)
        return Message(updates, state - self.c - updates / length[:, None])


_STYLES = {
    "scaffold": ("SCAFFOLD", "#0072B2"),
    "scaffold-i": ("SCAFFOLD, option I", "#E69F00"),
    "vrl-sgd": ("VRL-SGD", "#CC79A7"),
}
_method = partial(
    Method, family=Family("scaffold", "SCAFFOLD", _STYLES), reference="Karimireddy et al. 2020"
)
_FROM_UPDATE, _FROM_GRADIENT = ControlVariates("update"), ControlVariates("gradient")

METHODS = (
    _method("scaffold", "control variates from the update (option II)", RULE, _FROM_UPDATE),
    _method("scaffold-i", "control variates from full gradients (option I)", RULE, _FROM_GRADIENT),
    Method(
        "vrl-sgd",
        "SCAFFOLD in other words",
        RULE,
        _FROM_UPDATE,
        reference="Liang et al. 2019",
        family=Family("vrl-sgd", "VRL-SGD", _STYLES),
    ),
)
