r"""The audit: which objective does a method really minimise?

In one round client i of the cohort moves the model by its contribution ``a_i gamma_i tau_i`` times
its gradient, to first order in the step size. So a method minimises the objective with the weights

.. math:: \hat w_i \propto E\big[ 1\{i \in S\}\, a_i\, \gamma_i\, \tau_i \big]
          = \frac{\tilde w_i \tau_i}{c_i q_i}, \qquad
          \frac{1}{q_i} = E\Big[ \frac{1\{i \in S\}}{q_i^S} \Big],

and it is *consistent* if that is the objective you meant, :math:`\hat w = w`. What momentum and
other directions change is derived in docs/explanation/audit.md.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.auditing.estimation import BATCHES, error_of_mean, positive_sum
from fedshuffle.auditing.findings import TOLERANCE, method_findings
from fedshuffle.auditing.quadrature import expected_ratio, nonempty_probability
from fedshuffle.auditing.result import Audit
from fedshuffle.auditing.subject import ROUNDS, Subject
from fedshuffle.auditing.transforms import transform_effects
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Cohort, CohortMoments, InclusionProbability, Method, SumOne
from fedshuffle.methods.averaging import RatioOfSums, objective_weight, steps_of_the_longest
from fedshuffle.methods.directions import gradient_weights
from fedshuffle.privacy import Privacy, bind
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.sampling import One, Sampling, resolve
from fedshuffle.sampling.base import MAX_COHORTS, EqualPairCorrelation
from fedshuffle.transforms import Channel, Transform, channels

_LEVELS = 200  # largest number of distinct step counts for the level-by-level formula
_Moments = tuple[FloatArray, FloatArray | None, FloatArray | None]  # contribution, joint, estimate


class _NoFormulaError(Exception):
    """The direction has no formula in this case."""


class _NotExactError(Exception):
    """The formula or enumeration does not apply."""


def audit(
    federation: Federation,
    method: str | Method,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    *,
    transforms: Sequence[Transform] = (),
    channel: str | Channel | None = None,
    privacy: Privacy | None = None,
    seed: int = 0,
    draws: int = 32_000,
    rounds: int = ROUNDS,
) -> Audit:
    """The objective that a method really minimises on this federation.

    ``transforms``, ``channel`` and ``privacy`` are those of the run: each transform says what it
    does to the mean update.
    ``seed`` and ``draws`` matter only if no exact result is known and the audit has to sample;
    ``rounds`` only if a rule or an interruption of yours depends on the round: the weights are
    then the mean over that many rounds.

        >>> result = audit(Federation.from_sizes([1, 2, 3]), "fedavg-rr")
        >>> (result.effective_weights * 14).round(6).tolist(), result.consistent
        ([1.0, 4.0, 9.0], False)
    """
    expect(federation, Federation, "federation")
    method = methods.get(method)
    sampling = resolve(sampling, federation)
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if count(draws, "draws") < BATCHES:
        raise FedShuffleError(f"{draws} draws are too few to judge by: use {BATCHES} or more.")
    workload = method.local_work(work).on(method.clients(federation).sizes)
    method.check(workload, method.sampling(sampling))
    subject = Subject(federation, method, sampling, workload, count(rounds, "rounds"))
    raw, how, errors, averaged = _weights(subject, check_seed(seed), draws)
    objective, effective = federation.weights, raw / positive_sum(raw)
    # Five standard errors, so that among a thousand clients chance alone hardly ever accuses one.
    slack = TOLERANCE * objective if errors is None else 5 * errors + 1e-12
    biased = bool((np.abs(effective - objective) > slack).any())
    link = channels.channel(channel)
    chain = [*transforms, *([] if link is None else [link])]
    if privacy is not None:
        # The noise for an epsilon depends on the rounds of the run; it does not change the mean.
        unknown: dict[str, Any] = {} if privacy.noise else {"noise": 1.0, "adaptive": None}
        settings = dataclasses.replace(privacy, epsilon=None, **unknown)
        private = bind(settings, method, federation, sampling, workload, None, chain).transforms
        chain += private[:1] if unknown else private
    effects, notes, keeps = transform_effects(subject, chain)
    certain = True if errors is None and averaged is None and keeps else None
    momentum = "" if method.momentum == "none" else f", momentum {method.momentum}"
    return Audit(
        name=f"{method.name}{momentum}",
        source=f"sampling {sampling!r}",
        method=method,
        sampling=sampling,
        client_ids=federation.ids,
        sizes=federation.sizes,
        objective_weights=objective,
        effective_weights=effective,
        inclusion_probabilities=sampling.p,
        consistent=False if biased or keeps is False else certain,
        exact=errors is None,
        how=how,
        rounds=averaged,
        standard_errors=errors,
        findings=(*method_findings(subject, effective, biased, averaged), *effects),
        notes=tuple(notes),
        keeps_mean=keeps,
    )


def _weights(
    subject: Subject, seed: int, draws: int
) -> tuple[FloatArray, str, FloatArray | None, int | None]:
    """Effective weights, not normalised; how they were found; their standard errors; and the
    number of rounds that were averaged, if rounds differ.
    """
    if subject.method.pooled:  # every example counts equally
        return subject.federation.sizes.astype(np.float64), "closed form", None, None
    depends, optimal = subject.dependencies, subject.sampling.two_phase
    rounds, formula = depends.rounds, type(subject.method.direction).effective_weights
    # Under optimal sampling the probability to be asked depends on the updates, so on the data.
    by_data = optimal and (depends.probability or depends.others)
    if formula is not methods.Direction.effective_weights and not by_data:
        with suppress(_NoFormulaError):
            if (exact := _exact_weights(subject)) is not None:
                raw, how = exact
                return raw, how if rounds is None else f"{how}, {_range(rounds)}", None, rounds
            raw, errors = monte_carlo(subject, seed, draws)
            of = f" of {_range(depends.window)}" if depends.window else ""
            return raw, f"Monte Carlo, {draws} draws{of}", errors, rounds
    from fedshuffle.auditing.simulation import simulated_weights

    raw, errors = simulated_weights(subject, seed, draws)
    equal = " with equally long gradients" if optimal else ""
    how = f"simulated with linear clients{equal}, {draws} rounds"
    return raw, how, errors, None if rounds is None else draws


def _range(rounds: int) -> str:
    return "round 0" if rounds == 1 else f"rounds 0 to {rounds - 1}"


def contributions(method: Method, cohort: Cohort) -> FloatArray:
    """How far each client of a cohort moves the model along its gradient, per unit step size.

    ``contribution_i(S) = a_i (gamma_i / eta) tau_i``: aggregation weight, scaled step size, steps.

    >>> from fedshuffle import methods
    >>> steps, half = np.array([1, 3]), np.array([0.5, 0.5])
    >>> cohort = Cohort(np.arange(2), np.array([0.25, 0.75]), half, steps, steps, max_steps=3)
    >>> contributions(methods.get("fedshuffle"), cohort).tolist()
    [1.5, 4.5]
    """
    rule = method.averaging
    return rule.aggregation_weights(cohort) * rule.step_scale(cohort) * cohort.done


def _exact_weights(subject: Subject) -> tuple[FloatArray, str] | None:
    """Effective weights by formula or by enumeration; None if neither applies."""
    depends, steps = subject.dependencies, subject.workload.possible_steps[0]
    varied = np.ptp(steps) > 0 and not isinstance(subject.sampling, One)
    ways = [] if depends.random else [_by_enumeration]
    if ways and varied and isinstance(subject.workload.work.steps, str):  # agreed in the cohort
        ways.insert(0, _by_levels)
    elif ways and not depends.others:
        ways.insert(0, _by_formula)
    for way in ways:
        with suppress(_NotExactError):
            moments, how = way(subject)
            return _effective(subject, moments), how
    return None


def _effective(subject: Subject, moments: _Moments) -> FloatArray:
    """The direction's effective weights from the expectations over the cohorts."""
    direction, w = subject.method.direction, subject.federation.weights
    nonempty = nonempty_probability(subject.sampling)
    weights = direction.effective_weights(CohortMoments(w, nonempty, *moments))
    if weights is None:
        raise _NoFormulaError
    if subject.sampling.two_phase:
        # Momentum is not updated in rounds in which no client is selected from the pool, and how
        # often that happens depends on the data.
        other = direction.effective_weights(CohortMoments(w, nonempty / 2, *moments))
        if not np.array_equal(weights, other):  # type: ignore[arg-type]
            raise _NoFormulaError
    if np.shape(weights) != w.shape or not np.isfinite(weights).all():
        raise FedShuffleError(
            f"{type(direction).__name__}.effective_weights gives {weights!r:.60}, of shape"
            f" {np.shape(weights)}: give a finite number for each of the {len(w)} clients, or leave"
            " it out, and the audit simulates."
        )
    return weights


