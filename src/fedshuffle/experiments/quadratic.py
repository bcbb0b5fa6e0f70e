r"""The paper's toy figures: :math:`|x^r - x^*|^2` over the rounds, and what the text says of them.

The problem is :math:`f_{ij}(x) = \frac12 |x - e_j|^2`: clients own 1, 2 and 3 of the canonical
basis vectors of :math:`R^6` (8, 1 and 1 of :math:`R^{10}` for importance sampling), every client
runs one epoch with batch size 1 and the start is 0. Panels ``full``, ``momentum``, ``sum_one`` and
``importance`` are the paper's first figure, ``hybrid`` is the one of its appendix. Curves are the
mean over three seeds, bands one standard deviation of these three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, count
from fedshuffle._terminal import Console
from fedshuffle.auditing import Audit, audit, mass
from fedshuffle.engines import LanesEngine, Problem
from fedshuffle.experiments import results_folder
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, MissLast
from fedshuffle.methods import MVR, Method
from fedshuffle.report.look import label
from fedshuffle.rounds import Run, simulate

SEEDS = (123, 124, 125)

Results = dict[str, dict[str, dict[str, list[float]]]]
"""``{panel: {method: {"mean": [...], "std": [...]}}}`` with one value a round."""


# The panels ----------------------------------------------------------------------------------


def federation(sizes: Sequence[int]) -> Federation:
    """Clients of these sizes, who share the canonical basis among them."""
    return Federation.from_arrays(torch.eye(sum(sizes), dtype=torch.float64), sizes=sizes)


@final
@dataclass(frozen=True)
class Setting:
    """What one curve shows. ``eta`` is the paper's eta_l: a client's steps add up to it."""

    method: Method
    eta: float
    sampling: str = "full"
    unfinished: bool = False
    sizes: tuple[int, ...] = (1, 2, 3)

    @property
    def federation(self) -> Federation:
        """The clients with their basis vectors."""
        return federation(self.sizes)

    @property
    def work(self) -> LocalWork:
        """One epoch, one example a step."""
        return LocalWork(interruption=MissLast(1) if self.unfinished else None)

    @property
    def step_size(self) -> float:
        """The step of a client with the most steps: eta divided by that number."""
        workload = self.method.local_work(self.work).on(np.array(self.sizes))
        everyone = np.arange(len(self.sizes))
        return self.eta / int(workload.plan(everyone, seed=0, round=0).planned.max())

    def run(self, seed: int) -> Run:
        """The setting with a seed, ready to be simulated."""
        return Run(
            self.federation, self.method, self.sampling, self.work, self.step_size, seed=seed
        )

    def audit(self) -> Audit:
        """Which objective the setting really minimises."""
        return audit(self.federation, self.method, self.sampling, self.work)

    def bias(self) -> float:
        """``|x^ - x*|^2``, how far the audit's optimum lies from the one that was meant.

        A client's own optimum is the mean of its basis vectors: they are orthogonal, with squared
        length ``1 / |D_i|``.
        """
        found = self.audit()
        gap = found.effective_weights - found.objective_weights
        return float((gap**2 / np.array(self.sizes)).sum())

    def pace(self) -> float:
        """How far a round of full participation moves along the gradient."""
        cohort = self.run(seed=0).cohort(round=0)
        return self.step_size * float(mass(self.method, cohort).sum())


_BASELINES = (
    "fedavg",
    "fedavg-rr",
    "fedavg-min",
    "fedavg-mean",
    "fednova",
    "fednova-rr",
    "fedshuffle",
)


def panels() -> dict[str, dict[str, Setting]]:
    """Every curve of every panel, with the step sizes of the paper's authors."""
    shuffle = methods.get("fedshuffle")
    uneven = (8, 1, 1)
    return {
        "full": {name: Setting(methods.get(name), 1 / 80) for name in _BASELINES},
        "momentum": {
            name: Setting(methods.get(name).with_momentum(MVR(0.1)), 1 / 80) for name in _BASELINES
        },
        "sum_one": {
            name: Setting(methods.get(name), 1 / 160, "uniform:2")
            for name in ("fedshuffle-so", "fedshuffle")
        },
        "importance": {
            "fedshuffle-uniform": Setting(shuffle, 1 / 500, "uniform:1", sizes=uneven),
            "fedshuffle-importance": Setting(shuffle, 1 / 300, "one", sizes=uneven),
        },
        "hybrid": {
            name: Setting(methods.get(name), 1 / 80, unfinished=True)
            for name in ("fednova-rr", "fedshuffle", "fedshuffle-gen")
        },
    }


