"""Settings for all tests, and which of them are slow by what they need."""

import os
import signal
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest

# Tests run side by side already: torch's own threads would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray's workers give way to all other processes: beside busy tests they would hardly start.
os.environ.setdefault("RAY_worker_niceness", "0")

# Fonts in a PDF take longer than its figure.
os.environ.setdefault("MATPLOTLIBRC", str(Path(__file__).parent / "tests" / "matplotlibrc"))

# Started in the background of a shell, all would ignore Ctrl-C, by which tests end what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings
from tests.chromium import browser  # noqa: F401  one for all files

# No test may depend on timing. In CI the examples are always the same; elsewhere they vary, so that
# fewer of them per run see as much over time.
derandomize = "CI" in os.environ
settings.register_profile("fedshuffle", deadline=None, derandomize=derandomize, max_examples=50)
settings.load_profile("fedshuffle")

# Fast tests run where Ray, Flower, Sphinx and datasets are not installed. These files import them,
# so they are slow as a whole, doctests included, and fast tests do not even open them.
_NEED_EXTRAS = (
    "src/fedshuffle/flower",
    "tests/docs",
    "tests/flower",
    "tests/data/test_huggingface*",
    "tests/engines/test_ray*",
)


@cache  # asked once for every test
def _needs_extras(path: Path) -> bool:
    here = Path(__file__).parent
    return any(
        place.is_relative_to(here) and place.relative_to(here).match(pattern)
        for place in (path, *path.parents)
        for pattern in _NEED_EXTRAS
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    fast = config.getoption("markexpr") == "not slow"
    return True if fast and _needs_extras(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    shown = "browser" in getattr(item, "fixturenames", ())
    if shown or _needs_extras(item.path):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that is skipped has failed, unless it needs data that no machine has to have."""
    report = yield
    excused = hasattr(report, "wasxfail") or "FEDSHUFFLE_DATA" in str(report.longrepr)
    if "CI" in os.environ and report.skipped and not excused:
        report.outcome = "failed"
    return report
