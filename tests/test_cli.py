"""The command line's words and JSON keys are a contract."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshuffle
from fedshuffle import cli


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of ``fedshuffle WORDS``, in this process."""
    monkeypatch.setattr(sys, "argv", ["fedshuffle", *words])
    monkeypatch.setenv("COLUMNS", "100")
    interrupt = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    signal.signal(signal.SIGINT, interrupt)  # which an interrupted command ignores to its end
    code = stop.value.code
    assert isinstance(code, int)
    return code


def audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, Any]:
    assert run(monkeypatch, "audit", *words, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_audit_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sizes", "1,2,3", "--method", "fedshuffle-so", "--sampling", "uniform:2"]
    result = audit(monkeypatch, capsys, *words)
    np.testing.assert_allclose(result["effective_weights"], [7 / 36, 16 / 45, 9 / 20], rtol=1e-9)
    np.testing.assert_allclose(result["objective_weights"], [1 / 6, 1 / 3, 1 / 2])
    np.testing.assert_allclose(result["inclusion_probabilities"], 2 / 3)
    assert result["total_variation"] == pytest.approx(0.05)
    assert result["consistent"] is False
    assert result["exact"] is True


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--sampling", "full"], [1, 4, 9]),
        (["--sampling", "full", "--epochs", "7"], [1, 4, 9]),
        (["--sampling", "full", "--batch-size", "3"], [1, 2, 3]),
        (["--sampling", "full", "--epochs", "6,3,2"], [1, 2, 3]),
        (["--sampling", "full", "--epochs", "2..5"], [1, 4, 9]),
        (["--sampling", "full", "--weights", "1,1,1"], [1, 2, 3]),
        (["--sampling", "uniform:1"], [1, 2, 3]),
        (["--sampling", "one"], [1, 4, 9]),
        (["--sampling", "independent:1,1,1"], [1, 4, 9]),
        (["--sampling", "importance:3"], [1, 4, 9]),
        (["--sampling", "ais:3"], [1, 4, 9]),
        # With momentum a = 0.1, nine tenths of the direction are unbiased.
        (
            ["--sampling", "full", "--momentum", "global:0.1"],
            [0.1 * k / 14 + 0.9 * j / 6 for k, j in [(1, 1), (4, 2), (9, 3)]],
        ),
    ],
)
def test_audit_options(
    words: list[str],
    want: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = audit(monkeypatch, capsys, "--sizes", "1,2,3", "--method", "fedavg-rr", *words)
    have = np.array(result["effective_weights"])
    np.testing.assert_allclose(have, np.array(want) / np.sum(want), rtol=1e-9)


def test_sizes_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("1\n2\n\n3\n")
    result = audit(monkeypatch, capsys, "--sizes", f"@{sizes}", "--method", "fedavg-rr")
    np.testing.assert_allclose(result["effective_weights"], np.array([1, 4, 9]) / 14)
    sizes.write_text("1\ntwo\n")
    assert run(monkeypatch, "audit", "--sizes", f"@{sizes}") == 2
    assert "line 2 is 'two'" in capsys.readouterr().err


def test_the_table_for_a_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "audit", "--sizes", "1,2,3", "--method", "fedavg-rr") == 0
    text = capsys.readouterr().out
    for word in ["not consistent", "64.29%", "50.00%", "Fix:", "method fedshuffle", "exact"]:
        assert word in text
    assert run(monkeypatch, "audit", "--sizes", "1,2,3", "--method", "fedshuffle") == 0
    assert "it minimises the objective you meant" in capsys.readouterr().out
    many = ",".join(map(str, range(1, 101)))
    assert run(monkeypatch, "audit", "--sizes", many, "--sampling", "uniform:5") == 0
    assert "91 to 100" in capsys.readouterr().out


def test_methods(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "methods", "--json") == 0
    listed = {method["name"]: method for method in json.loads(capsys.readouterr().out)}
    assert listed["fedshuffle"]["consistent"] == {
        "uneven_steps": True,
        "client_sampling": True,
        "unfinished_work": False,
    }
    assert all(listed["fedshuffle-gen"]["consistent"].values())
    assert not any(listed["fedavg-rr"]["consistent"].values())
    assert run(monkeypatch, "methods") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in listed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "--sizes", "1,0"], "client 1 has 0"),
        (["audit", "--sizes", "1,x"], "entry 2 is 'x'"),
        (["audit", "--sizes", "@no-such-file"], "cannot read 'no-such-file'"),
        (["audit", "--sizes", "1,2", "--method", "fedvag"], "Did you mean 'fedavg'"),
        (["audit", "--sizes", "1,2", "--sampling", "uniform:3"], "cannot take 3 of 2"),
        (["audit", "--sizes", "1,2", "--sampling", "independent:0.5,2"], "outside"),
        (["audit", "--sizes", "1,2", "--batch-size", "0"], "batch size is 0"),
        (["audit", "--sizes", "1,2", "--epochs", "x"], "--epochs: cannot read 'x'"),
        (["audit", "--sizes", "1,2", "--epochs", "0"], "epochs is 0"),
        (["audit", "--sizes", "1,2", "--epochs", "1,2,3"], "3 numbers for 2 clients"),
        (["audit", "--sizes", "1,2", "--weights", "1"], "each of the 2 clients"),
        (["audit", "--sizes", "1,2", "--momentum", "mvr:2"], "outside"),
        (["audit", "--sizes", "1,2", "--method", "[/x]"], "unknown method '[/x]'"),
        (["audit", "--sizes", "[/b],2"], "entry 1 is '[/b]'"),
        (["audit", "--sizes", "1,2", "--epochs", "1..10000000000"], "too wide"),
        (["audit", "--sizes", "3,2", "--epochs", "9223372036854775807"], "too many"),
        (["audit", "--sizes", "1,2", "--weights", "1e-300,1e300"], "too far apart"),
        (["audit", "--sizes", "4611686018427387904,4611686018427387904"], "2**52"),
        (["reproduce", "cubic", "--out", "x"], "unknown experiment 'cubic'"),
        (["reproduce", "quadratic", "--out", "x", "--rounds", "0"], "rounds"),
        (["demo", "--seed", "-1", "--out", "x"], "seed -1"),
    ],
)
def test_mistakes_get_one_clear_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not list(tmp_path.iterdir())  # refused before any work


def test_the_installed_command_and_its_version() -> None:
    command = Path(sys.executable).parent / "fedshuffle"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fedshuffle.__version__


def test_an_audit_needs_neither_torch_nor_matplotlib() -> None:
    """In a fresh interpreter, importing the package and auditing must not touch them."""
    code = """
import sys
import fedshuffle
fedshuffle.audit(fedshuffle.Federation.from_sizes([1, 2, 3]), "fedavg-rr", "uniform:2")
import fedshuffle.cli
heavy = {"torch", "matplotlib", "sklearn"} & set(sys.modules)
assert not heavy, heavy
assert callable(fedshuffle.train) and "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], ["A TOML file that describes a run.", "auto, lean, lanes or loop", "lean:2"]),
        (["compare"], ["A TOML file of a run with a section [compare]."]),
        (["data", "show"], ["The folder of a store."]),
    ],
)
def test_help_says_what_the_words_mean(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: list[str],
) -> None:
    assert run(monkeypatch, *words, "--help") == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in says)
