r"""Predicted curves: the upper bounds of the general theorem, with their constants.

With :math:`\eta = W \eta_g \eta_l` the proof says of one round (docs/theory.md derives it)

.. math:: E|x^+ - \hat x|^2 \le \Big(1 - \frac{\mu \eta}{2}\Big) |x - \hat x|^2
          - g\, (\hat f(x) - \hat f^\star) + b \quad \text{(convex)}, \qquad
          E \hat f(x^+) \le \hat f(x) - g\, |\nabla \hat f(x)|^2 + b \quad \text{(not)},

with a gain g and a noise b that are explicit functions of the step size. Nothing is rounded here:
the paper puts ``eta / 10`` and ``eta / 8`` for the gains and 9 in the noise, which holds at the
largest step; at smaller ones the truth is better, and so are these curves.

A curve is one of three, each an expectation over cohorts and orders:

``gap``: :math:`\hat f - \hat f^\star` at one of the rounds so far, picked with the weights
:math:`g_r / \prod_{k \le r} (1 - \mu \eta_k / 2)`; for the mean model with these weights it holds
as well, and for the best of the rounds. ``distance``: :math:`|x - \hat x|^2` after the last.
``gradient``: :math:`|\nabla \hat f|^2` at one of the rounds so far, picked with the weights
:math:`g_r`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final, get_args

import numpy as np

from fedshuffle import schedules
from fedshuffle._arrays import FloatArray, count, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.schedules import Schedule
from fedshuffle.theory.constants import MethodConstants
from fedshuffle.theory.step_sizes import (
    ProblemConstants,
    drift_noise,
    largest_step_size,
)

Regime = Literal["strongly-convex", "convex", "non-convex"]
REGIMES: tuple[Regime, ...] = get_args(Regime)

Quantity = Literal["gap", "distance", "gradient"]

_DECADES = 12
"""So many decades of step sizes are searched at a time."""


class Round(NamedTuple):
    """What a round does: ``after <= keep * before - gain * measured + noise``."""

    keep: FloatArray
    gain: FloatArray
    noise: FloatArray


@final
@dataclass(frozen=True)
class Tuned:
    """A step size, and what is promised for it."""

    step_size: float
    """This project's: ``eta_l / tau_max``."""
    eta_l: float
    effective: float
    """``W eta_g eta_l``."""
    rounds: int
    value: float
    """The bound on the quantity after so many rounds."""
    quantity: Quantity


@final
@dataclass(frozen=True)
class Recursion:
    """The proof's inequality for one round, for one setting."""

    regime: Regime
    L: float
    mu: float
    """0 unless strongly convex."""
    B2: float
    G2: float
    M: float
    """``M_1``."""
    W: float
    server_step_size: float
    reach: float
    """``max_i tau_i / c_i``."""
    spread: float
    """A: ``max_i (tau_i / c_i)^2 (1 + P_i^2 / (3 k_i E_i^2))``."""
    local: float
    """The part of the drift's noise that is there without G."""
    longest: int
    largest: float
    """The largest effective step that the proof allows."""

    @classmethod
    def of(
        cls,
        constants: MethodConstants,
        problem: ProblemConstants,
        *,
        regime: Regime,
        server_step_size: float = 1.0,
    ) -> Recursion:
        """That of a method on a problem."""
        if regime not in REGIMES:
            raise unknown("regime", regime, REGIMES)
        if regime == "strongly-convex" and not problem.mu > 0:
            raise FedShuffleError(
                "mu is 0, so the losses are not known to be strongly convex. Use regime='convex',"
                " or regularise them (weight_decay)."
            )
        limit = largest_step_size(
            constants, problem, server_step_size=server_step_size, bound="proof"
        )
        alone = replace(problem, G=1.0, sigma=0.0), replace(problem, G=0.0)
        spread, local = (drift_noise(constants, part, bound="proof") for part in alone)
        return cls(
            regime=regime,
            L=problem.L,
            mu=problem.mu if regime == "strongly-convex" else 0.0,
            B2=problem.B**2,
            G2=problem.G**2,
            M=constants.M_1,
            W=constants.W,
            server_step_size=limit.server_step_size,
            reach=float(constants.shares.max()),
            spread=spread,
            local=local,
            longest=constants.longest,
            largest=limit.effective,
        )

    def sampled(self, M: float) -> Recursion:  # noqa: N803
        """The same method and problem under a sampling with another M.

        Only for methods that weigh by inclusion probability: nothing else depends on the sampling.
        """
        # 4 L eta (1 + M B^2) <= 1 changes, what the drift allows does not.
        drift = self.W * self.server_step_size * self._drift_limit
        progress = 1.0 / (4.0 * self.L * (1.0 + M * self.B2))
        return replace(self, M=M, largest=min(progress, drift))

    @property
    def _drift_limit(self) -> float:
        return math.sqrt(0.9 / (12.0 * self.B2 * self.spread + 1.8 * self.reach**2)) / self.L

    def at(self, effective: FloatArray) -> Round:
        """Keep, gain and noise for effective steps."""
        eta = np.asarray(effective, dtype=np.float64)
        L, M = self.L, self.M  # noqa: N806
        eta_l = eta / (self.W * self.server_step_size)
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
        return Round(1.0 - self.mu * eta / 2.0, np.where(room > 0, gain, -np.inf), noise)

    def effective(self, step_size: float) -> float:
        """``W eta_g eta_l`` of this project's step size."""
        return self.W * self.server_step_size * step_size * self.longest

    def tuned(self, effective: float, rounds: int, start: float, quantity: Quantity) -> Tuned:
        """What is promised for one effective step."""
        eta_l = effective / (self.W * self.server_step_size)
        value = float(self.after(rounds, np.array([effective]), start, quantity)[0])
        return Tuned(eta_l / self.longest, eta_l, effective, rounds, value, quantity)

    def after(
        self, rounds: int, effective: FloatArray, start: float, quantity: Quantity
    ) -> FloatArray:
        """The bound after so many rounds, for each of some effective steps."""
        keep, gain, noise = self.at(effective)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if quantity == "distance":
                q = keep - gain * self.mu / 2.0
                spent = np.where(q == 1.0, rounds, -np.expm1(rounds * np.log(q)) / (1.0 - q))
                value = q**rounds * start + spent * noise
                return np.where(gain >= 0, value, np.inf)
            value = start / (gain * self._weight(keep, rounds)) + noise / gain
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
            weight = start / rest
            rounds = weight
            if self.mu > 0:
                rounds = np.log1p((1.0 - keep) * weight) / -np.log(keep)
        return np.where((gain > 0) & (rest > 0), rounds, np.inf)

    @staticmethod
    def _weight(keep: FloatArray, rounds: int) -> FloatArray:
        """``sum_{r=1..R} keep^-r``."""
        grown = np.expm1(-rounds * np.log(keep)) / (1.0 - keep)
        weight: FloatArray = np.where(keep == 1.0, float(rounds), grown)
        return weight


