"""What the theorems allow a method on a federation, and which sampling they favour."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, count, expect, vector
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.methods import FedShuffleGen, Method
from fedshuffle.methods.averaging import own_steps
from fedshuffle.sampling import (
    Full,
    Independent,
    Listed,
    Sampling,
    Uniform,
    importance,
    resolve,
)
from fedshuffle.sampling.base import MAX_COHORTS
from fedshuffle.theory.constants import ProblemConstants
from fedshuffle.theory.method_constants import (
    MAX_MATRIX_CLIENTS,
    MethodConstants,
    listed_cohorts,
    method_constants,
    smallest_s,
)
from fedshuffle.theory.rates import ConvergenceRate, Regime, StepLimit, TunedStep, largest_step_size

KINDS: dict[str, Callable[[Federation, int], Sampling]] = {
    "uniform": lambda clients, b: Uniform(len(clients), b),
    "importance": lambda clients, b: importance(clients.sizes, b),
    "best": lambda clients, b: Independent(best_probabilities(clients.weights, b)),
}
"""The samplings to compare: ``best`` is the independent one with the smallest M, and also bounds
optimal client sampling."""

MAX_EIGENVALUE_CLIENTS = 400
"""Largest number of clients for which M of uniform sampling is an eigenvalue, not a formula."""


@dataclass(frozen=True)
class StepAdvice:
    """The step sizes of one method in one regime."""

    method: str
    regime: Regime
    covered: bool
    """Whether they are proven for this method, sampling and local work."""
    notes: tuple[str, ...]
    constants: dict[str, float | str]
    """W, M_1 and M_2, and how M_1 was found."""
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
) -> MethodConstants:
    """The constants of a method, also where :func:`method_constants` only covers a near case.

    ``notes`` and ``covered`` say how the case differs, and whether it is proven: epochs may change
    from round to round, second moments are estimated where there are too many cohorts, and optimal
    sampling has at most the variance of the best independent one (docs/explanation/theory.md).

        >>> clients = Federation.from_sizes([1, 2, 3])
        >>> work = LocalWork(epochs=EpochRange(1, 4))
        >>> found = nearest_constants(clients, "fedshuffle", work=work)
        >>> found.covered, found.max_steps
        (True, 12)
    """
    expect(federation, Federation, "federation")
    work = LocalWork() if work is None else work
    rule = method if isinstance(method, FedShuffleGen) else methods.get(method).averaging
    drawn, notes, covered = resolve(sampling, federation), list[str](), True
    if not drawn.independent_rounds:
        covered = False
        notes.append("the bounds are for independent rounds; here a cohort depends on earlier ones")
    if rule.estimate is not None:
        covered = False
        notes.append("the bounds are for known inclusion probabilities; here they are estimated")
    if drawn.two_phase and rule.by_probability:
        if not isinstance(drawn.pool, Full):
            proven = "only optimal sampling of all clients is covered"
            raise FedShuffleError(f"nothing is proven for sampling {drawn!r}: {proven}.")
        notes.append("optimal sampling: at most the variance of the best independent sampling")
        b = round(drawn.expected_updates)
        drawn = Independent(best_probabilities(federation.weights, b))
    elif not rule.by_probability and not drawn.two_phase and listed_cohorts(drawn) is None:
        drawn, covered = _drawn_cohorts(drawn, seed), False
        notes.append(f"too many cohorts: moments estimated from {MAX_COHORTS} drawn ones")

    def fixed(epochs: int | Sequence[int] | None) -> MethodConstants:
        chosen = dataclasses.replace(work, epochs=epochs)
        return _smallest_variance(method_constants(federation, method, drawn, chosen), drawn)

    epochs = work.epochs
    found = fixed(epochs.high if isinstance(epochs, EpochRange) else epochs)
    if isinstance(epochs, EpochRange):
        mixed = [epochs.low] * len(federation)
        mixed[int(federation.sizes.argmax())] = epochs.high
        other = fixed(mixed)
        same = np.isclose(found.W, other.W) and np.allclose(found.w_hat, other.w_hat, 1e-9, 0.0)
        if same and rule.step_normalisation is own_steps:  # other c depend on the longest client
            notes.append(f"epochs change: the bound is for {epochs.low}, where it is largest")
            found = dataclasses.replace(fixed(epochs.low), max_steps=found.max_steps)
        else:
            what, covered = "step sizes" if same else "objective", False
            notes.append(f"epochs change, and the {what} with them: taken as {epochs.high}")
    wrong = 0.5 * float(np.abs(found.w_hat - federation.weights).sum())
    if wrong > 1e-9:
        notes.append(f"about its own objective, {wrong:.1%} of which is not what you meant")
    return dataclasses.replace(found, notes=tuple(notes), covered=covered)


def step_advice(
    constants: MethodConstants,
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

    ``problem`` is for the method's own ``w_hat``; ``rounds`` is what the step is tuned for,
    ``epsilon`` the target, and ``start`` as for :class:`~fedshuffle.theory.ConvergenceRate`.

    >>> nearest = nearest_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
    >>> advice = step_advice(nearest, ProblemConstants(L=1.0), method="mine", regime="convex")
    >>> round(advice.theorem.eta_l, 6), advice.proof.eta_l
    (0.083333, 0.25)
    """
    theorem = tuned = target = None
    if (constants.shares <= 1.0 + 1e-12).all():
        theorem = largest_step_size(constants, problem, server_step_size=server_step_size)
    rate = ConvergenceRate(constants, problem, regime=regime, server_step_size=server_step_size)
    if start is not None and rounds is not None:
        tuned = rate.tune(rounds, start=start)
    if start is not None and epsilon is not None:
        target = rate.rounds_to(epsilon, start=start)
    used = {name: getattr(constants, name) for name in ("W", "M_1", "M_2", "how")}
    limits = theorem, rate.limit, tuned, target
    return StepAdvice(method, regime, constants.covered, constants.notes, used, *limits)


