r"""Effective weights, as expectations over the cohorts of what each client moves.

By closed forms, by quadrature, by enumeration of all cohorts; or, if none of them applies, by Monte
Carlo with standard errors.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.estimation import BATCHES, error_of_mean, errors_of_shares
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.subject import Subject
from fedshuffle.errors import FedShuffleError, NotAuditableError
from fedshuffle.methods import Cohort, CohortMoments, Method, SumOne
from fedshuffle.methods.averaging import RatioOfSums, objective_weight, steps_of_the_longest
from fedshuffle.methods.directions import gradient_weights
from fedshuffle.probabilities import Participation, TruncatedIntervals
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import AmongAvailable, Cohorts, One, Sampling
from fedshuffle.sampling.base import MAX_COHORTS, EqualPairCorrelation

_LEVELS = 200  # largest number of distinct step counts for the level-by-level formula
_INTEGRALS = 100  # most integrals over different rounds; sampling is faster than more
_Moments = tuple[FloatArray, FloatArray | None, FloatArray | None]  # contribution, joint, estimate


class NoFormulaError(Exception):
    """The direction has no formula in this case."""


class _NotExactError(Exception):
    """The formula or enumeration does not apply."""


def contributions(method: Method, cohort: Cohort) -> FloatArray:
    """How far each client of a cohort moves the model along its gradient, per unit step size.

    ``contribution_i(S) = a_i (gamma_i / eta) tau_i``: aggregation weight, scaled step size, steps
    (of a local optimiser with momentum their length, which is more than their number).

    >>> from fedshuffle import methods
    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> contributions(methods.get("fedshuffle"), cohort).tolist()
    [1.5, 4.5]
    """
    rule = method.averaging
    return rule.aggregation_weights(cohort) * rule.step_scale(cohort) * cohort.done_length


def exact_weights(subject: Subject) -> tuple[FloatArray, str] | None:
    """Effective weights by formula or by enumeration; None if neither applies."""
    depends, steps = subject.dependencies, subject.workload.possible_steps[0]
    varied = np.ptp(steps) > 0 and not isinstance(subject.sampling, One)
    ways = [] if depends.random and not subject.outcomes.known else [_by_enumeration]
    if ways and varied and isinstance(subject.workload.work.steps, str):  # agreed in the cohort
        ways.insert(0, _by_levels)
    elif ways and not depends.others:
        # Ratios over those who are there take an integral for each kind of round, or a double one:
        # a few cohorts are faster.
        ways.insert(len(ways) if _ratios_among_available(subject) else 0, _by_formula)
    for way in ways:
        with suppress(_NotExactError):
            moments, how = way(subject)
            return _effective(subject, moments), how
    return None


def _ratios_among_available(subject: Subject) -> bool:
    """Whether contributions are ratios of sums over cohorts of those who are there."""
    ratios = not subject.method.averaging.by_probability
    return ratios and isinstance(subject.sampling, AmongAvailable)


def _integrals(subject: Subject) -> int:
    """How many integrals such ratios need; a double one counts as ten."""
    cost = 0
    for law in {id(law): law for _, _, law in subject.plan}.values():
        draws = law.independent_draws() if isinstance(law, AmongAvailable) else None
        cost += 10 if any(there is not None for *_, there in draws or ()) else 1
    return cost


def _effective(subject: Subject, moments: _Moments) -> FloatArray:
    """The direction's effective weights from the expectations over the cohorts."""
    direction, w = subject.method.direction, subject.federation.weights
    unknown = np.isnan(subject.nonempty)
    nonempty = 1.0 if unknown else subject.nonempty
    inclusion = subject.sampling.inclusion
    heard, gradient = np.where(inclusion > 0, w, 0.0), w * inclusion / subject.probability
    weights = direction.effective_weights(CohortMoments(heard, gradient, nonempty, *moments))
    if weights is None:
        raise NoFormulaError
    if subject.sampling.two_phase or unknown:
        # Momentum is not updated in rounds in which no client is selected from the pool, and how
        # often that happens depends on the data.
        less = CohortMoments(heard, gradient, nonempty / 2, *moments)
        other = direction.effective_weights(less)
        if other is None or not np.allclose(weights * other.sum(), other * weights.sum()):
            raise NoFormulaError
    if np.shape(weights) != w.shape or not np.isfinite(weights).all():
        raise FedShuffleError(
            f"{type(direction).__name__}.effective_weights gives {weights!r:.60}, of shape"
            f" {np.shape(weights)}: give a finite number for each of the {len(w)} clients, or leave"
            " it out, and the audit simulates."
        )
    return weights


