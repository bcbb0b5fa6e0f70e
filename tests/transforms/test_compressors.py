"""Compressors: their mean and error by enumeration of all outcomes, and their bytes on the wire."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle.errors import FedShuffleError
from fedshuffle.transforms import QSGD, Compressor, Float16, RandK, Sign, TopK, wire

ALL: list[Compressor] = [
    TopK(0.01),
    TopK(0.3),
    TopK(1.0),
    RandK(0.2),
    RandK(1.0),
    QSGD(2),
    QSGD(4),
    QSGD(11),
    Sign(),
    Float16(),
]
DTYPES = [torch.float64, torch.float32, torch.float16]
each = pytest.mark.parametrize("compressor", ALL, ids=str)
numbers = st.floats(-100, 100).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
vectors = st.lists(numbers, min_size=1, max_size=5).map(lambda x: torch.tensor(x).double())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).normal(size=shape)
    return torch.from_numpy(values).to(dtype)


def draws(compressor: Compressor, rows: Tensor) -> list[NDArray[Any] | None]:
    rng = np.random.default_rng(1)
    return [compressor.draw(rows.shape[1], rng) for _ in rows]


def compress(compressor: Compressor, u: Tensor, drawn: NDArray[Any] | None = None) -> Tensor:
    return compressor.compress(u[None], [drawn])[0][0]


# Mean and error, over all outcomes ---------------------------------------------------------------


def outcomes(compressor: Compressor, u: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every outcome with its probability, from the definitions."""
    d = len(u)
    if isinstance(compressor, RandK):
        k = max(1, round(compressor.share * d))
        for places in itertools.combinations(range(d), k):
            yield 1 / math.comb(d, k), compress(compressor, u, np.array(places))
    elif isinstance(compressor, QSGD):
        s = 2 ** (compressor.bits - 1) - 1
        exact = np.minimum(s * np.abs(u.numpy()) / (np.linalg.norm(u.numpy()) or 1), s)
        up = exact - np.floor(exact)
        for picks in itertools.product([False, True], repeat=d):
            chance = np.prod(np.where(picks, up, 1 - up))
            if chance > 0:
                # A coordinate is rounded up if its random number is below its fraction.
                yield float(chance), compress(compressor, u, np.where(picks, 0.0, 1.0))


@pytest.mark.parametrize("compressor", [c for c in ALL if c.mean == "unbiased"], ids=str)
@settings(max_examples=25)
@given(u=vectors)
def test_the_mean_over_all_outcomes_is_the_vector(compressor: Compressor, u: Tensor) -> None:
    found = list(outcomes(compressor, u))
    assert sum(p for p, _ in found) == pytest.approx(1)
    mean = sum((p * q for p, q in found), torch.zeros_like(u))
    torch.testing.assert_close(mean, u, rtol=0, atol=1e-11)
    error = sum(p * float((q - u).square().sum()) for p, q in found)
    assert error <= compressor.omega(len(u)) * float(u.square().sum()) + 1e-9


def test_the_error_of_rand_k_is_as_large_as_its_bound() -> None:
    u = normal(5, dtype=torch.float64)
    error = sum(p * float((q - u).square().sum()) for p, q in outcomes(RandK(0.4), u))
    assert error == pytest.approx((5 / 2 - 1) * float(u.square().sum()))


def test_the_thresholds_of_qsgd_are_uniform_and_the_places_of_rand_k_distinct() -> None:
    rng = np.random.default_rng(0)
    drawn = QSGD(4).draw(1000, rng)
    assert drawn is not None
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.05)
    times = np.zeros(7)
    for _ in range(7000):
        places = RandK(3 / 7).draw(7, rng)
        assert places is not None
        assert (np.diff(places) > 0).all()
        times[places] += 1
    np.testing.assert_allclose(times / 7000, 3 / 7, atol=0.03)


@pytest.mark.parametrize("compressor", [c for c in ALL if c.mean == "biased"], ids=str)
@settings(max_examples=25)
@given(u=vectors)
def test_biased_compressors_are_contractions(compressor: Compressor, u: Tensor) -> None:
    omega = compressor.omega(len(u))
    assert 0 <= omega < 1
    error = float((compress(compressor, u) - u).square().sum())
    assert error <= omega * float(u.square().sum()) * (1 + 1e-12) + 1e-18


