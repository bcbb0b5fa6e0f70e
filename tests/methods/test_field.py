"""Every method of the field against its authors' algorithm, written out in numpy, or a closed form.

Clients have different Hessians, weights, sizes and numbers of steps; see ``tests/regression.py``.
Nothing here calls the kernel to know what is right.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import Federation, FedShuffleError, LocalWork, MissLast, audit, methods
from fedshuffle.engines import ReferenceEngine, VectorizedEngine
from fedshuffle.local_work import Minibatches
from fedshuffle.sampling import Independent, Listed, Uniform
from fedshuffle.training.rounds import Run, simulate
from tests.problems import Point, unit_vectors
from tests.regression import (
    SEED,
    Clients,
    Floats,
    kept,
    make_run,
    models,
    squared_residual,
    streams,
    trained,
    whole,
)

SIZES, EPOCHS, WEIGHTS = [4, 5, 6, 7], [1, 3, 2, 5], [0.1, 0.4, 0.3, 0.2]
CLIENTS = Clients.drawn(SIZES, WEIGHTS)
ALIKE = Clients.drawn(SIZES, [1, 1, 1, 1])
BATCHES = LocalWork(epochs=[1, 2, 1, 3], batch_size=2)
LIKELY = Independent([0.5, 0.9, 0.3, 0.6])
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


def distances(x: Floats, to: Floats) -> Floats:
    d: Floats = np.linalg.norm(x - to, axis=-1)
    return d


# To the true optimum --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "scaffold-i", "vrl-sgd", "fedlin"])
def test_corrected_methods_converge_linearly_to_the_optimum(name: str) -> None:
    """With unequal steps, weights and Hessians; FedLin's steps of the others are the larger."""
    run = make_run(CLIENTS, name, work=whole(EPOCHS), step=0.1)
    d = distances(models(trained(CLIENTS, run, 120)), CLIENTS.optimum)
    reached = int(np.argmax(d < 1e-10))
    assert 0 < reached < 120
    assert (d[10:reached] <= 0.2 * d[: reached - 10]).all()
    assert d[-1] < 1e-10


def test_fedavg_stops_where_its_affine_round_stops() -> None:
    """K full gradient steps are ``y - x = -M (x - x_i)``, ``M = I - (I - gamma H)^k``."""
    gamma, one = 0.1, np.eye(CLIENTS.d)
    reach = [
        one - np.linalg.matrix_power(one - gamma * CLIENTS.hessian(i), k)
        for i, k in enumerate(EPOCHS)
    ]
    total = np.sum([w * m for w, m in zip(CLIENTS.w, reach, strict=True)], axis=0)
    target = np.sum(
        [w * m @ CLIENTS.minimiser(i) for i, w, m in zip(range(4), CLIENTS.w, reach, strict=True)],
        axis=0,
    )
    stop = np.linalg.solve(total, target)
    run = make_run(CLIENTS, "fedavg-rr", work=whole(EPOCHS), step=gamma)
    x = models(trained(CLIENTS, run, 120))
    np.testing.assert_allclose(x[-1], stop, rtol=0, atol=1e-10)
    assert distances(stop, CLIENTS.optimum) > 0.5


def test_scaffold_converges_under_sampling() -> None:
    """What sampling adds vanishes at the optimum, with small steps; not so for FedShuffle."""
    names = ["scaffold", "scaffold-i", "fedshuffle"]
    runs = [make_run(CLIENTS, name, "uniform:2", whole(EPOCHS), step=0.05) for name in names]
    states = simulate(VectorizedEngine(CLIENTS.problem()), runs, 250)
    x = np.stack([models(at_once) for at_once in states], axis=1)
    *corrected, fedshuffle = distances(x, CLIENTS.optimum)
    for d in corrected:
        reached = int(np.argmax(d < 1e-10))
        assert 0 < reached < 250
        assert (d[50:reached] <= 0.1 * d[: reached - 50]).all()
        assert d[-1] < 1e-10
    assert fedshuffle[100:].min() > 1e-2