def _by_formula(subject: Subject) -> tuple[_Moments, str]:
    """Closed forms and quadrature, if steps do not depend on the cohort: the mean over rounds."""
    known: dict[bytes, _Moments] = {}
    moments: list[_Moments] = []
    for round in range(subject.dependencies.rounds or 1):
        moved, ratio = _table(subject, round)
        arrays = [moved, *(() if ratio is None else (ratio.u, ratio.v))]
        key = b"".join(array.tobytes() for array in arrays if array is not None)
        if key not in known:  # most rounds are equal
            known[key] = _of_table(subject, moved, ratio)
        moments.append(known[key])
    contribution, joint, estimate = (
        None if parts[0] is None else np.mean(parts, axis=0) for parts in zip(*moments, strict=True)
    )
    assert contribution is not None
    closed = isinstance(subject.method.averaging.normaliser, InclusionProbability)
    fixed = len(subject.workload.possible_steps[1]) == 1
    closed = closed or (fixed and subject.sampling.cohorts(0) is not None)
    return (contribution, joint, estimate), "closed form" if closed else "quadrature"


def _table(subject: Subject, round: int) -> tuple[FloatArray, RatioOfSums | None]:
    """Contribution times q, and q, of every client in each of its alternatives: shape (n, A). Each
    alternative is shown to the rules as a cohort of its own, as in training.
    """
    rule = subject.method.averaging
    moved, ratios = [], []
    for alternative in range(len(subject.workload.possible_steps[1])):
        planned = subject.workload.possible_steps[0][:, alternative]
        clients = subject.cohort(np.arange(len(planned)), planned, round=round)
        weights = rule.client_weights(clients)
        moved.append(weights * rule.step_scale(clients) * clients.done)
        ratios.append(rule.normaliser.ratio(weights, clients))
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return np.stack(moved, axis=1), None
    v = [ratio.v for ratio in known if ratio.v is not None]
    u = np.stack([ratio.u for ratio in known], axis=1)
    ratio = RatioOfSums(u, np.stack(v, axis=1) if v else None, known[0].power)
    return np.stack(moved, axis=1), ratio


