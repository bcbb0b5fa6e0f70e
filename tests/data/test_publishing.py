"""A store is replaced whole or not at all, by one writer at a time."""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError, _files
from fedshuffle.data import import_chunks
from fedshuffle.data.storage import store, writer
from tests.data.helpers import (
    names_in,
)


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

    monkeypatch.setattr(writer, "_places", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_chunks([("b", [1.0]), ("a", [2.0])], tmp_path / "p")
    assert not list(tmp_path.iterdir())
    assert "nothing was kept" in capsys.readouterr().err


def test_a_killed_import_leaves_no_store(tmp_path: Path) -> None:
    code = """
import os, sys
from fedshuffle.data import import_chunks
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
from fedshuffle.data import import_chunks
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
@pytest.mark.parametrize(
    ("stop", "there", "within"),
    [
        ("interrupted", True, "draft publish _sweep"),
        *(
            pytest.param(stop, there, "", marks=pytest.mark.slow)
            for stop, there in (("killed", True), ("killed", False), ("interrupted", False))
        ),
    ],
)
def test_a_complete_store_remains_wherever_an_overwrite_stops(
    tmp_path: Path, stop: str, there: bool, within: str
) -> None:
    """A child process stops at its k-th line of the code that writes, for every k."""
    # Forks of a new process cost a fraction of forks of one that has run other tests.
    process = multiprocessing.get_context("spawn").Process(
        target=overwrite_and_stop_everywhere, args=(tmp_path, stop, there, within)
    )
    process.start()
    process.join()
    assert process.exitcode == 0  # its error is in what it printed


def overwrite_and_stop_everywhere(tmp_path: Path, stop: str, there: bool, within: str) -> None:
    os.fsync = lambda fd: None  # it is no power cut
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
    modules = (store, writer, _files, shutil)
    files = [module.__file__ for module in modules]
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


def test_a_store_is_overwritten_only_on_request(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "people"
    import_chunks([("a", [1.0])], place)
    first = Federation.open(place)
    with pytest.raises(FedShuffleError, match="overwrite"):
        import_chunks([("b", [2.0])], place)
    with pytest.raises(FedShuffleError, match="NaN"):
        import_chunks([("b", [np.nan])], place, overwrite=True)
    assert Federation.open(place).ids[0] == "a"
    import_chunks([("b", [2.0])], place, overwrite=True)
    assert Federation.open(place).ids[0] == "b"
    assert first.fields[0].tolist() == [1.0]  # who has it open keeps it
    assert [file.name for file in place.parent.iterdir()] == ["people"]


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    with pytest.raises(FedShuffleError, match="neither a store"):
        import_chunks([("a", [1.0])], tmp_path / "letters", overwrite=True)
    for path in (tmp_path / "file", tmp_path / "file" / "p"):
        with pytest.raises(FedShuffleError, match="cannot write"):
            import_chunks([("a", [1.0])], path, overwrite=True)
    assert names_in(tmp_path / "letters") == ["dear.txt"]
    (tmp_path / "empty").mkdir()
    assert len(import_chunks([("a", [1.0])], tmp_path / "empty")) == 1


def test_a_broken_store_stays_until_it_is_replaced(tmp_path: Path) -> None:
    import_chunks([("a", [1.0])], tmp_path / "p")
    facts = (tmp_path / "p" / "federation.json").read_text()
    (tmp_path / "p" / "federation.json").write_text(facts[:-9])
    with pytest.raises(FedShuffleError, match="NaN"):
        import_chunks([("b", [np.nan])], tmp_path / "p", overwrite=True)
    (tmp_path / "p" / "federation.json").write_text(facts)
    assert Federation.open(tmp_path / "p").ids[0] == "a"
    (tmp_path / "p" / "federation.json").write_text(facts[:-9])
    import_chunks([("b", [1.0])], tmp_path / "p", overwrite=True)
    assert len(names_in(tmp_path / "p")) == 2


def test_a_store_replaced_during_opening_opens_as_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_chunks([("a", [1.0])], tmp_path / "p")
    mapped = store._map
    left = [("b", [2.0])]

    def late(*args: Any) -> Any:
        if left:
            import_chunks([left.pop()], tmp_path / "p", overwrite=True)
        return mapped(*args)

    monkeypatch.setattr(store, "_map", late)
    assert list(Federation.open(tmp_path / "p").ids) == ["b"]


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import resource, sys
import numpy as np
from fedshuffle.data import import_chunks
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
