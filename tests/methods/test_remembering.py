"""Methods for clients that come and go, against their authors' algorithms written out in numpy.

Clients have different Hessians, weights, sizes and numbers of steps; see ``tests/regression.py``.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import Federation, FedShuffleError, LocalWork, audit, methods, schedules
from fedshuffle.auditing.method_server import MethodAggregator
from fedshuffle.auditing.simulation import QuadraticClients, simulated_weights
from fedshuffle.auditing.subject import Subject
from fedshuffle.availability import Trace
from fedshuffle.sampling import Full, Independent, Uniform, among_available
from fedshuffle.schedules import resolve as schedule
from fedshuffle.testing import check
from fedshuffle.training.rounds import Run
from tests.regression import (
    SEED,
    Clients,
    Floats,
    kept,
    make_run,
    models,
    streams,
    trained,
    whole,
)

SIZES, WEIGHTS = [4, 5, 6, 7], [0.1, 0.4, 0.3, 0.2]
CLIENTS = Clients.drawn(SIZES, WEIGHTS)
BATCHES = LocalWork(epochs=[1, 2, 1, 3], batch_size=2)
RARE = Independent([0.5, 0.2, 0.3, 0.1])  # in some rounds nobody takes part
SCHEDULE = schedule("cosine:0.05:0.01", 12)
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
ROUNDS = 12


def local_model(run: Run, start: Floats, minibatches: Any, gamma: float) -> Floats:
    def gradient(i: int, y: Floats, rows: Any) -> Floats:
        return CLIENTS.gradient(i, y, rows)

    return CLIENTS.local_steps(start, minibatches, gamma, gradient)


def scales(run: Run, cohort: Any, eta: float) -> Floats:
    """Step sizes by hand: one for all, or FedShuffle's."""
    if "fedshuffle" in run.method.name:
        return np.asarray(eta * run.workload.max_steps / cohort.planned)
    return np.full(len(cohort.clients), eta)


# MIFA and FedVARP -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Uniform(4, 2), RARE], ids=["uniform", "rare"])
@pytest.mark.parametrize("name", ["mifa", "mifa+fedshuffle", "fedvarp", "fedvarp+fedshuffle"])
def test_remembered_updates_are_their_authors_algorithms(name: str, sampling: Any) -> None:
    """Gu et al. 2021, algorithm 1, and Jhunjhunwala et al. 2022, algorithm 1, with weights w."""
    run = make_run(CLIENTS, name, sampling, BATCHES, SCHEDULE, 0.8)
    x, last, empty = np.zeros(3), np.zeros((4, 3)), 0
    for r, state in enumerate(trained(CLIENTS, run, ROUNDS)):
        cohort, eta = run.cohort(r), schedules.value(SCHEDULE, r, "step size")
        before, new = last.copy(), last.copy()
        gammas = scales(run, cohort, eta)
        for i, batches, gamma in zip(cohort.clients, streams(run, cohort), gammas, strict=True):
            new[i] = (local_model(run, x, batches, gamma) - x) / eta
        if "mifa" in name:
            v = CLIENTS.w @ new
        else:
            change = (CLIENTS.w / sampling.p) @ (new - before)
            v = CLIENTS.w @ before + change
        x, last, empty = x + 0.8 * eta * v, new, empty + (len(cohort.clients) == 0)
        np.testing.assert_allclose(state.x, x, **EXACT)
        np.testing.assert_allclose(kept(state), last, **EXACT)
        np.testing.assert_allclose(state.method_state["memory"], CLIENTS.w @ last, **EXACT)
    assert bool(empty) == (sampling is RARE)  # also in rounds without clients the model moves


@pytest.mark.parametrize("name", ["mifa", "fedvarp", "fedawe", "amplified:every=1,factor=1"])
def test_fedavg_if_all_take_part(name: str) -> None:
    both = [make_run(CLIENTS, each, "full", BATCHES) for each in (name, "fedavg-rr")]
    found, fedavg = (models(trained(CLIENTS, run, 8)) for run in both)
    np.testing.assert_allclose(found, fedavg, **EXACT)


@pytest.mark.parametrize("name", ["mifa+fednova-rr", "fedvarp+fedshuffle-gen", "mifa+fedavg-mean"])
def test_only_step_sizes_and_weights_are_lent(name: str) -> None:
    own, other = (methods.get(one).averaging for one in name.split("+"))
    both = methods.get(name).averaging
    assert both.normaliser is own.normaliser
    assert (both.weight, both.step_normalisation) == (other.weight, other.step_normalisation)


