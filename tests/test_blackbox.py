"""The black-box auditor against the exact audit, planted faults, hand-made logs, and Flower."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle import EpochRange, Federation, FedShuffleError, LocalWork, audit, methods
from fedshuffle.auditing import BlackBoxAudit, probe
from fedshuffle.auditing.adapters import Flower, Function, read_log
from fedshuffle.auditing.estimation import Sightings, estimate
from fedshuffle.auditing.traits import long_run
from fedshuffle.cli import main
from fedshuffle.methods import Participants
from fedshuffle.sampling import resolve

ROOT = Path(__file__).parent.parent
SIZES = [1, 2, 2, 3, 5, 8, 13, 4, 6, 7, 9, 2]
WORK = LocalWork(epochs=2, batch_size=2)


def server_of(method: str, federation: Federation, work: LocalWork) -> Callable[..., Any]:
    """The aggregation of one of our methods, as others would write theirs."""
    rule, longest = methods.get(method).averaging, work.on(federation.sizes).longest

    def aggregate(clients: Any, sizes: Any, updates: Any, steps: Any, probabilities: Any) -> Any:
        weight = federation.weights[clients]
        cohort = Participants(clients, weight, probabilities, steps, steps, longest)
        return rule.aggregation_weights(cohort) @ updates

    return aggregate


KNOWN = [("fedavg", "equal"), ("fednova", "equal"), ("fedshuffle", "scaled")]


@pytest.mark.parametrize("sampling", ["full", "uniform:3", "importance:4", "one"])
@pytest.mark.parametrize(("method", "step_sizes"), KNOWN)
def test_finds_the_weights_of_our_methods(method: str, step_sizes: Any, sampling: str) -> None:
    federation = Federation.from_sizes(SIZES)
    server = server_of(method, federation, WORK)
    found = probe(server, federation, sampling, WORK, step_sizes=step_sizes, draws=150)
    truth = audit(federation, method, sampling, WORK)
    # All twelve intervals at once, so wider ones: five standard errors.
    errors = 0.0 if found.standard_errors is None else found.standard_errors
    assert (np.abs(found.effective_weights - truth.effective_weights) <= 5 * errors + 1e-9).all()
    assert found.traits.linear is True
    assert found.traits.repeatable is True
    if truth.consistent:
        assert found.consistent is not False
        assert not found.findings
    if method == "fedshuffle":  # the weight of a client never varies, and is found at once
        assert found.consistent is True
        assert found.exact
    if truth.total_variation > 0.05:
        assert found.consistent is False


def test_every_cohort_listed_is_exact() -> None:
    federation = Federation.from_sizes([1, 2, 4, 5])
    found = probe(server_of("fedavg", federation, WORK), federation, "uniform:2", WORK)
    truth = audit(federation, "fedavg", "uniform:2", WORK)
    np.testing.assert_allclose(found.effective_weights, truth.effective_weights, rtol=1e-9)
    assert found.exact
    assert found.standard_errors is None
    assert found.how == "all 6 cohorts"


def test_random_epochs_are_sampled() -> None:
    federation, work = Federation.from_sizes([1, 2, 4]), LocalWork(epochs=EpochRange(1, 3))
    found = probe(server_of("fedavg", federation, work), federation, "full", work, draws=600)
    truth = audit(federation, "fedavg", "full", work)
    assert not found.exact
    assert found.standard_errors is not None
    apart = np.abs(found.effective_weights - truth.effective_weights)
    assert (apart < 4 * found.standard_errors).all()


def by_root(clients: Any, sizes: Any, updates: Any) -> Any:
    return np.sqrt(sizes) / np.sqrt(sizes).sum() @ updates


def by_head(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / len(sizes) @ updates


def by_root_of_the_sum(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / np.sqrt(sizes.sum()) @ updates


def by_definition(server: Callable[..., Any], federation: Federation, sampling: str) -> Any:
    """The effective weights from every cohort, when all clients walk equally far."""
    pull, identity = np.zeros(len(federation)), np.eye(len(federation))
    cohorts = resolve(sampling, federation).cohorts(5000)
    assert cohorts is not None
    for members, share in cohorts:
        if len(members):
            pull += share * server(members, federation.sizes[members], identity[members])
    return pull / pull.sum()


@pytest.mark.parametrize("sampling", ["uniform:3", "importance:4"])
@pytest.mark.parametrize("server", [by_root, by_head])
def test_shares_of_any_numbers_are_found_exactly(server: Any, sampling: str) -> None:
    """From some of the cohorts, though a cohort in which a small client is alone is rare."""
    federation, work = Federation.from_sizes(SIZES), LocalWork(steps=2)
    truth = by_definition(server, federation, sampling)
    for seed in range(3):
        found = probe(server, federation, sampling, work, draws=150, seed=seed)
        low, high = found.intervals.T
        assert ((low <= truth) & (truth <= high)).all()
        assert found.exact


@pytest.mark.parametrize("sampling", ["uniform:3", "importance:4"])
def test_what_no_share_explains_has_wide_intervals(sampling: str) -> None:
    federation, work = Federation.from_sizes(SIZES), LocalWork(steps=2)
    truth = by_definition(by_root_of_the_sum, federation, sampling)
    for seed in range(5):
        found = probe(by_root_of_the_sum, federation, sampling, work, draws=120, seed=seed)
        low, high = found.intervals.T
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
        low, high = probe(server, federation, sampling, work, draws=120, seed=seed).intervals.T
        held.append((low <= truth) & (truth <= high))
    assert np.mean(held) > 0.91


def test_intervals_cover_for_logs_too() -> None:
    """The estimator without known probabilities, against a closed form."""
    sampling = resolve("uniform:2", Federation.from_sizes([1, 2, 3, 4]))
    masses = np.array([1.0, 2.0, 3.0, 4.0])
    truth, held = masses / masses.sum(), 0
    for seed in range(100):
        cohorts = [sampling.draw(seed, r) for r in range(60)]
        clients = np.concatenate(cohorts)
        seen = Sightings(np.repeat(np.arange(60), 2), clients, masses[clients], 60)
        found = estimate(seen, truth, None)
        held += int((np.abs(found.weights - truth) <= found.half_widths(0.95)).sum())
    assert 0.92 < held / 400 < 0.98


def test_standard_error_of_a_ratio() -> None:
    """Two clients that take turns at random: the share of one is a binomial share."""
    first = np.arange(1000) % 10 < 3
    seen = Sightings(np.arange(1000), np.where(first, 0, 1), np.ones(1000), 1000)
    found = estimate(seen, np.array([0.5, 0.5]), None)
    np.testing.assert_allclose(found.weights, [0.3, 0.7])
    np.testing.assert_allclose(found.errors, np.sqrt(0.3 * 0.7 / 999), rtol=1e-12)


def test_a_client_that_nobody_saw_is_unknown() -> None:
    federation = Federation.from_sizes([1] * 50 + [2])
    p = ",".join(["0.5"] * 50 + ["0.000001"])
    server = server_of("fedavg", federation, LocalWork())
    found = probe(server, federation, f"independent:{p}", draws=64)
    assert found.standard_errors is not None
    assert np.isinf(found.standard_errors[50])
    assert found.to_dict()["intervals"][50] == [None, None]
    assert found.consistent is not True
    json.dumps(found.to_dict(), allow_nan=False)


def test_many_clients_with_few_in_a_cohort() -> None:
    sizes = np.random.default_rng(0).integers(1, 20, 100_000)
    federation = Federation.from_sizes(sizes)
    server = server_of("fedshuffle", federation, LocalWork())
    found = probe(server, federation, "uniform:50", step_sizes="scaled", draws=100)
    assert found.traits.linear is True
    assert found.consistent is None  # most clients were never seen
    assert "clients never were" in found.how
    np.testing.assert_allclose(found.effective_weights, federation.weights)


def test_large_cohorts_are_probed_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshuffle.auditing.blackbox._COORDINATES", 10)
    monkeypatch.setattr("fedshuffle.auditing.blackbox._NUMBERS", 60)
    federation = Federation.from_sizes(range(1, 41))
    found = probe(fedavg, federation, "full")
    np.testing.assert_allclose(
        found.effective_weights, audit(federation, "fedavg-rr").effective_weights
    )


# Planted faults ----------------------------------------------------------------------------------


def fedavg(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / sizes.sum() @ updates


def only_last(clients: Any, sizes: Any, updates: Any) -> Any:
    step = np.zeros(updates.shape[1])
    for update in updates:
        step = update
    return step


def by_number_of_clients(clients: Any, sizes: Any, updates: Any) -> Any:
    return sizes / len(clients) @ updates


def ignores_sizes(clients: Any, sizes: Any, updates: Any) -> Any:
    return updates.mean(axis=0)


def earlier_count_more(clients: Any, sizes: Any, updates: Any) -> Any:
    weights = sizes / np.arange(1, len(sizes) + 1)
    return weights / weights.sum() @ updates


def clipped(clients: Any, sizes: Any, updates: Any) -> Any:
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    return fedavg(clients, sizes, updates * np.minimum(1, 0.001 / np.maximum(norms, 1e-30)))


def drifting(clients: Any, sizes: Any, updates: Any) -> Any:
    return fedavg(clients, sizes, updates) - 0.01


def nan_for_small_cohorts(clients: Any, sizes: Any, updates: Any) -> Any:
    spread = np.float64(sizes.sum() - sizes[0])
    return fedavg(clients, sizes, updates) * (spread / spread)


def always_nan(clients: Any, sizes: Any, updates: Any) -> Any:
    return np.full(updates.shape[1], np.nan)


def uphill(clients: Any, sizes: Any, updates: Any) -> Any:
    return -fedavg(clients, sizes, updates)


class Momentum:
    """Heavy ball; ``times`` is how often the old velocity is added."""

    share, times = 0.6, 1

    def __init__(self) -> None:
        self.velocity: Any = 0.0

    def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
        old = self.share * self.velocity
        self.velocity = self.times * old + fedavg(clients, sizes, updates)
        return self.velocity


class MomentumTwice(Momentum):
    times = 2


class MomentumTwiceButStable(Momentum):
    share, times = 0.3, 2


class LastKnown:
    """Averages over all clients what each sent last (as MIFA does): consistent, and remembers."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
        for client, size, update in zip(clients, sizes, updates, strict=True):
            self.known[int(client)] = size * update
        return np.sum(list(self.known.values()), axis=0) / 16


