"""What a number of rounds costs, and what another epsilon would need."""

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from fedshuffle._arrays import count
from fedshuffle.errors import FedShuffleError
from fedshuffle.privacy.accounting import Amplification, Budget, calibrated
from fedshuffle.privacy.mechanism import Mechanism

TARGETS = (1.0, 2.0, 4.0, 8.0)
"""Values of epsilon to compute the noise for."""


@dataclass(frozen=True)
class PrivacyAdvice:
    """The cost of a run's privacy."""

    rounds: int
    delta: float
    noise: float
    """The noise multiplier."""
    sensitivity: float
    noise_std: float
    amplification: Amplification
    epsilon: float
    """Of the worst client, after all rounds."""
    median_epsilon: float
    """Of the median client, after all rounds."""
    epsilon_after: dict[int, float]
    """Of the worst client, by the number of rounds."""
    noise_for: dict[float, float]
    """The noise multiplier with which all rounds cost an epsilon; without those out of reach."""
    stops_after: int | None = None
    """The last round that the user's epsilon affords, if it is not the last of all."""


def advise(mechanism: Mechanism, rounds: int) -> PrivacyAdvice:
    """What the rounds of a mechanism cost.

    >>> from fedshuffle import Federation, LocalWork, methods
    >>> from fedshuffle.privacy import Privacy, bind
    >>> from fedshuffle.sampling import Full
    >>> clients, method = Federation.from_sizes([10] * 100), methods.get("fedshuffle")
    >>> workload = method.local_work(LocalWork()).on(clients.sizes)
    >>> privacy = Privacy(clip=1.0, noise=20.0, delta=1e-4)
    >>> found = advise(bind(privacy, method, clients, Full(100), workload, 50), 50)
    >>> found.amplification, round(found.epsilon, 2), round(found.noise_for[2.0], 2)
    ('none', 1.14, 12.26)
    """
    count(rounds, "the number of rounds")
    budget = mechanism.budget
    last = mechanism.max_rounds
    steps = sorted({max(1, rounds // 10), max(1, rounds // 2), rounds, 2 * rounds, 10 * rounds})
    return PrivacyAdvice(
        rounds,
        budget.delta,
        budget.noise,
        mechanism.sensitivity,
        mechanism.noise_std,
        budget.amplification,
        budget.spent(rounds),
        float(np.median(budget.per_client(rounds))),
        {step: budget.spent(step) for step in steps},
        _noise_for(budget, rounds),
        last if last is not None and last < rounds else None,
    )


def _noise_for(budget: Budget, rounds: int) -> dict[float, float]:
    found = {}
    for epsilon in TARGETS:
        with suppress(FedShuffleError):  # adaptive clipping does not reach every epsilon
            found[epsilon] = calibrated(replace(budget, epsilon=epsilon), rounds).noise
    return found
