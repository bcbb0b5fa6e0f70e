"""Definitions written out the long way, to hold the library against."""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from fedshuffle.sampling import Sampling

Floats = NDArray[np.float64]


def cohorts(sampling: Sampling) -> list[tuple[tuple[int, ...], float]]:
    """Every cohort with its probability, as the sampling itself lists them."""
    listed = sampling.cohorts(1 << 20)
    assert listed is not None
    return [(tuple(members.tolist()), probability) for members, probability in listed]


def independent(p: Floats) -> list[tuple[tuple[int, ...], float]]:
    """Every cohort of independent sampling, from the definition."""
    rows = []
    for picks in itertools.product([0, 1], repeat=len(p)):
        chance = np.prod([q if pick else 1 - q for pick, q in zip(picks, p, strict=True)])
        rows.append((tuple(i for i, pick in enumerate(picks) if pick), float(chance)))
    return rows


def uniform(n: int, b: int) -> list[tuple[tuple[int, ...], float]]:
    """Every cohort of b of n clients, from the definition."""
    subsets = list(itertools.combinations(range(n), b))
    return [(subset, 1 / len(subsets)) for subset in subsets]


def approximate(p: Floats, k: int) -> list[tuple[tuple[int, ...], float]]:
    """Every cohort of approximate independent sampling, from the definition (with repeats)."""
    n = len(p)
    rows = []
    for invited, chance in uniform(n, k):
        for picks in itertools.product([0, 1], repeat=k):
            keep = [n * p[i] / k for i in invited]
            kept = np.prod([q if pick else 1 - q for pick, q in zip(picks, keep, strict=True)])
            cohort = tuple(i for i, pick in zip(invited, picks, strict=True) if pick)
            rows.append((cohort, chance * float(kept)))
    return rows


def markov(b: int, on: Floats, off: Floats) -> tuple[Floats, list[tuple[int, ...]], Floats]:
    """The chain of (who is there, which b of them take part), clients that come and go by these
    rates: its transitions, the cohort of each state, and the stationary distribution.
    """
    n = len(on)
    sets = list(itertools.product([False, True], repeat=n))
    states = [
        (k, cohort)
        for k, there in enumerate(sets)
        for cohort in itertools.combinations([i for i in range(n) if there[i]], min(b, sum(there)))
    ]
    ways = [math.comb(sum(there), min(b, sum(there))) for there in sets]
    moves = np.empty((len(states), len(states)))
    for row, (k, _) in enumerate(states):
        for column, (m, _) in enumerate(states):
            comes = [1 - off[i] if sets[k][i] else on[i] for i in range(n)]
            steps = [c if then else 1 - c for c, then in zip(comes, sets[m], strict=True)]
            moves[row, column] = math.prod(steps) / ways[m]
    system = np.vstack([moves.T - np.eye(len(states)), np.ones(len(states))])
    stationary = np.linalg.lstsq(system, np.append(np.zeros(len(states)), 1), rcond=None)[0]
    return moves, [cohort for _, cohort in states], np.asarray(stationary)


def expected_ratio(
    rows: list[tuple[tuple[int, ...], float]],
    u: Floats,
    c: Floats,
    v: Floats | None,
    power: int,
    chances: Floats,
) -> Floats:
    """``E[1{i in S} c_i (sum_S v) / (sum_S u)^power]`` over cohorts and alternatives."""
    total = np.zeros(len(u))
    for cohort, probability in rows:
        members = np.array(cohort, dtype=int)
        if not len(members):
            continue
        for picks in itertools.product(range(len(chances)), repeat=len(members)):
            pick = np.array(picks)
            share = probability * float(np.prod(chances[pick]))
            numerator = 1.0 if v is None else float(v[members, pick].sum())
            denominator = float(u[members, pick].sum())
            if np.isfinite(denominator):
                total[members] += share * c[members, pick] * numerator / denominator**power
    return total
