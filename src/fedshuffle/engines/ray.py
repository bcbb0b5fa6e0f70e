"""Workers on the machines of a Ray cluster, each with one engine, the model and the data.

A worker gets one task a round: its share of the clients, answered with one running sum. What it
answers follows from the task alone, so a task whose worker is lost is simply given to another.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fedshuffle._arrays import count, expect, number
from fedshuffle.engines import cluster
from fedshuffle.engines.lanes import LanesEngine
from fedshuffle.engines.lean import LeanEngine
from fedshuffle.engines.parcels import Flat, Parcel, Tensors, pack, received, sent
from fedshuffle.engines.problem import Problem
from fedshuffle.engines.sharing import MakeEngine, Whose, Workers
from fedshuffle.errors import FedShuffleError, TrainingError, unknown

PATIENCE = 120.0
"""Seconds to wait for a worker when there is none."""

DEATHS = 3
"""After so many workers that died of it, a share is given up, and so is a place for a worker."""

MOST = 10_000
"""No cluster is asked for more workers."""

INLINE = 100_000
"""Tensors of fewer bytes in all travel with the task itself."""

_KINDS: dict[str, MakeEngine] = {"lean": LeanEngine, "lanes": LanesEngine}
_LOG = logging.getLogger("fedshuffle")
_elsewhere: list[Any] = []
"""What belongs to the process that this one was forked from."""


@final
@dataclass(frozen=True)
class Ray:
    """Workers on a Ray cluster, as an engine: ``train(..., engine=Ray(workers=4))``.

    As a text, without the address, which changes nothing in the result:

        >>> str(Ray(4)), str(Ray(4, "lanes")), str(Ray(4, gpus=0.5))
        ('ray:4', 'ray:4:lanes', 'ray:4:lean:gpus=0.5')
        >>> Ray.read("ray:4:lanes:cpus=2") == Ray(4, "lanes", cpus=2)
        True

    Args:
        workers: how many; as many as the cluster has room for if None. The result depends on the
            number in its rounding only, and a cluster with less room does the same with fewer.
        kind: the engine of each worker, ``"lean"`` or ``"lanes"``.
        gpus: the GPUs of each worker, perhaps a fraction of one; it then computes there.
        cpus: the CPUs of each worker; torch gets as many threads.
        address: HOST:PORT of the cluster's head; if None, that of ``RAY_ADDRESS``, or else a
            cluster is started on this machine, and for it alone.
    """

    workers: int | None = None
    kind: str = "lean"
    gpus: float = 0.0
    cpus: float = 1.0
    address: str | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and count(self.workers, "the number of workers") > MOST:
            raise FedShuffleError(
                f"the engine 'ray' is asked for {self.workers} workers. Ask for at most {MOST}."
            )
        if self.kind not in _KINDS:
            raise unknown("engine of a worker", self.kind, _KINDS)
        if self.address is not None:
            expect(self.address, str, "address")
        gpus, cpus = number(self.gpus, "gpus"), number(self.cpus, "cpus")
        if not 0 <= gpus < math.inf or (gpus > 1 and gpus != int(gpus)):
            raise FedShuffleError(
                f"gpus is {gpus:g}, but a worker has a fraction of a GPU, or whole ones."
            )
        if not 0 < cpus < math.inf or (cpus > 1 and cpus != int(cpus)):
            raise FedShuffleError(
                f"cpus is {cpus:g}, but a worker has a fraction of a CPU, or whole ones."
            )

    @classmethod
    def read(cls, text: str) -> Ray:
        """What a text says: ``ray``, then perhaps a number, a kind, and ``gpus=`` or ``cpus=``."""
        found: dict[str, Any] = {}
        for word in text.split(":")[1:]:
            name, equals, value = word.partition("=")
            if equals and name in ("gpus", "cpus") and name not in found:
                with contextlib.suppress(ValueError):
                    found[name] = float(value)
                    continue
            if word.isdecimal() and not found:
                found["workers"] = int(word)
                continue
            if word in _KINDS and not found.keys() - {"workers"}:
                found["kind"] = word
                continue
            raise FedShuffleError(
                f"engine {text!r} cannot be read: write 'ray', 'ray:4' for four workers,"
                " 'ray:4:lanes', or 'ray:4:lean:gpus=0.5' for half a GPU each."
            )
        return cls(**found)

    def __str__(self) -> str:
        words = ["ray", *([] if self.workers is None else [str(self.workers)])]
        options = [f"gpus={self.gpus:g}"] * (self.gpus != 0) + [f"cpus={self.cpus:g}"] * (
            self.cpus != 1
        )
        words += [self.kind] * (self.kind != "lean" or bool(options))
        return ":".join(words + options)

    def threads(self) -> int:
        return max(1, int(self.cpus))


class _Member:
    """A worker, seen from here. It is ready if it has a place, and no word of it is waited for."""

    def __init__(self, number: int, actor: Any, hello: Any, again: int) -> None:
        self.number = number
        self.actor = actor
        self.hello = hello
        self.again = again
        """How many before it did not come to life in its place."""
        self.replaces = False
        self.place: _Place | None = None


class _Place(NamedTuple):
    """Where a worker is."""

    node: str
    address: str
    pid: int
    versions: dict[str, str]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}, node {self.node[:8]}"


@final
class RayEngine(Workers):
    """Shares every request among the workers of a Ray cluster."""

    def __init__(self, problem: Problem, wanted: Ray) -> None:
        _KINDS[wanted.kind](problem)  # what is wrong with the model is said here, not in a worker
        self._ray = cluster.library()
        task = sent(problem)
        leave = cluster.join(wanted.address, (wanted.workers or 1) * wanted.cpus)
        self._cluster = cluster.identity()
        self._members: list[_Member | None] = []
        self._held: list[Any] = []
        mine = os.getpid(), self._ray, self._members, self._held, leave
        self._close = weakref.finalize(self, _close, *mine)
        try:
            self._worker = self._ray.remote(_Worker)
            room = _room(self._ray, wanted)
            self.wanted = replace(wanted, workers=wanted.workers or room)
            super().__init__(problem, wanted.workers or room)
            # They stay in the cluster's memory as long as this engine does, for those who come.
            self._held.append(self.put(task))
            if problem.federation.path is None:
                self._held.append(self.put([Flat.of(field) for field in problem.fields]))
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """What is recorded of it, and makes the same engine again."""
        return str(self.wanted)

    @property
    def places(self) -> list[str]:
        """Where the workers that are ready are."""
        ready = [member.place for member in self._members if member is not None and member.place]
        return [str(place) for place in ready]

    def close(self) -> None:
        """End the workers, and the cluster if it was started for them."""
        self._close()

    def put(self, thing: object) -> Any:
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
        if not self._close.alive or cluster.identity() != self._cluster:
            raise FedShuffleError("the engine's Ray cluster was shut down: make a new engine.")
        if not self._members:
            self._members += [self._enlisted(k) for k in range(self.workers)]
        try:
            return _Round(self, what, requests).answers()
        except BaseException:
            _dismiss(self._ray, self._members)  # they are in the middle of something: begin anew
            raise

    def _enlisted(self, number: int, again: int = 0) -> _Member:
        """A new worker, on its way to life."""
        wanted = self.wanted
        worker = self._worker.options(
            num_cpus=wanted.cpus,
            num_gpus=wanted.gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        actor = worker.remote()
        paths = [os.path.abspath(path) for path in sys.path]
        hello = actor.hello.remote(paths, wanted.kind, wanted.threads(), wanted.gpus, *self._held)
        return _Member(number, actor, hello, again)


class _Round:
    """One request, shared: who does which share, until all are done."""

    def __init__(self, engine: RayEngine, what: str, requests: Sequence[list[Any]]) -> None:
        self.engine, self.ray, self.members = engine, engine._ray, engine._members
        self.what = what
        self.requests = requests
        shared, self.parcels = pack(requests)
        size = sum(flat.bits.nbytes for flat in shared.values())
        self.shared: Any = shared if size < INLINE else engine.put(shared)
        self.waiting = list(range(len(requests)))
        self.deaths = [0] * len(requests)
        self.busy: dict[Any, tuple[_Member, int]] = {}
        self.found: dict[int, list[Tensor]] = {}
        self.stillborn = ""
        """Why the last worker that did not come to life did not."""

    def answers(self) -> list[list[Tensor]]:
        """What the shares gave, in their order, whoever did them."""
        deadline = time.monotonic() + PATIENCE
        while len(self.found) < len(self.requests):
            self._hand_out()
            coming = {member.hello: member for member in self.members if member and member.hello}
            refs = [*coming, *self.busy]
            left = None if self.busy else max(0.0, deadline - time.monotonic())
            done, _ = self.ray.wait(refs, num_returns=1, timeout=left) if refs else ([], [])
            if not done:
                raise self._nobody()
            if done[0] in coming:
                self._welcome(coming[done[0]])
            else:
                self._collect(done[0])
                deadline = time.monotonic() + PATIENCE
        return [self.found[share] for share in range(len(self.requests))]

    def _hand_out(self) -> None:
        """Give every share that waits to its own worker, or else to any that has nothing to do."""
        occupied = {member.number for member, _ in self.busy.values()}
        idle = {
            member.number: member
            for member in self.members
            if member and member.place and not member.hello and member.number not in occupied
        }
        for share in [*self.waiting]:
            if idle:
                member = idle.pop(share if share in idle else min(idle))
                parcel = self.parcels[share]
                ref = member.actor.answer.remote(self.what, parcel, self.shared)
                self.busy[ref] = member, share
                self.waiting.remove(share)

    def _welcome(self, member: _Member) -> None:
        """A worker said hello, or what keeps it from working, or nothing ever again."""
        hello, member.hello = member.hello, None
        try:
            ok, found = self.ray.get(hello)
            if ok:
                _check_versions(found)
        except self.ray.exceptions.RayTaskError as error:
            ok, found = False, _broken(error)
        except FedShuffleError as error:
            ok, found = False, error
        except self.ray.exceptions.RayError as error:
            self.stillborn = _last_line(error)
            what = "is gone, too" if member.place else "did not come to life"
            self._replace(member, f"{what} ({type(error).__name__})")
            return
        if ok:
            member.place = found
        elif member.replaces and any(other and other.place for other in self.members):
            _LOG.warning("Ray: a new worker %d cannot work: %s", member.number, found)
            self.members[member.number] = None
        else:
            raise found

    def _collect(self, ref: Any) -> None:
        """A worker answered, or was lost: then its share waits for another."""
        member, share = self.busy.pop(ref)
        try:
            ok, found = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise _broken(error) from error
        except self.ray.exceptions.RayError as error:
            whose = Whose.of(self.engine.problem, self.requests[share])
            self.deaths[share] += 1
            if self.deaths[share] == DEATHS:
                raise TrainingError(
                    f"{DEATHS} workers that trained it were lost one after another (out of"
                    " memory?). Use fewer workers a machine, or go on from the last checkpoint.",
                    client=whose.clients,
                    round=whose.round,
                    stage=whose.stage,
                ) from error
            self.waiting.insert(0, share)
            self._doubt(member)
            clients = whose.clients.removeprefix("one of ")
            self._replace(
                member,
                f"was lost ({type(error).__name__}); its clients ({clients}) of round"
                f" {whose.round} are done again by another",
            )
            return
        if not ok:
            raise found
        device = self.engine.problem.device
        # The cluster's memory cannot be written to, and the others are added to the first.
        self.found[share] = [flat.tensor().to(device, copy=share == 0) for flat in found]

    def _doubt(self, lost: _Member) -> None:
        """Perhaps the whole machine is lost: those of it get no work until they are heard of."""
        occupied = {member.number for member, _ in self.busy.values()}
        for other in self.members:
            if other is None or other is lost or other.number in occupied or other.hello:
                continue
            if other.place and lost.place and other.place.node == lost.place.node:
                other.hello = other.actor.here.remote()

    def _replace(self, member: _Member, why: str) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(member.actor)  # it may only have been out of reach
        again = 0 if member.place else member.again + 1
        where = f" ({member.place})" if member.place else ""
        _LOG.warning("Ray: worker %d%s %s.", member.number, where, why)
        self.members[member.number] = None
        if again < DEATHS:
            new = self.engine._enlisted(member.number, again)
            new.replaces = True
            self.members[member.number] = new

    def _nobody(self) -> FedShuffleError:
        if not any(self.members):
            return FedShuffleError(
                f"no worker came to life on the Ray cluster: {self.stillborn.rstrip('.')}. Every"
                " machine of it needs the same fedshuffle, and memory for a worker."
            )
        wanted = self.engine.wanted
        free = self.ray.available_resources()
        gpus = f" and {wanted.gpus:g} GPUs" if wanted.gpus else ""
        return FedShuffleError(
            f"no worker came to life on the Ray cluster within {PATIENCE:g} seconds. Each needs"
            f" {wanted.cpus:g} CPUs{gpus}, and {free.get('CPU', 0):g} CPUs and"
            f" {free.get('GPU', 0):g} GPUs are free: make room, such as by closing other engines of"
            " this program, or ask for less."
        )


@final
class _Worker:
    """A worker, in a process of its own somewhere in the cluster.

    It never raises, since Ray would wrap that: it answers whether all went well, and what.
    """

    def hello(
        self,
        paths: list[str],
        kind: str,
        threads: int,
        gpus: float,
        task: bytes,
        fields: Sequence[Flat] = (),
    ) -> tuple[bool, Any]:
        """Get ready to work on a problem; where this is."""
        import ray

        from fedshuffle.runs import versions

        context = ray.get_runtime_context()
        node, address = context.get_node_id(), ray.util.get_node_ip_address()
        place = _Place(node, address, os.getpid(), versions())
        there = [path for path in paths if os.path.exists(path)]
        sys.path[:] = [*there, *(path for path in sys.path if path not in there)]
        try:
            torch.set_num_threads(threads)
            device = _device(gpus)
            self._problem = received(task, [field.tensor() for field in fields], device)
            self._engine = _KINDS[kind](self._problem)
        except Exception as error:
            return False, _sendable(error, str(place))
        self._place = place
        return True, place

    def here(self) -> tuple[bool, Any]:
        """That it is still there."""
        return True, self._place

    def answer(self, what: str, parcel: Parcel, shared: Tensors) -> tuple[bool, Any]:
        """What a share gives."""
        try:
            requests = parcel.opened(shared, self._problem.device)
            answers: list[Tensor] = getattr(self._engine, what)(requests)
            return True, [Flat.of(tensor) for tensor in answers]
        except Exception as error:
            return False, _sendable(error, "")


def _device(gpus: float) -> torch.device:
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise FedShuffleError(
            "a worker was given a GPU, but torch finds no CUDA device there. Install a torch with"
            " CUDA on every machine of the cluster, or leave gpus out."
        )
    return torch.device("cuda")


def _room(ray: Any, wanted: Ray) -> int:
    """How many workers the cluster has room for."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = {"CPU": wanted.cpus, "GPU": wanted.gpus}
    room = sum(
        min(int(node.get(what, 0) / need + 1e-9) for what, need in needs.items() if need)
        for node in nodes
    )
    if not room:
        most = {what: max((n.get(what, 0) for n in nodes), default=0) for what in needs}
        gpus = f" and {wanted.gpus:g} GPUs" if wanted.gpus else ""
        raise FedShuffleError(
            f"a worker needs {wanted.cpus:g} CPUs{gpus}, but no machine of the Ray cluster has more"
            f" than {most['CPU']:g} CPUs and {most['GPU']:g} GPUs. Ask for less, or add a machine."
        )
    return room


