"""Where data sets are found, and downloads that survive interruptions."""

import hashlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.progress import Progress

from fedshuffle import FedShuffleError, cli
from fedshuffle._files import one_writer
from fedshuffle.data import datasets
from fedshuffle.data.datasets import download
from fedshuffle.data.datasets.download import ARCHIVES, Archive, cache_folder
from tests.data.helpers import ANN, BOB, binary, plays


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSHUFFLE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_folder_then_variable_then_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedShuffleError, match="fedshuffle data get"):
        datasets.shakespeare()
    named = plays(tmp_path / "named", {"NAMED": ANN}, {"NAMED": ANN})
    given = plays(tmp_path / "given", {"TOLD": ANN}, {"TOLD": ANN})
    plays(tmp_path / "cache" / "fedshuffle", {"CACHED": ANN}, {"CACHED": ANN})
    assert datasets.shakespeare()[0].ids == ("CACHED",)
    monkeypatch.setenv("FEDSHUFFLE_DATA", str(given))
    assert datasets.shakespeare()[0].ids == ("TOLD",)
    assert datasets.shakespeare(named)[0].ids == ("NAMED",)
    assert datasets.shakespeare(str(named / "shakespeare"))[0].ids == ("NAMED",)
    (given / "shakespeare" / "shakespeare_test.h5").unlink()
    assert datasets.shakespeare()[0].ids == ("CACHED",)
    with pytest.raises(FedShuffleError, match=r"shakespeare_test.h5"):
        datasets.shakespeare(given)


def test_an_archive_unpacked_by_hand_is_found(tmp_path: Path) -> None:
    (binary(tmp_path) / "cifar100").rename(tmp_path / "cifar-100-binary")
    assert len(datasets.cifar100(tmp_path / "cifar-100-binary", clients=3)[0]) == 3


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
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / want / "fedshuffle"


def test_load_returns_one_part(tmp_path: Path) -> None:
    plays(tmp_path, {"A": ANN, "B": BOB}, {"B": [b"x"]})
    assert list(datasets.load("shakespeare", folder=tmp_path, sequence=5).ids) == ["A", "B"]
    assert list(datasets.load("shakespeare", "test", tmp_path).ids) == ["B"]
    with pytest.raises(FedShuffleError, match="unknown data set 'mnist'"):
        datasets.load("mnist")
    with pytest.raises(FedShuffleError, match="'tests'"):
        datasets.load("shakespeare", "tests")


