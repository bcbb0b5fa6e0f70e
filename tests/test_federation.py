import random
from collections.abc import Callable, Iterator

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedshuffle import Federation, FedShuffleError


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_sizes_alone_give_offsets_and_weights(sizes: list[int]) -> None:
    federation = Federation.from_sizes(sizes)
    assert np.diff(federation.offsets).tolist() == sizes
    np.testing.assert_allclose(federation.weights, np.array(sizes) / sum(sizes), rtol=1e-15)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_rows_are_packed_by_client_id_in_order(ids: list[str]) -> None:
    rows = np.arange(len(ids))
    federation = Federation.from_arrays(rows, rows * 2, client_ids=ids)
    assert list(federation.ids) == sorted(set(ids))
    for i, name in enumerate(federation.ids):
        own = slice(int(federation.offsets[i]), int(federation.offsets[i + 1]))
        expected = [k for k, owner in enumerate(ids) if owner == name]
        assert federation.fields[0][own].tolist() == expected
        assert federation.fields[1][own].tolist() == [2 * k for k in expected]


def test_tensors_and_datasets_are_packed_equally() -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    packed = Federation.from_arrays(x, y, sizes=[1, 2, 3])
    datasets = [TensorDataset(x[a:b], y[a:b]) for a, b in [(0, 1), (1, 3), (3, 6)]]
    from_datasets = Federation.from_datasets(datasets)
    assert from_datasets.sizes.tolist() == packed.sizes.tolist()
    for one, other in zip(from_datasets.tensors(), packed.tensors(), strict=True):
        assert torch.equal(one, other)


def test_arrays_that_torch_cannot_read_are_converted() -> None:
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


def test_arrays_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Federation.from_sizes([1, 2]).weights[0] = 1


ONE = TensorDataset(torch.ones(1))
TABLE = pandas.DataFrame(
    {
        "age": [30.0, 41.0],
        "city": ["Paris", "Rome"],
        "seen": pandas.to_datetime(["2020-01-01", "2020-01-02"]),
        "n": [3, 4],
    }
)


