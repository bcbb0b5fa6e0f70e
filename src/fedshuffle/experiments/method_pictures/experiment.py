"""The pictures of ``docs/methods``: each family of methods on the toy problem.

The problem is that of :mod:`fedshuffle.experiments.quadratic`: clients hold 1, 2 and 3 points,
unless a picture says otherwise. All runs of a picture move equally far: each step size is chosen
such that a round of full participation moves the model by the same multiple of the gradient, to
first order. Exceptions, such as the server step size of an adaptive method, are listed under the
picture. ``make docs-pictures`` draws them.
"""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle._files import results_folder, write_file
from fedshuffle.auditing import contributions
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments.quadratic.experiment import SEEDS, distances
from fedshuffle.experiments.quadratic.figures import DISTANCE, TITLES
from fedshuffle.experiments.quadratics import toy
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.reports.drawing import clean
from fedshuffle.reports.methods import markdown
from fedshuffle.reports.page import joined
from fedshuffle.training.rounds import Run

PACE = 1 / 40
ROUNDS = 400
SAMPLINGS = {"full": TITLES["full"], "uniform:2": TITLES["sum_one"]}
"""With the title of the panel."""
_DASHES = ("-", "--", ":", "-.")
_FLOOR = 1e-12
"""Below this, differences are rounding errors."""

GREY = {"fedavg-rr": "#b5b5b5", "fedshuffle": "#707070"}
"""Drawn in every picture, to compare with."""


@dataclass(frozen=True)
class PlottedMethod:
    """A method in a picture. ``step`` is a factor on its step size."""

    name: str
    paint: str = field(default="", compare=False)
    title: str = field(default="", compare=False)
    step: float = 1.0
    server_step_size: float = 1.0
    momentum: str = ""

    @property
    def method(self) -> Method:
        """The method itself, with its momentum."""
        found = methods.get(self.name)
        momentum = methods.parse_momentum(self.momentum) if self.momentum else None
        return found.with_momentum(momentum) if momentum else found

    @property
    def grey(self) -> bool:
        """Whether it is there to be compared with."""
        return GREY.get(self.name) == self.paint

    @property
    def label(self) -> str:
        """Its name in the picture."""
        return self.title or methods.label(self.name)

    @property
    def colour(self) -> str:
        """Its colour in the picture."""
        return self.paint or methods.colour(self.name)

    @property
    def note(self) -> str:
        """How its settings differ from those of the others, in words."""
        parts = [f"the step size times {self.step:g}"] if self.step != 1 else []
        if self.server_step_size != 1:
            parts.append(f"server step size {self.server_step_size:g}")
        return f"{self.label}: {' and '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Picture:
    """The methods of a page, and the toy problem they run on."""

    curves: tuple[PlottedMethod, ...]
    pace: float = PACE
    rounds: int = ROUNDS
    sizes: tuple[int, ...] = (1, 2, 3)

    @property
    def grey(self) -> tuple[PlottedMethod, ...]:
        """FedAvgRR and FedShuffle, unless the picture is about them."""
        shown = {curve.name for curve in self.curves if not curve.momentum}
        return tuple(PlottedMethod(n, paint) for n, paint in GREY.items() if n not in shown)


def _by_name(*names: str) -> Picture:
    return Picture(tuple(PlottedMethod(name) for name in names))


