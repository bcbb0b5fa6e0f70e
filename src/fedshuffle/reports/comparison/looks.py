"""The methods of a comparison, each with a colour and a marker in all figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedshuffle.methods import colour

# The first is nearest to the colour of the FedNova variants.
_PALETTE = (
    *("#0072B2", "#D55E00", "#882255", "#CC79A7", "#E69F00", "#56B4E9", "#009E73"),
    *("#117733", "#332288", "#AA4499", "#661100", "#999999"),
)

_MARKERS = {
    "o": "M-1,0a1,1 0 1,0 2,0a1,1 0 1,0 -2,0z",
    "s": "M-.9,-.9h1.8v1.8h-1.8z",
    "^": "M0,-1.15L1.1,.85H-1.1z",
    "D": "M0,-1.25L1.25,0 0,1.25 -1.25,0z",
    "v": "M0,1.15L1.1,-.85H-1.1z",
    "*": "M0,-1.6L.42,-.5 1.52,-.49 .63,.2 .95,1.3 0,.65 -.95,1.3 -.63,.2 -1.52,-.49 -.42,-.5z",
    "<": "M-1.15,0L.85,1.1V-1.1z",
    "P": "M-.42,-1.2h.84v.78h.78v.84h-.78v.78h-.84v-.78h-.78v-.84h.78z",
    ">": "M1.15,0L-.85,1.1V-1.1z",
}
"""Matplotlib's name of a marker, and the same as an SVG path of radius one."""


@dataclass(frozen=True)
class ComparedMethod:
    """A method of the comparison, and how it looks."""

    name: str
    label: str
    index: int
    colour: str
    marker: str

    @property
    def path(self) -> str:
        """The marker as an SVG path."""
        return _MARKERS[self.marker]

    @property
    def style(self) -> dict[str, Any]:
        """Matplotlib's arguments for a line with markers."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": 9 if self.marker == "*" else 5.5,
            "linewidth": 1.6,
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
        }


def looks(labels: Mapping[str, str]) -> dict[str, ComparedMethod]:
    """A method for each name and label: its usual colour if it is free, else a spare one."""
    colours: dict[str, str] = {}
    for name in labels:
        if (usual := colour(name)) in _PALETTE and usual not in colours.values():
            colours[name] = usual
    spare = [paint for paint in _PALETTE if paint not in colours.values()] or list(_PALETTE)
    for k, name in enumerate([name for name in labels if name not in colours]):
        colours[name] = spare[k % len(spare)]
    shapes = list(_MARKERS)
    return {
        name: ComparedMethod(name, label, k, colours[name], shapes[k % len(shapes)])
        for k, (name, label) in enumerate(labels.items())
    }
