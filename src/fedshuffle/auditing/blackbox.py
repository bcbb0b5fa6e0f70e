r"""The black-box auditor: which objective does other people's code minimise?

The clients are ours, the server is theirs. Client i of a cohort walks :math:`\tau_i` steps of size
:math:`\gamma_i` along its own coordinate, so its update is :math:`\gamma_i \tau_i e_i`, and the
server's step shows, coordinate by coordinate, by how much each client moved the model: its mass
:math:`a_i \gamma_i \tau_i`, whatever rule made :math:`a_i`. The mean mass over cohorts gives the
effective weights (see :mod:`fedshuffle.auditing.audit`), here with confidence intervals.

That is exact per cohort if a step is a weighted sum of the updates, which is tested first. Of a
server that remembers, the mean over a long play is taken. Of one that is not linear, only the
response to small differences around a common update can be told, by central differences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, expect, number
from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.auditing.adapters.callable import Function
from fedshuffle.auditing.estimation import (
    Control,
    Estimate,
    Sightings,
    estimate,
    estimate_by_batches,
    exact,
    proportions,
)
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.traits import CLOSE, Coefficients, Traits, long_run
from fedshuffle.auditing.verdict import BlackBoxAudit, check_confidence, conclude, uneven
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork, Workload
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.sampling import Optimal, Sampling, resolve
from fedshuffle.sampling.base import check_cohort

StepSizes = Literal["equal", "scaled"]

_COORDINATES = 1024
"""Up to so many clients each has a coordinate of its own; of more, each within its cohort."""

_NUMBERS = 1 << 22
"""So many numbers are sent in one round at most; larger cohorts are probed in portions."""

_CHECKS = 5
"""So many cohorts are tried for linearity, order and the like."""

_FORMS = 64
"""So many cohorts are compared to find what the weights go by."""

_DIFFERENT = 2000
"""Up to so many different clients, masses are compared with shares of known expectation."""

_BATCHES = 32
"""A long play is split in so many parts to find its standard error."""

_SMALL = 2.0**-10
"""The relative size of the differences around a common update."""


def probe(
    aggregate: Aggregator | Callable[..., Any],
    federation: Federation,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    *,
    step_sizes: StepSizes = "equal",
    step_size: float = 2.0**-6,
    draws: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> BlackBoxAudit:
    """The objective that a server really minimises, found by probing it with known updates.

    Args:
        aggregate: a function ``(clients, sizes, updates) -> step``, a class of such, or an adapter
            from :mod:`fedshuffle.auditing.adapters`.
        federation: the clients, and the objective that is meant.
        sampling: who takes part.
        work: how many local steps clients take.
        step_sizes: ``"equal"`` for all clients, or ``"scaled"`` by 1 / (their planned steps), as
            clients of FedShuffle do.
        step_size: of the client with the most steps; matters for servers that are not linear.
        draws: cohorts to probe with; fewer where every cohort can be listed.
        seed: of the cohorts.
        confidence: of each client's interval.

    >>> def fedavg(clients, sizes, updates):
    ...     return sizes / sizes.sum() @ updates
    >>> found = probe(fedavg, Federation.from_sizes([1, 2, 3]), "uniform:2")
    >>> found.effective_weights.round(4).tolist(), found.consistent
    ([0.0862, 0.3153, 0.5985], False)
    """
    expect(federation, Federation, "federation")
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    if step_sizes not in ("equal", "scaled"):
        raise FedShuffleError(f"step_sizes is {step_sizes!r}: choose 'equal' or 'scaled'.")
    if not 0 < number(step_size, "step_size") < np.inf:
        raise FedShuffleError(f"step_size is {step_size}, but must be positive and finite.")
    check_confidence(confidence)
    if count(draws, "draws") < 2 * _BATCHES:
        raise FedShuffleError(f"{draws} draws are too few to judge by: use {2 * _BATCHES} or more.")
    server = aggregate if isinstance(aggregate, Aggregator) else Function(aggregate)
    drawn = resolve(sampling, federation)
    if isinstance(drawn, Optimal):
        raise FedShuffleError(
            f"sampling {drawn!r} goes by the updates, and the probes' are not real ones: give its"
            " pool, for the clients that walk."
        )
    probing = _Probing(
        server,
        federation,
        drawn,
        work.on(federation.sizes),
        step_sizes == "scaled",
        float(step_size),
        draws,
        check_seed(seed),
    )
    found, how, traits = probing.run()
    return _audit(probing, found, how, traits, confidence)


def _audit(
    probing: _Probing, found: Estimate, how: str, traits: Traits, confidence: float
) -> BlackBoxAudit:
    steps = probing.workload.alone[0]
    low, high = int(steps.min()), int(steps.max())
    return conclude(
        found,
        traits,
        name=probing.server.name,
        source=f"sampling {probing.sampling!r}",
        how=how,
        federation=probing.federation,
        probabilities=probing.sampling.p,
        known=True,
        uneven_steps=None if probing.scaled or low == high else (low, high),
        confidence=confidence,
    )


@final
@dataclass(frozen=True)
class _Cohort:
    """A cohort to probe with: the clients as they come in, and the steps they did."""

    round: int
    clients: IntArray
    steps: IntArray
    walked: FloatArray
    """How far each client walks along a gradient of one: step size times steps."""
    share: float
    """The cohort's probability where all cohorts are listed."""


