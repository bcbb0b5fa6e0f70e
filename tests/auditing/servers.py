"""Servers to audit: other people's aggregation, right and wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedshuffle import Federation, LocalWork, methods
from fedshuffle.methods import Cohort

WORK = LocalWork(epochs=2, batch_size=2)
FEDERATION = Federation.from_sizes([1, 2, 3, 4, 6])
EQUAL_STEPS = LocalWork(steps=3)


def server_of(method: str, federation: Federation, work: LocalWork) -> Callable[..., Any]:
    """The aggregation of one of our methods, as others would write theirs."""
    rule, max_steps = methods.get(method).averaging, work.on(federation.sizes).max_steps

    def aggregate(clients: Any, sizes: Any, updates: Any, steps: Any, probabilities: Any) -> Any:
        weight = federation.weights[clients]
        cohort = Cohort(clients, weight, probabilities, steps, steps, max_steps)
        return rule.aggregation_weights(cohort) @ updates

    return aggregate


def by_root(clients: Any, sizes: Any, updates: Any) -> Any:
    return np.sqrt(sizes) / np.sqrt(sizes).sum() @ updates


def by_cohort_size(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / len(sizes) @ updates


def by_root_of_the_sum(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / np.sqrt(sizes.sum()) @ updates


def fedavg(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / sizes.sum() @ updates


def only_last(clients: Any, sizes: Any, updates: Any) -> Any:
    step = np.zeros(updates.shape[1])
    for update in updates:
        step = update
    return step


def ignores_sizes(clients: Any, sizes: Any, updates: Any) -> Any:
    return updates.mean(axis=0)


def earlier_count_more(clients: Any, sizes: Any, updates: Any) -> Any:
    weights = sizes / np.arange(1, len(sizes) + 1)
    return weights / weights.sum() @ updates


def clipped(clients: Any, sizes: Any, updates: Any) -> Any:
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    return fedavg(clients, sizes, updates * np.minimum(1, 0.001 / np.maximum(norms, 1e-30)))


def drifting(clients: Any, sizes: Any, updates: Any) -> Any:
    return fedavg(clients, sizes, updates) - 0.01


def nan_for_small_cohorts(clients: Any, sizes: Any, updates: Any) -> Any:
    spread = np.float64(sizes.sum() - sizes[0])
    return fedavg(clients, sizes, updates) * (spread / spread)


def always_nan(clients: Any, sizes: Any, updates: Any) -> Any:
    return np.full(updates.shape[1], np.nan)


def uphill(clients: Any, sizes: Any, updates: Any) -> Any:
    return -fedavg(clients, sizes, updates)


class Momentum:
    """Heavy ball; ``times`` is how often the old velocity is added."""

    share, times = 0.6, 1

    def __init__(self) -> None:
        self.velocity: Any = 0.0

    def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
        old = self.share * self.velocity
        self.velocity = self.times * old + fedavg(clients, sizes, updates)
        return self.velocity


class MomentumTwice(Momentum):
    times = 2


class MomentumTwiceButStable(Momentum):
    share, times = 0.3, 2


class LastKnown:
    """Averages over all clients what each sent last (as MIFA does): consistent, with memory."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
        for client, size, update in zip(clients, sizes, updates, strict=True):
            self.known[int(client)] = size * update
        return np.sum(list(self.known.values()), axis=0) / 16
