"""Data sets: counts of the real files, contents of tiny ones, downloads that survive."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from rich.progress import Progress
from torch import nn

from fedshuffle import Federation, FedShuffleError, LocalWork, cli, datasets, losses, train
from fedshuffle._files import one_writer
from fedshuffle.datasets import Augment, download, text
from fedshuffle.datasets.images import _DEVIATION, _MEAN
from fedshuffle.datasets.places import cache_folder
from fedshuffle.datasets.sources import IMAGE_BYTES, SOURCES, Source
from fedshuffle.models import CharLSTM


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSHUFFLE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def real(name: str) -> Path:
    """The folder of the real data, if this machine has it."""
    told = REAL
    if told is None or not list(Path(told).glob(name)):
        pytest.skip(f"FEDSHUFFLE_DATA names no folder with {name}")
    return Path(told)


REAL = os.environ.get("FEDSHUFFLE_DATA")


def write_hdf5(path: Path, clients: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for client, fields in clients.items():
            for name, values in fields.items():
                file[f"examples/{client}/{name}"] = values


# Shakespeare ---------------------------------------------------------------------------------

ANN, BOB = [b"To be", b"", b"or}"], [b"0123456789"]


def plays(root: Path, train: dict[str, Any], test: dict[str, Any]) -> Path:
    for part, clients in (("train", train), ("test", test)):
        snippets = {client: {"snippets": texts} for client, texts in clients.items()}
        write_hdf5(root / "shakespeare" / f"shakespeare_{part}.h5", snippets)
    return root


def test_the_vocabulary() -> None:
    assert len(text.CHARACTERS) == len(set(text.CHARACTERS)) == 86
    assert text.VOCABULARY == 90
    assert {text.PADDING, text.UNKNOWN, text.BEGIN, text.END} == {0, 87, 88, 89}
    assert set("AZaz09 \n\r@$_#/*%!?.,:;'\"&()[]-") <= set(text.CHARACTERS)
    assert not set("{}<>|=+^~`\\\t") & set(text.CHARACTERS)
    assert text._IGNORED == losses.IGNORED


def code(character: str) -> int:
    return text.CHARACTERS.index(character) + 1 if character in text.CHARACTERS else text.UNKNOWN


@pytest.mark.parametrize("sequence", [1, 2, 3, 6, 7, 80])
def test_shakespeare_by_hand(tmp_path: Path, sequence: int) -> None:
    plays(tmp_path, {"BOB": BOB, "ANN": ANN}, {"ANN": [b""], "BOB": [b"x"]})
    train, test = datasets.shakespeare(tmp_path, sequence=sequence)
    assert list(train.ids) == ["ANN", "BOB"]
    assert list(test.ids) == ["BOB"]
    inputs, labels = [], []
    for snippet in ["To be", "or}", "0123456789"]:
        tokens = [text.BEGIN, *map(code, snippet), text.END]
        for begin in range(0, len(tokens) - 1, sequence):
            given = tokens[begin : min(begin + sequence, len(tokens) - 1)]
            wanted = tokens[begin + 1 : begin + 1 + sequence]
            inputs.append(given + [text.PADDING] * (sequence - len(given)))
            labels.append(wanted + [losses.IGNORED] * (sequence - len(wanted)))
    assert train.fields[0].tolist() == inputs
    assert train.fields[1].tolist() == labels
    assert train.fields[0].dtype == train.fields[1].dtype == np.int64
    assert train.sizes.sum() == len(inputs)
    assert train.sizes[1] == -(-11 // sequence)


def test_text_may_be_kept_in_other_ways(tmp_path: Path) -> None:
    fixed = datasets.shakespeare(plays(tmp_path / "a", {"A": ANN}, {"A": ANN}))[0]
    words = np.array([snippet.decode() for snippet in ANN], dtype=h5py.string_dtype())
    other = datasets.shakespeare(plays(tmp_path / "b", {"A": words}, {"A": words}))[0]
    np.testing.assert_array_equal(fixed.fields[0], other.fields[0])


def test_clients_without_text_are_counted(tmp_path: Path) -> None:
    plays(tmp_path, {"A": ANN, "B": [b""], "C": np.zeros(0, "S3")}, {"A": ANN})
    with pytest.warns(UserWarning, match="2 clients without any text were left out, such as 'B'"):
        train, _ = datasets.shakespeare(tmp_path)
    assert list(train.ids) == ["A"]


def test_padding_does_not_count(tmp_path: Path) -> None:
    train, _ = datasets.shakespeare(plays(tmp_path, {"A": [b"hm"]}, {"A": [b"hm"]}))
    torch.manual_seed(0)
    model = CharLSTM(hidden=4)
    inputs, labels = train.tensors()
    short = losses.cross_entropy(model, inputs[:, :3], labels[:, :3])
    torch.testing.assert_close(losses.cross_entropy(model, inputs, labels), short)


def test_the_real_shakespeare() -> None:
    folder = real("shakespeare/shakespeare_t*.h5")
    with h5py.File(folder / "shakespeare" / "shakespeare_train.h5") as file:
        snippets = [bytes(s) for c in file["examples"].values() for s in c["snippets"][()]]
    assert len(snippets) == 16_068
    assert snippets.count(b"") == 150
    train, test = datasets.shakespeare(folder)
    assert len(train) == 715
    assert train.fields[0].shape == train.fields[1].shape == (37_851, 80)
    steps = -(-train.sizes // 32)
    assert (steps.min(), steps.max()) == (1, 32)
    assert set(test.ids) < set(train.ids)
    assert len(train) - len(test) == 26
    counted = train.fields[1] != losses.IGNORED
    assert counted.sum() == sum(len(s) + 1 for s in snippets if s)
    assert (train.fields[1] == text.END).sum() == (train.fields[0] == text.BEGIN).sum() == 15_918
    assert (train.fields[0] == text.UNKNOWN).sum() == 2  # two braces in 2.4 million characters
    assert train.fields[0].max() < text.VOCABULARY


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ({"A": {"lines": [b"x"]}}, "cannot read 'snippets' of client 'A' in .*train.h5"),
        ({"A": {"snippets": [1.5]}}, "'snippets' of client 'A' .* holds float64 values, but"),
        ({"A": {"snippets": [b""]}}, "has no text: all snippets are empty"),
        ({}, "has no clients in a group 'examples'"),
    ],
)
def test_broken_hdf5(tmp_path: Path, clients: dict[str, Any], says: str) -> None:
    plays(tmp_path, {}, {"A": [b"x"]})
    write_hdf5(tmp_path / "shakespeare" / "shakespeare_train.h5", clients)
    with pytest.raises(FedShuffleError, match=says):
        datasets.shakespeare(tmp_path)


def test_hdf5_that_is_cut_off(tmp_path: Path) -> None:
    path = plays(tmp_path, {"A": ANN}, {"A": ANN}) / "shakespeare" / "shakespeare_train.h5"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(FedShuffleError, match=r"cannot read .*train.h5' as HDF5.*get it again"):
        datasets.shakespeare(tmp_path)
    with pytest.raises(FedShuffleError, match="sequence is 0"):
        datasets.shakespeare(tmp_path, sequence=0)


# FEMNIST -------------------------------------------------------------------------------------


def writers(root: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    people = {
        name: {
            "pixels": rng.random((size, 28, 28), dtype=np.float32),
            "label": rng.integers(62, size=size).astype(np.int32),
        }
        for name, size in (("f01", 3), ("f00", 2))
    }
    write_hdf5(root / "femnist" / "fed_emnist_test.h5", people)
    people["f00"] |= changes
    write_hdf5(root / "femnist" / "fed_emnist_train.h5", people)
    return root


def test_femnist(tmp_path: Path) -> None:
    train, test = datasets.femnist(writers(tmp_path))
    assert list(train.ids) == list(test.ids) == ["f00", "f01"]
    assert train.sizes.tolist() == [2, 3]
    assert train.fields[0].shape == (5, 1, 28, 28)
    assert (train.fields[0].dtype, train.fields[1].dtype) == (np.float32, np.int64)
    with h5py.File(tmp_path / "femnist" / "fed_emnist_train.h5") as file:
        for k, name in enumerate(train.ids):
            pixels, labels = train.client(k)
            np.testing.assert_array_equal(pixels[:, 0], file[f"examples/{name}/pixels"])
            np.testing.assert_array_equal(labels, file[f"examples/{name}/label"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pixels": np.zeros((2, 28, 27), "f4")}, r"float32 \(2, 28, 27\), but should be float32"),
        ({"pixels": np.zeros((1, 28, 28), "f4")}, r"float32 \(1, 28, 28\), but should be"),
        ({"pixels": np.zeros((2, 28, 28), "u1")}, "'pixels' of client 'f00' .* are uint8"),
        ({"pixels": np.full((2, 28, 28), np.nan, "f4")}, "NaN or infinity"),
        ({"label": np.array([0, 62])}, "'label' of client 'f00' .* whole numbers from 0 to 61"),
        ({"label": np.array([0.0, 1.0])}, "'label' of client 'f00'"),
    ],
)
def test_broken_femnist(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        datasets.femnist(writers(tmp_path, **changes))


# CIFAR-100 -----------------------------------------------------------------------------------


def raw_images(number: int, seed: int = 0) -> Any:
    """Random pixels, where the first pixel of every image is its fine label."""
    rng = np.random.default_rng(seed)
    images = rng.integers(256, size=(number, 3, 32, 32), dtype=np.uint8)
    fine = np.arange(number, dtype=np.uint8) % 100
    images[:, 0, 0, 0] = fine
    return images, fine // 5, fine


def binary(root: Path, train: int = 300, test: int = 70) -> Path:
    place = root / "cifar100"
    place.mkdir(parents=True, exist_ok=True)
    for part, number in (("train", train), ("test", test)):
        images, coarse, fine = raw_images(number)
        rows = np.concatenate([coarse[:, None], fine[:, None], images.reshape(number, -1)], axis=1)
        assert rows.shape[1] == IMAGE_BYTES
        rows.tofile(place / f"{part}.bin")
    return root


def arrays(train: int = 300, test: int = 70) -> dict[str, Any]:
    found = {}
    for part, number in (("train", train), ("test", test)):
        images, coarse, fine = raw_images(number)
        found[f"x_{part}"] = images.transpose(0, 2, 3, 1)
        found[f"coarse_{part}"], found[f"fine_{part}"] = coarse, fine
    return found


def npz(root: Path, **changes: Any) -> Path:
    (root / "cifar100").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in (arrays() | changes).items() if value is not None}
    np.savez(root / "cifar100" / "cifar100.npz", **kept)
    return root


def test_cifar100(tmp_path: Path) -> None:
    train, test = datasets.cifar100(binary(tmp_path), clients=14, per_client=20, seed=3)
    assert train.sizes.tolist() == [20] * 14
    assert test.sizes.tolist() == [23, 23, 24]
    images, labels = train.fields
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)

    mean, deviation = np.array(_MEAN)[:, None, None], np.array(_DEVIATION)[:, None, None]
    for some, number in ((train, 300), (test, 70)):
        raw, _, _ = raw_images(number)
        back = np.rint((some.fields[0] * deviation + mean) * 255).astype(int)
        np.testing.assert_array_equal(back[:, 0, 0, 0], some.fields[1])
        dealt = {image.tobytes() for image in back.astype(np.uint8)}
        assert len(dealt) == len(back)  # nobody's image is anybody else's
        assert dealt <= {image.tobytes() for image in raw}


def test_the_split_follows_from_the_seed(tmp_path: Path) -> None:
    binary(tmp_path)
    options: Any = {"clients": 10, "per_client": 20}
    one, again, other = (datasets.cifar100(tmp_path, **options, seed=k)[0] for k in (1, 1, 2))
    np.testing.assert_array_equal(one.fields[0], again.fields[0])
    assert not np.array_equal(one.fields[1], other.fields[1])
    narrow, _ = datasets.cifar100(tmp_path, **options, alpha=1e-9)
    assert len(set((narrow.client(0)[1] // 5).tolist())) <= 2  # 15 images of each coarse label


def test_arrays_are_as_good_as_binary_files(tmp_path: Path) -> None:
    one, _ = datasets.cifar100(binary(tmp_path / "a"), clients=10, per_client=30)
    other, _ = datasets.cifar100(npz(tmp_path / "b"), clients=10, per_client=30)
    np.testing.assert_array_equal(one.fields[0], other.fields[0])
    np.testing.assert_array_equal(one.fields[1], other.fields[1])


def test_the_real_subset_of_cifar100() -> None:
    train, test = datasets.cifar100(real("cifar100/*.npz"), clients=50)
    assert train.fields[0].shape == (5_000, 3, 32, 32)
    assert np.bincount(train.fields[1]).tolist() == [50] * 100
    assert test.fields[0].shape == (1_000, 3, 32, 32)
    np.testing.assert_allclose(train.fields[0].mean((0, 2, 3)), 0, atol=0.03)
    np.testing.assert_allclose(train.fields[0].std((0, 2, 3)), 1, atol=0.03)


def test_broken_cifar100(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="500 clients with 100 images each need 50,000"):
        datasets.cifar100(binary(tmp_path))
    path = tmp_path / "cifar100" / "train.bin"
    whole = path.read_bytes()
    for broken in (whole[:-1], b""):
        path.write_bytes(broken)
        with pytest.raises(FedShuffleError, match="no whole number of images"):
            datasets.cifar100(tmp_path, clients=2)
    for place, says in ((0, "the coarse label 200, but"), (1, "the fine label 200, but")):
        path.write_bytes(whole[:place] + bytes([200]) + whole[place + 1 :])
        with pytest.raises(FedShuffleError, match=says):
            datasets.cifar100(tmp_path, clients=2)
    with pytest.raises(FedShuffleError, match="per_client is 0"):
        datasets.cifar100(tmp_path, per_client=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fine_test": None}, "fine_test is missing"),
        ({"x_train": np.zeros((300, 3, 32, 32), np.uint8)}, "x_train is of uint8 .*should be"),
        ({"coarse_train": np.zeros(300)}, "coarse_train is of float64"),
        ({"fine_train": np.zeros(299, np.uint8)}, "train has not one label of each kind"),
        ({"fine_train": np.full(300, 100, np.uint8)}, "the fine label 100, but"),
        ({"x_test": np.array([None])}, "cannot read .*cifar100.npz' as arrays"),
    ],
)
def test_broken_arrays(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        datasets.cifar100(npz(tmp_path, **changes), clients=2)


def test_arrays_that_are_cut_off(tmp_path: Path) -> None:
    path = npz(tmp_path) / "cifar100" / "cifar100.npz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FedShuffleError, match=r"cannot read .* as arrays"):
        datasets.cifar100(tmp_path, clients=2)


# Crops and flips -----------------------------------------------------------------------------


def test_every_image_is_moved_and_mirrored_on_its_own() -> None:
    images = torch.rand(400, 3, 5, 4) + 1
    torch.manual_seed(0)
    found = Augment(padding=2)(images)
    padded = nn.functional.pad(images, [2] * 4)
    seen = set()
    for before, after in zip(padded, found, strict=True):
        ways = [
            (down, right, mirrored)
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            if torch.equal(
                after,
                (lambda crop: crop.flip(2) if mirrored else crop)(
                    before[:, down : down + 5, right : right + 4]
                ),
            )
        ]
        assert len(ways) == 1
        seen.add(ways[0])
    assert len(seen) == 50  # all of them


def test_crops_only_and_flips_only() -> None:
    images = torch.rand(50, 1, 3, 3)
    flipped = Augment(padding=0)(images)
    same = (flipped == images).flatten(1).all(1)
    assert 0 < same.sum() < 50
    torch.testing.assert_close(flipped[~same], images[~same].flip(3))
    torch.testing.assert_close(Augment(padding=0, flip=False)(images), images)
    still = Augment().eval()
    assert still(images) is images


@pytest.mark.parametrize("engine", ["loop", "lean", "lean:2:processes"])
def test_augmentation_follows_from_seed_round_and_client(engine: str) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((12, 1, 6, 6), dtype=np.float32)
    federation = Federation.from_arrays(images, rng.integers(3, size=12), sizes=[5, 7])

    def run(name: str, seed: int = 5, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Augment(padding=2), nn.Flatten(), nn.Linear(36, 3))
        torch.manual_seed(options.pop("disturbed", 1))
        work = LocalWork(epochs=2, batch_size=3)
        options |= {"loss": losses.cross_entropy, "work": work, "rounds": 3}
        result = train(model, federation, seed=seed, engine=name, **options)
        return torch.cat([p.detach().flatten() for p in result.model.parameters()])

    found = run(engine)
    torch.testing.assert_close(found, run("loop"))
    assert torch.equal(found, run(engine, disturbed=2))
    assert not torch.allclose(found, run(engine, seed=6))


# Where data lies -----------------------------------------------------------------------------


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedShuffleError, match=r"no shakespeare data under .*fedshuffle data get"):
        datasets.shakespeare()
    named = plays(tmp_path / "named", {"NAMED": ANN}, {"NAMED": ANN})
    told = plays(tmp_path / "told", {"TOLD": ANN}, {"TOLD": ANN})
    plays(tmp_path / "cache" / "fedshuffle", {"CACHED": ANN}, {"CACHED": ANN})
    assert datasets.shakespeare()[0].ids == ("CACHED",)
    monkeypatch.setenv("FEDSHUFFLE_DATA", str(told))
    assert datasets.shakespeare()[0].ids == ("TOLD",)
    assert datasets.shakespeare(named)[0].ids == ("NAMED",)
    assert datasets.shakespeare(str(named / "shakespeare"))[0].ids == ("NAMED",)
    (told / "shakespeare" / "shakespeare_test.h5").unlink()
    assert datasets.shakespeare()[0].ids == ("CACHED",)
    with pytest.raises(FedShuffleError, match=r"shakespeare_train.h5 and shakespeare_test.h5 into"):
        datasets.shakespeare(told)


def test_an_archive_unpacked_by_hand_is_found(tmp_path: Path) -> None:
    (binary(tmp_path) / "cifar100").rename(tmp_path / "cifar-100-binary")
    assert len(datasets.cifar100(tmp_path, clients=3)[0]) == 3


@pytest.mark.parametrize(
    ("platform", "want"),
    [("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")],
)
def test_the_cache_of_each_system(
    platform: str, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == tmp_path / "cache" / "fedshuffle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / want / "fedshuffle"


def test_one_part_for_a_config(tmp_path: Path) -> None:
    plays(tmp_path, {"A": ANN, "B": BOB}, {"B": [b"x"]})
    assert list(datasets.load("shakespeare", folder=tmp_path, sequence=5).ids) == ["A", "B"]
    assert list(datasets.load("shakespeare", "test", tmp_path).ids) == ["B"]
    with pytest.raises(FedShuffleError, match="unknown data set 'mnist'"):
        datasets.load("mnist")
    with pytest.raises(FedShuffleError, match=r"unknown part 'tests'. Did you mean 'test'"):
        datasets.load("shakespeare", "tests")


def test_no_torch_before_it_is_needed() -> None:
    program = (
        "import sys, fedshuffle.datasets, fedshuffle.partition;"
        "assert not {'torch', 'h5py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Downloads -----------------------------------------------------------------------------------


@dataclass
class Server:
    """Files by path, and how to serve them."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: int | None = None
    """Break off after so many bytes."""
    ranges: bool = True
    asked: list[str | None] = field(default_factory=list)
    """What ranges were asked for."""
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            state.asked.append(asked)
            content = state.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if begin and begin >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            self.wfile.write(content[begin : state.cut])

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def packed(files: dict[str, bytes], inside: str = "", mode: Any = "w:bz2") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(inside + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A tiny Shakespeare with two clients, on the server and in the table of sources."""
    place = plays(tmp_path / "made", {"A": ANN, "B": BOB}, {"A": ANN, "B": BOB}) / "shakespeare"
    rng = np.random.default_rng(0)
    padding = {"README": rng.integers(256, size=300_000, dtype=np.uint8).tobytes()}
    content = packed(padding | {path.name: path.read_bytes() for path in place.iterdir()}, "./")
    server.files["/shakespeare.tar.bz2"] = content
    source = Source(
        url=f"{server.url}/shakespeare.tar.bz2",
        checksum=f"sha256:{hashlib.sha256(content).hexdigest()}",
        files={"shakespeare_train.h5": 2, "shakespeare_test.h5": 2},
    )
    monkeypatch.setitem(SOURCES, "shakespeare", source)
    return content


def change(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setitem(SOURCES, "shakespeare", replace(SOURCES["shakespeare"], **changes))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


WHOLE = {"shakespeare_train.h5", "shakespeare_test.h5"}
PART = "shakespeare.tar.bz2.part"


@pytest.mark.usefixtures("archive")
def test_a_download(tmp_path: Path, server: Server) -> None:
    folder = datasets.get("shakespeare")
    assert folder == tmp_path / "cache" / "fedshuffle" / "shakespeare"
    assert names(folder) == WHOLE  # nothing else of the archive, and no archive
    assert list(datasets.shakespeare()[0].ids) == ["A", "B"]
    assert datasets.get("shakespeare") == folder
    assert server.asked == [None]


@pytest.mark.usefixtures("archive")
def test_two_downloads_at_once_do_not_mix(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "cache" / "fedshuffle" / "shakespeare"
    with one_writer(folder), pytest.raises(FedShuffleError, match="being written by"):
        datasets.get("shakespeare")
    assert not server.asked
    assert datasets.get("shakespeare") == folder
    assert names(folder) == WHOLE


def test_a_download_goes_on_where_it_broke_off(
    archive: bytes, server: Server, tmp_path: Path
) -> None:
    server.cut = 200_000
    with pytest.raises(FedShuffleError, match=r"broke off after 200,000 of .* what has come is"):
        datasets.get("shakespeare", tmp_path / "data")
    folder = tmp_path / "data" / "shakespeare"
    assert (folder / PART).read_bytes() == archive[:200_000]
    server.cut = None
    datasets.get("shakespeare", tmp_path / "data")
    assert server.asked == [None, "bytes=200000-"]
    assert names(folder) == WHOLE


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_was_whole_but_not_unpacked(
    ranges: bool, archive: bytes, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / PART).write_bytes(archive)
    server.ranges = ranges  # without them, the whole is sent once more
    datasets.get("shakespeare", tmp_path)
    assert names(folder) == WHOLE


def test_servers_that_cannot_go_on_begin_again(
    archive: bytes, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / PART).write_bytes(archive[:1000])
    server.ranges = False
    datasets.get("shakespeare", tmp_path)
    assert server.asked == ["bytes=1000-"]
    assert names(folder) == WHOLE


def test_another_file_than_was_published(archive: bytes, server: Server, tmp_path: Path) -> None:
    server.files["/shakespeare.tar.bz2"] = archive[:-1] + b"?"
    with pytest.raises(FedShuffleError, match=r"not the file that was published: its sha256 is"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == set()  # going on with it would not help
    server.files["/shakespeare.tar.bz2"] = archive
    datasets.get("shakespeare", tmp_path)


@pytest.mark.usefixtures("archive")
def test_what_is_not_there(server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(FedShuffleError, match=r"cannot get http.*404.* put it, or shakespeare_tr"):
        datasets.get("shakespeare", tmp_path)
    with pytest.raises(FedShuffleError, match="unknown data set 'shakespear'"):
        datasets.get("shakespear")


@pytest.mark.usefixtures("archive")
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, url="http://127.0.0.1:1/shakespeare.tar.bz2")
    with pytest.raises(FedShuffleError, match=r"cannot get http://127.*shakespeare.tar.bz2.*into"):
        datasets.get("shakespeare", tmp_path)


def test_an_archive_put_there_by_hand(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, url="http://127.0.0.1:1/shakespeare.tar.bz2")
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / "shakespeare.tar.bz2").write_bytes(archive)
    datasets.get("shakespeare", tmp_path)
    assert names(folder) == WHOLE | {"shakespeare.tar.bz2"}


def test_interrupted_by_hand(
    archive: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            datasets.get("shakespeare", tmp_path, progress=True)
    assert "Interrupted: what has come is kept" in capsys.readouterr().err
    part = tmp_path / "shakespeare" / PART
    assert part.read_bytes() == archive[: download._BLOCK]
    datasets.get("shakespeare", tmp_path)


def serve(content: bytes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else, published as it is."""
    server.files["/shakespeare.tar.bz2"] = content
    change(monkeypatch, checksum=f"md5:{hashlib.md5(content).hexdigest()}")


@pytest.mark.parametrize("keep", [0, 100, 250_000])
def test_archives_that_are_cut_off(
    keep: int, archive: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(archive[:keep] or b"no", server, monkeypatch)
    with pytest.raises(FedShuffleError, match=r"shakespeare.tar.bz2.* is broken"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == set()
    # Cut in the middle of a file that is wanted: the others are kept, that one is not.
    made = {path.name: path.read_bytes() for path in (tmp_path / "made" / "shakespeare").iterdir()}
    serve(packed(dict(sorted(made.items())), mode="w")[:-12_000], server, monkeypatch)
    with pytest.raises(FedShuffleError, match=r"shakespeare.tar.bz2.* is broken"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == {"shakespeare_test.h5"}


@pytest.mark.usefixtures("archive")
def test_archives_that_hold_something_else(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made" / "shakespeare"
    train = (made / "shakespeare_train.h5").read_bytes()
    serve(packed({"shakespeare_train.h5": train}), server, monkeypatch)
    with pytest.raises(FedShuffleError, match=r"lacks shakespeare_test.h5"):
        datasets.get("shakespeare", tmp_path)
    # Names that lead out of the folder lead nowhere: files are written by their last part.
    outside = {"../../shakespeare_train.h5": train, "/shakespeare_test.h5": train}
    serve(packed(outside), server, monkeypatch)
    assert names(datasets.get("shakespeare", tmp_path / "a" / "b")) == WHOLE
    assert names(tmp_path / "a") == {"b"}
    change(monkeypatch, files={"shakespeare_train.h5": 2, "shakespeare_test.h5": 715})
    with pytest.raises(FedShuffleError, match=r"test.h5' holds 2 clients, but should hold 715"):
        datasets.get("shakespeare", tmp_path / "a" / "b")


@pytest.mark.usefixtures("archive")
def test_links_in_archives_are_not_followed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as tar:
        for name in WHOLE:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    serve(buffer.getvalue(), server, monkeypatch)
    with pytest.raises(FedShuffleError, match="lacks shakespeare_test"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == set()


def test_images_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary(tmp_path)
    with pytest.raises(FedShuffleError, match=r"train.bin' holds 300 images, but should hold 50,0"):
        datasets.get("cifar100", tmp_path)
    monkeypatch.setitem(
        SOURCES,
        "cifar100",
        replace(SOURCES["cifar100"], files={"train.bin": 300, "test.bin": 70}),
    )
    assert datasets.get("cifar100", tmp_path) == tmp_path / "cifar100"


def test_a_folder_that_cannot_be_written(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "shakespeare").write_bytes(archive)
    with pytest.raises(FedShuffleError, match=r"cannot get .*File exists"):
        datasets.get("shakespeare", tmp_path)


@pytest.mark.usefixtures("archive")
def test_what_reads_the_data_is_missed_before_the_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(FedShuffleError, match=r"needs h5py: pip install 'fedshuffle\[data\]'"):
        datasets.get("shakespeare", tmp_path)
    assert server.asked == []


@pytest.mark.usefixtures("archive")
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSHUFFLE_DATA", str(tmp_path / "told"))
    for words, place in (([], "told"), (["--data", str(tmp_path / "here")], "here")):
        monkeypatch.setattr(sys, "argv", ["fedshuffle", "data", "get", "shakespeare", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        folder = tmp_path / place / "shakespeare"
        assert lines == [f"{folder / f'shakespeare_{p}.h5'}: 2 clients" for p in ("train", "test")]


def test_what_is_published_is_written_down_well() -> None:
    for source in SOURCES.values():
        algorithm, _, digest = source.checksum.partition(":")
        assert len(digest) == 2 * hashlib.new(algorithm).digest_size
        assert source.url.startswith("https://")
