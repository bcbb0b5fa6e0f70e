"""The theory's constants and step sizes against their definitions.

The convergence lemmas are held against exact expectations: quadratics, every cohort and every order
of the examples, written in numpy from the algorithm and without the library's training code.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import (
    AtMost,
    EpochRange,
    Federation,
    FedShuffleError,
    FedShuffleGen,
    LocalWork,
    RandomStop,
    audit,
    methods,
)
from fedshuffle.methods import EffectiveSteps, InclusionProbability, SumOne
from fedshuffle.methods.averaging import (
    Cohort,
    objective_weight,
    own_steps,
    steps_of_the_longest,
    weight_per_step,
)
from fedshuffle.sampling import Full, Independent, One, Sampling, Uniform, importance
from fedshuffle.theory import (
    Bound,
    ConvergenceRate,
    MethodConstants,
    ProblemConstants,
    StepLimit,
    drift_noise,
    largest_step_size,
    method_constants,
    smallest_s,
)
from tests import brute
from tests.brute import Floats
from tests.sampling.test_sampling import samplings

BOUNDS: tuple[Bound, ...] = ("theorem", "proof")
RHOS = [1.0, 1.3, 2.0, 5.0, np.inf]


def capped(rho: float) -> FedShuffleGen:
    """The family between FedNova (1) and FedShuffle (infinity), from its definition."""

    def c(clients: Cohort) -> Floats:
        return np.maximum(clients.planned, clients.max_steps / rho).astype(float)

    def weight(clients: Cohort) -> Floats:
        return clients.weight * c(clients) / clients.done

    return FedShuffleGen(c, weight, InclusionProbability())


RULES = {
    "fedavg": FedShuffleGen(steps_of_the_longest, objective_weight, SumOne()),
    "fednova": FedShuffleGen(steps_of_the_longest, weight_per_step, SumOne()),
    "fednova-original": FedShuffleGen(steps_of_the_longest, weight_per_step, EffectiveSteps()),
    "fedshuffle": FedShuffleGen(own_steps, objective_weight, InclusionProbability()),
    "fedshuffle-so": FedShuffleGen(own_steps, objective_weight, SumOne()),
    "capped-1": capped(1.0),
    "capped-2": capped(2.0),
}

rules = st.sampled_from(sorted(RULES)).map(RULES.__getitem__)


def by_definition(
    rule: FedShuffleGen, federation: Federation, sampling: Sampling, steps: Floats
) -> tuple[Floats, Floats, Floats]:
    """``1/q``, H and the contribution ``w-tilde tau / (q c)`` by definition, cohort by cohort."""
    n, planned = len(sampling), steps.astype(int)
    inverse, moments = np.zeros(n), np.zeros((n, n))
    weight, c = np.zeros(n), np.zeros(n)
    for cohort, probability in brute.cohorts(sampling):
        members = np.array(cohort, dtype=int)
        if not len(members):
            continue
        clients = Cohort(
            members,
            federation.weights[members],
            sampling.p[members],
            planned[members],
            planned[members],
            int(planned.max()),
        )
        weight[members] = rule.weight(clients)
        c[members] = rule.step_normalisation(clients)
        v = np.zeros(n)
        v[members] = rule.normaliser.divide(weight[members], clients) / weight[members]
        inverse += probability * v
        moments += probability * np.outer(v, v)
    return inverse, moments / np.outer(inverse, inverse), weight * inverse * steps / c


def is_valid_s(s: Floats, moments: Sampling | Floats) -> bool:
    """Whether ``H - e e^T <= Diag(h_i s_i)``, up to rounding."""
    if isinstance(moments, Sampling):
        moments = moments.pair_probabilities() / np.outer(moments.p, moments.p)
    root = 1.0 / np.sqrt(np.diag(moments))
    gap = np.diag(s) - root[:, None] * (moments - 1.0) * root
    return bool(np.linalg.eigvalsh(gap)[0] >= -1e-9)


# Constants ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(samplings(), rules, st.integers(0, 10**6))
def test_constants_are_their_definitions(
    sampling: Sampling, rule: FedShuffleGen, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = len(sampling)
    sizes, epochs = rng.integers(1, 6, n), rng.integers(1, 4, n)
    federation = Federation.from_sizes(sizes, weights=rng.random(n) + 0.1)
    steps = (sizes * epochs).astype(float)
    found = method_constants(federation, rule, sampling, LocalWork(epochs=epochs.tolist()))
    _, moments, contribution = by_definition(rule, federation, sampling, steps)
    np.testing.assert_allclose(found.W, contribution.sum(), rtol=1e-12)
    np.testing.assert_allclose(found.w_hat, contribution / contribution.sum(), rtol=1e-12)
    np.testing.assert_allclose(found.h, np.diag(moments), rtol=1e-12)
    assert is_valid_s(found.s, moments)
    assert pytest.approx((found.h * found.s * found.w_hat).max(), rel=1e-12) == found.M_1
    per_step = contribution / steps
    assert pytest.approx(steps.sum() * per_step.max() / contribution.sum(), rel=1e-12) == found.M_2
    assert found.M_2 >= 1 - 1e-12
    # The smallest M_1 that any s can give is this eigenvalue, and s by enumeration reaches it.
    root = np.sqrt(found.w_hat)
    least = max(0.0, float(np.linalg.eigvalsh(root[:, None] * (moments - 1) * root)[-1]))
    assert least - 1e-9 <= found.M_1
    if found.how == "enumeration":
        assert pytest.approx(least, abs=1e-9) == found.M_1


@settings(max_examples=40)
@given(samplings(), rules, st.integers(0, 10**6))
def test_w_hat_is_what_the_audit_finds(sampling: Sampling, rule: FedShuffleGen, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = len(sampling)
    federation = Federation.from_sizes(rng.integers(1, 6, n), weights=rng.random(n) + 0.1)
    found = method_constants(federation, rule, sampling)
    result = audit(federation, methods.Method("rule", "", rule), sampling)
    np.testing.assert_allclose(found.w_hat, result.effective_weights, rtol=1e-8)


def test_m_in_the_papers_special_cases() -> None:
    federation = Federation.from_sizes([1, 2, 3, 4])
    w = federation.weights
    n, b = 4, 2

    def m(sampling: Sampling) -> float:
        return method_constants(federation, "fedshuffle", sampling).M_1

    assert m(Full(n)) == 0
    assert m(Uniform(n, b)) == pytest.approx((n - b) / (n - 1) * n / b * w.max())
    assert m(importance(federation.sizes, b)) == pytest.approx((1 - b * w.min()) / b)
    assert m(importance(federation.sizes, 1)) == pytest.approx(1 - w.min())
    assert m(One(w)) == pytest.approx(1)
    p = np.array([0.2, 0.9, 1.0, 0.5])
    assert m(Independent(p)) == pytest.approx(((1 - p) / p * w).max())


def test_fedshuffle_is_normalised_and_weighs_every_step_alike() -> None:
    federation = Federation.from_sizes([1, 2, 3, 4])
    found = method_constants(federation, "fedshuffle", "uniform:2", LocalWork(epochs=3))
    assert pytest.approx(1) == found.W
    assert pytest.approx(1) == found.M_2
    np.testing.assert_allclose(found.shares, 1)
    assert found.how == "closed form"
    # FedAvg under full participation: (1, 4, 9, 16) / 30, and the mean of tau / tau_max.
    average = method_constants(federation, "fedavg-rr")
    np.testing.assert_allclose(average.w_hat * 30, [1, 4, 9, 16])
    assert pytest.approx(float(federation.weights @ federation.sizes) / 4) == average.W


def test_closed_forms_serve_many_clients() -> None:
    n = 200_000
    sizes = np.random.default_rng(0).integers(1, 300, n)
    found = method_constants(Federation.from_sizes(sizes), "fedshuffle", "uniform:100")
    assert pytest.approx((n - 100) / (n - 1) * n / 100 * sizes.max() / sizes.sum()) == found.M_1


def test_constants_of_unfinished_work() -> None:
    federation = Federation.from_sizes([1, 2, 4])
    work = LocalWork(interruption=AtMost(3))
    hybrid = method_constants(federation, "fedshuffle-gen", "uniform:2", work)
    np.testing.assert_allclose(hybrid.w_hat, federation.weights)
    assert hybrid.tau.tolist() == [1, 2, 3]
    assert "whole epochs" in hybrid.obstacle


@pytest.mark.parametrize(
    ("method", "sampling", "work", "said"),
    [
        ("fedshuffle", "full", LocalWork(epochs=EpochRange(1, 2)), "range"),
        ("fedavg-min", "uniform:2", LocalWork(), "cohort"),
        ("fedshuffle", "full", LocalWork(interruption=RandomStop(0.5)), "random"),
        ("fedshuffle-mvr", "full", LocalWork(), "fedshuffle-mvr"),
        ("fedadam", "full", LocalWork(), "fedadam"),
        ("fedshuffle", "optimal:1", LocalWork(), "optimal:1"),
    ],
)
def test_what_the_theorem_does_not_cover(
    method: str, sampling: str, work: LocalWork, said: str
) -> None:
    with pytest.raises(FedShuffleError, match=said):
        method_constants(Federation.from_sizes([1, 2, 3]), method, sampling, work)


def test_cohorts_that_cannot_be_listed() -> None:
    with pytest.raises(FedShuffleError, match="too many"):
        method_constants(Federation.from_sizes([1] * 40), "fedavg-rr", "uniform:20")
    with pytest.raises(FedShuffleError, match="2000"):
        smallest_s(Uniform(2000, 2))
    assert method_constants(Federation.from_sizes([1, 2]), "fedavg-min", "one").tau.tolist() == [
        1,
        2,
    ]
    assert method_constants(Federation.from_sizes([1, 2]), "fedavg-min").tau.tolist() == [1, 1]


# The matrix inequality and the variance lemma ----------------------------------------------------


@given(samplings())
def test_s_of_every_sampling_is_valid_and_the_smallest_no_larger(sampling: Sampling) -> None:
    assert is_valid_s(sampling.s, sampling)
    least = smallest_s(sampling)
    assert is_valid_s(least, sampling)
    assert least[0] <= sampling.s.max() + 1e-9
    if least[0] > 1e-6:
        assert not is_valid_s(0.999 * least, sampling)


def test_s_by_hand() -> None:
    np.testing.assert_allclose(smallest_s(Full(4)), 0, atol=1e-12)
    np.testing.assert_allclose(smallest_s(Uniform(5, 2)), (5 - 2) / (5 - 1))
    p = np.array([0.2, 0.9, 0.5])
    np.testing.assert_allclose(smallest_s(Independent(p)), 0.8)
    np.testing.assert_allclose(smallest_s(One(np.array([0.3, 0.7]))), 1)
    with pytest.raises(FedShuffleError, match="weights"):
        smallest_s(Full(2), [1.0])


@settings(max_examples=60)
@given(samplings(), st.integers(0, 10**6))
def test_sampling_variance_lemma(sampling: Sampling, seed: int) -> None:
    """``E |sum_S (w_i/p_i) z_i - sum w_i z_i|^2 <= sum w_i^2 (s_i/p_i) |z_i|^2``, for the s that
    the sampling states.
    """
    rng = np.random.default_rng(seed)
    n = len(sampling)
    w = rng.random(n) + 0.05
    w /= w.sum()
    z = rng.normal(size=(n, 3)) * rng.integers(0, 2, (n, 1))
    variance = sum(
        probability * float(np.square((w / sampling.p)[list(S)] @ z[list(S)] - w @ z).sum())
        for S, probability in brute.cohorts(sampling)
    )
    bound = float(np.sum(w**2 * sampling.s / sampling.p * np.square(z).sum(axis=1)))
    assert variance <= bound * (1 + 1e-9) + 1e-12


@settings(max_examples=30)
@given(st.integers(2, 6), st.data())
def test_sampling_without_replacement_lemma(n: int, data: st.DataObject) -> None:
    """The mean of the first k examples of a random order has the variance
    ``(n - k) / (k (n - 1)) sigma^2``; the minibatches of an epoch are drawn like that.
    """
    k = data.draw(st.integers(1, n))
    z = np.random.default_rng(data.draw(st.integers(0, 10**6))).normal(size=(n, 2))
    sigma2 = float(np.square(z - z.mean(axis=0)).sum(axis=1).mean())
    means = np.array(
        [z[list(order[:k])].mean(axis=0) for order in itertools.permutations(range(n))]
    )
    np.testing.assert_allclose(means.mean(axis=0), z.mean(axis=0), atol=1e-12)
    variance = float(np.square(means - z.mean(axis=0)).sum(axis=1).mean())
    assert math.isclose(variance, (n - k) / (k * (n - 1)) * sigma2, rel_tol=1e-9, abs_tol=1e-12)


@settings(max_examples=60)
@given(samplings(), rules, st.integers(0, 10**6))
def test_general_variance_lemma(sampling: Sampling, rule: FedShuffleGen, seed: int) -> None:
    """``E |sum_S u_i z_i / q_i^S - sum u_i z_i / q_i|^2 <= sum h_i s_i |u_i z_i / q_i|^2``."""
    rng = np.random.default_rng(seed)
    n = len(sampling)
    sizes = rng.integers(1, 6, n)
    federation = Federation.from_sizes(sizes, weights=rng.random(n) + 0.1)
    found = method_constants(federation, rule, sampling)
    inverse, _, _ = by_definition(rule, federation, sampling, sizes.astype(float))
    z = rng.normal(size=(n, 3)) * rng.random((n, 1)) * rng.integers(0, 2, (n, 1))
    mean = inverse @ z
    variance = 0.0
    for cohort, probability in brute.cohorts(sampling):
        members = np.array(cohort, dtype=int)
        total = np.zeros(3)
        if len(members):
            clients = Cohort(
                members,
                federation.weights[members],
                sampling.p[members],
                sizes[members],
                sizes[members],
                int(sizes.max()),
            )
            weight = rule.weight(clients)
            total = (rule.normaliser.divide(weight, clients) / weight) @ z[members]
        variance += probability * float(((total - mean) ** 2).sum())
    bound = float(found.h * found.s @ ((inverse[:, None] * z) ** 2).sum(1))
    assert variance <= bound * (1 + 1e-9) + 1e-9


# One round, exactly ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratics:
    """Client i holds points b_ij: ``f_ij(x) = a_i / 2 |x - b_ij|^2``."""

    curvature: Floats
    points: list[Floats]

    @classmethod
    def random(cls, sizes: list[int], seed: int, scale: float = 1.0) -> "Quadratics":
        rng = np.random.default_rng(seed)
        points = [2 * rng.normal(size=2) + rng.normal(size=(m, 2)) for m in sizes]
        return cls(scale * rng.uniform(0.3, 1.0, len(sizes)), points)

    def optimum(self, w: Floats) -> Floats:
        means = np.array([b.mean(0) for b in self.points])
        best: Floats = (w * self.curvature) @ means / float(w @ self.curvature)
        return best

    def value(self, w: Floats, x: Floats) -> float:
        each = [a / 2 * ((x - b) ** 2).sum(1).mean() for a, b in zip(self.curvature, self.points)]
        return float(w @ np.array(each))

    def constants(self, w: Floats) -> ProblemConstants:
        """Constants for which every assumption holds: ``|u|^2 <= 2 |u - v|^2 + 2 |v|^2`` with v the
        gradients at the optimum, and ``sum w |u - v|^2 <= 2 L (f - f*)``; P = 0 as every client's
        losses have one Hessian.
        """
        best = self.optimum(w)
        grads = [a * (best - b.mean(0)) for a, b in zip(self.curvature, self.points)]
        sigma = [
            a * math.sqrt(((b - b.mean(0)) ** 2).sum(1).mean())
            for a, b in zip(self.curvature, self.points)
        ]
        return ProblemConstants(
            L=float(self.curvature.max()),
            mu=float(self.curvature.min()),
            B=math.sqrt(2),
            G=math.sqrt(2 * float(w @ np.array([g @ g for g in grads]))),
            sigma=sigma,
        )


@dataclass(frozen=True)
class LocalUpdate:
    """One client's update over all orders of its examples: mean, variance, and its drift."""

    mean: Floats
    variance: float
    drift: float
    """``sum over steps of E |y - x|^2``, before each step."""


