"""A federation's transform of its examples: the same draws on every engine and after a resume."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import (
    Evaluation,
    Federation,
    FedShuffleError,
    LocalWork,
    TrainingError,
    losses,
    train,
)
from fedshuffle.data import padded
from fedshuffle.engines import Problem, ReferenceEngine, make
from fedshuffle.engines import problem as problems
from fedshuffle.engines.example_transform import transformed
from fedshuffle.kernel import FullGradient
from fedshuffle.local_work import Minibatches
from fedshuffle.randomness import Address
from fedshuffle.theory import logistic_regression_constants
from fedshuffle.theory.problem import recognise
from fedshuffle.training.rounds import Run, simulate
from tests.engines.models import ENGINES, data
from tests.problems import Point, half_squared_distance

SIZES = [2, 5, 9, 4]
WORK = LocalWork(epochs=2, batch_size=3)


def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Draws from all three global generators."""
    shift = random.random() + np.random.rand()
    return x + 0.5 * torch.randn_like(x) + shift, y


def cropped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A random number of columns, so that the minibatches of clients differ in shape."""
    return x[:, : int(torch.randint(2, 7, ()))], y


class Mean(nn.Module):
    """Takes inputs of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(x.mean(dim=1, keepdim=True))
        return logits


def trained(
    engine: str, method: str = "fedshuffle", transform: Any = noisy, work: LocalWork = WORK
) -> Tensor:
    torch.manual_seed(0)
    model = Mean() if transform is cropped else nn.Linear(6, 3)
    federation = data((6,), 3, SIZES).with_transform(transform)
    problem = Problem(model.double(), losses.cross_entropy, federation)
    run = Run(problem.federation, method, "uniform:3", work, 0.2, seed=5)
    running = make(engine, problem)
    try:
        *_, (state,) = simulate(running, [run], 3)
    finally:
        running.close()
    return state.x


def test_the_reference_is_a_plain_loop() -> None:
    """Local SGD over minibatches that are transformed one by one, written out."""
    federation = data((6,), 3, [5]).with_transform(noisy)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    run = Run(federation, "fedavg-rr", "full", WORK, 0.2, seed=5)
    engine = ReferenceEngine(Problem(model, losses.cross_entropy, federation))
    *_, (state,) = simulate(engine, [run], 2)
    x, y = federation.tensors()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for round in range(2):
        stream = Minibatches(0, 5, 4, 3, "reshuffled", seed=5, round=round)
        for step, rows in enumerate(stream):
            batch = transformed(noisy, [x[rows], y[rows]], Address(5, round, 0, step))
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            torch.autograd.backward(loss)
            optimiser.step()
    torch.testing.assert_close(state.x, parameters_to_vector(model.parameters()).detach())


@pytest.mark.parametrize(
    ("method", "transform"),
    [
        ("fedshuffle", noisy),
        ("fedshuffle", cropped),
        ("fedlin", cropped),
        ("mime", noisy),
        ("fedshuffle-mvr", cropped),
    ],
)
def test_every_engine_draws_the_same(method: str, transform: Any) -> None:
    """Minibatches, and the full gradients that FedLin, Mime and MVR ask for."""
    wanted = trained("reference", method, transform)
    for engine in ENGINES[1:]:
        torch.testing.assert_close(trained(engine, method, transform), wanted, msg=engine)


@pytest.mark.parametrize("transform", [noisy, cropped])
def test_every_engine_draws_the_same_for_a_local_optimiser(transform: Any) -> None:
    work = LocalWork(steps=5, batch_size=3, optimiser="adamw")
    wanted = trained("reference", "fedavg-rr", transform, work)
    for engine in ("sequential", "vectorized", "sequential:2"):
        have = trained(engine, "fedavg-rr", transform, work)
        torch.testing.assert_close(have, wanted, msg=engine)


