"""The commands of the tutorials, one after the other, print what the pages show."""

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedshuffle import comparison

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "tutorials"


def blocks(page: str, kind: str) -> list[str]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page, each with the output that the page shows."""
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            found.append((line, output))
    return found


def words(text: str) -> str:
    """A text on one line, without what depends on the terminal or the machine's rounding."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours
    text = re.sub(r"\d+\.\d+ ± \d+\.\d+", "mean ± deviation", text)
    return " ".join(text.split()) + "\n"


def follow(page: str, folder: Path) -> None:
    """Run the commands of a page in a folder; what is shown must be printed ("..." is anything)."""
    for line, shown in commands(page):
        program, *rest = line.split(" ", 1)
        assert program == "fedshuffle", line
        done = subprocess.run(
            [f"{sys.executable} -m fedshuffle {rest[0]}"],
            shell=True,
            cwd=folder,
            env=os.environ | {"COLUMNS": "80"},
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        printed = words(done.stdout)
        if shown:
            same = doctest.OutputChecker().check_output(words(shown), printed, doctest.ELLIPSIS)
            assert same, f"{line}\nshown: {words(shown)}\nprinted: {printed}"


def test_every_tutorial_with_commands_is_followed_here() -> None:
    pages = {page.name for page in PAGES.glob("*.md") if commands(page.name)}
    assert pages == {"first-audit.md", "your-table.md", "compare.md", "flower.md"}


def test_first_audit(tmp_path: Path) -> None:
    follow("first-audit.md", tmp_path)


@pytest.mark.slow
def test_your_table(tmp_path: Path) -> None:
    tables, network = blocks("your-table.md", "python")
    (settings,) = blocks("your-table.md", "toml")
    (tmp_path / "make_tables.py").write_text(tables)
    (tmp_path / "network.py").write_text(network)
    (tmp_path / "compare.toml").write_text(settings)
    subprocess.run([sys.executable, "make_tables.py"], cwd=tmp_path, check=True)
    (example,) = blocks("your-table.md", "csv")
    assert (tmp_path / "visits.csv").read_text().startswith(example)
    follow("your-table.md", tmp_path)
    # A run that was resumed for more rounds does not change its comparison.
    before = json.loads((tmp_path / "comparison" / "results.json").read_text())
    again = comparison.load(tmp_path / "compare.toml").run(jobs=1)
    for curve in (*again["curves"], *before["curves"]):
        for run in curve["runs"]:
            del run["small_decile"]  # unknown for the run that has gone on
    assert again["curves"] == before["curves"]
    assert before["warnings"] == []  # standardised columns train at these step sizes
    assert "Who is ill" in (tmp_path / "comparison" / "report.html").read_text(encoding="utf-8")
    longer = tmp_path / "comparison" / "runs" / "fedshuffle_step0.01_seed0"
    assert load_file(longer / "model.safetensors")["2.weight"].shape == (2, 16)
    assert (longer / "metrics.jsonl").read_text().count("\n") == 100


@pytest.mark.slow
def test_compare(tmp_path: Path) -> None:
    files = ROOT / "examples" / "digits"
    for name in ("compare.toml", "config.toml", "digits.py"):
        shutil.copy(files / name, tmp_path)
    (section,) = blocks("compare.md", "toml")
    assert section in (files / "compare.toml").read_text(encoding="utf-8")
    follow("compare.md", tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("flower")  # two deployments at a time would slow each other down
def test_flower(tmp_path: Path) -> None:
    follow("flower.md", tmp_path)
    model = load_file(tmp_path / "out" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    assert shapes == {"0.weight": (32, 64), "0.bias": (32,), "2.weight": (10, 32), "2.bias": (10,)}
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]  # three, then resumed
