"""Every engine gives the trajectory of the reference engine."""

import dataclasses
import math
from collections.abc import Callable, Sequence

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
    Problem,
    ReferenceEngine,
    SequentialEngine,
    VectorizedEngine,
    choose,
    make,
)
from fedshuffle.engines.gradients import by_hand
from fedshuffle.kernel import ClientTask, FullGradient, LocalTraining, StepCoefficients, step
from fedshuffle.local_work import Minibatches
from fedshuffle.models import CharLSTM, ResNet
from fedshuffle.training.rounds import Run, simulate
from tests.engines.models import ENGINES, SIZES, Tokens, data, text_data, token_data
from tests.problems import Point, copies, half_squared_distance, quadratic, targets

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


def all_engines(problem: Problem, widths: Sequence[int] = (1, 3, 100)) -> dict[str, Engine]:
    """Every engine in every variant that makes a difference to this model."""
    vectorised = not any(isinstance(module, nn.LSTM) for module in problem.model.modules())
    problems = {"": problem}
    if by_hand(problem) is not None:  # not with a loss of unknown derivative
        loss = problem.loss
        opaque = lambda m, *batch: loss(m, *batch)  # noqa: E731
        by_autograd = Problem(problem.replica(), opaque, problem.federation)
        problems = {" by hand": problem, "": by_autograd}
    alone = {f"sequential{how}": SequentialEngine(each) for how, each in problems.items()}
    wide: dict[str, Engine] = {}
    for width in widths:
        for how, each in problems.items() if vectorised else ():
            wide[f"{width} wide{how}"] = engine = VectorizedEngine(each)
            engine.width = width
    named = ["sequential:2", "sequential:3:processes", *(["vectorized:2"] if vectorised else [])]
    return {**wide, **alone, **{name: make(name, problem) for name in named}}


@pytest.mark.parametrize("case", CASES)
def test_every_engine_equals_the_reference(case: str) -> None:
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
    reference = [s.x for states in simulate(ReferenceEngine(problem), runs, 3) for s in states]
    for name, engine in all_engines(problem).items():
        xs = [s.x for states in simulate(engine, runs, 3) for s in states]
        for have, want in zip(xs, reference, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13, msg=name)
    assert not torch.equal(reference[0], reference[1])


@pytest.mark.parametrize("case", CASES)
def test_every_engine_equals_the_reference_in_single_precision(case: str) -> None:
    """The updates of three rounds, in float32, up to 1e-5 of their size."""
    make_model, federation = CASES[case]
    torch.manual_seed(0)
    problem = Problem(make_model().float(), losses.cross_entropy, federation)
    run = Run(federation, "fedshuffle", "full", LocalWork(epochs=2, batch_size=4), 0.05)
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 3)
    for name, engine in all_engines(problem, widths=(3,)).items():
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
    assert by_hand(problem) is not None
    run = Run(federation, "fedshuffle", "full", LocalWork(epochs=2, batch_size=4), 0.05)
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 3)
    for engine in (SequentialEngine(problem), VectorizedEngine(problem)):
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
        assert by_hand(problem) is None, model
        run = Run(federation, "fedshuffle", "full", LocalWork(batch_size=4), 0.05)
        *_, (want,) = simulate(ReferenceEngine(problem), [run], 2)
        *_, (have,) = simulate(make("sequential", problem), [run], 2)
        torch.testing.assert_close(have.x, want.x, rtol=1e-12, atol=1e-13)
    mine = Problem(
        nn.Linear(6, 3).double(), lambda m, x, y: losses.cross_entropy(m, x, y), federation
    )
    assert by_hand(mine) is None
    rows, labels = federation.tensors()
    some = Federation.from_arrays(rows, labels.where(labels > 0, -100), sizes=SIZES)
    assert by_hand(Problem(nn.Linear(6, 3).double(), losses.cross_entropy, some)) is None