def _by_formula(subject: Subject) -> tuple[_Moments, str]:
    """Closed forms and quadrature, if steps do not depend on the cohort: the mean over rounds."""
    if _ratios_among_available(subject) and _integrals(subject) > _INTEGRALS:
        raise _NotExactError
    known: dict[tuple[bytes, int], _Moments] = {}
    moments: list[_Moments] = []
    for round, share, law in subject.plan:
        moved, ratio = contribution_table(subject, round)
        arrays = [moved, *(() if ratio is None else (ratio.u, ratio.v))]
        key = b"".join(array.tobytes() for array in arrays if array is not None), id(law)
        if key not in known:  # most rounds are equal
            known[key] = _of_table(subject, law, moved, ratio)
        parts = (None if part is None else share * part for part in known[key])
        moments.append((*parts,))  # type: ignore[arg-type]
    contribution, joint, estimate = (
        None if parts[0] is None else np.sum(parts, axis=0) for parts in zip(*moments, strict=True)
    )
    assert contribution is not None
    closed = subject.method.averaging.by_probability
    fixed = subject.outcomes.number == 1
    closed = closed or (fixed and subject.sampling.cohorts(0) is not None)
    return (contribution, joint, estimate), "closed form" if closed else "quadrature"


def contribution_table(subject: Subject, round: int) -> tuple[FloatArray, RatioOfSums | None]:
    """Contribution times q, and q, of every client in each of its alternatives: shape (n, A). Each
    alternative is shown to the rules as a cohort of its own, as in training.
    """
    rule = subject.method.averaging
    moved, ratios = [], []
    for clients in subject.alternatives(round):
        weights = rule.client_weights(clients)
        moved.append(weights * rule.step_scale(clients) * clients.done_length)
        ratios.append(rule.normaliser.ratio(weights, clients))
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return np.stack(moved, axis=1), None
    v = [ratio.v for ratio in known if ratio.v is not None]
    u = np.stack([ratio.u for ratio in known], axis=1)
    ratio = RatioOfSums(u, np.stack(v, axis=1) if v else None, known[0].power)
    return np.stack(moved, axis=1), ratio


def _of_table(
    subject: Subject, law: Sampling, moved: FloatArray, ratio: RatioOfSums | None
) -> _Moments:
    """The expectations over the cohorts of a round, which this sampling draws."""
    direction, p = subject.method.direction, subject.probability
    chances, w = subject.outcomes.chances, subject.federation.weights
    joint = estimate = None
    if subject.method.averaging.by_probability:
        mean, often = (moved * chances).sum(axis=1), law.inclusion / p  # in the mean over rounds 1
        if direction.needs_joint:
            joint = w / p * law.expected_sums(mean / p)
        return mean * often, joint, w * often if direction.needs_estimate else None
    if ratio is None:
        raise _NotExactError
    if direction.needs_joint:
        total = _total_contribution(moved, ratio)
        joint = _exact_ratio(law, total.u, None, total.v, total.power, chances)
        joint = w / p * joint
    if direction.needs_estimate:
        each = np.repeat(w[:, None], chances.shape[1], axis=1)
        estimate = _exact_ratio(law, each, each, None, 1, chances)
    contribution = _exact_ratio(law, ratio.u, moved, ratio.v, ratio.power, chances)
    return contribution, joint, estimate


def _exact_ratio(*arguments: Any) -> FloatArray:
    found = expected_ratio(*arguments)
    if found is None:
        raise _NotExactError
    return found


def _total_contribution(moved: FloatArray, ratio: RatioOfSums) -> RatioOfSums:
    """Of a whole cohort: ``(sum moved) (sum v) / (sum u)^power``, as a ratio of sums."""
    if ratio.v is None:
        return RatioOfSums(u=ratio.u, v=moved, power=ratio.power)
    factor = moved / ratio.u
    if ratio.power == 2 and np.ptp(factor) <= 1e-12 * factor.max():
        return RatioOfSums(u=ratio.u, v=ratio.v * factor.flat[0], power=1)
    raise _NotExactError