def test_the_memory_holds_weights_of_the_round_they_were_made_in() -> None:
    """FedNova's weights change with the steps done; the sum stays that of what clients keep."""
    from fedshuffle import EpochRange

    work = LocalWork(epochs=EpochRange(1, 4), batch_size=2)
    run = make_run(CLIENTS, "mifa+fednova-rr", Uniform(4, 2), work)
    last = np.zeros((4, 3))
    x = np.zeros(3)
    for r, state in enumerate(trained(CLIENTS, run, ROUNDS)):
        cohort = run.cohort(r)
        for i, batches in zip(cohort.clients, streams(run, cohort), strict=True):
            last[i] = (local_model(run, x, batches, 0.05) - x) / batches.steps
        x = x + CLIENTS.w @ last
        np.testing.assert_allclose(state.x, x, **EXACT)


# FedAWE ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Uniform(4, 2), RARE], ids=["uniform", "rare"])
@pytest.mark.parametrize("name", ["fedawe", "fedawe+fedshuffle"])
def test_fedawe_is_its_authors_algorithm(name: str, sampling: Any) -> None:
    """Xiang et al. 2024, algorithm 1: echoes, and models that gossip; with weights w."""
    run = make_run(CLIENTS, name, sampling, BATCHES, 0.02, 0.8)
    own, tau, x = np.zeros((4, 3)), np.full(4, -1), np.zeros(3)
    for t, state in enumerate(trained(CLIENTS, run, ROUNDS)):
        cohort = run.cohort(t)
        echoed, gammas = own.copy(), scales(run, cohort, 0.02)
        mean_before = CLIENTS.w @ own
        for i, batches, gamma in zip(cohort.clients, streams(run, cohort), gammas, strict=True):
            y = local_model(run, own[i], batches, gamma)
            echoed[i] = own[i] + 0.8 * (t - tau[i]) * (y - own[i])
        if len(cohort.clients):
            x = np.average(echoed[cohort.clients], axis=0, weights=cohort.weight)
            moved = CLIENTS.w @ echoed - mean_before
            own[cohort.clients], tau[cohort.clients] = x, t
            # Gossip preserves the mean over all clients: only the echoes move it.
            np.testing.assert_allclose(CLIENTS.w @ own, mean_before + moved, **EXACT)
        np.testing.assert_allclose(state.x, x, **EXACT)
        came = tau >= 0
        np.testing.assert_allclose(kept(state)[came], own[came], **EXACT)


def test_echoes_count_every_round_once() -> None:
    """With constant gradients the mean over clients moves as if all took part, at all times."""
    clients = Federation.from_sizes([1, 1, 1])
    there = Trace(3, [0, 1, 2], begins=[0, 3, 5], ends=[3, 5, 6])
    sampling = among_available(Full(3), there, clients, 12)
    subject = Subject(clients, methods.get("fedawe"), sampling, LocalWork().on(clients.sizes))
    raw, errors = simulated_weights(subject, seed=0, rounds=480)
    np.testing.assert_allclose(raw / raw.sum(), 1 / 3, atol=0.01 + 5 * float(errors.max()))


# Amplification --------------------------------------------------------------------------------


def test_amplified_is_its_authors_algorithm() -> None:
    """Wang and Ji 2022, algorithm 1: after P rounds, empty ones among them."""
    run = make_run(CLIENTS, "amplified:every=3,factor=2.5", RARE, BATCHES, 0.02)
    x, x0, u, empty = np.zeros(3), np.zeros(3), np.zeros(3), 0
    for t, state in enumerate(trained(CLIENTS, run, ROUNDS)):
        cohort, delta = run.cohort(t), np.zeros(3)
        for batches, w in zip(streams(run, cohort), cohort.weight, strict=True):
            delta += w / cohort.weight.sum() * (local_model(run, x, batches, 0.02) - x)
        x, u, empty = x + delta, u + delta, empty + (len(cohort.clients) == 0)
        if (t + 1) % 3 == 0:
            x = x0 + 2.5 * u
            x0, u = x, np.zeros(3)
        np.testing.assert_allclose(state.x, x, **EXACT)
    assert empty


# What they minimise ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mifa+fedshuffle", "fedvarp+fedshuffle", "fedawe+fedshuffle"])
def test_to_the_optimum_as_steps_fall_though_some_are_rarely_there(name: str) -> None:
    """On quadratics, in the mean of the last rounds; with weights that sum to one instead, the
    model stays where those who come often want it.
    """
    coarse, fine, other = away(name, 0.04), away(name, 0.01), away("fedshuffle-so", 0.01)
    assert other > 0.1
    assert fine < 0.2 * other
    assert fine < max(0.6 * coarse, 0.01)


