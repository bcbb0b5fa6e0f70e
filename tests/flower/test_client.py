"""The client: unfinished work, withheld sizes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshuffle import Federation, losses
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import Client, FedShuffleStrategy, protocol
from fedshuffle.flower import client as client_module
from fedshuffle.local_work import AtMost
from fedshuffle.training.run_folder import RunFolder
from tests.flower.grid import LocalGrid
from tests.flower.helpers import (
    FEDERATION,
    SIZES,
    WORK,
    apps,
    model,
    own,
    same,
    simulated,
    start,
    strategy,
    warnings,
)

pytestmark = pytest.mark.usefixtures("server_process")


class _Ticks:
    """A clock that advances by one with every call."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    def sleep(self, seconds: float) -> None: ...


@pytest.mark.parametrize("name", ["fedshuffle-gen", "fednova", "fedshuffle-mvr+fedshuffle-gen"])
def test_unfinished_work_counts_by_steps_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "time", _Ticks())
    # The first look starts the clock; a look before each further step: three steps in three ticks.
    grid = LocalGrid(apps(seconds=3))
    result = strategy(method=name).start(grid, start(), 3)
    work = replace(WORK, interruption=AtMost(3))
    assert same(result.arrays, simulated(3, method=name, work=work))


def test_unfinished_work_without_correction_is_called_biased(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_module, "time", _Ticks())
    strategy(out=tmp_path / "run").start(LocalGrid(apps(seconds=3)), start(), 1)
    assert "fedshuffle-gen" in warnings(log)
    assert not RunFolder(tmp_path / "run").metrics()[0]["follows_dropout_model"]


def test_withheld_sizes_train_the_same_model() -> None:
    """Clients scale their steps themselves, as FedShuffle for equal objective weights."""
    grid = LocalGrid(apps(share_size=False))
    ours = strategy(sizes="withheld", step_size=0.3)
    result = ours.start(grid, start(), 3)
    equal = Federation.from_arrays(*FEDERATION.fields, sizes=SIZES, weights=[1, 1, 1, 1])
    expected = simulated(3, equal, step_size=0.3 / 6)  # the longest has six steps an epoch
    found = result.arrays.to_torch_state_dict()
    for name, value in expected.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_withheld_sizes_are_in_no_message() -> None:
    seen: list[dict[str, Any]] = []
    client = Client(1, model(), own(1), losses.cross_entropy, share_size=False, seconds=1e-9)

    def spy(message: Message, context: Context) -> Message:
        reply = client.handle(message)
        for record in (message, reply):
            if fields := record.content.config_records.get("fedshuffle"):
                seen.append(json.loads(fields["payload"]))
        return reply

    app = ClientApp()
    app.query("info")(spy)
    app.train()(spy)
    FedShuffleStrategy(2, sizes="withheld", work=WORK).start(
        LocalGrid([apps(share_size=False)[0], app]), start(), 1
    )
    assert len(seen) == 3  # the first query has no fields
    assert all(fields.get("size") is None for fields in seen)
    # Epochs, not steps: 2 of them, though the client stopped after the first step.
    assert [fields["steps"] for fields in seen if "steps" in fields] == [2, 2]


def test_client_of_withheld_size_corrects_unfinished_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "time", _Ticks())
    grid = LocalGrid(apps(share_size=False, seconds=3))
    result = strategy(sizes="withheld", step_size=0.3).start(grid, start(), 2)
    equal = Federation.from_arrays(*FEDERATION.fields, sizes=SIZES, weights=[1, 1, 1, 1])
    work = replace(WORK, interruption=AtMost(3))
    expected = simulated(2, equal, step_size=0.05, work=work, method="fedshuffle-gen")
    found = result.arrays.to_torch_state_dict()
    for name, value in expected.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_withheld_size_cannot_be_guessed(log: pytest.LogCaptureFixture) -> None:
    ours = strategy(sampling="full", sizes=[3, 8, 12, 5], response_probability=0.9)
    ours.start(LocalGrid(apps(share_size=False)), start(), 1)
    assert "client 1 withholds its size" in warnings(log)
    assert "7 examples" not in warnings(log)


def test_withheld_sizes_cannot_be_asked() -> None:
    with pytest.raises(FedShuffleError, match="client 0"):
        strategy().start(LocalGrid(apps(share_size=False)), start(), 1)


def test_client_refuses_messages_for_others() -> None:
    client = Client(1, model(), own(1), losses.cross_entropy)
    question = protocol.Query(2, 0)
    x = protocol.arrays(points=torch.zeros(1, 43))
    with pytest.raises(FedShuffleError, match="client 2"):
        client.handle(Message(protocol.content(question, x), 1, protocol.FULL_GRADIENT))
    with pytest.raises(FedShuffleError, match=r"train\.other"):
        client.handle(Message(RecordDict({}), 1, "train.other"))
    with pytest.raises(FedShuffleError, match="client_app needs FedShuffleStrategy"):
        client.handle(Message(RecordDict({}), 1, protocol.TRAIN))


def test_changed_data_are_refused(log: pytest.LogCaptureFixture) -> None:
    ours = strategy(sampling="full", sizes=[3, 8, 12, 5], response_probability=0.9)
    ours.start(LocalGrid(apps()), start(), 1)
    assert "client 1 has 7 examples" in warnings(log)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"number": -1}, "-1"),
        ({"seconds": 0}, "seconds"),
        ({"data": ()}, "at least 1"),
        ({"data": FEDERATION}, "not a federation"),
    ],
)
def test_invalid_client_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"number": 0, "data": own(0)} | options
    with pytest.raises(FedShuffleError, match=said):
        Client(given.pop("number"), model(), given.pop("data"), losses.cross_entropy, **given)


def test_node_without_partition_id_is_refused() -> None:
    app = apps()[0]
    context = Context(1, 1, {}, RecordDict({}), {})
    with pytest.raises(FedShuffleError, match="partition-id"):
        app(Message(RecordDict({}), 1, protocol.INFO), context)


@pytest.mark.parametrize("method", ["fedshuffle", "fedlin", "fedshuffle-mvr", "mime"])
def test_transforms_of_examples_draw_as_in_a_simulation(method: str) -> None:
    """Also for the full gradients that some methods ask for."""

    def noisy(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.rand_like(x), y

    result = strategy(method=method).start(LocalGrid(apps(transform=noisy)), start(), 2)
    augmented = FEDERATION.with_transform(noisy)
    assert same(result.arrays, simulated(2, augmented, method=method))
    assert not same(result.arrays, simulated(2, method=method))
