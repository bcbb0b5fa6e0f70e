"""Workers on this machine: one engine each, as threads or as processes.

The longest clients come first, and every worker has one running sum. Which worker trains which
client, and in which order the sums are added, depend on the request and the number of workers
alone. So threads, processes and the machines of a cluster give the same bits.
"""

import abc
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any

import numpy as np
import torch

from fedshuffle.engines import serialization
from fedshuffle.engines.base import Engine, OneWorker, check_model, named_clients
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError, TrainingError
from fedshuffle.kernel import Answer, FullGradient, LocalTraining, Request, joined_metrics

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_SERVER = {**_ONE_THREAD, "PYTHONSAFEPATH": "1"}  # and no modules from the current folder
_lock = threading.Lock()


class Workers(Engine, abc.ABC):
    """Splits every request among the workers and adds their answers in the workers' order."""

    def __init__(self, name: str, problem: Problem, workers: int) -> None:
        self.name, self.problem, self.workers = name, problem, workers

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Answer]:
        return self._divided("local_training", requests)

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Answer]:
        return self._divided("full_gradients", requests)

    def _divided(self, what: str, requests: Sequence[Request]) -> list[Answer]:
        shares = [longest_first(self._loads(request), self.workers) for request in requests]
        by_worker = [
            [_part(request, mine[worker]) for request, mine in zip(requests, shares, strict=True)]
            for worker in range(self.workers)
        ]
        answers = self._answers(what, by_worker)
        return [_together([answer[k] for answer in answers], mine) for k, mine in enumerate(shares)]

    def _loads(self, request: Request) -> list[int]:
        """How much work each client of a request is."""
        if isinstance(request, FullGradient):
            return [int(size) for size in self.problem.federation.sizes[request.clients]]
        streams = [task.minibatches for task in request.tasks]
        # A step itself costs about as much as eight examples.
        return [stream.examples + 8 * stream.steps for stream in streams]

    @abc.abstractmethod
    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Answer]]:
        """Each worker's answers to its requests, by the engine's method ``what``."""


def _part(request: Request, chosen: list[int]) -> Request:
    """The part of a request for some of its clients."""
    states = None if request.states is None else request.states[chosen]
    if isinstance(request, FullGradient):
        clients, weights = request.clients[chosen], request.weights[chosen]
        return replace(request, clients=clients, weights=weights, states=states)
    tasks = [request.tasks[k] for k in chosen]
    own = None if request.state_weights is None else request.state_weights[chosen]
    return replace(request, tasks=tasks, states=states, state_weights=own)


def _together(answers: Sequence[Answer], shares: Sequence[list[int]]) -> Answer:
    """The answers to all parts of a request as one: sums are added in the workers' order."""
    order = np.argsort([k for share in shares for k in share])
    states = [answer.states for answer in answers if answer.states is not None]
    changes = [answer.state_change for answer in answers if answer.state_change is not None]
    metrics = joined_metrics([answer.metrics for answer in answers], list(map(len, shares)))
    return Answer(
        functools.reduce(torch.add, [answer.sums for answer in answers]),
        torch.cat(states)[torch.from_numpy(order)] if states else None,
        functools.reduce(torch.add, changes) if changes else None,
        {name: values[order] for name, values in metrics.items()},
    )


