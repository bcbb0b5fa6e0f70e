"""Convergence rates: bounds above exact expectations, steps that converge and that do not.

Expectations are exact (``tests/theory/exact_rounds.py``) for quadratic losses, and over the whole
tree of outcomes for logistic ones.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import (
    EpochRange,
    Federation,
    FedShuffleError,
    LocalWork,
    schedules,
)
from fedshuffle.engines import Problem, SequentialEngine
from fedshuffle.sampling import Independent, One, Uniform, parse
from fedshuffle.theory import (
    ConvergenceRate,
    MVRRate,
    ProblemConstants,
    Quantity,
    Regime,
    StepLimit,
    drift_noise,
    largest_step_size,
    linear_regression_constants,
    logistic_regression_constants,
    method_constants,
    nearest_constants,
    step_advice,
)
from fedshuffle.training.rounds import Run, simulate
from tests.problems import Point, half_squared_distance
from tests.theory.exact_rounds import Floats, Losses, expected_rounds, with_mvr
from tests.theory.test_constants_and_step_sizes import RULES

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
    exact = expected_rounds(
        problem, RULES[name], federation, drawn, epochs, step, server, found.w_hat, rounds, x
    )  # fmt: skip
    start = exact.gap[0] if regime == "non-convex" else exact.distance[0]

    rate = ConvergenceRate(found, known.problem, regime=regime, server_step_size=server)

    def bound(quantity: Any) -> Floats:
        return rate.curve(rounds, step, start=start, quantity=quantity)

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
    rate = ConvergenceRate(found, known.problem, regime="strongly-convex")
    tuned = rate.tune(300, start=2.0)
    exact = expected_rounds(
        problem, RULES["fedshuffle"], federation, sampling, [1] * 3, tuned.step_size, 1.0,
        found.w_hat, 300, x,
    )  # fmt: skip
    curve = rate.curve(300, tuned.step_size, start=2.0)
    assert curve[-1] == pytest.approx(tuned.bound, rel=1e-9)
    keep = 1 - known.mu * tuned.effective / 2
    assert (mean_so_far(exact.gap, keep) <= curve).all()
    assert exact.gap[-1] < 0.05 * exact.gap[0]  # and it converges


def test_bounds_of_logistic_regression_over_every_outcome() -> None:
    """Three outcomes per round (one client of two, its order), six rounds: 729 paths."""
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
    rate = ConvergenceRate(found, known.problem, regime="strongly-convex")
    names: tuple[Quantity, ...] = ("gap", "distance")
    gap, distance = (rate.curve(rounds, step, start=5.0, quantity=name) for name in names)
    keep = 1 - known.mu * step * 2 / 2
    assert (mean_so_far(np.array(gaps), keep) <= gap).all()
    assert (np.array(distances) <= distance * (1 + 1e-12)).all()
    assert distances[-1] < distances[0]


def test_a_step_size_that_changes() -> None:
    found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle", "uniform:2")
    problem = ProblemConstants(L=1.0, mu=0.2, G=0.5, sigma=1.0)
    rate = ConvergenceRate(found, problem, regime="strongly-convex")
    for quantity in ("gap", "distance"):
        options: Any = {"start": 1.0, "quantity": quantity}
        same = rate.curve(30, 0.02, **options)
        again = rate.curve(30, lambda r: 0.02, **options)
        np.testing.assert_allclose(same, again)
        falling = schedules.inverse_time(0.02, 100)
        assert rate.curve(400, falling, **options)[-1] < same[-1]


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
    tuned = ConvergenceRate(found, problem, regime=regime).tune(rounds, start=1.0)
    assert tuned.bound <= paper * (1 + 1e-6)
    assert tuned.step_size <= limit.step_size * (1 + 1e-12)


@given(
    st.integers(0, 10**6),
    st.sampled_from(REGIMES),
    st.sampled_from([0.5, 0.05, 1e-4]),
)
def test_rounds_to_a_target_are_those_of_the_curve(
    seed: int, regime: Regime, epsilon: float
) -> None:
    rng = np.random.default_rng(seed)
    found = method_constants(Federation.from_sizes([1, 2, 3]), "fedshuffle", "uniform:2")
    problem = ProblemConstants(L=1.0, mu=0.3, G=0.1 * rng.random(), sigma=0.1)
    rate = ConvergenceRate(found, problem, regime=regime)
    best = rate.rounds_to(epsilon, start=1.0)
    assert best.bound <= epsilon * (1 + 1e-9)
    if best.rounds < 20_000:
        curve = rate.curve(best.rounds, best.step_size, start=1.0)
        assert curve[-1] == pytest.approx(best.bound, rel=1e-6)
        assert curve[-2] > epsilon * (1 - 1e-9)
    limit = largest_step_size(found, problem, bound="proof")
    for share in (1.0, 0.5, 0.1):  # no other step is faster
        other = rate.needed(epsilon, np.array([share * limit.effective]), 1.0)
        assert best.rounds <= math.ceil(float(other[0]) * (1 + 1e-6)) if other[0] < 1e9 else True


def test_bounds_refuse_what_is_not_proven() -> None:
    found = method_constants(Federation.from_sizes([1, 2]), "fedshuffle")
    problem = ProblemConstants(L=1.0)
    rate = ConvergenceRate(found, problem, regime="convex")
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("step size 3", lambda: rate.curve(5, 3.0, start=1.0)),
        ("mu", lambda: ConvergenceRate(found, problem, regime="strongly-convex")),
        ("concave", lambda: ConvergenceRate(found, problem, regime="concave")),  # type: ignore[arg-type]
        ("gradient", lambda: rate.curve(5, 0.1, start=1.0, quantity="gradient")),
        ("start", lambda: rate.curve(5, 0.1, start=-1.0)),
        ("rounds", lambda: rate.tune(0, start=1.0)),
        ("epsilon", lambda: rate.rounds_to(0.0, start=1.0)),
    ]
    for word, call in calls:
        with pytest.raises(FedShuffleError, match=word):
            call()


# Advice that is followed, and twenty times that -------------------------------------------------


def end(
    federation: Federation, step: float, rounds: int, method: str = "fedshuffle", **settings: Any
) -> Floats:
    """Where the library's training of ``1/2 |x - target|^2`` goes, from the origin."""
    d = federation.fields[0].shape[1]
    engine = SequentialEngine(Problem(Point(d), half_squared_distance, federation))
    run = Run(federation, method, settings.get("sampling", "full"), settings.get("work"), step)
    models = [state.x.numpy().copy() for (state,) in simulate(engine, [run], rounds)]
    return np.stack([np.zeros(d), *models])


