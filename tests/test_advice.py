"""Advice from the theorems: bounds above what is measured, steps that converge and that do not.

Expectations are exact (``tests/exact_rounds.py``) where losses are quadratic, and over a whole tree
of outcomes where they are logistic. The command is a contract, like all others.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedshuffle import (
    EpochRange,
    Federation,
    FedShuffleError,
    LocalWork,
    cli,
    losses,
    methods,
    schedules,
)
from fedshuffle.config import advising, knowing, load, probing
from fedshuffle.engines import LeanEngine, Problem
from fedshuffle.rounds import Run, simulate
from fedshuffle.sampling import Independent, One, Optimal, Uniform, parse
from fedshuffle.theory import (
    ProblemConstants,
    Recursion,
    Regime,
    StepLimit,
    best_probabilities,
    compare_steps,
    drift_noise,
    is_valid_s,
    largest_step_size,
    linear_regression_constants,
    logistic_regression_constants,
    method_constants,
    method_setting,
    mvr_bound,
    mvr_limit,
    mvr_setting,
    mvr_tune,
    rounds_to,
    sampling_advice,
    sources,
    step_advice,
    tune,
    upper_bound,
)
from fedshuffle.theory.sampling_advice import KINDS, variance
from tests.exact_rounds import Floats, Losses, played, with_mvr
from tests.problems import Point, half_squared_distance
from tests.test_theory import RULES

ROOT = Path(__file__).parent.parent
REGIMES: tuple[Regime, ...] = ("strongly-convex", "convex", "non-convex")


def mean_so_far(values: Floats, keep: float) -> Floats:
    """Means over the rounds so far, with the weights of the theorem."""
    above, below, means = 0.0, 0.0, [math.inf]
    for value in values[:-1]:
        above, below = keep * above + value, keep * below + 1.0
        means.append(above / below)
    return np.array(means)


# Bounds over what happens -------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(RULES)),
    st.sampled_from(["full", "uniform:2", "importance:2", "one"]),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 0.3]),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from(REGIMES),
)
def test_exact_expectations_stay_under_the_bounds(
    name: str, sampling: str, seed: int, share: float, server: float, regime: Regime
) -> None:
    rng = np.random.default_rng(seed)
    sizes, epochs = rng.integers(1, 4, 3).tolist(), rng.integers(1, 3, 3).tolist()
    federation = Federation.from_sizes(sizes, weights=rng.random(3) + 0.2)
    drawn = parse(sampling, federation)
    problem = Losses.drawn(sizes, seed)
    found = method_constants(federation, RULES[name], drawn, LocalWork(epochs=epochs))
    known = problem.constants(found.w_hat, form="gradient" if regime == "non-convex" else "convex")
    limit = largest_step_size(found, known.problem, server_step_size=server, bound="proof")
    step, rounds = share * limit.step_size, 200
    x = known.x_star + rng.normal(size=2)
    exact = played(
        problem, RULES[name], federation, drawn, epochs, step, server, found.w_hat, rounds, x
    )  # fmt: skip
    start = exact.gap[0] if regime == "non-convex" else exact.distance[0]

    def bound(quantity: Any) -> Floats:
        return upper_bound(
            rounds, found, known.problem, step, server, regime=regime, start=start,
            quantity=quantity,
        )  # fmt: skip

    if regime == "non-convex":
        assert (mean_so_far(exact.gradient, 1.0) <= bound("gradient") * (1 + 1e-9)).all()
        return
    mu = known.mu if regime == "strongly-convex" else 0.0
    keep = 1 - mu * share * limit.effective / 2
    assert (mean_so_far(exact.gap, keep) <= bound("gap") * (1 + 1e-9)).all()
    assert (exact.distance <= bound("distance") * (1 + 1e-9)).all()


def test_bounds_of_linear_regression() -> None:
    """The same through :func:`linear_regression_constants`: every Hessian is ``a a'``."""
    rng = np.random.default_rng(4)
    a, t = rng.normal(size=(6, 2)), rng.normal(size=6)
    federation = Federation.from_arrays(a, t, sizes=[1, 2, 3])
    l2 = 0.1
    hessians = np.einsum("ja,jb->jab", a, a) + l2 * np.eye(2)
    optima = np.stack([np.linalg.solve(h, v * y) for h, v, y in zip(hessians, a, t)])
    cut = [1, 3]
    problem = Losses(np.split(hessians, cut), np.split(optima, cut))
    sampling = Uniform(3, 2)
    found = method_constants(federation, "fedshuffle", sampling)
    known = linear_regression_constants(federation, l2=l2, form="convex")
    x = known.x_star + 1.0
    tuned = tune(300, found, known.problem, regime="strongly-convex", start=2.0)
    exact = played(
        problem, RULES["fedshuffle"], federation, sampling, [1] * 3, tuned.step_size, 1.0,
        found.w_hat, 300, x,
    )  # fmt: skip
    curve = upper_bound(
        300, found, known.problem, tuned.step_size, regime="strongly-convex", start=2.0
    )
    assert curve[-1] == pytest.approx(tuned.value, rel=1e-9)
    keep = 1 - known.mu * tuned.effective / 2
    assert (mean_so_far(exact.gap, keep) <= curve).all()
    assert exact.gap[-1] < 0.05 * exact.gap[0]  # and it converges


