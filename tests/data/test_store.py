"""A store opens as the federation that was saved, and a broken one is refused."""

import copy
import dataclasses
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import Federation, FedShuffleError, LocalWork, losses
from fedshuffle.data import import_chunks, open_store
from tests.data.helpers import (
    assert_same,
    people,
    rows_of,
)


def test_save_and_open_round_trip(tmp_path: Path) -> None:
    x, y, owners = people()
    federations = [
        Federation.from_arrays(x, y, client_ids=owners),
        Federation.from_arrays(x, y, client_ids=[int(o[-1]) for o in owners]),
        Federation.from_arrays(torch.tensor(x).T.contiguous().T, torch.tensor(y), sizes=[10, 30]),
        Federation.from_arrays(x, y, sizes=[10, 20, 10], weights=[0.1, 0.7, 0.3]),
        Federation.from_sizes([1, 2, 3]),
    ]
    for k, federation in enumerate(federations):
        federation.save(tmp_path / f"{k}")
        again = Federation.open(tmp_path / f"{k}")
        assert_same(again, federation)
        assert type(again.weights) is np.ndarray
        assert repr(again) == repr(federation)
    assert not (tmp_path / "2" / "arrays-1" / "ids.npy").exists()
    assert (tmp_path / "3" / "arrays-1" / "weights.npy").exists()
    assert not (tmp_path / "0" / "arrays-1" / "weights.npy").exists()


def test_saving_an_opened_federation_keeps_field_names(tmp_path: Path) -> None:
    import_chunks([("b", [[1.0]], [2])], tmp_path / "a", names=["x", "y"])
    Federation.open(tmp_path / "a").save(tmp_path / "b")
    assert open_store(tmp_path / "b").names == ("x", "y")
    with pytest.raises(FedShuffleError, match="1 names"):
        Federation.open(tmp_path / "a").save(tmp_path / "c", names=["x"])


@pytest.mark.parametrize(
    ("federation", "message"),
    [
        (lambda: Federation.from_arrays([1.0], client_ids=[1.5]), "ids"),
        (
            lambda: Federation.from_arrays(torch.ones(2, dtype=torch.bfloat16), sizes=[2]),
            "(?i)bfloat",
        ),
    ],
)
def test_unsupported_ids_and_dtypes_are_refused(
    tmp_path: Path, federation: Callable[[], Federation], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        federation().save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_tensors_share_the_mapped_memory(tmp_path: Path) -> None:
    x, y, owners = people()
    federation = import_chunks(rows_of(x, y, owners), tmp_path / "p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that memory is not writable
        tensors = federation.tensors()
    for field, tensor in zip(federation.fields, tensors, strict=True):
        assert field.ctypes.data == tensor.data_ptr()
    tensors[0].zero_()  # a copy in memory, never on disk
    assert Federation.open(tmp_path / "p").fields[0].any()


@pytest.mark.skipif(sys.platform != "linux", reason="needs files with holes, and /proc")
def test_a_store_may_be_larger_than_memory(tmp_path: Path) -> None:
    rows = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import_chunks([(0, np.zeros(1, np.uint8))], tmp_path / "p")
    facts = json.loads((tmp_path / "p" / "federation.json").read_text())
    (tmp_path / "p" / "federation.json").write_text(json.dumps(facts | {"examples": rows}))
    np.save(tmp_path / "p" / "arrays-1" / "sizes.npy", [rows])
    with (tmp_path / "p" / "arrays-1" / "field0.npy").open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(file, header)
        try:
            file.truncate(file.tell() + rows)
        except OSError:
            pytest.skip("this file system has no files with such holes")
    assert int(Federation.open(tmp_path / "p").tensors()[0][rows - 1]) == 0


def test_an_opened_federation_is_pickled_as_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import_chunks(((k, np.zeros((10, 10))) for k in range(100)), "p")
    federation = Federation.open("p")
    sent = pickle.dumps(federation)
    assert len(sent) < 300
    monkeypatch.chdir("/")
    assert_same(pickle.loads(sent), federation)
    assert_same(copy.deepcopy(federation), federation)
    assert federation.path == tmp_path / "p"


def test_other_weights_are_pickled_too(tmp_path: Path) -> None:
    import_chunks([("a", [1.0]), ("b", [1.0, 2.0])], tmp_path / "p")
    federation = Federation.open(tmp_path / "p", weights=[3, 1])
    assert federation.weights.tolist() == [0.75, 0.25]
    assert pickle.loads(pickle.dumps(federation)).weights.tolist() == [0.75, 0.25]
    changed = dataclasses.replace(federation, weights=np.array([0.5, 0.5]))
    assert changed.path is None
    assert pickle.loads(pickle.dumps(changed)).weights.tolist() == [0.5, 0.5]
    with pytest.raises(FedShuffleError, match="each of the 2 clients"):
        Federation.open(tmp_path / "p", weights=[1])


def test_another_process_opens_the_store_itself(tmp_path: Path) -> None:
    federation = import_chunks([("a", [1.0]), ("b", [1.0, 2.0])], tmp_path / "p")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).fields[0].sum())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(federation), capture_output=True
    )
    assert done.stdout.split() == [b"4.0"]


