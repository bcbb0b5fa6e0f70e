"""Where the data sets come from, where they are on this machine, and downloading them.

A download is resumed after an interruption, verified, and unpacked completely or not at all. pooch
is not used for it: it starts an interrupted download from the beginning.
"""

import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from fedshuffle._files import atomic_file, one_writer
from fedshuffle._terminal import progress_bar
from fedshuffle.data.importers.clients import open_clients
from fedshuffle.data.importers.files import optional
from fedshuffle.errors import FedShuffleError, check_known, error_context

IMAGE_BYTES = 2 + 3 * 32 * 32
"""An image of CIFAR-100: a coarse label, a fine one, and 32 x 32 pixels in three colours."""
_VARIABLE = "FEDSHUFFLE_DATA"
_BLOCK = 1 << 16
_TIMEOUT = 30.0  # seconds without a byte after which a connection counts as broken


@dataclass(frozen=True)
class Archive:
    """An archive to download, and the files in it that matter."""

    url: str
    checksum: str
    """``algorithm:digest``, as published with the data."""
    files: Mapping[str, int]
    """Number of clients (HDF5) or images (CIFAR-100) in each file."""

    def check(self, folder: Path) -> None:
        """Refuse files that do not hold what they should."""
        for name, want in self.files.items():
            path = folder / name
            if path.suffix == ".h5":
                with open_clients(path) as clients:
                    count, what = float(len(clients.names)), "clients"
            else:
                count, what = path.stat().st_size / IMAGE_BYTES, "images"
            if count != want:
                raise FedShuffleError(
                    f"'{path}' holds {count:,g} {what}, not {want:,}. Delete it and get it again."
                )


_TFF = "https://storage.googleapis.com/tff-datasets-public"

ARCHIVES = {
    "shakespeare": Archive(
        url=f"{_TFF}/shakespeare.tar.bz2",
        checksum="sha256:0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707",
        files={"shakespeare_train.h5": 715, "shakespeare_test.h5": 715},
    ),
    "cifar100": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        checksum="md5:03b5dce01913d631647c71ecec9e9cb8",
        files={"train.bin": 50_000, "test.bin": 10_000},
    ),
    "femnist": Archive(
        url=f"{_TFF}/fed_emnist.tar.bz2",
        checksum="sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
        files={"fed_emnist_train.h5": 3_400, "fed_emnist_test.h5": 3_400},
    ),
}
"""Where each data set comes from, by its name: address, checksum and files."""


def cache_folder() -> Path:
    """The system's folder for files that can be downloaded again."""
    windows = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    usual = {"darwin": "~/Library/Caches", "win32": windows}.get(sys.platform, "~/.cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual).expanduser() / "fedshuffle"


def _roots(folder: str | Path | None) -> list[Path]:
    """The folders that may hold data sets; a new one goes into the first."""
    if folder is not None:
        return [Path(folder)]
    given = os.environ.get(_VARIABLE)
    return [Path(given), cache_folder()] if given else [cache_folder()]


def find(name: str, folder: str | Path | None, *also: str) -> Path:
    """The folder with the files of a data set, or with files that match a pattern in ``also``."""
    archive, roots = ARCHIVES[name], _roots(folder)
    for root in roots:
        for place in (root / name, root):
            if all((place / file).is_file() for file in archive.files):
                return place
            if any(path.is_file() for pattern in also for path in place.glob(pattern)):
                return place
    raise FedShuffleError(
        f"there is no {name} data under {' or '.join(map(str, roots))}. Get it with 'fedshuffle"
        f" data get {name}'; or put {' and '.join(archive.files)} into a folder {name!r}, and say"
        f" with folder= or {_VARIABLE} which folder holds that."
    )


def get(name: str, data: str | Path | None = None, *, progress: bool = False) -> Path:
    """The folder with the files of a data set; downloads them if they are missing.

    Args:
        name: shakespeare, cifar100 or femnist.
        data: the folder that holds or gets the data set's folder; by default FEDSHUFFLE_DATA, or
            the cache of this system.
        progress: show a progress bar.
    """
    check_known("data set", name, ARCHIVES)
    archive, folder = ARCHIVES[name], _roots(data)[0] / name
    if any(file.endswith(".h5") for file in archive.files):
        optional("h5py")  # fail before the download
    if not all((folder / file).is_file() for file in archive.files):
        with error_context(
            lambda error: (
                f"cannot get {archive.url}: {str(error).strip('<>')}. Try again: the bytes"
                " received are kept. Or get that file elsewhere and put it, or"
                f" {' and '.join(archive.files)} from it, into {str(folder)!r}."
            ),
            (OSError, http.client.HTTPException),
        ):
            folder.mkdir(parents=True, exist_ok=True)  # stays, for files put there by hand
            with one_writer(folder):
                _fetch(archive, folder, progress)
    archive.check(folder)
    return folder


def _fetch(archive: Archive, folder: Path, progress: bool) -> None:
    file = folder / archive.url.rpartition("/")[2]
    if file.is_file():  # put there by hand
        _unpack(file, archive, folder)
        return
    part = file.with_name(file.name + ".part")
    _download(archive.url, part, progress)
    try:
        _unpack(part, archive, folder)
    except FedShuffleError:
        part.unlink()  # a corrupt file cannot be resumed
        raise
    part.unlink()


def _download(url: str, part: Path, progress: bool) -> None:
    """Download to ``part``, resuming after the bytes that are there already."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedshuffle"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return  # complete; the checksum is compared next
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = progress_bar(progress, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        task = bar.add_task(part.stem, total=total, completed=have)
        try:
            with bar, part.open("ab" if have else "wb") as file:
                while block := response.read(_BLOCK):
                    have += file.write(block)
                    bar.advance(task, len(block))
        except KeyboardInterrupt:
            bar.console.print("Interrupted: the bytes received are kept. Run again to resume.")
            raise
    if total is not None and have < total:
        raise ConnectionError(f"it broke off after {have:,} of {total:,} bytes")


def _unpack(file: Path, archive: Archive, folder: Path) -> None:
    """Take the wanted files out of a verified archive, by their names alone, and nothing else."""
    algorithm, _, want = archive.checksum.partition(":")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, partial(hashlib.new, algorithm, usedforsecurity=False))
    name = file.name.removesuffix(".part")
    if digest.hexdigest() != want:
        raise FedShuffleError(
            f"{name} is not what was published: its {algorithm} is not {want}. Get it again."
        )
    missing = set(archive.files)
    broken = (tarfile.TarError, EOFError, zlib.error)
    with (
        error_context(lambda error: f"{name} is broken: {error}. Get it again.", broken),
        tarfile.open(file) as tar,
    ):
        for member in tar:
            last = PurePosixPath(member.name).name
            content = tar.extractfile(member) if member.isreg() and last in missing else None
            if content is not None:
                with content, atomic_file(folder / last) as target:
                    shutil.copyfileobj(content, target)
                missing.remove(last)
    if missing:
        raise FedShuffleError(f"{name} lacks {' and '.join(sorted(missing))}.")
