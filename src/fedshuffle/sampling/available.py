r"""A sampling among the clients that are there.

Client i is there with probability :math:`q_i`. Of those who are there, ``uniform:B`` asks B, or all
if there are fewer, and an asked client leaves before it answers with probability :math:`l_i`. So

.. math:: p_i = q_i\, E\Big[ \min\Big( 1, \frac{B}{1 + M_i} \Big) \Big]\, (1 - l_i),

where :math:`M_i` is the number of the others that are there. Where probabilities change with time,
p is the mean over the rounds of a period, so that the weights ``w / p`` are right in the long run.
"""

import itertools
import math
from collections.abc import Iterator
from functools import cached_property, partial

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, frozen
from fedshuffle.availability import Always, Availability, Groups
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling.base import Cohorts, Sampling, check_pairs, enumerated
from fedshuffle.sampling.independent import Independent, decided
from fedshuffle.sampling.poisson_binomial import PoissonBinomial, members_of_others
from fedshuffle.sampling.stratified import Stratified
from fedshuffle.sampling.uniform import Full, Uniform
from fedshuffle.timing import InTime

_WORK = 64  # draws to enumerate, for each cohort that may be listed
_Row = tuple[tuple[int, ...], float]


class AmongAvailable(Sampling):
    """A sampling that draws among those who are there; ``p`` is that of both together.

    ``full`` takes all who are there, ``uniform:B`` takes B of them, ``stratified`` its number from
    each stratum (all, if fewer), and ``independent`` and ``importance`` draw among all, but only
    those take part who are there.

        >>> from fedshuffle.availability import Independent
        >>> AmongAvailable(Uniform(3, 2), Independent([0.9, 0.5, 0.2])).p.round(4).tolist()
        [0.87, 0.47, 0.17]
    """

    def __init__(self, sampling: Sampling, availability: Availability) -> None:
        self.sampling, self.availability = sampling, availability
        self.period, n = availability.period, len(sampling)
        self._stay = np.ones(n)  # of those who are there and asked
        everyone: IntArray = np.arange(n)
        match sampling:
            case Full():
                self._strata = [(everyone, n)]
            case Uniform():
                self._strata = [(everyone, sampling.b)]
            case Independent():  # as if all were asked
                self._strata, self._stay = [(everyone, n)], sampling.p
            case Stratified():
                taken = sampling.take.tolist()
                self._strata = list(zip(sampling.members, taken, strict=True))
            case _:
                raise FedShuffleError(
                    f"sampling {sampling!r} cannot draw among the clients that are there and in"
                    " time: use full, uniform:B, stratified:B:K, independent or importance:B."
                )
        if availability.leaves is not None:
            self._stay = self._stay * (1 - availability.leaves)
        self._everybody = isinstance(getattr(availability, "of", None), Always)
        self._alike = availability.at(0) is availability  # independent rounds, all alike
        self.independent_rounds = self._alike
        total, there = np.zeros((2, n))
        for round in range(self.period):
            of_round = availability.at(round)
            q = of_round.probability(0)
            total += self._round_inclusion(of_round, q)
            there += q
        self._inclusion: FloatArray = frozen(np.minimum(total / self.period, 1.0))
        dropped = (self._inclusion == 0) & availability.drop
        self.p: FloatArray = frozen(np.where(dropped, 1.0, self._inclusion))  # never used as such
        if isinstance(availability, InTime):
            self.step_chances = availability.step_chances
        self.availability_probability: FloatArray = frozen(there / self.period)
        """How much of the time each client is there."""

    @property
    def inclusion(self) -> FloatArray:
        return self._inclusion

    @property
    def expected_updates(self) -> float:
        return float(self._inclusion.sum())

    @property
    def independent_clients(self) -> bool:
        """Whether in a round each client takes part independently of the others."""
        everybody = all(b >= len(members) for members, b in self._strata)
        return self._alike and everybody and _groups(self.availability) is None

    def independent_draws(
        self,
    ) -> "list[tuple[IntArray, FloatArray, int, FloatArray | None]] | None":
        """Rounds that are alike as independent draws, of clients that are independent.

        Of each: the members that may be there, their chances to stay, the number that is asked, and
        the members' chances to be there. These are None if all are there, or if they are part of
        the chances to stay, as all who are there are asked.
        """
        if not self._alike or _groups(self.availability) is not None:
            return None
        q, draws = self.availability.probability(0), []
        for stratum, b in self._strata:
            members = stratum[q[stratum] > 0]
            everybody = b >= len(members)
            keep = (self._inclusion if everybody else self._stay)[members]
            there = None if everybody or (q[members] == 1).all() else q[members]
            if len(members):
                draws.append((members, keep, min(b, len(members)), there))
        return draws

    @property
    def nonempty(self) -> float:
        """The probability that somebody takes part, in rounds that are alike; NaN if unknown."""
        groups = _groups(self.availability)
        if self.independent_clients:
            away = self._inclusion
        elif (self._stay == 1).all():  # somebody is there
            away = (groups.of if groups else self.availability).probability(0)
        else:
            return math.nan
        with np.errstate(divide="ignore"):
            return float(-np.expm1(np.log1p(-away).sum()))

    def __repr__(self) -> str:
        if self._everybody:
            return f"{self.sampling!r}, those {self.availability!r}"
        return f"{self.sampling!r} of those available ({self.availability!r})"

    def at(self, round: int) -> "AmongAvailable":
        if self._alike:
            return self
        return AmongAvailable(self.sampling, self.availability.at(round))

    def kind_of_round(self, round: int) -> bytes:
        return self.availability.probability(round).tobytes()

    def draw(self, seed: int, round: int) -> IntArray:
        asked = self.asked(seed, round)
        return asked[self.availability.answers(seed, round, asked)]

    def asked(self, seed: int, round: int) -> IntArray:
        """Who is there and is asked; some may not answer."""
        if self._everybody:
            return self.sampling.draw(seed, round)
        if isinstance(self.sampling, Independent):
            drawn = self.sampling.draw(seed, round)
            return drawn[self.availability.available(seed, round, drawn)]
        rng = generator(seed, Purpose.COHORT, round=round)
        parts = [
            self._among(members, b, look, seed, round, rng)
            for (members, b), look in zip(self._strata, self._looks, strict=True)
        ]
        return np.sort(np.concatenate(parts))

    @cached_property
    def _looks(self) -> list[int]:
        """How many of each stratum to ask first: enough of them are likely to be there."""
        q = self.availability_probability
        there = [max(float(q[members].sum()), 1e-9) for members, _ in self._strata]
        return [
            16 + math.ceil(1.5 * b * len(members) / mean)
            for (members, b), mean in zip(self._strata, there, strict=True)
        ]

    def _among(
        self, members: IntArray, b: int, look: int, seed: int, round: int, rng: np.random.Generator
    ) -> IntArray:
        """``b`` of the members that are there, or all. Members are asked in random order, so that
        few of a million need to be looked at; if too few of these are there, more are tried.
        """
        n = len(members)
        while look < n // 2:
            asked = members[rng.choice(n, look, replace=False)]
            there = asked[self.availability.available(seed, round, asked)]
            if len(there) >= b:
                return there[:b]
            look *= 4
        there = members[self.availability.available(seed, round, members)]
        return there if len(there) <= b else rng.choice(there, b, replace=False)

    def _round_inclusion(self, of_round: Availability, q: FloatArray) -> FloatArray:
        """The inclusion probabilities in a round with this availability."""
        share, groups = np.ones(len(q)), _groups(of_round)
        for members, b in self._strata:
            if b >= len(members):
                continue
            if groups is None:
                there = PoissonBinomial(q[members])
                share[members] = there.without_one(partial(_asked, b))
                continue
            present, where, sizes = np.unique(
                groups.groups[members], return_inverse=True, return_counts=True
            )
            others = members_of_others(groups.of.probability(0)[present], sizes)
            number = np.arange(len(members) + 1)
            shares = [
                float(np.minimum(1.0, b / (own + number)) @ chance)
                for own, chance in zip(sizes.tolist(), others, strict=True)
            ]
            share[members] = np.array(shares)[where]
        return q * share * self._stay

    def expected_sums(self, v: FloatArray) -> FloatArray:
        if not self._alike:
            sums = [self.at(round).expected_sums(v) for round in range(self.period)]
            return np.asarray(np.mean(sums, axis=0))
        if _groups(self.availability) is not None:
            return enumerated(self).expected_sums(v)
        q, own = self.availability.probability(0), self._inclusion * v
        asked, result = q * self._stay, own.copy()
        for members, b in self._strata:
            inside, p = own[members], self._inclusion[members]
            result[members] += p * float(own.sum() - inside.sum())
            if b >= len(members):
                result[members] += p * (float(inside.sum()) - inside)
                continue
            pairs = PoissonBinomial(q[members]).sums_without_two(
                partial(_both_asked, b), (asked * v)[members]
            )
            result[members] += asked[members] * pairs
        return result

    def pair_probabilities(self) -> FloatArray:
        check_pairs(self)
        return np.stack([self.expected_sums(one) for one in np.eye(len(self))], axis=1)

    def cohorts(self, limit: int) -> Cohorts | None:
        total: dict[tuple[int, ...], float] = {}
        left = _WORK * limit
        of = _groups(self.availability) or self.availability
        q = (of.of if isinstance(of, Groups) else of).probability(0)
        unsure = np.count_nonzero((q > 0) & (q < 1))
        if self.period > limit or 2.0**unsure > left or self.at(0)._most_draws() > left:
            return None
        for round in range(self.period):
            for cohort, probability in self.at(round)._listed(left):
                total[cohort] = total.get(cohort, 0.0) + probability / self.period
                left -= 1
                if left <= 0 or len(total) > limit:
                    return None
        return Cohorts.of([(cohort, q) for cohort, q in sorted(total.items()) if q > 0])

    def _most_draws(self) -> float:
        """The number of draws from all who may be there, in rounds that are alike."""
        q, log_draws = self.availability.probability(0), 0.0
        for members, b in self._strata:
            n = np.count_nonzero(q[members])
            if b < n:
                log_draws += math.lgamma(n + 1) - math.lgamma(b + 1) - math.lgamma(n - b + 1)
        return math.exp(min(log_draws, 700.0))

    def _listed(self, most: int) -> Iterator[_Row]:
        """Cohorts with probabilities, some several times, of rounds that are all alike: over who is
        there, who is asked, and who stays. With more than ``most``, some may be left out.
        """
        groups, everyone = _groups(self.availability), np.arange(len(self))
        if self.independent_clients:
            yield from decided(everyone, self._inclusion)
            return
        of = self.availability if groups is None else groups.of
        place = everyone if groups is None else groups.groups
        for present, chance in decided(np.arange(len(of)), of.probability(0)):
            there = np.isin(place, present)
            choices = []
            for members, b in self._strata:
                some = members[there[members]].tolist()
                ways = itertools.combinations(some, min(b, len(some)))
                choices.append(list(itertools.islice(ways, most + 1)))
            share = chance / math.prod(map(len, choices))
            for parts in itertools.product(*choices):
                asked = np.array(sorted(itertools.chain(*parts)), dtype=np.int64)
                yield from ((cohort, share * q) for cohort, q in decided(asked, self._stay))


def _asked(b: int, others: FloatArray) -> FloatArray:
    """The probability to be among b of those who are there, with this many others."""
    return np.minimum(1.0, b / (1 + others))


def _both_asked(b: int, others: FloatArray) -> FloatArray:
    """The same of two clients, with this many others."""
    return np.minimum(1.0, b * (b - 1) / ((others + 2) * (others + 1)))


def _groups(availability: Availability) -> Groups | None:
    """The groups of an availability whose rounds are alike; None if clients are independent."""
    inner = getattr(availability, "of", None)
    if inner is None:
        return None
    nested = _groups(inner)
    if not isinstance(availability, Groups):  # clients may leave
        return nested
    if nested is None:
        return availability
    return Groups(nested.groups[availability.groups], nested.of)