def _by_levels(subject: Subject) -> tuple[_Moments, str]:
    """FedAvg with the fewest steps of the cohort, K(S) = sum over levels of 1{S within level}.

    A cohort takes at least t steps if all its members would: the others must be absent.
    """
    direction, rule = subject.method.direction, subject.method.averaging
    work, (planned, chances) = subject.workload.work, subject.workload.possible_steps
    levels = np.unique(planned)
    lengths = subject.workload.optimiser.lengths(levels)
    applies = (
        *(work.steps == "min", work.interruption is None, len(chances) == 1),
        *(not direction.needs_joint, not direction.needs_estimate, len(levels) <= _LEVELS),
        *(rule.weight is objective_weight, rule.step_normalisation is steps_of_the_longest),
        isinstance(rule.normaliser, SumOne),
    )
    if not all(applies):
        raise _NotExactError
    w = subject.federation.weights[:, None]
    total = np.zeros(len(w))
    for level, far, below in zip(levels, lengths, [0.0, *lengths[:-1]], strict=True):
        u = np.where(planned >= level, w, np.inf)
        part = sum(share * _exact_ratio(law, u, w) for _, share, law in subject.plan)
        total += (far - below) * part
        if (part * (lengths[-1] - far) <= 1e-14 * total).all():
            break  # hardly any cohort takes more steps than this
    return (total, None, None), "quadrature"


def _by_enumeration(subject: Subject) -> tuple[_Moments, str]:
    """The definition itself, over every cohort, and over rounds if they differ."""
    planned, rounds = subject.outcomes.planned, len(subject.plan)
    most = MAX_COHORTS if rounds == 1 else 16 * MAX_COHORTS // rounds
    laws = {id(law): law for _, _, law in subject.plan}
    listed: dict[int, Cohorts] = {}
    for key, law in laws.items():
        cohorts = law.cohorts(MAX_COHORTS) if subject.outcomes.number == 1 else None
        if cohorts is None or len(cohorts) > most:
            raise _NotExactError
        listed[key] = cohorts
    every = (
        (members, planned[members, 0], 0, round, share * probability)
        for round, share, law in subject.plan
        for members, probability in listed[id(law)]
    )
    return _expectations(subject, every), "enumeration"


