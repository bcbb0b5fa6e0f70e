"""Workers on this machine: one engine each, as threads or as processes.

Threads come first: torch releases the interpreter's lock while it computes, and threads share the
model's start and the data for free. Processes serve where Python itself is the cost, as it is for
small models that walk one client at a time.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pickle
import signal
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle.engines.base import first_look
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.sharing import MakeEngine, Whose, Workers
from fedshuffle.errors import FedShuffleError, TrainingError
from fedshuffle.kernel import Probe, Walk


@final
class ThreadsEngine(Workers):
    """Workers as threads of this process, each with one thread for torch."""

    def __init__(self, problem: Problem, make: MakeEngine, workers: int) -> None:
        super().__init__(problem, workers)
        if first_look(problem):
            raise FedShuffleError(
                "the model draws random numbers (dropout?), and threads would draw them from one"
                " stream in any order. Use one worker, or processes: engine='lean' or"
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
    """Workers as processes of their own, forked where the system can, so that data is shared."""

    def __init__(self, problem: Problem, make: MakeEngine, workers: int) -> None:
        super().__init__(problem, workers)
        if problem.device.type != "cpu":
            raise FedShuffleError(
                f"worker processes compute on the CPU, and the model is on {problem.device}."
                " Use engine='lanes' or 'lean' there."
            )
        make(problem)  # what is wrong with the model is said here, not in a worker
        self._make = make
        self._running: list[_Process] = []
        self._stop = weakref.finalize(self, _stop, self._running)

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        if not self._running:
            for _ in range(self.workers):
                self._running.append(_Process(self.problem, self._make, self._running))
        try:
            for worker, request in zip(self._running, requests, strict=True):
                worker.ask(what, request)
            pairs = zip(self._running, requests, strict=True)
            return [worker.answer(request) for worker, request in pairs]
        except BaseException:
            _stop(self._running)  # the others may be in the middle of something: begin anew
            raise


class _Process:
    """One worker process, seen from the parent."""

    def __init__(self, problem: Problem, make: MakeEngine, before: Sequence[_Process]) -> None:
        how = "fork" if sys.platform.startswith("linux") else "spawn"
        context: Any = multiprocessing.get_context(how)
        self.connection, theirs = context.Pipe()
        # A fork has the parent's ends of all pipes, and would never see the parent hang up.
        ours = [self.connection, *(worker.connection for worker in before)]
        self.process = context.Process(
            target=_serve, args=(theirs, ours if how == "fork" else [], problem, make), daemon=True
        )
        try:
            self.process.start()
        except AssertionError as error:
            raise FedShuffleError(f"no worker process can be made here: {error}.") from error
        theirs.close()
        self.problem = problem

    def ask(self, what: str, requests: list[Walk] | list[Probe]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its death is reported when it should answer
            self.connection.send_bytes(_dumps((what, requests)))

    def answer(self, requests: list[Any]) -> list[Tensor]:
        try:
            ok, result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise _death(self.problem, requests, self.process.exitcode) from None
        if ok:
            answers: list[Tensor] = result
            return answers
        raise result


def _serve(
    connection: Connection, others: list[Connection], problem: Problem, make: MakeEngine
) -> None:
    """The life of a worker process: answer until the parent is gone."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _one_thread()
    engine = make(problem)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            what, requests = pickle.loads(connection.recv_bytes())
            try:
                answer: tuple[bool, Any] = True, getattr(engine, what)(requests)
            except Exception as error:
                answer = False, _sendable(error)
            connection.send_bytes(_dumps(answer))


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
        worker.connection.close()
        worker.process.kill()
    for worker in running:
        worker.process.join()
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
