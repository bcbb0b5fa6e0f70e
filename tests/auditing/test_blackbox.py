"""The black-box audit against the exact audit, and on planted faults."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedshuffle import EpochRange, Federation, FedShuffleError, LocalWork, audit
from fedshuffle.auditing import Audit, audit_server
from fedshuffle.auditing.server import estimate_gain
from fedshuffle.sampling import resolve
from tests.auditing import servers
from tests.auditing.servers import EQUAL_STEPS, FEDERATION, WORK, fedavg, ignores_sizes, server_of

SIZES = [1, 2, 2, 3, 5, 8, 13, 4, 6, 7, 9, 2]
METHODS = [("fedavg", "equal"), ("fednova", "equal"), ("fedshuffle", "scaled")]


def ends(result: Audit) -> tuple[Any, Any]:
    assert result.intervals is not None
    return result.intervals[:, 0], result.intervals[:, 1]


@pytest.mark.parametrize("sampling", ["full", "uniform:3", "importance:4", "one"])
@pytest.mark.parametrize(("method", "step_sizes"), METHODS)
def test_weights_of_known_methods_are_found(method: str, step_sizes: Any, sampling: str) -> None:
    federation = Federation.from_sizes(SIZES)
    server = server_of(method, federation, WORK)
    found = audit_server(server, federation, sampling, WORK, step_sizes=step_sizes, draws=150)
    truth = audit(federation, method, sampling, WORK)
    # All twelve intervals at once, so wider ones: five standard errors.
    errors = 0.0 if found.standard_errors is None else found.standard_errors
    assert (np.abs(found.effective_weights - truth.effective_weights) <= 5 * errors + 1e-9).all()
    assert found.properties.linear is True
    assert found.properties.repeatable is True
    if truth.consistent:
        assert found.consistent is not False
        assert not found.findings
    if method == "fedshuffle":  # the weight of a client never varies, and is found at once
        assert found.consistent is True
        assert found.exact
    if truth.total_variation > 0.05:
        assert found.consistent is False


def test_listing_every_cohort_is_exact() -> None:
    federation = Federation.from_sizes([1, 2, 4, 5])
    found = audit_server(server_of("fedavg", federation, WORK), federation, "uniform:2", WORK)
    truth = audit(federation, "fedavg", "uniform:2", WORK)
    np.testing.assert_allclose(found.effective_weights, truth.effective_weights, rtol=1e-9)
    assert found.exact
    assert found.standard_errors is None
    assert found.how == "all 6 cohorts"


def test_random_epochs_are_sampled() -> None:
    federation, work = Federation.from_sizes([1, 2, 4]), LocalWork(epochs=EpochRange(1, 3))
    found = audit_server(server_of("fedavg", federation, work), federation, "full", work, draws=600)
    truth = audit(federation, "fedavg", "full", work)
    assert not found.exact
    assert found.standard_errors is not None
    apart = np.abs(found.effective_weights - truth.effective_weights)
    assert (apart < 4 * found.standard_errors).all()


def by_definition(server: Callable[..., Any], federation: Federation, sampling: str) -> Any:
    """The effective weights from every cohort, when all clients take the same steps."""
    raw, identity = np.zeros(len(federation)), np.eye(len(federation))
    cohorts = resolve(sampling, federation).cohorts(5000)
    assert cohorts is not None
    for members, share in cohorts:
        if len(members):
            raw += share * server(members, federation.sizes[members], identity[members])
    return raw / raw.sum()


@pytest.mark.parametrize("sampling", ["uniform:3", "importance:4"])
@pytest.mark.parametrize("server", [servers.by_root, servers.by_cohort_size])
def test_shares_of_any_numbers_are_found_exactly(server: Any, sampling: str) -> None:
    """From some of the cohorts, though a cohort in which a small client is alone is rare."""
    federation, work = Federation.from_sizes(SIZES), LocalWork(steps=2)
    truth = by_definition(server, federation, sampling)
    for seed in range(3):
        found = audit_server(server, federation, sampling, work, draws=150, seed=seed)
        low, high = ends(found)
        assert ((low <= truth) & (truth <= high)).all()
        assert found.exact


@pytest.mark.parametrize("sampling", ["uniform:3", "importance:4"])
def test_contributions_that_no_share_explains_have_wide_intervals(sampling: str) -> None:
    federation, work = Federation.from_sizes(SIZES), LocalWork(steps=2)
    truth = by_definition(servers.by_root_of_the_sum, federation, sampling)
    for seed in range(5):
        found = audit_server(
            servers.by_root_of_the_sum, federation, sampling, work, draws=120, seed=seed
        )
        low, high = ends(found)
        assert ((low <= truth) & (truth <= high)).all()
        assert not found.exact


@pytest.mark.parametrize(("sampling", "seeds"), [("full", 40), ("importance:4", 15)])
def test_intervals_cover(sampling: str, seeds: int) -> None:
    """Numbers of epochs drawn at random, against the exact audit."""
    federation, work = Federation.from_sizes(SIZES), LocalWork(EpochRange(1, 4), batch_size=2)
    server = server_of("fedavg", federation, work)
    truth = audit(federation, "fedavg", sampling, work).effective_weights
    held = []
    for seed in range(seeds):
        found = audit_server(server, federation, sampling, work, draws=120, seed=seed)
        low, high = ends(found)
        held.append((low <= truth) & (truth <= high))
    assert np.mean(held) > 0.91


def test_a_client_that_was_never_drawn_is_unknown() -> None:
    federation = Federation.from_sizes([1] * 50 + [2])
    p = ",".join(["0.5"] * 50 + ["0.000001"])
    server = server_of("fedavg", federation, LocalWork())
    found = audit_server(server, federation, f"independent:{p}", draws=64)
    assert found.standard_errors is not None
    assert np.isinf(found.standard_errors[50])
    assert found.to_dict()["intervals"][50] == [None, None]
    assert found.consistent is not True
    json.dumps(found.to_dict(), allow_nan=False)


def test_many_clients_in_small_cohorts() -> None:
    sizes = np.random.default_rng(0).integers(1, 20, 100_000)
    federation = Federation.from_sizes(sizes)
    server = server_of("fedshuffle", federation, LocalWork())
    found = audit_server(server, federation, "uniform:50", step_sizes="scaled", draws=100)
    assert found.properties.linear is True
    assert found.consistent is None  # most clients were never seen
    assert "in none of them" in found.how
    np.testing.assert_allclose(found.effective_weights, federation.weights)


def test_large_cohorts_are_sent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshuffle.auditing.server._COORDINATES", 10)
    monkeypatch.setattr("fedshuffle.auditing.server._NUMBERS", 60)
    federation = Federation.from_sizes(range(1, 41))
    found = audit_server(fedavg, federation, "full")
    np.testing.assert_allclose(
        found.effective_weights, audit(federation, "fedavg-rr").effective_weights
    )


def said(result: Audit) -> str:
    return " | ".join(finding.what for finding in result.findings)


@pytest.mark.parametrize(
    ("server", "sampling", "words"),
    [
        (servers.only_last, "uniform:3", "last client"),
        (servers.only_last, "full", "last client"),
        (servers.by_cohort_size, "importance:2", "inclusion probability"),
        (ignores_sizes, "full", "examples"),
        (servers.earlier_count_more, "uniform:3", "order"),
        (servers.clipped, "uniform:2", "linear"),
        (servers.drifting, "full", "no client moves"),
        (servers.nan_for_small_cohorts, "independent:0.5,0.5,0.5,0.5,0.5", "NaN"),
        (servers.MomentumTwice, "full", "without bound"),
        (fedavg, "uniform:2", "normalised over the cohort"),
    ],
)
def test_planted_faults_are_flagged(server: Any, sampling: str, words: str) -> None:
    found = audit_server(server, FEDERATION, sampling, EQUAL_STEPS, draws=400)
    assert words in said(found)
    assert found.consistent is False
    assert all(finding.why and finding.fix for finding in found.findings)


def test_a_fault_is_said_once() -> None:
    found = audit_server(servers.only_last, FEDERATION, "full", EQUAL_STEPS, draws=64)
    assert "last client" in said(found)
    assert not any("order" in fact or "last" in fact for fact in found.properties.facts())


def test_counting_by_steps_is_flagged() -> None:
    found = audit_server(fedavg, FEDERATION, "full", LocalWork(epochs=1))
    assert "from 1 to 6 local steps" in said(found)
    equal = audit_server(fedavg, FEDERATION, "full", EQUAL_STEPS)
    assert equal.consistent is True
    assert not equal.findings


def test_properties_of_fedavg() -> None:
    traits = audit_server(fedavg, FEDERATION, "uniform:2", EQUAL_STEPS).properties
    assert traits.form == "by size"
    assert traits.sums_to == pytest.approx(1)
    assert traits.constant is False
    assert traits.uses_sizes
    for name in (
        "uses_steps",
        "ordered",
        "stateful",
        "moves_without_updates",
        "fails_on_zero_updates",
    ):
        assert getattr(traits, name) is False


def test_steps_and_sizes_are_distinguished() -> None:
    """With one step per example the weights of FedNova look like those of a plain mean."""
    work = LocalWork(epochs=1)
    nova = audit_server(server_of("fednova", FEDERATION, work), FEDERATION, "full", work)
    plain = audit_server(ignores_sizes, FEDERATION, "full", work)
    assert nova.properties.form == "by the objective's weight / steps"
    assert plain.properties.form == "all alike"


def test_only_the_last_client_counts_by_chance_of_arrival() -> None:
    """Whoever comes last wins, so all win equally often, whatever their number."""
    found = audit_server(servers.only_last, FEDERATION, "full", EQUAL_STEPS, draws=2000)
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - 0.2) < 4 * found.standard_errors).all()


@pytest.mark.parametrize("server", [servers.Momentum, servers.MomentumTwiceButStable])
def test_linear_servers_with_memory_are_simulated(server: type[servers.Momentum]) -> None:
    found = audit_server(server, FEDERATION, "uniform:2", EQUAL_STEPS, draws=2000)
    truth = audit(FEDERATION, "fedavg", "uniform:2", EQUAL_STEPS).effective_weights
    assert found.how.startswith("a simulation")
    assert found.properties.stateful
    assert found.properties.long_run_gain == pytest.approx(1 / (1 - server.share * server.times))
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()


def test_memory_that_repairs_the_weights_is_seen() -> None:
    found = audit_server(servers.LastKnown, FEDERATION, "uniform:2", EQUAL_STEPS, draws=2000)
    assert found.properties.stateful
    assert found.consistent is not False
    assert found.total_variation < 0.01


def test_functions_with_memory_are_simulated_too() -> None:
    found = audit_server(servers.Momentum(), FEDERATION, "uniform:2", EQUAL_STEPS, draws=2000)
    truth = audit(FEDERATION, "fedavg", "uniform:2", EQUAL_STEPS).effective_weights
    assert found.properties.repeatable is False
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()


def test_noise_averages_out() -> None:
    rng = np.random.default_rng(0)

    def noisy(clients: Any, sizes: Any, updates: Any) -> Any:
        return fedavg(clients, sizes, updates) + 0.01 * rng.standard_normal(updates.shape[1])

    found = audit_server(noisy, FEDERATION, "full", EQUAL_STEPS, draws=3000)
    assert found.properties.repeatable is False
    assert not found.properties.moves_without_updates
    assert found.consistent is None
    low, high = ends(found)
    assert ((low - 0.02 < FEDERATION.weights) & (FEDERATION.weights < high + 0.02)).all()


def test_local_response_of_clipping() -> None:
    """Clipped updates all have one length, so what remains is the weight, whatever the steps."""
    found = audit_server(servers.clipped, FEDERATION, "full", LocalWork(epochs=1))
    assert found.properties.linear is False
    np.testing.assert_allclose(found.effective_weights, FEDERATION.weights, rtol=1e-3)
    assert found.consistent is None  # no server that is not linear is called consistent


def test_local_response_sees_through_a_scalar_function() -> None:
    def squashed(clients: Any, sizes: Any, updates: Any) -> Any:
        return np.tanh(fedavg(clients, sizes, updates))

    found = audit_server(squashed, FEDERATION, "full", EQUAL_STEPS, step_size=0.1)
    np.testing.assert_allclose(found.effective_weights, FEDERATION.weights, rtol=1e-4)


def test_long_run_gain() -> None:
    assert estimate_gain([1.0] * 10) == 1
    assert estimate_gain([2.0**k for k in range(10)]) == float("inf")
    assert estimate_gain([float(k) for k in range(1, 10)]) == float("inf")


class Unwilling:
    def __init__(self) -> None:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (servers.always_nan, "NaN"),
        (servers.uphill, "sum to"),
        (lambda clients, sizes, updates: updates, "shape"),
        (lambda clients, sizes, updates: 1 / 0, "ZeroDivisionError"),
        (lambda clients: 1, "TypeError"),
        (3, "called"),
        (object, "__call__"),
        (Unwilling, "not today"),
        (lambda clients, sizes, updates: 1j * updates[0], "complex"),
    ],
)
def test_what_cannot_be_audited_is_refused(server: Any, words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        audit_server(server, FEDERATION)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"draws": 10}, "draws"),
        ({"confidence": 1.0}, "confidence"),
        ({"step_sizes": "large"}, "step_sizes"),
        ({"step_size": 0.0}, "step_size"),
        ({"sampling": "optimal:1"}, "pool"),
    ],
)
def test_bad_settings_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        audit_server(fedavg, FEDERATION, **more)


def test_a_server_may_change_what_it_is_given() -> None:
    """FedNova that divides its arrays in place is FedNova."""

    def pure(clients: Any, sizes: Any, updates: Any, steps: Any) -> Any:
        share = sizes / steps
        return share / share.sum() @ updates

    def in_place(clients: Any, sizes: Any, updates: Any, steps: Any) -> Any:
        step = pure(clients, sizes, updates, steps)
        for array in (clients, sizes, updates, steps):
            array[:] = 1
        return step

    federation, work = Federation.from_sizes([1, 2, 3]), LocalWork(epochs=[1, 3, 2])
    want = audit_server(pure, federation, "uniform:2", work)
    found = audit_server(in_place, federation, "uniform:2", work)
    np.testing.assert_array_equal(found.effective_weights, want.effective_weights)
    assert found.properties == want.properties
