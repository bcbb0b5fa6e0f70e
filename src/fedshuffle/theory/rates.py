r"""Convergence rates: the upper bounds of the general theorem, with their constants.

With :math:`\eta = W \eta_g \eta_l` the proof says of one round (docs/theory.md derives it)

.. math:: E|x^+ - \hat x|^2 \le \Big(1 - \frac{\mu \eta}{2}\Big) |x - \hat x|^2
          - g\, (\hat f(x) - \hat f^\star) + b \quad \text{(convex)}, \qquad
          E \hat f(x^+) \le \hat f(x) - g\, |\nabla \hat f(x)|^2 + b \quad \text{(not)},

with a gain g and a noise b that are explicit functions of the step size. A bound is on one of three
quantities, each an expectation over cohorts and orders: ``gap``, :math:`\hat f - \hat f^\star` at a
past round drawn with the weights :math:`g_r / \prod_{k \le r} (1 - \mu \eta_k / 2)`, and hence of
the mean model with these weights and of the best round; ``distance``, :math:`|x - \hat x|^2` after
the last round; ``gradient``, :math:`|\nabla \hat f|^2` at a past round drawn with the weights g_r.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from fedshuffle import schedules
from fedshuffle._arrays import FloatArray, count, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.schedules import Schedule
from fedshuffle.theory.constants import MethodConstants, ProblemConstants
from fedshuffle.theory.step_sizes import drift_limit, drift_noise, largest_step_size, progress_limit

Regime = Literal["strongly-convex", "convex", "non-convex"]
Quantity = Literal["gap", "distance", "gradient"]

_DECADES = 12
"""Decades of step sizes to search at a time."""


class RoundInequality(NamedTuple):
    """What a round does: ``after <= keep * before - gain * quantity + noise``."""

    keep: FloatArray
    gain: FloatArray
    noise: FloatArray


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
        >>> few, many = (rate.tune(rounds, start=1.0) for rounds in (10, 1000))
        >>> many.step_size < few.step_size, many.bound < few.bound
        (True, True)
    """

    def __init__(
        self,
        constants: MethodConstants,
        problem: ProblemConstants,
        *,
        regime: Regime,
        server_step_size: float = 1.0,
    ) -> None:
        if regime not in get_args(Regime):
            raise unknown("regime", regime, get_args(Regime))
        if regime == "strongly-convex" and not problem.mu > 0:
            raise FedShuffleError(
                "mu is 0, so the losses are not known to be strongly convex. Use regime='convex',"
                " or regularise them (weight_decay)."
            )
        limit = largest_step_size(
            constants, problem, server_step_size=server_step_size, bound="proof"
        )
        self.regime, self.mu = regime, problem.mu if regime == "strongly-convex" else 0.0
        self.L, self.B2, self.G2, self.M = problem.L, problem.B**2, problem.G**2, constants.M_1
        self.scale, self.longest = constants.W * limit.server_step_size, constants.longest
        self.largest = limit.effective  # the largest effective step that the proof allows
        self.reach = float(constants.shares.max())
        # A, and the part of the drift's noise that does not depend on G.
        alone = replace(problem, G=1.0, sigma=0.0), replace(problem, G=0.0)
        self.spread, self.local = (drift_noise(constants, part, bound="proof") for part in alone)

    def with_variance(self, M: float) -> ConvergenceRate:  # noqa: N803
        """The same method and problem under a sampling with another M.

        Only for methods that weight by inclusion probability: nothing else depends on the sampling.
        """
        rate = copy.copy(self)
        drift = self.scale * drift_limit(self.L, self.B2, self.spread, self.reach)
        rate.M, rate.largest = M, min(progress_limit(self.L, M, self.B2), drift)
        return rate

    def at(self, effective: FloatArray) -> RoundInequality:
        """The inequality for each of some effective steps."""
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
        return RoundInequality(1.0 - self.mu * eta / 2.0, np.where(room > 0, gain, -np.inf), noise)

    def effective(self, step_size: float) -> float:
        """``W eta_g eta_l`` of this project's step size."""
        return self.scale * step_size * self.longest

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

    def needed(
        self, epsilon: float, effective: FloatArray, start: float, quantity: Quantity
    ) -> FloatArray:
        """The rounds until the bound is epsilon, for each of some effective steps."""
        keep, gain, noise = self.at(effective)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if quantity == "distance":
                q = keep - gain * self.mu / 2.0
                floor = noise / (1.0 - q)
                rounds = np.log((start - floor) / (epsilon - floor)) / -np.log(q)
                reached = (gain >= 0) & (q < 1.0) & (epsilon > floor)
                rounds = np.where(epsilon >= start, 0.0, rounds)
                return np.where(reached, rounds, np.inf)
            rest = gain * epsilon - noise
            rounds = weight = start / rest
            if self.mu > 0:
                rounds = np.log1p((1.0 - keep) * weight) / -np.log(keep)
        return np.where((gain > 0) & (rest > 0), rounds, np.inf)

    def curve(
        self, rounds: int, step_size: Schedule, *, start: float, quantity: Quantity | None = None
    ) -> FloatArray:
        """The bound after 0, 1, ..., ``rounds`` rounds; a gap or gradient is infinite at first.

        >>> from fedshuffle import Federation
        >>> from fedshuffle.theory import method_constants
        >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
        >>> problem = ProblemConstants(L=1.0, mu=1.0)
        >>> rate = ConvergenceRate(found, problem, regime="strongly-convex")
        >>> rate.curve(3, 0.05, start=1.0, quantity="distance").round(3).tolist()
        [1.0, 0.836, 0.699, 0.585]
        """
        rounds, quantity = count(rounds, "rounds"), self.bounded(quantity)
        before = number(start, "start", "[0, inf)")
        steps = range(rounds) if callable(step_size) else range(1)
        moved = np.array(
            [self.effective(schedules.value(step_size, r, "step size")) for r in steps]
        )
        keep, gain, noise = (np.broadcast_to(part, rounds) for part in self.at(moved))
        if (gain < 0).any() or (quantity != "distance" and gain[0] <= 0):
            scale = self.effective(1.0)
            raise FedShuffleError(
                f"the proof says nothing of the step size {moved.max() / scale:g}: the largest that"
                f" it allows here is {self.largest / scale:g}."
            )
        if quantity == "distance":
            curve, shrink = [before], keep - gain * self.mu / 2.0
            for q, b in zip(shrink.tolist(), noise.tolist(), strict=True):
                curve.append(q * curve[-1] + b)
            return np.array(curve)
        # (start + sum w_r noise_r) / sum w_r gain_r, scaled so that nothing overflows.
        above, below, curve = before, 0.0, [math.inf]
        for rho, g, b in zip(keep.tolist(), gain.tolist(), noise.tolist(), strict=True):
            above, below = rho * above + b, rho * below + g
            curve.append(above / below)
        return np.array(curve)

    def tune(self, rounds: int, *, start: float, quantity: Quantity | None = None) -> TunedStep:
        """The step size with the smallest bound after this many rounds.

        The paper's lemmas choose it by hand, up to factors; here the bound itself is minimised
        among the steps that the proof allows, so it is never larger than what the lemmas give.
        """
        rounds, quantity = count(rounds, "rounds"), self.bounded(quantity)
        before = number(start, "start", "(0, inf)")
        best = _argmin(lambda eta: self.after(rounds, eta, before, quantity), self.largest)
        return self._tuned(best, rounds, before, quantity)

    def rounds_to(
        self, epsilon: float, *, start: float, quantity: Quantity | None = None
    ) -> TunedStep:
        """The fewest rounds after which the bound is at most epsilon, and the step size for them.

        This is what is proven; training is often much faster.

        >>> from fedshuffle import Federation
        >>> from fedshuffle.theory import method_constants
        >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
        >>> rate = ConvergenceRate(found, ProblemConstants(L=1.0), regime="convex")
        >>> rate.rounds_to(0.1, start=1.0).rounds
        57
        """
        quantity = self.bounded(quantity)
        target = number(epsilon, "epsilon", "(0, inf)")
        before = number(start, "start", "(0, inf)")
        best = _argmin(lambda eta: self.needed(target, eta, before, quantity), self.largest)
        needed = float(self.needed(target, np.array([best]), before, quantity)[0])
        if not math.isfinite(needed):
            raise FedShuffleError(
                f"no number of rounds is known to bring the {quantity} to {epsilon:g}. Use a larger"
                " epsilon, or another quantity."
            )
        return self._tuned(best, max(1, math.ceil(needed * (1 - 1e-12))), before, quantity)

    def _tuned(self, effective: float, rounds: int, start: float, quantity: Quantity) -> TunedStep:
        eta_l = effective / self.scale
        value = float(self.after(rounds, np.array([effective]), start, quantity)[0])
        return TunedStep(eta_l / self.longest, rounds, value, quantity, eta_l, effective)

    def bounded(self, quantity: Quantity | None) -> Quantity:
        """The quantity to bound, by default that of the theorem."""
        convex: tuple[Quantity, ...] = ("gap", "distance")
        fitting = ("gradient",) if self.regime == "non-convex" else convex
        if quantity is not None and quantity not in fitting:
            raise unknown(f"quantity of the regime {self.regime!r}", quantity, fitting)
        return quantity or fitting[0]


def _argmin(cost: Callable[[FloatArray], FloatArray], largest: float) -> float:
    """Where a cost is smallest among the positive numbers up to the largest.

    >>> round(_argmin(lambda x: 1 / x + x, 5.0), 4)
    1.0
    """
    high, low = math.log10(largest), math.log10(largest) - _DECADES
    while True:
        grid = np.linspace(low, high, 600)
        best = int(cost(10.0**grid).argmin())
        if best > 0 or low < -290.0:
            break
        low -= _DECADES
    for _ in range(3):
        width = (grid[1] - grid[0]) * 1.5
        grid = np.linspace(grid[best] - width, min(grid[best] + width, high), 600)
        best = int(cost(10.0**grid).argmin())
    return min(float(10.0 ** grid[best]), largest)
