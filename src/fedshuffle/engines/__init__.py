"""Engines by name: they do the walking."""

from __future__ import annotations

from fedshuffle._arrays import count, expect
from fedshuffle.engines.base import Engine
from fedshuffle.engines.lanes import LanesEngine
from fedshuffle.engines.lean import LeanEngine
from fedshuffle.engines.loop import LoopEngine
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import FedShuffleError, unknown

__all__ = ["Engine", "LanesEngine", "LeanEngine", "LoopEngine", "Loss", "Problem", "make"]


def make(name: str, problem: Problem) -> Engine:
    """The engine of that name for a problem: ``loop``, ``lanes``, ``lean`` or ``lean:WORKERS``."""
    expect(name, str, "engine")
    kind, _, workers = name.partition(":")
    if kind == "lean":
        if workers and not workers.isdecimal():
            raise FedShuffleError(f"engine {name!r} cannot be read: write 'lean:2'.")
        return LeanEngine(problem, count(int(workers or 1), "the number of workers"))
    if name == "loop":
        return LoopEngine(problem)
    if name == "lanes":
        return LanesEngine(problem)
    raise unknown("engine", name, ["loop", "lanes", "lean", "lean:WORKERS"])