def local_update(a: float, points: Floats, epochs: int, gamma: float, x: Floats) -> LocalUpdate:
    orders = list(itertools.permutations(range(len(points))))
    ends, drift = [], 0.0
    for plan in itertools.product(orders, repeat=epochs):
        y = x.copy()
        for j in itertools.chain(*plan):
            drift += float((y - x) @ (y - x))
            y = y - gamma * a * (y - points[j])
        ends.append(y - x)
    updates = np.array(ends)
    mean = updates.mean(0)
    return LocalUpdate(mean, float(((updates - mean) ** 2).sum(1).mean()), drift / len(ends))


def one_round(
    rule: FedShuffleGen,
    federation: Federation,
    sampling: Sampling,
    quadratics: Quadratics,
    epochs: list[int],
    found: MethodConstants,
    limit: StepLimit,
    x: Floats,
    server_step_size: float = 1.0,
) -> tuple[float, float]:
    """``E |x^+ - x-hat|^2`` over all cohorts and orders, and the drift xi."""
    steps = federation.sizes * np.array(epochs)
    best = quadratics.optimum(found.w_hat)
    updates = [
        local_update(a, b, e, limit.eta_l / c, x)
        for a, b, e, c in zip(quadratics.curvature, quadratics.points, epochs, found.c)
    ]
    expected = 0.0
    for cohort, probability in brute.cohorts(sampling):
        members = np.array(cohort, dtype=int)
        move, variance = np.zeros_like(x), 0.0
        if len(members):
            clients = Cohort(
                members,
                federation.weights[members],
                sampling.p[members],
                steps[members],
                steps[members],
                int(steps.max()),
            )
            for i, weight in zip(cohort, rule.normaliser.divide(rule.weight(clients), clients)):
                move = move + server_step_size * weight * updates[i].mean
                variance += (server_step_size * weight) ** 2 * updates[i].variance
        expected += probability * (float(((x + move - best) ** 2).sum()) + variance)
    per_step = found.w_hat / steps
    return expected, float(per_step @ np.array([update.drift for update in updates]))


