"""Advice for a run: what short runs measure, then what is proven. Needs torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any

from fedshuffle._arrays import count, number
from fedshuffle.auditing import audit
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.local_work import EpochRange
from fedshuffle.methods import MVR, Method
from fedshuffle.theory.derivations import Derivation, ReportedNumber, to_dict
from fedshuffle.theory.method_advice import (
    StepAdvice,
    StepComparison,
    compare_steps,
    nearest_constants,
    step_advice,
)
from fedshuffle.theory.mvr import MVRRate, MVRStep
from fedshuffle.theory.problem import AdvisedRun, EstimatedProblem, ExactProblem, find_problem
from fedshuffle.theory.rates import ConvergenceRate, Regime
from fedshuffle.theory.sampling_advice import SamplingAdvice, sampling_advice
from fedshuffle.theory.step_size_search import StepSizeSearch, search_step_sizes
from fedshuffle.theory.step_sizes import Bound

METHODS = ("fedavg-rr", "fednova-rr", "fedshuffle")
"""The methods to advise on for every run, besides FedShuffleMVR."""

_DRAWS = 4000
"""Cohorts to draw in a Monte Carlo audit."""


@dataclass(frozen=True)
class AdvisedSetting:
    """The run that the advice is for."""

    clients: int
    examples: int
    method: str
    momentum: str
    sampling: str
    rounds: int
    server_step_size: float
    target: float


@dataclass(frozen=True)
class ProblemSummary:
    """The constants of the losses, and how they were found."""

    how: str
    """exact or estimated."""
    what: str
    regimes: tuple[Regime, ...]
    constants: Annotated[dict[str, ReportedNumber], Derivation.PROBLEM]
    start: Annotated[dict[str, float], Derivation.PROBLEM]
    """The quantities of the bounds at the start of training."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class MVRSteps:
    """The largest step of FedShuffleMVR, and the best for the run's rounds."""

    limit: MVRStep
    tuned: MVRStep | None


@dataclass(frozen=True)
class MVRAdvice:
    """Step size and momentum for FedShuffleMVR."""

    notes: tuple[str, ...]
    theorem: Annotated[MVRSteps, Derivation.MVR_THEOREM]
    proof: Annotated[MVRSteps, Derivation.MVR_PROOF]
    covered: bool = True


@dataclass(frozen=True)
class NotCovered:
    """A case that no theorem covers, and why."""

    method: str
    notes: tuple[str, ...]
    regime: None = None
    covered: bool = False


@dataclass(frozen=True)
class OwnStepSize:
    """The run's step size, and its ratio to the proven limit."""

    step_size: float
    times_the_limit: ReportedNumber | None


@dataclass(frozen=True)
class ObjectiveSummary:
    """Whether the run's method minimises the intended objective."""

    consistent: bool | None
    conclusion: str
    total_variation: Annotated[float | None, Derivation.AUDIT]


@dataclass(frozen=True, eq=False)
class Advice:
    """The results of short runs and of the theory for a run; every number has a derivation."""

    setting: AdvisedSetting
    step_size_search: StepSizeSearch | None
    """Step sizes tried in short runs; None if not asked for."""
    problem: ProblemSummary
    steps: tuple[StepAdvice | NotCovered, ...]
    """For each method and regime: constants, limits, the tuned step, rounds to the target."""
    step_ratios: tuple[StepComparison, ...]
    """How many times as large FedShuffle's steps may be as each other method's."""
    mvr: MVRAdvice | NotCovered
    your_step_size: OwnStepSize
    sampling: SamplingAdvice | NotCovered
    audit: ObjectiveSummary

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain: dict[str, Any] = to_dict(self)
        return plain


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
    >>> found.problem.what, found.audit.consistent
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
    steps = _step_sizes(run, problem, target)
    covered = [row for row in steps if isinstance(row, StepAdvice)]
    mine = {row.regime: row for row in covered if row.method == "fedshuffle"}
    mvr = _mvr(run, problem)
    yours = _your_step_size(run, covered, mvr)
    times = yours.times_the_limit
    if search is not None and search.best is not None and times is not None:
        ratio = times.value * search.best / yours.step_size
        search = dataclasses.replace(search, best_times_the_limit=ratio)
    return Advice(
        setting=AdvisedSetting(
            clients=len(run.federation),
            examples=int(run.federation.sizes.sum()),
            method=run.method.name,
            momentum=run.method.momentum,
            sampling=repr(run.sampling),
            rounds=run.rounds,
            server_step_size=run.first_step_sizes[1],
            target=target,
        ),
        step_size_search=search,
        problem=_summary(problem),
        steps=steps,
        step_ratios=tuple(
            compare_steps(mine[row.regime], row)
            for row in covered
            if row.method in METHODS and row.method != "fedshuffle" and row.regime in mine
        ),
        mvr=mvr,
        your_step_size=yours,
        sampling=_sampling(run, problem, target, list(mine)),
        audit=_audit(run),
    )


