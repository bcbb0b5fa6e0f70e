"""Which models and losses can be trained, and what is said of the others."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from fedshuffle import Federation, FedShuffleError, TrainingError, losses, train
from fedshuffle._arrays import IGNORED
from fedshuffle.engines import Problem
from fedshuffle.sampling import resolve
from tests.engines.models import ENGINES, SIZES, data
from tests.problems import Point, copies, half_squared_distance, targets


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

    def weights(seed: int, noise: int, engine: str = "reference") -> Tensor:
        torch.manual_seed(noise)  # the global generator must not matter, nor be disturbed
        before = torch.get_rng_state()
        result = train(
            model, federation, loss=losses.cross_entropy, rounds=3, seed=seed, engine=engine
        )
        assert torch.equal(torch.get_rng_state(), before)
        return result.model[1].weight.detach().clone()  # type: ignore[index, no-any-return]

    assert torch.equal(weights(1, 10), weights(1, 20))
    torch.testing.assert_close(weights(1, 10, "sequential"), weights(1, 20))
    torch.testing.assert_close(weights(1, 10, "sequential:2:processes"), weights(1, 20))
    assert not torch.equal(weights(1, 10), weights(2, 10))


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
            Counting(True).double(), federation, loss=losses.cross_entropy, rounds=2, engine=engine
        )


def test_models_that_cannot_be_flattened_are_refused() -> None:
    federation = copies([1], targets(1, 2))
    with pytest.raises(FedShuffleError, match="no trainable parameters"):
        Problem(nn.Flatten(), half_squared_distance, federation)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(FedShuffleError, match="mixes trainable parameters"):
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


def test_models_in_other_memory_formats_and_precisions_are_trained() -> None:
    federation = data((2, 6, 6), 3, SIZES)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()
    arranged = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for engine in ("sequential", "vectorized", "sequential:2:processes"):
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
    assert result.engine != "reference"
    train(short, federation, loss=losses.cross_entropy, rounds=1, engine="sequential:2:processes")


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
    with pytest.raises(FedShuffleError, match=r"^cross_entropy takes outputs.*lambda model, x, y"):
        fit(nn.Linear(6, 3), nn.functional.cross_entropy)
    with pytest.raises(FedShuffleError, match="model must be of type Module, not type"):
        fit(nn.Linear, losses.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match=r"federation .* Federation, not tuple: [^\n]*$"):
        train(nn.Linear(6, 3), federation.tensors(), loss=losses.cross_entropy, rounds=1)  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match=r"cannot be called. Use one of fedshuffle.losses"):
        fit(nn.Linear(6, 3), "cross_entropy")


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("label", [3, -1])
def test_a_label_out_of_range_is_named_before_training(engine: str, label: int) -> None:
    """Though its client is not in the first cohort, nor among the examples of a first look."""
    rows, labels = data((6,), 3, SIZES).tensors()
    labels = labels.clone()
    labels[0], labels[-1] = IGNORED, label
    federation = Federation.from_arrays(rows, labels, sizes=SIZES)
    last = len(SIZES) - 1
    first = next(s for s in range(99) if last not in resolve("uniform:1", federation).draw(s, 0))
    with pytest.raises(
        FedShuffleError, match=rf"^client {last} has the label {label}, .* gives 3 outputs.* 0 to 2"
    ):
        train(
            nn.Linear(6, 3).double(),
            federation,
            loss=losses.cross_entropy,
            rounds=1,
            sampling="uniform:1",
            seed=first,
            engine=engine,
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_classes_may_be_numbers_of_any_type(dtype: torch.dtype) -> None:
    rows, labels = data((6,), 2, SIZES).tensors()
    found = [
        train(
            nn.Linear(6, 2).double().requires_grad_(),
            Federation.from_arrays(rows, one, sizes=SIZES),
            loss=losses.cross_entropy,
            rounds=1,
            seed=1,
        ).history[-1]["train_loss"]
        for one in (labels, labels.to(dtype))
        if torch.manual_seed(0)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_classes_that_are_no_whole_numbers_are_said() -> None:
    federation = Federation.from_arrays(torch.zeros(3, 6), torch.ones(3), sizes=[1, 2])
    with pytest.raises(TrainingError, match=r"targets of torch.float32 .* whole numbers, as by"):
        train(nn.Linear(6, 3), federation, loss=losses.cross_entropy, rounds=1)


class Checkpointed(nn.Module):
    """A layer under gradient checkpointing, and one after it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        inner = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        logits: Tensor = self.out(inner)
        return logits


def test_gradient_checkpointing_trains_every_layer_or_is_refused() -> None:
    """Reentrant, torch.autograd.grad would reach the last layer alone."""
    federation = data((6,), 3, [4, 6])

    def trained(model: nn.Module) -> Tensor:
        run = train(model.double(), federation, loss=losses.cross_entropy, rounds=1)
        return parameters_to_vector(run.model.parameters()).detach()

    plain = nn.Sequential(*Checkpointed(False).children())
    torch.testing.assert_close(trained(Checkpointed(False)), trained(plain))
    with pytest.raises(TrainingError, match=r"reentrant .* would not train. Give use_reentrant="):
        trained(Checkpointed(True))
