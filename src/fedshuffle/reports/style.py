"""Colours of figures on light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.methods import Method, colour


@dataclass(frozen=True)
class Theme:
    """The colours of a figure, for a light or a dark page."""

    page: str
    ink: str
    axis: str
    grid: str
    greys: str
    """matplotlib's colour map from nothing to all."""

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


LIGHT = Theme(page="#ffffff", ink="#222222", axis="#8a8f98", grid="#e6e8eb", greys="Greys")
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
