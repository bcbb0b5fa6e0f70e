"""What every audit tells: the weights that were meant, and those that are minimised."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.findings import TOLERANCE, Finding
from fedshuffle.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Weighed(abc.ABC):
    """The objective that a system really minimises, beside the one that was meant."""

    client_ids: Sequence[Hashable]
    """The clients' names."""
    sizes: IntArray
    """Examples of each client."""
    objective_weights: FloatArray
    effective_weights: FloatArray
    inclusion_probabilities: FloatArray
    exact: bool
    how: str
    standard_errors: FloatArray | None
    findings: tuple[Finding, ...]

    @property
    @abc.abstractmethod
    def title(self) -> tuple[str, str]:
        """The name of what was audited, and what else there is to say of it."""

    @property
    @abc.abstractmethod
    def setting(self) -> str:
        """Who took part, in a word."""

    @property
    @abc.abstractmethod
    def consistent(self) -> bool | None:
        """Whether the two objectives are the same; None where that cannot be told."""

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
    def furthest_off(self) -> int:
        """The client with that factor."""
        return int(self._factors.argmax())

    @property
    def _factors(self) -> FloatArray:
        ratios, errors = self.ratios, self.standard_errors
        with np.errstate(divide="ignore"):
            factors: FloatArray = np.maximum(ratios, 1 / np.maximum(ratios, 0.0))
        if errors is not None:  # a client that no draw has seen says nothing
            factors[(ratios <= 0) & (errors != 0)] = 0.0
        return factors

    @property
    def gaining(self) -> IntArray:
        """Clients that count more than they should, most first."""
        order = np.argsort(-self.ratios, kind="stable")
        return order[self.ratios[order] > 1 + TOLERANCE]

    @property
    def losing(self) -> IntArray:
        """Clients that count less than they should, most first."""
        order = np.argsort(self.ratios, kind="stable")
        return order[self.ratios[order] < 1 - TOLERANCE]

    @property
    def conclusion(self) -> tuple[str, str]:
        """The verdict in a word or two, and a sentence that says more."""
        if self.consistent:
            return "consistent", "it minimises the objective you meant."
        if self.consistent is None:
            if self.standard_errors is None:
                return "undecided", f"no bias was seen ({self.how}), but rounds differ."
            return "undecided", "no bias larger than the sampling error was seen."
        i = self.furthest_off
        return "not consistent", (
            f"{self.total_variation:.2%} of the objective is in the wrong place; client"
            f" {visible(str(self.client_ids[i]))} counts {self.ratios[i]:.3g} times what you meant"
            f" ({len(self.gaining)} gain, {len(self.losing)} lose)."
        )

    def __repr__(self) -> str:
        name, more = self.title
        word, sentence = self.conclusion
        clients = f"{len(self.objective_weights)} clients"
        return f"<{name}{more} on {clients}, {self.setting}: {word}: {sentence}>"

    def _repr_html_(self) -> str:
        """The table, the verdict and the findings, for a notebook."""
        from fedshuffle.report.audit import html

        return html(self)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw how many times what was meant each client counts, against its size."""
        from fedshuffle.report.audit import plot

        return plot(self, axes)

    def _plain(self, **more: Any) -> dict[str, Any]:
        """What every audit tells, as data for JSON, which has no infinity and no NaN: null."""
        told = {
            "client_ids": [i if isinstance(i, int | str) else str(i) for i in self.client_ids],
            "objective_weights": self.objective_weights,
            "effective_weights": self.effective_weights,
            "inclusion_probabilities": self.inclusion_probabilities,
            "total_variation": self.total_variation,
            "largest_ratio": self.largest_ratio,
            "consistent": self.consistent,
            "exact": self.exact,
            "how": self.how,
            "standard_errors": self.standard_errors,
            "gaining": self.gaining,
            "losing": self.losing,
            **more,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }
        return {key: finite(value) for key, value in told.items()}


def finite(value: Any) -> Any:
    """Plain data in which None stands for every number that is not finite."""
    if isinstance(value, np.ndarray):
        return finite(value.tolist())
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