# The simulation ------------------------------------------------------------------------------


class _Point(nn.Module):
    """A model that is nothing but a point, at the origin to begin with."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x


def _half_squared_distance(model: nn.Module, points: Tensor) -> Tensor:
    distances: Tensor = (model() - points).square()
    return distances.sum() / (2 * len(points))


def problem(sizes: Sequence[int]) -> Problem:
    """The toy problem for clients of these sizes."""
    return Problem(_Point(sum(sizes)), _half_squared_distance, federation(sizes))


def compute(rounds: int, progress: bool = False) -> Results:
    """The curves of all panels; what shares a problem runs in lockstep."""
    chosen = panels()
    results: Results = {panel: {} for panel in chosen}
    everything = [(panel, name, s) for panel, row in chosen.items() for name, s in row.items()]
    for sizes in dict.fromkeys(setting.sizes for _, _, setting in everything):
        same = [entry for entry in everything if entry[2].sizes == sizes]
        walked = track(
            _distances([setting for _, _, setting in same], rounds),
            f"{len(same) * len(SEEDS)} runs in R^{sum(sizes)}",
            total=rounds,
            disable=not progress,
        )
        table = np.stack(list(walked), axis=-1)
        for (panel, name, _), curves in zip(same, table, strict=True):
            results[panel][name] = {
                "mean": curves.mean(axis=0).tolist(),
                "std": curves.std(axis=0).tolist(),
            }
    return results


def _distances(settings: Sequence[Setting], rounds: int) -> Iterator[FloatArray]:
    """``|x - x*|^2`` after each round, with a row per setting and a column per seed."""
    engine = LanesEngine(problem(settings[0].sizes))
    runs = [setting.run(seed) for setting in settings for seed in SEEDS]
    optimum = 1 / sum(settings[0].sizes)
    for states in simulate(engine, runs, rounds):
        gaps = torch.stack([state.x for state in states]) - optimum
        yield gaps.square().sum(1).numpy().reshape(len(settings), len(SEEDS))


# The claims of the text ----------------------------------------------------------------------

CLEARLY = 2.0
"""One number is clearly below another if so many times the one does not exceed the other."""
NEAR = 1.5
"""Two numbers are near each other if neither is more than so many times the other."""
HAIR = 1.05
"""Curves closer than this factor are not told apart."""


@final
@dataclass(frozen=True)
class Claim:
    """A sentence of the paper about a panel, whether it was seen, and by which numbers."""

    panel: str
    text: str
    seen: bool
    evidence: str


@final
class Panel:
    """The curves of one panel, and the few things that are asked of them."""

    def __init__(self, name: str, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        self.name = name
        self.settings = panels()[name]
        # An exact zero has no logarithm; the smallest float stands for it.
        floor = np.finfo(np.float64).tiny
        self.mean = {
            curve: np.maximum(np.asarray(c["mean"], dtype=np.float64), floor)
            for curve, c in curves.items()
        }
        self.rounds = len(next(iter(self.mean.values())))
        self.end = {
            curve: geometric(mean[-_share(mean, 10) :]) for curve, mean in self.mean.items()
        }
        """The geometric mean of each curve over the last tenth of the rounds."""

    def settled(self, curve: str) -> bool:
        """Whether the curve has lost its pace: less than half of the mean in the last quarter."""
        mean = self.mean[curve]
        if len(mean) < 4:
            return False
        quarter = _share(mean, 4)
        third, last = geometric(mean[-2 * quarter : -quarter]), geometric(mean[-quarter:])
        late = np.log(third / last) / 0.25
        overall = np.log(mean[0] / last) / 0.875  # between the start and the last quarter's middle
        return bool(late < 0.5 * overall)

    def reaches(self, curve: str, level: float) -> int | None:
        """The first round after which the curve is at or below the level; None for never."""
        below = np.flatnonzero(self.mean[curve] <= level)
        return int(below[0]) + 1 if len(below) else None

    def ends(self, *curves: str) -> str:
        """Where curves end, in words."""
        return ", ".join(f"{label(curve)} {_number(self.end[curve])}" for curve in curves)

    def claim(self, text: str, seen: bool, evidence: str, *about: str) -> Claim:
        """A claim about some curves; where it is not seen, say which of them still fall."""
        falling = [label(curve) for curve in about if not self.settled(curve)]
        if not seen and falling:
            evidence += f" Still falling after {self.rounds} rounds: {', '.join(falling)}."
        return Claim(self.name, text, bool(seen), evidence)


def geometric(values: FloatArray) -> float:
    """The geometric mean: the mean height on a logarithmic axis."""
    return float(np.exp(np.log(values).mean()))


def claims(results: Results) -> list[Claim]:
    """What the paper's text says of its figures, held against the curves."""
    panel = {name: Panel(name, curves) for name, curves in results.items()}
    return [
        *_full(panel["full"]),
        *_momentum(panel["momentum"], panel["full"]),
        *_sum_one(panel["sum_one"]),
        *_importance(panel["importance"]),
        *_hybrid(panel["hybrid"]),
    ]


