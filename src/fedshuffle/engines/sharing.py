"""Sharing the work of a round: the longest clients first, one running sum a worker.

Which client falls to which worker, and in which order the sums are added, follow from the request
and the number of workers alone. So threads, processes and machines of a cluster give the same.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines.base import OneWorker
from fedshuffle.engines.problem import Problem
from fedshuffle.kernel import Probe, Walk

MakeEngine = Callable[[Problem], OneWorker]


class Workers(abc.ABC):
    """Splits every request among the workers and adds what they answer, in the workers' order."""

    def __init__(self, problem: Problem, workers: int) -> None:
        self.problem = problem
        self.workers = workers

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        return self._together("walk", [_split_walk(walk, self.workers) for walk in walks])

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        sizes = self.problem.federation.sizes
        return self._together(
            "probe",
            [_split_probe(probe, sizes[probe.clients].tolist(), self.workers) for probe in probes],
        )

    def _together(self, what: str, shares: Sequence[Sequence[_Share]]) -> list[Tensor]:
        by_worker = [[share.request for share in mine] for mine in zip(*shares, strict=True)]
        answers = zip(*self._answers(what, by_worker), strict=True)
        return [_added(*both) for both in zip(shares, answers, strict=True)]

    @abc.abstractmethod
    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        """What each worker answers to its requests."""


class Whose(NamedTuple):
    """Which clients, which round and which stage some requests are about."""

    clients: str
    round: int
    stage: str

    @classmethod
    def of(cls, problem: Problem, requests: Sequence[Walk | Probe]) -> Whose:
        clients: list[int] = []
        round, stage = 0, "local training"
        for request in requests:
            if isinstance(request, Walk):
                clients += [order.minibatches.client for order in request.orders]
                round = request.orders[0].minibatches.round if request.orders else round
            else:
                clients += request.clients.tolist()
                round, stage = request.round, "probe"
        names = [str(problem.federation.ids[client]) for client in dict.fromkeys(clients)]
        if len(names) == 1:
            return cls(names[0], round, stage)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return cls(f"one of {', '.join(names[:5])}{more}", round, stage)


class _Share(NamedTuple):
    """A worker's part of a request, with only those of the sums in which it counts."""

    request: Walk | Probe
    sums: Tensor
    of: int
    """How many sums there are in all."""


def _split_walk(walk: Walk, workers: int) -> list[_Share]:
    # A step costs something even if its minibatch is small: about as much as eight examples.
    loads = [order.minibatches.examples + 8 * order.minibatches.steps for order in walk.orders]
    weights = np.array([order.weights for order in walk.orders]).reshape(-1, walk.sums)
    found = []
    for share in longest_first(loads, workers):
        sums = _used(weights[share])
        orders = [walk.orders[k] for k in share]
        if len(sums) < walk.sums:
            few = weights[share][:, sums].tolist()
            pairs = zip(orders, few, strict=True)
            orders = [dataclasses.replace(order, weights=some) for order, some in pairs]
        request = dataclasses.replace(walk, orders=orders, sums=len(sums))
        found.append(_Share(request, torch.from_numpy(sums), walk.sums))
    return found


def _split_probe(probe: Probe, loads: list[int], workers: int) -> list[_Share]:
    found = []
    for share in longest_first(loads, workers):
        clients, weights = probe.clients[share], probe.weights[share]
        sums = _used(weights)
        request = dataclasses.replace(probe, clients=clients, weights=weights[:, sums])
        found.append(_Share(request, torch.from_numpy(sums), probe.weights.shape[1]))
    return found


def _used(weights: FloatArray) -> IntArray:
    """The sums in which one of these clients counts; at least one, since an answer needs a row."""
    used = np.flatnonzero(weights.any(axis=0))
    return used if len(used) else np.zeros(1, np.int64)


def _added(shares: Sequence[_Share], answers: Sequence[Tensor]) -> Tensor:
    """The sums of all workers, in the workers' order."""
    first = shares[0]
    if len(first.sums) == first.of:
        total, begin = answers[0], 1
    else:
        total, begin = answers[0].new_zeros(first.of, *answers[0].shape[1:]), 0
    for share, answer in zip(shares[begin:], answers[begin:], strict=True):
        if len(share.sums) == share.of:
            total += answer
        else:
            total.index_add_(0, share.sums.to(total.device), answer)
    return total


def longest_first(loads: Sequence[int], workers: int) -> list[list[int]]:
    """Each task, from the longest on, to the worker with the least to do: always the same way.

    >>> longest_first([1, 5, 2, 2], workers=2)
    [[1], [2, 3, 0]]
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    totals = [0] * workers
    for task in sorted(range(len(loads)), key=lambda task: -loads[task]):
        worker = totals.index(min(totals))
        shares[worker].append(task)
        totals[worker] += loads[task]
    return shares
