r"""Compression and reshuffling: Q-NASTYA and DIANA-NASTYA (Sadiev et al. 2022, arXiv:2206.07021).

In every round each client runs an epoch with a small step size :math:`\gamma` and sends its mean
gradient :math:`g_i = (x - y_i) / (\gamma n)` through a channel, and the server moves by
:math:`\eta` times the mean of what it decodes. Q-NASTYA sends :math:`Q(g_i)`, DIANA-NASTYA
:math:`Q(g_i - h_i)`. Here clients send updates, :math:`-\gamma n g_i`, which is the same since the
compressors scale with their argument, and the server's step size is :math:`\eta / (\gamma n)`.

The paper's finding: plain compression loses what reshuffling gains over sampling with replacement,
and DIANA restores it. The problem has ten clients with eight quadratic losses each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.stats import gmean

from fedshuffle._arrays import count
from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, publish
from fedshuffle.experiments.toy_problems import equal, squared_distances
from fedshuffle.training.rounds import Run
from fedshuffle.transforms import channel

SEEDS = (123, 124, 125)
ETA = 0.1
"""The step size of the server, of a mean gradient."""
LOCAL = 1e-3
"""The length of a local epoch, gamma n: small, so that the drift of clients is below the noise."""

METHODS = {"with replacement": "fedavg", "reshuffled": "nastya"}
"""On clients of one size the methods differ in the order of the examples only."""
PANELS = {
    "randk": ("none", "randk:0.25", "randk:0.25+diana"),
    "qsgd": ("none", "qsgd:2", "qsgd:2+diana"),
    "fine": ("none", "qsgd:8", "qsgd:8+diana"),
    "topk": ("none", "topk:0.25", "topk:0.25+ef", "topk:0.25+ef21"),
}
TITLES = {
    "randk": "A quarter of the coordinates at random",
    "qsgd": "Two bits per coordinate",
    "fine": "Eight bits per coordinate",
    "topk": "The largest quarter of the coordinates",
}
_COLOURS = {
    "none": "#000000",
    "": "#D55E00",
    "ef": "#CC79A7",
    "ef21": "#009E73",
    "diana": "#0072B2",
}

Results = dict[str, dict[str, dict[str, Any]]]
"""``{panel: {"channel, order": {"mean": [...], "std": [...]}}}`` with one value per round."""


def run(order: str, text: str, seed: int) -> Run:
    """Training with examples in some order, through a channel."""
    sent = channel(text)
    federation = equal().problem.federation
    step_size = LOCAL / int(federation.sizes.max())
    return Run(
        federation,
        METHODS[order],
        step_size=step_size,
        server_step_size=ETA / LOCAL,
        seed=seed,
        transforms=() if sent is None else (sent,),
    )


def compute(rounds: int, progress: bool = False) -> Results:
    """``|x - x*|^2`` by panel, curve and round: the mean and the deviation over the seeds."""
    curves = dict.fromkeys(
        (order, text) for texts in PANELS.values() for text in texts for order in METHODS
    )
    problem = equal()
    runs = [run(order, text, seed) for order, text in curves for seed in SEEDS]
    optimum = torch.from_numpy(problem.constants.x_star)
    table = squared_distances(problem.problem, runs, rounds, optimum, progress)
    found = {
        curve: {"mean": rows.mean(axis=0).tolist(), "std": rows.std(axis=0).tolist()}
        for curve, rows in zip(curves, table.reshape(len(curves), len(SEEDS), rounds), strict=True)
    }
    return {
        panel: {label(o, text): found[o, text] for text in texts for o in METHODS}
        for panel, texts in PANELS.items()
    }


def label(order: str, text: str) -> str:
    """The name of a curve.

    >>> label("reshuffled", "qsgd:2+diana")
    'qsgd:2+diana, reshuffled'
    """
    return f"{text}, {order}"


# What the papers say ------------------------------------------------------------------------------

FAR, NEAR = 10.0, 2.0
READING = (
    "A curve is the mean over the seeds of the squared distance to the optimum. It *ends* at its"
    " geometric mean over the last tenth of the rounds. *Far* is a factor of at least"
    f" {FAR:g}, and *the same level* one of less than {NEAR:g}."
)


class Panel:
    """Where the curves of a panel end, by channel: at their geometric mean over the last tenth."""

    def __init__(self, name: str, curves: Mapping[str, Mapping[str, Any]]) -> None:
        self.name = name
        self.drawn, self.shuffled = (
            {text: _end(curves[label(order, text)]["mean"]) for text in PANELS[name]}
            for order in METHODS
        )

    def claim(self, text: str, seen: bool, *channels: str) -> Claim:
        """With the ends of some channels as evidence."""
        shown = (f"{c} {self.drawn[c]:.2g} and {self.shuffled[c]:.2g}" for c in channels)
        evidence = f"Ends with replacement and reshuffled: {', '.join(shown)}."
        return Claim(self.name, text, seen, evidence)


def claims(results: Results) -> list[Claim]:
    """The findings, checked against the curves."""
    panel = {name: Panel(name, results[name]) for name in PANELS}
    return [
        *_about_diana(panel["randk"]),
        *_about_diana(panel["qsgd"]),
        *_about_diana(panel["fine"]),
        *_about_error_feedback(panel["topk"]),
    ]


def _about_diana(panel: Panel) -> list[Claim]:
    none, plain, diana = PANELS[panel.name]
    drawn, shuffled = panel.drawn, panel.shuffled
    lost = _near(shuffled[plain], drawn[plain]) and _far_below(shuffled[none], shuffled[plain])
    return [
        panel.claim(
            "Without compression, reshuffling ends far below sampling with replacement.",
            _far_below(shuffled[none], drawn[none]),
            none,
        ),
        panel.claim(
            "Q-NASTYA loses what reshuffling gains: it ends at the same level with replacement.",
            lost,
            none,
            plain,
        ),
        panel.claim(
            "DIANA-NASTYA restores it: it ends far below sampling with replacement.",
            _far_below(shuffled[diana], drawn[diana]),
            plain,
            diana,
        ),
        panel.claim(
            "DIANA-NASTYA ends at the level without compression.",
            _near(shuffled[diana], shuffled[none]),
            none,
            diana,
        ),
    ]


def _about_error_feedback(panel: Panel) -> list[Claim]:
    none, plain, ef, ef21 = PANELS[panel.name]
    shuffled = panel.shuffled
    return [
        panel.claim(
            "Top-k without memory ends far from the optimum, reshuffled or not.",
            _far_below(panel.drawn[none], min(shuffled[plain], panel.drawn[plain])),
            none,
            plain,
        ),
        panel.claim(
            "Error feedback ends far below top-k without memory.",
            _far_below(shuffled[ef], shuffled[plain]),
            plain,
            ef,
        ),
        panel.claim(
            "EF21 ends at the level without compression.",
            _near(shuffled[ef21], shuffled[none]),
            none,
            ef21,
        ),
    ]


def _end(mean: Sequence[float]) -> float:
    tiny = np.finfo(np.float64).tiny  # an exact zero has no logarithm
    return float(gmean(np.maximum(mean[-max(1, len(mean) // 10) :], tiny)))


def _far_below(a: float, b: float) -> bool:
    return FAR * a <= b


def _near(a: float, b: float) -> bool:
    return max(a, b) < NEAR * min(a, b)


def reproduce(out: Path, rounds: int = 400, progress: bool = True) -> list[Claim]:
    """Train through every channel; write ``compression``, ``results.json`` and ``claims.md``."""
    count(rounds, "rounds")
    out = results_folder(out)
    results = compute(rounds, progress)
    found = claims(results)
    sheets = {"compression": (list(PANELS), (1, len(PANELS)), (19, 5.2))}
    seeds = ", ".join(map(str, SEEDS))
    reading = f" in {rounds} rounds with seeds {seeds}.\n\n{READING}"
    publish(out, results, _draw, sheets, found, "Compression and reshuffling", reading, progress)
    return found


def _draw(axes: Axes, panel: str, curves: dict[str, dict[str, Any]]) -> None:
    for curve, of in curves.items():
        text, order = curve.split(", ")
        memory = text if text == "none" else text.partition("+")[2]
        shuffled = order == "reshuffled"
        style: dict[str, Any] = {"color": _COLOURS[memory], "lw": 1.6}
        style |= {"ls": "-", "label": text} if shuffled else {"ls": ":", "label": f"_{text}"}
        rounds = np.arange(1, len(of["mean"]) + 1)
        axes.plot(rounds, of["mean"], **style)
    axes.plot([], [], ":", color="#777777", lw=1.6, label="with replacement")
    axes.set(yscale="log", xlabel="round", title=TITLES[panel])
    axes.set(ylabel=r"$\|x^r - x^\star\|^2$", xlim=(0, rounds[-1]))
    axes.minorticks_off()
