"""Step sizes and rates of the general theorem and its proof (docs/explanation/theory.md).

The effective step ``eta = W eta_g eta_l`` is how far a round moves along f-hat, to first order.
Bounds are on one of three expectations: ``gap``, f-hat - f-hat* at a past round drawn with the
weights ``g_r / prod_{k <= r} (1 - mu eta_k / 2)``, so also of the best round; ``distance``,
``|x - x-hat|^2`` after the last one; ``gradient``, ``|grad f-hat|^2`` at one drawn by the g_r.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

import numpy as np

from fedshuffle import schedules
from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle.errors import FedShuffleError, check_known, unknown
from fedshuffle.schedules import Schedule
from fedshuffle.theory.constants import ProblemConstants
from fedshuffle.theory.method_constants import MethodConstants

Bound = Literal["theorem", "proof"]
"""Whether a bound is the theorem's, or the tighter one of its proof."""
Regime = Literal["strongly-convex", "convex", "non-convex"]
"""What is assumed of the losses."""
Quantity = Literal["gap", "distance", "gradient"]
"""What a bound is on: the gap to the optimum, the distance to it, or the squared gradient."""


@dataclass(frozen=True)
class StepLimit:
    """The largest step sizes that a bound allows, in each parametrisation."""

    step_size: float
    """This project's: ``eta_l / tau_max``, that of a client with ``c_i = tau_max``."""
    eta_l: float
    """The paper's local step size; client i uses ``eta_l / c_i``."""
    largest_client_step: float
    """``eta_l / min c``, the largest step that any client takes."""
    effective: float
    """``W eta_g eta_l``: how far a round moves along the objective's gradient."""
    binding: str
    """The condition that limits it: the theorem's ``beta``, ``progress``, or ``drift``."""


def largest_step_size(
    constants: MethodConstants,
    problem: ProblemConstants,
    *,
    server_step_size: float = 1.0,
    bound: Bound = "theorem",
) -> StepLimit:
    """The largest local step size for a server step size.

    With ``bound="theorem"`` it is the paper's ``eta_l max(1, W eta_g) <= 1 / (4 beta L)``, where
    ``beta = 1 + M_2 + (1 + P) B + M_1 B^2`` (the paper omits W: docs/research/differences.md). With
    ``bound="proof"``, which is never smaller, it is what the proof needs for the progress of a
    round, ``4 L eta (1 + M_1 B^2) <= 1``, and against the drift of clients, ``12 L^2 eta_l^2 B^2 A
    <= 9/10 (1 - 2 L^2 eta_l^2 r^2)``, where ``r = max_i tau_i / c_i`` and
    ``A = max_i (tau_i / c_i)^2 (1 + P_i^2 / (3 k_i E_i^2))``.

    >>> from fedshuffle import Federation
    >>> from fedshuffle.theory import method_constants
    >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
    >>> largest_step_size(found, ProblemConstants(L=1.0)).eta_l == 1 / 12
    True
    """
    _check(constants, problem, bound)
    eta_g = number(server_step_size, "server_step_size", "(0, inf)")
    (spread, _), b2 = _drift(constants, problem, bound), problem.B**2
    if bound == "theorem":
        p = math.sqrt(spread - 1.0)
        beta = 1.0 + constants.M_2 + (1.0 + p) * problem.B + constants.M_1 * b2
        both = 1.0 / (4.0 * beta * problem.L)
        eta_l, binding = both / max(1.0, constants.W * eta_g), "beta"
    else:
        by_progress = 1.0 / (4.0 * problem.L * (1.0 + constants.M_1 * b2)) / (constants.W * eta_g)
        # 12 B^2 A e = 9/10 (1 - 2 r^2 e) for e = (L eta_l)^2.
        reach = float(constants.shares.max())
        by_drift = math.sqrt(0.9 / (12.0 * b2 * spread + 1.8 * reach**2)) / problem.L
        eta_l = min(by_progress, by_drift)
        binding = "drift" if by_drift < by_progress else "progress"
    largest, effective = eta_l / float(constants.c.min()), constants.W * eta_g * eta_l
    return StepLimit(eta_l / constants.max_steps, eta_l, largest, effective, binding)


