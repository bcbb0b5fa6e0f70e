"""What the paper's text says about its toy figures, checked against the curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.experiments.claims import Checks, Claim, check_all
from fedshuffle.experiments.quadratic.experiment import Results, label, panels

CLEARLY = 2.0
"""One number is clearly below another if this many times the one does not exceed the other."""
NEAR = 1.5
"""Two numbers are near each other if neither is more than this many times the other."""
HAIR = 1.05
"""Curves closer than this factor cannot be told apart."""

READING = (
    "A curve is the mean over the seeds of the squared distance to the optimum. It *ends* at"
    " its geometric mean over the last tenth of the rounds; in brackets stands the distance of the"
    " optimum that the audit finds, if it is another. *Better* and *worse* mean a factor of at"
    f" least {CLEARLY:g}; a curve that saturates at a bias settles within a factor of {NEAR:g} of"
    " the audit's distance; a curve has settled if in the last quarter of the rounds it falls at"
    " less than half of its mean pace. To *dominate* is to end lowest and never to lie above"
    f" another by more than a factor of {HAIR:g}."
)
"""How the words of the claims are meant."""


class Panel:
    """The curves of one panel, and the questions that claims ask about them."""

    def __init__(
        self,
        name: str,
        curves: Mapping[str, Mapping[str, Sequence[float]]],
        plain: Panel | None = None,
    ) -> None:
        self.plain = plain
        """The same curves without momentum."""
        self.scenarios = panels()[name]
        self.consistent = {c: bool(s.audit().consistent) for c, s in self.scenarios.items()}
        # An exact zero has no logarithm; the smallest float stands for it.
        tiny = np.finfo(np.float64).tiny
        self.mean = {c: np.maximum(np.array(curves[c]["mean"], float), tiny) for c in curves}
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

    def below(self, curve: str, other: str) -> bool:
        """Whether a curve ends clearly below another."""
        return self.end[curve] * CLEARLY <= self.end[other]

    def ends(self, curves: Sequence[str]) -> str:
        """Where curves end, in words."""
        bias = {
            c: "" if consistent else f" [{self.scenarios[c].bias():.2g}]"
            for c, consistent in self.consistent.items()
        }
        return ", ".join(f"{label(c)} {self.end[c]:.2g}{bias[c]}" for c in curves)


def geometric(values: FloatArray) -> float:
    """The geometric mean: the mean height on a logarithmic axis."""
    return float(np.exp(np.log(values).mean()))


def _part(values: FloatArray, parts: int) -> int:
    return max(1, len(values) // parts)


# Checks: whether a claim about some curves is seen in a panel, and what the ends do not show -----

Finding = tuple[bool, str]


def _saturates(panel: Panel, curve: str, better: str) -> Finding:
    """The curve settles where the audit says, above another with the right objective."""
    bias, end = panel.scenarios[curve].bias(), panel.end[curve]
    there = panel.settled(curve) and bias / NEAR <= end <= bias * NEAR
    return there and panel.below(better, curve), ""


def _fixes(panel: Panel, curve: str, biased: str) -> Finding:
    """The audit finds the right objective, and the curve ends below a biased one."""
    return panel.consistent[curve] and panel.below(curve, biased), ""


def _better(panel: Panel, curve: str, other: str) -> Finding:
    return panel.below(curve, other), ""


def _dominated(panel: Panel, curve: str) -> Finding:
    """All other consistent curves end lower."""
    others = [c for c, consistent in panel.consistent.items() if consistent and c != curve]
    return all(panel.end[other] < panel.end[curve] for other in others), ""


def _noise(panel: Panel, curve: str, reshuffled: str) -> Finding:
    """The curve first goes with its noiseless counterpart, and later settles above it."""
    early = _part(panel.mean[curve], 10)
    apart = panel.mean[curve][:early] / panel.mean[reshuffled][:early]
    together = float(np.maximum(apart, 1 / apart).max())
    later = panel.settled(curve) and panel.below(reshuffled, curve)
    return together < 1.1 and later, (
        f"In the first tenth of the rounds they are within {together - 1:.1%} of each other."
    )


def _best(panel: Panel, curve: str) -> Finding:
    """The curve ends lowest, and is nowhere more than a hair above another."""
    others = np.min([mean for other, mean in panel.mean.items() if other != curve], axis=0)
    ratio = panel.mean[curve] / others
    lowest = min(panel.end, key=lambda other: panel.end[other]) == curve
    worst = f"At worst {label(curve)} is at {ratio.max():.3g} times the best of the others."
    return lowest and ratio.max() <= HAIR, worst


def _improves(panel: Panel, *curves: str) -> Finding:
    """Momentum lowers the end of each curve."""
    plain = panel.plain
    assert plain is not None
    seen = all(panel.end[c] * CLEARLY <= plain.end[c] for c in curves)
    return seen, f"Without momentum: {plain.ends(curves)}."


def _importance(panel: Panel, by_size: str, uniform: str) -> Finding:
    variance = []
    for curve in (uniform, by_size):
        scenario = panel.scenarios[curve]
        sampling = scenario.run(seed=0).sampling
        variance.append(float((sampling.s * scenario.federation.weights / sampling.p).max()))
    return panel.below(by_size, uniform), (
        f"The theory's M = max s w / p falls from {variance[0]:.2g} to {variance[1]:.2g}."
    )


def _sooner(panel: Panel, curve: str, other: str) -> Finding:
    """The curve is earlier at a hundredth of the start's distance, 1/d."""
    level = 0.01 / sum(panel.scenarios[curve].sizes)
    first, second = (
        next((r for r, mean in enumerate(panel.mean[c], start=1) if mean <= level), np.inf)
        for c in (curve, other)
    )
    return first < second, f"Rounds to 1% of the start's distance: {first} and {second}."


