r"""Clients that come and go: a chain of two states for each.

A client that is away comes with probability ``on`` from one round to the next, one that is there
goes with probability ``off``. One number u per round and client drives the chain:

.. math:: X_t = 1 \text{ if } u_t < \min(a, b), \quad X_t = 0 \text{ if } u_t \ge \max(a, b),
          \qquad a = \text{on},\ b = 1 - \text{off},

and in between the state stays as it was if :math:`a < b`, and changes if :math:`a > b`. So the
state of any round follows from the last round whose number decides alone: coupling from the past
(Propp and Wilson 1996). Before round 0 the state is drawn from the stationary distribution.
"""

import functools

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, frozen, vector
from fedshuffle.availability.base import Availability, BoolArray
from fedshuffle.availability.independent import Independent
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, uniforms

_NUMBERS = 1 << 13  # to look at together when the past is searched for a round that decides


class Markov(Availability):
    """A client that is away comes with probability ``on`` per round, one that is there goes with
    probability ``off``: it is there ``on / (on + off)`` of the time, for ``1 / off`` rounds.

        >>> Markov(on=[0.1, 0.5], off=[0.3, 0.5]).probability(round=0).round(3).tolist()
        [0.25, 0.5]
    """

    def __init__(self, on: ArrayLike, off: ArrayLike) -> None:
        self.on: FloatArray = frozen(vector(on, "on rates", within="[0, 1]"))
        self.off: FloatArray = frozen(vector(off, "off rates", range(len(self)), within="[0, 1]"))
        for client in np.flatnonzero(self.on + self.off == 0).tolist():
            raise FedShuffleError(
                f"client {client} neither comes nor goes (on and off are 0), so nothing says"
                " whether it is there: give it an on rate to be there always, an off rate to be"
                " there never."
            )

    def __repr__(self) -> str:
        there = self.on / (self.on + self.off)
        return f"markov, {there.mean():.3g} of the time"

    def __len__(self) -> int:
        return len(self.on)

    @functools.cached_property
    def _stationary(self) -> Independent:
        return Independent(self.on / (self.on + self.off))

    def at(self, round: int) -> Independent:
        return self._stationary

    def probability(self, round: int) -> FloatArray:
        return self._stationary.probabilities

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        clients = np.asarray(clients, dtype=np.int64)
        a, b = self.on[clients], 1 - self.off[clients]
        low, high, flips = np.minimum(a, b), np.maximum(a, b), a > b
        state, changed = np.zeros((2, len(clients)), dtype=np.bool_)
        left = np.arange(len(clients))  # those whose state no later round has decided
        end = round + 1  # rounds before this one are to be looked at
        while end > 0 and len(left):
            begin = max(0, end - max(1, _NUMBERS // len(left)))
            rounds = np.arange(begin, end)[::-1]
            # Round t has the number t + 1; number 0 is for the state before round 0.
            u = uniforms(
                seed, Purpose.AVAILABILITY, round=rounds + 1, client=clients[left][:, None]
            )
            there, away = u < low[left, None], u >= high[left, None]
            decides = there | away
            found = decides.any(axis=1)
            first = np.where(found, decides.argmax(axis=1), len(rounds))
            state[left] = there[np.arange(len(left)), np.minimum(first, len(rounds) - 1)]
            changed[left] ^= flips[left] & (first % 2 == 1)
            left, end = left[~found], begin
        start = uniforms(seed, Purpose.AVAILABILITY, round=0, client=clients[left])
        state[left] = start < self._stationary.probabilities[clients[left]]
        return state ^ changed
