"""One round with clients that may fail.

The method is the simulator's. It makes a request, some clients reply, and then its round runs again
as if only those that replied had been sampled, each with the probability that it was sampled *and*
replied, and with the steps it really did. So the method's rules alone decide the weights.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.flower.update_buffer import UpdateBuffer
from fedshuffle.kernel import LocalTraining, Request
from fedshuffle.methods import Cohort
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, advance


class ClientRound:
    """A round of a run, exchange by exchange.

    Args:
        run: the settings.
        state: the state before the round.
        response_probability: for every client the probability that it replies to a message,
            independently of everything else.
    """

    def __init__(self, run: Run, state: State, response_probability: FloatArray) -> None:
        self.run = run
        self.state = state
        self.response_probability = response_probability
        self.cohort: Cohort = run.cohort(state.round)
        """The clients that have replied to every request so far."""
        self.missing: dict[int, str] = {}
        """The clients that have not, and why."""
        self.begun = time.perf_counter()
        self.buffers: list[UpdateBuffer] = []
        """The replies to each request so far."""
        self._request: Request | State = state

    def next(self) -> Request | State:
        """The next request to the cohort, or the state after the round."""
        requests = self.run.round(self.state, self.cohort)
        self._request = advance(requests)
        for buffer in self.buffers:
            if isinstance(self._request, State):  # nobody is left
                break
            self._request = advance(requests, buffer.sums(self._request))
        return self._request

    def add_replies(self, buffer: UpdateBuffer) -> None:
        """End the exchange of the last request with its replies."""
        cohort, clients = self.cohort, self.cohort.clients
        if isinstance(self._request, LocalTraining):
            done = [buffer.steps.get(client, 1) for client in clients.tolist()]
            cohort = replace(cohort, done=np.array(done, dtype=np.int64))
        replied = np.isin(clients, list(buffer.steps))
        self.cohort = cohort.only(replied, cohort.probability * self.response_probability[clients])
        self.buffers.append(buffer)
