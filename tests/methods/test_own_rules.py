"""Audits of rules and interruptions of the user's own, against every cohort, round and epoch."""

import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedshuffle import (
    Audit,
    EpochRange,
    Federation,
    FedShuffleError,
    FedShuffleGen,
    LocalWork,
    Method,
    audit,
    methods,
)
from fedshuffle.local_work import Interruption
from fedshuffle.methods import (
    Cohort,
    Custom,
    InclusionProbability,
    Normaliser,
    SumOne,
    objective_weight,
    own_steps,
    steps_of_the_longest,
)
from fedshuffle.methods.averaging import ClientRule
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Sampling, Uniform, optimal_probabilities, parse
from tests import brute
from tests.brute import Floats

Ints = NDArray[np.int64]
THREE = Federation.from_sizes([1, 2, 3])
EQUAL = Federation.from_sizes([4, 4, 4])
TABLE = np.array([1.0, 5.0, 2.0])


def mine(weight: ClientRule, c: ClientRule = own_steps, q: Normaliser | None = None) -> Method:
    return Method("mine", "", FedShuffleGen(c, weight, q or InclusionProbability()))


def truth(
    federation: Federation,
    method: Method,
    sampling: str | Sampling,
    work: LocalWork | None = None,
    rounds: int = 1,
) -> Floats:
    """Effective weights by the definition: cohorts as training shows them to the rules."""
    work = work or LocalWork()
    sampling = parse(sampling, federation) if isinstance(sampling, str) else sampling
    values, chances = work.on(federation.sizes).possible_steps
    total = np.zeros(len(federation))
    for round in range(rounds):
        for cohort, probability in brute.cohorts(sampling):
            members = np.array(cohort, dtype=np.int64)
            for picks in itertools.product(range(len(chances)), repeat=len(cohort)):
                pick = np.array(picks, dtype=int)
                planned = done = values[members, pick]
                if work.interruption is not None:
                    done = work.interruption.done(planned, members, 0, round)
                seen = Cohort(
                    members,
                    federation.weights[members],
                    sampling.p[members],
                    planned,
                    done,
                    int(values.max()),
                    round,
                )
                rule = method.averaging
                contribution = rule.aggregation_weights(seen) * rule.step_scale(seen) * done
                total[members] += probability * np.prod(chances[pick]) * contribution
    return total / float(total.sum())


def by_number(clients: Cohort) -> Floats:
    return TABLE[clients.clients] * clients.weight


# Rules that look at the clients' numbers --------------------------------------------------------


@pytest.mark.parametrize("sampling", ["full", "uniform:2", "importance:2", "one"])
@pytest.mark.parametrize("epochs", [1, EpochRange(1, 3)], ids=["fixed", "random"])
@pytest.mark.parametrize("q", [InclusionProbability(), SumOne()], ids=["p", "sum"])
def test_a_rule_that_looks_at_the_clients_numbers(
    q: Normaliser, epochs: int | EpochRange, sampling: str
) -> None:
    work = LocalWork(epochs=epochs)
    for method in (mine(by_number, q=q), mine(objective_weight, c=by_number, q=q)):
        result = audit(THREE, method, sampling, work)
        want = truth(THREE, method, sampling, work)
        np.testing.assert_allclose(result.effective_weights, want, rtol=1e-9)
        assert result.exact
        assert bool(result.findings) == (not result.consistent)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=8, max_size=8),
    st.sampled_from(["full", "uniform:2", "one", "importance:1"]),
    st.booleans(),
)
def test_what_is_not_consistent_has_a_finding(
    sizes: list[int], numbers: list[float], sampling: str, sums_to_one: bool
) -> None:
    federation, table = Federation.from_sizes(sizes), np.array(numbers)
    method = mine(
        lambda c: c.weight * table[c.clients],
        lambda c: c.planned * table[4 + c.clients],
        SumOne() if sums_to_one else None,
    )
    result = audit(federation, method, sampling)
    np.testing.assert_allclose(
        result.effective_weights, truth(federation, method, sampling), rtol=1e-9
    )
    assert result.exact
    assert bool(result.findings) == (not result.consistent)


# Rules that look at who else takes part ---------------------------------------------------------