def test_another_seed_draws_other_examples() -> None:
    x = [torch.zeros(4)]
    draw = [
        transformed(lambda x: x + torch.rand(4), x, Address(*address))[0]
        for address in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    ]
    assert len({tuple(one.tolist()) for one in draw}) == 5


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "sequential:2"])
def test_the_global_generators_are_left_alone(engine: str) -> None:
    federation = data((6,), 3, SIZES).with_transform(noisy)
    model = nn.Linear(6, 3)

    def states() -> tuple[Any, ...]:
        name, key, *rest = tuple(np.random.get_state())
        numpy_state = name, np.asarray(key).tolist(), *rest
        return random.getstate(), numpy_state, torch.get_rng_state().tolist()

    before = states()
    train(model, federation, loss=losses.cross_entropy, rounds=1, work=WORK, engine=engine)
    assert states() == before


def test_full_gradients_have_the_same_draws_at_every_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in pieces: the gradient of a linear loss is the mean of the transformed examples."""
    monkeypatch.setattr(problems, "GRADIENT_ROWS", 2)
    federation = Federation.from_arrays(torch.zeros(5, 3).double(), sizes=[5]).with_transform(
        lambda x: x + torch.rand_like(x)
    )
    problem = Problem(Point(3), lambda model, x: (x @ model.x).mean(), federation)

    def request(seed: int, round: int = 4) -> FullGradient:
        points = torch.zeros(3).double(), torch.ones(3).double()
        return FullGradient(points, np.array([0]), np.ones((1, 1)), round, seed=seed)

    def gradients(engine: str, *where: int) -> Tensor:
        return make(engine, problem).full_gradients([request(*where)])[0].sums[0]

    wanted = gradients("reference", 1)
    torch.testing.assert_close(wanted[0], wanted[1])
    pieces = problem.pieces(0, None, request(1).address(0))
    assert [len(piece.rows) for piece in pieces] == [2, 2, 1]
    drawn = torch.cat([problem.batch(piece.rows, piece.address)[0] for piece in pieces])
    assert len(set(drawn.flatten().tolist())) == 15
    torch.testing.assert_close(wanted[0], drawn.mean(0))
    for engine in ("sequential", "vectorized"):
        torch.testing.assert_close(gradients(engine, 1), wanted)
        assert not torch.allclose(gradients(engine, 1, 5), wanted)
        assert not torch.allclose(gradients(engine, 2), wanted)


def test_shares_of_pieces_count_what_the_transform_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transform that masks targets at random: the full gradient is the mean over the others."""
    monkeypatch.setattr(problems, "GRADIENT_ROWS", 3)

    def masked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.where(torch.rand(len(y)) < 0.5, y, -100)

    federation = data((6,), 3, [8]).with_transform(masked)
    problem = Problem(nn.Linear(6, 3).double(), losses.cross_entropy, federation)
    pieces = problem.pieces(0)
    counts = [int((problem.batch(p.rows, p.address)[1] != -100).sum()) for p in pieces]
    assert sum(piece.share for piece in pieces) == pytest.approx(1)
    assert [piece.share * sum(counts) for piece in pieces] == pytest.approx(counts)


def go(out: Path | None, federation: Federation, rounds: int, **more: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    settings: dict[str, Any] = {"sampling": "uniform:2", "work": WORK, "seed": 4, **more}
    result = train(model, federation, loss=losses.cross_entropy, rounds=rounds, out=out, **settings)
    return parameters_to_vector(result.model.parameters()).detach()


@pytest.mark.parametrize("engine", ["sequential", "vectorized:2"])
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Path, engine: str) -> None:
    federation = data((6,), 3, SIZES).with_transform(noisy)
    wanted = go(None, federation, 4, engine=engine)
    go(tmp_path, federation, 2, engine=engine)
    assert torch.equal(go(tmp_path, federation, 4, engine=engine, resume=True), wanted)


