"""The table of characteristics: what running the methods gives, and why the paper differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshuffle.experiments import characteristics

PAGE = Path(__file__).parents[2] / "docs" / "characteristics.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("characteristics"),  # measured once for both
]


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, bool]]:
    return characteristics.measured()


def test_the_page_is_up_to_date(measured: dict[str, dict[str, bool]]) -> None:
    hint = "run python -m fedshuffle.experiments.characteristics > docs/characteristics.md"
    assert characteristics.page(measured) == PAGE.read_text(encoding="utf-8"), hint


def test_every_difference_from_the_paper_has_a_reason(measured: dict[str, dict[str, bool]]) -> None:
    assert set(characteristics.differences(measured)) == set(characteristics.REASONS)
