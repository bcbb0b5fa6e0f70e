"""Channels with memory: closed forms, what telescopes, and the wire."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.transforms import (
    EF21,
    QSGD,
    Channel,
    ClientContext,
    Compressed,
    Compressor,
    Diana,
    ErrorFeedback,
    Float16,
    RandK,
    Sign,
    TopK,
    channel,
)

COMPRESSORS: list[Compressor] = [TopK(0.3), RandK(0.5), QSGD(3), Sign(), Float16()]
MEMORY: list[Callable[[Compressor], Channel]] = [Compressed, ErrorFeedback, EF21, Diana]
ALL = [
    memory(compressor)
    for memory in MEMORY
    for compressor in COMPRESSORS
    if memory is not Diana or compressor.mean == "unbiased"
]
STATEFUL = [one for one in ALL if one.keeps_state]
each = pytest.mark.parametrize("one", ALL, ids=str)


def context(
    clients: list[int], round: int = 0, seed: int = 3, part: int = 0, weight: float = 1.0
) -> ClientContext:
    n = len(clients)
    steps, step_sizes, weights = np.ones(n, dtype=np.int64), np.full(n, 0.1), np.full(n, weight)
    return ClientContext(
        seed, round, np.array(clients, dtype=np.int64), steps, step_sizes, weights, part=part
    )


def updates(n: int, d: int, round: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(round).normal(size=(n, d)))


def zeros(one: Channel, n: int, d: int) -> Tensor | None:
    return torch.zeros(n, d, dtype=torch.float64) if one.keeps_state else None


def test_what_channels_do_to_the_mean() -> None:
    found = {str(one): one.mean for one in ALL}
    for name in ("topk:0.3", "sign", "float16"):
        assert [found[name], found[name + "+ef"], found[name + "+ef21"]] == [
            "biased",
            "restored",
            "restored",
        ]
    for name in ("randk:0.5", "qsgd:3"):
        assert [found[name], found[name + "+ef"], found[name + "+diana"]] == [
            "unbiased",
            "restored",
            "unbiased",
        ]


def test_only_channels_without_memory_take_any_layout() -> None:
    assert {str(one) for one in ALL if one.any_layout} == {"float16"}


# Sent plus residual --------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_messages_and_residual_sum_to_the_updates(compressor: Compressor) -> None:
    one, n, d, rounds = ErrorFeedback(compressor), 3, 8, 30
    h, sent, done = torch.zeros(n, d).double(), torch.zeros(n, d).double(), torch.zeros(n, d)
    for round in range(rounds):
        u = updates(n, d, round)
        message = one.client(u.clone(), h, context([0, 1, 2], round))
        assert message.state is not None
        h, sent, done = message.state, sent + message.values, done + u
    torch.testing.assert_close(sent + h, done, rtol=0, atol=1e-13)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(-64, 64), min_size=4, max_size=4), min_size=1, max_size=8))
def test_the_sum_is_exact_where_floating_point_is(rounds: list[list[int]]) -> None:
    for compressor in (TopK(0.25), RandK(0.5), Sign()):
        one, h, sent = ErrorFeedback(compressor), torch.zeros(1, 4).double(), torch.zeros(1, 4)
        for r, values in enumerate(rounds):
            message = one.client(torch.tensor([values]).double(), h, context([5], r))
            assert message.state is not None
            h, sent = message.state, sent + message.values
        assert (sent + h).tolist() == [[float(sum(column)) for column in zip(*rounds, strict=True)]]


# Closed forms with two clients ---------------------------------------------------------------


def test_error_feedback_by_hand() -> None:
    one, h = ErrorFeedback(TopK(0.5)), torch.zeros(2, 2).double()
    u = torch.tensor([[3.0, 2.0], [1.0, -4.0]]).double()
    sent = []
    for round in range(3):
        message = one.client(u.clone(), h, context([0, 1], round))
        assert message.state is not None
        h = message.state
        sent.append(message.values.tolist())
    assert sent == [[[3, 0], [0, -4]], [[0, 4], [0, -4]], [[6, 0], [0, -4]]]
    assert h.tolist() == [[0, 2], [3, 0]]


def _top_one(v: FloatArray) -> FloatArray:
    out = np.zeros_like(v)
    j = int(np.argmax(np.abs(v)))
    out[j] = v[j]
    return out


def test_ef21_with_two_clients_by_hand() -> None:
    """Gradient descent on ``a_i |x - m_i|^2 / 2`` with the largest of three coordinates."""
    a, step = np.array([1.0, 2.0]), 0.1
    m = np.array([[1.0, -2.0, 0.5], [-3.0, 1.0, 2.0]])
    x, g = np.zeros(3), np.zeros((2, 3))
    y, h, one = torch.zeros(3).double(), torch.zeros(2, 3).double(), EF21(TopK(1 / 3))
    for round in range(200):
        for i in range(2):
            g[i] += _top_one(-step * a[i] * (x - m[i]) - g[i])
        x = x + g.mean(axis=0)
        u = -step * torch.from_numpy(a)[:, None] * (y - torch.from_numpy(m))
        message = one.client(u, h, context([0, 1], round))
        assert message.state is not None
        h, y = message.state, y + message.values.mean(dim=0)
        np.testing.assert_allclose(y.numpy(), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(h.numpy(), g, rtol=0, atol=1e-12)
    np.testing.assert_allclose(x, (a[:, None] * m).sum(axis=0) / a.sum(), atol=1e-6)


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_diana_with_two_clients_by_hand(alpha: float | None) -> None:
    """The same with one of three coordinates at random: omega is 2, and alpha a third."""
    a, step, compressor = np.array([1.0, 2.0]), 0.1, RandK(1 / 3)
    m = np.array([[1.0, -2.0, 0.5], [-3.0, 1.0, 2.0]])
    x, shift = np.zeros(3), np.zeros((2, 3))
    y, h, one = torch.zeros(3).double(), torch.zeros(2, 3).double(), Diana(compressor, alpha)
    for round in range(400):
        total = np.zeros(3)
        for i, generator in enumerate(context([0, 1], round).generators()):
            (j,) = compressor.draw(3, generator)  # type: ignore[misc]
            q = np.zeros(3)
            q[j] = 3 * (-step * a[i] * (x[j] - m[i, j]) - shift[i, j])
            total += shift[i] + q
            shift[i] += (alpha or 1 / 3) * q
        x = x + total / 2
        u = -step * torch.from_numpy(a)[:, None] * (y - torch.from_numpy(m))
        message = one.client(u, h, context([0, 1], round))
        assert message.state is not None
        h, y = message.state, y + message.values.mean(dim=0)
        np.testing.assert_allclose(y.numpy(), x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(h.numpy(), shift, rtol=0, atol=1e-12)
    np.testing.assert_allclose(x, (a[:, None] * m).sum(axis=0) / a.sum(), atol=1e-6)


@pytest.mark.parametrize("one", [one for one in STATEFUL if one.shared_memory], ids=str)
def test_a_shift_learns_an_update_that_stands_still(one: Channel) -> None:
    u, h = updates(1, 8), torch.zeros(1, 8).double()
    for round in range(300):
        message = one.client(u.clone(), h, context([0], round))
        assert message.state is not None
        h = message.state
    torch.testing.assert_close(h, u, rtol=0, atol=1e-9)


def test_error_feedback_needs_the_damping() -> None:
    """The residual stays bounded, although omega is 9 and Q itself would let it grow."""
    one, h = ErrorFeedback(RandK(0.1)), torch.zeros(1, 10).double()
    for round in range(300):
        message = one.client(torch.ones(1, 10).double(), h, context([0], round))
        assert message.state is not None
        h = message.state
    assert float(h.abs().max()) < 200


# Rows, randomness and the wire ---------------------------------------------------------------


@each
def test_rows_never_mix_and_randomness_is_addressed(one: Channel) -> None:
    clients, u = [4, 0, 9], updates(3, 20)
    state = updates(3, 20, round=99) if one.keeps_state else None
    together = one.client(u.clone(), state, context(clients, round=2, weight=5.0))
    for i, client in enumerate(clients):
        own = None if state is None else state[i : i + 1]
        alone = one.client(u[i : i + 1].clone(), own, context([client], round=2))
        assert torch.equal(alone.values[0], together.values[i])
        if state is not None:
            assert alone.state is not None
            assert together.state is not None
            assert torch.equal(alone.state[0], together.state[i])


@pytest.mark.parametrize("name", ["randk:0.5", "qsgd:3", "randk:0.5+diana"])
def test_seed_round_client_and_part_each_change_the_message(name: str) -> None:
    one = channel(name)
    assert one is not None
    u = updates(1, 50)
    values = [
        one.client(u.clone(), zeros(one, 1, 50), where).values.numpy().tobytes()
        for where in (
            context([1]),
            context([2]),
            context([1], round=1),
            context([1], seed=4),
            context([1], part=1),
            context([1]),
        )
    ]
    assert len(set(values)) == 5
    assert values[0] == values[-1]


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_the_wire_gives_what_the_simulation_gives(one: Channel, dtype: torch.dtype) -> None:
    d, like = 21, torch.zeros(21, dtype=dtype)
    state = zeros(one, 1, d)
    state = None if state is None else state.to(dtype)
    mine = theirs = None if state is None else state[0]
    for round in range(5):
        u, where = updates(1, d, round).to(dtype), context([7], round, part=2)
        message = one.client(u.clone(), state, where)
        arrays, mine = one.encode(u[0].clone(), mine, where)
        values, theirs = one.decode(arrays, like, theirs if one.shared_memory else None, where)
        assert values.dtype == dtype
        assert values.numpy().tobytes() == message.values[0].numpy().tobytes()
        size = sum(array.nbytes for array in arrays.values())
        assert np.asarray(message.metrics["bytes_up"]).tolist() == [size]
        state = message.state
        if state is not None:
            assert mine is not None
            assert torch.equal(mine, state[0])
            assert not one.shared_memory or torch.equal(theirs, mine)  # type: ignore[arg-type]


@each
def test_the_state_given_is_not_changed(one: Channel) -> None:
    if one.keeps_state:
        state = updates(2, 9)
        before = state.clone()
        one.client(updates(2, 9, 1), state, context([0, 1]))
        assert torch.equal(state, before)
    else:
        assert one.client(updates(2, 9), None, context([0, 1])).state is None


@pytest.mark.parametrize("compressor", [TopK(0.1), Sign(), Float16()], ids=str)
def test_diana_refuses_biased_compressors(compressor: Compressor) -> None:
    with pytest.raises(FedShuffleError, match=rf"biased\. Use '{compressor}\+ef21'"):
        Diana(compressor)


def test_other_things_are_not_compressors() -> None:
    for memory in MEMORY:
        with pytest.raises(FedShuffleError, match="must be of type Compressor"):
            memory("topk")  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match=r"alpha of diana is 0"):
        Diana(QSGD(4), alpha=0)