class Stream(IterableDataset[int]):
    """Examples without an index."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __len__(self) -> int:
        return 2


def test_a_table_with_columns_of_different_types() -> None:
    """As get_dummies makes them: True and False beside numbers, which numpy sees as objects."""
    dummies = pandas.get_dummies(TABLE[["age", "n", "city"]])
    assert np.asarray(dummies).dtype == object
    expected = [[30, 3, 1, 0], [41, 4, 0, 1]]
    for table in (dummies, dummies.to_numpy()):
        (x,) = Federation.from_arrays(table, sizes=[2]).fields
        assert (x.dtype, x.tolist()) == (np.float64, expected)
    (x,) = Federation.from_arrays(dummies[["city_Paris", "city_Rome"]], sizes=[2]).fields
    assert (x.dtype, x.tolist()) == (np.float64, [[1, 0], [0, 1]])
    y = pandas.Series([1, 0], dtype=object)
    assert Federation.from_arrays(y, sizes=[2]).fields[0].dtype == np.int64


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Examples, each with a draw of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, self.draw()]), index % 2


OWN = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: float(torch.rand(())), "different values"),
        (lambda: random.random(), "different values"),
        (lambda: np.random.rand(), "different values"),
        (lambda: OWN.random(), "different values"),
        (lambda: float(OWN.random() < 0.5), "different values"),
        (lambda: float(torch.rand(()) < 1e-9), "draws random numbers"),  # hardly ever
        (lambda: float(random.random() < 1e-9), "draws random numbers"),
        (lambda: float(np.random.rand() < 1e-9), "draws random numbers"),
    ],
)
def test_random_transforms_give_a_warning(draw: Callable[[], float], message: str) -> None:
    with pytest.warns(UserWarning, match=f"{message}.*with_transform") as seen:
        Federation.from_datasets([Noisy(draw), Noisy(draw)])
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_examples_of_random_shapes_give_a_warning() -> None:
    class Crop(Dataset[torch.Tensor]):
        reads = 0

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> torch.Tensor:
            self.reads += 1
            return torch.ones(1 if self.reads <= 40 else self.reads)

    with pytest.warns(UserWarning, match="different values"):
        Federation.from_datasets([Crop()])


def test_the_check_for_randomness_draws_nothing_itself() -> None:
    def reading(check: bool) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        data = Noisy(lambda: float(torch.rand(()) + random.random() + np.random.rand()))
        if check:
            with pytest.warns(UserWarning, match="different values"):
                values = Federation.from_datasets([data]).fields[0][:, 1].tolist()
        else:
            values = [data[j][0][1].item() for j in range(len(data))]
        return [*values, data.draw()]

    assert reading(check=True) == reading(check=False)


def test_cached_examples_give_no_warning() -> None:
    kept: dict[int, float] = {}

    class Lazy(Dataset[float]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> float:
            if index not in kept:
                kept[index] = random.random()
            return kept[index]

    Federation.from_datasets([Lazy()])


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
        (lambda: Federation.from_sizes([[1], [2, 3]]), "different lengths"),
        (lambda: Federation.from_arrays(np.zeros((0, 2)), client_ids=[]), "no examples"),
        (lambda: Federation.from_arrays([1.0, 2.0], client_ids=[None, "a"]), "row 0 has no client"),
        (lambda: Federation.from_arrays([1.0, 2.0], client_ids=[3.0, np.nan]), "row 1 has no cli"),
        (
            lambda: Federation.from_arrays([1.0, 2.0], client_ids=np.array([3, "a"], object)),
            "mixes",
        ),
        (lambda: Federation.from_arrays([[1.0], [2.0, 3.0]], sizes=[2]), "different lengths"),
        (lambda: Federation.from_datasets([[{"a": 1}]]), r"dicts \(a\): let .* tuples"),  # type: ignore[list-item]
        (lambda: Federation.from_datasets([iter([])]), "must have a length"),  # type: ignore[list-item]
        (lambda: Federation.from_datasets([[(1.0, "a")]]), "part 1"),  # type: ignore[list-item]
        (lambda: Federation.from_datasets([DataLoader(ONE)]), "dataset 0 is a DataLoader.*dataset"),  # type: ignore[list-item]
        (lambda: Federation.from_datasets(DataLoader(ONE)), "list with a dataset per client"),  # type: ignore[arg-type]
        (lambda: Federation.from_datasets(ONE), "list with a dataset per client"),  # type: ignore[arg-type]
        (lambda: Federation.from_datasets([Stream()]), "dataset 0 is an IterableDataset"),
        (lambda: Federation.from_arrays(DataLoader(ONE), sizes=[1]), "field 0 is a DataLoader"),
        (lambda: Federation.from_arrays(TABLE, sizes=[2]), r"'Paris'.*row 0 of column 'city'"),
        (
            lambda: Federation.from_arrays(TABLE.to_numpy(), sizes=[2]),
            "'Paris'.*row 0.*get_dummies",
        ),
        (lambda: Federation.from_arrays(TABLE["city"], sizes=[2]), "'Paris'.*row 0"),
        (lambda: Federation.from_arrays(TABLE["seen"], sizes=[2]), "datetime64.* values"),
        (lambda: Federation.from_arrays([1, None], sizes=[2]), "missing value.*row 1"),
    ],
)
def test_invalid_input_is_refused(make: object, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        make()  # type: ignore[operator]


def test_subset_and_sample() -> None:
    whole = Federation.from_arrays(torch.arange(6.0), sizes=[1, 2, 3], weights=[1, 2, 5])
    part = whole.subset([2, 0])
    assert part.ids == (0, 2)
    assert part.sizes.tolist() == [1, 3]
    assert part.weights.tolist() == pytest.approx([1 / 6, 5 / 6])
    assert part.fields[0].tolist() == [0, 3, 4, 5]
    for wrong in ([], [3], [-1]):
        with pytest.raises(FedShuffleError, match="from 0 to 2"):
            whole.subset(wrong)
    assert whole.sample(3) is whole
    assert whole.sample(2).ids == whole.sample(2).ids
    drawn = {whole.sample(1, seed).ids for seed in range(20)}
    assert drawn == {(0,), (1,), (2,)}
