"""Options of the engine on Ray, as a value and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedshuffle._arrays import count, expect, number
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.engines.vectorized import VectorizedEngine
from fedshuffle.engines.workers import MakeEngine
from fedshuffle.errors import FedShuffleError, unknown

MAX_WORKERS = 10_000

KINDS: dict[str, MakeEngine] = {
    engine.name: engine for engine in (SequentialEngine, VectorizedEngine)
}


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
            raise FedShuffleError(
                f"the engine 'ray' is asked for {self.workers} workers. Ask for at most"
                f" {MAX_WORKERS}."
            )
        if self.kind not in KINDS:
            raise unknown("engine of a worker", self.kind, KINDS)
        if self.address is not None:
            expect(self.address, str, "address")
        for what, least in (("gpus", 0.0), ("cpus", math.ulp(0.0))):
            value = number(getattr(self, what), what)
            if not least <= value < math.inf or (value > 1 and value != int(value)):
                raise FedShuffleError(
                    f"{what} is {value:g}, but a worker has a fraction of one, or whole ones."
                )

    @classmethod
    def read(cls, text: str) -> Ray:
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
