"""The audit of asynchronous schedules, against enumeration and simulation."""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError, LocalWork, audit, methods
from fedshuffle.auditing.asynchronous import independent_arrivals
from fedshuffle.cli import main
from fedshuffle.local_work import EpochRange
from fedshuffle.methods.averaging import Custom, RatioOfSums
from fedshuffle.timing import Clock, Exponential, LogNormal

CLIENTS = Federation.from_sizes([1, 2, 3, 4])
RATES: dict[str, Any] = {"clock": "rates:4,2,1,0.5"}


def test_contract(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = "audit --sizes 1,1,1,1 --method fedavg-rr --rates 4,2,1,0.5 --json --schedule"
    known = {
        "fedasync:a=0.5": [0.624, 0.246, 0.095, 0.036],
        "fedasync": [0.533, 0.267, 0.133, 0.067],
        "fedbuff:K=10,C=1": [0.25] * 4,
    }
    for schedule, want in known.items():
        monkeypatch.setattr("sys.argv", ["fedshuffle", *command.split(), schedule])
        with pytest.raises(SystemExit, match="0"):
            main()
        found = json.loads(capsys.readouterr().out)
        np.testing.assert_allclose(found["effective_weights"], want, atol=5e-4)
        assert found["exact"]
        assert found["consistent"] == (schedule == "fedbuff:K=10,C=1")


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("buffer", [2, 3])
def test_independent_arrivals_are_enumerated(power: int, buffer: int) -> None:
    """Every buffer of clients and their alternatives, one by one."""
    rng = np.random.default_rng(0)
    share, chances = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.75])
    u, v, moved = rng.uniform(0.2, 2, (3, 3, 2))
    ratio = RatioOfSums(u, v if power == 2 else None, power)
    tasks = list(itertools.product(range(3), range(2)))
    want = np.zeros(3)
    for filled in itertools.product(tasks, repeat=buffer):
        probability = np.prod([share[i] * chances[a] for i, a in filled])
        over = sum(v[task] for task in filled) if power == 2 else 1.0
        factor = over / sum(u[task] for task in filled) ** power
        for i, a in filled:
            want[i] += probability * moved[i, a] * factor
    found = independent_arrivals(buffer * share, chances, moved, ratio, buffer)
    np.testing.assert_allclose(found, want, rtol=1e-10)


@pytest.mark.parametrize("method", ["fedavg-rr", "fednova-rr"])
@pytest.mark.parametrize("schedule", ["fedasync:a=0.5", "fedbuff:K=3"])
def test_monte_carlo_finds_what_is_exact(method: str, schedule: str) -> None:
    """A normaliser of which nothing is known is simulated."""
    exact = audit(CLIENTS, method, schedule=schedule, **RATES)
    rule = methods.get(method)
    q = rule.averaging.normaliser
    unknown = Custom(lambda weights, cohort: weights / q.divide(weights, cohort))
    averaging = replace(rule.averaging, normaliser=unknown)
    found = audit(CLIENTS, replace(rule, averaging=averaging), schedule=schedule, **RATES)
    assert exact.exact
    assert found.how.startswith("Monte Carlo")
    assert found.standard_errors is not None
    assert found.standard_errors.max() < 0.01
    off = np.abs(found.effective_weights - exact.effective_weights)
    assert (off < 5 * found.standard_errors + 1e-6).all()


