"""FedShuffle and its kin: step sizes scaled by each client's number of steps.

    c = tau,  w-tilde = w,                  q = p                        FedShuffle
    c = tau,  w-tilde = w,                  q^S = sum of w over S        FedShuffle with sum one
    c = tau,  w-tilde = w planned / done,   q = p                        FedShuffleGen, the hybrid

Every client walks equally far in a round whatever its number of steps, and is weighed by its
inclusion probability, so the objective is the one you meant under every sampling. Where work is
left unfinished, the hybrid repairs what is missing through the aggregation weight.

With full participation and equal numbers of steps FedShuffle is FedRR (LocalRR), and with a server
step size besides, NASTYA.

Reference: Horvath, Sanjabi, Xiao, Richtarik and Rabbat, FedShuffle: Recipes for Better Use of Local
Work in Federated Learning, 2022.
"""

from __future__ import annotations

from fedshuffle.methods.averaging import (
    FedShuffleGen,
    InclusionProbability,
    SumOne,
    objective_weight,
    own_steps,
    weight_per_share_done,
)
from fedshuffle.methods.method import Method
from fedshuffle.methods.momentum import MVR

RULE = FedShuffleGen(own_steps, objective_weight, InclusionProbability())
SUM_ONE = FedShuffleGen(own_steps, objective_weight, SumOne())
HYBRID = FedShuffleGen(own_steps, weight_per_share_done, InclusionProbability())
_REFERENCE = "Horvath et al. 2022"

METHODS = (
    Method(
        "fedshuffle",
        "scaled step sizes, reshuffled epochs, w/p",
        RULE,
        reference=_REFERENCE,
    ),
    Method(
        "fedshuffle-so",
        "FedShuffle with weights summing to one (biased)",
        SUM_ONE,
        reference=_REFERENCE,
    ),
    Method(
        "fedshuffle-gen",
        "FedShuffle that repairs unfinished work",
        HYBRID,
        reference=_REFERENCE,
    ),
    Method(
        "fedshuffle-mvr",
        "FedShuffle with exact MVR momentum, a = 0.1",
        RULE,
        direction=MVR(0.1),
        reference=_REFERENCE,
    ),
    Method(
        "fedrr",
        "FedShuffle for balanced clients; LocalRR",
        RULE,
        balanced_only=True,
        reference="Mishchenko et al. 2021; Yun et al. 2021",
    ),
    Method(
        "nastya",
        "FedRR with a server step size",
        RULE,
        balanced_only=True,
        reference="Malinovsky et al. 2022",
    ),
)
