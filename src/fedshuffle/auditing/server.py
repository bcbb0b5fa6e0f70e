"""A server under audit: the step it makes of known updates, and what a few cohorts show of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.adapters import Aggregator, Replies
from fedshuffle.auditing.findings import CLOSE
from fedshuffle.auditing.server_properties import ServerProperties
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, Workload
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Sampling
from fedshuffle.sampling.base import check_cohort

_COORDINATES = 1024  # up to this many clients each has its own coordinate; else in its cohort
_NUMBERS = 1 << 22  # most numbers that are sent in one round; larger cohorts come in portions
_SMALL = 2.0**-10  # the relative size of the differences around a common update
_CHECKED = 5  # cohorts that are checked


@dataclass(frozen=True)
class QueryCohort:
    """A cohort to query a server with: the clients in order of arrival, and the steps they did."""

    round: int
    clients: IntArray
    sizes: IntArray
    steps: IntArray
    distance: FloatArray  # how far each client goes along a gradient of one: step size times steps
    share: float  # the cohort's probability if all cohorts are listed

    def in_order(self, order: IntArray) -> "QueryCohort":
        """The same clients in another order."""
        names = ("clients", "sizes", "steps", "distance")
        return replace(self, **{name: getattr(self, name)[order] for name in names})


@dataclass(eq=False)
class ServerQueries:
    """A server, and the cohorts it is tested with."""

    aggregator: Aggregator
    federation: Federation
    sampling: Sampling
    workload: Workload
    scaled: bool
    step_size: float
    draws: int
    seed: int

    def __post_init__(self) -> None:
        work, n, self.name = self.workload.work, len(self.federation), self.aggregator.name
        random = isinstance(work.epochs, EpochRange) and not isinstance(work.steps, int)
        random |= work.interruption is not None and work.interruption.random
        listed = None if random else self.sampling.cohorts(self.draws)
        self.listed = listed if listed is not None and len(listed) <= self.draws else None
        self.own = n <= _COORDINATES
        if next(self.cohorts(), None) is None:
            raise FedShuffleError(
                f"no client took part in {self.draws} draws: use more draws, or larger"
                " probabilities."
            )
        most = n if self.own else max(len(cohort.clients) for cohort in self.cohorts())
        self.places = n if self.own else min(most, max(16, _NUMBERS // most))
        self.coordinates = self.places + 1  # the last is unused

    def cohorts(self, shuffled: bool = False, draws: int | None = None) -> Iterator[QueryCohort]:
        """The cohorts to test with; the order of arrival is not known, so it may be shuffled."""
        rounds: Iterator[tuple[int, IntArray, float]]
        if self.listed is not None and not shuffled:
            rounds = ((0, members, share) for members, share in self.listed)
        else:
            n, number = len(self.federation), self.draws if draws is None else draws
            drawn = (self.sampling.draw(self.seed, r) for r in range(number))
            rounds = ((r, check_cohort(d, n, self.sampling), 0.0) for r, d in enumerate(drawn))
        for r, members, share in rounds:
            if not len(members):
                continue
            plan = self.workload.plan(members, self.seed, r)
            lengths, most = self.workload.optimiser.lengths, np.array([self.workload.max_steps])
            scale = lengths(most) / lengths(plan.planned) if self.scaled else 1.0
            distance = self.step_size * scale * lengths(plan.done)
            sizes = self.federation.sizes[members]
            cohort = QueryCohort(r, members, sizes, plan.done, distance, share)
            if shuffled:
                rng = generator(self.seed, Purpose.MONTE_CARLO, round=r)
                cohort = cohort.in_order(rng.permutation(len(members)))
            yield cohort

    def ask(
        self, cohort: QueryCohort, gradients: FloatArray, *, fresh: bool = True, round: int = 0
    ) -> FloatArray:
        """The server's step when each client of the cohort moves along its gradient."""
        if fresh:
            self.aggregator.reset()
        # Copies: a server that works in place must not change what the audit compares with.
        clients, sizes, steps = cohort.clients.copy(), cohort.sizes.copy(), cohort.steps.copy()
        updates = cohort.distance[:, None] * gradients
        replies = Replies(round, clients, sizes, steps, self.sampling.p[clients], updates)
        some = ", ".join(map(str, cohort.clients[:5].tolist()))
        some += f", ... ({len(cohort.clients)} in all)" if len(cohort.clients) > 5 else ""
        with error_context(f"{self.name} failed for the clients {some}"), np.errstate(all="ignore"):
            step = self.aggregator.step(replies)
        if np.shape(step) != (self.coordinates,):
            raise FedShuffleError(
                f"{self.name} gives a step of shape {np.shape(step)} for updates of shape"
                f" {replies.updates.shape}: give one number per column, ({self.coordinates},)."
            )
        return step

    def contributions(self, cohort: QueryCohort, checked: ServerProperties) -> FloatArray:
        """How far each client moves the model, or would by a small difference if the server is not
        linear: clients follow unit vectors, alone or in addition to a common gradient.
        """
        size, found = len(cohort.clients), []
        for begin in range(0, size, self.places):  # as many clients as there are coordinates
            end = min(begin + self.places, size)
            places = cohort.clients if self.own else np.arange(end - begin)
            gradients = np.zeros((size, self.coordinates))
            gradients[np.arange(begin, end), places] = 1.0
            if checked.linear is False:
                small = _SMALL * gradients
                step = self.ask(cohort, 1.0 + small) - self.ask(cohort, 1.0 - small)
                # Subtract the change of the unused coordinate: it is common to all clients.
                step = (step - step[-1]) / (2 * _SMALL)
            else:
                step = self.ask(cohort, gradients)
                if checked.moves_without_updates:
                    step = step - self.ask(cohort, np.zeros_like(gradients))
            found.append(step[places])
        return np.concatenate(found)

    def check(self) -> ServerProperties:
        """The properties of the server, from its steps for a few cohorts."""
        few: list[QueryCohort] = []
        for cohort in self.cohorts():  # the first ones in which clients can be compared
            few.append(cohort)
            if sum(len(c.clients) > 1 for c in few) == _CHECKED:
                break
        few = sorted(few, key=lambda cohort: -len(cohort.clients))[:_CHECKED]
        shown = [_check(self, *pair) for pair in zip(few, [*few[1:], few[0]], strict=True)]
        combined: dict[str, Any] = {}
        for name in dict.fromkeys(name for one in shown for name in one):
            known = [one[name] for one in shown if one.get(name) is not None]
            combined[name] = _COMBINE.get(name, any)(known) if known else None
        return ServerProperties(**combined)


