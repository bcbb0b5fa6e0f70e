"""Every Python snippet with prompts of the README and the docs runs and prints what it says."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def needs_extras(page: Path) -> bool:
    wanted = r"^>>> (from (fedshuffle\.flower|flwr_datasets)|import (datasets|peft|polars))\b"
    return bool(re.search(wanted, page.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if needs_extras(page) else (), id=name(page))
        for page in PAGES
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_snippets(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # as one who reads them in a clone
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
