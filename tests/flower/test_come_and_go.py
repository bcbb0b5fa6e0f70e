"""Clients that fail, leave, return and join: estimated response probabilities, exactly."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping
from torch import Tensor, nn

from fedshuffle import Federation, LocalWork, Privacy
from fedshuffle.auditing import audit_server
from fedshuffle.auditing.adapters import FlowerAggregator
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import (
    ConsistentFedAvg,
    FedShuffleStrategy,
    SecureAggregation,
    client_app,
)
from fedshuffle.flower.population import Population, Report
from fedshuffle.probabilities import BetaRate
from fedshuffle.sampling import Uniform
from tests.flower.grid import LocalGrid
from tests.flower.helpers import strategy, warnings
from tests.flower.test_consistent_fedavg import grid, trained
from tests.flower.test_consistent_fedavg import start as start_of

pytestmark = pytest.mark.usefixtures("server_process")

SIZES = [1, 2, 3, 2]
WEIGHTS = np.array(SIZES) / sum(SIZES)


class Linear(nn.Module):
    """One number per client, on which its loss depends linearly: clients move as far as planned."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4, dtype=torch.float64))


def loss(model: nn.Module, axes: Tensor) -> Tensor:
    (x,) = model.parameters()
    return -(axes @ x).mean()


def axes(context: Context) -> tuple[Tensor, ...]:
    client = int(context.node_config["partition-id"])
    return (torch.eye(4, dtype=torch.float64)[client].expand(SIZES[client], 4),)


def linear_grid(fails: Callable[[int, int], bool]) -> LocalGrid:
    """Clients that fail to train in some rounds (from 1)."""

    def fault(client: int, message: Message) -> str | None:
        train = message.metadata.message_type == "train"
        return "gone" if train and fails(client, int(message.metadata.group_id)) else None

    return LocalGrid([client_app(Linear, axes, loss)] * 4, fault)


def counting(rule: str = "estimate", **options: Any) -> FedShuffleStrategy:
    common: dict[str, Any] = {"method": "fedshuffle", "step_size": 0.1, "seed": 5, "sizes": SIZES}
    return FedShuffleStrategy(**common | {"response_probability": rule} | options)


def start() -> ArrayRecord:
    return ArrayRecord(Linear().state_dict())


def script(client: int, round: int) -> bool:
    """Client 1 fails in every second round, client 2 is away from round 3 to 7 and returns."""
    return (client == 1 and round % 2 == 1) or (client == 2 and 3 <= round <= 7)


def away_by_script(grid: LocalGrid) -> Callable[[int, ArrayRecord], None]:
    """Called after each round: who is not even connected in the next."""

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {2} if script(2, round + 1) else set()

    return evaluate


# The exact strategy


def test_weights_are_divided_by_the_counted_replies() -> None:
    """Against a count by hand: what a client moves by, over the share of questions answered."""
    here = linear_grid(lambda client, round: client == 1 and script(1, round))
    ours = counting(sampling="uniform:2")
    found = ours.start(here, start(), 12, evaluate_fn=away_by_script(here))
    x, asked, replied = np.zeros(4), np.zeros(4), np.zeros(4)
    for round in range(12):
        cohort = Uniform(4, 2).draw(5, round)
        there = np.array([c for c in cohort if not script(int(c), round + 1)], dtype=np.int64)
        rate = (1 + replied.sum()) / (1 + asked.sum())
        response = (1 + replied) / (1 / rate + asked)
        x[there] += 0.1 * 3 * WEIGHTS[there] / (0.5 * response[there])  # three steps at most
        asked[cohort] += 1
        replied[there] += 1
    np.testing.assert_allclose(found.arrays["x"].numpy(), x, rtol=1e-12)
    assert (asked > replied)[[1, 2]].all()  # or it was no test


@pytest.mark.parametrize("method", ["fedshuffle", "fedshuffle-mvr"])
def test_resumed_run_has_the_estimates_of_one_never_interrupted(
    method: str, tmp_path: Path
) -> None:
    def run(rounds: int, folder: str, resume: bool = False) -> np.ndarray[Any, Any]:
        here = linear_grid(script)
        ours = counting("estimate:ewma:0.2", method=method, out=tmp_path / folder, resume=resume)
        found: np.ndarray[Any, Any] = ours.start(here, start(), rounds).arrays["x"].numpy()
        return found

    run(5, "stopped")
    resumed = run(9, "stopped", resume=True)
    assert np.array_equal(resumed, run(9, "whole"))
    with pytest.raises(FedShuffleError, match="response_estimate"):
        counting("estimate", method=method, out=tmp_path / "stopped", resume=True).start(
            linear_grid(script), start(), 10
        )


def test_missing_clients_are_not_called_a_bias_but_a_drift_is(
    log: pytest.LogCaptureFixture,
) -> None:
    counting().start(linear_grid(lambda client, round: client == 0 and round > 32), start(), 64)
    said = warnings(log)
    assert "biased" not in said
    assert "who replies changed over the 64 rounds" in said
    assert "response_probability 'estimate:ewma:0.05'" in said


