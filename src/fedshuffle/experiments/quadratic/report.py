"""What the paper says about its toy figures, checked against the curves; and the figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import gmean

from fedshuffle._arrays import FloatArray, count
from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, draw_panels, publish
from fedshuffle.experiments.quadratic import experiment
from fedshuffle.experiments.quadratic.experiment import DISTANCE, SEEDS, TITLES, Results, label

CLEARLY = 2.0
"""One number is clearly below another if this many times the one does not exceed the other."""
NEAR = 1.5
"""Two numbers are near each other if neither is more than this many times the other."""
HAIR = 1.05
"""Curves closer than this factor cannot be told apart."""

READING = (
    "A curve is the mean over the seeds of the squared distance to the optimum. It *ends* at"
    " its geometric mean over the last tenth of the rounds (for momentum, that without it comes"
    " first); in brackets stands the distance of the optimum that the audit finds, if it is"
    f" another. *Better* and *worse* mean a factor of at least {CLEARLY:g}; a curve that saturates"
    f" at a bias settles within a factor of {NEAR:g} of the audit's distance; a curve has settled"
    " if in the last quarter of the rounds it falls at less than half of its mean pace. To"
    " *dominate* is to end lowest and never to lie above another by more than a factor of"
    f" {HAIR:g}."
)
"""How the words of the claims are meant."""


class Panel:
    """The curves of one panel, and what claims ask about them."""

    def __init__(self, name: str, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        self.name, self.scenarios = name, experiment.panels()[name]
        self.plain: Panel | None = None
        """The same methods without momentum."""
        self.consistent = {c: bool(s.audit().consistent) for c, s in self.scenarios.items()}
        # An exact zero has no logarithm; the smallest float stands for it.
        tiny = np.finfo(np.float64).tiny
        self.mean = {c: np.maximum(np.array(curves[c]["mean"], float), tiny) for c in curves}
        self.end = {c: float(gmean(mean[-_part(mean, 10) :])) for c, mean in self.mean.items()}
        """The geometric mean of each curve over the last tenth of the rounds."""

    def settled(self, curve: str) -> bool:
        """Whether the curve fell in the last quarter at less than half of its mean pace."""
        mean = self.mean[curve]
        if len(mean) < 4:
            return False
        quarter = _part(mean, 4)
        third, last = gmean(mean[-2 * quarter : -quarter]), gmean(mean[-quarter:])
        late = np.log(third / last) / 0.25
        overall = np.log(mean[0] / last) / 0.875  # between the start and the last quarter's middle
        return bool(late < 0.5 * overall)

    def saturates(self, curve: str) -> bool:
        """Whether the curve settles near the optimum that the audit finds for it."""
        bias = self.scenarios[curve].bias()
        return self.settled(curve) and bias / NEAR <= self.end[curve] <= bias * NEAR

    def below(self, curve: str, other: str) -> bool:
        """Whether a curve ends clearly below another."""
        return self.end[curve] * CLEARLY <= self.end[other]

    def parts_from(self, curve: str, other: str) -> bool:
        """Whether a curve first goes with another, and later settles clearly above it."""
        early = _part(self.mean[curve], 10)
        apart = self.mean[curve][:early] / self.mean[other][:early]
        together = bool((np.maximum(apart, 1 / apart) < 1.1).all())
        return together and self.settled(curve) and self.below(other, curve)

    def dominates(self, curve: str) -> bool:
        """Whether a curve ends lowest, and is nowhere more than a hair above another."""
        lowest = np.min([mean for other, mean in self.mean.items() if other != curve], axis=0)
        first = min(self.end, key=lambda other: self.end[other]) == curve
        return first and bool((self.mean[curve] <= HAIR * lowest).all())

    def round_at(self, curve: str) -> float:
        """The first round with a hundredth of the start's distance, 1/d; infinite for none."""
        below = np.flatnonzero(self.mean[curve] <= 0.01 / sum(self.scenarios[curve].sizes))
        return float(below[0]) + 1 if len(below) else math.inf

    def claim(self, text: str, seen: bool, note: str = "") -> Claim:
        """With the ends of the curves that the text names; of all, if it names fewer than two."""
        names = {label(curve): curve for curve in self.mean}
        about = [names[word] for word in re.findall(r"\w+", text) if word in names]
        curves = about if len(set(about)) > 1 else list(self.mean)
        evidence = []
        for c in curves:
            bias = "" if self.consistent[c] else f" [{self.scenarios[c].bias():.2g}]"
            falling = "" if seen or self.settled(c) else " (still falling)"
            before = f"{self.plain.end[c]:.2g} to " if self.plain else ""
            evidence.append(f"{label(c)} {before}{self.end[c]:.2g}{bias}{falling}")
        return Claim(self.name, text, seen, f"Ends: {', '.join(evidence)}.{note}")


