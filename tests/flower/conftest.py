"""Fixtures of the tests of Flower."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fedshuffle.auditing.adapters.flower import _identity


@pytest.fixture
def server_process() -> Iterator[None]:
    with _identity():
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("flwr")  # it does not propagate by itself
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
