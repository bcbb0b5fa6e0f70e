"""Step-size advice: what the theorems allow a method on a federation, sampling and local work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedshuffle import methods
from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.methods import FedShuffleGen, InclusionProbability, Method
from fedshuffle.methods.averaging import own_steps
from fedshuffle.sampling import Full, Independent, Listed, Sampling, resolve
from fedshuffle.sampling.base import MAX_COHORTS
from fedshuffle.theory.constants import (
    MAX_MATRIX_CLIENTS,
    MethodConstants,
    ProblemConstants,
    listed_cohorts,
    method_constants,
    smallest_s,
)
from fedshuffle.theory.rates import ConvergenceRate, Regime, TunedStep
from fedshuffle.theory.sampling_advice import MAX_EIGENVALUE_CLIENTS, best_probabilities
from fedshuffle.theory.step_sizes import StepLimit, largest_step_size


class NearestConstants(NamedTuple):
    """The constants of a method, in the nearest case that the theorem covers."""

    constants: MethodConstants
    covered: bool
    """Whether the theorem covers the case itself."""
    notes: tuple[str, ...]
    """How the cases differ."""


@dataclass(frozen=True)
class StepAdvice:
    """The step sizes of one method in one regime."""

    method: str
    regime: Regime
    covered: bool
    """Whether they are proven for this method, sampling and local work."""
    notes: tuple[str, ...]
    constants: dict[str, float]
    """W, M_1 and M_2."""
    how: str
    """How M_1 was found."""
    theorem: StepLimit | None
    """The largest by the theorem as printed; None where its conditions do not hold."""
    proof: StepLimit
    """The largest for which the proof holds."""
    tuned: TunedStep | None
    """The best for a number of rounds, if given."""
    target: TunedStep | None
    """The fewest rounds to a target, if given."""


@dataclass(frozen=True)
class StepComparison:
    """How many times as large FedShuffle's steps may be as another method's, by the proof."""

    than: str
    regime: Regime
    step_size: float
    """Ratio of the limits on ``step_size`` (and on ``eta_l``)."""
    largest_client_step: float
    """Ratio of the largest steps of any client within the limit."""
    effective: float
    """Ratio of how far a round moves along its objective's gradient."""


def nearest_constants(
    federation: Federation,
    method: str | Method | FedShuffleGen,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    seed: int = 0,
) -> NearestConstants:
    """The constants of a method, also where :func:`method_constants` only covers a near case.

    Epochs may change from round to round: if neither the objective nor W depends on them, the proof
    holds round by round, and the bound is largest for the fewest epochs; otherwise the most epochs
    are used, and what follows is not proven. With too many cohorts to enumerate, second moments are
    estimated from drawn ones. Optimal client sampling of all clients has at most the variance of
    the best independent sampling.

        >>> clients = Federation.from_sizes([1, 2, 3])
        >>> work = LocalWork(epochs=EpochRange(1, 4))
        >>> found = nearest_constants(clients, "fedshuffle", work=work)
        >>> found.covered, found.constants.longest
        (True, 12)
    """
    expect(federation, Federation, "federation")
    work = LocalWork() if work is None else work
    rule = method if isinstance(method, FedShuffleGen) else methods.get(method).averaging
    drawn = resolve(sampling, federation)
    notes: list[str] = []
    covered = True
    by_probability = isinstance(rule.normaliser, InclusionProbability)
    if drawn.two_phase and by_probability:
        if not isinstance(drawn.pool, Full):
            raise FedShuffleError(
                f"nothing is proven for sampling {drawn!r}: only for optimal sampling of all"
                " clients."
            )
        notes.append("optimal sampling: at most the variance of the best independent sampling")
        b = round(drawn.expected_updates)
        drawn = Independent(best_probabilities(federation.weights, b))
    elif not by_probability and not drawn.two_phase and listed_cohorts(drawn) is None:
        drawn, covered = _drawn_cohorts(drawn, seed), False
        notes.append(f"too many cohorts: moments estimated from {MAX_COHORTS} drawn ones")

    def fixed(epochs: int | Sequence[int] | None) -> MethodConstants:
        chosen = dataclasses.replace(work, epochs=epochs)
        return _smallest_variance(method_constants(federation, method, drawn, chosen), drawn)

    epochs = work.epochs
    if isinstance(epochs, EpochRange):
        found = most = fixed(epochs.high)
        mixed = [epochs.low] * len(federation)
        mixed[int(federation.sizes.argmax())] = epochs.high
        other = fixed(mixed)
        weights = np.allclose(most.w_hat, other.w_hat, rtol=1e-9, atol=0.0)
        same = bool(np.isclose(most.W, other.W)) and weights
        if same and rule.step_normalisation is own_steps:  # other c depend on the longest client
            notes.append(f"epochs change: the bound is for {epochs.low}, where it is largest")
            found = dataclasses.replace(fixed(epochs.low), longest=most.longest)
        else:
            what, covered = "step sizes" if same else "objective", False
            notes.append(f"epochs change, and the {what} with them: taken as {epochs.high}")
    else:
        found = fixed(epochs)
    wrong = 0.5 * float(np.abs(found.w_hat - federation.weights).sum())
    if wrong > 1e-9:
        notes.append(f"about its own objective, {wrong:.1%} of which is not what you meant")
    return NearestConstants(found, covered, tuple(notes))


