r"""FedShuffleMVR: its step size, its momentum parameter, and the bound that they give.

The paper's theorem is for one client a round, drawn with the probabilities w; for server steps of
size 1; and for losses that need not be convex, with :math:`P_i = 0`. Here :math:`\eta_l` is the
step of a whole epoch, as in that theorem: a client walks with :math:`\eta_l / k_i`, and this
project's ``step_size`` is :math:`\eta_l E / \tau_{max}`.

The proof has slips (docs/differences.md), so it is done again in docs/theory.md, with nothing
rounded. With :math:`x = \eta_l L` and :math:`y = \eta_l E \delta` it ends with

.. math:: \frac{1}{R E} \sum_{r, e} E|\nabla f(y^r_e)|^2 \le \frac1p \Big( \frac{F}{\eta_l E R}
          + \frac{c}{R} E|m^0 - \nabla f(x^0)|^2 + q\, G^2 + s\, \sigma^2 \Big),
          \qquad \sigma^2 = \sum_i w_i \frac{\sigma_i^2}{k_i},

where p, c, q and s are functions of x, y, a and E. What the theorem prints holds, with room to
spare: its 5, 63, 255 and 25 are at most 3, 5, 9 and 6 by this count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.theory.step_sizes import Bound, ProblemConstants

LEAST = 0.2
"""The least p that counts as progress: the paper's eta_l / 5."""


class Epochs(NamedTuple):
    """The numbers in the bound."""

    p: FloatArray
    """What is left of the descent; not positive: the proof says nothing."""
    c: FloatArray
    """What the momentum's error weighs, over ``eta_l E``."""
    q: FloatArray
    s: FloatArray


@final
@dataclass(frozen=True)
class MVRStep:
    """A step size with its momentum parameter, and what is promised for both."""

    eta_l: float
    """The paper's, of an epoch."""
    step_size: float
    """This project's."""
    a: float
    server_step_size: float
    gain: float
    """p."""
    value: float
    """The bound on the mean of ``|grad f|^2`` over all rounds and epochs; infinite for limits."""
    binding: str
    """What keeps the step from being larger."""


@final
@dataclass(frozen=True)
class MVRSetting:
    """What the theorem on FedShuffleMVR needs to know; made by :func:`mvr_setting`."""

    L: float
    delta: float
    G2: float
    B2: float
    noise: float
    """``sum_i w_i sigma_i^2 / k_i``."""
    epochs: int
    longest: int
    """``tau_max``."""

    def at(self, eta_l: FloatArray, a: FloatArray) -> Epochs:
        """The numbers in the bound, for arrays that fit together."""
        x2, y2 = (eta_l * self.L) ** 2, (eta_l * self.epochs * self.delta) ** 2
        kept2 = (1.0 - a) ** 2
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inside = np.where(x2 < 1.0, 1.0 / (1.0 - x2), np.inf)
            rho = inside * 2.0 / 3.0
            bent = 1.0 + 2.0 * rho * x2
            later = 1.0 - 1.0 / self.epochs  # of one epoch, the start is the server's model
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
        return Epochs(np.where(sound, p, -np.inf), c, q, s)

    def after(
        self, rounds: FloatArray, eta_l: FloatArray, a: FloatArray, start: float, error: float
    ) -> FloatArray:
        """The bound."""
        p, c, q, s = self.at(eta_l, a)
        with np.errstate(invalid="ignore", over="ignore"):
            begun = (start / (eta_l * self.epochs) + c * error) / rounds
            value = (begun + q * self.G2 + s * self.noise) / p
        return np.where(p > 0, value, np.inf)

    def start_error(self, start: float) -> float:
        """``E |m^0 - grad f(x^0)|^2`` where the momentum starts with the first client's gradient:
        ``G^2 + (B^2 - 1) |grad f(x^0)|^2``, the latter no more than ``2 L (f(x^0) - f*)``.
        """
        return self.G2 + (self.B2 - 1.0) * 2.0 * self.L * start

    def step(self, eta_l: float, a: float, value: float, binding: str) -> MVRStep:
        """With all that follows."""
        gain = float(self.at(np.array(eta_l), np.array(a)).p)
        size = eta_l * self.epochs / self.longest
        return MVRStep(eta_l, size, a, 1.0, gain, value, binding)


