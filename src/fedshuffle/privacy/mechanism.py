"""The mechanism of a run: transforms and budget, from what the user says about privacy."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.errors import FedShuffleError, require
from fedshuffle.federation import Federation
from fedshuffle.local_work import AtMost, MissLast, Workload
from fedshuffle.methods import (
    Cohort,
    InclusionProbability,
    Method,
    objective_weight,
    weight_per_share_done,
    weight_per_step,
)
from fedshuffle.methods.fedshuffle import WeightPerDistance
from fedshuffle.privacy.accounting import Amplification, Budget, calibrated
from fedshuffle.privacy.adaptive import AdaptiveClip, sum_noise
from fedshuffle.privacy.clipping import Clip
from fedshuffle.privacy.noise import GaussianNoise, TreeNoise
from fedshuffle.privacy.settings import Privacy
from fedshuffle.sampling import Independent, Sampling, Uniform
from fedshuffle.transforms import Transform

_KNOWN_WEIGHTS = (objective_weight, weight_per_step, weight_per_share_done)
"""Rules for w-tilde that do not depend on the round and fall with the steps done."""
_SAME_IN_EVERY_ROUND = (AtMost, MissLast)
"""Interruptions after which a client has done the same number of steps in every round."""


@dataclass(frozen=True, eq=False)
class Mechanism:
    """What makes a run private, and what it costs."""

    privacy: Privacy
    transforms: tuple[Transform, ...]
    """The last links of the run's chain."""
    budget: Budget
    sensitivity: float
    """The most by which one client moves the sum, at the first threshold."""
    max_rounds: int | None = None
    """The rounds that the epsilon of the user affords; None without one."""

    @property
    def noise_std(self) -> float:
        """The noise multiplier times the sensitivity. It is the standard deviation of the noise on
        the sum, but for adaptive clipping, which spends a part of it on the count, and with
        ``min_separation``, where it is that of a node of the tree.
        """
        return self.budget.noise * self.sensitivity

    def epsilon(self, rounds: int) -> float:
        """What this number of rounds costs the worst client, or up to 2% more rounds: it is
        computed for some rounds only, since a run asks in every round.
        """
        step = max(1, rounds // 50)
        spent = self._spent(-(-rounds // step) * step)
        limit = self.privacy.epsilon
        known = limit is not None and self.max_rounds is not None and rounds <= self.max_rounds
        return min(spent, limit) if known and limit is not None else spent

    @functools.cached_property
    def _spent(self) -> Callable[[int], float]:
        return functools.lru_cache(maxsize=1)(self.budget.spent)

    def describe(self) -> dict[str, Any]:
        """All that training depends on, as plain data."""
        return {
            "privacy": repr(self.privacy),
            "privacy_noise": self.budget.noise,
            "privacy_sensitivity": self.sensitivity,
            "privacy_delta": self.budget.delta,
        }


def bind(
    privacy: Privacy,
    method: Method,
    federation: Federation,
    sampling: Sampling,
    workload: Workload,
    rounds: int | None,
    transforms: Sequence[Transform] = (),
    response_probability: ArrayLike = 1.0,
) -> Mechanism:
    """The mechanism of a run with these settings, or an error that says why it is not private.

    ``transforms`` are those before privacy in the chain. If clients that are asked reply with a
    probability (one for all, or one each), aggregation divides by it as well; it amplifies nothing,
    since the server does not draw it.

    >>> from fedshuffle import methods
    >>> from fedshuffle.local_work import LocalWork
    >>> clients, method = Federation.from_sizes([10, 30]), methods.get("fedshuffle")
    >>> workload = method.local_work(LocalWork()).on(clients.sizes)
    >>> sampling = Independent([0.5, 0.5])
    >>> private = bind(Privacy(clip=2.0, noise=1.5), method, clients, sampling, workload, rounds=10)
    >>> private.sensitivity, private.noise_std
    (3.0, 4.5)
    >>> private.transforms
    (Clip(threshold=2.0, weighted=False), GaussianNoise(std=4.5))
    """
    expect(privacy, Privacy, "privacy")
    require("privacy", "the accounting of privacy")
    response_probability = np.asarray(response_probability, dtype=np.float64)
    assert privacy.clip is not None
    _check_method(method, workload)
    _check_rules(method, federation, sampling, workload)
    _check_sampling(privacy, sampling)
    _check_transforms(transforms)
    if privacy.weighted:
        weights = np.ones(len(federation))
    else:
        weights = largest_weights(method, federation, sampling, workload) / response_probability
    largest = float(weights.max())
    cohort, count_noise = float((sampling.inclusion * response_probability).sum()), math.inf
    if privacy.adaptive is not None:
        given = privacy.adaptive.count_noise
        count_noise = cohort / 20 if given is None else given
    budget = Budget(
        _delta(privacy, len(federation)),
        privacy.noise or 1.0,
        weights / largest,
        np.asarray(sampling.p, dtype=np.float64),
        _amplification(privacy, sampling),
        count_noise,
        privacy.min_separation,
        privacy.epsilon,
    )
    max_rounds = None
    if privacy.noise is None:
        if rounds is None:
            raise FedShuffleError(
                "privacy has epsilon without noise, so the noise depends on the number of rounds:"
                " give rounds, or noise."
            )
        max_rounds = count(rounds, "the number of rounds")
        budget = calibrated(budget, max_rounds)
    elif privacy.epsilon is not None:
        max_rounds = budget.affordable()
        if max_rounds == 0:
            raise FedShuffleError(
                f"one round with noise {privacy.noise:g} costs epsilon {budget.spent(1):.3g}, and"
                f" {privacy.epsilon:g} may be spent. Give more noise, or more epsilon."
            )
    sensitivity = privacy.clip * largest
    chain: tuple[Transform, ...]
    if privacy.adaptive is not None:
        adaptive = privacy.adaptive
        noise = sum_noise(budget.noise, count_noise)
        rule = adaptive.quantile, adaptive.rate, count_noise, privacy.weighted
        chain = (AdaptiveClip(privacy.clip, noise, largest, cohort, *rule),)
    else:
        std, clip = budget.noise * sensitivity, Clip(privacy.clip, privacy.weighted)
        tree = privacy.min_separation > 1
        chain = (clip, TreeNoise(std, privacy.min_separation) if tree else GaussianNoise(std))
    return Mechanism(privacy, chain, budget, sensitivity, max_rounds)


def largest_weights(
    method: Method, federation: Federation, sampling: Sampling, workload: Workload
) -> FloatArray:
    """The largest aggregation weight ``a_i`` that each client can have in any round."""
    rule, clients = method.averaging, np.arange(len(federation))
    if not (rule.weight in _KNOWN_WEIGHTS or isinstance(rule.weight, WeightPerDistance)):
        raise FedShuffleError(
            f"{method.name} weights clients by {rule.describe()['weight']}, whose largest value is"
            " not known, so the sensitivity of the sum is not. Use Privacy(weighted=True), which"
            " clips the weighted update."
        )
    steps, interruption = workload.possible_steps[0], workload.work.interruption
    found = np.zeros(len(federation))
    for planned in steps.T:
        if interruption is None or type(interruption) in _SAME_IN_EVERY_ROUND:
            done = workload.done(planned, clients, seed=0, round=0)
        else:
            done = np.ones_like(planned)  # the fewest
        cohort = Cohort.of(federation, sampling, workload, clients, (planned, done))
        found = np.maximum(found, rule.aggregation_weights(cohort))
    return found


def _check_method(method: Method, workload: Workload) -> None:
    """Refuse what leaves without noise, and sums whose sensitivity is not bounded."""
    name, direction = method.name, method.direction
    if method.pooled:
        raise FedShuffleError(f"{name} has all data in one place: there are no clients to protect.")
    sent = {
        "keeps a vector at every client, of which the server needs the sum": direction.client_state,
        "asks clients for full gradients": direction.full_gradients or direction.trips > 1,
        "estimates the gradient from a further sum of updates": direction.needs_estimate,
    }
    momentum = "" if method.momentum == "none" else f" with momentum {method.momentum}"
    for what, needed in sent.items():
        if needed:
            raise FedShuffleError(
                f"{name}{momentum} {what} ({direction!r:.60}): that sum would leave without noise."
                " Use a method that needs the sum of updates only, such as fedshuffle or"
                " fedadam+fedshuffle, without momentum."
            )
    if type(method.averaging.normaliser) is not InclusionProbability:
        rule = method.averaging.describe()["normaliser"]
        raise FedShuffleError(
            f"{name} divides by a number that depends on the cohort ({rule}), so one client changes"
            " the weights of all others and the sensitivity is not bounded by its update. Privacy"
            " needs a fixed denominator, as aggregation by inclusion probability has: use"
            f" {name.partition('+')[0]}+fedshuffle."
        )
    if method.averaging.estimate is not None:
        raise FedShuffleError(
            f"{name} estimates inclusion probabilities from who took part, so weights tell who did,"
            " and the sensitivity is not known. Privacy needs known probabilities: leave"
            " probabilities out, or use fedshuffle."
        )
    if isinstance(workload.work.steps, str):
        raise FedShuffleError(
            f"steps={workload.work.steps!r} depends on the cohort, so one client changes the"
            " updates of all others and the sensitivity is not bounded by its own. Give a number"
            " of steps, or epochs."
        )


def _check_rules(
    method: Method, federation: Federation, sampling: Sampling, workload: Workload
) -> None:
    """Refuse rules that give a client another number if it is alone than among all clients."""
    rule, planned = method.averaging, workload.possible_steps[0][:, -1]

    def values(clients: IntArray) -> FloatArray:
        steps = planned[clients], workload.done(planned[clients], clients, seed=0, round=0)
        cohort = Cohort.of(federation, sampling, workload, clients, steps)
        return np.stack([rule.client_weights(cohort), rule.step_scale(cohort), cohort.done])

    among_all = values(np.arange(len(planned)))
    for client in (int(planned.argmin()), int(planned.argmax()), 0, len(planned) - 1):
        if not np.allclose(values(np.array([client]))[:, 0], among_all[:, client], rtol=1e-9):
            raise FedShuffleError(
                f"{method.name} computes the weight, the step size or the steps of a client from"
                " the whole cohort, so one client changes what all others send and the sensitivity"
                " is not bounded by its own update. Use rules that depend on each client alone."
            )


def _check_sampling(privacy: Privacy, sampling: Sampling) -> None:
    if sampling.two_phase:
        raise FedShuffleError(
            f"sampling {sampling!r} selects clients by the norms of their updates, which would"
            " leave without noise. Use uniform:B or importance:B."
        )
    promised = getattr(sampling, "min_separation", 1)
    if promised < privacy.min_separation:
        raise FedShuffleError(
            f"sampling {sampling!r} may draw a client again after {promised} round"
            f"{'s' * (promised > 1)}, but privacy counts on min_separation="
            f"{privacy.min_separation}. Give a sampling with that attribute, or leave"
            " min_separation out."
        )


def _check_transforms(transforms: Sequence[Transform]) -> None:
    for one in transforms:
        if type(one).server is not Transform.server:
            raise FedShuffleError(
                f"{one!r:.60} changes or remembers the sum of updates before it has noise. Leave it"
                " out, or train without privacy."
            )


def _amplification(privacy: Privacy, sampling: Sampling) -> Amplification:
    """The sampling whose randomness counts: a subclass may draw otherwise."""
    if privacy.server_draws and privacy.min_separation == 1:
        if type(sampling) is Independent:
            return "poisson"
        if type(sampling) is Uniform and sampling.b < len(sampling):
            return "uniform"
    return "none"


def _delta(privacy: Privacy, n: int) -> float:
    if privacy.delta is None:
        return float(n) ** -1.1 if n > 1 else 1e-5
    if privacy.delta >= 1 / n:
        warnings.warn(
            f"the delta of privacy is {privacy.delta:g}, but with {n} clients it should be well"
            f" below {1 / n:.3g}: a mechanism that publishes a random client's data satisfies it.",
            stacklevel=3,
        )
    return privacy.delta