def drift_noise(
    constants: MethodConstants, problem: ProblemConstants, *, bound: Bound = "theorem"
) -> float:
    """The noise N from the clients' drift, which adds ``9 L eta eta_l^2 N`` to a round at most.

    ``(1 + P^2) G^2 + sigma^2`` by the theorem, with ``P^2 = max_i P_i^2 / (3 k_i E_i^2)`` and
    ``sigma^2 = sum_i w-hat_i sigma_i^2 / (3 k_i E_i^2)``. By the proof, where client i drifts only
    ``tau_i / c_i`` as far, ``A G^2 + sum_i w-hat_i (tau_i / c_i)^2 sigma_i^2 / (3 k_i E_i^2)``.

    >>> from fedshuffle import Federation
    >>> from fedshuffle.theory import method_constants
    >>> constants = method_constants(Federation.from_sizes([1, 2]), "fedshuffle", "full")
    >>> drift_noise(constants, ProblemConstants(L=1.0, G=2.0))
    4.0
    """
    _check(constants, problem, bound)
    spread, local = _drift(constants, problem, bound)
    return spread * problem.G**2 + local


def _drift(
    constants: MethodConstants, problem: ProblemConstants, bound: Bound
) -> tuple[float, float]:
    """The factor of G^2 in the noise (``1 + P^2`` by the theorem, A by the proof), and the rest."""
    n, tau = len(constants.tau), constants.tau.astype(np.float64)
    visits = 3.0 * tau**2 / constants.steps_per_epoch  # 3 k_i E_i^2, with E_i = tau_i / k_i
    shrink = constants.shares**2 if bound == "proof" else np.ones(n)
    spread = shrink * (1.0 + problem.per_client("P", n) ** 2 / visits)
    local = constants.w_hat @ (shrink * problem.per_client("sigma", n) ** 2 / visits)
    return float(spread.max()), float(local)


def _check(constants: MethodConstants, problem: ProblemConstants, bound: str) -> None:
    expect(constants, MethodConstants, "constants")
    expect(problem, ProblemConstants, "problem")
    check_known("bound", bound, get_args(Bound))
    if constants.obstacle:
        raise FedShuffleError(f"no step size can be advised: {constants.obstacle}.")
    short = np.flatnonzero(constants.shares > 1.0 + 1e-12)
    if bound == "theorem" and short.size:
        i = int(short[0])
        raise FedShuffleError(
            f"the theorem asks for c_i >= tau_i, but client {i} has c = {constants.c[i]:g} and"
            f" {constants.tau[i]} steps. Use a larger c, or bound='proof'."
        )


@dataclass(frozen=True)
class TunedStep:
    """A step size, and the bound that is proven for it."""

    step_size: float
    """This project's: ``eta_l / tau_max``."""
    rounds: int
    bound: float
    """The bound on the quantity after these rounds."""
    quantity: Quantity
    eta_l: float
    effective: float
    """``W eta_g eta_l``."""


