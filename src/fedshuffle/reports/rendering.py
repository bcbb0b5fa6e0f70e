"""Figures and pages that look alike: colours, calm axes, files that do not change; words."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle._figures import AXIS, GRID, INK
from fedshuffle._files import write_file
from fedshuffle.methods import Method, colour, label


@dataclass(frozen=True)
class Theme:
    """The colours of a figure, for a light or a dark page."""

    page: str
    ink: str
    axis: str
    grid: str
    greys: str  # matplotlib's colour map from nothing to all

    def colour(self, method: str | Method) -> str:
        """The colour of a method, readable on this page."""
        return colour(method) if self is LIGHT else on_dark(colour(method))

    @property
    def parameters(self) -> dict[Any, Any]:
        """What matplotlib needs to know, for ``matplotlib.rc_context``."""
        inks = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
        pages = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
        return {
            **dict.fromkeys(inks, self.ink),
            **dict.fromkeys(pages, self.page),
            "axes.edgecolor": self.axis,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "grid.color": self.grid,
        }


LIGHT = Theme(page="#ffffff", ink=INK, axis=AXIS, grid=GRID, greys="Greys")
DARK = Theme(page="#16191d", ink="#e4e7eb", axis="#6d7681", grid="#2d333b", greys="Greys_r")


def on_dark(colour: str) -> str:
    """The colour, lightened until it stands out from a dark page."""
    parts, ground = _channels(colour), luminance(_channels(DARK.page))
    for share in np.linspace(0, 1, 51):
        mixed = np.round(parts + share * (255 - parts))
        if (luminance(mixed) + 0.05) / (ground + 0.05) >= 6:
            break
    return "#" + "".join(f"{int(part):02x}" for part in mixed)


def _channels(colour: str) -> FloatArray:
    return np.array(list(bytes.fromhex(colour[1:])), np.float64)


def luminance(channels: Any) -> float:
    """The relative luminance of red, green and blue, which WCAG's contrast is defined by."""
    shares = channels / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def clean(axes: Axes) -> None:
    """Two spines only, and a light grid behind the curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def round_numbers(ends: tuple[float, float], multiples: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Multiples of powers of ten between two ends, for a logarithmic axis."""
    numbers = [m * 10.0**k for k in range(-6, 9) for m in multiples]
    return [number for number in numbers if ends[0] <= number <= ends[1]]


def spread(points: int, most: int) -> IntArray:
    """Evenly spread places of points, with the first and the last; all if there are few."""
    return np.linspace(0, points - 1, min(points, most)).round().astype(np.int64)


def set_ticks(axis: Axis, ticks: Sequence[float], form: str = "g") -> None:
    """These ticks alone, written as plain numbers."""
    axis.set_ticks(ticks, labels=[f"{tick:{form}}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def encoded(figure: Figure, kind: str, dpi: float | Literal["figure"] = "figure") -> bytes:
    """The figure as a ``png``, ``pdf`` or ``svg`` file; the same numbers give the same bytes."""
    metadata: Any = {{"png": "Software", "pdf": "CreationDate", "svg": "Date"}[kind]: None}
    file = io.BytesIO()
    # Letters stay letters in a paper.
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedshuffle"}):
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def save(figure: Figure, path: Path) -> list[Path]:
    """Write ``path`` with .png and .pdf."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    write_file(files[0], encoded(figure, "png", dpi=160))
    figure.set_layout_engine("none")  # laid out once is enough
    write_file(files[1], encoded(figure, "pdf"))
    return files


def data_uri(mime: str, data: bytes) -> str:
    """A file inside a page."""
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"


def render(folder: str, template: str, filters: dict[str, Any], **context: Any) -> str:
    """A template of a folder of the package, everything in it escaped."""
    environment = Environment(
        loader=PackageLoader("fedshuffle", folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words = (number, percent, joined, duration, label, colour, on_dark)
    environment.filters.update({word.__name__: word for word in words} | filters)
    return environment.get_template(template).render(context)


def number(value: float) -> str:
    """Two significant digits, without an exponent where a person can do without."""
    if value != 0 and abs(value) < 1e-6:
        return f"{value:.1e}"
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


def percent(share: float) -> str:
    """A share in percent, with one decimal."""
    return f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """A time for a person."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def joined(words: Sequence[object]) -> str:
    """A list in a sentence."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
