"""The study of clients that come and go: which remedy helps, and where does it fail?

    fedshuffle reproduce availability --out DIR
    python -m fedshuffle.experiments.availability DIR docs

The comparison is in ``availability.toml``, its two populations in
:mod:`fedshuffle.experiments.day_and_night`. The second command writes what the docs show of it:
CSV files and a picture, and the tables of docs/research/availability.md.
"""

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedshuffle import comparison
from fedshuffle._files import results_folder, write_file
from fedshuffle.auditing import audit
from fedshuffle.comparison.results import Results
from fedshuffle.experiments import day_and_night, studies
from fedshuffle.experiments.day_and_night import CLIENTS, DAY, POPULATIONS, night
from fedshuffle.experiments.pages import fill, markdown_table, write_picture
from fedshuffle.experiments.studies import Line, csv_of
from fedshuffle.reports.rendering import LIGHT, set_ticks

FILES = ("availability.csv", "availability-tuning.csv")
_TOML = Path(__file__).with_name("availability.toml")


def load(population: str, out: Path, scale: str = "laptop") -> comparison.Comparison:
    """The comparison on a population, to be run into ``out``; its trace is written there."""
    folder = results_folder(out)
    write_file(folder / "trace.csv", csv_of(day_and_night.intervals(population)))
    given = {
        "availability": "trace:trace.csv",
        "compare.title": f"Clients that come and go: {POPULATIONS[population].lower()}",
    }
    found = comparison.load(_TOML, given, scale)
    return replace(found, base=replace(found.base, folder=folder))


def reproduce(
    out: Path, scale: str = "laptop", jobs: int | None = None, progress: bool = True
) -> list[Line]:
    """Compare the methods on both populations; the same call resumes it.

    Returns:
        A line for each run, as in ``availability.csv``.
    """
    lines: list[Line] = []
    tried: list[Line] = []
    for population in POPULATIONS:
        folder, experiment = out / population, f"availability --scale {scale}"
        part = load(population, folder, scale)
        results = studies.run_part(part, out, population, experiment, jobs, progress)
        lines += summary(population, results, folder)
        tried += studies.tuning_lines(population, results)
    for name, rows in zip(FILES, (lines, tried), strict=True):
        write_file(out / name, csv_of(rows))
    write_file(out / "tables.md", "\n\n".join(table(lines, one) for one in POPULATIONS) + "\n")
    write_picture(draw(lines), out / "availability.png")
    return lines


# Tables -------------------------------------------------------------------------------------------

_KEPT = (
    *("method", "step_size", "server_step_size", "seed", "diverged", "round"),
    *("accuracy", "accuracy_worst_decile", "loss", "training_loss"),
)
COLUMNS = {
    "accuracy": "accuracy",
    "accuracy_night": "night clients",
    "accuracy_worst_decile": "worst tenth",
    "training_loss": "training loss",
}


def summary(population: str, results: Results, folder: Path) -> list[Line]:
    """A line for each run: what the tables and the picture are made of."""
    found = [(row, run) for row in studies.rows_of(results) for run in row.curve["runs"]]
    return [
        {"population": population}
        | {key: line[key] for key in _KEPT if key in line}
        | {"wrong": row.wrong}
        | by_group(folder / run["folder"] / "clients.csv")
        for line, (row, run) in zip(studies.run_lines("", results), found, strict=True)
    ]


def by_group(file: Path) -> Line:
    """The accuracy over all examples of night clients, and of the others, at the end of a run."""
    if not file.exists():  # it diverged
        return {}
    with file.open(newline="", encoding="utf-8") as lines:
        clients = list(csv.DictReader(lines))
    by_night = night()[[int(client["client"]) for client in clients]]
    examples, accuracy = (
        np.array([float(client[name]) for client in clients]) for name in ("examples", "accuracy")
    )
    return {
        f"accuracy_{name}": float(np.average(accuracy[group], weights=examples[group]))
        for name, group in {"night": by_night, "day": ~by_night}.items()
    }


def values(lines: Sequence[Line], population: str, method: str, column: str) -> list[float]:
    """What the runs of a method that did not diverge have in a column."""
    return [
        float(line[column])
        for line in lines
        if (line["population"], line["method"]) == (population, method)
        and str(line["diverged"]) == "False"
    ]


