"""The constants of problems: those known in closed form against autograd, and estimates of them."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.autograd.functional import hessian as full_hessian
from torch.nn import functional

from fedshuffle import Federation, FedShuffleError, losses, models
from fedshuffle.theory import (
    EstimatedConstants,
    ExactConstants,
    largest_step_size,
    linear_regression_constants,
    logistic_regression_constants,
    method_constants,
    problem_constants,
    quadratic_constants,
)
from fedshuffle.theory.estimation import spectrum_ends
from fedshuffle.theory.exact import ConstantsRequest, QuadraticForm, max_on_ball, smallest_bound
from tests.brute import Floats

SIZES = [1, 2, 4, 3]
EVERYTHING: dict[str, Any] = {
    "minibatches": 99, "delta_clients": 99, "iterations": 99, "tolerance": 1e-9
}  # fmt: skip
Each = Callable[[Tensor], Tensor]
"""The losses of all examples at a model."""


@dataclass(frozen=True)
class Known:
    """A problem by its losses, from which torch gets all derivatives, and its constants."""

    each: Each
    d: int
    constants: Callable[..., ExactConstants]
    """With the options."""

    def gradients(self, x: Floats) -> list[Floats]:
        """A table for each client."""
        found = torch.func.jacrev(self.each)(torch.from_numpy(x)).numpy()
        return np.split(found, np.cumsum(SIZES)[:-1])

    def hessians(self, x: Floats) -> list[Floats]:
        found = torch.func.jacrev(torch.func.jacrev(self.each))(torch.from_numpy(x)).numpy()
        return np.split(found, np.cumsum(SIZES)[:-1])

    def objective(self, x: Floats, w: Floats) -> float:
        values = np.split(self.each(torch.from_numpy(x)).numpy(), np.cumsum(SIZES)[:-1])
        return float(sum(share * own.mean() for share, own in zip(w, values, strict=True)))


def drawn(kind: str, seed: int, l2: float = 0.1, d: int = 2) -> Known:
    """Random data; sometimes with clients that span less than the space."""
    rng = np.random.default_rng(seed)
    rows = sum(SIZES)
    if kind == "quadratic":
        roots = rng.normal(size=(rows, d, d)) * rng.uniform(0.3, 2, size=(rows, 1, 1))
        matrices, optima = roots @ np.swapaxes(roots, 1, 2), rng.normal(size=(rows, d))
        a, m = torch.from_numpy(matrices), torch.from_numpy(optima)

        def quadratics(x: Tensor) -> Tensor:
            return 0.5 * torch.einsum("ja,jab,jb->j", x - m, a, x - m)

        return Known(
            quadratics, d, lambda **o: quadratic_constants(matrices, optima, sizes=SIZES, **o)
        )
    features = rng.normal(size=(rows, d)) * rng.uniform(0.3, 2, size=(rows, 1))
    a, bias = torch.from_numpy(features), bool(seed % 2)
    if kind == "linear":
        targets = rng.normal(size=rows)
        data = Federation.from_arrays(features, targets, sizes=SIZES)
        t = torch.from_numpy(targets)

        def squares(x: Tensor) -> Tensor:
            shift = x[d] if bias else 0.0
            return 0.5 * (a @ x[:d] + shift - t) ** 2 + 0.5 * l2 * (x @ x)

        return Known(
            squares,
            d + bias,
            lambda **o: linear_regression_constants(data, l2=l2, bias=bias, **o),
        )
    classes = 3 if kind == "softmax" else None
    k = classes or 1
    labels = rng.integers(classes or 2, size=rows)
    data = Federation.from_arrays(features, labels, sizes=SIZES)
    y = torch.from_numpy(labels)

    def logistic(x: Tensor) -> Tensor:
        z = a @ x[: k * d].reshape(k, d).T + (x[k * d :] if bias else 0.0)
        if classes:
            values = functional.cross_entropy(z, y, reduction="none")
        else:
            values = functional.binary_cross_entropy_with_logits(
                z[:, 0], y.double(), reduction="none"
            )
        return values + 0.5 * l2 * (x @ x)

    return Known(
        logistic,
        k * (d + bias),
        lambda **o: logistic_regression_constants(data, l2=l2, bias=bias, classes=classes, **o),
    )


KINDS = ["quadratic", "linear", "binary", "softmax"]


def means(parts: list[Floats]) -> Floats:
    return np.stack([own.mean(axis=0) for own in parts])


@settings(max_examples=50)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    form=st.sampled_from(["gradient", "convex"]),
    ball=st.booleans(),
    factor=st.sampled_from([None, 1.0, 1.5]),
    weighted=st.booleans(),
    l2=st.sampled_from([0.0, 0.1]),
    d=st.sampled_from([1, 2, 3]),
)
def test_every_assumption_holds(
    kind: str,
    seed: int,
    form: str,
    ball: bool,
    factor: float | None,
    weighted: bool,
    l2: float,
    d: int,
) -> None:
    affine = kind in ("quadratic", "linear")
    problem = drawn(kind, seed, l2 if affine else 0.1, d)  # else there may be no minimum
    rng = np.random.default_rng(seed + 1)
    w = rng.dirichlet(np.ones(4)) + 0.01 if weighted else np.array(SIZES, dtype=float)
    w = w / w.sum()
    radius = float(10 ** rng.uniform(-2, 1)) if ball else None
    options: dict[str, Any] = {"w_hat": w, "form": form, "radius": radius}
    found = problem.constants(**options)
    if factor is not None and (not affine or ball):
        found = problem.constants(**options, B=factor)
    elif factor is not None:  # a larger B, and P, than those of the default
        found = problem.constants(**options, B=factor * found.B, P=factor * found.P.max())
    assert found.mu <= found.mu_objective <= found.L + 1e-9

    optimum = means(problem.gradients(found.x_star))
    assert np.abs(w @ optimum).max() < 1e-9
    assert math.isclose(found.f_star, problem.objective(found.x_star, w), rel_tol=1e-9)
    for _ in range(6):
        away = rng.normal(size=problem.d)
        length = radius * rng.random() if ball else 10 ** rng.uniform(-2, 3)  # type: ignore[operator]
        x = found.x_star + away / np.linalg.norm(away) * length
        parts, hessians = problem.gradients(x), problem.hessians(x)
        g, h = means(parts), means(hessians)
        whole = np.einsum("i,iab->ab", w, h)
        scale = 1 + float((g**2).sum())
        every = np.linalg.eigvalsh(np.concatenate(hessians))
        assert found.mu - 1e-9 <= every.min()
        assert every.max() <= found.L + 1e-9
        assert found.mu_objective - 1e-9 <= np.linalg.eigvalsh(whole)[0]
        assert np.abs(np.linalg.eigvalsh(h - whole)).max() <= found.delta + 1e-9

        right = float(((w @ g) ** 2).sum())
        if form == "convex":
            right = 2 * found.L * (problem.objective(x, w) - found.f_star)
        left = float(w @ (g**2).sum(axis=1))
        assert left <= found.G**2 + found.B**2 * right + 1e-8 * scale
        for i, own in enumerate(parts):
            variance = float(((own - g[i]) ** 2).sum(axis=1).mean())
            bound = found.sigma[i] ** 2 + found.P[i] ** 2 * float((g[i] ** 2).sum())
            assert variance <= bound * (1 + 1e-8) + 1e-8 * scale


def lowest(function: Callable[[Floats], float], start: Floats) -> float:
    return float(minimize(function, start, method="BFGS", options={"gtol": 1e-8}).fun)


@pytest.mark.slow
@settings(max_examples=6)
@given(kind=st.sampled_from(["quadratic", "linear"]), seed=st.integers(0, 10**6))
def test_quadratics_need_no_less(kind: str, seed: int) -> None:
    problem = drawn(kind, seed)
    found = problem.constants()
    w = found.w_hat
    ball = problem.constants(radius=1.3)

    def excess(x: Floats, at: ExactConstants) -> float:
        g = means(problem.gradients(x))
        return float(w @ (g**2).sum(axis=1) - at.B**2 * ((w @ g) ** 2).sum())

    def uneven(x: Floats, at: ExactConstants, i: int) -> float:
        own = problem.gradients(x)[i]
        g = own.mean(axis=0)
        return float(((own - g) ** 2).sum(axis=1).mean() - at.P[i] ** 2 * (g**2).sum())

    def highest(function: Callable[[Floats], float], radius: float | None) -> float:
        if radius is None:
            return -lowest(lambda x: -function(x), found.x_star)

        def inside(
            u: Floats,
        ) -> Floats:  # from anywhere to the ball, so that no search can leave it
            return found.x_star + radius * u / max(1.0, float(np.linalg.norm(u)))

        starts = np.random.default_rng(0).normal(size=(4, problem.d))
        return -min(lowest(lambda u: -function(inside(u)), start) for start in starts)

    assert math.isclose(
        highest(lambda x: excess(x, found), None), found.G**2, rel_tol=1e-4, abs_tol=1e-6
    )
    assert math.isclose(
        highest(lambda x: excess(x, ball), 1.3), ball.G**2, rel_tol=1e-4, abs_tol=1e-6
    )
    client = 2
    assert math.isclose(
        highest(lambda x: uneven(x, ball, client), 1.3),
        ball.sigma[client] ** 2,
        rel_tol=1e-4,
        abs_tol=1e-6,
    )
    # Below the least B no G is enough, and below the least P no sigma.
    assert found.P[0] == found.sigma[0] == 0
    with pytest.raises(FedShuffleError, match="B"):
        problem.constants(B=max(1.0, 0.99 * found.B / math.sqrt(2)))
    with pytest.raises(FedShuffleError, match="P"):
        problem.constants(P=0.99 * found.P.max() / math.sqrt(2))


def test_the_toy_quadratic() -> None:
    """Equal Hessians: B = 1 and P = 0 do, and G and sigma are the variances at the optimum."""
    toy = quadratic_constants(1.0, np.eye(6), sizes=[1, 2, 3])
    assert (toy.L, toy.mu, toy.delta, toy.B) == (1.0, 1.0, 0.0, 1.0)
    assert toy.P.tolist() == [0, 0, 0]
    assert np.allclose(toy.sigma**2, [0, 1 / 2, 2 / 3])
    between = [m * ((1 / m - 1 / 6) ** 2 * m + (6 - m) / 36) for m in (1, 2, 3)]
    assert math.isclose(toy.G**2, sum(between) / 6)
    assert math.isclose(toy.f_star, 5 / 12)
    assert {claim.status for claim in toy.validity.values()} == {"exact"}
    assert toy.problem.per_client("sigma", 3).tolist() == toy.sigma.tolist()


def test_which_smoothness_is_attained() -> None:
    """Binary: at zero. Softmax: where two classes share all the probability."""
    for kind in ("binary", "softmax"):
        problem = drawn(kind, 3)  # with a bias
        found = problem.constants()
        x = np.zeros(problem.d)
        if kind == "softmax":
            x[-1] = -50.0
        hessians = problem.hessians(x)
        assert math.isclose(np.linalg.eigvalsh(np.concatenate(hessians)).max(), found.L)
        assert found.validity["L"].status == "exact"
        assert found.validity["delta"].status == "bound"


@pytest.mark.parametrize(("m", "b"), [(4, 2), (5, 2), (4, 3), (3, 1), (3, 5)])
def test_minibatches(m: int, b: int) -> None:
    """The variance of an epoch's steps over all orders of the examples, and L of any of them."""
    rng = np.random.default_rng(m * b)
    gradients = rng.normal(size=(m, 2))
    mean = gradients.mean(axis=0)
    variance = ((gradients - mean) ** 2).sum(axis=1).mean()
    request = ConstantsRequest(batch_size=b)
    every = [
        ((gradients[list(order[k : k + b])].mean(axis=0) - mean) ** 2).sum()
        for order in itertools.permutations(range(m))
        for k in range(0, m, b)
    ]
    assert math.isclose(request.variance_factor(m) * variance, np.mean(every), abs_tol=1e-15)

    features, targets = rng.normal(size=(m, 3)), rng.normal(size=m)
    data = Federation.from_arrays(features, targets, sizes=[m])
    found = linear_regression_constants(data, batch_size=b)
    batches = [
        c for s in {min(b, m), m % b or b} for c in itertools.combinations(range(m), min(s, m))
    ]
    true = max(np.linalg.norm(features[list(c)], 2) ** 2 / len(c) for c in batches)
    assert true <= found.L + 1e-12
    if b == 1 or b >= m:
        assert math.isclose(true, found.L)
        assert found.validity["L"].status == "exact"
    else:
        assert found.validity["L"].status == "bound"


