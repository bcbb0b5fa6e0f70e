"""Messages to clients that fail, are silent or disconnect."""

from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from fedshuffle import LocalWork, losses
from fedshuffle.flower import FedShuffleStrategy, client_app, protocol
from fedshuffle.training.run_folder import RunFolder
from tests.flower.grid import LocalGrid
from tests.flower.helpers import (
    apps,
    model,
    own,
    same,
    simulated,
    start,
    strategy,
    trains,
    when_training,
)

pytestmark = pytest.mark.usefixtures("server_process")


def test_few_replies_are_in_memory_at_a_time() -> None:
    n = 50

    def one(context: Context) -> tuple[Tensor, ...]:
        return own(int(context.node_config["partition-id"]) % 4)

    grid = LocalGrid([client_app(model, one, losses.cross_entropy)] * n)
    FedShuffleStrategy(n, work=LocalWork(batch_size=8)).start(grid, start(), 1)
    assert 0 < grid.most_in_hand <= 16


def test_retries_give_the_same_model() -> None:
    failed: set[tuple[int, str, str]] = set()

    def once(client: int, message: Message) -> str | None:
        key = (client, message.metadata.message_type, message.metadata.group_id)
        if key in failed or message.metadata.message_type == protocol.INFO:
            return None
        failed.add(key)
        return "raises" if client % 2 else "gone"

    grid = LocalGrid(apps(), once)
    result = strategy(method="fedshuffle-mvr", retries=1).start(grid, start(), 3)
    assert same(result.arrays, simulated(3, method="fedshuffle-mvr"))
    assert len(failed) == 3 * 2 * 2


def test_silent_client_is_missing_after_the_timeout(tmp_path: Path) -> None:
    grid = LocalGrid(apps(), when_training("silent", 0))
    ours = strategy(sampling="full", out=tmp_path / "run", response_probability=0.9)
    ours.start(grid, start(), 1, timeout=0.3)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert record["missing"] == {"0": "did not reply within 0.3 seconds"}


def test_disconnected_client_takes_part_when_it_is_back(tmp_path: Path) -> None:
    grid = LocalGrid(apps())

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {3} if round == 1 else set()

    ours = strategy(sampling="full", out=tmp_path / "run")
    ours.start(grid, start(), 3, evaluate_fn=evaluate)
    records = RunFolder(tmp_path / "run").metrics()
    assert [record["missing"] for record in records] == [{}, {"3": "is not connected"}, {}]


def test_refused_messages_are_recorded(tmp_path: Path) -> None:
    def fault(client: int, message: Message) -> str | None:
        return "refused" if trains(message) and client in (0, 2) else None

    grid = LocalGrid(apps(), fault)
    strategy(sampling="full", out=tmp_path / "run").start(grid, start(), 1)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert set(record["missing"]) == {"0", "2"}
    assert "the SuperLink refused the message" in record["missing"]["0"]
    assert not record["follows_dropout_model"]


def test_second_reply_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = LocalGrid(apps())
    pulled = grid.pull_messages
    monkeypatch.setattr(grid, "pull_messages", lambda ids: 2 * pulled(ids))
    assert same(strategy().start(grid, start(), 2).arrays, simulated(2))
