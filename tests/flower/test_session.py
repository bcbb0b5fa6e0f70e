"""Rounds with missing clients and invalid replies, and evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedshuffle import losses
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import Client, protocol
from fedshuffle.sampling import Uniform
from fedshuffle.training.run_folder import RunFolder
from tests.flower.grid import LocalGrid
from tests.flower.helpers import (
    FEDERATION,
    SIZES,
    apps,
    change,
    model,
    own,
    same,
    start,
    strategy,
    trains,
    warnings,
    when_training,
)

pytestmark = pytest.mark.usefixtures("server_process")


def test_failed_client_is_named_and_the_round_called_biased(
    log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fault(client: int, message: Message) -> str | None:
        second = message.metadata.group_id == "2"
        return "raises" if client == 2 and second else None

    grid = LocalGrid(apps(), fault)
    strategy(sampling="full", out=tmp_path / "run").start(grid, start(), 3)
    _, second, third = RunFolder(tmp_path / "run").metrics()
    assert second["missing"] == {"2": "failed: the client failed (Flower's error 2)"}
    assert (second["clients"], second["replied"], second["follows_dropout_model"]) == (4, 3, False)
    assert (third["replied"], third["follows_dropout_model"]) == (4, True)
    assert "client 2 failed" in warnings(log)
    assert "Round 2 is biased" in warnings(log)


@pytest.mark.parametrize("record_cohorts", [True, False])
def test_records_list_the_cohort_on_request(tmp_path: Path, record_cohorts: bool) -> None:
    ours = strategy(out=tmp_path / "run", record_cohorts=record_cohorts)
    ours.start(LocalGrid(apps()), start(), 2)
    for round, record in enumerate(RunFolder(tmp_path / "run").metrics()):
        drawn = Uniform(4, 2).draw(ours.seed, round).tolist()
        assert record.get("cohort") == (drawn if record_cohorts else None)


def test_dropout_of_the_model_is_not_called_biased(
    log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    grid = LocalGrid(apps(), when_training("gone", 1))
    strategy(sampling="full", response_probability=0.75, out=tmp_path / "run").start(
        grid, start(), 1
    )
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert record["missing"]["1"].startswith("failed: node unavailable")
    assert record["follows_dropout_model"]
    assert "biased" not in warnings(log)


def test_empty_rounds_may_follow_the_dropout_model() -> None:
    grid = LocalGrid(apps(), when_training("gone"))
    result = strategy(response_probability=0.3).start(grid, start(), 5)  # by chance in 0.7 ** 10
    assert result.train_metrics_clientapp[5]["replied"] == 0
    with pytest.raises(FedShuffleError, match="4 rounds"):
        strategy(response_probability=0.85).start(
            LocalGrid(apps(), when_training("gone")), start(), 5
        )


def test_empty_rounds_change_nothing() -> None:
    grid = LocalGrid(apps(), when_training("gone"))
    result = strategy().start(grid, start(), 2)
    assert same(result.arrays, model())
    assert result.train_metrics_clientapp[2]["replied"] == 0


def test_run_without_replies_stops(tmp_path: Path) -> None:
    grid = LocalGrid(apps(), when_training("raises"))
    with pytest.raises(FedShuffleError, match=r"3 rounds.*failed"):
        strategy(out=tmp_path / "run").start(grid, start(), 9)
    result = strategy(out=tmp_path / "run", resume=True).start(LocalGrid(apps()), start(), 4)
    assert result.train_metrics_clientapp[3]["replied"] == 2


def wrong(**values: Any) -> ClientApp:
    """Client 1, with wrong replies to local training."""
    client = Client(1, model(), own(1), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = client.handle(message)
        if trains(message):
            metrics = values.get("metrics", {"train_loss": 1.0, "update_norm": 1.0})
            fields = protocol.Reply(values.get("client", 1), values.get("steps", 8), metrics)
            d = len(client.problem.start)
            update = values.get("update", torch.zeros(d))
            sent = protocol.arrays(**{values.get("name", "update"): update})
            for name, array in sent.items():
                says = values.get("dtype", array.dtype), values.get("shape", array.shape)
                sent[name] = Array(*says, array.stype, array.data)
            others = dict.fromkeys(values.get("others", ()), sent)
            reply = Message(protocol.content(fields, sent, **others), reply_to=message)
        return reply

    app = ClientApp()
    app.query("info")(answer)
    app.train()(answer)
    return app


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"update": torch.zeros(3)}, "has shape"),
        ({"update": torch.full((43,), torch.nan)}, "not finite"),
        ({"update": torch.zeros(43, dtype=torch.int64)}, "floating point"),
        ({"update": torch.full((43,), 1e300, dtype=torch.float64)}, "not finite"),
        ({"update": torch.full((43,), 3.4e38)}, "update"),
        ({"update": torch.full((43,), -1e30)}, "update"),
        ({"steps": 9}, "did 9 of 8 steps"),
        ({"steps": 0}, "did 0 of 8 steps"),
        ({"client": 2}, "client 2 "),
        ({"name": "other"}, "other"),
        ({"others": ["more"]}, "more arrays"),
        ({"dtype": "garbage"}, "said to be"),
        ({"shape": (10**9,)}, "said to be"),
        ({"metrics": {}}, "metrics"),
        ({"metrics": {"train_loss": 1.0, "update_norm": "large"}}, "metrics"),
        ({"metrics": {"train_loss": 1.0, "update_norm": 1.0, "rows": 1.0}}, "rows"),
        ({"metrics": {"train_loss": 1.0, "update_norm": 1.0, "epsilon": 0.1}}, "epsilon"),
    ],
)
def test_invalid_replies_are_refused(
    values: dict[str, Any], said: str, log: pytest.LogCaptureFixture
) -> None:
    all_apps = apps()
    all_apps[1] = wrong(**values)
    result = strategy(sampling="full", response_probability=0.9).start(
        LocalGrid(all_apps), start(), 1
    )
    assert result.train_metrics_clientapp[1]["replied"] == 3
    assert said in warnings(log)


def test_infinite_model_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that are finite one by one, but not when they are weighted."""
    all_apps = apps()
    all_apps[1] = wrong(update=torch.full((43,), 3e37))
    monkeypatch.setattr("fedshuffle.flower.exchange.MAX_NORM", float("inf"))
    ours = {"sampling": "full", "server_step_size": 200.0, "out": tmp_path / "run"}
    strategy(**ours).start(LocalGrid(apps()), start(), 1)
    with pytest.raises(FedShuffleError, match=r"round 2.*Client 1") as error:
        strategy(**ours, resume=True).start(LocalGrid(all_apps), start(), 3)
    assert "\n" not in str(error.value)
    latest = RunFolder(tmp_path / "run").latest()
    assert latest is not None
    assert latest.round == 1
    assert latest.x.isfinite().all()


