r"""FedShuffleGen: every averaging method is three rules (c, w-tilde, q).

In a round with cohort S, client i walks its local steps with step size

.. math:: \gamma_i = \eta \, \tau_{\max} / c_i,

and the server moves by

.. math:: x \leftarrow x + \eta_g \sum_{i \in S} a_i (y_i - x), \qquad a_i = \tilde w_i / q_i^S.

Here :math:`\eta` is the step size of a client with :math:`c_i = \tau_{\max}`, the most steps any
client of the federation may take; the paper's :math:`\eta_l` is :math:`\eta \, \tau_{\max}`.
The three rules also say which objective is really minimised: see :mod:`fedshuffle.auditing`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray, number
from fedshuffle.errors import FedShuffleError


@final
@dataclass(frozen=True, slots=True)
class Participants:
    """What the rules may know of clients: arrays of equal shape, one entry per client."""

    clients: IntArray
    """The clients' numbers."""
    weight: FloatArray
    """Objective weight w."""
    probability: FloatArray
    """Inclusion probability p."""
    planned: IntArray
    """Local steps the client was asked to do."""
    done: IntArray
    """Local steps it did."""
    longest: int
    """The most steps any client of the federation may be asked for."""
    round: int = 0
    """The round they take part in."""

    def only(self, chosen: NDArray[np.bool_], probability: FloatArray) -> Participants:
        """Those chosen, with other inclusion probabilities."""
        return Participants(
            self.clients[chosen],
            self.weight[chosen],
            probability[chosen],
            self.planned[chosen],
            self.done[chosen],
            self.longest,
            self.round,
        )


ClientRule = Callable[[Participants], FloatArray]
"""A number for every client that depends on that client alone (not on who else takes part)."""


# Step normalisations c -----------------------------------------------------------------------


def steps_of_the_longest(clients: Participants) -> FloatArray:
    """``c_i = tau_max``: every client uses the same step size."""
    return np.full(clients.planned.shape, float(clients.longest))


def own_steps(clients: Participants) -> FloatArray:
    """``c_i = tau_i``, the planned steps: a client that walks more steps makes them smaller."""
    return clients.planned.astype(np.float64)


@final
@dataclass(frozen=True)
class CappedSteps:
    """``c_i = max(tau_i, tau_max / rho)``: no step is more than rho times that of the longest."""

    rho: float

    def __post_init__(self) -> None:
        _check_cap(self.rho)

    def __call__(self, clients: Participants) -> FloatArray:
        return np.maximum(own_steps(clients), clients.longest / self.rho)


# Aggregation weights w-tilde -----------------------------------------------------------------


def objective_weight(clients: Participants) -> FloatArray:
    """``w-tilde_i = w_i``."""
    return clients.weight


def weight_per_step(clients: Participants) -> FloatArray:
    """``w-tilde_i = w_i / (steps done)``: what FedNova does."""
    return clients.weight / clients.done


def weight_per_share_done(clients: Participants) -> FloatArray:
    """``w-tilde_i = w_i * planned / done``: repairs unfinished work."""
    return clients.weight * (clients.planned / clients.done)


@final
@dataclass(frozen=True)
class WeightPerDistance:
    """``w-tilde_i = w_i c_i / done`` with the c of :class:`CappedSteps`: what capped steps leave
    of the imbalance, and unfinished work, is repaired by the weight.
    """

    rho: float

    def __call__(self, clients: Participants) -> FloatArray:
        return clients.weight * CappedSteps(self.rho)(clients) / clients.done


# Normalisers q -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RatioOfSums:
    """A normaliser written as ``1 / q^S = (sum of v over S) / (sum of u over S) ** power``.

    Without ``v`` the numerator is 1. From this form the audit computes expectations exactly.
    """

    u: FloatArray
    v: FloatArray | None = None
    power: int = 1


class Normaliser(abc.ABC):
    """The rule q: by what the server divides the weighted update of a client in the cohort."""

    @abc.abstractmethod
    def divide(self, weights: FloatArray, cohort: Participants) -> FloatArray:
        """``weights / q^S`` for the clients of a cohort."""

    @abc.abstractmethod
    def ratio(self, weights: FloatArray, clients: Participants) -> RatioOfSums | None:
        """The normaliser as a ratio of sums over the cohort; None where it is not one."""


@final
class InclusionProbability(Normaliser):
    """``q_i^S = p_i``: every client counts in expectation by its weight, whoever was sampled."""

    def divide(self, weights: FloatArray, cohort: Participants) -> FloatArray:
        return weights / cohort.probability

    def ratio(self, weights: FloatArray, clients: Participants) -> None:
        return None


