"""Every engine gives the trajectory of the reference engine."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import (
    MVR,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    MissLast,
    TrainingError,
    losses,
    methods,
    schedules,
    train,
)
from fedshuffle.engines import (
    Engine,
    LanesEngine,
    LeanEngine,
    LoopEngine,
    Problem,
    choose,
    forkserver,
    make,
)
from fedshuffle.engines.machine import flushed_denormals, keep_freed_memory, operations
from fedshuffle.engines.stack import Stack
from fedshuffle.kernel import Order, Probe, Steering, Walk, step
from fedshuffle.local_work import Minibatches
from fedshuffle.models import CharLSTM, ResNet
from fedshuffle.rounds import Run, simulate
from fedshuffle.runs import RunFolder
from fedshuffle.state import State
from fedshuffle.training import Result
from tests.problems import Point, copies, half_squared_distance, quadratic, targets
from tests.processes import alive, wait_for


def data(shape: tuple[int, ...], classes: int, sizes: list[int]) -> Federation:
    rng = np.random.default_rng(0)
    n = sum(sizes)
    x = rng.normal(size=(n, *shape))
    y = rng.integers(classes, size=n)
    return Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), sizes=sizes)


class Tokens(nn.Module):
    """Embedding and recurrent cell, with an input of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.cell = nn.Linear(4 + 5, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.zeros(tokens.shape[0], 5, dtype=self.out.weight.dtype)
        for k in range(tokens.shape[1]):
            hidden = self.cell(torch.cat([self.embedding(tokens[:, k]), hidden], dim=1)).tanh()
        logits: Tensor = self.out(hidden)
        return logits


def token_data(sizes: list[int]) -> Federation:
    rng = np.random.default_rng(1)
    n = sum(sizes)
    return Federation.from_arrays(
        rng.integers(7, size=(n, 4)), rng.integers(3, size=n), sizes=sizes
    )


def text_data(sizes: list[int]) -> Federation:
    text = np.random.default_rng(2).integers(7, size=(sum(sizes), 6))
    return Federation.from_arrays(text[:, :-1], text[:, 1:], sizes=sizes)


ENGINES = ["loop", "lanes", "lean", "lean:2", "lean:2:processes"]
SIZES = [2, 5, 9]
CASES: dict[str, tuple[Callable[[], nn.Module], Federation]] = {
    "linear": (lambda: nn.Linear(6, 3), data((6,), 3, SIZES)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        data((6,), 3, SIZES),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        data((1, 6, 6), 3, SIZES),
    ),
    "tokens": (Tokens, token_data(SIZES)),
    "pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        data((2, 6, 6), 3, SIZES),
    ),
    "lstm": (lambda: CharLSTM(7, 4, 5), text_data(SIZES)),
    "resnet": (lambda: ResNet(3, width=2, blocks=(1, 1)), data((3, 4, 4), 3, SIZES)),
}


WORKS = {
    "free": LocalWork(epochs=2, batch_size=4, interruption=MissLast()),
    "limited": LocalWork(epochs=2, batch_size=4, clip=0.8, weight_decay=0.01),
}
RUNS = [
    (None, "free", 1),
    (None, "limited", 2),
    (MVR(0.2), "limited", 1),
    (GlobalMomentum(0.2), "free", 2),
]


def all_engines(problem: Problem) -> dict[str, Engine]:
    """Every engine in every variant that makes a difference to this model."""
    vectorised = not any(isinstance(module, nn.LSTM) for module in problem.model.modules())
    by_hand = [False] if Stack.of(problem) is None else [True, False]
    lanes = {
        f"{width} lanes{' by hand' * fused}": LanesEngine(problem, width, fused)
        for width in (1, 3, 100)
        for fused in by_hand
        if vectorised
    }
    lean = {f"lean{' by hand' * fused}": LeanEngine(problem, fused=fused) for fused in by_hand}
    named = ["lean:2", "lean:3:processes", *(["lanes:2"] if vectorised else [])]
    return {**lanes, **lean, **{name: make(name, problem) for name in named}}


@pytest.mark.parametrize("case", CASES)
def test_every_engine_equals_the_loop(case: str) -> None:
    """Rounds of runs in lockstep, whose step sizes change from round to round.

    All that a method can ask of an engine is put to models below, and methods to engines in
    ``test_field_runs``. Here is the rest of a round: who takes part, and how long.
    """
    make_model, federation = CASES[case]
    torch.manual_seed(0)
    problem = Problem(make_model().double(), losses.cross_entropy, federation)
    steps = schedules.inverse_time(0.05, halved_after=2)
    runs = [
        Run(
            federation,
            methods.get("fedshuffle").with_momentum(momentum),
            "uniform:2",
            WORKS[work],
            steps,
            seed=seed,
        )
        for momentum, work, seed in RUNS
    ]
    reference = [s.x for states in simulate(LoopEngine(problem), runs, 3) for s in states]
    for name, engine in all_engines(problem).items():
        xs = [s.x for states in simulate(engine, runs, 3) for s in states]
        for have, want in zip(xs, reference, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13, msg=name)
    assert not torch.equal(reference[0], reference[1])


