"""FedAvg and the ways to give every client the same number of steps.

    c = tau_max,  w-tilde = w,  q^S = sum of w over S

One step size for all, and weights that are made to sum to one over the cohort. A client counts by
its weight *and* by its number of steps, and the sum in the cohort adds a bias of its own: the
objective that is minimised is ``w-hat_i ~ w_i tau_i E[1{i in S} / sum_S w]``.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
Data, 2017; FedAvgMin and FedAvgMean as in Horvath et al. 2022.
"""

from __future__ import annotations

from fedshuffle.methods.averaging import (
    FedShuffleGen,
    SumOne,
    objective_weight,
    steps_of_the_longest,
)
from fedshuffle.methods.method import Method

RULE = FedShuffleGen(steps_of_the_longest, objective_weight, SumOne())
_REFERENCE = "McMahan et al. 2017"

METHODS = (
    Method(
        "fedavg",
        "FedAvg, examples drawn with replacement",
        RULE,
        work={"order": "replacement"},
        reference=_REFERENCE,
    ),
    Method(
        "fedavg-rr",
        "FedAvg with reshuffled epochs, as practised",
        RULE,
        reference=_REFERENCE,
    ),
    Method(
        "fedavg-min",
        "FedAvg, the cohort's fewest steps for all, with replacement",
        RULE,
        work={"order": "replacement", "steps": "min"},
        reference="Horvath et al. 2022",
    ),
    Method(
        "fedavg-mean",
        "FedAvg, the cohort's mean steps for all, with replacement",
        RULE,
        work={"order": "replacement", "steps": "mean"},
        reference="Horvath et al. 2022",
    ),
)