def upper_bound(
    rounds: int,
    constants: MethodConstants,
    problem: ProblemConstants,
    step_size: Schedule,
    server_step_size: float = 1.0,
    *,
    regime: Regime,
    start: float,
    quantity: Quantity | None = None,
) -> FloatArray:
    """The bound after 0, 1, ..., ``rounds`` rounds.

    Args:
        rounds: how many.
        constants: of the method, the sampling and the federation.
        problem: the constants of the losses. For the regime ``non-convex`` G and B must be for the
            gradient form of similarity.
        step_size: this project's, a number or a function of the round.
        server_step_size: ``eta_g``.
        regime: ``strongly-convex``, ``convex`` or ``non-convex``.
        start: ``|x^0 - x*|^2``, or ``f(x^0) - f*`` for losses that are not convex.
        quantity: of what, see above; ``gap``, or ``gradient`` for losses that are not convex.

    Before the first round a ``gap`` and a ``gradient`` have no bound, and are infinite.

    >>> from fedshuffle import Federation
    >>> from fedshuffle.theory import method_constants
    >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
    >>> problem = ProblemConstants(L=1.0, mu=1.0)
    >>> upper_bound(
    ...     3, found, problem, 0.05, regime="strongly-convex", start=1.0, quantity="distance"
    ... ).round(3).tolist()
    [1.0, 0.836, 0.699, 0.585]
    """
    rounds = count(rounds, "rounds")
    recursion = Recursion.of(constants, problem, regime=regime, server_step_size=server_step_size)
    measured = measured_by(regime, quantity)
    before = number(start, "start")
    if not 0.0 <= before < math.inf:
        raise FedShuffleError(f"start is {start}, but must be 0 or more, and finite.")
    moved = np.array(
        [
            recursion.effective(schedules.value(step_size, r, "step size"))
            for r in (range(rounds) if callable(step_size) else (0,))
        ]
    )
    keep, gain, noise = (np.broadcast_to(part, rounds) for part in recursion.at(moved))
    if (gain < 0).any() or (measured != "distance" and gain[0] <= 0):
        largest = recursion.largest / recursion.effective(1.0)
        raise FedShuffleError(
            f"the proof says nothing of the step size {moved.max() / recursion.effective(1.0):g}:"
            f" the largest that it allows here is {largest:g}."
        )
    if measured == "distance":
        return _distance(keep - gain * recursion.mu / 2.0, noise, before)
    return _mean(keep, gain, noise, before)


