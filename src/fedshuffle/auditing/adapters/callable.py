"""A plain Python function, or a class, as a server under audit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.errors import FedShuffleError, error_context, user_error

_OPTIONAL = ("steps", "probabilities", "round")  # given to functions with such parameters


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
            parameters = inspect.signature(self._call).parameters
            self._more = [name for name in _OPTIONAL if name in parameters]

    def step(self, replies: Replies) -> FloatArray:
        more = {name: getattr(replies, name) for name in self._more}
        step = self._call(replies.clients, replies.sizes, replies.updates, **more)
        if np.iscomplexobj(step):
            raise FedShuffleError(f"{self.name} gives complex numbers: give a step of real ones.")
        return np.asarray(step, dtype=np.float64)
