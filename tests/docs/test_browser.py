"""The site in a browser: narrow, dark, searched; and no page complains."""

import json
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.chromium import Browser
from tests.docs.html import Page


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site behind a server of this machine: from a file, search cannot read its index."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def show(browser: Browser, page: str, width: int = 1200, *, dark: bool = False) -> None:
    browser.call("Page.navigate", url="about:blank")  # no page sees its window change
    browser.window(width, 900, dark=dark, phone=width < 600)
    browser.open(page)


def test_no_page_scrolls_sideways_or_complains(
    browser: Browser, address: str, pages: dict[str, Page]
) -> None:
    for page in pages:
        show(browser, f"{address}/{page}", 420)
        wide = browser.run("document.documentElement.scrollWidth")
        assert wide <= 420, f"{page} is {wide} pixels wide"
        assert browser.complaints() == [], page
        others = [url for url in browser.requests() if not url.startswith((address, "data:"))]
        assert others == [], page


def test_dark_is_dark_and_pictures_stay_readable(browser: Browser, address: str) -> None:
    colour = "getComputedStyle(document.{}).backgroundColor"
    for dark in (False, True):
        show(browser, f"{address}/explanation/methods/fedshuffle.html", dark=dark)
        body = browser.run(colour.format("body"))
        brightness = sum(map(int, body.removeprefix("rgb(").removesuffix(")").split(",")))
        assert brightness < 150 if dark else brightness > 600
    picture = browser.run(colour.format("querySelector('article img')"))
    assert picture == "rgb(255, 255, 255)"


def test_the_switch_changes_the_mode(browser: Browser, address: str) -> None:
    show(browser, f"{address}/index.html")
    for mode in ("dark", "light"):
        browser.run(f"document.querySelector('.theme-change-button[data-mode={mode}]').click()")
        assert browser.run("document.documentElement.dataset.theme") == mode
    browser.run("localStorage.clear()")


def search(browser: Browser, address: str, words: str) -> list[str]:
    """The addresses that the search page shows once it has ended, best first."""
    show(browser, f"{address}/search.html?q={words.replace(' ', '+')}")
    query = "[...document.querySelectorAll('#search-results ul.search > li > a')].map(a => a.href)"
    end = time.monotonic() + 60
    while not browser.run(
        "/found|match/.test(document.querySelector('.search-summary')?.innerText)"
    ):
        assert time.monotonic() < end, f"no end of the search for {words}"
        time.sleep(0.1)
    found: list[str] = json.loads(browser.run(f"JSON.stringify({query})"))
    return found


@pytest.mark.parametrize("words", ["inclusion probability", "step_size", "audit_server"])
def test_search_finds(browser: Browser, address: str, words: str) -> None:
    found = search(browser, address, words)
    assert any("/reference/" in link for link in found)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("adam", "faq"),
        ("adam", "explanation/methods/adaptive"),
        ("gpu", "how-to/engines"),
        ("csv", "how-to/import-data"),
        ("resume", "how-to/resume"),
        ("cite", "citing"),
        ("step size", "how-to/step-sizes"),
    ],
)
def test_search_shows_the_page_among_the_first(
    browser: Browser, address: str, words: str, page: str
) -> None:
    first = search(browser, address, words)[:3]
    assert any(f"/{page}.html" in link for link in first), first
