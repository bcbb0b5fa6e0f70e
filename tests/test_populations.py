"""Stores on disk hold what Federation.from_arrays would, whatever they were imported from."""

from __future__ import annotations

import copy
import dataclasses
import errno
import gzip
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pyarrow import parquet

from fedshuffle import EpochRange, Federation, FedShuffleError, LocalWork, _files, cli, losses
from fedshuffle.populations import (
    StoreWriter,
    draft,
    import_chunks,
    import_file,
    import_hdf5,
    import_leaf,
    import_table,
    open_store,
    store,
    writing,
)
from fedshuffle.populations import leaf as leaf_reading
from fedshuffle.randomness import Purpose, generator
from fedshuffle.report.population import histogram

per_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_same(one: Federation, other: Federation) -> None:
    """Both hold the same clients, with the same examples in the same order."""
    assert list(one.ids) == list(other.ids)
    assert one.sizes.tolist() == other.sizes.tolist()
    assert one.weights.tolist() == other.weights.tolist()
    for mine, theirs in zip(one.fields, other.fields, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype


def people(n: int = 40, clients: int = 7, seed: int = 0) -> tuple[Any, Any, list[str]]:
    """Inputs, labels, and whose each row is, in no order."""
    rng = np.random.default_rng(seed)
    owners = [f"client {k}" for k in rng.integers(clients, size=n)]
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(5, size=n), owners


def rows_of(x: Any, y: Any, owners: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """A chunk a row, read once."""
    return ((owner, x[k : k + 1], y[k : k + 1]) for k, owner in enumerate(owners))


# Packing -------------------------------------------------------------------------------------


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
    monkeypatch.setattr(draft, "_BLOCK_ROWS", block)
    monkeypatch.setattr(writing, "_WAITING_BYTES", waiting)
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
    monkeypatch.setattr(draft, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(writing, "_WAITING_BYTES", 1 << 16)
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


def test_an_iterator_may_fill_the_same_arrays_again(tmp_path: Path) -> None:
    row = np.zeros((1, 1))

    def chunks() -> Iterator[tuple[int, NDArray[Any]]]:
        for k in range(5):
            row[:] = k
            yield k, row

    assert import_chunks(chunks(), tmp_path / "p").fields[0].ravel().tolist() == [0, 1, 2, 3, 4]


def test_forms_of_a_chunk(tmp_path: Path) -> None:
    x, y = np.eye(2), np.array([True, False])
    plain = import_chunks([(np.int32(4), x, y)], tmp_path / "a")
    in_tuple = import_chunks([(4, (x, y))], tmp_path / "b")
    by_name = import_chunks([(4, {"x": x, "y": y})], tmp_path / "c")
    tensors = import_chunks([(4, torch.eye(2, dtype=torch.float64), y)], tmp_path / "d")
    assert plain.ids[0] == 4
    for other in (in_tuple, by_name, tensors):
        assert_same(plain, other)
    assert open_store(tmp_path / "c").names == ("x", "y")


def test_fields_come_by_name_in_the_first_ones_order(tmp_path: Path) -> None:
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
def test_dtypes(tmp_path: Path, values: Any, dtype: str | None, stored: str) -> None:
    told = None if dtype is None else {"field0": dtype}
    field = import_chunks([("a", values)], tmp_path / "p", dtype=told).fields[0]
    assert field.dtype == stored
    assert field.tolist() == np.asarray(values).tolist()


def test_clients_without_examples_are_left_out_and_named(tmp_path: Path) -> None:
    chunks = [("a", [1.0]), ("b", []), ("c", []), ("c", [2.0])]
    with pytest.warns(UserWarning, match="1 clients without examples were left out, such as 'b'"):
        federation = import_chunks(chunks, tmp_path / "p")
    assert list(federation.ids) == ["a", "c"]


@pytest.mark.parametrize(
    ("chunks", "options", "message"),
    [
        ([], {}, "no examples"),
        ([("a", [])], {}, "no examples"),
        (["ab"], {}, "a chunk is"),
        ([("a",)], {}, "a chunk is"),
        ([(None, [1.0])], {}, "id None is of type NoneType"),
        ([(True, [1.0])], {}, "id True"),
        ([(1.5, [1.0])], {}, "id 1.5"),
        ([(2**63, [1.0])], {}, "64 bits"),
        ([("\ud800", [1.0])], {}, "no valid text"),
        ([("a", [1.0]), (1, [1.0])], {}, "mix text and numbers"),
        ([("a", [1.0], [1.0, 2.0])], {}, "all fields of client 'a' need one row"),
        ([("a", 1.0)], {}, "one row per example"),
        ([("a", [[1.0], [1.0, 2.0]])], {}, "field 'field0' of client 'a' is no array"),
        ([("a", ["x"])], {}, "'field0' of client 'a' holds text.*read"),
        ([("a", [1.0], [1.0]), ("b", [1.0])], {}, "1 arrays after rows with 2"),
        ([("a", [[1.0]]), ("b", [[1.0, 2.0]])], {}, r"'b' has examples of shape \(2,\)"),
        ([("a", [1]), ("b", [1.5])], {}, "'b' holds float64.*others hold int64.*such as float64"),
        ([("a", [1j])], {"dtype": {"field0": "float32"}}, "holds complex128"),
        ([("a", [1]), ("b", [2, 300])], {"dtype": {"field0": "uint8"}}, "'b'.*uint8.*example 1"),
        ([("a", [1.5])], {"dtype": {"field0": "int64"}}, "int64 cannot hold.*example 0"),
        ([("a", [1e300])], {"dtype": {"field0": "float32"}}, "float32 cannot hold"),
        ([("a", [1.0])], {"dtype": {"x": "float32"}}, "unknown field 'x'"),
        ([("a", [1.0])], {"dtype": {"field0": "U3"}}, "cannot be stored as 'U3'"),
        ([("a", [1.0])], {"dtype": {"field0": "flaot32"}}, "cannot be stored as 'flaot32'"),
        ([("a", [1.0])], {"names": ["x", "y"]}, "1 arrays for the fields x, y"),
        ([("a", [1.0], [1.0])], {"names": ["x", "x"]}, "another name"),
        ([("a", {"x": [1.0]}), ("b", {"z": [1.0]})], {}, "'b' has the fields z, but others have x"),
        ([("a", [1.0]), ("b", [1.0]), ("a", [2.0, np.nan])], {}, "'a' has NaN.*example 2"),
        ([("a", [[1.0]]), ("b", [[-np.inf]])], {}, "'b' has NaN or infinity in its example 0"),
    ],
)
@pytest.mark.parametrize("waiting", [0, 1 << 22])
def test_what_cannot_be_imported_is_named_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[Any],
    options: dict[str, Any],
    message: str,
    waiting: int,
) -> None:
    monkeypatch.setattr(writing, "_WAITING_BYTES", waiting)
    with pytest.raises(FedShuffleError, match=message):
        import_chunks(chunks, tmp_path / "p", **options)
    assert not list(tmp_path.iterdir())


# Places and interruptions --------------------------------------------------------------------


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_import_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: type[BaseException]
) -> None:
    def chunks() -> Iterator[tuple[str, list[float]]]:
        yield "b", [1.0] * 1_000_000
        yield "a", [1.0]
        raise stop

    with pytest.raises(stop):
        import_chunks(chunks(), tmp_path / "p")
    assert not list(tmp_path.iterdir())
    assert ("nothing was kept" in capsys.readouterr().err) == (stop is KeyboardInterrupt)


def test_an_import_interrupted_while_packing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_places", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_chunks([("b", [1.0]), ("a", [2.0])], tmp_path / "p")
    assert not list(tmp_path.iterdir())
    assert "nothing was kept" in capsys.readouterr().err


def test_a_killed_import_leaves_no_store(tmp_path: Path) -> None:
    code = """
import os, sys
from fedshuffle.populations import import_chunks
def chunks():
    yield "a", [1.0] * 1_000_000
    os._exit(9)
import_chunks(chunks(), sys.argv[1])
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "p"]).returncode == 9
    with pytest.raises(FedShuffleError, match="no federation"):
        Federation.open(tmp_path / "p")
    assert [file.name for file in (tmp_path / "p").iterdir()] != []
    import_chunks([("b", [1.0])], tmp_path / "p")
    assert Federation.open(tmp_path / "p").ids[0] == "b"
    assert names_in(tmp_path / "p") == ["arrays-1", "federation.json"]


IMPORTER = """
import sys
from fedshuffle.populations import import_chunks
def chunks():
    yield "first", [1.0] * 1000
    print("begun", flush=True)
    sys.stdin.read()
    yield "first", [2.0]
import_chunks(chunks(), sys.argv[1], overwrite=True)
"""


@pytest.mark.parametrize("there", [False, True])
def test_a_second_import_into_the_same_store_is_refused(tmp_path: Path, there: bool) -> None:
    place = tmp_path / "p"
    if there:
        import_chunks([("old", [0.0])], place)
    words = [sys.executable, "-c", IMPORTER, str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"begun\n"
        for overwrite in (False, True) if not there else (True,):
            with pytest.raises(FedShuffleError, match=f"written by process {first.pid}") as error:
                import_chunks([("second", [3.0])], place, overwrite=overwrite)
            assert "\n" not in str(error.value)
        if there:
            assert list(Federation.open(place).ids) == ["old"]  # until the new one is whole
    assert first.returncode == 0
    assert Federation.open(place).sizes.tolist() == [1001]
    assert names_in(place) == [f"arrays-{1 + there}", "federation.json"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("stop", "there", "within"),
    [
        ("interrupted", True, "finish replace"),
        *(
            pytest.param(stop, there, "", marks=pytest.mark.slow)
            for stop in ("killed", "interrupted")
            for there in (False, True)
        ),
    ],
)
def test_wherever_an_overwrite_stops_a_whole_store_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str, there: bool, within: str
) -> None:
    """A child process stops at its k-th line of the code that writes, for every k."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it is no power cut
    place, new = tmp_path / "p", [("d", [3.0]), ("c", [4.0])]
    seen: set[str] = set()
    points = 0
    while True:
        points += 1
        shutil.rmtree(place, ignore_errors=True)
        if there:
            import_chunks([("b", [1.0]), ("a", [2.0])], place)
        if (child := os.fork()) == 0:
            stopped_at(points, stop, within, lambda: import_chunks(new, place, overwrite=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        if (place / "federation.json").exists():
            whole = Federation.open(place)
            found = (list(whole.ids), whole.fields[0].tolist())
            assert found in ((["a", "b"], [2.0, 1.0]), (["c", "d"], [4.0, 3.0]))
            seen.add(str(found[0][0]))
        else:
            assert not there
            seen.add("none")
        import_chunks([("e", [5.0])], place, overwrite=True)  # whatever was left
        assert Federation.open(place).fields[0].tolist() == [5.0]
        assert len(names_in(place)) == 2
        assert names_in(tmp_path) == ["p"]
        if code == 0:
            break
    assert points > 20
    assert seen == {"a" if there else "none", "c"}


def stopped_at(point: int, stop: str, within: str, work: Callable[[], Any]) -> NoReturn:
    """End this process at the point-th line of the code that writes: 9, or 0 if it never came.

    Count only the lines of the functions named in ``within``, if any is.
    """
    files = (draft.__file__, writing.__file__, _files.__file__, shutil.__file__)
    left = point

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        left -= event == "line" and (not within or frame.f_code.co_name in within.split())
        if left == 0:
            if stop == "killed":
                os._exit(9)
            left = -1
            raise KeyboardInterrupt
        return trace

    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.settrace(trace)
        work()
        code = 0
    except KeyboardInterrupt:
        code = 9
    finally:
        os._exit(code)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_store_is_overwritten_only_when_told(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "people"
    import_chunks([("a", [1.0])], place)
    first = Federation.open(place)
    with pytest.raises(FedShuffleError, match=r"holds a federation already.*overwrite"):
        import_chunks([("b", [2.0])], place)
    with pytest.raises(FedShuffleError, match="NaN"):
        import_chunks([("b", [np.nan])], place, overwrite=True)
    assert Federation.open(place).ids[0] == "a"
    import_chunks([("b", [2.0])], place, overwrite=True)
    assert Federation.open(place).ids[0] == "b"
    assert first.fields[0].tolist() == [1.0]  # who has it open keeps it
    assert [file.name for file in place.parent.iterdir()] == ["people"]


def test_what_is_no_store_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    for name in ("letters", "file"):
        with pytest.raises(FedShuffleError, match=r"no federation. Choose another place"):
            import_chunks([("a", [1.0])], tmp_path / name, overwrite=True)
    with pytest.raises(FedShuffleError, match=r"cannot write.*choose another folder"):
        import_chunks([("a", [1.0])], tmp_path / "file" / "p")
    (tmp_path / "empty").mkdir()
    assert len(import_chunks([("a", [1.0])], tmp_path / "empty")) == 1
    import_chunks([("a", [1.0])], tmp_path / "p")
    facts = (tmp_path / "p" / "federation.json").rename(tmp_path / "copy.json")
    with pytest.raises(FedShuffleError, match="no federation"):  # only that file is lost
        import_chunks([("b", [1.0])], tmp_path / "p", overwrite=True)
    facts.rename(tmp_path / "p" / "federation.json")
    assert Federation.open(tmp_path / "p").ids[0] == "a"


def test_a_broken_store_stays_until_another_takes_its_place(tmp_path: Path) -> None:
    import_chunks([("a", [1.0])], tmp_path / "p")
    facts = (tmp_path / "p" / "federation.json").read_text()
    (tmp_path / "p" / "federation.json").write_text(facts[:-9])
    with pytest.raises(FedShuffleError, match="NaN"):
        import_chunks([("b", [np.nan])], tmp_path / "p", overwrite=True)
    (tmp_path / "p" / "federation.json").write_text(facts)
    assert Federation.open(tmp_path / "p").ids[0] == "a"
    (tmp_path / "p" / "federation.json").write_text(facts[:-9])
    import_chunks([("b", [1.0])], tmp_path / "p", overwrite=True)
    assert names_in(tmp_path / "p") == ["arrays-2", "federation.json"]


def test_a_store_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_chunks([("a", [1.0])], tmp_path / "p")
    mapped = store._mapped
    left = [("b", [2.0])]

    def late(*args: Any) -> Any:
        if left:
            import_chunks([left.pop()], tmp_path / "p", overwrite=True)
        return mapped(*args)

    monkeypatch.setattr(store, "_mapped", late)
    assert list(Federation.open(tmp_path / "p").ids) == ["b"]


def test_a_disk_that_takes_no_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import resource, sys
import numpy as np
from fedshuffle.populations import import_chunks
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import_chunks([("a", np.zeros(1 << 18))], sys.argv[1])
"""
    words = [sys.executable, "-c", code, str(tmp_path / "p")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "FedShuffleError: cannot write" in done.stderr
    assert "File too large. Nothing of it was kept" in done.stderr
    assert not list(tmp_path.iterdir())

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FedShuffleError, match="No space left on device"):
        import_chunks([("b", [1.0]), ("a", [2.0])], tmp_path / "p")
    assert not list(tmp_path.iterdir())


# Opening -------------------------------------------------------------------------------------


def test_a_federation_comes_back_as_it_was_saved(tmp_path: Path) -> None:
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


def test_saving_what_was_opened_keeps_the_names(tmp_path: Path) -> None:
    import_chunks([("b", [[1.0]], [2])], tmp_path / "a", names=["x", "y"])
    Federation.open(tmp_path / "a").save(tmp_path / "b")
    assert open_store(tmp_path / "b").names == ("x", "y")
    with pytest.raises(FedShuffleError, match="1 names for 2 fields"):
        Federation.open(tmp_path / "a").save(tmp_path / "c", names=["x"])


@pytest.mark.parametrize(
    ("federation", "message"),
    [
        (lambda: Federation.from_arrays([1.0], client_ids=[1.5]), "all text or all whole numbers"),
        (lambda: Federation.from_arrays(torch.ones(2, dtype=torch.bfloat16), sizes=[2]), "bfloat"),
    ],
)
def test_what_cannot_be_saved(
    tmp_path: Path, federation: Callable[[], Federation], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        federation().save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_tensors_lie_on_the_mapping(tmp_path: Path) -> None:
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
def test_a_store_may_be_larger_than_the_memory(tmp_path: Path) -> None:
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


def test_pickled_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    import_chunks(((k, np.zeros((10, 10))) for k in range(100)), "p")
    federation = Federation.open("p")
    sent = pickle.dumps(federation)
    assert len(sent) < 300
    monkeypatch.chdir("/")
    assert_same(pickle.loads(sent), federation)
    assert_same(copy.deepcopy(federation), federation)
    assert federation.path == tmp_path / "p"


def test_other_weights_travel_too(tmp_path: Path) -> None:
    import_chunks([("a", [1.0]), ("b", [1.0, 2.0])], tmp_path / "p")
    federation = Federation.open(tmp_path / "p", weights=[3, 1])
    assert federation.weights.tolist() == [0.75, 0.25]
    assert pickle.loads(pickle.dumps(federation)).weights.tolist() == [0.75, 0.25]
    changed = dataclasses.replace(federation, weights=np.array([0.5, 0.5]))
    assert changed.path is None
    assert pickle.loads(pickle.dumps(changed)).weights.tolist() == [0.5, 0.5]
    with pytest.raises(FedShuffleError, match="each of the 2 clients"):
        Federation.open(tmp_path / "p", weights=[1])


def test_another_process_opens_it_itself(tmp_path: Path) -> None:
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
    assert "..." in repr(federation.ids)
    with pytest.raises(IndexError):
        federation.ids[len(names)]
    for unknown in ("eve", 3):
        with pytest.raises(FedShuffleError, match="no client has the id"):
            federation.find(unknown)


def test_ids_that_are_not_sorted_are_found(tmp_path: Path) -> None:
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
        (lambda store: shutil.rmtree(store), "no federation.*is missing"),
        (lambda store: (store / "federation.json").unlink(), "no federation"),
        (lambda store: (store / "arrays-1" / "sizes.npy").unlink(), "sizes.npy is missing"),
        (lambda store: (store / "arrays-1" / "field1.npy").unlink(), "field1.npy is missing"),
        (
            lambda store: (store / "arrays-1" / "id_offsets.npy").unlink(),
            "id_offsets.npy is missing",
        ),
        (lambda store: (store / "arrays-1" / "weights.npy").unlink(), "weights.npy is missing"),
        (broken("federation.json", lambda data: data[:-9]), "is broken"),
        (broken("federation.json", lambda data: b"[1]"), "does not describe"),
        (broken("federation.json", lambda data: b'{"format": "fedshuffle federation"}'), "version"),
        (facts(format="other"), "does not describe"),
        (facts(version=1), "its version is 1, and this fedshuffle reads 2"),
        (facts(arrays="../arrays-1"), "speaks of arrays in"),
        (facts(clients="x"), "is broken"),
        (facts(clients=6), r"sizes.npy holds int64 \(7,\) instead of int64 \(6,\)"),
        (facts(examples=41), "adds up to 40 examples instead of 41"),
        (facts(ids="names"), "kind 'names'"),
        (facts(fields=[{"name": "x", "dtype": "float64", "shape": [3]}]), "field0.npy holds"),
        (facts(fields=[{"name": "x", "dtype": "O", "shape": [3]}]), "speaks of O values"),
        (facts(fields=[{"name": "x", "dtype": "spam", "shape": [3]}]), "is broken"),
        (facts(fields=[{"name": "x"}]), "lacks 'dtype'"),
        (broken("field0.npy", lambda data: data[:-1]), "field0.npy is 1 bytes too short"),
        (broken("field0.npy", lambda data: data + b"12"), "field0.npy is 2 bytes too long"),
        (broken("field0.npy", lambda data: data[:50]), "field0.npy is no array"),
        (broken("field0.npy", lambda data: b""), "field0.npy is no array"),
        (broken("field0.npy", lambda data: b"x" * len(data)), "field0.npy is no array"),
        (broken("ids.npy", lambda data: data[:-1]), "ids.npy is 1 bytes too short"),
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
            "does not ascend",
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


# Tables --------------------------------------------------------------------------------------


def table(n: int = 500) -> tuple[Any, Any, list[str], dict[str, Any]]:
    x, y, owners = people(n)
    columns = {"a": x[:, 0], "who": owners, "b": x[:, 1], "note": ["n"] * n, "y": y, "c": x[:, 2]}
    return x, y, owners, columns


def write_csv(path: Path, columns: dict[str, Any], delimiter: str = ",") -> None:
    rows = zip(*(map(str, np.asarray(column).tolist()) for column in columns.values()))
    text = "\n".join(delimiter.join(row) for row in [tuple(columns), *rows]) + "\n"
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.tsv", "t.csv.gz", "parts"])
def test_a_table_with_a_label(tmp_path: Path, name: str) -> None:
    x, y, owners, columns = table()
    if name == "parts":  # rows of a client lie in several files
        (tmp_path / name).mkdir()
        for k in range(5):
            part = {key: column[k * 100 : (k + 1) * 100] for key, column in columns.items()}
            parquet.write_table(pa.table(part), tmp_path / name / f"part{k}.parquet")
    elif name.endswith("parquet"):
        parquet.write_table(pa.table(columns), tmp_path / name, row_group_size=64)
    else:
        write_csv(tmp_path / name, columns, "\t" if "tsv" in name else ",")
    federation = import_file(tmp_path / name, tmp_path / "p", client="who", label="y")
    assert_same(federation, Federation.from_arrays(x, y, client_ids=owners))
    store = open_store(tmp_path / "p")
    assert store.names == ("input", "label")
    assert store.source["columns"] == {"input": ["a", "b", "c"], "label": "y"}
    assert store.source["left_out"] == ["note"]


def test_columns_as_fields(tmp_path: Path) -> None:
    x, y, owners, columns = table(50)
    columns["image"] = [[[1, 2], [3, k]] for k in range(50)]
    columns["flat"] = pa.FixedSizeListArray.from_arrays(pa.array(range(100), pa.uint8()), 2)
    columns["small"] = pa.array(y, pa.int8())
    columns["money"] = pa.array([Decimal("1.00")] * 50, pa.decimal128(5, 2))
    columns["code"] = pa.array(owners).dictionary_encode()
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    fields = ["image", "flat", "small", "a", "money"]
    federation = import_table(
        tmp_path / "t.parquet", tmp_path / "p", client="code", fields=fields, dtype={"a": "float64"}
    )
    expected = Federation.from_arrays(
        np.array(columns["image"]),
        np.arange(100, dtype=np.uint8).reshape(50, 2),
        y,
        x[:, 0].astype(np.float64),
        np.ones(50),
        client_ids=owners,
    )
    assert_same(federation, expected)


def test_a_list_column_as_the_input(tmp_path: Path) -> None:
    columns = {"client": [2, 1], "x": [[1.0, 2.0], [3.0, 4.0]], "y": [1.5, 2.5]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    federation = import_file(tmp_path / "t.parquet", tmp_path / "p", client="client", label="y")
    assert list(federation.ids) == [1, 2]
    assert federation.fields[0].tolist() == [[3, 4], [1, 2]]
    assert federation.fields[1].tolist() == [2.5, 1.5]


def test_input_columns_in_the_order_they_are_named(tmp_path: Path) -> None:
    x, _, owners, columns = table(30)
    write_csv(tmp_path / "t.csv", columns)
    federation = import_file(tmp_path / "t.csv", tmp_path / "p", client="who", input=["c", "a"])
    assert_same(federation, Federation.from_arrays(x[:, [2, 0]], client_ids=owners))
    alone = import_file(tmp_path / "t.csv", tmp_path / "q", client="who", input=["b"])
    assert alone.fields[0].shape == (30, 1)


def test_clients_of_text_files(tmp_path: Path) -> None:
    write_csv(tmp_path / "n.csv", {"who": ["10", "9", "-1", "10"], "x": [1, 2, 3, 4]})
    numbers = import_file(tmp_path / "n.csv", tmp_path / "p", client="who", fields=["x"])
    assert list(numbers.ids) == [-1, 9, 10]
    assert numbers.fields[0].tolist() == [3, 2, 1, 4]
    write_csv(tmp_path / "t.csv", {"who": ["7", "007", "7"], "x": [1, 2, 3]})
    text = import_file(tmp_path / "t.csv", tmp_path / "q", client="who", fields=["x"])
    assert list(text.ids) == ["007", "7"]
    assert text.fields[0].tolist() == [2, 1, 3]


def test_text_files_that_begin_with_whole_numbers(tmp_path: Path) -> None:
    """What the first megabyte looks like must not decide what comes later."""
    n = 400_000
    x = np.ones(n)
    x[-1] = 0.5
    write_csv(tmp_path / "t.csv", {"who": ["1"] * (n - 1) + ["b"], "x": [f"{v:g}" for v in x]})
    federation = import_file(tmp_path / "t.csv", tmp_path / "p", client="who", input=["x"])
    assert list(federation.ids) == ["1", "b"]
    assert federation.fields[0].ravel().tolist() == x.tolist()
    told = import_file(
        tmp_path / "t.csv", tmp_path / "q", client="who", fields=["x"], dtype={"x": "float64"}
    )
    assert told.fields[0].tolist() == x.tolist()
    with pytest.raises(FedShuffleError, match=r"cannot read.*0\.5"):
        import_file(tmp_path / "t.csv", tmp_path / "r", client="who", fields=["x"])


def test_folders_named_after_clients(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "t" / f"who={name}").mkdir(parents=True)
        part = pa.table({"x": [ord(name)] * 2})
        parquet.write_table(part, tmp_path / "t" / f"who={name}" / "part.parquet")
    federation = import_file(tmp_path / "t", tmp_path / "p", client="who", fields=["x"])
    assert list(federation.ids) == ["a", "b"]
    assert federation.fields[0].tolist() == [97, 97, 98, 98]


def test_folders_above_the_source_make_no_column(tmp_path: Path) -> None:
    (tmp_path / "version=3" / "parts").mkdir(parents=True)
    columns = pa.table({"who": [1], "a.b": [2.0], "y": [0]})
    parquet.write_table(columns, tmp_path / "version=3" / "parts" / "t.parquet")
    for k, source in enumerate(["version=3/parts", "version=3/parts/t.parquet"]):
        federation = import_table(tmp_path / source, tmp_path / str(k), client="who", label="y")
        assert federation.fields[0].tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": [1.0]}, {"label": "y"}, "unknown column 'y'"),
        ({"x": [1.0]}, {"fields": ["X"]}, "unknown column 'X'"),
        ({"x": [1.0]}, {}, "columns who, x. Say which"),
        ({"x": [1.0]}, {"fields": ["x"], "label": "x"}, "Say which"),
        ({"x": [1.0]}, {"fields": ["x", "x"]}, "named twice"),
        ({"x": [1.0]}, {"input": ["x", "x"]}, "named twice"),
        ({"y": [1.0]}, {"label": "y"}, "no other column holds numbers"),
        ({"x": ["t"]}, {"fields": ["x"]}, "column 'x' holds text"),
        ({"x": [["t"]]}, {"fields": ["x"]}, "column 'x' holds text"),
        ({"x": [[1.0]], "z": [1.0], "y": [1]}, {"label": "y"}, "hold lists.*Name the input"),
        ({"x": [[1.0]], "z": [[1.0]], "y": [1]}, {"label": "y"}, "x, z hold lists"),
        ({"x": [[1.0]], "z": [1.0]}, {"input": ["x", "z"]}, "'x' holds lists and cannot be set"),
        ({"x": [[1.0], [1.0, 2.0]]}, {"fields": ["x"]}, "lists of 1 and, in row 2, of 2"),
        ({"x": [[1.0], None]}, {"fields": ["x"]}, "in row 2, of 0"),
        ({"x": [[[1], [2]], [[1], [2, 3]]]}, {"fields": ["x"]}, "lists of 1 and, in row 2, of 2"),
        ({"x": [1.0, None]}, {"fields": ["x"]}, "client 'ann' has NaN or inf.*example 1"),
        ({"x": [1, None]}, {"fields": ["x"]}, "client 'ann' has NaN or inf.*example 1"),
        ({"x": [[1], [None]]}, {"fields": ["x"]}, "client 'ann' has NaN or inf.*example 1"),
        ({"x": [1.0, np.inf]}, {"input": ["x"]}, "field 'input' of client 'ann' has NaN"),
        ({"x": [1.0]}, {"fields": ["x"], "dtype": {"y": "int8"}}, "unknown field 'y'"),
        ({"who": [1.5], "x": [1.0]}, {"fields": ["x"]}, "client column 'who' holds double"),
        ({"who": ["a", None], "x": [1, 2]}, {"fields": ["x"]}, "row 2 has no client"),
        ({"x": [1.0]}, {"fields": ["x"], "client": None}, "which column"),
        ({"x": [1.0]}, {"fields": ["x"], "client": "whom"}, "Did you mean 'who'"),
        ({"x": [1.0]}, {"fields": ["x"], "format": "xml"}, "unknown format 'xml'"),
        ({"x": [1.0]}, {"fields": ["x"], "format": "csv"}, "cannot read|unknown column"),
        ({"x": pa.array([], pa.float64())}, {"fields": ["x"]}, "no examples"),
    ],
)
def test_tables_that_cannot_be_imported(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    n = len(next(iter(columns.values())))
    columns = {"who": pa.array(["ann"] * n, pa.string()), **columns}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(FedShuffleError, match=message) as error:
        import_file(tmp_path / "t.parquet", tmp_path / "p", **{"client": "who", **options})
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("who,x\na,1\nb,\n", "client 'b' has NaN"),
        ("who,x\na,1\n,2\n", "row 2 has no client"),
        ("who,x\na,1\nb\n", "cannot read"),
        ("", "cannot read"),
        ("who,x\n", "holds null values|no examples"),
        ("who,x\na,nan\n", "client 'a' has NaN"),
    ],
)
def test_text_that_cannot_be_imported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(FedShuffleError, match=message):
        import_file(tmp_path / "t.csv", tmp_path / "p", client="who", fields=["x"])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("choice", "value", "message"),
    [
        ({"input": ["x", "z"]}, "old", "column 'z' holds .*leave the column out"),
        ({"fields": ["x", "z"]}, "old", "column 'z' holds .*leave the column out"),
        ({"label": "z"}, "old", "column 'z' holds .*leave the column out"),
    ],
)
def test_text_in_a_column_is_named(
    tmp_path: Path, choice: dict[str, Any], value: str, message: str, late: bool
) -> None:
    before = 200_000 if late else 0  # more than is read to see what a column looks like
    rows = ["who,x,z", *["a,1,2"] * before, f"b,3,{value}"]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(FedShuffleError, match=message) as error:
        import_file(tmp_path / "t.csv", tmp_path / "p", client="who", **choice)
    assert "\n" not in str(error.value)
    assert not late or "'old' in row 200002" in str(error.value)


def test_the_dummies_of_a_table_are_numbers(tmp_path: Path) -> None:
    """As pandas writes get_dummies: True and False in text files, bool in Parquet."""
    table = pandas.get_dummies(
        pandas.DataFrame({"who": [1, 2, 2], "age": [3, 4, 5.5], "city": ["p", "r", "p"]})
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    parquet.write_table(pa.Table.from_pandas(table), tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        imported = import_file(
            tmp_path / name,
            tmp_path / "p",
            client="who",
            label=None,
            input=["age", "city_p", "city_r"],
            overwrite=True,
        )
        assert imported.fields[0].tolist() == [[3, 1, 0], [4, 0, 1], [5.5, 1, 0]]
        only = import_file(
            tmp_path / name,
            tmp_path / "p",
            client="who",
            label="age",
            input=["city_p", "city_r"],
            overwrite=True,
        )
        assert only.fields[0].dtype == np.float32
    x = table.drop(columns="who")
    chunks = import_chunks([("a", x[:1]), ("b", x[1:])], tmp_path / "q")
    assert chunks.fields[0].tolist() == [[3, 1, 0], [4, 0, 1], [5.5, 1, 0]]


def test_a_parquet_file_that_is_cut_short(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"who": [1] * 100, "x": [1.0] * 100}), tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[:-20])
    with pytest.raises(FedShuffleError, match="cannot read"):
        import_file(tmp_path / "t.parquet", tmp_path / "p", client="who", fields=["x"])


# LEAF ----------------------------------------------------------------------------------------


def leaf(users: dict[str, Any]) -> str:
    counts = [len(data["y"]) for data in users.values()]
    return json.dumps({"users": list(users), "num_samples": counts, "user_data": users})


def test_leaf_files(tmp_path: Path) -> None:
    x, y, owners = people()
    (tmp_path / "leaf").mkdir()
    for k in range(2):  # a user's examples may lie in both files
        half = range(20 * k, 20 * k + 20)
        users: dict[str, Any] = {owners[i]: {"x": [], "y": []} for i in reversed(half)}
        for i in half:
            users[owners[i]]["x"].append(x[i].tolist())
            users[owners[i]]["y"].append(int(y[i]))
        (tmp_path / "leaf" / f"all_data_{k}.json").write_text(leaf(users))
    expected = Federation.from_arrays(x, y, client_ids=owners)
    assert_same(import_file(tmp_path / "leaf", tmp_path / "p"), expected)
    swapped = import_leaf(
        tmp_path / "leaf", tmp_path / "q", fields=["y", "x"], dtype={"x": "float64", "y": "uint8"}
    )
    assert_same(
        swapped,
        Federation.from_arrays(y.astype(np.uint8), x.astype(np.float64), client_ids=owners),
    )


def test_leaf_inputs_without_decimal_points_are_real_all_the_same(tmp_path: Path) -> None:
    users = {"a": {"x": [[0, 1]], "y": [1]}, "b": {"x": [[0.5, 1]], "y": [2]}}
    (tmp_path / "t.json").write_text(leaf(users))
    federation = import_leaf(tmp_path / "t.json", tmp_path / "p")
    assert [field.dtype.name for field in federation.fields] == ["float32", "int64"]
    assert federation.fields[0].tolist() == [[0, 1], [0.5, 1]]


def test_leaf_text_through_read(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(leaf({"b": {"x": ["ab", "cd"], "y": ["c", "e"]}}))
    with pytest.raises(FedShuffleError, match=r"field 'x' of client 'b' holds text.*read"):
        import_leaf(tmp_path / "t.json", tmp_path / "p")

    def read(raw: Any) -> dict[str, Any]:
        return {"x": [list(map(ord, text)) for text in raw["x"]], "y": [*map(ord, raw["y"])]}

    federation = import_leaf(tmp_path / "t.json", tmp_path / "p", read=read)
    assert [field.tolist() for field in federation.fields] == [[[97, 98], [99, 100]], [99, 101]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no users under 'user_data'"),
        ("[1, 2]", "no users"),
        ("", "cannot read"),
        (leaf({"a": {"x": [[1.0]], "y": [1]}})[:-8], "cannot read"),
        (leaf({"a": {"z": [[1.0]], "y": [1]}}), "unknown field of user 'a' 'x'"),
        ('{"user_data": {"a": 3}}', "user 'a' of .* is no object"),
        (leaf({"a": {"x": [[1.0], [1.0, 2.0]], "y": [1, 2]}}), "no array of equal rows"),
        (leaf({"a": {"x": [[1.0], [2.0]], "y": [1]}}), "one row per example"),
        (
            leaf({"a": {"x": [[1.0, None]], "y": [1]}}),
            "'x' of client 'a' holds a missing value \\(null\\)",
        ),
        (leaf({"a": {"x": [[1.0, 1e60]], "y": [1]}}), "NaN or infinity"),
        (leaf({"a": {"x": [1.0], "y": [1]}, "b": {"x": [1.0], "y": [1.5]}}), "Say its dtype"),
    ],
)
def test_leaf_files_that_cannot_be_imported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(FedShuffleError, match=message):
        import_leaf(tmp_path / "t.json", tmp_path / "p")
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
            import_leaf(tmp_path / "t.json", tmp_path / "p", overwrite=True)
        except FedShuffleError as error:
            said = str(error)
            refused += 1
        assert re.fullmatch("[ -~]+", said)
    assert refused > len(cut)


@pytest.mark.parametrize("begin", ["", '{"users": ', '{"user_data": {"a": {"x": '])
@pytest.mark.parametrize("level", ["[", "[1, [2], ", '{"a": '])
def test_leaf_files_that_nest_without_end(tmp_path: Path, begin: str, level: str) -> None:
    (tmp_path / "t.json").write_text(begin + level * 3000)
    with pytest.raises(FedShuffleError, match="nests more than 64 lists"):
        import_leaf(tmp_path / "t.json", tmp_path / "p")


@given(st.lists(st.text(st.sampled_from('[{]}"\\ax'), max_size=9), min_size=1), st.integers(1, 7))
def test_brackets_within_text_do_not_nest(words: list[str], size: int) -> None:
    text = json.dumps({"x": [[[word] for word in words]], "y": words}).encode()
    file = leaf_reading._Shallow(io.BytesIO(text), Path("t.json"))
    depths = []
    while file.read(size):
        depths.append(file._depth)
    assert max(depths) <= 4
    assert depths[-1] == 0
    assert size > 1 or max(depths) == 4


ANN = {"ann": {"x": [[1.0], [2.0]], "y": [0, 1]}}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("users", "counts", "message"),
    [
        (["ann", "bob"], [2, 3], "lists user 'bob' with 3 examples, but holds none .*'user_data'"),
        (["ann", "bob"], None, "lists user 'bob', but holds none of its examples"),
        (["ann"], [3], "user 'ann' of .*t.json' has 2 examples, but 'num_samples' says 3"),
        (["ann"], [0], "user 'ann' of .*t.json' has 2 examples, but 'num_samples' says 0"),
        (["ann", "bob"], [2], "2 'users', but 1 'num_samples'"),
        (["ann"], [2.5], "'num_samples' that are no whole numbers"),
        ([["ann"]], [2], "'users' that are no names"),
        ("ann", [2], "'users' that are no names"),
    ],
)
def test_leaf_users_and_their_data_agree(
    tmp_path: Path, users: Any, counts: Any, message: str, last: bool
) -> None:
    said = {"users": users} | ({} if counts is None else {"num_samples": counts})
    parts = [{"user_data": ANN}, said] if last else [said, {"user_data": ANN}]
    (tmp_path / "t.json").write_text(json.dumps(parts[0] | parts[1]))
    with pytest.raises(FedShuffleError, match=message):
        import_leaf(tmp_path / "t.json", tmp_path / "p")
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_leaf_users_that_say_they_are_empty_are_left_out_and_counted(tmp_path: Path) -> None:
    facts = {"users": ["ann", "bob", "cid"], "num_samples": [2, 0, 0], "user_data": ANN}
    (tmp_path / "t.json").write_text(json.dumps(facts))
    with pytest.warns(UserWarning, match="2 clients without examples were left out, such as 'bob'"):
        federation = import_leaf(tmp_path / "t.json", tmp_path / "p")
    assert list(federation.ids) == ["ann"]
    with pytest.warns(UserWarning, match="2 clients without examples"):
        import_leaf(tmp_path / "t.json", tmp_path / "r", read=lambda raw: {"n": raw["y"]})
    (tmp_path / "t.json").write_text(json.dumps({"user_data": ANN}))
    assert_same(import_leaf(tmp_path / "t.json", tmp_path / "q"), federation)


def test_leaf_data_and_its_splits_are_not_merged(tmp_path: Path) -> None:
    for name in ("train", "test", "all_data"):
        (tmp_path / "leaf" / name).mkdir(parents=True)
        (tmp_path / "leaf" / name / "part.json").write_text(leaf(ANN))
    for importer in (import_leaf, import_file):
        with pytest.raises(FedShuffleError, match=r"all_data, test and train.*Give one of them"):
            importer(tmp_path / "leaf", tmp_path / "p")
    shutil.rmtree(tmp_path / "leaf" / "all_data")
    with pytest.raises(FedShuffleError, match=r"test and train.*such as '.*leaf.train'"):
        import_leaf(tmp_path / "leaf", tmp_path / "p")
    assert len(import_leaf(tmp_path / "leaf" / "train", tmp_path / "p")) == 1
    shutil.rmtree(tmp_path / "leaf" / "test")
    assert len(import_leaf(tmp_path / "leaf", tmp_path / "q")) == 1


# HDF5 ----------------------------------------------------------------------------------------


def write_hdf5(path: Path, clients: dict[str, dict[str, Any]]) -> None:
    with h5py.File(path, "w") as file:
        for client, fields in clients.items():
            for name, values in fields.items():
                file[f"examples/{client}/{name}"] = values


def test_hdf5(tmp_path: Path) -> None:
    x, y, owners = people()
    clients = {}
    for owner in dict.fromkeys(owners):
        mine = [k for k, other in enumerate(owners) if other == owner]
        clients[owner] = {"pixels": x[mine].reshape(-1, 3, 1), "label": y[mine].astype(np.int32)}
    write_hdf5(tmp_path / "t.h5", clients)
    expected = Federation.from_arrays(x.reshape(-1, 3, 1), y, client_ids=owners)
    by_fields = import_hdf5(tmp_path / "t.h5", tmp_path / "p", fields=["pixels", "label"])
    assert_same(by_fields, expected)
    named = import_file(tmp_path / "t.h5", tmp_path / "q", input=["pixels"], label="label")
    assert_same(named, expected)
    with pytest.raises(FedShuffleError, match=r"the fields label, pixels. Name those you want"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "r")
    with pytest.raises(FedShuffleError, match="Did you mean 'pixels'"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "r", fields=["pixel"])
    with pytest.raises(FedShuffleError, match="named twice"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "r", fields=["pixels", "pixels"])
    with pytest.raises(FedShuffleError, match="unknown format of a table 'hdf5'"):
        import_table(tmp_path / "t.h5", tmp_path / "r", client="who", label="label")
    with pytest.raises(FedShuffleError, match="leave client out"):
        import_file(tmp_path / "t.h5", tmp_path / "r", client="who")


@pytest.mark.parametrize("text", [np.array([b"ab", b"c"]), ["ab", "c"]])
def test_hdf5_text_through_read(tmp_path: Path, text: Any) -> None:
    write_hdf5(tmp_path / "t.h5", {"ANN": {"snippets": text}})
    with pytest.raises(FedShuffleError, match=r"'snippets' of client 'ANN' holds text.*read"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "p")
    federation = import_hdf5(
        tmp_path / "t.h5", tmp_path / "p", read=lambda raw: {"n": [*map(len, raw["snippets"])]}
    )
    assert federation.fields[0].tolist() == [2, 1]


def test_hdf5_files_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("no")
    with pytest.raises(FedShuffleError, match=r"cannot read .* as HDF5"):
        import_file(tmp_path / "a.h5", tmp_path / "p")
    with pytest.raises(FedShuffleError, match=r"cannot read .* as HDF5"):
        import_hdf5(tmp_path / "none.h5", tmp_path / "p")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["examples/x"] = [1.0]
    with pytest.raises(FedShuffleError, match="examples/<client>/<field>"):
        import_hdf5(tmp_path / "b.h5", tmp_path / "p")
    write_hdf5(tmp_path / "c.h5", {"a": {"x": [1.0]}, "b": {"y": [1.0]}})
    with pytest.raises(FedShuffleError, match=r"cannot read 'x' of client 'b' .*: there is none"):
        import_hdf5(tmp_path / "c.h5", tmp_path / "p")
    write_hdf5(tmp_path / "d.h5", {"a": {"x/y": [1.0]}})
    for read in (None, dict):
        with pytest.raises(FedShuffleError, match="'/examples/a/x' is a group, not an array"):
            import_hdf5(tmp_path / "d.h5", tmp_path / "p", read=read)
    with h5py.File(tmp_path / "e.h5", "w") as file:
        file["examples/a/x"] = [1.0]
        file["examples/b"] = [1.0]
    with pytest.raises(FedShuffleError, match=r"cannot read 'x' of client 'b' .*: there is none"):
        import_hdf5(tmp_path / "e.h5", tmp_path / "p")


def outward(kind: str, file: h5py.File, secret: Path) -> None:
    """Make a file pull another one of the reader's machine into the store."""
    if kind == "external examples":
        del file["examples"]
        file["examples"] = h5py.ExternalLink(secret, "/examples")
    elif kind == "external client":
        file["examples/b"] = h5py.ExternalLink(secret, "/examples/b")
    elif kind == "external field":
        file["examples/b/x"] = h5py.ExternalLink(secret, "/examples/b/x")
    elif kind == "soft link":
        file["out"] = h5py.ExternalLink(secret, "/examples")
        file["examples/b"] = h5py.SoftLink("/out/b")
    elif kind == "external dataset":
        raw = [(str(secret), 0, 16)]
        file["examples"].create_dataset("b/x", (2,), "f8", external=raw)
    else:
        layout = h5py.VirtualLayout(shape=(2,), dtype="f8")
        layout[:] = h5py.VirtualSource(secret, "/examples/b/x", shape=(2,))
        file["examples"].create_virtual_dataset("b/x", layout)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("external examples", "link to another place"),
        ("external client", "link to another place"),
        ("external field", "link to another place"),
        ("soft link", "link to another place"),
        ("external dataset", "other files"),
        ("virtual dataset", "other files"),
    ],
)
def test_hdf5_files_pull_no_other_file_in(tmp_path: Path, kind: str, message: str) -> None:
    write_hdf5(tmp_path / "secret.h5", {"b": {"x": [4.0, 2.0]}})
    write_hdf5(tmp_path / "t.h5", {"a": {"x": [1.0]}})
    with h5py.File(tmp_path / "t.h5", "a") as file:
        outward(kind, file, tmp_path / "secret.h5")
    refused = f"cannot read .* in .*t.h5': .*{message}.*Copy.*into the file[.]$"
    with pytest.raises(FedShuffleError, match=refused):
        import_hdf5(tmp_path / "t.h5", tmp_path / "p")
    assert names_in(tmp_path) == ["secret.h5", "t.h5"]


@pytest.mark.parametrize("chunks", [None, (1 << 20,)])
def test_hdf5_arrays_that_were_never_written_are_not_allocated(
    tmp_path: Path, chunks: tuple[int] | None
) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_dataset("examples/a/x", (1 << 40,), "f8", chunks=chunks)
    assert (tmp_path / "t.h5").stat().st_size < 4096
    with pytest.raises(FedShuffleError, match=r"'x' of client 'a'.*8,796,093,022,208 bytes"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "p")


def test_hdf5_arrays_with_gaps_are_refused_and_small_ones_may_be_compressed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        gzip = file.create_dataset("examples/a/x", (1000, 100), "f8", compression="gzip")
        gzip[:] = 1.0
        file.create_dataset("examples/b/x", (0, 100), "f8")
    with pytest.warns(UserWarning, match="without examples"):
        assert import_hdf5(tmp_path / "t.h5", tmp_path / "p").fields[0].sum() == 100_000
    with h5py.File(tmp_path / "t.h5", "a") as file:
        file.create_dataset("examples/c/x", (10, 100), "f8", chunks=(5, 100))[:5] = 1.0
    with pytest.raises(FedShuffleError, match=r"'x' of client 'c'.*only 4,000 were written"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "q")


def test_hdf5_groups_that_hold_themselves(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "t.h5", {"a": {"x": [1.0]}})
    with h5py.File(tmp_path / "t.h5", "a") as file:
        file["examples/b"] = file["examples"]
        file["examples/x"] = file["examples"]
    with pytest.raises(FedShuffleError, match=r"'x' of client 'b'.*is a group, not an array"):
        import_hdf5(tmp_path / "t.h5", tmp_path / "p")
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file["examples"] = h5py.SoftLink("/examples")
    with pytest.raises(FedShuffleError, match="link"):
        import_hdf5(tmp_path / "u.h5", tmp_path / "p")


@pytest.mark.slow
def test_damaged_hdf5_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: a damaged file may end it."""
    code = """
import sys
from pathlib import Path
import h5py
import numpy as np
from fedshuffle import Federation, FedShuffleError
from fedshuffle.populations import import_hdf5

folder = Path(sys.argv[1])
with h5py.File(folder / "t.h5", "w") as file:
    for k in range(9):
        file[f"examples/client{k}/x"] = np.ones(3)
        file.create_dataset(f"examples/client{k}/y", data=[k, k, k], compression="gzip")
data = bytearray((folder / "t.h5").read_bytes())
rng = np.random.default_rng(0)
refused = 0
for _ in range(300):
    harmed = bytearray(data)
    for at in rng.integers(len(data), size=rng.integers(1, 40)):
        harmed[at] = rng.integers(256)
    (folder / "u.h5").write_bytes(harmed)
    try:
        import_hdf5(folder / "u.h5", folder / "p", fields=["x", "y"], overwrite=True)
    except FedShuffleError as error:
        assert "\\n" not in str(error), error
        refused += 1
print(refused)
"""
    words = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_the_real_shakespeare(tmp_path: Path) -> None:
    where = os.environ.get("FEDSHUFFLE_DATA")
    path = Path(where or "") / "shakespeare" / "shakespeare_train.h5"
    if where is None or not path.exists():
        pytest.skip("FEDSHUFFLE_DATA names no folder with shakespeare/shakespeare_train.h5")
    with pytest.raises(FedShuffleError, match=r"field 'snippets' of client '.*' holds text"):
        import_hdf5(path, tmp_path / "p")

    def read(raw: Any) -> dict[str, Any]:
        first = [snippet[:4].ljust(4, b"\0") for snippet in raw["snippets"]]
        return {"bytes": np.array([list(text) for text in first], dtype=np.uint8)}

    federation = import_hdf5(path, tmp_path / "p", read=read)
    assert len(federation) == 715
    assert federation.sizes.sum() == 16_068
    adam = federation.client(federation.find("ALL_S_WELL_THAT_ENDS_WELL_ADAM"))[0]
    assert len(adam) == 9
    assert adam[0].tobytes() == b"Yond"


# One door, and the command -------------------------------------------------------------------


def test_the_format_is_guessed_or_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="no file or folder"):
        import_file(tmp_path / "none.csv", tmp_path / "p")
    (tmp_path / "t.dat").write_text("who,x\n1,2\n")
    with pytest.raises(FedShuffleError, match=r"no known suffix. Say the format: csv, hdf5, leaf"):
        import_file(tmp_path / "t.dat", tmp_path / "p", client="who", fields=["x"])
    told = import_file(tmp_path / "t.dat", tmp_path / "p", client="who", fields=["x"], format="csv")
    assert told.fields[0].tolist() == [2]
    (tmp_path / "mixed").mkdir()
    for name in ("a.csv", "b.json"):
        (tmp_path / "mixed" / name).touch()
    with pytest.raises(FedShuffleError, match="formats csv and leaf"):
        import_file(tmp_path / "mixed", tmp_path / "q")
    with pytest.raises(FedShuffleError, match=r"no file in .* ends with \.h5|cannot read"):
        import_file(tmp_path / "mixed", tmp_path / "q", format="hdf5")


@pytest.mark.parametrize("package", ["pyarrow", "h5py", "ijson"])
def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    name = {"pyarrow": "t.csv", "h5py": "t.h5", "ijson": "t.json"}[package]
    (tmp_path / name).touch()
    for module in [m for m in sys.modules if m.partition(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, module, None)
    client = "who" if package == "pyarrow" else None
    with pytest.raises(FedShuffleError, match=rf"{package}: pip install 'fedshuffle\[data\]'"):
        import_file(tmp_path / name, tmp_path / "p", client=client, label="y")


def test_importing_the_package_loads_no_reader() -> None:
    code = """
import sys
import fedshuffle.cli, fedshuffle.populations
assert not {"torch", "pyarrow", "h5py", "ijson"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y, owners, columns = table()
    write_csv(tmp_path / "t.csv", columns)
    out = tmp_path / "people"
    words = ["--client", "who", "--label", "y", "--dtype", "input=float64, label=int8"]
    assert command(monkeypatch, "data", "import", tmp_path / "t.csv", "--out", out, *words) == 0
    text = capsys.readouterr().out
    for word in ["7 clients", "500 examples", "float64", "int8", "columns left out: note", "####"]:
        assert word in text
    expected = Federation.from_arrays(x.astype(np.float64), y.astype(np.int8), client_ids=owners)
    stored = Federation.open(out)
    assert stored.sizes.tolist() == expected.sizes.tolist()
    np.testing.assert_allclose(stored.fields[0], expected.fields[0], rtol=1e-6)

    assert command(monkeypatch, "data", "show", out) == 0
    assert "min 5" not in capsys.readouterr().err
    assert command(monkeypatch, "data", "show", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["clients"] == 7
    assert facts["examples"] == 500
    assert facts["sizes"]["min"] == expected.sizes.min()
    assert facts["sizes"]["median"] == np.median(expected.sizes)
    assert sum(bin["clients"] for bin in facts["histogram"]) == 7
    assert facts["fields"][0] == {"name": "input", "dtype": "float64", "shape": [3]}

    again = ["data", "import", tmp_path / "t.csv", "--out", out, *words]
    assert command(monkeypatch, *again) == 2
    assert "holds a federation already" in capsys.readouterr().err
    assert command(monkeypatch, *again, "--overwrite") == 0


def test_the_command_says_who_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = {"a": {"x": [[1.0]], "y": [1]}, "b": {"x": [], "y": []}}
    (tmp_path / "t.json").write_text(leaf(users))
    out = tmp_path / "p"
    assert command(monkeypatch, "data", "import", tmp_path / "t.json", "--out", out) == 0
    assert "! 1 clients without examples were left out, such as 'b'." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "none.csv", "--out", "p"], "no file or folder 'none.csv'"),
        (["import", "none.csv", "--out", "p", "--dtype", "float32"], "--dtype: cannot read"),
        (["show", "none"], "no federation in 'none'"),
    ],
)
def test_mistakes_at_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "data", *words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(1, 10**9), min_size=1))
def test_the_histogram_counts_every_client_once(sizes: list[int]) -> None:
    bins = histogram(np.array(sizes))
    for low, high, count in bins:
        assert count == sum(low <= size <= high for size in sizes)
    assert sum(count for _, _, count in bins) == len(sizes)