def _full(panel: Panel) -> Iterator[Claim]:
    end = panel.end
    yield _wrong_objective(
        panel,
        "FedAvgRR saturates at a higher loss, since it optimises the wrong objective.",
        "fedavg-rr",
        better="fedshuffle",
    )
    consistent = panel.settings["fedavg-min"].audit().consistent
    yield panel.claim(
        "FedAvgMin fixes the objective inconsistency of FedAvg.",
        bool(consistent) and _clearly(end["fedavg-min"], below=end["fedavg"]),
        f"Audit of FedAvgMin: {_verdict(consistent)}. Ends: {panel.ends('fedavg-min', 'fedavg')}.",
        "fedavg-min",
        "fedavg",
    )
    biased, sound = _by_audit(panel)
    others = [curve for curve in sound if curve != "fedavg-min"]
    yield panel.claim(
        "FedAvgMin is still dominated by the other baselines (read as: the consistent ones).",
        all(end[curve] < end["fedavg-min"] for curve in others),
        f"Ends: {panel.ends('fedavg-min')}, against {panel.ends(*others)}. The inconsistent ones:"
        f" {panel.ends(*biased)}.",
        *others,
    )
    yield panel.claim(
        "FedNova performs better than FedAvg.",
        _clearly(end["fednova"], below=end["fedavg"]),
        f"Ends: {panel.ends('fednova', 'fedavg')}.",
        "fednova",
    )
    yield _noise(panel, "fednova", reshuffled="fednova-rr")
    yield panel.claim(
        "The same holds for FedAvgMean: it performs better than FedAvg.",
        _clearly(end["fedavg-mean"], below=end["fedavg"]),
        f"Ends: {panel.ends('fedavg-mean', 'fedavg')}.",
        "fedavg-mean",
    )
    yield _noise(panel, "fedavg-mean", reshuffled="fedshuffle")
    yield panel.claim(
        "Reshuffling decreases the noise: FedNovaRR improves upon FedNova.",
        _clearly(end["fednova-rr"], below=end["fednova"]),
        f"Ends: {panel.ends('fednova-rr', 'fednova')}.",
        "fednova",
    )
    yield _best(panel, "FedShuffle dominates all the baselines.")