def test_a_run_is_not_resumed_with_another_transform(tmp_path: Path) -> None:
    federation = data((6,), 3, SIZES).with_transform(noisy)
    go(tmp_path, federation, 2)

    def other(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, y

    for changed, name in ((other, "'.*other'"), (None, "None")):
        with pytest.raises(FedShuffleError, match=f"example_transform 'noisy', not {name}"):
            go(tmp_path, federation.with_transform(changed), 3, resume=True)


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "sequential:2:processes"])
def test_a_stored_federation_is_transformed_after_it_is_read(tmp_path: Path, engine: str) -> None:
    memory = data((6,), 3, SIZES)
    memory.save(tmp_path / "store")
    stored = Federation.open(tmp_path / "store").with_transform(noisy)
    assert stored.path == tmp_path / "store"
    have = go(None, stored, 2, engine=engine)
    torch.testing.assert_close(have, go(None, memory.with_transform(noisy), 2, engine="reference"))


def test_parts_of_a_federation_keep_its_transform() -> None:
    federation = data((6,), 3, SIZES).with_transform(noisy)
    parts = [federation.subset([1]), federation.pooled(), federation.sample(2)]
    assert [part.transform for part in parts] == [noisy] * 3
    assert federation.with_transform(None).transform is None


def test_an_evaluation_sees_the_transform_of_its_own_data() -> None:
    held_out = Federation.from_arrays(torch.eye(3), torch.arange(3), sizes=[1, 2])
    model = nn.Identity()
    assert Evaluation(held_out, ["accuracy"])(model)["accuracy"] == 1
    turned = held_out.with_transform(lambda x, y: (x, (y + 1) % 3))
    assert Evaluation(turned, ["accuracy"])(model)["accuracy"] == 0
    drawn = Evaluation(held_out.with_transform(noisy), ["loss"], loss=losses.cross_entropy)
    assert drawn(model) == drawn(model)
    # The transform of the training data plays no role in it.
    seen = []

    def watched(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return x, y

    training = held_out.with_transform(watched)
    evaluate = Evaluation(held_out)  # in batches of three, and training takes one by one
    train(nn.Linear(3, 3), training, loss=losses.cross_entropy, rounds=1, evaluate=evaluate)
    assert 1 in seen
    assert 3 not in seen


def test_exact_constants_are_of_examples_as_they_are() -> None:
    federation = data((6,), 3, SIZES)
    model = nn.Linear(6, 3)
    assert not isinstance(recognise(model, losses.cross_entropy, federation), str)
    augmented = federation.with_transform(noisy)
    assert "transform" in recognise(model, losses.cross_entropy, augmented)
    with pytest.raises(FedShuffleError, match=r"Give federation\.with_transform\(None\)"):
        logistic_regression_constants(augmented, classes=3)


def test_auto_finds_an_engine_that_draws_the_same() -> None:
    federation = data((6,), 3, SIZES).with_transform(noisy)
    torch.testing.assert_close(
        go(None, federation, 2, engine="auto"), go(None, federation, 2, engine="reference")
    )


def test_a_transform_may_make_other_fields() -> None:
    """Bytes to scaled numbers with a mask: the loss takes what the transform returns."""

    def scaled(pixels: Tensor) -> tuple[Tensor, Tensor]:
        return pixels / 255, pixels > 0

    def loss(model: Point, x: Tensor, mask: Tensor) -> Tensor:
        return half_squared_distance(model, x * mask)

    pixels = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    federation = Federation.from_arrays(
        pixels,
        sizes=[2],
    ).with_transform(scaled)
    for engine in ("reference", "sequential", "vectorized"):
        work = LocalWork(batch_size=2)
        result = train(Point(2), federation, loss=loss, rounds=1, work=work, engine=engine)
        torch.testing.assert_close(result.model.x.data, torch.tensor([0.01, 0.07]).double())


class Words(nn.Module):
    """Logits from the mean over the words of a row; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        there = (tokens != 0).double().unsqueeze(-1)
        logits: Tensor = (self.table(tokens) * there).sum(1) / there.sum(1)
        return logits


def test_text_is_tokenised_and_padded_per_minibatch() -> None:
    """Stored as bytes; the same as tokens that were made and padded for all examples before."""
    numbers = {"so": 1, "it": 2, "is": 3, "no": 4}
    texts = ["so it is", "no", "it is so it is", "no no", "is it so"]
    labels, widths = np.array([0, 1, 0, 1, 0]), set[int]()

    def tokens(some: list[str]) -> Tensor:
        return torch.from_numpy(padded([[numbers[word] for word in t.split()] for t in some]))

    def tokenised(codes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        assert codes.dtype == torch.uint8
        found = tokens([bytes(row).decode().rstrip("\0") for row in codes.tolist()])
        widths.add(found.shape[1])
        return found, labels

    codes = padded([list(text.encode()) for text in texts]).astype("uint8")
    raw = Federation.from_arrays(codes, labels, sizes=[1, 4], transform=tokenised)
    ready = Federation.from_arrays(tokens(texts), labels, sizes=[1, 4])

    def fit(federation: Federation, engine: str) -> Tensor:
        torch.manual_seed(0)
        settings: Any = {"loss": losses.cross_entropy, "rounds": 2, "work": LocalWork(batch_size=2)}
        result = train(Words().double(), federation, engine=engine, **settings)
        return parameters_to_vector(result.model.parameters()).detach()

    wanted = fit(ready, "reference")
    for engine in ("reference", "sequential", "vectorized", "sequential:2"):
        torch.testing.assert_close(fit(raw, engine), wanted, rtol=0, atol=1e-12, msg=engine)
    assert len(widths) > 1


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "sequential:2"])
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda x, y: x, "takes 2 fields and returned a Tensor. Return all fields"),
        (lambda x, y: (x, "y"), "returned a tuple of Tensor, str. Return all"),
        (lambda x, y: None, "returned a NoneType"),
        (lambda x, y: (), "returned no field"),
        (lambda x, y: (x[:1], y), r"field 0 of shape \(1, 6\) for . examples. Return one row"),
        (lambda x, y: (x, y.sum()), r"field 1 of shape \(\)"),
        (lambda x, y: (x / 0, y), "NaN or infinity in field 0"),
        (lambda x, y: (x @ y, y), "transform of the examples: RuntimeError"),
        (lambda x: x, "transform of the examples: TypeError"),
    ],
)
def test_what_is_wrong_with_a_transform_is_said_once(
    transform: Any, message: str, engine: str
) -> None:
    federation = data((6,), 3, [2, 3]).with_transform(transform)
    with pytest.raises(TrainingError, match=f"round 0, client 0, .*: the .*{message}") as error:
        go(None, federation, 1, engine=engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
def test_errors_name_a_client_that_draws_as_another(engine: str) -> None:
    """A real client has only its own data, and draws by its number in the population."""

    def fails(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("no such crop")

    federation = data((6,), 3, [4])
    problem = Problem(nn.Linear(6, 3).double(), losses.cross_entropy, federation)
    running = make(engine, problem)  # it runs the model once
    problem.federation = federation.with_transform(fails)
    request = FullGradient((problem.start,), np.zeros(1, int), np.ones((1, 1)), 3, stream_id=7)
    with pytest.raises(TrainingError, match=r"round 3, client 0, full gradient: .*no such crop"):
        running.full_gradients([request])


def own_generator(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + GENERATOR.random(), y


def new_seed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    torch.seed()
    return x + torch.rand(len(x), 1), y


GENERATOR = np.random.default_rng(1)


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
@pytest.mark.parametrize("transform", [own_generator, new_seed])
def test_draws_that_no_seed_determines_are_refused(transform: Any, engine: str) -> None:
    """They would differ between engines, and after a resume."""
    federation = data((6,), 3, [2, 3]).with_transform(transform)
    with pytest.raises(TrainingError, match="gives different values for the same seed"):
        go(None, federation, 1, engine=engine)


def test_a_transform_is_a_function() -> None:
    with pytest.raises(FedShuffleError, match="transform is 'flip', but must be a function"):
        data((6,), 3, [2]).with_transform("flip")  # type: ignore[arg-type]