PICTURES: dict[str, Picture] = {
    "fedavg": Picture(
        (
            PlottedMethod("fedavg", "#0072B2"),
            *(PlottedMethod(name) for name in ("fedavg-rr", "fedavg-min", "fedavg-mean")),
        )
    ),
    "fednova": _by_name("fednova", "fednova-rr", "fednova-original", "fednova-original-rr"),
    "fedshuffle": _by_name("fedshuffle", "fedshuffle-so", "fedshuffle-gen", "fedshuffle-mvr"),
    "fedrr-nastya": Picture(
        (
            PlottedMethod("fedrr"),
            PlottedMethod("nastya", "", "NASTYA, server step 4", 1 / 4, 4),
            PlottedMethod("fedshuffle", "", "FedShuffle, server step 4", 1 / 4, 4),
        ),
        sizes=(2, 2, 2),
    ),
    "capped": Picture(
        tuple(
            PlottedMethod(f"fedshuffle-capped:rho={rho}", paint, f"capped, rho = {rho}")
            for rho, paint in ((1, "#0072B2"), (2, "#56B4E9"), (4, "#CC79A7"))
        ),
        pace=0.2,
        rounds=60,
        sizes=(4, 8, 48),
    ),
    "fedprox": Picture(
        (
            PlottedMethod("fedprox", "#56B4E9", "FedProx, mu = 0.01"),
            PlottedMethod("fedprox:mu=20", "#0072B2", "FedProx, mu = 20"),
            PlottedMethod(
                "fedprox:mu=20+fedshuffle", "#CC79A7", "FedProx, mu = 20, with FedShuffle"
            ),
        )
    ),
    "scaffold": _by_name("scaffold", "scaffold-i"),
    "vrl-sgd": _by_name("vrl-sgd"),
    "fedlin": _by_name("fedlin", "fedlin-sparse"),
    "mime": Picture(
        (
            *(PlottedMethod(name) for name in ("mime", "mime-sgd", "mime-lite", "mime-mvr")),
            PlottedMethod("mime-adam", step=0.1),
            PlottedMethod("mime-lite-adam", step=0.1),
        )
    ),
    "adaptive": Picture(
        (
            PlottedMethod("fedavgm", server_step_size=0.1),
            PlottedMethod("fedadagrad", server_step_size=0.05),
            PlottedMethod("fedadam", server_step_size=0.005),
            PlottedMethod("fedyogi", server_step_size=0.005),
            PlottedMethod("fedadam+fedshuffle", "#009E73", "FedAdam with FedShuffle", 1, 0.005),
        )
    ),
    "baselines": _by_name("pooled-sgd", "pooled-rr", "distributed-gd", "non-local-mvr"),
    "momentum": Picture(
        tuple(
            PlottedMethod(name, paint, f"{methods.label(name)}, {momentum}", momentum=momentum)
            for name, momentum, paint in (
                ("fedavg-rr", "mvr:0.1", "#D55E00"),
                ("fedavg-rr", "global:0.1", "#E69F00"),
                ("fedshuffle", "mvr:0.1", "#0072B2"),
                ("fedshuffle", "global:0.1", "#56B4E9"),
            )
        )
    ),
}
"""By the name of their page."""


def run(curve: PlottedMethod, picture: Picture, sampling: str, seed: int) -> Run | None:
    """A method's run; None where the method is not defined under the sampling."""
    clients, method, work = toy(picture.sizes).problem.federation, curve.method, LocalWork()
    everyone = Run(clients, method, "full", work).cohort(round=0)
    step_size = curve.step * picture.pace / float(contributions(method, everyone).sum())
    try:
        return Run(clients, method, sampling, work, step_size, curve.server_step_size, seed)
    except FedShuffleError:
        return None


Results = dict[str, dict[str, dict[PlottedMethod, FloatArray]]]
"""``{page: {sampling: {method: distances}}}``, the mean over the seeds, one per round."""


def compute(pages: Sequence[str] = tuple(PICTURES), rounds: int = ROUNDS) -> Results:
    """The curves of the pictures; equal runs are made once, those of one problem in lockstep."""
    wanted: dict[tuple[int, ...], dict[Hashable, list[Run]]] = {}
    places = []
    for page in pages:
        picture = PICTURES[page]
        for sampling in SAMPLINGS:
            for curve in (*picture.grey, *picture.curves):
                runs = [run(curve, picture, sampling, seed) for seed in SEEDS]
                defined = [one for one in runs if one is not None]
                if defined:
                    clients = tuple(defined[0].federation.sizes.tolist())  # one, if pooled
                    key = (curve, picture.pace, picture.sizes, sampling)
                    wanted.setdefault(clients, {})[key] = defined
                    places.append((page, sampling, curve, clients, key))
    found: dict[tuple[int, ...], dict[Hashable, FloatArray]] = {}
    for clients, same in wanted.items():
        longest = max(PICTURES[page].rounds for page, *_, at, _ in places if at == clients)
        everyone = [one for runs in same.values() for one in runs]
        columns = [
            gaps.reshape(-1, len(SEEDS)).mean(axis=1)
            for gaps in distances(clients, everyone, min(rounds, longest))
        ]
        found[clients] = dict(zip(same, np.stack(columns, axis=1), strict=True))
    results: Results = {page: {sampling: {} for sampling in SAMPLINGS} for page in pages}
    for page, sampling, curve, clients, key in places:
        results[page][sampling][curve] = found[clients][key][: PICTURES[page].rounds]
    return results