def test_importing_datasets_loads_neither_torch_nor_h5py() -> None:
    program = (
        "import sys, fedshuffle.data.datasets, fedshuffle.data.partition;"
        "assert not {'torch', 'h5py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@dataclass
class Server:
    """Files by path, and how to serve them."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: int | None = None
    """Break off after this many bytes."""
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
    source = Archive(
        url=f"{server.url}/shakespeare.tar.bz2",
        checksum=f"sha256:{hashlib.sha256(content).hexdigest()}",
        files={"shakespeare_train.h5": 2, "shakespeare_test.h5": 2},
    )
    monkeypatch.setitem(ARCHIVES, "shakespeare", source)
    return content


def change(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setitem(ARCHIVES, "shakespeare", replace(ARCHIVES["shakespeare"], **changes))


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


def test_a_download_resumes(archive: bytes, server: Server, tmp_path: Path) -> None:
    server.cut = 200_000
    with pytest.raises(FedShuffleError, match="200,000"):
        datasets.get("shakespeare", tmp_path / "data")
    folder = tmp_path / "data" / "shakespeare"
    assert (folder / PART).read_bytes() == archive[:200_000]
    server.cut = None
    datasets.get("shakespeare", tmp_path / "data")
    assert server.asked == [None, "bytes=200000-"]
    assert names(folder) == WHOLE


@pytest.mark.parametrize("ranges", [True, False])
def test_a_complete_download_is_unpacked(
    ranges: bool, archive: bytes, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / PART).write_bytes(archive)
    server.ranges = ranges  # without them, the whole is sent once more
    datasets.get("shakespeare", tmp_path)
    assert names(folder) == WHOLE


def test_without_ranges_a_download_restarts(archive: bytes, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / PART).write_bytes(archive[:1000])
    server.ranges = False
    datasets.get("shakespeare", tmp_path)
    assert server.asked == ["bytes=1000-"]
    assert names(folder) == WHOLE


def test_a_wrong_checksum_is_refused(archive: bytes, server: Server, tmp_path: Path) -> None:
    server.files["/shakespeare.tar.bz2"] = archive[:-1] + b"?"
    with pytest.raises(FedShuffleError, match="sha256"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == set()  # going on with it would not help
    server.files["/shakespeare.tar.bz2"] = archive
    datasets.get("shakespeare", tmp_path)


@pytest.mark.usefixtures("archive")
def test_missing_files_and_unknown_names(server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(FedShuffleError, match="404"):
        datasets.get("shakespeare", tmp_path)
    with pytest.raises(FedShuffleError, match="'shakespear'"):
        datasets.get("shakespear")


@pytest.mark.usefixtures("archive")
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, url="http://127.0.0.1:1/shakespeare.tar.bz2")
    with pytest.raises(FedShuffleError, match=r"shakespeare.tar.bz2"):
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


def test_an_interrupted_download_keeps_its_bytes(
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
    assert "Interrupted" in capsys.readouterr().err
    part = tmp_path / "shakespeare" / PART
    assert part.read_bytes() == archive[: download._BLOCK]
    datasets.get("shakespeare", tmp_path)


def serve(content: bytes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else, published as it is."""
    server.files["/shakespeare.tar.bz2"] = content
    change(monkeypatch, checksum=f"md5:{hashlib.md5(content).hexdigest()}")


@pytest.mark.parametrize("keep", [0, 100, 250_000])
def test_truncated_archives_are_refused(
    keep: int, archive: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(archive[:keep] or b"no", server, monkeypatch)
    with pytest.raises(FedShuffleError, match="broken"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == set()
    # Cut in the middle of a file that is wanted: the others are kept, that one is not.
    made = {path.name: path.read_bytes() for path in (tmp_path / "made" / "shakespeare").iterdir()}
    serve(packed(dict(sorted(made.items())), mode="w")[:-12_000], server, monkeypatch)
    with pytest.raises(FedShuffleError, match="broken"):
        datasets.get("shakespeare", tmp_path)
    assert names(tmp_path / "shakespeare") == {"shakespeare_test.h5"}


@pytest.mark.usefixtures("archive")
def test_only_wanted_files_are_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made" / "shakespeare"
    train = (made / "shakespeare_train.h5").read_bytes()
    serve(packed({"shakespeare_train.h5": train}), server, monkeypatch)
    with pytest.raises(FedShuffleError, match=r"shakespeare_test.h5"):
        datasets.get("shakespeare", tmp_path)
    # Names that lead out of the folder lead nowhere: files are written by their last part.
    outside = {"../../shakespeare_train.h5": train, "/shakespeare_test.h5": train}
    serve(packed(outside), server, monkeypatch)
    assert names(datasets.get("shakespeare", tmp_path / "a" / "b")) == WHOLE
    assert names(tmp_path / "a") == {"b"}
    change(monkeypatch, files={"shakespeare_train.h5": 2, "shakespeare_test.h5": 715})
    with pytest.raises(FedShuffleError, match="715"):
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
    with pytest.raises(FedShuffleError, match="300 images"):
        datasets.get("cifar100", tmp_path)
    monkeypatch.setitem(
        ARCHIVES,
        "cifar100",
        replace(ARCHIVES["cifar100"], files={"train.bin": 300, "test.bin": 70}),
    )
    assert datasets.get("cifar100", tmp_path) == tmp_path / "cifar100"


def test_a_folder_that_cannot_be_written(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "shakespeare").write_bytes(archive)
    with pytest.raises(FedShuffleError, match=r"cannot get .*File exists"):
        datasets.get("shakespeare", tmp_path)


@pytest.mark.usefixtures("archive")
def test_a_missing_reader_fails_before_the_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(FedShuffleError, match="h5py"):
        datasets.get("shakespeare", tmp_path)
    assert server.asked == []


@pytest.mark.usefixtures("archive")
def test_the_get_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSHUFFLE_DATA", str(tmp_path / "given"))
    for words, place in (([], "given"), (["--data", str(tmp_path / "here")], "here")):
        monkeypatch.setattr(sys, "argv", ["fedshuffle", "data", "get", "shakespeare", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        folder = tmp_path / place / "shakespeare"
        assert lines == [f"{folder / f'shakespeare_{p}.h5'}: 2 clients" for p in ("train", "test")]


def test_checksums_and_addresses_are_well_formed() -> None:
    for source in ARCHIVES.values():
        algorithm, _, digest = source.checksum.partition(":")
        assert len(digest) == 2 * hashlib.new(algorithm).digest_size
        assert source.url.startswith("https://")
