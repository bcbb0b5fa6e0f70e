"""The study of step sizes: what `fedshuffle tune` reaches, and the tables and pictures of the docs.

    fedshuffle reproduce steps-shakespeare --out DIR/shakespeare    likewise cifar100 and plays
    fedshuffle reproduce steps-default --out DIR/default
    python -m fedshuffle.experiments.step_sizes DIR docs

The last command writes the CSV files in docs/research, docs/images/step-sizes.png, and the tables
of docs/research/step-sizes.md.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from fedshuffle._arrays import jsonable
from fedshuffle._files import results_folder, write_file
from fedshuffle._terminal import Console
from fedshuffle.comparison import Comparison
from fedshuffle.comparison.results import Curve, Results, effective_weights
from fedshuffle.config import Config, resume
from fedshuffle.config.schema import resized
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import real
from fedshuffle.reports.comparison import write as write_report
from fedshuffle.reports.comparison.model import Compared, Line
from fedshuffle.reports.comparison.warnings import annotate
from fedshuffle.reports.rendering import LIGHT, clean, encoded
from fedshuffle.training.run_folder import RunFolder

DATA_SETS = {"shakespeare": "Shakespeare", "cifar100": "CIFAR-100", "plays": "Plays"}
DEFAULT_METHODS = {
    "shakespeare": ("rho = 2",),
    "cifar100": ("FedShuffle (rho = inf)", "rho = 2"),
    "plays": ("rho = 2", "rho = 2, stratified, Adam"),
}
"""Methods of the study that are also tuned and trained without a choice of step sizes: those that
docs/how-to/choose-a-method.md advises, and on CIFAR-100, where steps differ little, the cap, too.
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
    data_sets: Sequence[str] = tuple(DATA_SETS),
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Tune, then train, from step sizes that know nothing of the data; finished runs are kept."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not progress)
    rows = []
    for name in data_sets:
        study = real.load(f"steps-{name}", "laptop", out / name, data)
        variants = {variant.name: variant for variant in study.variants}
        inputs = study.base.inputs()
        for method in DEFAULT_METHODS[name]:
            variant = variants[method]
            folder = out / name / variant.folder
            for row in _tuned_runs(study.config(variant), folder, inputs):
                console.print(f"{name} {method}: {row}", markup=False)
                rows.append({"data": name, "method": method, **row})
        write_file(out / "default.csv", csv_of(rows))
    return rows


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


@dataclass(frozen=True)
class Row:
    """A method at its own best step sizes."""

    name: str
    curve: Curve
    wrong: float
    """The share of the objective in the wrong place, by the audit."""

    def values(self, metric: str) -> list[float]:
        """The last value of each run that did not diverge."""
        runs = [run for run in self.curve["runs"] if not run["diverged"]]
        if metric.endswith("_small_decile"):
            found = [run["small_decile"].get(metric.removesuffix("_small_decile")) for run in runs]
        else:
            found = [run["history"][-1].get(metric) for run in runs]
        return [value for value in found if value is not None]


def rows_of(results: Results) -> list[Row]:
    """The methods of a comparison at their own best step sizes, in order."""
    rows = []
    for curve in results["curves"]:
        if curve["group"] == "own":
            audit = curve["audit"]
            gap = np.abs(effective_weights(audit) - audit["objective_weights"]).sum()
            rows.append(Row(curve["label"], curve, 0.5 * float(gap)))
    return rows


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
    lines = [
        "| " + " | ".join(["method", "wrong", "step sizes", *used.values(), "local steps"]) + " |",
        "|---|" + "---:|" * (len(used) + 3),
    ]
    for row in rows:
        steps = [f"{row.curve['step_size']:g}, {row.curve['server_step_size']:g}"]
        cells = [_cell(row, name) for name in used]
        local = row.values("total_steps")
        cells.append(f"{np.mean(local):,.0f}" if local else "")
        wrong = f"{row.wrong:.1%}" if row.wrong > 5e-4 else "0"
        lines.append("| " + " | ".join([row.name, wrong, *steps, *cells]) + " |")
    return "\n".join(lines)


def _cell(row: Row, metric: str) -> str:
    values = row.values(metric)
    lost = sum(run["diverged"] for run in row.curve["runs"])
    if not values:
        return "diverged" if lost == len(row.curve["runs"]) else ""
    scale, digits = (100, 2) if metric.startswith("accuracy") else (1, 3)
    note = f" ({lost} diverged)" if lost and metric == "accuracy" else ""
    return f"{mean_and_deviation(values, scale, digits)}{note}"


def mean_and_deviation(values: Sequence[float], scale: float, digits: int) -> str:
    """The mean of some runs and, of several, their standard deviation.

    >>> mean_and_deviation([0.25, 0.75], scale=100, digits=1)
    '50.0 ± 35.4'
    """
    spread = f" ± {scale * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * np.mean(values):.{digits}f}{spread}"