@pytest.mark.parametrize(
    "weight",
    [
        lambda c: c.weight / c.weight.sum(),
        lambda c: c.weight * c.planned / c.planned.max(),
        lambda c: c.weight * (1.0 + np.arange(len(c.weight))),
    ],
    ids=["sum", "max", "position"],
)
def test_a_weight_that_depends_on_the_cohort_has_no_formula(weight: ClientRule) -> None:
    method = mine(weight)
    result = audit(THREE, method, "uniform:2")
    np.testing.assert_allclose(
        result.effective_weights, truth(THREE, method, "uniform:2"), rtol=1e-9
    )
    assert result.how == "enumeration"
    many = Federation.from_sizes(np.arange(1, 31))
    assert not audit(many, method, "uniform:10", draws=64).exact


def triples_if_anybody_plans_much(clients: Cohort) -> Floats:
    """Looks at the numbers, and around, only where somebody plans many steps."""
    if (clients.planned > 8).any():
        return np.where(clients.clients == 1, 3.0, 1.0) * clients.weight
    return clients.weight


@pytest.mark.parametrize("sampling", ["full", "uniform:2"])
def test_a_weight_that_depends_on_the_cohort_only_with_many_steps(sampling: str) -> None:
    work, method = LocalWork(epochs=EpochRange(1, 3)), mine(triples_if_anybody_plans_much)
    result = audit(EQUAL, method, sampling, work, draws=640)
    assert result.standard_errors is not None
    want = truth(EQUAL, method, sampling, work)
    assert (np.abs(result.effective_weights - want) <= 5 * result.standard_errors).all()


# Interruptions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Early(Interruption):
    """The first client always stops after one step."""

    random: bool

    def done(self, planned: Ints, clients: Ints, seed: int, round: int) -> Ints:
        return np.where(clients == 0, 1, planned)


@pytest.mark.parametrize("random", [False, True])
def test_equal_clients_are_not_alike_if_one_always_stops_early(random: bool) -> None:
    work = LocalWork(interruption=Early(random))
    result = audit(EQUAL, "fedavg-rr", "uniform:2", work, draws=640)
    want = truth(EQUAL, methods.get("fedavg-rr"), "uniform:2", work)
    np.testing.assert_allclose(want, [1 / 9, 4 / 9, 4 / 9], rtol=1e-9)
    errors = np.zeros(3) if result.standard_errors is None else result.standard_errors
    assert (np.abs(result.effective_weights - want) <= 5 * errors + 1e-9).all()
    assert result.exact != random
    assert result.consistent is False
    assert any("do not finish" in finding.what for finding in result.findings)


def test_rules_that_tell_equal_clients_apart_are_not_averaged_over_them() -> None:
    work = LocalWork(epochs=EpochRange(1, 2), steps="min")
    method = mine(by_number, c=steps_of_the_longest)
    result = audit(EQUAL, method, "uniform:2", work, draws=640)
    assert result.standard_errors is not None
    want = TABLE / TABLE.sum()
    assert (np.abs(result.effective_weights - want) <= 5 * result.standard_errors + 1e-9).all()


@dataclass(frozen=True)
class Drawn(Interruption):
    """Chance that says it is none."""

    random = False

    def done(self, planned: Ints, clients: Ints, seed: int, round: int) -> Ints:
        rng = [generator(seed, Purpose.INTERRUPTION, round=round, client=i) for i in clients]
        return np.array([r.integers(1, n + 1) for r, n in zip(rng, planned, strict=True)])


def test_chance_is_noticed_also_where_it_is_not_declared() -> None:
    result = audit(EQUAL, "fedavg-rr", "full", LocalWork(interruption=Drawn()), draws=640)
    assert not result.exact
    assert result.consistent is None


@dataclass(frozen=True)
class Company(Interruption):
    """The slower half of a cohort is cut off."""

    random = False

    def done(self, planned: Ints, clients: Ints, seed: int, round: int) -> Ints:
        return np.where(planned > np.median(planned), 1, planned)


def test_an_interruption_that_depends_on_the_cohort() -> None:
    work, fedavg = LocalWork(interruption=Company()), methods.get("fedavg-rr")
    result = audit(THREE, fedavg, "uniform:2", work)
    np.testing.assert_allclose(
        result.effective_weights, truth(THREE, fedavg, "uniform:2", work), rtol=1e-9
    )
    assert result.exact


