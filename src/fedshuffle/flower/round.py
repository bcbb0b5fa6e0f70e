"""One round with clients that may fail.

The method is the simulator's. It makes a request, some clients reply, and then its round runs again
as if only those that replied had been sampled, each with the probability that it was sampled *and*
replied, and with the steps it really did. So the method's rules alone decide the weights.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.flower.update_buffer import UpdateBuffer
from fedshuffle.kernel import Request
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
        self._buffers: list[UpdateBuffer] = []

    def next(self) -> Request | State:
        """The next request to the cohort, or the state after the round."""
        requests = self.run.round(self.state, self.cohort)
        request = advance(requests)
        for buffer in self._buffers:
            if isinstance(request, State):  # nobody is left
                break
            request = advance(requests, buffer.sums(request))
        return request

    def add_replies(self, buffer: UpdateBuffer, steps: IntArray | None = None) -> None:
        """End an exchange with its replies; after training, with the steps of each client of the
        cohort (any number for those that did not reply).
        """
        cohort = self.cohort
        if steps is not None:
            cohort = replace(cohort, done=steps)
        replied = np.array([client in buffer for client in cohort.clients.tolist()], dtype=np.bool_)
        self.cohort = cohort.only(
            replied, cohort.probability * self.response_probability[cohort.clients]
        )
        self._buffers.append(buffer)