def _expectations(
    subject: Subject, cohorts: Iterable[tuple[IntArray, IntArray, int, int, float]]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Sums over cohorts: members, steps they would plan independently, seed, round and share."""
    contribution, joint, estimate = np.zeros((3, len(subject.federation)))
    for members, alone, seed, round, share in cohorts:
        if not len(members):
            continue
        cohort = subject.cohort(members, subject.workload.cohort_steps(alone), seed, round)
        own = contributions(subject.method, cohort)
        contribution[members] += share * own
        joint[members] += share * own.sum() * cohort.weight / cohort.probability
        normaliser = subject.method.averaging.normaliser
        estimate[members] += share * gradient_weights(cohort, normaliser)
    return contribution, joint, estimate


def monte_carlo(subject: Subject, seed: int, draws: int) -> tuple[FloatArray, FloatArray]:
    """Effective weights from drawn cohorts, not normalised, and their standard errors.

    Interchangeable clients have equal expectations, so their draws are pooled.
    """
    values, chances = subject.workload.possible_steps
    pool, window = _pool_alike(subject), subject.dependencies.window
    each, batches = draws // BATCHES, []
    if window and subject.timed:
        raise NotAuditableError(
            "a rule that depends on the round cannot be audited where the clock decides who takes"
            " part by the steps of the round. Use schedule 'wait', or a rule that treats rounds"
            " alike."
        )

    law, shares = subject.plan[0][2], np.array([share for _, share, _ in subject.plan])
    same = all(other is law for _, _, other in subject.plan) and subject.step_size is None

    def drawn(draw: int) -> tuple[IntArray, IntArray, int, int, float]:
        rng = generator(seed, Purpose.MONTE_CARLO, round=draw)
        if subject.timed:  # who takes part depends on the steps, which the round addresses
            chosen = subject.plan[rng.choice(len(shares), p=shares)][2]
            members = chosen.draw(seed, draw)
            return members, subject.workload.planned(members, seed, draw), seed, draw, 1 / each
        if not same:  # a round by its share, and a cohort that depends on no other
            round, _, chosen = subject.plan[rng.choice(len(shares), p=shares)]
            members = chosen.draw(seed, draw)
            planned = values[members, rng.choice(len(chances), size=len(members), p=chances)]
            return members, planned, (seed + draw) % 2**64, round, 1 / each
        members = law.draw(seed, draw)
        planned = values[members, rng.choice(len(chances), size=len(members), p=chances)]
        if not window:
            return members, planned, seed, draw, 1 / each
        # All rounds of the window come equally often.
        return members, planned, (seed + draw // window) % 2**64, draw % window, 1 / each

    for batch in range(BATCHES):
        cohorts = map(drawn, range(batch * each, (batch + 1) * each))
        contribution, joint, estimate = map(pool, _expectations(subject, cohorts))
        batches.append(_effective(subject, (contribution, joint, estimate)))
    mean = np.mean(batches, axis=0)
    if not mean.sum() > 0:
        raise FedShuffleError(
            f"no client took part in {draws} draws: use more draws, or larger probabilities."
        )
    shares = np.stack([raw / max(raw.sum(), np.finfo(float).tiny) for raw in batches])
    errors = error_of_mean(shares)
    # A client that was hardly ever drawn shows no spread, so its error is at least its weight.
    rare = np.count_nonzero(shares, axis=0) < BATCHES // 2
    errors[rare] = np.maximum(errors, subject.federation.weights)[rare]
    return mean, errors


def over_successive_rounds(
    subject: Subject, seed: int, rounds: int
) -> tuple[FloatArray, FloatArray]:
    r"""Effective weights, not normalised, where probabilities are estimated from correlated rounds,
    and their standard errors.

    Client i counts :math:`p_i` times its mean contribution in the rounds with it. Truncated
    intervals remember all rounds, so their error never averages out within a run. But their weight
    :math:`1 / \hat p` tends to ``E[T] / E[ceil(T / K)]``, and :math:`p_i = 1 / E[T]` by Kac, so the
    client counts its mean contribution per weight over the mean number of pieces.
    """
    rule, sampling, n = subject.method.averaging, subject.sampling, len(subject.sampling)
    estimate, intervals = rule.estimate, isinstance(rule.estimate, TruncatedIntervals)
    assert estimate is not None
    past, each = Participation(n, estimate, partial(sampling.draw, seed)), rounds // BATCHES
    values, chances = subject.workload.possible_steps
    last, moved, counted = np.full(n, -1), *np.zeros((2, BATCHES, n))
    for round in range(each + BATCHES * each):
        members = sampling.draw(seed, round)
        gap, last[members] = round - last[members], round
        if not len(members) or round < each:  # in which estimates settle
            continue
        rng = generator(seed, Purpose.MONTE_CARLO, round=round)
        planned = values[members, rng.choice(len(chances), size=len(members), p=chances)]
        steps = subject.workload.cohort_steps(planned)
        cohort, batch = subject.cohort(members, steps, seed, round), round // each - 1
        if intervals:
            counted[batch, members] += estimate.updated(np.zeros(len(members)), gap)
            cohort = replace(cohort, probability=np.ones(len(members)))
        else:
            counted[batch, members] += 1 / sampling.inclusion[members]
            cohort = replace(cohort, probability=past.probabilities(round, members))
        moved[batch, members] += contributions(subject.method, cohort)
    count, w = counted.sum(axis=0), subject.federation.weights
    never = (count == 0) & (sampling.inclusion > 0)
    count = np.maximum(count, 1e-300)
    raw = moved.sum(axis=0) / count
    batches = raw / BATCHES + (moved - raw * counted) / count
    batches = np.stack([_effective(subject, (batch, None, None)) for batch in batches])
    raw, errors = batches.sum(axis=0), errors_of_shares(batches)
    raw[never] = w[never] * raw.sum() / max(w[~never].sum(), 1e-300)
    errors[never] = w[never]
    return raw, errors


def _pool_alike(subject: Subject) -> Callable[[FloatArray], FloatArray]:
    """A function that averages over clients with equal weight, steps and probability, if nothing
    else distinguishes them.
    """
    depends, sampling = subject.dependencies, subject.sampling
    if not isinstance(sampling, EqualPairCorrelation) or depends.clients or depends.others:
        return lambda values: values
    columns = [subject.federation.weights, sampling.p, subject.workload.possible_steps[0]]
    table = np.column_stack(columns)
    _, group, count = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    return lambda values: (np.bincount(group, weights=values) / count)[group]
