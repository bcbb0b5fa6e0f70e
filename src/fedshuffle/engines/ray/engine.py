"""Workers on the machines of a Ray cluster, each with one engine, the model and the data.

A worker gets one share of the clients per request and answers with one running sum. The answer
depends on the share alone, so the share of a lost worker is simply given to another. Ray itself
starts lost workers again, on another machine if need be.
"""

import contextlib
import logging
import math
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedshuffle._arrays import count, expect, number
from fedshuffle.engines import serialization
from fedshuffle.engines.base import OneWorker
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.ray import cluster
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.engines.vectorized import VectorizedEngine
from fedshuffle.engines.workers import Workers, lost_worker
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.fingerprint import versions
from fedshuffle.kernel import Answer

MAX_WORKERS = 10_000
TIMEOUT = 120.0  # seconds to wait for a worker when there is none
MAX_LOSSES = 3  # of workers over one share, before giving up
MAX_RESTARTS = 100  # of a worker, so that one that cannot start does not try for ever
INLINE_BYTES = 100_000  # tensors with fewer bytes in all travel with the request itself

KINDS: dict[str, type[OneWorker]] = {e.name: e for e in (SequentialEngine, VectorizedEngine)}

_LOG = logging.getLogger("fedshuffle")


@dataclass(frozen=True)
class Ray:
    """Workers on a Ray cluster, as an engine: ``train(..., engine=Ray(workers=4))``.

    As text, without the address, which does not change the result:

        >>> str(Ray(4)), str(Ray(4, "vectorized")), str(Ray(4, gpus=0.5))
        ('ray:4', 'ray:4:vectorized', 'ray:4:sequential:gpus=0.5')
        >>> Ray.read("ray:4:vectorized:cpus=2") == Ray(4, "vectorized", cpus=2)
        True

    Args:
        workers: how many; None for as many as the cluster has room for. The number changes only
            the rounding, and a cluster with less room gives the same result with fewer.
        kind: the engine of each worker, ``"sequential"`` or ``"vectorized"``.
        gpus: GPUs per worker, perhaps a fraction; with any, it computes on the GPU.
        cpus: CPUs per worker; torch gets as many threads.
        address: HOST:PORT of the cluster's head; if None, ``RAY_ADDRESS``, or else a local
            cluster is started.
    """

    workers: int | None = None
    kind: str = "sequential"
    gpus: float = 0.0
    cpus: float = 1.0
    address: str | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and count(self.workers, "the number of workers") > MAX_WORKERS:
            raise FedShuffleError(f"workers is {self.workers}, but Ray gets at most {MAX_WORKERS}.")
        check_known("engine of a worker", self.kind, KINDS)
        if self.address is not None:
            expect(self.address, str, "address")
        for what, least in (("gpus", 0.0), ("cpus", math.ulp(0.0))):
            value = number(getattr(self, what), what)
            if not least <= value < math.inf or (value > 1 and value != int(value)):
                raise FedShuffleError(
                    f"{what} is {value:g}, but a worker has a fraction of one, or whole ones."
                )

    @classmethod
    def read(cls, text: str) -> "Ray":
        """What a text says: ``ray``, then perhaps a number, a kind, and ``gpus=`` or ``cpus=``."""
        words, found = text.split(":")[1:], dict[str, Any]()
        if words and words[0].isdecimal():
            found["workers"] = int(words.pop(0))
        if words and words[0] in KINDS:
            found["kind"] = words.pop(0)
        for word in words:
            name, _, value = word.partition("=")
            if name not in ("gpus", "cpus") or name in found:
                raise FedShuffleError(
                    f"engine {text!r} cannot be read: write 'ray', 'ray:4' for four workers,"
                    " 'ray:4:vectorized', or 'ray:4:sequential:gpus=0.5' for half a GPU each."
                )
            found[name] = number(value, f"{name} of the engine {text!r}")
        return cls(**found)

    def __str__(self) -> str:
        options = [f"gpus={self.gpus:g}"] if self.gpus else []
        options += [f"cpus={self.cpus:g}"] if self.cpus != 1 else []
        workers = [] if self.workers is None else [str(self.workers)]
        kind = [self.kind] if self.kind != "sequential" or options else []
        return ":".join(["ray", *workers, *kind, *options])

    @property
    def needs(self) -> dict[str, float]:
        """The resources of one worker."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


class RayEngine(Workers):
    """Divides every request among the workers of a Ray cluster."""

    def __init__(self, problem: Problem, wanted: Ray) -> None:
        KINDS[wanted.kind](problem)  # reports what is wrong with the model here, not in a worker
        dumped, tensors = serialization.dump_problem(problem)
        joined = cluster.join(wanted.address, (wanted.workers or 1) * wanted.cpus)
        self._ray, self._cluster = cluster.library(), cluster.current()
        self._ready: dict[Any, str] = {}
        """Workers that can be given a share, and where they are."""
        self._pending: dict[Any, tuple[Any, int | None]] = {}
        """What is waited for: a worker's share, or (None) a sign that it is ready."""
        self._held: list[Any] = []
        """What stays in the cluster's memory as long as this engine, for workers that restart."""
        leaves = self._cluster if joined else None
        mine = leaves, self._ready, self._pending, self._held
        self._close = weakref.finalize(self, _close, os.getpid(), self._ray, *mine)
        try:
            room = _room(self._ray, wanted)
            self.wanted = replace(wanted, workers=wanted.workers or room)
            super().__init__(str(self.wanted), problem, wanted.workers or room)
            self._held.append(self._put(dumped))
            self._held.append(self._put([serialization.Flat.of(tensor) for tensor in tensors]))
        except BaseException:
            self.close()
            raise
        self._worker = self._ray.remote(_Worker).options(
            num_cpus=wanted.cpus,
            num_gpus=wanted.gpus,
            max_restarts=MAX_RESTARTS,
            scheduling_strategy="SPREAD",
        )

    def close(self) -> None:
        """End the workers, and the cluster if it was started for them."""
        self._close()

    def _put(self, thing: object) -> Any:
        """Put something into the cluster's memory, for all workers."""
        full = self._ray.exceptions.ObjectStoreFullError, self._ray.exceptions.OutOfDiskError
        try:
            return self._ray.put(thing)
        except full as error:
            raise FedShuffleError(
                "the model or the data do not fit into the Ray cluster's memory. Give it more (ray"
                " start --object-store-memory), or save the data (Federation.save) and open them,"
                " so that workers map them from disk."
            ) from error

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Answer]]:
        if not self._close.alive or cluster.current() != self._cluster:
            raise FedShuffleError("the engine's Ray cluster was shut down: make a new engine.")
        if not self._ready and not self._pending:
            paths = [os.path.abspath(path) for path in sys.path]
            for _ in range(self.workers):
                self._expect(self._worker.remote(paths, versions(), self.wanted, *self._held))
        try:
            return self._shared(what, requests)
        except BaseException:
            _kill(self._ray, self._ready, self._pending)  # they may be busy: start new ones
            raise

    def _expect(self, worker: Any) -> None:
        """Let a worker say that it is ready; if it is restarting, as soon as it has restarted."""
        self._ready.pop(worker, None)
        ref = worker.ready.options(max_task_retries=-1).remote()
        self._pending[ref] = worker, None

    def _shared(self, what: str, requests: Sequence[list[Any]]) -> list[list[Answer]]:
        """The answers to all shares, in their order, whoever computes them."""
        shared, packed = serialization.pack(requests)
        inline = sum(flat.bits.nbytes for flat in shared.values()) < INLINE_BYTES
        everywhere = shared if inline else self._put(shared)
        waiting, losses = list(range(len(requests))), [0] * len(requests)
        found: dict[int, list[Answer]] = {}
        failure = ""
        while len(found) < len(requests):
            for worker in self._idle()[: len(waiting)]:
                k = waiting.pop(0)
                self._pending[worker.answer.remote(what, packed[k], everywhere)] = worker, k
            if not self._pending:
                raise FedShuffleError(
                    f"no worker started on the Ray cluster: {failure.rstrip('.')}. Every machine of"
                    " it needs the same fedshuffle, and memory for a worker."
                )
            busy = any(share is not None for _, share in self._pending.values())
            refs, timeout = list(self._pending), None if busy else TIMEOUT
            done, _ = self._ray.wait(refs, num_returns=1, timeout=timeout)
            if not done:
                free = _resources(self._ray.available_resources())
                raise FedShuffleError(
                    f"no worker started on the Ray cluster within {TIMEOUT:g} seconds. Each needs"
                    f" {_resources(self.wanted.needs)}, and {free} are free: make room, such as by"
                    " closing other engines of this program, or ask for less."
                )
            worker, share = self._pending.pop(done[0])
            try:
                ok, result = self._ray.get(done[0])
            except self._ray.exceptions.RayError as error:
                if share is None:  # it cannot even start: Ray has given it up
                    failure = str(error).strip().rpartition("\n")[2].strip()  # after a page
                    _LOG.warning("Ray: a worker cannot start: %s", failure)
                    continue
                losses[share] += 1
                waiting.insert(0, share)
                self._lost(worker, requests[share], losses[share], error)
                continue
            if share is not None:
                if not ok:
                    raise result
                device = self.problem.device
                found[share] = [serialization.load_answer(one, device) for one in result]
            elif ok:
                self._ready[worker] = result
            elif self._ready:
                _LOG.warning("Ray: a worker cannot work: %s", result)
                self._ray.kill(worker)
            else:
                raise result
        return [found[share] for share in range(len(requests))]

    def _idle(self) -> list[Any]:
        busy = {worker for worker, _ in self._pending.values()}
        return [worker for worker in self._ready if worker not in busy]

    def _lost(self, worker: Any, request: Any, losses: int, error: Exception) -> None:
        """Say that a worker was lost over a share, and ask the idle ones if they are there."""
        lost = lost_worker(
            self.problem,
            request,
            f"{losses} workers that trained it were lost one after another (out of memory?). Use"
            " fewer workers per machine, or resume from the last checkpoint.",
        )
        if losses == MAX_LOSSES:
            raise lost from error
        _LOG.warning(
            "Ray: a worker (%s) was lost (%s); clients (%s) of round %d are trained again by"
            " another.",
            self._ready[worker],
            type(error).__name__,
            str(lost.client).removeprefix("one of "),
            lost.round,
        )
        for one in self._idle():
            self._expect(one)


