"""Files that are there wholly or not at all, and folders with one writer at a time."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedshuffle.errors import FedShuffleError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""The file in a folder that its writer holds locked, with the writer's process id in it."""

_WRITERS: dict[tuple[int, str], object] = {}
"""The folders that this process writes to: the kernel's lock does not tell its threads apart.

The process id is part of the key, so that a forked child ignores what it inherits.
"""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there wholly or not at all, even after a power cut."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Keep all other writers out of a folder; the second one is refused at once.

    The kernel holds the lock for this process alone: it ends when the process does, however it
    dies, and a child process neither inherits it nor keeps it alive. The folder is made if it is
    missing, and goes again if it is empty at the end. Where there are no such locks (Windows, some
    network disks), only the threads of one process keep each other out.

    Raises:
        FedShuffleError: if somebody else writes to the folder; says which process.
        OSError: if the folder or the lock cannot be written.
    """
    key, writer = (os.getpid(), os.path.realpath(folder)), object()
    if _WRITERS.setdefault(key, writer) is not writer:
        raise _taken(folder, "this program")
    made = not folder.exists()
    file = None
    try:
        file = _locked(folder)
        yield
    finally:
        try:
            if file is not None and os.getpid() == key[0]:  # no forked child frees it
                with suppress(OSError):
                    (folder / LOCK).unlink()  # before it is free: see _locked
                os.close(file)
            if made:
                with suppress(OSError):  # there is something in it
                    folder.rmdir()
        finally:
            del _WRITERS[key]


def _locked(folder: Path) -> int:
    """The open lock file of a folder, locked, or an error that names who holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            file = os.open(folder / LOCK, flags, 0o666)
        except FileNotFoundError:  # another writer removed the folder that it had made
            continue
        try:
            _lock(file, folder)
            # The writer before may have removed the file while this one waited to lock it.
            if os.fstat(file).st_ino == (folder / LOCK).stat().st_ino:
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            pid = os.read(file, 20).decode(errors="replace")
            holder = f"process {pid}" if pid.isdecimal() else "another process"
            raise _taken(folder, holder) from None
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"the disk of {str(folder)!r} has no locks ({error.strerror}): see to it yourself that"
            " only one process writes there.",
            stacklevel=5,
        )


def _taken(folder: Path, holder: str) -> FedShuffleError:
    return FedShuffleError(
        f"{str(folder)!r} is being written by {holder}. Wait until that ends, or choose another"
        " folder."
    )