@settings(max_examples=25)
@given(u=vectors)
def test_the_error_of_sign_is_exact(u: Tensor) -> None:
    error = float((compress(Sign(), u) - u).square().sum())
    square, total = float(u.square().sum()), float(u.abs().sum())
    assert error == pytest.approx(square - total**2 / len(u), abs=1e-9)


@pytest.mark.parametrize("compressor", [RandK(0.4), QSGD(2)], ids=str)
@settings(max_examples=25)
@given(u=vectors)
def test_damping_makes_unbiased_compressors_contractions(compressor: Compressor, u: Tensor) -> None:
    c, omega = compressor.damping(len(u)), compressor.omega(len(u))
    error = sum(p * float((c * q - u).square().sum()) for p, q in outcomes(compressor, u))
    assert error <= omega / (1 + omega) * float(u.square().sum()) + 1e-9


# The wire ----------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 2, 7, 64, 300])
def test_what_is_simulated_is_what_is_sent(
    compressor: Compressor, dtype: torch.dtype, d: int
) -> None:
    rows = normal(4, d, dtype=dtype)
    rows[1] = 0
    rows[2, 0] = -0.0
    drawn = draws(compressor, rows)
    found, sizes = compressor.compress(rows, drawn)
    slow, slow_sizes = Compressor.compress(compressor, rows, drawn)
    assert found.dtype == dtype
    for i, row in enumerate(rows):
        arrays = compressor.encode(row, drawn[i])
        assert sum(array.nbytes for array in arrays.values()) == sizes[i] == slow_sizes[i]
        decoded = compressor.decode(arrays, d, dtype, drawn[i])
        for other in (decoded, slow[i]):  # bytes, since 0 and -0 are equal
            assert other.numpy().tobytes() == found[i].numpy().tobytes()


@pytest.mark.parametrize(
    ("compressor", "d", "dtype", "size"),
    [
        (TopK(0.01), 1000, torch.float32, 10 * 4 + 13),  # ten places of ten bits are 12.5 bytes
        (TopK(0.3), 1000, torch.float32, 300 * 4 + 125),  # a bit for each coordinate is shorter
        (RandK(0.01), 1000, torch.float32, 10 * 4),
        (RandK(0.01), 1000, torch.float64, 10 * 8),
        (QSGD(4), 1001, torch.float32, 501 + 4),
        (QSGD(3), 1000, torch.float16, 375 + 4),
        (Sign(), 1001, torch.float64, 126 + 8),
        (Float16(), 1000, torch.float32, 2001),
    ],
    ids=str,
)
def test_bytes_by_hand(compressor: Compressor, d: int, dtype: torch.dtype, size: int) -> None:
    rows = normal(2, d, dtype=dtype)
    assert compressor.compress(rows, draws(compressor, rows))[1].tolist() == [size, size]


@each
def test_entropy_is_a_bound_for_what_is_sent(compressor: Compressor) -> None:
    u = normal(1, 300)
    (drawn,) = draws(compressor, u)
    arrays = compressor.encode(u[0], drawn)
    bound = compressor.entropy_bits(arrays, 300)
    assert 0 < bound <= 8 * sum(array.nbytes for array in arrays.values()) + 1e-9


def test_entropy_by_hand() -> None:
    u = torch.tensor([1.0, 1.0, 1.0, -1.0])
    three_of_four = 2 - 0.75 * math.log2(3)
    assert Sign().entropy_bits(Sign().encode(u, None), 4) == pytest.approx(32 + 4 * three_of_four)
    top = TopK(0.5)
    assert top.entropy_bits(top.encode(u, None), 4) == pytest.approx(math.log2(6) + 2 * 32)
    q = QSGD(2)  # s = 1 and u has norm 2: all levels are one half, here rounded 0, 1, 0, 1
    arrays = q.encode(u, np.array([0.9, 0.1, 0.9, 0.1]))
    assert q.entropy_bits(arrays, 4) == pytest.approx(32 + 1.5 * 4)