@settings(max_examples=80)
@given(
    samplings().filter(lambda sampling: len(sampling) <= 4),
    rules,
    st.integers(0, 10**6),
    st.sampled_from([0.2, 1.0, 3.0]),
    st.sampled_from([1.0, 40.0]),
    st.sampled_from(BOUNDS),
)
def test_one_round_makes_the_progress_that_the_proof_promises(
    sampling: Sampling,
    rule: FedShuffleGen,
    seed: int,
    server_step_size: float,
    scale: float,
    bound: Bound,
) -> None:
    rng = np.random.default_rng(seed)
    n = len(sampling)
    sizes, epochs = rng.integers(1, 4, n), rng.integers(1, 3, n)
    federation = Federation.from_sizes(sizes, weights=rng.random(n) + 0.1)
    quadratics = Quadratics.random(sizes.tolist(), seed, scale)
    found = method_constants(federation, rule, sampling, LocalWork(epochs=epochs.tolist()))
    problem = quadratics.constants(found.w_hat)
    limit = largest_step_size(found, problem, server_step_size=server_step_size, bound=bound)
    best = quadratics.optimum(found.w_hat)
    rate = ConvergenceRate(
        found, problem, regime="strongly-convex", server_step_size=server_step_size
    )
    for distance in (0.0, 0.1, 3.0):
        x = best + distance * rng.normal(size=2)
        after, drift = one_round(
            rule, federation, sampling, quadratics, epochs.tolist(), found, limit, x,
            server_step_size,
        )  # fmt: skip
        squared = float(((x - best) ** 2).sum())
        gap = quadratics.value(found.w_hat, x) - quadratics.value(found.w_hat, best)
        moved = limit.effective
        # Lemma "one round progress", with the drift as it is.
        progress = (
            (1 - problem.mu * moved / 2) * squared
            - moved * gap
            + 3 * problem.L * moved * drift
            + 2 * moved**2 * found.M_1 * problem.G**2
        )
        assert after <= progress * (1 + 1e-9) + 1e-12
        # Lemma "bounded drift", with the L that the paper drops.
        noise = drift_noise(found, problem, bound=bound)
        assert 3 * problem.L * drift <= 0.9 * gap + 9 * problem.L * limit.eta_l**2 * noise + 1e-12
        # Both together, without rounding.
        keep, gain, cost = rate.at(np.array(moved))
        assert after <= (keep * squared - gain * gap + cost) * (1 + 1e-9) + 1e-12
        assert gain >= moved / 10 * (1 - 1e-9)


