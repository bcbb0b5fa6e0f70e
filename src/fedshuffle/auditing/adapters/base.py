"""The interface of a server under black-box audit, and plain functions and classes as servers."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError, error_context, user_error


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


class FunctionAggregator(Aggregator):
    """``aggregate(clients, sizes, updates) -> step``, with ``updates`` a row per client.

    It may have further parameters named ``steps``, ``probabilities`` and ``round``. A server with
    memory is a class whose objects are called like that: a new object is a fresh server.

    >>> def mean(clients, sizes, updates):
    ...     return updates.mean(axis=0)
    >>> FunctionAggregator(mean).name
    'mean'
    """

    def __init__(self, aggregate: Callable[..., Any], name: str | None = None) -> None:
        if not callable(aggregate):
            raise FedShuffleError(
                f"{aggregate!r:.60} cannot be called: give a function of (clients, sizes, updates)"
                " that returns the server's step, or a class whose objects are such functions."
            )
        self.resets = isinstance(aggregate, type)
        self.name = name or getattr(aggregate, "__name__", None) or type(aggregate).__name__
        self._given = aggregate
        self.reset()

    def reset(self) -> None:
        self._call = self._given
        if self.resets:
            fails, remedy = f"{self.name}() fails", "Give a class that needs no arguments."
            with error_context(lambda error: f"{fails}: {user_error(error)}. {remedy}"):
                self._call = self._given()
        if not callable(self._call):
            raise FedShuffleError(
                f"objects of {self.name} cannot be called: give it a method"
                " __call__(self, clients, sizes, updates) that returns the server's step."
            )
        self._more: list[str] = []
        with suppress(TypeError, ValueError):  # some built-in functions have no signature
            optional = inspect.signature(self._call).parameters.keys()
            self._more = sorted(optional & {"steps", "probabilities", "round"})

    def step(self, replies: Replies) -> FloatArray:
        more = {name: getattr(replies, name) for name in self._more}
        step = self._call(replies.clients, replies.sizes, replies.updates, **more)
        if np.iscomplexobj(step):
            raise FedShuffleError(f"{self.name} gives complex numbers: give a step of real ones.")
        return np.asarray(step, dtype=np.float64)