def _of_table(subject: Subject, moved: FloatArray, ratio: RatioOfSums | None) -> _Moments:
    direction, sampling = subject.method.direction, subject.sampling
    chances, w = subject.workload.possible_steps[1], subject.federation.weights
    joint = estimate = None
    if isinstance(subject.method.averaging.normaliser, InclusionProbability):
        mean = moved @ chances
        if direction.needs_joint:
            joint = w / sampling.p * sampling.expected_sums(mean / sampling.p)
        return mean, joint, w if direction.needs_estimate else None
    if ratio is None:
        raise _NotExactError
    if direction.needs_joint:
        total = _total_contribution(moved, ratio)
        joint = _exact_ratio(sampling, total.u, None, total.v, total.power, chances)
        joint = w / sampling.p * joint
    if direction.needs_estimate:
        each = np.repeat(w[:, None], len(chances), axis=1)
        estimate = _exact_ratio(sampling, each, each, None, 1, chances)
    contribution = _exact_ratio(sampling, ratio.u, moved, ratio.v, ratio.power, chances)
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
    for level, below in zip(levels, [0, *levels[:-1]], strict=True):
        part = _exact_ratio(subject.sampling, np.where(planned >= level, w, np.inf), w)
        total += (level - below) * part
        if (part * (levels[-1] - level) <= 1e-14 * total).all():
            break  # hardly any cohort takes more steps than this
    return (total, None, None), "quadrature"


def _by_enumeration(subject: Subject) -> tuple[_Moments, str]:
    """The definition itself, over every cohort, and over rounds if they differ."""
    cohorts = subject.sampling.cohorts(MAX_COHORTS)
    planned, chances = subject.workload.possible_steps
    rounds = subject.dependencies.rounds or 1
    most = MAX_COHORTS if rounds == 1 else 16 * MAX_COHORTS // rounds
    if cohorts is None or len(cohorts) > most or len(chances) > 1:
        raise _NotExactError
    every = (
        (members, planned[members, 0], 0, round, probability / rounds)
        for round in range(rounds)
        for members, probability in cohorts
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

    def drawn(draw: int) -> tuple[IntArray, IntArray, int, int, float]:
        members = subject.sampling.draw(seed, draw)
        rng = generator(seed, Purpose.MONTE_CARLO, round=draw)
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