def summary(name: str, results: Results) -> Iterable[dict[str, Any]]:
    """One line per run: what the tables are made of."""
    for row in rows_of(results):
        for run in row.curve["runs"]:
            last = run["history"][-1] if run["history"] else {}
            small = run["small_decile"]
            yield {
                "data": name,
                "method": row.name,
                **{f"own_{key}": value for key, value in row.curve["settings"].items()},
                "step_size": row.curve["step_size"],
                "server_step_size": row.curve["server_step_size"],
                "seed": run["seed"],
                "diverged": run["diverged"],
                **{key: value for key, value in last.items() if not key.startswith("total_bytes")},
                **{f"{key}_small_decile": value for key, value in small.items()},
            }


def tuning(name: str, results: Results) -> Iterable[dict[str, Any]]:
    """One line per short run: what the step sizes were chosen by."""
    for row in rows_of(results):
        for trial in row.curve["tuning"]:
            chosen = all(row.curve[k] == trial[k] for k in ("step_size", "server_step_size"))
            yield {
                "data": name,
                "method": row.name,
                "step_size": trial["step_size"],
                "server_step_size": trial["server_step_size"],
                "training_loss": trial["value"],
                "diverged": trial["diverged"],
                "chosen": chosen,
            }


def csv_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV; a key that a row does not have is empty."""
    found = list(rows)
    written = io.StringIO()
    names = list(dict.fromkeys(key for row in found for key in row))
    writer = csv.DictWriter(written, names, lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return written.getvalue()


def default_table(rows: Sequence[Mapping[str, str]], found: Mapping[str, Results]) -> str:
    """What tuning reaches beside the study, for each data set and method."""
    lines = [
        "| data | method | found by `tune` | accuracy | in the study | difference"
        " | best method of the study |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for data, results in found.items():
        study = {row.name: row for row in rows_of(results)}
        finished = [r for r in study.values() if len(r.values("accuracy")) == len(r.curve["runs"])]
        best = max(finished, key=lambda row: np.mean(row.values("accuracy")), default=None)
        for name in DEFAULT_METHODS[data]:
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
                DATA_SETS[data],
                name,
                "; ".join(dict.fromkeys(pairs)),
                f"{mean_and_deviation(reached, 100, 2)}{note}" if reached else "diverged",
                mean_and_deviation(wanted, 100, 2) if wanted else "",
                f"{100 * (np.mean(reached) - np.mean(wanted)):+.2f}" if both else "",
                ""
                if best is None
                else f"{mean_and_deviation(best.values('accuracy'), 100, 2)} ({best.name})",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_part(
    part: Comparison, out: Path, name: str, experiment: str, jobs: int | None, progress: bool
) -> Results:
    """Run a comparison that is part of a study into a folder of ``out``, and write its report."""
    command = f"fedshuffle reproduce {experiment} --out {out}"
    results = part.run(out / name, jobs=jobs, progress=progress, command=command, annotate=annotate)
    write_report(results, out / name)
    if not results["complete"]:
        raise FedShuffleError(
            f"some runs in {str(out / name)!r} failed: its report says which. The same command"
            " tries them again."
        )
    return results


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


_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_picture(figure: Figure, path: Path) -> None:
    """Write a small PNG file."""
    results_folder(path.parent)
    with Image.open(io.BytesIO(encoded(figure, "png", dpi=110))) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Put generated blocks in their places on a page; others stay."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}{blocks[name]}\n{end}" if name in blocks else match[0]

    write_file(page, _BLOCK.sub(block, page.read_text(encoding="utf-8")))


def write(study: Path, docs: Path) -> None:
    """Write all that the docs show of the study in a folder."""
    found: dict[str, Results] = {}
    for name in DATA_SETS:
        file = study / name / "results.json"
        if file.exists():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
    if not found:
        raise FedShuffleError(
            f"{str(study)!r} holds no results of the study: run fedshuffle reproduce"
            f" steps-shakespeare --out {study / 'shakespeare'} first."
        )
    research, blocks = docs / "research", {name: table(results) for name, results in found.items()}
    for name, results in found.items():
        write_file(research / f"step-sizes-{name}.csv", csv_of(summary(name, results)))
        write_file(research / f"step-sizes-{name}-tuning.csv", csv_of(tuning(name, results)))
        curves = (study / name / "curves.csv").read_text(encoding="utf-8")
        write_file(research / f"step-sizes-{name}-curves.csv", curves)
    default = study / "default" / "default.csv"
    if default.exists():
        text = default.read_text(encoding="utf-8")
        write_file(research / "step-sizes-default.csv", text)
        blocks["default"] = default_table(list(csv.DictReader(io.StringIO(text))), found)
    write_picture(draw(found), docs / "images" / "step-sizes.png")
    fill(research / "step-sizes.md", blocks)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