def test_advice_that_is_followed_converges_and_twenty_times_it_does_not() -> None:
    """One eigenvalue at L, full participation: gradient descent, which needs ``eta L < 2``."""
    federation = Federation.from_arrays(torch.ones(2, 1, dtype=torch.float64), sizes=[1, 1])
    problem = ProblemConstants(L=1.0, mu=1.0)
    nearest = nearest_constants(federation, "fedshuffle")
    advice = step_advice(
        nearest, problem, method="fedshuffle", regime="strongly-convex", rounds=40, start=1.0,
        epsilon=1e-3,
    )  # fmt: skip
    rate = ConvergenceRate(nearest, problem, regime="strongly-convex")
    assert advice.tuned is not None
    for step in (advice.proof.step_size, advice.tuned.step_size):
        away = np.abs(end(federation, step, 40) - 1)[:, 0]
        assert away[-1] < 1e-3
        curve = rate.curve(40, step, start=1.0, quantity="distance")
        assert (away**2 <= curve * (1 + 1e-9)).all()
    away = np.abs(end(federation, 20 * advice.proof.step_size, 40) - 1)[:, 0]
    assert away[-1] > 1e6


def test_twenty_times_the_theorems_step_diverges_where_sampling_is_the_noise() -> None:
    """A client that comes with probability 0.2: ``E|x|^2`` shrinks iff ``eta L (1 + M) < 2``."""
    federation = Federation.from_sizes([1])
    sampling = Independent([0.2])
    found = method_constants(federation, "fedshuffle", sampling)
    assert pytest.approx(4.0) == found.M_1
    problem = ProblemConstants(L=1.0, mu=1.0)
    quadratic = Losses([np.eye(2)[None]], [np.zeros((1, 2))])
    for bound in ("theorem", "proof"):
        limit: StepLimit = largest_step_size(found, problem, bound=bound)
        grown = []
        for times in (1, 20):
            exact = expected_rounds(
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
    setting = nearest_constants(federation, "fedshuffle", "uniform:2")
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
    assert gaps[200:].mean() < advice.tuned.bound
    assert gaps[200:].mean() < 0.2 * gaps[0]


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
    rate = MVRRate(federation, known.problem, known.delta, LocalWork(epochs=epochs))
    x = known.x_star + rng.normal(size=2)
    start = 0.5 * float((x - known.x_star) @ problem.hessian(w) @ (x - known.x_star))
    tuned = rate.tune(300, start=start, bound="proof")
    limit = rate.limit(bound="proof")
    assert tuned.eta_l <= limit.eta_l * (1 + 1e-9)
    pairs = {(share * tuned.eta_l, tuned.a), (share * limit.eta_l, limit.a)}
    for eta_l, a in pairs:
        exact = with_mvr(problem, w, epochs, eta_l, a, 300, x)
        mean = np.cumsum(exact) / np.arange(1, 301)
        size = eta_l * epochs / rate.max_steps
        bound = rate.curve(300, size, a, start=start)
        assert (mean <= bound[1:] * (1 + 1e-9)).all()
    assert rate.curve(300, tuned.step_size, tuned.a, start=start)[-1] == pytest.approx(tuned.bound)


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
    rate = MVRRate(federation, problem, delta, LocalWork(epochs=epochs))
    tuned = rate.tune(rounds, start=1.0)
    eta, a = tuned.eta_l, tuned.a
    limit = rate.limit()
    assert eta <= limit.eta_l <= min(1 / 4, 1 / (40 * delta * epochs)) * (1 + 1e-12)
    if rounds == 1:
        return
    for error in (0.0, G**2):
        psi = 1.0 + 288 * eta / (23 * a) * epochs * error
        noise = float(federation.weights @ (sigma**2 / federation.sizes))
        printed = 5 * psi / (eta * rounds * epochs) + 25 * eta**2 * noise + 255 * a * G**2
        ours = rate.after(np.array(rounds), np.array(eta), np.array(a), 1.0, error)
        assert float(ours) <= printed
    assert rate.at(np.array(eta), np.array(a))[0] > 0.4
    if G > 0 or sigma > 0:
        best = rate.tune(rounds, start=1.0, bound="proof")
        assert best.bound <= tuned.bound * 1.01


def test_mvr_advice_that_is_followed_converges() -> None:
    targets = torch.from_numpy(3 + np.random.default_rng(1).normal(size=(6, 2)))
    federation = Federation.from_arrays(targets, sizes=[1, 2, 3])
    known = Losses(
        [np.broadcast_to(np.eye(2), (m, 2, 2)).copy() for m in (1, 2, 3)],
        np.split(targets.numpy(), [1, 3]),
    ).constants(federation.weights)
    assert known.delta == 0  # so that L alone is the limit
    rate = MVRRate(federation, known.problem, known.delta)
    start = 0.5 * float(known.x_star @ known.x_star)
    for bound in ("theorem", "proof"):
        tuned = rate.tune(200, start=start, bound=bound)
        method = f"fedshuffle-mvr:a={tuned.a}"
        models = end(federation, tuned.step_size, 200, method, sampling=One(federation.weights))
        gradients = ((models - known.x_star) ** 2).sum(1)
        assert gradients[:-1].mean() < tuned.bound
        assert gradients[150:].mean() < 0.1 * gradients[0]


def test_expected_rounds_of_mvr_are_what_the_library_trains() -> None:
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
        with pytest.raises(FedShuffleError, match="epochs"):
            MVRRate(federation, problem, 1.0, work)
    with pytest.raises(FedShuffleError, match="P"):
        MVRRate(federation, replace(problem, P=1.0), 1.0)
    with pytest.raises(FedShuffleError, match="delta"):
        MVRRate(federation, problem, -1.0)
    rate = MVRRate(federation, replace(problem, B=2.0), 1.0, LocalWork(epochs=3))
    with pytest.raises(FedShuffleError, match="B = 1"):
        rate.limit()
    assert rate.limit(bound="proof").a < 0.2
    plain = MVRRate(federation, problem, 1.0)
    with pytest.raises(FedShuffleError, match="step size"):
        plain.curve(10, 5.0, 0.5, start=1.0)
    with pytest.raises(FedShuffleError, match="a is"):
        plain.curve(10, 0.01, 2, start=1.0)
    with pytest.raises(FedShuffleError, match="start"):
        plain.tune(10, start=0.0)
    with pytest.raises(FedShuffleError, match="bound"):
        plain.limit(bound="hope")  # type: ignore[arg-type]
