"""What the black-box auditor needs of a server, whatever it is made of."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

from fedshuffle._arrays import FloatArray, IntArray


@final
@dataclass(frozen=True, slots=True, eq=False)
class Replies:
    """What reaches the server in one round: one entry, or one row, per client, as they came in."""

    round: int
    """From 0 on."""
    clients: IntArray
    sizes: IntArray
    """Examples."""
    steps: IntArray
    """Local steps done."""
    probabilities: FloatArray
    """Inclusion probabilities."""
    updates: FloatArray
    """By how much each client would move the model: (clients, dimensions)."""


class Aggregator(abc.ABC):
    """A server under audit: it maps the replies of a round to a step of the model."""

    name: str
    resets: bool
    """Whether :meth:`reset` really forgets; a plain function may remember behind our back."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Be as new: no round has been, and the model is zero."""

    def average(self) -> Aggregator | None:
        """The server without its optimiser: the average of the updates that the optimiser gets.

        None where there is no optimiser, or where it cannot be taken apart.
        """
        return None

    @abc.abstractmethod
    def step(self, replies: Replies) -> FloatArray:
        """How the model moves in this round: one number per dimension."""
