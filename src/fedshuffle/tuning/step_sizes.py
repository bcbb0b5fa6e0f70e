"""Find the step sizes of a run by short runs, for a bounded share of its cost."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.progress import TimeElapsedColumn
from torch import nn

from fedshuffle import fingerprint, methods, schedules
from fedshuffle._arrays import count, jsonable, number
from fedshuffle._terminal import progress_bar
from fedshuffle.availability import Availability
from fedshuffle.engines import Loss, Ray
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.privacy import Privacy
from fedshuffle.probabilities import Estimate
from fedshuffle.sampling import Sampling, among_available, resolve
from fedshuffle.schedules import NamedSchedule, Schedule
from fedshuffle.timing import Clock, TrainingSchedule
from fedshuffle.training import Simulation
from fedshuffle.transforms import Channel, DownLink, Transform
from fedshuffle.tuning import DEFAULT_SHARE
from fedshuffle.tuning.journal import Journal, Key, opened
from fedshuffle.tuning.search import Axis, Choices, Lattice, Point, descend
from fedshuffle.tuning.short_runs import ShortRuns, Trial

RATIOS = 10.0, 10**0.5, 10**0.25
"""The ratio of neighbours in each search."""
TRIALS = 18, 15, 7
"""The runs of a search are so long that this many would use up what is left of the budget."""
SAFETY = 2.0
"""Step sizes that diverge when both are this many times as large are too large."""
MIN_ROUNDS = 3
"""The rounds of the shortest run that tries step sizes."""
MIN_TRIALS = 5
"""The number of trials that are made even if they cost more than the budget."""
WIDEN = 1000.0
"""A search ends this factor above and below the step sizes that it starts from."""


@dataclass(frozen=True)
class TunedStepSizes:
    """Step sizes that short runs found, and what that cost."""

    step_size: float
    server_step_size: float
    start: float
    """The training loss before training."""
    loss: float
    """The training loss after the short run that decided."""
    tried: tuple[Trial, ...]
    """All short runs, in order."""
    rounds_spent: int
    """The rounds of all of them together."""
    share: float
    """The same as a share of the rounds of the full run."""
    local_steps: int
    """The local steps of all of them together."""
    complete: bool
    """Whether every neighbour of the best point was tried before the budget was spent."""
    largest_scale: float
    """The largest step size of a client, as a multiple of ``step_size``."""
    settings: Mapping[str, Any] = field(repr=False)
    """The arguments ``step_size`` and ``server_step_size`` of :func:`fedshuffle.train`, with the
    schedules that were given.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del plain["settings"]
        tried = [dataclasses.asdict(trial) for trial in self.tried]
        return dict(jsonable({**plain, "tried": tried}))


