"""Transforms on real clients: the simulator's trajectory, the bytes on the wire, lost replies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines import Problem
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import Client, client_app, protocol
from fedshuffle.flower.chain import WireChain, from_text, register, to_text
from fedshuffle.privacy import (
    AdaptiveClip,
    AdaptiveClipping,
    Clip,
    GaussianNoise,
    Privacy,
    TreeNoise,
)
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import ClientContext, ServerContext, Transform, channel
from fedshuffle.transforms import Message as Sent
from tests.flower.grid import Fault, LocalGrid
from tests.flower.helpers import (
    FEDERATION,
    SIZES,
    WORK,
    Shorten,
    apps,
    change,
    data,
    model,
    own,
    start,
    strategy,
    trains,
    warnings,
)

pytestmark = pytest.mark.usefixtures("server_process")


@register
@dataclass(frozen=True)
class Learned(Transform):
    """Scales updates by a number that the server learns, and by the aggregation weight."""

    start: float

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Sent:
        factor = float(context.shared.get("factor", torch.tensor(self.start)))
        return Sent(updates * (factor * float(context.weights[0])))

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        factor = context.state.get("factor", torch.tensor(self.start, dtype=torch.float64))
        return update, {"factor": factor * 0.7}


@register
@dataclass(frozen=True)
class Jitter(Transform):
    """Adds random numbers at the client."""

    std: float

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Sent:
        drawn = [self.std * g.standard_normal(updates.shape[1]) for g in context.generators()]
        return Sent(updates + torch.from_numpy(np.stack(drawn)).to(updates))


def state_of(transforms: list[Transform], rounds: int = 4, method: str = "fedshuffle") -> State:
    """The simulator's state."""
    run = Run(FEDERATION, method, "uniform:2", WORK, 0.05, seed=3, transforms=transforms)
    engine = SequentialEngine(Problem(model(), losses.cross_entropy, FEDERATION))
    *_, (last,) = simulate(engine, [run], rounds)
    return last


def flat(arrays: ArrayRecord) -> Tensor:
    return torch.cat([torch.from_numpy(array.numpy()).view(-1) for array in arrays.values()])


def link(text: str) -> Transform:
    found = channel(text)
    assert found is not None
    return found


