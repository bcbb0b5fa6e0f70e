"""Rows that arrive in any order are packed as Federation.from_arrays packs them."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedshuffle import Federation, FedShuffleError
from fedshuffle.data import import_chunks, open_store
from fedshuffle.data.importers import files
from fedshuffle.data.storage import writer
from tests.data.helpers import (
    assert_same,
    people,
    rows_of,
)

per_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
@pytest.mark.parametrize("waiting", [0, 1 << 22])
@per_folder
@given(
    owners=st.one_of(
        st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
        st.lists(st.integers(-(2**63), 2**63 - 1)),
        st.lists(st.integers(0, 3)),
        st.lists(st.integers(0, 3)).map(sorted),
    ).filter(len),
    data=st.data(),
)
def test_chunks_are_packed_as_arrays_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    waiting: int,
    owners: list[Any],
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(writer, "_BLOCK_ROWS", block)
    monkeypatch.setattr(files, "_BUFFER_BYTES", waiting)
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=len(owners), max_size=len(owners)))
    n = sum(lengths)
    ends = np.cumsum(lengths)
    x, y = np.arange(2.0 * n).reshape(n, 2), np.arange(n, dtype=np.int8)
    chunks = ((o, x[e - m : e], y[e - m : e]) for o, e, m in zip(owners, ends, lengths))
    packed = import_chunks(chunks, tmp_path / "people", overwrite=True)
    ids = [owner for owner, m in zip(owners, lengths) for _ in range(m)]
    assert_same(packed, Federation.from_arrays(x, y, client_ids=ids))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["people"]


def test_memory_holds_a_block_and_never_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(files, "_BUFFER_BYTES", 1 << 16)
    row = np.zeros((4, 2048))
    order = np.random.default_rng(0).permutation(512)
    tracemalloc.start()
    try:
        federation = import_chunks(((int(k), row + k) for k in order), tmp_path / "p")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert federation.fields[0].nbytes == 512 * row.nbytes == 1 << 25
    assert most < 1 << 22
    assert (federation.fields[0][:, 0] == np.repeat(np.arange(512), 4)).all()


def test_a_store_holds_nothing_but_its_files(tmp_path: Path) -> None:
    x, y, owners = people()
    import_chunks(rows_of(x, y, owners), tmp_path / "people", names=["x", "y"])
    folder = tmp_path / "people"
    assert sorted(file.name for file in folder.iterdir()) == ["arrays-1", "federation.json"]
    assert sorted(file.name for file in (folder / "arrays-1").iterdir()) == [
        "field0.npy",
        "field1.npy",
        "id_offsets.npy",
        "ids.npy",
        "sizes.npy",
    ]
    facts = json.loads((tmp_path / "people" / "federation.json").read_text())
    assert facts["version"] == 2
    assert facts["clients"] == 7
    assert facts["examples"] == 40
    assert facts["fields"] == [
        {"name": "x", "dtype": "float32", "shape": [3]},
        {"name": "y", "dtype": "int64", "shape": []},
    ]


def test_an_iterator_may_reuse_its_arrays(tmp_path: Path) -> None:
    row = np.zeros((1, 1))

    def chunks() -> Iterator[tuple[int, NDArray[Any]]]:
        for k in range(5):
            row[:] = k
            yield k, row

    assert import_chunks(chunks(), tmp_path / "p").fields[0].ravel().tolist() == [0, 1, 2, 3, 4]


def test_arrays_of_a_chunk_come_plain_in_a_tuple_or_by_name(tmp_path: Path) -> None:
    x, y = np.eye(2), np.array([True, False])
    plain = import_chunks([(np.int32(4), x, y)], tmp_path / "a")
    in_tuple = import_chunks([(4, (x, y))], tmp_path / "b")
    by_name = import_chunks([(4, {"x": x, "y": y})], tmp_path / "c")
    tensors = import_chunks([(4, torch.eye(2, dtype=torch.float64), y)], tmp_path / "d")
    assert plain.ids[0] == 4
    for other in (in_tuple, by_name, tensors):
        assert_same(plain, other)
    assert open_store(tmp_path / "c").names == ("x", "y")


def test_named_fields_keep_the_order_of_the_first_chunk(tmp_path: Path) -> None:
    chunks = [("a", {"x": [1.0], "y": [2.0]}), ("b", {"y": [4.0], "x": [3.0]})]
    assert [f.tolist() for f in import_chunks(chunks, tmp_path / "p").fields] == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("values", "dtype", "stored"),
    [
        ([[1, 2], [3, 4]], "float32", "float32"),
        ([[1.0, 2.0], [3.0, 4.0]], "int16", "int16"),
        ([[0, 1], [1, 0]], "bool", "bool"),
        ([[1, 2], [3, 4]], "float16", "float16"),
        (np.array([1, 2], dtype=">i4"), None, "int32"),
    ],
)
def test_fields_are_stored_with_the_given_dtype(
    tmp_path: Path, values: Any, dtype: str | None, stored: str
) -> None:
    given = None if dtype is None else {"field0": dtype}
    field = import_chunks([("a", values)], tmp_path / "p", dtype=given).fields[0]
    assert field.dtype == stored
    assert field.tolist() == np.asarray(values).tolist()


def test_clients_without_examples_are_left_out_with_a_warning(tmp_path: Path) -> None:
    chunks = [("a", [1.0]), ("b", []), ("c", []), ("c", [2.0])]
    with pytest.warns(UserWarning, match="1 clients.*'b'"):
        federation = import_chunks(chunks, tmp_path / "p")
    assert list(federation.ids) == ["a", "c"]


@pytest.mark.parametrize(
    ("chunks", "options", "message"),
    [
        ([], {}, "no examples"),
        ([("a", [])], {}, "no examples"),
        (["ab"], {}, "chunk"),
        ([("a",)], {}, "chunk"),
        ([(None, [1.0])], {}, "id None"),
        ([(True, [1.0])], {}, "id True"),
        ([(1.5, [1.0])], {}, "id 1.5"),
        ([(2**63, [1.0])], {}, "64 bits"),
        ([("\ud800", [1.0])], {}, "valid text"),
        ([("a", [1.0]), (1, [1.0])], {}, "another type"),
        ([("a", [1.0], [1.0, 2.0])], {}, "client 'a'.*shapes"),
        ([("a", 1.0)], {}, "shapes"),
        ([("a", [[1.0], [1.0, 2.0]])], {}, "'field0' of client 'a'"),
        ([("a", ["x"])], {}, "'field0'"),
        ([("a", [1.0], [1.0]), ("b", [1.0])], {}, "'b'.*field0, field1"),
        ([("a", [[1.0]]), ("b", [[1.0, 2.0]])], {}, "'b'.*shape"),
        ([("a", [1]), ("b", [1.5])], {}, "'b' holds float64.*int64"),
        ([("a", [1j])], {"dtype": {"field0": "float32"}}, "holds complex128"),
        ([("a", [1]), ("b", [2, 300])], {"dtype": {"field0": "uint8"}}, "'b'.*uint8.*example 1"),
        ([("a", [1.5])], {"dtype": {"field0": "int64"}}, "int64.*example 0"),
        ([("a", [1e300])], {"dtype": {"field0": "float32"}}, "float32"),
        ([("a", [1.0])], {"dtype": {"x": "float32"}}, "unknown field 'x'"),
        ([("a", [1.0])], {"dtype": {"field0": "U3"}}, "U3"),
        ([("a", [1.0])], {"dtype": {"field0": "flaot32"}}, "flaot32"),
        ([("a", [1.0])], {"names": ["x", "y"]}, "x, y"),
        ([("a", [1.0], [1.0])], {"names": ["x", "x"]}, "twice in x, x"),
        ([("a", {"x": [1.0]}), ("b", {"z": [1.0]})], {}, "'b'.*z.*x"),
        ([("a", [1.0]), ("b", [1.0]), ("a", [2.0, np.nan])], {}, "'a' has NaN.*example 2"),
        ([("a", [[1.0]]), ("b", [[-np.inf]])], {}, "'b'.*NaN.*example 0"),
    ],
)
@pytest.mark.parametrize("waiting", [0, 1 << 22])
def test_invalid_chunks_are_refused_and_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[Any],
    options: dict[str, Any],
    message: str,
    waiting: int,
) -> None:
    monkeypatch.setattr(files, "_BUFFER_BYTES", waiting)
    with pytest.raises(FedShuffleError, match=message):
        import_chunks(chunks, tmp_path / "p", **options)
    assert not list(tmp_path.iterdir())


def test_batches_hold_rows_of_several_clients(tmp_path: Path) -> None:
    batches: list[writer.Batch] = [
        (["b"], np.array([0]), {"x": np.array([1.0])}),
        (["a", "b"], np.array([1, 0, 1]), {"x": np.array([2.0, 3.0, 4.0])}),
        (["a"], np.array([0]), {"x": np.array([5.0])}),
    ]
    writer.write_store(batches, tmp_path / "p")
    assert Federation.open(tmp_path / "p").fields[0].tolist() == [3, 5, 1, 2, 4]
