"""The audit where clients come and go: exact against enumeration, and honest for logs."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedshuffle import Federation, FedShuffleError, audit, audit_server, methods
from fedshuffle.auditing import estimation, expected_ratio, read_log
from fedshuffle.auditing.estimation import Observations, estimate
from fedshuffle.availability import (
    Availability,
    Cyclic,
    Drifting,
    Groups,
    Independent,
    Leaving,
    Markov,
    Trace,
)
from fedshuffle.cli import app
from fedshuffle.methods import Cohort
from fedshuffle.sampling import AmongAvailable, Stratified, Uniform
from tests import brute

CLIENTS = Federation.from_sizes([1, 2, 3])
HALVES = Trace(2, [0, 1], [0, 50], [50, 100])


def brute_force(q: brute.Floats, b: int) -> brute.Floats:
    """Of FedAvg on clients of 1, 2, ... examples, which take as many steps."""
    n = len(q)
    sizes = np.arange(1.0, n + 1)
    total = np.zeros(n)
    for there in itertools.product([0, 1], repeat=n):
        chance = math.prod(q[i] if there[i] else 1 - q[i] for i in range(n))
        present = [i for i in range(n) if there[i]]
        ways = list(itertools.combinations(present, min(b, len(present))))
        for cohort in ways:
            for i in cohort:
                share = sizes[i] / sizes[list(cohort)].sum()
                total[i] += chance / len(ways) * share * sizes[i]
    weights: brute.Floats = total / total.sum()
    return weights


@pytest.mark.parametrize("kind", ["independent", "markov"])
def test_stationary_weights_are_those_of_enumeration(kind: str) -> None:
    q = np.array([0.9, 0.5, 0.2, 0.6])
    there: Availability = Independent(q)
    if kind == "markov":
        there = Markov(on=0.3 * q, off=0.3 * (1 - q))
    for b in (1, 2, 4):
        sampling = "full" if b == 4 else f"uniform:{b}"
        found = audit(Federation.from_sizes([1, 2, 3, 4]), "fedavg", sampling, availability=there)
        assert found.exact
        np.testing.assert_allclose(found.effective_weights, brute_force(q, b), rtol=0, atol=1e-9)


def test_weights_on_the_enumerated_chain() -> None:
    """By the stationary distribution of the whole chain: nothing is taken to be independent."""
    on, off = np.array([0.1, 0.6, 0.8]), np.array([0.3, 0.2, 0.9])
    _, cohorts, stationary = brute.markov(2, on, off)
    total = np.zeros(3)
    for cohort, chance in zip(cohorts, stationary, strict=True):
        sizes = CLIENTS.sizes[list(cohort)]
        total[list(cohort)] += chance * sizes**2 / max(sizes.sum(), 1)
    found = audit(CLIENTS, "fedavg", "uniform:2", availability=Markov(on, off))
    want = total / total.sum()
    np.testing.assert_allclose(found.effective_weights, want, rtol=0, atol=1e-9)


def test_the_command_line_contract() -> None:
    command = "audit --sizes 1,2,3 --method fedavg-rr --sampling uniform:2 --json"
    plain = json.loads(CliRunner().invoke(app, command.split()).stdout)
    command += " --availability independent:0.9,0.5,0.2"
    found = json.loads(CliRunner().invoke(app, command.split()).stdout)
    assert list(found) == list(plain)
    np.testing.assert_allclose(found["inclusion_probabilities"], [0.87, 0.47, 0.17], atol=1e-12)
    want = brute_force(np.array([0.9, 0.5, 0.2]), 2)
    np.testing.assert_allclose(found["effective_weights"], want, rtol=0, atol=1e-9)
    assert found["exact"]
    assert found["consistent"] is False
    (came,) = [finding for finding in found["findings"] if "come and go" in finding["what"]]
    assert "client 0 is there 90% of the time, client 2 20%" in came["what"]
    assert "inclusion probability of sampling and availability together" in came["fix"]


@pytest.mark.parametrize("schedule", [None, "deadline:60"])
def test_a_finding_names_who_leaves_before_it_answers(schedule: str | None) -> None:
    timing: dict[str, Any] = {"schedule": schedule, "clock": "fixed:1"} if schedule else {}
    there = "independent:1+leaves:0.1,0.5,0.8"
    found = audit(CLIENTS, "fedshuffle-so", availability=there, **timing)
    np.testing.assert_allclose(found.inclusion_probabilities, [0.9, 0.5, 0.2])
    told = [finding.what for finding in found.findings if "leave" in finding.what]
    assert len(told) == 1
    assert "client 2 80% of the times that it is asked, client 0 10%" in told[0]
    alike = audit(CLIENTS, "fedshuffle-so", "uniform:2", availability="independent:1+leaves:0.3")
    assert not [finding for finding in alike.findings if "leave" in finding.what]


@pytest.mark.parametrize(
    "there",
    [
        "independent:0.9,0.5,0.2",
        "markov:on=0.1,0.3,0.5,off=0.2",
        "cyclic:4:0.5:0,1,3",
        "groups:0,0,1:markov:on=0.1,off=0.4,0.1",
        "drifting:0.9,0.5,0.1:0.1,0.5,0.9",
        "independent:0.9,0.5,0.2+leaves:0.1,0.2,0.3",
    ],
)
@pytest.mark.parametrize("sampling", ["full", "uniform:2", "importance:2", "stratified:2:2"])
def test_fedshuffle_stays_consistent_where_fedavg_does_not(there: str, sampling: str) -> None:
    found = audit(CLIENTS, "fedshuffle", sampling, availability=there)
    assert found.consistent is True
    np.testing.assert_allclose(found.effective_weights, CLIENTS.weights, atol=1e-12)
    assert audit(CLIENTS, "fedavg", sampling, availability=there).consistent is False


@pytest.mark.parametrize("name", ["fedavg", "fednova", "fedshuffle", "fedlin", "scaffold"])
@pytest.mark.parametrize(
    "there",
    [
        Independent([0.9, 0.5, 0.2]),
        Cyclic([0, 1, 3], 4, 0.5, 0.8, 0.1),
        Drifting([0.9, 0.5, 0.1], [0.1, 0.5, 0.9], 5),
        Groups([0, 0, 1], Independent([0.5, 0.9])),
    ],
    ids=repr,
)
def test_formulas_and_the_definition_agree(name: str, there: Availability) -> None:
    """The mean over rounds and cohorts of what each client moves; FedLin moves by the cohort's."""
    method = methods.get(name)
    sampling = AmongAvailable(Uniform(3, 2), there)
    moved, joint = np.zeros(3), np.zeros(3)
    cohorts = sampling.cohorts(4096)
    assert cohorts is not None
    for members, chance in cohorts:
        steps = CLIENTS.sizes[members]
        w, p = CLIENTS.weights[members], sampling.p[members]
        cohort = Cohort(members, w, p, steps, steps, max_steps=3)
        if len(members):
            rule = method.averaging
            own = rule.aggregation_weights(cohort) * rule.step_scale(cohort) * steps
            moved[members] += chance * own
            joint[members] += chance * own.sum() * w / p
    want = {"fedlin": joint, "scaffold": CLIENTS.weights}.get(name, moved)
    found = audit(CLIENTS, name, "uniform:2", availability=there)
    assert found.exact
    np.testing.assert_allclose(found.effective_weights, want / want.sum(), rtol=0, atol=1e-9)


