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


def check(name: str) -> None:
    """Refuse a name that cannot be read; ``auto`` is left to :func:`fedshuffle.engines.choose`."""
    if name != "auto":
        _read(name)


def make(name: str, problem: Problem) -> Engine:
    """The engine of that name for a problem: ``KIND``, ``KIND:WORKERS`` or
    ``KIND:WORKERS:processes``, where the kind is ``lean`` or ``lanes``.

    Workers are threads unless they are said to be processes. The reference, ``loop``, works alone.
    """
    one, workers, processes = _read(name)
    if processes:
        return ProcessesEngine(problem, one, workers)
    return one(problem) if workers == 1 else ThreadsEngine(problem, one, workers)


def _read(name: str) -> tuple[MakeEngine, int, bool]:
    """The engine of one worker, the number of workers, and whether they are processes."""
    expect(name, str, "engine")
    kind, *how = name.split(":")
    if kind not in _ENGINES:
        raise unknown("engine", kind, [*_ENGINES, "auto"])
    if not how:
        return _ENGINES[kind], 1, False
    workers, *where = how
    if kind == "loop" or not workers.isdecimal() or where not in ([], ["processes"]):
        raise FedShuffleError(
            f"engine {name!r} cannot be read: write 'lean', 'lean:2' for two threads, or"
            " 'lean:2:processes' (or lanes instead of lean); 'loop' works alone."
        )
    return _ENGINES[kind], count(int(workers), "the number of workers"), bool(where)
