r"""The audit: which objective does a method really minimise?

In one round client i moves the model by ``mass_i(S) = a_i gamma_i tau_i`` times its gradient, to
first order in the step size, if it is in the cohort. So a method walks down the objective with
weights

.. math:: \hat w_i \propto E\big[ 1\{i \in S\}\, a_i\, \gamma_i\, \tau_i \big]
          = \frac{\tilde w_i \tau_i}{c_i q_i}, \qquad
          \frac{1}{q_i} = E\Big[ \frac{1\{i \in S\}}{q_i^S} \Big],

and it is *consistent* if that is the objective you meant, :math:`\hat w = w`.

Momentum adds a share of its own. The cheap momentum is made from other cohorts than the one that
uses it, and pulls towards the objective it estimates. Exact MVR uses the same cohort twice: its
estimate of the gradient is correlated with how far that cohort moves in total, which shifts the
objective unless every cohort moves equally far (docs/audit.md has the derivation).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.auditing.findings import Finding, differ, find
from fedshuffle.auditing.quadrature import expected_ratio, probability_of_anybody
from fedshuffle.auditing.reading import Reads, survey
from fedshuffle.auditing.weighed import Weighed
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods import (
    Custom,
    Direction,
    InclusionProbability,
    Method,
    Moments,
    Participants,
    SumOne,
)
from fedshuffle.methods.averaging import RatioOfSums, objective_weight, steps_of_the_longest
from fedshuffle.methods.directions import gradient_weights
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.sampling import One, Optimal, Sampling, resolve
from fedshuffle.sampling.base import AlikePairs, check_cohort

_COHORTS = 4096
"""So many cohorts are enumerated where no formula applies; beyond, the audit samples."""

_LEVELS = 200
"""So many different numbers of steps are taken one by one for the minimum over the cohort."""

_ROUNDS = 100
"""Where clients count otherwise in other rounds, the audit is the mean over so many."""

_BATCHES = 32
"""The draws of a Monte Carlo estimate are split in so many parts to find its standard error."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Audit(Weighed):
    """The objective that a method really minimises, beside the one that was meant."""

    method: Method
    sampling: Sampling
    client_ids: Sequence[Hashable]
    sizes: IntArray
    objective_weights: FloatArray
    effective_weights: FloatArray
    inclusion_probabilities: FloatArray
    exact: bool
    how: str
    """closed form, quadrature, enumeration, or Monte Carlo."""
    rounds: int | None
    """Over how many rounds, from 0 on, the weights are the mean, where a rule or an interruption
    depends on the round; None where every round counts clients alike.
    """
    standard_errors: FloatArray | None
    """Of the effective weights, where they are Monte Carlo estimates."""
    findings: tuple[Finding, ...]
    """What is wrong, why it matters and how to fix it."""

    @property
    def title(self) -> tuple[str, str]:
        """The method's name, and its momentum, if any."""
        momentum = self.method.momentum
        return self.method.name, "" if momentum == "none" else f", momentum {momentum}"

    @property
    def setting(self) -> str:
        """The sampling."""
        return f"sampling {self.sampling!r}"

    @property
    def consistent(self) -> bool | None:
        """Whether the two objectives are the same; None where sampling cannot tell, or where only
        some rounds were looked at and others may differ.
        """
        if differ(self.objective_weights, self.effective_weights, self.standard_errors):
            return False
        return True if self.standard_errors is None and self.rounds is None else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; null for what is infinite."""
        return {
            "method": self.method.name,
            "momentum": self.method.momentum,
            "sampling": repr(self.sampling),
            **self._plain(rounds=self.rounds),
        }


def audit(
    federation: Federation,
    method: str | Method,
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    *,
    seed: int = 0,
    draws: int = 32_000,
    rounds: int = _ROUNDS,
) -> Audit:
    """The objective that a method really minimises on this federation.

    ``seed`` and ``draws`` matter only where nothing exact is known and the audit has to sample;
    ``rounds`` only where a rule or an interruption of your own depends on the round: the weights
    are then the mean over that many rounds.

        >>> result = audit(Federation.from_sizes([1, 2, 3]), "fedavg-rr")
        >>> (result.effective_weights * 14).round(6).tolist(), result.consistent
        ([1.0, 4.0, 9.0], False)
    """
    expect(federation, Federation, "federation")
    method = methods.get(method)
    sampling = resolve(sampling, federation)
    work = LocalWork() if work is None else work
    expect(work, LocalWork, "work")
    count(draws, "draws")
    workload = method.local_work(work).on(method.clients(federation).sizes)
    method.check(workload, method.sampling(sampling))
    setting = _Setting(federation, method, sampling, workload, count(rounds, "rounds"))
    pull, how, errors, seen = _found(setting, check_seed(seed), draws)
    if not pull.sum() > 0:
        raise FedShuffleError(
            f"the clients' pulls on {method.name} sum to {pull.sum():g}: the mean round does not"
            " walk downhill, so it minimises nothing."
        )
    effective = pull / pull.sum()
    return Audit(
        method=method,
        sampling=sampling,
        client_ids=federation.ids,
        sizes=federation.sizes,
        objective_weights=federation.weights,
        effective_weights=effective,
        inclusion_probabilities=sampling.p,
        exact=errors is None,
        how=how,
        rounds=seen,
        standard_errors=errors,
        findings=find(federation, effective, errors, method, sampling, workload, seen),
    )


@dataclass(frozen=True)
class _Setting:
    federation: Federation
    method: Method
    sampling: Sampling
    workload: Workload
    rounds: int = _ROUNDS

    @functools.cached_property
    def reads(self) -> Reads:
        """On what the clients' movements depend."""
        return survey(self, self.rounds)

    def participants(
        self, clients: IntArray, planned: IntArray, seed: int = 0, round: int = 0
    ) -> Participants:
        """Clients as the rules see them."""
        return Participants(
            clients=clients,
            weight=self.federation.weights[clients],
            probability=self.sampling.p[clients],
            planned=planned,
            done=self.workload.done(planned, clients, seed, round),
            longest=self.workload.longest,
            round=round,
        )

    def alone(self, clients: IntArray, alternative: int = 0, round: int = 0) -> Participants:
        """Clients with the steps that each may be given by its own epochs."""
        planned = self.workload.alone[0][clients, alternative]
        return self.participants(clients, planned, round=round)

    @functools.cached_property
    def drawn(self) -> Participants:
        """A cohort that may be drawn."""
        draws = (
            check_cohort(self.sampling.draw(0, r), len(self.sampling), self.sampling)
            for r in range(100)
        )
        members = next((drawn for drawn in draws if len(drawn)), np.arange(len(self.federation)))
        planned = self.workload.together(self.workload.alone[0][members, 0])
        return self.participants(members, planned)

    def seen(self, round: int) -> tuple[FloatArray, ...]:
        """What the rules make in a round of all clients, and of the cohort."""
        rule, everyone = self.method.averaging, self.alone(np.arange(len(self.sampling)), 0, round)
        cohort = self.participants(self.drawn.clients, self.drawn.planned, 0, round)
        alone = rule.client_weights(everyone), rule.step_scale(everyone)
        return (*alone, rule.aggregation_weights(cohort))

    def address(self, seed: int, draw: int) -> tuple[int, int]:
        """The seed and the round that a draw stands for; all rounds of the window equally often."""
        window = self.reads.window
        return (seed, draw) if not window else ((seed + draw // window) % 2**64, draw % window)

    @property
    def common_steps(self) -> bool:
        """Whether the members of a cohort agree on a number of steps that depends on the cohort."""
        steps = self.workload.alone[0]
        varied = steps.min() != steps.max() and not isinstance(self.sampling, One)
        return isinstance(self.workload.work.steps, str) and bool(varied)


def mass(method: Method, cohort: Participants) -> FloatArray:
    """How far each client of a cohort moves the model along its gradient, per unit step size."""
    rule = method.averaging
    return rule.aggregation_weights(cohort) * rule.step_scale(cohort) * cohort.done


def _found(
    setting: _Setting, seed: int, draws: int
) -> tuple[FloatArray, str, FloatArray | None, int | None]:
    """The weights of the mean movement, not normalised; how they were found; standard errors; and
    over how many rounds, if rounds differ.
    """
    if setting.method.pooled:  # every example counts equally
        return setting.federation.sizes.astype(np.float64), "closed form", None, None
    rounds = setting.reads.rounds
    if type(setting.method.direction).pull is not Direction.pull and not _unselected(setting):
        with suppress(_NoFormulaError):
            exact, how = _exact(setting)
            if exact is not None:
                return exact, how if rounds is None else f"{how}, {_named(rounds)}", None, rounds
            pull, errors = _monte_carlo(setting, seed, draws)
            of = f" of {_named(setting.reads.window)}" if setting.reads.window else ""
            return pull, f"Monte Carlo, {draws} draws{of}", errors, rounds
    from fedshuffle.auditing.playing import played

    pull, errors = played(setting, seed, draws)
    optimal = isinstance(setting.sampling, Optimal)
    alike = " with equally long gradients" if optimal else ""
    how = f"played with linear clients{alike}, {draws} rounds"
    return pull, how, errors, None if rounds is None else draws


def _named(rounds: int) -> str:
    return "round 0" if rounds == 1 else f"rounds 0 to {rounds - 1}"


def _unselected(setting: _Setting) -> bool:
    """Whether the weights of those who are asked under optimal sampling are not those of the pool.

    They are asked with a probability that depends on their updates, and so on the data.
    """
    reads = setting.reads
    return isinstance(setting.sampling, Optimal) and (reads.probability or reads.company)


class _NoFormulaError(Exception):
    """The direction knows no formula for this setting."""


def _pull(
    setting: _Setting, mass: FloatArray, joint: FloatArray | None, estimate: FloatArray | None
) -> FloatArray:
    """What the direction makes of the expectations over the cohorts."""
    anybody = probability_of_anybody(setting.sampling)
    moments = Moments(setting.federation.weights, anybody, mass, joint, estimate)
    pull = setting.method.direction.pull(moments)
    if pull is None or _memory_waits(setting, moments, pull):
        raise _NoFormulaError
    n, name = len(setting.federation), type(setting.method.direction).__name__
    if np.shape(pull) != (n,):
        raise FedShuffleError(
            f"{name}.pull gives an array of shape {np.shape(pull)}: give a number for each of the"
            f" {n} clients, or leave pull out, and the audit lets the method play."
        )
    if not np.isfinite(pull).all():
        raise FedShuffleError(f"{name}.pull gives {pull!r:.60}: give finite numbers.")
    return pull


def _memory_waits(setting: _Setting, moments: Moments, pull: FloatArray) -> bool:
    """Whether the direction has a momentum that is not renewed in rounds that draw a pool of which
    nobody is asked: how many those are, and with whom, depends on the data.
    """
    if not isinstance(setting.sampling, Optimal):
        return False
    rarer = setting.method.direction.pull(dataclasses.replace(moments, anybody=moments.anybody / 2))
    return rarer is None or not np.array_equal(rarer, pull)


def _exact(setting: _Setting) -> tuple[FloatArray | None, str]:
    """The pull by formula or by enumeration; None where neither is possible."""
    reads = setting.reads
    if reads.chance:
        return None, ""
    parts: _Parts | None = None
    how = ""
    if setting.common_steps:
        parts, how = _by_levels(setting), "quadrature"
    elif not reads.company:
        parts, how = _by_formula(setting)
    if parts is None:
        parts, how = _by_enumeration(setting), "enumeration"
    return (None if parts is None else _pull(setting, *parts)), how


_Parts = tuple[FloatArray, FloatArray | None, FloatArray | None]


def _by_formula(setting: _Setting) -> tuple[_Parts | None, str]:
    """Closed forms and quadrature, where every client's steps are its own: the mean over rounds."""
    if isinstance(setting.method.averaging.normaliser, Custom):
        return None, ""
    tables: dict[bytes, tuple[_Table, int]] = {}
    rounds = setting.reads.rounds or 1
    for round in range(rounds):  # most are the same
        table = _Table.of(setting, round)
        key = table.digest
        tables[key] = table, tables[key][1] + 1 if key in tables else 1
    how = ""
    columns: tuple[list[FloatArray], ...] = ([], [], [])
    for table, _ in tables.values():
        parts, how = _of_table(setting, table)
        if parts is None:
            return None, ""
        for column, part in zip(columns, parts, strict=True):
            if part is not None:
                column.append(part)
    shares = [times / rounds for _, times in tables.values()]
    mass_, joint, estimate = (np.average(c, axis=0, weights=shares) if c else None for c in columns)
    assert mass_ is not None
    return (mass_, joint, estimate), how


@dataclass(frozen=True)
class _Table:
    """What the rules give every client in a round, in each of its alternatives: shape (n, A)."""

    walked: FloatArray
    """Mass times q."""
    ratio: RatioOfSums | None

    @classmethod
    def of(cls, setting: _Setting, round: int) -> _Table:
        """Each alternative is shown to the rules as a cohort of its own, as in training."""
        rule, everyone = setting.method.averaging, np.arange(len(setting.federation))
        walked, ratios = [], []
        for alternative in range(len(setting.workload.alone[1])):
            clients = setting.alone(everyone, alternative, round)
            weights = rule.client_weights(clients)
            walked.append(weights * rule.step_scale(clients) * clients.done)
            ratios.append(rule.normaliser.ratio(weights, clients))
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) < len(ratios):
            return cls(np.stack(walked, axis=1), None)
        v = [ratio.v for ratio in known if ratio.v is not None]
        return cls(
            np.stack(walked, axis=1),
            RatioOfSums(
                np.stack([ratio.u for ratio in known], axis=1),
                np.stack(v, axis=1) if v else None,
                known[0].power,
            ),
        )

    @property
    def digest(self) -> bytes:
        """Equal for equal tables."""
        arrays = [self.walked]
        if self.ratio is not None:
            arrays += [self.ratio.u, *(() if self.ratio.v is None else (self.ratio.v,))]
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()


def _of_table(setting: _Setting, table: _Table) -> tuple[_Parts | None, str]:
    method, sampling, walked = setting.method, setting.sampling, table.walked
    chances, w = setting.workload.alone[1], setting.federation.weights
    needs_joint = method.direction.needs_joint
    needs_estimate = method.direction.needs_estimate

    if isinstance(method.averaging.normaliser, InclusionProbability):
        mean = walked @ chances
        joint = w / sampling.p * sampling.expected_sums(mean / sampling.p) if needs_joint else None
        return (mean, joint, w if needs_estimate else None), "closed form"

    ratio = table.ratio
    if ratio is None:
        return None, ""
    mass_ = expected_ratio(
        sampling, ratio.u, c=walked, v=ratio.v, power=ratio.power, chances=chances
    )
    joint = estimate = None
    if needs_joint:
        total = _total_mass(walked, ratio)
        if total is None:
            return None, ""
        joint = expected_ratio(sampling, total.u, v=total.v, power=total.power, chances=chances)
        joint = None if joint is None else w / sampling.p * joint
    if needs_estimate:
        each = np.repeat(w[:, None], len(chances), axis=1)
        estimate = expected_ratio(sampling, each, c=each, chances=chances)
    if mass_ is None or (needs_joint and joint is None) or (needs_estimate and estimate is None):
        return None, ""
    listed = len(chances) == 1 and sampling.cohorts(0) is not None
    return (mass_, joint, estimate), "closed form" if listed else "quadrature"


def _total_mass(walked: FloatArray, ratio: RatioOfSums) -> RatioOfSums | None:
    """The mass of a whole cohort, ``(sum walked) (sum v) / (sum u)^power``, as a ratio of sums."""
    if ratio.v is None:
        return RatioOfSums(u=ratio.u, v=walked, power=ratio.power)
    factor = walked / ratio.u
    if ratio.power == 2 and np.ptp(factor) <= 1e-12 * factor.max():
        return RatioOfSums(u=ratio.u, v=ratio.v * factor.flat[0], power=1)
    return None


def _by_levels(setting: _Setting) -> _Parts | None:
    """FedAvg with the fewest steps of the cohort, K(S) = sum over levels of 1{S within level}.

    A cohort takes at least t steps if all its members would: the others must be absent.
    """
    method, work = setting.method, setting.workload.work
    direction = method.direction
    plain = not (direction.needs_joint or direction.needs_estimate) and work.interruption is None
    planned, chances = setting.workload.alone
    levels = np.unique(planned)
    if work.steps != "min" or len(chances) > 1 or not plain or len(levels) > _LEVELS:
        return None
    rule = method.averaging
    simple = rule.weight is objective_weight and rule.step_normalisation is steps_of_the_longest
    if not simple or not isinstance(rule.normaliser, SumOne):
        return None
    w = setting.federation.weights[:, None]
    pull = np.zeros(len(w))
    for level, below in zip(levels, [0, *levels[:-1]], strict=True):
        u = np.where(planned >= level, w, np.inf)
        part = expected_ratio(setting.sampling, u, c=w)
        if part is None:
            return None
        pull += (level - below) * part
        if (part * (levels[-1] - level) <= 1e-14 * pull).all():
            break  # hardly any cohort takes more steps than this
    return pull, None, None


def _by_enumeration(setting: _Setting) -> _Parts | None:
    """The definition itself, over every cohort, and every round if they are not alike."""
    cohorts = setting.sampling.cohorts(_COHORTS)
    planned, chances = setting.workload.alone
    rounds = setting.reads.rounds or 1
    most = _COHORTS if rounds == 1 else 16 * _COHORTS // rounds
    if cohorts is None or len(cohorts) > most or len(chances) > 1:
        return None
    total = _Totals(setting)
    for round in range(rounds):
        for members, probability in cohorts:
            if len(members):
                share = probability / rounds
                total.add(members, planned[members, 0], seed=0, round=round, share=share)
    return total.mass, total.joint, total.estimate


class _Totals:
    """Running sums of what cohorts contribute."""

    def __init__(self, setting: _Setting) -> None:
        self.setting = setting
        self.mass, self.joint, self.estimate = np.zeros((3, len(setting.federation)))

    def add(self, members: IntArray, alone: IntArray, seed: int, round: int, share: float) -> None:
        """Count one cohort, whose members would plan ``alone`` steps if it were for them."""
        setting, method = self.setting, self.setting.method
        cohort = setting.participants(members, setting.workload.together(alone), seed, round)
        own = mass(method, cohort)
        self.mass[members] += share * own
        self.joint[members] += share * own.sum() * cohort.weight / cohort.probability
        self.estimate[members] += share * gradient_weights(cohort, method.averaging.normaliser)


def _monte_carlo(setting: _Setting, seed: int, draws: int) -> tuple[FloatArray, FloatArray]:
    """The pull from drawn cohorts, and the standard error of the effective weights.

    Clients that are alike have equal expectations, so they share their draws.
    """
    if draws < _BATCHES:
        raise FedShuffleError(f"{draws} draws are too few to judge by: use at least {_BATCHES}.")
    values, chances = setting.workload.alone
    pool = _interchangeable(setting)
    pulls = []
    for batch in range(_BATCHES):
        total = _Totals(setting)
        each = draws // _BATCHES
        for k in range(each):
            draw = batch * each + k
            members = setting.sampling.draw(seed, draw)
            if not len(members):
                continue
            rng = generator(seed, Purpose.MONTE_CARLO, round=draw)
            pick = rng.choice(len(chances), size=len(members), p=chances)
            total.add(members, values[members, pick], *setting.address(seed, draw), share=1 / each)
        pulls.append(_pull(setting, pool(total.mass), pool(total.joint), pool(total.estimate)))
    mean = np.mean(pulls, axis=0)
    if not mean.sum() > 0:
        raise FedShuffleError(
            f"in {draws} draws nobody took part: use more draws, or larger probabilities."
        )
    shares = np.stack([pull / max(pull.sum(), np.finfo(float).tiny) for pull in pulls])
    errors = shares.std(axis=0, ddof=1) / np.sqrt(_BATCHES)
    # A client that hardly any part has seen shows no spread, but nothing is known of it either.
    rare = np.count_nonzero(shares, axis=0) < _BATCHES // 2
    errors[rare] = np.maximum(errors, setting.federation.weights)[rare]
    return mean, errors


def _interchangeable(setting: _Setting) -> Callable[[FloatArray], FloatArray]:
    """A function that averages over clients with equal weight, steps and probability, where
    nothing else tells them apart.
    """
    alike = isinstance(setting.sampling, AlikePairs)  # else they may keep different company
    if not alike or setting.reads.clients or setting.reads.company:
        return lambda values: values
    table = np.column_stack(
        [setting.federation.weights, setting.sampling.p, setting.workload.alone[0]]
    )
    _, group, count = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    return lambda values: (np.bincount(group, weights=values) / count)[group]