def test_many_clients_that_are_all_asked_need_no_enumeration() -> None:
    """With sampling full the cohort is an independent one: by quadrature."""
    sizes = np.arange(1, 61)
    q = np.linspace(0.1, 1.0, 60)
    there = Markov(0.2 * q, 0.2 * (1 - q))
    found = audit(Federation.from_sizes(sizes), "fednova", "full", availability=there)
    same = audit(
        Federation.from_sizes(sizes), "fednova", "independent:" + ",".join(map(str, q.tolist()))
    )
    assert found.how == same.how == "quadrature"
    np.testing.assert_allclose(found.effective_weights, same.effective_weights, rtol=1e-9)


@pytest.mark.parametrize(("n", "b"), [(3, 1), (6, 2), (7, 5)])
@pytest.mark.parametrize("leaves", [False, True])
def test_some_of_those_who_are_there_by_a_double_integral(n: int, b: int, leaves: bool) -> None:
    """Every expectation that the audit needs, against all cohorts."""
    rng = np.random.default_rng(n)
    q, u, c, v = np.append(rng.random(n - 1), 1.0), *rng.uniform(0.1, 2.0, (3, n, 2))
    there: Availability = Independent(q)
    there = Leaving(there, rng.random(n) / 2) if leaves else there
    sampling, chances = AmongAvailable(Uniform(n, b), there), np.array([0.3, 0.7])
    for numerator, power in ((None, 1), (v, 1), (v, 2)):
        found = expected_ratio(sampling, u, c, numerator, power, chances)
        want = brute.expected_ratio(brute.cohorts(sampling), u, c, numerator, power, chances)
        np.testing.assert_allclose(found, want, rtol=1e-10)  # type: ignore[arg-type]