def mvr_setting(
    federation: Federation,
    problem: ProblemConstants,
    delta: float,
    work: LocalWork | None = None,
) -> MVRSetting:
    """What the theorem needs, of a federation, a problem and local work that it covers.

    >>> problem = ProblemConstants(L=1.0, G=1.0)
    >>> setting = mvr_setting(Federation.from_sizes([2, 4]), problem, 0.1, LocalWork(epochs=10))
    >>> mvr_limit(setting).eta_l
    0.025
    """
    expect(federation, Federation, "federation")
    expect(problem, ProblemConstants, "problem")
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if not 0.0 <= number(delta, "delta") < math.inf:
        raise FedShuffleError(f"delta is {delta}, but must be 0 or more, and finite.")
    epochs = 0 if isinstance(work.epochs, EpochRange) else np.unique(work.epochs)
    whole = work.steps is None and work.interruption is None and not np.isfinite(work.clip)
    if np.size(epochs) != 1 or not np.all(epochs) or not whole or work.order != "reshuffled":
        raise FedShuffleError(
            "the theorem on FedShuffleMVR is for the same number of whole, reshuffled epochs at"
            " every client, not clipped and not interrupted: give epochs as one number."
        )
    n = len(federation)
    if problem.per_client("P", n).any():
        raise FedShuffleError(
            "the theorem on FedShuffleMVR is for P = 0. Give the least sigma for that, as on a ball"
            " (radius=...)."
        )
    workload = work.on(federation.sizes)
    sigma = problem.per_client("sigma", n)
    return MVRSetting(
        L=problem.L,
        delta=float(delta),
        G2=problem.G**2,
        B2=problem.B**2,
        noise=float(federation.weights @ (sigma**2 / workload.steps_per_epoch)),
        epochs=int(np.max(epochs)),
        longest=workload.longest,
    )


def mvr_limit(setting: MVRSetting, *, bound: Bound = "theorem") -> MVRStep:
    """The largest step size, whatever the number of rounds, and the a that goes with it.

    By the theorem's proof as it is printed, ``min(1 / (4 L), 1 / (40 delta E))`` with the least
    ``a = 1152 (E delta eta_l)^2``; done again (``bound="proof"``), the largest for which some a
    leaves a fifth of the descent, as the paper's does.
    """
    if bound == "theorem":
        _check_b(setting)
        steep, alike = 1.0 / (4.0 * setting.L), _over(1.0, 40.0 * setting.delta * setting.epochs)
        eta_l = min(steep, alike)
        a = 1152.0 * (setting.epochs * setting.delta * eta_l) ** 2
        # Without drift there is nothing that the momentum must outweigh: any a will do.
        return setting.step(eta_l, a or 1.0, math.inf, "L" if steep < alike else "delta")
    if bound != "proof":
        raise unknown("bound", bound, ("theorem", "proof"))
    shares = np.geomspace(1e-6, 1.0, 400)

    def left(eta_l: float) -> FloatArray:
        return setting.at(np.array(eta_l), shares).p

    low, high = 0.0, 1.0 / setting.L
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if left(middle).max() >= LEAST else (low, middle)
    if low == 0.0:
        raise FedShuffleError(
            f"B = {math.sqrt(setting.B2):g} is too large: no step size is known to be sound. Use"
            " B = 1 with a larger G, as on a ball (radius=...)."
        )
    return setting.step(low, float(shares[left(low).argmax()]), math.inf, "progress")


