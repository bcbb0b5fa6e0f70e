"""Engines by name."""

from __future__ import annotations

from dataclasses import replace

from fedshuffle._arrays import count, expect
from fedshuffle.engines.base import Engine
from fedshuffle.engines.cpu_tuning import available_cores
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.ray.engine import RayEngine
from fedshuffle.engines.ray.options import Ray
from fedshuffle.engines.reference import ReferenceEngine
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.engines.vectorized import VectorizedEngine
from fedshuffle.engines.workers import MakeEngine, ProcessesEngine, ThreadsEngine
from fedshuffle.errors import FedShuffleError, unknown

_ENGINES: dict[str, MakeEngine] = {
    engine.name: engine for engine in (ReferenceEngine, SequentialEngine, VectorizedEngine)
}
_MAX_WORKERS = 256
"""Any machine may be asked for this many, such as to resume the run of a larger one."""


def check(name: str | Ray) -> None:
    """Refuse a name that cannot be read; ``auto`` is left to :func:`fedshuffle.engines.choose`."""
    if name != "auto" and _ray(name) is None:
        _read(name)


def make(name: str | Ray, problem: Problem) -> Engine:
    """The engine of that name for a problem: ``KIND``, ``KIND:WORKERS`` or
    ``KIND:WORKERS:processes``, where the kind is ``sequential`` or ``vectorized``;
    ``ray:WORKERS:KIND``; or ``reference``. Workers are threads unless they are said to be processes
    or on Ray.
    """
    if (wanted := _ray(name)) is not None:
        return RayEngine(problem, wanted)
    one, workers, processes = _read(name)
    if processes:
        return ProcessesEngine(problem, one, workers)
    return one(problem) if workers == 1 else ThreadsEngine(problem, one, workers)


def at_address(name: str, address: str | None) -> str | Ray:
    """The engine of that name, on the Ray cluster at an address if there is one."""
    if address is None:
        return name
    if (wanted := _ray(name)) is None:
        raise FedShuffleError(
            f"address is {address!r}, but the engine is {name!r}, which needs none. Ask for the"
            " engine 'ray', or leave the address out."
        )
    return replace(wanted, address=address)


def resumed(name: str | Ray, recorded: str) -> str | Ray:
    """The engine to resume a run with: what the name leaves open is as it was recorded.

    >>> resumed("auto", "vectorized:2"), str(resumed("ray", "ray:4"))
    ('vectorized:2', 'ray:4')
    >>> resumed("sequential", "vectorized")
    'sequential'
    """
    if name == "auto":
        return recorded
    wanted, before = _ray(name), _ray(recorded)
    if wanted and before and wanted.workers is None:
        return replace(wanted, workers=before.workers)
    return name


def _ray(name: str | Ray) -> Ray | None:
    if isinstance(name, Ray):
        return name
    return Ray.read(name) if isinstance(name, str) and name.split(":")[0] == "ray" else None


def _read(name: object) -> tuple[MakeEngine, int, bool]:
    """The engine of one worker, the number of workers, and whether they are processes."""
    expect(name, str, "engine")
    kind, *options = str(name).split(":")
    if kind not in _ENGINES:
        raise unknown("engine", kind, [*_ENGINES, "auto", "ray"])
    if not options:
        return _ENGINES[kind], 1, False
    workers, *where = options
    if kind == "reference" or not workers.isdecimal() or where not in ([], ["processes"]):
        raise FedShuffleError(
            f"engine {name!r} cannot be read: write 'sequential', 'sequential:2' for two threads,"
            " or 'sequential:2:processes' (or vectorized); 'reference' works alone."
        )
    number, cores = count(int(workers), "the number of workers"), available_cores()
    if number > (most := max(_MAX_WORKERS, 4 * cores)):
        raise FedShuffleError(
            f"engine {name!r} asks for {number} workers, and this machine has {cores} cores."
            f" Ask for about as many workers as cores, at most {most}."
        )
    return _ENGINES[kind], number, bool(where)
