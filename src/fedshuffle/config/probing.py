"""Which step sizes are stable on the user's own problem, measured in short runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import nn

from fedshuffle.divergence import has_diverged
from fedshuffle.engines import LeanEngine, Loss, Problem
from fedshuffle.errors import DivergedError
from fedshuffle.evaluation import Evaluation
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.rounds import Run, simulate
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule

REACH = 6
"""At most this many step sizes are tried above the first one, and as many below it."""

_SPACING = math.sqrt(10)
"""The factor from one step size to the next."""


@final
@dataclass(frozen=True)
class Probe:
    """What short runs with constant step sizes came to."""

    rounds: int
    clients: int
    """The loss is that of so many clients' training data."""
    start: float
    """The loss before training."""
    losses: dict[float, float]
    """The loss after these rounds for each step size, in order; infinite where it diverged."""
    steps: int
    """The local steps that all of it took."""

    @property
    def stable(self) -> list[float]:
        """The step sizes after which the loss is no higher than at the start."""
        return [size for size, loss in self.losses.items() if loss <= self.start]

    @property
    def largest(self) -> float | None:
        """The largest stable one below all that are not; None if the smallest tried is not."""
        stable = self.stable
        lost = [size for size in self.losses if size not in stable]
        return max((size for size in stable if size < min(lost, default=math.inf)), default=None)

    @property
    def best(self) -> float | None:
        """The one with the lowest loss."""
        return min(self.stable, key=self.losses.__getitem__, default=None)


def probe(
    model: nn.Module,
    federation: Federation,
    loss: Loss,
    method: Method,
    sampling: Sampling,
    work: LocalWork,
    *,
    step_size: float,
    server_step_size: Schedule = 1.0,
    seed: int = 0,
    rounds: int = 10,
    clients: int = 50,
) -> Probe:
    """Try step sizes in short runs, up and down from one, until the stable range is known.

    It goes up until one is not stable, and down until one is stable and not the best; at most
    :data:`REACH` times by a factor of sqrt(10) each way. All runs share the seed, so what is found
    is a pure function of the arguments.

    Args:
        model: at its start; left as it is.
        federation: who owns which examples.
        loss: ``loss(model, *fields)``.
        method: what is run.
        sampling: who takes part.
        work: what a sampled client does.
        step_size: where to begin.
        server_step_size: as in the run.
        seed: everything random follows from it.
        rounds: those of each short run.
        clients: the loss is taken on the training data of at most so many.
    """
    part = federation.sample(clients)
    evaluate = Evaluation(part, ["loss"], loss=loss, per_client=False)
    problem = Problem(model, loss, method.clients(federation))
    start, steps = evaluate(problem.load(problem.start))["loss"], 0

    def after(size: float) -> float:
        nonlocal steps
        run = Run(federation, method, sampling, work, size, server_step_size, seed)
        engine, found = LeanEngine(Problem(problem.replica(), loss, run.federation)), start
        try:
            for (state,) in simulate(engine, [run], rounds):
                steps += int(run.cohort(state.round - 1).done.sum())
                found = evaluate(problem.load(state.x))["loss"]
                if has_diverged(found, start):
                    return math.inf
        except DivergedError:
            return math.inf
        return found

    losses: dict[float, float] = {}
    for k in range(REACH + 1):
        size = _times(step_size, k)
        losses[size] = after(size)
        if not losses[size] <= start:
            break
    for k in range(1, REACH + 1):
        smallest, best = min(losses), min(losses, key=losses.__getitem__)
        if losses[smallest] <= start and best != smallest:
            break
        size = _times(step_size, -k)
        losses[size] = after(size)
    return Probe(rounds, len(part), start, dict(sorted(losses.items())), steps)


def _times(size: float, k: int) -> float:
    """A step size so many spacings away, with two significant digits.

    >>> _times(0.025, 0), _times(0.1, 1), _times(0.1, -2)
    (0.025, 0.32, 0.01)
    """
    return size if k == 0 else float(f"{size * _SPACING**k:.2g}")
