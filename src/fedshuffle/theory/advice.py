"""Step-size advice: what the theorems allow a method on this federation, sampling and local work.

The general theorem has one limit for all three regimes, but what it is made of differs: for convex
losses gradient similarity may take its weaker form, with a smaller B. The step that serves a given
number of rounds best differs more (:mod:`fedshuffle.theory.rates`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

import numpy as np

from fedshuffle import methods
from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.methods import FedShuffleGen, InclusionProbability, Method
from fedshuffle.methods.averaging import own_steps
from fedshuffle.sampling import Full, Independent, Optimal, Sampling, Table, resolve
from fedshuffle.theory.constants import MethodConstants, method_constants, smallest_s
from fedshuffle.theory.rates import Quantity, Recursion, Regime, Tuned, rounds_to, tune
from fedshuffle.theory.sampling_advice import EIGENVALUES, best_probabilities
from fedshuffle.theory.step_sizes import ProblemConstants, StepLimit, largest_step_size

COMPARED = ("fedavg-rr", "fednova-rr", "fedshuffle")
"""The methods that advice is always given for, besides FedShuffleMVR."""

_COHORTS = 4096
"""So many cohorts are listed, or drawn, where no formula applies."""

_CLIENTS = 1000
"""For so many clients second moments are found without a formula."""


@final
@dataclass(frozen=True, eq=False)
class Setting:
    """The constants of a method where the theorem covers it, or as near as can be."""

    constants: MethodConstants
    covered: bool
    """Whether what follows is proven for this setting."""
    notes: tuple[str, ...]
    """What was taken for what."""


@final
@dataclass(frozen=True, eq=False)
class StepAdvice:
    """The step sizes of one method in one regime."""

    method: str
    regime: Regime
    setting: Setting
    theorem: StepLimit | None
    """The largest by the theorem as it is printed; None where it asks for more than there is."""
    proof: StepLimit
    """The largest for which the proof holds."""
    tuned: Tuned | None
    """The best for a number of rounds, if that was given."""
    target: Tuned | None
    """The fewest rounds to a target, if that was given."""


@final
@dataclass(frozen=True)
class StepComparison:
    """How many times as large FedShuffle's steps may be as another method's, by the proof."""

    than: str
    step_size: float
    """Of the limits on ``step_size`` (and on ``eta_l``)."""
    largest_client_step: float
    """Of the largest steps that any client takes within the limit."""
    effective: float
    """Of how far a round goes along its objective's gradient."""


