"""The check of pages finds what it looks for."""

from pathlib import Path

import pytest

from tests.accessibility import problems, unseen_focus
from tests.chromium import Browser

BAD = """<!doctype html><title>bad</title>
<style>* { outline: 0 !important; } p { color: #999; background: #fff; }</style>
<h1>One</h1><h3>Three</h3><img src="data:,"><svg></svg><p>pale</p>
<table><tr><th>a</th></tr></table><input>
<div style="overflow-x: auto; width: 9px">wide</div>
<div style="width: 3000px">wider</div><script>throw new Error("lost")</script>
"""


@pytest.mark.xdist_group("comparison report")
def test_every_kind_of_problem_is_found(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(BAD, encoding="utf-8")
    browser.window(420, 800)
    browser.open(page)
    told = "\n".join(problems(browser))
    for what in (
        *("the page is 30", "jumps", "no alternative text", "no label: <svg", "no label: <input"),
        *("no caption", "th without scope", "not by keyboard", "contrast 2.85", "lost"),
    ):
        assert what in told, what
    assert any("<input" in node for node in unseen_focus(browser))