@settings(max_examples=40)
@given(
    samplings().filter(lambda sampling: len(sampling) <= 4),
    rules,
    st.integers(0, 10**6),
    st.sampled_from([1.0, 40.0]),
)
def test_one_round_descends_as_the_non_convex_proof_promises(
    sampling: Sampling, rule: FedShuffleGen, seed: int, scale: float
) -> None:
    """``E f(x^+) <= f(x) - eta/8 |grad f|^2 + eta^2 M_1 G^2 L + 9/4 L^2 eta eta_l^2 N``."""
    rng = np.random.default_rng(seed)
    n = len(sampling)
    sizes = rng.integers(1, 4, n)
    federation = Federation.from_sizes(sizes, weights=rng.random(n) + 0.1)
    quadratics = Quadratics.random(sizes.tolist(), seed, scale)
    found = method_constants(federation, rule, sampling)
    w, a = found.w_hat, quadratics.curvature
    mean = float(w @ a)  # of f-hat, which is mean / 2 |x - x-hat|^2 and a constant
    likeness = math.sqrt(2 * float(w @ a**2)) / mean
    problem = dataclasses.replace(quadratics.constants(w), B=likeness, mu=0.0)
    best = quadratics.optimum(w)
    for bound in BOUNDS:
        limit = largest_step_size(found, problem, bound=bound)
        noise = drift_noise(found, problem, bound=bound)
        moved = limit.effective
        for distance in (0.0, 0.3, 3.0):
            x = best + distance * rng.normal(size=2)
            ones = [1] * n
            after, _ = one_round(rule, federation, sampling, quadratics, ones, found, limit, x)
            squared = float(((x - best) ** 2).sum())
            promised = (
                mean / 2 * squared
                - moved / 8 * mean**2 * squared
                + moved**2 * found.M_1 * problem.G**2 * problem.L
                + 9 / 4 * problem.L**2 * moved * limit.eta_l**2 * noise
            )
            assert mean / 2 * after <= promised * (1 + 1e-9) + 1e-12