def _momentum(panel: Panel, plain: Panel) -> Iterator[Claim]:
    biased, sound = _by_audit(plain)
    biases = [
        f"{label(c)} {_number(plain.settings[c].bias())} to {_number(panel.settings[c].bias())}"
        for c in biased
    ]
    yield panel.claim(
        "Momentum helps FedAvg to reduce its objective inconsistency.",
        all(_clearly(panel.end[c], below=plain.end[c]) for c in biased),
        f"Ends without and with: {_change(plain, panel, biased)}. Distance of the audit's optimum:"
        f" {', '.join(biases)}.",
        *biased,
    )
    yield panel.claim(
        "For the other methods momentum reduces the variance and gives higher precision.",
        all(_clearly(panel.end[c], below=plain.end[c]) for c in sound),
        f"Ends without and with: {_change(plain, panel, sound)}.",
        *sound,
    )
    yield _best(panel, "FedShuffle still performs the best.")


def _sum_one(panel: Panel) -> Iterator[Claim]:
    yield _wrong_objective(
        panel,
        "FedShuffle with sum one converges to a worse solution, from the biased aggregation.",
        "fedshuffle-so",
        better="fedshuffle",
    )


def _importance(panel: Panel) -> Iterator[Claim]:
    uniform, by_size = "fedshuffle-uniform", "fedshuffle-importance"
    variance = {}
    for curve, setting in panel.settings.items():
        sampling = setting.run(seed=0).sampling
        variance[curve] = float((sampling.s * setting.federation.weights / sampling.p).max())
    ratio = panel.end[uniform] / panel.end[by_size]
    yield panel.claim(
        "Importance sampling leads to a substantial improvement.",
        _clearly(panel.end[by_size], below=panel.end[uniform]),
        f"Ends: importance {_number(panel.end[by_size])}, uniform {_number(panel.end[uniform])},"
        f" {_times(ratio)} times as high, each at the step size of the paper. The theory's"
        f" M = max s w / p falls from {variance[uniform]:.2g} to {variance[by_size]:.2g}.",
        uniform,
        by_size,
    )


def _hybrid(panel: Panel) -> Iterator[Claim]:
    nova, hybrid = "fednova-rr", "fedshuffle-gen"
    yield _wrong_objective(
        panel,
        "FedShuffle suffers from objective inconsistency when clients do not finish.",
        "fedshuffle",
        better=hybrid,
    )
    consistent = panel.settings[hybrid].audit().consistent
    yield panel.claim(
        "FedShuffleGen fixes the inconsistency.",
        bool(consistent) and _clearly(panel.end[hybrid], below=panel.end["fedshuffle"]),
        f"Audit: {_verdict(consistent)}. Ends: {panel.ends(hybrid, 'fedshuffle')}.",
        hybrid,
    )
    level = 0.01 / sum(panel.settings[hybrid].sizes)  # the start is 1/d away
    sooner, later = panel.reaches(hybrid, level), panel.reaches(nova, level)
    yield panel.claim(
        "FedShuffleGen is superior to FedNovaRR: it gets there sooner.",
        sooner is not None and (later is None or sooner < later),
        f"Rounds to 1% of the start's distance: FedShuffleGen {sooner or 'never'}, FedNovaRR"
        f" {later or 'never'}.",
        hybrid,
    )
    lower = panel.end[hybrid] < panel.end[nova]
    evidence = f"Ends: {panel.ends(hybrid, nova)}."
    faster = panel.settings[hybrid].pace() / panel.settings[nova].pace()
    if not lower and faster > 1 and panel.settled(hybrid):
        evidence += (
            f" At the same eta_l a round of FedShuffleGen moves {_times(faster)} times as far as"
            " one of FedNovaRR: it is that much faster, and the noise of the example that a client"
            " misses weighs that much more at the end."
        )
    yield panel.claim(
        "FedShuffleGen is superior to FedNovaRR: it ends lower.",
        lower and panel.settled(hybrid) and panel.settled(nova),
        evidence,
        hybrid,
        nova,
    )


