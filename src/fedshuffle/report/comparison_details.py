"""What stands beside the curves: audits, the search for step sizes, the sizes of the clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.report.comparison_numbers import Compared, Entrant, edge, finite, higher_is_better

_POINTS = 600
"""More dots than these of one method cannot be told apart."""


@final
@dataclass(frozen=True)
class Audited:
    """The audit of a method, for all momenta under which it says the same."""

    method: Entrant
    momenta: tuple[str, ...]
    consistent: bool | None
    wrong: float
    """The share of the weight that is in the wrong place."""
    largest: float
    """The largest factor between what a client counts and what it should, either way."""
    points: FloatArray
    """Rows of size and ``w-hat_i / w_i``, each once."""


@final
@dataclass(frozen=True)
class Tuned:
    """How a method came to its step size."""

    method: Entrant
    values: dict[float, float | None]
    """The best value for each step size that was tried; None where there is none."""
    lost: frozenset[float]
    """The step sizes with which every trial diverged."""
    chosen: float
    weight_decay: float | None
    clip: float | None
    edge: str
    """``largest`` or ``smallest`` where the chosen one is that of several, else nothing."""


def audits(comparison: Compared) -> list[Audited]:
    """All audits, one for each method and what momentum changes."""
    return [audited for method in comparison.methods for audited in _audits(comparison, method)]


def _audits(comparison: Compared, method: Entrant) -> list[Audited]:
    found: dict[str, Mapping[str, Any]] = {}
    for momentum in comparison.momenta:
        for group in comparison.groups:
            curve = comparison.curve(group, momentum, method.name)
            # The step size changes nothing in the audit, so that of any group will do.
            if curve is not None and curve.get("audit"):
                found.setdefault(momentum, curve["audit"])
    kept: list[Audited] = []
    seen: list[tuple[Any, FloatArray]] = []
    for momentum, audit in found.items():
        ratios, wrong = _ratios(comparison, audit, method)
        for k, (consistent, others) in enumerate(seen):
            if consistent == audit["consistent"] and np.allclose(others, ratios, rtol=1e-6):
                kept[k] = _with(kept[k], momentum)
                break
        else:
            seen.append((audit["consistent"], ratios))
            known = ratios[ratios > 0]
            largest = float(np.maximum(known, 1 / known).max()) if known.size else math.inf
            points = _points(np.array(comparison.results["federation"]["sizes"]), ratios)
            kept.append(Audited(method, (momentum,), audit["consistent"], wrong, largest, points))
    return kept


def _with(audited: Audited, momentum: str) -> Audited:
    momenta = (*audited.momenta, momentum)
    return Audited(**{**vars(audited), "momenta": momenta})


def _ratios(
    comparison: Compared, audit: Mapping[str, Any], method: Entrant
) -> tuple[FloatArray, float]:
    clients = len(comparison.results["federation"]["sizes"])
    try:
        meant = np.array(audit["objective_weights"], np.float64)
        really = np.array(audit["effective_weights"], np.float64)
        whole = meant.shape == really.shape == (clients,) and bool((meant > 0).all())
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or "consistent" not in audit or not np.isfinite(really).all():
        raise FedShuffleError(
            f"the audit of {method.label!r} in the results needs 'consistent', and a number for"
            f" each of the {clients} clients in objective_weights and effective_weights."
        )
    return really / meant, 0.5 * float(np.abs(really - meant).sum())


def _points(sizes: Any, ratios: FloatArray) -> FloatArray:
    """Clients of the same size and ratio are one dot; a ratio of zero has no place on the axis."""
    rows = np.stack([sizes[ratios > 0], [float(f"{ratio:.3g}") for ratio in ratios[ratios > 0]]], 1)
    rows = np.unique(rows.astype(np.float64), axis=0)
    return (
        rows[np.unique(np.linspace(0, len(rows) - 1, _POINTS).astype(int))] if len(rows) else rows
    )


def ratio_limits(found: Sequence[Audited]) -> tuple[float, float]:
    """The ends of the axis of ratios, with one in it and room to both sides."""
    ratios = [float(ratio) for audited in found for ratio in audited.points[:, 1]]
    return min([0.7, *ratios]) / 1.25, max([1.4, *ratios]) * 1.25


def judge(results: Mapping[str, Any]) -> tuple[str, bool | None]:
    """What trials were judged by, if the results say so, and whether higher is better."""
    told = results.get("judge")
    if not isinstance(told, Mapping) or not isinstance(told.get("metric"), str):
        return "", None
    high = told.get("higher_is_better")
    return told["metric"], high if isinstance(high, bool) else higher_is_better(told["metric"])


def tuning(comparison: Compared, group: str, momentum: str) -> list[Tuned]:
    """The search of each method that made one."""
    high = judge(comparison.results)[1]
    return [
        _tuned(method, curve, high)
        for method in comparison.methods
        if (curve := comparison.curve(group, momentum, method.name)) and curve.get("tuning")
    ]


def _tuned(method: Entrant, curve: Mapping[str, Any], high: bool | None) -> Tuned:
    chosen = float(curve["step_size"])
    trials: dict[float, list[tuple[float, Mapping[str, Any]]]] = {}
    lost: dict[float, bool] = {}
    for trial in sorted(curve["tuning"], key=lambda trial: float(trial["step_size"])):
        size, value = float(trial["step_size"]), finite(trial["value"])
        found = trials.setdefault(size, [])
        lost[size] = lost.get(size, True) and bool(trial["diverged"])
        if value is not None and not trial["diverged"]:
            found.append((value, trial))
    if high is None:  # the winner tells
        known = [value for found in trials.values() for value, _ in found]
        high = bool(known) and max(known) in [value for value, _ in trials.get(chosen, [])]
    best = {
        size: (max if high else min)(found, key=lambda one: one[0])
        for size, found in trials.items()
        if found
    }
    winner = {**(best[chosen][1] if chosen in best else {}), **curve}
    return Tuned(
        method=method,
        values={size: best[size][0] if size in best else None for size in trials},
        lost=frozenset(size for size, all_lost in lost.items() if all_lost),
        chosen=chosen,
        weight_decay=finite(winner.get("weight_decay")),
        clip=finite(winner.get("clip")),
        edge=edge(curve),
    )


def searched(comparison: Compared, key: str) -> bool:
    """Whether the search also went over weight decay or clipping."""
    trials = [
        trial.get(key)
        for curve in comparison.results["curves"]
        for trial in curve.get("tuning") or ()
    ]
    return len(set(trials)) > 1


def histogram(sizes: Sequence[int], most: int = 24) -> list[tuple[int, int, int]]:
    """First size, last size and number of clients of each bar; bars widen where sizes differ much.

    >>> histogram([1, 2, 2, 3])
    [(1, 1, 1), (2, 2, 2), (3, 3, 1)]
    >>> histogram([1, 100], most=4)
    [(1, 2, 1), (3, 9, 0), (10, 31, 0), (32, 100, 1)]
    """
    low, high = min(sizes), max(sizes)
    space = np.geomspace if high > 20 * low else np.linspace
    inner = np.round(space(low, high + 1, min(most, high + 1 - low) + 1)).astype(int)
    edges = np.unique([low, *inner, high + 1])
    counts, _ = np.histogram(sizes, edges)
    return [
        (int(first), int(after) - 1, int(clients))
        for first, after, clients in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
