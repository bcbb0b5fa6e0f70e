"""FedAvg and the ways to give every client the same number of steps.

    c = tau_max,  w-tilde = w,  q^S = sum of w over S

One step size for all, and weights that sum to one over the cohort. A client counts by its weight
*and* by its number of steps, and the sum over the cohort adds another bias: the objective that
is minimised is ``w-hat_i ~ w_i tau_i E[1{i in S} / sum_S w]``.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
Data, 2017; FedAvgMin and FedAvgMean as in Horvath et al. 2022.
"""

from functools import partial

from fedshuffle.methods.averaging import (
    FedShuffleGen,
    SumOne,
    objective_weight,
    steps_of_the_longest,
)
from fedshuffle.methods.method import Family, Method

RULE = FedShuffleGen(steps_of_the_longest, objective_weight, SumOne())

_STYLES = {
    "fedavg": ("FedAvg", "#999999"),
    "fedavg-rr": ("FedAvgRR", "#D55E00"),
    "fedavg-min": ("FedAvgMin", "#E69F00"),
    "fedavg-mean": ("FedAvgMean", "#CC79A7"),
}
_method = partial(Method, family=Family("fedavg", "FedAvg", _STYLES), averaging=RULE)
_mcmahan = partial(_method, reference="McMahan et al. 2017")
_horvath = partial(_method, reference="Horvath et al. 2022")
_DRAWN = {"order": "replacement"}
_MIN, _MEAN = {**_DRAWN, "steps": "min"}, {**_DRAWN, "steps": "mean"}

METHODS = (
    _mcmahan("fedavg", "examples drawn with replacement", work=_DRAWN),
    _mcmahan("fedavg-rr", "reshuffled epochs, as practised"),
    _horvath("fedavg-min", "the cohort's fewest steps for all, with replacement", work=_MIN),
    _horvath("fedavg-mean", "the cohort's mean steps for all, with replacement", work=_MEAN),
)
