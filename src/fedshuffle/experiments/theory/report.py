"""What the theory says, checked against the measurements; and the figures."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, publish
from fedshuffle.experiments.theory import experiment
from fedshuffle.experiments.theory.experiment import LOCAL, NON_LOCAL, PanelData, Results, Scale
from fedshuffle.methods import colour
from fedshuffle.reports.rendering import set_ticks

CLOSE = 0.25  # a slope is as claimed if it is this close
CLEARLY = 2.0  # at least this many times as many rounds are clearly more

READING = (
    ". A *slope* is that of the line through the logarithms, by least squares, and is as claimed"
    f" if it is within {CLOSE:g}; *fewer* means by a factor of at least {CLEARLY:g}."
)
"""How the words of the claims are meant."""


def slope(x: Sequence[float], y: Sequence[float | None]) -> float:
    """The power of x that y grows with: the slope of the line through the logarithms.

    >>> round(slope([1, 2, 4], [5, 20, 80]), 9)
    2.0
    """
    if None in y or len(y) < 2:
        return math.nan
    return float(np.polyfit(np.log(x), np.log(np.array(y, dtype=np.float64)), 1)[0])


_SPEED_UP = "Under importance sampling the rounds to a given error go with 1/b: linear speed-up."
_MIDDLE = "The middle term vanishes as eta_g grows, with 1 / eta_g^2, at the same effective step."
_IMPORTANCE = "Importance sampling needs fewer rounds than uniform sampling, as its M is smaller."
_BEATS = "FedShuffleMVR beats non-local MVR when delta is much smaller than L, at"
SLOPES = {
    "noise": {
        "Reshuffled, the stationary error goes with eta^2.": ("reshuffled", 2),
        "With replacement, it goes with eta only.": ("with replacement", 1),
    },
    "cohort": {_SPEED_UP: ("importance", -1)},
    "server": {
        _MIDDLE: ("reshuffled", -2),
        "With replacement the noise stays.": ("with replacement", 0),
    },
    "similarity": {
        "FedShuffleMVR's rounds go with delta, at the same L.": (f"{LOCAL}, theorem", 1),
        "Those of MVR without local steps do not: they go with L.": (f"{NON_LOCAL}, theorem", 0),
    },
}
"""For each panel: sentences, each with its curve and the slope that it claims."""
FEWER = {
    "cohort": {_IMPORTANCE: ("importance", "uniform", 0)},
    "similarity": {
        f"{_BEATS} the theorem's step sizes.": (f"{LOCAL}, theorem", f"{NON_LOCAL}, theorem", -1),
        f"{_BEATS} the best found for each.": (f"{LOCAL}, best", f"{NON_LOCAL}, best", -1),
    },
}
"""For each panel: sentences, each with the curve of fewer rounds, the other, and from where on."""


def claims(results: Results) -> list[Claim]:
    """What the theory says, checked against the measurements."""
    found = []
    for name, panel in results.items():
        x, curves, places = panel["x"], panel["curves"], _list(panel["x"])
        for text, (curve, claimed) in SLOPES.get(name, {}).items():
            power = round(slope(x, curves[curve]), 2) + 0.0  # no minus before a zero
            evidence = f"Slope {power:.2f}, claimed {claimed}: {_list(curves[curve])} at {places}."
            found.append(Claim(name, text, abs(power - claimed) <= CLOSE, evidence))
        for text, (few, more, start) in FEWER.get(name, {}).items():
            pairs = zip(curves[few][start:], curves[more][start:], strict=True)
            seen = all(a is not None and b is not None and a * CLEARLY <= b for a, b in pairs)
            evidence = f"Rounds: {_list(curves[few])} against {_list(curves[more])} at {places}."
            if "M" in panel.get("facts", {}):
                of_few, of_more = (_list(panel["facts"]["M"][curve]) for curve in (few, more))
                evidence += f" M: {of_few} against {of_more}."
            found.append(Claim(name, text, seen, evidence))
        if "bound" in panel:
            text = "The reshuffled error stays under the theorem's bound, 18 (L/mu) eta_l^2 N."
            found.append(_under_bounds(name, text, curves, {"reshuffled": panel["bound"]}))
        if "bounds" in panel:
            text = "The measured mean stays under the bound in every round."
            found.append(_under_bounds(name, text, curves, panel["bounds"]))
    return found


def _under_bounds(name: str, text: str, curves: PanelData, bounds: PanelData) -> Claim:
    room = {curve: np.divide(bound, curves[curve]) for curve, bound in bounds.items()}
    evidence = "; ".join(
        f"{curve}: {each.min():.4g} to {each.max():.3g} times as large, {each[-1]:.3g} at the end"
        for curve, each in room.items()
    )
    seen = all(bool((each >= 1).all()) for each in room.values())
    return Claim(name, text, seen, f"The bound is, for {evidence}.")


def _list(values: Sequence[float | None]) -> str:
    return ", ".join("never" if value is None else f"{value:.4g}" for value in values)


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
COLOURS = {
    **dict.fromkeys(["reshuffled", "importance", "FedShuffle", "eta_g = 1"], colour("fedshuffle")),
    **dict.fromkeys(["with replacement", "eta_g = 4"], colour("fedavg-rr")),
    "uniform": "#0072B2",
    "FedShuffleMVR": colour("fedshuffle-mvr"),
    "non-local MVR": colour("non-local-mvr"),
}


def reproduce(out: Path, scale: Scale | None = None, progress: bool = True) -> list[Claim]:
    """Measure all panels; write ``theory``, ``bounds``, ``results.json`` and ``claims.md``."""
    out = results_folder(out)
    results = experiment.compute(scale, progress)
    found = claims(results)
    rows = (experiment.MEASURED, experiment.PREDICTED)
    measured, predicted = ([panel.__name__ for panel in row] for row in rows)
    sheets = {"theory": (measured, (2, 2), (11, 10)), "bounds": (predicted, (1, 3), (15, 5))}
    title = "What the theory says, and what was measured"
    publish(out, results, _draw, sheets, found, title, READING, progress)
    return found


def _draw(axes: Axes, name: str, panel: PanelData) -> None:
    """The curves; with deviations as bars or bands, under bounds, and beside the ideal slopes."""
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
        power = dict(SLOPES.get(name, {}).values()).get(curve)
        if power is not None:
            ideal = mean[0] * (x / x[0]) ** float(power)
            axes.plot(x, ideal, "--", color="#707070", lw=1, label=f"slope {power}", zorder=1)
    if "bound" in panel:
        text = "the theorem's bound, reshuffled"
        axes.plot(x, panel["bound"], ":", color=COLOURS["reshuffled"], label=text)
    if "bounds" not in panel:
        axes.set_xscale("log")
        set_ticks(axes.xaxis, panel["x"], ".2g")
