r"""Effective weights from observed rounds, with confidence intervals.

In round k client i of the cohort moved the model by its contribution :math:`m_{ki}`. The effective
weights are :math:`\hat w_i = P_i / \sum_j P_j` with :math:`P_i = E[1\{i \in S\} m_i]`. Where the
inclusion probabilities are known, :math:`P_i` is estimated by :math:`p_i` times the mean
contribution over the rounds of client i, so that only what varies *beyond* who takes part adds
noise; for a log, by the mean over all rounds. Standard errors are those of a ratio, to first order:
round k moves :math:`\hat w_i` by :math:`(v_{ki} - \hat w_i \sum_j v_{kj}) / (K \sum_j P_j)`, where
v is the contribution or, with known probabilities, its difference from the client's mean, times
``p_i`` over the client's share of rounds; it is zero for clients that did not take part. The rounds
of a log may be correlated, as clients come and go: there the standard error is that of the means
over batches of successive rounds, where it is larger.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError

BATCHES = 32  # batches of draws or rounds that give the standard error of their mean
LOG_BATCHES = 16  # batches of successive rounds of a log
_FEW = 8  # clients seen less often get the spread of all clients; batches that show a spread
_EXPLAINED = 1e-9  # relative differences up to this are rounding
_FITS = 1000  # most iterations to fit proportions; ten to a hundred are usual


@dataclass(frozen=True, eq=False)
class Observations:
    """Which client moved the model how far in which round: entries of equal length."""

    rounds: int
    round: IntArray  # numbered from 0 on
    client: IntArray
    contribution: FloatArray
    weight: FloatArray  # the aggregation weight
    steps: IntArray


@dataclass(frozen=True, eq=False)
class WeightEstimate:
    """Effective weights, their standard errors and degrees of freedom."""

    weights: FloatArray
    errors: FloatArray  # infinite for a client about which nothing is known
    freedom: FloatArray

    def half_widths(self, confidence: float, together: bool = False) -> FloatArray:
        """Half widths of the intervals: one by one, or to hold for all clients together."""
        from scipy.special import stdtrit  # a third of a second to import: only when needed

        miss = (1 - confidence) / 2 / (len(self.weights) if together else 1)
        known = np.isfinite(self.errors)
        reach = np.full(len(self.weights), np.inf)
        reach[known] = stdtrit(np.maximum(self.freedom[known], 1.0), 1 - miss) * self.errors[known]
        return reach


Control = tuple[FloatArray, FloatArray]
"""A control variate: its value in each observation, and its mean for each client if present."""


def estimate(
    seen: Observations,
    objective: FloatArray,
    probabilities: FloatArray | None,
    controls: Iterable[Control] = (),
) -> WeightEstimate:
    """The effective weights of clients from rounds: independent ones if probabilities are known,
    else those of a log, in order.

    A client that was never seen is assumed to have the average ratio of effective to objective
    weight: its error is infinite, but the weights of the others come out right.

    A rare round with a large contribution may not be drawn, so contributions are regressed on
    control variates: docs/how-to/audit-your-code.md says why, under "Intervals".
    """
    client, n = seen.client, len(objective)
    count = np.bincount(client, minlength=n).astype(np.float64)
    total = np.bincount(client, weights=seen.contribution, minlength=n)
    mean = total / np.maximum(count, 1.0)
    apart = seen.contribution - mean[client]
    unit = np.where(mean == 0, 1.0, np.abs(mean))[client]
    if probabilities is None:
        plain = _ratio(seen, count, total / seen.rounds, seen.contribution)
        return _cautious(_correlated(plain, seen), count, apart / unit)

    def known(mean: FloatArray, apart: FloatArray) -> WeightEstimate:
        raw = probabilities * mean
        unseen = (count == 0) & (probabilities > 0)
        raw[unseen] = objective[unseen] * raw.sum() / objective[count > 0].sum()
        scale = probabilities * seen.rounds / np.maximum(count, 1.0)
        return _ratio(seen, count, raw, scale[client] * apart)

    def explained(found: WeightEstimate, apart: FloatArray) -> WeightEstimate | None:
        if np.abs(apart / unit).max() > _EXPLAINED:
            return None
        return WeightEstimate(found.weights, np.where(count > 0, 0.0, np.inf), found.freedom)

    plain = known(mean, apart)
    if exact := explained(plain, apart):
        return exact
    shift = np.zeros(n)
    for control in controls:  # made one by one, as each takes a while
        part = _regressed(client, apart, mean, count, control)
        found = known(*part)
        if exact := explained(found, part[1]):
            return exact
        shift = np.maximum(shift, np.abs(found.weights - plain.weights))
    errors = np.hypot(plain.errors, shift)
    return _cautious(WeightEstimate(plain.weights, errors, plain.freedom), count, apart / unit)


def _ratio(
    seen: Observations, count: FloatArray, raw: FloatArray, moved: FloatArray
) -> WeightEstimate:
    """Normalised weights, with errors from how far each observation moved its client's weight."""
    client, n, k = seen.client, len(count), seen.rounds
    whole = positive_sum(raw)
    weights = raw / whole
    together = np.bincount(seen.round, weights=moved, minlength=k)[seen.round]
    present = np.bincount(client, weights=(moved - weights[client] * together) ** 2, minlength=n)
    squares = np.bincount(client, weights=together**2, minlength=n)
    absent = np.where(count == k, 0.0, np.maximum(float(together @ moved) - squares, 0.0))
    errors: FloatArray = np.sqrt((present + weights**2 * absent) / max(k - 1, 1) / k) / whole
    errors[errors <= 1e-12 * np.abs(weights)] = 0.0  # rounding alone
    return WeightEstimate(weights, errors, count - 1)


