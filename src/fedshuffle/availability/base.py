"""The interface of availability: who is there in a round."""

import abc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, uniforms

BoolArray = NDArray[np.bool_]
MOST_ROUNDS = 10**6  # of a period, whose rounds are all looked at once


class Availability(abc.ABC):
    """Who is there in a round, of all clients of a federation.

    :meth:`available` is a pure function of (seed, round, client) and costs as much as the clients
    that are asked for, so a round of a million clients is planned in milliseconds.

        >>> from fedshuffle.availability import Markov
        >>> phones = Markov(on=[0.1, 0.5], off=[0.3, 0.5])
        >>> phones.probability(round=0).round(3).tolist()
        [0.25, 0.5]
        >>> phones.available(seed=1, round=8, clients=np.array([1])).tolist()
        [True]
    """

    period: int = 1
    """Rounds 0 to ``period - 1`` may have different probabilities."""
    repeats: bool = True
    """Whether later rounds repeat those of the period, or else stay as the last of them."""
    leaves: FloatArray | None = None
    """The probability of each client that was asked to leave before it answers."""
    drop: bool = False
    """Whether to train without clients that are never there, instead of refusing them."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of clients."""

    @abc.abstractmethod
    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        """Which of these clients are there in a round."""

    @abc.abstractmethod
    def at(self, round: int) -> "Availability":
        """An availability whose independent rounds all have the distribution of this round:
        an ``Independent`` one, or ``Groups`` of one, which return themselves.
        """

    @abc.abstractmethod
    def probability(self, round: int) -> FloatArray:
        """The probability of each client to be there in a round."""

    def answers(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        """Which of these clients, if they were asked, do not leave before they answer."""
        if self.leaves is None:
            return np.ones(len(clients), dtype=np.bool_)
        numbers = uniforms(seed, Purpose.AVAILABILITY, round=round, client=clients, part=2)
        return numbers >= self.leaves[clients]


def per_client(values: NDArray[Any], clients: int, what: str) -> NDArray[Any]:
    """One number for all clients, or one for each, as one for each."""
    if len(values) not in (1, clients):
        raise FedShuffleError(
            f"{what}: there are {len(values)} numbers for {clients} clients. Give one for each, or"
            " one for all."
        )
    return np.broadcast_to(values, clients) if len(values) == 1 else values
