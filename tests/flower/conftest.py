"""Fixtures of the tests of Flower."""

import logging
from collections.abc import Iterator

import pytest

from fedshuffle.auditing.adapters import ensure_identity
from tests.flower.deployment import deployment  # noqa: F401  where it is asked for


@pytest.fixture
def server_process() -> None:
    ensure_identity()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("flwr")  # it does not propagate by itself
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
