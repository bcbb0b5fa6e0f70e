"""Partitioners: everyone gets an example, and the mix is the one that was asked for."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import Federation, FedShuffleError
from fedshuffle._arrays import IntArray
from fedshuffle.data import partition
from fedshuffle.randomness import Purpose, generator

ANYHOW: Any = partition

SPLITS: dict[str, Callable[[IntArray, int, int], IntArray]] = {
    "dirichlet": lambda labels, n, seed: partition.dirichlet(labels, n, 0.1, seed),
    "concentrated": lambda labels, n, seed: partition.dirichlet(labels, n, 1e-9, seed),
    "lognormal": lambda labels, n, seed: partition.lognormal(len(labels), n, 2.0, seed),
    "pachinko": lambda labels, n, seed: partition.pachinko(labels // 3, labels, n, seed=seed),
    "narrow": lambda labels, n, seed: partition.pachinko(
        labels // 3, labels, n, alpha=1e-9, beta=1e-9, seed=seed
    ),
}


@pytest.mark.parametrize("name", SPLITS)
@given(
    labels=st.lists(st.integers(0, 8), min_size=1, max_size=40),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_everyone_gets_an_example(name: str, labels: list[int], share: float, seed: int) -> None:
    clients = max(1, round(share * len(labels)))
    owner = SPLITS[name](np.array(labels), clients, seed)
    assert owner.shape == (len(labels),)
    assert sorted(set(owner.tolist())) == list(range(clients))
    assert np.array_equal(owner, SPLITS[name](np.array(labels), clients, seed))
    sizes = np.bincount(owner)
    if name in ("pachinko", "narrow"):
        assert sizes.max() - sizes.min() <= 1
    assert len(Federation.from_arrays(labels, client_ids=owner)) == clients


@pytest.mark.parametrize("name", SPLITS)
def test_another_seed_is_another_split(name: str) -> None:
    labels = np.repeat(np.arange(9), 20)
    assert not np.array_equal(SPLITS[name](labels, 5, 0), SPLITS[name](labels, 5, 1))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_second_moment_of_the_distribution(alpha: float) -> None:
    """E sum_i p_i^2 = (alpha + 1) / (n alpha + 1)."""
    kinds, each, clients = 400, 300, 6
    labels = np.repeat(np.arange(kinds), each)
    counts = np.zeros((kinds, clients))
    np.add.at(counts, (labels, partition.dirichlet(labels, clients, alpha)), 1)
    squares = ((counts / each) ** 2).sum(1)
    want = (alpha + 1) / (clients * alpha + 1)
    assert abs(squares.mean() - want) < 4 * squares.std() / np.sqrt(kinds) + 1 / each


def test_dirichlet_at_its_ends() -> None:
    labels = np.array(["cat"] * 60 + ["dog"] * 60)
    even = partition.dirichlet(labels, 6, 1e12)
    assert np.bincount(even[:60]).tolist() == np.bincount(even[60:]).tolist() == [10] * 6
    alone = partition.dirichlet(labels, 6, 1e-12)
    assert sorted(np.bincount(alone).tolist())[:4] == [1] * 4  # what two clients had to give


def test_lognormal_sizes() -> None:
    assert np.bincount(partition.lognormal(103, 10, 0)).tolist() == pytest.approx(
        [10.3] * 10, abs=1
    )
    sizes = np.bincount(partition.lognormal(10_000_000, 1000, 1.5))
    assert abs(np.log(sizes).std() - 1.5) < 4 * 1.5 / np.sqrt(2 * 1000)
    # The client of a row does not depend on its position.
    halves = np.bincount(partition.lognormal(10_000, 2, 0)[:5_000])
    assert abs(halves[0] - 2_500) < 4 * 25


def test_drawing_without_room_is_drawing_one_by_one() -> None:
    """Against the exact probabilities of all ways to draw one after another."""
    shares, room, size = np.array([0.5, 0.3, 0.15, 0.05]), np.array([1, 2, 1, 3]), 4

    exact: dict[tuple[int, ...], float] = defaultdict(float)

    def go(taken: tuple[int, ...], probability: float) -> None:
        if sum(taken) == size:
            exact[taken] += probability
            return
        open = [k for k in range(4) if taken[k] < room[k]]
        for k in open:
            more = tuple(t + (j == k) for j, t in enumerate(taken))
            go(more, probability * shares[k] / shares[open].sum())

    go((0, 0, 0, 0), 1.0)
    draws = 20_000
    rng = generator(0, Purpose.SPLIT)
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for _ in range(draws):
        found[tuple(partition._draw(rng, np.log(shares), room, size).tolist())] += 1
    assert found.keys() <= exact.keys()
    for taken, p in exact.items():
        assert abs(found[taken] / draws - p) < 4.5 * np.sqrt(p * (1 - p) / draws)


def test_pachinko_mixes_as_its_distributions_say() -> None:
    """Two examples of a client share their label with probability (a + 1) / (n a + 1)."""
    alpha, beta, size, clients = 0.5, 2.0, 40, 300
    fine = np.repeat(np.arange(20), 2 * size)  # enough that no label runs out
    coarse = fine // 5
    same_coarse, same_fine, pairs = 0.0, 0.0, 0.0
    for seed in range(clients):
        owner = partition.allocate(
            coarse, fine, np.array([size]), alpha=alpha, beta=beta, seed=seed
        )
        assert sorted(set(owner.tolist())) == [-1, 0]
        mine = np.bincount(fine[owner == 0], minlength=20)
        assert mine.sum() == size
        by_coarse = mine.reshape(4, 5).sum(1)
        same_coarse += (by_coarse * (by_coarse - 1)).sum()
        same_fine += (mine * (mine - 1)).sum()
        pairs += size * (size - 1)
    assert same_coarse / pairs == pytest.approx((alpha + 1) / (4 * alpha + 1), rel=0.1)
    assert same_fine / same_coarse == pytest.approx((beta + 1) / (5 * beta + 1), rel=0.1)


def test_pachinko_gives_all_of_cifar_to_500_clients() -> None:
    fine = np.tile(np.arange(100), 500)
    owner = partition.pachinko(fine // 5, fine, 500)
    assert np.bincount(owner).tolist() == [100] * 500
    kinds = [len(set((fine // 5)[owner == k].tolist())) for k in range(0, 500, 25)]
    assert np.mean(kinds) < 12  # of 20: a uniform split would show nearly all


def test_labels_twice_are_clients_of_equal_sizes_with_mixes_of_labels() -> None:
    labels = ["a", "b", "c", "d"] * 25
    owner = partition.pachinko(labels, labels, 10, alpha=1e-6)
    assert np.bincount(owner).tolist() == [10] * 10
    assert len(set(np.array(labels)[owner == 0].tolist())) == 1


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (["b", "a", "b"], ["b", "a", "b"]),
        ([3, 1, 3], [3, 1, 3]),
        (np.array([2.0, 5.0]), [2, 5]),
        (np.array(["x", "y"]), ["x", "y"]),
        (pd.Series(["x", "y"], dtype="string"), ["x", "y"]),
        (pd.Series([1, 2], dtype="Int64"), [1, 2]),
    ],
)
def test_by_column(values: Any, want: list[Any]) -> None:
    found = partition.by_column(values)
    assert found.tolist() == want
    assert list(Federation.from_arrays(np.arange(len(want)), client_ids=found).ids) == sorted(
        set(want)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], "row 1"),
        (["a", ""], "row 1 names no client"),
        ([1.0, float("nan")], "row 1"),
        (["a", float("nan")], "row 1"),
        (pd.Series([1, None], dtype="Int64"), "row 1 names no client"),
        ([0.5, 1.0], "float"),
        (["a", 1], "int, str"),
        ([1e30], "float"),
        ([], "shape"),
        ([[1, 2]], "shape"),
    ],
)
def test_columns_that_name_no_clients(values: Any, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        partition.by_column(values)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda: ANYHOW.dirichlet([0, 1], 3, 1.0), "too few"),
        (lambda: ANYHOW.lognormal(2, 3, 1.0), "at most 2"),
        (lambda: ANYHOW.pachinko([0, 1], [0, 1], 3), "too few"),
        (lambda: ANYHOW.dirichlet([0, 1], 0, 1.0), "clients is 0"),
        (lambda: ANYHOW.dirichlet([0, 1], 1.5, 1.0), "clients is 1.5"),
        (lambda: ANYHOW.dirichlet([0, 1], 2, 0.0), "alpha is 0.0"),
        (lambda: ANYHOW.dirichlet([0, 1], 2, "x"), "alpha is 'x'"),
        (lambda: ANYHOW.dirichlet([0, 1], 2, 1.0, seed=-1), "seed is -1"),
        (lambda: ANYHOW.dirichlet([], 1, 1.0), "shape"),
        (lambda: ANYHOW.dirichlet([[0, 1]], 1, 1.0), "shape"),
        (lambda: ANYHOW.dirichlet([0, np.nan], 1, 1.0), "labels: row 1 has nan"),
        (lambda: ANYHOW.dirichlet([None, 1], 1, 1.0), "labels mix"),
        (lambda: ANYHOW.lognormal(0, 1, 1.0), "examples is 0"),
        (lambda: ANYHOW.lognormal(9, 3, -1.0), "spread is -1"),
        (lambda: ANYHOW.lognormal(9, 3, float("nan")), "spread is nan"),
        (lambda: ANYHOW.pachinko([0, 1], [0], 1), "coarse"),
        (lambda: ANYHOW.pachinko([0, 1], [0, 1], 1, beta=-1), "beta is -1"),
    ],
)
def test_what_cannot_be_split(split: Any, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        split()
