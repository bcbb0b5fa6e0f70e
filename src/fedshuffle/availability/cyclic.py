"""Clients whose probability to be there changes with time: day and night, and slow drift."""

import abc

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, as_array, count, frozen, number, vector
from fedshuffle.availability.base import MOST_ROUNDS, Availability, BoolArray
from fedshuffle.availability.independent import Independent
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, uniforms

_ROUNDING = 1e-9  # of a round: 0.07 * 100 is more than 7


class _Changing(Availability):
    """Clients that are there independently, with probabilities that change from round to round."""

    @abc.abstractmethod
    def _probability(self, round: int, clients: IntArray) -> FloatArray:
        """The probability of each of these clients."""

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        numbers = uniforms(seed, Purpose.AVAILABILITY, round=round, client=clients)
        return numbers < self._probability(round, clients)

    def at(self, round: int) -> Independent:
        return Independent(self.probability(round))

    def probability(self, round: int) -> FloatArray:
        return self._probability(round, np.arange(len(self)))


class Cyclic(_Changing):
    """Day and night: client i is there in a share of every ``period`` rounds, by its time zone.

    It is day for client i in round t if ``(t + offsets[i]) % period < share * period``. Clients are
    there with probability ``day`` then, and ``night`` otherwise.

        >>> world = Cyclic([0, 12], period=24, share=0.5)
        >>> [world.probability(round).tolist() for round in (0, 11, 12)]
        [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        offsets: ArrayLike,
        period: int,
        share: float = 0.5,
        day: float = 1.0,
        night: float = 0.0,
    ) -> None:
        self.period = count(period, "the period of day and night, in rounds,", most=MOST_ROUNDS)
        zones = as_array(offsets, "offsets")
        if zones.ndim != 1 or not zones.size or zones.dtype.kind not in "iu":
            raise FedShuffleError(
                "offsets must be a list with a whole number of rounds for each client, its time"
                f" zone: got {offsets!r:.60}."
            )
        self.offsets: IntArray = frozen(zones.astype(np.int64) % self.period)
        self.share = number(share, "the share of a day that clients are there", within="[0, 1]")
        self.day = number(day, "the probability by day", within="[0, 1]")
        self.night = number(night, "the probability by night", within="[0, 1]")

    def __repr__(self) -> str:
        return f"cyclic, {self.share:g} of every {self.period} rounds"

    def __len__(self) -> int:
        return len(self.offsets)

    def _probability(self, round: int, clients: IntArray) -> FloatArray:
        day = np.ceil(self.share * self.period - _ROUNDING)  # rounds of it
        is_day = (round + self.offsets[clients]) % self.period < day
        return np.where(is_day, self.day, self.night)


class Drifting(_Changing):
    """The probability to be there moves evenly from ``first``, in round 0, to ``last``, in the last
    of the ``rounds``, and stays there.

        >>> fleet = Drifting([0.9, 0.1], [0.1, 0.9], rounds=3)
        >>> [fleet.probability(round).tolist() for round in (0, 1, 2, 99)]
        [[0.9, 0.1], [0.5, 0.5], [0.1, 0.9], [0.1, 0.9]]
    """

    repeats = False

    def __init__(self, first: ArrayLike, last: ArrayLike, rounds: int) -> None:
        self.first: FloatArray = frozen(vector(first, "first probabilities", within="[0, 1]"))
        clients = range(len(self.first))
        self.last: FloatArray = frozen(vector(last, "last probabilities", clients, within="[0, 1]"))
        self.period = count(rounds, "the rounds of the drift", least=2, most=MOST_ROUNDS)

    def __repr__(self) -> str:
        first, last = self.first.mean(), self.last.mean()
        return f"drifting, {first:.3g} to {last:.3g} of the time in {self.period} rounds"

    def __len__(self) -> int:
        return len(self.first)

    def _probability(self, round: int, clients: IntArray) -> FloatArray:
        share = min(round, self.period - 1) / (self.period - 1)
        first, last = self.first[clients], self.last[clients]
        return np.clip((1 - share) * first + share * last, 0.0, 1.0)
