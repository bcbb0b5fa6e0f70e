"""The report that several tests read."""

import json
from pathlib import Path

import pytest

from fedshuffle.reports.comparison import write
from tests.reports.examples import whole


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty files, for tests that read texts alone: they take the most time."""
    for place in ("fedshuffle.reports.rendering", "fedshuffle.reports.comparison"):
        monkeypatch.setattr(f"{place}.encoded", lambda *_, **__: b"")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report is."""
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def written(folder: Path) -> list[Path]:
    """Its files."""
    return write(json.loads(json.dumps(whole())), folder)


@pytest.fixture(scope="session")
def page(written: list[Path]) -> Path:
    """Its page."""
    return written[-1]
