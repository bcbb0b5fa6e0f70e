"""Findings: what is wrong with a method in a setting, why it matters, and how to fix it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.subject import Subject
from fedshuffle.local_work import Workload
from fedshuffle.methods import MVR, Cohort, GlobalMomentum, InclusionProbability, Method, Plain
from fedshuffle.methods.servers import Average
from fedshuffle.sampling import Full

TOLERANCE = 1e-8
"""Effective weights within this relative distance of the objective's count as equal."""


def differ(objective: FloatArray, effective: FloatArray, errors: FloatArray | None) -> bool:
    """Whether two objectives differ, beyond rounding or beyond chance."""
    # Five standard errors, so that among a thousand clients chance alone hardly ever accuses one.
    slack = TOLERANCE * objective if errors is None else 5 * errors + 1e-12
    return bool((np.abs(effective - objective) > slack).any())


@dataclass(frozen=True)
class Finding:
    """One cause of a bias."""

    what: str
    why: str
    fix: str


def findings_of(*rows: tuple[Any, str, str, str]) -> list[Finding]:
    """The findings of the rows (condition, what, why, fix) whose condition holds."""
    return [Finding(*texts) for holds, *texts in rows if holds]


def method_findings(
    subject: Subject, effective: FloatArray, biased: bool, rounds: int | None
) -> list[Finding]:
    """The causes of the bias of a method. Without a bias, the only possible finding is that rounds
    differ: ``rounds`` is then the number of rounds that were averaged.
    """
    method, sampling, work = subject.method, subject.sampling, subject.workload.work
    objective, steps = subject.federation.weights, subject.workload.possible_steps[0]
    if method.pooled:
        return findings_of(
            (
                biased,
                "All data is in one place, and every example counts equally.",
                "The objective goes by the number of examples, not by the weights you gave.",
                "Weigh clients by size, or use a federated method.",
            )
        )
    findings = findings_of(
        (
            rounds is not None,
            "A rule or an interruption depends on the round.",
            f"The weights are the mean over the first {rounds} rounds; later ones may differ.",
            "Let every round treat clients alike, or audit over as many rounds as you train.",
        )
    )
    if not biased:
        return findings
    uneven, partial = steps.min() != steps.max(), not isinstance(sampling, Full)
    few, many = int(steps.max(axis=1).min()), int(steps.max())
    by_steps = uneven and work.steps is None and _moves_apart(subject, (few, few), (many, many))
    scaled = by_steps and _step_scale(subject, few) != _step_scale(subject, many)
    at_scale = "at step sizes that do not make up for it" if scaled else "at one step size"
    consistent, mvr = consistent_variant(method), isinstance(method.direction, MVR)
    findings += findings_of(
        (
            by_steps,
            f"Clients take from {steps.min()} to {steps.max()} local steps {at_scale}.",
            "A client that takes more steps moves the model further, so it also counts by steps.",
            f"Scale each client's step size by its number of steps: method {consistent}.",
        ),
        (
            uneven and isinstance(work.steps, str),
            f"The number of steps is the {work.steps} over each cohort.",
            "Clients that are sampled together with large clients move the model further.",
            f"Give every client its own epochs and scale the step size: method {consistent}.",
        ),
        (
            _stops_early(subject.workload) and _moves_apart(subject, (many, 1), (many, many)),
            "Some clients do not finish the steps that they planned.",
            "A client that stops early moves less far than its weight says.",
            "Weigh by the share of the work that was done: method fedshuffle-gen.",
        ),
    )
    findings += findings_of(
        (
            partial and not isinstance(method.averaging.normaliser, InclusionProbability),
            "The aggregation weights are normalised over the cohort.",
            why_not_normalise(objective, effective, other_causes=bool(findings)),
            f"Divide each weight by the client's inclusion probability: method {consistent}.",
        ),
        (
            partial and method.direction.needs_joint,
            f"{'Exact MVR' if mvr else method.name} estimates the gradient from the cohort that"
            " then follows it.",
            "A cohort of large total weight both counts more in the estimate and moves further.",
            f"Use {'the cheap global momentum' if mvr else 'scaffold'}, or a sampling whose cohorts"
            " all have the same total weight (full participation, or one client with probability"
            " w).",
        ),
    )
    most = int(np.argmax(np.abs(np.log(np.maximum(effective, 1e-300) / objective))))
    return findings or findings_of(
        (
            True,
            f"The rules of {method.name} do not weigh clients as the objective does.",
            f"In the mean over cohorts client {subject.federation.ids[most]} counts"
            f" {effective[most] / objective[most]:.3g} times what was meant.",
            "Make weight times steps over normalisations proportional to the objective's weight,"
            f" as method {consistent} does.",
        )
    )


def why_not_normalise(objective: FloatArray, effective: FloatArray, other_causes: bool) -> str:
    """Why weights should not be normalised over the cohort, as these weights show it.

    ``other_causes`` says whether there are other causes of a bias, which may outweigh this one.
    """
    why = (
        "A client is divided by a larger sum when it is sampled itself, and most of all when it is"
        " large"
    )
    order = np.argsort(objective, kind="stable")
    tenth = max(1, len(order) // 10)
    small, large = (
        effective[part].sum() / objective[part].sum() for part in (order[:tenth], order[-tenth:])
    )
    if objective[order[0]] < objective[order[-1]] and large < 1 < small:
        return f"{why}, so large clients count too little and small ones too much."
    if other_causes:
        return (
            f"{why}. By itself this takes weight from large clients; here other causes outweigh it."
        )
    return f"{why}, so it does not count in proportion to its weight."


def _stops_early(workload: Workload) -> bool:
    interruption = workload.work.interruption
    if interruption is None or interruption.random:
        return interruption is not None
    planned = workload.possible_steps[0][:, -1]
    return bool((workload.done(planned, np.arange(len(planned)), 0, 0) < planned).any())


def _client(subject: Subject, planned: int, done: int) -> Cohort:
    """The first client with other steps, so that only these differ."""
    client, half = np.zeros(1, dtype=np.int64), np.full(1, 0.5)
    longest = subject.workload.longest
    return Cohort(client, half, half, np.array([planned]), np.array([done]), longest)


def _step_scale(subject: Subject, steps: int) -> float:
    return float(subject.method.averaging.step_scale(_client(subject, steps, steps)).item())


def _moves_apart(subject: Subject, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a client moves the model differently far with these (planned, done) steps."""
    rule, clients = subject.method.averaging, (_client(subject, *one), _client(subject, *other))
    moved = [(rule.client_weights(c) * rule.step_scale(c) * c.done).item() for c in clients]
    return not math.isclose(*moved, rel_tol=1e-9)


def consistent_variant(method: Method) -> str:
    """The name of the method with the same direction and server that averages as FedShuffle does.

    >>> from fedshuffle import methods
    >>> consistent_variant(methods.get("fedavg")), consistent_variant(methods.get("fedprox"))
    ('fedshuffle', 'fedprox+fedshuffle')
    """
    averages = isinstance(method.direction, Plain | MVR | GlobalMomentum)
    if averages and isinstance(method.server, Average):
        return "fedshuffle"
    return f"{method.name.partition('+')[0]}+fedshuffle"
