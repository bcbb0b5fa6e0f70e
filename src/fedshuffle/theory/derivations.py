"""References to the docs for reported numbers, and their JSON form."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from fedshuffle._arrays import jsonable

_THEORY = "docs/theory.md"


class Derivation(Enum):
    """A heading in the docs, and the theorem or lemma behind it."""

    METHOD = f"{_THEORY}#the-constants", "general theorem, definitions"
    PROBLEM = f"{_THEORY}#the-constants-of-a-problem", "assumptions on the losses"
    THEOREM = f"{_THEORY}#the-step-size-limit", "general theorem"
    PROOF = f"{_THEORY}#the-step-size-limit", "general theorem, lemmas on one round and on drift"
    ROUNDS = f"{_THEORY}#over-many-rounds", "general theorem, recursion with its constants"
    TARGET = f"{_THEORY}#rounds-to-a-target", "general theorem, recursion with its constants"
    LARGER = (
        f"{_THEORY}#how-much-larger-are-fedshuffles-steps",
        "general theorem, step-size limits",
    )
    MVR_THEOREM = f"{_THEORY}#fedshufflemvr", "theorem on FedShuffleMVR"
    MVR_PROOF = f"{_THEORY}#fedshufflemvr", "theorem on FedShuffleMVR, its proof redone"
    SAMPLING = f"{_THEORY}#which-sampling", "sampling variance lemma"
    COHORT = f"{_THEORY}#when-a-larger-cohort-stops-paying", "general theorem, recursion over M"
    MEASURED = f"{_THEORY}#what-can-be-measured", "short runs, no theorem"
    AUDIT = "docs/audit.md", "general theorem, definition of w-hat"

    def __init__(self, anchor: str, statement: str) -> None:
        self.anchor, self.statement = anchor, statement


@dataclass(frozen=True)
class ReportedNumber:
    """A number with what else is known about it."""

    value: float
    uncertainty: float | None = None
    """The uncertainty of an estimate."""
    note: str = ""
    derivation: Derivation | None = None
    """By default that of the field with the number."""

    def __str__(self) -> str:
        error = "" if self.uncertainty is None else f"+- {self.uncertainty:.2g}"
        return "; ".join(filter(None, (error, self.note)))


def to_dict(value: Any, derivation: Derivation | None = None) -> Any:
    """Plain data for JSON: numbers with a derivation become tables, infinity becomes null.

    The fields of a dataclass have the derivation in their ``Annotated`` type, or that of the whole.

    >>> to_dict({"L": float("inf")}, Derivation.THEOREM)["L"]["value"] is None
    True
    """
    if isinstance(value, ReportedNumber):
        found: dict[str, Any] = to_dict(value.value, value.derivation or derivation)
        if value.uncertainty is not None:
            found["uncertainty"] = jsonable(value.uncertainty)
        return found | ({"note": value.note} if value.note else {})
    if is_dataclass(value):
        return {
            name: to_dict(getattr(value, name), own or derivation)
            for name, own in _derivations(value.__class__).items()
        }
    if isinstance(value, dict):
        return {key: to_dict(part, derivation) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(part, derivation) for part in value]
    plain = jsonable(value)
    if derivation is None or isinstance(value, bool) or not isinstance(value, int | float):
        return plain
    return {"value": plain, "source": derivation.anchor, "statement": derivation.statement}


@cache
def _derivations(kind: type) -> dict[str, Derivation | None]:
    """The derivation of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