# SCAFFOLD and VRL-SGD -------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["uniform:2", "full"])
@pytest.mark.parametrize("option", ["i", "ii"])
def test_scaffold_is_its_authors_algorithm(option: str, sampling: str) -> None:
    """Karimireddy et al. 2020, algorithm 1: w = 1/n, a uniform cohort, K steps each."""
    n, rounds, k_steps, eta_l, eta_g = 4, 25, 6, 0.04, 0.8
    name = {"i": "scaffold-i", "ii": "scaffold"}[option]
    run = make_run(ALIKE, name, sampling, LocalWork(steps=k_steps, batch_size=2), eta_l, eta_g)
    states = trained(ALIKE, run, rounds)
    x, c, own = np.zeros(3), np.zeros(3), np.zeros((n, 3))
    for r, state in enumerate(states):
        cohort = run.cohort(r)
        dy, dc = [], []
        for i, batches in zip(cohort.clients, streams(run, cohort), strict=True):
            y = x
            for rows in batches:
                y = y - eta_l * (ALIKE.gradient(i, y, rows) - own[i] + c)
            full = ALIKE.gradient(i, x)
            renewed = full if option == "i" else own[i] - c + (x - y) / (k_steps * eta_l)
            dy.append(y - x)
            dc.append(renewed - own[i])
        own[cohort.clients] += dc
        x = x + eta_g * np.mean(dy, axis=0)
        c = c + len(cohort.clients) / n * np.mean(dc, axis=0)
        np.testing.assert_allclose(state.x, x, **EXACT)
        np.testing.assert_allclose(state.method_state["c"], c, **EXACT)
        np.testing.assert_allclose(kept(state), own, **EXACT)


@settings(max_examples=20)
@given(
    weights=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
    p=st.lists(st.floats(0.2, 1), min_size=4, max_size=4),
    name=st.sampled_from(["scaffold", "scaffold-i", "vrl-sgd", "scaffold+fedshuffle"]),
    missed=st.integers(0, 2),
)
def test_the_servers_control_variate_is_the_clients_mean(
    weights: list[float], p: list[float], name: str, missed: int
) -> None:
    clients = Clients.drawn(SIZES, weights)
    work = LocalWork(epochs=2, batch_size=3, interruption=MissLast(missed) if missed else None)
    states = trained(clients, make_run(clients, name, Independent(p), work, 0.01), 4)
    for state in states:
        c = state.method_state.get("c", torch.zeros(3, dtype=torch.float64))
        np.testing.assert_allclose(c, clients.w @ kept(state), rtol=0, atol=1e-12)


def test_vrl_sgd_is_its_authors_algorithm() -> None:
    """Liang et al. 2019, algorithm 1; they have equal weights, and unequal ones do no harm."""
    k, gamma = 5, 0.04
    run = make_run(CLIENTS, "vrl-sgd", work=LocalWork(steps=k, batch_size=2), step=gamma)
    states = trained(CLIENTS, run, 25)
    mean, delta, y = np.zeros(3), np.zeros((4, 3)), np.zeros((4, 3))
    for r, state in enumerate(states):
        if r:
            delta = delta + (mean - y) / (k * gamma)
        np.testing.assert_allclose(CLIENTS.w @ delta, 0, **EXACT)
        y = np.tile(mean, (4, 1))
        for i, batches in enumerate(streams(run, run.cohort(r))):
            for rows in batches:
                y[i] = y[i] - gamma * (CLIENTS.gradient(i, y[i], rows) - delta[i])
        mean = CLIENTS.w @ y
        np.testing.assert_allclose(state.x, mean, **EXACT)


# FedLin ---------------------------------------------------------------------------------------


def top(vector: Floats, entries: int) -> Floats:
    """The largest entries, all others zero."""
    chosen = np.zeros_like(vector)
    places = np.argsort(-np.abs(vector))[:entries]
    chosen[places] = vector[places]
    return chosen