def test_bounds_of_logistic_regression_over_every_outcome() -> None:
    """Three outcomes a round (one client of two, its order), six rounds: 729 paths."""
    features = np.array([[1.0, 0.5], [-0.5, 1.0], [0.3, -1.2]])
    labels = np.array([1, 0, 0])
    federation = Federation.from_arrays(features, labels, sizes=[2, 1])
    l2, rounds = 0.05, 6
    known = logistic_regression_constants(federation, l2=l2, form="convex")
    found = method_constants(federation, "fedshuffle", "one")
    step = largest_step_size(found, known.problem, bound="proof").step_size
    w = federation.weights

    def gradient(x: Floats, j: int) -> Floats:
        grown: Floats = features[j] / (1 + np.exp(-features[j] @ x)) - labels[j] * features[j]
        return grown + l2 * x

    def value(x: Floats) -> float:
        each = np.logaddexp(0, features @ x) - labels * (features @ x)
        return float(w[0] * each[:2].mean() + w[1] * each[2] + l2 / 2 * x @ x)

    outcomes = [(w[0] / 2, (0, 1), 1.0), (w[0] / 2, (1, 0), 1.0), (w[1], (2,), 2.0)]
    start = known.x_star + np.array([1.0, -2.0])
    paths, gaps, distances = [(1.0, start)], [], []
    for r in range(rounds + 1):
        gaps.append(sum(p * (value(x) - known.f_star) for p, x in paths))
        distances.append(sum(p * float(((x - known.x_star) ** 2).sum()) for p, x in paths))
        if r == rounds:
            break
        branches = []
        for p, x in paths:
            for q, order, scale in outcomes:
                y = x
                for j in order:
                    y = y - step * scale * gradient(y, j)
                branches.append((p * q, y))
        paths = branches
    bounds = [
        upper_bound(
            rounds, found, known.problem, step, regime="strongly-convex", start=5.0, quantity=name
        )
        for name in ("gap", "distance")
    ]
    keep = 1 - known.mu * step * 2 / 2
    assert (mean_so_far(np.array(gaps), keep) <= bounds[0]).all()
    assert (np.array(distances) <= bounds[1] * (1 + 1e-12)).all()
    assert distances[-1] < distances[0]


def test_a_step_size_that_changes() -> None:
    found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle", "uniform:2")
    problem = ProblemConstants(L=1.0, mu=0.2, G=0.5, sigma=1.0)
    for quantity in ("gap", "distance"):
        options: Any = {"regime": "strongly-convex", "start": 1.0, "quantity": quantity}
        same = upper_bound(30, found, problem, 0.02, **options)
        again = upper_bound(30, found, problem, lambda r: 0.02, **options)
        np.testing.assert_allclose(same, again)
        falling = schedules.inverse_time(0.02, 100)
        assert upper_bound(400, found, problem, falling, **options)[-1] < same[-1]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 10**5), st.sampled_from(["convex", "non-convex"]))
def test_tuning_is_no_worse_than_the_papers_lemma(seed: int, rounds: int, regime: Any) -> None:
    """``d/(eta_max R) + 2 sqrt(c_1 d / R) + 2 (d/R)^(2/3) c_2^(1/3)``, with the right constants."""
    rng = np.random.default_rng(seed)
    federation = Federation.from_sizes(rng.integers(1, 9, 4))
    found = method_constants(federation, "fedshuffle", "uniform:2")
    problem = ProblemConstants(L=2.0, B=1.3, G=rng.random(), sigma=rng.random())
    limit = largest_step_size(found, problem, bound="proof")
    noise = drift_noise(found, problem, bound="proof")
    if regime == "convex":
        d, c_1, c_2 = 10.0, 20 * found.M_1 * problem.G**2, 90 * problem.L * noise
    else:
        d, c_1, c_2 = 8.0, 8 * found.M_1 * problem.G**2 * 2.0, 18 * problem.L**2 * noise
    paper = d / (limit.effective * rounds) + 2 * math.sqrt(c_1 * d / rounds)
    paper += 2 * (d / rounds) ** (2 / 3) * c_2 ** (1 / 3)
    tuned = tune(rounds, found, problem, regime=regime, start=1.0)
    assert tuned.value <= paper * (1 + 1e-6)
    assert tuned.step_size <= limit.step_size * (1 + 1e-12)


@given(
    st.integers(0, 10**6),
    st.sampled_from(REGIMES),
    st.sampled_from([0.5, 0.05, 1e-4]),
    st.booleans(),
)
def test_rounds_to_a_target_are_those_of_the_curve(
    seed: int, regime: Regime, epsilon: float, last: bool
) -> None:
    rng = np.random.default_rng(seed)
    found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle", "uniform:2")
    problem = ProblemConstants(L=1.0, mu=0.3, G=0.1 * rng.random(), sigma=0.1)
    quantity: Any = "distance" if last and regime == "strongly-convex" else None
    options: Any = {"regime": regime, "start": 1.0, "quantity": quantity}
    best = rounds_to(epsilon, found, problem, **options)
    assert best.value <= epsilon * (1 + 1e-9)
    if best.rounds < 20_000:
        curve = upper_bound(best.rounds, found, problem, best.step_size, **options)
        assert curve[-1] == pytest.approx(best.value, rel=1e-6)
        assert curve[-2] > epsilon * (1 - 1e-9)
    limit = largest_step_size(found, problem, bound="proof")
    for share in (1.0, 0.5, 0.1):  # no other step is faster
        recursion = Recursion.of(found, problem, regime=regime)
        other = recursion.needed(
            epsilon, np.array([share * limit.effective]), 1.0, best.quantity
        )  # fmt: skip
        assert best.rounds <= math.ceil(float(other[0]) * (1 + 1e-6)) if other[0] < 1e9 else True


