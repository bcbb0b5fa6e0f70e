r"""The pictures of ``docs/methods``: each family of methods on the toy problem.

The problem is that of :mod:`fedshuffle.experiments.quadratic`: clients own 1, 2 and 3 points,
unless a picture says otherwise. All runs of a picture move equally far: the step size of each is
such that a round of full participation moves the model by the same number times the gradient, to
first order. What departs from that, such as the server's step size of an adaptive method, is said
under the picture. ``make docs-pictures`` draws them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing import mass
from fedshuffle.engines import LanesEngine
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import results_folder
from fedshuffle.experiments.quadratic import SEEDS, federation, problem
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.report.look import colour, label
from fedshuffle.report.methods import markdown
from fedshuffle.rounds import Run, simulate

PACE = 1 / 40
ROUNDS = 400
SAMPLINGS = ("full", "uniform:2")

GREY = {"fedavg-rr": "#b5b5b5", "fedshuffle": "#707070"}
"""Drawn in every picture, to compare with."""


@final
@dataclass(frozen=True)
class Curve:
    """One method of a picture. ``step`` is a factor on its step size, ``momentum`` one it gets."""

    name: str
    paint: str = ""
    title: str = ""
    step: float = 1.0
    server_step_size: float = 1.0
    momentum: str = ""

    @property
    def method(self) -> Method:
        """The method itself."""
        found = methods.get(self.name)
        return (
            found.with_momentum(methods.parse_momentum(self.momentum)) if self.momentum else found
        )

    @property
    def what(self) -> tuple[Hashable, ...]:
        """What the run depends on, without how it is drawn."""
        return (self.name, self.step, self.server_step_size, self.momentum)

    @property
    def grey(self) -> bool:
        """Whether it is there to be compared with."""
        return GREY.get(self.name) == self.paint

    @property
    def label(self) -> str:
        """What it is called in the picture."""
        return self.title or label(self.name)

    @property
    def colour(self) -> str:
        """Its colour in the picture."""
        return self.paint or colour(self.name)

    @property
    def note(self) -> str:
        """In what it departs from the other curves, in words."""
        parts = []
        if self.step != 1:
            parts.append(f"the step size times {self.step:g}")
        if self.server_step_size != 1:
            parts.append(f"server step size {self.server_step_size:g}")
        return f"{self.label}: {' and '.join(parts)}" if parts else ""


@final
@dataclass(frozen=True)
class Picture:
    """The curves of a page, and what the toy problem is for them."""

    curves: tuple[Curve, ...]
    pace: float = PACE
    rounds: int = ROUNDS
    sizes: tuple[int, ...] = (1, 2, 3)

    @property
    def grey(self) -> tuple[Curve, ...]:
        """FedAvgRR and FedShuffle, unless the picture is about them."""
        shown = {curve.name for curve in self.curves if not curve.momentum}
        return tuple(Curve(name, paint) for name, paint in GREY.items() if name not in shown)


def _by_name(*names: str) -> Picture:
    return Picture(tuple(Curve(name) for name in names))


PICTURES: dict[str, Picture] = {
    "fedavg": Picture(
        (
            Curve("fedavg", "#0072B2"),
            *(Curve(name) for name in ("fedavg-rr", "fedavg-min", "fedavg-mean")),
        )
    ),
    "fednova": _by_name("fednova", "fednova-rr", "fednova-original", "fednova-original-rr"),
    "fedshuffle": _by_name("fedshuffle", "fedshuffle-so", "fedshuffle-gen", "fedshuffle-mvr"),
    "fedrr-nastya": Picture(
        (
            Curve("fedrr"),
            Curve("nastya", title="NASTYA, server step 4", step=1 / 4, server_step_size=4),
            Curve("fedshuffle", step=1 / 4, title="FedShuffle, server step 4", server_step_size=4),
        ),
        sizes=(2, 2, 2),
    ),
    "capped": Picture(
        (
            Curve("fedshuffle-capped:rho=1", "#0072B2", "capped, rho = 1"),
            Curve("fedshuffle-capped:rho=2", "#56B4E9", "capped, rho = 2"),
            Curve("fedshuffle-capped:rho=4", "#CC79A7", "capped, rho = 4"),
        ),
        pace=0.2,
        rounds=60,
        sizes=(4, 8, 48),
    ),
    "fedprox": Picture(
        (
            Curve("fedprox", "#56B4E9", "FedProx, mu = 0.01"),
            Curve("fedprox:mu=20", "#0072B2", "FedProx, mu = 20"),
            Curve("fedprox:mu=20+fedshuffle", "#CC79A7", "FedProx, mu = 20, with FedShuffle"),
        )
    ),
    "scaffold": _by_name("scaffold", "scaffold-i"),
    "vrl-sgd": _by_name("vrl-sgd"),
    "fedlin": _by_name("fedlin", "fedlin-sparse"),
    "mime": Picture(
        (
            Curve("mime"),
            Curve("mime-sgd"),
            Curve("mime-lite"),
            Curve("mime-mvr"),
            Curve("mime-adam", step=0.1),
            Curve("mime-lite-adam", step=0.1),
        )
    ),
    "adaptive": Picture(
        (
            Curve("fedavgm", server_step_size=0.1),
            Curve("fedadagrad", server_step_size=0.05),
            Curve("fedadam", server_step_size=0.005),
            Curve("fedyogi", server_step_size=0.005),
            Curve("fedadam+fedshuffle", "#009E73", "FedAdam with FedShuffle", 1, 0.005),
        )
    ),
    "baselines": _by_name("pooled-sgd", "pooled-rr", "distributed-gd", "non-local-mvr"),
    "momentum": Picture(
        (
            Curve("fedavg-rr", "#D55E00", "FedAvgRR, mvr:0.1", momentum="mvr:0.1"),
            Curve("fedavg-rr", "#E69F00", "FedAvgRR, global:0.1", momentum="global:0.1"),
            Curve("fedshuffle", "#0072B2", "FedShuffle, mvr:0.1", momentum="mvr:0.1"),
            Curve("fedshuffle", "#56B4E9", "FedShuffle, global:0.1", momentum="global:0.1"),
        )
    ),
}
"""By the name of their page."""


def run(curve: Curve, picture: Picture, sampling: str, seed: int) -> Run | None:
    """A curve's run; None where the method is not defined under the sampling."""
    clients, method, work = federation(picture.sizes), curve.method, LocalWork()
    everyone = Run(clients, method, "full", work).cohort(round=0)
    step_size = curve.step * picture.pace / float(mass(method, everyone).sum())
    try:
        return Run(clients, method, sampling, work, step_size, curve.server_step_size, seed)
    except FedShuffleError:
        return None


