r"""Clients that come and go: a chain of two states for each.

A client that is away comes with probability ``on`` from one round to the next, one that is there
goes with probability ``off``. The same chain: a round draws the state again with probability

.. math:: r = \min(\text{on} + \text{off},\ 2 - \text{on} - \text{off}),

there with probability on/r, or (1 - off)/r if on + off > 1; else the state stays as it was, or
changes if on + off > 1. So the state of a round follows from the last round that drew it, which is
found without a look at those between: rounds lie in blocks of about 1/r, and in a block the gaps
from one draw to the next are geometric. Before round 0 the state is drawn from the stationary
distribution.
"""

import functools

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, frozen, vector
from fedshuffle.availability.base import Availability, BoolArray
from fedshuffle.availability.independent import Independent
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, uniforms


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
        for client in np.flatnonzero(self.on + self.off == 2).tolist():
            raise FedShuffleError(
                f"client {client} always changes (on and off are 1): it is there in every second"
                " round, and which clients it meets never changes, so its probability does not"
                " describe a run. Write 'cyclic:2:0.5', or smaller rates."
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
        on, off = self.on[clients], self.off[clients]
        changes = on + off > 1
        rate = np.where(changes, (1 - on) + (1 - off), on + off)
        drawn = self._last_draw(seed, round, clients, rate)
        first = drawn < 0  # not drawn since round 0: as it was before
        there = np.where(first, on / (on + off), np.where(changes, 1 - off, on) / rate)
        # Round t has the number t + 1; number 0 is for the state before round 0.
        u = uniforms(seed, Purpose.AVAILABILITY, round=drawn + 1, client=clients)
        changed: BoolArray = changes & ((round - drawn) % 2 == 1)
        return changed ^ (u < there)

    def _last_draw(self, seed: int, round: int, clients: IntArray, rate: FloatArray) -> IntArray:
        """The last round up to this one that drew each client's state again; -1 if none did."""
        found = np.full(len(clients), -1)
        length = np.ceil(1 / rate)
        with np.errstate(divide="ignore"):  # a rate of 1 draws in every round
            scale = np.log1p(-rate)
        left, last = np.arange(len(clients)), np.full(len(clients), float(round))
        while len(left):
            begin = last - last % length[left]  # of the block
            draw, number, inside = begin - 1, 0, np.ones(len(left), dtype=np.bool_)
            while inside.any():
                u = uniforms(
                    seed, Purpose.AVAILABILITY, round=begin + number, client=clients[left], part=1
                )
                draw = draw + 1 + np.floor(np.log1p(-u) / scale[left])
                inside = draw <= last
                found[left[inside]] = draw[inside]
                number += 1
            earlier = (found[left] < 0) & (begin > 0)
            left, last = left[earlier], begin[earlier] - 1
        return found
