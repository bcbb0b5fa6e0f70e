"""What the black-box auditor concludes from weights, their intervals and a server's traits."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, number
from fedshuffle.auditing.estimation import Estimate
from fedshuffle.auditing.findings import Finding
from fedshuffle.auditing.traits import CLOSE, Traits, find_bias, find_traits
from fedshuffle.auditing.weighed import Weighed
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation

ROUNDING = 1e-8
"""No interval is narrower, against its weight: servers and expectations round."""

_SURE = 5.0
"""At least so many standard errors accuse, lest chance does among many clients."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class BlackBoxAudit(Weighed):
    """The objective that a server really minimises, found by probing it or from its log."""

    name: str
    source: str
    """The sampling it was probed with, or the log."""
    client_ids: Sequence[Hashable]
    sizes: IntArray
    objective_weights: FloatArray
    effective_weights: FloatArray
    inclusion_probabilities: FloatArray
    """Of a log: the share of rounds that had the client."""
    exact: bool
    how: str
    standard_errors: FloatArray | None
    """None where nothing is estimated; infinite for a client of which nothing is known."""
    intervals: FloatArray
    """Lower and upper ends for each client's effective weight, each at the confidence level."""
    confidence: float
    verdict: bool | None
    traits: Traits
    findings: tuple[Finding, ...]

    @property
    def title(self) -> tuple[str, str]:
        """Its name."""
        return self.name, ""

    @property
    def setting(self) -> str:
        """The sampling, or the log."""
        return self.source

    @property
    def consistent(self) -> bool | None:
        """False if the intervals exclude the objective that was meant, True if they leave no room
        for another, None if they leave some.
        """
        return self.verdict

    def facts(self) -> list[str]:
        """What the server was seen to do, in sentences."""
        return self.traits.facts()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; null for what is infinite."""
        return {
            "name": self.name,
            "source": self.source,
            **self._plain(
                intervals=self.intervals,
                confidence=self.confidence,
                traits=dataclasses.asdict(self.traits),
            ),
        }


def conclude(
    found: Estimate,
    traits: Traits,
    *,
    name: str,
    source: str,
    how: str,
    federation: Federation,
    probabilities: FloatArray,
    known: bool,
    uneven_steps: tuple[int, int] | None,
    confidence: float,
) -> BlackBoxAudit:
    """The audit that follows from an estimate; ``known`` says whether the probabilities are."""
    objective = federation.weights
    told = verdict(found, objective, confidence, traits)
    findings = find_traits(traits)
    if told is False:
        findings += find_bias(
            traits,
            objective,
            found.weights,
            partial=bool((probabilities < 1).any()),
            uneven_steps=uneven_steps,
            uneven_weights=uneven(objective),
            # In a log, chance alone makes the shares of rounds differ.
            uneven_probabilities=known and uneven(probabilities),
        )
    exactly = not found.errors.any()
    half = np.maximum(found.half_widths(confidence), ROUNDING * np.abs(found.weights))
    return BlackBoxAudit(
        name=name,
        source=source,
        client_ids=federation.ids,
        sizes=federation.sizes,
        objective_weights=objective,
        effective_weights=found.weights,
        inclusion_probabilities=probabilities,
        exact=exactly and traits.linear is not False,
        how=how,
        standard_errors=None if exactly else found.errors,
        intervals=np.stack([found.weights - half, found.weights + half], axis=1),
        confidence=confidence,
        verdict=told,
        traits=traits,
        findings=tuple(findings),
    )


def check_confidence(confidence: float) -> None:
    if not 0 < number(confidence, "confidence") < 1:
        raise FedShuffleError(f"confidence is {confidence}: choose a share such as 0.95.")


def uneven(values: FloatArray) -> bool:
    """Whether these numbers are not all the same."""
    return bool(np.ptp(values) > 1e-9 * np.abs(values).max())


def verdict(
    found: Estimate, objective: FloatArray, confidence: float, traits: Traits
) -> bool | None:
    """Whether the weights are those that were meant, as far as intervals for all can tell."""
    if traits.broken or traits.drifts or traits.gain == np.inf:
        return False
    reach = np.maximum(found.half_widths(confidence, together=True), _SURE * found.errors)
    apart = np.abs(found.weights - objective)
    slack = (CLOSE if traits.linear is not False else 100 * CLOSE) * objective
    if (apart > np.maximum(reach, slack)).any():
        return False
    return True if traits.linear is not False and (apart + reach <= slack).all() else None
