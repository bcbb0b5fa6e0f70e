"""Advice for a run: what short runs measure, then what is proven. Needs torch."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np

from fedshuffle._arrays import count, jsonable, number
from fedshuffle._links import page
from fedshuffle.auditing import audit
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.local_work import EpochRange
from fedshuffle.methods import MVR, Method
from fedshuffle.privacy.advice import PrivacyAdvice
from fedshuffle.privacy.advice import advise as advise_on_privacy
from fedshuffle.theory.method_advice import (
    SamplingAdvice,
    StepAdvice,
    StepComparison,
    compare_steps,
    nearest_constants,
    sampling_advice,
    step_advice,
)
from fedshuffle.theory.mvr import MVRRate, MVRStep
from fedshuffle.theory.problem import AdvisedProblem, AdvisedRun, StartingPoint, find_problem
from fedshuffle.theory.rates import Bound, ConvergenceRate, Regime
from fedshuffle.training.rounds import Run
from fedshuffle.tuning.search import Axis, Lattice, Point, descend
from fedshuffle.tuning.short_runs import ShortRuns, Trial

METHODS = ("fedavg-rr", "fednova-rr", "fedshuffle")
"""The methods to advise on for every run, besides FedShuffleMVR."""

_theory = partial(page, "explanation/theory")
SOURCES = {
    "step_size_search": (_theory("what-can-be-measured"), "short runs, no theorem"),
    "problem": (_theory("the-constants-of-a-problem"), "assumptions on the losses"),
    "steps.constants": (_theory("the-constants"), "general theorem, definitions"),
    "steps.theorem": (_theory("the-step-size-limit"), "general theorem"),
    "steps.proof": (_theory("the-step-size-limit"), "general theorem, lemmas of proof"),
    "steps.tuned": (_theory("over-many-rounds"), "general theorem, recursion of proof"),
    "steps.target": (_theory("rounds-to-a-target"), "general theorem, recursion of proof"),
    "step_ratios": (_theory("how-much-larger-are-fedshuffles-steps"), "steps.proof"),
    "mvr.theorem": (_theory("fedshufflemvr"), "theorem on FedShuffleMVR"),
    "mvr.proof": (_theory("fedshufflemvr"), "theorem on FedShuffleMVR, its proof redone"),
    "largest_proven": (_theory("the-step-size-limit"), "steps.proof, or mvr.proof for MVR"),
    "sampling": (_theory("which-sampling"), "sampling variance lemma"),
    "sampling.rounds": (_theory("when-a-larger-cohort-stops-paying"), "steps.target over M"),
    "total_variation": (page("explanation/audit"), "general theorem, definition of w-hat"),
    "privacy": (page("how-to/privacy"), "accounting, no theorem on convergence"),
}
"""For each part of the advice the place that derives its numbers, and the statement."""

_AT_OPTIMUM = "training starts at the optimum"


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
    """Each step size with the loss after its run, which is infinite if it diverged."""
    largest_stable: float | None
    """The largest stable step size below all unstable ones; None if the smallest is unstable."""
    best: float | None
    """The stable step size with the lowest loss."""


@dataclass(frozen=True, eq=False)
class Advice:
    """The results of short runs and of the theory for a run; :data:`SOURCES` derives each part."""

    setting: dict[str, str | float]
    """What the advice is for: method, clients, rounds and so on."""
    step_size_search: StepSizeSearch | None
    """Step sizes tried in short runs; None if not asked for."""
    problem: AdvisedProblem
    steps: tuple[StepAdvice, ...]
    """For each method and regime: constants, limits, the tuned step, rounds to the target."""
    step_ratios: tuple[StepComparison, ...]
    """How many times as large FedShuffle's steps may be as each other method's."""
    not_covered: dict[str, str]
    """The methods without step sizes, each with the reason."""
    mvr: dict[Bound, dict[str, MVRStep]]
    """By each bound the ``limit`` of FedShuffleMVR's steps and the one ``tuned`` to the rounds;
    empty if the theorem does not cover the run."""
    mvr_notes: tuple[str, ...]
    largest_proven: float | None
    """The largest step size that is proven for the run's method."""
    sampling: SamplingAdvice | str
    """Samplings compared, or why not."""
    consistent: bool | None
    """Whether the run's method minimises the intended objective; None if the audit cannot say."""
    total_variation: float | None
    conclusion: str
    """That of the audit."""
    privacy: PrivacyAdvice | None = None
    """What the rounds cost, if the run is private."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, with the sources of the numbers."""
        keys = "source", "statement"
        sources = {part: dict(zip(keys, found, strict=True)) for part, found in SOURCES.items()}
        plain = dataclasses.asdict(self)
        del plain["problem"]["of"]
        return {**jsonable(plain), "sources": sources}


