"""Checks of a server on a few cohorts: whether it is linear, has state, and the like."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.properties import CLOSE, ServerProperties, describe_weights, estimate_gain
from fedshuffle.auditing.server_queries import QueryCohort, ServerQueries
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator

_COHORTS = 5  # cohorts that are checked


def check_server(server: ServerQueries) -> ServerProperties:
    """The properties of a server, from its steps for a few cohorts."""
    few: list[QueryCohort] = []
    for cohort in server.cohorts():  # the first ones in which clients can be compared
        few.append(cohort)
        if sum(len(c.clients) > 1 for c in few) == _COHORTS:
            break
    few = sorted(few, key=lambda cohort: -len(cohort.clients))[:_COHORTS]
    pairs = zip(few, [*few[1:], few[0]], strict=True)
    checked = [found for found in (_check(server, *pair) for pair in pairs) if found is not None]
    if not checked:
        return ServerProperties()

    def known(name: str) -> list[Any]:
        found = [getattr(properties, name) for properties in checked]
        return [value for value in found if value is not None]

    every = ("linear", "repeatable")
    some = (
        "stateful",
        "ordered",
        "moves_without_updates",
        "fails_on_zero_updates",
        "uses_sizes",
        "uses_steps",
    )
    combined: dict[str, Any] = {name: all(known(name)) for name in every if known(name)}
    combined |= {name: any(known(name)) for name in some if known(name)}
    only = {
        one.only_client_counted for one, c in zip(checked, few, strict=False) if len(c.clients) > 1
    }
    combined["only_client_counted"] = only.pop() if len(only) == 1 else None
    return ServerProperties(long_run_gain=max(known("long_run_gain"), default=None), **combined)


def _check(
    server: ServerQueries, cohort: QueryCohort, before: QueryCohort
) -> ServerProperties | None:
    """The properties that one cohort shows, alone and after another; None without a finite step."""
    b = len(cohort.clients)
    rng = generator(server.seed, Purpose.MONTE_CARLO, round=cohort.round, client=1)
    one, other = (
        rng.choice([-1.0, 1.0], (b, server.coordinates)) * rng.uniform(0.5, 2.0, (b, 1))
        for _ in range(2)
    )
    ask = partial(server.ask, cohort)
    first, again = ask(one), ask(one)
    fails = False
    try:
        still = ask(np.zeros_like(one))
    except FedShuffleError:
        fails = True
    if not (np.isfinite(first).all() and np.isfinite(again).all()):
        return None
    if fails or not np.isfinite(still).all():
        still, fails = np.zeros_like(first), True
    scale = np.abs(cohort.distance).max()

    def same(a: FloatArray, b: FloatArray, times: float = 1.0) -> bool:
        size = max(np.abs(a).max(), np.abs(b).max(), 1e-9 * scale)
        return bool(np.abs(a - b).max() <= times * CLOSE * size)

    moves = not same(still, np.zeros_like(still))
    if not same(first, again):  # random, or a memory that cannot be reset
        # Random noise is not drift: only a constant step is.
        moves = moves and same(still, ask(np.zeros_like(one)))
        return ServerProperties(repeatable=False, moves_without_updates=moves)
    moved = first - still
    linear = same(ask(2 * one) - still, 2 * moved)
    linear = linear and same(ask(one + other) - still, moved + (ask(other) - still), times=10.0)
    contributions = server.contributions(cohort, moves)
    linear = linear and same(contributions @ one, moved, times=10.0)
    ordered = not same(server.ask(cohort.reversed(), one[::-1]), first) if b > 1 else None
    later = ask(one, round=1)
    server.ask(before, np.ones((len(before.clients), server.coordinates)))
    stateful = not same(ask(one, fresh=False, round=1), later)
    sizes = _first_tripled(server.federation.sizes[cohort.clients])
    return ServerProperties(
        linear=linear,
        repeatable=True,
        stateful=stateful,
        long_run_gain=_gain(server, cohort, one) if stateful and linear else None,
        ordered=ordered,
        only_client_counted=_only(contributions) if ordered else None,
        moves_without_updates=moves,
        fails_on_zero_updates=fails,
        uses_sizes=not same(ask(one, sizes=sizes), first) if b > 1 else None,
        uses_steps=not same(ask(one, steps=_first_tripled(cohort.steps)), first),
    )


def _first_tripled(values: IntArray) -> IntArray:
    return np.concatenate([3 * values[:1], values[1:]])


def _gain(server: ServerQueries, cohort: QueryCohort, gradients: FloatArray) -> float:
    """The long-run gain of a server that gets the same updates in every round."""
    server.aggregator.reset()
    steps = [server.ask(cohort, gradients, fresh=False, round=r) for r in range(64)]
    norms = [float(np.linalg.norm(step)) for step in steps]
    return estimate_gain(norms) if norms[0] > 0 and np.isfinite(norms).all() else float("inf")


def _only(contributions: FloatArray) -> str | None:
    """Whether only the first or only the last client of a cohort counts."""
    counts = np.abs(contributions) > CLOSE * np.abs(contributions).max()
    if len(contributions) > 1 and counts.sum() == 1:
        return "last" if counts[-1] else "first" if counts[0] else None
    return None


def describe_cohorts(
    server: ServerQueries, checked: ServerProperties, seen: list[tuple[QueryCohort, FloatArray]]
) -> ServerProperties:
    """The properties with those of the weights of these cohorts."""
    seen = [(cohort, found) for cohort, found in seen if found.any()]
    if not seen:
        return checked
    return describe_weights(
        checked,
        server.federation,
        server.sampling.p,
        cohort=np.repeat(np.arange(len(seen)), [len(found) for _, found in seen]),
        client=np.concatenate([cohort.clients for cohort, _ in seen]),
        weight=np.concatenate([found / cohort.distance for cohort, found in seen]),
        steps=np.concatenate([cohort.steps for cohort, _ in seen]),
    )
