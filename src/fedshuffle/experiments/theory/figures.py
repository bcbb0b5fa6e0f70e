"""The figures of the theory experiment: four panels, and predicted over measured curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from fedshuffle.methods import colour
from fedshuffle.reports.drawing import clean, legend_below, save, set_ticks

_RESHUFFLED, _REPLACED = colour("fedshuffle"), colour("fedavg-rr")
_PAINT = {
    "importance": _RESHUFFLED,
    "uniform": "#0072B2",
    "FedShuffle": _RESHUFFLED,
    "FedShuffleMVR": colour("fedshuffle-mvr"),
    "non-local MVR": colour("non-local-mvr"),
}
_ERROR = r"stationary $E\,\|x - x^\star\|^2$"


def figure(results: Mapping[str, Any], path: Path) -> None:
    """The four panels: ``path`` with .png and .pdf."""
    drawing = Figure(figsize=(11, 10), layout="constrained")
    draws = {"noise": _noise, "cohort": _cohort, "server": _server, "similarity": _similarity}
    for axes, (name, draw) in zip(drawing.subplots(2, 2).flat, draws.items(), strict=True):
        axes.set_yscale("log")
        draw(axes, results[name], np.array(results[name]["x"]))
        _finish(axes)
    save(drawing, path, dpi=130)


def bounds(results: Mapping[str, Any], path: Path) -> None:
    """Predicted curves over measured ones: ``path`` with .png and .pdf."""
    drawing = Figure(figsize=(15, 5), layout="constrained")
    distance = r"$\|x - x^\star\|^2$"
    titles = {
        "distance": ("All clients: drift and the server step size", distance),
        "sampling": ("A few of many clients: the sampling", distance),
        "gradient": ("One client: momentum", r"$\|\nabla f\|^2$, mean so far"),
    }
    row = drawing.subplots(1, len(titles))
    for axes, (name, (title, measured)) in zip(row, titles.items(), strict=True):
        axes.set(title=title, yscale="log", xlabel="rounds", ylabel=measured)
        _measured_and_bound(axes, results[name])
        _finish(axes)
    save(drawing, path, dpi=130)


def _finish(axes: Axes) -> None:
    clean(axes)
    legend_below(axes, 0.13, columns=2, fontsize=9.5)


def _measured_and_bound(axes: Axes, panel: Mapping[str, Any]) -> None:
    x, others = panel["x"], iter((_RESHUFFLED, _REPLACED))
    for name, curve in panel["curves"].items():
        paint = _PAINT[name] if name in _PAINT else next(others)
        label = name.replace("eta_g", r"$\eta_g$")
        mean, deviation = np.array(curve), np.array(panel["deviations"][name])
        low = mean - _shown(deviation, mean)
        axes.fill_between(x, low, mean + deviation, color=paint, alpha=0.2, linewidth=0)
        axes.plot(x, mean, color=paint, label=f"{label}, measured")
        axes.plot(x, panel["bounds"][name], "--", color=paint, label=f"{label}, bound")


def _shown(deviation: Any, mean: Any) -> Any:
    """On a logarithmic axis a band that reaches zero would have no end."""
    return np.minimum(deviation, 0.9 * np.array(mean))


def _noise(axes: Axes, panel: Mapping[str, Any], x: Any) -> None:
    axes.set_title("Noise of the examples: reshuffled, or with replacement")
    _errors(axes, panel)
    for curve, power in (("with replacement", 1), ("reshuffled", 2)):
        start = panel["curves"][curve][int(np.argmax(x))]
        _ideal(axes, x, start * (x / max(x)) ** power, "slopes 1 and 2" if power == 1 else "")
    axes.set_xscale("log")
    set_ticks(axes.xaxis, panel["x"], ".3f")
    axes.set_xlabel(r"step size $\eta_l$, up to the theorem's limit")


def _server(axes: Axes, panel: Mapping[str, Any], x: Any) -> None:
    axes.set_title("The middle term and the server step size")
    _errors(axes, panel)
    _ideal(axes, x, panel["curves"]["reshuffled"][0] * (x / x[0]) ** -2.0, "slope -2")
    axes.set_xscale("log")
    set_ticks(axes.xaxis, panel["x"])
    effective = panel["facts"]["effective step"]
    axes.set_xlabel(rf"server step size $\eta_g$, with $\eta_g \eta_l = {effective:.3f}$")


def _cohort(axes: Axes, panel: Mapping[str, Any], x: Any) -> None:
    axes.set_title("Linear speed-up in the cohort size")
    for name, rounds in panel["curves"].items():
        _rounds(axes, panel, rounds, "o-", color=_PAINT[name], label=f"{name} sampling")
    first = panel["curves"]["importance"][0]
    if first is not None:
        _ideal(axes, x, first * x[0] / x, "ideal: 1/b")
    axes.set_xlabel("clients per round, b")
    axes.set_ylabel(rf"rounds to $E\,\|x - x^\star\|^2 = {panel['facts']['epsilon']:g}$")


def _similarity(axes: Axes, panel: Mapping[str, Any], x: Any) -> None:
    axes.set_title("Local steps, when Hessians are alike")
    for name, rounds in panel["curves"].items():
        method, how = name.split(", ")
        style, where = ("o-", "the theorem's step") if how == "theorem" else ("s--", "best step")
        _rounds(axes, panel, rounds, style, color=_PAINT[method], label=f"{method}, {where}")
    axes.set_xlabel(r"Hessian similarity $\delta / L$")
    share = panel["facts"]["gradient"]
    axes.set_ylabel(rf"rounds to $E\,\|\nabla f\|^2 = {share:g} \, \|\nabla f(x^0)\|^2$")


def _errors(axes: Axes, panel: Mapping[str, Any]) -> None:
    for name, paint in (("with replacement", _REPLACED), ("reshuffled", _RESHUFFLED)):
        mean, deviation = panel["curves"][name], panel["deviations"][name]
        bars = [_shown(deviation, mean), deviation]
        axes.errorbar(panel["x"], mean, yerr=bars, fmt="o-", color=paint, capsize=3, label=name)
    theorem = "the theorem's bound, reshuffled"
    axes.plot(panel["x"], panel["bound"], ":", color=_RESHUFFLED, label=theorem)
    axes.set_ylabel(_ERROR)


def _rounds(
    axes: Axes, panel: Mapping[str, Any], rounds: Sequence[int | None], style: str, **look: Any
) -> None:
    """Numbers of rounds as plain numbers, with gaps where the goal was never reached."""
    axes.plot(panel["x"], [np.nan if r is None else r for r in rounds], style, **look)
    axes.set_xscale("log")
    set_ticks(axes.xaxis, panel["x"])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _ideal(axes: Axes, x: Any, y: Any, text: str) -> None:
    axes.plot(x, y, "--", color="#707070", linewidth=1, label=text or "_nolegend_", zorder=1)
