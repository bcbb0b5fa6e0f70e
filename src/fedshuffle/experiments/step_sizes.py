"""The study of step sizes: what `fedshuffle tune` reaches, and the tables and pictures of the docs.

    fedshuffle reproduce steps-shakespeare --out DIR/shakespeare    likewise cifar100 and plays
    fedshuffle reproduce steps-default --out DIR/default
    fedshuffle reproduce steps-held-out --out DIR/held-out
    python -m fedshuffle.experiments.step_sizes DIR docs

The last command writes the CSV files in docs/research, docs/images/step-sizes.png, and the tables
of docs/research/step-sizes.md.
"""

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedshuffle._arrays import jsonable
from fedshuffle._files import write_file
from fedshuffle._terminal import Console
from fedshuffle.comparison.results import Results
from fedshuffle.config import Config, resume
from fedshuffle.config.schema import resized
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import real
from fedshuffle.experiments.pages import fill, markdown_table, write_picture
from fedshuffle.experiments.studies import (
    Row,
    csv_of,
    mean_and_deviation,
    rows_of,
    run_lines,
    run_part,
    tuning_lines,
)
from fedshuffle.reports.comparison.model import Compared, Line
from fedshuffle.reports.rendering import LIGHT, clean
from fedshuffle.training.run_folder import RunFolder

DATA_SETS = {"shakespeare": "Shakespeare", "cifar100": "CIFAR-100", "plays": "Plays"}
HELD_OUT = {"synthetic": "linear", "synthetic-network": "network"}
"""Models on generated data, which were not seen when `tune` was designed."""
DEFAULT_METHODS = {
    "shakespeare": ("rho = 2",),
    "cifar100": ("FedShuffle (rho = inf)", "rho = 2"),
    "plays": ("rho = 2", "rho = 2, stratified, Adam"),
}
"""Methods of the study that are also tuned and trained without a choice of step sizes: those that
docs/how-to/choose-a-method.md advises, and on CIFAR-100, where steps differ little, the cap, too.
On other data it is all methods.
"""
FIRST_STEP_SIZE = 0.1
"""That of a config that says nothing."""
SEEDS = (0, 1, 2)
SHOWN = ("FedAvg", "rho = 2", "rho = 2, stratified, Adam", "FedShuffle (rho = inf)")
"""The curves of the picture, where a data set has them."""


# A default that needs no tuning -------------------------------------------------------------------


