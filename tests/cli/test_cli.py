"""The command line's words and JSON keys are a contract."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer

import fedshuffle
from fedshuffle import cli
from fedshuffle.errors import nearest_name


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


def test_audit_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
        (["audit", "--sizes", "1,2", "--sampling", "uniform:3"], "clients is 3"),
        (["audit", "--sizes", "1,2", "--sampling", "independent:0.5,2"], "client 1 has 2"),
        (["audit", "--sizes", "1,2", "--batch-size", "0"], "batch size is 0"),
        (["audit", "--sizes", "1,2", "--epochs", "x"], "--epochs is 'x'"),
        (["audit", "--sizes", "1,2", "--epochs", "0"], "epochs is 0"),
        (["audit", "--sizes", "1,2", "--epochs", "1,2,3"], "3 numbers for 2 clients"),
        (["audit", "--sizes", "1,2", "--weights", "1"], "each of the 2 clients"),
        (["audit", "--sizes", "1,2", "--momentum", "mvr:2"], "momentum"),
        (["audit", "--sizes", "1,2", "--method", "[/x]"], "unknown method '[/x]'"),
        (["audit", "--sizes", "[/b],2"], "entry 1 is '[/b]'"),
        (["audit", "--sizes", "1,2", "--epochs", "1..10000000000"], "most epochs is 10000000000"),
        (["audit", "--sizes", "3,2", "--epochs", "9223372036854775807"], "too many"),
        (["audit", "--sizes", "1,2", "--weights", "1e-300,1e300"], "too far apart"),
        (["audit", "--sizes", "4611686018427387904,4611686018427387904"], "2**52"),
        (["reproduce", "cubic", "--out", "x"], "unknown experiment 'cubic'"),
        (["reproduce", "quadratic", "--out", "x", "--rounds", "0"], "rounds"),
        (["demo", "--seed", "-1", "--out", "x"], "seed is -1"),
    ],
)
def test_mistakes_are_one_line(
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


@pytest.mark.parametrize(
    "command",
    [[Path(sys.executable).parent / "fedshuffle"], [sys.executable, "-m", "fedshuffle"]],
    ids=["installed", "module"],
)
def test_command(command: list[Any]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fedshuffle.__version__


def test_an_audit_needs_neither_torch_nor_matplotlib() -> None:
    """In a fresh interpreter, commands load without scipy, and an audit without these two."""
    code = """
import sys
import fedshuffle
import fedshuffle.cli
assert "scipy" not in sys.modules
fedshuffle.audit(fedshuffle.Federation.from_sizes([1, 2, 3]), "fedavg-rr", "uniform:2")
heavy = {"torch", "matplotlib", "sklearn"} & set(sys.modules)
assert not heavy, heavy
assert callable(fedshuffle.train) and "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["run"],
            [
                "A TOML file that describes a run.",
                "auto, sequential, vectorized or reference",
                "sequential:2",
            ],
        ),
        (["compare"], ["A TOML file of a run with a section compare."]),
        (["data", "show"], ["The folder of a store."]),
    ],
)
def test_help(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: list[str],
) -> None:
    assert run(monkeypatch, *words, "--help") == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in says)


# Hints ------------------------------------------------------------------------


def complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """What a command that is not understood says, in one line."""
    assert run(monkeypatch, *words) == 2
    return re.sub(r"[\s│╭╮╰╯─]+", " ", capsys.readouterr().err)


def every_command() -> list[list[str]]:
    """All commands, with those of the groups."""
    found: list[list[str]] = [[]]
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        found.append([name])
        if isinstance(command, click.Group):
            found += [[name, inner] for inner in command.commands]
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_command_has_the_short_option_h(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(monkeypatch, *words, "-h") == 0
    assert "Usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train", "config.toml"], "'run'"),
        (["rnu", "config.toml"], "'run'"),
        (["list"], "'methods'"),
        (["data", "download", "femnist"], "'get'"),
        (["audit", "--samplin", "full"], "--sampling"),
        (["audit", "--algorithm", "fedavg"], "--method"),
        (["run", "--lr", "0.1"], "--set step_size="),
        (["run", "--batch-size", "3"], "--set work.batch_size="),
        (["compare", "--learning-rate", "3"], "--set step_size="),
        (["audit", "--sizes", "1,2", "--method", "adam"], "'fedadam'"),
        (["audit", "--sizes", "1,2", "--sampling", "random:1"], "'uniform'"),
    ],
    ids=" ".join,
)
def test_hints_for_unknown_commands_options_and_names(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    meant: str,
) -> None:
    assert meant in complaint(monkeypatch, capsys, *words)


def test_errors_name_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The library's error is about its argument, ``rounds``."""
    words = ["reproduce", "quadratic", "--rounds", "0", "--out", str(tmp_path / "out")]
    assert "--rounds is 0" in complaint(monkeypatch, capsys, *words)
    said = complaint(monkeypatch, capsys, "audit", "--sizes", "1,2", "--batch-size", "0")
    assert "batch_size" not in said


@pytest.mark.parametrize(
    ("command", "file", "other"), [("run", "compare", "compare"), ("compare", "config", "run")]
)
def test_a_file_of_the_other_kind_names_its_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    file: str,
    other: str,
) -> None:
    example = Path(__file__).parents[2] / "examples" / "digits" / f"{file}.toml"
    said = complaint(monkeypatch, capsys, command, str(example), "--out", str(tmp_path / "out"))
    assert f"fedshuffle {other}" in said


def test_the_shell_completes_commands() -> None:
    command = Path(sys.executable).parent / "fedshuffle"
    asked = {"_FEDSHUFFLE_COMPLETE": "complete_bash", "COMP_WORDS": "fedshuffle com"}
    done = subprocess.run(
        [command], env={**os.environ, **asked, "COMP_CWORD": "1"}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["compare"]


def test_every_command_that_prints_a_table_has_json() -> None:
    """What prints no table: the callback, files to begin with, downloads, and a deployment."""
    without = [[], ["data"], ["data", "get"], ["flower"], ["flower", "up"], ["new"]]
    group = typer.main.get_command(cli.app)
    for words in every_command():
        command: click.Command = group
        for word in words:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        has = any("--json" in param.opts for param in command.params)
        assert has == (words not in without), words


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("mse", ["cross_entropy", "squared_error"], "squared_error"),
        ("BCE", ["cross_entropy", "squared_error"], "cross_entropy"),
        ("mse", ["accuracy", "loss"], "loss"),
        ("learning-rate", ["step_size", "seed"], "step_size"),
        ("roc_auc", ["accuracy", "auc"], "auc"),
        ("vmap", ["sequential", "vectorized", "reference"], "vectorized"),
        ("gpu", ["cpu", "cuda", "mps"], "cuda"),
        ("zzz", ["sequential"], None),
    ],
)
def test_synonyms_of_other_libraries(word: str, known: list[str], meant: str | None) -> None:
    assert nearest_name(word, known) == meant


def test_the_help_names_every_experiment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "reproduce", "cubic", "--out", "x") == 2
    known = re.findall(r"[\w-]+", capsys.readouterr().err.partition("Known:")[2])
    assert run(monkeypatch, "reproduce", "--help") == 0
    shown = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert len(known) > 8
    assert set(known) <= shown, known