class _Worker:
    """A worker process somewhere in the cluster.

    It never raises, since Ray would wrap that: it answers whether all went well, and what.
    """

    def __init__(
        self,
        paths: list[str],
        needed: dict[str, str],
        wanted: Ray,
        dumped: bytes,
        shared: Sequence[serialization.Flat],
    ) -> None:
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        place = f"process {os.getpid()} on {address}, node {node[:8]}"
        there = [path for path in paths if os.path.exists(path)]
        sys.path[:] = [*there, *(path for path in sys.path if path not in there)]
        self._state: tuple[bool, Any] = True, place
        try:
            for what, version in versions().items():
                if version != needed.get(what):
                    raise FedShuffleError(
                        f"a worker has {what} {version}, and the run {needed.get(what)}. Use the"
                        " same environment on every machine of the cluster."
                    )
            torch.set_num_threads(max(1, int(wanted.cpus)))
            tensors = [flat.tensor() for flat in shared]
            problem = serialization.load_problem(dumped, tensors, _device(wanted.gpus))
            self._engine = KINDS[wanted.kind](problem)
        except Exception as error:
            self._state = False, serialization.sendable(error, place)

    def ready(self) -> tuple[bool, Any]:
        return self._state

    def answer(self, what: str, packed: Any, shared: Any) -> tuple[bool, Any]:
        return serialization.answer(self._engine, what, packed, shared)