def reproduce_default(
    out: Path,
    data: Path | None = None,
    data_sets: Iterable[str] = DATA_SETS,
    scale: str = "laptop",
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Tune, then train, from step sizes that know nothing of the data; finished runs are kept."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not progress)
    rows = []
    for name in data_sets:
        study = real.load(f"steps-{name}", scale, out / name, data)
        variants = {variant.name: variant for variant in study.variants}
        inputs = study.base.inputs()
        for method in DEFAULT_METHODS.get(name, variants):
            variant = variants[method]
            folder = out / name / variant.folder
            for row in _tuned_runs(study.config(variant), folder, inputs):
                console.print(f"{name} {method}: {row}", markup=False)
                rows.append({"data": name, "method": method, **row})
        write_file(out / "default.csv", csv_of(rows))
    return rows


def reproduce_held_out(
    out: Path, scale: str = "laptop", jobs: int | None = None, progress: bool = True
) -> list[dict[str, Any]]:
    """The study on data that `tune` was not designed on, and then what it reaches there."""
    for name in HELD_OUT:
        part, command = real.load(f"steps-{name}", scale, out / name), "steps-held-out"
        run_part(part, out, name, f"{command} --scale {scale}", jobs, progress)
    return reproduce_default(out / "default", None, HELD_OUT, scale, progress)


def _tuned_runs(config: Config, folder: Path, inputs: Any) -> list[dict[str, Any]]:
    """What runs with each seed reach at the step sizes that tuning found with the first."""
    file = folder / "default.json"
    if file.exists():
        known: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return known
    start = resized(config.step_size, FIRST_STEP_SIZE)
    config = replace(config, step_size=start, seed=SEEDS[0], out=None)
    found = config.tune(folder, inputs=inputs)
    rows = []
    for seed in SEEDS:
        run = folder / f"seed{seed}"
        if RunFolder(run).begun:  # and was interrupted
            result = resume(run, inputs=inputs)
        else:
            result = replace(config.tuned(found), seed=seed).run(run, inputs=inputs)
        last = result.history[-1]
        rows.append(
            {
                "seed": seed,
                "step_size": found.step_size,
                "server_step_size": found.server_step_size,
                "share": found.share,
                "diverged": result.diverged is not None,
                "accuracy": jsonable(last.get("accuracy")),
                "training_loss": jsonable(last.get("training_loss")),
            }
        )
    write_file(file, json.dumps(rows))
    return rows


# Tables -------------------------------------------------------------------------------------------


COLUMNS = {
    "accuracy": "accuracy",
    "accuracy_mean": "mean of clients",
    "accuracy_small_decile": "small clients",
    "loss_worst_decile": "loss, worst tenth",
    "training_loss": "training loss",
}


def table(results: Results) -> str:
    """The table of a data set in Markdown."""
    rows = rows_of(results)
    used = {name: title for name, title in COLUMNS.items() if any(r.values(name) for r in rows)}
    lines = [["method", "wrong", "step sizes", *used.values(), "local steps"]]
    for row in rows:
        steps = [f"{row.curve['step_size']:g}, {row.curve['server_step_size']:g}"]
        cells = [_cell(row, name) for name in used]
        local = row.values("total_steps")
        cells.append(f"{np.mean(local):,.0f}" if local else "")
        wrong = f"{row.wrong:.1%}" if row.wrong > 5e-4 else "0"
        lines.append([row.name, wrong, *steps, *cells])
    return markdown_table(lines)


def _cell(row: Row, metric: str) -> str:
    values = row.values(metric)
    lost = sum(run["diverged"] for run in row.curve["runs"])
    if not values:
        return "diverged" if lost == len(row.curve["runs"]) else ""
    scale, digits = (100, 2) if metric.startswith("accuracy") else (1, 3)
    note = f" ({lost} diverged)" if lost and metric == "accuracy" else ""
    return f"{mean_and_deviation(values, scale, digits)}{note}"


def default_table(rows: Sequence[Mapping[str, str]], found: Mapping[str, Results]) -> str:
    """What tuning reaches beside the study, for each data set and method."""
    head = ["data", "method", "found by `tune`", "accuracy", "in the study", "difference"]
    lines, titles = [[*head, "best method of the study"]], DATA_SETS | HELD_OUT
    for data, results in found.items():
        study = {row.name: row for row in rows_of(results)}
        finished = [r for r in study.values() if len(r.values("accuracy")) == len(r.curve["runs"])]
        best = max(finished, key=lambda row: np.mean(row.values("accuracy")), default=None)
        for name in DEFAULT_METHODS.get(data, study):
            own = [row for row in rows if (row["data"], row["method"]) == (data, name)]
            if not own:
                continue
            reached = [float(row["accuracy"]) for row in own if row["diverged"] == "False"]
            wanted = study[name].values("accuracy") if name in study else []
            pairs = (f"{float(r['step_size']):g}, {float(r['server_step_size']):g}" for r in own)
            lost = len(own) - len(reached)
            note = f" ({lost} diverged)" if reached and lost else ""
            both = reached and wanted
            cells = [
                titles[data],
                name,
                "; ".join(dict.fromkeys(pairs)),
                f"{mean_and_deviation(reached, 100, 2)}{note}" if reached else "diverged",
                mean_and_deviation(wanted, 100, 2) if wanted else "",
                f"{100 * (np.mean(reached) - np.mean(wanted)):+.2f}" if both else "",
                ""
                if best is None
                else f"{mean_and_deviation(best.values('accuracy'), 100, 2)} ({best.name})",
            ]
            lines.append(cells)
    return markdown_table(lines, texts=3)


# Pictures -----------------------------------------------------------------------------------------


def draw(found: Mapping[str, Results]) -> Figure:
    """Accuracy over rounds and over local steps, a column per data set."""
    with matplotlib.rc_context(LIGHT.parameters | {"font.size": 11}):
        figure = Figure(figsize=(4.2 * len(found), 6.4), layout="constrained")
        grid = figure.subplots(2, len(found), squeeze=False)
        for column, (name, results) in zip(grid.T, found.items(), strict=True):
            lines = {line.method.label: line for line in Compared(results).of("own")}
            for axes, x in zip(column, ("round", "total_steps"), strict=True):
                for k, label in enumerate(SHOWN):
                    if label in lines:
                        _curve(axes, lines[label], x, k)
                clean(axes)
                axes.set_xlabel("round" if x == "round" else "local steps so far")
            column[0].set_title(DATA_SETS[name], fontsize=13)
            column[1].legend(fontsize=9, frameon=False)
        for axes in grid[:, 0]:
            axes.set_ylabel("test accuracy (%)")
    return figure


def _curve(axes: Any, line: Line, x: str, k: int) -> None:
    runs = [run["history"] for run in line.curve["runs"] if not run["diverged"]]
    if runs:
        over = np.mean([[record[x] for record in history] for history in runs], axis=0)
        values = 100 * np.array([[r["accuracy"] for r in history] for history in runs])
        look = {"color": f"C{k}", "linestyle": ("-", "--", ":", "-.")[k]}
        axes.plot(over, values.mean(axis=0), label=line.method.label, linewidth=1.6, **look)
        ends = values.min(axis=0), values.max(axis=0)
        axes.fill_between(over, *ends, color=f"C{k}", alpha=0.12, linewidth=0)


def write(study: Path, docs: Path) -> None:
    """Write all that the docs show of the study in a folder."""
    found, held_out = _results(study, DATA_SETS), _results(study / "held-out", HELD_OUT)
    if not found and not held_out:
        raise FedShuffleError(
            f"{str(study)!r} holds no results of the study: run fedshuffle reproduce"
            f" steps-shakespeare --out {study / 'shakespeare'} first."
        )
    research, blocks = docs / "research", {name: table(results) for name, results in found.items()}
    for name, results in found.items():
        _write_lines(research, name, {name: results})
        curves = (study / name / "curves.csv").read_text(encoding="utf-8")
        write_file(research / f"step-sizes-{name}-curves.csv", curves)
    if found:
        write_picture(draw(found), docs / "images" / "step-sizes.png")
    if held_out:
        _write_lines(research, "held-out", held_out)
    tuned = {"default": (study, found), "held-out-default": (study / "held-out", held_out)}
    for name, (folder, beside) in tuned.items():
        file = folder / "default" / "default.csv"
        if file.exists():
            text = file.read_text(encoding="utf-8")
            write_file(research / f"step-sizes-{name}.csv", text)
            blocks[name] = default_table(list(csv.DictReader(io.StringIO(text))), beside)
    fill(research / "step-sizes.md", blocks)


def _results(study: Path, names: Iterable[str]) -> dict[str, Results]:
    """The results of the comparisons that are there, by name."""
    files = {name: study / name / "results.json" for name in names}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def _write_lines(research: Path, name: str, found: Mapping[str, Results]) -> None:
    """Write the runs of some comparisons, and the short ones that chose their step sizes."""
    for end, lines in {"": run_lines, "-tuning": tuning_lines}.items():
        rows = [line for data, results in found.items() for line in lines(data, results)]
        write_file(research / f"step-sizes-{name}{end}.csv", csv_of(rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