def test_no_minimum() -> None:
    data = Federation.from_arrays([[1.0], [2.0], [-1.0]], [1, 1, 0], sizes=[2, 1])
    for classes in (None, 2):
        with pytest.raises(FedShuffleError, match="l2"):
            logistic_regression_constants(data, classes=classes)
        for l2 in (1e-6, 1e-10):
            logistic_regression_constants(data, l2=l2, classes=classes)
    # Separated in one direction, not in the other.
    table = [[1.0, 1.0], [2.0, 1.0], [-1.0, 0.0], [1.5, 0.0]]
    with pytest.raises(FedShuffleError, match="l2"):
        logistic_regression_constants(Federation.from_arrays(table, [1, 1, 0, 1], sizes=[2, 2]))
    # Softmax has a minimum though all logits can be shifted, and features that say nothing.
    table = [[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [2.0, 0.0]]
    overlapping = Federation.from_arrays(table, [0, 1, 1, 0], sizes=[2, 2])
    found = logistic_regression_constants(overlapping, classes=2)
    assert np.allclose(found.x_star, 0)
    assert math.isclose(found.f_star, math.log(2))
    # Of many minima, the one nearest to zero.
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 2)) @ np.array([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    flat = Federation.from_arrays(table, rng.integers(2, size=40), sizes=[20, 20])
    found = logistic_regression_constants(flat)
    assert abs(found.x_star @ [2.0, -1.0, 1.0]) < 1e-12


def linear_model(d: int, out: int, bias: bool, x: Floats | None = None) -> nn.Linear:
    model = nn.Linear(d, out, bias=bias).double()
    with torch.no_grad():
        nn.utils.vector_to_parameters(
            torch.zeros(out * (d + bias), dtype=torch.float64)
            if x is None
            else torch.from_numpy(x),
            model.parameters(),
        )
    return model


def binary_loss(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(features)[:, 0], labels.double())


@pytest.mark.parametrize("kind", ["linear", "binary", "softmax"])
def test_estimates_agree_with_what_is_known(kind: str) -> None:
    rng = np.random.default_rng(5)
    features, rows = rng.normal(size=(10, 3)), 10
    out = 3 if kind == "softmax" else 1
    loss: Any = {
        "linear": losses.squared_error, "binary": binary_loss, "softmax": losses.cross_entropy
    }[kind]  # fmt: skip
    if kind == "linear":
        data = Federation.from_arrays(features, rng.normal(size=(rows, 1)), sizes=SIZES)
        known: Callable[..., ExactConstants] = linear_regression_constants
        options: dict[str, Any] = {}
    else:
        data = Federation.from_arrays(
            features, rng.integers(out + 1 - (out > 1), size=rows), sizes=SIZES
        )
        known, options = logistic_regression_constants, {"classes": out if out > 1 else None}
    w = np.array([0.1, 0.2, 0.3, 0.4])
    options |= {"l2": 0.2, "bias": True, "w_hat": w, "radius": 0.0}
    if kind == "linear":
        options |= {"B": 1.0, "P": 0.0}
    exact = known(data, **options)
    model = linear_model(3, out, True, exact.x_star)
    found = problem_constants(
        model, data, loss, w_hat=w, weight_decay=0.2, batch_size=1, **EVERYTHING
    )
    # At the optimum, which is where the exact ones are made for.
    assert abs(found.G.value - exact.G) <= found.G.uncertainty + 1e-9
    assert abs(found.delta.value - exact.delta) <= found.delta.uncertainty + 1e-9
    assert abs(found.mu.value - exact.mu) <= found.mu.residual + 1e-9
    # Zero there: a difference of squares as large as the variance, so zero to their rounding.
    assert found.gradient[0] < 1e-13 * found.variance[0]
    if kind == "linear":
        assert np.allclose(found.problem.sigma, exact.sigma)
        assert abs(found.L.value - exact.L) <= found.L.uncertainty + 1e-9
        inputs = np.split(np.hstack([features, np.ones((rows, 1))]), np.cumsum(SIZES)[:-1])
        whole = sum(v * own.T @ own / len(own) for v, own in zip(w, inputs, strict=True))
        largest = np.linalg.eigvalsh(whole)[-1] + 0.2
        assert abs(found.L_objective.value - largest) <= found.L_objective.uncertainty + 1e-9
    else:
        assert (found.problem.per_client("sigma", 4) <= exact.sigma + 1e-9).all()
        assert found.L.value <= exact.L + 1e-9
        zero = problem_constants(
            model, data, loss, points=[np.zeros(len(exact.x_star))], weight_decay=0.2, **EVERYTHING
        )
        if kind == "binary":  # where the curvature is largest
            assert abs(zero.L.value - exact.L) <= zero.L.uncertainty + 1e-9
    again = problem_constants(model, data, loss, w_hat=w, weight_decay=0.2, iterations=2)
    for name in ("L", "L_objective", "delta"):
        rough, fine = getattr(again, name), getattr(found, name)
        assert rough.value <= fine.value + 1e-9  # from below
        assert rough.residual > 0


def test_the_least_that_holds_at_all_points() -> None:
    rng = np.random.default_rng(1)
    data = Federation.from_arrays(rng.normal(size=(10, 2)), rng.normal(size=(10, 1)), sizes=SIZES)
    points = rng.normal(size=(3, 2))
    found = problem_constants(
        linear_model(2, 1, False), data, losses.squared_error, points=points, **EVERYTHING
    )
    known = Known(
        lambda x: (
            0.5 * (torch.as_tensor(data.fields[0]) @ x - torch.as_tensor(data.fields[1])[:, 0]) ** 2
        ),
        2,
        lambda **_: None,  # type: ignore[arg-type]
    )
    w = data.weights
    for B, P in ((1.0, 0.0), (1.3, 0.5)):  # noqa: N806
        problem = found.problem_with(B=B, P=P)
        gaps, uneven = [], []
        for x in points:
            parts = known.gradients(x)
            g = means(parts)
            gaps.append(w @ (g**2).sum(axis=1) - B**2 * ((w @ g) ** 2).sum())
            uneven.append(
                [
                    ((own - own.mean(axis=0)) ** 2).sum(axis=1).mean()
                    - P**2 * (own.mean(axis=0) ** 2).sum()
                    for own in parts
                ]
            )
        assert math.isclose(problem.G**2, max(0.0, *gaps), abs_tol=1e-12)
        expected = np.maximum(np.max(uneven, axis=0), 0)
        assert np.allclose(problem.per_client("sigma", 4) ** 2, expected)
    assert found.problem.B == 1
    limit = largest_step_size(method_constants(data, "fedshuffle", "uniform:2"), found.problem)
    assert limit.step_size > 0
    with pytest.raises(FedShuffleError, match="B is"):
        found.problem_with(B=0.5)
    with pytest.raises(FedShuffleError, match="P is"):
        found.problem_with(P=-1.0)


def estimates(found: EstimatedConstants) -> list[Any]:
    """All numbers."""
    return [
        value.tolist() if isinstance(value, np.ndarray) else value for value in vars(found).values()
    ]


def many(n: int, m: int = 3) -> Federation:
    """Clients that differ."""
    rng = np.random.default_rng(0)
    scale = np.repeat(rng.uniform(0.5, 1.5, size=(n, 1)), m, axis=0)
    features = scale * rng.normal(size=(n * m, 2))
    targets = features @ np.ones((2, 1)) + rng.normal(size=(n * m, 1))
    return Federation.from_arrays(features, targets, sizes=np.full(n, m))


@pytest.mark.slow
def test_a_sample_of_clients() -> None:
    data, model = many(200), linear_model(2, 1, False)
    whole = problem_constants(
        model, data, losses.squared_error, clients=200, delta_clients=1, minibatches=99
    )
    assert whole.L_objective.standard_error == whole.G.standard_error == 0
    inside = 0
    for seed in range(5):
        some = problem_constants(
            model, data, losses.squared_error, clients=40, delta_clients=2, seed=seed
        )
        assert len(set(some.clients.tolist())) == 40
        assert "95% confidence at most 7%" in some.L.note
        assert some.L.value <= whole.L.value + 1e-9
        for name in ("L_objective", "G", "sigma_rms"):
            one, all_ = getattr(some, name), getattr(whole, name)
            assert one.standard_error > 0
            assert abs(one.value - all_.value) <= 5 * one.standard_error
            inside += abs(one.value - all_.value) <= one.uncertainty + whole.L_objective.residual
        # Those not seen have the root mean square: the weighted sum is that of the sample.
        sigma = some.problem.per_client("sigma", 200)
        assert math.isclose(some.w_hat @ sigma**2, some.sigma_rms.value**2)
    assert inside >= 12  # of 15, of which about 14 are expected
    first, again, other = (
        problem_constants(model, data, losses.squared_error, clients=5, seed=s) for s in (1, 1, 2)
    )
    assert first.clients.tolist() == again.clients.tolist() != other.clients.tolist()
    assert estimates(first) == estimates(again) != estimates(other)


def test_some_of_the_minibatches() -> None:
    data, model = many(2, m=60), linear_model(2, 1, False)
    whole = problem_constants(model, data, losses.squared_error, **EVERYTHING)
    some = problem_constants(model, data, losses.squared_error, minibatches=30)
    assert whole.sigma_rms.standard_error == 0
    assert 0 < abs(some.sigma_rms.value - whole.sigma_rms.value) < 4 * some.sigma_rms.standard_error
    # Minibatches of b have about 1/b of the variance; where one step takes all, there is none.
    tens = problem_constants(model, data, losses.squared_error, batch_size=10, minibatches=99)
    share = ConstantsRequest(batch_size=10).variance_factor(60)
    away = tens.sigma_rms.value - math.sqrt(share) * whole.sigma_rms.value
    assert abs(away) < 4 * tens.sigma_rms.standard_error
    one = problem_constants(model, data, losses.squared_error, batch_size=60)
    assert one.problem.per_client("sigma", 2).tolist() == [0, 0]


def brute_hessians(model: nn.Module, loss: Any, data: Federation) -> Floats:
    """The Hessian of every client."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    x = nn.utils.parameters_to_vector(model.parameters()).detach()

    class Bound(nn.Module):
        def __init__(self, x: Tensor) -> None:
            super().__init__()
            parts = torch.split(x, [s.numel() for s in shapes])
            self.values = dict(zip(names, map(Tensor.view, parts, shapes), strict=True))

        def forward(self, *inputs: Tensor) -> Any:
            return torch.func.functional_call(model, self.values, inputs)

    found = []
    for i in range(len(data)):
        fields = tuple(torch.as_tensor(field) for field in data.client(i))
        hessian: Any = full_hessian
        found.append(hessian(lambda x, fields=fields: loss(Bound(x), *fields), x).numpy())
    return np.stack(found)


def test_a_network_against_its_whole_hessian() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    data = Federation.from_arrays(rng.normal(size=(10, 3)), rng.integers(2, size=10), sizes=SIZES)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    before = [p.detach().clone() for p in model.parameters()]
    found = problem_constants(model, data, losses.cross_entropy, **EVERYTHING)
    assert all(map(torch.equal, before, model.parameters()))
    each = brute_hessians(model, losses.cross_entropy, data)
    whole = np.einsum("i,iab->ab", data.weights, each)
    ends = np.linalg.eigvalsh(whole)
    assert ends[0] < -1e-3  # not convex here
    assert math.isclose(found.L_objective.value, np.abs(ends).max(), rel_tol=1e-6)
    assert found.L.value >= np.abs(np.linalg.eigvalsh(each)).max() * (1 - 1e-6)
    apart = np.abs(np.linalg.eigvalsh(each - whole)).max()
    assert math.isclose(found.delta.value, apart, rel_tol=1e-6)
    assert found.mu.value < 0
    assert found.problem.mu == 0
    # Points as modules and as vectors are the same.
    module = problem_constants(model, data, losses.cross_entropy, points=[model], clients=2)
    vector = nn.utils.parameters_to_vector(model.parameters())
    again = problem_constants(model, data, losses.cross_entropy, points=[vector], clients=2)
    assert estimates(module) == estimates(again)


def test_images_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    )
    images = Federation.from_arrays(torch.randn(6, 1, 4, 4), torch.arange(6) % 2, sizes=[2, 4])
    lstm = models.CharLSTM(vocabulary=5, embedding=2, hidden=3, layers=2)
    text = torch.randint(5, (6, 4))
    snippets = Federation.from_arrays(text, text.roll(1, 1), sizes=[2, 4])
    for model, data in ((cnn, images), (lstm, snippets)):
        found = problem_constants(
            model, data, losses.cross_entropy, batch_size=2, iterations=6, progress=True
        )
        assert 0 < found.L_objective.value <= found.L.value
        assert 0 < found.delta.value < 2.1 * found.L.value
        assert found.G.value > 0
        sigma = found.problem.per_client("sigma", 2)
        assert sigma[1] > 0 == sigma[0]
        shown = capsys.readouterr()
        assert "constants" in shown.err
        assert not shown.out
        assert found.L.value == found.problem.L


def test_on_disk_is_the_same(tmp_path: Path) -> None:
    data, model = many(12), linear_model(2, 1, False)
    data.save(tmp_path / "people")
    opened = Federation.open(tmp_path / "people")
    here, there = (
        problem_constants(model, f, losses.squared_error, clients=6, batch_size=2)
        for f in (data, opened)
    )
    assert estimates(here) == estimates(there)
    exact, mapped = (linear_regression_constants(f, l2=0.1) for f in (data, opened))
    assert exact.G == mapped.G
    assert exact.x_star.tolist() == mapped.x_star.tolist()


def test_gradients_that_are_the_same_everywhere() -> None:
    """A linear loss has no Hessian, and parameters may go unused."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))

    data = Federation.from_arrays(torch.eye(2), sizes=[1, 1])
    found = problem_constants(Two(), data, lambda model, v: (v @ model.a).mean(), weight_decay=0.5)
    assert abs(found.L.value - 0.5) < 1e-6
    assert found.delta.value < 1e-6
    assert math.isclose(found.G.value, math.sqrt(0.5), rel_tol=1e-6)


def test_exact_constants_need_no_torch() -> None:
    code = "import sys, fedshuffle.theory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


LINEAR = Federation.from_arrays([[1.0, 0.0], [2.0, 1.0]], [1.0, 0.0], sizes=[1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quadratic_constants(-1.0, [[0.0]]), "not convex"),
        (lambda: quadratic_constants(np.eye(3), [[0.0]]), "hessians"),
        (lambda: quadratic_constants([[1.0, 2.0], [0.0, 1.0]], [[0.0, 0.0]]), "symmetric"),
        (lambda: quadratic_constants(1.0, [0.0]), "optima"),
        (lambda: quadratic_constants(1.0, [["a"]]), "optima"),
        (lambda: quadratic_constants(math.nan, [[0.0]]), "hessians"),
        (lambda: quadratic_constants(1.0, [[0.0]], sizes=[2]), "sizes"),
        (lambda: quadratic_constants(1.0, [[0.0]], w_hat=[1.0, 2.0]), "w_hat"),
        (lambda: quadratic_constants(1.0, [[0.0]], B=0.5), "B is"),
        (lambda: quadratic_constants(1.0, [[0.0]], P=-1), "P is"),
        (lambda: quadratic_constants(1.0, [[0.0]], radius=-1), "radius"),
        (lambda: quadratic_constants(1.0, [[0.0]], batch_size=0), "batch_size"),
        (lambda: quadratic_constants(1.0, [[0.0]], form="convexe"), "convex"),  # type: ignore[arg-type]
        (lambda: linear_regression_constants(LINEAR, l2=-1.0), "l2"),
        (lambda: linear_regression_constants(Federation.from_sizes([1])), "fields"),
        (
            lambda: linear_regression_constants(
                Federation.from_arrays([[1.0]], [[1.0, 2.0]], sizes=[1])
            ),
            "targets",
        ),
        (lambda: logistic_regression_constants(LINEAR, classes=1), "classes"),
        (lambda: logistic_regression_constants(LINEAR, P=1.0), "P must"),
        (
            lambda: logistic_regression_constants(
                Federation.from_arrays([[1.0], [2.0]], [0, 2], sizes=[1, 1])
            ),
            "label 2",
        ),
        (
            lambda: logistic_regression_constants(
                Federation.from_arrays([[1.0]], [3], sizes=[1]), classes=3
            ),
            "label 3",
        ),
        (
            lambda: logistic_regression_constants(
                Federation.from_arrays(np.zeros((1, 1000)), [0], sizes=[1]), classes=3
            ),
            "parameters",
        ),
    ],
)
def test_bad_problems(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients"),
        ({"clients": [0, 0]}, "clients"),
        ({"clients": [2]}, "clients"),
        ({"points": []}, "points"),
        ({"points": [[1.0]]}, "point 0"),
        ({"points": [[math.nan, 0.0]]}, "finite"),
        ({"points": [["a"]]}, "point 0"),
        ({"w_hat": [1.0]}, "w_hat"),
        ({"batch_size": 0}, "batch_size"),
        ({"iterations": 0}, "iterations"),
        ({"minibatches": 0}, "minibatches"),
        ({"delta_clients": 0}, "delta_clients"),
        ({"tolerance": 0}, "tolerance"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"seed": -1}, "seed"),
        ({"points": [[1e300, 1e300]]}, "finite"),
    ],
)
def test_bad_questions(options: dict[str, Any], message: str) -> None:
    data = Federation.from_arrays([[1e20, 0.0], [2.0, 1.0]], [[1.0], [0.0]], sizes=[1, 1])
    with pytest.raises(FedShuffleError, match=message):
        problem_constants(linear_model(2, 1, False), data, losses.squared_error, **options)


