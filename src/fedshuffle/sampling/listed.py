"""A sampling given as a list of cohorts."""

import operator
from collections.abc import Iterable, Sequence

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, number
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import (
    Cohorts,
    Sampling,
    check_probabilities,
)


class Listed(Sampling):
    """Any sampling, given as (cohort, probability) rows.

    >>> Listed(3, [((0, 1), 0.5), ((2,), 0.5)]).p.tolist()
    [0.5, 0.5, 0.5]
    """

    def __init__(self, n: int, rows: Iterable[tuple[Sequence[int], float]]) -> None:
        checked = [_check_row(n, members, probability) for members, probability in rows]
        total = sum(probability for _, probability in checked)
        if not np.isclose(total, 1.0, rtol=0, atol=1e-9):
            raise FedShuffleError(
                f"the probabilities of the cohorts sum to {total:g}. Make them sum to 1."
            )
        self._cohorts = Cohorts.of([(members, q / total) for members, q in checked])
        lengths = np.diff(self._cohorts.starts)
        weights = np.repeat(self._cohorts.probabilities, lengths)
        p = np.bincount(self._cohorts.members, weights=weights, minlength=n)
        self.p = check_probabilities(np.minimum(p, 1.0))

    def __repr__(self) -> str:
        return f"table of {len(self._cohorts)} cohorts"

    def pair_probabilities(self) -> FloatArray:
        return self._cohorts.pair_probabilities(len(self))

    def expected_sums(self, v: FloatArray) -> FloatArray:
        return self._cohorts.expected_sums(v)

    def draw(self, seed: int, round: int) -> IntArray:
        return self._cohorts.at(generator(seed, Purpose.COHORT, round=round).random())

    def cohorts(self, limit: int) -> Cohorts:
        return self._cohorts


def _check_row(n: int, members: Sequence[int], probability: float) -> tuple[tuple[int, ...], float]:
    what = f"cohort {members!r}: members must be client numbers."
    with error_context(lambda _: what, TypeError):
        cohort = tuple(sorted(operator.index(i) for i in members))
    if len(set(cohort)) != len(cohort) or any(not 0 <= i < n for i in cohort):
        raise FedShuffleError(
            f"cohort {cohort}: members must be different clients from 0 to {n - 1}."
        )
    return cohort, number(probability, f"the probability of cohort {cohort}", within="[0, 1]")
