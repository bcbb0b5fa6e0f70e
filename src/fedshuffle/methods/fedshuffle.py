"""FedShuffle and its variants: step sizes scaled by each client's number of steps.

    c = tau,  w-tilde = w,                  q = p                        FedShuffle
    c = tau,  w-tilde = w,                  q^S = sum of w over S        FedShuffle with sum one
    c = tau,  w-tilde = w planned / done,   q = p                        FedShuffleGen, the hybrid

Every client moves equally far in a round whatever its number of steps, and is weighed by its
inclusion probability, so the objective is the one you meant under every sampling. The hybrid
corrects for unfinished work through the aggregation weight.

With full participation and equal numbers of steps FedShuffle is FedRR (LocalRR), and with a server
step size as well, NASTYA.

Reference: Horvath, Sanjabi, Xiao, Richtarik and Rabbat, FedShuffle: Recipes for Better Use of Local
Work in Federated Learning, 2022.
"""

from __future__ import annotations

from functools import partial

from fedshuffle.methods.averaging import (
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

_STYLES = {
    "fedshuffle": ("FedShuffle", "#009E73"),
    "fedshuffle-so": ("FedShuffle w/ SO", "#D55E00"),
    "fedshuffle-gen": ("FedShuffleGen", "#CC79A7"),
    "fedshuffle-mvr": ("FedShuffleMVR", "#0072B2"),
    "fedrr": ("FedRR", "#56B4E9"),
    "nastya": ("NASTYA", "#0072B2"),
}
_FAMILY = Family("fedshuffle", "FedShuffle", _STYLES)
_method = partial(Method, family=_FAMILY, reference="Horvath et al. 2022")
_FEDRR = Family("fedrr-nastya", "FedRR and NASTYA", _STYLES)
_balanced = partial(Method, family=_FEDRR, averaging=RULE, balanced_only=True)

METHODS = (
    _method("fedshuffle", "scaled step sizes, reshuffled epochs, w/p", RULE),
    _method("fedshuffle-so", "FedShuffle with weights summing to one (biased)", SUM_ONE),
    _method("fedshuffle-gen", "FedShuffle that corrects for unfinished work", HYBRID),
    _method("fedshuffle-mvr", "FedShuffle with exact MVR momentum, a = 0.1", RULE, MVR(0.1)),
    _balanced(
        "fedrr",
        "FedShuffle for balanced clients; LocalRR",
        reference="Mishchenko et al. 2021; Yun et al. 2021",
    ),
    _balanced("nastya", "FedRR with a server step size", reference="Malinovsky et al. 2022"),
)
