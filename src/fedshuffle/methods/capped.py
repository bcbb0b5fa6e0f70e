r"""The family between FedNova and FedShuffle: step sizes scaled by a factor of at most rho.

    c_i = max(tau_i, tau_max / rho),   w-tilde_i = w_i c_i / (steps done),   q = p

so that :math:`\gamma_i = \eta \min(\tau_{\max} / \tau_i, \rho)`; the aggregation weight corrects
for the rest of the imbalance. ``rho = 1`` is FedNova with inclusion probabilities (equal step
sizes), ``rho = inf`` is FedShuffle, and every rho minimises the objective you meant. In all of them
a client moves the model equally far, to first order; what differs is the size of a single step.

Reference: FedShuffleGen, Horvath et al. 2022, allows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, number
from fedshuffle.methods.averaging import Cohort, FedShuffleGen, InclusionProbability, own_steps
from fedshuffle.methods.method import Family, Method


@dataclass(frozen=True)
class CappedSteps:
    """``c_i = max(tau_i, tau_max / rho)``: no step is more than rho times that of the longest."""

    rho: float

    def __post_init__(self) -> None:
        number(self.rho, "rho, the largest factor between step sizes,", within="[1, inf]")

    def __call__(self, clients: Cohort) -> FloatArray:
        return np.maximum(own_steps(clients), clients.max_steps / self.rho)


@dataclass(frozen=True)
class WeightPerDistance:
    """``w-tilde_i = w_i c_i / done`` with the c of :class:`CappedSteps`: the weight corrects for
    unfinished work and for the imbalance that capped steps leave.
    """

    rho: float

    def __call__(self, clients: Cohort) -> FloatArray:
        return clients.weight * CappedSteps(self.rho)(clients) / clients.done


def rule(rho: float) -> FedShuffleGen:
    """The averaging rule with this largest factor between step sizes.

    >>> rule(4.0).step_normalisation
    CappedSteps(rho=4.0)
    """
    return FedShuffleGen(CappedSteps(rho), WeightPerDistance(rho), InclusionProbability())


_FAMILY = Family(
    "capped",
    "Between FedNova and FedShuffle",
    {"fedshuffle-capped": ("FedShuffle, capped", "#CC79A7")},
)
METHODS = (
    Method(
        "fedshuffle-capped",
        "FedShuffle with steps at most rho = 4 times as large",
        rule(4.0),
        reference="Horvath et al. 2022 (FedShuffleGen)",
        family=_FAMILY,
    ),
)
