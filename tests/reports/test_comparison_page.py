"""The page of a comparison in a real browser."""

import re
from pathlib import Path

import pytest

from tests.chromium import Browser
from tests.reports.examples import EVIL

pytestmark = pytest.mark.xdist_group("comparison report")  # what they share is made once


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.window(1200, 900)
    browser.open(page)
    return browser


def drawn(browser: Browser, where: str = "#chart") -> list[str]:
    """The methods whose curves are to be seen."""
    found = browser.run(
        f"[...document.querySelectorAll('{where} [data-method]')].map(g => g.dataset.method)"
    )
    return sorted(found)


def shown(browser: Browser) -> list[str]:
    """The values beside the names of the methods."""
    found: list[str] = browser.run(
        "[...document.querySelectorAll('.method output')].map(o => o.innerText)"
    )
    return found


METHODS = sorted(["fedavg", "fedshuffle", f"mine,{EVIL}"])


def test_the_page_works_without_network_or_errors(opened: Browser, page: Path) -> None:
    assert drawn(opened) == drawn(opened, "#weights") == METHODS
    assert opened.run("document.title") == f"Everything {EVIL}"  # not owned
    asked = opened.requests()
    assert asked[0] == page.as_uri()
    assert all(address.startswith("data:") for address in asked[1:])
    assert opened.complaints() == []
    assert opened.run("getComputedStyle(document.querySelector('.static')).display") == "none"


def test_final_values_equal_those_of_the_table(opened: Browser) -> None:
    mean = 0.4 * (1 - 0.8**20) + 0.015
    assert shown(opened)[1].split()[0] == f"{100 * mean:.2f}%"
    cells = opened.run("[...document.querySelectorAll('tbody tr')][1].innerText")
    assert f"{100 * mean:.2f}" in cells


@pytest.mark.parametrize(
    ("fragment", "methods"),
    [
        ("#methods=fedshuffle&momentum=none", ["fedshuffle"]),
        ("#methods=fedshuffle,fedavg&group=common:0.1", ["fedavg", "fedshuffle"]),
        ("#methods=", []),
        ("#methods=%zz&metric=no&group=%00&momentum=&scale=log", []),
        ("#metric=training_loss&momentum=global%3A0.1", METHODS),
    ],
)
def test_the_address_selects_what_is_shown(
    browser: Browser, page: Path, fragment: str, methods: list[str]
) -> None:
    browser.open(page, fragment)
    assert drawn(browser) == drawn(browser, "#weights") == methods
    assert browser.complaints() == []
    title = "train loss" if "training_loss" in fragment else "test accuracy"
    assert title in browser.run("document.getElementById('chart').textContent")
    crosses = browser.run("document.querySelectorAll('#chart .cross').length")
    assert crosses == ("global" in fragment)


def test_a_click_hides_a_method_and_updates_the_address(opened: Browser, page: Path) -> None:
    place = opened.run(
        "(() => { const box = document.querySelector('input[value=fedavg]');"
        " box.scrollIntoView({block: 'center'}); const at = box.getBoundingClientRect();"
        " return [at.x + at.width / 2, at.y + at.height / 2]; })()"
    )
    opened.mouse("mousePressed", *place)
    opened.mouse("mouseReleased", *place)
    rest = [name for name in METHODS if name != "fedavg"]
    assert drawn(opened) == drawn(opened, "#weights") == rest
    opened.open(page, opened.run("location.hash"))
    assert drawn(opened) == rest
    opened.run("document.querySelector('button[data-all=no]').click()")
    assert drawn(opened) == []
    assert "No method is chosen." in opened.run("document.getElementById('chart').textContent")
    opened.open(page, opened.run("location.hash"))
    assert drawn(opened) == []
    opened.run("document.querySelector('button[data-all=yes]').click()")
    assert drawn(opened) == METHODS


def test_the_page_works_by_keyboard(opened: Browser) -> None:
    reached = []
    for _ in range(12):
        opened.key("Tab")
        reached.append(opened.run("document.activeElement.id || document.activeElement.name"))
        if reached[-1] == "chart":
            break
    assert reached == ["group", "momentum", "metric", "x", "scale", "chart"]
    opened.key("Home")
    assert opened.run("document.getElementById('round').textContent") == "at round 1"
    opened.key("ArrowRight")
    assert opened.run("document.getElementById('round').textContent") == "at round 2"
    at_two = 0.4 * (1 - 0.8**2) + 0.015
    assert shown(opened)[1].split()[0] == f"{100 * at_two:.2f}%"
    spoken = opened.run("document.getElementById('chart').getAttribute('aria-valuetext')")
    assert spoken.startswith("round 2: FedAvg ")
    for _ in range(3):  # two buttons and then the first method
        opened.key("Tab")
    opened.key(" ")
    assert drawn(opened) == [name for name in METHODS if name != "fedavg"]


def test_pointing_shows_the_values_of_a_round(opened: Browser) -> None:
    left, top, width, height = opened.run(
        "(() => { const chart = document.getElementById('chart');"
        " chart.scrollIntoView({block: 'center'}); const at = chart.getBoundingClientRect();"
        " return [at.left, at.top, at.width, at.height]; })()"
    )
    opened.mouse("mouseMoved", left + width / 2, top + height / 2)
    text = opened.run("document.getElementById('round').textContent")
    assert 5 < int(text.removeprefix("at round ")) < 15
    assert opened.run("document.querySelectorAll('#chart .pointer .marker').length") == 3
    opened.mouse("mouseMoved", 2, 2)
    assert opened.run("document.getElementById('round').textContent") == "at round 20"


def test_curves_over_local_steps(browser: Browser, page: Path) -> None:
    """Five steps per round with seed 1, ten with seed 2: 7.5 on average, 8 when rounded."""
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.window(1200, 900)
    browser.open(page, "#x=steps&metric=training_loss")
    assert browser.complaints() == []
    drawing = "document.getElementById('chart')"
    assert "local steps of all clients" in browser.run(f"{drawing}.textContent")
    assert browser.run("document.getElementById('round').textContent") == "at the end"
    browser.run(f"{drawing}.focus()")
    browser.key("Home")
    assert browser.run("document.getElementById('round').textContent") == "at 8 local steps"
    spoken = browser.run(f"{drawing}.getAttribute('aria-valuetext')")
    assert spoken.startswith("8 local steps: FedAvg ")
    assert browser.run("document.querySelectorAll('#chart .pointer .marker').length") == 3
    assert "x=steps" in browser.run("location.hash")
    browser.run("document.querySelector('input[name=x][value=rounds]').click()")
    assert "x=steps" not in browser.run("location.hash")
    assert browser.run("document.getElementById('round').textContent") in (
        "at round 20",
        "at round 8",
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.window(360, 740, dark=dark, phone=True)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth <= 360")
    assert browser.run("document.getElementById('chart').getBoundingClientRect().right <= 360")
    ground = browser.run("getComputedStyle(document.querySelector('main')).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 150) is dark


def test_without_scripts_figures_and_tables_are_shown(browser: Browser, page: Path) -> None:
    browser.window(1000, 900)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    widths = browser.run("[...document.querySelectorAll('.static img')].map(i => i.clientWidth)")
    assert len(widths) == 3
    assert min(widths) > 500
    assert browser.run("document.querySelectorAll('tbody tr').length") > 6
    assert browser.run("document.getElementById('controls').clientHeight") == 0
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
