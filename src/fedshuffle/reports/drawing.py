"""What all figures share: calm axes, plain ticks, legends, and files that do not change."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedshuffle.reports.style import LIGHT


def clean(axes: Axes) -> None:
    """Two spines only, and a light grid behind the curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def round_numbers(ends: tuple[float, float], multiples: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Multiples of powers of ten between two ends, for a logarithmic axis."""
    numbers = [m * 10.0**k for k in range(-6, 9) for m in multiples]
    return [number for number in numbers if ends[0] <= number <= ends[1]]


def set_ticks(axis: Axis, ticks: Sequence[float], form: str = "g") -> None:
    """These ticks alone, written as plain numbers."""
    axis.set_ticks(ticks, labels=[f"{tick:{form}}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path`` with .png and .pdf; the same numbers give the same bytes."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # letters stay letters in a paper
        figure.savefig(files[0], dpi=160, metadata={"Software": None})
        figure.set_layout_engine("none")  # laid out once is enough
        figure.savefig(files[1], metadata={"CreationDate": None})
    return files


def data_uri(figure: Figure, kind: str = "png") -> str:
    """The figure inside a page, as ``png`` or ``svg``."""
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedshuffle"}):
        metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None}
        figure.savefig(
            drawn, format=kind, dpi=120 if kind == "png" else "figure", metadata=metadata
        )
    mime = {"png": "image/png", "svg": "image/svg+xml"}[kind]
    return f"data:{mime};base64,{base64.b64encode(drawn.getvalue()).decode('ascii')}"
