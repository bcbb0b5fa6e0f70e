"""The page of a comparison, which needs no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from markupsafe import Markup

from fedshuffle.reports.comparison import tables
from fedshuffle.reports.comparison.details import Audited, Gains, histogram, ratio_limits
from fedshuffle.reports.comparison.figures import where_lost
from fedshuffle.reports.comparison.model import Compared, Line, final_value
from fedshuffle.reports.comparison.text import group_title, is_share, momentum_title, value_text
from fedshuffle.reports.comparison.warnings import headlines, marks, notes
from fedshuffle.reports.page import joined, render
from fedshuffle.reports.style import DARK

_POINTS = 400
"""The largest number of points of a curve on the page; the CSV has all."""


def answers(comparison: Compared) -> list[tuple[str, list[str]]]:
    """Who is best, group by group and momentum by momentum."""
    unit = "%" if is_share(comparison.metric) else ""
    found = []
    for group in comparison.groups:
        sentences = []
        for momentum in comparison.momenta_of(group):
            lines = comparison.of(group, momentum)
            best = [line for line in lines if line.best]
            near = [line.method.label for line in lines if line.near]
            title = momentum_title(momentum).capitalize()
            if not best:
                sentences.append(f"{title}: no method has finished without diverging.")
                continue
            names, verb = joined([x.method.label for x in best]), "is" if len(best) == 1 else "are"
            text = f"{title}: {names} {verb} best, {best[0].value}{unit}"
            verb = "is" if len(near) == 1 else "are"
            text += f"; {joined(near)} {verb} within its standard deviation." if near else "."
            sentences.append(text)
        found.append((group_title(group).capitalize(), sentences))
    return found


def render_page(
    comparison: Compared,
    found: list[Audited],
    pictures: Mapping[str, str],
    weights: str | None,
    names: list[str],
    clients: Sequence[Gains],
) -> str:
    """The text of the page, with the pictures given as data URIs."""
    script = files("fedshuffle.reports.comparison").joinpath("page.js").read_text(encoding="utf-8")
    trials = [trial for line in comparison.lines for trial in line.curve["tuning"]]
    return render(
        "reports/comparison",
        "page.html",
        {"momentum": momentum_title, "group": group_title},
        results=comparison.results,
        comparison=comparison,
        answers=answers(comparison),
        tables=tables,
        headlines=headlines(comparison),
        marks=marks,
        notes=notes,
        value=value_text,
        final=final_value,
        searched=[k for k in ("weight_decay", "clip") if len({trial[k] for trial in trials}) > 1],
        night=DARK.page,
        pictures=pictures,
        weights=weights,
        audits=found,
        histogram=histogram,
        sizes=np.array(comparison.results["federation"]["sizes"]),
        median=np.median,
        gains=clients,
        names=names,
        data=_data(comparison, found),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def _data(comparison: Compared, found: list[Audited]) -> dict[str, Any]:
    """What the script of the page draws."""
    metrics = comparison.metrics
    return {
        "rounds": comparison.rounds,
        "seeds": len(comparison.seeds),
        "methods": [
            {"name": method.name, "label": method.label, "path": method.path}
            for method in comparison.methods
        ],
        "groups": comparison.groups,
        "momenta": comparison.momenta,
        "metrics": [
            {"name": name, "title": comparison.title(name), "share": is_share(name)}
            for name in metrics
        ],
        "limits": {
            group: {name: _short(comparison.limits(group, name)) for name in metrics}
            for group in comparison.groups
        },
        "curves": [
            {
                "group": line.group,
                "momentum": line.momentum,
                "method": line.method.name,
                "metrics": {name: _curve(comparison, line, name) for name in metrics},
            }
            for line in comparison.lines
        ],
        "audits": [
            {
                "method": audited.method.name,
                "momenta": audited.momenta,
                "points": [_short(point) for point in audited.points.tolist()],
            }
            for audited in found
        ],
        "ratios": _short(ratio_limits(found)),
    }


def _curve(comparison: Compared, line: Line, metric: str) -> dict[str, Any]:
    band, limits = line.band(metric), comparison.limits(line.group, metric)
    some = _thin(len(band.rounds))
    return {
        "rounds": band.rounds[some].tolist(),
        **{name: _short(getattr(band, name)[some]) for name in ("mean", "low", "high")},
        "runs": band.runs[some].tolist(),
        "stops": [
            {
                "rounds": rounds[_thin(len(rounds))].tolist(),
                "values": _short(values[_thin(len(rounds))]),
                "cross": _short(where_lost(rounds, values, limits)),
            }
            for rounds, values in line.stopped(metric)
        ],
    }


def _thin(points: int) -> Any:
    """Evenly spread places, with the first and the last."""
    return np.unique(np.linspace(0, points - 1, min(points, _POINTS)).round().astype(int))


def _short(values: Any) -> list[float]:
    """Six significant digits, so that the page stays small."""
    return [float(f"{value:.6g}") for value in values]
