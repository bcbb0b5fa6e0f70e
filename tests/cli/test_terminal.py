"""Names from data cannot steer the terminal that they are printed to."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from rich.table import Table

import fedshuffle
from fedshuffle import Federation, FedShuffleError, cli
from fedshuffle._terminal import Console
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
    from fedshuffle.auditing.display import print_audit

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