@given(bits=st.integers(1, 20), values=st.lists(st.integers(0, 2**20 - 1), max_size=30))
def test_packing_is_undone_by_unpacking(bits: int, values: list[int]) -> None:
    numbers = np.array(values, dtype=np.uint32) % 2**bits
    packed = wire.pack(numbers, bits)
    assert len(packed) == wire.packed_length(len(values), bits)
    assert wire.unpack(packed, len(values), bits).tolist() == numbers.tolist()


@each
def test_a_message_for_another_model_is_refused(compressor: Compressor) -> None:
    u = normal(1, 300)
    (drawn,) = draws(compressor, u)
    arrays = compressor.encode(u[0], drawn)
    for broken in ({}, {**arrays, "more": np.zeros(1)}, {k: v[:-1] for k, v in arrays.items()}):
        with pytest.raises(FedShuffleError, match="same channel"):
            compressor.decode(broken, 300, torch.float32, drawn)
    with pytest.raises(FedShuffleError, match=f"for {compressor} "):
        compressor.decode(arrays, 200, torch.float32, drawn)


def test_places_and_levels_that_do_not_exist_are_refused() -> None:
    top = TopK(0.2)
    arrays = top.encode(torch.arange(10.0), None)
    for places in ([9, 9], [3, 12], [4, 2]):
        arrays["places"] = wire.pack(np.array(places), 4)
        with pytest.raises(FedShuffleError, match="2 places below 10"):
            top.decode(arrays, 10, torch.float32, None)
    mask = TopK(0.5)
    arrays = mask.encode(torch.arange(10.0), None)
    arrays["places"] = np.array([255, 0], dtype=np.uint8)
    with pytest.raises(FedShuffleError, match="5 places below 10"):
        mask.decode(arrays, 10, torch.float32, None)
    arrays = QSGD(2).encode(torch.ones(4), np.zeros(4))
    arrays["levels"] = np.array([255], dtype=np.uint8)
    with pytest.raises(FedShuffleError, match="a level above 1"):
        QSGD(2).decode(arrays, 4, torch.float32, None)


# Rows, ties and unusual numbers ------------------------------------------------------------------


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_never_mix(compressor: Compressor, dtype: torch.dtype) -> None:
    rows = normal(5, 33, dtype=dtype) * torch.tensor([[1e-3, 1.0, 3.0, 1e2, 0.0]], dtype=dtype).T
    drawn = draws(compressor, rows)
    together = compressor.compress(rows, drawn)[0]
    for i, row in enumerate(rows):
        assert torch.equal(together[i], compress(compressor, row, drawn[i]))
    columns = rows.T.contiguous().T  # the same table, column by column in memory
    assert not columns.is_contiguous()
    assert torch.equal(compressor.compress(columns, drawn)[0], together)
    assert torch.equal(compressor.compress(rows.repeat(1, 2)[:, :33], drawn)[0], together)


@each
def test_the_input_is_not_changed(compressor: Compressor) -> None:
    rows = normal(2, 33)
    before = rows.clone()
    compressor.compress(rows, draws(compressor, rows))
    assert torch.equal(rows, before)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_stays_zero(compressor: Compressor, dtype: torch.dtype) -> None:
    rows = torch.zeros(2, 9, dtype=dtype)
    assert not compressor.compress(rows, draws(compressor, rows))[0].any()


@each
def test_no_rows_are_no_messages(compressor: Compressor) -> None:
    found, sizes = compressor.compress(torch.zeros(0, 9), [])
    assert (found.shape, sizes.shape) == ((0, 9), (0,))


@each
def test_one_coordinate_is_sent_exactly(compressor: Compressor) -> None:
    rows = torch.tensor([[-0.75]])
    assert compressor.compress(rows, draws(compressor, rows))[0].item() == -0.75


@each
def test_a_scale_is_only_a_unit(compressor: Compressor) -> None:
    rows = normal(3, 40)
    drawn = draws(compressor, rows)
    for unit in (2.0**-60, 2.0**60):
        scaled = compressor.compress(unit * rows, drawn)[0]
        torch.testing.assert_close(scaled / unit, compressor.compress(rows, drawn)[0])


