"""The rounds of a run: sample, plan, probe, walk, aggregate."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from fedshuffle import _identity, methods, schedules
from fedshuffle._arrays import expect
from fedshuffle.client_memory import ClientMemory, Shelf
from fedshuffle.federation import Federation
from fedshuffle.kernel import Probe, Request, Walk
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods import Method, Participants
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import Optimal, Sampling, resolve
from fedshuffle.sampling.base import check_cohort
from fedshuffle.schedules import Schedule
from fedshuffle.state import State

if TYPE_CHECKING:
    from fedshuffle.engines import Engine


@final
class Run:
    """The settings of one training run, checked and bound to a federation."""

    def __init__(
        self,
        federation: Federation,
        method: str | Method,
        sampling: str | Sampling = "full",
        work: LocalWork | None = None,
        step_size: Schedule = 0.1,
        server_step_size: Schedule = 1.0,
        seed: int = 0,
    ) -> None:
        expect(federation, Federation, "federation")
        work = LocalWork() if work is None else work
        expect(work, LocalWork, "work")
        self.method = methods.get(method)
        self.federation = self.method.clients(federation)
        self.sampling = self.method.sampling(resolve(sampling, federation))
        self.workload: Workload = self.method.local_work(work).on(self.federation.sizes)
        self.method.check(self.workload, self.sampling)
        self.step_size = step_size
        self.server_step_size = server_step_size
        self.seed = check_seed(seed)
        schedules.value(step_size, 0, "step size")
        schedules.value(server_step_size, 0, "server step size")

    def settings(self, rounds: int) -> dict[str, Any]:
        """What the trajectory over so many rounds depends on besides the model, as plain data."""
        cohorts = self.sampling.cohorts(0)
        arrays = [self.federation.sizes, self.federation.weights, self.sampling.p]
        if cohorts is not None:
            arrays += [cohorts.members, cohorts.starts, cohorts.probabilities]
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
        return {
            **self.method.describe(),
            "direction": _identity.part(self.method.direction),
            "server": _identity.part(self.method.server),
            "sampling": _identity.part(self.sampling),
            "work": _identity.work(self.workload.work),
            "step_size": schedules.describe(self.step_size, rounds, "step size"),
            "server_step_size": schedules.describe(
                self.server_step_size, rounds, "server step size"
            ),
            "seed": self.seed,
            "clients": len(self.federation),
            "clients_sha256": digest.hexdigest(),
            "data_sha256": _identity.data(self.federation),
        }

    def start(self, x: Tensor, shelf: Shelf | None = None) -> State:
        """The state before the first round; what clients keep goes to the shelf, if they do."""
        if not self.method.direction.client_state:
            return State(x)
        shelf = Shelf(len(x), x.dtype) if shelf is None else shelf
        return State(x, clients=ClientMemory.empty(len(self.federation), shelf))

    def cohort(self, round: int) -> Participants:
        """Who takes part in a round, and what they do: a pure function of (seed, round)."""
        drawn = self.sampling.draw(self.seed, round)
        clients = check_cohort(drawn, len(self.sampling), self.sampling)
        plan = self.workload.plan(clients, self.seed, round)
        return Participants(
            clients=clients,
            weight=self.federation.weights[clients],
            probability=self.sampling.p[clients],
            planned=plan.planned,
            done=plan.done,
            longest=self.workload.longest,
            round=round,
        )

    def step_scales(self) -> tuple[float, float]:
        """The smallest and the largest step size of a client, as multiples of ``step_size``.

        >>> Run(Federation.from_sizes([2, 88]), "fedshuffle").step_scales()
        (1.0, 44.0)
        """
        everybody = np.arange(len(self.federation))
        scales = [
            self.method.averaging.step_scale(
                Participants(
                    clients=everybody,
                    weight=self.federation.weights,
                    probability=self.sampling.p,
                    planned=planned,
                    done=planned,
                    longest=self.workload.longest,
                )
            )
            for planned in self.workload.alone[0][:, [0, -1]].T  # the fewest and the most epochs
        ]
        return float(np.min(scales)), float(np.max(scales))

    def walk(self, state: State) -> Walk | None:
        """What the clients would be asked in the next round; None if nobody takes part."""
        requests = self.round(state)
        answer = None
        try:
            while isinstance(request := requests.send(answer), Probe):
                points = torch.stack(list(request.points))
                answer = points.new_zeros(request.weights.shape[1], *points.shape)
        except StopIteration:
            return None
        return request

    def round(
        self, state: State, cohort: Participants | None = None
    ) -> Generator[Request, Any, State]:
        """The next round as requests to an engine; returns the state after it.

        The cohort is the one that is drawn, unless it is known better who takes part.
        """
        cohort = self.cohort(state.round) if cohort is None else cohort
        if not len(cohort.clients):
            return replace(state, round=state.round + 1, sent=None)
        select = None
        if isinstance(self.sampling, Optimal):
            select = partial(
                self.sampling.select, seed=self.seed, round=state.round, clients=cohort.clients
            )
        after: State = yield from self.method.round(
            state,
            cohort,
            self.workload,
            self.seed,
            schedules.value(self.step_size, state.round, "step size"),
            schedules.value(self.server_step_size, state.round, "server step size"),
            select,
        )
        return after


def play(engine: Engine, runs: Sequence[Run], states: Sequence[State]) -> list[State]:
    """One round of every run, in lockstep: requests of the same kind go to the engine together."""
    rounds = [run.round(state) for run, state in zip(runs, states, strict=True)]
    after: list[State | None] = [None] * len(runs)
    waiting: dict[int, Request] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(runs)))
    while answers:
        for k, answer in answers.items():
            try:
                waiting[k] = rounds[k].send(answer)
            except StopIteration as stop:
                after[k] = stop.value
        probes = {k: request for k, request in waiting.items() if isinstance(request, Probe)}
        walks = {k: request for k, request in waiting.items() if isinstance(request, Walk)}
        answers = {}
        if probes:  # walks wait until nobody probes any more, so that all runs walk together
            answers.update(zip(probes, engine.probe(list(probes.values())), strict=True))
        elif walks:
            answers.update(zip(walks, engine.walk(list(walks.values())), strict=True))
        for k in answers:
            del waiting[k]
    return [state for state in after if state is not None]


def simulate(
    engine: Engine, runs: Sequence[Run], rounds: int, states: Sequence[State] | None = None
) -> Iterator[list[State]]:
    """The states of all runs after each round, from the problem's start unless given."""
    current = list(states or [run.start(engine.problem.start) for run in runs])
    for _ in range(rounds):
        current = play(engine, runs, current)
        yield current