def said(result: BlackBoxAudit) -> str:
    return " | ".join(finding.what for finding in result.findings)


FEDERATION = Federation.from_sizes([1, 2, 3, 4, 6])
EQUAL_STEPS = LocalWork(steps=3)


@pytest.mark.parametrize(
    ("server", "sampling", "words"),
    [
        (only_last, "uniform:3", "Only the last client"),
        (only_last, "full", "Only the last client"),
        (by_number_of_clients, "importance:2", "ignores inclusion probability"),
        (ignores_sizes, "full", "ignores how many examples"),
        (earlier_count_more, "uniform:3", "depends on the order"),
        (clipped, "uniform:2", "Not linear"),
        (drifting, "full", "although no client moves"),
        (nan_for_small_cohorts, "independent:0.5,0.5,0.5,0.5,0.5", "NaN or infinity"),
        (MomentumTwice, "full", "grow without bound"),
        (fedavg, "uniform:2", "sum to one over the cohort"),
    ],
)
def test_planted_faults_are_flagged(server: Any, sampling: str, words: str) -> None:
    found = probe(server, FEDERATION, sampling, EQUAL_STEPS, draws=400)
    assert words in said(found)
    assert found.consistent is False
    assert all(finding.why and finding.fix for finding in found.findings)


def test_counting_by_steps_is_flagged() -> None:
    found = probe(fedavg, FEDERATION, "full", LocalWork(epochs=1))
    assert "Clients take from 1 to 6 local steps" in said(found)
    sound = probe(fedavg, FEDERATION, "full", EQUAL_STEPS)
    assert sound.consistent is True
    assert not sound.findings


