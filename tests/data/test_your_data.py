"""The page for a new user, followed to the letter: from a table to models and a report."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from fedshuffle import comparison

PAGE = Path(__file__).parents[2] / "docs" / "your-data.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def table(path: Path, rows: int, seed: int) -> None:
    """A table with the columns of the page's example."""
    (example,) = blocks("csv")
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(example.split("\n")[0].split(","))
        for _ in range(rows):
            age, pressure, sugar = rng.normal([55, 130, 5.5], [15, 18, 1.2]).round(1)
            hospital = rng.choice(["north", "south", "east", "west"], p=[0.1, 0.2, 0.6, 0.1])
            ill = (age - 55) / 15 + (pressure - 130) / 18 > 0
            writer.writerow([hospital, age, pressure, sugar, int(ill)])


@pytest.mark.slow
def test_the_page_leads_from_a_table_to_models_and_a_report(tmp_path: Path) -> None:
    table(tmp_path / "visits.csv", 240, seed=0)
    table(tmp_path / "held-out.csv", 60, seed=1)
    (network,) = blocks("python")
    (compare,) = blocks("toml")
    (tmp_path / "network.py").write_text(network)
    (tmp_path / "compare.toml").write_text(compare)
    lines = [line for block in blocks("console") for line in block.split("\n")]
    commands = [line[2:].split() for line in lines if line.startswith("$ fedshuffle")]
    assert len(commands) == 6
    winner = None
    for _, *words in commands:
        if "--resume" in words:  # which step size wins depends on the table
            (winner,) = tmp_path.glob("comparison/runs/fedshuffle_*_seed0")
            words[words.index("--resume") + 1] = str(winner)
        subprocess.run(
            [sys.executable, "-m", "fedshuffle.cli", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    # As the page message, a run that went on for more rounds is no trouble for its comparison.
    before = json.loads((tmp_path / "comparison" / "results.json").read_text())
    again = comparison.load(tmp_path / "compare.toml").run(jobs=1)
    assert again["curves"] == before["curves"]
    assert before["warnings"] == []  # standardised columns train at these step sizes
    assert "Who is ill" in (tmp_path / "comparison" / "report.html").read_text(encoding="utf-8")
    assert winner is not None
    assert load_file(winner / "model.safetensors")["2.weight"].shape == (2, 16)
    assert (winner / "metrics.jsonl").read_text().count("\n") == 100
