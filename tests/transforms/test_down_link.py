"""The down-link: a closed form, honest bytes, and clients that follow the model."""

import numpy as np
import pytest
import torch

from fedshuffle.transforms import QSGD, Compressor, DownLink, Float16, RandK, Sign, TopK

COMPRESSORS: list[Compressor] = [TopK(0.25), RandK(0.25), QSGD(2), Sign(), Float16()]


def test_two_rounds_by_hand() -> None:
    link = DownLink(TopK(1 / 3))
    x = torch.tensor([1.0, 2.0, 3.0])
    state = link.init(x, clients=4)
    known, received, state = link.send(x, state, np.array([0, 2]), seed=0, round=0)
    assert known.tolist() == [1, 2, 3]
    assert received.tolist() == [12, 12]  # the whole model, for both the first time
    x = x + torch.tensor([4.0, 5.0, 0.5])
    known, received, state = link.send(x, state, np.array([0, 1]), seed=0, round=1)
    assert known.tolist() == [1, 7, 3]
    assert received.tolist() == [5, 12]  # a value and a place of two bits; the whole model
    known, received, state = link.send(x, state, np.array([3, 2]), seed=0, round=2)
    assert known.tolist() == [5, 7, 3]  # what round 1 left out
    assert received.tolist() == [12, 10]  # client 2 missed one message
    known, received, state = link.send(x, state, np.array([0]), seed=0, round=3)
    assert (known.tolist(), received.tolist()) == ([5, 7, 3.5], [10])
    _, received, state = link.send(x, state, np.array([1]), seed=0, round=4)
    assert received.tolist() == [12]  # three messages are more than the model
    assert {name: value.dtype for name, value in state.items()} == {
        "known": torch.float32,
        "sent": torch.int64,
        "received": torch.int64,
    }
    assert state["received"].tolist() == [20, 25, 15, 15]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_clients_reach_a_model_that_stands_still(compressor: Compressor) -> None:
    link = DownLink(compressor)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=8))
    state = link.init(torch.zeros_like(x), clients=1)
    for round in range(300):
        known, _, state = link.send(x, state, np.array([0]), seed=1, round=round)
    torch.testing.assert_close(known, x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_the_wire_gives_what_the_simulation_gives(compressor: Compressor) -> None:
    link, rng = DownLink(compressor), np.random.default_rng(0)
    x = torch.zeros(30)
    state = link.init(x, clients=2)
    client = x
    link.send(x, state, np.array([0]), seed=1, round=0)
    for round in range(5):
        x = x + torch.from_numpy(rng.normal(size=30)).float()
        before = state
        arrays = link.encode(x, before["known"], seed=1, round=round)
        known, received, state = link.send(x, before, np.array([0]), seed=1, round=round)
        client = link.decode(arrays, client, seed=1, round=round)
        assert torch.equal(client, known)
        size = sum(array.nbytes for array in arrays.values())
        assert received.tolist() == [size if round else 120]


def test_a_state_is_not_changed_and_nobody_is_fine() -> None:
    link, x = DownLink(TopK(0.5)), torch.ones(4)
    state = link.init(torch.zeros(4), clients=2)
    before = {name: value.clone() for name, value in state.items()}
    _, received, _ = link.send(x, state, np.array([], dtype=np.int64), seed=0, round=0)
    assert received.shape == (0,)
    assert all(torch.equal(state[name], value) for name, value in before.items())