def mvr_tune(
    rounds: int,
    setting: MVRSetting,
    *,
    start: float,
    start_error: float | None = None,
    bound: Bound = "theorem",
) -> MVRStep:
    r"""The step size and the a for so many rounds.

    By the theorem, with :math:`F = f(x^0) - f^\star` (``start``),

    .. math:: \eta_l = \min\Big\{ \frac{1}{4L}, \frac{1}{40 \delta E}, \Big( \frac{F}{E^3 R
              (58752\, \delta^2 G^2 + 5 \sigma^2 L^2 / E^2)} \Big)^{1/3} \Big\}, \qquad
              a = \max\Big\{ 1152\, E^2 \delta^2 \eta_l^2, \frac1R \Big\}.

    With ``bound="proof"``, those for which the bound is smallest. ``start_error`` is
    ``E |m^0 - grad f(x^0)|^2``; by default that of this library's start, the gradient of the first
    client. The theorem supposes ``G^2 / R``, from R rounds that only measure.
    """
    rounds = count(rounds, "rounds")
    if not 0.0 < number(start, "start") < math.inf:
        raise FedShuffleError(f"start is {start}, but must be positive and finite.")
    error = setting.start_error(start) if start_error is None else number(start_error, "error")
    limit = mvr_limit(setting, bound=bound)
    if bound == "theorem":
        e = setting.epochs
        mixed = 58752.0 * setting.delta**2 * setting.G2 + 5.0 * setting.noise * setting.L**2 / e**2
        noisy = _over(start, e**3 * rounds * mixed) ** (1.0 / 3.0)
        eta_l = min(limit.eta_l, noisy)
        a = max(1152.0 * (e * setting.delta * eta_l) ** 2, 1.0 / rounds)
        binding = limit.binding if limit.eta_l <= noisy else "rounds"
    else:
        eta_l, a = _smallest(setting, rounds, limit.eta_l, start, error)
        binding = "progress" if eta_l >= limit.eta_l * (1 - 1e-3) else "rounds"
    found = setting.after(np.array(rounds), np.array(eta_l), np.array(a), start, error)
    return setting.step(eta_l, a, float(found), binding)


def mvr_bound(
    rounds: int,
    setting: MVRSetting,
    step_size: float,
    a: float,
    *,
    start: float,
    start_error: float | None = None,
) -> FloatArray:
    """The bound on the mean of ``E |grad f|^2`` over the starts of all epochs of all rounds so far,
    after 0 (infinite), 1, ..., ``rounds`` rounds.

    >>> problem = ProblemConstants(L=1.0, G=1.0)
    >>> setting = mvr_setting(Federation.from_sizes([2, 4]), problem, 0.1)
    >>> mvr_bound(1000, setting, 0.05, 0.1, start=1.0)[[10, 100, 1000]].round(2).tolist()
    [5.28, 1.2, 0.79]
    """
    error = setting.start_error(start) if start_error is None else start_error
    eta_l = np.array(number(step_size, "step_size") * setting.longest / setting.epochs)
    if not (eta_l > 0 and 0 < number(a, "a") <= 1):
        raise FedShuffleError(f"step_size is {step_size} and a is {a}: use both above 0, a <= 1.")
    share = np.array(float(a))
    if not setting.at(eta_l, share).p > 0:
        raise FedShuffleError(
            f"the proof says nothing of the step size {step_size:g} with a = {a:g}. Use a smaller"
            " step size, or the one that mvr_tune advises."
        )
    passed = np.arange(1.0, count(rounds, "rounds") + 1.0)
    return np.concatenate([[np.inf], setting.after(passed, eta_l, share, start, error)])


def _smallest(
    setting: MVRSetting, rounds: int, largest: float, start: float, error: float
) -> tuple[float, float]:
    """Where the bound is smallest: a grid, made finer around its best point."""
    high = np.array([math.log10(largest), 0.0])
    low = high - np.array([9.0, 9.0])
    top = high
    for _ in range(5):
        eta_l, a = (10.0 ** np.linspace(low[k], top[k], 80) for k in range(2))
        values = setting.after(np.array(rounds), eta_l[:, None], a[None, :], start, error)
        sound = setting.at(eta_l[:, None], a[None, :]).p >= LEAST
        i, j = np.unravel_index(int(np.where(sound, values, np.inf).argmin()), values.shape)
        best = np.log10([eta_l[i], a[j]])
        width = 1.5 * (top - low) / 79
        low, top = best - width, np.minimum(best + width, high)
    return float(10.0 ** best[0]), min(1.0, float(10.0 ** best[1]))


def _check_b(setting: MVRSetting) -> None:
    if setting.B2 > 1.0 + 1e-12:
        raise FedShuffleError(
            f"the theorem on FedShuffleMVR is for B = 1, not {math.sqrt(setting.B2):g}. Give the"
            " least G for that, as on a ball (radius=...), or use bound='proof'."
        )


def _over(above: float, below: float) -> float:
    return above / below if below > 0 else math.inf