# Rounds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class From(Interruption):
    """From a round on, the last client stops early."""

    first: int
    random = False

    def done(self, planned: Ints, clients: Ints, seed: int, round: int) -> Ints:
        return np.where((clients == 2) & (round >= self.first), 1, planned)


def says_that_rounds_differ(result: Audit) -> bool:
    return any("depends on the round" in finding.what for finding in result.findings)


@pytest.mark.parametrize("sampling", ["full", "uniform:2"])
@pytest.mark.parametrize("name", ["fedshuffle", "fednova-rr", "fedavg-rr"])
def test_an_interruption_that_depends_on_the_round(name: str, sampling: str) -> None:
    work, method = LocalWork(interruption=From(3)), methods.get(name)
    result = audit(THREE, method, sampling, work, rounds=8)
    want = truth(THREE, method, sampling, work, rounds=8)
    np.testing.assert_allclose(result.effective_weights, want, rtol=1e-9)
    assert result.rounds == 8
    assert "rounds 0 to 7" in result.how
    assert says_that_rounds_differ(result)
    assert result.consistent is not True


@dataclass(frozen=True)
class LongOnes(Interruption):
    """In odd rounds the second client stops early, if it plans many steps."""

    random = False

    def done(self, planned: Ints, clients: Ints, seed: int, round: int) -> Ints:
        return np.where((planned > 8) & (clients == 1) & (round % 2 == 1), 1, planned)


def test_an_interruption_that_depends_on_the_round_only_with_many_steps() -> None:
    work, method = LocalWork(epochs=EpochRange(1, 3), interruption=LongOnes()), "fedshuffle"
    result = audit(EQUAL, method, "uniform:2", work, rounds=2)
    want = truth(EQUAL, methods.get(method), "uniform:2", work, rounds=2)
    np.testing.assert_allclose(result.effective_weights, want, rtol=1e-9)
    assert says_that_rounds_differ(result)


@pytest.mark.parametrize("first", [1, 50, 101, 5000])
def test_a_change_in_later_rounds_is_not_called_consistent(first: int) -> None:
    work = LocalWork(interruption=From(first))
    result = audit(THREE, "fedshuffle", "uniform:2", work)
    assert result.consistent is (False if first < 100 else None)
    assert says_that_rounds_differ(result)
    assert (
        audit(THREE, "fedshuffle", "uniform:2", LocalWork(interruption=Early(False))).rounds is None
    )


def alternating(clients: Cohort) -> Floats:
    """The first client in even rounds counts double, in odd rounds not at all, nearly."""
    factor = 1.9 if clients.round % 2 == 0 else 0.1
    return np.where(clients.clients == 0, factor, 1.0) * clients.weight


@pytest.mark.parametrize(
    "method",
    [
        mine(alternating),
        mine(alternating, q=SumOne()),
        mine(objective_weight, q=Custom(lambda w, c: w / alternating(c))),
    ],
    ids=["p", "sum", "custom"],
)
def test_a_rule_that_depends_on_the_round(method: Method) -> None:
    result = audit(THREE, method, "uniform:2", rounds=4)
    want = truth(THREE, method, "uniform:2", rounds=4)
    np.testing.assert_allclose(result.effective_weights, want, rtol=1e-9)
    assert result.exact
    assert result.consistent is not True
    assert says_that_rounds_differ(result)


def test_the_mean_of_rounds_may_be_right_and_yet_decides_nothing() -> None:
    result = audit(THREE, mine(alternating), "uniform:2")
    np.testing.assert_allclose(result.effective_weights, THREE.weights, rtol=1e-12)
    assert result.consistent is None
    assert "rounds" in result.conclusion[1]


def test_rounds_end_where_the_rule_knows_no_more() -> None:
    factors = [1.0, 3.0, 2.0]
    method = mine(lambda c: np.where(c.clients == 1, factors[c.round], 1.0) * c.weight)
    result = audit(THREE, method, "full")
    assert result.rounds == 3
    np.testing.assert_allclose(result.effective_weights, truth(THREE, method, "full", rounds=3))


def test_monte_carlo_draws_from_the_rounds() -> None:
    work = LocalWork(epochs=EpochRange(1, 2), steps="mean")
    method = mine(alternating, c=steps_of_the_longest, q=SumOne())
    want = truth(EQUAL, method, "full", LocalWork(), rounds=2)
    result = audit(EQUAL, method, "full", work, rounds=2, draws=640)
    assert result.standard_errors is not None
    assert (np.abs(result.effective_weights - want) <= 5 * result.standard_errors + 1e-9).all()
    assert "rounds 0 to 1" in result.how


