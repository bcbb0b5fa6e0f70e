"""Runs with transforms that are interrupted and resumed end the same, bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshuffle import LocalWork, Privacy, losses, train
from fedshuffle._arrays import IntArray
from fedshuffle.privacy import AdaptiveClipping
from fedshuffle.sampling import Independent
from fedshuffle.sampling.base import EqualPairCorrelation
from fedshuffle.state import State
from fedshuffle.training.callbacks import Callback
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform
from tests.engines.models import data
from tests.training.test_resume import Killed, vector, without_time

FEDERATION = data((4,), 3, [2, 5, 9, 1, 3, 3])
RARE = Independent([0.25] * 6)
"""Rounds 2 and 6 have no clients, with the seed below."""


@dataclass(frozen=True)
class Momentum(Transform):
    """Clients and the server remember the last updates; the server also draws noise."""

    keeps_state = every_round = True

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        assert state is not None
        kept = 0.5 * state + updates
        signs = np.stack(
            [rng.choice([-1.0, 1.0], updates.shape[1]) for rng in context.generators()]
        )
        shared = context.shared.get("mean", 0.0)
        sent = kept + 1e-3 * updates.new_tensor(signs) + 0.1 * shared
        return Message(sent, kept, {"first": sent[:, 0]})

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        noise = update.new_tensor(context.generator().normal(size=len(update)))
        count = context.state.get("count", torch.tensor(0)) + 1
        mean = 0.5 * context.state.get("mean", torch.zeros_like(update)) + update
        return update + 1e-3 * noise / count, {"mean": mean, "count": count}


class Rotation(EqualPairCorrelation):
    """Clients take turns, so each has two rounds in between."""

    min_separation = 3
    rho = 0.0

    def __init__(self) -> None:
        self.p = np.full(6, 1 / 3)

    def __repr__(self) -> str:
        return "rotation"

    def draw(self, seed: int, round: int) -> IntArray:
        return np.arange(6)[round % 3 :: 3]


CASES: dict[str, dict[str, Any]] = {
    "error feedback": {"channel": "topk:0.1+ef"},
    "ef21": {"channel": "topk:0.1+ef21"},
    "diana": {"channel": "qsgd:4+diana"},
    "rand-k": {"channel": "randk:0.5"},
    "down-link": {"down_channel": "qsgd:4"},
    "both links": {"down_channel": "qsgd:4", "channel": "qsgd:4+diana"},
    "privacy": {"privacy": Privacy(clip=0.1, noise=0.5)},
    "adaptive": {
        "privacy": Privacy(clip=0.1, noise=0.5, adaptive=AdaptiveClipping(count_noise=2.0))
    },
    "tree": {"privacy": Privacy(clip=0.1, noise=0.5, min_separation=3), "sampling": Rotation()},
    "all": {
        "privacy": Privacy(clip=0.1, noise=0.5, adaptive=AdaptiveClipping(count_noise=2.0)),
        "channel": "topk:0.1+ef",
        "down_channel": "qsgd:4",
    },
    "scaffold": {"method": "scaffold", "channel": "qsgd:4"},
    "fedlin-sparse": {"method": "fedlin-sparse"},
    "optimal": {"sampling": "optimal:2", "channel": "topk:0.1+ef", "down_channel": "topk:0.5"},
    "yours": {"transforms": [Momentum()], "down_channel": "qsgd:4"},
}


class Stop(Callback):
    """Ends the program after a round, or as Ctrl-C does, which leaves time to save the state."""

    def __init__(self, after: int, how: type[BaseException]) -> None:
        self.after, self.how = after, how

    def on_round(self, record: Mapping[str, Any], state: State) -> None:
        if state.round == self.after:
            raise self.how


def go(case: str, engine: str, out: Path, **settings: Any) -> tuple[Any, State]:
    """A run of eight rounds, and its last state."""
    torch.manual_seed(0)
    given = {
        "loss": losses.cross_entropy,
        "rounds": 8,
        "sampling": RARE,
        "work": LocalWork(batch_size=2),
        "seed": 42,
        "engine": engine,
        "out": out,
        "checkpoint_every": 3,
        **CASES[case],
        **settings,
    }
    result = train(nn.Linear(4, 3).double(), FEDERATION, **given)
    state = RunFolder(out).latest()
    assert state is not None
    return result, state


def check_resumed(case: str, engine: str, path: Path, how: type[BaseException]) -> None:
    whole, want = go(case, engine, path / "whole")
    with pytest.raises(how):
        go(case, engine, path / "broken", callbacks=[Stop(5, how)])
    resumed, have = go(case, engine, path / "broken", resume=True)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert repr(without_time(resumed.history)) == repr(without_time(whole.history))  # NaN is NaN
    assert have.transform_state.keys() == want.transform_state.keys()
    for name, tensor in want.transform_state.items():
        assert torch.equal(have.transform_state[name], tensor), name
    assert (have.clients is None) == (want.clients is None)
    if have.clients is not None and want.clients is not None:
        everyone = np.arange(len(FEDERATION))
        assert torch.equal(have.clients.rows(everyone), want.clients.rows(everyone))
        assert want.clients.rows(everyone).any()


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_the_same(case: str, tmp_path: Path) -> None:
    check_resumed(case, "sequential", tmp_path, Killed)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "sequential:2:processes"])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_ends_the_same(case: str, engine: str, tmp_path: Path) -> None:
    check_resumed(case, engine, tmp_path, KeyboardInterrupt)


def test_some_of_these_rounds_have_no_clients(tmp_path: Path) -> None:
    result, _ = go("all", "sequential", tmp_path)
    assert [record["round"] for record in result.history if not record["clients"]] == [2, 6]
