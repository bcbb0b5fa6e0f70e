"""Findings: what is wrong with a setting, why it matters, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.federation import Federation
from fedshuffle.local_work import Workload
from fedshuffle.methods import (
    MVR,
    FedShuffleGen,
    GlobalMomentum,
    InclusionProbability,
    Method,
    Participants,
    Plain,
)
from fedshuffle.methods.servers import Average
from fedshuffle.sampling import Full, Sampling

TOLERANCE = 1e-8
"""Effective weights within this relative distance of the objective's count as equal."""


def differ(objective: FloatArray, effective: FloatArray, errors: FloatArray | None) -> bool:
    """Whether two objectives differ, beyond rounding or beyond chance."""
    # Five standard errors, so that among a thousand clients chance alone does not accuse.
    slack = TOLERANCE * objective if errors is None else 5 * errors + 1e-12
    return bool((np.abs(effective - objective) > slack).any())


@final
@dataclass(frozen=True)
class Finding:
    """One cause of a bias."""

    what: str
    why: str
    fix: str


def find(
    federation: Federation,
    effective: FloatArray,
    errors: FloatArray | None,
    method: Method,
    sampling: Sampling,
    workload: Workload,
    rounds: int | None = None,
) -> tuple[Finding, ...]:
    """The causes of the difference between two objectives; where there is no difference, only that
    rounds differ, if they do: ``rounds`` of them were looked at.
    """
    objective = federation.weights
    findings = [] if rounds is None else [_rounds_differ(rounds)]
    if not differ(objective, effective, errors):
        return tuple(findings)
    if method.pooled:
        return (
            Finding(
                "All data is in one place, and every example counts equally.",
                "The objective goes by the number of examples, not by the weights you gave.",
                "Weigh clients by size, or use a federated method.",
            ),
        )
    rule, work = method.averaging, workload.work
    steps = workload.alone[0]
    uneven = int(steps.min()) != int(steps.max())
    sound = sound_kin(method)
    if uneven and work.steps is None and not _balanced(rule, workload):
        findings.append(
            Finding(
                f"Clients take from {steps.min()} to {steps.max()} local steps"
                f" {_at_which_step_sizes(rule, workload)}.",
                "A client that takes more steps moves the model further, so it counts by its"
                " weight and by its steps.",
                f"Scale each client's step size by its number of steps: method {sound}.",
            )
        )
    if uneven and isinstance(work.steps, str):
        findings.append(
            Finding(
                f"The number of steps is the {work.steps} over each cohort.",
                "Clients that are sampled together with large clients move the model further.",
                f"Give every client its own epochs and scale the step size: method {sound}.",
            )
        )
    if _stops_early(workload) and not _makes_up(rule, workload):
        findings.append(
            Finding(
                "Some clients do not finish the steps that they planned.",
                "A client that stops early moves less far than its weight says.",
                "Weigh by the share of the work that was done: method fedshuffle-gen.",
            )
        )
    if not isinstance(rule.normaliser, InclusionProbability) and not isinstance(sampling, Full):
        findings.append(
            Finding(
                "The aggregation weights are normalised over the cohort.",
                divided_by_a_larger_sum(objective, effective, others=bool(findings)),
                f"Divide each weight by the client's inclusion probability: method {sound}.",
            )
        )
    if method.direction.needs_joint and not isinstance(sampling, Full):
        mvr = isinstance(method.direction, MVR)
        findings.append(
            Finding(
                f"{'Exact MVR' if mvr else method.name} estimates the gradient from the cohort that"
                " then walks along it.",
                "Cohorts of large total weight both steer and move more than others.",
                f"Use {'the cheap global momentum' if mvr else 'scaffold'}, or a sampling whose"
                " cohorts all have the same total weight (full participation, or one client with"
                " probability w).",
            )
        )
    if not findings:
        most = int(np.argmax(np.abs(np.log(np.maximum(effective, 1e-300) / objective))))
        findings.append(
            Finding(
                f"The rules of {method.name} do not weigh clients as the objective does.",
                f"In the mean over cohorts client {federation.ids[most]} counts"
                f" {effective[most] / objective[most]:.3g} times what was meant.",
                "Give rules by which weight times steps over normalisations goes by the objective's"
                f" weight, as those of method {sound}.",
            )
        )
    return tuple(findings)


