"""Local optimisers on Flower's clients: the simulator's model, or a refusal."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshuffle.errors import FedShuffleError
from tests.flower.grid import LocalGrid
from tests.flower.helpers import WORK, apps, same, simulated, start, strategy

pytestmark = pytest.mark.usefixtures("server_process")


class Mine(torch.optim.SGD):
    """Known to the server alone."""


@pytest.mark.parametrize("text", ["sgd:momentum=0.9,nesterov=true", "adamw:weight_decay=0.1"])
def test_model_is_that_of_the_simulator(text: str) -> None:
    options: dict[str, Any] = {"work": replace(WORK, optimiser=text), "step_size": 0.01}
    result = strategy(**options).start(LocalGrid(apps()), start(), 2)
    assert same(result.arrays, simulated(2, **options))
    assert not same(result.arrays, simulated(2, step_size=0.01))


def test_what_clients_cannot_know_or_scale_is_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"clients would not know the local .*Mine"):
        strategy(work=replace(WORK, optimiser=Mine))
    with pytest.raises(FedShuffleError, match="leave out the local optimiser adam"):
        strategy(work=replace(WORK, optimiser="adam"), sizes="withheld", clients=4)
