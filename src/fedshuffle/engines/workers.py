"""Workers: one engine each, the longest clients first, one running sum each.

Threads come first: torch releases the interpreter's lock while it computes, and threads share the
model's start and the data for free. Processes serve where Python itself is the cost, as it is for
small models that walk one client at a time.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import io
import multiprocessing
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines.base import OneWorker, first_look
from fedshuffle.engines.problem import Problem
from fedshuffle.errors import FedShuffleError, TrainingError
from fedshuffle.kernel import Probe, Walk

MakeEngine = Callable[[Problem], OneWorker]


class _Workers(abc.ABC):
    """Splits every request among the workers and adds what they answer, in the workers' order."""

    def __init__(self, problem: Problem, workers: int) -> None:
        self.problem = problem
        self.workers = workers

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        return self._together("walk", [_split_walk(walk, self.workers) for walk in walks])

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        sizes = self.problem.federation.sizes
        return self._together(
            "probe",
            [_split_probe(probe, sizes[probe.clients].tolist(), self.workers) for probe in probes],
        )

    def _together(self, what: str, shares: Sequence[Sequence[_Share]]) -> list[Tensor]:
        by_worker = [[share.request for share in mine] for mine in zip(*shares, strict=True)]
        answers = zip(*self._answers(what, by_worker), strict=True)
        return [_added(*both) for both in zip(shares, answers, strict=True)]

    @abc.abstractmethod
    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        """What each worker answers to its requests."""


@final
class ThreadsEngine(_Workers):
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
class ProcessesEngine(_Workers):
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
    clients, round, stage = [], 0, "local training"
    for request in requests:
        if isinstance(request, Walk):
            clients += [order.minibatches.client for order in request.orders]
            round = request.orders[0].minibatches.round if request.orders else round
        else:
            clients += request.clients.tolist()
            round, stage = request.round, "probe"
    names = [str(problem.federation.ids[client]) for client in dict.fromkeys(clients)]
    how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
    return TrainingError(
        f"the worker process that trained it {how} (out of memory?). Use fewer workers, or go on"
        " from the last checkpoint.",
        client=names[0]
        if len(names) == 1
        else f"one of {', '.join(names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
        round=round,
        stage=stage,
    )


class _Share(NamedTuple):
    """A worker's part of a request, with only those of the sums in which it counts."""

    request: Walk | Probe
    sums: Tensor
    of: int
    """How many sums there are in all."""


def _split_walk(walk: Walk, workers: int) -> list[_Share]:
    # A step costs something even if its minibatch is small: about as much as eight examples.
    loads = [order.minibatches.examples + 8 * order.minibatches.steps for order in walk.orders]
    weights = np.array([order.weights for order in walk.orders]).reshape(-1, walk.sums)
    found = []
    for share in longest_first(loads, workers):
        sums = _used(weights[share])
        orders = [walk.orders[k] for k in share]
        if len(sums) < walk.sums:
            few = weights[share][:, sums].tolist()
            pairs = zip(orders, few, strict=True)
            orders = [dataclasses.replace(order, weights=some) for order, some in pairs]
        request = dataclasses.replace(walk, orders=orders, sums=len(sums))
        found.append(_Share(request, torch.from_numpy(sums), walk.sums))
    return found


def _split_probe(probe: Probe, loads: list[int], workers: int) -> list[_Share]:
    found = []
    for share in longest_first(loads, workers):
        clients, weights = probe.clients[share], probe.weights[share]
        sums = _used(weights)
        request = dataclasses.replace(probe, clients=clients, weights=weights[:, sums])
        found.append(_Share(request, torch.from_numpy(sums), probe.weights.shape[1]))
    return found


def _used(weights: FloatArray) -> IntArray:
    """The sums in which one of these clients counts; at least one, since an answer needs a row."""
    used = np.flatnonzero(weights.any(axis=0))
    return used if len(used) else np.zeros(1, np.int64)


def _added(shares: Sequence[_Share], answers: Sequence[Tensor]) -> Tensor:
    """The sums of all workers, in the workers' order."""
    first = shares[0]
    if len(first.sums) == first.of:
        total, begin = answers[0], 1
    else:
        total, begin = answers[0].new_zeros(first.of, *answers[0].shape[1:]), 0
    for share, answer in zip(shares[begin:], answers[begin:], strict=True):
        if len(share.sums) == share.of:
            total += answer
        else:
            total.index_add_(0, share.sums.to(total.device), answer)
    return total


def longest_first(loads: Sequence[int], workers: int) -> list[list[int]]:
    """Each task, from the longest on, to the worker with the least to do: always the same way.

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


def _one_thread() -> None:
    """Workers must not compete with each other for cores."""
    torch.set_num_threads(1)