def _wrong_objective(panel: Panel, text: str, curve: str, better: str) -> Claim:
    """The curve settles where the audit says, above another that means the right objective."""
    bias = panel.settings[curve].bias()
    there = panel.settled(curve) and _near(panel.end[curve], bias)
    return panel.claim(
        text,
        there and _clearly(panel.end[better], below=panel.end[curve]),
        f"Ends: {panel.ends(curve)}, and the audit puts its optimum at a distance of"
        f" {_number(bias)}; {panel.ends(better)}.",
        curve,
        better,
    )


def _noise(panel: Panel, curve: str, reshuffled: str) -> Claim:
    """The curve first goes with its noiseless counterpart, and later settles above it."""
    early = _share(panel.mean[curve], 10)
    apart = panel.mean[curve][:early] / panel.mean[reshuffled][:early]
    together = float(np.maximum(apart, 1 / apart).max())
    ratio = panel.end[curve] / panel.end[reshuffled]
    return panel.claim(
        f"{label(curve)} is later dominated by the noise of stochastic gradients.",
        together < 1.1 and panel.settled(curve) and ratio >= CLEARLY,
        f"Within {together - 1:.1%} of {label(reshuffled)} in the first tenth of the rounds,"
        f" {_times(ratio)} times as high in the last: {panel.ends(curve, reshuffled)}.",
        curve,
    )


def _best(panel: Panel, text: str) -> Claim:
    """FedShuffle ends lowest, and is nowhere more than a hair above another."""
    others = [curve for curve in panel.mean if curve != "fedshuffle"]
    lowest = np.min([panel.mean[curve] for curve in others], axis=0)
    ratio = panel.mean["fedshuffle"] / lowest
    runner_up = min(others, key=lambda curve: panel.end[curve])
    evidence = (
        f"Ends: {panel.ends('fedshuffle')}, the best of the others {panel.ends(runner_up)}. Below"
        f" all others in {(ratio < 1).mean():.0%} of the rounds"
    )
    if ratio.max() > 1:
        evidence += f", elsewhere at most {ratio.max() - 1:.1%} above the best of them"
    return panel.claim(
        text,
        panel.end["fedshuffle"] < panel.end[runner_up] and bool(ratio.max() <= HAIR),
        f"{evidence}.",
        "fedshuffle",
        runner_up,
    )


def _by_audit(panel: Panel) -> tuple[list[str], list[str]]:
    """The curves whose audit finds the wrong objective, and those with the right one."""
    right = {curve: setting.audit().consistent for curve, setting in panel.settings.items()}
    return [c for c in right if not right[c]], [c for c in right if right[c]]


def _change(before: Panel, after: Panel, curves: Sequence[str]) -> str:
    return ", ".join(
        f"{label(c)} {_number(before.end[c])} to {_number(after.end[c])}" for c in curves
    )


def _clearly(value: float, below: float) -> bool:
    return value * CLEARLY <= below


def _near(value: float, other: float) -> bool:
    return other / NEAR <= value <= other * NEAR


def _share(values: FloatArray, parts: int) -> int:
    """A part of the rounds, at least one."""
    return max(1, len(values) // parts)


def _verdict(consistent: bool | None) -> str:
    return {True: "consistent", False: "not consistent", None: "unknown"}[consistent]


def _number(value: float) -> str:
    return f"{value:.2g}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 100 else f"{ratio:.0f}"


# The command ---------------------------------------------------------------------------------


def reproduce(out: Path, rounds: int = 1000, progress: bool = True) -> list[Claim]:
    """Simulate all panels and leave ``figure1``, ``hybrid``, ``results.json`` and ``claims.md``."""
    count(rounds, "rounds")
    out = results_folder(out)
    # Drawing needs matplotlib, which nothing else here does.
    from fedshuffle.report import quadratic as report

    results = compute(rounds, progress)
    found = claims(results)
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    (out / "claims.md").write_text(report.markdown(found, rounds), encoding="utf-8")
    report.figure1(results, out / "figure1")
    report.hybrid(results, out / "hybrid")
    if progress:
        console = Console()
        console.print(report.table(found))
        console.print(f"\nFigures, curves and the evidence for each claim are in {out}.")
    return found