def test_a_rule_that_tells_clients_apart_in_later_rounds_only() -> None:
    work = LocalWork(epochs=EpochRange(1, 2), steps="mean")
    method = mine(
        lambda c: by_number(c) if c.round % 2 else c.weight, c=steps_of_the_longest, q=SumOne()
    )
    want = truth(EQUAL, method, "full", LocalWork(), rounds=2)
    result = audit(EQUAL, method, "full", work, rounds=2, draws=640)
    assert result.standard_errors is not None
    assert (np.abs(result.effective_weights - want) <= 5 * result.standard_errors + 1e-9).all()


def test_rules_of_the_library_look_at_no_round() -> None:
    for method in methods.available():
        if not method.balanced_only:
            assert audit(THREE, method, "full", draws=32).rounds is None


# Optimal client sampling ------------------------------------------------------------------------


def test_a_rule_that_reads_the_probability_under_optimal_sampling() -> None:
    """The probability of being asked goes by the updates: pools and coins, enumerated."""
    federation = Federation.from_sizes([1, 2, 4, 5])
    w, p = federation.weights, 0.75

    def by_probability(clients: Cohort) -> Floats:
        return clients.weight * clients.probability**2

    total = np.zeros(4)
    for pool, chance in brute.uniform(4, 3):
        i = np.array(pool)
        length = float(federation.sizes.max())  # step size times steps, of every client
        asked = optimal_probabilities(w[i] * p**2 / p * length, 2)
        total[i] += chance * asked * w[i] * (p * asked) ** 2 / (p * asked) * length
    result = audit(federation, mine(by_probability), "optimal:2:of:uniform:3", draws=1600)
    assert result.standard_errors is not None
    apart = np.abs(result.effective_weights - total / total.sum())
    assert (apart <= 5 * result.standard_errors).all()
    assert result.consistent is False
    assert result.findings


POOL = np.array([0.9, 0.2, 0.2, 0.9])
UNLIKE = Federation.from_sizes([5, 4, 2, 1])