def _device(gpus: float) -> torch.device:
    if gpus and not torch.cuda.is_available():
        raise FedShuffleError(
            "a worker was given a GPU, but torch finds no CUDA device there. Install a torch with"
            " CUDA on every machine of the cluster, or leave gpus out."
        )
    return torch.device("cuda" if gpus else "cpu")


def _room(ray: Any, wanted: Ray) -> int:
    """How many workers the cluster has room for."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = wanted.needs
    room = sum(
        min(int(node.get(k, 0) / need + 1e-9) for k, need in needs.items()) for node in nodes
    )
    if not room:
        most = {k: max((node.get(k, 0) for node in nodes), default=0) for k in ("CPU", "GPU")}
        raise FedShuffleError(
            f"a worker needs {_resources(needs)}, but no machine of the Ray cluster has more than"
            f" {_resources(most)}. Ask for less, or add a machine."
        )
    return room


def _resources(found: dict[str, float]) -> str:
    return " and ".join(f"{found[k]:g} {k}s" for k in ("CPU", "GPU") if k in found) or "none"


def _kill(ray: Any, ready: dict[Any, str], pending: dict[Any, Any]) -> None:
    if ray.is_initialized():  # or else it would start a cluster to kill them in
        for worker in {*ready, *(worker for worker, _ in pending.values())}:
            with contextlib.suppress(Exception):
                ray.kill(worker)
    ready.clear()
    pending.clear()


def _close(owner: int, ray: Any, cluster_to_leave: str | None, *mine: Any) -> None:
    if os.getpid() != owner:  # a fork, in which Ray has no threads and would wait for ever
        return
    ready, pending, held = mine
    _kill(ray, ready, pending)
    held.clear()
    with contextlib.suppress(ImportError):  # the program ends, and its cluster with it
        if cluster_to_leave and cluster.current() == cluster_to_leave:
            ray.shutdown()