CHAINS: dict[str, list[Transform]] = {
    **{
        text: [link(text)]
        for text in (
            "topk:0.2",
            "topk:0.2+ef",
            "topk:0.2+ef21",
            "randk:0.3+diana",
            "qsgd:4",
            "qsgd:4+diana",
            "sign+ef",
            "float16",
        )
    },
    "clip": [Shorten(0.05)],
    "clip, then channel": [Shorten(0.05), link("topk:0.2+ef")],
    "channel, then clip": [link("qsgd:4+diana"), Shorten(0.05)],
    "random at every place": [Jitter(0.01), link("randk:0.3"), Jitter(0.01), Jitter(0.01)],
    "server state": [Learned(0.5)],
    "privacy": [Clip(0.05), GaussianNoise(0.001)],
    "privacy after a channel": [
        link("qsgd:4+diana"),
        Clip(0.05, weighted=True),
        TreeNoise(0.001, 3),
    ],
    "private threshold": [AdaptiveClip(0.05, 0.01, 1.0, 2.0, count_noise=0.1)],
    "server state after the channel": [link("randk:0.3"), Learned(0.5)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_model_is_that_of_the_simulator(name: str) -> None:
    result = strategy(transforms=CHAINS[name]).start(LocalGrid(apps()), start(), 4)
    expected = state_of(CHAINS[name]).x
    assert torch.equal(flat(result.arrays), expected)
    assert not torch.equal(state_of([]).x, expected)


def perceptron() -> nn.Module:
    """A model for which the engine has a layout of its own."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    "transforms",
    [[Clip(0.05)], [link("sign")], [link("float16"), Clip(0.05)], [Clip(0.1), link("sign")]],
    ids=str,
)
def test_layout_of_the_engine_does_not_matter(transforms: list[Transform]) -> None:
    problem = Problem(perceptron(), losses.cross_entropy, FEDERATION)
    engine, x = SequentialEngine(problem), torch.arange(1.0, 1.0 + len(problem.start))
    assert not torch.equal(engine._here.layout.arrange(x), x)
    run = Run(FEDERATION, "fedshuffle", "uniform:2", WORK, 0.05, seed=3, transforms=transforms)
    *_, (last,) = simulate(engine, [run], 6)
    grid = LocalGrid([client_app(perceptron, data, losses.cross_entropy)] * len(SIZES))
    begin = ArrayRecord(perceptron().state_dict())
    result = strategy(transforms=transforms).start(grid, begin, 6)
    assert torch.equal(flat(result.arrays), last.x)


@pytest.mark.parametrize("name", ["topk:0.2+ef21", "scaffold", "scaffold-i"])
def test_clients_with_state_may_come_in_portions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedshuffle.methods.round._PORTION", 0)
    monkeypatch.setattr("fedshuffle.methods.round._FEWEST", 1)
    method = name if name.startswith("scaffold") else "fedshuffle"
    transforms = CHAINS.get(name, [])
    grid = LocalGrid(apps())
    result = strategy(transforms=transforms, method=method).start(grid, start(), 4)
    assert torch.equal(flat(result.arrays), state_of(transforms, method=method).x)
    assert sum(kind == protocol.TRAIN for _, kind in grid.asked) == 2 * 4


@pytest.mark.parametrize("name", ["topk:0.2+ef", "qsgd:4", "sign+ef", "float16", "clip"])
def test_bytes_are_those_that_the_simulator_counts(name: str) -> None:
    grid, ours = LocalGrid(apps()), strategy(transforms=CHAINS[name])
    ours.start(grid, start(), 1)
    assert ours._session is not None
    counted = state_of(CHAINS[name], rounds=1).metrics["bytes_up"]
    records = [m.content.array_records for m in grid.received if m.content.array_records]
    assert len(records) == 2
    sent = [sum(a.numpy().nbytes for r in each.values() for a in r.values()) for each in records]
    assert sorted(sent) == sorted(counted.tolist())
    np.testing.assert_array_equal(ours._session.state.metrics["bytes_up"], counted)


def test_metrics_are_those_of_the_simulator() -> None:
    ours = strategy(transforms=CHAINS["channel, then clip"])
    ours.start(LocalGrid(apps()), start(), 2)
    assert ours._session is not None
    found = ours._session.state.metrics
    expected = state_of(CHAINS["channel, then clip"], rounds=2).metrics
    assert set(found) == set(expected)
    assert {"train_loss", "update_norm", "clipped"} <= set(found)
    for metric, values in expected.items():
        np.testing.assert_array_equal(found[metric], values, metric)


def test_private_run_is_that_of_the_simulator(
    log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    privacy = Privacy(clip=0.05, noise=0.5)
    ours = strategy(privacy=privacy, channel="qsgd:4+diana", out=tmp_path / "run")
    result = ours.start(LocalGrid(apps()), start(), 3)
    settings: Any = {"transforms": [link("qsgd:4+diana")], "privacy": privacy, "rounds": 3}
    run = Run(FEDERATION, "fedshuffle", "uniform:2", WORK, 0.05, seed=3, **settings)
    engine = SequentialEngine(Problem(model(), losses.cross_entropy, FEDERATION))
    *_, (last,) = simulate(engine, [run], 3)
    assert torch.equal(flat(result.arrays), last.x)
    assert run.mechanism is not None
    spent = run.mechanism.budget.spent(3)
    assert f"3 rounds cost epsilon {spent:.3g}" in log.text
    assert RunFolder(tmp_path / "run").metrics()[-1]["epsilon"] == pytest.approx(spent)


def test_budget_is_not_exceeded(tmp_path: Path) -> None:
    privacy = Privacy(clip=0.05, epsilon=3.0, delta=0.01)
    strategy(privacy=privacy, out=tmp_path / "run").start(LocalGrid(apps()), start(), 2)
    more = strategy(privacy=privacy, out=tmp_path / "run", resume=True)
    with pytest.raises(FedShuffleError, match="affords 2 rounds"):
        more.start(LocalGrid(apps()), start(), 4)


@pytest.mark.parametrize("weighted", [False, True])
def test_sensitivity_grows_with_the_weights_of_clients_that_seldom_reply(weighted: bool) -> None:
    """The noise is that of the largest weight ``w_i / (p_i r_i)``, or of the threshold alone."""
    r = np.array([0.5, 1.0, 0.9, 0.25])
    privacy = Privacy(clip=0.05, noise=2.0, weighted=weighted)
    ours = strategy(privacy=privacy, response_probability=r, sampling="full")
    ours.start(LocalGrid(apps()), start(), 1)
    assert ours._session is not None
    clip, noise = ours._session.run.chain.transforms
    assert isinstance(noise, GaussianNoise)
    largest = 1.0 if weighted else np.max(FEDERATION.weights / r)
    assert clip == Clip(0.05, weighted)
    assert noise.std == pytest.approx(2.0 * 0.05 * largest)


def test_threshold_follows_the_clients_that_reply() -> None:
    privacy = Privacy(clip=1.0, noise=1.0, adaptive=AdaptiveClipping(count_noise=1.0))
    ours = strategy(privacy=privacy, response_probability=0.5)
    (clip,) = ours._run(FEDERATION.sizes, 1).chain.transforms
    assert isinstance(clip, AdaptiveClip)
    assert clip.expected_cohort == 2 * 0.5


def test_privacy_counts_on_all_steps(log: pytest.LogCaptureFixture) -> None:
    """The weight of a client that does less would grow beyond its bound."""
    transforms = CHAINS["privacy"]
    ours = strategy(method="fedshuffle-gen", transforms=transforms, sampling="full")
    result = ours.start(LocalGrid(apps(seconds=1e-9)), start(), 1)
    assert result.train_metrics_clientapp[1]["replied"] == 0
    assert "privacy counts on all" in warnings(log)


def test_records_have_the_means_of_metrics(tmp_path: Path) -> None:
    ours = strategy(transforms=CHAINS["clip"], out=tmp_path / "run")
    ours.start(LocalGrid(apps()), start(), 1)
    (record,) = RunFolder(tmp_path / "run").metrics()
    norms = state_of(CHAINS["clip"], rounds=1).metrics["update_norm"]
    assert record["update_norm"] == pytest.approx(norms.mean())
    assert record["update_norm_max"] == norms.max()
    assert record["clipped"] == (norms > 0.05).mean()


# Lost replies


def in_round(round: int, fault: str, client: int) -> Fault:
    """A fault in the local training of a client, once."""
    done: set[int] = set()

    def found(asked: int, message: Message) -> str | None:
        if not trains(message) or asked != client or message.metadata.group_id != str(round):
            return None
        return None if done else (done.add(1) or fault)  # type: ignore[func-returns-value]

    return found


@pytest.mark.parametrize("name", ["topk:0.2+ef", "qsgd:4+diana", "topk:0.2+ef21"])
def test_lost_reply_is_repeated_from_the_state_before(name: str) -> None:
    expected = state_of(CHAINS[name]).x
    cohort = strategy()._run(FEDERATION.sizes, 1).cohort(1).clients
    grid = LocalGrid(apps(), in_round(2, "lost", int(cohort[0])))
    result = strategy(transforms=CHAINS[name], retries=1).start(grid, start(), 4)
    assert torch.equal(flat(result.arrays), expected)


@pytest.mark.parametrize("name", ["topk:0.2+ef", "qsgd:4+diana", "topk:0.2+ef21"])
def test_client_whose_reply_is_lost_rolls_back(name: str) -> None:
    """As if it had not been asked, in this round and in later ones."""
    client = int(strategy(sampling="full")._run(FEDERATION.sizes, 1).cohort(0).clients[1])
    results = [
        strategy(transforms=CHAINS[name], sampling="full", response_probability=0.9)
        .start(LocalGrid(apps(), in_round(2, fault, client)), start(), 4)
        .arrays
        for fault in ("raises", "lost")
    ]
    assert torch.equal(flat(results[0]), flat(results[1]))


def test_lost_state_is_an_error(log: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(apps())

    def restarted(client: int, message: Message) -> None:
        if trains(message) and message.metadata.group_id == "3":
            grid.contexts.pop(client, None)

    grid.fault = restarted
    strategy(transforms=CHAINS["topk:0.2+ef"], sampling="full").start(grid, start(), 3)
    assert "client 0 has no state after round 2" in warnings(log)


def test_client_with_state_needs_a_context(log: pytest.LogCaptureFixture) -> None:
    app = ClientApp()
    for kind in (app.query("info"), app.train()):
        kind(
            lambda message, context: Client(
                int(context.node_config["partition-id"]),
                model(),
                own(int(context.node_config["partition-id"])),
                losses.cross_entropy,
            ).handle(message)
        )
    strategy(transforms=CHAINS["topk:0.2+ef"]).start(LocalGrid([app] * 4), start(), 1)
    assert "client.handle(message, context)" in warnings(log)


# Invalid messages


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("values", lambda a: a * np.float32("inf"), "too large"),
        ("values", lambda a: a[:-1], "values"),
        ("places", lambda a: a | 255, "places"),
        ("values", lambda a: a.astype(np.float64), "values"),
        ("more", lambda a: a, "more"),
    ],
)
def test_invalid_message_is_refused(
    name: str,
    change: Any,
    said: str,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = LocalGrid(apps())
    pull = grid.pull_messages

    def tampered(ids: Any) -> list[Message]:
        replies = pull(ids)
        for reply in replies:
            if not reply.has_error() and "message" in reply.content.array_records:
                record = reply.content.array_records["message"]
                before = record["values"] if name == "more" else record[name]
                record[name] = Array(np.ascontiguousarray(change(before.numpy().copy())))
        return replies

    monkeypatch.setattr(grid, "pull_messages", tampered)
    result = strategy(transforms=[link("topk:0.2")]).start(grid, start(), 1)
    assert result.train_metrics_clientapp[1]["replied"] == 0
    assert said in warnings(log)


@register
@dataclass(frozen=True)
class Broken(Transform):
    """What it keeps at the server is not finite."""

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Sent:
        return Sent(updates)

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        return update, {"kept": torch.tensor(math.nan)}


def test_server_state_stays_finite() -> None:
    with pytest.raises(FedShuffleError, match="not be finite after round 1"):
        strategy(transforms=[Broken()]).start(LocalGrid(apps()), start(), 1)


@pytest.mark.parametrize("clipped", [None, math.nan, 1e300, -1.0, 0.5])
def test_clients_count_as_clipped_or_not(
    clipped: float | None, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private threshold follows the count, whatever one of them says."""
    grid = LocalGrid(apps())
    pull = grid.pull_messages

    def tampered(ids: Any) -> list[Message]:
        replies = pull(ids)
        for reply in replies:
            if reply.metadata.src_node_id == 101 and reply.metadata.message_type == protocol.TRAIN:
                metrics = {"train_loss": 1.0, "update_norm": 1.0, "clipped": clipped}
                told = {name: value for name, value in metrics.items() if value is not None}
                change(reply.content, metrics=told)
        return replies

    monkeypatch.setattr(grid, "pull_messages", tampered)
    ours = strategy(transforms=CHAINS["private threshold"], sampling="full")
    assert ours.start(grid, start(), 1).train_metrics_clientapp[1]["replied"] == 3
    assert "clipped" in warnings(log)


# Texts


def test_transforms_have_texts() -> None:
    for transforms in CHAINS.values():
        for transform in transforms:
            assert from_text(to_text(transform)) == transform
    assert to_text(Shorten(2.0)) == 'Shorten {"most": 2.0}'


def test_what_has_no_text_is_refused() -> None:
    class Odd(Transform):
        def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Sent:
            return Sent(updates)

    with pytest.raises(FedShuffleError, match="register"):
        strategy(transforms=[Odd()])
    with pytest.raises(FedShuffleError, match="dataclass"):
        register(Odd)


@pytest.mark.parametrize(
    "text",
    ["", "none", "os.system {}", 'Shorten {"most": 1.0, "x": 2}', "Shorten {", "topk:0", "Shorten"],
)
def test_invalid_texts_are_refused(text: str) -> None:
    with pytest.raises(FedShuffleError):
        WireChain.from_texts([text])
