"""What the paper's text says about its toy figures, checked against the curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.experiments.claims import Claim
from fedshuffle.experiments.quadratic.experiment import SEEDS, Results, label, panels

CLEARLY = 2.0
"""One number is clearly below another if this many times the one does not exceed the other."""
NEAR = 1.5
"""Two numbers are near each other if neither is more than this many times the other."""
HAIR = 1.05
"""Curves closer than this factor cannot be told apart."""


def reading(claims: Sequence[Claim], rounds: int) -> str:
    """How the words of the claims are meant."""
    return (
        f"{sum(claim.seen for claim in claims)} of {len(claims)} claims were seen in {rounds}"
        f" rounds with seeds {', '.join(map(str, SEEDS))}.\n\n"
        "A curve is the mean over the seeds of the squared distance to the optimum. It *ends* at"
        " its geometric mean over the last tenth of the rounds. *Better* and *worse* mean a factor"
        f" of at least {CLEARLY:g}; a curve that saturates at a bias settles within a factor of"
        f" {NEAR:g} of the distance of the audit's optimum; a curve has settled if in the last"
        " quarter of the rounds it falls at less than half of its mean pace. To *dominate* is"
        f" to end lowest and never to lie above another by more than a factor of {HAIR:g}."
    )


class Panel:
    """The curves of one panel, and the questions that claims ask about them."""

    def __init__(
        self,
        name: str,
        curves: Mapping[str, Mapping[str, Sequence[float]]],
        plain: Panel | None = None,
    ) -> None:
        self.name = name
        self.plain = plain
        """The same curves without momentum."""
        self.scenarios = panels()[name]
        # An exact zero has no logarithm; the smallest float stands for it.
        floor = np.finfo(np.float64).tiny
        self.mean = {c: np.maximum(np.array(curves[c]["mean"], float), floor) for c in curves}
        self.rounds = len(next(iter(self.mean.values())))
        self.end = {c: geometric(mean[-_part(mean, 10) :]) for c, mean in self.mean.items()}
        """The geometric mean of each curve over the last tenth of the rounds."""

    def settled(self, curve: str) -> bool:
        """Whether the curve fell in the last quarter at less than half of its mean pace."""
        mean = self.mean[curve]
        if len(mean) < 4:
            return False
        quarter = _part(mean, 4)
        third, last = geometric(mean[-2 * quarter : -quarter]), geometric(mean[-quarter:])
        late = np.log(third / last) / 0.25
        overall = np.log(mean[0] / last) / 0.875  # between the start and the last quarter's middle
        return bool(late < 0.5 * overall)

    def reaches(self, curve: str, level: float) -> int | None:
        """The first round after which the curve is at or below the level; None for never."""
        below = np.flatnonzero(self.mean[curve] <= level)
        return int(below[0]) + 1 if len(below) else None

    def below(self, curve: str, other: str) -> bool:
        """Whether a curve ends clearly below another."""
        return self.end[curve] * CLEARLY <= self.end[other]

    def ends(self, *curves: str) -> str:
        """Where curves end, in words."""
        return ", ".join(f"{label(curve)} {self.end[curve]:.2g}" for curve in curves)

    def by_audit(self) -> tuple[list[str], list[str]]:
        """The curves whose audit finds the wrong objective, and those with the right one."""
        right = {curve: scenario.audit().consistent for curve, scenario in self.scenarios.items()}
        return [c for c in right if not right[c]], [c for c in right if right[c]]


def geometric(values: FloatArray) -> float:
    """The geometric mean: the mean height on a logarithmic axis."""
    return float(np.exp(np.log(values).mean()))


def _part(values: FloatArray, parts: int) -> int:
    return max(1, len(values) // parts)


def _times(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 100 else f"{ratio:.0f}"


# Checks: each says whether the claim is seen, the evidence, and which curves must have settled ---

Finding = tuple[bool, str, Sequence[str]]


def _wrong_objective(panel: Panel, curve: str, better: str) -> Finding:
    """The curve settles where the audit says, above another with the right objective."""
    bias, end = panel.scenarios[curve].bias(), panel.end[curve]
    there = panel.settled(curve) and bias / NEAR <= end <= bias * NEAR
    evidence = (
        f"Ends: {panel.ends(curve)}, and the audit puts its optimum at a distance of {bias:.2g};"
        f" {panel.ends(better)}."
    )
    return there and panel.below(better, curve), evidence, (curve, better)


def _fixes(panel: Panel, curve: str, biased: str) -> Finding:
    """The audit finds the right objective, and the curve ends below a biased one."""
    consistent = panel.scenarios[curve].audit().consistent
    word = {True: "consistent", False: "not consistent", None: "unknown"}[consistent]
    evidence = f"Audit of {label(curve)}: {word}. Ends: {panel.ends(curve, biased)}."
    return bool(consistent) and panel.below(curve, biased), evidence, (curve, biased)


def _better(panel: Panel, curve: str, other: str) -> Finding:
    return panel.below(curve, other), f"Ends: {panel.ends(curve, other)}.", (curve, other)


def _dominated(panel: Panel, curve: str) -> Finding:
    """All other consistent curves end lower."""
    biased, consistent = panel.by_audit()
    others = [other for other in consistent if other != curve]
    evidence = (
        f"Ends: {panel.ends(curve)}, against {panel.ends(*others)}. The inconsistent ones:"
        f" {panel.ends(*biased)}."
    )
    return all(panel.end[other] < panel.end[curve] for other in others), evidence, others


def _noise(panel: Panel, curve: str, reshuffled: str) -> Finding:
    """The curve first goes with its noiseless counterpart, and later settles above it."""
    early = _part(panel.mean[curve], 10)
    apart = panel.mean[curve][:early] / panel.mean[reshuffled][:early]
    together = float(np.maximum(apart, 1 / apart).max())
    ratio = panel.end[curve] / panel.end[reshuffled]
    evidence = (
        f"Within {together - 1:.1%} of {label(reshuffled)} in the first tenth of the rounds,"
        f" {_times(ratio)} times as high in the last: {panel.ends(curve, reshuffled)}."
    )
    return together < 1.1 and panel.settled(curve) and ratio >= CLEARLY, evidence, (curve,)


def _best(panel: Panel) -> Finding:
    """FedShuffle ends lowest, and is nowhere more than a hair above another."""
    curve = "fedshuffle"
    others = [other for other in panel.mean if other != curve]
    ratio = panel.mean[curve] / np.min([panel.mean[other] for other in others], axis=0)
    runner_up = min(others, key=lambda other: panel.end[other])
    evidence = (
        f"Ends: {panel.ends(curve)}, the best of the others {panel.ends(runner_up)}. Below"
        f" all others in {(ratio < 1).mean():.0%} of the rounds"
    )
    if ratio.max() > 1:
        evidence += f", elsewhere at most {ratio.max() - 1:.1%} above the best of them"
    seen = panel.end[curve] < panel.end[runner_up] and bool(ratio.max() <= HAIR)
    return seen, f"{evidence}.", (curve, runner_up)


def _improves(panel: Panel, consistent: bool) -> Finding:
    """Momentum lowers the end of every consistent (or every biased) curve."""
    plain = panel.plain
    assert plain is not None
    curves = plain.by_audit()[consistent]
    change = [f"{label(c)} {plain.end[c]:.2g} to {panel.end[c]:.2g}" for c in curves]
    evidence = f"Ends without and with: {', '.join(change)}."
    if not consistent:
        both = [(c, plain.scenarios[c].bias(), panel.scenarios[c].bias()) for c in curves]
        biases = ", ".join(f"{label(c)} {before:.2g} to {after:.2g}" for c, before, after in both)
        evidence += f" Distance of the audit's optimum: {biases}."
    return all(panel.end[c] * CLEARLY <= plain.end[c] for c in curves), evidence, curves


def _importance(panel: Panel) -> Finding:
    uniform, by_size = "fedshuffle-uniform", "fedshuffle-importance"
    variance = {}
    for curve, scenario in panel.scenarios.items():
        sampling = scenario.run(seed=0).sampling
        variance[curve] = float((sampling.s * scenario.federation.weights / sampling.p).max())
    evidence = (
        f"Ends: importance {panel.end[by_size]:.2g}, uniform {panel.end[uniform]:.2g},"
        f" {_times(panel.end[uniform] / panel.end[by_size])} times as high, each at the step size"
        f" of the paper. The theory's M = max s w / p falls from {variance[uniform]:.2g} to"
        f" {variance[by_size]:.2g}."
    )
    return panel.below(by_size, uniform), evidence, (uniform, by_size)


def _sooner(panel: Panel, curve: str, other: str) -> Finding:
    level = 0.01 / sum(panel.scenarios[curve].sizes)  # the start is 1/d away
    sooner, later = panel.reaches(curve, level), panel.reaches(other, level)
    evidence = (
        f"Rounds to 1% of the start's distance: {label(curve)} {sooner or 'never'}, {label(other)}"
        f" {later or 'never'}."
    )
    return sooner is not None and (later is None or sooner < later), evidence, (curve,)


def _lower(panel: Panel, curve: str, other: str) -> Finding:
    lower = panel.end[curve] < panel.end[other]
    evidence = f"Ends: {panel.ends(curve, other)}."
    faster = panel.scenarios[curve].pace() / panel.scenarios[other].pace()
    if not lower and faster > 1 and panel.settled(curve):
        evidence += (
            f" At the same eta_l a round of {label(curve)} moves {_times(faster)} times as far as"
            f" one of {label(other)}: it is that much faster, and the noise of the example that a"
            " client misses has that much more effect at the end."
        )
    seen = lower and panel.settled(curve) and panel.settled(other)
    return seen, evidence, (curve, other)


CLAIMS: dict[str, dict[str, Callable[[Panel], Finding]]] = {
    "full": {
        "FedAvgRR saturates at a higher loss, since it optimises the wrong objective.": partial(
            _wrong_objective, curve="fedavg-rr", better="fedshuffle"
        ),
        "FedAvgMin fixes the objective inconsistency of FedAvg.": partial(
            _fixes, curve="fedavg-min", biased="fedavg"
        ),
        "FedAvgMin is still dominated by the other baselines (read as: the consistent ones).": (
            partial(_dominated, curve="fedavg-min")
        ),
        "FedNova performs better than FedAvg.": partial(_better, curve="fednova", other="fedavg"),
        "FedNova is later dominated by the noise of stochastic gradients.": partial(
            _noise, curve="fednova", reshuffled="fednova-rr"
        ),
        "The same holds for FedAvgMean: it performs better than FedAvg.": partial(
            _better, curve="fedavg-mean", other="fedavg"
        ),
        "FedAvgMean is later dominated by the noise of stochastic gradients.": partial(
            _noise, curve="fedavg-mean", reshuffled="fedshuffle"
        ),
        "Reshuffling decreases the noise: FedNovaRR improves upon FedNova.": partial(
            _better, curve="fednova-rr", other="fednova"
        ),
        "FedShuffle dominates all the baselines.": _best,
    },
    "momentum": {
        "Momentum helps FedAvg to reduce its objective inconsistency.": partial(
            _improves, consistent=False
        ),
        "For the other methods momentum reduces the variance and gives higher precision.": partial(
            _improves, consistent=True
        ),
        "FedShuffle still performs the best.": _best,
    },
    "sum_one": {
        "FedShuffle with sum one converges to a worse solution, from the biased aggregation.": (
            partial(_wrong_objective, curve="fedshuffle-so", better="fedshuffle")
        )
    },
    "importance": {"Importance sampling leads to a substantial improvement.": _importance},
    "hybrid": {
        "FedShuffle suffers from objective inconsistency when clients do not finish.": partial(
            _wrong_objective, curve="fedshuffle", better="fedshuffle-gen"
        ),
        "FedShuffleGen fixes the inconsistency.": partial(
            _fixes, curve="fedshuffle-gen", biased="fedshuffle"
        ),
        "FedShuffleGen is superior to FedNovaRR: it gets there sooner.": partial(
            _sooner, curve="fedshuffle-gen", other="fednova-rr"
        ),
        "FedShuffleGen is superior to FedNovaRR: it ends lower.": partial(
            _lower, curve="fedshuffle-gen", other="fednova-rr"
        ),
    },
}
"""For each panel: the paper's sentence, and its check."""


def claims(results: Results) -> list[Claim]:
    """What the paper's text says about its figures, checked against the curves."""
    plain = Panel("full", results["full"])
    found = []
    for name, checks in CLAIMS.items():
        panel = Panel(name, results[name], plain)
        for text, check in checks.items():
            seen, evidence, about = check(panel)
            falling = [label(curve) for curve in about if not panel.settled(curve)]
            if not seen and falling:
                evidence += f" Still falling after {panel.rounds} rounds: {', '.join(falling)}."
            found.append(Claim(name, text, bool(seen), evidence))
    return found
