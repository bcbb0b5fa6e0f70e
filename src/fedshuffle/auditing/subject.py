"""The subject of an audit, and what its rules and its interruption depend on.

The rules of the library depend on a client's weight, probability and steps alone. A rule of the
user may read anything in the cohort: the clients' numbers, the round, or (though it should not)
the other clients. The audit has to know, since then clients of equal size may differ, rounds may
differ, or no formula holds.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshuffle import schedules
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.quadrature import nonempty_probability
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import Workload
from fedshuffle.methods import Cohort, Method
from fedshuffle.probabilities import BetaRate
from fedshuffle.sampling import AmongAvailable, Sampling
from fedshuffle.sampling.base import check_cohort
from fedshuffle.schedules import Schedule
from fedshuffle.timing import UntilDeadline

ROUNDS = 100  # to average over by default, if rounds differ
_LATE_ROUNDS = (1000, 10_000, 100_000, 1_000_000)  # later rounds to test for changes
_MOST_OUTCOMES = 1_000_000  # of all clients; for more the audit samples
_MIXES = 8  # most alternatives of random epochs that rules are shown
_FIELDS = frozenset(field.name for field in dataclasses.fields(Cohort))
_FIELDS |= {"planned_length", "done_length", "max_length"}  # of the client's own steps
_Values = FloatArray | IntArray


@dataclass(frozen=True)
class Dependencies:
    """What a client's contribution depends on besides its own weight, probability and steps."""

    clients: bool  # the client's number, so that equal clients need not be alike
    others: bool  # who else takes part, beyond what the normaliser makes of it
    probability: bool  # the inclusion probability (in its weight), which optimal sampling changes
    random: bool  # chance, as the steps done are random
    rounds: int | None  # the first rounds stand for all; None if every round is alike
    window: int  # the rounds to draw from if an interruption of the user's is random


@dataclass(frozen=True)
class Outcomes:
    """What a client that takes part may have planned and done, with the chances: (n, A) each."""

    planned: IntArray
    done: IntArray | None  # None if an interruption decides, whose distribution is not known
    chances: FloatArray
    known: bool
    """Whether the chances are those of the steps done, also if these are random."""

    @property
    def number(self) -> int:
        """The number of alternatives."""
        return int(self.planned.shape[1])


