"""Which models and losses can be trained, and what is said of the others."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import Federation, FedShuffleError, TrainingError, losses, train
from fedshuffle.engines import Problem
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
    with pytest.raises(FedShuffleError, match=r"cannot be called. Use one of fedshuffle.losses"):
        fit(nn.Linear(6, 3), "cross_entropy")


@pytest.mark.parametrize("engine", ["sequential", "sequential:2", "vectorized:2"])
def test_a_label_out_of_range_is_an_error(engine: str) -> None:
    rows, labels = data((6,), 3, SIZES).tensors()
    labels = labels.clone()
    labels[-1] = 3
    federation = Federation.from_arrays(rows, labels, sizes=SIZES)
    with pytest.raises(FedShuffleError, match="out of bounds"):
        train(
            nn.Linear(6, 3).double(), federation, loss=losses.cross_entropy, rounds=1, engine=engine
        )
