"""The training loop: sample, plan, probe, walk, aggregate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from rich.progress import track
from torch import Tensor, nn

from fedshuffle import engines, methods, schedules
from fedshuffle._arrays import count
from fedshuffle.engines import Engine, Loss, Problem
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.kernel import Probe, Request, Walk
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods import Method, Participants
from fedshuffle.methods.directions import Memory
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import Sampling
from fedshuffle.sampling import parse as parse_sampling
from fedshuffle.schedules import Schedule


@final
@dataclass(frozen=True)
class State:
    """All that changes during a run."""

    x: Tensor
    memory: Memory = field(default_factory=dict)
    round: int = 0


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
        self.federation = federation
        self.method = methods.get(method)
        self.sampling = (
            parse_sampling(sampling, federation) if isinstance(sampling, str) else sampling
        )
        if len(self.sampling) != len(federation):
            raise FedShuffleError(
                f"the sampling is for {len(self.sampling)} clients, but the federation has"
                f" {len(federation)}."
            )
        self.workload: Workload = self.method.local_work(work or LocalWork()).on(federation.sizes)
        self.method.check(self.workload, self.sampling)
        self.step_size = step_size
        self.server_step_size = server_step_size
        self.seed = check_seed(seed)
        schedules.value(step_size, 0, "step size")
        schedules.value(server_step_size, 0, "server step size")

    def cohort(self, round: int) -> Participants:
        """Who takes part in a round, and what they do: a pure function of (seed, round)."""
        clients = self.sampling.draw(self.seed, round)
        plan = self.workload.plan(clients, self.seed, round)
        return Participants(
            clients=clients,
            weight=self.federation.weights[clients],
            probability=self.sampling.p[clients],
            planned=plan.planned,
            done=plan.done,
            longest=plan.longest,
            round=round,
        )

    def round(self, state: State) -> Generator[Request, Any, State]:
        """The next round as requests to an engine; returns the state after it."""
        cohort = self.cohort(state.round)
        if not len(cohort.clients):
            return replace(state, round=state.round + 1)
        x, memory = yield from self.method.round(
            state.x,
            state.memory,
            cohort,
            self.workload,
            self.seed,
            schedules.value(self.step_size, state.round, "step size"),
            schedules.value(self.server_step_size, state.round, "server step size"),
        )
        return State(x, memory, state.round + 1)


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


def simulate(engine: Engine, runs: Sequence[Run], rounds: int) -> Iterator[list[State]]:
    """The states of all runs after each round, from the problem's start."""
    states = [State(engine.problem.start) for _ in runs]
    for _ in range(rounds):
        states = play(engine, runs, states)
        yield states


@final
@dataclass(frozen=True)
class Result:
    """What training leaves: the model, and one record per evaluated round."""

    model: nn.Module
    history: list[dict[str, float]]


def train(
    model: nn.Module,
    federation: Federation,
    *,
    loss: Loss,
    rounds: int,
    method: str | Method = "fedshuffle",
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    step_size: Schedule = 0.1,
    server_step_size: Schedule = 1.0,
    seed: int = 0,
    engine: str = "loop",
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    evaluate_every: int = 1,
    progress: bool = False,
) -> Result:
    """Train a model over a federation. The model given is left as it is.

    ``step_size`` is that of the client with the most local steps; methods scale it for the others.
    ``evaluate`` is called with the model, in evaluation mode and without gradients, after every
    ``evaluate_every`` rounds and after the last.

        >>> import torch
        >>> from fedshuffle import Federation, losses
        >>> points = torch.eye(6)
        >>> model = torch.nn.Linear(1, 6, bias=False)
        >>> federation = Federation.from_arrays(torch.ones(6, 1), points, sizes=[1, 2, 3])
        >>> result = train(model, federation, loss=losses.squared_error, rounds=100, step_size=0.1)
        >>> bool((result.model.weight.flatten() - 1 / 6).abs().max() < 0.05)
        True
    """
    count(rounds, "rounds")
    count(evaluate_every, "evaluate_every")
    problem = Problem(copy.deepcopy(model), loss, federation)
    runner = engines.make(engine, problem)
    run = Run(federation, method, sampling, work, step_size, server_step_size, seed)
    history: list[dict[str, float]] = []
    state = State(problem.start)
    states = simulate(runner, [run], rounds)
    if progress:
        states = track(states, description=run.method.name, total=rounds)  # type: ignore[assignment]
    for (state,) in states:
        if evaluate and (state.round % evaluate_every == 0 or state.round == rounds):
            history.append({"round": state.round, **_evaluated(evaluate, problem.load(state.x))})
    return Result(problem.load(state.x), history)


def _evaluated(
    evaluate: Callable[[nn.Module], Mapping[str, float]], model: nn.Module
) -> Mapping[str, float]:
    training = model.training
    model.eval()
    with torch.no_grad():
        record = evaluate(model)
    model.train(training)
    return record
