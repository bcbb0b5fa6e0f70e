"""The bound for reshuffled clients, against the exact mean over all orders."""

import itertools
from typing import Any

import numpy as np
import pytest

from fedshuffle import FedShuffleError
from fedshuffle.sampling import Reshuffled
from fedshuffle.theory import ProblemConstants, quadratic_constants, reshuffled_bound
from tests import brute

H = np.array([[1.0, 0.5], [2.0, 1.5], [0.6, 1.0], [0.8, 1.2]])
"""Four clients of two examples, with losses ``h/2 (x - m)^2``."""
M = np.array([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0], [0.0, 1.5]])


def orders(b: int) -> list[tuple[list[tuple[int, ...]], tuple[tuple[int, ...], ...]]]:
    """All orders of clients, cut into cohorts, with all orders of their examples."""
    clients = [
        [order[k : k + b] for k in range(0, 4, b)] for order in itertools.permutations(range(4))
    ]
    return list(itertools.product(clients, itertools.product([(0, 1), (1, 0)], repeat=4)))


def exact(b: int, step_size: float, start: float, meta_epochs: int, epochs: int) -> brute.Floats:
    """The mean squared distance: a meta-epoch maps z = x - x* to a z + c."""
    optimum = (H * M).sum() / H.sum()
    maps = []
    for cohorts, own in orders(b):
        a, c = 1.0, 0.0
        for cohort in cohorts:
            ends = []
            for client in cohort:
                a_i, c_i = a, c
                for j in own[client] * epochs:
                    keep = 1 - step_size * H[client, j]
                    a_i, c_i = keep * a_i, keep * c_i + (1 - keep) * (M[client, j] - optimum)
                ends.append((a_i, c_i))
            a, c = np.mean(ends, axis=0)
        maps.append((a, c))
    a, c = np.array(maps).T
    first, second, found = np.sqrt(start), start, [start]
    for _ in range(meta_epochs):
        second = np.mean(a**2) * second + 2 * np.mean(a * c) * first + np.mean(c**2)
        first = np.mean(a) * first + np.mean(c)
        found.append(second)
    return np.array(found)


@pytest.mark.parametrize(("b", "epochs"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_the_bound_holds_and_goes_with_the_square_of_the_step_size(b: int, epochs: int) -> None:
    found = quadratic_constants(H.reshape(8, 1, 1), M.reshape(8, 1), sizes=[2] * 4, radius=0.0)
    assert (found.L, found.mu, found.G > 0, found.B) == (2.0, 0.5, True, 1.0)
    ends = []
    for step_size in (0.5, 0.1, 0.025):
        settings: dict[str, Any] = {"step_size": step_size, "start": 4.0, "meta_epochs": 400}
        bound = reshuffled_bound(
            found.problem, Reshuffled(4, b), steps=2, epochs=epochs, **settings
        )
        want = exact(b, epochs=epochs, **settings)
        assert (bound >= want * (1 - 1e-12)).all()
        ends.append(bound[-1])
    assert ends[1] / ends[2] == pytest.approx(16, rel=0.15)


@pytest.mark.parametrize("b", [1, 2])
def test_the_noise_is_that_of_the_sums_of_gradients_at_the_optimum(b: int) -> None:
    """With L = mu = 1 and a step size of nearly 0 the bound adds the sum of all V_ri."""
    optimum = (H * M).sum() / H.sum()
    g = H * (optimum - M)
    total = []
    for cohorts, own in orders(b):
        moved, squares = 0.0, 0.0
        for cohort in cohorts:
            for client in cohort:
                sums = moved + np.cumsum([0.0, *(g[client, j] for j in own[client])])[:2]
                squares += float((sums**2).sum()) / b
            moved += float(np.mean([g[client].sum() for client in cohort]))
        total.append(squares)
    mean = g.mean(axis=1)
    sigma = np.sqrt(((g - mean[:, None]) ** 2).mean(axis=1))
    problem = ProblemConstants(1.0, float(np.sqrt(np.mean(mean**2))), 1.0, 0.0, sigma, 1.0)
    tiny = 1e-6
    bound = reshuffled_bound(
        problem, Reshuffled(4, b), steps=2, step_size=tiny, start=0.0, meta_epochs=1
    )
    assert bound[1] / tiny**3 == pytest.approx(np.mean(total), rel=1e-4)


def test_where_nothing_is_proven() -> None:
    problem = ProblemConstants(2.0, 1.0, mu=0.1)
    settings: dict[str, Any] = {"start": 1.0, "meta_epochs": 3}
    for given, b, step_size, words in (
        (problem, 3, 0.1, "divides 4, not 3"),
        (ProblemConstants(2.0), 2, 0.1, "give mu"),
        (problem, 2, 0.6, "1 / L = 0.5"),
    ):
        with pytest.raises(FedShuffleError, match=words):
            reshuffled_bound(given, Reshuffled(4, b), steps=2, step_size=step_size, **settings)
