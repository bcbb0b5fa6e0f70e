"""Warnings that come before the ranking, on page and terminal.

Three things make a ranking misleading: a best step size at an end of those tried (the method was
not really tuned), runs that diverged, and a model no better than the most common class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedshuffle.comparison.results import Results
from fedshuffle.reports.comparison.model import Compared, Line
from fedshuffle.reports.comparison.text import group_title, value_text

_TITLES = {
    "diverged": "Runs diverged",
    "edge": "The best step size is at an edge of those tried: the ranking is not settled",
    "majority": "No better than the most common class: scale the inputs, or train for more rounds",
}


class ResultWarning(NamedTuple):
    """A warning about one method in one column of the results."""

    kind: str
    """``diverged``, ``edge`` or ``majority``."""
    line: Line
    text: str


def warnings(comparison: Compared) -> list[ResultWarning]:
    """All warnings: divergence first, then best step sizes at an edge, then trivial models."""
    found = [
        ResultWarning(kind, line, f"{line.title}: {text}")
        for line in comparison.lines
        for kind, text in _texts(comparison, line)
    ]
    return sorted(found, key=lambda warning: list(_TITLES).index(warning.kind))


def _texts(comparison: Compared, line: Line) -> Iterator[tuple[str, str]]:
    if line.diverged:
        lost = f"{line.diverged} of {line.planned} runs diverged"
        yield "diverged", f"{lost}, so it is not ranked"
    if line.hopeless:
        yield "diverged", "even the smallest step size that was tried diverged"
    elif line.edge:
        best = f"its best step size, {line.curve['step_size']:g}, is the {line.edge} tried"
        beyond = {"smallest": "smaller", "largest": "larger"}[line.edge]
        yield "edge", f"{best}; a {beyond} one may be better still"
    majority = comparison.results["majority"]
    if line.trivial and line.mean is not None and majority is not None:
        reached, share = (value_text(x, line.metric) for x in (line.mean, majority["share"]))
        always = "no better than always predicting the most common class"
        yield "majority", f"{reached}% is {always} ({share}%)"


def annotate(results: Results) -> None:
    """Add all warnings to the results of a comparison."""
    results["warnings"] = [
        {
            "kind": kind,
            "group": line.group,
            "momentum": line.momentum,
            "method": line.method.name,
            "text": text,
        }
        for kind, line, text in warnings(Compared(results))
    ]


def headlines(comparison: Compared) -> list[tuple[str, list[str]]]:
    """The warnings of each kind and group under one title; one group alone is not named."""
    found: dict[str, list[str]] = {}
    own = comparison.of("own")
    sizes = {line.curve["step_size"] for line in own}
    tuned = any(line.curve["tuning"] for line in own)
    if len(comparison.methods) > 1 and len(sizes) == 1 and not tuned:
        found["No method was tuned: only one step size was given"] = [
            f"Every method takes the step size {sizes.pop():g}, which may suit some better than"
            " others. Give several in step_sizes."
        ]
    for warning in warnings(comparison):
        where = f" ({group_title(warning.line.group)})" if len(comparison.groups) > 1 else ""
        found.setdefault(_TITLES[warning.kind] + where, []).append(warning.text + ".")
    return list(found.items())