def test_bounds_refuse_what_is_not_proven() -> None:
    found = method_constants(Federation.from_sizes([1, 2]), "fedshuffle")
    problem = ProblemConstants(L=1.0)
    good: Any = {"regime": "convex", "start": 1.0}
    with pytest.raises(FedShuffleError, match="the proof says nothing of the step size 3: the"):
        upper_bound(5, found, problem, 3.0, **good)
    with pytest.raises(FedShuffleError, match="mu is 0"):
        upper_bound(5, found, problem, 0.1, regime="strongly-convex", start=1.0)
    with pytest.raises(FedShuffleError, match="unknown regime 'concave'"):
        upper_bound(5, found, problem, 0.1, regime="concave", start=1.0)  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match="unknown quantity of the regime 'convex'"):
        upper_bound(5, found, problem, 0.1, quantity="gradient", **good)
    with pytest.raises(FedShuffleError, match="start is -1"):
        upper_bound(5, found, problem, 0.1, regime="convex", start=-1.0)
    with pytest.raises(FedShuffleError, match="rounds is 0"):
        tune(0, found, problem, **good)
    with pytest.raises(FedShuffleError, match="epsilon is 0"):
        rounds_to(0.0, found, problem, **good)
    with pytest.raises(FedShuffleError, match="no number of rounds is known"):
        rounds_to(0.1, found, problem, quantity="distance", **good)


# Advice that is followed, and twenty times that -------------------------------------------------


def end(
    federation: Federation, step: float, rounds: int, method: str = "fedshuffle", **settings: Any
) -> Floats:
    """Where the library's training of ``1/2 |x - target|^2`` goes, from the origin."""
    d = federation.fields[0].shape[1]
    engine = LeanEngine(Problem(Point(d), half_squared_distance, federation))
    run = Run(federation, method, settings.get("sampling", "full"), settings.get("work"), step)
    models = [state.x.numpy().copy() for (state,) in simulate(engine, [run], rounds)]
    return np.stack([np.zeros(d), *models])


def test_advice_that_is_followed_converges_and_twenty_times_it_does_not() -> None:
    """One eigenvalue at L, full participation: gradient descent, which needs ``eta L < 2``."""
    federation = Federation.from_arrays(torch.ones(2, 1, dtype=torch.float64), sizes=[1, 1])
    problem = ProblemConstants(L=1.0, mu=1.0)
    advice = step_advice(
        method_setting(federation, "fedshuffle"), problem, method="fedshuffle",
        regime="strongly-convex", rounds=40, start=1.0, epsilon=1e-3,
    )  # fmt: skip
    assert advice.tuned is not None
    for step in (advice.proof.step_size, advice.tuned.step_size):
        away = np.abs(end(federation, step, 40) - 1)[:, 0]
        assert away[-1] < 1e-3
        curve = upper_bound(
            40, advice.setting.constants, problem, step, regime="strongly-convex", start=1.0,
            quantity="distance",
        )  # fmt: skip
        assert (away**2 <= curve * (1 + 1e-9)).all()
    away = np.abs(end(federation, 20 * advice.proof.step_size, 40) - 1)[:, 0]
    assert away[-1] > 1e6


def test_twenty_times_the_theorems_step_diverges_where_sampling_is_the_noise() -> None:
    """A client that comes with probability 0.2: ``E|x|^2`` shrinks iff ``eta L (1 + M) < 2``."""
    federation = Federation.from_sizes([1])
    sampling = Independent([0.2])
    found = method_constants(federation, "fedshuffle", sampling)
    assert pytest.approx(4.0) == found.M
    problem = ProblemConstants(L=1.0, mu=1.0)
    quadratic = Losses([np.eye(2)[None]], [np.zeros((1, 2))])
    for bound in ("theorem", "proof"):
        limit: StepLimit = largest_step_size(found, problem, bound=bound)
        grown = []
        for times in (1, 20):
            exact = played(
                quadratic, RULES["fedshuffle"], federation, sampling, [1],
                times * limit.step_size, 1.0, np.ones(1), 50, np.ones(2),
            )  # fmt: skip
            grown.append(exact.distance[-1] / exact.distance[0])
        assert grown[0] < 0.5
        assert grown[1] > 1e3


def test_following_the_advice_on_a_sampled_federation() -> None:
    rng = np.random.default_rng(0)
    targets = torch.from_numpy(rng.normal(size=(12, 2)))
    federation = Federation.from_arrays(targets, sizes=[1, 2, 3, 6])
    setting = method_setting(federation, "fedshuffle", "uniform:2")
    known = Losses(
        [np.broadcast_to(np.eye(2), (m, 2, 2)).copy() for m in (1, 2, 3, 6)],
        np.split(targets.numpy(), [1, 3, 6]),
    ).constants(federation.weights, form="convex")
    start = float(known.x_star @ known.x_star)
    advice = step_advice(
        setting, known.problem, method="fedshuffle", regime="strongly-convex", start=start,
        rounds=300,
    )  # fmt: skip
    assert advice.tuned is not None
    models = end(federation, advice.tuned.step_size, 300, sampling="uniform:2")
    gaps = 0.5 * ((models - known.x_star) ** 2).sum(1)
    assert gaps[200:].mean() < advice.tuned.value
    assert gaps[200:].mean() < 0.2 * gaps[0]


