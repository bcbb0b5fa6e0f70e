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

from fedshuffle import methods, schedules
from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.auditing.estimation import BATCHES, error_of_mean, positive_sum
from fedshuffle.auditing.findings import TOLERANCE, adaptive_steps, method_findings
from fedshuffle.auditing.over_time import check_steady, over_time
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.result import Audit
from fedshuffle.auditing.slow_clients import slow_clients
from fedshuffle.auditing.subject import ROUNDS, Subject
from fedshuffle.auditing.transforms import transform_effects
from fedshuffle.availability import Availability
from fedshuffle.errors import FedShuffleError, NotAuditableError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Cohort, CohortMoments, InclusionProbability, Method, SumOne
from fedshuffle.methods.averaging import RatioOfSums, objective_weight, steps_of_the_longest
from fedshuffle.methods.directions import gradient_weights
from fedshuffle.privacy import Privacy, bind
from fedshuffle.probabilities import Estimate
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.sampling import (
    AmongAvailable,
    Buffers,
    Cohorts,
    One,
    Sampling,
    among_available,
    resolve,
    scheduled,
)
from fedshuffle.sampling.base import MAX_COHORTS, EqualPairCorrelation
from fedshuffle.schedules import Schedule
from fedshuffle.timing import NO_BYTES, Clock, MessageSizes, Timing, TrainingSchedule
from fedshuffle.transforms import Chain, Channel, Transform, channels

_LEVELS = 200  # largest number of distinct step counts for the level-by-level formula
_INTEGRALS = 100  # most integrals over different rounds; sampling is faster than more
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
    availability: str | Availability | None = None,
    probabilities: str | Estimate | None = None,
    schedule: str | TrainingSchedule | None = None,
    clock: str | Clock | None = None,
    message_sizes: MessageSizes = NO_BYTES,
    step_size: Schedule | str | None = None,
    seed: int = 0,
    draws: int = 32_000,
    rounds: int = ROUNDS,
) -> Audit:
    """The objective that a method really minimises on this federation.

    ``transforms``, ``channel`` and ``privacy`` are those of the run: each transform says what it
    does to the mean update. ``availability`` says who is there: the sampling then draws among
    those, and ``inclusion_probabilities`` are those of both together. ``schedule`` says for whom
    the server waits, and ``clock`` how long clients take, with ``message_sizes`` in bytes where
    the clock has bandwidths. Where who takes part changes with time, ``step_size`` is that of the
    run, and rounds count by it. ``probabilities``, such as ``"estimate"``, are estimated from who
    took part so far (see :mod:`fedshuffle.probabilities`): the weights are then those of a long
    run.
    ``seed`` and ``draws`` matter only if no exact result is known and the audit has to sample;
    ``rounds`` only if a rule, an interruption, the availability or the step size depends on the
    round: the weights are then the mean over that many rounds.

        >>> result = audit(Federation.from_sizes([1, 2, 3]), "fedavg-rr")
        >>> (result.effective_weights * 14).round(6).tolist(), result.consistent
        ([1.0, 4.0, 9.0], False)
        >>> from fedshuffle.availability import Trace
        >>> halves = Trace(2, [0, 1], begins=[0, 50], ends=[50, 100])  # who is there when
        >>> settings = {"availability": halves, "step_size": "cosine:0.1:0", "rounds": 100}
        >>> audit(Federation.from_sizes([1, 1]), "fedavg", **settings).effective_weights.round(2)
        array([0.82, 0.18])
    """
    expect(federation, Federation, "federation")
    method = methods.get(method).with_probabilities(probabilities)
    rounds = count(rounds, "rounds")
    sampling = resolve(sampling, federation)
    sampling = among_available(sampling, availability, federation, rounds)
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if count(draws, "draws") < BATCHES:
        raise FedShuffleError(f"{draws} draws are too few to judge by: use {BATCHES} or more.")
    timing = Timing.of(schedule, clock, federation, message_sizes)
    workload = method.local_work(work).on(method.clients(federation).sizes)
    sampling, workload = scheduled(sampling, timing, workload, federation.ids)
    method.check(workload, method.sampling(sampling))
    link = channels.channel(channel)
    chain = [*transforms, *([] if link is None else [link])]
    if isinstance(sampling, Buffers):
        sampling.check(Chain(tuple(chain)), privacy is not None)
    by_round = None if step_size is None else schedules.resolve(step_size, rounds)
    subject = Subject(federation, method, sampling, workload, rounds, by_round)
    raw, how, errors, averaged = _weights(subject, check_seed(seed), draws)
    subject = _as_counted(subject)
    objective, effective = federation.weights, raw / positive_sum(raw)
    # Five standard errors, so that among a thousand clients chance alone hardly ever accuses one.
    slack = TOLERANCE * objective if errors is None else 5 * errors + 1e-12
    biased = bool((np.abs(effective - objective) > slack).any())
    if privacy is not None:
        # The noise for an epsilon depends on the rounds of the run; it does not change the mean.
        unknown: dict[str, Any] = {} if privacy.noise else {"noise": 1.0, "adaptive": None}
        settings = dataclasses.replace(privacy, epsilon=None, **unknown)
        private = bind(settings, method, federation, sampling, workload, None, chain).transforms
        chain += private[:1] if unknown else private
    effects, notes, keeps = transform_effects(subject, chain)
    adaptive, own, told = adaptive_steps(workload)
    unsteady, when = over_time(subject, errors is None, biased, _exact_weights)
    if isinstance(sampling, Buffers):
        from fedshuffle.auditing.asynchronous import long_run

        notes = [*notes, *long_run(subject)]
    if (assumed := subject.estimated) is not None:
        held = f", {assumed}" if assumed else ""
        notes = [*notes, f"probabilities are estimated: these are the weights of a long run{held}"]
    uncertain = adaptive or assumed or averaged is not None or errors is not None
    certain = True if keeps and not uncertain else None
    momentum = "" if method.momentum == "none" else f", momentum {method.momentum}"
    return Audit(
        name=f"{method.name}{momentum}",
        source=f"{'schedule' if isinstance(sampling, Buffers) else 'sampling'} {sampling!r}",
        method=method,
        sampling=sampling,
        client_ids=federation.ids,
        sizes=federation.sizes,
        objective_weights=objective,
        effective_weights=effective,
        inclusion_probabilities=sampling.inclusion,
        consistent=False if biased or keeps is False or adaptive == "unequal" else certain,
        exact=errors is None and not adaptive,
        how=f"{how}, for gradients of equal length" if adaptive else how,
        rounds=averaged,
        standard_errors=errors,
        findings=(
            *method_findings(subject, effective, biased, averaged),
            *slow_clients(subject, biased),
            *unsteady,
            *own,
            *effects,
        ),
        notes=(*told, *notes, *when),
        keeps_mean=keeps,
        optimiser=str(workload.optimiser),
        adaptive=adaptive,
    )


