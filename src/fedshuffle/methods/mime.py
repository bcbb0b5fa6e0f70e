r"""Mime and MimeLite: a centralised optimiser's local steps, its statistics fixed during the round.

The server keeps a momentum m (and for Adam a second moment s), made from full gradients of the
cohort at the global model, :math:`\hat g = \sum_{i \in S} \frac{w_i}{p_i} \nabla f_i(x)`. Clients
step along

.. math:: \frac{(1-b) d + b m}{\sqrt s + \epsilon}, \qquad
          d = g(y) - g(x) + \hat g \;\; \text{(Mime)}, \quad d = g(y) \;\; \text{(MimeLite)},

without the denominator unless the base is Adam and with b = 0 if it is SGD; after the round
:math:`m \leftarrow (1-b) \hat g + b m, \; s \leftarrow (1-b_2) \hat g^2 + b_2 s`. There is no
correction for the first rounds; s starts as the first :math:`\hat g^2`, since a denominator of zero
plus epsilon would make the first round diverge.

MimeMVR is Mime with MVR momentum: FedShuffleMVR's direction with one step size for all.

Reference: Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated
Learning, 2020.
"""

from dataclasses import dataclass
from functools import partial

from fedshuffle._arrays import FloatArray, number
from fedshuffle.errors import check_known
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods.directions import (
    MVR,
    CohortMoments,
    Direction,
    LocalPlan,
    RoundContext,
    Steps,
)
from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.scaffold import RULE

_BASES = ("sgd", "momentum", "adam")


@dataclass(frozen=True)
class Mimic(Direction):
    """The step of a base optimiser (sgd, momentum, adam) with its statistics held fixed."""

    base: str = "momentum"
    corrected: bool = True
    """Whether the gradient is corrected as in SVRG (Mime), or not (MimeLite)."""
    b: float = 0.9
    b2: float = 0.99
    epsilon: float = 1e-3
    up = 2  # the gradient and the update
    full_gradients = 1

    def __post_init__(self) -> None:
        check_known("base optimiser", self.base, _BASES)
        for name in ("b", "b2"):
            number(getattr(self, name), name, within="[0, 1)")
        number(self.epsilon, "epsilon", within="(0, inf)")

    @property
    def down(self) -> float:  # type: ignore[override]
        """The model, the statistics, and for Mime the gradient of the cohort."""
        return 1 + _BASES.index(self.base) + int(self.corrected)

    @property
    def trips(self) -> int:  # type: ignore[override]
        """Mime needs the gradient before local training; MimeLite sends it with the update."""
        return 1 + int(self.corrected)

    @property
    def gradients_per_step(self) -> int:  # type: ignore[override]
        return 1 + int(self.corrected)

    @property
    def needs_joint(self) -> bool:  # type: ignore[override]
        return self.corrected

    @property
    def needs_independent_rounds(self) -> bool:  # type: ignore[override]
        return self.share < 1

    @property
    def share(self) -> float:
        """The share of the new gradient in a step."""
        return 1.0 if self.base == "sgd" else 1 - self.b

    def round(self, context: RoundContext) -> Steps:
        x, a, kept = context.x, self.share, context.state
        ((g,),) = yield context.gradient(x)
        m = kept.get("m", x.new_zeros(x.shape))
        s = kept.get("s", g.square())

        v = (1 - a) * m + (a * g if self.corrected else 0.0)
        scale = 1 / (s.sqrt() + self.epsilon) if self.base == "adam" else None
        beta = a if self.corrected else 0.0
        yield LocalPlan(StepCoefficients(alpha=a, beta=beta, v=v, scale=scale))

        after = {"m": a * g + (1 - a) * m} if a < 1 else {}
        if scale is not None:
            after["s"] = (1 - self.b2) * g.square() + self.b2 * s
        return after

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """The new gradient is the cohort's (Mime) or the client's own (MimeLite), m of others."""
        new = moments.joint if self.corrected else moments.contribution
        assert new is not None
        return self.share * new + (1 - self.share) * moments.total * moments.cohort_gradient


_STYLES = {
    "mime": ("Mime", "#0072B2"),
    "mime-sgd": ("Mime, SGD", "#56B4E9"),
    "mime-adam": ("Mime, Adam", "#009E73"),
    "mime-lite": ("MimeLite", "#D55E00"),
    "mime-lite-adam": ("MimeLite, Adam", "#E69F00"),
    "mime-mvr": ("MimeMVR", "#CC79A7"),
}
_method = partial(
    Method, family=Family("mime", "Mime", _STYLES), reference="Karimireddy et al. 2020 (Mime)"
)
_LITE, _LITE_ADAM = Mimic(corrected=False), Mimic("adam", corrected=False)

METHODS = (
    _method("mime", "fixed momentum, corrected gradients", RULE, Mimic()),
    _method("mime-sgd", "corrected gradients, no momentum", RULE, Mimic("sgd")),
    _method("mime-adam", "fixed Adam statistics, corrected gradients", RULE, Mimic("adam")),
    _method("mime-lite", "fixed momentum", RULE, _LITE),
    _method("mime-lite-adam", "fixed Adam statistics", RULE, _LITE_ADAM),
    _method("mime-mvr", "exact MVR momentum", RULE, MVR(0.1)),
)