@pytest.mark.parametrize("case", CASES)
def test_every_engine_equals_the_loop_in_single_precision(case: str) -> None:
    """The updates of three rounds, in float32, up to 1e-5 of their size."""
    make_model, federation = CASES[case]
    torch.manual_seed(0)
    problem = Problem(make_model().float(), losses.cross_entropy, federation)
    run = Run(federation, "fedshuffle", "full", LocalWork(epochs=2, batch_size=4), 0.05)
    *_, (want,) = simulate(LoopEngine(problem), [run], 3)
    for name, engine in all_engines(problem).items():
        *_, (have,) = simulate(engine, [run], 3)
        error = float((have.x - want.x).norm() / (want.x - problem.start).norm())
        assert error < 1e-5, name


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.squared_error])
def test_stacks_are_differentiated_by_hand(
    activation: type[nn.Module], bias: bool, loss: losses.MeanLoss
) -> None:
    """Every activation, with and without bias, both losses, images that must be flattened."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    aims = rng.integers(3, size=16) if loss is losses.cross_entropy else rng.normal(size=(16, 3))
    federation = Federation.from_arrays(rng.normal(size=(16, 2, 3)), aims, sizes=SIZES)
    body = nn.Sequential(nn.Linear(6, 5, bias), activation(), nn.Linear(5, 4, bias), activation())
    model = nn.Sequential(nn.Flatten(), body, nn.Linear(4, 3, bias), activation()).double()
    problem = Problem(model, loss, federation)
    assert Stack.of(problem) is not None
    run = Run(federation, "fedshuffle", "full", LocalWork(epochs=2, batch_size=4), 0.05)
    *_, (want,) = simulate(LoopEngine(problem), [run], 3)
    for engine in (LeanEngine(problem), LanesEngine(problem)):
        *_, (have,) = simulate(engine, [run], 3)
        torch.testing.assert_close(have.x, want.x, rtol=1e-12, atol=1e-13)


class Doubled(nn.Linear):
    """A linear layer only by name."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_only_looks_like_a_stack_is_left_to_autograd() -> None:
    federation = data((6,), 3, SIZES)
    hooked = nn.Linear(6, 3)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    shared = nn.Linear(6, 6)
    frozen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    frozen[0].requires_grad_(False)
    for model in (
        Doubled(6, 3),
        hooked,
        nn.Sequential(shared, shared, nn.Linear(6, 3)),
        frozen,
        nn.Sequential(nn.Linear(6, 3), nn.GELU()),
        nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=1)),
        nn.Sequential(nn.ReLU(), nn.Linear(6, 3)),
    ):
        problem = Problem(model.double(), losses.cross_entropy, federation)
        assert Stack.of(problem) is None, model
        run = Run(federation, "fedshuffle", "full", LocalWork(batch_size=4), 0.05)
        *_, (want,) = simulate(LoopEngine(problem), [run], 2)
        *_, (have,) = simulate(make("lean", problem), [run], 2)
        torch.testing.assert_close(have.x, want.x, rtol=1e-12, atol=1e-13)
    mine = Problem(
        nn.Linear(6, 3).double(), lambda m, x, y: losses.cross_entropy(m, x, y), federation
    )
    assert Stack.of(mine) is None
    rows, labels = federation.tensors()
    some = Federation.from_arrays(rows, labels.where(labels > 0, -100), sizes=SIZES)
    assert Stack.of(Problem(nn.Linear(6, 3).double(), losses.cross_entropy, some)) is None