def longest_first(loads: Sequence[int], workers: int) -> list[list[int]]:
    """Assign each task, from the longest on, to the worker with the least to do.

    >>> longest_first([1, 5, 2, 2], workers=2)
    [[1], [2, 3, 0]]
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    totals = [0] * workers
    for task in sorted(range(len(loads)), key=lambda task: -loads[task]):
        worker = totals.index(min(totals))
        shares[worker].append(task)
        totals[worker] += loads[task]
    return shares


def lost_worker(problem: Problem, requests: Sequence[Request], message: str) -> TrainingError:
    """The error for a worker that died, with the clients, the round and the stage of its work."""
    streams = [t.minibatches for r in requests if isinstance(r, LocalTraining) for t in r.tasks]
    full = [request for request in requests if isinstance(request, FullGradient)]
    rounds = [stream.round for stream in streams] + [request.round for request in full]
    clients = [stream.client for stream in streams]
    clients += [client for request in full for client in request.clients.tolist()]
    ids = [str(problem.federation.ids[client]) for client in dict.fromkeys(clients)]
    round, stage = rounds[-1] if rounds else 0, "full gradient" if full else "local training"
    return TrainingError(message, client=named_clients(ids), round=round, stage=stage)


class ThreadsEngine(Workers):
    """Workers as threads of this process, each with one thread of torch."""

    def __init__(self, problem: Problem, make: type[OneWorker], workers: int) -> None:
        super().__init__(f"{make.name}:{workers}", problem, workers)
        if check_model(problem):
            raise FedShuffleError(
                "the model draws random numbers (dropout?), and threads would draw them from one"
                " stream in any order. Use one worker, or processes: the engine 'sequential' or"
                f" 'sequential:{workers}:processes'."
            )
        self._engines = [make(problem) for _ in range(workers)]
        self._threads = ThreadPoolExecutor(workers, "fedshuffle", lambda: torch.set_num_threads(1))

    def close(self) -> None:
        self._threads.shutdown()

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Answer]]:
        pairs = zip(self._engines, requests, strict=True)
        futures = [self._threads.submit(getattr(one, what), request) for one, request in pairs]
        try:
            return [future.result() for future in futures]
        except BaseException:  # stop the others
            for engine in self._engines:
                engine.stop = True
            wait(futures)
            for engine in self._engines:
                engine.stop = False
            raise


class ProcessesEngine(Workers):
    """Workers as separate processes, which share the data and the model's frozen parameters."""

    def __init__(self, problem: Problem, make: type[OneWorker], workers: int) -> None:
        super().__init__(f"{make.name}:{workers}:processes", problem, workers)
        if problem.device.type != "cpu":
            raise FedShuffleError(
                f"worker processes compute on the CPU, and the model is on {problem.device}."
                " Use the engine 'vectorized' or 'sequential' there."
            )
        make(problem)  # reports what is wrong with the model here, not in a worker
        self._make = make
        self._dumped, self._tensors = serialization.dump_problem(problem)
        self._data: IO[bytes] | None = None
        self._running: list[WorkerProcess] = []
        weakref.finalize(self, _end, self._running, os.getpid())

    def close(self) -> None:
        _end(self._running, os.getpid())

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Answer]]:
        try:
            if not self._running:
                self._start()
                self._receive(requests)
            shared, packed = serialization.pack(requests)
            for worker, mine in zip(self._running, packed, strict=True):
                worker.send((what, mine, shared))
            found = self._receive(requests)
        except BaseException:
            self.close()  # the others may be busy: start new ones
            raise
        return [[serialization.load_answer(one) for one in answers] for answers in found]

    def _start(self) -> None:
        if self._data is None and self._tensors:
            self._data = serialization.share_memory(self._tensors)
            weakref.finalize(self, self._data.close)
        for _ in range(self.workers):
            worker = WorkerProcess(_serve, self._make, self._dumped, self._data is not None)
            self._running.append(worker)
            if self._data:
                with contextlib.suppress(ConnectionError):
                    send_handle(worker.connection, self._data.fileno(), None)

    def _receive(self, requests: Sequence[list[Any]]) -> list[Any]:
        """What each worker answers; the requests name the clients of one that has died."""
        found = []
        for worker, request in zip(self._running, requests, strict=True):
            try:
                ok, result = worker.receive()
            except (EOFError, ConnectionError):
                code = worker.end(patience=1.0)
                how = f"killed by signal {-code}" if code and code < 0 else f"ended ({code})"
                raise lost_worker(
                    self.problem,
                    request,
                    f"the worker process that trained it was {how} (out of memory?). Use fewer"
                    " workers, or resume from the last checkpoint.",
                ) from None
            if not ok:
                raise result
            found.append(result)
        return found


def _end(running: "list[WorkerProcess]", owner: int) -> None:
    while running and os.getpid() == owner:  # a fork of the program leaves them alone
        running.pop().end()


def _serve(connection: Connection, make: type[OneWorker], dumped: bytes, shared: bool) -> None:
    """Run a worker process: build the engine, then answer until the parent is gone."""
    reply: tuple[bool, Any] = True, None
    try:
        tensors = serialization.from_shared_memory(recv_handle(connection)) if shared else []
        torch.set_num_threads(1)
        engine = make(serialization.load_problem(dumped, tensors))
    except Exception as error:
        reply = False, serialization.sendable(error)
    while True:
        connection.send_bytes(pickle.dumps(reply, protocol=5))
        reply = serialization.answer(engine, *pickle.loads(connection.recv_bytes()))


class WorkerProcess:
    """A process that runs ``work(connection, *args)``, and dies with this program.

    It is a fork of :mod:`multiprocessing`'s fork server, a clean process with a single thread. A
    fork of the program itself might wait for ever for a lock of a thread that it does not have.
    """

    def __init__(self, work: Callable[..., None], *args: Any, daemon: bool = True) -> None:
        try:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["fedshuffle.engines"])
            self.connection, theirs = context.Pipe()
            mine = work, theirs, os.environ | _ONE_THREAD, args
            self.process = context.Process(target=_run, args=mine, daemon=daemon)
            with theirs, _clean_start():
                self.process.start()
        except (EOFError, OSError, ValueError) as error:
            raise FedShuffleError(
                f"no worker process can be started ({type(error).__name__}: {error}). They need"
                " Linux or macOS. Use threads: the engine 'sequential:2'."
            ) from error

    def send(self, message: object) -> None:
        """Send a message. If the worker is dead, that shows when it should answer."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """The next message; EOFError or ConnectionError if the worker is dead."""
        return pickle.loads(self.connection.recv_bytes())

    def end(self, patience: float = 0.0) -> int | None:
        """Kill the worker unless it ends within some seconds; its exit code."""
        self.process.join(patience)
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


@contextlib.contextmanager
def _clean_start() -> Iterator[None]:
    """Let workers start no threads of libraries, and leave Ctrl-C to the program.

    multiprocessing would import the user's script in every worker if ``__main__`` had a name or a
    file. Nothing needs it there, since models and losses travel by cloudpickle.
    """
    main = vars(sys.modules["__main__"])
    with _lock:
        hidden = {name: main.pop(name) for name in {"__spec__", "__file__"} & main.keys()}
        before = {name: os.environ.get(name) for name in _SERVER}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        main["__spec__"] = None
        os.environ.update(_SERVER)
        try:
            yield
        finally:
            main.update(hidden)
            os.environ.update({name: value for name, value in before.items() if value is not None})
            for name in (name for name, value in before.items() if value is None):
                del os.environ[name]
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run(
    work: Callable[..., None], connection: Connection, variables: dict[str, str], args: Any
) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        work(connection, *args)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
