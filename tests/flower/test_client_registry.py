"""Which client is at which node."""

import itertools
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import Client, client_app, protocol
from tests.flower.grid import LocalGrid
from tests.flower.helpers import (
    SIZES,
    apps,
    change,
    data,
    model,
    own,
    same,
    simulated,
    start,
    strategy,
    warnings,
)

pytestmark = pytest.mark.usefixtures("server_process")


def test_slow_introductions_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow() -> LocalGrid:
        """One introduction arrives at a time, and only at every second look."""
        grid, looks, look = LocalGrid(apps()), itertools.count(), LocalGrid.pull_messages

        def pull(ids: Any) -> list[Message]:
            asked = dict(zip(map(str, itertools.count(1)), grid.asked))
            infos = [id for id in ids if asked[id][1] == protocol.INFO]
            if infos and next(looks) % 2 == 0:
                return []
            return look(grid, infos[:1] or ids)

        monkeypatch.setattr(grid, "pull_messages", pull)
        return grid

    known: dict[str, Any] = {"sampling": "full", "sizes": SIZES}
    result = strategy(**known, evaluate_every=1).start(slow(), start(), 1)
    assert result.train_metrics_clientapp[1]["replied"] == len(SIZES)
    result = strategy(sizes=SIZES, sampling="one", evaluate_every=1).start(slow(), start(), 1)
    assert result.evaluate_metrics_clientapp[1]["clients"] == len(SIZES)


def test_silent_unknown_node_delays_nobody() -> None:
    grid = LocalGrid([*apps(), apps()[0]], lambda client, m: "silent" if client == 4 else None)
    result = strategy(sampling="full").start(grid, start(), 1, timeout=1e6)
    assert result.train_metrics_clientapp[1]["replied"] == 4


def test_client_may_return_at_another_node() -> None:
    grid = LocalGrid([*apps(), apps()[0]])

    def moved(message: Message, context: Context) -> Message:
        client = Client(0, model(), own(0), losses.cross_entropy)
        return client.handle(message)

    app = ClientApp()
    app.query("info")(moved)
    app.train()(moved)
    grid.apps[4] = app
    grid.away = {4}

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {0} if round == 1 else grid.away

    result = strategy(sampling="full").start(grid, start(), 3, evaluate_fn=evaluate)
    assert same(result.arrays, simulated(3, sampling="full"))


