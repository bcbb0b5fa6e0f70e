"""What every page must do for people who use a keyboard, a screen reader, a phone or a dark screen.

The rules follow WCAG 2.2, level AA.
"""

from pathlib import Path

from tests.chromium import Browser

_ASK = Path(__file__).with_suffix(".js").read_text(encoding="utf-8").rstrip()


def problems(browser: Browser) -> list[str]:
    """What is wrong with the page that is open; nothing, it is hoped."""
    browser.run("document.querySelectorAll('details').forEach(details => details.open = true)")
    found: list[str] = browser.run(f"{_ASK}.problems()")
    return found + browser.complaints()


def unseen_focus(browser: Browser, most: int = 200) -> list[str]:
    """What can be reached with the tabulator key, but does not show that it was."""
    browser.run("document.activeElement.blur()")
    found = []
    for _ in range(most):
        browser.key("Tab")
        where = browser.run(f"{_ASK}.focus()")
        if where is None:  # through with the page
            break
        found += [where] if where else []
    return found