def _summary(problem: ExactProblem | EstimatedProblem) -> ProblemSummary:
    first = problem.start()
    start = {"gap": first.gap, "gradient": first.gradient}
    if math.isfinite(first.distance):
        start["distance"] = first.distance
    notes: tuple[str, ...]
    if isinstance(problem, ExactProblem):
        exact = problem.constants()
        values = {
            **{name: getattr(exact, name) for name in ("L", "mu", "G", "B")},
            "sigma": math.sqrt(float(exact.w_hat @ exact.sigma**2)),
            "P": float(exact.P.max()),
            "delta": exact.delta,
        }
        constants = {
            name: ReportedNumber(value, note=str(exact.validity[name]))
            for name, value in values.items()
        }
        notes = ("for the objective that was meant, in the form for convex losses",)
        how, what = "exact", problem.kind.name
    else:
        seen, chosen = problem.estimate, "chosen; G and sigma are the smallest for it"
        estimates = {"L": seen.L, "mu": seen.mu, "G": seen.G, "sigma": seen.sigma_rms}
        constants = {
            name: ReportedNumber(one.value, one.uncertainty, one.note)
            for name, one in {**estimates, "delta": seen.delta}.items()
        }
        constants |= {"B": ReportedNumber(1.0, note=chosen), "P": ReportedNumber(0.0, note=chosen)}
        sample = f"{len(seen.clients)} of {len(seen.w_hat)} clients, {seen.points} point(s)"
        notes = (sample, *problem.notes, "f* is taken to be 0 or more")
        how, what = "estimated", f"measured, since {problem.reason}"
    return ProblemSummary(how, what, problem.regimes, constants, start, notes)


def _step_sizes(
    run: AdvisedRun, problem: ExactProblem | EstimatedProblem, target: float
) -> tuple[StepAdvice | NotCovered, ...]:
    subjects: dict[str, str | Method] = {name: name for name in METHODS}
    if run.method.momentum == "none":
        subjects.setdefault(run.method.name, run.method)
    found: list[StepAdvice] = []
    not_covered: list[NotCovered] = []
    for name, subject in subjects.items():
        try:
            nearest = nearest_constants(
                run.federation, subject, run.sampling, run.work, seed=run.seed
            )
            w_hat = nearest.constants.w_hat
            for regime in problem.regimes:
                before = problem.start(w_hat).of(regime)[0]
                quantity = problem.start().of(regime)[1]
                known = 0 < before < math.inf and quantity > 0
                found.append(
                    step_advice(
                        nearest,
                        problem.problem(regime, w_hat),
                        method=name,
                        regime=regime,
                        server_step_size=run.first_step_sizes[1],
                        rounds=run.rounds,
                        epsilon=target * quantity if known else None,
                        start=before if known else None,
                    )
                )
        except FedShuffleError as error:
            not_covered.append(NotCovered(name, (str(error),)))
    return (*found, *not_covered)


def _mvr(run: AdvisedRun, problem: ExactProblem | EstimatedProblem) -> MVRAdvice | NotCovered:
    notes = ["proven for one client per round, drawn with the probabilities w, and eta_g = 1"]
    work, start = run.work, problem.start().gap
    if isinstance(work.epochs, EpochRange):
        notes.append(f"epochs change: taken as {work.epochs.high}")
        work = dataclasses.replace(work, epochs=work.epochs.high)
    try:
        constants, delta, where = problem.mvr()
        rate = MVRRate(run.federation, constants, delta, work)
        notes += where
        if rate.epochs * rate.delta < rate.L:
            notes.append("E < L / delta: no gain over momentum without local steps is shown")

        def steps(bound: Bound) -> MVRSteps:
            tuned = rate.tune(run.rounds, start=start, bound=bound) if start > 0 else None
            return MVRSteps(rate.limit(bound=bound), tuned)

        return MVRAdvice(tuple(notes), steps("theorem"), steps("proof"))
    except FedShuffleError as error:
        return NotCovered("fedshuffle-mvr", (*notes, str(error)))


def _your_step_size(
    run: AdvisedRun, steps: list[StepAdvice], mvr: MVRAdvice | NotCovered
) -> OwnStepSize:
    derivation, limits = Derivation.PROOF, list[float]()
    if isinstance(run.method.direction, MVR):
        derivation = Derivation.MVR_PROOF
        limits = [mvr.proof.limit.step_size] if isinstance(mvr, MVRAdvice) else []
    elif run.method.momentum == "none":
        limits = [row.proof.step_size for row in steps if row.method == run.method.name]
    size, times = run.first_step_sizes[0], None
    if limits:
        times = ReportedNumber(size / max(limits), derivation=derivation)
    return OwnStepSize(size, times)


def _sampling(
    run: AdvisedRun,
    problem: ExactProblem | EstimatedProblem,
    target: float,
    regimes: list[Regime],
) -> SamplingAdvice | NotCovered:
    if not regimes:
        return NotCovered("fedshuffle", ("no step size is advised for fedshuffle",))
    regime = regimes[0]
    before, quantity = problem.start().of(regime)
    if not (0 < before < math.inf and quantity > 0):
        return NotCovered("fedshuffle", ("training starts at the optimum",))
    nearest = nearest_constants(run.federation, "fedshuffle", run.sampling, run.work, seed=run.seed)
    eta_g, constants = run.first_step_sizes[1], problem.problem(regime)
    rate = ConvergenceRate(nearest.constants, constants, regime=regime, server_step_size=eta_g)
    cohort = max(1, round(run.sampling.expected_updates))
    return sampling_advice(run.federation, rate, cohort, epsilon=target * quantity, start=before)


def _audit(run: AdvisedRun) -> ObjectiveSummary:
    try:
        found = audit(run.federation, run.method, run.sampling, run.work, draws=_DRAWS)
    except FedShuffleError as error:
        return ObjectiveSummary(None, str(error), None)
    wrong = found.total_variation
    conclusions = {
        True: "consistent: it minimises the objective you meant",
        None: "undecided: no bias larger than the sampling error was seen",
        False: f"not consistent: {wrong:.2%} of the objective is in the wrong place",
    }
    return ObjectiveSummary(found.consistent, conclusions[found.consistent], wrong)
