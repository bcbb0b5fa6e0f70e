"""Search for the best settings on a lattice, from neighbour to neighbour.

The best point must be better than all its neighbours, so no value of it lies at an edge: where one
would, the lattice grows beyond its end, up to a limit.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Point = tuple[float, ...]
"""One value per axis."""

SPACING = math.sqrt(10)
"""The ratio of neighbours where a single value is given."""

EQUAL = 0.01
"""Losses that differ by no more than this share of the largest decrease count as equal."""
CAUTION = 0.05
"""The same where smaller steps are preferred: what is best in a short run is often too large."""


@dataclass(frozen=True)
class Axis:
    """Positive values of a setting, such as step sizes: those given, and others beyond their ends.

    Beyond an end the values go on at a ratio, in two significant digits, up to ``widen`` times the
    end. Unless it is given, it is the mean ratio of those given (at least 2, at most 10).

    >>> axis = Axis((0.01, 0.03, 0.1), widen=10)
    >>> axis.neighbours(0.03), axis.neighbours(0.1), axis.neighbours(0.32), axis.neighbours(1.0)
    ([0.01, 0.1], [0.03, 0.32], [0.1, 1.0], [0.32])
    >>> Axis((1.0,), widen=1).neighbours(1.0)
    []
    """

    given: tuple[float, ...]
    widen: float = 1000.0
    ratio: float | None = None

    @cached_property
    def values(self) -> list[float]:
        """All values, in order."""
        given = sorted(map(float, self.given))
        ratio = self.ratio or SPACING
        if self.ratio is None and len(given) > 1:
            ratio = min(max((given[-1] / given[0]) ** (1 / (len(given) - 1)), 2.0), 10.0)
        beyond = math.floor(math.log(self.widen * (1 + 1e-9), ratio))
        factors = [ratio**k for k in range(1, beyond + 1)]
        below = [_rounded(given[0] / factor) for factor in reversed(factors)]
        return [*below, *given, *(_rounded(given[-1] * factor) for factor in factors)]

    @property
    def middle(self) -> float:
        """The given value from which a search starts; the larger one of two in the middle."""
        return sorted(map(float, self.given))[len(self.given) // 2]

    def neighbours(self, value: float) -> list[float]:
        """The next smaller and the next larger value, where there are any."""
        at = self.values.index(value)
        return self.values[max(0, at - 1) : at] + self.values[at + 1 : at + 2]


@dataclass(frozen=True)
class Choices:
    """Values of a setting without an order: each is a neighbour of all others.

    >>> Choices((0.0, 1e-4)).neighbours(0.0)
    [0.0001]
    """

    given: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The value from which a search starts: the first."""
        return self.given[0]

    def neighbours(self, value: float) -> list[float]:
        """All other values."""
        return [other for other in self.given if other != value]


@dataclass(frozen=True)
class Lattice:
    """The points of several axes. Where training diverges, the first axis is lowered first.

    Args:
        axes: the values of each setting.
        trade: whether a step along the second axis takes one back along the first. If these are the
            server's and the local step size, it keeps their product, and so about the distance that
            a round moves: else a search would stop in the narrow valley along which it is constant.
        alone: whether steps along the second axis alone are tried as well where it trades.
        start: the loss before training. If given, losses that differ by at most 1% of the largest
            decrease count as equal.

    >>> lattice = Lattice((Axis((0.1, 1.0, 10.0)), Axis((1.0,))))
    >>> [lattice.best({(0.1, 1.0): 3.0, (1.0, 1.0): 2.0}), lattice.middle]
    [(1.0, 1.0), (1.0, 1.0)]
    >>> lattice.untried({(0.1, 1.0): 3.0, (1.0, 1.0): 2.0, (10.0, 1.0): None})
    [(1.0, 0.32), (1.0, 3.2)]
    >>> Lattice(lattice.axes, trade=True).untried({(1.0, 1.0): 2.0})
    [(0.1, 1.0), (10.0, 1.0), (10.0, 0.32), (0.1, 3.2)]
    >>> Lattice(lattice.axes, trade=True, alone=True).untried({(1.0, 1.0): 2.0})
    [(0.1, 1.0), (10.0, 1.0), (1.0, 0.32), (10.0, 0.32), (1.0, 3.2), (0.1, 3.2)]
    """

    axes: Sequence[Axis | Choices]
    trade: bool = False
    alone: bool = False
    start: float | None = None

    @property
    def middle(self) -> Point:
        """The point in the middle."""
        return tuple(axis.middle for axis in self.axes)

    @property
    def given(self) -> list[Point]:
        """The product of the given values."""
        return list(itertools.product(*(map(float, axis.given) for axis in self.axes)))

    def best(self, losses: Mapping[Point, float | None]) -> Point:
        """The point with the lowest loss, the first of equal ones.

        None stands for a run that diverged; if all did, it is the one with the smallest values, the
        first axis first.
        """
        equal = self.nearly_best(losses)
        return equal[0] if equal else min(losses)

    def least(self, losses: Mapping[Point, float]) -> Point:
        """Of the points with about the lowest loss (up to ``CAUTION``) the one with the smallest
        product.

        >>> Lattice((Axis((1.0,)), Axis((1.0,))), start=3.0).least({(1.0, 1.0): 2, (0.32, 1.0): 2})
        (0.32, 1.0)
        """
        equal = self.nearly_best(losses, CAUTION)
        first, ratio = math.prod(equal[0]), math.sqrt(SPACING)  # products of rounded values differ
        return min(equal, key=lambda point: round(math.log(math.prod(point) / first, ratio)))

    def nearly_best(
        self, losses: Mapping[Point, float | None], share: float = EQUAL
    ) -> list[Point]:
        """The points with the lowest loss, in the order in which they were tried."""
        finite = {point: loss for point, loss in losses.items() if loss is not None}
        lowest = min(finite.values(), default=0.0)
        slack = 0.0 if self.start is None else share * max(0.0, self.start - lowest)
        return [point for point, loss in finite.items() if loss <= lowest + slack]

    def untried(self, losses: Mapping[Point, float | None]) -> list[Point]:
        """The neighbours of the best point that were not tried yet; none ends the search."""
        best = self.best(losses)
        untried = [point for point in self._neighbours(best) if point not in losses]
        if losses[best] is None:  # all diverged: only downwards
            return [point for point in untried if point < best][:1]
        return untried

    def _neighbours(self, point: Point) -> Iterable[Point]:
        for k, axis in enumerate(self.axes):
            for value in axis.neighbours(point[k]):
                trades = self.trade and k == 1
                if self.alone or not trades:
                    yield (*point[:k], value, *point[k + 1 :])
                for other in self.axes[0].neighbours(point[0]) if trades else ():
                    if (other < point[0]) == (value > point[1]):
                        yield (other, value, *point[2:])


def descend(
    lattice: Lattice, loss: Callable[[Point], float | None], start: Iterable[Point] = ()
) -> dict[Point, float | None]:
    """The loss at every point that the search tries, in order.

    >>> bowl = lambda point: (math.log10(point[0]) - 2) ** 2 + math.log10(point[1]) ** 2
    >>> found = descend(Lattice((Axis((0.1, 1.0)), Axis((1.0,)))), bowl)
    >>> Lattice((Axis((0.1, 1.0)), Axis((1.0,)))).best(found), len(found)
    ((100.0, 1.0), 11)
    """
    found: dict[Point, float | None] = {}
    todo = list(start) or [lattice.middle]
    while todo:
        for point in todo:
            found[point] = loss(point)
        todo = lattice.untried(found)
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
