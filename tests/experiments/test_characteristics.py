"""The table of characteristics: what running the methods gives, and why the paper differs."""

import re
from pathlib import Path

import pytest

from fedshuffle.experiments.characteristics import (
    CHARACTERISTICS,
    PAPER,
    differences,
    measured,
    table,
)

PAGE = (Path(__file__).parents[2] / "docs" / "research" / "characteristics.md").read_text(
    encoding="utf-8"
)


@pytest.mark.slow
@pytest.mark.xdist_group("characteristics")
def test_the_page_is_what_running_the_methods_gives() -> None:
    found = measured()
    hint = "copy what python -m fedshuffle.experiments.characteristics prints"
    assert f"\n{table(found)}\n" in PAGE, hint
    reasons = PAGE.split("## Where the paper differs")[1]
    explained = {
        (m, " ".join(c.split())) for m, c in re.findall(r"`([\w-]+)`, ([a-z\s]+)", reasons)
    }
    assert set(differences(found)) == explained


def test_every_characteristic_is_defined_on_the_page() -> None:
    defined = PAGE.split("## What is asked")[1].split("\n## ")[0]
    assert re.findall(r"\*\*(.+)\*\*", defined) == list(CHARACTERISTICS)
    assert all(len(marks) == len(CHARACTERISTICS) for marks in PAPER.values())
