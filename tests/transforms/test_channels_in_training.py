"""Channels in real rounds: every engine sends the same messages of the same bytes."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshuffle import losses
from fedshuffle.engines import Problem, make
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.transforms import Channel, channel
from tests.engines.models import SIZES, data

NAMES = ["topk:0.1+ef", "topk:0.1+ef21", "randk:0.5", "qsgd:3+diana", "sign", "sign+ef", "float16"]


def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Problem(model, losses.cross_entropy, data((3,), 3, SIZES))


def after(name: str, engine: str, rounds: int = 4) -> State:
    one = channel(name)
    assert isinstance(one, Channel)
    where = problem()
    run = Run(where.federation, "fedshuffle", "uniform:2", step_size=0.1, transforms=[one])
    made = make(engine, where)
    try:
        *_, states = simulate(made, [run], rounds)
    finally:
        made.close()
    return states[0]


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree(name: str) -> None:
    expected = after(name, "reference")
    everyone = np.arange(len(SIZES))
    for engine in ("sequential", "vectorized", "sequential:2"):
        found = after(name, engine)
        torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-9)
        assert found.metrics["bytes_up"].tolist() == expected.metrics["bytes_up"].tolist()
        if expected.clients is not None:
            assert found.clients is not None
            rows = found.clients.rows(everyone), expected.clients.rows(everyone)
            torch.testing.assert_close(*rows, rtol=0, atol=1e-9)


def test_bytes_are_those_of_the_messages() -> None:
    d = 3 * 4 + 4 + 4 * 3 + 3
    assert after("topk:0.1+ef", "sequential").metrics["bytes_up"].tolist() == [3 * 8 + 2] * 2
    assert after("sign", "sequential").metrics["bytes_up"].tolist() == [8 + (d + 7) // 8] * 2