def test_a_stratum_that_must_be_away_may_be() -> None:
    """Cohorts with clients of few steps count zero; but all of a stratum may be away or leave."""
    inf, u = np.inf, np.arange(1.0, 6.0)[:, None]
    strata = Stratified([0, 0, 1, 1, 1], 3)
    for there in (
        Independent([0.9, 0.5, 0.2, 1.0, 0.7]),
        Leaving(Independent([1.0] * 5), [0.1, 0.2, 0.5, 0.3, 0.2]),
    ):
        sampling = AmongAvailable(strata, there)
        for away in ([0, 1], [2, 3, 4], [0, 2, 3]):
            v = u.copy()
            v[away] = inf
            found = expected_ratio(sampling, v, u)
            want = brute.expected_ratio(brute.cohorts(sampling), v, u, None, 1, np.ones(1))
            np.testing.assert_allclose(found, want, rtol=1e-10)  # type: ignore[arg-type]


def test_weights_of_many_clients_among_those_who_are_there_are_exact() -> None:
    """Four kinds of five clients: over how many of each kind are there, and how many are drawn."""
    sizes, q, b = np.array([1, 4, 1, 4]), np.array([0.9, 0.2, 0.4, 0.7]), 3
    total = np.zeros(4)
    for there in itertools.product(range(6), repeat=4):
        chance = math.prod(stats.binom.pmf(m, 5, p) for m, p in zip(there, q, strict=True))
        asked = min(b, sum(there))
        for drawn in itertools.product(*(range(min(m, asked) + 1) for m in there)):
            if 0 < sum(drawn) == asked:
                ways = math.prod(map(math.comb, there, drawn)) / math.comb(sum(there), asked)
                total += chance * ways * np.array(drawn) * sizes**2 / (np.array(drawn) @ sizes)
    clients = Federation.from_sizes(np.repeat(sizes, 5))
    there_ = Independent(np.repeat(q, 5))
    found = audit(clients, "fedavg", f"uniform:{b}", availability=there_)
    assert (found.how, found.exact) == ("quadrature", True)
    want = np.repeat(total / total.sum() / 5, 5)
    np.testing.assert_allclose(found.effective_weights, want, rtol=0, atol=1e-9)


def test_day_and_night_of_many_clients_are_exact() -> None:
    """Who is there is known in each round, so that a cohort is a uniform one of those."""
    sizes, zones = np.arange(1, 41), np.arange(40) % 4
    world = Cyclic(zones, period=4, share=0.5)
    found = audit(Federation.from_sizes(sizes), "fedavg", "uniform:5", availability=world)
    assert (found.how, found.exact) == ("quadrature", True)
    total = np.zeros(40)
    for round in range(4):
        there = np.flatnonzero(world.probability(round))
        u = sizes[there, None].astype(np.float64)
        share = expected_ratio(Uniform(len(there), 5), u, u)
        assert share is not None
        total[there] += share * sizes[there]
    np.testing.assert_allclose(found.effective_weights, total / total.sum(), rtol=1e-9)


def test_when_a_client_is_there_decides_how_much_it_counts() -> None:
    """Two clients, one in each half of a run with a cosine schedule: 82 to 18."""
    clients = Federation.from_sizes([1, 1])
    for method in ("fedavg", "fedshuffle"):
        steady = audit(clients, method, availability=HALVES)
        np.testing.assert_allclose(steady.effective_weights, 0.5, atol=1e-12)
        settings: Any = {"availability": HALVES, "step_size": "cosine:0.1:0", "rounds": 100}
        found = audit(clients, method, **settings)
        assert found.consistent is False
        assert found.effective_weights.round(2).tolist() == [0.82, 0.18]
        sizes = [(1 + math.cos(math.pi * t / 100)) / 2 for t in range(100)]
        first = sum(sizes[:50]) / sum(sizes)
        np.testing.assert_allclose(found.effective_weights, [first, 1 - first], atol=1e-12)
        (when,) = [f for f in found.findings if "changes with time" in f.what]
        assert "in rounds 0 to 24 client 0 counts 2 times" in when.what
        assert "47% of the step sizes" in when.why
        assert "Keep step sizes constant" in when.fix
    assert 0.5 + 1 / math.pi == pytest.approx(0.82, abs=2e-3)  # with many rounds
    assert "rounds 0 to 24 client 0 counts 2 times" in steady.notes[0]