_COMBINE: dict[str, Any] = {  # what cohorts show; all other properties hold if any shows them
    "linear": all,
    "repeatable": all,
    "long_run_gain": max,
    "only_client_counted": lambda known: known[0] if known[0] and len(set(known)) == 1 else None,
}


def _check(server: ServerQueries, cohort: QueryCohort, before: QueryCohort) -> dict[str, Any]:
    """The properties that one cohort shows, alone and after another; none without finite steps."""
    b = len(cohort.clients)
    rng = generator(server.seed, Purpose.MONTE_CARLO, round=cohort.round, client=1)
    one, other = (
        rng.choice([-1.0, 1.0], (b, server.coordinates)) * rng.uniform(0.5, 2.0, (b, 1))
        for _ in range(2)
    )
    ask = partial(server.ask, cohort)
    first, again = ask(one), ask(one)
    nothing = np.zeros_like(first)
    try:
        still = ask(np.zeros_like(one))
    except FedShuffleError:
        still = np.full_like(first, np.nan)
    if not (np.isfinite(first).all() and np.isfinite(again).all()):
        return {}
    fails = not np.isfinite(still).all()
    still = nothing if fails else still
    scale = np.abs(cohort.distance).max()

    def same(a: FloatArray, b: FloatArray, times: float = 1.0) -> bool:
        size = max(np.abs(a).max(), np.abs(b).max(), 1e-9 * scale)
        return bool(np.abs(a - b).max() <= times * CLOSE * size)

    moves = not same(still, nothing)
    if not same(first, again):  # random, or a memory that cannot be reset
        # Random noise is not drift: only a constant step is.
        moves = moves and same(still, ask(np.zeros_like(one)))
        return {"repeatable": False, "moves_without_updates": moves}
    moved = first - still
    linear = same(ask(2 * one) - still, 2 * moved)
    linear = linear and same(ask(one + other) - still, moved + (ask(other) - still), times=10.0)
    contributions = server.contributions(cohort, ServerProperties(moves_without_updates=moves))
    linear = linear and same(contributions @ one, moved, times=10.0)
    later = ask(one, round=1)
    server.ask(before, np.ones((len(before.clients), server.coordinates)))
    stateful = not same(ask(one, fresh=False, round=1), later)
    tripled = np.where(np.arange(b) == 0, 3, 1)
    other_steps = replace(cohort, steps=tripled * cohort.steps)
    found = {
        "linear": linear,
        "repeatable": True,
        "stateful": stateful,
        "long_run_gain": _gain(server, cohort, one) if stateful and linear else None,
        "moves_without_updates": moves,
        "fails_on_zero_updates": fails,
        "uses_steps": not same(server.ask(other_steps, one), first),
    }
    if b == 1:
        return found
    ordered = not same(server.ask(cohort.in_order(np.arange(b)[::-1]), one[::-1]), first)
    counts = np.abs(contributions) > CLOSE * np.abs(contributions).max()
    only = "last" if counts[-1] else "first" if counts[0] else ""
    other_sizes = replace(cohort, sizes=tripled * cohort.sizes)
    return found | {
        "ordered": ordered,
        "only_client_counted": only if ordered and counts.sum() == 1 else "",
        "uses_sizes": not same(server.ask(other_sizes, one), first),
    }


def _gain(server: ServerQueries, cohort: QueryCohort, gradients: FloatArray) -> float:
    """The long-run gain of a server that gets the same updates in every round."""
    server.aggregator.reset()
    steps = [server.ask(cohort, gradients, fresh=False, round=r) for r in range(64)]
    norms = [float(np.linalg.norm(step)) for step in steps]
    return estimate_gain(norms) if norms[0] > 0 and np.isfinite(norms).all() else float("inf")


def estimate_gain(norms: Sequence[float]) -> float:
    """The long-run step of a server that gets the same updates in every round, over its first step.

    Momentum closes a constant share of the gap in every round, so three steps give its limit.

    >>> estimate_gain([1.0, 1.9, 2.71, 3.439, 4.0951, 4.68559, 5.217031, 5.6953279])
    10.0
    """
    steps = np.asarray(norms)
    grown = np.diff(steps)
    quarter = max(len(grown) // 4, 1)
    early, late = grown[:quarter].mean(), grown[-quarter:].mean()
    if late > CLOSE * steps[0] and late >= early * (1 - 1e-9):
        return float("inf")
    bend = grown[-1] - grown[-2]
    limit = steps[-1] if abs(bend) < 1e-12 * steps[0] else steps[-1] - grown[-1] ** 2 / bend
    return float(np.round(limit / steps[0], 9))
