"""Experiment: the paper's toy figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from fedshuffle._arrays import count
from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, draw_panels, publish
from fedshuffle.experiments.quadratic.claims import READING, claims
from fedshuffle.experiments.quadratic.experiment import (
    SEEDS,
    TITLES,
    Results,
    colour,
    compute,
    label,
)

DISTANCE = r"$\|x^r - x^\star\|^2$"


def reproduce(out: Path, rounds: int = 1000, progress: bool = True) -> list[Claim]:
    """Simulate all panels; write ``figure1``, ``hybrid``, ``results.json`` and ``claims.md``."""
    count(rounds, "rounds")
    out = results_folder(out)
    results = compute(rounds, progress)
    found = claims(results)
    *first, appendix = results
    draw = partial(_draw, results)
    figures = {
        "figure1": draw_panels(first, (1, 4), (16, 4.8), draw),
        "hybrid": draw_panels([appendix], (1, 1), (5, 4.4), draw),
    }
    title = "What the paper says about its toy figures"
    seeds = ", ".join(map(str, SEEDS))
    reading = f" in {rounds} rounds with seeds {seeds}.\n\n{READING}"
    publish(out, results, figures, found, title, reading, progress)
    return found


def _draw(results: Results, axes: Axes, panel: str) -> None:
    curves = results[panel]
    for method, curve in curves.items():
        mean, std = np.array(curve["mean"]), np.array(curve["std"])
        rounds = np.arange(1, len(mean) + 1)
        # Dashes let the curve show that a reshuffled method covers.
        dashes = "--" if method.endswith("-rr") else "-"
        paint = colour(method)
        front = 3 if method.startswith("fedshuffle") else 2
        axes.plot(rounds, mean, dashes, color=paint, lw=1.6, label=label(method), zorder=front)
        # Where the deviation reaches the mean, a logarithmic axis would show an endless fall.
        lower = np.maximum(mean - std, mean / 10)
        band = axes.fill_between(rounds, lower, mean + std, color=paint, alpha=0.25, lw=0)
        band.set_zorder(front - 1)
    means = np.array([curve["mean"] for curve in curves.values()])
    bottom, top = float(means.min()) / 3, float(means.max()) * 1.5
    axes.set(yscale="log", ylim=(bottom, top), xlim=(0, means.shape[1]), xlabel="round")
    axes.set(title=TITLES[panel], ylabel=DISTANCE)
    if top / bottom > 100:  # the decades alone are enough
        axes.minorticks_off()
