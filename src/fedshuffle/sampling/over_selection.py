r"""Over-selection: ask M clients, take the first K.

Client i is asked with probability M/n, and is then among the first K if fewer than K of the others
that are asked are earlier. Let :math:`F_j(t)` be the probability of client j to be done at time t.
How many of *all* others are done, m, is a sum of independent coins with these chances, and of m
such clients a hypergeometric number is among the M - 1 that are asked. So

.. math:: p_i = \frac{M}{n} \int E\big[ h(m) \big]\, dF_i(t), \qquad
          h(m) = P\big( \mathrm{Hypergeometric}(n - 1, m, M - 1) < K \big),

where the expectation leaves out client i (:mod:`fedshuffle.sampling.poisson_binomial`). Clients
that are done at the same time come in the order of their numbers.
"""

import itertools
import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, frozen
from fedshuffle.errors import FedShuffleError
from fedshuffle.sampling.base import Cohorts, Sampling, enumerated
from fedshuffle.sampling.poisson_binomial import without_one
from fedshuffle.sampling.uniform import Uniform
from fedshuffle.timing import NoJitter, OverSelection, Tasks

_TAILS = 10.0 ** -np.array([1, 2, 3, 5, 8, 12])
_LEVELS = np.concatenate([[0.0], _TAILS, np.linspace(0.2, 0.8, 7), 1 - _TAILS])
"""Probabilities whose quantiles, of every client, are ends of cells of the quadrature."""
_GAUSS = np.polynomial.legendre.leggauss(10)  # nodes and weights in a cell
_CELLS, _MOST_CELLS = 64, 4096
_ACCURACY = 1e-8
_MOST_WORK = 4e7  # clients times nodes, or clients times tasks: about a minute


