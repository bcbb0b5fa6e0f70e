"""Estimates of effective weights from observed rounds."""

import numpy as np

from fedshuffle import Federation
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.estimation import Observations, estimate, proportions
from fedshuffle.sampling import resolve


def observed(
    rounds: int, round: IntArray, client: IntArray, contribution: FloatArray
) -> Observations:
    """Observations of clients that took one step each."""
    ones = np.ones(len(client), dtype=np.int64)
    return Observations(rounds, round, client, contribution, contribution, ones)


def test_proportions_of_weights_are_fitted_across_cohorts() -> None:
    round, client = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    fitted = proportions(observed(2, round, client, np.array([1.0, 2.0, 20.0, 30.0])), 3)
    np.testing.assert_allclose(fitted / fitted[0], [1, 2, 3])


def test_intervals_cover_without_known_probabilities() -> None:
    """The estimator without known probabilities, against a closed form."""
    sampling = resolve("uniform:2", Federation.from_sizes([1, 2, 3, 4]))
    contributions = np.array([1.0, 2.0, 3.0, 4.0])
    truth, held = contributions / contributions.sum(), 0
    for seed in range(100):
        cohorts = [sampling.draw(seed, r) for r in range(60)]
        clients = np.concatenate(cohorts)
        seen = observed(60, np.repeat(np.arange(60), 2), clients, contributions[clients])
        found = estimate(seen, truth, None)
        held += int((np.abs(found.weights - truth) <= found.half_widths(0.95)).sum())
    assert 0.92 < held / 400 < 0.98


def test_standard_error_of_a_ratio() -> None:
    """Two clients that take turns at random: the share of one is a binomial share."""
    first = np.arange(1000) % 10 < 3
    seen = observed(1000, np.arange(1000), np.where(first, 0, 1), np.ones(1000))
    found = estimate(seen, np.array([0.5, 0.5]), None)
    np.testing.assert_allclose(found.weights, [0.3, 0.7])
    np.testing.assert_allclose(found.errors, np.sqrt(0.3 * 0.7 / 999), rtol=1e-12)