@pytest.mark.parametrize("sampling", ["full", LIKELY], ids=["full", "sampled"])
@pytest.mark.parametrize(("name", "entries"), [("fedlin", 5), ("fedlin:keep=0.4", 2)])
def test_fedlin_is_its_authors_algorithm(name: str, entries: int, sampling: Any) -> None:
    """Mitra et al. 2021: steps of eta / tau_i, gradients sparsified with error memory."""
    clients, eta = Clients.drawn(SIZES, WEIGHTS, d=5), 0.15
    run = make_run(clients, name, sampling, whole(EPOCHS), step=eta / max(EPOCHS))
    x, rho = np.zeros(5), np.zeros((4, 5))
    sums, sent = np.zeros((4, 5)), np.zeros((4, 5))
    for r, state in enumerate(trained(clients, run, 30)):
        cohort = run.cohort(r)
        g, total = np.zeros(5), np.zeros(5)
        for i in cohort.clients:
            own = clients.gradient(i, x)
            h = top(rho[i] + own, entries)
            rho[i] += own - h
            sums[i] += own
            sent[i] += h
            g += clients.w[i] / run.sampling.p[i] * h
        for i in cohort.clients:
            at_x, y = clients.gradient(i, x), x
            for _ in range(EPOCHS[i]):
                y = y - eta / EPOCHS[i] * (clients.gradient(i, y) - at_x + g)
            total += clients.w[i] / run.sampling.p[i] * (y - x)
        x = x + total
        np.testing.assert_allclose(state.x, x, **EXACT)
        if entries < 5:  # what was sent and what is kept is all there was
            np.testing.assert_allclose(kept(state), sums - sent, **EXACT)
            np.testing.assert_allclose(kept(state), rho, **EXACT)
        else:
            assert state.clients is None
    assert np.abs(x).max() > 0.1


def test_sparse_fedlin_stays_near_the_optimum_as_steps_shrink() -> None:
    """Clients' gradients do not vanish at the optimum, so it is left, but by O(step size)."""
    away = []
    for step in (0.02, 0.005):
        run = make_run(CLIENTS, "fedlin:keep=0.3", work=whole(EPOCHS), step=step)
        start = run.start(torch.from_numpy(CLIENTS.optimum))
        states = simulate(ReferenceEngine(CLIENTS.problem()), [run], 60, [start])
        away.append(distances(models([state for (state,) in states]), CLIENTS.optimum).max())
    assert 0 < away[1] < away[0] / 3
    assert away[0] < 0.5 < distances(np.zeros(3), CLIENTS.optimum)


# Mime -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base", "corrected"),
    [
        ("mime", "momentum", True),
        ("mime-sgd", "sgd", True),
        ("mime-adam", "adam", True),
        ("mime-lite", "momentum", False),
        ("mime-lite-adam", "adam", False),
        ("mime:base=sgd,corrected=false", "sgd", False),
    ],
)
@pytest.mark.parametrize("sampling", [LIKELY, Uniform(4, 2)], ids=["independent", "uniform"])
def test_mime_is_its_authors_algorithm(
    name: str, base: str, corrected: bool, sampling: Any
) -> None:
    """Karimireddy et al. 2020: U(g, s) with s fixed in the round, V(full gradient, s) after it."""
    beta, beta2, epsilon, eta = 0.9, 0.99, 1e-3, 0.03
    run = make_run(CLIENTS, name, sampling, BATCHES, step=eta, server=0.9)
    x, m, v = np.zeros(3), np.zeros(3), None
    for r, state in enumerate(trained(CLIENTS, run, 15)):
        cohort = run.cohort(r)
        if len(cohort.clients):
            c, moved = CLIENTS.estimate(cohort, x), np.zeros(3)
            v = c**2 if v is None else v  # ours: Adam does not start by dividing by nothing
            for i, batches in zip(cohort.clients, streams(run, cohort), strict=True):
                y = x
                for rows in batches:
                    g = CLIENTS.gradient(i, y, rows)
                    if corrected:
                        g = g - CLIENTS.gradient(i, x, rows) + c
                    u = g if base == "sgd" else (1 - beta) * g + beta * m
                    y = y - eta * (u / (np.sqrt(v) + epsilon) if base == "adam" else u)
                moved += CLIENTS.w[i] / sampling.p[i] * (y - x)
            m = (1 - beta) * c + beta * m
            v = (1 - beta2) * c**2 + beta2 * v
            x = x + 0.9 * moved
        np.testing.assert_allclose(state.x, x, **EXACT)
    assert np.abs(x).max() > 0.1


