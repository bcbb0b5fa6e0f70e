"""The rounds of a run: sample a cohort, plan its steps, train, aggregate."""

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedshuffle import fingerprint, methods, schedules
from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.availability import Availability
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.kernel import Answer, FullGradient, LocalTraining, Request
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Cohort, Method
from fedshuffle.methods.round import RoundSettings
from fedshuffle.methods.servers import Average
from fedshuffle.privacy import Mechanism, Privacy, bind
from fedshuffle.probabilities import Participation
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import (
    AmongAvailable,
    Buffers,
    Sampling,
    among_available,
    resolve,
    scheduled,
)
from fedshuffle.sampling.base import check_cohort
from fedshuffle.schedules import Schedule
from fedshuffle.state import State
from fedshuffle.timing import (
    NO_BYTES,
    Clock,
    Deadline,
    MessageSizes,
    Timing,
    TrainingSchedule,
    Wait,
)
from fedshuffle.training.asynchronous import AsynchronousRounds
from fedshuffle.training.client_state import ClientState, ClientStateStore
from fedshuffle.transforms import Chain, Channel, DownLink, Transform, channels

if TYPE_CHECKING:
    from fedshuffle.engines import Engine


_LINK = "down."  # in the names of the down-link's state


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
        transforms: Sequence[Transform] = (),
        channel: str | Channel | None = None,
        down_channel: str | DownLink | None = None,
        privacy: Privacy | None = None,
        rounds: int | None = None,
        response_probability: ArrayLike = 1.0,
        availability: str | Availability | None = None,
        schedule: str | TrainingSchedule | None = None,
        clock: str | Clock | None = None,
        message_sizes: MessageSizes = NO_BYTES,
    ) -> None:
        expect(federation, Federation, "federation")
        work = LocalWork() if work is None else work
        expect(work, LocalWork, "work")
        self.method = methods.get(method)
        self.federation = self.method.clients(federation)
        timing = Timing.of(schedule, clock, federation, message_sizes)
        drawn = among_available(resolve(sampling, federation), availability, federation, rounds)
        workload = self.method.local_work(work).on(self.federation.sizes)
        self.timing = self.method.timing(timing, workload, drawn.two_phase)
        drawn, workload = scheduled(drawn, self.timing, workload, federation.ids)
        self.sampling, self.workload = self.method.sampling(drawn), workload
        self.workload.optimiser.check()
        self.method.check(self.workload, self.sampling)
        self.seed = check_seed(seed)
        self.participation: Participation | None = None
        """Who took part so far, if inclusion probabilities are estimated from that."""
        if estimate := self.method.averaging.estimate:
            self.participation = Participation(len(self.sampling), estimate, self._draw)
        self.step_size = step_size
        self.server_step_size = server_step_size
        given = Chain(channels.with_channel(transforms, channel)).flat
        self.down_link = channels.down_link(down_channel)
        if isinstance(self.sampling, Buffers):
            private, link_down = privacy is not None, self.down_link is not None
            self.sampling.check(Chain(given), private, link_down)
        self.mechanism: Mechanism | None = None
        """What makes the run private; its noise may depend on the number of rounds."""
        if privacy is not None:
            clients = self.federation, self.sampling, self.workload
            limits = rounds, given, response_probability  # of real clients: weights grow by it
            self.mechanism = bind(privacy, self.method, *clients, *limits)
        # Privacy comes last, so that its sensitivity holds whatever came before.
        self.chain = Chain((*given, *(self.mechanism.transforms if self.mechanism else ())))
        self.chain.check_with_client_state(self.method.name, self.method.direction.client_state)
        self._check_transforms()
        if self.method.direction.own_models and self.down_link is not None:
            raise FedShuffleError(
                f"clients of {self.method.name} start from models that they keep, which a down"
                " channel would lose: leave it out, or use another method."
            )
        schedules.value(step_size, 0, "step size")
        schedules.value(server_step_size, 0, "server step size")
        self.timing.check_link(self.down_link)
        self.asynchronous: AsynchronousRounds | None = None
        """From which models updates started, if the schedule is asynchronous."""
        if isinstance(self.sampling, Buffers):
            self.asynchronous = AsynchronousRounds(
                self.sampling, self.method, self.workload, self.seed
            )

    def _check_transforms(self) -> None:
        """Refuse transforms with local work that they exclude, and those that need the average
        itself where the server does something else.
        """
        direction = self.method.direction
        faults = {
            f"has the server optimiser {self.method.server}": self.method.server != Average(),
            "keeps a model at every client": direction.own_models,
            "counts updates of earlier rounds": direction.remembers,
            "has a momentum of such updates": direction.needs_estimate,
            "compresses the model on its way to clients": self.down_link is not None,
            "has an asynchronous schedule": isinstance(self.sampling, Buffers),
        }
        for one in self.chain.transforms:
            one.check(self.workload)
            for fault in (what for what, true in faults.items() if one.needs_average and true):
                raise FedShuffleError(
                    f"{type(one).__name__} needs a server that adds the clients' updates to the"
                    f" model that all of them started from, and this run of {self.method.name}"
                    f" {fault}. Use fedshuffle with schedule 'wait'."
                )
            if one.restart and (self.chain.keeps_state or not direction.stale_models):
                more = "the channel" if direction.stale_models else self.method.name
                raise FedShuffleError(
                    f"{one!r} gives parameters new values in every round, which fits clients that"
                    f" need nothing but the model, and {more} needs more. Use fedshuffle or fedprox"
                    " without error feedback, or fedex instead of flora."
                )

    def settings(self, rounds: int) -> dict[str, Any]:
        """What the trajectory over the rounds depends on besides the model, as plain data."""
        cohorts = self.sampling.cohorts(0)
        arrays: list[Any] = [self.federation.sizes, self.federation.weights, self.sampling.p]
        if cohorts is not None:
            arrays += [cohorts.members, cohorts.starts, cohorts.probabilities]
        if isinstance(self.sampling, AmongAvailable):  # by who is there, of whatever kind it is
            some = np.unique(np.linspace(0, len(self.sampling) - 1, 1000).astype(np.int64))
            there = self.sampling.availability.available
            arrays += [there(self.seed, round, some) for round in (*range(32), 100, 1000)]
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
        server = schedules.describe(self.server_step_size, rounds, "server step size")
        return {
            **self.method.describe(),
            "direction": fingerprint.part(self.method.direction),
            "server": fingerprint.part(self.method.server),
            "sampling": fingerprint.part(self.sampling),
            "work": fingerprint.work(self.workload.work),
            "transforms": [fingerprint.part(one) for one in self.chain.transforms],
            "down_channel": fingerprint.part(self.down_link),
            **self.timing.describe(),
            **(self.mechanism.describe() if self.mechanism else {}),
            "step_size": schedules.describe(self.step_size, rounds, "step size"),
            "server_step_size": server,
            "seed": self.seed,
            "clients": len(self.federation),
            "clients_sha256": digest.hexdigest(),
            "data_sha256": fingerprint.data(self.federation),
            "example_transform": fingerprint.example_transform(self.federation.transform),
        }

    def start(self, x: Tensor, store: ClientStateStore | None = None) -> State:
        """The state before the first round; client state, if any, goes to the store."""
        if not (self.method.direction.client_state or self.chain.keeps_state):
            return State(x)
        store = ClientStateStore(len(x), x.dtype) if store is None else store
        return State(x, clients=ClientState.empty(len(self.federation), store))

    def cohort(self, round: int, clients: IntArray | None = None) -> Cohort:
        """A round's clients, drawn unless given, and their steps: a function of (seed, round).

        Estimates of their probabilities come from the cohorts before. Given clients need not have
        been there, so they get what the estimates amount to in a long run.
        """
        drawn = self._draw(round) if clients is None else clients
        if self.asynchronous:
            steps = self.asynchronous.steps(round)
        else:
            steps = self.workload.plan(drawn, self.seed, round)
        cohort = Cohort.of(self.federation, self.sampling, self.workload, drawn, steps, round)
        if self.participation is None:
            return cohort
        if clients is None:
            estimated = self.participation.probabilities(round, drawn)
        else:
            estimated = self.method.averaging.long_run(cohort.probability)
        return replace(cohort, probability=estimated)

    def _draw(self, round: int) -> IntArray:
        drawn = self.sampling.draw(self.seed, round)
        return check_cohort(drawn, len(self.sampling), self.sampling)

    def step_scales(self) -> tuple[float, float]:
        """The smallest and the largest step size of a client, as multiples of ``step_size``."""
        steps, scales = self.workload.possible_steps[0], []
        all_clients = self.federation, self.sampling, self.workload, np.arange(len(steps))
        for planned in (steps[:, 0], steps[:, -1]):
            cohort = Cohort.of(*all_clients, (planned, planned))
            scales.append(self.method.averaging.step_scale(cohort))
        return float(np.min(scales)), float(np.max(scales))

    def local_training(self, state: State) -> LocalTraining | None:
        """The next local training, given zeros for full gradients; None if no client takes part."""
        requests = self.round(state)
        request = advance(requests)
        while isinstance(request, FullGradient):
            points = torch.stack(list(request.points))
            zeros = points.new_zeros(request.weights.shape[1], *points.shape)
            request = advance(requests, Answer(zeros, request.states))
        return request if isinstance(request, LocalTraining) else None

    def round(self, state: State, cohort: Cohort | None = None) -> "Requests":
        """The next round as requests, of the drawn cohort unless given; returns the next state."""
        cohort = self.cohort(state.round) if cohort is None else cohort
        after = yield from self._round(state, cohort)
        if self.asynchronous:
            return self.asynchronous.after(state, after)
        if self.timing.clock is None:
            return after
        return replace(after, time=state.time + self._seconds(cohort, after.metrics))

    def _seconds(self, cohort: Cohort, metrics: Mapping[str, FloatArray]) -> float:
        """How long a round takes, by the clock."""
        timing, at, clients = self.timing, cohort.round, cohort.clients
        if isinstance(timing.schedule, Deadline):
            assert isinstance(self.sampling, AmongAvailable)
            complete = len(self.sampling.asked(self.seed, at)) == len(clients)
            return timing.seconds(self.seed, at, clients, cohort.planned, timing.sizes, complete)
        sizes = timing.sizes
        if isinstance(timing.schedule, Wait) and len(clients):
            sizes = MessageSizes(metrics["bytes_down"], metrics["bytes_up"])
        return timing.seconds(self.seed, at, clients, cohort.done, sizes)

    def _round(self, state: State, cohort: Cohort) -> "Requests":
        at, select = state.round, None
        if self.sampling.two_phase:
            select = partial(self.sampling.select, seed=self.seed, round=at, clients=cohort.clients)
        settings = RoundSettings(
            self.workload,
            self.seed,
            schedules.value(self.step_size, at, "step size"),
            schedules.value(self.server_step_size, at, "server step size"),
            self.chain,
            select,
        )
        if self.asynchronous:
            starts = self.asynchronous.starts(state, self.step_size)
            settings = replace(settings, starts=starts, factors=self.asynchronous.factors(at))
        if self.down_link is None:
            return (yield from self.method.round(state, cohort, settings))
        link, kept = self._link_state(state)
        # Also if nobody takes part: what is sent must not tell, or sampling would not hide clients.
        known, sizes, link = self.down_link.send(state.x, link, cohort.clients, self.seed, at)
        state, settings = replace(state, transform_state=kept), replace(settings, start=known)
        after = yield from self.method.round(state, cohort, settings)
        linked = {_LINK + name: value for name, value in link.items()}
        extra = (self.method.direction.down - 1) * state.x.nbytes  # vectors besides the model
        kept, metrics = {**after.transform_state, **linked}, dict(after.metrics)
        if len(cohort.clients):
            metrics["bytes_down"] = sizes + extra
        return replace(after, transform_state=kept, metrics=metrics)

    def _link_state(self, state: State) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The state of the down-link, and that of the other transforms."""
        parts: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for name, value in state.transform_state.items():
            parts[not name.startswith(_LINK)][name.removeprefix(_LINK)] = value
        assert self.down_link is not None
        return parts[0] or self.down_link.init(state.x, len(self.federation)), parts[1]


Requests = Generator[Request, Answer, State]
"""A round of a run or of a method: requests, each to be sent its answer; then the next state."""


def advance(requests: Requests, answer: Answer | None = None) -> Request | State:
    """The next request of a round, given the answer to the one before; at its end, the state."""
    try:
        return next(requests) if answer is None else requests.send(answer)
    except StopIteration as stop:
        after: State = stop.value
        return after


def drive(requests: Requests, answer: Callable[[Request], Answer]) -> State:
    """The state after a round of which every request is answered by a function."""
    request = advance(requests)
    while not isinstance(request, State):
        request = advance(requests, answer(request))
    return request


def run_round(engine: "Engine", runs: Sequence[Run], states: Sequence[State]) -> list[State]:
    """One round of every run, in lockstep: requests of the same kind go to the engine together."""
    rounds = [run.round(state) for run, state in zip(runs, states, strict=True)]
    current = [advance(requests) for requests in rounds]
    while True:
        # Local training waits for the last full gradient, so that all runs train together.
        gradients = {k: r for k, r in enumerate(current) if isinstance(r, FullGradient)}
        training = {k: r for k, r in enumerate(current) if isinstance(r, LocalTraining)}
        if gradients:
            answers = zip(gradients, engine.full_gradients(list(gradients.values())), strict=True)
        elif training:
            answers = zip(training, engine.local_training(list(training.values())), strict=True)
        else:
            return [state for state in current if isinstance(state, State)]
        for k, answer in answers:
            current[k] = advance(rounds[k], answer)


def simulate(
    engine: "Engine", runs: Sequence[Run], rounds: int, states: Sequence[State] | None = None
) -> Iterator[list[State]]:
    """The states of all runs after each round, from the problem's start unless given."""
    current = list(states or [run.start(engine.problem.start) for run in runs])
    for _ in range(rounds):
        current = run_round(engine, runs, current)
        yield current
