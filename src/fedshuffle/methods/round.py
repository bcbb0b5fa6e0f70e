"""One round of a method: plan, train, aggregate, step; as a sequence of requests to an engine.

Clients that keep a vector are served in portions: their vectors are read from the store, travel
with the request, and come back with the answer. So memory does not grow with the cohort.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining, Request
from fedshuffle.local_work import Workload
from fedshuffle.methods.averaging import Cohort
from fedshuffle.methods.directions import (
    LocalPlan,
    Reported,
    RoundContext,
    Steps,
    begin_round,
    check_coefficients,
    check_state,
    check_tensor,
    end_round,
    shown,
)
from fedshuffle.state import State
from fedshuffle.transforms import NO_TRANSFORMS, Chain, ServerContext

if TYPE_CHECKING:
    from torch import Tensor

    from fedshuffle.methods.method import Method

Select = Callable[[FloatArray], tuple[NDArray[np.bool_], FloatArray]]
"""From the norms of the weighted updates: which are sent, and with which probability each."""

Requests = Generator[Request, Answer, Any]

_PORTION = 16 * 2**20  # bytes of the clients' vectors in memory at a time
_FEWEST = 16  # clients in a portion, so that workers have something to share


@dataclass(frozen=True)
class RoundSettings:
    """What a round is run with, besides the state and the cohort."""

    workload: Workload
    seed: int
    step_size: float
    server_step_size: float
    chain: Chain = NO_TRANSFORMS
    select: Select | None = None
    """For two-phase samplings: chooses who sends an update."""
    start: "Tensor | None" = None
    """The model that clients start from, if it is not the server's own."""


