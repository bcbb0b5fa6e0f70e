"""The pictures of ``docs/methods``: two panels, full participation and two of three clients."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedshuffle._arrays import FloatArray
from fedshuffle.report.quadratic import DISTANCE

if TYPE_CHECKING:
    from fedshuffle.experiments.method_pictures import Curve

_DASHES = ("-", "--", ":", "-.")
_TITLES = {"full": "Full participation", "uniform:2": "Two of three clients a round"}
_FLOOR = 1e-12
"""Below lies rounding."""


def draw(panels: Mapping[str, Mapping[Curve, FloatArray]], path: Path) -> None:
    """A picture of the curves under each sampling."""
    figure = Figure(figsize=(9, 4.0), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True)
    everything = [curve for curves in panels.values() for curve in curves.values()]
    lines: dict[str, Line2D] = {}
    for axes, (sampling, curves) in zip(row, panels.items(), strict=True):
        lines |= _panel(axes, curves)
        axes.set_title(_TITLES[sampling], fontsize=11)
    lowest = max(_FLOOR, min(float(values.min()) for values in everything))
    row[0].set_ylim(lowest / 2, 2 * max(float(values.max()) for values in everything))
    row[0].set_ylabel(DISTANCE)
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """A small file: of few colours, and the same from the same curves."""
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def _panel(axes: Axes, curves: Mapping[Curve, FloatArray]) -> dict[str, Line2D]:
    lines: dict[str, Line2D] = {}
    for k, (curve, distances) in enumerate(curves.items()):
        rounds = np.arange(1, len(distances) + 1)
        (lines[curve.label],) = axes.plot(
            rounds,
            np.maximum(distances, _FLOOR / 10),
            "-" if curve.grey else _DASHES[k % len(_DASHES)],
            color=curve.colour,
            linewidth=1.5,
            zorder=2 if curve.grey else 3,
        )
    axes.set_yscale("log")
    axes.set_xlim(0, len(rounds))
    axes.set_xlabel("round")
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    return lines
