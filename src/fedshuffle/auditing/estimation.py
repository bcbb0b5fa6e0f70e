r"""Effective weights from what was seen of rounds, with intervals.

In round k client i of the cohort moved the model by its mass :math:`m_{ki}`. The effective weights
are :math:`\hat w_i = P_i / \sum_j P_j` with :math:`P_i = E[1\{i \in S\} m_i]`. Where the inclusion
probabilities are known, :math:`P_i` is estimated by :math:`p_i` times the mean mass over the rounds
that had client i, so that only what varies *beyond* who takes part adds noise; for a log, by the
mean over all rounds. Standard errors are those of a ratio, to first order: round k moves
:math:`\hat w_i` by :math:`(v_{ki} - \hat w_i \sum_j v_{kj}) / (K \sum_j P_j)`, where v is the mass,
or, with known probabilities, what the mass is more than its client's mean, times ``p_i`` over the
share of rounds that had the client; it is zero for those who did not take part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError

_FEW = 8
"""Clients seen less often than this borrow the spread of all, lest two equal numbers pass for
certainty."""


_EXPLAINED = 1e-9
"""Relative differences up to this are rounding."""

_FITS = 1000
"""Rounds of alternation to fit proportions; ten or a hundred are the rule."""


@final
@dataclass(frozen=True, eq=False)
class Sightings:
    """Who moved the model by how much in which round: entries of equal length."""

    round: IntArray
    """Numbered 0, 1, ..."""
    client: IntArray
    mass: FloatArray
    rounds: int
    walked: FloatArray | None = None
    """How far each client walked, so that mass over this is its aggregation weight."""


@final
@dataclass(frozen=True, eq=False)
class Estimate:
    """Effective weights, their standard errors, and in how many degrees of freedom those are."""

    weights: FloatArray
    errors: FloatArray
    """Infinite for a client of which nothing is known."""
    freedom: FloatArray

    def half_widths(self, confidence: float, together: bool = False) -> FloatArray:
        """How far from the weights the intervals reach: one by one, or to hold all together."""
        from scipy.special import stdtrit  # a third of a second to import: only when needed

        miss = (1 - confidence) / 2 / (len(self.weights) if together else 1)
        known = np.isfinite(self.errors)
        reach = np.full(len(self.weights), np.inf)
        reach[known] = stdtrit(np.maximum(self.freedom[known], 1.0), 1 - miss) * self.errors[known]
        return reach


@final
@dataclass(frozen=True, eq=False)
class Control:
    """A number for every sighting whose expectation is known, to compare masses with."""

    value: FloatArray
    expected: FloatArray
    """Given that the client takes part: one number per client."""


def estimate(
    seen: Sightings,
    objective: FloatArray,
    probabilities: FloatArray | None,
    controls: Iterable[Control] = (),
) -> Estimate:
    """The effective weights of clients from independent rounds.

    A client that no round had is taken to count, against the objective, as the others do; nothing
    is known of it, but the shares of the others come right.

    A rare round in which a client's mass is large (when it is alone, say) may be in no draw, and
    then both the mean and its error are too small. So masses are regressed on controls. If one of
    them explains every mass there was, its expectation gives the weights. Else what regression
    would change is added to the errors, which then rather are too large.
    """
    client, n = seen.client, len(objective)
    count = np.bincount(client, minlength=n).astype(np.float64)
    total = np.bincount(client, weights=seen.mass, minlength=n)
    mean = total / np.maximum(count, 1.0)
    if probabilities is None:
        found = _ratio(seen, count, total / seen.rounds, seen.mass)
        return _cautious(found, count, (seen.mass - mean[client]) / _unit(mean)[client])

    def known(mean: FloatArray, apart: FloatArray) -> Estimate:
        pull = probabilities * mean
        pull[count == 0] = objective[count == 0] * pull.sum() / objective[count > 0].sum()
        scale = probabilities * seen.rounds / np.maximum(count, 1.0)
        return _ratio(seen, count, pull, scale[client] * apart)

    apart = seen.mass - mean[client]
    plain = known(mean, apart)
    unit = _unit(mean)[client]
    shifts = [np.zeros(n)]
    # Controls are made one by one, as each takes a while; the first that explains all is the last.
    tries = itertools.chain([None], controls)
    for control in tries:
        part = (mean, apart)
        if control is not None:
            part = _regressed(client, apart, mean, count, control)
        found = known(*part)
        if np.abs(part[1] / unit).max() <= _EXPLAINED:
            return Estimate(found.weights, np.where(count > 0, 0.0, np.inf), found.freedom)
        shifts.append(found.weights - plain.weights)
    errors = np.hypot(plain.errors, np.abs(shifts).max(axis=0))
    return _cautious(Estimate(plain.weights, errors, plain.freedom), count, apart / unit)


def _ratio(seen: Sightings, count: FloatArray, pull: FloatArray, moved: FloatArray) -> Estimate:
    """Shares of the pulls, with errors from how far each sighting moved its client's pull."""
    client, n, k = seen.client, len(count), seen.rounds
    whole = _downhill(pull)
    weights = pull / whole
    together = np.bincount(seen.round, weights=moved, minlength=k)[seen.round]
    present = np.bincount(client, weights=(moved - weights[client] * together) ** 2, minlength=n)
    squares = np.bincount(client, weights=together**2, minlength=n)
    absent = np.where(count == k, 0.0, np.maximum(float(together @ moved) - squares, 0.0))
    errors: FloatArray = np.sqrt((present + weights**2 * absent) / max(k - 1, 1) / k) / whole
    errors[errors <= 1e-12 * np.abs(weights)] = 0.0  # rounding alone
    return Estimate(weights, errors, count - 1)


