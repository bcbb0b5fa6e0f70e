"""Engines by name."""

from __future__ import annotations

from dataclasses import replace

from fedshuffle._arrays import count, expect
from fedshuffle.engines.base import Engine
from fedshuffle.engines.lanes import LanesEngine
from fedshuffle.engines.lean import LeanEngine
from fedshuffle.engines.loop import LoopEngine
from fedshuffle.engines.machine import cores_here
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.ray import Ray, RayEngine
from fedshuffle.engines.sharing import MakeEngine
from fedshuffle.engines.workers import ProcessesEngine, ThreadsEngine
from fedshuffle.errors import FedShuffleError, unknown

_ENGINES: dict[str, MakeEngine] = {
    "loop": LoopEngine,
    "lean": LeanEngine,
    "lanes": LanesEngine,
}

_MOST = 256
"""Workers that any machine may be asked for, such as to resume the run of a larger one."""


def check(name: str | Ray) -> None:
    """Refuse a name that cannot be read; ``auto`` is left to :func:`fedshuffle.engines.choose`."""
    if name != "auto" and on_ray(name) is None:
        _read(name)


def make(name: str | Ray, problem: Problem) -> Engine:
    """The engine of that name for a problem: ``KIND``, ``KIND:WORKERS`` or
    ``KIND:WORKERS:processes``, where the kind is ``lean`` or ``lanes``; or ``ray:WORKERS:KIND``.

    Workers are threads unless they are said to be processes. The reference, ``loop``, works alone.
    """
    if (wanted := on_ray(name)) is not None:
        return RayEngine(problem, wanted)
    one, workers, processes = _read(name)
    if processes:
        return ProcessesEngine(problem, one, workers)
    return one(problem) if workers == 1 else ThreadsEngine(problem, one, workers)


def on_ray(name: str | Ray) -> Ray | None:
    """What the name asks of a Ray cluster; None if it asks for another engine."""
    if isinstance(name, Ray):
        return name
    return Ray.read(name) if isinstance(name, str) and name.split(":")[0] == "ray" else None


def at_address(name: str, address: str | None) -> str | Ray:
    """The engine of that name, on the Ray cluster at an address if there is one."""
    if address is None:
        return name
    if (wanted := on_ray(name)) is None:
        raise FedShuffleError(
            f"address is {address!r}, but the engine is {name!r}, which needs none. Ask for the"
            " engine 'ray', or leave the address out."
        )
    return replace(wanted, address=address)


def again(name: str | Ray, recorded: str) -> str | Ray:
    """The engine to go on with, where one was recorded: what was left open is as it was found.

    >>> again("auto", "lanes:2"), str(again("ray", "ray:4")), again("lean", "lanes")
    ('lanes:2', 'ray:4', 'lean')
    """
    if name == "auto":
        return recorded
    wanted, before = on_ray(name), on_ray(recorded)
    if wanted and before and wanted.workers is None:
        return replace(wanted, workers=before.workers)
    return name


def _read(name: object) -> tuple[MakeEngine, int, bool]:
    """The engine of one worker, the number of workers, and whether they are processes."""
    expect(name, str, "engine")
    assert isinstance(name, str)
    kind, *how = name.split(":")
    if kind not in _ENGINES:
        raise unknown("engine", kind, [*_ENGINES, "auto", "ray"])
    if not how:
        return _ENGINES[kind], 1, False
    workers, *where = how
    if kind == "loop" or not workers.isdecimal() or where not in ([], ["processes"]):
        raise FedShuffleError(
            f"engine {name!r} cannot be read: write 'lean', 'lean:2' for two threads, or"
            " 'lean:2:processes' (or lanes instead of lean); 'loop' works alone."
        )
    number = count(int(workers), "the number of workers")
    if number > (most := max(_MOST, 4 * cores_here())):
        raise FedShuffleError(
            f"engine {name!r} asks for {number} workers, and this machine has {cores_here()} cores."
            f" Ask for about as many workers as cores, at most {most}."
        )
    return _ENGINES[kind], number, bool(where)
