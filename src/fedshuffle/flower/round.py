"""One round among clients that may fail.

The method is the one of the simulator. It is asked for its request, clients answer or do not, and
then it is asked again as if only those who answered had been sampled, each with the probability
that it was sampled *and* answered, and with the steps that it really did. So the rules of the
method, not this file, say how each counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.flower.spool import Spool
from fedshuffle.kernel import Request
from fedshuffle.methods import Participants
from fedshuffle.rounds import Run
from fedshuffle.state import State


@final
class Round:
    """A round of a run, exchange by exchange.

    Args:
        run: the settings.
        state: before the round.
        answers: for every client the probability that it answers when asked, each time
            independently of all else.
    """

    def __init__(self, run: Run, state: State, answers: FloatArray) -> None:
        self.run = run
        self.state = state
        self.answers = answers
        self.cohort: Participants = run.cohort(state.round)
        """Who has answered all that was asked so far."""
        self._spools: list[Spool] = []

    def next(self) -> Request | State:
        """What to ask the cohort next; or, when all is asked, the state after the round."""
        requests = self.run.round(self.state, self.cohort)
        answer = None
        try:
            for spool in self._spools:
                answer = spool.answer(requests.send(answer))
            return requests.send(answer)
        except StopIteration as stop:
            after: State = stop.value
            return after

    def answered(self, spool: Spool, steps: IntArray | None = None) -> None:
        """The exchange is over: these have answered; after a walk, with so many steps each (by
        client of the cohort, whatever stands for those who did not answer).
        """
        cohort = self.cohort
        if steps is not None:
            cohort = replace(cohort, done=steps)
        there = np.array([client in spool for client in cohort.clients.tolist()], dtype=np.bool_)
        self.cohort = cohort.only(there, cohort.probability * self.answers[cohort.clients])
        self._spools.append(spool)