@dataclass(frozen=True)
class Subject:
    """A method with the clients, the sampling and the local work to audit it on."""

    federation: Federation
    method: Method
    sampling: Sampling
    workload: Workload
    rounds: int = ROUNDS
    step_size: Schedule | None = None  # to weight rounds by; None if all count alike
    within: range | None = None  # only these rounds, if rounds differ

    def cohort(self, clients: IntArray, planned: IntArray, seed: int = 0, round: int = 0) -> Cohort:
        """Clients as the rules see them."""
        steps = planned, self.workload.done(planned, clients, seed, round)
        cohort = Cohort.of(self.federation, self.sampling, self.workload, clients, steps, round)
        return dataclasses.replace(cohort, probability=self.probability[clients])

    @functools.cached_property
    def outcomes(self) -> Outcomes:
        """The steps of clients that take part."""
        planned, chances = self.workload.possible_steps
        given = self.sampling.step_chances
        each = np.broadcast_to(chances, planned.shape) if given is None else given
        stop = self.workload.work.interruption
        if not isinstance(stop, UntilDeadline):
            return Outcomes(planned, None, each, not self.dependencies.random)
        most = planned.max(axis=0)
        if len(planned) * int(most.sum()) > _MOST_OUTCOMES:
            return Outcomes(planned, None, each, not stop.random)
        parts = [share * stop.chances(column) for column, share in zip(planned.T, chances)]
        joint = np.concatenate(parts, axis=1)
        number = np.concatenate([np.arange(1, m + 1) for m in most])
        plans = np.repeat(planned, most, axis=1)
        happens = (joint > 0).any(axis=0)
        joint = joint[:, happens] / np.maximum(joint.sum(axis=1), 1e-300)[:, None]
        done = np.minimum(number[happens], plans[:, happens])
        return Outcomes(plans[:, happens], done, joint, True)

    def alternatives(self, round: int) -> Iterator[Cohort]:
        """All clients as the rules see them, with each of their possible steps."""
        everyone = np.arange(len(self.federation))
        for k, planned in enumerate(self.outcomes.planned.T):
            cohort = self.cohort(everyone, planned, round=round)
            if self.outcomes.done is not None:
                cohort = dataclasses.replace(cohort, done=self.outcomes.done[:, k])
            yield cohort

    @property
    def timed(self) -> bool:
        """Whether who takes part, or how much of the work is done, depends on the clock and on the
        steps of the same round.
        """
        stops = isinstance(self.workload.work.interruption, UntilDeadline)
        return stops or self.sampling.step_chances is not None

    @functools.cached_property
    def probability(self) -> FloatArray:
        """What methods that divide by inclusion probability divide by."""
        return self.method.averaging.long_run(self.sampling.p)

    @property
    def estimated(self) -> str | None:
        """What is assumed of estimated probabilities; empty if nothing is, None without any."""
        if (estimate := self.method.averaging.estimate) is None:
            return None
        sampling = self.sampling
        if isinstance(sampling, AmongAvailable) and not sampling.availability.repeats:
            return "as if participation did not drift, as it does: no estimate can be right"
        if sampling.independent_rounds or self.successive:
            return ""
        if not isinstance(estimate, BetaRate):
            return "as if rounds were independent"
        return "" if sampling.period == 1 else f"over many periods of {sampling.period} rounds"

    @property
    def successive(self) -> bool:
        """Whether probabilities are estimated from rounds that are correlated by a rule to which
        that matters, so that a long run has to be drawn.
        """
        estimate, sampling = self.method.averaging.estimate, self.sampling
        if estimate is None or isinstance(estimate, BetaRate) or sampling.independent_rounds:
            return False
        known = not isinstance(sampling, AmongAvailable) or not sampling.availability.repeats
        return not (known or self.step_size is not None or self.dependencies.window)

    @functools.cached_property
    def plan(self) -> "list[tuple[int, float, Sampling]]":
        """Rounds that stand for all, the share of each in what the model moves, and the sampling
        that draws its cohort. Rounds with the same rules and the same sampling are one.
        """
        window, period = self.dependencies.window, self.sampling.period
        if not window and period == 1:
            return [(0, 1.0, self.sampling.at(0))]
        every = window or (period if self.step_size is None else self.rounds)
        rounds = self.within or range(every)
        sizes = np.array([self.step_size_of(round) for round in rounds])
        laws: dict[Hashable, Sampling] = {}
        found: dict[Hashable, tuple[int, float, Sampling]] = {}
        for round, share in zip(rounds, (sizes / sizes.sum()).tolist(), strict=True):
            kind = self.sampling.kind_of_round(round)
            if kind not in laws:
                laws[kind] = self.sampling.at(round)
            key = round if window else kind
            first, so_far, law = found.get(key, (round, 0.0, laws[kind]))
            found[key] = first, so_far + share, law
        return list(found.values())

    @functools.cached_property
    def nonempty(self) -> float:
        """The share of rounds in which somebody takes part, weighted as in the plan; NaN if it is
        not known.
        """
        laws, shares = {id(law): law for _, _, law in self.plan}, dict[int, float]()
        for _, share, law in self.plan:
            shares[id(law)] = shares.get(id(law), 0.0) + share
        return sum(shares[k] * nonempty_probability(law) for k, law in laws.items())

    def step_size_of(self, round: int) -> float:
        """The weight of a round."""
        if self.step_size is None:
            return 1.0
        return schedules.value(self.step_size, round, "step size")

    @functools.cached_property
    def dependencies(self) -> Dependencies:
        """Found by watching what the rules read and by trying other rounds, seeds and cohorts."""
        rules, interruption = self.method.averaging, self.workload.work.interruption
        everyone, alternatives = np.arange(len(self.federation)), self.workload.possible_steps[0]
        mixes, n, sampling = _mixes(alternatives), len(everyone), self.sampling
        draws = (check_cohort(sampling.draw(0, r), n, sampling) for r in range(100))
        members = next((drawn for drawn in draws if len(drawn)), everyone)
        planned = self.workload.cohort_steps(alternatives[members, 0])
        shown = [self.cohort(members, planned), *(self.cohort(everyone, mix) for mix in mixes)]
        weight_reads, divide = _reads(rules.weight, shown), rules.normaliser.divide
        fields = weight_reads | _reads(rules.step_normalisation, shown)
        fields |= _reads(lambda seen: divide(rules.client_weights(seen.cohort), seen), shown)
        opaque = "?" in fields  # then it may depend on anything
        foreign = interruption is not None and not _ours(interruption)
        random = interruption is not None and interruption.random

        def steps(members: IntArray, seed: int = 0, round: int = 0) -> IntArray:
            done = self.workload.done
            return np.stack([done(mix[members], members, seed, round) for mix in mixes])

        def values(members: IntArray, round: int = 0) -> FloatArray:
            cohorts = [self.cohort(members, mix[members], round=round) for mix in mixes]
            both = (rules.client_weights, rules.step_scale)
            return np.stack([rule(cohort) for cohort in cohorts for rule in both])

        def in_round(round: int) -> FloatArray:
            drawn = self.cohort(members, planned, round=round)
            return np.append(values(everyone, round), rules.aggregation_weights(drawn))

        others = not (_ours(rules.weight) and _ours(rules.step_normalisation))
        others = others and _depends_on_others(values, everyone)
        window, varies = self.rounds, "round" in fields
        if foreign and not random:
            now = steps(everyone)
            random = any(not np.array_equal(steps(everyone, seed), now) for seed in range(1, 4))
        if foreign and not random:
            others |= _depends_on_others(steps, everyone)
            window, changes = _over_rounds(lambda round: steps(everyone, round=round), window)
            varies |= changes
        if varies or opaque:
            window, changes = _over_rounds(in_round, window)
            varies |= changes
        return Dependencies(
            clients="clients" in fields or opaque or foreign or varies,
            others=others,
            probability=bool({"probability", "?"} & weight_reads),
            random=random,
            rounds=window if varies else None,
            window=window if varies or (foreign and random) else 0,
        )


