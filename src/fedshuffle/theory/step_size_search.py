"""Which step sizes are stable on the user's problem, measured in short runs. Needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedshuffle.engines import Problem
from fedshuffle.errors import DivergedError
from fedshuffle.evaluation import Evaluation
from fedshuffle.theory.problem import AdvisedRun
from fedshuffle.training.divergence import has_diverged
from fedshuffle.training.rounds import simulate

MAX_STEPS_EACH_WAY = 6
"""Largest number of step sizes to try above the first one, and below it."""

_SPACING = math.sqrt(10)
"""The factor from one step size to the next."""


@dataclass(frozen=True)
class StepSizeSearch:
    """The outcome of short runs with constant step sizes.

    A step size is stable if the loss after its run is no higher than before.
    """

    rounds: int
    clients: int
    """The number of clients whose training data give the loss."""
    local_steps: int
    """The total cost."""
    start: float
    """The loss before training."""
    tried: tuple[tuple[float, float], ...]
    """Each step size with the loss after its last round, which is infinite if it diverged."""
    largest_stable: float | None
    """The largest stable step size below all unstable ones; None if the smallest is unstable."""
    best: float | None
    """The stable step size with the lowest loss."""


def search_step_sizes(run: AdvisedRun, *, rounds: int = 10, clients: int = 50) -> StepSizeSearch:
    """Try step sizes in short runs, up and down from the run's first one.

    It goes up until one is unstable, and down until one is stable and not the best, by a factor of
    sqrt(10) at a time and at most :data:`MAX_STEPS_EACH_WAY` times each way. All runs share the
    seed, so the result is a pure function of the arguments. The loss is that on the training data
    of at most this many clients.
    """
    sample = run.federation.sample(clients)
    evaluate = Evaluation(sample, ["loss"], loss=run.loss, per_client=False)
    problem = Problem(run.model, run.loss, run.method.clients(run.federation))
    start, steps = evaluate(problem.load(problem.start))["loss"], 0
    first, server_step_size = run.first_step_sizes

    def after(size: float) -> float:
        nonlocal steps
        (engine, training), loss = run.training(problem, size, server_step_size), start
        try:
            for (state,) in simulate(engine, [training], rounds):
                steps += int(training.cohort(state.round - 1).done.sum())
                loss = evaluate(problem.load(state.x))["loss"]
                if has_diverged(loss, start):
                    return math.inf
        except DivergedError:
            return math.inf
        return loss

    losses: dict[float, float] = {}
    for k in range(MAX_STEPS_EACH_WAY + 1):
        size = _spaced(first, k)
        losses[size] = after(size)
        if not losses[size] <= start:
            break
    for k in range(1, MAX_STEPS_EACH_WAY + 1):
        smallest = min(losses)
        if losses[smallest] <= start and smallest != min(losses, key=losses.__getitem__):
            break
        size = _spaced(first, -k)
        losses[size] = after(size)
    stable = [size for size, loss in losses.items() if loss <= start]
    unstable = min((size for size in losses if size not in stable), default=math.inf)
    largest_stable = max((size for size in stable if size < unstable), default=None)
    best = min(sorted(stable), key=losses.__getitem__, default=None)
    tried = tuple(sorted(losses.items()))
    return StepSizeSearch(rounds, len(sample), steps, start, tried, largest_stable, best)


def _spaced(size: float, k: int) -> float:
    """The step size k spacings away, with two significant digits."""
    return size if k == 0 else float(f"{size * _SPACING**k:.2g}")