def test_what_a_sound_server_is_told() -> None:
    traits = probe(fedavg, FEDERATION, "uniform:2", EQUAL_STEPS).traits
    assert traits.form == "by size"
    assert traits.sums_to == pytest.approx(1)
    assert traits.constant is False
    assert traits.uses_sizes
    for name in ("uses_steps", "ordered", "remembers", "drifts", "fails_still"):
        assert getattr(traits, name) is False


def test_steps_and_sizes_are_told_apart() -> None:
    """With one step per example the weights of FedNova look like those of a plain mean."""
    work = LocalWork(epochs=1)
    nova = probe(server_of("fednova", FEDERATION, work), FEDERATION, "full", work)
    plain = probe(ignores_sizes, FEDERATION, "full", work)
    assert nova.traits.form == "by the objective's weight / steps"
    assert plain.traits.form == "all alike"


def test_only_the_last_client_counts_by_chance_of_arrival() -> None:
    """Whoever comes last wins, so all win equally often, whatever their number."""
    found = probe(only_last, FEDERATION, "full", EQUAL_STEPS, draws=2000)
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - 0.2) < 4 * found.standard_errors).all()


@pytest.mark.parametrize("server", [Momentum, MomentumTwiceButStable])
def test_linear_servers_that_remember_play(server: type[Momentum]) -> None:
    found = probe(server, FEDERATION, "uniform:2", EQUAL_STEPS, draws=2000)
    truth = audit(FEDERATION, "fedavg", "uniform:2", EQUAL_STEPS).effective_weights
    assert found.how.startswith("a play")
    assert found.traits.remembers
    assert found.traits.gain == pytest.approx(1 / (1 - server.share * server.times))
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()


