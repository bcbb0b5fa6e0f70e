"""Small pieces of HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, all of them escaped; every column but the first is aligned to the right.

    >>> table(["client", "loss"], [["<a>", "0.5"]])
    '<table><thead><tr><th style="text-align:left">client</th><th>loss</th></tr></thead>\
<tbody><tr><td style="text-align:left">&lt;a&gt;</td><td>0.5</td></tr></tbody></table>'
    """
    head = _row("th", columns)
    body = "".join(_row("td", row) for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    """A paragraph of escaped text."""
    return f"<p>{escape(text)}</p>"


def _row(tag: str, texts: Sequence[str]) -> str:
    style = ' style="text-align:left"'
    cells = (f"<{tag}{'' if k else style}>{escape(t)}</{tag}>" for k, t in enumerate(texts))
    return f"<tr>{''.join(cells)}</tr>"
