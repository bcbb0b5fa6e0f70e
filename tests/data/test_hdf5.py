"""HDF5 as TensorFlow Federated lays it out."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError
from fedshuffle.data import import_file
from tests.data.helpers import (
    assert_same,
    names_in,
    people,
    real,
    write_hdf5,
)


def test_hdf5(tmp_path: Path) -> None:
    x, y, owners = people()
    clients = {}
    for owner in dict.fromkeys(owners):
        mine = [k for k, other in enumerate(owners) if other == owner]
        clients[owner] = {"pixels": x[mine].reshape(-1, 3, 1), "label": y[mine].astype(np.int32)}
    write_hdf5(tmp_path / "t.h5", clients)
    expected = Federation.from_arrays(x.reshape(-1, 3, 1), y, client_ids=owners)
    by_fields = import_file(tmp_path / "t.h5", tmp_path / "p", fields=["pixels", "label"])
    assert_same(by_fields, expected)
    named = import_file(tmp_path / "t.h5", tmp_path / "q", input=["pixels"], label="label")
    assert_same(named, expected)
    with pytest.raises(FedShuffleError, match="label, pixels"):
        import_file(tmp_path / "t.h5", tmp_path / "r")
    with pytest.raises(FedShuffleError, match="Did you mean 'pixels'"):
        import_file(tmp_path / "t.h5", tmp_path / "r", fields=["pixel"])
    with pytest.raises(FedShuffleError, match="named twice"):
        import_file(tmp_path / "t.h5", tmp_path / "r", fields=["pixels", "pixels"])
    with pytest.raises(FedShuffleError, match="leave client out"):
        import_file(tmp_path / "t.h5", tmp_path / "r", client="who")


@pytest.mark.parametrize("text", [np.array([b"ab", b"c"]), ["ab", "c"]])
def test_hdf5_text_through_read(tmp_path: Path, text: Any) -> None:
    write_hdf5(tmp_path / "t.h5", {"ANN": {"snippets": text}})
    with pytest.raises(FedShuffleError, match="'ANN'"):
        import_file(tmp_path / "t.h5", tmp_path / "p")
    federation = import_file(
        tmp_path / "t.h5", tmp_path / "p", read=lambda raw: {"n": [*map(len, raw["snippets"])]}
    )
    assert federation.fields[0].tolist() == [2, 1]


def test_hdf5_files_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("no")
    with pytest.raises(FedShuffleError, match=r"cannot read HDF5 in .*a\.h5"):
        import_file(tmp_path / "a.h5", tmp_path / "p")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["examples/x"] = [1.0]
    with pytest.raises(FedShuffleError, match="examples"):
        import_file(tmp_path / "b.h5", tmp_path / "p")
    write_hdf5(tmp_path / "c.h5", {"a": {"x": [1.0]}, "b": {"y": [1.0]}})
    with pytest.raises(FedShuffleError, match="'x' of client 'b'"):
        import_file(tmp_path / "c.h5", tmp_path / "p")
    write_hdf5(tmp_path / "d.h5", {"a": {"x/y": [1.0]}})
    for read in (None, dict):
        with pytest.raises(FedShuffleError, match="/examples/a/x"):
            import_file(tmp_path / "d.h5", tmp_path / "p", read=read)
    with h5py.File(tmp_path / "e.h5", "w") as file:
        file["examples/a/x"] = [1.0]
        file["examples/b"] = [1.0]
    with pytest.raises(FedShuffleError, match="'x' of client 'b'"):
        import_file(tmp_path / "e.h5", tmp_path / "p")


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
def test_hdf5_links_to_other_files_are_refused(tmp_path: Path, kind: str, message: str) -> None:
    write_hdf5(tmp_path / "secret.h5", {"b": {"x": [4.0, 2.0]}})
    write_hdf5(tmp_path / "t.h5", {"a": {"x": [1.0]}})
    with h5py.File(tmp_path / "t.h5", "a") as file:
        outward(kind, file, tmp_path / "secret.h5")
    refused = f"t.h5.*{message}"
    with pytest.raises(FedShuffleError, match=refused):
        import_file(tmp_path / "t.h5", tmp_path / "p")
    assert names_in(tmp_path) == ["secret.h5", "t.h5"]


@pytest.mark.parametrize("chunks", [None, (1 << 20,)])
def test_hdf5_arrays_that_were_never_written_are_not_allocated(
    tmp_path: Path, chunks: tuple[int] | None
) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_dataset("examples/a/x", (1 << 40,), "f8", chunks=chunks)
    assert (tmp_path / "t.h5").stat().st_size < 4096
    with pytest.raises(FedShuffleError, match="8,796,093,022,208"):
        import_file(tmp_path / "t.h5", tmp_path / "p")


def test_hdf5_arrays_with_gaps_are_refused_and_small_ones_may_be_compressed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        gzip = file.create_dataset("examples/a/x", (1000, 100), "f8", compression="gzip")
        gzip[:] = 1.0
        file.create_dataset("examples/b/x", (0, 100), "f8")
    with pytest.warns(UserWarning, match="without examples"):
        assert import_file(tmp_path / "t.h5", tmp_path / "p").fields[0].sum() == 100_000
    with h5py.File(tmp_path / "t.h5", "a") as file:
        file.create_dataset("examples/c/x", (10, 100), "f8", chunks=(5, 100))[:5] = 1.0
    with pytest.raises(FedShuffleError, match="client 'c'"):
        import_file(tmp_path / "t.h5", tmp_path / "q")


def test_hdf5_groups_that_hold_themselves(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "t.h5", {"a": {"x": [1.0]}})
    with h5py.File(tmp_path / "t.h5", "a") as file:
        file["examples/b"] = file["examples"]
        file["examples/x"] = file["examples"]
    with pytest.raises(FedShuffleError, match="client 'b'"):
        import_file(tmp_path / "t.h5", tmp_path / "p")
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file["examples"] = h5py.SoftLink("/examples")
    with pytest.raises(FedShuffleError, match="link"):
        import_file(tmp_path / "u.h5", tmp_path / "p")


@pytest.mark.slow
def test_damaged_hdf5_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: a damaged file may end it."""
    code = """
import sys
from pathlib import Path
import h5py
import numpy as np
from fedshuffle import Federation, FedShuffleError
from fedshuffle.data import import_file

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
        import_file(folder / "u.h5", folder / "p", fields=["x", "y"], overwrite=True)
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
    path = real("shakespeare/shakespeare_train.h5") / "shakespeare" / "shakespeare_train.h5"
    with pytest.raises(FedShuffleError, match="'snippets'"):
        import_file(path, tmp_path / "p")

    def read(raw: Any) -> dict[str, Any]:
        first = [snippet[:4].ljust(4, b"\0") for snippet in raw["snippets"]]
        return {"bytes": np.array([list(text) for text in first], dtype=np.uint8)}

    federation = import_file(path, tmp_path / "p", read=read)
    assert len(federation) == 715
    assert federation.sizes.sum() == 16_068
    adam = federation.client(federation.find("ALL_S_WELL_THAT_ENDS_WELL_ADAM"))[0]
    assert len(adam) == 9
    assert adam[0].tobytes() == b"Yond"
