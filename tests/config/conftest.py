"""A folder with a config and a module."""

from pathlib import Path

import pytest

from tests.config.project import CONFIG, MODULE


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config and a module, as a user would have it."""
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "mine.py").write_text(MODULE)
    (folder / "config.toml").write_text(CONFIG)
    return folder
