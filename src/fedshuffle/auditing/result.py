"""What every audit reports: the weights you meant, and those that are minimised."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, jsonable
from fedshuffle.auditing.estimation import WeightEstimate
from fedshuffle.auditing.findings import TOLERANCE, Finding
from fedshuffle.auditing.properties import CLOSE, ServerProperties, uneven
from fedshuffle.errors import visible
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_ROUNDING = 1e-8  # the smallest relative width of an interval: servers and expectations round
_SURE = 5.0  # standard errors needed to call a weight wrong; corrects for testing many clients


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Audit:
    """The objective that a method or a server really minimises, and the one you meant.

    >>> from fedshuffle import Federation, audit
    >>> result = audit(Federation.from_sizes([1, 3]), "fedavg")
    >>> result.effective_weights.round(3).tolist(), result.consistent
    ([0.1, 0.9], False)
    """

    name: str  # the audited method, server or log
    source: str  # which clients took part: the sampling, or the log
    client_ids: Sequence[Hashable]
    sizes: IntArray  # examples of each client
    objective_weights: FloatArray
    effective_weights: FloatArray
    inclusion_probabilities: FloatArray  # for a log, shares of rounds
    consistent: bool | None  # whether the two objectives are the same; None if undecided
    exact: bool
    how: str  # how the weights were found
    standard_errors: FloatArray | None  # infinite for a client never seen; None if exact
    findings: tuple[Finding, ...]  # what is wrong, why it matters and how to fix it
    method: Method | None = None  # None for a server or a log
    sampling: Sampling | None = None  # None for a log
    rounds: int | None = None  # rounds from 0 on that were averaged, if a method's rounds differ
    intervals: FloatArray | None = None  # of a server or a log: lower and upper ends, per client
    confidence: float | None = None  # of each interval
    properties: ServerProperties = ServerProperties()  # noqa: RUF009
    """How a server or the system of a log behaves; all unknown for a method."""

    @property
    def total_variation(self) -> float:
        """``1/2 sum_i |w-hat_i - w_i|``: the share of the objective that is in the wrong place."""
        return 0.5 * float(np.abs(self.effective_weights - self.objective_weights).sum())

    @property
    def ratios(self) -> FloatArray:
        """``w-hat_i / w_i``: how many times what was meant each client counts; 1 is right."""
        return self.effective_weights / self.objective_weights

    @property
    def largest_ratio(self) -> float:
        """The largest factor between what a client counts and what it should, either way;
        infinite where a client does not count at all.
        """
        return float(self._factors.max())

    @property
    def _factors(self) -> FloatArray:
        ratios, errors = self.ratios, self.standard_errors
        with np.errstate(divide="ignore"):
            factors: FloatArray = np.maximum(ratios, 1 / np.maximum(ratios, 0.0))
        if errors is not None:  # nothing is known of a client that was never drawn
            factors[(ratios <= 0) & (errors != 0)] = 0.0
        return factors

    @property
    def gaining(self) -> IntArray:
        """Clients that count more than they should, most first."""
        return np.argsort(-self.ratios, kind="stable")[: (self.ratios > 1 + TOLERANCE).sum()]

    @property
    def losing(self) -> IntArray:
        """Clients that count less than they should, most first."""
        return np.argsort(self.ratios, kind="stable")[: (self.ratios < 1 - TOLERANCE).sum()]

    @property
    def conclusion(self) -> tuple[str, str]:
        """The conclusion in a word or two, and a sentence that explains it."""
        if self.consistent:
            return "consistent", "it minimises the objective you meant."
        if self.consistent is None:
            if self.standard_errors is None:
                return "undecided", f"no bias was seen ({self.how}), but rounds differ."
            return "undecided", "no bias larger than the sampling error was seen."
        i = int(self._factors.argmax())
        return "not consistent", (
            f"{self.total_variation:.2%} of the objective is in the wrong place; client"
            f" {visible(str(self.client_ids[i]))} counts {self.ratios[i]:.3g} times what you meant"
            f" ({len(self.gaining)} gain, {len(self.losing)} lose)."
        )

    def __repr__(self) -> str:
        word, sentence = self.conclusion
        return f"<{self.name} on {len(self.sizes)} clients, {self.source}: {word}: {sentence}>"

    def _repr_html_(self) -> str:
        """The table, the conclusion and the findings, for a notebook."""
        from fedshuffle.auditing.display import html

        return html(self)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw how many times what was meant each client counts, against its size."""
        from fedshuffle.auditing.display import plot

        return plot(self, axes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; null for what is infinite."""
        audited: dict[str, Any]
        if self.method is not None:
            audited = {"method": self.method.name, "momentum": self.method.momentum}
            audited |= {"sampling": repr(self.sampling), "rounds": self.rounds}
        else:
            fields = ("name", "source", "intervals", "confidence")
            audited = {name: getattr(self, name) for name in fields}
            audited["properties"] = dataclasses.asdict(self.properties)
        names = (
            *("objective_weights", "effective_weights", "inclusion_probabilities"),
            *("total_variation", "largest_ratio", "consistent", "exact", "how"),
            *("standard_errors", "gaining", "losing"),
        )
        data = {
            **audited,
            "client_ids": [i if isinstance(i, int | str) else str(i) for i in self.client_ids],
            **{name: getattr(self, name) for name in names},
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }
        plain: dict[str, Any] = jsonable(data)
        return plain


def blackbox_result(
    estimate: WeightEstimate,
    server: ServerProperties,
    federation: Federation,
    confidence: float,
    *,
    probabilities: FloatArray,
    sampling: Sampling | None = None,
    steps: tuple[int, int] | None,
    **names: Any,
) -> Audit:
    """The audit that follows from an estimate; ``steps`` are the fewest and the most if these make
    a difference. A log has no sampling; its probabilities are shares of rounds.
    """
    objective, weights = federation.weights, estimate.weights
    consistent = _consistent(estimate, objective, confidence, server)
    findings = server.findings()
    if consistent is False:
        # In a log, chance alone makes the shares of rounds differ.
        known_uneven = sampling is not None and uneven(probabilities)
        partial = bool((probabilities < 1).any())
        findings += server.bias_findings(objective, weights, steps, partial, known_uneven)
    exact = not estimate.errors.any()
    half = np.maximum(estimate.half_widths(confidence), _ROUNDING * np.abs(weights))
    return Audit(
        **names,
        client_ids=federation.ids,
        sizes=federation.sizes,
        objective_weights=objective,
        effective_weights=weights,
        inclusion_probabilities=probabilities,
        consistent=consistent,
        exact=exact and server.linear is not False,
        standard_errors=None if exact else estimate.errors,
        intervals=np.stack([weights - half, weights + half], axis=1),
        confidence=confidence,
        properties=server,
        sampling=sampling,
        findings=tuple(findings),
    )


def _consistent(
    estimate: WeightEstimate, objective: FloatArray, confidence: float, server: ServerProperties
) -> bool | None:
    """False if simultaneous intervals exclude the objective that was meant, True if they leave no
    room for another, None if they leave some.
    """
    if server.non_finite_rounds or server.moves_without_updates or server.long_run_gain == np.inf:
        return False
    linear = server.linear is not False
    reach = np.maximum(estimate.half_widths(confidence, together=True), _SURE * estimate.errors)
    distance = np.abs(estimate.weights - objective)
    slack = (CLOSE if linear else 100 * CLOSE) * objective
    if (distance > np.maximum(reach, slack)).any():
        return False
    return True if linear and (distance + reach <= slack).all() else None
