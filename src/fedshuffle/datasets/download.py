"""Downloading data sets: resumed where it broke off, checked, and unpacked whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fedshuffle._files import one_writer
from fedshuffle._terminal import Console
from fedshuffle.datasets.places import roots
from fedshuffle.datasets.sources import SOURCES, Source
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.populations.sources import optional

_BLOCK = 1 << 16
_TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""


def get(name: str, data: str | Path | None = None, *, progress: bool = False) -> Path:
    """The folder with the files of a data set, which are downloaded if they are not there.

    Args:
        name: shakespeare, cifar100 or femnist.
        data: the folder under which to put its folder; if not given, that of FEDSHUFFLE_DATA, or
            the cache of this system.
        progress: show a bar.
    """
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    source, folder = SOURCES[name], roots(data)[0] / name
    if any(file.endswith(".h5") for file in source.files):
        optional("h5py")  # what is missing is better missed before the download
    if not all((folder / file).is_file() for file in source.files):
        with _errors_named(source, folder):
            folder.mkdir(parents=True, exist_ok=True)  # stays, for what is put there by hand
            with one_writer(folder):
                _fetch(source, folder, progress)
    source.check(folder)
    return folder


def _fetch(source: Source, folder: Path, progress: bool) -> None:
    archive = folder / source.url.rpartition("/")[2]
    part = archive.with_name(archive.name + ".part")
    if archive.is_file():  # put there by hand
        _verify(archive, source.checksum)
        _unpack(archive, source.files, folder)
        return
    _download(source.url, part, progress)
    try:
        _verify(part, source.checksum)
        _unpack(part, source.files, folder)
    except FedShuffleError:
        part.unlink()  # going on with it would never mend it
        raise
    part.unlink()


@contextmanager
def _errors_named(source: Source, folder: Path) -> Iterator[None]:
    """Say of what the network or the disk refuses how to get the data without them."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        reason = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
        raise FedShuffleError(
            f"cannot get {source.url}: {reason}. Try again: what has come is kept. Or get that file"
            f" elsewhere and put it, or {' and '.join(source.files)} from it, into {str(folder)!r}."
        ) from error


def _download(url: str, part: Path, progress: bool) -> None:
    """Bring what is at the address to ``part``, after what is there already."""
    have = part.stat().st_size if part.exists() else 0
    ask = {"User-Agent": "fedshuffle"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(Request(url, headers=ask), timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return  # there is no more; the checksum will tell whether it is right
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with _bar(progress) as bar, part.open("ab" if have else "wb") as file:
            task = bar.add_task(part.name.removesuffix(".part"), total=total, completed=have)
            while block := response.read(_BLOCK):
                file.write(block)
                bar.advance(task, len(block))
    found = part.stat().st_size
    if total is not None and found < total:
        raise ConnectionError(f"it broke off after {found:,} of {total:,} bytes")


@contextmanager
def _bar(visible: bool) -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not visible,
    ) as bar:
        try:
            yield bar
        except KeyboardInterrupt:
            bar.console.print("Interrupted: what has come is kept. Run it again to go on.")
            raise


def _verify(path: Path, checksum: str) -> None:
    algorithm, _, want = checksum.partition(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != want:
        raise FedShuffleError(
            f"{path.name.removesuffix('.part')} is not the file that was published: its {algorithm}"
            f" is {digest.hexdigest()}, not {want}. Get it again."
        )


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is in its place once it is written, and not before."""
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _unpack(archive: Path, wanted: Collection[str], folder: Path) -> None:
    """Take the wanted files out of an archive, by their names alone, and nothing else."""
    missing = set(wanted)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if member.isreg() and name in missing else None
                if content is not None:
                    with content, _whole(folder / name) as file:
                        shutil.copyfileobj(content, file)
                    missing.remove(name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise FedShuffleError(f"{archive.name} is broken: {error}. Get it again.") from error
    if missing:
        raise FedShuffleError(f"{archive.name} lacks {' and '.join(sorted(missing))}.")
