"""One Flower deployment for all tests of a process: it takes seconds to bring up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fedshuffle.flower.local import Deployment

CLIENTS = 3


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and three SuperNodes, up until the tests are done.

    A test that kills a node restarts it, and waits until all are online again.
    """
    from fedshuffle.flower.local import Deployment  # fast tests run without Flower

    with Deployment(CLIENTS, tmp_path_factory.mktemp("flower") / "deployment") as up:
        yield up