def test_a_memory_that_repairs_the_weights_is_seen() -> None:
    found = probe(LastKnown, FEDERATION, "uniform:2", EQUAL_STEPS, draws=2000)
    assert found.traits.remembers
    assert found.consistent is not False
    assert found.total_variation < 0.01


def test_a_function_that_remembers_is_played_too() -> None:
    found = probe(Momentum(), FEDERATION, "uniform:2", EQUAL_STEPS, draws=2000)
    truth = audit(FEDERATION, "fedavg", "uniform:2", EQUAL_STEPS).effective_weights
    assert found.traits.repeatable is False
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()


def test_noise_averages_out() -> None:
    rng = np.random.default_rng(0)

    def noisy(clients: Any, sizes: Any, updates: Any) -> Any:
        return fedavg(clients, sizes, updates) + 0.01 * rng.standard_normal(updates.shape[1])

    found = probe(noisy, FEDERATION, "full", EQUAL_STEPS, draws=3000)
    assert found.traits.repeatable is False
    assert not found.traits.drifts
    assert found.consistent is None
    low, high = found.intervals.T
    assert ((low - 0.02 < FEDERATION.weights) & (FEDERATION.weights < high + 0.02)).all()


def test_local_response_of_clipping() -> None:
    """Clipped updates all have one length, so what remains is the weight, whatever the steps."""
    found = probe(clipped, FEDERATION, "full", LocalWork(epochs=1))
    assert found.traits.linear is False
    np.testing.assert_allclose(found.effective_weights, FEDERATION.weights, rtol=1e-3)
    assert found.consistent is None  # no server that is not linear is called consistent


def test_local_response_sees_through_a_scalar_function() -> None:
    def squashed(clients: Any, sizes: Any, updates: Any) -> Any:
        return np.tanh(fedavg(clients, sizes, updates))

    found = probe(squashed, FEDERATION, "full", EQUAL_STEPS, step_size=0.1)
    np.testing.assert_allclose(found.effective_weights, FEDERATION.weights, rtol=1e-4)


def test_long_run() -> None:
    assert long_run([1.0] * 10) == 1
    assert long_run([2.0**k for k in range(10)]) == float("inf")
    assert long_run([float(k) for k in range(1, 10)]) == float("inf")


