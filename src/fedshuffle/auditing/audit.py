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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedshuffle import methods, schedules
from fedshuffle._arrays import FloatArray, count, expect
from fedshuffle.auditing.asynchronous import asynchronous_weights, long_run
from fedshuffle.auditing.effective_weights import (
    NoFormulaError,
    exact_weights,
    monte_carlo,
    over_successive_rounds,
)
from fedshuffle.auditing.estimation import BATCHES, positive_sum
from fedshuffle.auditing.findings import TOLERANCE, adaptive_steps, method_findings
from fedshuffle.auditing.over_time import check_steady, over_time
from fedshuffle.auditing.result import Audit
from fedshuffle.auditing.slow_clients import slow_clients
from fedshuffle.auditing.subject import ROUNDS, Subject
from fedshuffle.auditing.transforms import transform_effects
from fedshuffle.availability import Availability
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import InclusionProbability, Method
from fedshuffle.privacy import Privacy, bind
from fedshuffle.probabilities import Estimate
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import (
    AmongAvailable,
    Buffers,
    Sampling,
    among_available,
    resolve,
    scheduled,
)
from fedshuffle.schedules import Schedule
from fedshuffle.timing import NO_BYTES, Clock, MessageSizes, Timing, TrainingSchedule
from fedshuffle.transforms import Chain, Channel, Transform, channels


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
    rounds: int | None = None,
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
    round: the weights are then the mean over that many rounds, 100 by default. Of an availability
    it is by default a whole period, or the rounds of a drift.

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
    length = ROUNDS if rounds is None else count(rounds, "rounds")
    sampling = resolve(sampling, federation)
    sampling = among_available(sampling, availability, federation, length)
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if count(draws, "draws") < BATCHES:
        raise FedShuffleError(f"{draws} draws are too few to judge by: use {BATCHES} or more.")
    timing = Timing.of(schedule, clock, federation, message_sizes)
    timing.check_sizes()
    workload = method.local_work(work).on(method.clients(federation).sizes)
    timing = method.timing(timing, workload)
    sampling, workload = scheduled(sampling, timing, workload, federation.ids)
    method.check(workload, method.sampling(sampling))
    chain = channels.with_channel(transforms, channel)
    if isinstance(sampling, Buffers):
        sampling.check(Chain(chain), privacy is not None)
    by_round = None if step_size is None else schedules.resolve(step_size, length)
    if by_round is None and rounds is not None and _ends_within(sampling, rounds):
        by_round = 1.0
    subject = Subject(federation, method, sampling, workload, length, by_round)
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
    unsteady, when = over_time(subject, errors is None, biased, exact_weights)
    if isinstance(sampling, Buffers):
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
        exact=errors is None and not adaptive and not (assumed or "").startswith("as if"),
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


def _ends_within(sampling: Sampling, rounds: int) -> bool:
    """Whether a run of this length ends within a period of the availability, or outlasts a drift:
    then the mean over a period does not stand for it.
    """
    if not isinstance(sampling, AmongAvailable) or (period := sampling.period) == 1:
        return False
    return rounds % period != 0 if sampling.availability.repeats else rounds != period


def _weights(
    subject: Subject, seed: int, draws: int
) -> tuple[FloatArray, str, FloatArray | None, int | None]:
    """Effective weights, not normalised; how they were found; their standard errors; and the
    number of rounds that were averaged, if rounds differ.
    """
    if subject.method.pooled:  # every example counts equally
        return subject.federation.sizes.astype(np.float64), "closed form", None, None
    if isinstance(subject.sampling, Buffers):
        return *asynchronous_weights(subject, seed, draws), subject.dependencies.rounds
    depends, optimal = subject.dependencies, subject.sampling.two_phase
    rounds, formula = depends.rounds, type(subject.method.direction).effective_weights
    # Under optimal sampling the probability to be asked depends on the updates, so on the data.
    by_data = optimal and (depends.probability or depends.others)
    correlated = not subject.sampling.independent_rounds
    by_past = correlated and subject.method.direction.needs_independent_rounds
    by_past |= subject.method.direction.remembers and _depends_on_when(subject)
    counted, direction = _as_counted(subject), subject.method.direction
    estimate, joint = counted.method.averaging.estimate, direction.needs_joint
    joint |= direction.needs_estimate or direction.needs_independent_rounds
    settled = estimate is None or (estimate.settles and not counted.successive)
    by_past |= joint and not settled
    if formula is not methods.Direction.effective_weights and not by_data and not by_past:
        with suppress(NoFormulaError):
            if counted.successive:
                successive = max(draws // 4, BATCHES)  # a round after the other takes its time
                raw, errors = over_successive_rounds(counted, seed, successive)
                return raw, f"Monte Carlo, {successive} successive rounds", errors, rounds
            if (exact := exact_weights(counted)) is not None:
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