# Training ------------------------------------------------------------------------------------


def test_training_on_a_store_is_training_in_memory(tmp_path: Path) -> None:
    from fedshuffle.training import train

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


def test_a_plan_asks_only_the_cohort() -> None:
    """A table of all clients and all numbers of epochs would not fit for a million clients."""
    sizes = np.arange(1, 101)
    workload = LocalWork(epochs=EpochRange(3, 900), batch_size=4).on(sizes)
    cohort = np.array([2, 30, 99])
    planned = workload.plan(cohort, seed=5, round=7).planned
    epochs = [
        3 + int(generator(5, Purpose.EPOCHS, round=7, client=client).integers(898))
        for client in cohort.tolist()
    ]
    assert planned.tolist() == [1 * epochs[0], 8 * epochs[1], 25 * epochs[2]]
    assert workload.longest == 25 * 900
    assert "alone" not in vars(workload)


def test_a_writer_by_hand(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "p", names=["x"]) as store:
        store.add("b", [1.0])
        store.add_rows(["a", "b"], np.array([1, 0, 1]), [2.0, 3.0, 4.0])
        store.add("a", [5.0])
        assert store.rows == 4  # the last one waits for company
    assert Federation.open(tmp_path / "p").fields[0].tolist() == [3, 5, 1, 2, 4]


def test_text_in_a_leaf_file_is_refused_without_names_of_python_arguments(tmp_path: Path) -> None:
    people = {"ann": {"x": [["high"]], "y": [0]}}
    (tmp_path / "all.json").write_text(json.dumps({"users": ["ann"], "user_data": people}))
    with pytest.raises(FedShuffleError, match="holds text") as refused:
        import_file(tmp_path, tmp_path / "store", format="leaf")
    assert "=" not in str(refused.value)