def _check_versions(place: _Place) -> None:
    from fedshuffle.runs import versions

    for what, here in versions().items():
        if (there := place.versions.get(what)) != here:
            raise FedShuffleError(
                f"a worker ({place}) has {what} {there}, and here it is {here}. Use the same"
                " environment on every machine of the cluster."
            )


def _sendable(error: Exception, where: str) -> FedShuffleError:
    if isinstance(error, TrainingError):
        return error
    if isinstance(error, FedShuffleError):
        return FedShuffleError(f"{error} (In {where}.)") if where else error
    return FedShuffleError(f"{type(error).__name__} in a worker: {error}")


def _last_line(error: Exception) -> str:
    """What Ray says in the end, after the page of where it happened."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1] if lines else repr(error)


def _broken(error: Exception) -> FedShuffleError:
    why = f"a worker of Ray cannot be used: {_last_line(error).rstrip('.')}."
    if isinstance(getattr(error, "cause", None), ImportError | AttributeError):
        why += " Install the same fedshuffle on every machine of the cluster."
    return FedShuffleError(why)


def _dismiss(ray: Any, members: list[_Member | None]) -> None:
    if ray.is_initialized():  # or else it would start a cluster to kill them in
        for member in members:
            if member is not None:
                with contextlib.suppress(Exception):
                    ray.kill(member.actor)
    members.clear()


def _close(
    pid: int,
    ray: Any,
    members: list[_Member | None],
    held: list[Any],
    leave: Callable[[], None],
) -> None:
    if os.getpid() != pid:  # a fork, in which Ray has no threads and would wait for them for ever
        _elsewhere.append((members, held))
        return
    _dismiss(ray, members)
    held.clear()
    with contextlib.suppress(ImportError):  # of a program that ends; its cluster ends with it
        leave()
