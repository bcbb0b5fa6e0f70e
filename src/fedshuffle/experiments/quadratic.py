r"""The paper's toy figures: :math:`|x^r - x^*|^2` over the rounds, and what the text says of them.

The problem is :math:`f_{ij}(x) = \frac12 |x - e_j|^2`: clients hold 1, 2 and 3 of the canonical
basis vectors (8, 1 and 1 for importance sampling), and run one epoch with batch size 1, from 0.
Curves are means over three seeds, bands one standard deviation of these.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from scipy.stats import gmean

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, count
from fedshuffle._files import results_folder
from fedshuffle.auditing import Audit, audit, contributions
from fedshuffle.experiments.claims import Claim, publish
from fedshuffle.experiments.toy_problems import squared_distances, toy
from fedshuffle.local_work import LocalWork, MissLast
from fedshuffle.methods import MVR, Method
from fedshuffle.training.rounds import Run

SEEDS = (123, 124, 125)
Key = TypeVar("Key")

Results = dict[str, dict[str, dict[str, list[float]]]]
"""``{panel: {method: {"mean": [...], "std": [...]}}}`` with one value per round."""

EPOCH, UNFINISHED = LocalWork(), LocalWork(interruption=MissLast(1))


@dataclass(frozen=True)
class Scenario:
    """What one curve shows. ``eta`` is the paper's eta_l: the steps of a client sum to it."""

    method: Method
    eta: float
    sampling: str = "full"
    work: LocalWork = EPOCH
    sizes: tuple[int, ...] = (1, 2, 3)

    def run(self, seed: int) -> Run:
        """With a seed; the step size is eta over the largest number of steps of a client."""
        federation = toy(self.sizes).problem.federation
        workload = self.method.local_work(self.work).on(federation.sizes)
        steps = workload.plan(np.arange(len(self.sizes)), seed=0, round=0).planned.max()
        step_size = self.eta / int(steps)
        return Run(federation, self.method, self.sampling, self.work, step_size, seed=seed)

    def audit(self) -> Audit:
        """The objective that the scenario really minimises."""
        return audit(self.run(0).federation, self.method, self.sampling, self.work)

    def bias(self) -> float:
        """``|x^ - x*|^2`` between the optimum of the effective objective and the intended one.

        A client's own optimum is the mean of its basis vectors: they are orthogonal, with squared
        length ``1 / |D_i|``.
        """
        found = self.audit()
        gap = found.effective_weights - found.objective_weights
        return float((gap**2 / np.array(self.sizes)).sum())

    def pace(self) -> float:
        """How far a round of full participation moves along the gradient."""
        run = self.run(seed=0)
        return float(run.step_size * contributions(self.method, run.cohort(round=0)).sum())


DISTANCE = r"$\|x^r - x^\star\|^2$"
TITLES = {
    "full": "Full participation",
    "momentum": "Full participation, momentum 0.9",
    "sum_one": "Two of three clients per round",
    "importance": "One of three clients per round",
    "hybrid": "Clients miss their last step",
}
"""The panels: four in the first figure, the last in the appendix."""

_SAMPLINGS = {
    "fedshuffle-uniform": ("FedShuffle, uniform", "#0072B2"),
    "fedshuffle-importance": ("FedShuffle w/ IS", "#009E73"),
}


def look(curve: str) -> tuple[str, str]:
    """Name and colour of a curve in the figure: those of its sampling, or of its method."""
    return _SAMPLINGS.get(curve) or (methods.label(curve), methods.colour(curve))


def panels() -> dict[str, dict[str, Scenario]]:
    """Every curve of every panel, with the step sizes of the paper's authors."""
    get = methods.get
    averaging = ["fedavg", "fedavg-rr", "fedavg-min", "fedavg-mean", "fednova", "fednova-rr"]
    names, uneven = [*averaging, "fedshuffle"], (8, 1, 1)
    return {
        "full": {name: Scenario(get(name), 1 / 80) for name in names},
        "momentum": {name: Scenario(get(name).with_momentum(MVR(0.1)), 1 / 80) for name in names},
        "sum_one": {
            name: Scenario(get(name), 1 / 160, "uniform:2")
            for name in ("fedshuffle-so", "fedshuffle")
        },
        "importance": {
            "fedshuffle-uniform": Scenario(get("fedshuffle"), 1 / 500, "uniform:1", sizes=uneven),
            "fedshuffle-importance": Scenario(get("fedshuffle"), 1 / 300, "one", sizes=uneven),
        },
        "hybrid": {
            name: Scenario(get(name), 1 / 80, work=UNFINISHED)
            for name in ("fednova-rr", "fedshuffle", "fedshuffle-gen")
        },
    }


