"""Rounds that move equally far for every cohort: an averaging method from three rules.

c_i = sqrt(tau_i tau_max)        half way between one step size for all and FedShuffle's
w-tilde_i = w_i c_i / (p_i tau_i)   corrects the other half, and how often a client takes part
q^S = sum of w_j / p_j over S    the weight that the drawn clients represent
"""

import numpy as np

from fedshuffle import FedShuffleGen, Method, methods
from fedshuffle.methods import Cohort, Normaliser, RatioOfSums


def half_scaled(clients: Cohort) -> np.ndarray:
    return np.sqrt(clients.planned * clients.max_steps)


def repaired(clients: Cohort) -> np.ndarray:
    return clients.weight / clients.probability * half_scaled(clients) / clients.done


class StandsFor(Normaliser):
    def divide(self, weights: np.ndarray, cohort: Cohort) -> np.ndarray:
        return weights / (cohort.weight / cohort.probability).sum()

    def ratio(self, weights: np.ndarray, clients: Cohort) -> RatioOfSums:
        """1 / q^S as a ratio of sums over the cohort, from which audits are exact; or None."""
        return RatioOfSums(u=clients.weight / clients.probability)


RULE = FedShuffleGen(half_scaled, repaired, StandsFor())
METHOD = methods.register(Method("steady", "rounds of the same length", RULE))