def test_ids_are_read_one_by_one(tmp_path: Path) -> None:
    names = sorted(["ann", "bob", "", "zoë", "日本", "𝄞", "a" * 1000])
    federation = import_chunks(((name, [1.0]) for name in names), tmp_path / "p")
    assert federation.ids[1:3] == tuple(names[1:3])
    assert federation.ids[-1] == names[-1]
    assert "bob" in federation.ids
    assert "eve" not in federation.ids
    assert 3 not in federation.ids
    assert [federation.find(name) for name in names] == list(range(len(names)))
    with pytest.raises(IndexError):
        federation.ids[len(names)]
    for unknown in ("eve", 3):
        with pytest.raises(FedShuffleError, match="no client has the id"):
            federation.find(unknown)


def test_unsorted_ids_are_found(tmp_path: Path) -> None:
    base = Federation.from_sizes([1, 2, 3])
    dataclasses.replace(base, ids=("c", "a", "b")).save(tmp_path / "p")
    federation = Federation.open(tmp_path / "p")
    assert [federation.find(name) for name in "cab"] == [0, 1, 2]


def test_a_client_by_its_number_and_by_its_id(tmp_path: Path) -> None:
    x, y, owners = people()
    federation = import_chunks(rows_of(x, y, owners), tmp_path / "p")
    mine = [k for k, owner in enumerate(owners) if owner == "client 3"]
    inputs, labels = federation.client(federation.find("client 3"))
    assert inputs.tolist() == x[mine].tolist()
    assert labels.tolist() == y[mine].tolist()
    assert federation.client(-1)[0].tolist() == federation.client(len(federation) - 1)[0].tolist()
    with pytest.raises(IndexError):
        federation.client(7)