def _weights(
    subject: Subject, seed: int, draws: int
) -> tuple[FloatArray, str, FloatArray | None, int | None]:
    """Effective weights, not normalised; how they were found; their standard errors; and the
    number of rounds that were averaged, if rounds differ.
    """
    if subject.method.pooled:  # every example counts equally
        return subject.federation.sizes.astype(np.float64), "closed form", None, None
    if isinstance(subject.sampling, Buffers):
        from fedshuffle.auditing.asynchronous import asynchronous_weights

        return *asynchronous_weights(subject, seed, draws), subject.dependencies.rounds
    depends, optimal = subject.dependencies, subject.sampling.two_phase
    rounds, formula = depends.rounds, type(subject.method.direction).effective_weights
    # Under optimal sampling the probability to be asked depends on the updates, so on the data.
    by_data = optimal and (depends.probability or depends.others)
    correlated = not subject.sampling.independent_rounds
    by_past = correlated and subject.method.direction.needs_independent_rounds
    by_past |= subject.method.direction.remembers and _depends_on_when(subject)
    if formula is not methods.Direction.effective_weights and not by_data and not by_past:
        counted = _as_counted(subject)
        with suppress(_NoFormulaError):
            if (exact := _exact_weights(counted)) is not None:
                raw, how = exact
                return raw, how if rounds is None else f"{how}, {_range(rounds)}", None, rounds
            raw, errors = monte_carlo(counted, seed, draws)
            of = f" of {_range(depends.window)}" if depends.window else ""
            return raw, f"Monte Carlo, {draws} draws{of}", errors, rounds
    check_steady(subject)
    from fedshuffle.auditing.simulation import simulated_weights

    raw, errors = simulated_weights(subject, seed, draws)
    equal = " with equally long gradients" if optimal else ""
    how = f"simulated with linear clients{equal}, {draws} rounds"
    return raw, how, errors, None if rounds is None else draws


def _as_counted(subject: Subject) -> Subject:
    """The subject with ``q = p`` if its method remembers clients: it counts each by what it sends
    when it takes part, however often that is.
    """
    method = subject.method
    if not method.direction.remembers:
        return subject
    rule = dataclasses.replace(method.averaging, normaliser=InclusionProbability())
    return dataclasses.replace(subject, method=dataclasses.replace(method, averaging=rule))


def _depends_on_when(subject: Subject) -> bool:
    """Whether it matters when clients take part even if each counts in every round: what they send
    depends on the round or on who else is there while the rounds are correlated, or rounds do not
    count alike while who is there changes.
    """
    sampling, depends = subject.sampling, subject.dependencies
    if depends.window:
        return True
    if sampling.independent_rounds:
        return False
    if depends.others or isinstance(subject.workload.work.steps, str):
        return True
    lasting = not isinstance(sampling, AmongAvailable) or sampling.availability.repeats
    return sampling.period > 1 and (subject.step_size is not None or not lasting)


def _range(rounds: int) -> str:
    return "round 0" if rounds == 1 else f"rounds 0 to {rounds - 1}"


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


def _exact_weights(subject: Subject) -> tuple[FloatArray, str] | None:
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
    by_probability = isinstance(subject.method.averaging.normaliser, InclusionProbability)
    return isinstance(subject.sampling, AmongAvailable) and not by_probability


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
    weights = direction.effective_weights(CohortMoments(w, nonempty, *moments))
    if weights is None:
        raise _NoFormulaError
    if subject.sampling.two_phase or unknown:
        # Momentum is not updated in rounds in which no client is selected from the pool, and how
        # often that happens depends on the data.
        other = direction.effective_weights(CohortMoments(w, nonempty / 2, *moments))
        if other is None or not np.allclose(weights * other.sum(), other * weights.sum()):
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
    closed = isinstance(subject.method.averaging.normaliser, InclusionProbability)
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
    if isinstance(subject.method.averaging.normaliser, InclusionProbability):
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