def compute(rounds: int, progress: bool = False) -> Results:
    scenarios = {(panel, name): s for panel, row in panels().items() for name, s in row.items()}
    runs = {place: [s.run(seed) for seed in SEEDS] for place, s in scenarios.items()}
    results: Results = {panel: {} for panel, _ in scenarios}
    for (panel, name), curves in distances(runs, rounds, progress).items():
        mean, std = curves.mean(axis=0), curves.std(axis=0)
        results[panel][name] = {"mean": mean.tolist(), "std": std.tolist()}
    return results


def distances(
    runs: Mapping[Key, Sequence[Run]], rounds: int, progress: bool = False
) -> dict[Key, FloatArray]:
    """``|x - x*|^2`` on the toy problem, by run and round; runs on the same clients in lockstep."""
    clients = {key: tuple(mine[0].federation.sizes.tolist()) for key, mine in runs.items()}
    found: dict[Key, FloatArray] = {}
    for sizes in dict.fromkeys(clients.values()):
        same = [key for key in runs if clients[key] == sizes]
        together = [run for key in same for run in runs[key]]
        optimum, problem = 1 / sum(sizes), toy(sizes).problem
        table = squared_distances(problem, together, rounds, optimum, progress)
        found |= dict(zip(same, table.reshape(len(same), -1, rounds), strict=True))
    return found


# What the paper says ------------------------------------------------------------------------------

CLEARLY = 2.0
"""One number is clearly below another if this many times the one does not exceed the other."""
NEAR = 1.5  # two numbers are near each other if neither is more than this many times the other
HAIR = 1.05  # curves closer than this factor cannot be told apart

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
        self.name, self.scenarios = name, panels()[name]
        self.plain: Panel | None = None  # the same methods without momentum
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
        names = {look(curve)[0]: curve for curve in self.mean}
        about = [names[word] for word in re.findall(r"\w+", text) if word in names]
        curves = about if len(set(about)) > 1 else list(self.mean)
        evidence = []
        for c in curves:
            bias = "" if self.consistent[c] else f" [{self.scenarios[c].bias():.2g}]"
            falling = "" if seen or self.settled(c) else " (still falling)"
            before = f"{self.plain.end[c]:.2g} to " if self.plain else ""
            evidence.append(f"{look(c)[0]} {before}{self.end[c]:.2g}{bias}{falling}")
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
    superior = "FedShuffleGen is superior to FedNovaRR: it"
    sooner, later = hybrid.round_at(gen), hybrid.round_at(nova)
    note = f" Rounds to 1% of the start's distance: {sooner:g} and {later:g}."
    found.append(hybrid.claim(f"{superior} gets there sooner.", sooner < later, note))
    lower = hybrid.end[gen] < hybrid.end[nova] and hybrid.settled(gen) and hybrid.settled(nova)
    faster = hybrid.scenarios[gen].pace() / hybrid.scenarios[nova].pace()
    note = (
        f" At the same eta_l a round of FedShuffleGen moves {faster:.3g} times as far: it is"
        " faster, and has more of the noise of the example that a client misses."
    )
    return [*found, hybrid.claim(f"{superior} ends lower.", lower, note)]


def reproduce(out: Path, rounds: int = 1000, progress: bool = True) -> list[Claim]:
    """Simulate all panels; write ``figure1``, ``hybrid``, ``results.json`` and ``claims.md``."""
    count(rounds, "rounds")
    out = results_folder(out)
    results = compute(rounds, progress)
    found = claims(results)
    *first, appendix = results
    sheets = {"figure1": (first, (1, 4), (16, 4.8)), "hybrid": ([appendix], (1, 1), (5, 4.4))}
    title = "What the paper says about its toy figures"
    seeds = ", ".join(map(str, SEEDS))
    reading = f" in {rounds} rounds with seeds {seeds}.\n\n{READING}"
    publish(out, results, _draw, sheets, found, title, reading, progress)
    return found


def _draw(axes: Axes, panel: str, curves: dict[str, dict[str, list[float]]]) -> None:
    for method, curve in curves.items():
        mean, std = np.array(curve["mean"]), np.array(curve["std"])
        rounds = np.arange(1, len(mean) + 1)
        # Dashes let the curve show that a reshuffled method covers.
        dashes = "--" if method.endswith("-rr") else "-"
        label, paint = look(method)
        front = 3 if method.startswith("fedshuffle") else 2
        axes.plot(rounds, mean, dashes, color=paint, lw=1.6, label=label, zorder=front)
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