def draw(panels: Mapping[str, Mapping[PlottedMethod, FloatArray]], path: Path) -> None:
    """A picture of the curves under each sampling."""
    figure = Figure(figsize=(9, 4.0), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True)
    values = [curve for curves in panels.values() for curve in curves.values()]
    lines: dict[str, Line2D] = {}
    for axes, (sampling, curves) in zip(row, panels.items(), strict=True):
        lines |= _panel(axes, curves)
        axes.set_title(SAMPLINGS[sampling], fontsize=11)
    lowest, highest = min(map(np.min, values)), max(map(np.max, values))
    row[0].set_ylim(max(_FLOOR, lowest) / 2, 2 * highest)
    row[0].set_ylabel(DISTANCE)
    look: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": 9}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", **look)
    # A palette makes the file small.
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def _panel(axes: Axes, curves: Mapping[PlottedMethod, FloatArray]) -> dict[str, Line2D]:
    lines: dict[str, Line2D] = {}
    for k, (curve, values) in enumerate(curves.items()):
        rounds = np.arange(1, len(values) + 1)
        dashes = "-" if curve.grey else _DASHES[k % len(_DASHES)]
        (lines[curve.label],) = axes.plot(
            *(rounds, np.maximum(values, _FLOOR / 10), dashes),
            color=curve.colour,
            linewidth=1.5,
            zorder=2 if curve.grey else 3,
        )
    axes.set(yscale="log", xlim=(0, len(rounds)), xlabel="round")
    axes.minorticks_off()
    clean(axes)
    return lines


def caption(page: str) -> str:
    """The text under the picture of a page."""
    picture = PICTURES[page]
    text = (
        f"The squared distance to the optimum on the toy problem (clients with"
        f" {joined(picture.sizes)} points, one epoch, batches of one), mean over the seeds"
        f" {', '.join(map(str, SEEDS))}. Step sizes are such that a round of full participation"
        f" moves the model by {picture.pace:g} times the gradient."
    )
    notes = "; ".join(curve.note for curve in picture.curves if curve.note)
    absent = [c.label for c in picture.curves if run(c, picture, "uniform:2", 0) is None]
    if notes:
        text += f" Otherwise: {notes}."
    if absent:
        text += f" Not defined for two of three clients: {'; '.join(absent)}."
    return text


_BLOCK = re.compile(r"(<!-- generated: (\w+) ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """A page with its tables, pictures and captions generated again."""

    def block(match: re.Match[str]) -> str:
        begin, kind, page, end = match.groups()
        if kind == "table":
            return f"{begin}{markdown(None if page == 'all' else page)}\n{end}"
        picture = f"![{page} on the toy problem](../images/methods/{page}.png)"
        text = textwrap.fill(f"*{caption(page)}*", 100, break_on_hyphens=False)
        return f"{begin}{picture}\n\n{text}\n{end}"

    return _BLOCK.sub(block, text)


def write(docs: Path, pages: Sequence[str] = tuple(PICTURES), rounds: int = ROUNDS) -> None:
    """Draw the pictures in ``docs/images/methods`` and refresh the pages of ``docs/methods``."""
    folder = results_folder(Path(docs) / "images" / "methods")
    for page, panels in compute(pages, rounds).items():
        draw(panels, folder / f"{page}.png")
    for path in sorted((Path(docs) / "methods").glob("*.md")):
        write_file(path, refreshed(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
