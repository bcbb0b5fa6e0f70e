"""LEAF's JSON."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError
from fedshuffle.data import import_file
from tests.data.helpers import (
    assert_same,
    leaf_json,
    people,
)


def test_leaf_files(tmp_path: Path) -> None:
    x, y, owners = people()
    (tmp_path / "leaf").mkdir()
    for k in range(2):  # a user's examples may lie in both files
        half = range(20 * k, 20 * k + 20)
        users: dict[str, Any] = {owners[i]: {"x": [], "y": []} for i in reversed(half)}
        for i in half:
            users[owners[i]]["x"].append(x[i].tolist())
            users[owners[i]]["y"].append(int(y[i]))
        (tmp_path / "leaf" / f"all_data_{k}.json").write_text(leaf_json(users))
    expected = Federation.from_arrays(x, y, client_ids=owners)
    assert_same(import_file(tmp_path / "leaf", tmp_path / "p"), expected)
    swapped = import_file(
        tmp_path / "leaf", tmp_path / "q", fields=["y", "x"], dtype={"x": "float64", "y": "uint8"}
    )
    assert_same(
        swapped,
        Federation.from_arrays(y.astype(np.uint8), x.astype(np.float64), client_ids=owners),
    )


def test_leaf_inputs_without_decimal_points_are_real(tmp_path: Path) -> None:
    users = {"a": {"x": [[0, 1]], "y": [1]}, "b": {"x": [[0.5, 1]], "y": [2]}}
    (tmp_path / "t.json").write_text(leaf_json(users))
    federation = import_file(tmp_path / "t.json", tmp_path / "p")
    assert [field.dtype.name for field in federation.fields] == ["float32", "int64"]
    assert federation.fields[0].tolist() == [[0, 1], [0.5, 1]]


def test_leaf_text_through_read(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(leaf_json({"b": {"x": ["ab", "cd"], "y": ["c", "e"]}}))
    with pytest.raises(FedShuffleError, match="client 'b'"):
        import_file(tmp_path / "t.json", tmp_path / "p")

    def read(raw: Any) -> dict[str, Any]:
        return {"x": [list(map(ord, text)) for text in raw["x"]], "y": [*map(ord, raw["y"])]}

    federation = import_file(tmp_path / "t.json", tmp_path / "p", read=read)
    assert [field.tolist() for field in federation.fields] == [[[97, 98], [99, 100]], [99, 101]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "user_data"),
        ("[1, 2]", "no users"),
        ("", "cannot read"),
        (leaf_json({"a": {"x": [[1.0]], "y": [1]}})[:-8], "cannot read"),
        (leaf_json({"a": {"z": [[1.0]], "y": [1]}}), "'x'"),
        ('{"user_data": {"a": 3}}', "user 'a'"),
        (leaf_json({"a": {"x": [[1.0], [1.0, 2.0]], "y": [1, 2]}}), "'x'"),
        (leaf_json({"a": {"x": [[1.0], [2.0]], "y": [1]}}), "shapes"),
        (
            leaf_json({"a": {"x": [[1.0, None]], "y": [1]}}),
            "null",
        ),
        (leaf_json({"a": {"x": [[1.0, 1e60]], "y": [1]}}), "NaN or infinity"),
        (leaf_json({"a": {"x": [1.0], "y": [1]}, "b": {"x": [1.0], "y": [1.5]}}), "dtype"),
    ],
)
def test_leaf_files_that_cannot_be_imported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(FedShuffleError, match=message):
        import_file(tmp_path / "t.json", tmp_path / "p")
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_damaged_leaf_files_are_refused_in_one_line(tmp_path: Path) -> None:
    data = {
        "users": ["a"],
        "num_samples": [2],
        "user_data": {"a": {"x": [[1.5], [2]], "y": [0, 1]}},
    }
    whole = json.dumps(data).encode()
    cut = [whole[:k] for k in range(len(whole) - 1)]
    harmed = [
        whole[:k] + byte + whole[k + 1 :] for k in range(len(whole)) for byte in (b"\x1b", b"]")
    ]
    refused = 0
    for text in cut + harmed:
        (tmp_path / "t.json").write_bytes(text)
        said = "x"
        try:
            import_file(tmp_path / "t.json", tmp_path / "p", overwrite=True)
        except FedShuffleError as error:
            said = str(error)
            refused += 1
        assert re.fullmatch("[ -~]+", said)
    assert refused > len(cut)


@pytest.mark.parametrize("begin", ["", '{"users": ', '{"user_data": {"a": {"x": '])
@pytest.mark.parametrize("level", ["[", "[1, [2], ", '{"a": '])
def test_leaf_files_that_nest_without_end(tmp_path: Path, begin: str, level: str) -> None:
    (tmp_path / "t.json").write_text(begin + level * 100_000)
    with pytest.raises(FedShuffleError, match="cannot read"):
        import_file(tmp_path / "t.json", tmp_path / "p")


ANN = {"ann": {"x": [[1.0], [2.0]], "y": [0, 1]}}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("users", "counts", "message"),
    [
        (["ann", "bob"], [2, 3], "'bob'.*lists 3"),
        (["ann", "bob"], None, "'bob'"),
        (["ann"], [3], "'ann'.*2 examples.*3"),
        (["ann"], [0], "'ann'.*2 examples.*0"),
        (["ann", "bob"], [2], "num_samples"),
        (["ann"], [2.5], "num_samples"),
        ([["ann"]], [2], "users"),
        ("ann", [2], "users"),
    ],
)
def test_leaf_users_and_their_data_agree(
    tmp_path: Path, users: Any, counts: Any, message: str, last: bool
) -> None:
    said = {"users": users} | ({} if counts is None else {"num_samples": counts})
    parts = [{"user_data": ANN}, said] if last else [said, {"user_data": ANN}]
    (tmp_path / "t.json").write_text(json.dumps(parts[0] | parts[1]))
    with pytest.raises(FedShuffleError, match=message):
        import_file(tmp_path / "t.json", tmp_path / "p")
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_leaf_users_without_samples_are_left_out_with_a_warning(tmp_path: Path) -> None:
    facts = {"users": ["ann", "bob", "cid"], "num_samples": [2, 0, 0], "user_data": ANN}
    (tmp_path / "t.json").write_text(json.dumps(facts))
    with pytest.warns(UserWarning, match="2 clients.*'bob'"):
        federation = import_file(tmp_path / "t.json", tmp_path / "p")
    assert list(federation.ids) == ["ann"]
    with pytest.warns(UserWarning, match="2 clients"):
        import_file(tmp_path / "t.json", tmp_path / "r", read=lambda raw: {"n": raw["y"]})
    (tmp_path / "t.json").write_text(json.dumps({"user_data": ANN}))
    assert_same(import_file(tmp_path / "t.json", tmp_path / "q"), federation)


def test_leaf_data_and_its_splits_are_not_merged(tmp_path: Path) -> None:
    for name in ("train", "test", "all_data"):
        (tmp_path / "leaf" / name).mkdir(parents=True)
        (tmp_path / "leaf" / name / "part.json").write_text(leaf_json(ANN))
    with pytest.raises(FedShuffleError, match="all_data, test and train"):
        import_file(tmp_path / "leaf", tmp_path / "p")
    shutil.rmtree(tmp_path / "leaf" / "all_data")
    with pytest.raises(FedShuffleError, match="test and train"):
        import_file(tmp_path / "leaf", tmp_path / "p")
    assert len(import_file(tmp_path / "leaf" / "train", tmp_path / "p")) == 1
    shutil.rmtree(tmp_path / "leaf" / "test")
    assert len(import_file(tmp_path / "leaf", tmp_path / "q")) == 1


def test_text_is_refused_without_naming_python_arguments(tmp_path: Path) -> None:
    people = {"ann": {"x": [["high"]], "y": [0]}}
    (tmp_path / "all.json").write_text(json.dumps({"users": ["ann"], "user_data": people}))
    with pytest.raises(FedShuffleError, match="holds text") as refused:
        import_file(tmp_path, tmp_path / "store", format="leaf")
    assert "=" not in str(refused.value)
