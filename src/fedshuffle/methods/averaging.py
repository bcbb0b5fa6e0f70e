r"""FedShuffleGen: every averaging method is three rules (c, w-tilde, q).

In a round with cohort S, client i takes its local steps with step size

.. math:: \gamma_i = \eta \, \tau_{\max} / c_i,

and the server moves by

.. math:: x \leftarrow x + \eta_g \sum_{i \in S} a_i (y_i - x), \qquad a_i = \tilde w_i / q_i^S.

Here :math:`\eta` is the step size of a client with :math:`c_i = \tau_{\max}`, the most steps any
client of the federation may take; the paper's :math:`\eta_l` is :math:`\eta \, \tau_{\max}`.
The three rules determine which objective is minimised: see :mod:`fedshuffle.auditing`.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_optimisers import SGD, LocalOptimiser
from fedshuffle.local_work import Workload
from fedshuffle.probabilities import Estimate
from fedshuffle.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Cohort:
    """What the rules know of clients: arrays of equal shape, one entry per client.

    >>> from fedshuffle import LocalWork, sampling
    >>> clients = Federation.from_sizes([1, 3])
    >>> workload = LocalWork().on(clients.sizes)
    >>> who = np.arange(2)
    >>> steps = clients.sizes, clients.sizes
    >>> cohort = Cohort.of(clients, sampling.Uniform(2, 1), workload, who, steps)
    >>> cohort.weight.tolist(), cohort.probability.tolist(), cohort.planned.tolist()
    ([0.25, 0.75], [0.5, 0.5], [1, 3])
    """

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
    max_steps: int
    """The largest number of local steps of any client of the federation."""
    round: int = 0
    optimiser: LocalOptimiser = SGD
    """What makes steps of the gradients."""

    @property
    def planned_length(self) -> FloatArray:
        """How far the planned steps go along a constant gradient, per step size: for plain SGD
        their number (see :meth:`~fedshuffle.local_optimisers.LocalOptimiser.lengths`).
        """
        return self.optimiser.lengths(self.planned)

    @property
    def done_length(self) -> FloatArray:
        """How far the steps that were done go."""
        return self.optimiser.lengths(self.done)

    @property
    def max_length(self) -> float:
        """How far the largest number of steps goes."""
        return float(self.optimiser.lengths(np.array([self.max_steps]))[0])

    @classmethod
    def of(
        cls,
        federation: Federation,
        sampling: Sampling,
        workload: Workload,
        clients: IntArray,
        steps: tuple[IntArray, IntArray],
        round: int = 0,
    ) -> "Cohort":
        """These clients of a federation, with the steps that they planned and did."""
        weight, probability = federation.weights[clients], sampling.p[clients]
        most, optimiser = workload.max_steps, workload.optimiser
        return cls(clients, weight, probability, *steps, most, round, optimiser)

    def only(self, chosen: NDArray[np.bool_] | IntArray, probability: FloatArray) -> "Cohort":
        """The chosen clients, with other inclusion probabilities."""
        return replace(
            self,
            clients=self.clients[chosen],
            weight=self.weight[chosen],
            probability=probability[chosen],
            planned=self.planned[chosen],
            done=self.done[chosen],
        )


ClientRule = Callable[[Cohort], FloatArray]
"""A number for every client that depends on that client alone (not on who else takes part)."""


# Step normalisations c -----------------------------------------------------------------------


def steps_of_the_longest(clients: Cohort) -> FloatArray:
    """``c_i = tau_max``: every client uses the same step size.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> steps_of_the_longest(cohort).tolist()
    [3.0, 3.0]
    """
    return np.full(clients.planned.shape, clients.max_length)


def own_steps(clients: Cohort) -> FloatArray:
    """``c_i = tau_i``, the planned steps: a client that takes more steps makes them smaller.

    Here and below, steps count by their length, which is their number for plain SGD.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> own_steps(cohort).tolist()
    [1.0, 3.0]
    """
    return clients.planned_length


# Aggregation weights w-tilde -----------------------------------------------------------------


def objective_weight(clients: Cohort) -> FloatArray:
    """``w-tilde_i = w_i``.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> objective_weight(cohort).tolist()
    [0.25, 0.75]
    """
    return clients.weight


def weight_per_step(clients: Cohort) -> FloatArray:
    """``w-tilde_i = w_i / (steps done)``: what FedNova does.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> weight_per_step(cohort).tolist()
    [0.25, 0.25]
    """
    return clients.weight / clients.done_length


def weight_per_share_done(clients: Cohort) -> FloatArray:
    """``w-tilde_i = w_i * planned / done``: corrects for unfinished work.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> weight_per_share_done(cohort).tolist()
    [0.25, 0.75]
    """
    return clients.weight * (clients.planned_length / clients.done_length)


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
    """The rule q: what the server divides the weighted update of a client by."""

    @abc.abstractmethod
    def divide(self, weights: FloatArray, cohort: Cohort) -> FloatArray:
        """``weights / q^S`` for the clients of a cohort."""

    def ratio(self, weights: FloatArray, clients: Cohort) -> RatioOfSums | None:
        """The normaliser as a ratio of sums over the cohort; None if it is not one."""
        return None


@dataclass(frozen=True)
class InclusionProbability(Normaliser):
    """``q_i^S = p_i``: in expectation every client counts by its weight. The probability is that of
    the sampling, or an estimate from who took part so far.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> InclusionProbability().divide(cohort.weight, cohort).tolist()
    [0.5, 1.5]
    """

    estimate: Estimate | None = None

    def __repr__(self) -> str:
        return f"InclusionProbability({self.estimate or ''})".removesuffix("()")

    def divide(self, weights: FloatArray, cohort: Cohort) -> FloatArray:
        return weights / cohort.probability


class Unnormalised(Normaliser):
    """``q = 1``: for methods that remember who does not take part, so that nobody is missing.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> Unnormalised().divide(cohort.weight, cohort).tolist()
    [0.25, 0.75]
    """

    def divide(self, weights: FloatArray, cohort: Cohort) -> FloatArray:
        return weights


class SumOne(Normaliser):
    """``q^S`` = the sum of w-tilde over S, so that the aggregation weights sum to one.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.1, 0.3]), half, steps, steps, max_steps=3)
    >>> SumOne().divide(cohort.weight, cohort).round(2).tolist()
    [0.25, 0.75]
    """

    def divide(self, weights: FloatArray, cohort: Cohort) -> FloatArray:
        return weights / float(weights.sum())

    def ratio(self, weights: FloatArray, clients: Cohort) -> RatioOfSums:
        return RatioOfSums(u=weights)


class EffectiveSteps(Normaliser):
    """The original FedNova: ``a_i = (w_i / W_S) / tau_i * tau_eff``, where ``W_S`` is the sum of w
    over S and ``tau_eff`` the w-weighted mean of the steps done in S.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), half, half, steps, steps, max_steps=3)
    >>> EffectiveSteps().divide(weight_per_step(cohort), cohort).round(2).tolist()
    [1.0, 0.33]

    Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, 2020.
    """

    def divide(self, weights: FloatArray, cohort: Cohort) -> FloatArray:
        steps, total = float(cohort.weight @ cohort.done_length), float(cohort.weight.sum())
        if total < 1e-150:  # its square underflows
            return weights / total * (steps / total)
        return weights * (steps / total**2)

    def ratio(self, weights: FloatArray, clients: Cohort) -> RatioOfSums:
        return RatioOfSums(u=clients.weight, v=clients.weight * clients.done_length, power=2)


@dataclass(frozen=True)
class Custom(Normaliser):
    """Your own q: a function of (w-tilde, cohort) that returns one number per client.

    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), half, half, steps, steps, max_steps=3)
    >>> Custom(lambda weights, cohort: cohort.done).divide(half, cohort).round(2).tolist()
    [0.5, 0.17]
    """

    q: Callable[[FloatArray, Cohort], FloatArray]

    def divide(self, weights: FloatArray, cohort: Cohort) -> FloatArray:
        return weights / self.q(weights, cohort)


@dataclass(frozen=True)
class FedShuffleGen:
    """The averaging rule (c, w-tilde, q); the paper's Algorithm "FedShuffleGen".

    >>> fedshuffle = FedShuffleGen(own_steps, objective_weight, InclusionProbability())
    >>> steps = np.array([1, 3])
    >>> cohort = Cohort(
    ...     clients=np.array([0, 1]), weight=np.array([0.25, 0.75]),
    ...     probability=np.array([0.5, 0.5]), planned=steps, done=steps, max_steps=3,
    ... )
    >>> fedshuffle.step_scale(cohort).tolist(), fedshuffle.aggregation_weights(cohort).tolist()
    ([3.0, 1.0], [0.5, 1.5])
    """

    step_normalisation: ClientRule
    weight: ClientRule
    normaliser: Normaliser

    def describe(self) -> dict[str, str]:
        """The names of the three rules."""
        return {name: _name(getattr(self, name)) for name in self.__dataclass_fields__}

    @property
    def by_probability(self) -> bool:
        """Whether q is the inclusion probability, known or estimated."""
        return isinstance(self.normaliser, InclusionProbability)

    @property
    def estimate(self) -> Estimate | None:
        """How inclusion probabilities are estimated; None if they are known, or not needed."""
        normaliser = self.normaliser
        return normaliser.estimate if isinstance(normaliser, InclusionProbability) else None

    def long_run(self, p: FloatArray) -> FloatArray:
        """What clients are divided by in a long run: ``p``, or what its estimate amounts to."""
        if self.estimate is None:
            return p
        # In buffers of asynchronous schedules, p is a number of updates and may exceed 1.
        return np.maximum(p, self.estimate.limit(np.minimum(p, 1.0)))

    def step_scale(self, clients: Cohort) -> FloatArray:
        """``gamma_i / eta = tau_max / c_i``."""
        c = self.step_normalisation(clients)
        return clients.max_length / _positive(c, clients, "step normalisation c")

    def client_weights(self, clients: Cohort) -> FloatArray:
        """``w-tilde_i``."""
        return _checked(self.weight(clients), clients, "weight w-tilde")

    def aggregation_weights(self, cohort: Cohort) -> FloatArray:
        """``a_i = w-tilde_i / q_i^S`` for the clients of a cohort."""
        shares = self.normaliser.divide(self.client_weights(cohort), cohort)
        return _positive(shares, cohort, "aggregation weight w/q")


def _name(rule: object) -> str:
    """A function by its name, an object by its class and its parameters."""
    if is_dataclass(rule) and not isinstance(rule, Custom):
        return repr(rule)
    name: str = getattr(rule, "__name__", type(rule).__name__)
    return name


def _checked(values: FloatArray, clients: Cohort, what: str) -> FloatArray:
    shape, wanted = np.shape(values), clients.planned.shape
    if shape != wanted:
        raise FedShuffleError(
            f"the rule for the {what} gives an array of shape {shape}, not {wanted}. Every rule"
            " must give one number per client; for the same number everywhere, use"
            " np.full(clients.planned.shape, number)."
        )
    return np.asarray(values, dtype=np.float64)


def _positive(given: FloatArray, clients: Cohort, what: str) -> FloatArray:
    values = _checked(given, clients, what)
    # min() is NaN-propagating, so one comparison rejects NaN, zero and negative numbers.
    if values.size and not (values.min() > 0 and values.max() < np.inf):
        raise FedShuffleError(
            f"the {what} of a client is {values.min():g}. Every rule must give positive numbers."
        )
    return values