def test_evaluation_averages_by_objective_weight(tmp_path: Path) -> None:
    ours = strategy(evaluate_every=2, out=tmp_path / "run")
    result = ours.start(LocalGrid(apps()), start(), 3)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 3]
    final = model()
    final.load_state_dict(result.arrays.to_torch_state_dict())
    final.eval()
    with torch.no_grad():
        loss = float(losses.cross_entropy(final, *FEDERATION.tensors()))
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(loss, rel=1e-5)
    assert RunFolder(tmp_path / "run").metrics()[2]["clients_loss"] == pytest.approx(loss, rel=1e-5)


def test_invalid_evaluation_is_refused(log: pytest.LogCaptureFixture) -> None:
    client = Client(1, model(), own(1), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = client.handle(message)
        if message.metadata.message_type == protocol.EVALUATE:
            change(reply.content, client=2)
        return reply

    app = ClientApp()
    for kind in (app.query("info"), app.train(), app.evaluate()):
        kind(answer)
    ours = strategy(evaluate_every=1)
    result = ours.start(LocalGrid([apps()[0], app, *apps()[2:]]), start(), 1)
    assert result.evaluate_metrics_clientapp[1]["clients"] == 3
    assert "client 2 " in warnings(log)


def metrics_of(client: int, change: Callable[[dict[str, float]], dict[str, float]]) -> ClientApp:
    """A client that reports changed metrics."""
    inside = Client(client, model(), own(client), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = inside.handle(message)
        if message.metadata.message_type == protocol.EVALUATE:
            found = dict(reply.content.metric_records["metrics"])
            reply.content["metrics"] = MetricRecord(change(found))
        return reply

    app = ClientApp()
    for kind in (app.query("info"), app.train(), app.evaluate()):
        kind(answer)
    return app


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"loss": float("nan")},
        lambda found: found | {"loss": float("inf")},
        lambda found: {"my loss": found["loss"], "accuracy": found["accuracy"]},
    ],
)
def test_invalid_metrics_of_one_client_are_left_out(
    change: Callable[[dict[str, float]], dict[str, float]], log: pytest.LogCaptureFixture
) -> None:
    honest, odd = (
        strategy(evaluate_every=1)
        .start(LocalGrid([apps()[0], app, *apps()[2:]]), start(), 1)
        .evaluate_metrics_clientapp[1]
        for app in (metrics_of(1, lambda found: found | {"loss": 5.0}), metrics_of(1, change))
    )
    weights = np.array(SIZES) / sum(SIZES)
    rest = (honest["loss"] - weights[1] * 5.0) / (1 - weights[1])
    assert odd["loss"] == pytest.approx(rest)
    assert odd["accuracy"] == honest["accuracy"]
    assert set(odd) == set(honest)
    assert "client 1" in warnings(log)


def test_metric_that_is_nowhere_finite_is_nan() -> None:
    everyone = [metrics_of(k, lambda found: found | {"loss": float("nan")}) for k in range(4)]
    result = strategy(evaluate_every=1).start(LocalGrid(everyone), start(), 1)
    assert np.isnan(result.evaluate_metrics_clientapp[1]["loss"])
