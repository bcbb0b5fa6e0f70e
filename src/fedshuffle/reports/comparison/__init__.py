"""The report of a comparison: figures, tables, every curve as CSV, and a page that needs no other.

docs/how-to/read-the-report.md lists the files, and says how to read them.
"""

import base64
import hashlib
import itertools
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from fedshuffle._arrays import IntArray
from fedshuffle._files import results_folder, write_file
from fedshuffle.comparison.results import Results
from fedshuffle.reports.comparison import charts, clients, figures, model, tables, warnings
from fedshuffle.reports.comparison.figures import Audited
from fedshuffle.reports.comparison.model import Compared, Line, group_title, momentum_title
from fedshuffle.reports.comparison.searches import SIZES
from fedshuffle.reports.rendering import DARK, data_uri, encoded, joined, render, save, spread

__all__ = ["write"]

_POINTS = 400  # the largest number of points of a curve on the page; the CSV has all


def write(results: Results, out: Path) -> list[Path]:
    """Write the whole report into a folder.

    Args:
        results: the ``results.json`` of a comparison, complete or not.
        out: the folder; it is made if it does not exist, and a report in it is replaced.

    Returns:
        The files written, the page last.
    """
    comparison = Compared(results)
    audits = figures.audits(comparison)
    out = results_folder(out)
    drawn = {group: figures.curves(comparison, group) for group in comparison.groups}
    paths = {group: out / f"figure-{group.replace(':', '-')}" for group in drawn}
    if (weights := figures.weights(comparison, audits)) is not None:
        drawn["weights"], paths["weights"] = weights, out / "weights"
    pictures = {k: data_uri("image/png", encoded(x, "png", 120)) for k, x in drawn.items()}
    # The page draws the others itself.
    for group, axis in itertools.product(comparison.groups, comparison.axes[1:]):
        name = f"{group} by {axis.name}"
        drawn[name] = figures.curves(comparison, group, axis)
        paths[name] = paths[group].with_name(f"{paths[group].name}-{axis.name}")
    if (search := figures.step_sizes(comparison)) is not None:
        drawn["step sizes"], paths["step sizes"] = search, out / "step-sizes"
    written = [path for name in drawn for path in save(drawn[name], paths[name])]
    texts = {
        "table.md": tables.markdown(comparison),
        "table.tex": tables.latex(comparison),
        "curves.csv": tables.csv_text(comparison),
    }
    script = files("fedshuffle.reports.comparison").joinpath("page.js").read_text(encoding="utf-8")
    searches = [line.curve["tuning"] for line in comparison.lines]
    texts["report.html"] = render(
        "reports/comparison",
        "page.html",
        {"momentum": momentum_title, "group": group_title},
        results=results,
        comparison=comparison,
        answers=answers(comparison),
        figures=figures,
        model=model,
        tables=tables,
        warnings=warnings,
        sizes_of=SIZES,
        searched=[
            key
            for key in ("weight_decay", "clip")
            if any(len({trial[key] for trial in trials}) > 1 for trials in searches)
        ],
        clients=clients,
        night=DARK.page,
        pictures=pictures,
        audits=audits,
        sizes=np.array(results["federation"]["sizes"]),
        median=np.median,
        charts=charts,
        columns=clients.columns(comparison, out),
        names=[*(path.name for path in written), *texts],
        data=_data(comparison, audits),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
    )
    for name, text in texts.items():
        write_file(out / name, text)
    return [*written, *(out / name for name in texts)]


def answers(comparison: Compared) -> list[tuple[str, list[str]]]:
    """Who is best, group by group and momentum by momentum."""
    unit = "%" if model.is_share(comparison.metric) else ""
    found = []
    for group in comparison.groups:
        sentences = []
        for momentum in comparison.momenta_of(group):
            lines = comparison.of(group, momentum)
            best = [line for line in lines if line.best]
            near = [line.method.label for line in lines if line.near]
            title = _sentence(momentum_title(momentum))
            if not best:
                how = "without diverging" if any(line.diverged for line in lines) else "yet"
                sentences.append(f"{title}: no method has finished {how}.")
                continue
            names, verb = joined([x.method.label for x in best]), "is" if len(best) == 1 else "are"
            rank = f"{verb} best," if len(lines) > 1 else "reaches"
            text = f"{title}: {names} {rank} {best[0].value}{unit}"
            if near:
                text += f", but not clearly ahead of {joined(near)}: a gap within one standard"
                text += " deviation says little"
            sentences.append(f"{text}.")
        found.append((_sentence(group_title(group)), sentences))
    return found


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _data(comparison: Compared, found: list[Audited]) -> dict[str, Any]:
    """What the script of the page draws."""
    metrics = comparison.metrics
    return {
        "axes": {
            axis.name: {
                "title": axis.title,
                "unit": axis.unit,
                "ends": {group: comparison.end(axis, group) for group in comparison.groups},
            }
            for axis in comparison.axes
        },
        "seeds": len(comparison.seeds),
        "methods": [
            {"name": method.name, "label": method.label, "path": method.path}
            for method in comparison.methods
        ],
        "groups": comparison.groups,
        "momenta": comparison.momenta,
        "metrics": [
            {"name": name, "title": comparison.title(name), "share": model.is_share(name)}
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
        "ratios": _short(figures.ratio_limits(found)),
    }


def _curve(comparison: Compared, line: Line, metric: str) -> dict[str, Any]:
    band, limits = line.band(metric), comparison.limits(line.group, metric)
    some = spread(len(band.rounds), _POINTS)
    stops = []
    for rounds, values in line.stopped(metric):
        few = spread(len(rounds), _POINTS)
        end, value = figures.where_lost(rounds, values, limits)
        cross = {axis.name: float(line.along(axis, end)) for axis in comparison.axes}
        cross["value"] = value
        stops.append(
            {
                **_axis(comparison, line, rounds[few]),
                "values": _short(values[few]),
                "cross": dict(zip(cross, _short(cross.values()), strict=True)),
            }
        )
    return {
        **_axis(comparison, line, band.rounds[some]),
        **{name: _short(getattr(band, name)[some]) for name in ("mean", "low", "high")},
        "runs": band.runs[some].tolist(),
        "stops": stops,
    }


def _axis(comparison: Compared, line: Line, rounds: IntArray) -> dict[str, list[float]]:
    """Where rounds are on every axis."""
    found = {axis.name: line.along(axis, rounds) for axis in comparison.axes}
    return {
        name: _short(places) if name == model.TIME.name else places.round().astype(int).tolist()
        for name, places in found.items()
    }


def _short(values: Any) -> list[float]:
    """Six significant digits, so that the page stays small."""
    return [float(f"{value:.6g}") for value in values]
