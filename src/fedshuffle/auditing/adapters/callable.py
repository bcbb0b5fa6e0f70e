"""A plain Python function, or a class, as a server under audit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.errors import FedShuffleError

MORE = ("steps", "probabilities", "round")
"""What a function is told besides, if it has parameters of these names."""


@final
class Function(Aggregator):
    """``aggregate(clients, sizes, updates) -> step``, with ``updates`` a row per client.

    It may have further parameters named ``steps``, ``probabilities`` and ``round``. A server that
    remembers is a class whose objects are called like that: a new one is made for a fresh server.

    >>> def mean(clients, sizes, updates):
    ...     return updates.mean(axis=0)
    >>> Function(mean).name
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
        self._made = aggregate
        self.reset()

    def reset(self) -> None:
        if not self.resets:
            self._call = self._made
        else:
            try:
                self._call = self._made()
            except Exception as error:
                raise FedShuffleError(
                    f"{self.name}() fails: {type(error).__name__}: {error}. Give a class that can"
                    " be made without arguments."
                ) from error
            if not callable(self._call):
                raise FedShuffleError(
                    f"objects of {self.name} cannot be called: give it a method"
                    " __call__(self, clients, sizes, updates) that returns the server's step."
                )
        self._more = [name for name in MORE if name in _parameters(self._call)]

    def step(self, replies: Replies) -> FloatArray:
        more = {name: getattr(replies, name) for name in self._more}
        step = self._call(replies.clients, replies.sizes, replies.updates, **more)
        if np.iscomplexobj(step):
            raise FedShuffleError(f"{self.name} gives complex numbers: give a step of real ones.")
        return np.asarray(step, dtype=np.float64)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return frozenset()
