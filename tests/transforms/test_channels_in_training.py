"""Channels in real rounds: every engine sends the same messages of the same bytes."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines import Problem, make
from fedshuffle.sampling import Independent
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.transforms import Channel, ClientContext, Message, Transform, channel
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


class Seen(Transform):
    """Sums the updates of each client as it sees them."""

    def __init__(self) -> None:
        self.sums = defaultdict[int, Tensor | float](float)

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        for client, update in zip(context.clients.tolist(), updates, strict=True):
            self.sums[client] = self.sums[client] + update.clone()
        return Message(updates)


@pytest.mark.parametrize("name", ["topk:0.1+ef", "qsgd:3+ef", "sign+ef"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_messages_and_residuals_sum_to_the_updates_in_any_cohorts(name: str, engine: str) -> None:
    made, sent, where = Seen(), Seen(), problem()
    one, p = channel(name), np.linspace(0.2, 0.8, len(SIZES))
    assert one is not None
    settings = "fedshuffle", Independent(p)
    run = Run(where.federation, *settings, step_size=0.1, transforms=[made, one, sent])
    *_, (last,) = simulate(make(engine, where), [run], 12)
    assert last.clients is not None
    assert made.sums.keys() == sent.sums.keys() == {*range(len(SIZES))}
    for client, total in made.sums.items():
        (residual,) = last.clients.rows(np.array([client]))
        torch.testing.assert_close(sent.sums[client] + residual, total, rtol=0, atol=1e-13)


def test_bytes_are_those_of_the_messages() -> None:
    d = 3 * 4 + 4 + 4 * 3 + 3
    assert after("topk:0.1+ef", "sequential").metrics["bytes_up"].tolist() == [3 * 8 + 2] * 2
    assert after("sign", "sequential").metrics["bytes_up"].tolist() == [8 + (d + 7) // 8] * 2
