"""The report of a comparison: figures, tables, every curve as CSV, and a page that needs no other.

out/figure-own.png, .pdf            the curves, one figure for each group
out/weights.png, .pdf               what the audits found
out/table.md, table.tex             how the curves end
out/curves.csv                      every round of every run
out/report.html                     all of it, to play with
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedshuffle.errors import FedShuffleError
from fedshuffle.report import comparison_figures as figures
from fedshuffle.report import comparison_tables as tables
from fedshuffle.report.comparison_clients import Gains, gains
from fedshuffle.report.comparison_details import (
    Audited,
    audits,
    histogram,
    judge,
    ratio_limits,
    searched,
    tuning,
)
from fedshuffle.report.comparison_numbers import (
    MARKERS,
    Compared,
    final_value,
    group_title,
    is_share,
    momentum_title,
    spread_text,
    value_text,
    where_lost,
)
from fedshuffle.report.comparison_warnings import headlines
from fedshuffle.report.look import DARK, on_dark

_POINTS = 400
"""A curve of the page has at most so many points; the CSV has all."""


def write(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the whole report into a folder.

    Args:
        results: the ``results.json`` of a comparison, complete or not.
        out: the folder; it is made where there is none, and reports in it are replaced.

    Returns:
        The files written, the page last.
    """
    comparison = Compared(results)
    found = audits(comparison)
    out = Path(out)
    written: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures: dict[str, str] = {}
        for group, name in _file_names(comparison.groups).items():
            figure = figures.curves(comparison, group)
            pictures[group] = _data_uri(figures.png(figure))
            written += figures.save(figure, out / name)
        shown = None
        if (sheet := figures.weights(comparison, found)) is not None:
            shown = _data_uri(figures.png(sheet))
            written += figures.save(sheet, out / "weights")
        texts = {
            "table.md": tables.markdown(comparison),
            "table.tex": tables.latex(comparison),
            "curves.csv": tables.csv_text(comparison),
        }
        names = [*(path.name for path in written), *texts]
        clients = gains(comparison, out)
        texts["report.html"] = render_page(comparison, found, pictures, shown, names, clients)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8", newline="\n")
            written.append(out / name)
    except OSError as error:
        raise FedShuffleError(
            f"the report cannot be written to {str(out)!r} ({error.strerror or error})."
            " Make room, or choose another folder."
        ) from error
    return written


def _file_names(groups: list[str]) -> dict[str, str]:
    """A file name for each group.

    >>> _file_names(["own", "common:0.1", "common/0.1"])
    {'own': 'figure-own', 'common:0.1': 'figure-common-0.1', 'common/0.1': 'figure-common-0.1-2'}
    """
    names: dict[str, str] = {}
    for group in groups:
        name = "figure-" + re.sub(r"[^A-Za-z0-9.]+", "-", group).strip("-.")
        k = 2
        plain = name
        while name in names.values():
            name, k = f"{plain}-{k}", k + 1
        names[group] = name
    return names


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


# Words ----------------------------------------------------------------------------------------


def answers(comparison: Compared) -> list[tuple[str, list[str]]]:
    """Who is best, group by group and momentum by momentum."""
    found = []
    unit = "%" if is_share(comparison.metric) else ""
    for group in comparison.groups:
        sentences = []
        for momentum in comparison.momenta_of(group):
            cells = comparison.cells(group, momentum)
            labels = {method.name: method.label for method in comparison.methods}
            best = [labels[name] for name, cell in cells.items() if cell.best]
            near = [labels[name] for name, cell in cells.items() if cell.near]
            title = momentum_title(momentum).capitalize()
            if not best:
                sentences.append(f"{title}: no method has finished in good health.")
                continue
            value = next(
                spread_text(cell, comparison.metric) for cell in cells.values() if cell.best
            )
            text = f"{title}: {_and(best)} {'is' if len(best) == 1 else 'are'} best, {value}{unit}"
            verb = "is" if len(near) == 1 else "are"
            text += f"; {_and(near)} {verb} within its standard deviation." if near else "."
            sentences.append(text)
        found.append((group_title(group).capitalize(), sentences))
    return found


