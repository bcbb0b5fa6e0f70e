"""Who is too slow for the schedule, where that biases the objective."""

from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.findings import Finding, consistent_variant, findings_of
from fedshuffle.auditing.subject import Subject
from fedshuffle.sampling import AmongAvailable, OverSelected
from fedshuffle.timing import InTime

_SHOWN = 0.005  # a smaller difference does not show in percent


def slow_clients(subject: Subject, biased: bool) -> list[Finding]:
    """A finding that names the fastest and the slowest client, if they do not count alike."""
    in_time, values = _in_time(subject)
    repaired = subject.method.averaging.by_probability
    if in_time is None or repaired or not biased or np.ptp(in_time) < _SHOWN:
        return []
    ids = subject.federation.ids
    return findings_of(
        {"over" if "keep" in values else "deadline": True},
        fast=ids[int(in_time.argmax())],
        slow=ids[int(in_time.argmin())],
        most=in_time.max(),
        least=in_time.min(),
        instead=f", as method {consistent_variant(subject.method)} does",
        **values,
    )


def _in_time(subject: Subject) -> tuple[FloatArray | None, dict[str, Any]]:
    """The probability of each client that is asked to be in time, None if all are waited for; and
    how many are taken of how many.
    """
    sampling = subject.sampling
    if isinstance(sampling, OverSelected):
        keep, ask = sampling.rule.keep, sampling.rule.ask
        return sampling.p * len(sampling) / ask, {"keep": keep, "ask": ask}
    if isinstance(sampling, AmongAvailable) and isinstance(sampling.availability, InTime):
        return sampling.availability.chance, {}
    return None, {}
