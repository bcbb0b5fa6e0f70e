"""How methods look in every figure: one label and one colour each, everywhere the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedshuffle.methods import Method

_LABELS = {
    "fedavg": "FedAvg",
    "fedavg-rr": "FedAvgRR",
    "fedavg-min": "FedAvgMin",
    "fedavg-mean": "FedAvgMean",
    "fednova": "FedNova",
    "fednova-rr": "FedNovaRR",
    "fednova-original": "FedNova (original)",
    "fednova-original-rr": "FedNovaRR (original)",
    "fedshuffle": "FedShuffle",
    "fedshuffle-so": "FedShuffle w/ SO",
    "fedshuffle-uniform": "FedShuffle, uniform",
    "fedshuffle-importance": "FedShuffle w/ IS",
    "fedshuffle-gen": "FedShuffleGen",
    "fedshuffle-mvr": "FedShuffleMVR",
    "fedrr": "FedRR",
    "nastya": "NASTYA",
    "fedshuffle-capped": "FedShuffle, capped",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "scaffold-i": "SCAFFOLD, option I",
    "vrl-sgd": "VRL-SGD",
    "fedlin": "FedLin",
    "fedlin-sparse": "FedLin, sparse",
    "mime": "Mime",
    "mime-sgd": "Mime, SGD",
    "mime-adam": "Mime, Adam",
    "mime-lite": "MimeLite",
    "mime-lite-adam": "MimeLite, Adam",
    "mime-mvr": "MimeMVR",
    "fedavgm": "FedAvgM",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "pooled-sgd": "Pooled SGD",
    "pooled-rr": "Pooled RR",
    "distributed-gd": "Distributed GD",
    "non-local-mvr": "Non-local MVR",
}

# Okabe and Ito's palette, which people with colour-blindness can tell apart. There are more methods
# than colours: those of one family differ.
_COLOURS = {
    "fedavg": "#999999",
    "fedavg-rr": "#D55E00",
    "fedavg-min": "#E69F00",
    "fedavg-mean": "#CC79A7",
    "fednova": "#56B4E9",
    "fednova-rr": "#0072B2",
    "fednova-original": "#E69F00",
    "fednova-original-rr": "#D55E00",
    "fedshuffle": "#009E73",
    "fedshuffle-so": "#D55E00",
    "fedshuffle-uniform": "#0072B2",
    "fedshuffle-importance": "#009E73",
    "fedshuffle-gen": "#CC79A7",
    "fedshuffle-mvr": "#0072B2",
    "fedrr": "#56B4E9",
    "nastya": "#0072B2",
    "fedshuffle-capped": "#CC79A7",
    "fedprox": "#0072B2",
    "scaffold": "#0072B2",
    "scaffold-i": "#E69F00",
    "vrl-sgd": "#CC79A7",
    "fedlin": "#0072B2",
    "fedlin-sparse": "#E69F00",
    "mime": "#0072B2",
    "mime-sgd": "#56B4E9",
    "mime-adam": "#009E73",
    "mime-lite": "#D55E00",
    "mime-lite-adam": "#E69F00",
    "mime-mvr": "#CC79A7",
    "fedavgm": "#E69F00",
    "fedadagrad": "#CC79A7",
    "fedadam": "#0072B2",
    "fedyogi": "#D55E00",
    "pooled-sgd": "#E69F00",
    "pooled-rr": "#D55E00",
    "distributed-gd": "#0072B2",
    "non-local-mvr": "#CC79A7",
}


def label(method: str | Method) -> str:
    """What a method is called in a figure."""
    name = method if isinstance(method, str) else method.name
    return _LABELS.get(name, name)


def colour(method: str | Method) -> str:
    """The colour of a method in a figure."""
    name = method if isinstance(method, str) else method.name
    return _COLOURS.get(name, "#000000")


# Light and dark pages


@final
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
    """The colour, lightened until it stands out from a dark page.

    >>> on_dark("#E69F00"), on_dark("#332288")
    ('#e69f00', '#9d95c6')
    """
    parts = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)], np.float64)
    ground = luminance(np.array([int(DARK.page[k : k + 2], 16) for k in (1, 3, 5)], np.float64))
    for share in np.linspace(0, 1, 51):
        mixed = np.round(parts + share * (255 - parts))
        if (luminance(mixed) + 0.05) / (ground + 0.05) >= 6:
            break
    return "#" + "".join(f"{int(part):02x}" for part in mixed)


def luminance(parts: Any) -> float:
    """The relative luminance of a colour, as WCAG defines contrast by."""
    shares = parts / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
