"""Names from data cannot steer the terminal that they are printed to; signals interrupt once."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from rich.table import Table

import fedshuffle
from fedshuffle import Federation, FedShuffleError, cli
from fedshuffle._terminal import Console, interrupted_once
from fedshuffle.data import import_chunks
from fedshuffle.errors import DivergedError, TrainingError

EVIL = "\x1b]0;owned\x07 \x9b31m\r \x1b[2J \u202e"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_console_shows_control_characters(terminal: bool) -> None:
    table = Table("name")
    table.add_row(EVIL)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    console.print(f"[bold]{EVIL}[/]", table, EVIL, highlight=False)
    found = file.getvalue()
    own = re.compile("\x1b\\[(\\d+;?)*m")  # rich's colours
    assert bool(own.search(found)) == terminal
    assert not OBEYED.search(own.sub("", found))
    assert found.count("\\x1b]0;owned") == 3


def test_the_console_knows_no_emoji() -> None:
    file = io.StringIO()
    Console(file=file).print("cyclic:x:0.5 [bold]:smile:[/]")
    assert file.getvalue() == "cyclic:x:0.5 :smile:\n"


def test_a_progress_bar_still_moves() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with Progress(console=console) as progress:
        progress.advance(progress.add_task(EVIL, total=2))
    assert "\x1b[?25h" in file.getvalue()  # rich shows the cursor again
    assert "\x1b]0;" not in file.getvalue()


@pytest.mark.parametrize(
    "error",
    [
        FedShuffleError(f"column {EVIL} is bad"),
        TrainingError(EVIL, client=EVIL, round=1, stage="here"),
        DivergedError(EVIL, client=EVIL, round=1, stage="here"),
    ],
)
def test_errors_show_control_characters(error: FedShuffleError) -> None:
    assert not OBEYED.search(str(error))
    assert "\\x1b]0;owned" in str(error)


def test_names_from_data_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    people = tmp_path / "people"
    import_chunks(
        [(f"ann{EVIL}", {f"x{EVIL}": [1.0]})], people, origin={"left_out": [EVIL], "file": EVIL}
    )

    def said(*words: Any) -> str:
        monkeypatch.setattr("sys.argv", ["fedshuffle", *map(str, words)])
        with pytest.raises(SystemExit):
            cli.main()
        both = capsys.readouterr()
        return both.out + both.err

    shown = said("data", "show", people)
    assert "1 clients" in shown
    assert "owned" in shown
    assert not OBEYED.search(shown)
    assert not OBEYED.search(said("data", "show", people, "--json"))
    (tmp_path / "t.csv").write_text(f"who,x{EVIL}\n1,2\n".replace("\r", ""), encoding="utf-8")
    shown = said(
        "data",
        "import",
        tmp_path / "t.csv",
        "--out",
        tmp_path / "p",
        "--client",
        "w",
        "--label",
        "x",
    )
    assert "owned" in shown
    assert not OBEYED.search(shown)


def test_an_audit_of_clients_with_such_names(capsys: pytest.CaptureFixture[str]) -> None:
    from fedshuffle import audit
    from fedshuffle.auditing.result import print_audit

    federation = Federation.from_arrays([1.0, 2.0, 3.0], client_ids=["a", f"b{EVIL}", "a"])
    print_audit(Console(width=200), audit(federation, "fedavg", "full"))
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert not OBEYED.search(shown)


def test_every_console_is_of_this_kind() -> None:
    folder = Path(fedshuffle.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"\bConsole\(", text) and path.name != "_terminal.py":
            assert "from fedshuffle._terminal import Console" in text, path


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ends", [False, True])
def test_a_second_signal_does_not_interrupt_the_cleanup(
    usual_handlers: None, first: signal.Signals, ends: bool
) -> None:
    cleaned = False

    def work() -> None:
        nonlocal cleaned
        with interrupted_once(ends=ends), interrupted_once():
            try:
                signal.raise_signal(first)
            finally:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                cleaned = True

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned
    if ends:  # nor what follows
        signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) is not ends


def test_signals_that_the_program_handles_are_left_alone(usual_handlers: None) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with interrupted_once():
        signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]


def test_a_reader_that_stops_early_is_no_error() -> None:
    """As in ``fedshuffle audit ... | head -1``."""
    start = "from fedshuffle.cli import main; main()"
    program = [sys.executable, "-c", start, "audit", "--sizes", "1,2,3"]
    read, write = os.pipe()
    os.close(read)
    try:
        found = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (found.returncode, found.stderr) == (141, "")
