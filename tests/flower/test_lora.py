"""LoRA adapters on Flower: only they travel, and the result is that of a simulation."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedshuffle import FedShuffleError, LocalWork, losses
from fedshuffle.finetuning import LoRALinear, fedex, ffa
from fedshuffle.flower import client_app
from tests.flower.grid import LocalGrid
from tests.flower.helpers import SIZES, data, same, simulated, strategy

pytestmark = pytest.mark.usefixtures("server_process")


def adapted(freeze: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = LoRALinear(nn.Linear(4, 3), rank=2)
    nn.init.normal_(model.get_parameter("lora_B.default.weight"))
    return ffa(model) if freeze else model


@pytest.mark.parametrize("freeze", [False, True])
def test_adapters_train_as_in_a_simulation(freeze: bool) -> None:
    def make() -> nn.Module:
        return adapted(freeze)

    apps = [client_app(make, data, losses.cross_entropy)] * len(SIZES)
    result = strategy().start(LocalGrid(apps), ArrayRecord(make().state_dict()), 2)
    assert same(result.arrays, simulated(2, make=make))


def test_corrections_at_the_server_are_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"FedEx .* in simulations only.*ffa\(model\)"):
        strategy(transforms=[fedex(adapted())], work=LocalWork())