@cache
def away(method: str, step: float) -> float:
    """How far from the optimum the mean of the last rounds is."""
    h, optima = np.array([1.0, 0.5, 2.0, 1.5]), np.array([[1.0], [-1.0], [0.5], [2.0]])
    optimum = (CLIENTS.w * h) @ optima / (CLIENTS.w @ h)
    often, work = Independent([0.9, 0.15, 0.4, 0.6]), whole([1, 3, 2, 5])
    run = make_run(CLIENTS, method, often, work, step / 5)
    clients = QuadraticClients(run, h, h[:, None] * optima)
    state, late = run.start(torch.zeros(1, dtype=torch.float64)), []
    for _ in range(round(10 / step)):
        state = clients.run_round(state)
        late.append(state.x.numpy())
    return float(np.abs(np.mean(late[len(late) // 2 :], axis=0) - optimum).max())


@pytest.mark.parametrize("there", ["markov:on=0.2,off=0.5", "independent:0.9,0.5,0.2"])
@pytest.mark.parametrize("name", ["mifa", "fedvarp", "fedawe"])
def test_audits_do_not_depend_on_who_comes_how_often(name: str, there: str) -> None:
    clients = Federation.from_sizes([1, 2, 3])
    plain = audit(clients, name, "uniform:2", availability=there)
    np.testing.assert_allclose(plain.effective_weights, np.array([1, 4, 9]) / 14, rtol=1e-9)
    assert plain.exact
    assert [one.what for one in plain.findings] == [
        "Clients take from 1 to 3 local steps at one step size."
    ]
    assert f"{name}+fedshuffle" in plain.findings[0].fix
    scaled = audit(clients, f"{name}+fedshuffle", "uniform:2", availability=there)
    assert scaled.exact
    assert scaled.consistent
    assert not scaled.findings


def test_audits_of_turns() -> None:
    """Amplification changes the pace; what remembers does not care for turns that repeat, and is
    not audited where they do not, or where step sizes fall meanwhile.
    """
    clients = Federation.from_sizes([1, 1])
    halves = Trace(2, [0, 1], begins=[0, 30], ends=[30, 40])
    fedavg, amplified = (
        audit(clients, name, availability=halves).effective_weights
        for name in ("fedavg", "amplified")
    )
    np.testing.assert_allclose(amplified, fedavg, rtol=1e-12)
    assert fedavg[0] == pytest.approx(0.75)
    for name in ("mifa", "fedawe"):
        assert audit(clients, name, availability=halves).consistent
        with pytest.raises(FedShuffleError, match="no formula is known"):
            audit(clients, name, availability=halves, step_size="cosine:0.1:0", rounds=40)


def test_steps_that_depend_on_who_is_there_are_simulated() -> None:
    """The cohort's fewest steps, with absences that last: no formula, and no claim."""
    clients, there = Federation.from_sizes([1, 2, 3]), "markov:on=0.2,off=0.5"
    found = audit(clients, "mifa+fedavg-min", availability=there, draws=960)
    assert not found.exact
    assert found.consistent is not True


# Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedawe", {"down_channel": "float16"}, "a down channel would lose"),
        ("mifa", {"sampling": "optimal:2"}, "learns from what every client"),
        ("fedawe", {"sampling": "optimal:2"}, "learns from what every client"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, settings: Any, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        Run(CLIENTS.federation, name, **{"sampling": "full", **settings}, seed=SEED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("amplified:every=0", "every, the number of rounds"),
        ("amplified:factor=-1", "factor of amplification"),
        ("mifa+amplified", "dataclasses.replace"),
    ],
)
def test_bad_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        methods.get(text)


def test_a_round_alone_does_not_show_what_is_remembered() -> None:
    with pytest.raises(FedShuffleError, match="remembers its clients"):
        MethodAggregator(CLIENTS.federation, "mifa")


def test_what_was_decoded_is_remembered() -> None:
    """A channel comes first: memory and sum agree, whatever it loses."""
    run = Run(
        *(CLIENTS.federation, "mifa", Uniform(4, 2), BATCHES, 0.05, 1.0, SEED),
        channel="topk:0.34",
    )
    for state in trained(CLIENTS, run, 6):
        rows = kept(state)
        np.testing.assert_allclose(state.method_state["memory"], CLIENTS.w @ rows, **EXACT)
        assert (np.count_nonzero(rows, axis=1) <= 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mifa+fedshuffle", "fedvarp+fedshuffle", "fedawe+fednova"])
def test_combinations_conform(name: str) -> None:
    report = check(name)
    assert report.passed, str(report)