def method_setting(
    federation: Federation,
    method: str | Method | FedShuffleGen,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    *,
    seed: int = 0,
) -> Setting:
    """The constants of a method, also where :func:`method_constants` has no answer but a near one.

    *Epochs that change from round to round.* If neither the objective nor W depends on them, the
    theorem's proof holds round by round, and the bound is largest for the fewest epochs. Otherwise
    they are taken for the most, and what follows is not proven.

    *Too many cohorts to list.* Second moments are then estimated from drawn cohorts.

    *Optimal client sampling* of all clients has no more variance than the best independent one.

        >>> clients = Federation.from_sizes([1, 2, 3])
        >>> found = method_setting(clients, "fedshuffle", work=LocalWork(epochs=EpochRange(1, 4)))
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
    if isinstance(drawn, Optimal) and by_probability:
        if not isinstance(drawn.pool, Full):
            raise FedShuffleError(
                f"nothing is proven for sampling {drawn!r}: only for optimal sampling of all"
                " clients."
            )
        notes.append("optimal sampling: no more variance than the best independent sampling")
        drawn = Independent(best_probabilities(federation.weights, drawn.b))
    elif not by_probability and not isinstance(drawn, Optimal):
        listed = _listed(drawn, seed)
        if listed is not drawn:
            covered = False
            notes.append(f"too many cohorts: moments estimated from {_COHORTS} drawn ones")
        drawn = listed

    def of(epochs: int | list[int]) -> MethodConstants:
        fixed = dataclasses.replace(work, epochs=epochs)
        return _tight(method_constants(federation, method, drawn, fixed), drawn)

    epochs = work.epochs
    if not isinstance(epochs, EpochRange):
        found = _tight(method_constants(federation, method, drawn, work), drawn)
        return _noted(found, covered, notes, federation)
    most = of(epochs.high)
    mixed = [epochs.low] * len(federation)
    mixed[int(federation.sizes.argmax())] = epochs.high
    other = of(mixed)
    same = np.isclose(most.W, other.W) and np.allclose(most.w_hat, other.w_hat, rtol=1e-9, atol=0.0)
    if same and rule.step_normalisation is own_steps:  # other c go by the longest client, too
        notes.append(f"epochs change: the bound is for {epochs.low}, where it is largest")
        fewest = dataclasses.replace(of(epochs.low), longest=most.longest)
        return _noted(fewest, covered, notes, federation)
    what = "step sizes" if same else "objective"
    notes.append(f"epochs change, and the {what} with them: taken for {epochs.high}")
    return _noted(most, False, notes, federation)


def step_advice(
    setting: Setting,
    problem: ProblemConstants,
    *,
    method: str,
    regime: Regime,
    server_step_size: float = 1.0,
    rounds: int | None = None,
    epsilon: float | None = None,
    start: float | None = None,
    quantity: Quantity | None = None,
) -> StepAdvice:
    """The largest step sizes; with ``start``, the best for some rounds and the rounds to a target.

    Args:
        setting: from :func:`method_setting`.
        problem: the constants of the losses, for the method's own ``w_hat``.
        method: its name.
        regime: ``strongly-convex``, ``convex`` or ``non-convex``.
        server_step_size: ``eta_g``.
        rounds: for which the step is tuned.
        epsilon: the target.
        start: as for :func:`~fedshuffle.theory.rates.upper_bound`.
        quantity: as there.

    >>> clients = Federation.from_sizes([1, 2, 3])
    >>> advice = step_advice(
    ...     method_setting(clients, "fedshuffle"), ProblemConstants(L=1.0), method="fedshuffle",
    ...     regime="convex",
    ... )
    >>> round(advice.theorem.eta_l, 6), advice.proof.eta_l
    (0.083333, 0.25)
    """
    constants = setting.constants
    proof = largest_step_size(constants, problem, server_step_size=server_step_size, bound="proof")
    theorem = None
    if (constants.shares <= 1.0 + 1e-12).all():
        theorem = largest_step_size(constants, problem, server_step_size=server_step_size)
    Recursion.of(constants, problem, regime=regime)  # refuses a regime that does not fit
    tuned = target = None
    if start is not None and start > 0:
        if rounds is not None:
            tuned = tune(
                rounds,
                constants,
                problem,
                server_step_size=server_step_size,
                regime=regime,
                start=start,
                quantity=quantity,
            )
        if epsilon is not None:
            target = rounds_to(
                epsilon,
                constants,
                problem,
                server_step_size=server_step_size,
                regime=regime,
                start=start,
                quantity=quantity,
            )
    return StepAdvice(method, regime, setting, theorem, proof, tuned, target)


def compare_steps(fedshuffle: StepAdvice, other: StepAdvice) -> StepComparison:
    """How much larger FedShuffle's steps may be, by the proof.

    >>> clients, problem = Federation.from_sizes([1, 2, 5]), ProblemConstants(L=1.0)
    >>> advised = [
    ...     step_advice(method_setting(clients, name), problem, method=name, regime="convex")
    ...     for name in ("fedshuffle", "fednova-rr")
    ... ]
    >>> found = compare_steps(*advised)
    >>> round(found.largest_client_step, 3), round(found.step_size, 3), round(found.effective, 3)
    (4.895, 0.979, 1.836)
    """
    mine, theirs = fedshuffle.proof, other.proof
    return StepComparison(
        than=other.method,
        step_size=mine.step_size / theirs.step_size,
        largest_client_step=mine.largest_client_step / theirs.largest_client_step,
        effective=mine.effective / theirs.effective,
    )


def _tight(constants: MethodConstants, sampling: Sampling) -> MethodConstants:
    """With the smallest M_1 also where there is a closed form, as other methods are given it: else
    a comparison would be of formulas, not of methods.
    """
    if constants.how != "closed form" or not 1 < len(sampling) <= EIGENVALUES:
        return constants
    s = smallest_s(sampling, constants.w_hat)
    M_1 = float((constants.h * s * constants.w_hat).max())  # noqa: N806
    if not M_1 < constants.M_1 * (1.0 - 1e-9):
        return constants
    return dataclasses.replace(constants, s=s, M_1=M_1, how="eigenvalue")


def _noted(
    constants: MethodConstants, covered: bool, notes: list[str], federation: Federation
) -> Setting:
    """Whatever is said of a method is about the objective that it minimises."""
    wrong = 0.5 * float(np.abs(constants.w_hat - federation.weights).sum())
    if wrong > 1e-9:
        notes = [*notes, f"about its own objective, {wrong:.1%} of which is not what you meant"]
    return Setting(constants, covered, tuple(notes))


def _listed(sampling: Sampling, seed: int) -> Sampling:
    """A sampling with few enough cohorts to list: itself, or some that were drawn from it."""
    n = len(sampling)
    cohorts = sampling.cohorts(_COHORTS) if n <= _CLIENTS else None
    if cohorts is not None and len(cohorts) <= _COHORTS:
        return sampling
    if n > _CLIENTS:
        raise FedShuffleError(
            f"weights that are normalised over the cohort have no formula, and {n} clients are too"
            f" many to estimate it (at most {_CLIENTS})."
        )
    drawn = [tuple(sampling.draw(seed, k).tolist()) for k in range(_COHORTS)]
    if len({i for cohort in drawn for i in cohort}) < n:
        raise FedShuffleError(
            "weights that are normalised over the cohort have no formula, and some client was in"
            f" none of {_COHORTS} drawn cohorts."
        )
    return Table(n, [(cohort, 1.0 / _COHORTS) for cohort in drawn])