def _part(values: FloatArray, parts: int) -> int:
    return max(1, len(values) // parts)


def claims(results: Results) -> list[Claim]:
    """What the paper's text says about its figures, checked against the curves."""
    panel = {name: Panel(name, results[name]) for name in TITLES}
    full, momentum, sum_one, importance, hybrid = panel.values()
    momentum.plain = full
    biased = [curve for curve, consistent in full.consistent.items() if not consistent]
    others = [curve for curve, consistent in full.consistent.items() if consistent]
    improved = {c for c in full.end if momentum.end[c] * CLEARLY <= full.end[c]}
    gen, nova = "fedshuffle-gen", "fednova-rr"
    said = {
        "full": {
            "FedAvgRR saturates at a higher loss, since it optimises the wrong objective.": (
                full.saturates("fedavg-rr") and full.below("fedshuffle", "fedavg-rr")
            ),
            "FedAvgMin fixes the objective inconsistency of FedAvg.": (
                full.consistent["fedavg-min"] and full.below("fedavg-min", "fedavg")
            ),
            "FedAvgMin is still dominated by the other baselines (read as: the consistent ones).": (
                max(others, key=lambda curve: full.end[curve]) == "fedavg-min"
            ),
            "FedNova performs better than FedAvg.": full.below("fednova", "fedavg"),
            "FedNova is later dominated by the noise of stochastic gradients.": (
                full.parts_from("fednova", "fednova-rr")
            ),
            "The same holds for FedAvgMean: it performs better than FedAvg.": (
                full.below("fedavg-mean", "fedavg")
            ),
            "FedAvgMean is later dominated by the noise of stochastic gradients.": (
                full.parts_from("fedavg-mean", "fedshuffle")
            ),
            "Reshuffling decreases the noise: FedNovaRR improves upon FedNova.": (
                full.below("fednova-rr", "fednova")
            ),
            "FedShuffle dominates all the baselines.": full.dominates("fedshuffle"),
        },
        "momentum": {
            "Momentum helps FedAvg to reduce its objective inconsistency.": improved >= {*biased},
            "For the other methods momentum reduces the variance and gives higher precision.": (
                improved >= {*others}
            ),
            "FedShuffle still performs the best.": momentum.dominates("fedshuffle"),
        },
        "sum_one": {
            "FedShuffle with sum one converges to a worse solution, from the biased aggregation.": (
                sum_one.saturates("fedshuffle-so") and sum_one.below("fedshuffle", "fedshuffle-so")
            )
        },
        "importance": {
            "Importance sampling leads to a substantial improvement.": (
                importance.below("fedshuffle-importance", "fedshuffle-uniform")
            )
        },
        "hybrid": {
            "FedShuffle suffers from objective inconsistency when clients do not finish.": (
                hybrid.saturates("fedshuffle") and hybrid.below(gen, "fedshuffle")
            ),
            "FedShuffleGen fixes the inconsistency.": (
                hybrid.consistent[gen] and hybrid.below(gen, "fedshuffle")
            ),
        },
    }
    found = [panel[name].claim(text, seen) for name in said for text, seen in said[name].items()]
    sooner, later = hybrid.round_at(gen), hybrid.round_at(nova)
    lower = hybrid.end[gen] < hybrid.end[nova] and hybrid.settled(gen) and hybrid.settled(nova)
    faster = hybrid.scenarios[gen].pace() / hybrid.scenarios[nova].pace()
    return [
        *found,
        hybrid.claim(
            "FedShuffleGen is superior to FedNovaRR: it gets there sooner.",
            sooner < later,
            f" Rounds to 1% of the start's distance: {sooner:g} and {later:g}.",
        ),
        hybrid.claim(
            "FedShuffleGen is superior to FedNovaRR: it ends lower.",
            lower,
            f" At the same eta_l a round of FedShuffleGen moves {faster:.3g} times as far: it"
            " is faster, and has more of the noise of the example that a client misses.",
        ),
    ]


def reproduce(out: Path, rounds: int = 1000, progress: bool = True) -> list[Claim]:
    """Simulate all panels; write ``figure1``, ``hybrid``, ``results.json`` and ``claims.md``."""
    count(rounds, "rounds")
    out = results_folder(out)
    results = experiment.compute(rounds, progress)
    found = claims(results)
    *first, appendix = results
    draw = partial(_draw, results)
    figures = {
        "figure1": draw_panels(first, (1, 4), (16, 4.8), draw),
        "hybrid": draw_panels([appendix], (1, 1), (5, 4.4), draw),
    }
    title = "What the paper says about its toy figures"
    seeds = ", ".join(map(str, SEEDS))
    reading = f" in {rounds} rounds with seeds {seeds}.\n\n{READING}"
    publish(out, results, figures, found, title, reading, progress)
    return found


def _draw(results: Results, axes: Axes, panel: str) -> None:
    curves = results[panel]
    for method, curve in curves.items():
        mean, std = np.array(curve["mean"]), np.array(curve["std"])
        rounds = np.arange(1, len(mean) + 1)
        # Dashes let the curve show that a reshuffled method covers.
        dashes = "--" if method.endswith("-rr") else "-"
        paint = experiment.colour(method)
        front = 3 if method.startswith("fedshuffle") else 2
        axes.plot(rounds, mean, dashes, color=paint, lw=1.6, label=label(method), zorder=front)
        # Where the deviation reaches the mean, a logarithmic axis would show an endless fall.
        lower = np.maximum(mean - std, mean / 10)
        band = axes.fill_between(rounds, lower, mean + std, color=paint, alpha=0.25, lw=0)
        band.set_zorder(front - 1)
    means = np.array([curve["mean"] for curve in curves.values()])
    bottom, top = float(means.min()) / 3, float(means.max()) * 1.5
    axes.set(yscale="log", ylim=(bottom, top), xlim=(0, means.shape[1]), xlabel="round")
    axes.set(title=TITLES[panel], ylabel=DISTANCE)
    if top / bottom > 100:  # the decades alone are enough
        axes.minorticks_off()
