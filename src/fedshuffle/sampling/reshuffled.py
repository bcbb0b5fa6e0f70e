"""Client reshuffling: every client once per meta-epoch, in random order."""

import numpy as np

from fedshuffle._arrays import IntArray, count, frozen
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import Cohorts, EqualPairCorrelation
from fedshuffle.sampling.uniform import Uniform


class Reshuffled(EqualPairCorrelation):
    """Each client takes part once per meta-epoch of ``T = ceil(n / b)`` rounds, in random order.

    At the start of every meta-epoch the clients are shuffled and dealt out to its rounds: b to
    each, or, if b does not divide n, as equally as possible. So a cohort is a uniform one, and
    ``p = 1/T`` (which is b/n if b divides n), but over a meta-epoch nothing is left to chance: the
    aggregation weights ``w / p`` of all its rounds sum to ``T w`` for certain.

    Malinovsky, Horvath, Burlachenko and Richtarik, Federated Learning with Regularized Client
    Participation, 2023.

        >>> sampling = Reshuffled(6, 2)
        >>> sampling.period, sampling.p.round(3).tolist()[:2]
        (3, [0.333, 0.333])
        >>> sorted(i for round in range(3) for i in sampling.draw(seed=0, round=round).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    independent_rounds = False

    def __init__(self, n: int, b: int) -> None:
        n = count(n, "the number of clients")
        self.b = count(b, "the number of sampled clients", most=n)
        self.period = -(-n // self.b)
        self.sizes: IntArray = frozen(np.diff(np.arange(self.period + 1) * n // self.period))
        """The number of clients of each round of a meta-epoch."""
        self.p = frozen(np.full(n, 1 / self.period))
        pairs = float((self.sizes * (self.sizes - 1)).mean()) / max(n * (n - 1), 1)
        self.rho = pairs * self.period**2 if n > 1 else 1.0
        self._shuffled: tuple[tuple[int, int], IntArray] | None = None

    def __repr__(self) -> str:
        return f"reshuffled:{self.b}"

    def at(self, round: int) -> Uniform:
        return Uniform(len(self), int(self.sizes[round % self.period]))

    def kind_of_round(self, round: int) -> int:
        return int(self.sizes[round % self.period])

    def draw(self, seed: int, round: int) -> IntArray:
        epoch, k = divmod(round, self.period)
        if self._shuffled is None or self._shuffled[0] != (seed, epoch):  # for the next rounds
            order = generator(seed, Purpose.COHORT, round=epoch).permutation(len(self))
            self._shuffled = (seed, epoch), order
        begin, n = k * len(self) // self.period, int(self.sizes[k])
        return np.sort(self._shuffled[1][begin : begin + n])

    def cohorts(self, limit: int) -> Cohorts | None:
        total: dict[tuple[int, ...], float] = {}
        for size, often in zip(*np.unique(self.sizes, return_counts=True), strict=True):
            listed = Uniform(len(self), int(size)).cohorts(limit)
            if listed is None:
                return None
            for members, q in listed:
                total[tuple(members.tolist())] = q * int(often) / self.period
        return Cohorts.of(list(total.items())) if len(total) <= limit else None
