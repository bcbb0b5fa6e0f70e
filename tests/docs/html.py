"""What tests ask of a page: its headings, its anchors, where it leads and what it loads."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}


@dataclass
class Page:
    """One page of the site."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    text: str = ""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        if "id" in given:
            self.page.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "index"):
            self.page.loaded.append(given["href"])
        if tag in _LOADED and _LOADED[tag] in given:
            self.page.loaded.append(given[_LOADED[tag]])
        if tag in ("h1", "h2", "h3", "h4"):
            self._heading = True
            self.page.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h1", "h2", "h3", "h4"):
            self._heading = False

    def handle_data(self, data: str) -> None:
        self.page.text += data
        if self._heading:
            self.page.headings[-1] += data


def read(path: Path) -> Page:
    """The page in a file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.page.headings = [heading.strip("# \n") for heading in reader.page.headings]
    return reader.page