def test_nobody_is_told_to_divide_by_what_the_method_divides_by() -> None:
    """Who is there changes, but the bias comes from an estimate that does not tend to p."""
    there = Trace(3, [0, 1, 2], [0, 0, 2], [6, 2, 3])
    settings: Any = {"availability": there, "probabilities": "estimate:ewma:0.3"}
    found = audit(CLIENTS, "fedshuffle", **settings)
    assert found.consistent is False
    assert ["estimated" in finding.what for finding in found.findings] == [True]


def test_estimates_over_correlated_rounds_are_those_of_a_long_run() -> None:
    """FedAU of a chain: ``1 / p-hat`` tends to ``E[T] / E[ceil(T / K)]``, and by Kac's formula
    ``p = 1 / E[T]``, so client i counts ``w_i / E[ceil(T_i / K)]``.
    """
    on, off, cutoff = np.array([0.05, 0.3, 0.02]), np.array([0.02, 0.3, 0.2]), 5
    settings: Any = {"availability": Markov(on, off), "probabilities": f"estimate:fedau:{cutoff}"}
    found = audit(CLIENTS, "fedshuffle", **settings)
    pieces = 1 + off * (1 - on) ** (cutoff - 1) / (1 - (1 - on) ** cutoff)
    want = CLIENTS.weights / pieces
    want /= want.sum()
    assert found.standard_errors is not None
    assert found.standard_errors.max() < 0.02
    assert (np.abs(found.effective_weights - want) < 5 * found.standard_errors).all()
    assert (found.exact, found.consistent) == (False, False)
    drifting = audit(CLIENTS, "fedau", availability="drifting:0.9:0.1")
    assert not drifting.exact  # as if it did not drift
    assert audit(CLIENTS, "fedau", availability="independent:0.9,0.5,0.2").exact


def test_directions_keep_their_weights_where_estimates_meet_correlated_rounds() -> None:
    """Control variates give all clients of a cohort the whole gradient, however they are weighted;
    FedLin's cohort estimates it with the same probabilities, so it is simulated.
    """
    there = Markov([0.45, 0.25, 0.1], [0.05, 0.25, 0.4])
    settings: Any = {"availability": there, "probabilities": "estimate:ewma:0.3", "draws": 640}
    found = audit(CLIENTS, "scaffold", **settings)
    np.testing.assert_allclose(found.effective_weights, CLIENTS.weights, rtol=1e-9)
    assert found.consistent is not False
    assert "simulated" in audit(CLIENTS, "fedlin", **settings).how


@pytest.mark.parametrize("rule", ["fedau:5", "ewma:0.2"])
def test_errors_of_estimates_over_correlated_rounds_are_those_between_seeds(rule: str) -> None:
    """Errors from within a run must include what all its rounds share: FedAU never forgets."""
    there = Markov([0.05, 0.3, 0.02], [0.02, 0.3, 0.2])
    settings: Any = {"availability": there, "probabilities": f"estimate:{rule}", "draws": 3200}
    found = [audit(CLIENTS, "fedshuffle", seed=seed, **settings) for seed in range(12)]
    between = np.std([one.effective_weights for one in found], axis=0, ddof=1)
    errors = [one.standard_errors for one in found if one.standard_errors is not None]
    within = np.mean(errors, axis=0)
    assert (np.abs(np.log(within / between)) < np.log(1.8)).all(), (within, between)


def test_a_drift_and_a_schedule_weigh_by_step_sizes() -> None:
    first, last = np.array([0.9, 0.5, 0.1]), np.array([0.1, 0.5, 0.9])
    sizes = 0.5 ** np.arange(6)
    settings: Any = {"step_size": lambda round: 0.5**round, "rounds": 6}
    found = audit(CLIENTS, "fedshuffle", availability=Drifting(first, last, 6), **settings)
    q = np.array([(1 - t / 5) * first + t / 5 * last for t in range(6)])
    want = CLIENTS.weights * (sizes @ q) / q.mean(axis=0)
    np.testing.assert_allclose(found.effective_weights, want / want.sum(), atol=1e-12)