# Slips of the paper, each with a case where the printed statement fails --------------------------


def test_the_drift_bound_needs_its_factor_l() -> None:
    """Printed without L, the bound on the drift fails for large L at the optimum."""
    quadratics = Quadratics(np.full(2, 40.0), [np.full((3, 1), -1.0), np.full((3, 1), 1.0)])
    federation = Federation.from_sizes([3, 3])
    rule = RULES["fedshuffle"]
    found = method_constants(federation, rule)
    problem = ProblemConstants(L=40.0, mu=40.0, G=40.0)  # B = 1, and one example is like another
    limit = largest_step_size(found, problem)
    best = quadratics.optimum(found.w_hat)
    _, drift = one_round(rule, federation, Full(2), quadratics, [1, 1], found, limit, best)
    noise = drift_noise(found, problem)
    assert 3 * problem.L * drift > 9 * limit.eta_l**2 * noise
    assert 3 * problem.L * drift <= 9 * problem.L * limit.eta_l**2 * noise


def test_the_limit_needs_its_factor_w() -> None:
    """Weights times 100: the printed ``eta_l <= 1 / (4 beta L eta_g)`` then diverges."""

    def hundredfold(clients: Cohort) -> Floats:
        return 100 * clients.weight

    federation = Federation.from_sizes([1, 1])
    rule = FedShuffleGen(own_steps, hundredfold, InclusionProbability())
    found = method_constants(federation, rule)
    plain = method_constants(federation, RULES["fedshuffle"])
    assert pytest.approx(100) == found.W
    problem = ProblemConstants(L=1.0, mu=1.0)
    limit = largest_step_size(found, problem)
    printed = 1 / (4 * (1 + found.M_2 + 1) * 1.0)
    assert abs(1 - found.W * printed) > 1  # one step of gradient descent on |x|^2 / 2
    assert limit.effective == pytest.approx(largest_step_size(plain, problem).effective)


