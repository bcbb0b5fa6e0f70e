"""Engines by name."""

from __future__ import annotations

from dataclasses import replace

from fedshuffle._arrays import count, expect
from fedshuffle.engines.base import Engine, OneWorker
from fedshuffle.engines.cpu_tuning import available_cores
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.ray.engine import KINDS, Ray, RayEngine
from fedshuffle.engines.reference import ReferenceEngine
from fedshuffle.engines.workers import ProcessesEngine, ThreadsEngine
from fedshuffle.errors import FedShuffleError, unknown

_ENGINES: dict[str, type[OneWorker]] = {ReferenceEngine.name: ReferenceEngine, **KINDS}
_MAX_WORKERS = 256  # on any machine, such as to resume the run of a larger one


def check(name: str | Ray) -> None:
    """Refuse a name that cannot be read; ``auto`` is left to :func:`fedshuffle.engines.choose`."""
    if name != "auto":
        _read(name)


def make(name: str | Ray, problem: Problem) -> Engine:
    """The engine of that name for a problem: ``KIND``, ``KIND:WORKERS`` or
    ``KIND:WORKERS:processes``, where the kind is ``sequential`` or ``vectorized``;
    ``ray:WORKERS:KIND``; or ``reference``. Workers are threads unless they are said to be processes
    or on Ray.
    """
    wanted = _read(name)
    if isinstance(wanted, Ray):
        return RayEngine(problem, wanted)
    one, workers, processes = wanted
    if processes:
        return ProcessesEngine(problem, one, workers)
    return one(problem) if workers == 1 else ThreadsEngine(problem, one, workers)


def at_address(name: str, address: str | None) -> str | Ray:
    """The engine of that name, on the Ray cluster at an address if there is one."""
    if address is None:
        return name
    if name == "auto" or not isinstance(wanted := _read(name), Ray):
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
    wanted = _read(name)
    if isinstance(wanted, Ray) and wanted.workers is None and recorded.startswith("ray"):
        return replace(wanted, workers=Ray.read(recorded).workers)
    return name


def _read(name: str | Ray) -> Ray | tuple[type[OneWorker], int, bool]:
    """The engine of one worker, the number of workers, and whether they are processes."""
    if isinstance(name, Ray):
        return name
    expect(name, str, "engine")
    kind, *options = name.split(":")
    if kind == "ray":
        return Ray.read(name)
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