def with_momentum(name: str, rounds: int) -> tuple[Floats, Floats]:
    """Effective weights with linear clients under ``optimal:1``, by hand, and their errors.

    The mean round is ``own + (1 - a) * distance * E[momentum]``: the first is enumerated. Of the
    last, only how far it is from that of a momentum which never waits, whose mean is known, is
    simulated.
    """
    w, sizes, a = UNLIKE.weights, UNLIKE.sizes, 0.1
    mvr, mime = name == "fedshuffle-mvr", name == "mime"
    length = np.full(4, 5.0) if mvr else sizes.astype(np.float64)
    one, empty = np.zeros(4), 1.0
    for pool, chance in brute.independent(POOL):
        i = np.array(pool, dtype=int)
        g = np.bincount(i, w[i] / POOL[i], 4)
        if pool:
            far = w[i] / POOL[i] * length[i]
            one += chance * a * (far.sum() * g if mime else np.bincount(i, far, 4))
            one += chance * (1 - a) * a * far.sum() * g * mvr
        else:
            empty -= chance
    rng = np.random.default_rng(1)
    waits = always = w / empty
    apart = np.zeros((rounds, 4))
    for r in range(rounds):
        i = np.flatnonzero(rng.random(4) < POOL)
        apart[r] = waits - always
        if not len(i):
            continue
        g = np.bincount(i, w[i] / POOL[i], 4)
        renewed = a * g + (1 - a) * waits
        along = (a * g if mime else a * np.eye(4)[i]) + (1 - a) * (renewed if mvr else waits)
        updates = (w[i] / POOL[i] * length[i])[:, None] * along
        asked = optimal_probabilities(np.linalg.norm(updates, axis=1), 1)
        always = a * g + (1 - a) * always
        if (rng.random(len(i)) < asked).any():
            waits = renewed
    parts = w / empty + apart.reshape(32, -1, 4).mean(1)
    moves = one + (1 - a) * (1 - a if mvr else 1.0) * float(w @ length) * parts
    shares = moves / moves.mean(0).sum()
    return shares.mean(0), shares.std(0, ddof=1) / np.sqrt(32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mime", "mime-lite", "fedshuffle-mvr"])
def test_momentum_under_optimal_sampling_changes_only_if_an_update_is_sent(name: str) -> None:
    want, noise = with_momentum(name, 32 * 200)
    pool = "independent:0.9,0.2,0.2,0.9"
    result = audit(UNLIKE, name, f"optimal:1:of:{pool}", draws=1600)
    assert result.standard_errors is not None
    errors = np.hypot(result.standard_errors, noise)
    assert (np.abs(result.effective_weights - want) <= 5 * errors).all()
    formula = audit(UNLIKE, name, pool).effective_weights
    assert (np.abs(formula - want) > 5 * noise).any()  # the pool alone says otherwise


def test_without_momentum_optimal_sampling_is_audited_exactly() -> None:
    for name in ("fedavg+fedshuffle", "fedprox+fedshuffle", "mime-sgd", "fedlin"):
        result = audit(UNLIKE, name, "optimal:1:of:uniform:2")
        assert result.exact
        pool = audit(UNLIKE, name, "uniform:2")
        np.testing.assert_array_equal(result.effective_weights, pool.effective_weights)


# Extreme weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1e-300, 1, 1], [1e-300, 1e-300, 1], [1e-160, 1, 3]])
@pytest.mark.parametrize("sampling", ["uniform:2", "independent:0.5,0.25,0.5", "one", "ais:2"])
@pytest.mark.parametrize("name", ["fedavg-rr", "fedshuffle-so", "fednova-original-rr"])
def test_tiny_weights(name: str, sampling: str, weights: list[float]) -> None:
    federation = Federation.from_sizes([1, 2, 3], weights=weights)
    sizes = [Fraction(n) for n in (1, 2, 3)]
    w = [Fraction(x) for x in federation.weights.tolist()]
    total = [Fraction(0)] * 3
    for cohort, probability in brute.cohorts(parse(sampling, federation)):
        whole = sum((w[i] for i in cohort), start=Fraction(0))
        for i in cohort:
            steps = {
                "fedavg-rr": sizes[i],
                "fedshuffle-so": Fraction(1),
                "fednova-original-rr": sum((w[j] * sizes[j] for j in cohort), start=Fraction(0))
                / whole,
            }[name]
            total[i] += Fraction(probability) * w[i] / whole * steps
    want = [float(part / sum(total)) for part in total]
    result = audit(federation, name, sampling)
    np.testing.assert_allclose(result.effective_weights, want, rtol=1e-8, atol=1e-300)


# Findings and the table -------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.sampled_from(["fedavg-rr", "fednova-rr", "fedshuffle-so", "fedavg-min", "fedprox"]),
    st.sampled_from(["uniform:2", "importance:1", "one", "uniform:1"]),
    st.sampled_from([1, 7]),
)
def test_what_a_finding_says_of_large_and_small_clients_is_in_the_table(
    sizes: list[int], method: str, sampling: str, batch_size: int
) -> None:
    federation = Federation.from_sizes(sizes)
    result = audit(federation, method, sampling, LocalWork(batch_size=batch_size))
    words = " ".join(finding.why for finding in result.findings)
    if "too much" in words or "too little" in words:
        order = np.argsort(federation.weights, kind="stable")
        assert result.ratios[order[-1]] < 1 < result.ratios[order[0]]


def test_a_rule_that_an_earlier_audit_called_consistent() -> None:
    """FedAvg with uneven steps: small clients count far too little, whatever the sum does."""
    result = audit(Federation.from_sizes([1, 10, 100]), "fedavg-rr", "uniform:2")
    assert result.ratios[0] < 0.2
    assert not any("small ones too much" in finding.why for finding in result.findings)
    alone = audit(Federation.from_sizes([1, 10, 100]), "fedshuffle-so", "uniform:2")
    assert alone.ratios[0] > 1 > alone.ratios[2]
    assert any("small ones too much" in finding.why for finding in alone.findings)


def test_a_rule_of_the_wrong_shape_is_named() -> None:
    method = mine(lambda c: c.weight[:1])
    with pytest.raises(FedShuffleError, match="shape"):
        audit(THREE, method, Uniform(3, 2), LocalWork(epochs=EpochRange(1, 2)))
