"""One round of a method: plan, train, aggregate, step; as a sequence of requests to an engine.

Clients that keep a vector are served in portions: their vectors are read from the store, travel
with the request, and come back with the answer. So memory does not grow with the cohort.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import (
    Answer,
    ClientTask,
    FullGradient,
    LocalTraining,
    Request,
    joined_metrics,
)
from fedshuffle.local_work import Workload
from fedshuffle.methods.averaging import Cohort
from fedshuffle.methods.checks import (
    begin_round,
    check_coefficients,
    check_state,
    check_tensor,
    end_round,
    shown,
)
from fedshuffle.methods.directions import LocalPlan, Reported, RoundContext, Steps
from fedshuffle.state import State
from fedshuffle.transforms import NO_TRANSFORMS, Chain, ServerContext

if TYPE_CHECKING:
    from torch import Tensor

    from fedshuffle.methods.method import Method

Select = Callable[[FloatArray], tuple[NDArray[np.bool_], FloatArray]]
"""From the norms of the weighted updates: which are sent, and with which probability each."""

Requests = Generator[Request, Answer, Any]

_PORTION = 16 * 2**20  # bytes of the clients' vectors in memory at a time
_FEWEST, _MOST = 16, 1024  # clients in a portion: workers share it, groups are no larger


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Clients that start from the same model."""

    places: IntArray
    """In the cohort."""
    model: "Tensor"
    address: int
    """The round that their random numbers are drawn for."""
    step_size: float | None = None
    """If it is not that of the round."""


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
    starts: Sequence[StartGroup] | None = None
    """In asynchronous rounds: who started from which model."""
    factors: FloatArray | None = None
    """A factor per client on its aggregation weight, besides the method's own."""


