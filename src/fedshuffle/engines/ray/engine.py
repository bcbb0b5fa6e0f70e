"""Workers on the machines of a Ray cluster, each with one engine, the model and the data.

A worker gets one share of the clients per request and answers with one running sum. The answer
depends on the share alone, so the share of a lost worker is simply given to another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshuffle.engines import serialization
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.ray import cluster
from fedshuffle.engines.ray.options import KINDS, Ray
from fedshuffle.engines.workers import RequestContext, Workers
from fedshuffle.errors import FedShuffleError
from fedshuffle.fingerprint import versions

TIMEOUT = 120.0
"""Seconds to wait for a worker when there is none."""

MAX_ATTEMPTS = 3
"""Workers lost over one share, or that fail to start in one place, before giving up."""

INLINE_BYTES = 100_000
"""Tensors with fewer bytes in all travel with the request itself."""

_LOG = logging.getLogger("fedshuffle")
_of_parent: list[Any] = []
"""What belongs to the process that this one was forked from; deleting it would wait for ever."""


class _Place(NamedTuple):
    """Where a worker is."""

    node: str
    address: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}, node {self.node[:8]}"


@dataclass(eq=False)
class _Member:
    """A worker, seen from the driver."""

    number: int
    actor: Any
    attempt: int
    """How many workers were lost or failed to start before it."""
    place: _Place | None = None
    """Where it is, once it was heard of."""


class RayEngine(Workers):
    """Divides every request among the workers of a Ray cluster."""

    def __init__(self, problem: Problem, wanted: Ray) -> None:
        KINDS[wanted.kind](problem)  # reports what is wrong with the model here, not in a worker
        dumped = serialization.dump_problem(problem)
        joined = cluster.join(wanted.address, (wanted.workers or 1) * wanted.cpus)
        self._ray = cluster.library()
        self._cluster = cluster.current()
        self._members: dict[int, _Member] = {}
        self._pending: dict[Any, tuple[_Member, int | None]] = {}
        """What is waited for: a member's share, or (None) a sign of life."""
        self._held: list[Any] = []
        mine = os.getpid(), self._ray, joined, self._members, self._pending, self._held
        self._close = weakref.finalize(self, _close, *mine)
        try:
            self._worker = self._ray.remote(_Worker)
            room = _room(self._ray, wanted)
            self.wanted = replace(wanted, workers=wanted.workers or room)
            super().__init__(str(self.wanted), problem, wanted.workers or room)
            # They stay in the cluster's memory as long as this engine, for workers that join later.
            self._held.append(self._put(dumped))
            if problem.federation.path is None:
                fields = [serialization.Flat.of(field) for field in problem.fields]
                self._held.append(self._put(fields))
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> list[str]:
        """Where the workers that are ready are."""
        return [str(member.place) for member in self._members.values() if member.place]

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

    def _answers(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        if not self._close.alive or cluster.current() != self._cluster:
            raise FedShuffleError("the engine's Ray cluster was shut down: make a new engine.")
        if not self._members:
            for place in range(self.workers):
                self._start_worker(place)
        try:
            return self._shared(what, requests)
        except BaseException:
            _kill(self._ray, self._members, self._pending)  # they may be busy: start new ones
            raise

    def _shared(self, what: str, requests: Sequence[list[Any]]) -> list[list[Tensor]]:
        """The answers to all shares, in their order, whoever computes them."""
        shared, packed = serialization.pack(requests)
        inline = sum(flat.bits.nbytes for flat in shared.values()) < INLINE_BYTES
        everywhere = shared if inline else self._put(shared)
        waiting, losses = list(range(len(requests))), [0] * len(requests)
        found: dict[int, list[Tensor]] = {}
        failure = ""
        deadline = time.monotonic() + TIMEOUT
        while len(found) < len(requests):
            idle = self._idle()
            for k in waiting[: len(idle)]:
                member = idle.pop(k if k in idle else min(idle))  # its own worker, or else any
                ref = member.actor.answer.remote(what, packed[k], everywhere)
                self._pending[ref] = member, k
                waiting.remove(k)
            busy = any(share is not None for _, share in self._pending.values())
            left = None if busy else max(0.0, deadline - time.monotonic())
            refs = list(self._pending)
            done, _ = self._ray.wait(refs, num_returns=1, timeout=left) if refs else ([], [])
            if not done:
                raise self._no_worker(failure)
            member, share = self._pending.pop(done[0])
            try:
                ok, result = self._ray.get(done[0])
            except self._ray.exceptions.RayTaskError as error:  # of Ray, not of the worker
                why = f"a worker of Ray cannot be used: {_last_line(error).rstrip('.')}."
                if isinstance(error.cause, ImportError | AttributeError):
                    why += " Install the same fedshuffle on every machine of the cluster."
                ok, result = False, FedShuffleError(why)
            except self._ray.exceptions.RayError as error:
                failure, context = _last_line(error), None
                if share is not None:
                    waiting.insert(0, share)
                    losses[share] += 1
                    context = RequestContext.of(self.problem, requests[share])
                    if losses[share] == MAX_ATTEMPTS:
                        raise context.error(
                            f"{MAX_ATTEMPTS} workers that trained it were lost one after another"
                            " (out of memory?). Use fewer workers per machine, or resume from the"
                            " last checkpoint."
                        ) from error
                self._replace(member, error, context)
                continue
            if share is None:
                self._heard(member, ok, result)
            elif not ok:
                raise result
            else:
                # The cluster's memory is read-only, and the others are added to the first.
                device = self.problem.device
                found[share] = [flat.tensor().to(device, copy=share == 0) for flat in result]
                deadline = time.monotonic() + TIMEOUT
        return [found[share] for share in range(len(requests))]

    def _idle(self) -> dict[int, _Member]:
        pending = {member.number for member, _ in self._pending.values()}
        return {k: member for k, member in self._members.items() if k not in pending}

    def _start_worker(self, place: int, attempt: int = 0) -> None:
        resources = {"num_cpus": self.wanted.cpus, "num_gpus": self.wanted.gpus}
        options = self._worker.options(max_restarts=0, scheduling_strategy="SPREAD", **resources)
        self._members[place] = member = _Member(place, options.remote(), attempt)
        paths = [os.path.abspath(path) for path in sys.path]
        ref = member.actor.prepare.remote(paths, versions(), self.wanted, *self._held)
        self._pending[ref] = member, None

    def _heard(self, member: _Member, ok: bool, result: Any) -> None:
        """A worker is ready, or says why it cannot work."""
        if ok:
            member.place = result
        elif member.attempt and any(other.place for other in self._members.values()):
            _LOG.warning("Ray: a new worker %d cannot work: %s", member.number, result)
            del self._members[member.number]
        else:
            raise result

    def _replace(self, lost: _Member, error: Exception, context: RequestContext | None) -> None:
        """Start another worker. Perhaps the machine is lost: ask its other workers, too."""
        with contextlib.suppress(Exception):
            self._ray.kill(lost.actor)  # it may only have been out of reach
        what = f"({lost.place}) was lost" if lost.place else "did not start"
        again = ""
        if context:
            clients = context.clients.removeprefix("one of ")
            again = f"; clients ({clients}) of round {context.round} are trained again by another"
        _LOG.warning("Ray: worker %d %s (%s)%s.", lost.number, what, type(error).__name__, again)
        del self._members[lost.number]
        for other in self._idle().values():
            if other.place and lost.place and other.place.node == lost.place.node:
                self._pending[other.actor.alive.remote()] = other, None
        if (attempt := 1 if lost.place else lost.attempt + 1) < MAX_ATTEMPTS:
            self._start_worker(lost.number, attempt)

    def _no_worker(self, failure: str) -> FedShuffleError:
        if not self._members:
            return FedShuffleError(
                f"no worker started on the Ray cluster: {failure.rstrip('.')}. Every machine of it"
                " needs the same fedshuffle, and memory for a worker."
            )
        free = self._ray.available_resources()
        return FedShuffleError(
            f"no worker started on the Ray cluster within {TIMEOUT:g} seconds. Each needs"
            f" {_resources(self.wanted.needs)}, and {_resources(free)} are free: make room, such as"
            " by closing other engines of this program, or ask for less."
        )


class _Worker:
    """A worker process somewhere in the cluster.

    It never raises, since Ray would wrap that: it answers whether all went well, and what.
    """

    def prepare(
        self,
        paths: list[str],
        needed: dict[str, str],
        wanted: Ray,
        dumped: bytes,
        fields: Sequence[serialization.Flat] = (),
    ) -> tuple[bool, Any]:
        """Get ready to work on a problem; where this is."""
        import ray

        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._place = _Place(node, address, os.getpid())
        there = [path for path in paths if os.path.exists(path)]
        sys.path[:] = [*there, *(path for path in sys.path if path not in there)]
        try:
            for what, version in versions().items():
                if version != needed.get(what):
                    raise FedShuffleError(
                        f"a worker has {what} {version}, and the run {needed.get(what)}. Use the"
                        " same environment on every machine of the cluster."
                    )
            torch.set_num_threads(max(1, int(wanted.cpus)))
            tensors = [field.tensor() for field in fields]
            problem = serialization.load_problem(dumped, tensors, _device(wanted.gpus))
            self._engine = KINDS[wanted.kind](problem)
        except Exception as error:
            return False, serialization.sendable(error, str(self._place))
        return self.alive()

    def alive(self) -> tuple[bool, Any]:
        return True, self._place

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


def _last_line(error: Exception) -> str:
    """What Ray says in the end, after a page of context."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1] if lines else repr(error)


def _kill(ray: Any, members: dict[int, _Member], pending: dict[Any, Any]) -> None:
    if ray.is_initialized():  # or else it would start a cluster to kill them in
        for member in members.values():
            with contextlib.suppress(Exception):
                ray.kill(member.actor)
    members.clear()
    pending.clear()


def _close(pid: int, ray: Any, joined: str | None, members: dict[int, _Member], *held: Any) -> None:
    if os.getpid() != pid:  # a fork, in which Ray has no threads and would wait for them for ever
        _of_parent.append((members, held))
        return
    pending, kept = held
    _kill(ray, members, pending)
    kept.clear()
    with contextlib.suppress(ImportError):  # of a program that ends; its cluster ends with it
        cluster.leave(joined)
