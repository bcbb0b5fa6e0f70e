"""The page of a comparison, which needs no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from markupsafe import Markup

from fedshuffle.reports.comparison import tables
from fedshuffle.reports.comparison.details import (
    Audited,
    Gains,
    histogram,
    judge,
    ratio_limits,
    searched,
    tuning,
)
from fedshuffle.reports.comparison.figures import MARKERS, looks, where_lost
from fedshuffle.reports.comparison.model import Compared, Line, final_value
from fedshuffle.reports.comparison.text import (
    group_title,
    is_share,
    momentum_title,
    spread_text,
    value_text,
)
from fedshuffle.reports.comparison.warnings import headlines
from fedshuffle.reports.page import joined, render
from fedshuffle.reports.style import DARK, on_dark

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
            best = [line for line in lines if line.cell.best]
            near = [line.method.label for line in lines if line.cell.near]
            title = momentum_title(momentum).capitalize()
            if not best or (mean := best[0].cell.mean) is None:
                sentences.append(f"{title}: no method has finished without diverging.")
                continue
            value = spread_text(mean, best[0].cell.std, comparison.metric)
            names, verb = joined([x.method.label for x in best]), "is" if len(best) == 1 else "are"
            text = f"{title}: {names} {verb} best, {value}{unit}"
            verb = "is" if len(near) == 1 else "are"
            text += f"; {joined(near)} {verb} within its standard deviation." if near else "."
            sentences.append(text)
        found.append((group_title(group).capitalize(), sentences))
    return found


def fact_text(value: Any) -> str:
    """A setting for a person; nested values are shown as JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list) and not any(isinstance(part, list | dict) for part in value):
        return ", ".join(fact_text(part) for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def render_page(
    comparison: Compared,
    found: list[Audited],
    pictures: Mapping[str, str],
    weights: str | None,
    names: list[str],
    clients: Sequence[Gains] = (),
) -> str:
    """The text of the page, with the pictures given as data URIs."""
    script = files("fedshuffle.reports.comparison").joinpath("page.js").read_text(encoding="utf-8")
    judged, _ = judge(comparison.results)
    sizes = np.array(comparison.results["federation"]["sizes"] or [0])
    look = looks(comparison)
    return render(
        "reports/comparison",
        "page.html",
        {"momentum": momentum_title, "group": group_title, "fact": fact_text},
        results=comparison.results,
        comparison=comparison,
        answers=answers(comparison),
        tables=tables,
        heading=tables.heading(comparison, comparison.metric),
        headlines=headlines(comparison),
        trial_value=lambda value: value_text(value, judged),
        trial_heading=tables.heading(comparison, judged) if judged else "Value",
        paths=[MARKERS[look[method].marker] for method in comparison.methods],
        colours=[(look[m].colour, on_dark(look[m].colour)) for m in comparison.methods],
        night=DARK.page,
        pictures=pictures,
        weights=weights,
        audits=found,
        bars=histogram(sizes.tolist()) if sizes.min() > 0 else [],
        sizes=sizes,
        median=float(np.median(sizes)),
        searches=[
            (group, momentum, rows)
            for group in comparison.groups
            for momentum in comparison.momenta_of(group)
            if (rows := tuning(comparison, group, momentum))
        ],
        titles={"group": group_title, "momentum": momentum_title},
        searched=[key for key in ("weight_decay", "clip") if searched(comparison, key)],
        runs=[row for line in comparison.lines for row in _runs(comparison, line)],
        gains=clients,
        names=names,
        data=_data(comparison, found),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )


def _runs(comparison: Compared, line: Line) -> list[dict[str, Any]]:
    """The runs of a curve, each as a row."""
    rows = []
    for run in line.data["runs"]:
        ended = final_value(run, comparison.metric)
        lost, done = comparison.diverged(run), comparison.finished(run)
        rows.append(
            {
                "group": group_title(line.group),
                "momentum": momentum_title(line.momentum),
                "method": line.method,
                "seed": run["seed"],
                "rounds": run["history"][-1]["round"] if run["history"] else 0,
                "value": "" if ended is None else value_text(ended, comparison.metric),
                "state": "diverged" if lost else "finished" if done else "unfinished",
                "folder": run.get("folder", ""),
            }
        )
    return rows


def _data(comparison: Compared, found: list[Audited]) -> dict[str, Any]:
    """What the script of the page draws."""
    look, metrics = looks(comparison), comparison.metrics
    return {
        "rounds": comparison.rounds,
        "seeds": len(comparison.seeds),
        "methods": [
            {"name": method.name, "label": method.label, "path": MARKERS[look[method].marker]}
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
    band, limits = comparison.band(line, metric), comparison.limits(line.group, metric)
    some = _thin(len(band.rounds))
    return {
        "rounds": band.rounds[some].tolist(),
        "mean": _short(band.mean[some]),
        "low": _short(band.low[some]),
        "high": _short(band.high[some]),
        "runs": band.runs[some].tolist(),
        "stops": [
            {
                "rounds": rounds[_thin(len(rounds))].tolist(),
                "values": _short(values[_thin(len(rounds))]),
                "cross": _short(where_lost(rounds, values, limits)),
            }
            for rounds, values in comparison.stopped(line, metric)
        ],
    }


def _thin(points: int) -> Any:
    """Evenly spread places, with the first and the last."""
    return np.unique(np.linspace(0, points - 1, min(points, _POINTS)).round().astype(int))


def _short(values: Any) -> list[float]:
    """Six significant digits, so that the page stays small."""
    return [float(f"{value:.6g}") for value in values]