class ConvergenceRate:
    """The bounds of a method on a problem, from the proof's inequality for one round.

    In the regime ``non-convex`` G and B must be for the gradient form of similarity. ``start`` is
    always ``|x^0 - x*|^2``, or ``f(x^0) - f*`` for non-convex losses. ``quantity`` is what is
    bounded, see the module; by default ``gap``, or ``gradient`` for non-convex losses.

        >>> from fedshuffle import Federation
        >>> from fedshuffle.theory import method_constants
        >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle", "uniform:2")
        >>> rate = ConvergenceRate(found, ProblemConstants(L=1.0, G=1.0), regime="convex")
        >>> best = rate.rounds_to(0.5, start=1.0)
        >>> best.rounds, rate.curve(best.rounds, best.step_size, start=1.0)[-1].round(2).item()
        (18, 0.5)
    """

    def __init__(
        self,
        constants: MethodConstants,
        problem: ProblemConstants,
        *,
        regime: Regime,
        server_step_size: float = 1.0,
    ) -> None:
        check_known("regime", regime, get_args(Regime))
        if regime == "strongly-convex" and not problem.mu > 0:
            raise FedShuffleError(
                "mu is 0, so the losses are not known to be strongly convex. Use regime='convex',"
                " or regularise them (weight_decay)."
            )
        eta_g = server_step_size
        self.limit = largest_step_size(constants, problem, server_step_size=eta_g, bound="proof")
        self._given = constants, problem, regime, eta_g
        self.regime, self.mu = regime, problem.mu if regime == "strongly-convex" else 0.0
        self.L, self.B2, self.G2, self.M = problem.L, problem.B**2, problem.G**2, constants.M_1
        self.scale, self.max_steps = constants.W * eta_g, constants.max_steps
        self.reach = float(constants.shares.max())
        self.spread, self.local = _drift(constants, problem, "proof")

    def with_variance(self, M: float) -> "ConvergenceRate":  # noqa: N803
        """The same method and problem under a sampling with another M.

        Only for methods that weight by inclusion probability: nothing else depends on the sampling.
        """
        constants, problem, regime, eta_g = self._given
        constants = replace(constants, M_1=M)
        return ConvergenceRate(constants, problem, regime=regime, server_step_size=eta_g)

    def at(self, effective: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """For each of some effective steps ``keep``, ``gain`` and ``noise`` of the inequality
        ``after <= keep * before - gain * quantity + noise``.
        """
        eta = np.asarray(effective, dtype=np.float64)
        L, M = self.L, self.M  # noqa: N806
        eta_l = eta / self.scale
        room = 1.0 - 2.0 * (L * eta_l * self.reach) ** 2
        drifted = 2.0 * eta_l**2 / np.where(room > 0, room, 1.0)
        left = drifted * (self.spread * self.G2 + self.local)
        more = drifted * self.B2 * self.spread
        if self.regime == "non-convex":
            price = eta * L**2 * (0.5 + (1.0 + M) * L * eta)
            gain = eta * (0.5 - L * eta * (1.0 + M * self.B2)) - price * more
            noise = L * eta**2 * M * self.G2 + price * left
        else:
            price = 2.0 * L * eta * (1.0 + (1.0 + M) * L * eta)
            gain = 2.0 * eta * (1.0 - 2.0 * L * eta * (1.0 + M * self.B2))
            gain = gain - price * more * 2.0 * L
            noise = 2.0 * eta**2 * M * self.G2 + price * left
        return 1.0 - self.mu * eta / 2.0, np.where(room > 0, gain, -np.inf), noise

    def after(
        self, rounds: int, effective: FloatArray, start: float, quantity: Quantity
    ) -> FloatArray:
        """The bound after this many rounds, for each of some effective steps."""
        keep, gain, noise = self.at(effective)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if quantity == "distance":
                q = keep - gain * self.mu / 2.0
                spent = np.where(q == 1.0, rounds, -np.expm1(rounds * np.log(q)) / (1.0 - q))
                value = q**rounds * start + spent * noise
                return np.where(gain >= 0, value, np.inf)
            grown = np.expm1(-rounds * np.log(keep)) / (1.0 - keep)
            weight = np.where(keep == 1.0, float(rounds), grown)  # sum_{r=1..R} keep^-r
            value = start / (gain * weight) + noise / gain
        return np.where(gain > 0, value, np.inf)

    def needed(self, epsilon: float, effective: FloatArray, start: float) -> FloatArray:
        """The rounds until the gap (or gradient) is epsilon, for each of some effective steps."""
        keep, gain, noise = self.at(effective)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            rest = gain * epsilon - noise
            rounds = weight = start / rest
            if self.mu > 0:
                rounds = np.log1p((1.0 - keep) * weight) / -np.log(keep)
        return np.where((gain > 0) & (rest > 0), rounds, np.inf)

    def curve(
        self, rounds: int, step_size: Schedule, *, start: float, quantity: Quantity | None = None
    ) -> FloatArray:
        """The bound after 0, 1, ..., ``rounds`` rounds; a gap or gradient is infinite at first."""
        rounds, quantity = count(rounds, "rounds"), self.bounded(quantity)
        before = number(start, "start", "[0, inf)")
        steps = range(rounds) if callable(step_size) else range(1)
        sizes = np.array([schedules.value(step_size, r, "step size") for r in steps])
        moved = self.at(sizes * self.max_steps * self.scale)
        keep, gain, noise = (np.broadcast_to(part, rounds) for part in moved)
        if (gain < 0).any() or (quantity != "distance" and gain[0] <= 0):
            raise FedShuffleError(
                f"the proof says nothing of the step size {sizes.max():g}: the largest that it"
                f" allows here is {self.limit.step_size:g}."
            )
        if quantity == "distance":
            return _recursion(keep - gain * self.mu / 2.0, noise, before)
        # (start + sum w_r noise_r) / sum w_r gain_r, scaled so that nothing overflows.
        above, below = _recursion(keep, noise, before), _recursion(keep, gain, 0.0)
        return np.concatenate([[np.inf], above[1:] / below[1:]])

    def tune(self, rounds: int, *, start: float, quantity: Quantity | None = None) -> TunedStep:
        """The step size with the smallest bound after this many rounds.

        The paper's lemmas choose it by hand, up to factors; here the bound itself is minimised
        among the steps that the proof allows, so it is never larger than what the lemmas give.
        """
        rounds, quantity = count(rounds, "rounds"), self.bounded(quantity)
        before = number(start, "start", "(0, inf)")
        largest = self.limit.effective
        best = _argmin(lambda eta: self.after(rounds, eta, before, quantity), largest)
        return self._tuned(best, rounds, before, quantity)

    def rounds_to(self, epsilon: float, *, start: float) -> TunedStep:
        """The fewest rounds after which the bound on the gap (or gradient) is at most epsilon, and
        the step size for them. This is what is proven; training is often much faster.
        """
        target = number(epsilon, "epsilon", "(0, inf)")
        before = number(start, "start", "(0, inf)")
        best = _argmin(lambda eta: self.needed(target, eta, before), self.limit.effective)
        needed = float(self.needed(target, np.array([best]), before)[0])
        if not math.isfinite(needed):
            raise FedShuffleError(f"epsilon is {epsilon:g}, which is too small to be reached.")
        rounds = max(1, math.ceil(needed * (1 - 1e-12)))
        return self._tuned(best, rounds, before, self.bounded(None))

    def _tuned(self, effective: float, rounds: int, start: float, quantity: Quantity) -> TunedStep:
        eta_l = effective / self.scale
        value = float(self.after(rounds, np.array([effective]), start, quantity)[0])
        return TunedStep(eta_l / self.max_steps, rounds, value, quantity, eta_l, effective)

    def bounded(self, quantity: Quantity | None) -> Quantity:
        """The quantity to bound, by default that of the theorem."""
        convex: tuple[Quantity, ...] = ("gap", "distance")
        fitting = ("gradient",) if self.regime == "non-convex" else convex
        if quantity is not None and quantity not in fitting:
            raise unknown(f"quantity of the regime {self.regime!r}", quantity, fitting)
        return quantity or fitting[0]


def _recursion(factor: FloatArray, added: FloatArray, first: float) -> FloatArray:
    """The sequence ``y <- factor_r y + added_r``."""
    pairs = zip(factor.tolist(), added.tolist(), strict=True)
    return np.array([*accumulate(pairs, lambda y, pair: pair[0] * y + pair[1], initial=first)])


def _argmin(cost: Callable[[FloatArray], FloatArray], largest: float) -> float:
    """Where a cost is smallest among the positive numbers up to the largest."""
    high, low = math.log10(largest), math.log10(largest) - 12
    while True:
        grid = np.linspace(low, high, 600)
        best = int(cost(10.0**grid).argmin())
        if best > 0 or low < -290.0:
            break
        low -= 12
    for _ in range(3):
        width = (grid[1] - grid[0]) * 1.5
        grid = np.linspace(grid[best] - width, min(grid[best] + width, high), 600)
        best = int(cost(10.0**grid).argmin())
    return min(float(10.0 ** grid[best]), largest)