def _lower(panel: Panel, curve: str, other: str) -> Finding:
    seen = panel.end[curve] < panel.end[other] and panel.settled(curve) and panel.settled(other)
    faster = panel.scenarios[curve].pace() / panel.scenarios[other].pace()
    return seen, (
        f"At the same eta_l a round of {label(curve)} moves {faster:.3g} times as far as one of"
        f" {label(other)}: that much faster, and with that much more of the noise of the example"
        " that a client misses."
    )


def _about(check: Callable[..., Finding], *curves: str) -> Callable[[Panel], Finding]:
    """The check of these curves, with where they (or all, if it is one) end as evidence."""

    def checked(panel: Panel) -> Finding:
        seen, note = check(panel, *curves)
        shown = curves if len(curves) > 1 else tuple(panel.mean)
        evidence = f"Ends: {panel.ends(shown)}. {note}".rstrip()
        falling = ", ".join(label(curve) for curve in shown if not panel.settled(curve))
        if not seen and falling:
            evidence += f" Still falling in the last round: {falling}."
        return seen, evidence

    return checked


CLAIMS: Checks = {
    "full": {
        "FedAvgRR saturates at a higher loss, since it optimises the wrong objective.": _about(
            _saturates, "fedavg-rr", "fedshuffle"
        ),
        "FedAvgMin fixes the objective inconsistency of FedAvg.": _about(
            _fixes, "fedavg-min", "fedavg"
        ),
        "FedAvgMin is still dominated by the other baselines (read as: the consistent ones).": (
            _about(_dominated, "fedavg-min")
        ),
        "FedNova performs better than FedAvg.": _about(_better, "fednova", "fedavg"),
        "FedNova is later dominated by the noise of stochastic gradients.": _about(
            _noise, "fednova", "fednova-rr"
        ),
        "The same holds for FedAvgMean: it performs better than FedAvg.": _about(
            _better, "fedavg-mean", "fedavg"
        ),
        "FedAvgMean is later dominated by the noise of stochastic gradients.": _about(
            _noise, "fedavg-mean", "fedshuffle"
        ),
        "Reshuffling decreases the noise: FedNovaRR improves upon FedNova.": _about(
            _better, "fednova-rr", "fednova"
        ),
        "FedShuffle dominates all the baselines.": _about(_best, "fedshuffle"),
    },
    "momentum": {
        "Momentum helps FedAvg to reduce its objective inconsistency.": _about(
            _improves, "fedavg", "fedavg-rr"
        ),
        "For the other methods momentum reduces the variance and gives higher precision.": _about(
            _improves, "fedavg-min", "fedavg-mean", "fednova", "fednova-rr", "fedshuffle"
        ),
        "FedShuffle still performs the best.": _about(_best, "fedshuffle"),
    },
    "sum_one": {
        "FedShuffle with sum one converges to a worse solution, from the biased aggregation.": (
            _about(_saturates, "fedshuffle-so", "fedshuffle")
        )
    },
    "importance": {
        "Importance sampling leads to a substantial improvement.": _about(
            _importance, "fedshuffle-importance", "fedshuffle-uniform"
        )
    },
    "hybrid": {
        "FedShuffle suffers from objective inconsistency when clients do not finish.": _about(
            _saturates, "fedshuffle", "fedshuffle-gen"
        ),
        "FedShuffleGen fixes the inconsistency.": _about(_fixes, "fedshuffle-gen", "fedshuffle"),
        "FedShuffleGen is superior to FedNovaRR: it gets there sooner.": _about(
            _sooner, "fedshuffle-gen", "fednova-rr"
        ),
        "FedShuffleGen is superior to FedNovaRR: it ends lower.": _about(
            _lower, "fedshuffle-gen", "fednova-rr"
        ),
    },
}
"""For each panel: the paper's sentence, and its check."""


def claims(results: Results) -> list[Claim]:
    """What the paper's text says about its figures, checked against the curves."""
    plain = Panel("full", results["full"])
    return check_all(CLAIMS, {name: Panel(name, results[name], plain) for name in CLAIMS})