def test_a_run_that_outlasts_its_drift_is_audited_over_all_its_rounds() -> None:
    first, last, period, rounds = np.array([0.9, 0.5, 0.1]), np.array([0.1, 0.5, 0.9]), 50, 500
    clients, fleet = CLIENTS, Drifting(first, last, period)
    # All who are there take part, so that client i counts w_i E[there] / p_i, with p of the drift.
    share = np.minimum(np.arange(rounds), period - 1)[:, None] / (period - 1)
    there = (1 - share) * first + share * last
    counts = clients.weights * there.mean(0) / there[:period].mean(0)
    found = audit(clients, "fedshuffle", availability=fleet, rounds=rounds)
    np.testing.assert_allclose(found.effective_weights, counts / counts.sum(), rtol=1e-9)
    [finding] = [one for one in found.findings if "changes with time" in one.what]
    assert "over 50 rounds, and these are 500" in finding.why
    assert audit(clients, "fedshuffle", availability=fleet).consistent
    assert audit(clients, "fedshuffle", availability=fleet, rounds=period).consistent


def test_a_run_that_ends_within_a_period_is_audited_until_then() -> None:
    clients = Federation.from_sizes([1, 1])
    found = audit(clients, "fedshuffle", availability=HALVES, rounds=50)
    assert found.effective_weights.tolist() == [1.0, 0.0]
    assert found.consistent is False
    later = audit(clients, "fedshuffle", availability=HALVES, rounds=150)
    np.testing.assert_allclose(later.effective_weights, [2 / 3, 1 / 3], rtol=1e-12)
    assert later.consistent is False
    assert "over 100 rounds, and these are 150" in later.findings[0].why
    assert audit(clients, "fedshuffle", availability=HALVES, rounds=200).consistent


def test_rules_that_depend_on_the_round_meet_who_is_there() -> None:
    """In even rounds clients have twice their weight, and client 0 is there in even rounds."""

    def weight(cohort: Cohort) -> brute.Floats:
        return cohort.weight * (2 if cohort.round % 2 == 0 else 1)

    from dataclasses import replace

    method = methods.get("fedshuffle")
    method = replace(method, averaging=replace(method.averaging, weight=weight))
    there = Trace(2, [0, 1], [0, 1], [1, 2])
    found = audit(Federation.from_sizes([1, 1]), method, availability=there, rounds=10)
    np.testing.assert_allclose(found.effective_weights, [2 / 3, 1 / 3], atol=1e-12)


def test_where_nothing_is_exact_intervals_hold() -> None:
    """Monte Carlo draws independent rounds of the stationary distribution."""
    n, rng = 40, np.random.default_rng(0)
    sizes, groups = rng.integers(1, 9, n), np.arange(n) // 2
    there = Groups(groups, Markov(rng.random(20), 0.02 * rng.random(20)))
    found = audit(
        Federation.from_sizes(sizes), "fednova", "uniform:5", availability=there, draws=3200
    )
    assert not found.exact
    assert "Monte Carlo" in found.how
    again = audit(
        Federation.from_sizes(sizes), "fednova", "uniform:5", availability=there, draws=6400, seed=1
    )
    assert found.standard_errors is not None
    assert again.standard_errors is not None
    error = np.hypot(found.standard_errors, again.standard_errors)
    assert (np.abs(found.effective_weights - again.effective_weights) < 5 * error).all()


def test_momentum_over_correlated_rounds_is_simulated() -> None:
    slow = Markov([0.02, 0.02, 0.02], [0.02, 0.02, 0.02])
    found = audit(CLIENTS, "fedshuffle-mvr", availability=slow, draws=640)
    assert "simulated" in found.how
    assert "closed form" in audit(CLIENTS, "fedshuffle-mvr", availability=slow.at(0)).how
    with pytest.raises(FedShuffleError, match="cannot be simulated with a schedule or a drift"):
        audit(CLIENTS, "fedshuffle-mvr", availability="drifting:0.9:0.1")