def order(client: int, size: int, steps: int, **steering: object) -> Order:
    stream = Minibatches(client, size, steps, 2, "reshuffled", 3, 0)
    return Order(stream, 0.1 + 0.01 * client, Steering(**steering), [1.0, float(client)])  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("clip", "decay"), [(math.inf, 0.0), (0.6, 0.0), (math.inf, 0.3), (0.4, 0.2)]
)
def test_the_whole_kernel_by_hand(engine: str, clip: float, decay: float) -> None:
    """Each of alpha, beta, mu, v and the scale, mixed over the clients of one walk, and several
    sums; with clipping and weight decay.
    """
    points = targets(7, 2)
    problem = quadratic(copies([2, 4, 6, 3, 5, 2, 1], points))
    x = targets(1, 2, seed=9)[0]
    v = targets(1, 2, seed=8)[0]
    scale, other = targets(2, 2, seed=7).exp()
    orders = [
        order(0, 2, 5, alpha=0.5, mu=0.3),
        order(1, 4, 3, alpha=1.0, beta=0.4, v=v),
        order(2, 6, 7, alpha=0.7, beta=0.2, mu=1.5, v=-v, scale=scale),
        order(3, 3, 4, alpha=1.2, mu=0.1, scale=other),
        order(4, 5, 6, alpha=0.0, beta=0.9, mu=0.4, v=2 * v),
        order(5, 2, 3, alpha=0.0, beta=-0.5, scale=scale),
        order(6, 1, 8, alpha=0.0, mu=0.6, v=v, scale=other),
    ]
    orders = [dataclasses.replace(o, clip=clip, weight_decay=decay) for o in orders]
    want = torch.zeros(2, 2, dtype=torch.float64)
    for o in orders:
        s, b, y = o.steering, points[o.minibatches.client], x
        for _ in range(o.minibatches.steps):
            push = torch.zeros_like(x) if s.v is None else s.v
            at_y, at_x = (
                (z - b) * min(1.0, clip / float((z - b).norm())) + decay * z for z in (y, x)
            )
            direction = s.alpha * at_y - s.beta * at_x + push + s.mu * (y - x)
            y = y - o.step_size * (1.0 if s.scale is None else s.scale) * direction
        want[0] += o.weights[0] * (y - x)
        want[1] += o.weights[1] * (y - x)
    (have,) = make(engine, problem).walk([Walk(x, orders, 2)])
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_probes_are_weighted_full_gradients(engine: str) -> None:
    sizes = [3, 1500]  # the second client is larger than one piece
    rows = targets(sum(sizes), 2)
    problem = quadratic(Federation.from_arrays(rows, sizes=sizes))
    a, b = targets(2, 2, seed=4)
    weights = np.array([[0.3, 0.0, 1.0], [2.0, 1.0, 0.0]])
    probe = Probe((a, b), np.array([0, 1]), weights, 0, weight_decay=0.7)
    (have,) = make(engine, problem).probe([probe])
    means = torch.stack([rows[:3].mean(0), rows[3:].mean(0)])
    want = torch.stack([torch.stack([p - means + 0.7 * p for p in (a, b)])] * 3)
    want = torch.einsum("ik,kpid->kpd", torch.from_numpy(weights), want)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)
    assert have.shape == (3, 2, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scaled_walk_is_a_geometric_series(engine: str) -> None:
    """f_i(y) = |y - b_i|^2 / 2 from x, coordinate by coordinate: with r = gamma D (alpha + mu) and
    u = (alpha - beta) (x - b_i) + v, after tau steps y - x = -u (1 - (1 - r)^tau) / (alpha + mu).
    """
    rng = np.random.default_rng(5)
    b, v = rng.normal(size=(2, 4, 3))
    x, scale = rng.normal(size=3), rng.uniform(0.2, 3.0, size=(4, 3))
    alpha, beta, mu, tau = 0.8, 0.3, 0.5, np.array([4, 9, 1, 6])
    problem = quadratic(copies([3, 5, 2, 4], torch.from_numpy(b)))
    orders = [
        Order(
            Minibatches(i, [3, 5, 2, 4][i], int(tau[i]), 2, "reshuffled", 3, 0),
            0.1,
            Steering(alpha, beta, mu, torch.from_numpy(v[i]), torch.from_numpy(scale[i])),
            np.eye(4)[i].tolist(),
        )
        for i in range(4)
    ]
    (have,) = make(engine, problem).walk([Walk(torch.from_numpy(x), orders, 4)])
    rate = 0.1 * scale * (alpha + mu)
    u = (alpha - beta) * (x - b) + v
    want = -u * (1 - (1 - rate) ** tau[:, None]) / (alpha + mu)
    np.testing.assert_allclose(have.numpy(), want, rtol=1e-12, atol=1e-14)


def steered(problem: Problem, seed: int, own_sums: bool) -> Walk:
    """A walk of every client whose orders have all the parts of the kernel, at random."""
    rng = np.random.default_rng(seed)
    sizes = problem.federation.sizes.tolist()
    d = len(problem.start)

    def vector(chance: float) -> Tensor | None:
        drawn = torch.from_numpy(rng.normal(size=d))
        return 0.3 * drawn if rng.random() < chance else None

    orders = []
    for client, size in enumerate(sizes):
        scale = vector(0.6)
        steering = Steering(
            alpha=[1.0, 0.7, 0.0][rng.integers(3)],
            beta=[0.0, 0.4][rng.integers(2)],
            mu=[0.0, 0.5][rng.integers(2)],
            v=vector(0.7),
            scale=None if scale is None else scale.exp(),
        )
        stream = Minibatches(client, size, int(rng.integers(1, 7)), 2, "reshuffled", seed, 0)
        weights = np.eye(len(sizes))[client] if own_sums else np.zeros(0)
        weights = np.append(weights, rng.normal(size=2))
        orders.append(
            Order(
                stream,
                0.05 * (1 + rng.random()),
                steering,
                weights.tolist(),
                [math.inf, 0.5][rng.integers(2)],
                [0.0, 0.1][rng.integers(2)],
            )
        )
    start = problem.start + 0.1 * torch.from_numpy(rng.normal(size=d))
    return Walk(start, orders, len(orders[0].weights))


def asked(problem: Problem, seed: int, own_sums: bool) -> Probe:
    """A probe of all clients at two points, with a sum for each client or three for all."""
    rng = np.random.default_rng(seed)
    n, d = len(problem.federation), len(problem.start)
    weights = np.eye(n) if own_sums else rng.normal(size=(n, 3))
    weights[0] *= seed % 2
    points = tuple(problem.start + 0.1 * torch.from_numpy(rng.normal(size=d)) for _ in range(2))
    return Probe(points, np.arange(n), weights, 0, weight_decay=0.3)


MANY_SIZES = [int(size) for size in np.random.default_rng(3).integers(1, 6, size=24)]
STEERED = {
    **{name: CASES[name] for name in ("linear", "mlp", "cnn", "tokens", "pooled", "lstm")},
    "many": (lambda: nn.Linear(6, 3), data((6,), 3, MANY_SIZES)),
}


@pytest.mark.parametrize("case", STEERED)
def test_every_engine_steers_like_the_loop(case: str) -> None:
    """Walks with a steering of its own for every client, and probes with many sums, in lockstep.

    Engines treat parameters as one vector, so models of small stacks get most of the combinations.
    """
    make_model, federation = STEERED[case]
    torch.manual_seed(0)
    problem = Problem(make_model().double(), losses.cross_entropy, federation)
    loop = LoopEngine(problem)
    few = case == "many" or Stack.of(problem) is None
    kinds = [(seed, bool(seed % 3)) for seed in range(2 if few else 6)]
    walks = [steered(problem, *kind) for kind in kinds]
    probes = [asked(problem, *kind) for kind in kinds]
    walked, probed = loop.walk(walks), loop.probe(probes)
    for name, engine in all_engines(problem).items():
        for have, want in zip(engine.walk(walks), walked, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13, msg=name)
        for have, want in zip(engine.probe(probes), probed, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("engine", [*ENGINES, "lanes:2"])
def test_steps_without_gradients_look_at_no_example(engine: str) -> None:
    """Neither the loss nor a batch may be touched once the engine is made."""
    points = targets(3, 2)
    problem = quadratic(copies([2, 4, 6], points))
    walker = make(engine, problem)
    assert not problem.random  # the first look at the model, which is allowed

    def forbidden(*_: object) -> tuple[Tensor, ...]:
        raise AssertionError("an example was looked at")

    problem.batch = problem.loss = forbidden  # type: ignore[method-assign, assignment]
    x, v = targets(2, 2, seed=9)
    scale = targets(1, 2, seed=7)[0].exp()
    orders = [
        order(0, 2, 5, alpha=0.0, v=v),
        order(1, 4, 3, alpha=0.0, v=-v, scale=scale),
        order(2, 6, 7, alpha=0.0, v=v, mu=0.5, scale=scale),
    ]
    orders = [
        dataclasses.replace(o, weights=np.eye(3)[k].tolist(), weight_decay=0.3, clip=0.1)
        for k, o in enumerate(orders)
    ]
    (have,) = walker.walk([Walk(x, orders, 3)])
    series = (1 - (1 - 0.12 * 0.5 * scale) ** 7) / 0.5
    want = torch.stack([-5 * 0.1 * v, 3 * 0.11 * scale * v, -series * v])
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_that_does_not_count_is_not_computed(engine: str) -> None:
    """With alpha = 0 only the global model is looked at, with weight 0 no data at all."""
    federation = copies([2, 4], targets(2, 2))
    x, far = torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e9, dtype=torch.float64)

    def near(model: Point, rows: Tensor) -> Tensor:  # not finite away from x
        return half_squared_distance(model, rows) / (model.x.abs().sum() < 1e-9)

    walker = make(engine, Problem(Point(2), near, federation))
    orders = [order(k, size, 3, alpha=0.0, beta=1.0, v=far) for k, size in enumerate([2, 4])]
    (have,) = walker.walk([Walk(x, orders, 2)])
    steps = torch.stack([-0.3 * (far + targets(2, 2)[0]), -0.33 * (far + targets(2, 2)[1])])
    torch.testing.assert_close(have, torch.stack([steps.sum(0), steps[1]]), rtol=1e-12, atol=0.0)

    def small(model: Point, rows: Tensor) -> Tensor:  # not finite at the larger client
        return half_squared_distance(model, rows) / (rows.shape[-2] < 4)

    walker = make(engine, Problem(Point(2), small, federation))
    (have,) = walker.probe([Probe((x,), np.arange(2), np.array([[2.0], [0.0]]), 0)])
    torch.testing.assert_close(have[0, 0], -2 * targets(2, 2)[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_probes_look_at_the_data_once_for_every_point(engine: str) -> None:
    """However many sums there are."""
    calls = []

    def counting(model: Point, rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return half_squared_distance(model, rows)

    problem = Problem(Point(2), counting, copies([2, 4, 3], targets(3, 2)))
    walker = make(engine, problem)
    assert not problem.random  # the first look at the model
    calls.clear()
    points = tuple(targets(2, 2, seed=4))
    weights = np.random.default_rng(0).normal(size=(3, 40))
    (have,) = walker.probe([Probe(points, np.arange(3), weights, 0)])
    # Lanes look once at both points; what processes do is not seen from here.
    assert len(calls) == {"lanes": 3, "lean:2:processes": 0}.get(engine, 6)
    slopes = torch.stack([point - targets(3, 2) for point in points])
    want = torch.einsum("ik,pid->kpd", torch.from_numpy(weights), slopes)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_counts_nowhere_must_be_finite_too(engine: str) -> None:
    federation = Federation.from_arrays(targets(6, 2), client_ids=list("abbbcc"))
    problem = quadratic(federation)
    walker = make(engine, problem)
    huge = torch.full((2,), 1e308, dtype=torch.float64)
    orders = [
        order(0, 1, 3),
        dataclasses.replace(order(1, 3, 3, v=huge, scale=huge), weights=[0.0, 0.0]),
    ]
    with pytest.raises(TrainingError, match=r"client b, local training.*not finite"):
        walker.walk([Walk(problem.start, orders, 2)])


def test_auto_tries_engines_on_steered_walks() -> None:
    make_model, federation = STEERED["many"]
    torch.manual_seed(0)
    problem = Problem(make_model().double(), losses.cross_entropy, federation)
    choice = choose(problem, steered(problem, 1, own_sums=True))
    assert choice.name != "loop"
    assert "does not agree" not in choice.why


def test_the_step_is_the_formula() -> None:
    y, x, g, gx, v, scale = targets(6, 3)
    have = step(y, x, g, gx, 0.1, 0.5, 0.2, 0.3, v)
    torch.testing.assert_close(have, y - 0.1 * (0.5 * g - 0.2 * gx + v + 0.3 * (y - x)))
    have = step(y, x, g, gx, 0.1, 0.5, 0.2, 0.3, v, scale)
    torch.testing.assert_close(have, y - 0.1 * scale * (0.5 * g - 0.2 * gx + v + 0.3 * (y - x)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_diverging_client_is_named(engine: str) -> None:
    federation = Federation.from_arrays(
        targets(6, 2), client_ids=["ann", "bob", "bob", "bob", "cy", "cy"]
    )
    with pytest.raises(
        TrainingError, match=r"round 0, client bob, local training.*not finite"
    ) as e:
        train(
            Point(2),
            federation,
            loss=lambda m, t: half_squared_distance(m, t) / (len(t) != 3 or 0),
            rounds=3,
            engine=engine,
            step_size=0.1,
            work=LocalWork(batch_size=3),
        )
    assert e.value.client == "bob"
    assert e.value.round == 0


def test_step_sizes_that_explode_are_named() -> None:
    federation = copies([1, 5], targets(2, 2))
    with pytest.raises(TrainingError, match="lower it"):
        train(Point(2), federation, loss=half_squared_distance, rounds=500, step_size=1e30, seed=1)


def test_what_the_users_code_raises_is_named() -> None:
    def broken(model: nn.Module, *fields: Tensor) -> Tensor:
        raise KeyError("oops")

    with pytest.raises(TrainingError, match="client 0, first look at the model: KeyError: 'oops'"):
        train(Point(2), copies([1, 2], targets(2, 2)), loss=broken, rounds=1)
    with pytest.raises(TrainingError, match="must be one number"):
        train(
            Point(2),
            copies([1, 2], targets(2, 2)),
            loss=lambda model, t: (model.x - t).square(),
            rounds=1,
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_larger_than_any_client_is_one_step(engine: str) -> None:
    federation = Federation.from_arrays(targets(5, 2), sizes=[2, 3])
    work = LocalWork(batch_size=10**20)
    result = train(
        Point(2), federation, loss=half_squared_distance, rounds=1, engine=engine, work=work
    )
    assert result.history[0]["steps"] == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_useless_losses_are_refused(engine: str) -> None:
    federation = copies([1, 2], targets(2, 2))
    other = Point(2)

    def fit(loss: Callable[..., Tensor]) -> None:
        train(Point(2), federation, loss=loss, rounds=1, engine=engine)

    with pytest.raises(FedShuffleError, match="must be one number"):
        fit(lambda model, t: (model.x - t).square().sum(1))
    with pytest.raises(FedShuffleError, match="does not depend on the model"):
        fit(lambda model, t: half_squared_distance(other, t))
    with pytest.raises(FedShuffleError, match="does not depend on the model"):
        fit(lambda model, t: t.mean())


def test_dropout_is_a_function_of_seed_round_and_client() -> None:
    federation = data((6,), 3, [4, 6])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()

    def weights(seed: int, noise: int, engine: str = "loop") -> Tensor:
        torch.manual_seed(noise)  # the global generator must not matter, nor be disturbed
        before = torch.get_rng_state()
        result = train(
            model, federation, loss=losses.cross_entropy, rounds=3, seed=seed, engine=engine
        )
        assert torch.equal(torch.get_rng_state(), before)
        return result.model[1].weight.detach().clone()  # type: ignore[index, no-any-return]

    assert torch.equal(weights(1, 10), weights(1, 20))
    torch.testing.assert_close(weights(1, 10, "lean"), weights(1, 20))
    torch.testing.assert_close(weights(1, 10, "lean:2:processes"), weights(1, 20))
    assert not torch.equal(weights(1, 10), weights(2, 10))


def test_dropout_cannot_run_in_threads_and_says_so() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match="Use one worker"):
        train(model, data((6,), 3, [4, 6]), loss=losses.cross_entropy, rounds=1, engine="lean:2")


def test_dropout_cannot_run_in_lanes_and_says_so() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match="Use the engine 'lean'"):
        train(model, data((6,), 3, [4, 6]), loss=losses.cross_entropy, rounds=1, engine="lanes")


def test_running_statistics_are_refused_and_batch_statistics_are_not() -> None:
    federation = data((6,), 3, [4, 6])
    bad = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match=r"layer '1' \(BatchNorm1d\).*GroupNorm"):
        Problem(bad, losses.cross_entropy, federation)
    fine = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)).double()
    Problem(fine, losses.cross_entropy, federation)


class Counting(nn.Linear):
    """Keeps a constant buffer, and perhaps one that counts the calls."""

    def __init__(self, counts: bool) -> None:
        super().__init__(6, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("calls", torch.zeros(()))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.get_buffer("calls").add_(1)
        return super().forward(x) * self.scale  # type: ignore[operator]


@pytest.mark.parametrize("engine", ENGINES)
def test_constant_buffers_are_fine_and_changing_ones_are_refused(engine: str) -> None:
    federation = data((6,), 3, [4, 6])
    model = Counting(False).double()
    result = train(model, federation, loss=losses.cross_entropy, rounds=2, engine=engine)
    assert torch.equal(result.model.state_dict()["scale"], model.state_dict()["scale"])
    with pytest.raises(FedShuffleError, match="changes the model's buffer 'calls'"):
        train(
            Counting(True).double(),
            federation,
            loss=losses.cross_entropy,
            rounds=2,
            engine=engine,
        )


def test_models_that_cannot_be_flattened_are_refused() -> None:
    federation = copies([1], targets(1, 2))
    with pytest.raises(FedShuffleError, match="no trainable parameters"):
        Problem(nn.Flatten(), half_squared_distance, federation)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(FedShuffleError, match="mixes parameters"):
        Problem(mixed, half_squared_distance, federation)


def test_frozen_parameters_stay_and_unused_ones_do_not_break() -> None:
    federation = data((6,), 3, [4, 6])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    model[1].register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    before = copy.deepcopy(model.state_dict())
    after = train(model, federation, loss=losses.cross_entropy, rounds=2).model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["1.unused"], before["1.unused"])
    assert not torch.equal(after["1.weight"], before["1.weight"])
    assert all(torch.equal(model.state_dict()[k], before[k]) for k in before)


def test_unknown_engines_are_named() -> None:
    with pytest.raises(FedShuffleError, match=r"unknown engine 'lane'\. Did you mean 'lanes'"):
        make("lane", quadratic(copies([1], targets(1, 2))))


@pytest.mark.parametrize("name", ["lean:x", "lean:2:threads", "loop:2", "lean:", "lanes:2:2"])
def test_engines_that_cannot_be_read_are_named(name: str) -> None:
    with pytest.raises(FedShuffleError, match=f"engine '{name}' cannot be read"):
        make(name, quadratic(copies([1], targets(1, 2))))


@pytest.mark.parametrize("name", ["lean:1000000", "lanes:1000000", "lean:1000000:processes"])
def test_more_workers_than_make_sense_are_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match=f"'{name}' asks for 1000000 workers"):
        train(
            Point(2),
            copies([1], targets(1, 2)),
            loss=half_squared_distance,
            rounds=1,
            engine=name,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def fatal(model: Point, rows: Tensor) -> Tensor:
    """Kills its process at the client with five examples."""
    if len(rows) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return half_squared_distance(model, rows)


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_the_engine_can_go_on(tmp_path: Path) -> None:
    federation = Federation.from_arrays(targets(10, 2), client_ids=list("aabbbbbccc"))
    problem = Problem(Point(2), fatal, federation)
    engine = make("lean:2:processes", problem)
    run = Run(federation, "fedavg-rr", "full", LocalWork(batch_size=5))
    with pytest.raises(TrainingError, match=r"client b, local.*signal 9 \(out of memory") as error:
        list(simulate(engine, [run], 1))
    assert (error.value.client, error.value.round) == ("b", 0)
    small = Run(federation, "fedavg-rr", "full", LocalWork(batch_size=3))  # never five at once
    *_, (have,) = simulate(engine, [small], 2)
    *_, (want,) = simulate(LoopEngine(problem), [small], 2)
    torch.testing.assert_close(have.x, want.x)

    out = tmp_path / "run"

    with pytest.raises(TrainingError, match=r"round 2, client b, local training.*signal 9"):
        train(
            Point(2),
            federation,
            loss=fatal,
            rounds=5,
            sampling="independent:1,0.3,1",  # with this seed, client b first comes in round 2
            work=LocalWork(batch_size=5),
            engine="lean:2:processes",
            out=out,
            seed=1,
        )
    latest = RunFolder(out).latest()
    assert latest is not None
    assert latest.round == 2


def test_worker_processes_say_what_went_wrong() -> None:
    def broken(model: Point, rows: Tensor) -> Tensor:
        if len(rows) == 5:
            raise KeyError("oops")
        return half_squared_distance(model, rows)

    federation = Federation.from_arrays(targets(10, 2), client_ids=list("aabbbbbccc"))
    with pytest.raises(TrainingError, match="client b, local training: KeyError: 'oops'"):
        train(
            Point(2),
            federation,
            loss=broken,
            rounds=1,
            work=LocalWork(batch_size=5),
            engine="lean:2:processes",
        )


def test_the_lanes_of_large_models_are_few() -> None:
    """Memory must not grow with the cohort."""
    federation = data((6,), 3, [4, 6])
    large = nn.Sequential(nn.Linear(6, 150_000), nn.Linear(150_000, 3))
    assert LanesEngine(Problem(large, losses.cross_entropy, federation)).width <= 4


@pytest.mark.slow
@pytest.mark.skipif(not keep_freed_memory(), reason="no allocator here that could be told")
@pytest.mark.parametrize(("setting", "kept"), [("1", True), ("0", False)])
def test_freed_memory_is_kept_unless_told_otherwise(setting: str, kept: bool) -> None:
    """How much of 80 MB a new process still has after it freed them."""
    program = """
import torch
from pathlib import Path
from fedshuffle.engines.machine import keep_freed_memory
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
keep_freed_memory()
before = pages()
torch.empty(20_000_000).fill_(1.0)
print((pages() - before) * 4096)
"""
    environment = os.environ | {"FEDSHUFFLE_KEEP_MEMORY": setting}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 70e6) == kept


def test_denormal_numbers_are_flushed_only_while_training() -> None:
    tiny = torch.tensor(1e-39)
    with flushed_denormals():
        assert float(tiny * 0.5) == 0
        with flushed_denormals():
            pass
        assert float(tiny * 0.5) == 0
    assert float(tiny * 0.5) > 0


@pytest.mark.parametrize("engine", ["loop", "lean", "lanes"])
@pytest.mark.parametrize(("small", "threads"), [(1e9, 1), (2 * 2 * 21, 3)])
def test_small_steps_are_computed_on_one_thread(
    engine: str, small: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of fewer operations than is said; torch's own setting comes back."""
    monkeypatch.setattr("fedshuffle.engines.machine._SMALL", small)
    seen = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return nn.functional.cross_entropy(model(x), y)

    problem = Problem(nn.Linear(6, 3), watched, data((6,), 3, [2, 3]))
    walker = make(engine, problem)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen.clear()
        stream = Minibatches(0, 2, 1, 2, "sequential", seed=1, round=0)
        walker.walk([Walk(problem.start, [Order(stream, 0.1, Steering(), [1.0])], 1)])
        assert set(seen) == {threads}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "shape", "found"),
    [
        (nn.Linear(6, 3), (6,), 2 * 5 * 21),
        (nn.Conv2d(2, 3, 3), (2, 8, 8), 2 * 5 * 57 * 128),  # at most, for it has 6 x 6 places
        (nn.Sequential(nn.Linear(6, 3)), (4, 6), 2 * 5 * 21 * 24),
    ],
)
def test_operations_are_counted_from_above(
    model: nn.Module, shape: tuple[int, ...], found: float
) -> None:
    federation = data(shape, 3, [2, 3])
    assert operations(Problem(model, losses.squared_error, federation), 5) == found


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshuffle.engines.auto.cores_here", lambda: 2)