def table(lines: Sequence[Line], population: str) -> str:
    """The table of a population in Markdown: means and standard deviations over the seeds."""
    rows = [["method", "wrong", "step sizes", *COLUMNS.values()]]
    of_method = {line["method"]: line for line in lines if line["population"] == population}
    for method, line in of_method.items():
        cells = [f"{float(line['wrong']):.0%}"]
        cells += [f"{float(line['step_size']):g}, {float(line['server_step_size']):g}"]
        for column in COLUMNS:
            scale, digits = (100, 1) if column.startswith("accuracy") else (1, 3)
            found = values(lines, population, method, column)
            cells += [studies.mean_and_deviation(found, scale, digits) if found else "diverged"]
        rows.append([method, *cells])
    return markdown_table(rows)


# The picture --------------------------------------------------------------------------------------

SHOWN = {"FedAvg": "fedavg-rr", "FedShuffle, counted p": "fedshuffle"}
"""Before and after: the names in the study, and the methods."""
LABELS = ("FedAvg", "FedShuffle")
_NIGHT_COLOUR, _DAY_COLOUR = "#3b4a6b", "#f0b429"
_MARKERS = ("o", "D")


def draw(lines: Sequence[Line]) -> Figure:
    """Who is there and how much each client counts; then how well the two groups are served."""
    with matplotlib.rc_context(LIGHT.parameters | {"font.size": 15}):
        figure = Figure(figsize=(9, 8.6), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
        figure.suptitle("Who comes often counts more, unless you correct it", fontweight="bold")
        parts: Any = figure.subfigures(2, 1, height_ratios=[2.4, 1])
        top, bottom = parts
        presence, counts = top.subplots(1, 2, sharey=True)
        _draw_presence(presence)
        _draw_counts(counts)
        for axes, group in zip(bottom.subplots(1, 2), ("night", "day"), strict=True):
            found = [values(lines, "day-and-night", name, f"accuracy_{group}") for name in SHOWN]
            _draw_accuracy(axes, group, [float(np.mean(runs)) for runs in found])
    return figure


def _draw_presence(axes: Axes) -> None:
    for line in day_and_night.intervals("day-and-night"):
        shade = _NIGHT_COLOUR if night()[line["client"]] else _DAY_COLOUR
        axes.barh(line["client"], line["end"] - line["begin"], 0.75, line["begin"], color=shade)
    axes.set(xlim=(0, DAY), ylim=(CLIENTS - 0.3, -0.7), xlabel="hour", ylabel="clients")
    axes.set_xticks(range(0, DAY + 1, 6))
    axes.set_yticks([])
    axes.text(13, 0.15 * CLIENTS, "night\nclients", ha="center", color=_NIGHT_COLOUR)
    axes.text(1, 0.65 * CLIENTS, "day\nclients", color="#8a6100")
    axes.set_title("Who is there", loc="left")


def _draw_counts(axes: Axes) -> None:
    """The effective over the intended weight of each client, by the audit."""
    federation = day_and_night.clients()
    work = comparison.load(_TOML).base
    trace = day_and_night.trace("day-and-night")
    for label, method, marker in zip(LABELS, SHOWN.values(), _MARKERS, strict=True):
        found = audit(federation, method, work.sampling, work.work, availability=trace)
        look: dict[str, Any] = {"color": LIGHT.colour(method), "marker": marker, "label": label}
        axes.scatter(found.ratios, range(CLIENTS), 34, lw=0, **look)
    axes.axvline(1, color=LIGHT.axis, linewidth=1, zorder=0.5)
    axes.set(xscale="log", xlabel="times what you meant")
    set_ticks(axes.xaxis, [0.125, 0.25, 0.5, 1, 2])
    axes.legend(frameon=False, loc="lower left", handletextpad=0.1)
    axes.set_title("How much they count", loc="left")


def _draw_accuracy(axes: Axes, group: str, shares: Sequence[float]) -> None:
    colours = [LIGHT.colour(method) for method in SHOWN.values()]
    bars = axes.barh(LABELS, shares, 0.72, color=colours)
    labels = [f"{share:.0%}" for share in shares]
    axes.bar_label(bars, labels, padding=-52, color="white", fontweight="bold", fontsize=17)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xticks=[])
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(f"Accuracy of {group} clients", loc="left", fontsize=15)


def write(study: Path, docs: Path) -> None:
    """Write all that the docs show of the study in a folder."""
    lines, _ = studies.published(study, docs, "availability", FILES)
    write_picture(draw(lines), docs / "images" / "availability.png")
    page = docs / "research" / "availability.md"
    fill(page, {name: table(lines, name) for name in POPULATIONS})


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
