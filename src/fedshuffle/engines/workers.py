"""Workers on this machine: one engine each, as threads or as processes.

Threads come first: torch releases the interpreter's lock while it computes, and threads share the
model's start and the data for free. Processes serve where Python itself is the cost, as it is for
small models that walk one client at a time.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle.engines.base import OneWorker, first_look
from fedshuffle.engines.forkserver import ONE_THREAD, fork_server
from fedshuffle.engines.parcels import Places, Shared, opened, received, sent
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.sharing import MakeEngine, Whose, Workers
from fedshuffle.errors import FedShuffleError, TrainingError


@final
class ThreadsEngine(Workers):
    """Workers as threads of this process, each with one thread for torch."""

    def __init__(self, problem: Problem, make: MakeEngine, workers: int) -> None:
        super().__init__(problem, workers)
        if first_look(problem):
            raise FedShuffleError(
                "the model draws random numbers (dropout?), and threads would draw them from one"
                " stream in any order. Use one worker, or processes: the engine 'lean' or"
                f" 'lean:{workers}:processes'."
            )
        self._engines = [make(problem) for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers, "fedshuffle", _one_thread)

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        tasks = [
            self._threads.submit(getattr(engine, what), request)
            for engine, request in zip(self._engines, requests, strict=True)
        ]
        try:
            return [task.result() for task in tasks]
        except BaseException:  # nobody waits for the others any more, but they must not go on
            for engine in self._engines:
                engine.stop = True
            wait(tasks)
            for engine in self._engines:
                engine.stop = False
            raise


@final
class ProcessesEngine(Workers):
    """Workers as processes of their own, which share the data."""

    def __init__(self, problem: Problem, make: MakeEngine, workers: int) -> None:
        super().__init__(problem, workers)
        if problem.device.type != "cpu":
            raise FedShuffleError(
                f"worker processes compute on the CPU, and the model is on {problem.device}."
                " Use the engine 'lanes' or 'lean' there."
            )
        make(problem)  # what is wrong with the model is said here, not in a worker
        self._make = make
        self._task = sent(problem)
        self._data: Shared | None = None
        self._running: list[_Process] = []
        self._stop = weakref.finalize(self, _stop, self._running)

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        try:
            if not self._running:
                self._start(requests)
            for worker, request in zip(self._running, requests, strict=True):
                worker.ask(what, request)
            pairs = zip(self._running, requests, strict=True)
            return [worker.answer(request) for worker, request in pairs]
        except BaseException:
            _stop(self._running)  # the others may be in the middle of something: begin anew
            raise

    def _start(self, requests: Sequence[list[Any]]) -> None:
        if self._data is None and self.problem.federation.path is None:
            self._data = Shared(self.problem.fields)
        surroundings = {**os.environ, **ONE_THREAD}, os.getcwd(), sys.path
        for _ in requests:
            self._running.append(worker := _Process(self.problem))
            places = self._data.places if self._data else None
            worker.ask("prepare", (surroundings, self._make, self._task, places))
            if self._data:
                worker.give(self._data.file.fileno())
        for worker, request in zip(self._running, requests, strict=True):
            worker.answer(request)


class _Process:
    """One worker process, seen from the parent."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._server = fork_server()
        self.pid, self._connection = self._server.fork()

    def ask(self, what: str, given: Any) -> None:
        with contextlib.suppress(ConnectionError):  # its death is reported when it should answer
            self._connection.send_bytes(_dumps((what, given)))

    def give(self, handle: int) -> None:
        """Let it use an open file, too."""
        with contextlib.suppress(ConnectionError):
            send_handle(self._connection, handle, None)

    def answer(self, requests: list[Any]) -> Any:
        try:
            ok, result = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise _death(self.problem, requests, self._server.end(self.pid)) from None
        if ok:
            return result
        raise result

    def end(self) -> None:
        self._connection.close()
        self._server.end(self.pid)


def serve(connection: Connection) -> None:
    """The life of a worker process: answer until the parent is gone."""
    engine: Any = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            what, given = pickle.loads(connection.recv_bytes())
            try:
                if what == "prepare":
                    engine, result = _prepared(connection, *given), None
                else:
                    result = getattr(engine, what)(given)
                answer: tuple[bool, Any] = True, result
            except Exception as error:
                answer = False, _sendable(error)
            connection.send_bytes(_dumps(answer))


def _prepared(
    connection: Connection,
    surroundings: tuple[dict[str, str], str, list[str]],
    make: MakeEngine,
    task: bytes,
    places: Places | None,
) -> OneWorker:
    """The engine for a problem, in surroundings like those of the parent."""
    fields = [] if places is None else opened(recv_handle(connection), places)
    environment, folder, sys.path[:] = surroundings
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # it may have been deleted
        os.chdir(folder)
    _one_thread()
    return make(received(task, fields))


class _Pickler(pickle.Pickler):
    """Tensors travel as plain arrays, which is quicker than torch's own way."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            bits = thing.detach().contiguous().view(torch.uint8)  # numpy does not know all dtypes
            return _tensor, (bits.numpy(), thing.dtype)
        return NotImplemented


def _tensor(bits: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits).view(dtype)


def _dumps(thing: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(thing)
    return buffer.getvalue()


def _sendable(error: Exception) -> FedShuffleError:
    if isinstance(error, FedShuffleError):
        return error
    return FedShuffleError(f"{type(error).__name__} in a worker process: {error}")


def _stop(running: list[_Process]) -> None:
    for worker in running:
        worker.end()
    running.clear()


def _death(problem: Problem, requests: list[Any], code: int | None) -> TrainingError:
    whose = Whose.of(problem, requests)
    how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
    return TrainingError(
        f"the worker process that trained it {how} (out of memory?). Use fewer workers, or go on"
        " from the last checkpoint.",
        client=whose.clients,
        round=whose.round,
        stage=whose.stage,
    )


def _one_thread() -> None:
    """Workers must not compete with each other for cores."""
    torch.set_num_threads(1)