def _mixes(alternatives: IntArray) -> list[IntArray]:
    """Steps that all clients may plan at the same time; with random epochs in several ways, so that
    clients are seen with few and with many steps, among others that plan more or fewer.
    """
    n, count = alternatives.shape
    shifts = np.unique(np.linspace(0, count - 1, min(count, _MIXES)).round().astype(np.int64))
    return [alternatives[np.arange(n), (np.arange(n) + shift) % count] for shift in shifts]


def _reads(rule: Callable[[Any], Any], cohorts: list[Cohort]) -> set[str]:
    """Which attributes of cohorts a rule reads, and '?' if it does more than read them."""
    reads: set[str] = set()
    for cohort in cohorts:
        try:
            rule(_Watched(cohort, reads))
        except Exception:  # it wants more than attributes; its own mistakes show when it is used
            reads.add("?")
    return reads


class _Watched:
    """A cohort that records which attributes are read."""

    def __init__(self, cohort: Cohort, reads: set[str]) -> None:
        self.cohort, self._reads = cohort, reads

    def __getattr__(self, name: str) -> Any:
        self._reads.add(name if name in _FIELDS else "?")
        return getattr(self.cohort, name)


def _ours(part: object) -> bool:
    return str(getattr(part, "__module__", "")).startswith("fedshuffle.")


def _depends_on_others(rule: Callable[[IntArray], _Values], everyone: IntArray) -> bool:
    """Whether a client's column changes with the other clients: all, or those that agree with
    it in one bit of their numbers.
    """
    among_all = rule(everyone)
    for bit in range(max(len(everyone) - 1, 0).bit_length()):
        for half in (everyone >> bit & 1 == 0, everyone >> bit & 1 == 1):
            if half.any() and not _same(rule(everyone[half]), among_all[:, half]):
                return True
    return False


def _over_rounds(value: Callable[[int], _Values], rounds: int) -> tuple[int, bool]:
    """How many rounds from 0 on, at most ``rounds``, have a value; whether it ever changes."""
    first, changes = value(0), False
    for round in (*range(1, rounds), *(late for late in _LATE_ROUNDS if late >= rounds)):
        try:
            changes |= not _same(value(round), first)
        except FedShuffleError:
            if round < rounds:
                raise
            return rounds, True
        except Exception:  # such as a list with an entry for every round of a run
            return min(round, rounds), True
    return rounds, changes


def _same(one: _Values, other: _Values) -> bool:
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=1e-9, atol=0)