def test_clients_dropped_knowingly_are_a_finding() -> None:
    with pytest.raises(FedShuffleError, match="never available"):
        audit(CLIENTS, "fedshuffle", availability="independent:0.5,0,1")
    found = audit(CLIENTS, "fedshuffle", availability="independent:0.5,0,1+drop")
    assert found.consistent is False
    np.testing.assert_allclose(found.effective_weights, [0.25, 0, 0.75], atol=1e-12)
    assert found.inclusion_probabilities.tolist() == [0.5, 0, 1]
    assert "Client 1 is never there" in found.findings[-1].what


@pytest.mark.parametrize(
    ("there", "estimate", "cutoff"),
    [([0.9, 0.0, 0.4], None, 0), ([0.9, 0.5, 0.2], "estimate:fedau:3", 3)],
    ids=["dropped", "estimated"],
)
@pytest.mark.parametrize("name", ["mime", "mime-lite", "fedshuffle-mvr", "scaffold"])
def test_momentum_holds_the_gradients_of_those_who_came(
    name: str, there: list[float], estimate: str | None, cutoff: int
) -> None:
    """Not those of a client that never did, and by estimated probabilities if they are divided by.

    Gradients are e_i: a client steps along a times its own gradient, or the cohort's, and 1 - a
    times a momentum that has settled in the mean; along the mean of what clients ever sent with
    control variates.
    """
    q, w, tau = np.array(there), CLIENTS.weights, CLIENTS.sizes
    cohorts: dict[tuple[int, ...], float] = {}
    for came, chance in brute.independent(q):
        ways = list(itertools.combinations(came, min(2, len(came))))
        for cohort in ways:
            cohorts[cohort] = cohorts.get(cohort, 0.0) + chance / len(ways)
    p = np.array(
        [sum(chance for cohort, chance in cohorts.items() if i in cohort) for i in (0, 1, 2)]
    )
    divide = p / (1 - (1 - p) ** cutoff) if cutoff else np.where(p > 0, p, 1.0)
    steps, a = 3.0 if name == "fedshuffle-mvr" else tau, 0.1  # FedShuffle's sizes undo the steps
    settled = w * p / divide / (1 - cohorts[()])  # the momentum stays if nobody comes
    moved = np.zeros(3)
    for cohort, chance in cohorts.items():
        heard = np.isin(np.arange(3), cohort) * w / divide
        own = heard * steps
        total = own.sum()
        moved += (
            chance
            * {
                "scaffold": total * w * (p > 0),
                "mime": a * total * heard + (1 - a) * total * settled,
                "mime-lite": a * own + (1 - a) * total * settled,
                "fedshuffle-mvr": a * own + (1 - a) * total * (a * heard + (1 - a) * settled),
            }[name]
        )
    text = f"independent:{','.join(map(str, there))}" + "+drop" * (0 in there)
    found = audit(CLIENTS, name, "uniform:2", availability=text, probabilities=estimate)
    np.testing.assert_allclose(found.effective_weights, moved / moved.sum(), rtol=0, atol=1e-9)
    assert found.consistent is (name == "scaffold" and 0 not in there)


def test_a_moving_rate_that_weighs_twice_is_simulated() -> None:
    """It never settles, so what divides by it twice, or remembers it, has no formula."""
    settings: Any = {"availability": "independent:0.9,0.5,0.2", "draws": 640}
    settings["probabilities"] = "estimate:ewma:0.3"
    for name in ("fedlin", "mime-lite", "fedshuffle-mvr"):
        assert "simulated" in audit(CLIENTS, name, **settings).how
    assert audit(CLIENTS, "fedshuffle", **settings).how == "closed form"
    settings["probabilities"] = "estimate:fedau:3"
    assert audit(CLIENTS, "fedlin", **settings).how == "closed form"


def test_client_reshuffling_is_consistent_and_its_fedavg_like_uniform() -> None:
    clients = Federation.from_sizes([1, 2, 3, 4])
    assert audit(clients, "fedshuffle", "reshuffled:2").consistent is True
    same = [audit(clients, "fedavg", s).effective_weights for s in ("reshuffled:2", "uniform:2")]
    np.testing.assert_allclose(same[0], same[1], atol=1e-12)
    uneven = audit(clients, "fedavg", "reshuffled:3")  # two rounds of two clients
    np.testing.assert_allclose(uneven.effective_weights, same[1], atol=1e-12)
    five = Federation.from_sizes([1, 2, 3, 4, 5])
    want = _fedavg(five, 2) + _fedavg(five, 3)  # a round of two clients and one of three
    found = audit(five, "fedavg", "reshuffled:3").effective_weights
    np.testing.assert_allclose(found, want / want.sum(), atol=1e-9)
    schedule = audit(clients, "fedshuffle", "reshuffled:2", step_size="cosine:0.1", rounds=40)
    assert schedule.consistent is True


