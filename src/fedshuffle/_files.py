"""Files that are written completely or not at all, and folders with one writer at a time."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedshuffle.errors import FedShuffleError, error_context

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""The file that the writer of a folder holds locked, with the writer's process id in it."""

_WRITERS: dict[tuple[int, str], object] = {}
"""The folders that this process writes to: the kernel's lock does not distinguish threads.

The process id is part of the key, so that a forked child ignores what it inherits."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def atomic_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when it is complete and on the disk.

    A private one can be read by its owner alone, at every moment.
    """
    draft = path.with_name(path.name + ".draft")
    mode = 0o600 if private else 0o666
    try:
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a whole file, or nothing, even if the process dies or the power fails."""
    with atomic_file(path, private=private) as file:
        file.write(data)


def write_file(path: Path, data: str | bytes) -> None:
    """Write a user's file completely or not at all, and create its folder if needed."""
    advice = "Make room, or choose another folder"
    with error_context(
        lambda error: f"cannot write {str(path)!r}: {error.strerror}. {advice}.", OSError
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data.encode() if isinstance(data, str) else data)


def results_folder(out: Path | str) -> Path:
    """A folder for results, made if needed; refused before any work if it is not writable."""
    folder, advice = Path(out), "Choose another folder"
    with error_context(
        lambda error: f"results cannot be written to {str(out)!r} ({error}). {advice}.", OSError
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission to write")
    return folder


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Keep all other writers out of a folder; the second one is refused at once.

    The kernel holds the lock for this process alone: it ends with the process, however that dies,
    and child processes do not inherit it. The folder is created if it is missing, and removed if it
    is empty at the end. Where there are no such locks (Windows, some network disks), only the
    threads of one process keep each other out.
    """
    key, writer = (os.getpid(), os.path.realpath(folder)), object()
    if _WRITERS.setdefault(key, writer) is not writer:
        raise _taken(folder, "this program")
    made, file = not folder.exists(), None
    try:
        file = _locked(folder)
        yield
    finally:
        try:
            if file is not None and os.getpid() == key[0]:  # not in a forked child
                with suppress(OSError):
                    (folder / LOCK).unlink()  # before it is released: see _locked
                os.close(file)
            if made:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
        finally:
            del _WRITERS[key]


def _locked(folder: Path) -> int:
    """The open and locked file of a folder, or an error that names who holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # Another writer may just have removed its lock, or the folder that it had created.
        with suppress(FileNotFoundError), ExitStack() as stack:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            file = os.open(folder / LOCK, flags, 0o666)
            stack.callback(os.close, file)
            _lock(file, folder)
            if os.fstat(file).st_ino == (folder / LOCK).stat().st_ino:
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
                stack.pop_all()
                return file


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
            f"the disk of {str(folder)!r} has no locks ({error.strerror}): make sure yourself that"
            " only one process writes there.",
            stacklevel=5,
        )


def _taken(folder: Path, holder: str) -> FedShuffleError:
    return FedShuffleError(
        f"{str(folder)!r} is being written by {holder}. Wait until that ends, or choose another"
        " folder."
    )
