"""Numbers that say where they come from: the place in the docs, and the statement behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

_THEORY = "docs/theory.md"


@final
@dataclass(frozen=True)
class Source:
    """Where a number is derived."""

    anchor: str
    """A page of the docs and a heading in it."""
    statement: str
    """The theorem or lemma."""


METHOD = Source(f"{_THEORY}#the-constants", "general theorem, definitions")
PROBLEM = Source(f"{_THEORY}#the-constants-of-a-problem", "assumptions on the losses")
THEOREM = Source(f"{_THEORY}#the-step-size-limit", "general theorem")
PROOF = Source(
    f"{_THEORY}#the-step-size-limit", "general theorem, lemmas on one round and on drift"
)
ROUNDS = Source(f"{_THEORY}#over-many-rounds", "general theorem, recursion with its constants")
TARGET = Source(f"{_THEORY}#rounds-to-a-target", "general theorem, recursion with its constants")
LARGER = Source(
    f"{_THEORY}#how-much-larger-are-fedshuffles-steps", "general theorem, step-size limits"
)
MVR_THEOREM = Source(f"{_THEORY}#fedshufflemvr", "theorem on FedShuffleMVR")
MVR_PROOF = Source(f"{_THEORY}#fedshufflemvr", "theorem on FedShuffleMVR, its proof done again")
SAMPLING = Source(f"{_THEORY}#which-sampling", "sampling variance lemma")
COHORT = Source(f"{_THEORY}#when-a-larger-cohort-stops-paying", "general theorem, recursion over M")
MEASURED = Source(f"{_THEORY}#what-can-be-measured", "short runs, no theorem")
AUDIT = Source("docs/audit.md", "general theorem, definition of w-hat")

ALL = (
    METHOD,
    PROBLEM,
    THEOREM,
    PROOF,
    ROUNDS,
    TARGET,
    LARGER,
    MVR_THEOREM,
    MVR_PROOF,
    SAMPLING,
    COHORT,
    MEASURED,
    AUDIT,
)


@final
@dataclass(frozen=True)
class Number:
    """A number with its source."""

    value: float | int
    source: Source
    uncertainty: float | None = None
    """What a measured one may be off by."""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON, which knows no infinity.

        >>> Number(math.inf, THEOREM).to_dict()["value"] is None
        True
        """
        found: dict[str, Any] = {
            "value": self.value if math.isfinite(self.value) else None,
            "source": self.source.anchor,
            "statement": self.source.statement,
        }
        if self.uncertainty is not None:
            sure = math.isfinite(self.uncertainty)
            found["uncertainty"] = self.uncertainty if sure else None
        if self.note:
            found["note"] = self.note
        return found


def plain(value: Any) -> Any:
    """Plain data from anything made of numbers with sources, texts, lists and tables."""
    if isinstance(value, Number):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