def task(client: int, size: int, steps: int, **coefficients: object) -> ClientTask:
    stream = Minibatches(client, size, steps, 2, "reshuffled", 3, 0)
    given = StepCoefficients(**coefficients)  # type: ignore[arg-type]
    return ClientTask(stream, 0.1 + 0.01 * client, given, [1.0, float(client)])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("clip", "decay"), [(math.inf, 0.0), (0.6, 0.0), (math.inf, 0.3), (0.4, 0.2)]
)
def test_the_whole_kernel_by_hand(engine: str, clip: float, decay: float) -> None:
    """Each of alpha, beta, mu, v and the scale, mixed over the clients of one request, and several
    sums; with clipping and weight decay.
    """
    points = targets(7, 2)
    problem = quadratic(copies([2, 4, 6, 3, 5, 2, 1], points))
    x = targets(1, 2, seed=9)[0]
    v = targets(1, 2, seed=8)[0]
    scale, other = targets(2, 2, seed=7).exp()
    tasks = [
        task(0, 2, 5, alpha=0.5, mu=0.3),
        task(1, 4, 3, alpha=1.0, beta=0.4, v=v),
        task(2, 6, 7, alpha=0.7, beta=0.2, mu=1.5, v=-v, scale=scale),
        task(3, 3, 4, alpha=1.2, mu=0.1, scale=other),
        task(4, 5, 6, alpha=0.0, beta=0.9, mu=0.4, v=2 * v),
        task(5, 2, 3, alpha=0.0, beta=-0.5, scale=scale),
        task(6, 1, 8, alpha=0.0, mu=0.6, v=v, scale=other),
    ]
    tasks = [dataclasses.replace(o, clip=clip, weight_decay=decay) for o in tasks]
    want = torch.zeros(2, 2, dtype=torch.float64)
    for o in tasks:
        s, b, y = o.coefficients, points[o.minibatches.client], x
        for _ in range(o.minibatches.steps):
            push = torch.zeros_like(x) if s.v is None else s.v
            at_y, at_x = (
                (z - b) * min(1.0, clip / float((z - b).norm())) + decay * z for z in (y, x)
            )
            direction = s.alpha * at_y - s.beta * at_x + push + s.mu * (y - x)
            y = y - o.step_size * (1.0 if s.scale is None else s.scale) * direction
        want[0] += o.weights[0] * (y - x)
        want[1] += o.weights[1] * (y - x)
    have = make(engine, problem).local_training([LocalTraining(x, tasks, 2)])[0].sums
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_full_gradients_are_weighted(engine: str) -> None:
    sizes = [3, 1500]  # the second client is larger than one piece
    rows = targets(sum(sizes), 2)
    problem = quadratic(Federation.from_arrays(rows, sizes=sizes))
    a, b = targets(2, 2, seed=4)
    weights = np.array([[0.3, 0.0, 1.0], [2.0, 1.0, 0.0]])
    request = FullGradient((a, b), np.array([0, 1]), weights, 0, weight_decay=0.7)
    have = make(engine, problem).full_gradients([request])[0].sums
    means = torch.stack([rows[:3].mean(0), rows[3:].mean(0)])
    want = torch.stack([torch.stack([p - means + 0.7 * p for p in (a, b)])] * 3)
    want = torch.einsum("ik,kpid->kpd", torch.from_numpy(weights), want)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)
    assert have.shape == (3, 2, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_local_training_with_a_scale_is_a_geometric_series(engine: str) -> None:
    """f_i(y) = |y - b_i|^2 / 2 from x, coordinate by coordinate: with r = gamma D (alpha + mu) and
    u = (alpha - beta) (x - b_i) + v, after tau steps y - x = -u (1 - (1 - r)^tau) / (alpha + mu).
    """
    rng = np.random.default_rng(5)
    b, v = rng.normal(size=(2, 4, 3))
    x, scale = rng.normal(size=3), rng.uniform(0.2, 3.0, size=(4, 3))
    alpha, beta, mu, tau = 0.8, 0.3, 0.5, np.array([4, 9, 1, 6])
    problem = quadratic(copies([3, 5, 2, 4], torch.from_numpy(b)))
    tasks = [
        ClientTask(
            Minibatches(i, [3, 5, 2, 4][i], int(tau[i]), 2, "reshuffled", 3, 0),
            0.1,
            StepCoefficients(alpha, beta, mu, torch.from_numpy(v[i]), torch.from_numpy(scale[i])),
            np.eye(4)[i].tolist(),
        )
        for i in range(4)
    ]
    request = LocalTraining(torch.from_numpy(x), tasks, 4)
    have = make(engine, problem).local_training([request])[0].sums
    rate = 0.1 * scale * (alpha + mu)
    u = (alpha - beta) * (x - b) + v
    want = -u * (1 - (1 - rate) ** tau[:, None]) / (alpha + mu)
    np.testing.assert_allclose(have.numpy(), want, rtol=1e-12, atol=1e-14)


def every_coefficient(problem: Problem, seed: int, own_sums: bool) -> LocalTraining:
    """A request of every client whose tasks have all the parts of the kernel, at random."""
    rng = np.random.default_rng(seed)
    sizes = problem.federation.sizes.tolist()
    d = len(problem.start)

    def vector(chance: float) -> Tensor | None:
        drawn = torch.from_numpy(rng.normal(size=d))
        return 0.3 * drawn if rng.random() < chance else None

    tasks = []
    for client, size in enumerate(sizes):
        scale = vector(0.6)
        coefficients = StepCoefficients(
            alpha=[1.0, 0.7, 0.0][rng.integers(3)],
            beta=[0.0, 0.4][rng.integers(2)],
            mu=[0.0, 0.5][rng.integers(2)],
            v=vector(0.7),
            scale=None if scale is None else scale.exp(),
            own_gradient=bool(rng.random() < 0.3),
        )
        stream = Minibatches(client, size, int(rng.integers(1, 7)), 2, "reshuffled", seed, 0)
        weights = np.eye(len(sizes))[client] if own_sums else np.zeros(0)
        weights = np.append(weights, rng.normal(size=2))
        tasks.append(
            ClientTask(
                stream,
                0.05 * (1 + rng.random()),
                coefficients,
                weights.tolist(),
                [math.inf, 0.5][rng.integers(2)],
                [0.0, 0.1][rng.integers(2)],
            )
        )
    start = problem.start + 0.1 * torch.from_numpy(rng.normal(size=d))
    return LocalTraining(start, tasks, len(tasks[0].weights))


def asked(problem: Problem, seed: int, own_sums: bool) -> FullGradient:
    """A request of all clients at two points, with a sum for each client or three for all."""
    rng = np.random.default_rng(seed)
    n, d = len(problem.federation), len(problem.start)
    weights = np.eye(n) if own_sums else rng.normal(size=(n, 3))
    weights[0] *= seed % 2
    points = tuple(problem.start + 0.1 * torch.from_numpy(rng.normal(size=d)) for _ in range(2))
    return FullGradient(points, np.arange(n), weights, 0, weight_decay=0.3)


MANY_SIZES = [int(size) for size in np.random.default_rng(3).integers(1, 6, size=24)]


COEFFICIENTS = {
    **{name: CASES[name] for name in ("linear", "mlp", "cnn", "tokens", "pooled", "lstm")},
    "many": (lambda: nn.Linear(6, 3), data((6,), 3, MANY_SIZES)),
}


@pytest.mark.parametrize("case", COEFFICIENTS)
def test_every_engine_uses_all_coefficients_like_the_reference(case: str) -> None:
    """Local training with other coefficients for every client, and full gradients with many sums,
    in lockstep.

    Engines treat parameters as one vector, so models of small stacks get most of the combinations.
    """
    make_model, federation = COEFFICIENTS[case]
    torch.manual_seed(0)
    problem = Problem(make_model().double(), losses.cross_entropy, federation)
    few = case == "many" or by_hand(problem) is None
    kinds = [(seed, bool(seed % 3)) for seed in range(2 if few else 6)]
    trainings = [every_coefficient(problem, *kind) for kind in kinds]
    gradients = [asked(problem, *kind) for kind in kinds]

    def answers(engine: Engine) -> list[Tensor]:
        found = [*engine.local_training(trainings), *engine.full_gradients(gradients)]
        return [answer.sums for answer in found]

    wanted = answers(ReferenceEngine(problem))
    for name, engine in all_engines(problem).items():
        for have, want in zip(answers(engine), wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("engine", [*ENGINES, "vectorized:2"])
def test_steps_without_gradients_look_at_no_example(engine: str) -> None:
    """Neither the loss nor a batch may be touched once the engine is made."""
    points = targets(3, 2)
    problem = quadratic(copies([2, 4, 6], points))
    runner = make(engine, problem)
    assert not problem.random  # the first look at the model, which is allowed

    def forbidden(*_: object) -> tuple[Tensor, ...]:
        raise AssertionError("an example was looked at")

    problem.batch = problem.loss = forbidden  # type: ignore[method-assign, assignment]
    x, v = targets(2, 2, seed=9)
    scale = targets(1, 2, seed=7)[0].exp()
    tasks = [
        task(0, 2, 5, alpha=0.0, v=v),
        task(1, 4, 3, alpha=0.0, v=-v, scale=scale),
        task(2, 6, 7, alpha=0.0, v=v, mu=0.5, scale=scale),
    ]
    tasks = [
        dataclasses.replace(o, weights=np.eye(3)[k].tolist(), weight_decay=0.3, clip=0.1)
        for k, o in enumerate(tasks)
    ]
    have = runner.local_training([LocalTraining(x, tasks, 3)])[0].sums
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

    runner = make(engine, Problem(Point(2), near, federation))
    tasks = [task(k, size, 3, alpha=0.0, beta=1.0, v=far) for k, size in enumerate([2, 4])]
    have = runner.local_training([LocalTraining(x, tasks, 2)])[0].sums
    steps = torch.stack([-0.3 * (far + targets(2, 2)[0]), -0.33 * (far + targets(2, 2)[1])])
    torch.testing.assert_close(have, torch.stack([steps.sum(0), steps[1]]), rtol=1e-12, atol=0.0)

    def small(model: Point, rows: Tensor) -> Tensor:  # not finite at the larger client
        return half_squared_distance(model, rows) / (rows.shape[-2] < 4)

    runner = make(engine, Problem(Point(2), small, federation))
    request = FullGradient((x,), np.arange(2), np.array([[2.0], [0.0]]), 0)
    have = runner.full_gradients([request])[0].sums
    torch.testing.assert_close(have[0, 0], -2 * targets(2, 2)[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_full_gradients_visit_the_data_once_per_point(engine: str) -> None:
    """However many sums there are."""
    calls = []

    def counting(model: Point, rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return half_squared_distance(model, rows)

    problem = Problem(Point(2), counting, copies([2, 4, 3], targets(3, 2)))
    runner = make(engine, problem)
    assert not problem.random  # the first look at the model
    calls.clear()
    points = tuple(targets(2, 2, seed=4))
    weights = np.random.default_rng(0).normal(size=(3, 40))
    have = runner.full_gradients([FullGradient(points, np.arange(3), weights, 0)])[0].sums
    # Vectorized visits the data once for both points; what processes do is not seen from here.
    assert len(calls) == {"vectorized": 3, "sequential:2:processes": 0}.get(engine, 6)
    slopes = torch.stack([point - targets(3, 2) for point in points])
    want = torch.einsum("ik,pid->kpd", torch.from_numpy(weights), slopes)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_counts_nowhere_must_be_finite_too(engine: str) -> None:
    federation = Federation.from_arrays(targets(6, 2), client_ids=list("abbbcc"))
    problem = quadratic(federation)
    runner = make(engine, problem)
    huge = torch.full((2,), 1e308, dtype=torch.float64)
    tasks = [
        task(0, 1, 3),
        dataclasses.replace(task(1, 3, 3, v=huge, scale=huge), weights=[0.0, 0.0]),
    ]
    with pytest.raises(TrainingError, match=r"client b, local training.*not finite"):
        runner.local_training([LocalTraining(problem.start, tasks, 2)])


def test_auto_tries_engines_on_all_coefficients() -> None:
    make_model, federation = COEFFICIENTS["many"]
    torch.manual_seed(0)
    problem = Problem(make_model().double(), losses.cross_entropy, federation)
    choice = choose(problem, every_coefficient(problem, 1, own_sums=True))
    assert choice.engine.name != "reference"
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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_larger_than_any_client_is_one_step(engine: str) -> None:
    federation = Federation.from_arrays(targets(5, 2), sizes=[2, 3])
    work = LocalWork(batch_size=10**20)
    result = train(
        Point(2), federation, loss=half_squared_distance, rounds=1, engine=engine, work=work
    )
    assert result.history[0]["steps"] == 2


def test_vectorized_refuses_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match="Use the engine 'sequential'"):
        train(
            model, data((6,), 3, [4, 6]), loss=losses.cross_entropy, rounds=1, engine="vectorized"
        )


def test_vectorized_trains_few_large_models_at_once() -> None:
    """Memory must not grow with the cohort."""
    federation = data((6,), 3, [4, 6])
    large = nn.Sequential(nn.Linear(6, 150_000), nn.Linear(150_000, 3))
    assert VectorizedEngine(Problem(large, losses.cross_entropy, federation)).width <= 4


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
@pytest.mark.parametrize(
    "engine", ["sequential", "sequential:2", "sequential:2:processes", "vectorized", "auto"]
)
def test_faster_pooling_changes_nothing(make_model: type[nn.Module], engine: str) -> None:
    federation = data((2, 6, 6), 3, SIZES)
    torch.manual_seed(0)
    model = make_model().double()

    def after(engine: str) -> Tensor:
        settings = {"loss": losses.cross_entropy, "rounds": 2, "step_size": 0.05}
        trained = train(model, federation, engine=engine, **settings).model  # type: ignore[arg-type]
        return parameters_to_vector(trained.parameters()).detach()

    torch.testing.assert_close(after(engine), after("reference"), rtol=1e-11, atol=1e-12)