def _rounds_differ(rounds: int) -> Finding:
    return Finding(
        "A rule or an interruption depends on the round.",
        f"Clients count otherwise in other rounds; the weights are the mean over the first {rounds}"
        " rounds, and say nothing of later ones.",
        "Let every round treat clients alike, or audit over as many rounds as you train.",
    )


def divided_by_a_larger_sum(objective: FloatArray, effective: FloatArray, others: bool) -> str:
    """Why weights should not be normalised over the cohort, as it shows in these weights.

    ``others`` says whether there are other causes, which may outweigh this one.
    """
    why = "A client is divided by a larger sum when it is sampled itself, and most of all"
    order = np.argsort(objective, kind="stable")
    tenth = max(1, len(order) // 10)
    small, large = (
        effective[part].sum() / objective[part].sum() for part in (order[:tenth], order[-tenth:])
    )
    if objective[order[0]] < objective[order[-1]] and large < 1 < small:
        return f"{why} when it is large, so large clients count too little and small ones too much."
    if others:
        return (
            f"{why} when it is large. By itself this takes weight from large clients; here other"
            " causes outweigh it."
        )
    return f"{why} when it is large, so it does not count in proportion to its weight."


def _balanced(rule: FedShuffleGen, workload: Workload) -> bool:
    """Whether clients that differ only in their steps move the model equally far."""
    short, long = (_moved(rule, workload, steps, steps) for steps in _extremes(workload))
    return bool(np.isclose(short, long, rtol=1e-9, atol=0))


def _at_which_step_sizes(rule: FedShuffleGen, workload: Workload) -> str:
    short, long = (
        rule.step_scale(_one(workload, steps, steps)).item() for steps in _extremes(workload)
    )
    return "at one step size" if short == long else "at step sizes that do not make up for it"


def _stops_early(workload: Workload) -> bool:
    interruption = workload.work.interruption
    if interruption is None or interruption.random:
        return interruption is not None
    planned = workload.alone[0][:, -1]
    return bool((workload.done(planned, np.arange(len(planned)), 0, 0) < planned).any())


def _makes_up(rule: FedShuffleGen, workload: Workload) -> bool:
    """Whether a client that stops early moves the model as far as if it did not."""
    planned = max(_extremes(workload))
    early, whole = (_moved(rule, workload, planned, done) for done in (1, planned))
    return bool(np.isclose(early, whole, rtol=1e-9, atol=0))


def _extremes(workload: Workload) -> tuple[int, int]:
    """The fewest and the most steps that clients take at most."""
    steps = workload.alone[0].max(axis=1)
    return int(steps.min()), int(steps.max())


def _one(workload: Workload, planned: int, done: int) -> Participants:
    """The first client with other steps, so that only these differ."""
    client, half = np.zeros(1, dtype=np.int64), np.full(1, 0.5)
    return Participants(client, half, half, np.array([planned]), np.array([done]), workload.longest)


def _moved(rule: FedShuffleGen, workload: Workload, planned: int, done: int) -> float:
    client = _one(workload, planned, done)
    return float((rule.client_weights(client) * rule.step_scale(client) * done).item())


def sound_kin(method: Method) -> str:
    """The name of the method with the same direction and server that averages as FedShuffle does.

    >>> from fedshuffle import methods
    >>> sound_kin(methods.get("fedavg")), sound_kin(methods.get("fedprox"))
    ('fedshuffle', 'fedprox+fedshuffle')
    """
    averages = isinstance(method.direction, Plain | MVR | GlobalMomentum)
    if averages and isinstance(method.server, Average):
        return "fedshuffle"
    return f"{method.name.partition('+')[0]}+fedshuffle"