def test_undeclared_client_is_refused_with_the_remedy(log: pytest.LogCaptureFixture) -> None:
    here = LocalGrid([client_app(Linear, axes, loss)] * 4)
    here.away = {3}

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        here.away = {3} if round < 2 else set()

    counting(sizes=SIZES[:3]).start(here, start(), 4, evaluate_fn=evaluate)
    (said,) = {record for record in log.records if "client 3" in record.getMessage()}
    assert "clients=4, or use ConsistentFedAvg" in said.getMessage()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"response_probability": "often"}, "response_probability: .*write 'estimate'"),
        ({"privacy": Privacy(clip=1.0, noise=1.0)}, "privacy would not hold"),
        (
            {"secure_aggregation": SecureAggregation(1.0)},
            "loses the whole round",
        ),
    ],
)
def test_what_does_not_go_with_estimates_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        strategy(**{"response_probability": "estimate"} | options)


# Apps with a train function of their own

OWN_SIZES = [8, 24, 64, 16]
LR = 0.25
CONNECTED = [[0, 1], [0, 1], [1], [0, 1, 2], [1, 2], [0, 1, 2], [0, 2, 3], [0, 1, 2, 3]]
FAILS = {(1, 2), (2, 5), (1, 6)}
"""Clients that fail, and the rounds (from 1) in which they do."""


def coming_and_going() -> LocalGrid:
    return grid(
        OWN_SIZES,
        lambda client, m: (
            "gone"
            if (client, int(m.content["config"]["server-round"])) in FAILS
            and m.metadata.message_type == "train"
            else None
        ),
    )


def run_rounds(
    ours: ConsistentFedAvg, rounds: Sequence[int], x: ArrayRecord, done: int = 0
) -> tuple[ArrayRecord, list[MetricRecord]]:
    """Flower's loop, with the connected clients of the script."""
    here, metrics = coming_and_going(), []
    for round in rounds:
        here.away = {*range(4)} - {*CONNECTED[round - 1]}
        messages = [*ours.configure_train(round - done, x, ConfigRecord({"lr": LR}), here)]
        after, found = ours.aggregate_train(round - done, here.send_and_receive(messages))
        x = after or x
        metrics.append(found or MetricRecord())
    return x, metrics


def consistent() -> ConsistentFedAvg:
    return ConsistentFedAvg(
        response_probability="estimate",
        local_steps=4,
        mean_examples=32,
        fraction_train=0.5,
        min_train_nodes=1,
        min_available_nodes=1,
        seed=2,
    )


def zeros() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(4))})


def test_clients_return_and_join_as_counted_by_hand(log: pytest.LogCaptureFixture) -> None:
    ours = consistent()
    x, metrics = run_rounds(ours, range(1, 9), zeros())
    # By hand, where only who was sampled is taken from the strategy's messages.
    sampled = consistent()
    by_hand = np.zeros(4)
    rounds, there, asked, replied = np.zeros((4, 4))
    known: set[int] = set()
    for round, connected in enumerate(CONNECTED, 1):
        here = coming_and_going()
        here.away = {*range(4)} - {*connected}
        messages = sampled.configure_train(round, zeros(), ConfigRecord({"lr": LR}), here)
        cohort = [message.metadata.dst_node_id - 100 for message in messages]
        presence = (1 + there.sum()) / (1 + rounds.sum())
        response = (1 + replied.sum()) / (1 + asked.sum())
        before, known = known, known | {*connected}
        for i in cohort:
            if (i, round) not in FAILS:
                is_there = (1 + there[i]) / (1 / presence + rounds[i])
                replies = (1 + replied[i]) / (1 / response + asked[i])
                p = is_there * len(cohort) / len(connected) * replies
                by_hand[i] += OWN_SIZES[i] / (32 * len(known)) / p * 4 * LR
        for i in before:
            rounds[i] += 1
            there[i] += i in connected
        for i in cohort:
            asked[i] += 1
            replied[i] += (i, round) not in FAILS
    np.testing.assert_allclose(x["w"].numpy(), by_hand, rtol=1e-12)
    assert asked.sum() > replied.sum()
    joins = {round: dict(m) for round, m in enumerate(metrics, 1) if "joined-nodes" in m}
    assert [*joins] == [1, 4, 7]
    assert joins[4]["joined-nodes"] == [102]
    assert joins[4]["others-weight"] == pytest.approx(2 / 3)
    assert (joins[7]["clients-known"], joins[7]["clients-connected"]) == (4, 3)
    said = "round 7: nodes joined: 103. The objective is now that of 4 clients"
    assert said in log.text
    assert "0.75 times what they did" in log.text


