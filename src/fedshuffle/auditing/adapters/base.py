"""The interface of a server under black-box audit."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from fedshuffle._arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Replies:
    """What reaches the server in one round: an entry, or a row, per client in order of arrival."""

    round: int  # from 0 on
    clients: IntArray
    sizes: IntArray  # examples
    steps: IntArray  # local steps done
    probabilities: FloatArray  # inclusion probabilities
    updates: FloatArray  # how far each client would move the model: (clients, dimensions)


class Aggregator(abc.ABC):
    """A server under audit: it maps the replies of a round to a step of the model."""

    name: str
    resets: bool
    """Whether :meth:`reset` clears all state; a plain function may have hidden state."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Start again: before the first round, with a model of zero."""

    @abc.abstractmethod
    def step(self, replies: Replies) -> FloatArray:
        """How the model moves in this round: one number per dimension."""

    def average(self) -> Aggregator | None:
        """The server without its optimiser: the average of the updates that the optimiser gets.

        None if there is no optimiser, or if it cannot be separated.
        """
        return None
