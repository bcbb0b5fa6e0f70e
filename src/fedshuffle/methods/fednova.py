"""FedNova: one step size for all, updates divided by the number of steps.

    c = tau_max,  w-tilde = w / tau,  q^S = sum of w-tilde over S            (scaling "sum")
                                      q^S = (sum_S w)^2 / sum_S w tau        (scaling "original")

Under full participation the objective is the one you meant. Under sampling, the sum over the
cohort brings a bias back. (Only scaling "sum" under uniform sampling has none, if ``w_i / tau_i``
is the same for all clients.) The two scalings differ in how far a round moves: the original keeps
the mean length of the clients' updates, which is much more when steps are very uneven; the paper's
experiments keep the sum of the weights at one.

Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, 2020.
"""

from functools import partial

from fedshuffle.methods.averaging import (
    EffectiveSteps,
    FedShuffleGen,
    SumOne,
    steps_of_the_longest,
    weight_per_step,
)
from fedshuffle.methods.method import Family, Method

SUM = FedShuffleGen(steps_of_the_longest, weight_per_step, SumOne())
ORIGINAL = FedShuffleGen(steps_of_the_longest, weight_per_step, EffectiveSteps())

_STYLES = {
    "fednova": ("FedNova", "#56B4E9"),
    "fednova-rr": ("FedNovaRR", "#0072B2"),
    "fednova-original": ("FedNova (original)", "#E69F00"),
    "fednova-original-rr": ("FedNovaRR (original)", "#D55E00"),
}
_method = partial(Method, family=Family("fednova", "FedNova", _STYLES))
_wang = partial(_method, reference="Wang et al. 2020")
_horvath = partial(_method, reference="Horvath et al. 2022")
_DRAWN = {"order": "replacement"}

METHODS = (
    _wang("fednova", "weights that sum to one, with replacement", SUM, work=_DRAWN),
    _horvath("fednova-rr", "weights that sum to one, reshuffled epochs", SUM),
    _wang("fednova-original", "its authors' scaling, with replacement", ORIGINAL, work=_DRAWN),
    _wang("fednova-original-rr", "its authors' scaling, reshuffled epochs", ORIGINAL),
)
