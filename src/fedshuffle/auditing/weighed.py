"""What every audit tells: the weights that were meant, and those that are minimised."""

from __future__ import annotations

import abc

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.findings import TOLERANCE, Finding


class Weighed(abc.ABC):
    """The objective that a system really minimises, beside the one that was meant."""

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
        """``w-hat_i / w_i``: how many times too much each client counts."""
        return self.effective_weights / self.objective_weights

    @property
    def largest_ratio(self) -> float:
        """The largest factor between what a client counts and what it should, either way."""
        errors = self.standard_errors
        sure = np.full(len(self.ratios), errors is None) if errors is None else errors == 0
        known = self.ratios[(self.ratios > 0) | sure]  # one that no draw has seen says nothing
        with np.errstate(divide="ignore"):
            return float(np.maximum(known, 1 / np.maximum(known, 0.0)).max())

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
