"""The search from neighbour to neighbour, against all points of the lattice."""

import itertools
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedshuffle.tuning.search import Axis, Choices, Lattice, Point, descend

SIZES = st.floats(1e-6, 1e3)
GRIDS = st.lists(SIZES, min_size=1, max_size=5, unique_by=lambda size: f"{size:.1g}")


def two_digits(value: float) -> bool:
    return value == float(f"{value:.2g}")


# Axes


@given(GRIDS, st.floats(1, 1e6))
def test_an_axis_goes_on_beyond_both_ends(sizes: list[float], widen: float) -> None:
    values = Axis(tuple(sizes), widen).values
    assert values == sorted(set(values))
    low, high = min(sizes), max(sizes)
    assert [value for value in values if low <= value <= high] == sorted(sizes)
    below = [value for value in values if value < low]
    above = [value for value in values if value > high]
    assert len(below) == len(above)
    assert all(map(two_digits, below + above))
    rounding = 1.06  # of two significant digits
    for one, other in pairwise([*above[:1], *above]):
        assert one == other or 2 / rounding <= other / one <= 10 * rounding
    farthest = max([1.0, *(low / value for value in below), *(value / high for value in above)])
    assert farthest <= rounding * widen
    mean = (high / low) ** (1 / (len(sizes) - 1)) if len(sizes) > 1 else math.sqrt(10)
    ratio = min(max(mean, 2), 10)
    assert ratio ** len(above) <= 1.001 * widen < 1.01 * ratio ** (len(above) + 1)  # no fewer


@pytest.mark.parametrize(
    ("sizes", "widen", "values"),
    [
        ((1.0,), 10, [0.1, 0.32, 1.0, 3.2, 10.0]),
        ((0.03, 0.1), 10, [0.009, 0.03, 0.1, 0.33]),
        ((0.1, 0.03), 1, [0.03, 0.1]),
        ((1.0, 1.1), 4, [0.25, 0.5, 1.0, 1.1, 2.2, 4.4]),  # nearer than 2
        ((1.0, 1000.0), 10, [0.1, 1.0, 1000.0, 10_000.0]),  # further than 10
    ],
)
def test_axes_by_hand(sizes: tuple[float, ...], widen: float, values: list[float]) -> None:
    axis = Axis(sizes, widen)
    assert axis.values == values
    for k, value in enumerate(values):
        around = [values[j] for j in (k - 1, k + 1) if 0 <= j < len(values)]
        assert axis.neighbours(value) == around


def test_the_search_starts_in_the_middle_of_what_is_given() -> None:
    assert [Axis(given).middle for given in ((3.0, 1.0, 2.0), (2.0, 1.0), (5.0,))] == [2, 2, 5]
    assert Choices((7.0, 1.0)).middle == 7


# Searches


def points(lattice: Lattice) -> list[Point]:
    """All points of a lattice."""
    return list(itertools.product(*(getattr(axis, "values", axis.given) for axis in lattice.axes)))


def bowl(
    centres: list[float], powers: list[float], limits: list[float]
) -> Callable[[Point], float | None]:
    """``sum_k |log(v_k / centre_k)|^power_k``; it diverges where an axis is above its limit.

    The last axis has no order: its values have losses like random ones.
    """

    def loss(point: Point) -> float | None:
        if any(value > limit for value, limit in zip(point, limits, strict=False)):
            return None
        terms = zip(point, centres, powers, strict=False)
        distances = [abs(math.log(value / centre)) ** power for value, centre, power in terms]
        return math.fsum(distances) + math.sin(1e3 * point[-1])

    return loss


def checked(lattice: Lattice, loss: Callable[[Point], float | None], start: list[Point]) -> Point:
    """The result of a search, which must be the best of all points of the lattice."""
    found = descend(lattice, loss, start)
    best = lattice.best(found)
    everywhere = {point: loss(point) for point in points(lattice)}
    finite = [value for value in everywhere.values() if value is not None]
    reached = found[best]
    assert reached is not None
    assert reached == pytest.approx(min(finite), rel=1e-9, abs=1e-9)
    for k, axis in enumerate(lattice.axes):  # it is no end of what was tried
        assert all((*best[:k], v, *best[k + 1 :]) in found for v in axis.neighbours(best[k]))
    return best


