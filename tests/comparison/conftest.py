"""One comparison for all tests."""

from pathlib import Path

import pytest

from fedshuffle import comparison
from fedshuffle.comparison.results import Results
from tests.comparison.project import project


@pytest.fixture(scope="package")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """A comparison that was not interrupted."""
    file = project(tmp_path_factory.mktemp("done"))
    results = comparison.load(file).run(jobs=2)
    return file.parent / "out", results