def _fedavg(clients: Federation, size: int) -> brute.Floats:
    """``E[1{i in S} w_i tau_i / sum_S w]``."""
    total = np.zeros(len(clients))
    cohorts = list(itertools.combinations(range(len(clients)), size))
    for cohort in cohorts:
        members = list(cohort)
        total[members] += clients.weights[members] / clients.weights[members].sum()
    found: brute.Floats = total * clients.sizes / len(cohorts)
    return found


def test_servers_are_audited_among_those_who_are_there() -> None:
    def fedavg(clients: object, sizes: brute.Floats, updates: brute.Floats) -> brute.Floats:
        step: brute.Floats = sizes / sizes.sum() @ updates
        return step

    chain = Markov([0.9, 0.5, 0.2], [0.1, 0.5, 0.8])
    found = audit_server(fedavg, CLIENTS, "uniform:2", availability=chain)
    want = brute_force(np.array([0.9, 0.5, 0.2]), 2)
    np.testing.assert_allclose(found.effective_weights, want, atol=1e-9)
    with pytest.raises(FedShuffleError, match="changes with time"):
        audit_server(fedavg, CLIENTS, availability="cyclic:4:0.5:0,1,2")


def test_servers_count_a_client_that_never_comes_as_nothing_also_in_drawn_cohorts() -> None:
    def fedavg(clients: object, sizes: brute.Floats, updates: brute.Floats) -> brute.Floats:
        step: brute.Floats = sizes / sizes.sum() @ updates
        return step

    clients, q = Federation.from_sizes(np.arange(1, 31)), np.linspace(0, 1, 30)
    there = Independent(q)
    there.drop = True
    found = audit_server(fedavg, clients, "uniform:5", availability=there, draws=320)
    want = audit(clients, "fedavg", "uniform:5", availability=there)
    assert (found.how, found.exact, want.how) == ("320 cohorts", True, "quadrature")
    np.testing.assert_allclose(found.effective_weights, want.effective_weights, rtol=0, atol=1e-9)


# Logs ---------------------------------------------------------------------------------------------


def _markov_log(seed: int, rounds: int) -> tuple[Observations, brute.Floats]:
    """FedAvg of whoever is there, of clients that come and go slowly; and the true weights."""
    on, off = np.array([0.05, 0.1, 0.05, 0.2]), np.array([0.05, 0.1, 0.1, 0.05])
    rng = np.random.default_rng(seed)
    state, q = rng.random(4) < on / (on + off), on / (on + off)
    seen = np.empty((rounds, 4), dtype=bool)
    for k, u in enumerate(rng.random((rounds, 4))):
        seen[k] = state = np.where(state, u >= off, u < on)
    round, client = np.nonzero(seen)
    weight = 1 / seen.sum(axis=1)[round]
    _, numbered = np.unique(round, return_inverse=True)
    true = np.zeros(4)
    for there in itertools.product([0, 1], repeat=4):
        present = np.flatnonzero(there)
        true[present] += np.where(there, q, 1 - q).prod() / max(len(present), 1)
    found = Observations(
        int(numbered.max()) + 1, numbered, client, weight, weight, np.ones(len(weight), dtype=int)
    )
    return found, true / true.sum()


