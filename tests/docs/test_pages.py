"""The site as it is built: links, anchors, what it loads, and two clicks to an answer."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from fedshuffle import _links
from fedshuffle.theory.advice import SOURCES
from tests.docs.conftest import ROOT, Build
from tests.docs.html import Page

QUESTIONS = [  # a question, the page that answers it, and the heading there
    ("How do I cite it?", "citing", "Cite fedshuffle"),
    ("Where is the API reference?", "reference/index", "Reference"),
    ("How do I choose the sampling?", "how-to/sampling", "Choose the sampling"),
    ("What does step_size mean here?", "how-to/step-sizes", "What step_size means here"),
    ("Can I use Adam locally?", "faq", "Can I use Adam locally?"),
    ("How do I use one GPU?", "faq", "How do I use one GPU?"),
    ("How do I use it in my Flower project?", "tutorials/flower", "Make it yours"),
    ("How do I start with my own table?", "tutorials/your-table", "1. The tables"),
    ("How do I resume a run?", "how-to/resume", "Resume a run"),
    ("Which extras are there?", "install", "Extras"),
]


def local(link: str) -> bool:
    return not re.match(r"[a-z]+:|//", link)


def target(page: str, link: str) -> tuple[str, str]:
    """The page and the anchor that a link on a page leads to."""
    path, _, anchor = link.partition("#")
    whole = os.path.normpath(Path(page).parent / unquote(path)) if path else page
    return Path(whole).as_posix(), unquote(anchor)


def test_the_build_has_no_warnings(build: Build) -> None:
    assert build.run.returncode == 0, build.run.stderr


def test_every_link_leads_to_a_page_and_an_anchor(site: Path, pages: dict[str, Page]) -> None:
    broken = []
    for name, page in pages.items():
        for link in (*page.links, *page.loaded):
            if not local(link):
                continue
            place, anchor = target(name, link.partition("?")[0])
            found = pages.get(place)
            if not (site / place).exists() or (anchor and found and anchor not in found.ids):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_pages_load_nothing_from_other_hosts(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert [link for link in page.loaded if not local(link)] == [], name
    for sheet in site.rglob("*.css"):
        css = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import\s*)[\"']?(https?:)?//", css), sheet


@pytest.mark.parametrize(("question", "answer", "heading"), QUESTIONS)
def test_an_answer_is_two_clicks_away(
    pages: dict[str, Page], question: str, answer: str, heading: str
) -> None:
    def next_pages(name: str) -> set[str]:
        return {target(name, link)[0] for link in pages[name].links if local(link)} & pages.keys()

    first = next_pages("index.html")
    second = {page for name in first for page in next_pages(name)}
    assert f"{answer}.html" in first | second, question
    assert heading in pages[f"{answer}.html"].headings, question


def test_links_of_the_package_lead_to_the_site(pages: dict[str, Page]) -> None:
    """What commands, errors and templates print."""
    files = [file for file in (ROOT / "src").rglob("*.*") if file.name != "_links.py"]
    kinds = (".py", ".toml", ".md", ".html")
    texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in kinds]
    found = set()
    for text in [*texts, *(link for link, _ in SOURCES.values())]:
        calls = re.findall(r'\bpage\(\s*"([^"]+)"(?:,\s*"([^"]+)")?', text)
        plain = re.findall(re.escape(_links.SITE) + r"([\w/-]+)\.html(?:#([\w-]+))?", text)
        found |= {*calls, *plain}
    assert len(found) > 10
    for name, anchor in found:
        page = pages[f"{name}.html"]
        assert not anchor or anchor in page.ids, f"{name}#{anchor}"
