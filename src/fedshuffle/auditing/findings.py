"""Findings: what is wrong with a setting, why it matters, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray
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
from fedshuffle.methods.averaging import own_steps
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
    objective: FloatArray,
    effective: FloatArray,
    errors: FloatArray | None,
    method: Method,
    sampling: Sampling,
    workload: Workload,
) -> tuple[Finding, ...]:
    """The causes of the difference between two objectives; none where there is no difference."""
    if not differ(objective, effective, errors):
        return ()
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
    findings = []
    sound = sound_kin(method)
    if uneven and work.steps is None and not _balanced(rule, workload):
        findings.append(
            Finding(
                f"Clients take from {steps.min()} to {steps.max()} local steps at one step size.",
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
    if not isinstance(rule.normaliser, InclusionProbability) and not isinstance(sampling, Full):
        findings.append(
            Finding(
                "The aggregation weights are normalised over the cohort.",
                "A client is divided by a larger sum when it is sampled itself, and most of all"
                " when it is large, so large clients count too little and small ones too much.",
                f"Divide each weight by the client's inclusion probability: method {sound}.",
            )
        )
    if work.interruption is not None and rule.step_normalisation is own_steps:
        findings.append(
            Finding(
                "Some clients do not finish the steps that their step size was made for.",
                "A client that stops early moves less far than its weight says.",
                "Weigh by the share of the work that was done: method fedshuffle-gen.",
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
    return tuple(findings)


def _balanced(rule: FedShuffleGen, workload: Workload) -> bool:
    """Whether clients that differ only in their steps move the model equally far."""
    steps = workload.alone[0].max(axis=1)
    two = np.array([steps.argmin(), steps.argmax()])
    half = np.full(2, 0.5)
    clients = Participants(two, half, half, steps[two], steps[two], workload.longest)
    short, long = rule.weight(clients) * rule.step_scale(clients) * steps[two]
    return bool(np.isclose(short, long, rtol=1e-9, atol=0))


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