def test_intervals_of_a_log_hold_for_correlated_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage over 60 logs: nominal 95%. As if rounds were independent it would be far less."""

    def coverage() -> float:
        held = []
        for seed in range(60):
            seen, true = _markov_log(seed, rounds=1500)
            found = estimate(seen, np.full(4, 0.25), None)
            held.append(np.abs(found.weights - true) <= found.half_widths(0.95))
        return float(np.mean(held))

    assert 0.92 <= coverage() <= 0.99
    monkeypatch.setattr(estimation, "_correlated", lambda found, seen: found)
    assert coverage() < 0.7


def test_intervals_of_a_log_hold_where_step_sizes_fall() -> None:
    """Batches that move the model by ``1 + cos`` tell less of their spread than equal ones: their
    squares as much as ``16 (mean of squares)^2 / (mean of fourth powers) = 16 * 1.5^2 / (35/8)``.
    """
    held = []
    for seed in range(100):
        seen, true = _markov_log(seed, rounds=1000)
        sizes = 1 + np.cos(math.pi * (np.arange(seen.rounds) + 0.5) / seen.rounds)
        moved = seen.contribution * sizes[seen.round]
        found = estimate(replace(seen, contribution=moved), np.full(4, 0.25), None)
        held.append(np.abs(found.weights - true) <= found.half_widths(0.95))
    np.testing.assert_allclose(found.freedom, 16 * 1.5**2 / (35 / 8) - 1, rtol=0.01)
    assert 0.93 <= np.mean(held) <= 0.97


def test_short_logs_are_not_taken_for_independent_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 40 rounds clients come and go a few times: intervals are wide, if not wide enough."""

    def coverage() -> float:
        logs = [_markov_log(seed, rounds=40) for seed in range(100)]
        found = [(estimate(seen, np.full(4, 0.25), None), true) for seen, true in logs]
        return float(np.mean([np.abs(e.weights - w) <= e.half_widths(0.95) for e, w in found]))

    assert coverage() > 0.75
    monkeypatch.setattr(estimation, "_correlated", lambda found, seen: found)
    assert coverage() < 0.6


def _write(path: Path, rows: list[str], header: str = "round,client,size,steps,weight") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_log_reports_drift_by_window(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = []
    for t in range(400):
        q = {"ann": 0.9 - 0.8 * t / 400, "bob": 0.1 + 0.8 * t / 400, "cyd": 0.5}
        there = [name for name, chance in q.items() if rng.random() < chance]
        rows += [f"{t},{name},1,1,{1 / len(there)}" for name in there]
    rng.shuffle(rows)  # rounds are ordered by their numbers
    found, _ = read_log(_write(tmp_path / "log.csv", rows))
    assert found.windows[0].first == "0"
    assert len(found.windows) == 4
    assert [w.effective_weights.argmax() for w in found.windows[::3]] == [0, 1]
    assert sum(window.share for window in found.windows) == pytest.approx(1)
    (finding,) = [f for f in found.findings if "changes over the rounds" in f.what]
    assert "client ann" in finding.what or "client bob" in finding.what
    assert len(found.to_dict()["windows"]) == 4
    steady = [f"{t},{name},1,1,0.5" for t in range(400) for name in "ab"]
    found, _ = read_log(_write(tmp_path / "steady.csv", steady))
    assert found.findings == ()


def test_large_steps_at_first_hide_no_drift(tmp_path: Path) -> None:
    """Step sizes fall like a cosine, and the last quarter has hardly any of what the model moves:
    its error is that of its own batches.
    """
    rng, rows = np.random.default_rng(1), []
    for t in range(400):
        q = {"ann": 0.9 - 0.8 * t / 400, "bob": 0.1 + 0.8 * t / 400, "cyd": 0.5}
        there = [name for name, chance in q.items() if rng.random() < chance]
        size = 0.01 + (1 + math.cos(math.pi * t / 400)) / 2
        rows += [f"{t},{name},1,1,{1 / len(there)},{size}" for name in there]
    header = "round,client,size,steps,weight,step_size"
    found, _ = read_log(_write(tmp_path / "log.csv", rows, header))
    assert found.windows[-1].share < 0.1
    (finding,) = [f for f in found.findings if "changes over the rounds" in f.what]
    assert "client bob" in finding.what


def test_a_log_weighs_rounds_by_their_step_sizes(tmp_path: Path) -> None:
    """The two clients of two halves, with the step sizes of the log."""
    sizes = [0.01 + 0.99 * (1 + math.cos(math.pi * t / 100)) / 2 for t in range(100)]
    rows = [f"{t},{'ab'[t >= 50]},1,1,1,{sizes[t]}" for t in range(100)]
    header = "round,client,size,steps,weight,step_size"
    found, _ = read_log(_write(tmp_path / "log.csv", rows, header))
    first = sum(sizes[:50]) / sum(sizes)
    np.testing.assert_allclose(found.effective_weights, [first, 1 - first], atol=1e-12)
