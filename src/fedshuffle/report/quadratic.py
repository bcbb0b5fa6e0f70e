"""The toy experiments for people: two figures, and the claims as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedshuffle.report.look import colour, label

if TYPE_CHECKING:
    from fedshuffle.experiments.quadratic import Claim, Results

TITLES = {
    "full": "Full participation",
    "momentum": "Full participation, momentum 0.9",
    "sum_one": "Two of three clients a round",
    "importance": "One of three clients a round",
    "hybrid": "Clients miss their last step",
}

DISTANCE = r"$\|x^r - x^\star\|^2$"


def figure1(results: Results, path: Path) -> None:
    """Four panels in a row, as in the paper: ``path`` with .png and .pdf."""
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    names = ("full", "momentum", "sum_one", "importance")
    row = figure.subplots(1, 4)
    for axes, name in zip(row, names, strict=True):
        _draw(axes, name, results[name])
    row[0].set_ylabel(DISTANCE)
    _save(figure, path)


def hybrid(results: Results, path: Path) -> None:
    """The appendix' figure of unfinished local work: ``path`` with .png and .pdf."""
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    _draw(axes, "hybrid", results["hybrid"])
    axes.set_ylabel(DISTANCE)
    _save(figure, path)


def _draw(axes: Axes, name: str, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    for method, curve in curves.items():
        paint = colour(method)
        mean, std = np.array(curve["mean"]), np.array(curve["std"])
        rounds = np.arange(1, len(mean) + 1)
        # Dashes let the curve show that a reshuffled method covers.
        style = "--" if method.endswith("-rr") else "-"
        front = 3 if method.startswith("fedshuffle") else 2
        axes.plot(
            rounds, mean, style, color=paint, linewidth=1.6, label=label(method), zorder=front
        )
        # Where the deviation reaches the mean, a logarithmic axis would show a fall without end.
        lower = np.maximum(mean - std, mean / 10)
        axes.fill_between(
            rounds, lower, mean + std, color=paint, alpha=0.25, linewidth=0, zorder=front - 1
        )
    means = np.array([curve["mean"] for curve in curves.values()])
    bottom, top = float(means.min()) / 3, float(means.max()) * 1.5
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.set_xlim(0, means.shape[1])
    if top / bottom > 100:  # the decades alone are enough
        axes.minorticks_off()
    axes.set_title(TITLES[name], fontsize=12)
    axes.set_xlabel("round")
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2 if len(curves) > 3 else 1,
        frameon=False,
        fontsize=10,
    )


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), dpi=160)
    figure.set_layout_engine("none")  # laid out once is enough
    # Without its date the same results give the same file.
    figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def table(claims: Sequence[Claim]) -> Table:
    """The claims for a terminal, with the evidence where one was not seen."""
    grid = Table(box=None, pad_edge=False, header_style="dim")
    grid.add_column("panel", no_wrap=True)
    grid.add_column("seen", justify="center")
    grid.add_column("what the paper says")
    for claim in claims:
        seen = "[green]yes[/]" if claim.seen else "[bold red]no[/]"
        reason = "" if claim.seen else f"\n[dim]{claim.evidence}[/]"
        grid.add_row(claim.panel, seen, claim.text + reason)
    return grid


def markdown(claims: Sequence[Claim], rounds: int) -> str:
    """The claims as a document."""
    from fedshuffle.experiments.quadratic import CLEARLY, HAIR, NEAR, SEEDS

    seeds = ", ".join(str(seed) for seed in SEEDS)
    seen = sum(claim.seen for claim in claims)
    lines = [
        "# What the paper says of its toy figures",
        "",
        f"{seen} of {len(claims)} claims were seen in {rounds} rounds with seeds {seeds}.",
        "",
        "A curve is the mean over the seeds of the squared distance to the optimum. It *ends* at"
        " its geometric mean over the last tenth of the rounds. *Better* and *worse* mean a factor"
        f" of at least {CLEARLY:g}; a curve that saturates at a bias settles within a factor of"
        f" {NEAR:g} of the distance of the audit's optimum; a curve has settled if in the last"
        " quarter of the rounds it falls at less than half of its mean pace. To *dominate* is"
        f" to end lowest and never to lie above another by more than a factor of {HAIR:g}.",
        "",
        "| panel | claim | seen | evidence |",
        "|---|---|---|---|",
        *(
            f"| {c.panel} | {c.text} | {'yes' if c.seen else '**no**'} | {c.evidence} |"
            for c in claims
        ),
        "",
    ]
    return "\n".join(lines)
