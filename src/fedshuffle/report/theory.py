"""The theory's claims for people: a figure of four panels, one of bounds, and a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from fedshuffle.report.look import colour

if TYPE_CHECKING:
    from fedshuffle.experiments.quadratic import Claim
    from fedshuffle.experiments.theory import Results

_QUIET, _LOUD, _GREY = colour("fedshuffle"), colour("fedavg-rr"), "#707070"
_WALKS, _STAYS = colour("fedshuffle-mvr"), colour("non-local-mvr")
_PAINT = {
    "importance": colour("fedshuffle-importance"),
    "uniform": colour("fedshuffle-uniform"),
    "FedShuffle": _QUIET,
    "FedShuffleMVR": _WALKS,
}

_ERROR = r"stationary $E\,\|x - x^\star\|^2$"


def figure(results: Results, path: Path) -> None:
    """The four panels: ``path`` with .png and .pdf."""
    drawing = Figure(figsize=(11, 10), layout="constrained")
    draws = {"noise": _noise, "cohort": _cohort, "server": _server, "similarity": _similarity}
    for axes, (name, draw) in zip(drawing.subplots(2, 2).flat, draws.items(), strict=True):
        axes.set_yscale("log")
        draw(axes, results[name])
        _finish(axes)
    _save(drawing, path)


def bounds(results: Results, path: Path) -> None:
    """Predicted curves over measured ones: ``path`` with .png and .pdf."""
    drawing = Figure(figsize=(15, 5), layout="constrained")
    distance = r"$\|x - x^\star\|^2$"
    titles = {
        "distance": ("All clients: drift and the server step size", distance),
        "sampling": ("A few of many clients: the sampling", distance),
        "gradient": ("One client: momentum", r"$\|\nabla f\|^2$, mean so far"),
    }
    for axes, (name, (title, measured)) in zip(
        drawing.subplots(1, 3).flat, titles.items(), strict=True
    ):
        axes.set_title(title)
        axes.set_yscale("log")
        _under(axes, results[name])
        axes.set_xlabel("rounds")
        axes.set_ylabel(measured)
        _finish(axes)
    _save(drawing, path)


def _under(axes: Axes, panel: Mapping[str, Any]) -> None:
    x, others = panel["x"], iter((_QUIET, _LOUD))
    for name, curve in panel["curves"].items():
        paint = _PAINT[name] if name in _PAINT else next(others)
        label = name.replace("eta_g", r"$\eta_g$")
        mean, deviation = np.array(curve), np.array(panel["deviations"][name])
        # On a logarithmic axis a band that reaches zero would have no end.
        low = mean - np.minimum(deviation, 0.9 * mean)
        axes.fill_between(x, low, mean + deviation, color=paint, alpha=0.2, linewidth=0)
        axes.plot(x, mean, color=paint, label=f"{label}, measured")
        axes.plot(x, panel["bounds"][name], "--", color=paint, label=f"{label}, bound")


def _finish(axes: Axes) -> None:
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False, fontsize=9.5
    )


def _save(drawing: Figure, path: Path) -> None:
    drawing.savefig(path.with_suffix(".png"), dpi=130)
    drawing.set_layout_engine("none")  # laid out once is enough
    # Without its date the same results give the same file.
    drawing.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def _noise(axes: Axes, panel: Mapping[str, Any]) -> None:
    axes.set_title("Noise of the examples: reshuffled, or with replacement")
    _errors(axes, panel)
    x, top = np.array(panel["x"]), max(panel["x"])
    for curve, power in (("with replacement", 1), ("reshuffled", 2)):
        start = panel["curves"][curve][int(np.argmax(x))]
        _ideal(axes, x, start * (x / top) ** power, "slopes 1 and 2" if power == 1 else "")
    _ticks(axes, panel["x"], "{x:.3f}")
    axes.set_xlabel(r"step size $\eta_l$, up to the theorem's limit")
    axes.set_ylabel(_ERROR)


def _server(axes: Axes, panel: Mapping[str, Any]) -> None:
    effective = panel["facts"]["effective step"]
    axes.set_title("The middle term and the server step size")
    _errors(axes, panel)
    x = np.array(panel["x"])
    _ideal(axes, x, panel["curves"]["reshuffled"][0] * (x / x[0]) ** -2.0, "slope -2")
    _ticks(axes, panel["x"], "{x:g}")
    axes.set_xlabel(rf"server step size $\eta_g$, with $\eta_g \eta_l = {effective:.3f}$")
    axes.set_ylabel(_ERROR)


def _cohort(axes: Axes, panel: Mapping[str, Any]) -> None:
    axes.set_title("Linear speed-up in the cohort size")
    for name, rounds in panel["curves"].items():
        _line(axes, panel["x"], rounds, "o-", color=_PAINT[name], label=f"{name} sampling")
    x, first = np.array(panel["x"]), panel["curves"]["importance"][0]
    if first is not None:
        _ideal(axes, x, first * x[0] / x, "ideal: 1/b")
    _numbers(axes)
    _ticks(axes, panel["x"], "{x:g}")
    axes.set_xlabel("clients a round, b")
    axes.set_ylabel(rf"rounds to $E\,\|x - x^\star\|^2 = {panel['facts']['epsilon']:g}$")


def _similarity(axes: Axes, panel: Mapping[str, Any]) -> None:
    axes.set_title("Local steps, when Hessians are alike")
    for name, rounds in panel["curves"].items():
        method, how = name.split(", ")
        paint = _WALKS if "Shuffle" in method else _STAYS
        where = "the theorem's step" if how == "theorem" else "best step"
        style = "o-" if how == "theorem" else "s--"
        _line(axes, panel["x"], rounds, style, color=paint, label=f"{method}, {where}")
    _ticks(axes, panel["x"], "{x:g}")
    _numbers(axes)
    axes.set_xlabel(r"Hessian similarity $\delta / L$")
    share = panel["facts"]["gradient"]
    axes.set_ylabel(rf"rounds to $E\,\|\nabla f\|^2 = {share:g} \, \|\nabla f(x^0)\|^2$")


def _errors(axes: Axes, panel: Mapping[str, Any]) -> None:
    for name, paint in (("with replacement", _LOUD), ("reshuffled", _QUIET)):
        mean, deviation = panel["curves"][name], panel["deviations"][name]
        # On a logarithmic axis a bar that reaches zero would have no end.
        low = np.minimum(deviation, 0.9 * np.array(mean))
        axes.errorbar(
            panel["x"], mean, yerr=[low, deviation], fmt="o-", color=paint, capsize=3, label=name
        )
    axes.plot(
        panel["x"], panel["bound"], ":", color=_QUIET, label="the theorem's bound, reshuffled"
    )


def _line(
    axes: Axes, x: Sequence[float], rounds: Sequence[int | None], style: str, **look: Any
) -> None:
    """A curve with gaps where the goal was never reached."""
    axes.plot(x, [np.nan if value is None else value for value in rounds], style, **look)


def _ideal(axes: Axes, x: Any, y: Any, text: str) -> None:
    axes.plot(x, y, "--", color=_GREY, linewidth=1, label=text or "_nolegend_", zorder=1)


def _numbers(axes: Axes) -> None:
    """Rounds as plain numbers, at 1, 2 and 5 times a power of ten."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _ticks(axes: Axes, x: Sequence[float], form: str) -> None:
    """A logarithmic axis with a tick at every value that was measured."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(x)))
    axes.xaxis.set_major_formatter(StrMethodFormatter(form))
    axes.xaxis.set_minor_locator(NullLocator())


def markdown(claims: Sequence[Claim]) -> str:
    """The claims as a document."""
    from fedshuffle.experiments.theory import CLEARLY, CLOSE

    seen = sum(claim.seen for claim in claims)
    lines = [
        "# What the theory says, and what was measured",
        "",
        f"{seen} of {len(claims)} claims were seen. A *slope* is that of the line through the"
        " logarithms, by least squares, and is as claimed if it is within"
        f" {CLOSE:g}; *fewer* means by a factor of at least {CLEARLY:g}.",
        "",
        "| panel | claim | seen | evidence |",
        "|---|---|---|---|",
        *(
            f"| {c.panel} | {c.text} | {'yes' if c.seen else '**no**'} | {c.evidence} |"
            for c in claims
        ),
        "",
    ]
    return "\n".join(lines)