def test_mime_without_momentum_is_svrg_in_the_round() -> None:
    """One round of one client is an inner loop of SVRG with its snapshot at x."""
    alone = Clients.drawn([7], [1])
    run = make_run(alone, "mime:b=0", work=LocalWork(epochs=2, batch_size=1), step=0.05)
    snapshot = np.zeros(3)
    for r, state in enumerate(trained(alone, run, 6)):
        y, anchor = snapshot, alone.gradient(0, snapshot)
        for rows in run.workload.minibatches(0, 14, SEED, r):
            y = y - 0.05 * (alone.gradient(0, y, rows) - alone.gradient(0, snapshot, rows) + anchor)
        snapshot = y
        np.testing.assert_allclose(state.x, snapshot, **EXACT)
    b_zero, sgd = (
        models(trained(CLIENTS, make_run(CLIENTS, name, LIKELY, BATCHES), 8))
        for name in ("mime:b=0", "mime-sgd")
    )
    np.testing.assert_allclose(b_zero, sgd, **EXACT)


@pytest.mark.parametrize(
    ("name", "local"), [("mime-mvr", True), ("mime-mvr:a=0.3", True), ("non-local-mvr", False)]
)
def test_mvr_with_one_step_size(name: str, local: bool) -> None:
    """``m = a g + (1-a) (m + g - g_old)``; without local work the server steps along m itself."""
    a, eta = 0.3 if "=" in name else 0.1, 0.04
    run = make_run(CLIENTS, name, LIKELY, BATCHES, step=eta, server=0.9)
    x, previous, m = np.zeros(3), None, np.zeros(3)
    for r, state in enumerate(trained(CLIENTS, run, 20)):
        cohort = run.cohort(r)
        if len(cohort.clients):
            now, moved = CLIENTS.estimate(cohort, x), np.zeros(3)
            then = now if previous is None else CLIENTS.estimate(cohort, previous)
            m = now if previous is None else a * now + (1 - a) * (m + now - then)
            for i, batches in zip(cohort.clients, streams(run, cohort), strict=True):
                y = x
                for rows in batches:
                    g = CLIENTS.gradient(i, y, rows) - (1 - a) * CLIENTS.gradient(i, x, rows)
                    y = y - eta * (g + (1 - a) * m)
                moved += CLIENTS.w[i] / LIKELY.p[i] * (y - x)
            previous, x = x, x + 0.9 * (moved if local else -eta * m)
        np.testing.assert_allclose(state.x, x, **EXACT)
    assert np.abs(x).max() > 0.1


# FedProx --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.5, 4.0, 19.0])
def test_fedprox_keeps_a_linear_client_within_g_over_mu(mu: float) -> None:
    """Gradients are unit vectors: ``y - x = -g (1 - (1 - mu gamma)^k) / mu``."""
    problem, gamma, steps = unit_vectors([3, 5], [0.4, 0.6]), 0.05, np.array([60, 100])
    work = LocalWork(epochs=20)
    run = Run(problem.federation, f"fedprox:mu={mu}", work=work, step_size=gamma)
    *_, (state,) = simulate(ReferenceEngine(problem), [run], 1)
    length = (1 - (1 - mu * gamma) ** steps) / mu
    assert (length <= 1 / mu).all()
    np.testing.assert_allclose(state.x, [0.4, 0.6] * length, rtol=1e-12)


