"""What a reader must know before the ranking: it stands at the top of page and terminal.

Three things make a ranking misleading: a best step size at an end of those tried (the method was
not really tuned), runs that diverged, and a model no better than the commonest class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedshuffle.report.comparison_numbers import (
    Cell,
    Compared,
    group_title,
    momentum_title,
    value_text,
)


@final
@dataclass(frozen=True)
class Caution:
    """What is to be known of one method in one column of the results."""

    kind: str
    """``diverged``, ``edge`` or ``majority``."""
    group: str
    momentum: str
    method: str
    text: str


def warnings(comparison: Compared) -> list[Caution]:
    """All warnings: divergence first, then best step sizes at an edge, then trivial models."""
    found = []
    for group in comparison.groups:
        for momentum in comparison.momenta_of(group):
            cells = comparison.cells(group, momentum)
            for method in comparison.methods_of(group):
                if (cell := cells.get(method.name)) is not None:
                    for kind, text in _texts(comparison, cell):
                        who = f"{method.label}, {momentum_title(momentum)}: {text}"
                        found.append(Caution(kind, group, momentum, method.name, who))
    return sorted(found, key=lambda warning: _KINDS.index(warning.kind))


_KINDS = ("diverged", "edge", "majority")


def _texts(comparison: Compared, cell: Cell) -> list[tuple[str, str]]:
    found = []
    if cell.diverged:
        lost = f"{cell.diverged} of {cell.planned} runs diverged, so it is not ranked"
        found.append(("diverged", lost))
    if cell.hopeless:
        found.append(("diverged", "even the smallest step size that was tried diverged"))
    elif cell.edge:
        beyond = {"smallest": "smaller", "largest": "larger"}[cell.edge]
        found.append(
            (
                "edge",
                f"its best step size, {cell.step_size:g}, is the {cell.edge} tried; a {beyond} one"
                " may be better still",
            )
        )
    if cell.trivial and cell.mean is not None:
        reached = value_text(cell.mean, comparison.metric)
        share = value_text(comparison.results["majority"]["share"], comparison.metric)
        found.append(
            (
                "majority",
                f"{reached}% is no better than always predicting the commonest class ({share}%)",
            )
        )
    return found


def headlines(comparison: Compared) -> list[tuple[str, list[str]]]:
    """The warnings of each kind and group under one title.

    A group is named only where there are several.
    """
    found: dict[str, list[str]] = {}
    if (size := _only_step_size(comparison)) is not None:
        found["No method was tuned: only one step size was given"] = [
            f"Every method takes the step size {size:g}, which may suit some better than others."
            " Give several in step_sizes."
        ]
    for warning in warnings(comparison):
        where = f" ({group_title(warning.group)})" if len(comparison.groups) > 1 else ""
        found.setdefault(_TITLES[warning.kind] + where, []).append(warning.text + ".")
    return list(found.items())


def _only_step_size(comparison: Compared) -> float | None:
    """The one that methods had instead of their own best, if they had no choice."""
    curves = [
        curve
        for momentum in comparison.momenta_of("own")
        for method in comparison.methods_of("own")
        if (curve := comparison.curve("own", momentum, method.name)) is not None
    ]
    sizes = {float(curve["step_size"]) for curve in curves}
    alone = len(comparison.methods) > 1 and len(sizes) == 1
    return sizes.pop() if alone and not any(curve.get("tuning") for curve in curves) else None


_TITLES = {
    "diverged": "Runs diverged",
    "edge": "The best step size is at an edge of those tried: the ranking is not settled",
    "majority": "No better than the commonest class: scale the inputs, or train for more rounds",
}
