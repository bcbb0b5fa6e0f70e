"""A method: an averaging rule, a direction, and what it asks of the local work."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Order, Probe, Request, Walk
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods.averaging import FedShuffleGen, Participants
from fedshuffle.methods.directions import (
    MVR,
    Direction,
    GlobalMomentum,
    Memory,
    Plain,
    RoundStart,
)
from fedshuffle.sampling import Full, Sampling

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True)
class Method:
    """A federated method over the one kernel.

    Args:
        name: how it is asked for.
        summary: one line for a person.
        averaging: the rules (c, w-tilde, q).
        direction: which way clients walk; the gradient itself by default.
        work: what the method changes in the local work it is given.
        balanced_only: defined only for full participation and equal numbers of local steps.
        reference: where it comes from.
    """

    name: str
    summary: str
    averaging: FedShuffleGen
    direction: Direction = field(default_factory=Plain)
    work: Mapping[str, Any] = field(default_factory=dict)
    balanced_only: bool = False
    reference: str = ""

    def with_momentum(self, momentum: Direction | None) -> Method:
        """This method with a momentum (:class:`MVR`, :class:`GlobalMomentum`), or without."""
        direction = Plain() if momentum is None else momentum
        expect(direction, Direction, "momentum")
        return dataclasses.replace(self, direction=direction)

    @property
    def momentum(self) -> str:
        """The momentum in a word, as the command line writes it."""
        kinds = {MVR: "mvr", GlobalMomentum: "global"}
        kind = kinds.get(type(self.direction))
        return "none" if kind is None else f"{kind}:{self.direction.a:g}"  # type: ignore[attr-defined]

    def local_work(self, work: LocalWork) -> LocalWork:
        """The local work as this method does it."""
        return dataclasses.replace(work, **self.work)

    def check(self, workload: Workload, sampling: Sampling) -> None:
        """Refuse a setting for which the method is not defined."""
        if not self.balanced_only:
            return
        steps = np.unique(workload.alone[0])
        if not isinstance(sampling, Full) or len(steps) > 1:
            raise FedShuffleError(
                f"{self.name} is defined for full participation and equal numbers of local steps"
                f" (here: sampling {sampling!r}, {steps[0]} to {steps[-1]} steps)."
                " Use fedshuffle, which is the same method there and sound beyond."
            )

    def round(
        self,
        x: Tensor,
        memory: Memory,
        cohort: Participants,
        workload: Workload,
        seed: int,
        step_size: float,
        server_step_size: float,
    ) -> Generator[Request, Any, tuple[Tensor, Memory]]:
        """One round as a sequence of requests to an engine; returns the new model and memory."""
        step_sizes = step_size * self.averaging.step_scale(cohort)
        weights = [self.averaging.aggregation_weights(cohort)]

        start = RoundStart(x, memory, cohort, step_sizes, self.averaging.normaliser)
        heading = self.direction.round(start)
        request = next(heading)
        while isinstance(request, Probe):
            decayed = dataclasses.replace(request, weight_decay=workload.work.weight_decay)
            request = heading.send((yield decayed))
        if request.report is not None:
            weights.append(request.report)

        by_client = zip(
            cohort.clients.tolist(),
            cohort.done.tolist(),
            step_sizes.tolist(),
            np.stack(weights, axis=1).tolist(),
            strict=True,
        )
        orders = [
            Order(
                workload.stream(i, steps, seed, cohort.round),
                gamma,
                request.steering,
                a,
                workload.work.clip,
                workload.work.weight_decay,
            )
            for i, steps, gamma, a in by_client
        ]
        sums = yield Walk(x, orders, len(weights))
        return x + server_step_size * sums[0], _finish(heading, sums[1] if len(sums) > 1 else None)


def _finish(heading: Generator[Any, Any, Memory], report: Tensor | None) -> Memory:
    try:
        heading.send(report)
    except StopIteration as stop:
        memory: Memory = stop.value
        return memory
    raise RuntimeError("a direction must yield exactly one heading, as its last request")
