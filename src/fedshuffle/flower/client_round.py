"""A round on real clients: the method's round, run again after each exchange.

After an exchange, the round runs again as if only the clients that replied had been sampled
(docs/explanation/architecture.md, "Real clients"). Updates are added in the cohort's order, so the
result does not depend on who was first.
"""

import time
from collections import Counter
from dataclasses import replace

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.flower.secure_aggregation import SecureSum
from fedshuffle.flower.update_buffer import UpdateBuffer
from fedshuffle.kernel import Answer, FullGradient, LocalTraining, Request
from fedshuffle.state import State
from fedshuffle.training.rounds import Requests, Run, advance


class ClientRound:
    """A round, exchange by exchange; each client replies with its given probability."""

    def __init__(self, run: Run, state: State, response_probability: FloatArray) -> None:
        self.run, self.state = run, state
        self.response_probability = response_probability
        self.begun = time.perf_counter()
        self.cohort = run.cohort(state.round)
        """The clients that have replied to every request so far."""
        self.missing: dict[int, str] = {}
        """The clients that have not, and why."""
        self.exchanges: list[tuple[IntArray, IntArray]] = []
        """Who was asked in each exchange so far, and who replied."""
        self.gradients: list[UpdateBuffer] = []
        """The replies to each request for full gradients so far,"""
        self.trained: UpdateBuffer | SecureSum | None = None
        """and those to the local training."""
        self.bytes: Counter[str] = Counter()
        """Sent ``down`` and ``up`` so far."""

    def next(self) -> Request | State:
        """The next request to the cohort, or the state after the round."""
        gradients = iter(self.gradients)
        requests = self.run.round(self.state, self.cohort)
        request = advance(requests)
        while not isinstance(request, State):
            if isinstance(request, FullGradient):
                if (replies := next(gradients, None)) is None:
                    return request
                answer = replies.full_gradients(request)
            elif self.trained is None:
                return self._of_all(requests, request)
            else:
                answer = self.trained.local_training(request)
            request = advance(requests, answer)
        return request

    def weights(self) -> dict[int, float]:
        """The aggregation weights if all clients of the cohort reply to the next request."""
        all_reply = self.cohort.only(np.ones(len(self.cohort.clients), bool), self._probability())
        weights = self.run.method.averaging.aggregation_weights(all_reply)
        return dict(zip(self.cohort.clients.tolist(), weights.tolist(), strict=True))

    def add_gradients(self, buffer: UpdateBuffer) -> None:
        """End an exchange of full gradients with its replies."""
        self._keep(buffer.steps)
        self.gradients.append(buffer)

    def add_training(self, buffer: UpdateBuffer | SecureSum) -> None:
        """End the exchange of local training with its replies."""
        done = [buffer.steps.get(client, 1) for client in self.cohort.clients.tolist()]
        self.cohort = replace(self.cohort, done=np.array(done, dtype=np.int64))
        self._keep(buffer.steps)
        self.trained = buffer

    def _keep(self, replied: dict[int, int]) -> None:
        asked, chosen = self.cohort.clients, np.isin(self.cohort.clients, list(replied))
        self.exchanges.append((asked, asked[chosen]))
        self.cohort = self.cohort.only(chosen, self._probability())

    def _probability(self) -> FloatArray:
        """That a client is in the cohort and replies."""
        found: FloatArray = self.cohort.probability * self.response_probability[self.cohort.clients]
        return found

    def _of_all(self, requests: Requests, first: LocalTraining) -> LocalTraining:
        """One request for the whole cohort: clients with state come in portions, whose tasks do
        not depend on the answers.
        """
        tasks = [*first.tasks]
        nothing = Answer(first.start.new_zeros(first.sums, len(first.start)))
        while len(tasks) < len(self.cohort.clients):
            portion = advance(requests, nothing)
            assert isinstance(portion, LocalTraining)
            tasks += portion.tasks
        return replace(first, tasks=tasks, states=None, state_weights=None)
