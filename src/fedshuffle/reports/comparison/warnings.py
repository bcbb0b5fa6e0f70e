"""Warnings that come before the ranking, on page and terminal, and explain the marks in tables.

Three things make a ranking misleading: a best step size at an end of those tried (the search met a
limit, so the method was not really tuned), runs that diverged, and a model no better than the most
common class.
"""

from fedshuffle.comparison.results import Results
from fedshuffle.reports.comparison.model import Compared, Line, group_title, value_text

WIDEN = "at the edge: widen the grid"
"""What a chart says where the best step size is at an end of those tried."""

_TITLES = {
    "diverged": "Runs diverged",
    "edge": "A best step size is at an edge of those tried: the ranking is not settled",
    "majority": "No better than the most common class: scale the inputs, or train for more rounds",
}
_MARKS = {"diverged": "†", "edge": "§", "majority": "¶", "missing": "‡"}


def line_warnings(line: Line) -> dict[str, str]:
    """The warnings about one method in one column of the results, by their kind."""
    found = {}
    if line.diverged:
        lost = f"{line.diverged} of {line.planned} runs diverged"
        found["diverged"] = f"{lost}, so it is not ranked"
    elif line.hopeless:
        found["diverged"] = "even the smallest step size that was tried diverged"
    beyond = {"smallest": "smaller", "largest": "larger"}
    if line.edges:
        found["edge"] = "; ".join(
            f"its best {search.name}, {search.won:g}, is the {search.edge} tried, and a"
            f" {beyond[search.edge]} one may be better still"
            for search in line.edges
        )
    if line.trivial and line.mean is not None and line.majority is not None:
        reached, share = (value_text(x, line.metric) for x in (line.mean, line.majority["share"]))
        always = "no better than always predicting the most common class"
        found["majority"] = f"{reached}% is {always} ({share}%)"
    return {kind: f"{line.title}: {text}" for kind, text in found.items()}


def annotate(results: Results) -> None:
    """Add all warnings to the results of a comparison."""
    results["warnings"] = []
    for kind, line, text in warnings(Compared(results)):
        where = {"group": line.group, "momentum": line.momentum, "method": line.method.name}
        results["warnings"].append({"kind": kind, **where, "text": text})


def warnings(comparison: Compared) -> list[tuple[str, Line, str]]:
    """All warnings: divergence first, then best step sizes at an edge, then trivial models."""
    found = [(line, line_warnings(line)) for line in comparison.lines]
    return [(kind, x, texts[kind]) for kind in _TITLES for x, texts in found if kind in texts]


def headlines(comparison: Compared) -> list[tuple[str, list[str]]]:
    """The warnings of each kind and group under one title; one group alone is not named."""
    found: dict[str, list[str]] = {}
    own = comparison.of("own")
    sizes = {line.step_size for line in own}
    tuned = any(line.tried for line in own)
    if len(comparison.methods) > 1 and len(sizes) == 1 and not tuned:
        found["No method was tuned: only one step size was given"] = [
            f"Every method takes the step size {sizes.pop():g}, which may suit some better than"
            " others. Give several in step_sizes."
        ]
    for kind, line, text in warnings(comparison):
        where = f" ({group_title(line.group)})" if len(comparison.groups) > 1 else ""
        found.setdefault(_TITLES[kind] + where, []).append(f"{text}.")
    return list(found.items())


def marks(line: Line) -> dict[str, str]:
    """The marks of a method in a table, and what each means."""
    found = line_warnings(line)
    if line.missing:
        found["missing"] = f"{line.title}: {line.missing} of {line.planned} runs have not finished"
    return {_MARKS[kind]: text for kind, text in found.items()}


def notes(comparison: Compared, group: str) -> list[str]:
    """The marks of a table explained, line by line."""
    lines = comparison.of(group)
    steps = "step sizes is that of the clients: those with fewer local steps take larger ones."
    found = [f"A range of {steps}"] if any("to" in line.steps for line in lines) else []
    if comparison.shows_server(group):
        found.append("The column server has the server step sizes.")
    own = {line.method.label: line.curve["settings"] for line in lines if line.curve["settings"]}
    for name, settings in own.items():
        rest = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "method")
        found.append(f"{name} is {settings['method']}{f' with {rest}' if rest else ''}.")
    unknown = {x.method.label: why for x in lines if (why := x.curve["audit"].get("unknown"))}
    found += [f"{name} could not be audited: {why}" for name, why in unknown.items()]
    return found + [f"{mark} {text}." for line in lines for mark, text in marks(line).items()]
