r"""The family between FedNova and FedShuffle: step sizes scaled, but by a factor of at most rho.

    c_i = max(tau_i, tau_max / rho),   w-tilde_i = w_i c_i / (steps done),   q = p

so that :math:`\gamma_i = \eta \min(\tau_{\max} / \tau_i, \rho)`, and what is left of the imbalance
is repaired by the aggregation weight. ``rho = 1`` is FedNova with inclusion probabilities (all step
sizes equal), ``rho = inf`` is FedShuffle, and every rho minimises the objective you meant. In all
of them a client moves the model equally far, to first order; what differs is how far a single step
goes: small clients no longer take steps as many times larger as the largest client is larger.

Reference: FedShuffleGen, Horvath et al. 2022, allows it.
"""

from __future__ import annotations

from fedshuffle.methods.averaging import (
    CappedSteps,
    FedShuffleGen,
    InclusionProbability,
    WeightPerDistance,
)
from fedshuffle.methods.method import Method


def rule(rho: float) -> FedShuffleGen:
    """The averaging rule with this largest factor between step sizes.

    >>> rule(4.0).step_normalisation
    CappedSteps(rho=4.0)
    """
    return FedShuffleGen(CappedSteps(rho), WeightPerDistance(rho), InclusionProbability())


METHODS = (
    Method(
        "fedshuffle-capped",
        "FedShuffle with steps at most rho = 4 times as large",
        rule(4.0),
        reference="Horvath et al. 2022 (FedShuffleGen)",
    ),
)
