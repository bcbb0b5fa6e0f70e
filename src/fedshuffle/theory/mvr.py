"""FedShuffleMVR: its step size, its momentum parameter, and the bound that they give.

docs/explanation/theory.md says what the theorem covers, and docs/research/proofs.md redoes its
proof. As in the paper, ``eta_l`` is the step of an epoch; this project's ``step_size`` is
``eta_l E / tau_max``.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.local_optimisers import SGD
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.theory.constants import ProblemConstants
from fedshuffle.theory.rates import Bound

MIN_PROGRESS = 0.2
"""The smallest p that counts as progress: the paper's eta_l / 5."""


@dataclass(frozen=True)
class MVRStep:
    """A step size and its momentum parameter, with the bound that is proven for both."""

    step_size: float
    """This project's."""
    eta_l: float
    """The paper's, of an epoch."""
    a: float
    bound: float
    """On the mean of ``|grad f|^2`` over all rounds and epochs; infinite for limits."""


class MVRRate:
    """The bounds of FedShuffleMVR on a problem.

    >>> problem = ProblemConstants(L=1.0, G=1.0)
    >>> rate = MVRRate(Federation.from_sizes([2, 4]), problem, 0.1, LocalWork(epochs=10))
    >>> rate.limit().eta_l, rate.curve(1000, 0.005, 0.1, start=1.0)[[100, 1000]].round(2).tolist()
    (0.025, [1.01, 0.66])
    """

    def __init__(
        self,
        federation: Federation,
        problem: ProblemConstants,
        delta: float,
        work: LocalWork | None = None,
    ) -> None:
        """Delta is the Hessian similarity of the problem."""
        expect(federation, Federation, "federation")
        expect(problem, ProblemConstants, "problem")
        work = LocalWork() if work is None else work
        expect(work, LocalWork, "work")
        self.delta = number(delta, "delta", "[0, inf)")
        work = work.resolved()
        given: Any = 0 if isinstance(work.epochs, EpochRange) else work.epochs
        epochs = np.unique(given)
        whole = work.steps is None and work.interruption is None and not np.isfinite(work.clip)
        whole = whole and work.optimiser == SGD
        if np.size(epochs) != 1 or not np.all(epochs) or not whole or work.order != "reshuffled":
            raise FedShuffleError(
                "the theorem on FedShuffleMVR is for the same number of whole, reshuffled epochs at"
                " every client, of plain SGD, not clipped and not interrupted: give epochs as one"
                " number."
            )
        n = len(federation)
        if problem.per_client("P", n).any():
            raise FedShuffleError(
                "the theorem on FedShuffleMVR is for P = 0. Give the smallest sigma for it, as on a"
                " ball (radius=...)."
            )
        workload = work.on(federation.sizes)
        sigma = problem.per_client("sigma", n)
        self.noise = float(federation.weights @ (sigma**2 / workload.steps_per_epoch))
        self.L, self.G2, self.B2 = problem.L, problem.G**2, problem.B**2
        self.epochs, self.max_steps = int(np.max(epochs)), workload.max_steps

    def at(self, eta_l: FloatArray, a: FloatArray) -> tuple[FloatArray, ...]:
        """The coefficients p, c, q and s of the bound, for arrays that broadcast.

        p is what remains of the descent: where it is not positive the proof says nothing.
        """
        x2, y2 = (eta_l * self.L) ** 2, (eta_l * self.epochs * self.delta) ** 2
        kept2 = (1.0 - a) ** 2
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inside = np.where(x2 < 1.0, 1.0 / (1.0 - x2), np.inf)
            rho = inside * 2.0 / 3.0
            bent = 1.0 + 2.0 * rho * x2
            later = 1.0 - 1.0 / self.epochs  # the first epoch starts at the server's model
            room = 1.0 - 4.5 * later * bent * y2
            away = np.where(room > 0, 1.5 * later / room, np.inf) * y2
            u, v = 3.0 * away * bent, 3.0 * away
            g = bent * (1.0 + u)
            rest = 1.0 - kept2 - 18.0 * kept2**2 * y2 * g
            c = np.where(rest > 0, 3.0 * kept2 * g / rest, np.inf)
            moved = 6.0 * c * kept2 * y2
            p = 0.5 - 2.0 * rho * x2 - bent * u - moved * g
            q = a**2 * (3.0 * g + 3.0 * moved * g + 2.0 * c)
            s = (1.0 + moved) * (1.0 + bent * v) * (2.0 - a) ** 2 * inside / 2.0 * x2
            # Only the first epoch of a round starts where clients' gradients are compared.
            p = p - self.epochs * q * (self.B2 - 1.0)
        sound = np.isfinite(p) & (x2 < 1.0) & (p > 0)
        return np.where(sound, p, -np.inf), c, q, s

    def after(
        self, rounds: FloatArray, eta_l: FloatArray, a: FloatArray, start: float, error: float
    ) -> FloatArray:
        """The bound ``(F / (eta_l E R) + c / R error + q G^2 + s sigma^2) / p`` after R rounds."""
        p, c, q, s = self.at(eta_l, a)
        with np.errstate(invalid="ignore", over="ignore"):
            begun = (start / (eta_l * self.epochs) + c * error) / rounds
            value = (begun + q * self.G2 + s * self.noise) / p
        return np.where(p > 0, value, np.inf)

    def _start_error(self, start: float, given: float | None) -> float:
        """``E |m^0 - grad f(x^0)|^2`` where the momentum starts with the first client's gradient:
        ``G^2 + (B^2 - 1) |grad f(x^0)|^2``, the latter at most ``2 L (f(x^0) - f*)``.
        """
        own = self.G2 + (self.B2 - 1.0) * 2.0 * self.L * number(start, "start", "(0, inf)")
        return own if given is None else number(given, "start_error", "[0, inf)")

    def _step(self, eta_l: float, a: float, bound: float = math.inf) -> MVRStep:
        return MVRStep(eta_l * self.epochs / self.max_steps, eta_l, a, bound)

    def limit(self, *, bound: Bound = "theorem") -> MVRStep:
        """The largest step size for any number of rounds, with the a that belongs to it.

        By the theorem, ``min(1 / (4 L), 1 / (40 delta E))`` with ``a = 1152 (E delta eta_l)^2``; by
        the proof, the largest that leaves a fifth of the descent for some a, as the paper's.
        """
        if bound == "theorem":
            if self.B2 > 1.0 + 1e-12:
                raise FedShuffleError(
                    f"the theorem on FedShuffleMVR is for B = 1, not {math.sqrt(self.B2):g}. Give"
                    " the smallest G for it, as on a ball (radius=...), or use bound='proof'."
                )
            drift = self.epochs * self.delta
            eta_l = min(1.0 / (4.0 * self.L), 1.0 / (40.0 * drift) if drift > 0 else math.inf)
            # Without drift the momentum has nothing to outweigh: any a will do.
            return self._step(eta_l, 1152.0 * (drift * eta_l) ** 2 or 1.0)
        if bound != "proof":
            raise unknown("bound", bound, ("theorem", "proof"))
        shares = np.geomspace(1e-6, 1.0, 400)

        def left(eta_l: float) -> FloatArray:
            return self.at(np.array(eta_l), shares)[0]

        low, high = 0.0, 1.0 / self.L
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if left(middle).max() >= MIN_PROGRESS else (low, middle)
        if low == 0.0:
            raise FedShuffleError(
                f"B = {math.sqrt(self.B2):g} is too large: no step size is proven. Use B = 1 with"
                " a larger G, as on a ball (radius=...)."
            )
        return self._step(low, float(shares[left(low).argmax()]))

    def tune(
        self,
        rounds: int,
        *,
        start: float,
        start_error: float | None = None,
        bound: Bound = "theorem",
    ) -> MVRStep:
        """The step size and the a for a number of rounds.

        By the theorem, with ``start = f(x^0) - f*``, the limit or, if that is smaller, the cube
        root of ``start / (E^3 R (58752 delta^2 G^2 + 5 sigma^2 L^2 / E^2))``; and
        ``a = max(1152 (E delta eta_l)^2, 1 / R)``. With ``bound="proof"``, those with the smallest
        bound. ``start_error`` is ``E |m^0 - grad f(x^0)|^2``, by default that of starting with the
        gradient of the first client; the theorem supposes ``G^2 / R``.
        """
        rounds, error = count(rounds, "rounds"), self._start_error(start, start_error)
        largest = self.limit(bound=bound).eta_l
        if bound == "theorem":
            e, delta2 = self.epochs, self.delta**2
            mixed = 58752.0 * delta2 * self.G2 + 5.0 * self.noise * self.L**2 / e**2
            eta_l = largest
            if mixed > 0:
                eta_l = min(largest, (start / (e**3 * rounds * mixed)) ** (1.0 / 3.0))
            a = max(1152.0 * (e * self.delta * eta_l) ** 2, 1.0 / rounds)
        else:
            eta_l, a = self._argmin(rounds, largest, start, error)
        value = self.after(np.array(rounds), np.array(eta_l), np.array(a), start, error)
        return self._step(eta_l, a, float(value))

    def curve(
        self,
        rounds: int,
        step_size: float,
        a: float,
        *,
        start: float,
        start_error: float | None = None,
    ) -> FloatArray:
        """The bound on the mean of ``E |grad f|^2`` over all epochs so far, after each round."""
        error = self._start_error(start, start_error)
        size, share = number(step_size, "step_size", "(0, inf)"), np.array(number(a, "a", "(0, 1]"))
        eta_l = np.array(size * self.max_steps / self.epochs)
        if not self.at(eta_l, share)[0] > 0:
            raise FedShuffleError(
                f"the proof does not cover the step size {step_size:g} with a = {a:g}. Use a"
                " smaller step size, or the one that tune advises."
            )
        passed = np.arange(1.0, count(rounds, "rounds") + 1.0)
        return np.concatenate([[np.inf], self.after(passed, eta_l, share, start, error)])

    def _argmin(
        self, rounds: int, largest: float, start: float, error: float
    ) -> tuple[float, float]:
        """The eta_l and a with the smallest bound: a grid, refined around its best point."""
        high = top = np.array([math.log10(largest), 0.0])
        low = high - 9.0
        for _ in range(5):
            eta_l, a = (10.0 ** np.linspace(low[k], top[k], 80) for k in range(2))
            values = self.after(np.array(rounds), eta_l[:, None], a[None, :], start, error)
            sound = self.at(eta_l[:, None], a[None, :])[0] >= MIN_PROGRESS
            i, j = np.unravel_index(int(np.where(sound, values, np.inf).argmin()), values.shape)
            best = np.log10([eta_l[i], a[j]])
            width = 1.5 * (top - low) / 79
            low, top = best - width, np.minimum(best + width, high)
        return float(10.0 ** best[0]), min(1.0, float(10.0 ** best[1]))
