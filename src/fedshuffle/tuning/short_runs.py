"""Short runs that try step sizes."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from fedshuffle import schedules
from fedshuffle.errors import DivergedError, FedShuffleError, error_context
from fedshuffle.evaluation import Evaluation
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator
from fedshuffle.state import State
from fedshuffle.training import Simulation
from fedshuffle.training.monitoring import has_diverged
from fedshuffle.training.rounds import simulate
from fedshuffle.training.simulation import reduced

LAST = 3
"""The loss is the mean after this many rounds: a single one may be lucky."""


@dataclass(frozen=True)
class Trial:
    """One short run, and the loss after it."""

    step_size: float
    server_step_size: float
    rounds: int
    """The rounds that were planned."""
    stage: int
    """The search that it belongs to: 0, 1 or 2. Each has a seed of its own."""
    loss: float | None
    """The mean training loss after each of the last three rounds; None if it diverged."""
    rounds_done: int
    """The rounds that it cost: fewer than planned if it diverged before."""
    local_steps: int


class ShortRuns:
    """Runs of a simulation with other step sizes and fewer rounds.

    They share the model, the engine and everything random, so that their losses differ by the step
    sizes alone; each stage has another seed. A schedule becomes a straight line
    (:func:`fedshuffle.schedules.shortened`).

    Args:
        simulation: the full run.
        rounds: its number of rounds.
        data: the training data of some clients, on which the loss is evaluated.
        on_round: is called after every round.
    """

    def __init__(
        self,
        simulation: Simulation,
        rounds: int,
        data: Federation,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._sim, self._rounds, self._on_round = simulation, rounds, on_round
        loss = simulation.problem.loss
        self._evaluate = Evaluation(data, ["loss"], loss=loss, per_client=False)
        with error_context("evaluation before training"):
            self.start = self._loss(simulation.init())
            """The loss before training."""
        if not math.isfinite(self.start):
            raise FedShuffleError(
                f"the training loss is {self.start:g} before training: check the model, the loss"
                " and the data."
            )

    def try_out(
        self, step_size: float, server_step_size: float, rounds: int, stage: int = 0
    ) -> Trial:
        """Train for some rounds with these step sizes; stop as soon as it diverges."""
        run = copy.copy(self._sim.run)
        sizes = {"step_size": step_size, "server_step_size": server_step_size}
        for name, size in sizes.items():
            schedule = schedules.resized(getattr(run, name), size)
            setattr(run, name, schedules.shortened(schedule, self._rounds, rounds))
        draw = generator(run.seed, Purpose.TUNING, part=stage)
        run.seed = int(draw.integers(2**63))
        done, steps, last = 0, 0, list[float]()
        try:
            for (state,) in simulate(self._sim.engine, [run], rounds):
                cohort = run.cohort(done)
                done, steps = done + 1, steps + int(cohort.done.sum())
                self._on_round()
                # Evaluating after every round may cost more than training.
                seen = reduced(state.metrics, cohort).get("train_loss", self.start)
                if done > rounds - LAST or has_diverged(seen, self.start):
                    last.append(self._loss(state))
                    if has_diverged(last[-1], self.start):
                        break
        except DivergedError:
            done += 1
            last.append(math.nan)
            self._on_round()
        diverged = has_diverged(last[-1], self.start)
        loss = None if diverged else fmean(last[-LAST:])
        return Trial(step_size, server_step_size, rounds, stage, loss, done, steps)

    def _loss(self, state: State) -> float:
        return self._evaluate(self._sim.model(state))["loss"]
