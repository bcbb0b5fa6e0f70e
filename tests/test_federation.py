from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from fedshuffle import Federation, FedShuffleError


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_sizes_alone_give_offsets_and_weights(sizes: list[int]) -> None:
    federation = Federation.from_sizes(sizes)
    assert np.diff(federation.offsets).tolist() == sizes
    np.testing.assert_allclose(federation.weights, np.array(sizes) / sum(sizes), rtol=1e-15)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_ids_pack_each_clients_rows_together_in_their_order(ids: list[str]) -> None:
    rows = np.arange(len(ids))
    federation = Federation.from_arrays(rows, rows * 2, client_ids=ids)
    assert list(federation.ids) == sorted(set(ids))
    for i, name in enumerate(federation.ids):
        own = slice(int(federation.offsets[i]), int(federation.offsets[i + 1]))
        expected = [k for k, owner in enumerate(ids) if owner == name]
        assert federation.fields[0][own].tolist() == expected
        assert federation.fields[1][own].tolist() == [2 * k for k in expected]


def test_tensors_and_datasets_pack_alike() -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    packed = Federation.from_arrays(x, y, sizes=[1, 2, 3])
    datasets = [TensorDataset(x[a:b], y[a:b]) for a, b in [(0, 1), (1, 3), (3, 6)]]
    from_datasets = Federation.from_datasets(datasets)
    assert from_datasets.sizes.tolist() == packed.sizes.tolist()
    for one, other in zip(from_datasets.tensors(), packed.tensors(), strict=True):
        assert torch.equal(one, other)


def test_arrays_that_torch_cannot_read_as_they_are() -> None:
    backwards = np.arange(6.0)[::-1]
    swapped = np.arange(6).astype(">i8")
    inputs, labels = Federation.from_arrays(backwards, swapped, sizes=[2, 4]).tensors()
    assert inputs.tolist() == [5, 4, 3, 2, 1, 0]
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_huge_weights_do_not_overflow() -> None:
    federation = Federation.from_sizes([1, 2], weights=[1e308, 1e308])
    assert federation.weights.tolist() == [0.5, 0.5]


def test_weights_may_be_anything_positive() -> None:
    federation = Federation.from_sizes([1, 2, 3], weights=[2, 1, 1])
    assert federation.weights.tolist() == [0.5, 0.25, 0.25]


def test_what_is_shared_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Federation.from_sizes([1, 2]).weights[0] = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Federation.from_sizes([1, 0, 2]), "client 1 has 0.*Leave out"),
        (lambda: Federation.from_sizes([]), "non-empty"),
        (lambda: Federation.from_sizes([1.5]), "client 0 has 1.5"),
        (lambda: Federation.from_sizes([1, float("nan")]), "client 1 has nan"),
        (lambda: Federation.from_sizes(["a"]), "whole numbers"),
        (lambda: Federation.from_sizes([1, 2], weights=[1]), "each of the 2 clients"),
        (lambda: Federation.from_sizes([1, 2], weights=[1, -1]), "client 1 has -1"),
        (lambda: Federation.from_sizes([1, 2], weights=[1, float("inf")]), "client 1 has inf"),
        (lambda: Federation.from_arrays([1.0, 2.0]), "client_ids .* or sizes"),
        (lambda: Federation.from_arrays(sizes=[1]), "at least one array"),
        (lambda: Federation.from_arrays([1.0, 2.0], sizes=[1, 2]), "add up to 3"),
        (lambda: Federation.from_arrays([1.0, 2.0], [1.0], sizes=[1, 1]), "one row per example"),
        (lambda: Federation.from_arrays([1.0, 2.0], client_ids=[1]), "2 rows"),
        (lambda: Federation.from_arrays(["a", "b"], sizes=[1, 1]), "Convert it to numbers"),
        (
            lambda: Federation.from_arrays([1.0, np.nan, 3.0], client_ids=["x", "y", "x"]),
            "client 'y' has NaN.*example 0",
        ),
        (
            lambda: Federation.from_arrays(torch.tensor([1.0, 2.0, torch.inf]), sizes=[1, 2]),
            "client 1 has NaN or infinity in its example 1",
        ),
        (lambda: Federation.from_sizes([1]).tensors(), "sizes only"),
        (lambda: Federation.from_sizes([[1], [2, 3]]), "one list"),
        (lambda: Federation.from_arrays(np.zeros((0, 2)), client_ids=[]), "no examples"),
        (lambda: Federation.from_arrays([1.0, 2.0], client_ids=[None, "a"]), "mixes kinds"),
        (lambda: Federation.from_arrays([[1.0], [2.0, 3.0]], sizes=[2]), "equal rows"),
        (lambda: Federation.from_datasets([[{"a": 1}]]), "with no names"),  # type: ignore[list-item]
        (lambda: Federation.from_datasets([iter([])]), "must have a length"),  # type: ignore[list-item]
    ],
)
def test_bad_input_is_named(make: object, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        make()  # type: ignore[operator]