def advise(
    run: AdvisedRun,
    *,
    clients: int = 50,
    points: int = 2,
    target: float = 0.01,
    search_rounds: int = 10,
    progress: bool = False,
) -> Advice:
    """Advise on a run: try step sizes in short runs, then apply the theory.

    Args:
        run: the run.
        clients: largest number of clients to measure, where constants are not exact.
        points: number of models to measure at: the start, and others during the training.
        target: predict rounds until the gap (for non-convex losses the squared gradient) is this
            share of what it is at the start.
        search_rounds: the rounds of each short run that tries a step size; 0 to try none.
        progress: show a progress bar while measuring.

    >>> import torch
    >>> from fedshuffle import Federation, LocalWork, losses, methods, sampling
    >>> data = Federation.from_arrays(torch.eye(3), torch.ones(3, 1), sizes=[1, 2])
    >>> method, model = methods.get("fedshuffle"), torch.nn.Linear(3, 1)
    >>> parts = losses.squared_error, data, method, sampling.parse("full", data), LocalWork()
    >>> found = advise(AdvisedRun(model, *parts, rounds=10, step_size=0.1), search_rounds=3)
    >>> found.problem.what, found.consistent
    ('linear regression', True)
    """
    count(clients, "clients")
    count(points, "points")
    number(target, "target", "(0, 1)")
    search = None
    if search_rounds != 0:
        rounds = min(count(search_rounds, "search_rounds"), run.rounds)
        with error_context("trying step sizes"):
            search = search_step_sizes(run, rounds=rounds, clients=clients)
    with error_context("measuring the problem"):
        problem = find_problem(run, clients=clients, points=points, progress=progress)
    step_size, server_step_size = run.first_step_sizes
    steps, not_covered = _step_sizes(run, problem, target)
    mine = {row.regime: row for row in steps if row.method == "fedshuffle"}
    others = [row for row in steps if row.method in METHODS and row.method != "fedshuffle"]
    mvr, mvr_notes = _mvr(run, problem)
    limits = list[float]()
    if isinstance(run.method.direction, MVR):
        limits = [mvr["proof"]["limit"].step_size] if mvr else []
    elif run.method.momentum == "none":
        limits = [row.proof.step_size for row in steps if row.method == run.method.name]
    consistent = total_variation = None
    try:
        found = audit(run.federation, run.method, run.sampling, run.work, draws=4000)
        consistent, total_variation = found.consistent, found.total_variation
        conclusion = ": ".join(found.conclusion)
    except FedShuffleError as error:
        conclusion = str(error)
    return Advice(
        setting={
            "clients": len(run.federation),
            "examples": int(run.federation.sizes.sum()),
            "method": run.method.name,
            "momentum": run.method.momentum,
            "sampling": repr(run.sampling),
            "rounds": run.rounds,
            "step_size": step_size,
            "server_step_size": server_step_size,
            "target": target,
        },
        step_size_search=search,
        problem=problem,
        steps=tuple(steps),
        step_ratios=tuple(
            compare_steps(mine[row.regime], row) for row in others if row.regime in mine
        ),
        not_covered=not_covered,
        mvr=mvr,
        mvr_notes=tuple(mvr_notes),
        largest_proven=max(limits, default=None),
        sampling=_sampling(run, problem, target, list(mine)),
        consistent=consistent,
        total_variation=total_variation,
        conclusion=conclusion,
        privacy=_privacy(run),
    )


def _privacy(run: AdvisedRun) -> PrivacyAdvice | None:
    if run.privacy is None:
        return None
    parts = run.federation, run.method, run.sampling, run.work
    with error_context("privacy"):
        mechanism = Run(*parts, privacy=run.privacy, rounds=run.rounds).mechanism
    assert mechanism is not None
    return advise_on_privacy(mechanism, run.rounds)


def _start_and_target(
    problem: AdvisedProblem, regime: Regime, start: StartingPoint, target: float
) -> dict[str, float]:
    """The arguments ``start`` and ``epsilon`` of a bound; empty if its start is not known."""
    before, quantity = start.distance, problem.start.gap
    if regime == "non-convex":
        before, quantity = start.gap, problem.start.gradient
    known = 0 < before < math.inf and quantity > 0
    return {"start": before, "epsilon": target * quantity} if known else {}