# How much larger --------------------------------------------------------------------------------


def test_how_much_larger() -> None:
    federation = Federation.from_sizes([2, 10, 50])
    problem = ProblemConstants(L=1.0, G=1.0, B=1.2)

    def advised(method: Any, name: str) -> Any:
        setting = method_setting(federation, method, "uniform:2")
        return step_advice(setting, problem, method=name, regime="convex", rounds=10, start=1.0)

    mine = advised("fedshuffle", "fedshuffle")
    nova = advised("fednova-rr", "fednova-rr")
    found = compare_steps(mine, nova)
    assert found.largest_client_step == pytest.approx(found.step_size * 50 / 2)
    # FedNova with inclusion probabilities: the same limit and rate, smaller steps for the small.
    capped = advised(methods.get("fedshuffle-capped:rho=1"), "capped")
    same = compare_steps(mine, capped)
    assert same.step_size == pytest.approx(1)
    assert same.effective == pytest.approx(1)
    assert same.largest_client_step == pytest.approx(50 / 2)
    assert capped.tuned.value <= mine.tuned.value * (1 + 1e-9)


def test_methods_are_compared_by_the_same_variance() -> None:
    """With weights that go by steps FedNova averages as FedShuffle does, up to a factor: its M_1 is
    the same, whether it comes from a formula or from a list of cohorts.
    """
    federation = Federation.from_sizes([10, 40, 200])
    found = [
        method_setting(federation, name, "uniform:2").constants
        for name in ("fedshuffle", "fednova-rr", "fedshuffle-capped:rho=1")
    ]
    assert [one.how for one in found] == ["eigenvalue", "enumeration", "eigenvalue"]
    np.testing.assert_allclose([one.M_1 for one in found], found[0].M_1)
    assert is_valid_s(found[0].s, Uniform(3, 2))
    np.testing.assert_allclose(found[0].M_1, variance("uniform", federation, 2))


def test_settings_near_those_of_the_theorem() -> None:
    federation = Federation.from_sizes([1, 2, 3, 9], weights=[1, 1, 2, 3])
    changing = LocalWork(epochs=EpochRange(2, 5))
    ours = method_setting(federation, "fedshuffle", "uniform:2", changing)
    fixed = method_setting(federation, "fedshuffle", "uniform:2", LocalWork(epochs=2)).constants
    assert ours.covered
    assert (ours.constants.M_1, ours.constants.W) == (fixed.M_1, fixed.W)
    assert ours.constants.longest == 45  # step_size is still that of the client with most steps
    limits = [
        largest_step_size(found, ProblemConstants(L=1.0, P=3.0), bound="proof")
        for found in (ours.constants, fixed)
    ]
    assert limits[0].eta_l == limits[1].eta_l
    average = method_setting(federation, "fedavg-rr", "uniform:2", changing)
    assert not average.covered
    assert average.constants.tau.tolist() == [5, 10, 15, 45]

    many = Federation.from_sizes(np.arange(1, 21))
    drawn = method_setting(many, "fedavg-rr", "uniform:5")
    assert not drawn.covered
    assert "drawn" in drawn.notes[0]
    assert "own objective" in drawn.notes[1]
    assert not method_setting(many, "fedshuffle", "uniform:5").notes
    few = method_setting(many, "fedavg-rr", "uniform:3")  # 1140 cohorts are listed
    assert few.covered
    assert 0.3 < drawn.constants.M_1 / few.constants.M_1 < 1

    asked = method_setting(federation, "fedshuffle", "optimal:2")
    assert pytest.approx(variance("best", federation, 2)) == asked.constants.M_1
    for sampling, method in (("optimal:1:of:uniform:2", "fedshuffle"), ("optimal:2", "fedavg-rr")):
        with pytest.raises(FedShuffleError, match=r"nothing is proven|does not cover|normalises"):
            method_setting(federation, method, sampling)
    with pytest.raises(FedShuffleError, match="2000 clients are too many"):
        method_setting(Federation.from_sizes([1] * 2000), "fedavg-rr", "uniform:100")


