"""Updates in memory and on disk."""

from __future__ import annotations

from typing import Any

import pytest

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import update_buffer
from fedshuffle.flower.update_buffer import UpdateBuffer
from tests.flower.grid import LocalGrid
from tests.flower.helpers import apps, same, simulated, start, strategy

pytestmark = pytest.mark.usefixtures("server_process")


@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-mvr"])
def test_updates_on_disk_count_as_those_in_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_buffer, "MAX_BYTES", 43 * 4)  # one update
    result = strategy(method=name, sampling="full").start(LocalGrid(apps()), start(), 2)
    assert same(result.arrays, simulated(2, method=name, sampling="full"))


def test_full_disk_is_not_a_client_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise FedShuffleError("the disk is full")

    monkeypatch.setattr(UpdateBuffer, "__setitem__", full)
    with pytest.raises(FedShuffleError, match="full"):
        strategy(response_probability=0.9).start(LocalGrid(apps()), start(), 1)
