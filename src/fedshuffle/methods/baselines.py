r"""Baselines without local work, or without clients.

- Pooled SGD and RR: all data in one place, in steps of minibatches drawn with replacement or
  reshuffled every epoch. Every example counts equally, so the objective goes by size.
- Distributed gradient descent: clients of the cohort send one full gradient each,
  :math:`x \leftarrow x - \eta \sum_{i \in S} \frac{w_i}{p_i} \nabla f_i(x)`.
- Non-local MVR: the same with MVR momentum, :math:`x \leftarrow x - \eta m`; what FedShuffleMVR's
  local steps are to beat.
"""

from dataclasses import dataclass
from functools import partial

from fedshuffle._arrays import FloatArray
from fedshuffle.kernel import StepCoefficients
from fedshuffle.local_work import WHOLE_CLIENT
from fedshuffle.methods import fedavg, fedshuffle
from fedshuffle.methods.directions import (
    CohortMoments,
    Direction,
    LocalPlan,
    RoundContext,
    Steps,
    check_share,
    updated_mvr,
)
from fedshuffle.methods.method import Family, Method

_FULL_GRADIENT = {
    "epochs": 1,
    "steps": 1,
    "batch_size": WHOLE_CLIENT,
    "order": "sequential",
    "interruption": None,
}


@dataclass(frozen=True)
class NonLocalMVR(Direction):
    """The MVR momentum itself; no gradient of a minibatch is computed."""

    a: float = 0.1
    down, up, trips = 2, 2, 1  # both models; two gradients
    gradients_per_step, full_gradients = 0, 2
    needs_joint = needs_independent_rounds = True

    def __post_init__(self) -> None:
        check_share(self.a)

    def round(self, context: RoundContext) -> Steps:
        m = yield from updated_mvr(self.a, context)
        yield LocalPlan(StepCoefficients(alpha=0.0, v=m["momentum"]))
        return m

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        assert moments.joint is not None
        return self.a * moments.joint + (1 - self.a) * moments.total * moments.cohort_gradient


_STYLES = {
    "pooled-sgd": ("Pooled SGD", "#E69F00"),
    "pooled-rr": ("Pooled RR", "#D55E00"),
    "distributed-gd": ("Distributed GD", "#0072B2"),
    "non-local-mvr": ("Non-local MVR", "#CC79A7"),
}
_method = partial(Method, family=Family("baselines", "Baselines", _STYLES))
_pooled = partial(_method, averaging=fedshuffle.RULE, pooled=True)

METHODS = (
    _pooled(
        "pooled-sgd",
        "all data in one place, with replacement",
        work={"order": "replacement"},
        reference="Robbins and Monro 1951",
    ),
    _pooled("pooled-rr", "all data in one place, reshuffled", reference="Mishchenko et al. 2020"),
    _method(
        "distributed-gd",
        "full gradients of the cohort, w/p",
        fedshuffle.RULE,
        work=_FULL_GRADIENT,
        reference="textbook",
    ),
    _method(
        "non-local-mvr",
        "MVR from full gradients, no local steps",
        fedavg.RULE,  # every client takes the same step, so weights that sum to one take it once
        NonLocalMVR(),
        work=_FULL_GRADIENT,
        reference="Cutkosky and Orabona 2019",
    ),
)