def _step_sizes(
    run: AdvisedRun, problem: AdvisedProblem, target: float
) -> tuple[list[StepAdvice], dict[str, str]]:
    """The step sizes of each method in each regime, and why some have none."""
    subjects: dict[str, str | Method] = {name: name for name in METHODS}
    if run.method.momentum == "none":
        subjects.setdefault(run.method.name, run.method)
    steps, not_covered = list[StepAdvice](), dict[str, str]()
    for name, subject in subjects.items():
        try:
            nearest = nearest_constants(run.federation, subject, run.sampling, run.work, run.seed)
            for regime in problem.regimes:
                losses, _, start = problem.of(regime, nearest.w_hat)
                found = step_advice(
                    nearest,
                    losses,
                    method=name,
                    regime=regime,
                    server_step_size=run.first_step_sizes[1],
                    rounds=run.rounds,
                    **_start_and_target(problem, regime, start, target),
                )
                steps.append(found)
        except FedShuffleError as error:
            not_covered[name] = str(error)
    return steps, not_covered


def _mvr(
    run: AdvisedRun, problem: AdvisedProblem
) -> tuple[dict[Bound, dict[str, MVRStep]], list[str]]:
    """The steps of FedShuffleMVR by each bound, and notes."""
    notes = ["proven for one client per round, drawn with the probabilities w, and eta_g = 1"]
    work, start = run.work, problem.start
    if isinstance(work.epochs, EpochRange):
        notes.append(f"epochs change: taken as {work.epochs.high}")
        work = dataclasses.replace(work, epochs=work.epochs.high)
    try:
        losses, delta, _ = problem.of("non-convex")
        if losses.B > 1 or np.any(losses.P):
            radius = 2.0 * math.sqrt(start.distance)
            notes.append(f"G and sigma hold within {radius:.3g} of the optimum")
            losses, delta, _ = problem.of("non-convex", run.federation.weights, radius)
        rate = MVRRate(run.federation, losses, delta, work)
        if rate.epochs * rate.delta < rate.L:
            notes.append("E < L / delta: no gain over momentum without local steps is shown")
        if start.gap == 0:
            raise FedShuffleError(_AT_OPTIMUM)
        steps = dict[Bound, dict[str, MVRStep]]()
        for bound in get_args(Bound):
            tuned = rate.tune(run.rounds, start=start.gap, bound=bound)
            steps[bound] = {"limit": rate.limit(bound=bound), "tuned": tuned}
        return steps, notes
    except FedShuffleError as error:
        return {}, [*notes, str(error)]


def _sampling(
    run: AdvisedRun, problem: AdvisedProblem, target: float, regimes: list[Regime]
) -> SamplingAdvice | str:
    if not regimes:
        return "no step size is advised for fedshuffle"
    start = _start_and_target(problem, regimes[0], problem.start, target)
    if not start:
        return _AT_OPTIMUM
    nearest = nearest_constants(run.federation, "fedshuffle", run.sampling, run.work, run.seed)
    losses, eta_g = problem.of(regimes[0])[0], run.first_step_sizes[1]
    rate = ConvergenceRate(nearest, losses, regime=regimes[0], server_step_size=eta_g)
    cohort = max(1, round(run.sampling.expected_updates))
    return sampling_advice(run.federation, rate, cohort, **start)


def search_step_sizes(run: AdvisedRun, *, rounds: int = 10, clients: int = 50) -> StepSizeSearch:
    """Try constant step sizes in short runs, from neighbour to neighbour of the run's first one.

    Neighbours are a factor of sqrt(10) apart. It goes on until the best is between two others, and
    then up to the first that is not stable. The loss is that on the training data of at most this
    many clients.
    """
    first, server_step_size = run.first_step_sizes
    sample, axis, trials = run.federation.sample(clients), Axis((first,)), dict[float, Trial]()
    with run.simulation(first, server_step_size) as simulation:
        runs = ShortRuns(simulation, rounds, sample)

        def loss(point: Point) -> float | None:
            trials[point[0]] = runs.try_out(point[0], server_step_size, rounds)
            return trials[point[0]].loss

        def stable(size: float) -> bool:
            found = trials[size].loss
            return found is not None and found <= runs.start

        descend(Lattice((axis,)), loss)
        while stable(largest := max(trials)) and (above := axis.neighbours(largest)[1:]):
            loss((above[0],))
    losses = {size: math.inf if (x := trials[size].loss) is None else x for size in sorted(trials)}
    below = list(itertools.takewhile(stable, losses))
    return StepSizeSearch(
        rounds,
        clients=len(sample),
        local_steps=sum(trial.local_steps for trial in trials.values()),
        start=runs.start,
        tried=tuple(losses.items()),
        largest_stable=max(below, default=None),
        best=min(filter(stable, losses), key=losses.__getitem__, default=None),
    )