class OverSelected(Sampling):
    """The first K updates of M clients that are drawn uniformly; ``p`` depends on speed.

    >>> from fedshuffle import LocalWork
    >>> from fedshuffle.timing import Clock
    >>> work = LocalWork(steps=1).on(np.array([1, 1, 1]))
    >>> OverSelected(OverSelection(keep=1, ask=2), Tasks(Clock([1, 2, 3]), work)).p.round(4)
    array([0.6667, 0.3333, 0.    ])
    """

    def __init__(self, rule: OverSelection, tasks: Tasks) -> None:
        self.rule, self.tasks = rule, tasks
        self._asked = Uniform(len(tasks), rule.ask)
        self._h = _Hypergeometric(len(tasks), rule.ask, rule.keep)
        self.fixed = isinstance(tasks.clock.jitter, NoJitter)
        """Whether every task of a client takes equally long."""
        each = self._fixed_times() if self.fixed else self._varying_times()
        each *= rule.ask / len(tasks)
        self.p: FloatArray = frozen(np.clip(each.sum(axis=1), 0.0, 1.0))
        self.step_chances = each / np.maximum(self.p, 1e-300)[:, None]

    def __repr__(self) -> str:
        return str(self.rule)

    def draw(self, seed: int, round: int) -> IntArray:
        asked = self._asked.draw(seed, round)
        order = np.argsort(self.tasks.durations(seed, round, asked), kind="stable")
        return np.sort(asked[order[: self.rule.keep]])

    # Inclusion probabilities ----------------------------------------------------------------------

    def _fixed_times(self) -> FloatArray:
        """The probability of an asked client to be early enough, with each of its steps: (n, A).

        Tasks are sorted by their times; ``before`` is how likely each client is done by then.
        """
        steps, chances = self.tasks.possible
        n, alternatives = steps.shape
        clients = np.repeat(np.arange(n), alternatives)
        clock, sizes = self.tasks.clock, self.tasks.sizes
        order = np.lexsort((clients, clock.mean(clients, steps.ravel(), sizes)))
        found = np.zeros(n * alternatives)
        if alternatives == 1:
            found[order] = self._h(np.arange(n))
            return found[:, None]
        self._check_work(float(n) * n * alternatives, "Give every client a fixed number of epochs")
        before = np.zeros(n)
        for task in order.tolist():
            i, alternative = divmod(task, alternatives)
            early = without_one(np.minimum(before, 1.0)[None], self._h)[0, i]
            found[task] = chances[alternative] * early
            before[i] += chances[alternative]
        return found.reshape(n, alternatives)

    def _varying_times(self) -> FloatArray:
        """The same where times vary: by quadrature, in finer cells until nothing changes."""
        cells, before = _CELLS, None
        while True:
            found = self._integrate(*self._nodes(cells))
            total = found.sum() * self.rule.ask / len(self.tasks)
            error = abs(total - self.rule.keep) / self.rule.keep  # exactly K take part
            if before is not None:
                error = max(error, float(np.abs(found - before).max()))
            if error < _ACCURACY and before is not None:
                return found
            if cells >= _MOST_CELLS:
                if error < math.sqrt(_ACCURACY):
                    return found
                raise FedShuffleError(
                    f"the inclusion probabilities of {self.rule} cannot be computed: the times of"
                    " clients hardly vary, each in its own way. Use a clock without jitter."
                )
            cells, before = 2 * cells, found

    def _ends(self) -> FloatArray:
        """Times between which all distributions are smooth, and none changes much."""
        clock, sizes, everyone = self.tasks.clock, self.tasks.sizes, np.arange(len(self.tasks))
        network = clock.network(everyone, sizes)
        factors = clock.jitter.quantile(_LEVELS)
        ends = [
            network[:, None] + clock.computing(everyone, steps)[:, None] * factors
            for steps in self.tasks.possible[0].T
        ]
        return np.unique(np.concatenate(ends))

    def _nodes(self, cells: int) -> tuple[FloatArray, FloatArray]:
        """The ends of cells, (C + 1,), and the nodes in each, (C, 10)."""
        ends = self._ends()
        if len(ends) > cells + 1:
            ends = ends[np.linspace(0, len(ends) - 1, cells + 1).round().astype(np.int64)]
        else:  # split every cell in equal parts
            parts = max(1, cells // max(len(ends) - 1, 1))
            fine = np.linspace(ends[:-1], ends[1:], parts, endpoint=False, axis=1)
            ends = np.append(fine.ravel(), ends[-1])
        half = np.diff(ends)[:, None] / 2
        nodes = ends[:-1, None] + half * (1 + _GAUSS[0])
        self._check_work(float(nodes.size) * self.tasks.possible[0].size, "Use sampling uniform")
        return ends, nodes

    def _integrate(self, ends: FloatArray, nodes: FloatArray) -> FloatArray:
        steps, chances = self.tasks.possible
        found = np.zeros(steps.shape)
        for cell, times in enumerate(nodes):
            edges, densities = self._distributions(ends[cell : cell + 2]), self._densities(times)
            mass = np.diff(edges, axis=0)[0]
            if not (mass > 0).any():
                continue
            weights = densities * _GAUSS[1][:, None, None]
            total = weights.sum(axis=0)
            # The mass of a cell is known exactly; where it begins or ends inside, only its place is
            # not.
            even = np.broadcast_to(_GAUSS[1][:, None, None] / 2, weights.shape)
            weights = np.where(total > 0, weights / np.where(total > 0, total, 1.0), even) * mass
            done = np.clip(self._distributions(times) @ chances, 0.0, 1.0)
            found += (weights * without_one(done, self._h)[:, :, None]).sum(axis=0) * chances
        return found

    def _distributions(self, times: FloatArray) -> FloatArray:
        """The probability to be done at each of some times: (times, n, A)."""
        return self._at(times, self.tasks.clock.in_time)

    def _densities(self, times: FloatArray) -> FloatArray:
        return self._at(times, self.tasks.clock.density)

    def _at(self, times: FloatArray, value: Callable[..., FloatArray]) -> FloatArray:
        everyone, steps = np.arange(len(self.tasks)), self.tasks.possible[0].T
        columns = [value(times[:, None], everyone, some, self.tasks.sizes) for some in steps]
        return np.stack(columns, axis=2)

    def _check_work(self, work: float, remedy: str) -> None:
        if work > _MOST_WORK:
            raise FedShuffleError(
                f"the inclusion probabilities of {self.rule} take too long for"
                f" {len(self.tasks):,} clients. {remedy}, or a deadline."
            )

    # Cohorts --------------------------------------------------------------------------------------

    def cohorts(self, limit: int) -> Cohorts | None:
        n, keep, ask = len(self), self.rule.keep, self.rule.ask
        random_steps = self.tasks.possible[0].shape[1] > 1
        if min(keep, n - keep) > 20 or math.comb(n, keep) > limit or random_steps:
            return None
        ways = 1 / math.comb(n, ask)
        rows = []
        for members in itertools.combinations(range(n), keep):
            chance = self._fixed_cohort(members) if self.fixed else self._varying_cohort(members)
            rows.append((members, ways * chance))
        return Cohorts.of([row for row in rows if row[1] > 0])

    def _fixed_cohort(self, members: tuple[int, ...]) -> float:
        """Among how many sets of asked clients these are the first."""
        last = int(self._rank[list(members)].max())
        return math.comb(len(self) - 1 - last, self.rule.ask - self.rule.keep)

    @cached_property
    def _rank(self) -> IntArray:
        clients, steps = np.arange(len(self)), self.tasks.possible[0][:, 0]
        times = self.tasks.clock.mean(clients, steps, self.tasks.sizes)
        rank = np.empty(len(self), dtype=np.int64)
        rank[np.lexsort((clients, times))] = clients
        return rank

    def _varying_cohort(self, members: tuple[int, ...]) -> float:
        """The same in expectation: all members are done, the last one just now, and the others
        that are asked are not.
        """
        done, weights = self._table
        inside = list(members)
        outside = np.setdiff1d(np.arange(len(self)), inside)
        later = np.zeros((self.rule.ask - self.rule.keep + 1, len(done)))
        later[0] = 1.0  # symmetric polynomials of the chances of the others to be late
        for j in outside:
            later[1:] += (1 - done[:, j]) * later[:-1]
        last = np.zeros(len(done))
        for i in inside:
            rest = [j for j in inside if j != i]
            last += weights[:, i] * done[:, rest].prod(axis=1)
        return float(last @ later[-1])

    @cached_property
    def _table(self) -> tuple[FloatArray, FloatArray]:
        """At many times: the probability of each client to be done, and of being done just now."""
        ends, nodes = self._nodes(max(len(self._ends()), 8 * _CELLS))
        half = np.diff(ends)[:, None] / 2
        times = nodes.ravel()
        weights = (half * _GAUSS[1]).ravel()
        return self._distributions(times)[:, :, 0], weights[:, None] * self._densities(times)[
            ..., 0
        ]

    def pair_probabilities(self) -> FloatArray:
        return enumerated(self).pair_probabilities(len(self))


class _Hypergeometric:
    """``P(fewer than K of the M - 1 others that are asked are done, if m of n - 1 are)``."""

    def __init__(self, n: int, ask: int, keep: int) -> None:
        self._known = np.full(n, np.nan)
        self._n, self._ask, self._keep = n, ask, keep

    def __call__(self, m: FloatArray | IntArray) -> FloatArray:
        # One more than all others may be asked for by a Fourier sum: it never happens.
        number = np.minimum(np.asarray(m, dtype=np.int64), self._n - 1)
        missing = np.unique(number[np.isnan(self._known[number])])
        if len(missing):
            self._known[missing] = self._below(missing)
        return self._known[number]

    def _below(self, m: IntArray) -> FloatArray:
        others, asked = self._n - 1, self._ask - 1
        few = self._keep <= self._ask - self._keep  # the shorter of the two sums
        x = np.arange(self._keep) if few else np.arange(self._keep, asked + 1)
        total = np.zeros(len(m))
        for some in np.array_split(np.arange(len(m)), 1 + len(m) * max(len(x), 1) // 2**20):
            here = m[some, None].astype(np.float64)
            with np.errstate(invalid="ignore"):
                logs = _log_ways(here, x) + _log_ways(others - here, asked - x)
            total[some] = np.exp(logs - _log_ways(float(others), float(asked))).sum(axis=1)
        return np.clip(total if few else 1 - total, 0.0, 1.0)


def _log_ways(n: FloatArray | float, k: FloatArray | IntArray | float) -> FloatArray:
    """The logarithm of n choose k; minus infinity if there is no way."""
    from scipy import special  # slow to import: only when needed

    inside = (np.asarray(k) >= 0) & (np.asarray(k) <= n)
    k = np.where(inside, k, 0.0)
    n = np.where(inside, n, 1.0)
    ways = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    return np.where(inside, ways, -np.inf)
