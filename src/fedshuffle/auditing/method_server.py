"""One of our methods as a server under audit: its aggregation weights, and its transforms."""

from collections.abc import Sequence

import numpy as np

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.adapters import Aggregator, Replies
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Cohort, Method
from fedshuffle.randomness import check_seed
from fedshuffle.transforms import Chain, ClientContext, ServerContext, Transform


class MethodAggregator(Aggregator):
    """What the server of a method makes of given updates, with what transforms do to them.

    The step is the aggregated update; a server optimiser, which only processes it further, is left
    out. So are directions, which the clients follow.
    """

    resets = True

    def __init__(
        self,
        federation: Federation,
        method: str | Method,
        work: LocalWork | None = None,
        transforms: Sequence[Transform] = (),
        seed: int = 0,
    ) -> None:
        self._method, self._federation = methods.get(method), federation
        if self._method.direction.remembers:
            raise FedShuffleError(
                f"{self._method.name} remembers its clients, so a round alone does not show how"
                " they count: use fedshuffle.audit, which follows it."
            )
        work = self._method.local_work(LocalWork() if work is None else work)
        self._workload = work.on(federation.sizes)
        self._chain, self._seed = Chain(tuple(transforms)), check_seed(seed)
        self.name = self._method.name
        self.reset()

    def reset(self) -> None:
        import torch

        self._shared: dict[str, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def step(self, replies: Replies) -> FloatArray:
        import torch

        clients, at = replies.clients, replies.round
        planned, done = self._workload.plan(clients, self._seed, at)
        weight, most = self._federation.weights[clients], self._workload.max_steps
        optimiser = self._workload.optimiser
        cohort = Cohort(clients, weight, replies.probabilities, planned, done, most, at, optimiser)
        rule = self._method.averaging
        weights, scales = rule.aggregation_weights(cohort), rule.step_scale(cohort)
        context = ClientContext(self._seed, at, clients, done, scales, weights, self._shared)
        updates, states, kept = torch.from_numpy(replies.updates.copy()), None, clients.tolist()
        if self._chain.keeps_state:
            first = torch.zeros_like(updates[0])
            states = torch.stack([self._states.get(client, first) for client in kept])
        message = self._chain.client(updates, states, context)
        if message.state is not None:
            self._states |= dict(zip(kept, message.state, strict=True))
        metrics = {name: np.asarray(value) for name, value in message.metrics.items()}
        total = torch.from_numpy(weights).to(message.values) @ message.values
        server = ServerContext(self._seed, at, self._shared, metrics)
        step, shared = self._chain.server(total, server)
        self._shared = dict(shared)
        return step.numpy().astype(np.float64)
