r"""The audit: which objective does a method really minimise?

In one round client i of the cohort moves the model by its contribution ``a_i gamma_i tau_i`` times
its gradient, to first order in the step size. So a method minimises the objective with the weights

.. math:: \hat w_i \propto E\big[ 1\{i \in S\}\, a_i\, \gamma_i\, \tau_i \big]
          = \frac{\tilde w_i \tau_i}{c_i q_i}, \qquad
          \frac{1}{q_i} = E\Big[ \frac{1\{i \in S\}}{q_i^S} \Big],

and it is *consistent* if that is the objective you meant, :math:`\hat w = w`. What momentum and
other directions change is derived in docs/audit.md.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, count, expect
from fedshuffle.auditing.estimation import BATCHES, positive_sum
from fedshuffle.auditing.expectation import NoFormulaError, exact_weights, monte_carlo
from fedshuffle.auditing.findings import differ, method_findings
from fedshuffle.auditing.result import Audit
from fedshuffle.auditing.subject import ROUNDS, Subject
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Direction, Method
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import Sampling, resolve


def audit(
    federation: Federation,
    method: str | Method,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    *,
    seed: int = 0,
    draws: int = 32_000,
    rounds: int = ROUNDS,
) -> Audit:
    """The objective that a method really minimises on this federation.

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
    biased = differ(objective, effective, errors)
    certain = True if errors is None and averaged is None else None
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
        consistent=False if biased else certain,
        exact=errors is None,
        how=how,
        rounds=averaged,
        standard_errors=errors,
        findings=tuple(method_findings(subject, effective, biased, averaged)),
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
    if formula is not Direction.effective_weights and not by_data:
        with suppress(NoFormulaError):
            if (exact := exact_weights(subject)) is not None:
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