def _cautious(found: Estimate, count: FloatArray, spread: FloatArray) -> Estimate:
    """The same with the spread of all for clients that were seen too seldom to show their own."""
    typical = float(np.sqrt(np.mean(spread**2)))
    borrowed = np.abs(found.weights) * typical / np.sqrt(np.maximum(count, 1.0))
    errors = np.where(count < _FEW, np.maximum(found.errors, borrowed), found.errors)
    # Where nothing has varied yet there is nothing to borrow, and few rounds prove nothing.
    errors[count < (_FEW if typical == 0 else 2)] = np.inf
    return Estimate(found.weights, errors, found.freedom)


def _regressed(
    client: IntArray, apart: FloatArray, mean: FloatArray, count: FloatArray, control: Control
) -> tuple[FloatArray, FloatArray]:
    """The mean masses where the control has its expectation, and what it leaves unexplained."""
    n = len(mean)
    middle = np.bincount(client, weights=control.value, minlength=n) / np.maximum(count, 1.0)
    value = control.value - middle[client]
    squares = np.bincount(client, weights=value**2, minlength=n)
    varied = squares > 1e-18 * count * middle**2
    usable = varied & (count >= _FEW)
    slope = np.bincount(client, weights=value * apart, minlength=n) / np.where(varied, squares, 1.0)
    # Clients that were seen too seldom are taken to go by the control as the others do.
    unit = np.where(middle > 0, mean / np.where(middle > 0, middle, 1.0), 0.0)
    typical = slope[usable & (unit != 0)] / unit[usable & (unit != 0)]
    slope = np.where(usable, slope, unit * (np.median(typical) if len(typical) else 0.0))
    way = np.where(count > 0, control.expected - middle, 0.0)
    return mean + slope * way, apart - slope[client] * value


def proportions(seen: Sightings, n: int) -> FloatArray:
    """A positive number for every client to which aggregation weights are proportional within
    cohorts, as nearly as can be: a fit of ``log weight = x_i + y_k`` for client i in round k.

    >>> rounds, clients = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    >>> seen = Sightings(rounds, clients, np.array([1.0, 2.0, 20.0, 30.0]), 2)
    >>> fitted = proportions(seen, 3)
    >>> (fitted / fitted[0]).round(6).tolist()
    [1.0, 2.0, 3.0]
    """
    level = np.log(seen.mass if seen.walked is None else seen.mass / seen.walked)
    x = np.zeros(n)
    members = np.maximum(np.bincount(seen.round, minlength=seen.rounds), 1)
    count = np.maximum(np.bincount(seen.client, minlength=n), 1)
    for _ in range(_FITS):
        rest = level - x[seen.client]
        y = np.bincount(seen.round, weights=rest, minlength=seen.rounds) / members
        apart = np.bincount(seen.client, weights=rest - y[seen.round], minlength=n) / count
        x += apart
        if np.abs(apart).max() < 1e-13:
            break
    fitted: FloatArray = np.exp(x - x.max())
    return fitted


def estimate_by_batches(moves: FloatArray, seen: IntArray) -> Estimate:
    """The same from the mean moves of long batches of rounds: (batches, clients)."""
    pull = moves.mean(axis=0)
    whole = _downhill(pull)
    weights = pull / whole
    residuals = moves - weights * moves.sum(axis=1, keepdims=True)
    errors: FloatArray = residuals.std(axis=0, ddof=1) / np.sqrt(len(moves)) / whole
    errors[seen < 2 * _FEW] = np.inf
    return Estimate(weights, errors, np.full(len(pull), len(moves) - 1.0))


def exact(seen: Sightings, n: int, shares: FloatArray) -> Estimate:
    """The weights from every cohort with its probability: nothing is estimated."""
    mass = seen.mass * shares[seen.round]
    pull = np.bincount(seen.client, weights=mass, minlength=n).astype(np.float64)
    return Estimate(pull / _downhill(pull), np.zeros(n), np.full(n, np.inf))


def _downhill(pull: FloatArray) -> float:
    whole = float(pull.sum())
    if not whole > 0:
        raise FedShuffleError(
            f"the clients' pulls on the model sum to {whole:g}: the mean round does not follow its"
            " clients, so it minimises no weighted sum of their objectives."
        )
    return whole


def _unit(mean: FloatArray) -> FloatArray:
    return np.where(mean == 0, 1.0, np.abs(mean))