def pretend(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Let engines seem to need so many seconds for whatever they are given."""

    def took(engine: Engine, walk: Walk) -> float:
        kind = type(engine).__name__.removesuffix("Engine")
        return seconds.get(kind, 1.0)

    monkeypatch.setattr("fedshuffle.engines.auto._seconds", took)


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        ({}, "lean"),
        ({"Lanes": 0.95}, "lean"),  # not worth it
        ({"Lanes": 0.5}, "lanes"),
        ({"Threads": 0.55}, "lean:2"),
        ({"Threads": 0.8, "Processes": 0.6}, "lean:2:processes"),
        ({"Threads": 1.5, "Processes": 0.95}, "lean"),
        ({"Lanes": 0.2, "Threads": 0.1}, "lanes:2"),
    ],
)
@pytest.mark.usefixtures("two_cores")
def test_the_fastest_engine_is_chosen(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], name: str
) -> None:
    pretend(monkeypatch, **seconds)
    federation = data((6,), 3, SIZES)
    result = train(
        nn.Linear(6, 3), federation, loss=losses.cross_entropy, rounds=2, engine="auto", seed=1
    )
    assert result.engine == name


@pytest.mark.usefixtures("two_cores")
def test_an_engine_that_fails_or_disagrees_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Lanes=0.1)
    federation = text_data(SIZES)
    problem = Problem(CharLSTM(7, 4, 5), losses.cross_entropy, federation)
    run = Run(federation, "fedshuffle-mvr", "uniform:2")
    walk = run.walk(State(problem.start))
    assert walk is not None
    choice = choose(problem, walk)
    assert choice.name == "lean"
    assert "lanes not (" in choice.why
    assert choice.why.startswith("lean ")

    monkeypatch.setattr(
        LanesEngine, "walk", lambda self, walks: [torch.ones_like(w.start) for w in walks]
    )
    federation = data((6,), 3, SIZES)
    problem = Problem(nn.Linear(6, 3).double(), losses.cross_entropy, federation)
    walk = Run(federation, "fedshuffle").walk(State(problem.start))
    assert walk is not None
    choice = choose(problem, walk)
    assert choice.name == "lean"
    assert "lanes not (it does not agree with the reference engine)" in choice.why


def test_a_run_goes_on_with_the_engine_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = data((6,), 3, SIZES)

    def go(rounds: int, resume: bool) -> Result:
        torch.manual_seed(0)
        return train(
            nn.Linear(6, 3),
            federation,
            loss=losses.cross_entropy,
            rounds=rounds,
            engine="auto",
            out=tmp_path / "run",
            resume=resume,
            progress=True,
        )

    pretend(monkeypatch, Lanes=0.1, Threads=1.0)
    assert go(2, resume=False).engine == "lanes"
    assert "engine lanes (lean " in capsys.readouterr().err
    pretend(monkeypatch)
    assert go(4, resume=True).engine == "lanes"


def test_a_run_without_clients_needs_no_choice() -> None:
    federation = data((6,), 3, SIZES)
    nobody = "independent:1e-9,1e-9,1e-9"
    model = nn.Linear(6, 3)
    loss = losses.cross_entropy
    assert train(model, federation, loss=loss, rounds=1, sampling=nobody, engine="auto").engine == (
        "lean"
    )


class Branching(nn.Module):
    """Convolution, ReLU and pooling in a Sequential that is never run as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[:2](x)
        logits: Tensor = self.out(
            torch.cat([self.layers[2](x).flatten(1), x.mean(dim=(2, 3))], dim=1)
        )
        return logits


class Viewing(nn.Module):
    """Views its activations as rows, which needs them contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(16, 3)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layers(x)  # an activation that stays behind cannot be copied
        logits: Tensor = self.out(self.seen.view(-1, 16))
        return logits


class Indexed(nn.Module):
    """Pools with indices."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled, where = self.pool(self.convolution(x))
        logits: Tensor = self.out((pooled + 0.1 * where).flatten(1))
        return logits


@pytest.mark.parametrize("make_model", [Branching, Viewing, Indexed])
@pytest.mark.parametrize("engine", ["lean", "lean:2", "lean:2:processes", "lanes", "auto"])
def test_pooling_is_quickened_only_where_that_changes_nothing(
    make_model: type[nn.Module], engine: str
) -> None:
    federation = data((2, 6, 6), 3, SIZES)
    torch.manual_seed(0)
    model = make_model().double()

    def after(engine: str) -> Tensor:
        settings = {"loss": losses.cross_entropy, "rounds": 2, "step_size": 0.05}
        trained = train(model, federation, engine=engine, **settings).model  # type: ignore[arg-type]
        return parameters_to_vector(trained.parameters()).detach()

    torch.testing.assert_close(after(engine), after("loop"), rtol=1e-11, atol=1e-12)


def test_models_in_other_memory_formats_and_precisions_are_trained() -> None:
    federation = data((2, 6, 6), 3, SIZES)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()
    arranged = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for engine in ("lean", "lanes", "lean:2:processes"):
        have, want = (
            train(m, federation, loss=losses.cross_entropy, rounds=1, engine=engine).model
            for m in (arranged, model)
        )
        torch.testing.assert_close(
            parameters_to_vector(p.contiguous() for p in have.parameters()),
            parameters_to_vector(want.parameters()),
        )
    short = copy.deepcopy(model).to(torch.bfloat16)
    result = train(short, federation, loss=losses.cross_entropy, rounds=1, engine="auto")
    assert result.engine != "loop"
    train(short, federation, loss=losses.cross_entropy, rounds=1, engine="lean:2:processes")


def test_models_and_losses_that_cannot_be_trained_are_named() -> None:
    federation = data((6,), 3, [4, 6])

    def fit(model: nn.Module, loss: object) -> None:
        train(model, federation, loss=loss, rounds=1)  # type: ignore[arg-type]

    with pytest.raises(FedShuffleError, match="'weight' is lazy"):
        fit(nn.LazyLinear(3), losses.cross_entropy)
    with pytest.raises(FedShuffleError, match="'weight' is on the meta device"):
        fit(nn.Linear(6, 3, device="meta"), losses.cross_entropy)
    with pytest.raises(
        FedShuffleError, match=r"CrossEntropyLoss takes outputs.*lambda model, x, y"
    ):
        fit(nn.Linear(6, 3), nn.CrossEntropyLoss())
    with pytest.raises(FedShuffleError, match=r"cannot be called. Use one of fedshuffle.losses"):
        fit(nn.Linear(6, 3), "cross_entropy")


@pytest.mark.parametrize("engine", ["lean", "lean:2", "lanes:2"])
def test_a_label_out_of_range_is_an_error(engine: str) -> None:
    rows, labels = data((6,), 3, SIZES).tensors()
    labels = labels.clone()
    labels[-1] = 3
    federation = Federation.from_arrays(rows, labels, sizes=SIZES)
    with pytest.raises(FedShuffleError, match="out of bounds"):
        train(
            nn.Linear(6, 3).double(),
            federation,
            loss=losses.cross_entropy,
            rounds=1,
            engine=engine,
        )


@pytest.mark.parametrize("engine", ["lean:2", "lanes:2", "lean:2:processes"])
def test_an_engine_can_be_used_again_after_a_failure(engine: str, tmp_path: Path) -> None:
    """The other workers are in the middle of their clients when one fails."""
    marker = tmp_path / "failed"

    def once(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 5 and not marker.exists():
            marker.touch()
            raise KeyError("oops")
        return losses.cross_entropy(model, x, y)

    federation = data((6,), 3, [5, 300, 9, 200])
    problem = Problem(nn.Linear(6, 3).double(), once, federation)
    walker = make(engine, problem)
    run = Run(federation, "fedshuffle", "full", LocalWork(epochs=3, batch_size=10), 0.05)
    with pytest.raises(FedShuffleError, match="oops"):
        list(simulate(walker, [run], 1))
    *_, (have,) = simulate(walker, [run], 2)
    *_, (want,) = simulate(LoopEngine(problem), [run], 2)
    torch.testing.assert_close(have.x, want.x, rtol=1e-11, atol=1e-12)


def program(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that may import the tests."""
    root = str(Path(__file__).parent.parent)
    text = f"import sys; sys.path.insert(0, {root!r})\n{text}"
    return subprocess.run([sys.executable, "-c", text, *words], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_worker_processes_do_not_outlive_a_killed_parent(busy: bool, tmp_path: Path) -> None:
    """Not even those that compute for ever, and the process that they are forked from."""
    killed = """
import os, signal, threading, time
from pathlib import Path
from fedshuffle.engines import Problem, forkserver, make
from fedshuffle.rounds import Run, simulate
from tests.problems import Point, copies, half_squared_distance, targets

here, busy, started = os.getpid(), sys.argv[1] == "True", Path(sys.argv[2])

def endless(model, rows):
    while busy and os.getpid() != here:
        started.touch()
    return half_squared_distance(model, rows)

def end():
    while busy and not started.exists():
        time.sleep(0.01)
    print(*(worker.pid for worker in engine._running), forkserver.fork_server().pid, flush=True)
    os.kill(here, signal.SIGKILL)

problem = Problem(Point(2), endless, copies([1, 2], targets(2, 2)))
engine = make("lean:2:processes", problem)
if busy:
    threading.Thread(target=end).start()
list(simulate(engine, [Run(problem.federation, "fedavg-rr")], 1))
end()
"""
    done = program(killed, str(busy), str(tmp_path / "started"))
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    wait_for(lambda: not any(map(alive, pids)), "the workers and their server to end")


@pytest.mark.slow
def test_worker_processes_serve_a_program_whose_threads_have_computed() -> None:
    """Its model and its loss are of no module, and nothing guards it against being imported."""
    found = program("""
import torch
from torch import nn
from fedshuffle import Federation, LocalWork, train

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 96), nn.Linear(96, 3)
    def forward(self, x):
        return self.out(self.hidden(x).tanh()) * factor

factor = 0.5
torch.manual_seed(0)
model = Scaled()
federation = Federation.from_arrays(
    torch.randn(200, 64), torch.randint(3, (200,)), sizes=[90, 30, 60, 20]
)
criterion = nn.CrossEntropyLoss()
settings = dict(
    loss=lambda model, x, y: criterion(model(x), y), rounds=1, work=LocalWork(batch_size=32)
)
torch.set_num_threads(4)
for _ in range(20):
    torch.randn(300, 300) @ torch.randn(300, 300)
    models = [
        train(model, federation, engine=engine, **settings).model
        for engine in ("lean:2", "lean:2:processes")
    ]
    for one, other in zip(*(m.parameters() for m in models)):
        assert torch.equal(one, other)
print("done")
""")
    assert found.stdout == "done\n", found.stderr


LOCK = threading.Lock()
"""Stands for the locks inside of libraries, which a thread may hold at any time."""


def locked(model: Point, rows: Tensor) -> Tensor:
    """Needs the lock, as a matrix product may need one of its library's."""
    assert LOCK.acquire(timeout=20), "the lock is held by a thread that is not here"
    LOCK.release()
    return half_squared_distance(model, rows)


def test_worker_processes_inherit_no_locks_of_threads() -> None:
    """A fork of a program with threads would wait for ever for a lock that one of them holds."""
    problem = Problem(Point(2), locked, copies([1, 2], targets(2, 2)))
    engine = make("lean:2:processes", problem)
    run = Run(problem.federation, "fedavg-rr")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(LOCK.acquire).result()
        try:
            (have,) = next(simulate(engine, [run], 1))
        finally:
            LOCK.release()
    (want,) = next(simulate(LoopEngine(problem), [run], 1))
    torch.testing.assert_close(have.x, want.x)
    if sys.platform == "linux":
        threads = Path(f"/proc/{forkserver.fork_server().pid}/task")
        assert len(list(threads.iterdir())) == 1