# FedShuffleMVR ----------------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from([0.1, 0.5, 1.0]))
def test_mvr_stays_under_its_bound(seed: int, epochs: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = [1, 2, 3] if epochs == 1 else [1, 2, 2]
    federation = Federation.from_sizes(sizes)
    w = federation.weights
    problem = Losses.drawn(sizes, seed, alike=True)
    known = problem.constants(w, form="gradient", P=0.0)
    setting = mvr_setting(federation, known.problem, known.delta, LocalWork(epochs=epochs))
    x = known.x_star + rng.normal(size=2)
    start = 0.5 * float((x - known.x_star) @ problem.hessian(w) @ (x - known.x_star))
    tuned = mvr_tune(300, setting, start=start, bound="proof")
    limit = mvr_limit(setting, bound="proof")
    assert tuned.eta_l <= limit.eta_l * (1 + 1e-9)
    pairs = {(share * tuned.eta_l, tuned.a), (share * limit.eta_l, limit.a)}
    for eta_l, a in pairs:
        exact = with_mvr(problem, w, epochs, eta_l, a, 300, x)
        mean = np.cumsum(exact) / np.arange(1, 301)
        size = eta_l * epochs / setting.longest
        bound = mvr_bound(300, setting, size, a, start=start)
        assert (mean <= bound[1:] * (1 + 1e-9)).all()
    assert mvr_bound(300, setting, tuned.step_size, tuned.a, start=start)[-1] == pytest.approx(
        tuned.value
    )


@given(
    st.floats(0.01, 10), st.integers(1, 40), st.floats(0, 3), st.floats(0, 3), st.integers(1, 10**6)
)
def test_the_theorem_on_mvr_holds_by_the_proof_done_again(
    delta: float,
    epochs: int,
    G: float,  # noqa: N803
    sigma: float,
    rounds: int,
) -> None:
    """``5 Psi / (eta E R) + 25 eta^2 L^2 sigma^2 + 255 a G^2``, as the paper's lemma says."""
    federation = Federation.from_sizes([2, 4])
    problem = ProblemConstants(L=1.0, G=G, sigma=sigma)
    setting = mvr_setting(federation, problem, delta, LocalWork(epochs=epochs))
    tuned = mvr_tune(rounds, setting, start=1.0)
    eta, a = tuned.eta_l, tuned.a
    limit = mvr_limit(setting)
    assert eta <= limit.eta_l <= min(1 / 4, 1 / (40 * delta * epochs)) * (1 + 1e-12)
    if rounds == 1:
        return
    for error in (0.0, G**2):
        psi = 1.0 + 288 * eta / (23 * a) * epochs * error
        noise = float(federation.weights @ (sigma**2 / federation.sizes))
        printed = 5 * psi / (eta * rounds * epochs) + 25 * eta**2 * noise + 255 * a * G**2
        ours = setting.after(np.array(rounds), np.array(eta), np.array(a), 1.0, error)
        assert float(ours) <= printed
    assert tuned.gain > 0.4
    if G > 0 or sigma > 0:
        best = mvr_tune(rounds, setting, start=1.0, bound="proof")
        assert best.value <= tuned.value * 1.01


def test_mvr_advice_that_is_followed_converges() -> None:
    targets = torch.from_numpy(3 + np.random.default_rng(1).normal(size=(6, 2)))
    federation = Federation.from_arrays(targets, sizes=[1, 2, 3])
    known = Losses(
        [np.broadcast_to(np.eye(2), (m, 2, 2)).copy() for m in (1, 2, 3)],
        np.split(targets.numpy(), [1, 3]),
    ).constants(federation.weights)
    assert known.delta == 0  # so that L alone is the limit
    setting = mvr_setting(federation, known.problem, known.delta)
    start = 0.5 * float(known.x_star @ known.x_star)
    for bound in ("theorem", "proof"):
        tuned = mvr_tune(200, setting, start=start, bound=bound)
        method = f"fedshuffle-mvr:a={tuned.a}"
        models = end(federation, tuned.step_size, 200, method, sampling=One(federation.weights))
        gradients = ((models - known.x_star) ** 2).sum(1)
        assert gradients[:-1].mean() < tuned.value
        assert gradients[150:].mean() < 0.1 * gradients[0]


def test_mvr_as_played_here_is_what_the_library_trains() -> None:
    """One client with copies of one point: nothing is random, and the two can be compared."""
    targets = torch.tensor([[1.0, -2.0]] * 2, dtype=torch.float64)
    federation = Federation.from_arrays(targets, sizes=[2])
    work = LocalWork(epochs=1)
    models = end(federation, 0.1, 20, "fedshuffle-mvr:a=0.3", work=work)
    alone = Losses([np.broadcast_to(np.eye(2), (2, 2, 2)).copy()], [targets.numpy()])
    exact = with_mvr(alone, np.ones(1), 1, 0.2, 0.3, 20, np.zeros(2))
    np.testing.assert_allclose(((models[:-1] - [1.0, -2.0]) ** 2).sum(1), exact, rtol=1e-9)


def test_mvr_refuses_what_its_theorem_does_not_cover() -> None:
    federation = Federation.from_sizes([1, 2])
    problem = ProblemConstants(L=1.0, G=1.0)
    for work in (
        LocalWork(epochs=EpochRange(1, 2)),
        LocalWork(epochs=[1, 2]),
        LocalWork(steps=3),
        LocalWork(order="replacement"),
        LocalWork(clip=1.0),
    ):
        with pytest.raises(FedShuffleError, match="the same number of whole, reshuffled epochs"):
            mvr_setting(federation, problem, 1.0, work)
    with pytest.raises(FedShuffleError, match="P = 0"):
        mvr_setting(federation, replace(problem, P=1.0), 1.0)
    with pytest.raises(FedShuffleError, match="delta is -1"):
        mvr_setting(federation, problem, -1.0)
    setting = mvr_setting(federation, replace(problem, B=2.0), 1.0, LocalWork(epochs=3))
    with pytest.raises(FedShuffleError, match="for B = 1, not 2"):
        mvr_limit(setting)
    assert mvr_limit(setting, bound="proof").a < 0.2
    plain = mvr_setting(federation, problem, 1.0)
    with pytest.raises(FedShuffleError, match="says nothing of the step size 5"):
        mvr_bound(10, plain, 5.0, 0.5, start=1.0)
    with pytest.raises(FedShuffleError, match="a is 2"):
        mvr_bound(10, plain, 0.01, 2, start=1.0)
    with pytest.raises(FedShuffleError, match="start is 0"):
        mvr_tune(10, plain, start=0.0)
    with pytest.raises(FedShuffleError, match="unknown bound"):
        mvr_limit(plain, bound="hope")  # type: ignore[arg-type]


# Sampling ---------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 7))
def test_no_independent_sampling_has_less_variance_than_the_best(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.dirichlet(np.full(n, 0.7)) + 1e-3
    w /= w.sum()
    b = int(rng.integers(1, n + 1))
    p = best_probabilities(w, b)
    assert p.sum() == pytest.approx(b)
    M = float(((1 - p) / p * w).max())  # noqa: N806
    np.testing.assert_allclose((1 - p) / p * w, M, atol=1e-9)
    for _ in range(20):
        other = np.clip(p * rng.uniform(0.3, 3, n), 1e-6, 1)
        other = np.minimum(other * min(1.0, b / other.sum()), 1)
        assert ((1 - other) / other * w).max() >= M - 1e-9
    # Optimal client sampling is for given updates at least as good, so that M serves for it too.
    zeta = rng.normal(size=(n, 2)) * rng.exponential(size=(n, 1)) ** 2
    norms = w * np.linalg.norm(zeta, axis=1)
    _, asked = Optimal(parse("full", Federation.from_sizes([1] * n)), b).select(
        norms, 0, 0, np.arange(n)
    )
    real = float(((1 / asked - 1) * norms**2).sum())
    assert real <= M * float(w @ (zeta**2).sum(1)) * (1 + 1e-9) + 1e-12


def test_samplings_and_cohorts_compared() -> None:
    federation = Federation.from_sizes([1, 2, 3, 5, 8, 13, 40, 80])
    problem = ProblemConstants(L=1.0, G=2.0, mu=0.1)
    found = method_constants(federation, "fedshuffle")
    recursion = Recursion.of(found, problem, regime="strongly-convex")
    advice = sampling_advice(federation, recursion, 3, epsilon=0.2, start=5.0)
    rounds = {option.sampling: option.rounds for option in advice.options}
    assert rounds["best"] <= rounds["importance"] < rounds["uniform"]
    assert advice.fastest.sampling == "best"
    for option in advice.options:  # the rounds are those of the theorem for that sampling
        assert variance(option.sampling, federation, 3) == option.M
        if option.sampling != "uniform":
            p = advice.p if option.sampling == "best" else parse("importance:3", federation).p
            constants = method_constants(federation, "fedshuffle", Independent(p))
            again = rounds_to(0.2, constants, problem, regime="strongly-convex", start=5.0)
            assert again.rounds == option.rounds
            assert again.step_size == pytest.approx(option.step_size, rel=1e-3)
    for k, kind in enumerate(KINDS):
        alone = advice.sizes[0][k].rounds
        each = [
            sampling_advice(federation, recursion, b, epsilon=0.2, start=5.0).options[k].rounds
            for b in range(1, 9)
        ]
        paying = [b for b, needed in enumerate(each, 1) if alone >= b * needed / 2]
        assert advice.pays_until[kind] == max(paying)
    assert [row[0].cohort for row in advice.sizes] == [1, 2, 4, 8]
    with pytest.raises(FedShuffleError, match="cannot take 9 of 8"):
        sampling_advice(federation, recursion, 9, epsilon=0.2, start=5.0)
    with pytest.raises(FedShuffleError, match="epsilon is -1"):
        sampling_advice(federation, recursion, 2, epsilon=-1.0, start=5.0)


def test_linear_speed_up_until_the_rest_takes_over() -> None:
    """With much noise rounds halve as the cohort doubles; with none they stay as they are."""
    federation = Federation.from_sizes([5] * 64)
    found = method_constants(federation, "fedshuffle")
    noisy, calm = (
        sampling_advice(
            federation,
            Recursion.of(found, ProblemConstants(L=1.0, G=g), regime="convex"),
            1,
            epsilon=0.01,
            start=1.0,
        )
        for g in (20.0, 0.0)
    )
    needed = [row[1].rounds for row in noisy.sizes]
    np.testing.assert_allclose(np.array(needed[:3]) / needed[1:4], 2, rtol=0.1)
    assert noisy.pays_until["importance"] > 16
    assert calm.pays_until["importance"] <= 3


# The command ------------------------------------------------------------------------------------

MODULE = """
import torch
from fedshuffle import Federation

def linear(classes=2):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, classes)).double()

def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

def data(numbers=False, separable=False):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    labels = torch.arange(24) % 2
    if separable:
        labels = (inputs[:, 0] > 0).long()
    if numbers:
        labels = inputs.sum(1, keepdim=True) + 1
    return Federation.from_arrays(inputs, labels, sizes=[3, 6, 15])
"""

CONFIG = """
rounds = 20
sampling = "uniform:2"
step_size = 0.01
loss = "cross_entropy"

[model]
use = "mine:linear"

[data]
use = "mine:data"

[work]
weight_decay = 0.1
batch_size = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "config.toml"


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", "advise", *words])
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def step_size(limit: StepLimit) -> float:
    return limit.step_size


def numbers(found: Any) -> list[dict[str, Any]]:
    """Every number with a source in a tree of plain data."""
    if isinstance(found, dict):
        if "source" in found:
            return [found]
        return [number for part in found.values() for number in numbers(part)]
    return [number for part in found for number in numbers(part)] if isinstance(found, list) else []


def bare(found: Any) -> set[str]:
    """The keys of floats that have no source."""
    keys = set()
    for key, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, float):
            keys.add(key)
        elif isinstance(value, dict) and "source" not in value:
            keys |= bare(value)
        elif isinstance(value, list):
            keys |= {key for part in value for key in bare(part)}
    return keys


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as they are linked."""
    text = (ROOT / page).read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_source_is_a_place_in_the_docs() -> None:
    for source in sources.ALL:
        page, _, anchor = source.anchor.partition("#")
        assert not anchor or anchor in anchors(page), source.anchor


def test_advice_as_json(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, str(config), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "setting", "probe", "problem", "steps", "larger", "mvr", "yours", "sampling", "audit",
    ]  # fmt: skip
    known = {source.anchor for source in sources.ALL}
    assert all(number["source"] in known for number in numbers(found))
    assert len(numbers(found)) > 100
    assert bare(found) <= {"server_step_size", "target", "step_size"}  # the config's own

    problem = found["problem"]
    assert (problem["how"], problem["what"]) == ("exact", "softmax regression")
    federation = load(config).task().federation
    options: Any = {"l2": 0.1, "classes": 2, "bias": True, "batch_size": 3}
    exact = logistic_regression_constants(federation, form="convex", **options)
    for name in ("L", "mu", "G", "B", "delta"):
        assert problem["constants"][name]["value"] == pytest.approx(getattr(exact, name))
    rows = {(row["method"], row["regime"]): row for row in found["steps"]}
    assert len(rows) == 9
    setting = method_constants(federation, "fedshuffle", "uniform:2", load(config).work)
    setting = replace(setting, M_1=variance("uniform", federation, 2))
    for regime in ("strongly-convex", "convex"):
        limit = largest_step_size(setting, exact.problem, bound="proof")
        row = rows["fedshuffle", regime]
        assert row["covered"]
        assert row["proof"]["step_size"]["value"] == pytest.approx(limit.step_size)
        assert row["theorem"]["step_size"]["value"] < limit.step_size
        assert row["tuned"]["rounds"]["value"] == 20
    other = logistic_regression_constants(federation, form="gradient", **options)
    widest = max(limit, largest_step_size(setting, other.problem, bound="proof"), key=step_size)
    times = found["yours"]["times_the_limit"]["value"]
    assert times == pytest.approx(0.01 / widest.step_size)
    assert [row["than"] for row in found["larger"][::3]] == ["fedavg-rr", "fednova-rr"]
    assert found["mvr"]["proof"]["tuned"]["a"]["value"] <= 1
    assert found["sampling"]["cohort"] == 2
    assert found["audit"]["consistent"] is True


def test_advice_for_a_person(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(config), "--set", "data.numbers=true", "--set", "model.classes=1"]
    words += ["--set", "loss=squared_error", "--set", "method=fedavg-rr", "--set", "work.epochs=2"]
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    for part in (
        "fedavg-rr on 3 clients with 24 examples",
        "The problem: linear regression",
        "exact: ",
        "strongly-convex",
        "docs/theory.md#the-step-size-limit",
        "FedShuffleMVR",
        "pays until",
        "of the optimum",
        "fedavg-rr is not consistent",
    ):
        assert part in said


def test_advice_by_measuring(config: Path) -> None:
    chosen = load(config, {"model": "mine:network", "work.epochs": "1..2", "rounds": 4})
    found = advising.advise(chosen, clients=2).to_dict()
    assert found["problem"]["how"] == "estimated"
    assert "no single linear layer" in found["problem"]["what"]
    assert any("after 4 rounds" in note for note in found["problem"]["notes"])
    assert found["problem"]["constants"]["L"]["uncertainty"] >= 0
    assert {row["regime"] for row in found["steps"]} == {"non-convex"}
    assert found["mvr"]["covered"]
    again = advising.advise(chosen, clients=2, points=1).to_dict()
    assert any("start only" in note for note in again["problem"]["notes"])


def test_what_is_recognised(config: Path) -> None:
    chosen = load(config)
    data = chosen.task().federation
    linear = nn.Linear(3, 2)
    assert knowing.recognised(linear, losses.cross_entropy, data) == knowing.Kind(
        "softmax regression", 2, True
    )
    for model, loss, said in (
        (nn.Sequential(linear, nn.ReLU()), losses.cross_entropy, "no single linear layer"),
        (nn.Sequential(linear, nn.Linear(2, 2)), losses.cross_entropy, "no single linear layer"),
        (linear, losses.squared_error, "neither"),
        (nn.Linear(3, 2000), losses.cross_entropy, "more than 1000 parameters"),
    ):
        found = knowing.recognised(model, loss, data)
        assert isinstance(found, str)
        assert said in found
    # The start is counted as the model stands, with the regularisation.
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2)).double()
    method, sampling = methods.get("fedshuffle"), parse("uniform:2", data)
    options: Any = {"clients": 3, "points": 1, "progress": False}
    known = knowing.know(chosen, data, model, losses.cross_entropy, method, sampling, **options)
    assert isinstance(known, knowing.Known)
    x, y = (torch.as_tensor(part) for part in data.fields)
    flat = nn.utils.parameters_to_vector(model.parameters())
    # weights go by size, so that the objective is the plain mean
    value = nn.functional.cross_entropy(model(x), y) + 0.05 * flat @ flat
    slopes = torch.autograd.grad(value, list(model.parameters()))
    start = known.start()
    assert start.gap == pytest.approx(float(value.detach()) - known.constants().f_star)
    assert start.gradient == pytest.approx(sum(float(part.square().sum()) for part in slopes))
    away = flat.detach().numpy() - known.constants().x_star
    assert start.distance == pytest.approx(float(away @ away))