Results = dict[str, dict[str, dict[Curve, FloatArray]]]
"""``{page: {sampling: {curve: distances}}}``, the mean over the seeds, one a round."""


def compute(pages: Sequence[str] = tuple(PICTURES), rounds: int = ROUNDS) -> Results:
    """The curves of the pages' pictures; what shares a problem runs in lockstep, and once."""
    results: Results = {page: {sampling: {} for sampling in SAMPLINGS} for page in pages}
    wanted: dict[tuple[int, ...], dict[tuple[Hashable, ...], list[Run]]] = {}
    places = []
    enough: dict[tuple[int, ...], int] = {}
    for page in pages:
        picture = PICTURES[page]
        for sampling in SAMPLINGS:
            for curve in (*picture.grey, *picture.curves):
                runs = [run(curve, picture, sampling, seed) for seed in SEEDS]
                defined = [one for one in runs if one is not None]
                if defined:
                    clients = tuple(defined[0].federation.sizes.tolist())  # one, if pooled
                    key = (*curve.what, picture.pace, picture.sizes, sampling)
                    wanted.setdefault(clients, {})[key] = defined
                    places.append((page, sampling, curve, clients, key))
                    enough[clients] = max(enough.get(clients, 0), min(rounds, picture.rounds))
    found = {
        clients: dict(
            zip(same, _distances(clients, list(same.values()), enough[clients]), strict=True)
        )
        for clients, same in wanted.items()
    }
    for page, sampling, curve, clients, key in places:
        results[page][sampling][curve] = found[clients][key][: PICTURES[page].rounds]
    return results


def _distances(sizes: tuple[int, ...], runs: Sequence[Sequence[Run]], rounds: int) -> FloatArray:
    """``|x - x*|^2``, the mean over the seeds: a row per curve and a column per round."""
    walked = []
    everyone = [one for same in runs for one in same]
    for states in simulate(LanesEngine(problem(sizes)), everyone, rounds):
        gaps = torch.stack([state.x for state in states]) - 1 / sum(sizes)
        walked.append(gaps.square().sum(1).numpy().reshape(-1, len(SEEDS)).mean(axis=1))
    return np.stack(walked, axis=1)


# The pages -----------------------------------------------------------------------------------


def caption(page: str) -> str:
    """What stands under the picture of a page."""
    picture = PICTURES[page]
    clients = ", ".join(str(size) for size in picture.sizes[:-1]) + f" and {picture.sizes[-1]}"
    seeds = ", ".join(str(seed) for seed in SEEDS)
    text = (
        f"The squared distance to the optimum on the toy problem (clients with {clients} points,"
        f" one epoch, batches of one), mean over the seeds {seeds}. Step sizes are such that a"
        f" round of full participation moves the model by {picture.pace:g} times the gradient."
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
    """A page with its tables, pictures and captions as they follow from the code."""

    def block(match: re.Match[str]) -> str:
        begin, kind, page, end = match.groups()
        if kind == "table":
            inner = markdown(None if page == "all" else page)
        else:
            inner = (
                f"![{page} on the toy problem](../images/methods/{page}.png)\n\n*{caption(page)}*"
            )
        return f"{begin}{inner}\n{end}"

    return _BLOCK.sub(block, text)


def write(docs: Path, pages: Sequence[str] = tuple(PICTURES), rounds: int = ROUNDS) -> None:
    """Draw the pictures in ``docs/images/methods`` and refresh the pages of ``docs/methods``."""
    from fedshuffle.report.method_pictures import draw

    folder = results_folder(Path(docs) / "images" / "methods")
    for page, panels in compute(pages, rounds).items():
        draw(panels, folder / f"{page}.png")
    for path in sorted((Path(docs) / "methods").glob("*.md")):
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
