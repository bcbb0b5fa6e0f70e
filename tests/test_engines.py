"""Every engine gives the trajectory of the reference engine."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshuffle import (
    MVR,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    TrainingError,
    losses,
    methods,
    train,
)
from fedshuffle.engines import Engine, LanesEngine, LeanEngine, LoopEngine, Problem, make
from fedshuffle.kernel import Order, Probe, Steering, Walk, step
from fedshuffle.local_work import Minibatches
from fedshuffle.training import Run, simulate
from tests.problems import Point, copies, half_squared_distance, quadratic, targets


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


ENGINES = ["loop", "lanes", "lean", "lean:2"]
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
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "momentum", [None, MVR(0.2), GlobalMomentum(0.2)], ids=["plain", "mvr", "g"]
)
def test_every_engine_equals_the_loop(case: str, momentum: MVR | GlobalMomentum | None) -> None:
    make_model, federation = CASES[case]
    torch.manual_seed(0)
    model = make_model().double()
    problem = Problem(model, losses.cross_entropy, federation)
    method = methods.get("fedshuffle").with_momentum(momentum)
    work = LocalWork(epochs=2, batch_size=4, clip=0.8, weight_decay=0.01)
    runs = [Run(federation, method, "uniform:2", work, 0.05, 1.0, seed) for seed in (1, 2)]
    reference = [s.x for states in simulate(LoopEngine(problem), runs, 4) for s in states]
    engines: list[Engine] = [
        *(LanesEngine(problem, width) for width in (1, 3, 100)),
        *(LeanEngine(problem, workers) for workers in (1, 2)),
    ]
    for engine in engines:
        xs = [s.x for states in simulate(engine, runs, 4) for s in states]
        for have, want in zip(xs, reference, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)
    assert not torch.equal(reference[0], reference[1])


def order(client: int, size: int, steps: int, **steering: object) -> Order:
    stream = Minibatches(client, size, steps, 2, "reshuffled", 3, 0)
    return Order(stream, 0.1 + 0.01 * client, Steering(**steering), [1.0, float(client)])  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("clip", "decay"), [(math.inf, 0.0), (0.6, 0.0), (math.inf, 0.3), (0.4, 0.2)]
)
def test_the_whole_kernel_by_hand(engine: str, clip: float, decay: float) -> None:
    """Each of alpha, beta, mu and v, mixed over the clients of one walk, and several sums; with
    clipping and weight decay.
    """
    points = targets(3, 2)
    problem = quadratic(copies([2, 4, 6], points))
    x = targets(1, 2, seed=9)[0]
    v = targets(1, 2, seed=8)[0]
    orders = [
        order(0, 2, 5, alpha=0.5, mu=0.3),
        order(1, 4, 3, alpha=1.0, beta=0.4, v=v),
        order(2, 6, 7, alpha=0.7, beta=0.2, mu=1.5, v=-v),
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
            y = y - o.step_size * (s.alpha * at_y - s.beta * at_x + push + s.mu * (y - x))
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
    probe = Probe((a, b), np.array([0, 1]), np.array([0.3, 2.0]), 0, weight_decay=0.7)
    (have,) = make(engine, problem).probe([probe])
    means = torch.stack([rows[:3].mean(0), rows[3:].mean(0)])
    weights = torch.tensor([0.3, 2.0], dtype=torch.float64)
    want = torch.stack([weights @ (point - means) + 0.7 * 2.3 * point for point in (a, b)])
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)


def test_the_step_is_the_formula() -> None:
    y, x, g, gx, v = targets(5, 3)
    have = step(y, x, g, gx, 0.1, 0.5, 0.2, 0.3, v)
    torch.testing.assert_close(have, y - 0.1 * (0.5 * g - 0.2 * gx + v + 0.3 * (y - x)))


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

    with pytest.raises(TrainingError, match="client 0, local training: KeyError: 'oops'"):
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
    assert not torch.equal(weights(1, 10), weights(2, 10))


def test_dropout_cannot_run_in_threads_and_says_so() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match="with one worker"):
        train(model, data((6,), 3, [4, 6]), loss=losses.cross_entropy, rounds=1, engine="lean:2")


def test_dropout_cannot_run_in_lanes_and_says_so() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match="Use engine='loop'"):
        train(model, data((6,), 3, [4, 6]), loss=losses.cross_entropy, rounds=1, engine="lanes")


def test_running_statistics_are_refused_and_batch_statistics_are_not() -> None:
    federation = data((6,), 3, [4, 6])
    bad = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match=r"layer '1' \(BatchNorm1d\).*GroupNorm"):
        Problem(bad, losses.cross_entropy, federation)
    fine = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)).double()
    Problem(fine, losses.cross_entropy, federation)


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
