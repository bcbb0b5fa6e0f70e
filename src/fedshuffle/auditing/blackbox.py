r"""The black-box audit: which objective does other people's code minimise?

The clients are ours, the server is theirs. Client i of a cohort takes :math:`\tau_i` steps of size
:math:`\gamma_i` along its own coordinate, so its update is :math:`\gamma_i \tau_i e_i`, and the
server's step shows, coordinate by coordinate, how far each client moved the model: its contribution
:math:`a_i \gamma_i \tau_i`, whatever rule made :math:`a_i`. The mean contribution over cohorts
gives the effective weights (see :mod:`fedshuffle.auditing.audit`), here with confidence intervals.
docs/how-to/audit-your-code.md says what is done if a step is not a weighted sum of the updates.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle.auditing.adapters import Aggregator, as_aggregator, check_not_by_updates
from fedshuffle.auditing.estimation import (
    BATCHES,
    Control,
    Observations,
    WeightEstimate,
    estimate,
    estimate_by_batches,
    positive_sum,
    proportions,
)
from fedshuffle.auditing.findings import adaptive_steps, uneven
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.result import Audit, blackbox_result
from fedshuffle.auditing.server import QueryCohort, ServerQueries
from fedshuffle.auditing.server_properties import ServerProperties, describe_weights
from fedshuffle.availability import Availability
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import AmongAvailable, Sampling, among_available, resolve

_DESCRIBED = 64  # cohorts of a simulation that are compared to find a rule for the weights
_DIFFERENT = 2000  # most different clients for which control variates are computed

_Found = tuple[WeightEstimate, str, ServerProperties]  # the weights, how found, and the server


def audit_server(
    aggregate: Aggregator | Callable[..., Any],
    federation: Federation,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    *,
    availability: str | Availability | None = None,
    step_sizes: Literal["equal", "scaled"] = "equal",
    step_size: float = 2.0**-6,
    draws: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Audit:
    """The objective that a server really minimises, measured by sending it known updates.

    Args:
        aggregate: a function ``(clients, sizes, updates) -> step``, a class of such, or an adapter
            from :mod:`fedshuffle.auditing.adapters`.
        federation: the clients, and the objective that is meant.
        sampling: how cohorts are drawn.
        availability: who is there to be drawn.
        work: how many local steps clients take, and by which local optimiser.
        step_sizes: ``"equal"`` for all clients, or ``"scaled"`` by 1 / (their planned steps), as
            clients of FedShuffle do.
        step_size: of the client with the most steps; matters for servers that are not linear.
        draws: number of cohorts to send; fewer if all cohorts can be listed.
        seed: of the cohorts.
        confidence: of each client's interval.

    >>> def fedavg(clients, sizes, updates):
    ...     return sizes / sizes.sum() @ updates
    >>> result = audit_server(fedavg, Federation.from_sizes([1, 2, 3]), "uniform:2")
    >>> result.effective_weights.round(4).tolist(), result.consistent
    ([0.0862, 0.3153, 0.5985], False)
    """
    expect(federation, Federation, "federation")
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if step_sizes not in ("equal", "scaled"):
        raise FedShuffleError(f"step_sizes is {step_sizes!r}: choose 'equal' or 'scaled'.")
    number(step_size, "step_size", within="(0, inf)")
    number(confidence, "confidence", within="(0, 1)")
    if count(draws, "draws") < 2 * BATCHES:
        raise FedShuffleError(f"{draws} draws are too few to judge by: use {2 * BATCHES} or more.")
    drawn = among_available(resolve(sampling, federation), availability, federation)
    if isinstance(drawn, AmongAvailable):
        if drawn.period > 1:
            raise FedShuffleError(
                f"{drawn!r} changes with time, and a server is asked about single rounds: audit its"
                " log instead (fedshuffle audit --log), or give the availability of one time."
            )
        drawn = drawn.at(0)  # independent rounds
    check_not_by_updates(drawn)
    server = ServerQueries(
        as_aggregator(aggregate),
        federation,
        drawn,
        work.on(federation.sizes),
        step_sizes == "scaled",
        float(step_size),
        draws,
        check_seed(seed),
    )
    found, how, properties = _measure(server)
    steps = server.workload.possible_steps[0]
    low, high = int(steps.min()), int(steps.max())
    adaptive, own, told = adaptive_steps(server.workload)
    result = blackbox_result(
        found,
        properties,
        federation,
        confidence,
        probabilities=drawn.p,
        sampling=drawn,
        steps=None if server.scaled or low == high else (low, high),
        name=server.name,
        source=f"sampling {drawn!r}",
        how=f"{how}, for gradients of equal length" if adaptive else how,
        notes=tuple(told),
        optimiser=str(server.workload.optimiser),
        adaptive=adaptive,
    )
    if not adaptive:
        return result
    consistent = False if adaptive == "unequal" or result.consistent is False else None
    findings = (*result.findings, *own)
    return dataclasses.replace(result, consistent=consistent, exact=False, findings=findings)


def _measure(server: ServerQueries) -> _Found:
    """Check the server, then measure its weights in the way that suits it."""
    checked = server.check()
    average = server.aggregator.average() if checked.linear is False else None
    if average is not None:  # of an optimiser, take the weights of the average that it gets
        found, how, inner = _measure(dataclasses.replace(server, aggregator=average))
        names = ("sums_to", "constant", "form", "non_finite_rounds", "ignored_rounds", "rounds")
        same = {name: getattr(inner, name) for name in names}
        checked = dataclasses.replace(checked, optimiser=True, **same)
        return found, f"{how}, of the average that the server's optimiser gets", checked
    if checked.stateful or checked.repeatable is False:
        # If steps grow without bound a simulation is useless; a fresh server may help.
        if server.own and checked.linear is not False and checked.long_run_gain != np.inf:
            return _simulate(server, checked)
        if not server.aggregator.resets:
            raise FedShuffleError(
                f"{server.name} has state, or is random, and cannot be reset: give a class instead"
                " of a function, so that a new object is a fresh server."
            )
    return _observe(server, checked)


def _observe(server: ServerQueries, checked: ServerProperties) -> _Found:
    """The contributions in each cohort, from a fresh server each."""
    asked = [(c, server.contributions(c, checked)) for c in server.cohorts(bool(checked.ordered))]
    seen = [(cohort, found) for cohort, found in asked if np.isfinite(found).all()]
    rounds, lost = len(asked), len(asked) - len(seen)
    if not seen:
        raise FedShuffleError(f"{server.name} gave NaN or infinity in every one of {lost} rounds.")
    ignored = sum(not found.any() for _, found in seen)
    ignored = 0 if ignored == rounds else ignored
    checked = dataclasses.replace(
        checked, non_finite_rounds=lost, ignored_rounds=ignored, rounds=rounds
    )
    n, listed = len(server.federation), None if checked.ordered else server.listed
    # Empty rounds count too, where cohorts are drawn.
    observations = _observations(seen, server.draws - lost if listed is None else len(seen))
    if listed is not None:
        shares = np.array([cohort.share for cohort, _ in seen])[observations.round]
        shared = observations.contribution * shares
        raw = np.bincount(observations.client, weights=shared, minlength=n).astype(np.float64)
        estimated = WeightEstimate(raw / positive_sum(raw), np.zeros(n), np.full(n, np.inf))
        how = f"all {len(listed)} cohorts" if len(listed) > 1 else "the only cohort"
    else:
        known = None if lost else server.sampling.inclusion
        controls = _controls(server, observations)
        estimated = estimate(observations, server.federation.weights, known, controls)
        never = server.sampling.inclusion == 0
        estimated = dataclasses.replace(estimated, errors=np.where(never, 0.0, estimated.errors))
        unseen = n - int(never.sum()) - len(np.unique(observations.client))
        how = f"{server.draws} cohorts" + (f", {unseen} clients in none of them" if unseen else "")
    how += ", small differences around a common update" if checked.linear is False else ""
    how += ", a fresh server each" if checked.stateful else ""
    checked = describe_weights(checked, server.federation, server.sampling.p, observations)
    return estimated, how, checked


def _observations(seen: list[tuple[QueryCohort, FloatArray]], rounds: int) -> Observations:
    return Observations(
        rounds,
        np.repeat(np.arange(len(seen)), [len(found) for _, found in seen]),
        np.concatenate([cohort.clients for cohort, _ in seen]),
        np.concatenate([found for _, found in seen]),
        np.concatenate([found / cohort.distance for cohort, found in seen]),
        np.concatenate([cohort.steps for cohort, _ in seen]),
    )


def _controls(server: ServerQueries, seen: Observations) -> Iterator[Control]:
    """Shares of clients in their cohorts, with known expectations: in proportion to fitted
    aggregation weights, and to one for each client.
    """
    n, positive = len(server.federation), bool((seen.contribution > 0).all())
    fitted = proportions(seen, n) if positive and server.own else server.federation.weights
    for u in (fitted, np.ones(n)):
        sums = np.bincount(seen.round, weights=u[seen.client], minlength=seen.rounds)
        values = u[seen.client] / sums[seen.round]
        if len(np.unique(u)) > _DIFFERENT or not uneven(values):
            continue
        shares = expected_ratio(server.sampling, u[:, None], c=u[:, None])
        if shares is not None:
            yield values, shares / server.sampling.p


def _simulate(server: ServerQueries, checked: ServerProperties) -> _Found:
    """The mean movement of a server with state over many rounds."""
    n = len(server.federation)
    count = np.zeros(n, dtype=np.int64)
    settle, each = server.draws // 8, server.draws // BATCHES
    moves = np.zeros((BATCHES, n))
    cohorts = list(server.cohorts(True, settle + each * BATCHES))
    checked = dataclasses.replace(checked, rounds=len(cohorts))
    if checked.repeatable is not False:
        seen = [(c, server.contributions(c, checked)) for c in cohorts[:_DESCRIBED]]
        described = _observations(seen, len(seen))
        checked = describe_weights(checked, server.federation, server.sampling.p, described)
    server.aggregator.reset()
    for r, cohort in enumerate(cohorts):
        step = server.ask(cohort, np.eye(n, n + 1)[cohort.clients], fresh=False, round=r)
        if not np.isfinite(step).all():
            raise FedShuffleError(
                f"{server.name} gave NaN or infinity in round {r} of a simulation over many rounds;"
                " what comes after is lost."
            )
        if r >= settle:
            moves[(r - settle) // each] += step[:n] / each
            count[cohort.clients] += 1
    how = f"a simulation over {len(cohorts)} rounds"
    return estimate_by_batches(moves, count), how, checked