@pytest.mark.parametrize(
    "parameters", [[1], {}, {"0.weight": [float("inf")]}, {"0.weight": 5}, "[" * 100_000, b"\xff"]
)
def test_invalid_introductions_are_refused(parameters: Any, log: pytest.LogCaptureFixture) -> None:
    client = Client(0, model(), own(0), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = client.handle(message)
        if isinstance(parameters, str | bytes):
            reply.content.config_records["fedshuffle"]["payload"] = parameters
        else:
            change(reply.content, parameters=parameters)
        return reply

    app = ClientApp()
    app.query("info")(answer)
    ours = strategy(sampling="full", sizes=SIZES, response_probability=0.9)
    result = ours.start(LocalGrid([app, *apps()[1:]]), start(), 1)
    assert result.train_metrics_clientapp[1]["replied"] == 3
    assert "node 100 is not a client" in warnings(log)


def test_nodes_that_are_not_clients_are_refused(log: pytest.LogCaptureFixture) -> None:
    def other() -> nn.Module:
        return nn.Linear(4, 3)

    strange = [
        client_app(model, data, losses.cross_entropy, number=lambda context: 9),
        client_app(model, lambda c: own(0), losses.cross_entropy, number=lambda context: 0),
        client_app(other, lambda c: own(0), losses.cross_entropy, number=lambda context: 3),
    ]
    with pytest.raises(FedShuffleError, match="3 of 4"):
        strategy().start(LocalGrid([*apps()[:3], *strange]), start(), 1, timeout=0.1)
    said = warnings(log)
    assert "client 9" in said
    assert "node 100" in said
    assert "parameters" in said


def test_registered_node_cannot_impersonate_another(log: pytest.LogCaptureFixture) -> None:
    registered = {100: 0, 101: 1, 102: 3, 103: 2}
    with pytest.raises(FedShuffleError, match="2 of 4"):
        strategy(nodes=registered).start(LocalGrid(apps()), start(), 1, timeout=0.1)
    assert "registered" in warnings(log)


def test_registered_nodes_of_known_sizes_are_not_all_queried() -> None:
    n = 40

    def one(context: Context) -> tuple[Tensor, ...]:
        return own(int(context.node_config["partition-id"]) % 4)

    grid = LocalGrid([client_app(model, one, losses.cross_entropy)] * n)
    nodes = {100 + k: k for k in range(n)}
    sizes = [SIZES[k % 4] for k in range(n)]
    ours = strategy(clients=n, nodes=nodes, sizes=sizes, evaluate_every=3)
    result = ours.start(grid, start(), 3)
    assert sum(kind == protocol.INFO for _, kind in grid.asked) == 16
    assert result.train_metrics_clientapp[3]["replied"] == 2
    assert result.evaluate_metrics_clientapp[3]["clients"] == n


def test_silent_unknown_node_is_queried_once(log: pytest.LogCaptureFixture) -> None:
    def fault(client: int, message: Message) -> str | None:
        return "silent" if client == 4 else None

    grid = LocalGrid([*apps(), apps()[0]], fault)

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {3}

    strategy(sampling="full", response_probability=0.9).start(
        grid, start(), 4, timeout=0.3, evaluate_fn=evaluate
    )
    assert grid.asked.count((4, protocol.INFO)) == 1


def test_replies_count_while_a_new_node_is_silent() -> None:
    def fault(client: int, message: Message) -> str | None:
        return "silent" if client == 4 else None

    grid = LocalGrid([*apps(), apps()[0]], fault)
    grid.away = {4}

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {3}

    ours = strategy(sampling="full", response_probability=0.9, retries=1)
    result = ours.start(grid, start(), 1, timeout=0.5, evaluate_fn=evaluate)
    assert (4, protocol.INFO) in grid.asked
    assert result.train_metrics_clientapp[1]["replied"] == 3


def test_late_client_is_registered_while_another_node_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fault(client: int, message: Message) -> str | None:
        return "silent" if client == 4 else None

    grid = LocalGrid([*apps(), apps()[0]], fault)
    looks, see = itertools.count(), grid.get_node_ids

    def later() -> list[int]:
        grid.away = {3} if next(looks) < 2 else set()
        return see()

    monkeypatch.setattr(grid, "get_node_ids", later)
    result = strategy(sampling="full").start(grid, start(), 1)
    assert result.train_metrics_clientapp[1]["replied"] == 4


def test_error_says_why_clients_are_missing() -> None:
    def broken(context: Context) -> Any:
        raise RuntimeError("no disk")

    app = client_app(model, broken, losses.cross_entropy)
    with pytest.raises(FedShuffleError, match=r"0 of 4 .*no disk"):
        strategy().start(LocalGrid([app] * 4), start(), 1, timeout=0.1)
    with pytest.raises(FedShuffleError, match="client 0"):
        strategy(sizes=SIZES).start(LocalGrid([]), start(), 1, timeout=0.1)


def test_clients_that_all_fail_are_not_awaited() -> None:
    def broken(context: Context) -> Any:
        raise RuntimeError("no disk")

    app = client_app(model, broken, losses.cross_entropy)
    with pytest.raises(FedShuffleError, match=r"0 of 4 clients came\. .*no disk"):
        strategy().start(LocalGrid([app] * 4), start(), 1, timeout=1e6)


def test_client_apps_of_others_are_told_at_once() -> None:
    def train(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    only_train, echoes = ClientApp(), ClientApp()
    only_train.train()(train)
    echoes.query("info")(train)
    for app in (only_train, echoes):  # one node is enough: all run the same app
        with pytest.raises(FedShuffleError, match=r"node 100 .*client_app.*ConsistentFedAvg"):
            strategy().start(LocalGrid([app]), start(), 1, timeout=1e6)


def test_other_client_app_beside_ours_is_only_refused() -> None:
    other = ClientApp()
    result = strategy(sampling="full").start(LocalGrid([*apps(), other]), start(), 1)
    assert result.train_metrics_clientapp[1]["replied"] == 4


@pytest.mark.parametrize("nodes", [{1: 0, 2: 0}, {1: 4}, {1: -1}, {"a": 1}])
def test_invalid_nodes_argument_is_refused(nodes: Any) -> None:
    with pytest.raises(FedShuffleError, match="nodes"):
        strategy(nodes=nodes)