@given(
    st.tuples(GRIDS, GRIDS),
    st.lists(st.floats(1e-9, 1e6), min_size=2, max_size=2),
    st.lists(st.floats(1, 3), min_size=2, max_size=2),
    st.lists(st.floats(1e-9, 1e6), min_size=2, max_size=2),
    st.floats(1, 1e4),
    st.booleans(),
)
def test_the_best_of_all_points_is_found_where_axes_do_not_interact(
    grids: tuple[list[float], list[float]],
    centres: list[float],
    powers: list[float],
    limits: list[float],
    widen: float,
    whole: bool,
) -> None:
    one, other = (Axis(tuple(grid), widen) for grid in grids)
    lattice = Lattice((one, other, Choices((0.0, 5.0, 2.0))))
    loss = bowl(centres, powers, limits)
    assume(any(loss(point) is not None for point in points(lattice)))
    checked(lattice, loss, lattice.given if whole else [])


@given(GRIDS, st.floats(1e-9, 1e6), st.floats(1e-9, 1e6), st.floats(1, 1e4))
def test_a_grid_of_one_axis_is_widened_beyond_the_end_that_is_best(
    grid: list[float], centre: float, limit: float, widen: float
) -> None:
    assume(len(grid) > 1)
    values = Axis(tuple(grid), widen).values
    bowl_of_one = bowl([centre], [2], [limit])

    def loss(point: Point) -> float | None:
        return bowl_of_one((*point, 0.0))

    tried = {size: loss((size,)) for size in grid}
    while True:
        finite = {size: value for size, value in tried.items() if value is not None}
        best = min(finite, key=lambda size: finite[size]) if finite else min(tried)
        outwards = {min(tried): -1} | ({max(tried): 1} if finite else {})
        at = values.index(best) + outwards.get(best, 0)
        if not 0 <= at < len(values) or values[at] in tried:
            break
        tried[values[at]] = loss((values[at],))
    lattice = Lattice((Axis(tuple(grid), widen),))
    assert descend(lattice, loss, lattice.given) == {(size,): x for size, x in tried.items()}


@given(GRIDS, GRIDS, st.tuples(SIZES, SIZES))
def test_the_number_of_trials_grows_with_the_way_not_with_the_lattice(
    one: list[float], other: list[float], centre: tuple[float, float]
) -> None:
    lattice = Lattice((Axis(tuple(one)), Axis(tuple(other))))
    loss = bowl(list(centre), [2, 2], [math.inf] * 2)
    tried = descend(lattice, lambda point: loss((*point, 0.0)))
    best = lattice.best(tried)
    way = sum(
        abs(axis.values.index(value) - axis.values.index(start))
        for axis, value, start in zip(lattice.axes, best, lattice.middle, strict=True)
        if isinstance(axis, Axis)
    )
    assert len(tried) <= 1 + 4 * (1 + way)


def test_two_step_sizes_cost_about_ten_trials_where_the_grid_has_twenty_five() -> None:
    sizes = (0.01, 0.03, 0.1, 0.3, 1.0)
    lattice = Lattice((Axis(sizes), Axis(sizes)))
    assert len(lattice.given) == 25
    near = bowl([0.3, 0.1], [2, 2], [math.inf] * 2)
    found = descend(lattice, lambda point: near((*point, 0.0)))
    assert lattice.best(found) == (0.3, 0.1)
    assert len(found) == 8


def test_of_equal_points_the_first_is_the_best() -> None:
    lattice = Lattice((Axis((1.0, 2.0, 4.0)), Axis((1.0,))))
    found = descend(lattice, lambda point: 0.5)
    assert next(iter(found)) == lattice.best(found) == (2.0, 1.0)
    assert len(found) == 5  # and its neighbours are the last that is tried
    assert lattice.best({(4.0, 1.0): 0.5, (1.0, 1.0): 0.5, (2.0, 1.0): 0.75}) == (4.0, 1.0)


def test_a_neighbour_that_diverged_is_not_tried_again() -> None:
    lattice = Lattice((Axis((1.0, 2.0), widen=1), Axis((1.0,), widen=1)))
    losses: dict[Point, float | None] = {(2.0, 1.0): None, (1.0, 1.0): 3.0}
    assert lattice.best(losses) == (1.0, 1.0)
    assert lattice.untried(losses) == []


def test_where_everything_diverged_the_search_goes_down_only() -> None:
    lattice = Lattice((Axis((1.0, 2.0), widen=4), Axis((1.0, 2.0), widen=2), Choices((0.0, 1.0))))
    found = descend(lattice, lambda point: None)
    assert list(found) == [
        *((2.0, 2.0, 0.0), (1.0, 2.0, 0.0), (0.5, 2.0, 0.0), (0.25, 2.0, 0.0)),
        *((0.25, 1.0, 0.0), (0.25, 0.5, 0.0)),
    ]
    assert lattice.best(found) == (0.25, 0.5, 0.0)
    first = Lattice((Choices((1.0,)), Axis((1.0, 2.0), widen=2)))  # what cannot be lowered is left
    assert list(descend(first, lambda point: None)) == [(1.0, 2.0), (1.0, 1.0), (1.0, 0.5)]