def step_advice(
    nearest: NearestConstants,
    problem: ProblemConstants,
    *,
    method: str,
    regime: Regime,
    server_step_size: float = 1.0,
    rounds: int | None = None,
    epsilon: float | None = None,
    start: float | None = None,
) -> StepAdvice:
    """The largest step sizes; with ``start``, the best for some rounds and the rounds to a target.

    ``problem`` holds the constants of the losses for the method's own ``w_hat``; ``rounds`` is what
    the step is tuned for, and ``epsilon`` the target. ``start`` is as for
    :class:`~fedshuffle.theory.rates.ConvergenceRate`.

    >>> clients = Federation.from_sizes([1, 2, 3])
    >>> advice = step_advice(
    ...     nearest_constants(clients, "fedshuffle"), ProblemConstants(L=1.0), method="fedshuffle",
    ...     regime="convex",
    ... )
    >>> round(advice.theorem.eta_l, 6), advice.proof.eta_l
    (0.083333, 0.25)
    """
    constants, eta_g = nearest.constants, server_step_size
    theorem = None
    if (constants.shares <= 1.0 + 1e-12).all():
        theorem = largest_step_size(constants, problem, server_step_size=eta_g)
    rate = ConvergenceRate(constants, problem, regime=regime, server_step_size=eta_g)
    tuned = target = None
    if start is not None and rounds is not None:
        tuned = rate.tune(rounds, start=start)
    if start is not None and epsilon is not None:
        target = rate.rounds_to(epsilon, start=start)
    return StepAdvice(
        method=method,
        regime=regime,
        covered=nearest.covered,
        notes=nearest.notes,
        constants={name: getattr(constants, name) for name in ("W", "M_1", "M_2")},
        how=constants.how,
        theorem=theorem,
        proof=largest_step_size(constants, problem, server_step_size=eta_g, bound="proof"),
        tuned=tuned,
        target=target,
    )


def compare_steps(fedshuffle: StepAdvice, other: StepAdvice) -> StepComparison:
    """How much larger FedShuffle's steps may be, by the proof.

    >>> clients, problem = Federation.from_sizes([1, 2, 5]), ProblemConstants(L=1.0)
    >>> advised = [
    ...     step_advice(nearest_constants(clients, name), problem, method=name, regime="convex")
    ...     for name in ("fedshuffle", "fednova-rr")
    ... ]
    >>> found = compare_steps(*advised)
    >>> round(found.largest_client_step, 3), round(found.step_size, 3), round(found.effective, 3)
    (4.895, 0.979, 1.836)
    """
    mine, theirs = fedshuffle.proof, other.proof
    return StepComparison(
        than=other.method,
        regime=other.regime,
        step_size=mine.step_size / theirs.step_size,
        largest_client_step=mine.largest_client_step / theirs.largest_client_step,
        effective=mine.effective / theirs.effective,
    )


def _smallest_variance(constants: MethodConstants, sampling: Sampling) -> MethodConstants:
    """With the smallest M_1 also where there is a closed form, as for methods without one:
    otherwise advice would compare formulas, not methods.
    """
    if constants.how != "closed form" or not 1 < len(sampling) <= MAX_EIGENVALUE_CLIENTS:
        return constants
    s = smallest_s(sampling, constants.w_hat)
    M_1 = float((constants.h * s * constants.w_hat).max())  # noqa: N806
    if not M_1 < constants.M_1 * (1.0 - 1e-9):
        return constants
    return dataclasses.replace(constants, s=s, M_1=M_1, how="eigenvalue")


def _drawn_cohorts(sampling: Sampling, seed: int) -> Sampling:
    """Some cohorts drawn from a sampling with too many to enumerate."""
    n, no_formula = (
        len(sampling),
        "weights that are normalised over the cohort have no formula, and",
    )
    if n > MAX_MATRIX_CLIENTS:
        raise FedShuffleError(
            f"{no_formula} {n} clients are too many to estimate it (at most {MAX_MATRIX_CLIENTS})."
        )
    drawn = [tuple(sampling.draw(seed, k).tolist()) for k in range(MAX_COHORTS)]
    if len({i for cohort in drawn for i in cohort}) < n:
        raise FedShuffleError(
            f"{no_formula} some client was in none of {MAX_COHORTS} drawn cohorts."
        )
    return Listed(n, [(cohort, 1.0 / MAX_COHORTS) for cohort in drawn])