class MethodRound:
    """A round of a method with the clients of a cohort."""

    def __init__(
        self, method: "Method", state: State, cohort: Cohort, settings: RoundSettings
    ) -> None:
        self.method, self.state, self.cohort, self.settings = method, state, cohort, settings
        self.x = state.x if settings.start is None else settings.start
        self.clients = state.clients
        sizes = np.full(len(cohort.clients), settings.step_size)
        for group in settings.starts or ():
            sizes[group.places] = group.step_size
        self.step_sizes = sizes * method.averaging.step_scale(cohort)

    def requests(self) -> Requests:
        """All requests of the round; returns the state after it."""
        steps, plan = yield from self._plan()
        if plan.report is not None or plan.state_weights is not None:
            self._refuse_if_private("asks for a further sum of what clients send")
        cohort, places, pool = self.cohort, None, None
        if self.settings.select:
            cohort, places, pool = yield from self._selected(plan, self.settings.select)
        if not len(cohort.clients) and self.settings.select:  # as if nobody took part
            nothing = empty_round(self.method, self.state, self.settings)
            return replace(nothing, sent=0, metrics=self._metrics({}, places, pool))
        columns = self.method.averaging.aggregation_weights(cohort)[:, None]
        for factors in (plan.factors, self.settings.factors):
            columns = columns if factors is None else columns * factors[:, None]
        if plan.report is not None:
            columns = np.column_stack([columns, plan.report])
        answer = yield from self._train(plan, columns, places)
        sums, settings = answer.sums, self.settings
        update, transform_state, observed = received(settings, self.state, sums[0], answer.metrics)
        metrics = {k: np.full(len(cohort.clients), value) for k, value in observed.items()}
        update = update if plan.add is None else update + plan.add
        x = self.state.x if plan.own is None else plan.own.mean
        after, optimiser_state = server_step(
            self.method, replace(self.state, x=x), update, settings
        )
        if plan.own is not None:
            assert self.clients is not None
            rows = after.expand(len(cohort.clients), -1)
            self.clients = self.clients.updated(cohort.clients, rows)
        reported = Reported(None if plan.report is None else sums[1], answer.state_change)
        return State(
            after,
            end_round(self.method.direction, steps, reported),
            optimiser_state,
            self.state.round + 1,
            self.clients,
            transform_state,
            None if places is None else len(places),
            self._metrics({**answer.metrics, **metrics}, places, pool),
        )

    def _plan(self) -> Generator[Request, Answer, tuple[Steps, LocalPlan]]:
        """The direction up to its local plan, with the full gradients that it asks for."""
        state, rule, size = self.state.method_state, self.method.averaging, self.settings.step_size
        context = RoundContext(self.x, state, self.cohort, self.step_sizes, rule, size, self._rows)
        decay = self.settings.workload.work.weight_decay
        planning = begin_round(self.method.direction, context, decay)
        answer: Tensor | None = None
        while True:
            try:
                request = planning.send(answer)
            except StopIteration as stop:
                found: tuple[Steps, LocalPlan] = stop.value
                return found
            self._refuse_if_private("asks for full gradients")
            request = replace(request, seed=self.settings.seed)
            if request.chain:
                answer = (yield from self._in_portions(request)).sums
            else:
                answer = (yield request).sums

    def _refuse_if_private(self, what: str) -> None:
        if self.settings.chain.private:
            raise FedShuffleError(
                f"{type(self.method.direction).__name__} {what}, which would leave without noise."
                " Use a method that needs the sum of updates only, such as fedshuffle."
            )

    def _selected(
        self, plan: LocalPlan, select: Select
    ) -> Generator[Request, Answer, tuple[Cohort, IntArray, Mapping[str, FloatArray]]]:
        """The first phase: all train and send a norm. Who sends an update, with which probability.

        The chosen train once more in the second phase, to the same update: nobody's is stored.
        """
        if plan.report is not None or plan.keep is not None:
            raise needs_every_update(self.method)
        cohort = self.cohort
        tasks = self._tasks(plan, np.zeros((len(cohort.clients), 0)), None)
        pool = (yield LocalTraining(self.x, tasks, 0)).metrics
        weights = self.method.averaging.aggregation_weights(cohort)
        asked, probability = select(weights * pool["update_norm"])
        chosen = cohort.only(asked, cohort.probability * probability)
        return chosen, np.flatnonzero(asked), pool

    def _train(
        self, plan: LocalPlan, columns: FloatArray, places: IntArray | None
    ) -> Generator[Request, Answer, Answer]:
        """Train the cohort, or only the clients at some places, in portions if they keep state."""
        chain, shared = self.settings.chain, self.state.transform_state
        if plan.keep is not None:
            # The method's own bookkeeping sees the update first, or remembers what was decoded.
            last = self.method.direction.remembers
            shared = {f"{int(not last)}.{name}": value for name, value in shared.items()}
            chain = Chain((chain, plan.keep) if last else (plan.keep, chain))
        sums = columns.shape[1]
        if not len(columns):
            nothing = self.x.new_zeros((sums, len(self.x)))
            return Answer(nothing, state_change=nothing[0])
        if (groups := self.settings.starts) is None and plan.own is not None:
            at = self.cohort.round
            groups = [StartGroup(places, model, at) for places, model in plan.own.groups]
        if groups is not None:
            return (yield from self._train_groups(plan, columns, groups))
        if not chain.keeps_state:
            tasks = self._tasks(plan, columns, None, places)
            return (yield LocalTraining(self.x, tasks, sums, chain, shared))
        total: Answer | None = None
        everyone = np.arange(len(self.cohort.clients)) if places is None else places
        for portion in self._portions(len(everyone)):
            some = everyone[portion]
            clients, wanted = self.cohort.clients[some], plan.state_weights
            states = self._rows(clients)
            tasks = self._tasks(plan, columns[portion], states, some)
            wanted = None if wanted is None else wanted[some]
            request = LocalTraining(self.x, tasks, sums, chain, shared, states, wanted)
            total = self._added(total, (yield request), clients, portion.start)
        assert total is not None
        return total

    def _train_groups(
        self, plan: LocalPlan, columns: FloatArray, groups: Sequence[StartGroup]
    ) -> Generator[Request, Answer, Answer]:
        """Train clients from different models: those with the same one together."""
        chain, shared, answers = self.settings.chain, self.state.transform_state, []
        for group in groups:
            places = group.places
            tasks = self._tasks(plan, columns[places], None, places, group.address)
            request = LocalTraining(group.model, tasks, columns.shape[1], chain, shared)
            answers.append((yield request))
        sums = sum((answer.sums for answer in answers[1:]), answers[0].sums)
        lengths = [len(group.places) for group in groups]
        order = np.argsort(np.concatenate([group.places for group in groups]))
        metrics = joined_metrics([answer.metrics for answer in answers], lengths)
        return Answer(sums, metrics={name: values[order] for name, values in metrics.items()})

    def _in_portions(self, request: FullGradient) -> Generator[Request, Answer, Answer]:
        total: Answer | None = None
        for portion in self._portions(len(request.clients)):
            clients, weights = request.clients[portion], request.weights[portion]
            states = self._rows(clients) if request.chain.keeps_state else None
            part = replace(request, clients=clients, weights=weights, states=states)
            total = self._added(total, (yield part), clients, portion.start)
        assert total is not None
        return total

    def _portions(self, n: int) -> Iterator[slice]:
        """Which of n clients are served together."""
        size = min(_MOST, max(_FEWEST, _PORTION // self.x.nbytes))
        return (slice(begin, begin + size) for begin in range(0, n, size))

    def _rows(self, clients: IntArray) -> "Tensor":
        assert self.clients is not None
        return self.clients.rows(clients, self.x.device)

    def _added(
        self, total: Answer | None, answer: Answer, clients: IntArray, before: int
    ) -> Answer:
        """The sums and metrics of one more portion, after a number of clients before; what its
        clients keep goes to the store.
        """
        if answer.states is not None:
            assert self.clients is not None
            self.clients = self.clients.updated(clients, answer.states)
        if total is None:
            return replace(answer, states=None)
        change = answer.state_change
        if total.state_change is not None and change is not None:
            change = total.state_change + change
        lengths = before, len(clients)
        metrics = joined_metrics([total.metrics, answer.metrics], lengths)
        return Answer(total.sums + answer.sums, None, change, metrics)

    def _tasks(
        self,
        plan: LocalPlan,
        columns: FloatArray,
        states: "Tensor | None",
        places: IntArray | None = None,
        address: int | None = None,
    ) -> list[ClientTask]:
        """What each client does, at some places of the cohort, and the weights of what it sends.

        The address is the round of its random numbers, if it is not this one.
        """
        workload, seed, cohort = self.settings.workload, self.settings.seed, self.cohort
        clip, decay = workload.work.clip, workload.work.weight_decay
        optimiser = None if workload.optimiser.plain else workload.optimiser
        per_client = [cohort.clients, cohort.done, self.step_sizes]
        if places is not None:
            per_client = [values[places] for values in per_client]
        told = plan.each(len(columns), places, states)
        if callable(plan.coefficients):
            name = f"{type(self.method.direction).__name__}.round"
            told = [check_coefficients(one, self.x, name) for one in told]
        numbers = [values.tolist() for values in per_client]
        batches, r = workload.minibatches, cohort.round if address is None else address
        return [
            ClientTask(batches(i, done, seed, r), size, one, a, clip, decay, optimiser)
            for i, done, size, one, a in zip(*numbers, told, columns, strict=True)
        ]

    def _metrics(
        self,
        senders: Mapping[str, FloatArray],
        places: IntArray | None,
        pool: Mapping[str, FloatArray] | None,
    ) -> dict[str, FloatArray]:
        """The numbers of the round, one per client of the cohort, with what each receives and
        sends.
        """
        n, direction = len(self.cohort.clients), self.method.direction
        size = 0 if self.method.pooled else self.x.nbytes  # pooled data is not sent
        found = dict(senders)
        found.setdefault("bytes_up", np.full(n if places is None else len(places), float(size)))
        if places is not None:
            found = {name: _placed(values, places, n) for name, values in found.items()}
            # Those that send no update send the norm of it, as all do.
            found["bytes_up"] = np.nan_to_num(found["bytes_up"]) + self.x.element_size()
        found["bytes_up"] = found["bytes_up"] + (direction.up - 1) * size
        found["bytes_down"] = np.full(n, float(direction.down * size))
        return {**found, **(pool or {})}


def _placed(values: FloatArray, places: IntArray, n: int) -> FloatArray:
    """Numbers of some clients of a cohort of n; NaN for the others."""
    found = np.full(n, math.nan)
    found[places] = values
    return found


def received(
    settings: RoundSettings, state: State, update: "Tensor", metrics: Mapping[str, FloatArray]
) -> "tuple[Tensor, Mapping[str, Tensor], Mapping[str, float]]":
    """The aggregated update after the transforms' part at the server, their next state, and what
    they measured.
    """
    if not settings.chain:
        return update, state.transform_state, {}
    context = ServerContext(
        settings.seed,
        state.round,
        state.transform_state,
        metrics,
        model=state.x,
        step_size=settings.server_step_size,
    )
    after, transform_state = settings.chain.server(update, context)
    check_tensor(after, "a transform's aggregated update", like=update)
    check_state(transform_state, "a transform's state at the server")
    # The sum shows it at a tenth of the cost of looking at every number.
    if not math.isfinite((after.float() if after.element_size() == 2 else after).sum()):
        names = ", ".join(type(one).__name__ for one in settings.chain.transforms)
        raise FedShuffleError(
            f"round {state.round}: the aggregated update is not finite after the transforms"
            f" ({names}). One of them gives NaN or infinity, or the weighted sum overflows."
        )
    return after, transform_state, context.observed


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
    """A round in which nobody takes part: only what acts in every round does anything."""
    after = replace(state, round=state.round + 1, sent=None, metrics={})
    if not (settings.chain.every_round or method.server.every_round):
        return after
    update, transform_state, _ = received(settings, state, state.x.new_zeros(state.x.shape), {})
    x, optimiser_state = server_step(method, state, update, settings)
    return replace(after, x=x, optimiser_state=optimiser_state, transform_state=transform_state)


def needs_every_update(method: "Method") -> FedShuffleError:
    """The error for a method that two-phase sampling cannot serve."""
    return FedShuffleError(
        f"{method.name} learns from what every client of the cohort sends, and with optimal"
        " client sampling most send only a norm. Use another sampling, or another method."
    )