def test_models_that_draw() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    data = Federation.from_arrays(torch.eye(2), torch.ones(2, 1), sizes=[1, 1])
    with pytest.raises(FedShuffleError, match="eval"):
        problem_constants(model, data, losses.squared_error)
    problem_constants(model.eval(), data, losses.squared_error)


def test_the_largest_value_of_a_form_without_a_linear_term() -> None:
    assert max_on_ball(QuadraticForm(np.zeros((2, 2)), np.zeros(2), 3.0), 2.0) == 3.0
    curved = QuadraticForm(np.diag([0.0, 1.0]), np.zeros(2), 3.0)
    assert max_on_ball(curved, 2.0) == pytest.approx(7.0)
    flat = QuadraticForm(np.zeros((2, 2)), np.array([0.0, 1.0]), 0.0)  # 2 z_2
    assert max_on_ball(flat, 2.0) == pytest.approx(4.0)
    concave = QuadraticForm(-np.eye(1), np.array([2.0]), 0.0)  # 4z - z^2
    assert max_on_ball(concave, 1.0) == pytest.approx(3.0)


def test_the_smallest_bound_of_a_shifted_square() -> None:
    shifted = QuadraticForm(np.eye(1), np.ones(1), 1.0)  # (z + 1)^2 <= a + b z^2
    for b, a in ((None, 2.0), (3.0, 1.5), (1.0, math.inf)):
        given = None if b is None else math.sqrt(b)
        found = smallest_bound(lambda axes: shifted, np.eye(1), np.zeros(1), given)
        assert found == pytest.approx((math.sqrt(a), math.sqrt(b or 2.0)))


def test_the_ends_of_a_spectrum() -> None:
    spectrum = torch.tensor([3.0, -1.0, 0.5])
    low, high = spectrum_ends(lambda v: spectrum * v, torch.ones(3), 9, 1e-6)
    assert (low.value, high.value) == pytest.approx((-1.0, 3.0), rel=1e-5)
    assert torch.allclose(high.vector.abs(), torch.tensor([1.0, 0.0, 0.0]), atol=1e-5)
