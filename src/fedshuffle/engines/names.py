"""Engines by name."""

from __future__ import annotations

from fedshuffle._arrays import count, expect
from fedshuffle.engines.base import Engine
from fedshuffle.engines.lanes import LanesEngine
from fedshuffle.engines.lean import LeanEngine
from fedshuffle.engines.loop import LoopEngine
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.workers import MakeEngine, ProcessesEngine, ThreadsEngine
from fedshuffle.errors import FedShuffleError, unknown

_ENGINES: dict[str, MakeEngine] = {
    "loop": LoopEngine,
    "lean": LeanEngine,
    "lanes": LanesEngine,
}


def make(name: str, problem: Problem) -> Engine:
    """The engine of that name for a problem: ``KIND``, ``KIND:WORKERS`` or
    ``KIND:WORKERS:processes``, where the kind is ``lean`` or ``lanes``.

    Workers are threads unless they are said to be processes. The reference, ``loop``, works alone.
    """
    expect(name, str, "engine")
    kind, *how = name.split(":")
    if kind not in _ENGINES:
        raise unknown("engine", kind, _ENGINES)
    one = _ENGINES[kind]
    if not how:
        return one(problem)
    workers, *where = how
    if kind == "loop" or not workers.isdecimal() or where not in ([], ["processes"]):
        raise FedShuffleError(
            f"engine {name!r} cannot be read: write 'lean', 'lean:2' for two threads, or"
            " 'lean:2:processes' (or lanes instead of lean); 'loop' works alone."
        )
    number = count(int(workers), "the number of workers")
    if where == ["processes"]:
        return ProcessesEngine(problem, one, number)
    return one(problem) if number == 1 else ThreadsEngine(problem, one, number)
