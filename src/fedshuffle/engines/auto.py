"""Choosing an engine: try each on a piece of the work, hold it against the reference, time it."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor

from fedshuffle.engines.agreement import SlowerWarning, tolerance
from fedshuffle.engines.base import Engine
from fedshuffle.engines.loop import LoopEngine
from fedshuffle.engines.machine import cores_here
from fedshuffle.engines.names import make
from fedshuffle.engines.problem import Problem
from fedshuffle.kernel import Order, Walk

_SECONDS = 0.2
"""A trial should last about so long."""

_GAIN = 1.1
"""A more elaborate engine is chosen only if it is faster by this factor."""


@final
class Choice(NamedTuple):
    """The engine chosen, by name, and why."""

    name: str
    engine: Engine
    why: str


def choose(problem: Problem, walk: Walk) -> Choice:
    """The fastest engine that agrees with the reference, tried on a piece of this walk.

    On a GPU that is ``lanes`` if the model can run in them, for there width is all that counts.
    """
    if problem.device.type != "cpu":
        return _on_a_gpu(problem, walk)
    trials = _Trials(problem, walk)
    best = trials.best(["lean", "lanes"])
    if best is None:  # whatever is wrong with the model, the reference says it best
        return Choice("loop", make("loop", problem), trials.report())
    kind, cores = best, cores_here()
    if cores > 1 and len(walk.orders) > 1:
        best = trials.best([kind, f"{kind}:{cores}"]) or kind
        if trials.speed(best) < 0.75 * cores * trials.speed(kind) and kind != "lanes":
            best = trials.best([best, f"{kind}:{cores}:processes"]) or best
    return Choice(best, make(best, problem), trials.report())


def _on_a_gpu(problem: Problem, walk: Walk) -> Choice:
    trials = _Trials(problem, walk)
    if trials.speed("lanes"):
        return Choice("lanes", make("lanes", problem), f"many clients at once on {problem.device}")
    best = trials.best(["lean"]) or "loop"
    return Choice(best, make(best, problem), trials.report())


class _Trials:
    """Engines tried on the same piece of work."""

    def __init__(self, problem: Problem, walk: Walk) -> None:
        self._problem = problem
        self._walk = walk
        self._speeds: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._tiny = dataclasses.replace(walk, orders=_shortened(walk.orders[:2], 4))
        self._piece: Walk | None = None
        self._reference: Tensor | None = None

    def best(self, names: Sequence[str]) -> str | None:
        """The fastest of these; an earlier one unless a later one is clearly faster."""
        found = None
        for name in names:
            if self.speed(name) > (_GAIN * self.speed(found) if found else 0):
                found = name
        return found

    def speed(self, name: str) -> float:
        """Local steps per second; zero for an engine that fails or disagrees."""
        if name not in self._speeds and name not in self._failures:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # such as vmap's about a slow way round
                    warnings.simplefilter("always", SlowerWarning)
                    self._speeds[name] = self._tried(name)
            except Exception as error:
                self._failures[name] = str(error).split("\n")[0]
        return self._speeds.get(name, 0.0)

    def _tried(self, name: str) -> float:
        engine = make(name, self._problem)
        if self._reference is None:
            (self._reference,) = LoopEngine(self._problem).walk([self._tiny])
        (found,) = engine.walk([self._tiny])
        error = (found - self._reference).norm()
        if not error <= tolerance(self._problem.dtype) * self._reference.norm() + 1e-12:
            raise ArithmeticError("it does not agree with the reference engine")
        if self._piece is None:  # the first to be timed says how much the others are given
            steps = sum(order.minibatches.steps for order in self._tiny.orders)
            allowance = int(_SECONDS * steps / _seconds(engine, self._tiny))
            self._piece = dataclasses.replace(
                self._walk, orders=_shortened(self._walk.orders, max(2 * cores_here(), allowance))
            )
        piece = self._piece
        engine.walk([piece])
        seconds = min(_seconds(engine, piece) for _ in range(2))
        return sum(order.minibatches.steps for order in piece.orders) / seconds

    def report(self) -> str:
        """Local steps per second of each engine that was tried."""
        told = [f"{name} {speed:,.0f} steps/s" for name, speed in self._speeds.items()]
        told += [f"{name} not ({failure})" for name, failure in self._failures.items()]
        return ", ".join(told)


def _seconds(engine: Engine, walk: Walk) -> float:
    begun = time.perf_counter()
    engine.walk([walk])
    return time.perf_counter() - begun


def _shortened(orders: Sequence[Order], steps: int) -> list[Order]:
    """Orders with about so many steps together: first fewer steps each, then fewer of them."""
    total = sum(order.minibatches.steps for order in orders)
    share = min(1.0, max(steps / max(1, total), 0.2))
    kept: list[Order] = []
    for order in orders:
        stream = order.minibatches
        few = max(1, min(stream.steps, round(share * stream.steps)))
        kept.append(dataclasses.replace(order, minibatches=dataclasses.replace(stream, steps=few)))
        steps -= few
        if steps <= 0:
            break
    return kept
