"""One writer per folder, and a lock that dies with its holder."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedshuffle import FedShuffleError, _files
from fedshuffle._files import one_writer

HOLDER = """
import os, sys
from pathlib import Path
from fedshuffle._files import one_writer

with one_writer(Path(sys.argv[1])):
    if sys.argv[2:] == ["fork"] and os.fork() == 0:
        sys.stdin.read()  # outlives its parent
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to the folder until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(folder), *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        yield process


def assert_free(folder: Path) -> None:
    with one_writer(folder):
        pass


def test_the_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with holder(folder) as other:
        told = f"run' is being written by process {other.pid}"
        with pytest.raises(FedShuffleError, match=told), one_writer(folder):
            pytest.fail("two writers")
        assert (folder / _files.LOCK).exists()
        assert other.poll() is None
    assert not folder.exists()  # it was empty
    assert_free(folder)


@pytest.mark.parametrize("words", [(), ("fork",)])
def test_a_killed_process_leaves_the_folder_free(tmp_path: Path, words: tuple[str, ...]) -> None:
    with holder(tmp_path, *words) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert_free(tmp_path)  # although a child of it may still be there


def test_threads_keep_each_other_out(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def second() -> None:
        try:
            with one_writer(tmp_path / ".." / tmp_path.name):
                pass
        except FedShuffleError as error:
            found.append(error)

    with one_writer(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "by this program" in str(found[0])
    assert_free(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_has_the_lock_nor_frees_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(one_writer(tmp_path))
        if (child := os.fork()) == 0:
            code = 1
            try:
                with one_writer(tmp_path):
                    code = 2
            except FedShuffleError as error:
                stack.close()
                code = 0 if f"process {os.getppid()}" in str(error) else 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (tmp_path / _files.LOCK).read_text() == str(os.getpid())


def test_only_the_lock_is_removed_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_free(tmp_path / "empty")
    assert (tmp_path / "empty").exists()  # it was there before
    with one_writer(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["file"]
    with pytest.raises(ZeroDivisionError), one_writer(tmp_path / "new"):
        raise ZeroDivisionError
    assert_free(tmp_path / "new")


def test_a_lock_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking the writer before ends; then a third one begins."""
    meanwhile = ["ends", "ends, and another begins"]
    lock = _files._lock

    def late(file: int, folder: Path) -> None:
        if meanwhile:
            (folder / _files.LOCK).unlink()
            if "another" in meanwhile.pop():
                (folder / _files.LOCK).touch()
        lock(file, folder)

    monkeypatch.setattr(_files, "_lock", late)
    with one_writer(tmp_path):
        assert (tmp_path / _files.LOCK).read_text() == str(os.getpid())
    assert not meanwhile


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", unable)
    with pytest.warns(UserWarning, match="has no locks"), one_writer(tmp_path):
        pass
    monkeypatch.setattr(_files, "fcntl", None)
    assert_free(tmp_path)


def test_results_go_to_a_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _files.results_folder(tmp_path / "deep" / "down").is_dir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FedShuffleError, match="file"):
        _files.results_folder(tmp_path / "file")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(FedShuffleError, match="permission"):
        _files.results_folder(tmp_path)
