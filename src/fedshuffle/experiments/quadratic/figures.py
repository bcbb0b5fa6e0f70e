"""The two figures of the toy experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshuffle.experiments.quadratic.experiment import colour, label
from fedshuffle.reports.drawing import clean, legend_below, save

Curves = Mapping[str, Mapping[str, Sequence[float]]]

TITLES = {
    "full": "Full participation",
    "momentum": "Full participation, momentum 0.9",
    "sum_one": "Two of three clients per round",
    "importance": "One of three clients per round",
    "hybrid": "Clients miss their last step",
}

DISTANCE = r"$\|x^r - x^\star\|^2$"


def figure1(results: Mapping[str, Curves], path: Path) -> None:
    """Four panels in a row, as in the paper: ``path`` with .png and .pdf."""
    _figure(results, ("full", "momentum", "sum_one", "importance"), (16, 4.8), path)


def hybrid(results: Mapping[str, Curves], path: Path) -> None:
    """The appendix' figure of unfinished local work: ``path`` with .png and .pdf."""
    _figure(results, ("hybrid",), (5, 4.4), path)


def _figure(
    results: Mapping[str, Curves], names: Sequence[str], size: tuple[float, float], path: Path
) -> None:
    figure = Figure(figsize=size, layout="constrained")
    row = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(row, names, strict=True):
        _draw(axes, results[name])
        axes.set_title(TITLES[name], fontsize=12)
    row[0].set_ylabel(DISTANCE)
    save(figure, path)


def _draw(axes: Axes, curves: Curves) -> None:
    for method, curve in curves.items():
        mean, std = np.array(curve["mean"]), np.array(curve["std"])
        rounds = np.arange(1, len(mean) + 1)
        # Dashes let the curve show that a reshuffled method covers.
        style = "--" if method.endswith("-rr") else "-"
        front = 3 if method.startswith("fedshuffle") else 2
        look: dict[str, Any] = {"color": colour(method)}
        axes.plot(rounds, mean, style, lw=1.6, label=label(method), zorder=front, **look)
        # Where the deviation reaches the mean, a logarithmic axis would show an endless fall.
        lower = np.maximum(mean - std, mean / 10)
        axes.fill_between(rounds, lower, mean + std, alpha=0.25, lw=0, zorder=front - 1, **look)
    means = np.array([curve["mean"] for curve in curves.values()])
    bottom, top = float(means.min()) / 3, float(means.max()) * 1.5
    axes.set(yscale="log", ylim=(bottom, top), xlim=(0, means.shape[1]), xlabel="round")
    if top / bottom > 100:  # the decades alone are enough
        axes.minorticks_off()
    clean(axes)
    legend_below(axes, 0.16, columns=2 if len(curves) > 3 else 1, fontsize=10)
