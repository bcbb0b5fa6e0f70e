"""FedShuffle and its variants: step sizes scaled by each client's number of steps.

    c = tau,  w-tilde = w,                  q = p                        FedShuffle
    c = tau,  w-tilde = w,                  q^S = sum of w over S        FedShuffle with sum one
    c = tau,  w-tilde = w planned / done,   q = p                        FedShuffleGen, the hybrid

Every client moves equally far in a round whatever its number of steps, and is weighted by its
inclusion probability, so the objective is the one you meant under every sampling. The hybrid
corrects for unfinished work through the aggregation weight.

Between FedNova and FedShuffle, step sizes are scaled by a factor of at most rho (capped):

    c_i = max(tau_i, tau_max / rho),   w-tilde_i = w_i c_i / (steps done),   q = p

so that ``gamma_i = eta min(tau_max / tau_i, rho)``; the aggregation weight corrects for the rest of
the imbalance. ``rho = 1`` is FedNova with inclusion probabilities (equal step sizes), ``rho = inf``
is the hybrid, and every rho minimises the objective you meant. In all of them a client moves the
model equally far, to first order; what differs is the size of a single step.

With full participation and equal numbers of steps FedShuffle is FedRR (LocalRR), and with a server
step size as well, NASTYA.

Reference: Horvath, Sanjabi, Xiao, Richtarik and Rabbat, FedShuffle: Recipes for Better Use of Local
Work in Federated Learning, 2022.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from fedshuffle._arrays import FloatArray, number
from fedshuffle.methods.averaging import (
    Cohort,
    FedShuffleGen,
    InclusionProbability,
    SumOne,
    objective_weight,
    own_steps,
    weight_per_share_done,
)
from fedshuffle.methods.directions import MVR
from fedshuffle.methods.method import Family, Method

RULE = FedShuffleGen(own_steps, objective_weight, InclusionProbability())
SUM_ONE = FedShuffleGen(own_steps, objective_weight, SumOne())
HYBRID = FedShuffleGen(own_steps, weight_per_share_done, InclusionProbability())


@dataclass(frozen=True)
class CappedSteps:
    """``c_i = max(tau_i, tau_max / rho)``: no step is more than rho times that of the longest."""

    rho: float

    def __post_init__(self) -> None:
        number(self.rho, "rho, the largest factor between step sizes,", within="[1, inf]")

    def __call__(self, clients: Cohort) -> FloatArray:
        return np.maximum(own_steps(clients), clients.max_length / self.rho)


@dataclass(frozen=True)
class WeightPerDistance:
    """``w-tilde_i = w_i c_i / done`` with the c of :class:`CappedSteps`: the weight corrects for
    unfinished work and for the imbalance that capped steps leave.
    """

    rho: float

    def __call__(self, clients: Cohort) -> FloatArray:
        return clients.weight * CappedSteps(self.rho)(clients) / clients.done_length


CAPPED = FedShuffleGen(CappedSteps(2.0), WeightPerDistance(2.0), InclusionProbability())

_STYLES = {
    "fedshuffle": ("FedShuffle", "#009E73"),
    "fedshuffle-so": ("FedShuffle w/ SO", "#D55E00"),
    "fedshuffle-gen": ("FedShuffleGen", "#CC79A7"),
    "fedshuffle-mvr": ("FedShuffleMVR", "#0072B2"),
    "fedrr": ("FedRR", "#56B4E9"),
    "nastya": ("NASTYA", "#0072B2"),
    "fedshuffle-capped": ("FedShuffle, capped", "#CC79A7"),
}
_FAMILY = Family("fedshuffle", "FedShuffle", _STYLES)
_method = partial(Method, family=_FAMILY, reference="Horvath et al. 2022")
_FEDRR = Family("fedrr-nastya", "FedRR and NASTYA", _STYLES)
_balanced = partial(Method, family=_FEDRR, averaging=RULE, balanced_only=True)

METHODS = (
    _method("fedshuffle", "scaled step sizes, reshuffled epochs, w/p", RULE),
    _method("fedshuffle-so", "weights that sum to one (biased)", SUM_ONE),
    _method("fedshuffle-gen", "corrects for unfinished work", HYBRID),
    _method("fedshuffle-mvr", "exact MVR momentum", RULE, MVR(0.1)),
    _balanced(
        "fedrr",
        "FedShuffle for balanced clients; LocalRR",
        reference="Mishchenko et al. 2021; Yun et al. 2021",
    ),
    _balanced("nastya", "FedRR with a server step size", reference="Malinovsky et al. 2022"),
    Method(
        "fedshuffle-capped",
        "steps at most rho = 2 times as large",
        CAPPED,
        reference="Horvath et al. 2022",
        family=Family("capped", "Between FedNova and FedShuffle", _STYLES),
    ),
)