def compare_steps(fedshuffle: StepAdvice, other: StepAdvice) -> StepComparison:
    """How much larger FedShuffle's steps may be, by the proof.

    >>> def advised(method):
    ...     nearest = nearest_constants(Federation.from_sizes([1, 2, 5]), method)
    ...     return step_advice(nearest, ProblemConstants(L=1.0), method=method, regime="convex")
    >>> found = compare_steps(advised("fedshuffle"), advised("fednova-rr"))
    >>> round(found.largest_client_step, 3), round(found.step_size, 3), round(found.effective, 3)
    (4.895, 0.979, 1.836)
    """
    names = "step_size", "largest_client_step", "effective"
    ratios = (getattr(fedshuffle.proof, name) / getattr(other.proof, name) for name in names)
    return StepComparison(other.method, other.regime, *ratios)


def _smallest_variance(constants: MethodConstants, sampling: Sampling) -> MethodConstants:
    """With the smallest M_1 also where there is a closed form, to compare methods, not formulas."""
    if constants.how != "closed form" or not 1 < len(sampling) <= MAX_EIGENVALUE_CLIENTS:
        return constants
    s = smallest_s(sampling, constants.w_hat)
    M_1 = float((constants.h * s * constants.w_hat).max())  # noqa: N806
    if not M_1 < constants.M_1 * (1.0 - 1e-9):
        return constants
    return dataclasses.replace(constants, s=s, M_1=M_1, how="eigenvalue")


def _drawn_cohorts(sampling: Sampling, seed: int) -> Sampling:
    """Some cohorts drawn from a sampling with too many to enumerate."""
    n, why = len(sampling), "weights that are normalised over the cohort have no formula, and"
    if n > MAX_MATRIX_CLIENTS:
        raise FedShuffleError(f"{why} {n} clients are too many (at most {MAX_MATRIX_CLIENTS}).")
    drawn = [tuple(sampling.draw(seed, k).tolist()) for k in range(MAX_COHORTS)]
    if len({i for cohort in drawn for i in cohort}) < n:
        raise FedShuffleError(f"{why} some client was in none of {MAX_COHORTS} drawn cohorts.")
    return Listed(n, [(cohort, 1.0 / MAX_COHORTS) for cohort in drawn])


@dataclass(frozen=True)
class SamplingOption:
    """A kind of sampling with its M, and the rounds and step size with which the bound on them
    reaches the target; cohort is the number of clients that take part, or are expected to.
    """

    sampling: str
    cohort: int
    M: float
    rounds: int
    step_size: float


