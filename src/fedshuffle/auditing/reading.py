"""What a method's rules and the clients' interruption look at.

The rules of the library depend on a client's weight, probability and steps alone. A rule of the
user's may look at anything it is shown: the clients' numbers, the round, or (though it should not)
who else takes part. The audit has to know, since then clients of equal size are not alike, one
round does not stand for all, or no formula holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.methods import Participants
from fedshuffle.methods.averaging import ClientRule

if TYPE_CHECKING:
    from fedshuffle.auditing.audit import _Setting

_FIELDS = frozenset(field.name for field in dataclasses.fields(Participants))
_FAR = (1000, 10_000, 100_000, 1_000_000)
"""Rounds beyond those that are averaged over, at which to look whether anything changes."""

_MIXES = 8
"""Of random epochs, at most so many alternatives are shown."""


@final
@dataclass(frozen=True)
class Reads:
    """On what, besides a client's own weight, probability and steps, its movement depends."""

    clients: bool
    """On the client's number, so that equal clients need not be alike."""
    company: bool
    """On who else takes part, beyond what the normaliser makes of it."""
    probability: bool
    """Whether the weight goes by the inclusion probability, which selection changes."""
    chance: bool
    """Whether the steps done are random."""
    rounds: int | None
    """On the round; so many rounds, from 0 on, stand for all. None if every round is alike."""
    window: int
    """The rounds to draw from where an interruption of the user's own is random."""


def survey(setting: _Setting, rounds: int) -> Reads:
    """Look at the rules and the interruption of a setting, over so many rounds if need be."""
    rules, interruption = setting.method.averaging, setting.workload.work.interruption
    everyone = np.arange(len(setting.federation))
    mixes = _mixes(setting.workload.alone[0])
    read, weight = _Read(), _Read()
    for cohort in (setting.drawn, *(setting.participants(everyone, mix) for mix in mixes)):
        read.by(rules.step_normalisation, cohort)
        read.by(partial(rules.normaliser.divide, rules.client_weights(cohort)), cohort)
        weight.by(rules.weight, cohort)
    foreign = interruption is not None and not _ours(interruption)
    checked = [(rules.step_normalisation, rules.step_scale), (rules.weight, rules.client_weights)]
    own_rules = [check for rule, check in checked if not _ours(rule)]
    chance = interruption is not None and interruption.random

    def steps(members: IntArray, seed: int = 0, round: int = 0) -> IntArray:
        done = setting.workload.done
        return np.stack([done(mix[members], members, seed, round) for mix in mixes])

    def shown(rule: ClientRule, members: IntArray) -> FloatArray:
        return np.stack([rule(setting.participants(members, mix[members])) for mix in mixes])

    company = any(_looks_around(partial(shown, rule), everyone) for rule in own_rules)
    if foreign and not chance:
        now = steps(everyone)
        chance = any(not np.array_equal(steps(everyone, seed), now) for seed in range(1, 4))
        company |= not chance and _looks_around(steps, everyone)

    window, varies = rounds, "round" in read.fields | weight.fields
    if foreign and not chance:
        window, changes = _over_rounds(lambda round: steps(everyone, round=round), window)
        varies |= changes
    if varies or read.opaque or weight.opaque:
        seen = lambda round: np.concatenate(setting.seen(round))  # noqa: E731
        window, changes = _over_rounds(seen, window)
        varies |= changes
    named = "clients" in read.fields | weight.fields or read.opaque or weight.opaque
    return Reads(
        clients=named or foreign or varies,  # other rounds may tell clients apart
        company=company,
        probability="probability" in weight.fields or weight.opaque,
        chance=chance,
        rounds=window if varies else None,
        window=window if varies or (foreign and chance) else 0,
    )


def _mixes(alternatives: IntArray) -> list[IntArray]:
    """Steps that all clients may plan at the same time; with random epochs in several ways, so that
    clients are seen with few and with many steps, each beside others that plan more or less.
    """
    n, count = alternatives.shape
    shifts = np.unique(np.linspace(0, count - 1, min(count, _MIXES)).round().astype(np.int64))
    return [alternatives[np.arange(n), (np.arange(n) + shift) % count] for shift in shifts]


class _Read:
    """Which attributes of a cohort some rules have read."""

    def __init__(self) -> None:
        self.fields: set[str] = set()
        self.opaque = False
        """Whether a rule does more than read attributes, so that anything may be behind it."""

    def by(self, rule: Callable[[Any], Any], cohort: Participants) -> None:
        """Call a rule and watch."""
        try:
            rule(_Watched(cohort, self))
        except Exception:  # it wants more than attributes; its own mistakes show when it is used
            self.opaque = True


class _Watched:
    """A cohort that notes what is read of it."""

    def __init__(self, cohort: Participants, read: _Read) -> None:
        self._cohort, self._noted = cohort, read

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS:
            self._noted.fields.add(name)
        else:
            self._noted.opaque = True
        return getattr(self._cohort, name)


def _ours(part: object) -> bool:
    return str(getattr(part, "__module__", "")).startswith("fedshuffle.")


def _looks_around(rule: Callable[[IntArray], FloatArray | IntArray], everyone: IntArray) -> bool:
    """Whether a client's column changes with the company in which it is shown.

    Each client is seen among all, and among those that agree with it in one bit of their numbers.
    """
    among_all = rule(everyone)
    for bit in range(max(len(everyone) - 1, 0).bit_length()):
        for half in (everyone >> bit & 1 == 0, everyone >> bit & 1 == 1):
            if half.any() and not _same(rule(everyone[half]), among_all[:, half]):
                return True
    return False


def _over_rounds(value: Callable[[int], FloatArray | IntArray], rounds: int) -> tuple[int, bool]:
    """How many rounds from 0 on, at most ``rounds``, have a value; whether it ever changes."""
    first, changes = value(0), False
    for round in (*range(1, rounds), *(far for far in _FAR if far >= rounds)):
        try:
            changes |= not _same(value(round), first)
        except FedShuffleError:
            if round < rounds:
                raise
            return rounds, True
        except Exception:  # as a list with an entry for every round of a run
            return min(round, rounds), True
    return rounds, changes


def _same(one: FloatArray | IntArray, other: FloatArray | IntArray) -> bool:
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=1e-9, atol=0)
