r"""FedAU: FedAvg for clients that come with probabilities nobody knows.

    c = tau_max,  w-tilde = w,  q = p-hat

where ``1 / p-hat`` is the mean interval between the participations of a client so far, and
intervals are cut at ``cutoff`` rounds, K. In a long run a client that comes with probability p, in
independent rounds, counts by ``w-hat_i ~ w_i tau_i (1 - (1 - p_i)^K)``: by its steps, as in FedAvg,
and hardly by its probability if that is larger than 1 / K.

``fedau+fedshuffle`` has FedShuffle's step sizes as well, so that steps do not count, either.

Reference: Wang and Ji, A Lightweight Method for Tackling Unknown Participation Statistics in
Federated Averaging, 2024.
"""

from fedshuffle.methods.averaging import (
    FedShuffleGen,
    InclusionProbability,
    objective_weight,
    steps_of_the_longest,
)
from fedshuffle.methods.method import Family, Method
from fedshuffle.probabilities import TruncatedIntervals

RULE = FedShuffleGen(
    steps_of_the_longest, objective_weight, InclusionProbability(TruncatedIntervals(cutoff=50))
)

METHODS = (
    Method(
        "fedau",
        "FedAvg divided by estimated probabilities",
        RULE,
        reference="Wang and Ji 2024",
        family=Family("fedau", "FedAU", {"fedau": ("FedAU", "#56B4E9")}),
    ),
)