@final
class SumOne(Normaliser):
    """``q^S`` = the sum of w-tilde over S, so that the aggregation weights sum to one."""

    def divide(self, weights: FloatArray, cohort: Participants) -> FloatArray:
        return weights / float(weights.sum())

    def ratio(self, weights: FloatArray, clients: Participants) -> RatioOfSums:
        return RatioOfSums(u=weights)


@final
class EffectiveSteps(Normaliser):
    """The original FedNova: ``a_i = (w_i / W_S) / tau_i * tau_eff``, where ``W_S`` is the sum of w
    over S and ``tau_eff`` the w-weighted mean of the steps done in S.
    """

    def divide(self, weights: FloatArray, cohort: Participants) -> FloatArray:
        walked, total = float(cohort.weight @ cohort.done), float(cohort.weight.sum())
        if total < 1e-150:  # its square is not a float any more
            return weights / total * (walked / total)
        return weights * (walked / total**2)

    def ratio(self, weights: FloatArray, clients: Participants) -> RatioOfSums:
        return RatioOfSums(u=clients.weight, v=clients.weight * clients.done, power=2)


@final
@dataclass(frozen=True)
class Custom(Normaliser):
    """The user's own q: a function of (w-tilde, cohort) that returns one number per client."""

    q: Callable[[FloatArray, Participants], FloatArray]

    def divide(self, weights: FloatArray, cohort: Participants) -> FloatArray:
        return weights / self.q(weights, cohort)

    def ratio(self, weights: FloatArray, clients: Participants) -> None:
        return None


@final
@dataclass(frozen=True)
class FedShuffleGen:
    """The averaging rule (c, w-tilde, q); the paper's Algorithm "FedShuffleGen".

    >>> fedshuffle = FedShuffleGen(own_steps, objective_weight, InclusionProbability())
    >>> steps = np.array([1, 3])
    >>> cohort = Participants(
    ...     clients=np.array([0, 1]), weight=np.array([0.25, 0.75]),
    ...     probability=np.array([0.5, 0.5]), planned=steps, done=steps, longest=3,
    ... )
    >>> fedshuffle.step_scale(cohort).tolist(), fedshuffle.aggregation_weights(cohort).tolist()
    ([3.0, 1.0], [0.5, 1.5])
    """

    step_normalisation: ClientRule
    weight: ClientRule
    normaliser: Normaliser

    def describe(self) -> dict[str, str]:
        """The names of the three rules."""
        rules = (self.step_normalisation, self.weight)
        c, weight = (getattr(rule, "__name__", None) or _named(rule) for rule in rules)
        normaliser = _named(self.normaliser)
        return {"step_normalisation": c, "weight": weight, "normaliser": normaliser}

    def step_scale(self, clients: Participants) -> FloatArray:
        """``gamma_i / eta = tau_max / c_i``."""
        c = _each(self.step_normalisation(clients), clients, "step normalisation c")
        return _positive(clients.longest / c, "step normalisation c")

    def client_weights(self, clients: Participants) -> FloatArray:
        """``w-tilde_i``."""
        return _each(self.weight(clients), clients, "weight w-tilde")

    def aggregation_weights(self, cohort: Participants) -> FloatArray:
        """``a_i = w-tilde_i / q_i^S`` for the clients of a cohort."""
        weights = self.client_weights(cohort)
        shares = self.normaliser.divide(weights, cohort)
        return _positive(_each(shares, cohort, "aggregation weight w/q"), "aggregation weight w/q")


def _named(rule: object) -> str:
    """A rule by its class and parameters, unless these are functions."""
    plain = dataclasses.is_dataclass(rule) and not isinstance(rule, Custom)
    return repr(rule) if plain else type(rule).__name__


def _check_cap(rho: float) -> None:
    if not number(rho, "rho") >= 1:
        raise FedShuffleError(
            f"rho = {rho}: the largest factor between step sizes must be 1 (FedNova) or more;"
            " inf is FedShuffle."
        )


def _each(values: FloatArray, clients: Participants, what: str) -> FloatArray:
    """What a rule gave, if it is a number for every client."""
    shape = np.shape(values)
    if shape != clients.planned.shape:
        raise FedShuffleError(
            f"the rule for the {what} gives an array of shape {shape}, not"
            f" {clients.planned.shape}. Every rule must give one number for each client it is"
            " shown; for the same number everywhere, use np.full(clients.planned.shape, number)."
        )
    return np.asarray(values, dtype=np.float64)


def _positive(values: FloatArray, what: str) -> FloatArray:
    # min() is NaN-propagating, so one comparison rejects NaN, zero and negative numbers.
    if values.size and not (values.min() > 0 and values.max() < np.inf):
        raise FedShuffleError(
            f"the {what} of a client is {values.min():g}. Every rule must give positive numbers."
        )
    return values