class Unwilling:
    def __init__(self) -> None:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (always_nan, "NaN or infinity in every one"),
        (uphill, "does not follow its clients"),
        (lambda clients, sizes, updates: updates, "a step of shape"),
        (lambda clients, sizes, updates: 1 / 0, "ZeroDivisionError"),
        (lambda clients: 1, "TypeError"),
        (3, "cannot be called"),
        (object, "objects of object cannot be called"),
        (Unwilling, "RuntimeError: not today"),
        (lambda clients, sizes, updates: 1j * updates[0], "complex"),
    ],
)
def test_what_cannot_be_audited_is_refused(server: Any, words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        probe(server, FEDERATION)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"draws": 10}, "too few"),
        ({"confidence": 1.0}, "confidence"),
        ({"step_sizes": "large"}, "step_sizes"),
        ({"step_size": 0.0}, "step_size"),
        ({"sampling": "optimal:1"}, "give its pool"),
    ],
)
def test_bad_settings_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        probe(fedavg, FEDERATION, **more)


def test_servers_may_change_what_they_are_given() -> None:
    def in_place(clients: Any, sizes: Any, updates: Any) -> Any:
        updates *= (sizes / sizes.sum())[:, None]
        clients[:] = 0
        return updates.sum(axis=0)

    assert probe(in_place, FEDERATION, "full", EQUAL_STEPS).consistent is True


# Logs --------------------------------------------------------------------------------------------

HEADER = "round,client,size,steps,weight\n"


def write(folder: Path, text: str, name: str = "rounds.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_log_of_full_participation(tmp_path: Path) -> None:
    lines = [f"{r},{c},{c + 1},{c + 1},{(c + 1) / 6}\n" for r in range(8) for c in range(3)]
    found, federation = read_log(write(tmp_path, HEADER + "".join(lines)))
    np.testing.assert_allclose(found.effective_weights, np.array([1, 4, 9]) / 14)
    assert federation.sizes.tolist() == [1, 2, 3]
    assert found.exact
    assert found.consistent is False
    assert found.traits.form == "by size"
    assert "Clients take from 1 to 3" in said(found)


def test_log_with_step_sizes_that_make_up_for_steps(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"round": r, "client": f"c{c}", "size": c, "steps": c, "weight": c, "step_size": 1 / c}
        )
        for r in range(8)
        for c in (1, 2, 3)
    ]
    found, federation = read_log(write(tmp_path, "\n".join(lines), "rounds.jsonl"))
    assert federation.ids == ("c1", "c2", "c3")
    assert found.consistent is True


def test_log_of_sampled_rounds(tmp_path: Path) -> None:
    federation = Federation.from_sizes([2, 4, 6, 9])
    sampling = resolve("uniform:2", federation)
    lines = []
    for r in range(400):
        cohort = sampling.draw(5, r)
        whole = federation.sizes[cohort].sum()
        lines += [
            f"{r},{c},{federation.sizes[c]},3,{float(federation.sizes[c] / whole)!r}\n"
            for c in cohort
        ]
    found, _ = read_log(write(tmp_path, HEADER + "".join(lines)))
    truth = audit(federation, "fedavg", "uniform:2", LocalWork(steps=3)).effective_weights
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4 * found.standard_errors).all()
    assert found.traits.sums_to == pytest.approx(1)
    assert found.inclusion_probabilities.sum() == pytest.approx(2)


