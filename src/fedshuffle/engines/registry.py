"""Engines by name, or the fastest: each is tried on a piece of the work and timed."""

import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from fedshuffle._arrays import count, expect
from fedshuffle.engines.base import Engine, OneWorker
from fedshuffle.engines.cpu_tuning import available_cores
from fedshuffle.engines.gradients import SlowerWarning, tolerance
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.ray.engine import KINDS, Ray, RayEngine
from fedshuffle.engines.reference import ReferenceEngine
from fedshuffle.engines.workers import ProcessesEngine, ThreadsEngine
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.kernel import ClientTask, LocalTraining
from fedshuffle.transforms import NO_TRANSFORMS

_ENGINES: dict[str, type[OneWorker]] = {ReferenceEngine.name: ReferenceEngine, **KINDS}
_MAX_WORKERS = 256  # on any machine, such as to resume the run of a larger one
_SECONDS = 0.2  # about the duration of one trial
_GAIN = 1.1  # a more elaborate engine is chosen only if it is faster by this factor


def check(name: str | Ray) -> None:
    """Refuse a name that cannot be read; ``auto`` is left to :func:`fedshuffle.engines.choose`.

    >>> check("vectorized:4")
    """
    if name != "auto":
        _read(name)


def make(name: str | Ray, problem: Problem) -> Engine:
    """The engine of that name for a problem.

    Names are ``KIND``, ``KIND:WORKERS`` or ``KIND:WORKERS:processes``, where the kind is
    ``sequential`` or ``vectorized``; ``ray:WORKERS:KIND``; or ``reference``. Workers are threads
    unless they are said to be processes or on Ray.

    >>> import torch
    >>> from fedshuffle import Federation, losses
    >>> clients = Federation.from_arrays(torch.ones(3, 2), torch.ones(3, 1), sizes=[1, 2])
    >>> problem = Problem(torch.nn.Linear(2, 1), losses.squared_error, clients)
    >>> make("sequential", problem).name
    'sequential'
    """
    wanted = _read(name)
    problem.check_labels()
    if isinstance(wanted, Ray):
        return RayEngine(problem, wanted)
    one, workers, processes = wanted
    if processes:
        return ProcessesEngine(problem, one, workers)
    return one(problem) if workers == 1 else ThreadsEngine(problem, one, workers)


def at_address(name: str, address: str | None) -> str | Ray:
    """The engine of that name, on the Ray cluster at an address if there is one.

    >>> at_address("sequential", None)
    'sequential'
    >>> at_address("ray:4", "auto").workers
    4
    """
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


class Choice(NamedTuple):
    """The engine chosen, and why."""

    engine: Engine
    why: str


def choose(problem: Problem, request: LocalTraining) -> Choice:
    """The fastest engine that agrees with the reference, tried on a piece of this request.

    On a GPU that is ``vectorized`` if it can train the model, for there width is all that counts.
    """
    trials = _Trials(problem, request)
    if problem.device.type != "cpu":
        if trials.speed("vectorized"):
            return Choice(make("vectorized", problem), f"many clients at once on {problem.device}")
        best = trials.best("sequential")
    else:
        kind = best = trials.best("sequential", "vectorized")
        cores = available_cores()
        if kind is not None and cores > 1 and len(request.tasks) > 1:
            best = trials.best(kind, f"{kind}:{cores}") or kind
            if trials.speed(best) < 0.75 * cores * trials.speed(kind) and kind != "vectorized":
                best = trials.best(best, f"{kind}:{cores}:processes")
    # Whatever is wrong with a model that no engine can train, the reference reports best.
    return Choice(make(best or "reference", problem), trials.report())


class _Trials:
    """Engines tried on the same piece of work."""

    def __init__(self, problem: Problem, request: LocalTraining) -> None:
        self._problem, self._request = problem, request
        self._piece: LocalTraining | None = None
        self._speeds: dict[str, float] = {}
        self._failures: dict[str, str] = {}

    def best(self, *names: str) -> str | None:
        """The fastest of these; an earlier one unless a later one is clearly faster."""
        found = None
        for name in names:
            if self.speed(name) > (_GAIN * self.speed(found) if found else 0):
                found = name
        return found

    def speed(self, name: str) -> float:
        """Local steps per second; zero for an engine that fails or disagrees."""
        if name not in self._speeds:
            self._speeds[name] = 0.0
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # such as vmap's about a slow fallback
                    warnings.simplefilter("always", SlowerWarning)
                    with closing(make(name, self._problem)) as engine:
                        self._speeds[name] = self._measured(engine)
            except Exception as error:
                self._failures[name] = str(error).split("\n")[0]
        return self._speeds[name]

    def _measured(self, engine: Engine) -> float:
        tiny = _shortened(self._request, 4, self._request.tasks[:2])
        # Adaptive steps would enlarge what rounding changes in a gradient of almost zero.
        tiny = replace(tiny, tasks=[replace(task, optimiser=None) for task in tiny.tasks])
        wanted = ReferenceEngine(self._problem).local_training([tiny])[0].sums
        found = engine.local_training([tiny])[0].sums
        if not (found - wanted).norm() <= tolerance(self._problem.dtype) * wanted.norm() + 1e-12:
            raise ArithmeticError("it does not agree with the reference engine")
        if self._piece is None:  # the first engine decides how much the others are given
            steps = int(_SECONDS * _steps(tiny.tasks) / _seconds(engine, tiny))
            steps = max(2 * available_cores(), steps)
            self._piece = _shortened(self._request, steps, self._request.tasks)
        engine.local_training([self._piece])
        return _steps(self._piece.tasks) / min(_seconds(engine, self._piece) for _ in range(2))

    def report(self) -> str:
        """The speed or the failure of each engine that was tried."""
        speeds = [f"{name} {speed:,.0f} steps/s" for name, speed in self._speeds.items() if speed]
        failures = [f"{name} not ({failure})" for name, failure in self._failures.items()]
        return ", ".join(speeds + failures)


def _steps(tasks: Sequence[ClientTask]) -> int:
    return sum(task.minibatches.steps for task in tasks)


def _seconds(engine: Engine, request: LocalTraining) -> float:
    begun = time.perf_counter()
    engine.local_training([request])
    return time.perf_counter() - begun


def _shortened(request: LocalTraining, steps: int, tasks: Sequence[ClientTask]) -> LocalTraining:
    """A request with about this many steps: first fewer steps per task, then fewer tasks."""
    share = min(1.0, max(steps / max(1, _steps(tasks)), 0.2))
    kept: list[ClientTask] = []
    for task in tasks:
        few = max(1, round(share * task.minibatches.steps))
        kept.append(replace(task, minibatches=replace(task.minibatches, steps=few)))
        steps -= few
        if steps <= 0:
            break
    return replace(request, tasks=kept, chain=NO_TRANSFORMS, states=None, state_weights=None)
