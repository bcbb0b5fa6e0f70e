"""Engines by name: they do the walking."""

from __future__ import annotations

from fedshuffle.engines.base import Engine
from fedshuffle.engines.lanes import LanesEngine
from fedshuffle.engines.loop import LoopEngine
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import unknown

__all__ = ["Engine", "LanesEngine", "LoopEngine", "Loss", "Problem", "make"]


def make(name: str, problem: Problem) -> Engine:
    """The engine of that name for a problem."""
    engines = {"loop": LoopEngine, "lanes": LanesEngine}
    if name not in engines:
        raise unknown("engine", name, engines)
    engine: Engine = engines[name](problem)
    return engine