def test_log_with_an_objective_of_ones_own(tmp_path: Path) -> None:
    lines = [f"{r},{c},{c},1,0.5\n" for r in range(8) for c in (10, 9)]
    path = write(tmp_path, HEADER + "".join(lines))
    assert read_log(path, weights=[1, 1])[0].consistent is True
    assert read_log(path)[1].ids == ("9", "10")  # by number, not as text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rounds"),
        (HEADER, "no rounds"),
        ("round,client,size,weight\n", "line 1: there is no column 'steps'"),
        (HEADER + "0,a,1,1,1\n0,b,1,1\n", "line 3: 4 entries"),
        (HEADER + "0,a,1,x,1\n", "line 2: steps is 'x'"),
        (HEADER + "0,a,0,1,1\n", "line 2: size is '0'"),
        (HEADER + "0,a,1,1.5,1\n", "line 2: steps is '1.5'"),
        (HEADER + "0,a,1,1,nan\n", "line 2: weight is 'nan'"),
        (HEADER + "0,a,1,1,-1\n", "line 2: weight is '-1'"),
        (HEADER + "0,,1,1,1\n", "line 2: client is ''"),
        (HEADER + "0,a,1,1,1\n\n0,a,1,1,1\n", "line 4: client a is already in round 0, in line 2"),
        (HEADER + "0,a,1,1,1\n1,a,2,1,1\n", "line 3: client a has 2 examples, but 1 in line 2"),
        (HEADER + "0,a,1,1,0\n", "sum to 0"),
        ('{"round": 0}\n', "line 1: there is no column 'client'"),
        ('{"round": 0\n', "line 1: no JSON"),
        ('{"round":0,"client":"a","size":1,"steps":1,"weight":1}\n[]\n', "line 2: write one"),
        (
            '{"round":0,"client":null,"size":1,"steps":1,"weight":1}\n',
            "line 1: client is None",
        ),
        (
            '{"round":0,"client":"a","size":true,"steps":1,"weight":1}\n',
            "line 1: size is True",
        ),
        ("round,client,size,steps,weight,weight\n", "more than one column 'weight'"),
        (HEADER + f"0,a,{10**30},1,1\n", r"less than 2\*\*52"),
        (
            '{"round":0,"client":"a","size":' + "9" * 400 + ',"steps":1,"weight":1}\n',
            "line 1: size is 9",
        ),
        ('{"round":' + "9" * 5000 + "}\n", "line 1: no JSON"),
        ('{"round":' + "[" * 100_000 + "\n", "line 1: no JSON"),
    ],
)
def test_broken_logs_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        read_log(write(tmp_path, text))


def test_clients_may_have_very_long_names(tmp_path: Path) -> None:
    long = "9" * 5000
    assert read_log(write(tmp_path, HEADER + f"0,{long},1,1,1\n"))[1].ids == (long,)


def test_missing_and_binary_logs(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="cannot read the log"):
        read_log(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedShuffleError, match="cannot read the log"):
        read_log(tmp_path / "b.csv")


# The command -------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", "audit", *words])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


MINE = """
def mean(clients, sizes, updates):
    return updates.mean(axis=0)
"""


def test_command_on_a_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, MINE, "my_server_under_audit.py")
    monkeypatch.chdir(tmp_path)
    words = ["--callable", "my_server_under_audit:mean", "--sizes", "1,2,3", "--batch-size", "9"]
    assert run(monkeypatch, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(told["effective_weights"], [1 / 3] * 3)
    assert told["consistent"] is False
    assert run(monkeypatch, *words, "--sampling", "uniform:2") == 0
    text = capsys.readouterr().out
    assert "weighed all alike" in text
    assert "ignores how many examples" in text


def test_command_on_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, HEADER + "0,a,1,1,1\n1,b,1,1,1\n2,a,1,1,1\n3,b,1,1,1\n")
    assert run(monkeypatch, "--log", str(path)) == 0
    text = capsys.readouterr().out
    assert "a log of 4 rounds" in text
    assert "±" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--callable", "json:dumps"], "give --sizes"),
        (["--callable", "json:dumps", "--log", "x.csv"], "one of --flower, --callable and --log"),
        (["--log", "x.csv", "--sizes", "1,2"], "leave out --sizes"),
        (["--log", "no-such.csv"], "cannot read the log"),
        (["--callable", "json:dmps", "--sizes", "1,2"], "Did you mean 'dumps'"),
        (["--callable", "json:dumps", "--sizes", "1", "--step-sizes", "x"], "unknown step sizes"),
        (["--callable", "json:dumps", "--sizes", "1", "--method", "fedavg"], "--method changes"),
        (["--log", "x.csv", "--sampling", "full"], "--sampling changes nothing under --log"),
        (["--log", "x.csv", "--batch-size", "1"], "--batch-size changes nothing"),
        (["--sizes", "1,2", "--step-sizes", "scaled"], "--step-sizes changes nothing"),
        (["--flower", "", "--sizes", "1,2"], "no import path"),
        ([], "give --sizes"),
    ],
)
def test_command_refuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_flower_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(FedShuffleError, match=r"fedshuffle\[flower\]"):
        Flower(object(), 3)