@final
class _Probing:
    """A server and what it is probed with."""

    def __init__(
        self,
        server: Aggregator,
        federation: Federation,
        sampling: Sampling,
        workload: Workload,
        scaled: bool,
        step_size: float,
        draws: int,
        seed: int,
    ) -> None:
        self.server, self.federation, self.sampling = server, federation, sampling
        self.workload, self.scaled, self.step_size = workload, scaled, step_size
        self.draws, self.seed = draws, seed
        work, n = workload.work, len(federation)
        chance = isinstance(work.epochs, EpochRange) and not isinstance(work.steps, int)
        chance |= work.interruption is not None and work.interruption.random
        listed = None if chance else sampling.cohorts(draws)
        self.listed = listed if listed is not None and len(listed) <= draws else None
        self.own = n <= _COORDINATES
        if next(self.cohorts(), None) is None:
            raise FedShuffleError(
                f"in {draws} draws nobody took part: use more draws, or larger probabilities."
            )
        most = n if self.own else max(len(cohort.clients) for cohort in self.cohorts())
        self.places = n if self.own else min(most, max(16, _NUMBERS // most))
        self.coordinates = self.places + 1  # the last is nobody's

    def run(self) -> tuple[Estimate, str, Traits]:
        """Check the server, then probe it in the way that suits it."""
        traits = self._checked()
        federation = self.federation
        average = self.server.average() if traits.linear is False else None
        if average is not None:
            return self._averaged(average, traits)
        if traits.remembers or traits.repeatable is False:
            # Of steps that grow without bound a play tells nothing; a fresh server may.
            if self.own and traits.linear is not False and traits.gain != np.inf:
                return self._play(traits)
            if not self.server.resets:
                raise FedShuffleError(
                    f"{self.server.name} remembers, or is random, and cannot be reset: give a class"
                    " that is made anew for a fresh server instead of a function."
                )
        respond = self._local if traits.linear is False else self._masses
        sightings, shares, traits = self._sight(traits, partial(respond, traits=traits))
        n = len(federation)
        if self.listed is not None and not traits.ordered:
            found = exact(sightings, n, shares)
            how = f"all {len(self.listed)} cohorts" if len(self.listed) > 1 else "the only cohort"
        else:
            p = None if traits.broken else self.sampling.p
            found = estimate(sightings, federation.weights, p, self._controls(sightings))
            how = f"{self.draws} cohorts"
            unseen = n - len(np.unique(sightings.client))
            how += f", in which {unseen} clients never were" if unseen else ""
        if traits.linear is False:
            how += ", small differences around a common update"
        if traits.remembers:
            how += ", a fresh server each"
        return found, how, traits

    def _averaged(self, average: Aggregator, traits: Traits) -> tuple[Estimate, str, Traits]:
        """What is told of a server's optimiser, with the weights of the average that it gets."""
        whole, self.server = self.server, average
        found, how, inner = self.run()
        self.server = whole
        names = ("sums_to", "constant", "form", "broken", "idle", "rounds")
        told = {name: getattr(inner, name) for name in names}
        traits = dataclasses.replace(traits, optimiser=True, **told)
        return found, f"{how}, of the average that the server's optimiser gets", traits

    def cohorts(self, shuffled: bool = False, draws: int | None = None) -> Iterator[_Cohort]:
        """The cohorts to probe with; nobody's order of arrival is known, so it may be shuffled."""
        if self.listed is not None and not shuffled:
            rounds = ((0, members, share) for members, share in self.listed)
        else:
            n = len(self.federation)
            rounds = (
                (r, check_cohort(self.sampling.draw(self.seed, r), n, self.sampling), 0.0)
                for r in range(self.draws if draws is None else draws)
            )
        for r, members, share in rounds:
            if not len(members):
                continue
            plan = self.workload.plan(members, self.seed, r)
            scale = self.workload.longest / plan.planned if self.scaled else 1.0
            order = np.arange(len(members))
            if shuffled:
                order = generator(self.seed, Purpose.MONTE_CARLO, round=r).permutation(len(members))
            walked = self.step_size * scale * plan.done.astype(np.float64)
            yield _Cohort(r, members[order], plan.done[order], walked[order], share)

    # Asking --------------------------------------------------------------------------------------

    def ask(
        self,
        cohort: _Cohort,
        gradients: FloatArray,
        *,
        fresh: bool = True,
        round: int = 0,
        sizes: IntArray | None = None,
        steps: IntArray | None = None,
    ) -> FloatArray:
        """The server's step where each client of the cohort walks along its gradient."""
        if fresh:
            self.server.reset()
        # Copies: a server that works in place must not change what the auditor compares with.
        replies = Replies(
            round=round,
            clients=cohort.clients.copy(),
            sizes=self.federation.sizes[cohort.clients] if sizes is None else sizes.copy(),
            steps=(cohort.steps if steps is None else steps).copy(),
            probabilities=self.sampling.p[cohort.clients],
            updates=cohort.walked[:, None] * gradients,
        )
        try:
            with np.errstate(all="ignore"):
                step = self.server.step(replies)
        except FedShuffleError:
            raise
        except Exception as error:
            raise FedShuffleError(
                f"{self.server.name} failed for the clients {_some(cohort.clients)}:"
                f" {type(error).__name__}: {error}"
            ) from error
        if np.shape(step) != (self.coordinates,):
            raise FedShuffleError(
                f"{self.server.name} gives a step of shape {np.shape(step)} for updates of shape"
                f" {replies.updates.shape}: give one number per column,"
                f" ({self.coordinates},)."
            )
        return step

    def portions(self, cohort: _Cohort) -> Iterator[tuple[slice, IntArray]]:
        """Which clients of a cohort have a coordinate of their own at a time, and which."""
        for begin in range(0, len(cohort.clients), self.places):
            part = slice(begin, min(begin + self.places, len(cohort.clients)))
            yield part, cohort.clients if self.own else np.arange(part.stop - begin)

    def one_hot(self, cohort: _Cohort, part: slice, places: IntArray) -> FloatArray:
        gradients = np.zeros((len(cohort.clients), self.coordinates))
        gradients[np.arange(part.start, part.stop), places] = 1.0
        return gradients

    def _masses(self, cohort: _Cohort, traits: Traits) -> FloatArray:
        """By how much each client moves the model, if the server is linear."""
        masses = []
        for part, places in self.portions(cohort):
            step = self.ask(cohort, self.one_hot(cohort, part, places))
            if traits.drifts:
                step = step - self.ask(cohort, np.zeros((len(cohort.clients), self.coordinates)))
            masses.append(step[places])
        return np.concatenate(masses)

    def _local(self, cohort: _Cohort, traits: Traits) -> FloatArray:
        """The same for small differences, where all clients walk along the same gradient."""
        masses = []
        for part, places in self.portions(cohort):
            small = _SMALL * self.one_hot(cohort, part, places)
            change = self.ask(cohort, 1.0 + small) - self.ask(cohort, 1.0 - small)
            # What moves nobody's coordinate too (by a norm, say) is no answer to one client.
            masses.append((change[places] - change[-1]) / (2 * _SMALL))
        return np.concatenate(masses)

    # Probing over many cohorts -------------------------------------------------------------------

    def _sight(
        self, traits: Traits, respond: Callable[[_Cohort], FloatArray]
    ) -> tuple[Sightings, FloatArray, Traits]:
        """What each cohort shows of its members."""
        shuffled = bool(traits.ordered)
        clients, masses, walked, lengths, shares = [], [], [], [], []
        forms: list[tuple[_Cohort, FloatArray]] = []
        broken = idle = asked = 0
        for cohort in self.cohorts(shuffled):
            asked += 1
            mass = respond(cohort)
            if not np.isfinite(mass).all():
                broken += 1
                continue
            idle += not mass.any()
            clients.append(cohort.clients)
            masses.append(mass)
            walked.append(cohort.walked)
            lengths.append(len(mass))
            shares.append(cohort.share)
            if len(forms) < _FORMS:
                forms.append((cohort, mass))
        if not masses:
            raise FedShuffleError(
                f"{self.server.name} gave NaN or infinity in every one of {asked} rounds."
            )
        idle = 0 if idle == asked else idle
        traits = dataclasses.replace(traits, broken=broken, idle=idle, rounds=asked)
        traits = self._formed(traits, forms)
        rounds = len(lengths)
        if self.listed is None or shuffled:  # rounds without anybody count too
            rounds += self.draws - asked
        seen = Sightings(
            np.repeat(np.arange(len(lengths)), lengths),
            np.concatenate(clients),
            np.concatenate(masses),
            rounds,
            np.concatenate(walked),
        )
        return seen, np.array(shares), traits

    def _controls(self, seen: Sightings) -> Iterator[Control]:
        """Shares of clients in their cohorts, whose expectations are known without asking the
        server: by numbers that come as near as can be to what clients count, and by head.
        """
        n, positive = len(self.federation), bool((seen.mass > 0).all())
        fitted = proportions(seen, n) if positive and self.own else self.federation.weights
        for u in (fitted, np.ones(n)):
            sums = np.bincount(seen.round, weights=u[seen.client], minlength=seen.rounds)
            values = u[seen.client] / sums[seen.round]
            if len(np.unique(u)) > _DIFFERENT or not uneven(values):
                continue
            shares = expected_ratio(self.sampling, u[:, None], c=u[:, None])
            if shares is not None:
                yield Control(values, shares / self.sampling.p)

    def _play(self, traits: Traits) -> tuple[Estimate, str, Traits]:
        """The mean movement over many rounds of a server that keeps its memory."""
        n = len(self.federation)
        seen = np.zeros(n, dtype=np.int64)
        settle, each = self.draws // 8, self.draws // _BATCHES
        forms: list[tuple[_Cohort, FloatArray]] = []
        moves = np.zeros((_BATCHES, n))
        cohorts = list(self.cohorts(True, settle + each * _BATCHES))
        if traits.repeatable is not False:
            forms = [(c, self._masses(c, traits)) for c in cohorts[:_FORMS]]
        self.server.reset()
        for r, cohort in enumerate(cohorts):
            step = self.ask(cohort, np.eye(n, n + 1)[cohort.clients], fresh=False, round=r)
            if not np.isfinite(step).all():
                raise FedShuffleError(
                    f"{self.server.name} gave NaN or infinity in round {r} of a play over many"
                    " rounds; what comes after is lost."
                )
            if r >= settle:
                moves[(r - settle) // each] += step[:n] / each
                seen[cohort.clients] += 1
        traits = dataclasses.replace(traits, rounds=len(cohorts))
        traits = self._formed(traits, forms)
        found = estimate_by_batches(moves, seen)
        return found, f"a play over {len(cohorts)} rounds", traits

    # Checking ------------------------------------------------------------------------------------

    def _checked(self) -> Traits:
        """What a few cohorts tell: whether the server is linear, remembers, and the like."""
        few = []
        for cohort in self.cohorts():  # the first ones in which clients can be compared
            few.append(cohort)
            if sum(len(c.clients) > 1 for c in few) == _CHECKS:
                break
        few = sorted(few, key=lambda cohort: -len(cohort.clients))[:_CHECKS]
        pairs = zip(few, [*few[1:], few[0]], strict=True)
        told = [answer for answer in (self._check(*pair) for pair in pairs) if answer is not None]
        if not told:
            return Traits()

        def any_of(name: str) -> bool | None:
            answers = [getattr(t, name) for t in told if getattr(t, name) is not None]
            return any(answers) if answers else None

        def all_of(name: str) -> bool | None:
            answers = [getattr(t, name) for t in told if getattr(t, name) is not None]
            return all(answers) if answers else None

        only = {t.only for t, cohort in zip(told, few, strict=False) if len(cohort.clients) > 1}
        gains = [t.gain for t in told if t.gain is not None]
        return Traits(
            linear=all_of("linear"),
            repeatable=all_of("repeatable"),
            remembers=any_of("remembers"),
            gain=max(gains, default=None),
            ordered=any_of("ordered"),
            only=only.pop() if len(only) == 1 else None,
            drifts=any_of("drifts"),
            fails_still=any_of("fails_still"),
            uses_sizes=any_of("uses_sizes"),
            uses_steps=any_of("uses_steps"),
        )

    def _check(self, cohort: _Cohort, before: _Cohort) -> Traits | None:
        """What one cohort tells, and what it tells after another; None where the server gives it no
        finite step.
        """
        b = len(cohort.clients)
        rng = generator(self.seed, Purpose.MONTE_CARLO, round=cohort.round, client=1)
        one, other = (
            rng.choice([-1.0, 1.0], (b, self.coordinates)) * rng.uniform(0.5, 2.0, (b, 1))
            for _ in range(2)
        )
        ask = partial(self.ask, cohort)
        first, again = ask(one), ask(one)
        try:
            still, fails = ask(np.zeros_like(one)), False
        except FedShuffleError:  # it is asked for what it cannot do
            still, fails = np.zeros_like(first), True
        if not (np.isfinite(first).all() and np.isfinite(again).all()):
            return None
        if not np.isfinite(still).all():
            still, fails = np.zeros_like(first), True
        scale = np.abs(cohort.walked).max()

        def same(a: FloatArray, b: FloatArray, times: float = 1.0) -> bool:
            size = max(np.abs(a).max(), np.abs(b).max(), 1e-9 * scale)
            return bool(np.abs(a - b).max() <= times * CLOSE * size)

        drifts = not same(still, np.zeros_like(still))
        if not same(first, again):  # random, or a memory that cannot be reset
            # What averages out is no drift: only a step that does not change is.
            return Traits(repeatable=False, drifts=drifts and same(still, ask(np.zeros_like(one))))
        moved = first - still
        linear = same(ask(2 * one) - still, 2 * moved)
        linear = linear and same(ask(one + other) - still, moved + (ask(other) - still), times=10.0)
        masses = self._masses(cohort, Traits(drifts=drifts))
        linear = linear and same(masses @ one, moved, times=10.0)
        back = dataclasses.replace(
            cohort,
            clients=cohort.clients[::-1],
            steps=cohort.steps[::-1],
            walked=cohort.walked[::-1],
        )
        ordered = not same(self.ask(back, one[::-1]), first) if b > 1 else None
        sizes = self.federation.sizes[cohort.clients].copy()
        sizes[0] *= 3
        steps = cohort.steps.copy()
        steps[0] *= 3
        later = ask(one, round=1)
        self.ask(before, np.ones((len(before.clients), self.coordinates)))
        remembers = not same(ask(one, fresh=False, round=1), later)
        return Traits(
            linear=linear,
            repeatable=True,
            remembers=remembers,
            gain=self._gain(cohort, one) if remembers and linear else None,
            ordered=ordered,
            only=_only(masses) if ordered else None,
            drifts=drifts,
            fails_still=fails,
            uses_sizes=not same(ask(one, sizes=sizes), first) if b > 1 else None,
            uses_steps=not same(ask(one, steps=steps), first),
        )

    def _gain(self, cohort: _Cohort, gradients: FloatArray) -> float:
        """How far a server goes that gets the same updates again and again."""
        self.server.reset()
        norms = [
            float(np.linalg.norm(self.ask(cohort, gradients, fresh=False, round=r)))
            for r in range(64)
        ]
        return long_run(norms) if norms[0] > 0 and np.isfinite(norms).all() else float("inf")

    def _formed(self, traits: Traits, seen: list[tuple[_Cohort, FloatArray]]) -> Traits:
        """The traits with what the weights of these cohorts go by."""
        seen = [(cohort, mass) for cohort, mass in seen if mass.any()]
        if not seen:
            return traits
        clients = np.concatenate([cohort.clients for cohort, _ in seen])
        found = Coefficients(
            cohort=np.repeat(np.arange(len(seen)), [len(mass) for _, mass in seen]),
            client=clients,
            weight=np.concatenate([mass / cohort.walked for cohort, mass in seen]),
            size=self.federation.sizes[clients],
            steps=np.concatenate([cohort.steps for cohort, _ in seen]),
            probability=self.sampling.p[clients],
            objective=self.federation.weights[clients],
        )
        if traits.linear is False:  # a common factor of the answers is not a weight
            form = found.form(traits.uses_sizes, traits.uses_steps)
            return dataclasses.replace(traits, form=form)
        return dataclasses.replace(
            traits,
            sums_to=found.sums_to(),
            constant=found.constant() if len(seen) > 1 else None,
            form=found.form(traits.uses_sizes, traits.uses_steps),
        )


def _only(masses: FloatArray) -> str | None:
    """Whether only the first or only the last client of a cohort counts."""
    counts = np.abs(masses) > CLOSE * np.abs(masses).max()
    if len(masses) > 1 and counts.sum() == 1:
        return "last" if counts[-1] else "first" if counts[0] else None
    return None


def _some(clients: IntArray) -> str:
    names = ", ".join(str(i) for i in clients[:5].tolist())
    return names if len(clients) <= 5 else f"{names}, ... ({len(clients)} in all)"
