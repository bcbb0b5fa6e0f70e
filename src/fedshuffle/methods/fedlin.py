r"""FedLin: every client replaces its own gradient at the global model by that of the cohort.

.. math:: y \leftarrow y - \gamma_i (g(y) - \nabla f_i(x) + \hat g), \qquad
          \hat g = \sum_{i \in S} \frac{w_i}{p_i} h_i, \qquad \gamma_i = \eta \, \tau_{\max}/\tau_i,

where :math:`h_i = \nabla f_i(x)` is sent before local training. To send less, ``keep`` a share of
its entries, the largest: client i sends :math:`h_i = \mathrm{top}(\rho_i + \nabla f_i(x))` and
keeps what it did not send, :math:`\rho_i \leftarrow \rho_i + \nabla f_i(x) - h_i`. The step
sizes, inversely proportional to the number of steps, are its authors' own, and FedShuffle's.

Reference: Mitra et al., Linear Convergence in Federated Learning: Tackling Client Heterogeneity and
Sparse Gradients, 2021.
"""

from dataclasses import dataclass
from functools import partial

from fedshuffle._arrays import FloatArray, number
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods import fedshuffle
from fedshuffle.methods.directions import CohortMoments, Direction, LocalPlan, RoundContext, Steps
from fedshuffle.methods.method import Family, Method
from fedshuffle.transforms import Chain, ErrorFeedback, TopK


@dataclass(frozen=True)
class GradientExchange(Direction):
    """The gradient, with the client's own at x replaced by the cohort's."""

    keep: float = 1.0
    down, trips = 2, 2  # the model and the gradient
    full_gradients = 2  # the same one twice, rather than to store a vector for every client
    needs_joint = True

    def __post_init__(self) -> None:
        number(self.keep, "keep, the share of a gradient that is sent,", within="(0, 1]")

    @property
    def up(self) -> float:  # type: ignore[override]
        """The gradient (values and places, if only some are sent), and the update."""
        return 2 if self.keep == 1 else 1 + 2 * self.keep

    @property
    def client_state(self) -> bool:  # type: ignore[override]
        return self.keep < 1

    def round(self, context: RoundContext) -> Steps:
        sparse = (ErrorFeedback(TopK(self.keep)),) if self.keep < 1 else ()
        ((g,),) = yield context.gradient(context.x, through=Chain(sparse))
        yield LocalPlan(StepCoefficients(v=g, own_gradient=True))
        return {}

    def effective_weights(self, moments: CohortMoments) -> FloatArray | None:
        """All clients of a cohort follow its estimate of the gradient."""
        return moments.joint


_STYLES = {"fedlin": ("FedLin", "#0072B2"), "fedlin-sparse": ("FedLin, sparse", "#E69F00")}
_FAMILY = Family("fedlin", "FedLin", _STYLES)
_method = partial(Method, family=_FAMILY, reference="Mitra et al. 2021")
_ALL, _TENTH = GradientExchange(), GradientExchange(keep=0.1)

METHODS = (
    _method("fedlin", "own gradient replaced by the cohort's", fedshuffle.RULE, _ALL),
    _method(
        "fedlin-sparse", "sends a tenth of the gradient, with error memory", fedshuffle.RULE, _TENTH
    ),
)