def test_functions_are_told_what_they_ask_for() -> None:
    assert Function(server_of("fedavg", FEDERATION, WORK)).name == "aggregate"
    assert Function(fedavg, name="mine").name == "mine"


# Flower ------------------------------------------------------------------------------------------


@pytest.fixture
def flower() -> Any:
    return importlib.import_module("flwr.serverapp.strategy")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["full", "uniform:2"])
def test_flower_averages_as_fedavg(flower: Any, sampling: str) -> None:
    truth = audit(FEDERATION, "fedavg-rr", sampling).effective_weights
    for make in (flower.FedAvg, flower.FedAdam, lambda: flower.FedProx(proximal_mu=0.1)):
        found = probe(Flower(make, len(FEDERATION)), FEDERATION, sampling)
        np.testing.assert_allclose(found.effective_weights, truth, rtol=1e-6)
        assert found.consistent is False
        assert found.traits.form == "by size"


@pytest.mark.slow
def test_flower_momentum_plays(flower: Any) -> None:
    strategy = flower.FedAvgM(server_momentum=0.5)
    found = probe(Flower(strategy, len(FEDERATION)), FEDERATION, "uniform:2", draws=400)
    truth = audit(FEDERATION, "fedavg-rr", "uniform:2").effective_weights
    assert found.traits.gain == pytest.approx(2, rel=1e-6)
    assert found.standard_errors is not None
    assert (np.abs(found.effective_weights - truth) < 4.5 * found.standard_errors).all()
    assert strategy.momentum_vector is None  # the strategy given is never used itself


@pytest.mark.slow
def test_flower_strategies_that_cannot_be(flower: Any) -> None:
    with pytest.raises(FedShuffleError, match="waits for more than the 2 clients"):
        probe(
            Flower(lambda: flower.FedAvg(min_available_nodes=9), 2), Federation.from_sizes([1, 2])
        )
    with pytest.raises(FedShuffleError, match=r"QFedAvg\(\) fails"):
        Flower(flower.QFedAvg, 3)
    with pytest.raises(FedShuffleError, match="no strategy of Flower's message API"):
        Flower(dict, 3)
    with pytest.raises(FedShuffleError, match="no Flower strategy"):
        Flower(3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedMedian", "FedTrimmedAvg, 0.2"])
def test_the_page_on_flower_says_what_is_measured(flower: Any, name: str) -> None:
    spec = importlib.util.spec_from_file_location(
        "flower_strategies", ROOT / "benchmarks" / "flower_strategies.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    line = script.row(name, script.strategies()[name])
    assert line in (ROOT / "docs" / "audit-others.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_command_on_flower(
    flower: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--flower", "flwr.serverapp.strategy:FedAvg", "--sizes", "1,2,3"]
    assert run(monkeypatch, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(told["effective_weights"], np.array([1, 4, 9]) / 14)


def test_a_log_of_a_few_equal_rounds_proves_nothing(tmp_path: Path) -> None:
    rows = [f"{r},{c},{c + 1},{c + 1},{(c + 1) / 6}" for r in range(9) for c in range(3)]
    for rounds, sure in ((2, None), (9, False)):
        path = tmp_path / f"{rounds}.csv"
        path.write_text("\n".join(["round,client,size,steps,weight", *rows[: 3 * rounds]]))
        found, _ = read_log(path)
        assert found.consistent is sure


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
    want = probe(pure, federation, "uniform:2", work)
    found = probe(in_place, federation, "uniform:2", work)
    np.testing.assert_array_equal(found.effective_weights, want.effective_weights)
    assert found.traits == want.traits