@pytest.mark.parametrize("compressor", [c for c in ALL if c != RandK(0.2)], ids=str)
def test_numbers_that_are_not_finite_reach_the_server(compressor: Compressor) -> None:
    rows = normal(1, 40)
    rows[0, 3] = math.nan
    (drawn,) = draws(compressor, rows)
    found = compress(compressor, rows[0], drawn)
    assert found.isnan().any()
    arrays = compressor.encode(rows[0], drawn)
    assert compressor.decode(arrays, 40, torch.float32, drawn).isnan().any()


def test_the_first_of_equal_coordinates_are_kept() -> None:
    rows = torch.tensor([[1.0, -2.0, 2.0, -1.0, 1.0], [0.0, 0.0, 0.0, 5.0, 0.0], [1.0] * 5])
    found = TopK(0.6).compress(rows, [None] * 3)[0]
    assert found[0].tolist() == [1, -2, 2, 0, 0]
    assert found[1].tolist() == [0, 0, 0, 5, 0]
    assert found[2].tolist() == [1, 1, 1, 0, 0]


@settings(max_examples=50)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.floats(0.05, 1))
def test_top_k_is_a_stable_sort(values: list[int], share: float) -> None:
    k = max(1, round(share * len(values)))
    first = sorted(range(len(values)), key=lambda j: (-abs(values[j]), j))[:k]
    expected = [float(v) if j in first else 0.0 for j, v in enumerate(values)]
    assert compress(TopK(share), torch.tensor(values).float()).tolist() == expected


def test_half_precision_neither_overflows_nor_underflows() -> None:
    for unit in (1e-30, 1e-9, 1e9, 1e30):
        u = unit * normal(100)
        torch.testing.assert_close(compress(Float16(), u), u, rtol=2**-11, atol=unit * 1e-9)


sizes = st.tuples(st.floats(1, 2), st.integers(-60, 60)).map(lambda pair: math.ldexp(*pair))
floats = st.just(0.0) | sizes | sizes.map(lambda size: -size)


@settings(max_examples=50)
@given(u=st.lists(floats, min_size=1, max_size=6), dtype=st.sampled_from(DTYPES[:2]))
@example(u=[2.0**-4, 2.0**-25 * 0.999], dtype=torch.float64)  # the smallest norm without scaling
@example(u=[2.0**-4] + [1.5 * 2.0**-24] * 5, dtype=torch.float32)  # halfway between subnormals
@example(u=[1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)  # nearly halfway, rounded twice
@example(u=[2.0**15 * (1 - 2.0**-12)], dtype=torch.float32)  # rounds up to 2^15
@example(u=[2.0**14.9] * 4, dtype=torch.float32)  # a norm above 2^15, and no exponent
def test_the_error_of_half_precision(u: list[float], dtype: torch.dtype) -> None:
    """Within its bound, and the same with known norms, into the rows themselves, on the wire."""
    rows = torch.tensor([u], dtype=dtype)
    found = compress(Float16(), rows[0])
    exact = rows[0].double()
    error = float((found.double() - exact).square().sum())
    assert error <= Float16().omega(len(u)) * float(exact.square().sum())
    arrays = Float16().encode(rows[0], None)
    assert torch.equal(Float16().decode(arrays, len(u), dtype, None), found)
    norms = torch.linalg.vector_norm(rows, dim=1)
    size = Float16().compress_in_place(rows, norms)
    if size is not None:
        assert not arrays["exponent"].any()
        assert torch.equal(rows[0], found)
        assert size.tolist() == [sum(array.nbytes for array in arrays.values())]


def test_a_model_without_a_numpy_dtype_is_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"bfloat16.*use float64"):
        compress(TopK(0.5), torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan, "a"])
@pytest.mark.parametrize("kind", [TopK, RandK])
def test_shares_out_of_range_are_refused(kind: Any, share: Any) -> None:
    with pytest.raises(FedShuffleError, match=f"the share of {kind.__name__.lower()} is"):
        kind(share)


@pytest.mark.parametrize("bits", [0, 1, 17, 4.5])
def test_bits_out_of_range_are_refused(bits: Any) -> None:
    with pytest.raises(FedShuffleError, match=r"bits of qsgd is .* from 2 to 16"):
        QSGD(bits)