def test_m_2_can_exceed_what_the_non_convex_proof_allows() -> None:
    """It needs ``M_2 / 2 + (M_1 + M_2) L eta <= 3/4``, which no step size gives for M_2 > 1.5."""
    federation = Federation.from_sizes([1, 9], weights=[0.5, 0.5])
    assert pytest.approx(10 * 0.5) == method_constants(federation, "fedshuffle").M_2


@given(st.integers(0, 10**6))
def test_jensen_needs_no_m_2(seed: int) -> None:
    """``|sum v_k z_k|^2 <= sum v_k |z_k|^2`` for weights that sum to one: 1 serves for M_2."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    sizes = rng.integers(1, 5, n)
    federation = Federation.from_sizes(sizes, weights=rng.random(n) + 0.01)
    found = method_constants(federation, RULES["fedavg"])
    v = np.repeat(found.w_hat / found.tau, found.tau)
    z = rng.normal(size=(len(v), 2))
    assert v.sum() == pytest.approx(1)
    assert ((v @ z) ** 2).sum() <= v @ (z**2).sum(1) + 1e-12


# Step sizes --------------------------------------------------------------------------------------


def test_the_limit_by_hand() -> None:
    federation = Federation.from_sizes([1, 2, 5])
    work = LocalWork(epochs=2)
    found = method_constants(federation, "fedshuffle", "uniform:2", work)
    problem = ProblemConstants(L=3.0, B=2.0, P=[0.0, 1.0, 6.0])
    m = 0.5 * 3 / 2 * 5 / 8
    p = math.sqrt(max(1 / (3 * 2 * 4), 36 / (3 * 5 * 4)))
    beta = 1 + 1 + (1 + p) * 2 + m * 4
    limit = largest_step_size(found, problem, server_step_size=1.5)
    assert limit.eta_l == pytest.approx(1 / (4 * beta * 3 * 1.5))
    assert limit.step_size == pytest.approx(limit.eta_l / 10)
    assert limit.largest_client_step == pytest.approx(limit.eta_l / 2)
    assert limit.effective == pytest.approx(1.5 * limit.eta_l)
    # A small server step does not allow drift.
    small = largest_step_size(found, problem, server_step_size=0.1)
    assert small.eta_l == pytest.approx(1 / (4 * beta * 3))
    assert largest_step_size(found, problem, bound="proof").binding == "progress"
    assert largest_step_size(found, problem, server_step_size=0.1, bound="proof").binding == "drift"


@given(rules, st.integers(0, 10**6), st.floats(0.1, 5))
def test_the_proof_allows_no_less_than_the_theorem(
    rule: FedShuffleGen, seed: int, server_step_size: float
) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, 4)
    federation = Federation.from_sizes(sizes, weights=rng.random(4) + 0.1)
    found = method_constants(federation, rule, "uniform:2")
    problem = ProblemConstants(L=2.0, G=1.0, B=1 + rng.random(), P=3 * rng.random(4), sigma=1.0)
    limits = [
        largest_step_size(found, problem, server_step_size=server_step_size, bound=bound).eta_l
        for bound in BOUNDS
    ]
    assert limits[0] <= limits[1] * (1 + 1e-12)
    assert drift_noise(found, problem, bound="proof") <= drift_noise(found, problem) * (1 + 1e-12)


def test_limits_refuse_what_is_not_covered() -> None:
    federation = Federation.from_sizes([1, 2, 3])
    problem = ProblemConstants(L=1.0)
    for method, work in (
        ("fedavg", LocalWork()),
        ("fedshuffle", LocalWork(clip=1.0)),
        ("fedshuffle", LocalWork(interruption=AtMost(2))),
        ("fedshuffle", LocalWork(steps=2)),
    ):
        found = method_constants(federation, method, "full", work)
        with pytest.raises(FedShuffleError, match="theorem"):
            largest_step_size(found, problem)

    def ones(clients: Cohort) -> Floats:
        return np.ones(clients.planned.shape)

    short = method_constants(
        federation, FedShuffleGen(ones, objective_weight, InclusionProbability())
    )
    with pytest.raises(FedShuffleError, match="client 1"):
        largest_step_size(short, problem)
    assert largest_step_size(short, problem, bound="proof").eta_l < 1 / 3
    found = method_constants(federation, "fedshuffle")
    with pytest.raises(FedShuffleError, match="bound"):
        largest_step_size(found, problem, bound="guess")  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match="server_step_size"):
        largest_step_size(found, problem, server_step_size=0.0)
    with pytest.raises(FedShuffleError, match="P"):
        largest_step_size(found, ProblemConstants(L=1.0, P=[1.0, 2.0]))
    for bad in ({"L": 0.0}, {"L": 1.0, "B": 0.5}, {"L": 1.0, "mu": 2.0}, {"L": 1.0, "P": -1.0}):
        with pytest.raises(FedShuffleError, match=r"must be|no more than"):
            ProblemConstants(**bad)


# The family between FedNova and FedShuffle -------------------------------------------------------


@settings(max_examples=40)
@given(samplings(), st.integers(0, 10**6), st.sampled_from(BOUNDS))
def test_the_cap_changes_neither_the_limit_nor_what_a_step_counts(
    sampling: Sampling, seed: int, bound: Bound
) -> None:
    rng = np.random.default_rng(seed)
    n = len(sampling)
    sizes, epochs = rng.integers(1, 9, n), rng.integers(1, 3, n).tolist()
    federation = Federation.from_sizes(sizes, weights=rng.random(n) + 0.1)
    work = LocalWork(epochs=epochs)
    steps = sizes * np.array(epochs)
    problem = ProblemConstants(L=2.0, G=1.0, B=1.5, P=4 * rng.random(n), sigma=rng.random(n))
    plain = method_constants(federation, "fedshuffle", sampling, work)
    limits, noises = [], []
    for rho in RHOS:
        found = method_constants(federation, f"fedshuffle-capped:rho={rho}", sampling, work)
        by_hand = method_constants(federation, capped(rho), sampling, work)
        limits.append(largest_step_size(found, problem, bound=bound))
        noises.append(drift_noise(found, problem, bound=bound))
        again = largest_step_size(by_hand, problem, bound=bound)
        assert limits[-1].eta_l == pytest.approx(again.eta_l, rel=1e-12)
        assert noises[-1] == pytest.approx(drift_noise(by_hand, problem, bound=bound), rel=1e-12)
        np.testing.assert_allclose(found.w_hat, federation.weights, rtol=1e-12)
        assert pytest.approx((1, plain.M_1, plain.M_2)) == (found.W, found.M_1, found.M_2)

    ours = largest_step_size(plain, problem, bound=bound)
    assert limits[-1].step_size == pytest.approx(ours.step_size, rel=1e-12)
    widest = steps.max() / steps.min()
    ratios = [limit.largest_client_step / limit.step_size for limit in limits]
    np.testing.assert_allclose(ratios, np.minimum(RHOS, widest), rtol=1e-12)
    eta_l = [limit.eta_l for limit in limits]
    if bound == "theorem":
        np.testing.assert_allclose(eta_l, eta_l[0], rtol=1e-12)
        np.testing.assert_allclose(noises, noises[0], rtol=1e-12)
    assert (np.diff(eta_l) <= 1e-12).all()
    assert (np.diff(noises) >= -1e-12).all()


def test_the_proof_sees_rho_where_a_short_client_varies_much() -> None:
    federation = Federation.from_sizes([2, 20])
    problem = ProblemConstants(L=1.0, P=[20.0, 0.0])
    few, some, all_ = (
        largest_step_size(method_constants(federation, capped(rho)), problem, bound="proof").eta_l
        for rho in (1, 5, np.inf)
    )
    assert few > some > all_


def test_norms_cannot_see_what_equal_drift_cancels() -> None:
    """Equal Hessians, full participation: the fixed point moves least for FedShuffle.

    Client i has tau_i copies of one point, so its update goes ``1 - (1 - gamma_i)^tau_i`` of the
    way to it, and the fixed point weights it by that times its aggregation weight.
    """
    tau = np.array([4, 20, 100])
    w = tau / tau.sum()
    clients = Cohort(np.arange(3), w, np.ones(3), tau, tau, 100)
    step_size = 0.25 / 100

    def shift(rho: float) -> float:
        rule = capped(rho)
        way = 1 - (1 - step_size * rule.step_scale(clients)) ** tau
        moved = rule.aggregation_weights(clients) * way
        return 0.5 * float(np.abs(moved / moved.sum() - w).sum())

    shifts = [shift(rho) for rho in (1.0, 2.0, 5.0, 25.0)]
    assert shifts == sorted(shifts, reverse=True)
    assert shifts[-1] < shifts[0] / 3