def test_small_models_are_measured_on_one_thread(config: Path) -> None:
    chosen = load(config)
    data = Federation.from_arrays(torch.eye(4), torch.arange(4.0), sizes=[1, 3])
    seen = set()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        error: torch.Tensor = model(x).squeeze(-1) - y
        return error.square().mean()

    method, sampling = methods.get("fedshuffle"), parse("uniform:1", data)
    options: Any = {"clients": 2, "points": 1, "progress": False}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = knowing.know(chosen, data, nn.Linear(4, 1), loss, method, sampling, **options)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert isinstance(found, knowing.Measured)
    assert seen == {1}


def test_classes_that_can_be_separated_are_measured(config: Path) -> None:
    changes = {"data.separable": True, "work.weight_decay": 0.0}
    found = advising.advise(load(config, changes), points=1).to_dict()
    assert found["problem"]["how"] == "estimated"
    assert "separated" in found["problem"]["what"]


def test_what_is_not_covered_is_said(config: Path) -> None:
    found = advising.advise(load(config, {"work.clip": 1.0, "method": "fedprox"})).to_dict()
    notes = {row["method"]: row["notes"][0] for row in found["steps"]}
    assert "not clipped" in notes["fedshuffle"]
    assert "does not cover 'fedprox'" in notes["fedprox"]
    assert not found["mvr"]["covered"]
    assert not found["sampling"]["covered"]
    assert found["yours"]["times_the_limit"] is None