def duration(seconds: float | None) -> str:
    """A time for a person.

    >>> duration(42.4), duration(605), duration(12_345)
    ('42 s', '10 min', '3 h 26 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def fact_text(value: Any) -> str:
    """A setting for a person; what is nested is shown as JSON."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list) and not any(isinstance(part, list | dict) for part in value):
        return ", ".join(fact_text(part) for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# The page -------------------------------------------------------------------------------------


def render_page(
    comparison: Compared,
    found: list[Audited],
    pictures: Mapping[str, str],
    weights: str | None,
    names: list[str],
    clients: Sequence[Gains] = (),
) -> str:
    """The text of the page, with the pictures given as data URIs."""
    environment = Environment(
        loader=PackageLoader("fedshuffle", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        momentum=momentum_title, group=group_title, duration=duration, fact=fact_text
    )
    script = files("fedshuffle.report").joinpath("comparison.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    judged, _ = judge(comparison.results)
    sizes = np.array(comparison.results["federation"]["sizes"] or [0])
    return environment.get_template("comparison.html").render(
        results=comparison.results,
        comparison=comparison,
        answers=answers(comparison),
        legend=tables.legend(comparison),
        ranks=lambda best, near: tables.ranks(comparison, best, near),
        heading=tables.heading(comparison),
        cell_text=lambda cell: tables.cell_text(cell, comparison.metric),
        mark=tables.mark,
        step_text=tables.step_text,
        headlines=headlines(comparison),
        notes=tables.notes,
        trial_value=lambda value: value_text(value, judged),
        trial_heading=tables.metric_heading(comparison, judged) if judged else "Value",
        markers=MARKERS,
        dark={method.name: on_dark(method.colour) for method in comparison.methods},
        night=DARK.page,
        pictures=pictures,
        weights=weights,
        audits=found,
        bars=histogram(sizes.tolist()) if sizes.min() > 0 else [],
        sizes={
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "mean": float(sizes.mean()),
            "largest": int(sizes.max()),
        },
        searches=[
            (group, momentum, rows)
            for group in comparison.groups
            for momentum in comparison.momenta_of(group)
            if (rows := tuning(comparison, group, momentum))
        ],
        group_words=group_title,
        momentum_words=momentum_title,
        searched=[key for key in ("weight_decay", "clip") if searched(comparison, key)],
        runs=_runs(comparison),
        gains=clients,
        names=names,
        data=_data(comparison, found),
        script=Markup(script),
        digest=digest,
    )


def _runs(comparison: Compared) -> list[dict[str, Any]]:
    """Every run in a line."""
    lines = []
    for group in comparison.groups:
        for momentum in comparison.momenta_of(group):
            for method in comparison.methods_of(group):
                curve = comparison.curve(group, momentum, method.name)
                for run in curve["runs"] if curve else []:
                    ended = final_value(run, comparison.metric)
                    lost, done = comparison.diverged(run), comparison.finished(run)
                    lines.append(
                        {
                            "group": group_title(group),
                            "momentum": momentum_title(momentum),
                            "method": method,
                            "seed": run["seed"],
                            "rounds": run["history"][-1]["round"] if run["history"] else 0,
                            "value": "" if ended is None else value_text(ended, comparison.metric),
                            "state": "diverged" if lost else "finished" if done else "unfinished",
                            "folder": run.get("folder", ""),
                        }
                    )
    return lines


def _data(comparison: Compared, found: list[Audited]) -> dict[str, Any]:
    """What the script of the page draws."""
    return {
        "rounds": comparison.rounds,
        "seeds": len(comparison.seeds),
        "methods": [
            {"name": method.name, "label": method.label, "path": MARKERS[method.marker]}
            for method in comparison.methods
        ],
        "groups": comparison.groups,
        "momenta": comparison.momenta,
        "metrics": [
            {"name": name, "title": comparison.title(name), "share": is_share(name)}
            for name in comparison.metrics
        ],
        "limits": {
            group: {name: _round(comparison.limits(group, name)) for name in comparison.metrics}
            for group in comparison.groups
        },
        "curves": [
            {
                "group": group,
                "momentum": momentum,
                "method": method.name,
                "metrics": {name: _line(comparison, curve, name) for name in comparison.metrics},
            }
            for group in comparison.groups
            for momentum in comparison.momenta
            for method in comparison.methods
            if (curve := comparison.curve(group, momentum, method.name))
        ],
        "audits": [
            {
                "method": audited.method.name,
                "momenta": audited.momenta,
                "points": [_round(point) for point in audited.points.tolist()],
            }
            for audited in found
        ],
        "ratios": _round(ratio_limits(found)),
    }


def _line(comparison: Compared, curve: Mapping[str, Any], metric: str) -> dict[str, Any]:
    band, limits = comparison.band(curve, metric), comparison.limits(curve["group"], metric)
    kept = _thin(len(band.rounds))
    stops = []
    for rounds, values in comparison.stopped(curve, metric):
        some = _thin(len(rounds))
        cross = where_lost(rounds, values, limits)
        facts = {"rounds": rounds[some].tolist(), "values": _round(values[some])}
        stops.append({**facts, "cross": _round(cross)})
    return {
        "rounds": band.rounds[kept].tolist(),
        "mean": _round(band.mean[kept]),
        "low": _round(band.low[kept]),
        "high": _round(band.high[kept]),
        "runs": band.runs[kept].tolist(),
        "stops": stops,
    }


def _thin(points: int) -> Any:
    """Places of at most so many points, evenly, with the first and the last."""
    return np.unique(np.linspace(0, points - 1, min(points, _POINTS)).round().astype(int))


def _round(values: Any) -> list[float]:
    """Six digits that count, so that the page stays small."""
    return [float(f"{value:.6g}") for value in values]