def _correlated(found: WeightEstimate, seen: Observations) -> WeightEstimate:
    """Errors that hold if successive rounds are correlated, for much less long than a batch."""
    n, k = len(found.weights), seen.rounds
    batches = min(LOG_BATCHES, k // 2)
    if batches < _FEW:
        return found
    batch = seen.round * batches // k
    cells = np.bincount(batch * n + seen.client, seen.contribution, batches * n)
    moved = cells.astype(np.float64).reshape(batches, n)
    spread = errors_of_shares(moved)
    larger = spread > found.errors
    # Where step sizes fall, the first batches have most of the spread (Satterthwaite 1946).
    squares = (moved.sum(axis=1) / moved.sum()) ** 2
    freedom = np.minimum(found.freedom, squares.sum() ** 2 / (squares**2).sum() - 1)
    freedom = np.where(larger, freedom, found.freedom)
    return WeightEstimate(found.weights, np.where(larger, spread, found.errors), freedom)


def _cautious(found: WeightEstimate, count: FloatArray, spread: FloatArray) -> WeightEstimate:
    """Use the spread of all clients for those that were seen too rarely."""
    typical = float(np.sqrt(np.mean(spread**2)))
    borrowed = np.abs(found.weights) * typical / np.sqrt(np.maximum(count, 1.0))
    errors = np.where(count < _FEW, np.maximum(found.errors, borrowed), found.errors)
    # If nothing has varied yet there is no spread to borrow.
    errors[count < (_FEW if typical == 0 else 2)] = np.inf
    return WeightEstimate(found.weights, errors, found.freedom)


def _regressed(
    client: IntArray, apart: FloatArray, mean: FloatArray, count: FloatArray, control: Control
) -> tuple[FloatArray, FloatArray]:
    """The mean contributions if the control had its expectation, and the residuals."""
    (value, expected), n = control, len(mean)
    middle = np.bincount(client, weights=value, minlength=n) / np.maximum(count, 1.0)
    value = value - middle[client]
    squares = np.bincount(client, weights=value**2, minlength=n)
    varied = squares > 1e-18 * count * middle**2
    usable = varied & (count >= _FEW)
    slope = np.bincount(client, weights=value * apart, minlength=n) / np.where(varied, squares, 1.0)
    # Clients that were seen too rarely get the typical slope of the others.
    unit = np.where(middle > 0, mean / np.where(middle > 0, middle, 1.0), 0.0)
    typical = slope[usable & (unit != 0)] / unit[usable & (unit != 0)]
    slope = np.where(usable, slope, unit * (np.median(typical) if len(typical) else 0.0))
    way = np.where(count > 0, expected - middle, 0.0)
    return mean + slope * way, apart - slope[client] * value


def proportions(seen: Observations, n: int) -> FloatArray:
    """A positive number for every client to which aggregation weights are proportional within
    cohorts, as nearly as possible: a fit of ``log weight = x_i + y_k`` for client i in round k.
    """
    level, x = np.log(seen.weight), np.zeros(n)
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


def errors_of_shares(batches: FloatArray) -> FloatArray:
    """The standard errors of the shares of the columns in the sum of all, from batches of
    successive rounds.

    Batch b moves the share ``w_i`` by ``(m_bi - w_i sum_j m_bj) / sum_b sum_j m_bj``; the variance
    of the sum over batches follows from their spread and from how alike neighbours are.
    """
    moved = batches.sum(axis=0)
    whole = positive_sum(moved)
    weights = moved / whole
    residuals = batches - weights * batches.sum(axis=1, keepdims=True)
    squares = (residuals**2).sum(axis=0)
    alike = (residuals[1:] * residuals[:-1]).sum(axis=0) / np.where(squares > 0, squares, 1.0)
    variance = len(batches) * residuals.var(axis=0, ddof=1) * (1 + 2 * np.maximum(alike, 0.0))
    errors: FloatArray = np.sqrt(variance) / whole
    errors[errors <= 1e-12 * np.abs(weights)] = 0.0  # rounding alone
    return errors


def error_of_mean(batches: FloatArray) -> FloatArray:
    """The standard errors of the means of the columns, from independent rows."""
    errors: FloatArray = batches.std(axis=0, ddof=1) / np.sqrt(len(batches))
    return errors


def estimate_by_batches(moves: FloatArray, seen: IntArray) -> WeightEstimate:
    """The effective weights from the mean moves over batches of rounds: (batches, clients)."""
    raw = moves.mean(axis=0)
    whole = positive_sum(raw)
    weights = raw / whole
    residuals = moves - weights * moves.sum(axis=1, keepdims=True)
    errors = error_of_mean(residuals) / whole
    errors[seen < 2 * _FEW] = np.inf
    return WeightEstimate(weights, errors, np.full(len(raw), len(moves) - 1.0))


def positive_sum(raw: FloatArray) -> float:
    """The sum of contributions, if the mean round goes downhill."""
    whole = float(raw.sum())
    if not whole > 0:
        raise FedShuffleError(
            f"the clients' contributions to the model sum to {whole:g}: the mean round does not"
            " follow its clients, so it minimises no weighted sum of their objectives."
        )
    return whole
