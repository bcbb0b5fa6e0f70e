"""Queries to a server under audit: the step it makes of known updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, Workload
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Sampling
from fedshuffle.sampling.base import check_cohort

_COORDINATES = 1024  # up to this many clients each has its own coordinate; else in its cohort
_NUMBERS = 1 << 22  # most numbers that are sent in one round; larger cohorts come in portions
_SMALL = 2.0**-10  # the relative size of the differences around a common update


@dataclass(frozen=True)
class QueryCohort:
    """A cohort to query a server with: the clients in order of arrival, and the steps they did."""

    round: int
    clients: IntArray
    steps: IntArray
    distance: FloatArray  # how far each client goes along a gradient of one: step size times steps
    share: float  # the cohort's probability if all cohorts are listed

    def reversed(self) -> QueryCohort:
        """The same clients in the opposite order."""
        clients, steps, distance = self.clients[::-1], self.steps[::-1], self.distance[::-1]
        return QueryCohort(self.round, clients, steps, distance, self.share)


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
        work, n = self.workload.work, len(self.federation)
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

    @property
    def name(self) -> str:
        """The server's name."""
        return self.aggregator.name

    def cohorts(self, shuffled: bool = False, draws: int | None = None) -> Iterator[QueryCohort]:
        """The cohorts to test with; the order of arrival is not known, so it may be shuffled."""
        if self.listed is not None and not shuffled:
            rounds = ((0, members, share) for members, share in self.listed)
        else:
            n = len(self.federation)
            rounds = (
                (r, check_cohort(self.sampling.draw(self.seed, r), n, self.sampling), 0.0)
                for r in range(self.draws if draws is None else draws)
            )
        for r, members, share in rounds:
            if not len(members):
                continue
            plan = self.workload.plan(members, self.seed, r)
            scale = self.workload.longest / plan.planned if self.scaled else 1.0
            order = np.arange(len(members))
            if shuffled:
                order = generator(self.seed, Purpose.MONTE_CARLO, round=r).permutation(len(members))
            distance = self.step_size * scale * plan.done.astype(np.float64)
            yield QueryCohort(r, members[order], plan.done[order], distance[order], share)

    def ask(
        self,
        cohort: QueryCohort,
        gradients: FloatArray,
        *,
        fresh: bool = True,
        round: int = 0,
        sizes: IntArray | None = None,
        steps: IntArray | None = None,
    ) -> FloatArray:
        """The server's step when each client of the cohort moves along its gradient."""
        if fresh:
            self.aggregator.reset()
        # Copies: a server that works in place must not change what the audit compares with.
        replies = Replies(
            round=round,
            clients=cohort.clients.copy(),
            sizes=self.federation.sizes[cohort.clients] if sizes is None else sizes.copy(),
            steps=(cohort.steps if steps is None else steps).copy(),
            probabilities=self.sampling.p[cohort.clients],
            updates=cohort.distance[:, None] * gradients,
        )
        try:
            with np.errstate(all="ignore"):
                step = self.aggregator.step(replies)
        except FedShuffleError:
            raise
        except Exception as error:
            some = ", ".join(map(str, cohort.clients[:5].tolist()))
            some += f", ... ({len(cohort.clients)} in all)" if len(cohort.clients) > 5 else ""
            raise FedShuffleError(
                f"{self.name} failed for the clients {some}: {type(error).__name__}: {error}"
            ) from error
        if np.shape(step) != (self.coordinates,):
            raise FedShuffleError(
                f"{self.name} gives a step of shape {np.shape(step)} for updates of shape"
                f" {replies.updates.shape}: give one number per column, ({self.coordinates},)."
            )
        return step

    def _portions(self, cohort: QueryCohort) -> Iterator[tuple[FloatArray, IntArray]]:
        """One-hot gradients for as many clients as there are coordinates, and these coordinates."""
        size = len(cohort.clients)
        for begin in range(0, size, self.places):
            end = min(begin + self.places, size)
            places = cohort.clients if self.own else np.arange(end - begin)
            gradients = np.zeros((size, self.coordinates))
            gradients[np.arange(begin, end), places] = 1.0
            yield gradients, places

    def contributions(self, cohort: QueryCohort, moves_without_updates: bool) -> FloatArray:
        """How far each client moves the model, if the server is linear."""
        found = []
        for gradients, places in self._portions(cohort):
            step = self.ask(cohort, gradients)
            if moves_without_updates:
                step = step - self.ask(cohort, np.zeros_like(gradients))
            found.append(step[places])
        return np.concatenate(found)

    def local_response(self, cohort: QueryCohort) -> FloatArray:
        """The response to small differences when all clients follow the same gradient."""
        found = []
        for gradients, places in self._portions(cohort):
            small = _SMALL * gradients
            change = self.ask(cohort, 1.0 + small) - self.ask(cohort, 1.0 - small)
            # Subtract the change of the unused coordinate: it is common to all clients.
            found.append((change[places] - change[-1]) / (2 * _SMALL))
        return np.concatenate(found)