def broken(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def harm(store: Path) -> None:
        file = store / name if name == "federation.json" else store / "arrays-1" / name
        file.write_bytes(change(file.read_bytes()))

    return harm


def facts(**changes: Any) -> Callable[[Path], None]:
    return broken(
        "federation.json", lambda data: json.dumps({**json.loads(data), **changes}).encode()
    )


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda store: shutil.rmtree(store), "no federation"),
        (lambda store: (store / "federation.json").unlink(), "no federation"),
        (lambda store: (store / "arrays-1" / "sizes.npy").unlink(), "sizes.npy is missing"),
        (lambda store: (store / "arrays-1" / "field1.npy").unlink(), "field1.npy is missing"),
        (
            lambda store: (store / "arrays-1" / "id_offsets.npy").unlink(),
            "id_offsets.npy",
        ),
        (lambda store: (store / "arrays-1" / "weights.npy").unlink(), "weights.npy is missing"),
        (broken("federation.json", lambda data: data[:-9]), "is broken"),
        (broken("federation.json", lambda data: b"[1]"), "does not describe"),
        (broken("federation.json", lambda data: b'{"format": "fedshuffle federation"}'), "version"),
        (facts(format="other"), "does not describe"),
        (facts(version=1), "version is 1"),
        (facts(arrays="../arrays-1"), "arrays in"),
        (facts(clients="x"), "is broken"),
        (facts(clients=6), "sizes.npy holds"),
        (facts(examples=41), "sizes.npy"),
        (facts(ids="names"), "kind 'names'"),
        (facts(fields=[{"name": "x", "dtype": "float64", "shape": [3]}]), "field0.npy holds"),
        (facts(fields=[{"name": "x", "dtype": "O", "shape": [3]}]), "O values"),
        (facts(fields=[{"name": "x", "dtype": "spam", "shape": [3]}]), "is broken"),
        (facts(fields=[{"name": "x"}]), "lacks 'dtype'"),
        (broken("field0.npy", lambda data: data[:-1]), "field0.npy.*short"),
        (broken("field0.npy", lambda data: data + b"12"), "field0.npy.*long"),
        (broken("field0.npy", lambda data: data[:50]), "field0.npy"),
        (broken("field0.npy", lambda data: b""), "field0.npy"),
        (broken("field0.npy", lambda data: b"x" * len(data)), "field0.npy"),
        (broken("ids.npy", lambda data: data[:-1]), "ids.npy.*short"),
        (
            lambda store: np.save(store / "arrays-1" / "sizes.npy", [40, 0, 0, 0, 0, 0, 0]),
            "client 1 has 0",
        ),
        (
            lambda store: np.save(store / "arrays-1" / "weights.npy", np.full(7, 1.0)),
            "adds up to 7",
        ),
        (
            lambda store: np.save(store / "arrays-1" / "weights.npy", np.full(7, np.nan)),
            "client 0 has nan",
        ),
        (
            lambda store: np.save(store / "arrays-1" / "id_offsets.npy", np.arange(8)[::-1]),
            "id_offsets.npy",
        ),
        (
            lambda store: np.save(
                store / "arrays-1" / "field0.npy", np.asfortranarray(np.ones((40, 3), "f4"))
            ),
            "Fortran",
        ),
    ],
)
def test_broken_stores_are_refused_in_one_line(
    tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    x, y, owners = people()
    whole = Federation.from_arrays(x, y, client_ids=owners, weights=np.arange(1, 8))
    whole.save(tmp_path / "p")
    harm(tmp_path / "p")
    with pytest.raises(FedShuffleError, match=message) as error:
        Federation.open(tmp_path / "p")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("byte", [0, 0x0A, 0x28, 0x31, 0x4C, 0x5C, 0x7B, 0xFF])
def test_a_damaged_header_of_an_array_is_refused_in_one_line(tmp_path: Path, byte: int) -> None:
    whole = import_chunks([("a", [[1.0], [2.0]])], tmp_path / "p")
    file = tmp_path / "p" / "arrays-1" / "field0.npy"
    data = file.read_bytes()
    for k in range(len(data) - whole.fields[0].nbytes):
        file.write_bytes(data[:k] + bytes([byte]) + data[k + 1 :])
        said = "field0.npy Import it again"
        try:
            assert_same(Federation.open(tmp_path / "p"), whole)  # a blank may be another blank
        except FedShuffleError as error:
            said = str(error)
        assert re.fullmatch(".*field0.npy.*Import it again.*", said)  # no dot is a new line


def test_training_on_a_store_equals_training_in_memory(tmp_path: Path) -> None:
    from fedshuffle.training.loop import train

    x, y, owners = people()
    memory = Federation.from_arrays(x, y, client_ids=owners)
    memory.save(tmp_path / "p")
    model = torch.nn.Linear(3, 5)
    both = [
        train(
            model,
            federation,
            loss=losses.cross_entropy,
            rounds=3,
            sampling="uniform:3",
            work=LocalWork(batch_size=4),
        ).model.state_dict()["weight"]
        for federation in (memory, Federation.open(tmp_path / "p"))
    ]
    assert torch.equal(*both)