class MethodRound:
    """A round of a method with the clients of a cohort."""

    def __init__(
        self, method: "Method", state: State, cohort: Cohort, settings: RoundSettings
    ) -> None:
        self.method, self.state, self.cohort, self.settings = method, state, cohort, settings
        self.x = state.x if settings.start is None else settings.start
        self.clients = state.clients
        self.step_sizes = settings.step_size * method.averaging.step_scale(cohort)

    def requests(self) -> Requests:
        """All requests of the round; returns the state after it."""
        steps, plan = yield from self._plan()
        if plan.report is not None or plan.state_weights is not None:
            self._refuse_if_private("asks for a further sum of what clients send")
        n, places, cohort = (
            len(self.cohort.clients),
            np.arange(len(self.cohort.clients)),
            self.cohort,
        )
        pool: Mapping[str, FloatArray] = {}
        if self.settings.select:
            places, cohort, pool = yield from self._selected(plan, self.settings.select)
        if not len(places):  # as if nobody took part
            metrics = self._metrics(places, pool, {})
            return replace(self.state, round=self.state.round + 1, sent=0, metrics=metrics)
        weights = self.method.averaging.aggregation_weights(cohort)
        columns = [weights] if plan.report is None else [weights, plan.report]
        answer = yield from self._train(plan, places, np.column_stack(columns))
        update, transform_state = self._received(answer.sums[0], answer.metrics)
        after, optimiser_state = server_step(self.method, self.state, update, self.settings)
        reported = Reported(None if plan.report is None else answer.sums[1], answer.state_change)
        return State(
            after,
            end_round(self.method.direction, steps, reported),
            optimiser_state,
            self.state.round + 1,
            self.clients,
            transform_state,
            len(places) if len(places) < n or self.settings.select else None,
            self._metrics(places, pool, answer.metrics),
        )

    def _plan(self) -> Generator[Request, Answer, tuple[Steps, LocalPlan]]:
        """The direction up to its local plan, with the full gradients that it asks for."""
        method, context = (
            self.method,
            RoundContext(
                self.x,
                self.state.method_state,
                self.cohort,
                self.step_sizes,
                self.method.averaging.normaliser,
            ),
        )
        planning = begin_round(method.direction, context, self.settings.workload.work.weight_decay)
        answer: Tensor | None = None
        while True:
            try:
                request = planning.send(answer)
            except StopIteration as stop:
                found: tuple[Steps, LocalPlan] = stop.value
                return found
            self._refuse_if_private(f"asks for {type(request).__name__}")
            request = replace(request, seed=self.settings.seed)
            if request.chain.keeps_state:
                answer = (yield from self._in_portions(request)).sums
            else:
                answer = (yield request).sums

    def _refuse_if_private(self, what: str) -> None:
        if self.settings.chain.private:
            raise FedShuffleError(
                f"{type(self.method.direction).__name__} {what}, which would leave without noise."
                " Use a method that needs the sum of updates only, such as fedshuffle."
            )

    def _in_portions(self, request: FullGradient) -> Generator[Request, Answer, Answer]:
        total: Answer | None = None
        for places in self._portions(np.arange(len(request.clients)), keeps=True):
            clients, weights = request.clients[places], request.weights[places]
            states = self._rows(clients)
            part = replace(request, clients=clients, weights=weights, states=states)
            total = self._added(total, (yield part), clients)
        assert total is not None
        return total

    def _selected(
        self, plan: LocalPlan, select: Select
    ) -> Generator[Request, Answer, tuple[IntArray, Cohort, Mapping[str, FloatArray]]]:
        """The first phase: all train and send a norm; who sends an update, and its probability.

        The chosen train once more in the second phase, to the same update: nobody's is stored.
        """
        if plan.report is not None or plan.keep is not None:
            raise needs_every_update(self.method)
        everyone, cohort = np.arange(len(self.cohort.clients)), self.cohort
        tasks = self._tasks(plan, everyone, np.zeros((len(everyone), 0)), None)
        pool = (yield LocalTraining(self.x, tasks, 0)).metrics
        norms = self.method.averaging.aggregation_weights(cohort) * pool["update_norm"]
        asked, probability = select(norms)
        chosen = cohort.only(asked, cohort.probability * probability)
        return np.flatnonzero(asked), chosen, pool

    def _train(
        self, plan: LocalPlan, places: IntArray, columns: FloatArray
    ) -> Generator[Request, Answer, Answer]:
        """Train the clients at these places of the cohort, in portions if they keep a vector."""
        chain, shared = self.settings.chain, self.state.transform_state
        if plan.keep is not None:  # the method's own bookkeeping sees the update first
            shared = {f"1.{name}": value for name, value in shared.items()}
            chain = Chain((plan.keep, chain))
        total: Answer | None = None
        for some in self._portions(np.arange(len(places)), chain.keeps_state):
            clients = self.cohort.clients[places[some]]
            states = self._rows(clients) if chain.keeps_state else None
            tasks = self._tasks(plan, places[some], columns[some], states)
            wanted = None if plan.state_weights is None else plan.state_weights[places[some]]
            request = LocalTraining(self.x, tasks, columns.shape[1], chain, shared, states, wanted)
            total = self._added(total, (yield request), clients)
        assert total is not None
        return total

    def _portions(self, places: IntArray, keeps: bool) -> Iterator[IntArray]:
        size = len(places)
        if keeps:
            size = max(_FEWEST, _PORTION // (len(self.x) * self.x.element_size()))
        return (places[begin : begin + size] for begin in range(0, len(places), max(size, 1)))

    def _rows(self, clients: IntArray) -> "Tensor":
        assert self.clients is not None
        return self.clients.rows(clients, self.x.device)

    def _added(self, total: Answer | None, answer: Answer, clients: IntArray) -> Answer:
        """The sums and metrics of one more portion; what its clients keep goes to the store."""
        if answer.states is not None:
            assert self.clients is not None
            self.clients = self.clients.updated(clients, answer.states)
        if total is None:
            return replace(answer, states=None)
        change = answer.state_change
        if total.state_change is not None and change is not None:
            change = total.state_change + change
        metrics = {
            name: np.concatenate([total.metrics[name], values])
            for name, values in answer.metrics.items()
        }
        return Answer(total.sums + answer.sums, None, change, metrics)

    def _tasks(
        self, plan: LocalPlan, places: IntArray, columns: FloatArray, states: "Tensor | None"
    ) -> list[ClientTask]:
        """What each client does, and the weights of what it sends."""
        workload, seed, cohort = self.settings.workload, self.settings.seed, self.cohort
        clip, decay = workload.work.clip, workload.work.weight_decay
        told = plan.each(places, states)
        if callable(plan.coefficients):
            name = f"{type(self.method.direction).__name__}.round"
            told = [check_coefficients(one, self.x, name) for one in told]
        per_client = (cohort.clients, cohort.done, self.step_sizes)
        numbers = [values[places].tolist() for values in per_client]
        batches, r = workload.minibatches, cohort.round
        return [
            ClientTask(batches(i, done, seed, r), size, one, a, clip, decay)
            for i, done, size, one, a in zip(*numbers, told, columns, strict=True)
        ]

    def _received(
        self, update: "Tensor", metrics: Mapping[str, FloatArray]
    ) -> "tuple[Tensor, Mapping[str, Tensor]]":
        return received(self.settings, self.state, update, metrics)

    def _metrics(
        self,
        places: IntArray,
        pool: Mapping[str, FloatArray],
        senders: Mapping[str, FloatArray],
    ) -> dict[str, FloatArray]:
        """The numbers of the round, one per client of the cohort, with what each client is sent
        and sends.
        """
        n, number, direction = (
            len(self.cohort.clients),
            self.x.element_size(),
            self.method.direction,
        )
        size = 0 if self.method.pooled else len(self.x) * number  # pooled data is not sent
        found: dict[str, FloatArray] = {}
        for name, values in senders.items():
            found[name] = np.full(n, math.nan)
            found[name][places] = values
        found |= pool
        up = np.full(n, float((direction.up - 1) * size))
        up[places] += senders.get("bytes_up", np.full(len(places), float(size)))
        up += number if self.settings.select else 0  # all send the norm of their update
        return found | {"bytes_up": up, "bytes_down": np.full(n, float(direction.down * size))}


def received(
    settings: RoundSettings, state: State, update: "Tensor", metrics: Mapping[str, FloatArray]
) -> "tuple[Tensor, Mapping[str, Tensor]]":
    """The aggregated update after the transforms' part at the server, and their next state."""
    context = ServerContext(settings.seed, state.round, state.transform_state, metrics)
    after, transform_state = settings.chain.server(update, context)
    check_tensor(after, "a transform's aggregated update", like=update)
    check_state(transform_state, "a transform's state at the server")
    return after, transform_state


def server_step(
    method: "Method", state: State, update: "Tensor", settings: RoundSettings
) -> "tuple[Tensor, Mapping[str, Tensor]]":
    """The next model and the next state of the server optimiser."""
    name = f"{type(method.server).__name__}.step"
    step = method.server.step(state.x, update, settings.server_step_size, state.optimiser_state)
    if not (isinstance(step, tuple) and len(step) == 2):
        raise FedShuffleError(f"{name} gives {shown(step)}: return the next model and state.")
    check_tensor(step[0], f"{name}: the next model", like=state.x)
    check_state(step[1], f"{name}: the next state")
    return step


def empty_round(method: "Method", state: State, settings: RoundSettings) -> State:
    """A round in which nobody takes part: only transforms that act in every round do anything."""
    after = replace(state, round=state.round + 1, sent=None, metrics={})
    if not settings.chain.every_round:
        return after
    update, transform_state = received(settings, state, state.x.new_zeros(state.x.shape), {})
    x, optimiser_state = server_step(method, state, update, settings)
    return replace(after, x=x, optimiser_state=optimiser_state, transform_state=transform_state)


def needs_every_update(method: "Method") -> FedShuffleError:
    """The error for a method that two-phase sampling cannot serve."""
    return FedShuffleError(
        f"{method.name} learns from what every client of the cohort sends, and with optimal"
        " client sampling most send only a norm. Use another sampling, or another method."
    )