def test_strategy_goes_on_from_its_state() -> None:
    whole, _ = run_rounds(consistent(), range(1, 9), zeros())
    first, resumed = consistent(), consistent()
    x, _ = run_rounds(first, range(1, 5), zeros())
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after, _ = run_rounds(resumed, range(5, 9), x, done=4)
    assert np.array_equal(after["w"].numpy(), whole["w"].numpy())
    with pytest.raises(FedShuffleError, match="Use the same"):
        ConsistentFedAvg().load_state_dict(first.state_dict())
    with pytest.raises(FedShuffleError, match="no state of the strategy"):
        resumed.load_state_dict({"estimate": first.state_dict()["estimate"], "round": 1})
    with pytest.raises(FedShuffleError, match="round of the state is None"):
        resumed.load_state_dict({})
    with pytest.raises(FedShuffleError, match="the state must be of type Mapping, not list"):
        resumed.load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("estimate", [None, "estimate"])
def test_state_of_other_nodes_is_warned_of(
    estimate: str | None, log: pytest.LogCaptureFixture
) -> None:
    """As where the same clients have new ids in Flower's simulator."""
    first, resumed = (ConsistentFedAvg(response_probability=estimate) for _ in range(2))
    here, others = grid(), grid(OWN_SIZES * 2)
    trained(first, here)
    resumed.load_state_dict(first.state_dict())
    others.away = {0, 1, 2}
    messages = resumed.configure_train(1, start_of(8), ConfigRecord({"lr": LR}), others)
    assert len([*messages]) == 5
    said = "round 2: none of the 3 clients seen before is connected"
    assert (said in warnings(log)) is (estimate is not None)
    log.clear()
    others.away = {0, 1}
    assert [*resumed.configure_train(2, start_of(8), ConfigRecord({"lr": LR}), others)]
    assert "none of" not in warnings(log)


def test_estimates_lead_to_the_objective_of_all_clients() -> None:
    """Clients that reply more often count more, unless it is estimated how often they do."""
    clients, often = Federation.from_sizes([8, 24, 64]), "independent:0.9,0.5,0.3"
    found = {}
    for rule in (None, "estimate"):
        ours = ConsistentFedAvg(response_probability=rule, local_steps=4, mean_examples=32)
        server = FlowerAggregator(ours, nodes=3)
        found[rule] = audit_server(server, clients, often, LocalWork(batch_size=8), draws=600)
    assert found["estimate"].consistent is not False
    np.testing.assert_allclose(found["estimate"].ratios, 1, atol=0.1)
    assert found[None].consistent is False


def test_clients_count_alike_in_a_long_run_however_often_they_are_there() -> None:
    """Over the rounds since a client joined: here client 2 does so in the middle."""
    population, rng = Population(BetaRate()), np.random.default_rng(0)
    there, replies, counted = [0.8, 0.5, 0.3], [0.9, 0.3, 1.0], np.zeros(3)
    known = np.zeros(3)
    for round in range(6000):
        connected = [i for i in range(3) if rng.random() < there[i] and (i < 2 or round >= 3000)]
        if not connected:
            continue
        population.begin(connected)
        known[: population.size] += 1
        size = max(1, len(connected) // 2)
        population.asked = rng.choice(connected, size, replace=False).tolist()
        replied = [i for i in population.asked if rng.random() < replies[i]]
        counted[replied] += 1 / population.inclusion(replied)
        population.end({i: Report(1, 1) for i in replied})
    np.testing.assert_allclose(counted / known, 1, atol=0.1)
    assert population.drift_warnings(6000) == []


def test_clients_that_left_for_good_are_forgotten_if_so_wished() -> None:
    population = Population(BetaRate(), forget_after=2)
    for connected in ([7, 9], [9], [9]):
        population.begin(connected)
    assert (population.forgotten, population.size) == ([7], 1)
    assert population.metrics()["others-weight"] == 2
    assert "nodes forgotten: 7. The objective is now that of 1 clients" in population.change()
    population.begin([7, 9])
    assert (population.joined, population.forgotten, population.size) == ([7], [], 2)
    population.asked = [7, 9]
    np.testing.assert_array_equal(population.inclusion([7, 9]), 1)  # node 9 was never away
    with pytest.raises(FedShuffleError, match="forget_after"):
        ConsistentFedAvg(forget_after=2)


def test_own_loop_warns_of_a_drift(log: pytest.LogCaptureFixture) -> None:
    def fault(client: int, message: Message) -> str | None:
        train = message.metadata.message_type == "train"
        return "gone" if train and client == 0 and here.asked.count((0, "train")) > 32 else None

    here = grid(fault=fault)
    trained(ConsistentFedAvg(response_probability="estimate", fraction_evaluate=0.0), here, 64)
    assert "who replies changed over the 64 rounds" in warnings(log)
    assert "who is connected changed" not in warnings(log)


def test_privacy_of_flowers_wrapper_does_not_go_with_estimates() -> None:
    ours = ConsistentFedAvg(response_probability="estimate")
    with pytest.raises(FedShuffleError, match="leave out response_probability"):
        trained(DifferentialPrivacyClientSideFixedClipping(ours, 1.0, 1.0, 3), grid())