def test_fedprox_stays_at_x_as_mu_grows() -> None:
    """With ``gamma (L + mu) <= 1`` no iterate is further from x than ``|grad f_i(x)| / mu``."""
    alone = Clients.drawn([6], [1])
    g = np.linalg.norm(alone.gradient(0, np.zeros(3)))
    lipschitz = np.linalg.eigvalsh(alone.hessian(0)).max()
    ends = []
    for mu in (1.0, 10.0, 100.0, 1e4):
        run = make_run(alone, f"fedprox:mu={mu}", work=whole(200), step=1 / (lipschitz + mu))
        end = trained(alone, run, 1)[0].x.numpy()
        assert np.linalg.norm(end) <= g / mu
        ends.append(np.linalg.norm(end) * mu / g)
    assert ends[-1] > 0.99  # and the bound is sharp


def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit() -> None:
    bare, fedavg = (
        models(trained(CLIENTS, make_run(CLIENTS, name, "uniform:2", BATCHES), 10))
        for name in ("fedprox:mu=0", "fedavg-rr")
    )
    assert (bare == fedavg).all()


def test_fedprox_refuses_a_proximal_term_that_overshoots() -> None:
    with pytest.raises(FedShuffleError, match=r"mu = 40 with a step size of 0\.05"):
        trained(CLIENTS, make_run(CLIENTS, "fedprox:mu=40", step=0.05), 1)
    # The largest step of the cohort counts: FedShuffle's for the smallest client.
    with pytest.raises(FedShuffleError, match=r"with a step size of 0\.0875"):
        trained(CLIENTS, make_run(CLIENTS, "fedprox:mu=30+fedshuffle", step=0.05), 1)
    trained(CLIENTS, make_run(CLIENTS, "fedprox:mu=39", step=0.05), 1)
    for mu in ("-1", "nan", "inf"):
        with pytest.raises(FedShuffleError, match="mu"):
            methods.get(f"fedprox:mu={mu}")


# From FedNova to FedShuffle -------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [False, True])
def test_capped_at_one_is_fednova_with_inclusion_probabilities(interrupted: bool) -> None:
    """One step size, and the weight ``w/p tau_max / done``."""
    work = LocalWork(epochs=2, batch_size=2, interruption=MissLast() if interrupted else None)
    run = make_run(CLIENTS, "fedshuffle-capped:rho=1", LIKELY, work)
    x = np.zeros(3)
    for r, state in enumerate(trained(CLIENTS, run, 15)):
        cohort = run.cohort(r)
        for i, batches in zip(cohort.clients, streams(run, cohort), strict=True):
            assert batches.steps == 2 * -(-SIZES[i] // 2) - interrupted
        ends = [CLIENTS.local_steps(x, b, 0.05, CLIENTS.gradient) for b in streams(run, cohort)]
        weights = CLIENTS.w[cohort.clients] / LIKELY.p[cohort.clients] * 8 / cohort.done
        x = x + np.asarray(sum(a * (y - x) for a, y in zip(weights, ends, strict=True)))
        np.testing.assert_allclose(state.x, x, **EXACT)
    assert np.abs(x).max() > 0.1


@pytest.mark.parametrize(
    ("interruption", "same"), [(None, "fedshuffle"), (MissLast(2), "fedshuffle-gen")]
)
def test_capped_at_infinity_is_fedshuffle(interruption: MissLast | None, same: str) -> None:
    work = LocalWork(epochs=[1, 2, 1, 3], batch_size=2, interruption=interruption)
    capped, fedshuffle = (
        models(trained(CLIENTS, make_run(CLIENTS, name, LIKELY, work, 0.02), 15))
        for name in ("fedshuffle-capped:rho=inf", same)
    )
    np.testing.assert_allclose(capped, fedshuffle, rtol=0, atol=1e-14)


def test_capped_step_sizes() -> None:
    """``min(tau_max / tau, rho)``, and every client moves equally far to first order."""
    run = make_run(CLIENTS, "fedshuffle-capped:rho=2", work=LocalWork(epochs=[1, 2, 1, 3]))
    cohort = run.cohort(0)
    assert cohort.planned.tolist() == [4, 10, 6, 21]
    rule = run.method.averaging
    np.testing.assert_allclose(rule.step_scale(cohort), [2, 2, 2, 1])
    np.testing.assert_allclose(
        rule.aggregation_weights(cohort) * rule.step_scale(cohort) * cohort.done, 21 * CLIENTS.w
    )
    for rho in ("0.5", "nan", "-1"):
        with pytest.raises(FedShuffleError, match="rho"):
            methods.get(f"fedshuffle-capped:rho={rho}")


@settings(max_examples=60)
@given(
    clients=st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 9)), min_size=2, max_size=6),
    rho=st.one_of(st.just(1.0), st.just(np.inf), st.floats(1, 50)),
    kind=st.sampled_from(["full", "uniform:2", "importance:1", "one", "ais:2", "optimal:1"]),
    missed=st.integers(0, 4),
    batch=st.integers(1, 8),
)
def test_every_cap_is_consistent(
    clients: list[tuple[int, float]], rho: float, kind: str, missed: int, batch: int
) -> None:
    sizes, weights = zip(*clients, strict=True)
    federation = Federation.from_sizes(sizes, weights)
    work = LocalWork(2, batch_size=batch, interruption=MissLast(missed) if missed else None)
    found = audit(federation, f"fedshuffle-capped:rho={rho}", kind, work)
    np.testing.assert_allclose(found.effective_weights, federation.weights, rtol=1e-9)
    assert found.consistent