def test_mistakes_of_the_command(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["nowhere.toml"], "there is no config 'nowhere.toml'"),
        ([str(config), "--target", "2"], "target is 2.0"),
        ([str(config), "--points", "0"], "points is 0"),
        ([str(config), "--clients", "0"], "clients is 0"),
        ([str(config), "--set", "method=fedavgg"], "unknown method 'fedavgg'"),
    ):
        assert command(monkeypatch, *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_the_example_of_digits() -> None:
    chosen = load(ROOT / "examples" / "digits" / "config.toml")
    found = advising.advise(chosen, clients=3, points=1).to_dict()
    rows = {row["method"]: row for row in found["steps"]}
    assert rows["fedshuffle"]["covered"]
    assert not rows["fedavg-rr"]["covered"]
    assert found["audit"]["consistent"] is True


# What can be measured -----------------------------------------------------------------------------


def descent(step_size: float, rounds: int = 4) -> probing.Probe:
    """Clients with one example each: gradient descent on 1/2 |x - x*|^2 and a constant."""
    points = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    federation = Federation.from_arrays(points, sizes=[1] * 4)
    method, sampling = methods.get("fedshuffle"), parse("full", federation)
    return probing.probe(
        Point(2), federation, half_squared_distance, method,
        sampling, LocalWork(), step_size=step_size, rounds=rounds,
    )  # fmt: skip


@pytest.mark.parametrize("step_size", [0.01, 0.1, 1.0, 100.0])
def test_the_probe_finds_the_stable_range_of_gradient_descent(step_size: float) -> None:
    found = descent(step_size)
    assert found.start == pytest.approx(1.5)
    for size, loss in found.losses.items():
        want = 0.5 + (1 - size) ** 8  # stable below 2
        lost = max((1 - size) ** (2 * k) for k in range(1, 5)) + 0.5 > 15.0
        assert loss == (math.inf if lost else pytest.approx(want, abs=1e-12))
    assert found.largest == found.best == 1.0
    assert found.stable == [size for size in found.losses if size < 2]
    assert found.steps <= 16 * len(found.losses)
    assert descent(step_size) == found  # always the same


def test_a_probe_that_finds_nothing_says_so(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = descent(1e6)
    assert len(found.losses) == probing.REACH + 1  # it does not go down for ever
    assert found.largest is None
    assert found.best is None
    assert command(monkeypatch, str(config), "--set", "step_size=1e9") == 0
    assert "None of these step sizes" in capsys.readouterr().out


def test_what_is_measured_comes_before_what_is_proved(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, str(config), "--probe", "3") == 0
    said = capsys.readouterr().out
    assert said.index("largest stable") < said.index("They differ") < said.index("What is proved")
    assert said.index("What is proved") < said.index("rounds to target")
    assert command(monkeypatch, str(config), "--probe", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    tried = found["probe"]["tried"]
    assert found["probe"]["rounds"] == 3
    assert found["probe"]["best"]["value"] in [row["step_size"] for row in tried]
    own = found["yours"]["step_size"] / found["yours"]["times_the_limit"]["value"]
    assert found["probe"]["best_times_the_limit"]["value"] == pytest.approx(
        found["probe"]["best"]["value"] / own
    )
    assert command(monkeypatch, str(config), "--probe", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["probe"] is None


def test_a_cap_holds_for_drawn_epochs_too() -> None:
    clients = Federation.from_sizes([1, 10])
    work = LocalWork(epochs=EpochRange(1, 4))
    setting = method_setting(clients, "fedshuffle-capped:rho=2", work=work)
    limit = step_advice(setting, ProblemConstants(L=1.0), method="capped", regime="convex").proof
    assert limit.largest_client_step <= 2 * limit.step_size * (1 + 1e-12)
    assert any("step sizes" in note for note in setting.notes)
