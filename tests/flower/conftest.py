"""Fixtures of the tests of Flower."""

import logging
from collections.abc import Iterator

import pytest

from fedshuffle.auditing.adapters import ensure_identity
from tests.flower.deployment import deployment  # noqa: F401  where it is asked for

# Apps hold no tests. Collected, their modules would stand in sys.modules, and a test that imports a
# changed copy of an app would get the unchanged one.
collect_ignore = ["app", "quickstart"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients without a network have replied when they are asked, or never do."""
    for module in ("asynchronous", "exchange", "secure_aggregation", "stragglers"):
        monkeypatch.setattr(f"fedshuffle.flower.{module}.POLL_SECONDS", 0.0)
    monkeypatch.setattr("fedshuffle.flower.client_registry._PAUSE", 0.0)


@pytest.fixture
def server_process() -> None:
    ensure_identity()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("flwr")  # it does not propagate by itself
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
