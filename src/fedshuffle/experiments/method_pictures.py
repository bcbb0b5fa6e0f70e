"""The pictures of ``docs/explanation/methods``: each family of methods on the toy problem.

All runs of a picture move equally far: each step size is chosen such that a round of full
participation moves the model by the same multiple of the gradient, to first order. The exceptions
are listed under the picture. ``make docs-pictures`` draws them.
"""

import itertools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle._files import results_folder
from fedshuffle.auditing import contributions
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments.pages import fill, write_picture
from fedshuffle.experiments.quadratic import DISTANCE, SEEDS, TITLES, distances
from fedshuffle.experiments.toy_problems import toy
from fedshuffle.local_work import LocalWork
from fedshuffle.reports.methods import markdown
from fedshuffle.reports.rendering import clean, joined
from fedshuffle.training.rounds import Run

PACE, ROUNDS = 1 / 40, 400
SAMPLINGS = {"full": TITLES["full"], "uniform:2": TITLES["sum_one"]}  # with the title of the panel
_DASHES = ("-", "--", ":", "-.")
_FLOOR = 1e-12  # below this, differences are rounding errors
GREY = {"fedavg-rr": "#b5b5b5", "fedshuffle": "#707070"}  # in every picture that is not about them


@dataclass(frozen=True)
class Curve:
    """A method in a picture. ``step`` is a factor on its step size."""

    name: str
    paint: str = ""
    title: str = ""
    step: float = 1.0
    server_step_size: float = 1.0
    momentum: str = ""

    @property
    def label(self) -> str:
        return self.title or methods.label(self.name)

    @property
    def note(self) -> str:
        """How its settings differ from those of the others, in words."""
        parts = [f"step size times {self.step:g}"] if self.step != 1 else []
        if self.server_step_size != 1:
            parts.append(f"server step size {self.server_step_size:g}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Picture:
    """The methods of a page, and the toy problem they run on."""

    curves: tuple[Curve, ...]
    pace: float = PACE
    rounds: int = ROUNDS
    sizes: tuple[int, ...] = (1, 2, 3)


def _picture(*curves: str | Curve, **settings: Any) -> Picture:
    return Picture(tuple(Curve(c) if isinstance(c, str) else c for c in curves), **settings)


PICTURES: dict[str, Picture] = {
    "fedavg": _picture(Curve("fedavg", "#0072B2"), "fedavg-rr", "fedavg-min", "fedavg-mean"),
    "fedau": _picture(
        "fedau", Curve("fedau+fedshuffle", "#0072B2", "FedAU with FedShuffle's step sizes")
    ),
    "fednova": _picture("fednova", "fednova-rr", "fednova-original", "fednova-original-rr"),
    "fedshuffle": _picture("fedshuffle", "fedshuffle-so", "fedshuffle-gen", "fedshuffle-mvr"),
    "fedrr-nastya": _picture(
        "fedrr",
        Curve("nastya", "", "NASTYA, server step 4", 1 / 4, 4),
        Curve("fedshuffle", "", "FedShuffle, server step 4", 1 / 4, 4),
        sizes=(2, 2, 2),
    ),
    "capped": _picture(
        Curve("fedshuffle-capped:rho=1", "#0072B2", "capped, rho = 1"),
        Curve("fedshuffle-capped:rho=2", "#56B4E9", "capped, rho = 2"),
        Curve("fedshuffle-capped:rho=4", "#CC79A7", "capped, rho = 4"),
        pace=0.2,
        rounds=60,
        sizes=(4, 8, 48),
    ),
    "fedprox": _picture(
        Curve("fedprox", "#56B4E9", "FedProx, mu = 0.01"),
        Curve("fedprox:mu=20", "#0072B2", "FedProx, mu = 20"),
        Curve("fedprox:mu=20+fedshuffle", "#CC79A7", "FedProx, mu = 20, with FedShuffle"),
    ),
    "scaffold": _picture("scaffold", "scaffold-i"),
    "vrl-sgd": _picture("vrl-sgd"),
    "fedlin": _picture("fedlin", "fedlin-sparse"),
    "mime": _picture(
        *("mime", "mime-sgd", "mime-lite", "mime-mvr"),
        Curve("mime-adam", step=0.1),
        Curve("mime-lite-adam", step=0.1),
    ),
    "adaptive": _picture(
        Curve("fedavgm", server_step_size=0.1),
        Curve("fedadagrad", server_step_size=0.05),
        Curve("fedadam", server_step_size=0.005),
        Curve("fedyogi", server_step_size=0.005),
        Curve("fedadam+fedshuffle", "#009E73", "FedAdam with FedShuffle", 1, 0.005),
    ),
    "diloco": _picture(
        Curve("diloco", step=0.05, server_step_size=0.7),
        Curve("diloco", "#D55E00", "DiLoCo, steps times 0.2", 0.01, 0.7),
        sizes=(2, 2, 2),
    ),
    "mifa": _picture("mifa", Curve("mifa+fedshuffle", "#E69F00", "MIFA with FedShuffle")),
    "fedvarp": _picture(
        "fedvarp", Curve("fedvarp+fedshuffle", "#0072B2", "FedVARP with FedShuffle")
    ),
    "fedawe": _picture("fedawe", Curve("fedawe+fedshuffle", "#0072B2", "FedAWE with FedShuffle")),
    "amplified": _picture(
        Curve("amplified", step=1 / 2),
        Curve("amplified+fedshuffle", "#0072B2", "Amplified, with FedShuffle", 1 / 2),
    ),
    "baselines": _picture("pooled-sgd", "pooled-rr", "distributed-gd", "non-local-mvr"),
    "momentum": _picture(
        Curve("fedavg-rr", "#D55E00", "FedAvgRR, mvr:0.1", momentum="mvr:0.1"),
        Curve("fedavg-rr", "#E69F00", "FedAvgRR, global:0.1", momentum="global:0.1"),
        Curve("fedshuffle", "#0072B2", "FedShuffle, mvr:0.1", momentum="mvr:0.1"),
        Curve("fedshuffle", "#56B4E9", "FedShuffle, global:0.1", momentum="global:0.1"),
    ),
}
"""By the name of their page."""


def run(curve: Curve, picture: Picture, sampling: str, seed: int) -> Run | None:
    """A method's run; None where the method is not defined under the sampling."""
    clients, work = toy(picture.sizes).problem.federation, LocalWork()
    method = methods.get(curve.name)
    if curve.momentum:
        method = method.with_momentum(methods.parse_momentum(curve.momentum))
    everyone = Run(clients, method, "full", work).cohort(round=0)
    step_size = curve.step * picture.pace / float(contributions(method, everyone).sum())
    try:
        return Run(clients, method, sampling, work, step_size, curve.server_step_size, seed)
    except FedShuffleError:
        return None


Panels = dict[str, dict[Curve, FloatArray]]
"""``{sampling: {method: distances}}``, the mean over the seeds, one per round."""


def compute(picture: Picture, rounds: int = ROUNDS) -> Panels:
    """The curves of a picture, where they are defined."""
    runs: dict[tuple[str, Curve], list[Run]] = {}
    shown = {curve.name for curve in picture.curves if not curve.momentum}
    grey = [Curve(name, paint) for name, paint in GREY.items() if name not in shown]
    for sampling in SAMPLINGS:
        for curve in (*grey, *picture.curves):
            tried = [run(curve, picture, sampling, seed) for seed in SEEDS]
            if defined := [one for one in tried if one is not None]:
                runs[sampling, curve] = defined
    found = distances(runs, min(rounds, picture.rounds))
    return {
        sampling: {curve: found[s, curve].mean(axis=0) for s, curve in runs if s == sampling}
        for sampling in SAMPLINGS
    }


def draw(panels: Panels, path: Path) -> None:
    """A picture of the curves under each sampling."""
    figure = Figure(figsize=(9, 4.0), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True)
    lines: dict[str, Line2D] = {}
    for axes, (sampling, curves) in zip(row, panels.items(), strict=True):
        for k, (curve, values) in enumerate(curves.items()):
            grey = GREY.get(curve.name) == curve.paint
            (lines[curve.label],) = axes.plot(
                np.arange(1, len(values) + 1),
                np.maximum(values, _FLOOR / 10),
                "-" if grey else _DASHES[k % len(_DASHES)],
                color=curve.paint or methods.colour(curve.name),
                linewidth=1.5,
                zorder=2 if grey else 3,
            )
        axes.set(yscale="log", xlim=(0, len(values)), xlabel="round")
        axes.minorticks_off()
        clean(axes)
        axes.set_title(SAMPLINGS[sampling], fontsize=11)
    every = np.concatenate([curve for curves in panels.values() for curve in curves.values()])
    row[0].set_ylim(max(_FLOOR, every.min()) / 2, 2 * every.max())
    row[0].set_ylabel(DISTANCE)
    look: dict[str, Any] = {"loc": "outside lower center", "ncols": 4, "frameon": False}
    figure.legend(list(lines.values()), list(lines), fontsize=9, **look)
    write_picture(figure, path)


def caption(page: str) -> str:
    """The text under the picture of a page."""
    picture = PICTURES[page]
    text = "On [the toy problem](index.md#the-pictures)"
    if picture.sizes != Picture.sizes:
        text += f", for clients with {joined(picture.sizes)} points"
    if picture.pace != PACE:
        text += f", moving by {picture.pace:g} times the gradient"
    text += "."
    noted = sorted((c for c in picture.curves if c.note), key=lambda curve: curve.note)
    for note, curves in itertools.groupby(noted, key=lambda curve: curve.note):
        text += f" {'; '.join(curve.label for curve in curves)}: {note}."
    return text


def blocks() -> dict[str, str]:
    """What is generated on the pages: the table of all methods, and each picture with a caption."""
    found = {"table all": markdown()}
    for page in PICTURES:
        picture = f"![{page} on the toy problem](../../images/methods/{page}.png)"
        text = textwrap.fill(f"*{caption(page)}*", 100, break_on_hyphens=False)
        found[f"picture {page}"] = f"{picture}\n\n{text}"
    return found


def write(docs: Path, pages: Sequence[str] = tuple(PICTURES), rounds: int = ROUNDS) -> None:
    """Draw ``docs/images/methods`` and refresh the pages of ``docs/explanation/methods``."""
    folder = results_folder(Path(docs) / "images" / "methods")
    for page in pages:
        draw(compute(PICTURES[page], rounds), folder / f"{page}.png")
    generated = blocks()
    for path in sorted((Path(docs) / "explanation" / "methods").glob("*.md")):
        fill(path, generated)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
