"""Experiment: the theory's claims, measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, draw_panels, publish
from fedshuffle.experiments.theory.claims import READING, claims
from fedshuffle.experiments.theory.experiment import MEASURED, PREDICTED, Results, Scale, compute
from fedshuffle.methods import colour
from fedshuffle.reports.drawing import set_ticks

_DISTANCE, _STATIONARY = r"$\|x - x^\star\|^2$", r"stationary $E\,\|x - x^\star\|^2$"
_AT_EFFECTIVE_STEP = r"server step size $\eta_g$, with $\eta_g \eta_l = %(effective step).3f$"
_TO_GRADIENT = r"rounds to $E\,\|\nabla f\|^2 = %(gradient)g \, \|\nabla f(x^0)\|^2$"
TEXTS = {
    "noise": (
        "Noise of the examples",
        r"step size $\eta_l$, up to the theorem's limit",
        _STATIONARY,
    ),
    "cohort": ("Linear speed-up", "clients per round, b", f"rounds to {_DISTANCE} = %(epsilon)g"),
    "server": ("The middle term and the server step size", _AT_EFFECTIVE_STEP, _STATIONARY),
    "similarity": ("Local steps, when Hessians are alike", r"$\delta / L$", _TO_GRADIENT),
    "distance": ("All clients: drift and the server step size", "rounds", _DISTANCE),
    "sampling": ("A few of many clients: the sampling", "rounds", _DISTANCE),
    "gradient": ("One client: momentum", "rounds", r"$\|\nabla f\|^2$, mean so far"),
}
"""Title, x and y axis of each panel; the facts of the panel fill them in."""
GUIDES = {
    "noise": {"with replacement": 1, "reshuffled": 2},
    "cohort": {"importance": -1},
    "server": {"reshuffled": -2},
}
"""The slopes that the theory gives some curves."""
COLOURS = {
    **dict.fromkeys(["reshuffled", "importance", "FedShuffle", "eta_g = 1"], colour("fedshuffle")),
    **dict.fromkeys(["with replacement", "eta_g = 4"], colour("fedavg-rr")),
    "uniform": "#0072B2",
    "FedShuffleMVR": colour("fedshuffle-mvr"),
    "non-local MVR": colour("non-local-mvr"),
}


def reproduce(out: Path, scale: Scale | None = None, progress: bool = True) -> list[Claim]:
    """Measure all panels; write ``theory.png``, ``bounds.png``, the same as ``.pdf``,
    ``results.json`` and ``claims.md``.
    """
    out = results_folder(out)
    results = compute(scale, progress)
    found = claims(results)
    draw = partial(_draw, results)
    figures = {
        "theory": draw_panels([panel.__name__ for panel in MEASURED], (2, 2), (11, 10), draw),
        "bounds": draw_panels([panel.__name__ for panel in PREDICTED], (1, 3), (15, 5), draw),
    }
    title = "What the theory says, and what was measured"
    publish(out, results, figures, found, title, READING, progress)
    return found


def _draw(results: Results, axes: Axes, name: str) -> None:
    """The curves; with deviations as bars or bands, under bounds, and beside the ideal slopes."""
    panel = results[name]
    title, x_label, y_label = (text % panel["facts"] for text in TEXTS[name])
    axes.set(title=title, xlabel=x_label, ylabel=y_label, yscale="log")
    x = np.array(panel["x"])
    for curve, values in panel["curves"].items():
        paint, dashes = COLOURS[curve.split(", ")[0]], "--" if curve.endswith("best") else "-"
        mean = np.array(values, float)  # None, where the goal was never reached, leaves a gap
        deviation = np.array(panel.get("deviations", {}).get(curve, 0 * mean))
        below = np.minimum(deviation, 0.9 * mean)  # a band to zero has no end on this axis
        text = curve.replace("eta_g", r"$\eta_g$")
        if "bounds" in panel:
            axes.fill_between(x, mean - below, mean + deviation, color=paint, alpha=0.2, lw=0)
            axes.plot(x, mean, color=paint, label=f"{text}, measured")
            axes.plot(x, panel["bounds"][curve], "--", color=paint, label=f"{text}, bound")
        else:
            axes.errorbar(x, mean, (below, deviation), None, "o", ls=dashes, c=paint, label=text)
        slope = GUIDES.get(name, {}).get(curve)
        if slope is not None:
            ideal = mean[0] * (x / x[0]) ** float(slope)
            axes.plot(x, ideal, "--", color="#707070", lw=1, label=f"slope {slope}", zorder=1)
    if "bound" in panel:
        text = "the theorem's bound, reshuffled"
        axes.plot(x, panel["bound"], ":", color=COLOURS["reshuffled"], label=text)
    if "bounds" not in panel:
        axes.set_xscale("log")
        set_ticks(axes.xaxis, panel["x"], ".2g")
    if "deviations" not in panel:  # numbers of rounds, as plain numbers
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
