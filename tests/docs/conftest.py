"""One build of the site for all tests."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.html import Page, read

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("site"))


class Build(NamedTuple):
    """A built site."""

    folder: Path
    run: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The site as ``make docs`` builds it: a warning is an error."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    command = re.search(r"-m (sphinx .*) docs out/", makefile)
    assert command is not None, "make docs does not run sphinx"
    out = tmp_path_factory.mktemp("site") / "html"
    words = [sys.executable, "-m", *command[1].split(), "docs", str(out)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return Build(out, run)


@pytest.fixture(scope="session")
def site(build: Build) -> Path:
    """The folder of the built site."""
    return build.folder


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, Page]:
    """All pages by their paths in the site."""
    found = {page.relative_to(site): page for page in site.rglob("*.html")}
    return {
        name.as_posix(): read(page) for name, page in found.items() if name.parts[0] != "_static"
    }