def tune(
    model: nn.Module,
    federation: Federation,
    *,
    loss: Loss,
    rounds: int,
    method: str | Method = "fedshuffle",
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    step_size: Schedule | str = 0.1,
    server_step_size: Schedule | str | None = None,
    transforms: Sequence[Transform] = (),
    channel: str | Channel | None = None,
    down_channel: str | DownLink | None = None,
    privacy: Privacy | None = None,
    availability: str | Availability | None = None,
    schedule: str | TrainingSchedule | None = None,
    clock: str | Clock | None = None,
    probabilities: str | Estimate | None = None,
    seed: int = 0,
    engine: str | Ray = "sequential",
    device: str | torch.device | None = None,
    share: float = DEFAULT_SHARE,
    clients: int = 100,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> TunedStepSizes:
    r"""Find the step size and the server step size for a run of :func:`fedshuffle.train`.

    Short runs compare pairs of step sizes by the loss on training data, never on held-out data.
    Three searches go from neighbour to neighbour until none is better, each with a seed of its own:

    1. The first varies the step size alone, from the given one, by factors of 10.
    2. The second varies both, from the best of the first, by factors of :math:`\sqrt{10}`. A larger
       server step size is tried with a smaller step size, since their product says how far a round
       moves.
    3. The third does the same by factors of :math:`\sqrt[4]{10}`, in runs as long as the rest of
       the budget allows.

    With an adaptive server (``fedadam``) the two step sizes change their places, and the later
    searches vary each alone.

    The last search decides. If losses differ by at most 5% of the decrease, the step sizes that
    move less win. Step sizes that diverged in a short run are never returned, nor larger ones, nor,
    where others are stable, those of which twice as large ones diverged: the run is longer.

    All short runs together take at most ``share`` of the rounds of the full run, with two
    exceptions: 5 trials of 3 rounds are always made; and while all diverge, the step size is
    lowered until one does not, in each search at most by a factor of 1000. The result says what was
    really spent. The same arguments give the same result.

    Args:
        rounds: the number of rounds of the full run.
        step_size: where to start. A schedule is scaled as a whole; in a short run it is a straight
            line from its step size to its end.
        server_step_size: where to start; by default what is usual for the method.
        privacy: must be None: short runs on private data would cost privacy, too.
        seed: that of the full run. Short runs use others, which follow from it.
        share: the largest cost, as a share of the rounds of the full run: with 3, at most three
            times as many rounds.
        clients: evaluate the loss on at most this many clients, drawn once.
        out: a folder for ``tuning.jsonl``, where every finished short run is noted. The same call
            after an interruption repeats none of them.
        progress: whether to show a progress bar on the error stream.

    All other arguments are those of :func:`fedshuffle.train`.

    >>> import torch
    >>> from fedshuffle import Federation, losses, train
    >>> data = Federation.from_arrays(torch.ones(6, 1), torch.eye(6), sizes=[1, 2, 3])
    >>> model = torch.nn.Linear(1, 6, bias=False)
    >>> found = tune(model, data, loss=losses.squared_error, rounds=100)
    >>> found.share <= 3.0, len(found.tried) >= 5
    (True, True)
    >>> result = train(model, data, loss=losses.squared_error, rounds=100, **found.settings)
    """
    rounds, clients = count(rounds, "rounds"), count(clients, "clients")
    share = check(share, privacy)
    method = methods.get(method)
    if server_step_size is None:
        server_step_size = method.server.usual_step_size
    given = {"step_size": step_size, "server_step_size": server_step_size}
    sizes = {name: schedules.resolve(size, rounds) for name, size in given.items()}
    first = schedules.size(sizes["step_size"]), schedules.size(sizes["server_step_size"])
    short = min(rounds, max(MIN_ROUNDS, math.floor(share * rounds / TRIALS[0])))
    budget = max(math.floor(share * rounds), MIN_TRIALS * short)
    drawn = among_available(resolve(sampling, federation), availability, federation, rounds)
    simulation = Simulation(
        model,
        federation,
        loss=loss,
        method=method,
        sampling=drawn,
        work=work,
        step_size=sizes["step_size"],
        server_step_size=sizes["server_step_size"],
        transforms=transforms,
        channel=channel,
        down_channel=down_channel,
        schedule=schedule,
        clock=clock,
        probabilities=probabilities,
        seed=seed,
        engine=engine,
        device=device,
    )
    facts = {"engine": str(engine), "rounds": rounds, "evaluated_clients": clients}
    text = "{task.completed:.0f} of at most {task.total:.0f} rounds"
    bar = progress_bar(progress, text, TimeElapsedColumn(), transient=True)
    with simulation, opened(out, _settings(simulation, facts)) as journal, bar:
        task = bar.add_task("tuning", total=budget)
        sample = federation.sample(clients, simulation.run.seed)
        runs = ShortRuns(simulation, rounds, sample, partial(bar.advance, task))
        search = _Search(runs, journal, budget, method.server.adaptive)
        point, found = search.search(first, short, rounds)
        tried = tuple(search.tried.values())
    kinds = zip(given.items(), point, strict=True)
    return TunedStepSizes(
        step_size=point[0],
        server_step_size=point[1],
        start=runs.start,
        loss=found,
        tried=tried,
        rounds_spent=search.spent,
        share=search.spent / rounds,
        local_steps=sum(trial.local_steps for trial in tried),
        complete=search.complete,
        largest_scale=simulation.run.step_scales()[1],
        settings={name: _like(size, sizes[name], to) for (name, size), to in kinds},
    )


def check(share: float, privacy: Privacy | None) -> float:
    """The share; what cannot be tuned is refused, before data are loaded."""
    if privacy is not None:
        raise FedShuffleError(
            "step sizes cannot be tuned for a private run: short runs on private data cost privacy,"
            " which no budget would count. Tune without privacy on public data of the same kind,"
            " and give the step sizes that were found."
        )
    return number(share, "share", "(0, inf)")


def _like(given: Schedule | str, schedule: Schedule, to: float) -> Schedule | str:
    """A step size in the form in which it was given."""
    found = schedules.resized(schedule, to)
    if isinstance(given, str) and isinstance(found, NamedSchedule):
        return schedules.text(found.name, found.arguments) or found
    return found


def _settings(simulation: Simulation, facts: Mapping[str, Any]) -> str:
    """A digest of all that the search depends on."""
    start = fingerprint.tensor(simulation.problem.start)
    settings = {**simulation.settings(facts["rounds"]), "start_sha256": start, **facts}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class _BudgetSpent(Exception):  # noqa: N818
    """The next trial would cost more than the budget."""


class _Search:
    """Trials within a budget of rounds; what the journal knows is not done again.

    The first coordinate of a point is the size that decides how far a round moves: the step size,
    or with an adaptive server the server's.
    """

    def __init__(self, runs: ShortRuns, journal: Journal, budget: int, adaptive: bool) -> None:
        self._runs, self._journal, self._budget = runs, journal, budget
        self._adaptive = adaptive
        self.tried: dict[Key, Trial] = {}
        self.spent = 0
        self.complete = False

    def search(self, first: Point, short: int, rounds: int) -> tuple[Point, float]:
        """The best step sizes and the loss of the run that decided."""
        try:
            size, other = self._swapped(first)
            axes = Axis((size,), WIDEN, RATIOS[0]), Choices((other,))
            self._descend(Lattice(axes, start=self._runs.start), short, stage=0)
            for stage in (1, 2):
                length = (self._budget - self.spent) // TRIALS[stage]
                lattice = self._lattice(self._best(), RATIOS[stage])
                self._descend(lattice, min(rounds, max(short, length)), stage)
            self.complete = True
        except _BudgetSpent:
            pass
        best = self._best()
        return self._swapped(best), self._losses()[best]

    def _descend(self, lattice: Lattice, rounds: int, stage: int) -> None:
        descend(lattice, lambda point: self._loss(point, rounds, stage))

    def _lattice(self, first: Point, ratio: float) -> Lattice:
        axes = tuple(Axis((size,), WIDEN, ratio) for size in first)
        return Lattice(axes, trade=not self._adaptive, start=self._runs.start)

    def _best(self) -> Point:
        """The best point of the last search."""
        if not (losses := self._losses()):
            name = "server_step_size" if self._adaptive else "step_size"
            sizes = sorted({self._swapped(key[:2])[0] for key in self.tried})
            raise FedShuffleError(
                f"training diverges at every {name} that was tried, from {sizes[0]:g} to"
                f" {sizes[-1]:g}: give a smaller one to start from, or scale the model's inputs."
            )
        return self._lattice(next(iter(losses)), RATIOS[-1]).least(losses)

    def _loss(self, point: Point, rounds: int, stage: int) -> float | None:
        step_size, server_step_size = self._swapped(point)
        key = step_size, server_step_size, rounds, stage
        if key not in self.tried:
            if self.spent + rounds > self._budget and self._losses():
                raise _BudgetSpent
            trial = self._journal.trials.get(key)
            if trial is None:
                trial = self._journal.add(self._runs.try_out(*key))
            self.tried[key] = trial
            self.spent += trial.rounds_done
        return self.tried[key].loss

    def _losses(self) -> dict[Point, float]:
        """The losses of the last search, at points that keep their distance from any that diverged;
        if none does, at those that are not larger.
        """
        diverged = [key[:2] for key, trial in self.tried.items() if trial.loss is None]
        for margin in (SAFETY, 1.0):
            stable = {
                key: trial.loss
                for key, trial in self.tried.items()
                if trial.loss is not None
                and not any(s <= margin * key[0] and g <= margin * key[1] for s, g in diverged)
            }
            if stable:
                break
        last = max((stage for *_, stage in stable), default=None)
        return {self._swapped(key[:2]): loss for key, loss in stable.items() if key[3] == last}

    def _swapped(self, point: Point) -> Point:
        return point[::-1] if self._adaptive else point
