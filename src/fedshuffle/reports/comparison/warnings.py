"""Warnings that come before the ranking, on page and terminal.

Three things make a ranking misleading: a best step size at an end of those tried (the method was
not really tuned), runs that diverged, and a model no better than the most common class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedshuffle.reports.comparison.model import Compared, Line
from fedshuffle.reports.comparison.text import group_title, value_text

_TITLES = {
    "diverged": "Runs diverged",
    "edge": "The best step size is at an edge of those tried: the ranking is not settled",
    "majority": "No better than the most common class: scale the inputs, or train for more rounds",
}


@dataclass(frozen=True)
class ResultWarning:
    """A warning about one method in one column of the results."""

    kind: str
    """``diverged``, ``edge`` or ``majority``."""
    group: str
    momentum: str
    method: str
    text: str


def warnings(comparison: Compared) -> list[ResultWarning]:
    """All warnings: divergence first, then best step sizes at an edge, then trivial models."""
    found = [
        ResultWarning(kind, line.group, line.momentum, line.method.name, f"{line.title}: {text}")
        for line in comparison.lines
        for kind, text in _texts(comparison, line)
    ]
    return sorted(found, key=lambda warning: list(_TITLES).index(warning.kind))


def _texts(comparison: Compared, line: Line) -> Iterator[tuple[str, str]]:
    cell = line.cell
    if cell.diverged:
        yield (
            "diverged",
            f"{cell.diverged} of {cell.planned} runs diverged, so it is not ranked",
        )
    if cell.hopeless:
        yield "diverged", "even the smallest step size that was tried diverged"
    elif cell.edge:
        beyond = {"smallest": "smaller", "largest": "larger"}[cell.edge]
        yield (
            "edge",
            f"its best step size, {cell.step_size:g}, is the {cell.edge} tried; a {beyond} one"
            " may be better still",
        )
    if cell.trivial and cell.mean is not None:
        reached = value_text(cell.mean, comparison.metric)
        share = value_text(comparison.results["majority"]["share"], comparison.metric)
        yield (
            "majority",
            f"{reached}% is no better than always predicting the most common class ({share}%)",
        )


def annotate(results: dict[str, Any]) -> None:
    """Add all warnings to the results of a comparison."""
    results["warnings"] = [vars(warning) for warning in warnings(Compared(results))]


def headlines(comparison: Compared) -> list[tuple[str, list[str]]]:
    """The warnings of each kind and group under one title; one group alone is not named."""
    found: dict[str, list[str]] = {}
    own = comparison.of("own")
    sizes = {line.cell.step_size for line in own}
    tuned = any(line.data.get("tuning") for line in own)
    if len(comparison.methods) > 1 and len(sizes) == 1 and not tuned:
        found["No method was tuned: only one step size was given"] = [
            f"Every method takes the step size {sizes.pop():g}, which may suit some better than"
            " others. Give several in step_sizes."
        ]
    for warning in warnings(comparison):
        where = f" ({group_title(warning.group)})" if len(comparison.groups) > 1 else ""
        found.setdefault(_TITLES[warning.kind] + where, []).append(warning.text + ".")
    return list(found.items())
