"""What the theory says, checked against the measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fedshuffle.experiments.claims import Claim
from fedshuffle.experiments.theory.experiment import LOCAL, NON_LOCAL, PanelData, Results

CLOSE = 0.25
"""A slope is as claimed if it is this close."""
CLEARLY = 2.0
"""At least this many times as many rounds are clearly more."""

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


def _slope(curve: str, claimed: float, panel: PanelData) -> tuple[bool, str]:
    y = panel["curves"][curve]
    found = round(slope(panel["x"], y), 2) + 0.0  # no minus before a zero
    evidence = f"Slope {found:.2f}, claimed {claimed:g}: {_list(y)} at {_list(panel['x'])}."
    return abs(found - claimed) <= CLOSE, evidence


def _fewer(few: str, more: str, start: int, panel: PanelData) -> tuple[bool, str]:
    """Clearly fewer rounds, from some place of the x axis on."""
    y, other = panel["curves"][few], panel["curves"][more]
    pairs = zip(y[start:], other[start:], strict=True)
    seen = all(a is not None and b is not None and a * CLEARLY <= b for a, b in pairs)
    return seen, f"Rounds: {_list(y)} against {_list(other)} at {_list(panel['x'])}."


def _smaller_variance(panel: PanelData) -> tuple[bool, str]:
    seen, evidence = _fewer("importance", "uniform", 0, panel)
    few, more = (panel["facts"]["M"][name] for name in ("importance", "uniform"))
    return seen, f"{evidence} M: {_list(few)} against {_list(more)}."


def _under_bound(panel: PanelData) -> tuple[bool, str]:
    """Every curve with a bound stays under it."""
    bounds = panel["bounds"] if "bounds" in panel else {"reshuffled": panel["bound"]}
    room = {name: np.divide(bound, panel["curves"][name]) for name, bound in bounds.items()}
    evidence = "; ".join(
        f"{name}: {each.min():.4g} to {each.max():.3g} times as large, {each[-1]:.3g} at the end"
        for name, each in room.items()
    )
    return all(bool((each >= 1).all()) for each in room.values()), f"The bound is, for {evidence}."


def _list(values: Sequence[float | None]) -> str:
    return ", ".join("never" if value is None else f"{value:.4g}" for value in values)


_BEATS = "FedShuffleMVR beats non-local MVR when delta is much smaller than L, at"
CLAIMS: dict[str, dict[str, Callable[[PanelData], tuple[bool, str]]]] = {
    "noise": {
        "Reshuffled, the stationary error goes with eta^2.": partial(_slope, "reshuffled", 2),
        "With replacement, it goes with eta only.": partial(_slope, "with replacement", 1),
        "The reshuffled error stays under the theorem's bound, 18 (L/mu) eta_l^2 N.": _under_bound,
    },
    "cohort": {
        "Under importance sampling the rounds to a given error go with 1/b: linear speed-up.": (
            partial(_slope, "importance", -1)
        ),
        "Importance sampling needs fewer rounds than uniform sampling, as its M is smaller.": (
            _smaller_variance
        ),
    },
    "server": {
        "The middle term vanishes as eta_g grows, with 1 / eta_g^2, at the same effective step.": (
            partial(_slope, "reshuffled", -2)
        ),
        "With replacement the noise stays.": partial(_slope, "with replacement", 0),
        "The reshuffled error stays under the theorem's bound, 18 (L/mu) eta_l^2 N.": _under_bound,
    },
    "similarity": {
        "FedShuffleMVR's rounds go with delta, at the same L.": partial(
            _slope, f"{LOCAL}, theorem", 1
        ),
        "Those of MVR without local steps do not: they go with L.": partial(
            _slope, f"{NON_LOCAL}, theorem", 0
        ),
        f"{_BEATS} the theorem's step sizes.": partial(
            _fewer, f"{LOCAL}, theorem", f"{NON_LOCAL}, theorem", -1
        ),
        f"{_BEATS} the best found for each.": partial(
            _fewer, f"{LOCAL}, best", f"{NON_LOCAL}, best", -1
        ),
    },
    **{
        name: {"The measured mean stays under the bound in every round.": _under_bound}
        for name in ("distance", "sampling", "gradient")
    },
}
"""For each panel: what the theory says, and its check."""


def claims(results: Results) -> list[Claim]:
    """What the theory says, checked against the measurements."""
    return [
        Claim(name, text, *check(results[name]))
        for name, checks in CLAIMS.items()
        for text, check in checks.items()
    ]