def test_errors_of_rare_clients_are_not_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of their updates are stale, and count little; few are not, and decide the mean."""
    rates = np.exp(np.random.default_rng(0).normal(size=300))
    clients, clock = Federation.from_sizes([1] * 300), Clock(1 / rates, "task", Exponential())
    settings: dict[str, Any] = {"schedule": "fedbuff:K=3,a=0.5", "clock": clock}
    exact = audit(clients, "fedavg-rr", **settings)
    monkeypatch.setattr("fedshuffle.auditing.asynchronous._exact", lambda subject, buffers: None)
    for seed in range(3):
        found = audit(clients, "fedavg-rr", **settings, seed=seed)
        assert exact.exact
        assert not found.exact
        assert found.standard_errors is not None
        off = np.abs(found.effective_weights - exact.effective_weights)
        assert (off < 5 * found.standard_errors).all()


@pytest.mark.slow
def test_large_populations_are_simulated_for_long_enough() -> None:
    clients = Federation.from_sizes(np.arange(4000) % 50 + 1)
    schedule, clock = "fedbuff:K=10,C=100,a=0.5", "lognormal:0.05:1"
    assert audit(clients, "fedavg-rr", schedule=schedule, clock=clock).consistent is False


@pytest.mark.parametrize(
    "schedule", ["fedbuff:K=2,C=3,a=0.5", "queued:K=2,C=5,a=1", "fedasync:a=1"]
)
@pytest.mark.parametrize("clock", [Clock([1, 2, 3, 5]), Clock([1, 2, 3, 5], jitter=LogNormal(1))])
def test_dividing_by_rate_and_staleness_is_consistent(schedule: str, clock: Clock) -> None:
    """Also with epochs that are drawn, which take time; with other averaging it is not."""
    settings: dict[str, Any] = {"schedule": schedule, "clock": clock, "draws": 3200}
    work = LocalWork(epochs=EpochRange(1, 3))
    result = audit(CLIENTS, "fedshuffle", work=work, **settings)
    assert (result.exact, result.consistent) == (True, True)
    assert any("of a long run" in note for note in result.notes)
    biased = audit(CLIENTS, "fedavg-rr", work=work, **settings)
    assert (biased.exact, biased.consistent) == (False, False)


def test_findings_say_who_counts_and_why() -> None:
    result = audit(CLIENTS, "fedavg-rr", schedule="fedasync:a=0.5", **RATES)
    told = " ".join(f"{one.what} {one.why} {one.fix}" for one in result.findings)
    assert "Client 0 arrives 8 times as often as client 3" in told
    assert "counts by its rate" in told
    assert "(1 + t)^-0.5" in told
    assert "as method fedshuffle does" in told
    queued = audit(CLIENTS, "fednova-rr", schedule="queued:C=3,a=1", **RATES)
    assert [one.what.split()[0] for one in queued.findings] == ["An"]  # staleness, no rates
    alike = Federation.from_sizes([1, 1, 1, 1])  # a buffer's sum of equal weights is a constant
    for clients, count in ((alike, 1), (CLIENTS, 2)):
        buffered = audit(clients, "fednova-rr", schedule="fedbuff:K=2", **RATES)
        assert sum("normalised" in one.what for one in buffered.findings) == count - 1
        assert len(buffered.findings) == count


def test_estimated_rates_count_by_the_long_run() -> None:
    for rule, consistent in {"estimate": True, "estimate:ewma:0.1": False}.items():
        method = methods.get("fedshuffle").with_probabilities(rule)
        result = audit(CLIENTS, method, schedule="fedasync", **RATES)
        assert result.consistent is consistent
    often = Federation.from_sizes([1, 1])  # client 0 has more than one update per step
    settings: dict[str, Any] = {"clock": Clock([1, 9], jitter=Exponential())}
    method = methods.get("fedshuffle").with_probabilities("estimate:fedau:10")
    result = audit(often, method, schedule="fedbuff:K=3", **settings)
    assert result.inclusion_probabilities.tolist() == pytest.approx([2.7, 0.3])


def test_what_is_refused() -> None:
    for settings, message in (
        ({"method": "scaffold"}, "does not go with scaffold"),
        ({"sampling": "uniform:2"}, "leave the sampling out"),
        ({"channel": "topk:0.5+ef"}, "earlier updates"),
        ({"clock": None}, "there is no clock"),
    ):
        with pytest.raises(FedShuffleError, match=message):
            audit(CLIENTS, **{"method": "fedavg", "schedule": "fedasync"} | RATES | settings)