# Baselines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [LIKELY, Uniform(4, 3)], ids=["independent", "uniform"])
def test_distributed_gradient_descent(sampling: Any) -> None:
    """Weight decay is part of the objective."""
    work = LocalWork(weight_decay=0.1)
    run = make_run(CLIENTS, "distributed-gd", sampling, work, step=0.1, server=0.5)
    x = np.zeros(3)
    for r, state in enumerate(trained(CLIENTS, run, 20)):
        cohort = run.cohort(r)
        shares = cohort.weight / cohort.probability
        x = x - 0.05 * (CLIENTS.estimate(cohort, x) + 0.1 * shares.sum() * x)
        np.testing.assert_allclose(state.x, x, **EXACT)
    assert np.abs(x).max() > 0.1


@pytest.mark.parametrize(
    ("name", "order"), [("pooled-sgd", "replacement"), ("pooled-rr", "reshuffled")]
)
def test_pooled_training_is_a_plain_torch_loop(name: str, order: Any) -> None:
    total = sum(SIZES)
    rows = torch.from_numpy(np.concatenate(CLIENTS.a))
    values = torch.from_numpy(np.concatenate(CLIENTS.t))
    run = make_run(CLIENTS, name, work=LocalWork(epochs=2, batch_size=3), step=0.05)
    model = Point(3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for r, state in enumerate(trained(CLIENTS, run, 4)):
        steps = 2 * -(-total // 3)
        assert int(run.cohort(r).done.sum()) == steps
        seen = []
        for positions in Minibatches(0, total, steps, 3, order, SEED, r):
            optimiser.zero_grad()
            squared_residual(model, rows[positions], values[positions]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            seen += positions.tolist()
        torch.testing.assert_close(state.x, model.x.detach(), rtol=0, atol=1e-12)
        assert name == "pooled-sgd" or sorted(seen) == sorted([*range(total)] * 2)


def test_pooled_data_has_no_clients() -> None:
    for sampling in ("uniform:2", "optimal:2", Listed(4, [((0, 1, 2, 3), 1.0)])):
        with pytest.raises(FedShuffleError, match=r"no clients to sample.*Use sampling 'full'"):
            make_run(CLIENTS, "pooled-rr", sampling)
    found = audit(CLIENTS.federation, "pooled-sgd")
    np.testing.assert_allclose(found.effective_weights, np.array(SIZES) / sum(SIZES))
    assert not found.consistent
    assert audit(Federation.from_sizes(SIZES), "pooled-rr").consistent
    run = make_run(CLIENTS, "pooled-rr", work=whole(400), step=0.2)
    a, t = np.concatenate(CLIENTS.a), np.concatenate(CLIENTS.t)
    least = np.linalg.lstsq(a, t, rcond=None)[0]
    np.testing.assert_allclose(trained(CLIENTS, run, 1)[0].x, least, rtol=0, atol=1e-10)
