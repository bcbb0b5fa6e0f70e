"""The study of stragglers: wait for them, drop them, or train asynchronously?

    fedshuffle reproduce stragglers --out DIR
    python -m fedshuffle.experiments.stragglers DIR docs

60 clients hold equally many of the digits that come with scikit-learn. Their devices have
log-normal speeds, and slow ones hold other digits. At most 20 train at a time. Every schedule is a
comparison of its own, of as many rounds as fit in about the same simulated time; what is common is
in ``stragglers.toml``. The second command writes what the docs show: CSV files, tables, a picture.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import special
from torch import Tensor

from fedshuffle import comparison
from fedshuffle._arrays import FloatArray
from fedshuffle._files import results_folder, write_file
from fedshuffle.comparison.results import Results, effective_weights
from fedshuffle.evaluation import SetMetric
from fedshuffle.experiments import digits
from fedshuffle.experiments.pages import fill, markdown_table, write_picture
from fedshuffle.experiments.studies import (
    Line,
    csv_of,
    mean_and_deviation,
    published,
    rows_of,
    run_part,
    tuning_lines,
)
from fedshuffle.federation import Federation
from fedshuffle.reports.rendering import LIGHT, clean

CLIENTS, SLOW = 60, 20  # the first are the slow ones
TARGET = 0.8  # accuracy
_EVALUATIONS, _TUNING = 30, 600
_SPREAD = 1.0  # of the logarithms of speeds
_CLOCK = "table:clock.csv+latency:1+jitter:lognormal:0.7"
FILES = ("stragglers.csv", "stragglers-curves.csv", "stragglers-tuning.csv")
_TOML = Path(__file__).with_name("stragglers.toml")


# The population -----------------------------------------------------------------------------------


def seconds() -> FloatArray:
    """How long each client takes for a local step: a median of 1, slow clients first."""
    places = (np.arange(CLIENTS) + 0.5) / CLIENTS
    return np.exp(_SPREAD * special.ndtri(places))[::-1]


def clients(part: str = "train") -> Federation:
    """The digits by client: equally many, high ones at slow clients."""
    return digits.clients(np.ones(CLIENTS), part)


def _accuracy_of_slow(outputs: Tensor, labels: Tensor, weights: FloatArray) -> float:
    examples = int(clients("test").offsets[SLOW])
    return float((outputs[:examples].argmax(1) == labels[:examples]).double().mean())


SLOW_ACCURACY = SetMetric("accuracy_slow", _accuracy_of_slow, higher_is_better=True)
"""Over all test examples of slow clients."""


# The comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What the server does about stragglers, and the methods to compare."""

    title: str
    schedule: str
    rounds: int
    methods: tuple[str, ...] = ("FedAvg", "FedShuffle")
    sampling: str | None = None
    server_step_size: float = 2.0  # where tuning starts

    def given(self, scale: str) -> dict[str, Any]:
        """What it sets in the config."""
        rounds = self.rounds if scale == "laptop" else 2
        every = max(1, rounds // _EVALUATIONS)
        sampling = {} if self.sampling is None else {"sampling": self.sampling}
        return sampling | {
            "schedule": self.schedule,
            "rounds": rounds,
            "compare.title": f"Stragglers: {self.title}",
            "compare.methods": [{"name": name} | METHODS[name] for name in self.methods],
            "compare.server_step_sizes": [self.server_step_size / 2, self.server_step_size],
            "compare.tune.rounds": min(rounds, _TUNING),
            "compare.tune.every": rounds,
            "evaluation.every": every,
            "checkpoints.every": rounds,
        }


METHODS: dict[str, dict[str, str]] = {
    "FedAvg": {"method": "fedavg-rr"},
    "FedShuffle": {"method": "fedshuffle"},
    "FedShuffle, hybrid": {"method": "fedshuffle-gen"},
    "FedShuffle, estimated p": {"method": "fedshuffle", "probabilities": "estimate"},
}
_ALL = ("FedAvg", "FedShuffle", "FedShuffle, estimated p")
CHOICES = {
    "wait": Choice("wait for all", "wait", 21, sampling="uniform:20"),
    "deadline": Choice("deadline", "deadline:10", 60, _ALL, "uniform:20"),
    "partial": Choice(
        "deadline, partial work",
        "deadline:10+partial",
        60,
        ("FedAvg", "FedShuffle, hybrid"),
        "uniform:20",
    ),
    "over": Choice("over-selection", "over:15of20", 98),
    "fedasync": Choice("FedAsync", "fedasync:C=20,a=0.5", 2550, server_step_size=0.5),
    "fedbuff": Choice("FedBuff", "fedbuff:K=10,C=20,a=0.5", 255, _ALL),
}
"""Each is one comparison, in the folder of this name."""


def load(name: str, out: Path, scale: str = "laptop") -> comparison.Comparison:
    """The comparison under a schedule, to be run into ``out``; its clock is written there."""
    folder = results_folder(out)
    devices = [{"client": i, "seconds": value} for i, value in enumerate(seconds().tolist())]
    write_file(folder / "clock.csv", csv_of(devices))
    found = comparison.load(_TOML, CHOICES[name].given(scale) | {"clock": _CLOCK}, scale)
    return replace(found, base=replace(found.base, folder=folder))


def reproduce(
    out: Path, scale: str = "laptop", jobs: int | None = None, progress: bool = True
) -> list[Line]:
    """Compare the methods under every schedule; the same call resumes it.

    Returns:
        A line for each run, as in ``stragglers.csv``.
    """
    runs: list[Line] = []
    curves: list[Line] = []
    tried: list[Line] = []
    for name in CHOICES:
        part, experiment = load(name, out / name, scale), f"stragglers --scale {scale}"
        results = run_part(part, out, name, experiment, jobs, progress)
        for history, line in summary(name, results):
            curves += history
            runs.append(line)
        tried += tuning_lines(name, results)
    for file, lines in zip(FILES, (runs, curves, tried), strict=True):
        write_file(out / file, csv_of(lines))
    write_file(out / "tables.md", table(runs, curves) + "\n")
    write_picture(draw(curves), out / "stragglers.png")
    return runs


# Tables -------------------------------------------------------------------------------------------

_MEASURED = ("accuracy", "accuracy_slow", "training_loss")


def summary(name: str, results: Results) -> Iterator[tuple[list[Line], Line]]:
    """The evaluations of each run, and a line that says how it ended."""
    for row in rows_of(results):
        audit = row.curve["audit"]
        meant, really = (
            float(np.sum(weights[:SLOW]))
            for weights in (audit["objective_weights"], effective_weights(audit))
        )
        known = {key: row.curve[key] for key in ("step_size", "server_step_size")}
        for run in row.curve["runs"]:
            which = {"schedule": name, "method": row.name, "seed": run["seed"]}
            kept = ("round", "time", *_MEASURED)
            measured = (line for line in run["history"] if all(key in line for key in kept))
            history = [which | {key: line[key] for key in kept} for line in measured]
            audited = {"wrong": row.wrong, "slow_ratio": really / meant}
            ended = {"diverged": run["diverged"]} | known | audited
            yield history, which | ended | (history[-1] if history else {})


def table(runs: Sequence[Line], curves: Sequence[Line]) -> str:
    """The study in Markdown: means and standard deviations over the seeds."""
    head = ["schedule", "method", "wrong", "slow count", "step sizes", "accuracy", "slow clients"]
    rows = [[*head, f"s to {TARGET:.0%}"]]
    for pair in dict.fromkeys((line["schedule"], line["method"]) for line in runs):
        own = [line for line in runs if (line["schedule"], line["method"]) == pair]
        one, lost = own[0], [line for line in own if str(line["diverged"]) == "True"]
        cells = [f"{float(one['wrong']):.0%}", f"{float(one['slow_ratio']):.2f}"]
        cells += [f"{float(one['step_size']):g}, {float(one['server_step_size']):g}"]
        for column in ("accuracy", "accuracy_slow"):
            values = [float(line[column]) for line in own if line not in lost]
            shown = mean_and_deviation(values, 100, 1) if values else "diverged"
            cells.append(shown + (f" ({len(lost)} diverged)" if values and lost else ""))
        times = times_to_target(curves, pair)
        found = mean_and_deviation(times, 1, 0) if len(times) == len(own) else "never"
        rows.append([CHOICES[pair[0]].title, pair[1], *cells, found])
    return markdown_table(rows, texts=2)


def times_to_target(curves: Sequence[Line], pair: tuple[str, str]) -> list[float]:
    """When the runs of a schedule and a method that reach the target accuracy first do."""
    first: dict[str, float] = {}
    for line in curves:
        reached = (line["schedule"], line["method"]) == pair and float(line["accuracy"]) >= TARGET
        if reached:
            first.setdefault(str(line["seed"]), float(line["time"]))
    return list(first.values())


# The picture --------------------------------------------------------------------------------------

SHOWN = {
    ("wait", "FedShuffle"): ("wait for all", "#000000", "-"),
    ("over", "FedAvg"): ("over-selection, FedAvg", "#56b4e9", "-."),
    ("fedbuff", "FedAvg"): ("FedBuff, FedAvg", "#0072b2", "--"),
    ("fedbuff", "FedShuffle"): ("FedBuff, FedShuffle", "#d55e00", "-"),
}
"""The curves, with their names, colours that the colour-blind can tell apart, and dashes."""


def draw(curves: Sequence[Line]) -> Figure:
    """Accuracy against time, over all clients and of the slow ones."""
    with matplotlib.rc_context(LIGHT.parameters | {"font.size": 17}):
        figure = Figure(figsize=(9, 9.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, sharey=True)
        for axes, metric, group in (
            (top, "accuracy", "all clients"),
            (bottom, "accuracy_slow", "slow clients"),
        ):
            for pair, look in SHOWN.items():
                _draw_curve(
                    axes, [c for c in curves if (c["schedule"], c["method"]) == pair], metric, look
                )
            axes.set_title(f"Accuracy of {group} (%)", loc="left", fontweight="bold")
            clean(axes)
            axes.set(ylim=(0, 96), xlim=(0, None))
        bottom.set_xlabel("simulated time (s)")
        top.legend(frameon=False, loc="lower right")
    return figure


def _draw_curve(axes: Axes, lines: Sequence[Line], metric: str, look: tuple[str, str, str]) -> None:
    """The mean over the seeds, and the value at the end."""
    by_seed: dict[Any, list[Line]] = {}
    for line in lines:
        by_seed.setdefault(line["seed"], []).append(line)
    if not by_seed:
        return
    points = min(map(len, by_seed.values()))  # one that diverged ends early
    time, values = (
        np.array([[float(line[key]) for line in own[:points]] for own in by_seed.values()])
        for key in ("time", metric)
    )
    label, colour, dashes = look
    over, mean = time.mean(axis=0), 100 * values.mean(axis=0)
    axes.plot(over, mean, dashes, color=colour, label=label, linewidth=3)
    axes.plot(over[-1], mean[-1], "o", color=colour, markersize=9)


def write(study: Path, docs: Path) -> None:
    """Write all that the docs show of the study in a folder."""
    runs, curves, _ = published(study, docs, "stragglers", FILES)
    write_picture(draw(curves), docs / "images" / "stragglers.png")
    fill(docs / "research" / "stragglers.md", {"table": table(runs, curves)})


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
