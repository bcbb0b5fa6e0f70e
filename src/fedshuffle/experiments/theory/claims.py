"""What the theory says, checked against the measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedshuffle.experiments.claims import Claim
from fedshuffle.experiments.theory.experiment import LOCAL, NON_LOCAL, PREDICTED, Results

CLOSE = 0.25
"""A slope is as claimed if it is this close."""

CLEARLY = 2.0
"""At least this many times as many rounds are clearly more."""


def reading(claims: Sequence[Claim]) -> str:
    """How the words of the claims are meant."""
    return (
        f"{sum(claim.seen for claim in claims)} of {len(claims)} claims were seen. A *slope* is"
        " that of the line through the logarithms, by least squares, and is as claimed if it is"
        f" within {CLOSE:g}; *fewer* means by a factor of at least {CLEARLY:g}."
    )


def slope(x: Sequence[float], y: Sequence[float | None]) -> float:
    """The power of x that y grows with: the slope of the line through the logarithms.

    >>> round(slope([1, 2, 4], [5, 20, 80]), 9)
    2.0
    """
    if None in y or len(y) < 2:
        return math.nan
    return float(np.polyfit(np.log(x), np.log(np.array(y, dtype=np.float64)), 1)[0])


SLOPES: dict[str, tuple[str, str, float]] = {
    "Reshuffled, the stationary error goes with eta^2.": ("noise", "reshuffled", 2),
    "With replacement, it goes with eta only.": ("noise", "with replacement", 1),
    "Under importance sampling the rounds to a given error go with 1/b: linear speed-up.": (
        *("cohort", "importance", -1),
    ),
    "The middle term vanishes as eta_g grows, with 1 / eta_g^2, at the same effective step.": (
        *("server", "reshuffled", -2),
    ),
    "FedShuffleMVR's rounds go with delta, at the same L.": ("similarity", f"{LOCAL}, theorem", 1),
    "Those of MVR without local steps do not: they go with L.": (
        *("similarity", f"{NON_LOCAL}, theorem", 0),
    ),
}
"""Each sentence with its panel, its curve, and the slope it claims."""


def claims(results: Results) -> list[Claim]:
    """What the theory says, checked against the measurements."""
    found = [
        *(_slope(results, text, *claimed) for text, claimed in SLOPES.items()),
        *(_under_theorem(name, results[name]) for name in ("noise", "server")),
        _fewer_rounds(results["cohort"]),
        *_similarity(results["similarity"]),
        *(_under_proof(name, results[name]) for name in PREDICTED),
    ]
    return sorted(found, key=lambda claim: list(results).index(claim.panel))


def _slope(results: Results, text: str, name: str, curve: str, claimed: float) -> Claim:
    panel = results[name]
    y = panel["curves"][curve]
    found = round(slope(panel["x"], y), 2) + 0.0  # no minus before a zero
    evidence = f"Slope {found:.2f}, claimed {claimed:g}."
    if name == "cohort":
        within = max(max(shares) for shares in panel["facts"]["share of the limit"].values())
        evidence += (
            f" Rounds: {_list(y)} for b = {_list(panel['x'])}. The step sizes are at most"
            f" {within:.2f} of the theorem's limit."
        )
    if name == "similarity":
        evidence += f" Rounds: {_list(y)} for delta/L = {_list(panel['x'])}."
    if name == "server":
        still = slope(panel["x"], panel["curves"]["with replacement"])
        evidence += f" With replacement the noise stays: slope {still:.2f}."
    return Claim(name, text, abs(found - claimed) <= CLOSE, evidence)


def _under_theorem(name: str, panel: Mapping[str, Any]) -> Claim:
    room = np.array(panel["bound"]) / np.array(panel["curves"]["reshuffled"])
    return Claim(
        name,
        "The reshuffled error stays under the theorem's bound, 18 (L/mu) eta_l^2 N.",
        bool((room >= 1).all()),
        f"The bound is {_range(room.tolist())} times as large.",
    )


def _fewer_rounds(panel: Mapping[str, Any]) -> Claim:
    few, more = panel["curves"]["importance"], panel["curves"]["uniform"]
    ratios = _ratios(more, few)
    predicted = _ratios(panel["facts"]["M"]["uniform"], panel["facts"]["M"]["importance"])
    return Claim(
        "cohort",
        "Importance sampling needs fewer rounds than uniform sampling, as its M is smaller.",
        bool(ratios) and min(ratios) >= CLEARLY,
        f"Rounds of uniform sampling: {_list(more)}, {_range(ratios)} times as many; its M is"
        f" {_range(predicted)} times as large.",
    )


def _similarity(panel: Mapping[str, Any]) -> Iterator[Claim]:
    x, curves = panel["x"], panel["curves"]
    steps = {"theorem": "the theorem's step sizes", "best": "the best found for each"}
    for how, where in steps.items():
        few, more = curves[f"{LOCAL}, {how}"], curves[f"{NON_LOCAL}, {how}"]
        last = _ratios(more[-1:], few[-1:])
        yield Claim(
            "similarity",
            f"FedShuffleMVR beats non-local MVR when delta is much smaller than L, at {where}.",
            bool(last) and last[0] >= CLEARLY,
            f"At delta/L = {x[-1]:.3g}: {_count(few[-1])} rounds against {_count(more[-1])}; at"
            f" {x[0]:.3g}: {_count(few[0])} against {_count(more[0])}.",
        )


def _under_proof(name: str, panel: Mapping[str, Any]) -> Claim:
    room = {
        kind: np.array(panel["bounds"][kind]) / np.array(curve)
        for kind, curve in panel["curves"].items()
    }
    evidence = "; ".join(
        f"{kind}: {each.min():.4g} times as large at the closest (round"
        f" {panel['x'][int(each.argmin())]}), {each[-1]:.3g} at the end"
        for kind, each in room.items()
    )
    return Claim(
        name,
        "The measured mean stays under the bound in every round.",
        all(bool((each >= 1).all()) for each in room.values()),
        f"The bound is, for {evidence}.",
    )


def _ratios(more: Sequence[float | None], few: Sequence[float | None]) -> list[float]:
    """Nothing, if a number is missing."""
    pairs = [(a, b) for a, b in zip(more, few, strict=True) if a is not None and b is not None]
    return [a / b for a, b in pairs] if len(pairs) == len(more) else []


def _count(rounds: float | None) -> str:
    return "never" if rounds is None else f"{rounds:.3g}" if rounds < 1 else f"{rounds:g}"


def _list(values: Sequence[float | None]) -> str:
    return ", ".join(_count(value) for value in values)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else "some"
