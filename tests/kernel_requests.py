"""Which requests methods send to engines, so that engines need not be tried with every method.

An engine knows nothing of a method but its requests. So it is enough to try it with a few methods
that, between them, send every kind of request that any registered method sends. They are found by
running all methods: a new method with a new kind of request is among them by itself.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch

from fedshuffle import methods
from fedshuffle.kernel import FullGradient, Request
from fedshuffle.methods import Method
from fedshuffle.testing.problems import (
    WORK,
    federation,
    make_run,
    numbers,
    partial_sampling,
    quadratic_clients,
)

Kind = tuple[Any, ...]


def kind(request: Request) -> Kind:
    """What makes one request different from another for an engine: the parts of the kernel that
    are used, whether clients are told different things, and how many sums are wanted.
    """
    if isinstance(request, FullGradient):
        clients, sums = request.weights.shape
        return "gradients", len(request.points), "own sums" if sums >= clients > 1 else sums
    told = [order.coefficients for order in request.tasks]
    parts = frozenset(
        (
            one.alpha if one.alpha in (0, 1) else "other",
            *(one.beta != 0, one.mu != 0, one.v is not None, one.scale is not None),
        )
        for one in told
    )
    pushes = {id(one.v) for one in told}
    sums = "own sums" if request.sums >= len(told) > 1 else request.sums
    by_kernel = all(order.optimiser is None for order in request.tasks)
    return "training", parts, len(pushes) > 1, sums, by_kernel


@cache
def kinds(name: str) -> frozenset[Kind]:
    """The kinds of requests that a method sends in its first rounds."""
    method: Method = methods.get(name)
    run = make_run(method, partial_sampling(method), federation(method), work=WORK)
    clients = quadratic_clients(run, np.ones(4), numbers(4, 2).numpy())
    state, seen = run.start(torch.zeros(2, dtype=torch.float64)), list[Request]()
    for _ in range(3):
        state = clients.run_round(state, seen.append)
    return frozenset(map(kind, seen))


def covering(names: Iterable[str]) -> list[str]:
    """Some of these methods that send all kinds of requests that any of them sends."""
    chosen: list[str] = []
    left = {name: kinds(name) for name in names}
    missing = frozenset[Kind]().union(*left.values())
    while missing:
        best = max(left, key=lambda name: len(left[name] & missing))
        chosen.append(best)
        missing -= left[best]
    return chosen