def tune(
    rounds: int,
    constants: MethodConstants,
    problem: ProblemConstants,
    *,
    server_step_size: float = 1.0,
    regime: Regime,
    start: float,
    quantity: Quantity | None = None,
) -> Tuned:
    """The step size for which the bound after so many rounds is smallest.

    The paper's lemmas choose it by hand, up to factors; here the bound itself is minimised, among
    the steps that the proof allows, so it is never larger than what the lemmas give.

        >>> from fedshuffle import Federation
        >>> from fedshuffle.theory import method_constants
        >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle", "uniform:2")
        >>> problem = ProblemConstants(L=1.0, G=1.0)
        >>> few, many = (tune(r, found, problem, regime="convex", start=1.0) for r in (10, 1000))
        >>> many.step_size < few.step_size, many.value < few.value
        (True, True)
    """
    recursion = Recursion.of(constants, problem, regime=regime, server_step_size=server_step_size)
    measured, before = measured_by(regime, quantity), _positive(start, "start")
    rounds = count(rounds, "rounds")
    best = search(lambda eta: recursion.after(rounds, eta, before, measured), recursion.largest)
    return recursion.tuned(best, rounds, before, measured)


def rounds_to(
    epsilon: float,
    constants: MethodConstants,
    problem: ProblemConstants,
    *,
    server_step_size: float = 1.0,
    regime: Regime,
    start: float,
    quantity: Quantity | None = None,
) -> Tuned:
    """In how many rounds the bound is at most epsilon, with the step size for which these are
    fewest. Truth may be, and often is, much faster: this is what is proven.

        >>> from fedshuffle import Federation
        >>> from fedshuffle.theory import method_constants
        >>> found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle")
        >>> rounds_to(0.1, found, ProblemConstants(L=1.0), regime="convex", start=1.0).rounds
        57
    """
    recursion = Recursion.of(constants, problem, regime=regime, server_step_size=server_step_size)
    return fewest(recursion, epsilon, start, measured_by(regime, quantity))


def fewest(recursion: Recursion, epsilon: float, start: float, quantity: Quantity) -> Tuned:
    """The same for a recursion at hand."""
    target, before = _positive(epsilon, "epsilon"), _positive(start, "start")
    best = search(lambda eta: recursion.needed(target, eta, before, quantity), recursion.largest)
    needed = float(recursion.needed(target, np.array([best]), before, quantity)[0])
    if not math.isfinite(needed):
        raise FedShuffleError(
            f"no number of rounds is known to bring the {quantity} to {epsilon:g}. Use a larger"
            " epsilon, or another quantity."
        )
    return recursion.tuned(best, max(1, math.ceil(needed * (1 - 1e-12))), before, quantity)


def measured_by(regime: Regime, quantity: Quantity | None) -> Quantity:
    """The quantity, by default that of the theorem; or a clear error."""
    if regime not in REGIMES:
        raise unknown("regime", regime, REGIMES)
    fitting: tuple[Quantity, ...] = ("gradient",) if regime == "non-convex" else ("gap", "distance")
    if quantity is None:
        return fitting[0]
    if quantity not in fitting:
        raise unknown(f"quantity of the regime {regime!r}", quantity, fitting)
    return quantity


def search(cost: Callable[[FloatArray], FloatArray], largest: float) -> float:
    """Where a cost is smallest among the positive numbers up to the largest.

    >>> round(search(lambda x: 1 / x + x, 5.0), 4)
    1.0
    """
    high, low = math.log10(largest), math.log10(largest) - _DECADES
    while True:
        grid = np.linspace(low, high, 600)
        values = cost(10.0**grid)
        best = int(values.argmin())
        if best > 0 or low < -290.0:
            break
        low -= _DECADES
    for _ in range(3):
        width = (grid[1] - grid[0]) * 1.5
        grid = np.linspace(grid[best] - width, min(grid[best] + width, high), 600)
        values = cost(10.0**grid)
        best = int(values.argmin())
    return min(float(10.0 ** grid[best]), largest)


def _distance(shrink: FloatArray, noise: FloatArray, start: float) -> FloatArray:
    curve = [start]
    for q, b in zip(shrink.tolist(), noise.tolist(), strict=True):
        curve.append(q * curve[-1] + b)
    return np.array(curve)


def _mean(keep: FloatArray, gain: FloatArray, noise: FloatArray, start: float) -> FloatArray:
    """``(start + sum w_r noise_r) / sum w_r gain_r``, scaled so that nothing overflows."""
    above, below, curve = start, 0.0, [math.inf]
    for rho, g, b in zip(keep.tolist(), gain.tolist(), noise.tolist(), strict=True):
        above, below = rho * above + b, rho * below + g
        curve.append(above / below)
    return np.array(curve)


def _positive(value: float, what: str) -> float:
    checked = number(value, what)
    if not 0.0 < checked < math.inf:
        raise FedShuffleError(f"{what} is {value}, but must be positive and finite.")
    return checked