@dataclass(frozen=True)
class SamplingAdvice:
    """Samplings and cohort sizes, compared by what is proven."""

    regime: Regime
    cohort: int
    options: tuple[SamplingOption, ...]
    """Every kind, for this cohort size."""
    sizes: tuple[tuple[SamplingOption, ...], ...]
    """Every kind, for cohorts of 1, 2, 4, ... up to all clients."""
    pays_until: dict[str, int]
    """For every kind the largest cohort that is at least half as fast as a linear speed-up."""


def best_probabilities(weights: ArrayLike, b: int) -> FloatArray:
    """``p_i = w_i / (w_i + M)`` with sum b: independent sampling with the smallest M.

    >>> p = best_probabilities([0.8, 0.1, 0.1], 1)
    >>> p.round(4).tolist(), round(float(((1 - p) / p * [0.8, 0.1, 0.1]).max()), 4)
    ([0.6384, 0.1808, 0.1808], 0.4531)
    """
    w = vector(weights, "weights")
    w = w / float(w.sum())
    b = count(b, "the number of sampled clients", most=len(w))
    if b == len(w):
        return np.ones(len(w))
    from scipy.optimize import brentq  # a third of a second to import: only when needed

    # Importance sampling has less than 1 / b.
    M = brentq(lambda M: float((w / (w + M)).sum()) - b, 0.0, 1.0 / b, xtol=1e-300)  # noqa: N803, N806
    return w / (w + M)


def sampling_variance(kind: str, federation: Federation, b: int) -> float:
    """M of a kind of sampling with b clients (expected)."""
    w, sampling = federation.weights, KINDS[kind](federation, b)
    found = float((sampling.s * w / sampling.p).max())
    if kind == "uniform" and 1 < len(w) <= MAX_EIGENVALUE_CLIENTS:
        found = min(found, float((smallest_s(sampling, w) * w / sampling.p).max()))
    return found


def sampling_advice(
    federation: Federation, rate: ConvergenceRate, cohort: int, *, epsilon: float, start: float
) -> SamplingAdvice:
    """Compare samplings and cohort sizes by the rounds that they are predicted to need.

    ``rate`` is that of a method that weights by inclusion probability, with any sampling; cohort is
    the number of clients per round; epsilon and start are as for ``rate.rounds_to``.

    >>> clients, problem = Federation.from_sizes([10] * 40), ProblemConstants(L=1.0, G=4.0)
    >>> rate = ConvergenceRate(method_constants(clients, "fedshuffle"), problem, regime="convex")
    >>> advice = sampling_advice(clients, rate, 4, epsilon=0.5, start=10.0)
    >>> [option.rounds for option in advice.options], advice.pays_until["importance"]
    ([503, 496, 496], 7)
    """
    expect(federation, Federation, "federation")
    expect(rate, ConvergenceRate, "rate")
    n = len(federation)
    b = count(cohort, "the number of clients in a cohort", most=n)

    def option(kind: str, size: int) -> SamplingOption:
        M = sampling_variance(kind, federation, size)  # noqa: N806
        found = rate.with_variance(M).rounds_to(epsilon, start=start)
        return SamplingOption(kind, size, M, found.rounds, found.step_size)

    ladder: list[int] = sorted({*(2**k for k in range(n.bit_length()) if 2**k <= n), n})
    sizes = [tuple(option(kind, size) for kind in KINDS) for size in ladder]

    def pays_until(k: int, kind: str) -> int:
        """The largest cohort with ``rounds(1) / rounds(b) >= b / 2``."""

        def pays(found: SamplingOption) -> bool:
            return sizes[0][k].rounds >= 0.5 * found.cohort * found.rounds

        last = max(j for j, row in enumerate(sizes) if pays(row[k]))
        between = range(ladder[last] + 1, [*ladder, n + 1][last + 1])
        more = bisect_left(between, True, key=lambda size: not pays(option(kind, size)))
        return ladder[last] + more

    options = tuple(option(kind, b) for kind in KINDS)
    until = {kind: pays_until(k, kind) for k, kind in enumerate(KINDS)}
    return SamplingAdvice(rate.regime, b, options, tuple(sizes), until)
