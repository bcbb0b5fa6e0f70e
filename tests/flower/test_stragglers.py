"""Deadlines and over-selection with real clients: who counts, and how much."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from fedshuffle import LocalWork, Privacy
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import ConsistentFedAvg, SecureAggregation, client_app
from fedshuffle.sampling import Uniform
from fedshuffle.sampling.over_selection import OverSelected
from fedshuffle.timing import Clock, Exponential, OverSelection, Tasks
from tests.flower.grid import Fault, LocalGrid
from tests.flower.helpers import strategy, warnings
from tests.flower.test_come_and_go import SIZES, WEIGHTS, Linear, axes, counting, loss
from tests.flower.test_consistent_fedavg import LR, grid, model

pytestmark = pytest.mark.usefixtures("server_process")

DEADLINE = "deadline:0.01"  # who is not slow has replied before the server looks at its clock
SLOW = {(1, 1), (3, 2), (1, 3)}
"""Clients that are not in time, and the rounds (from 1) in which they are not."""


def linear(fault: Fault) -> LocalGrid:
    return LocalGrid([client_app(Linear, axes, loss)] * 4, fault)


def start() -> ArrayRecord:
    return ArrayRecord(Linear().state_dict())


def slow(fault: str = "late", script: set[tuple[int, int]] = SLOW) -> Fault:
    def one(client: int, message: Message) -> str | None:
        if message.metadata.message_type != "train":
            return None
        content = message.content.get("config", {})  # of an app with a train of its own
        round = int(content.get("server-round", message.metadata.group_id or 0))
        return fault if (client, round) in script else None

    return one


def test_deadline_divides_by_the_probability_to_be_in_time() -> None:
    here, in_time = linear(slow()), np.array([1.0, 0.5, 1.0, 0.25])
    ours = counting(response_probability=in_time, schedule=DEADLINE)
    found = ours.start(here, start(), 4).arrays["x"].numpy()
    rounds = np.array([4, 2, 4, 3])
    np.testing.assert_allclose(found, 0.1 * 3 * WEIGHTS * rounds / in_time, rtol=1e-12)
    assert here.came_late == len(SLOW)  # in later rounds, and were not counted there


def test_over_selection_takes_the_first_and_divides_by_their_probability() -> None:
    rule, work = OverSelection(keep=2, ask=3), LocalWork(steps=1).on(np.array(SIZES))
    p = OverSelected(rule, Tasks(Clock([1, 2, 3, 4], jitter=Exponential()), work)).p
    cohorts = [Uniform(4, 3).draw(5, round).tolist() for round in range(6)]
    last = {(cohorts[k][k % 3], k + 1) for k in range(6)}
    ours = counting(response_probability=p / 0.75, schedule=str(rule))
    found = ours.start(linear(slow(script=last)), start(), 6).arrays["x"].numpy()
    x = np.zeros(4)
    for k, cohort in enumerate(cohorts):
        first = [client for client in cohort if (client, k + 1) not in last]
        x[first] += 0.1 * 3 * WEIGHTS[first] / p[first]
    np.testing.assert_allclose(found, x, rtol=1e-12)


def own(**options: Any) -> ConsistentFedAvg:
    common: dict[str, Any] = {
        "response_probability": "estimate",
        "seed": 2,
        "fraction_evaluate": 0.0,
    }
    return ConsistentFedAvg(**common | options)


def run(kind: str, fault: Fault, schedule: str = "wait") -> Any:
    if kind == "exact":
        return counting(schedule=schedule).start(linear(fault), start(), 5).arrays["x"].numpy()
    return model(own(schedule=schedule), grid([8, 24, 64, 16], fault), 5)


@pytest.mark.parametrize("kind", ["exact", "own train"])
@pytest.mark.parametrize("schedule", [DEADLINE, "over:3of4"])
def test_late_clients_are_estimated_as_those_that_fail(kind: str, schedule: str) -> None:
    script = {*SLOW}
    if schedule != DEADLINE:
        script |= {(3, 4), (3, 5)}  # all four reply, and the last is one too many
    assert np.array_equal(run(kind, slow(), schedule), run(kind, slow("gone", script)))


def test_given_probabilities_by_node() -> None:
    in_time = {100: 1.0, 101: 0.5, 102: 0.8}
    ours = own(response_probability=in_time, schedule=DEADLINE, local_steps=4, mean_examples=32)
    found = model(ours, grid(fault=slow(script={(1, 1)})), 1)
    np.testing.assert_allclose(found, LR * 4 * np.array([8, 0, 64 / 0.8]) / 96, rtol=1e-12)
    with pytest.raises(FedShuffleError, match="says nothing of node 103"):
        model(own(response_probability=in_time), grid([8, 24, 64, 16]))


def test_node_without_a_given_probability_that_joins_later_is_left_out(
    log: pytest.LogCaptureFixture,
) -> None:
    here = grid()
    here.away = {2}

    def join(round: int, arrays: ArrayRecord) -> None:
        here.away = set() if round == 1 else {2}

    ours = own(response_probability={100: 0.5, 101: 1.0}, local_steps=4, mean_examples=16)
    config = ConfigRecord({"lr": LR})
    zeros = ArrayRecord({"w": Array(np.zeros(3))})
    found = ours.start(here, zeros, 3, train_config=config, evaluate_fn=join).arrays["w"].numpy()
    assert found == pytest.approx(3 * LR * 4 * np.array([8 / 0.5, 24, 0]) / 32)
    said = "response_probability says nothing of node 102"
    assert {r.getMessage()[:7] for r in log.records if said in r.getMessage()} == {"round 2"}


@pytest.mark.parametrize("schedule", [DEADLINE, "over:1of2"])
@pytest.mark.parametrize("known", [False, True])
def test_warns_that_slow_clients_count_less_unless_corrected(
    schedule: str, known: bool, log: pytest.LogCaptureFixture
) -> None:
    model(own(schedule=schedule, response_probability="estimate" if known else None), grid())
    exact = counting(schedule=schedule, response_probability="estimate" if known else 1.0)
    result = exact.start(linear(slow()), start(), 1)
    remedy = 'they count less than meant. Use response_probability="estimate"'
    warned = {record.module for record in log.records if remedy in record.getMessage()}
    assert warned == (set() if known else {"consistent_fedavg", "strategy"})
    assert "biased" not in warnings(log)
    assert result.train_metrics_clientapp[1]["follows-dropout-model"] == int(known)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "fedbuff:K=2"}, "use ConsistentFedBuff"),
        ({"schedule": "deadline:60+partial"}, r"client_app\(seconds=\.\.\.\)"),
        ({"schedule": "over:2of3", "sampling": "uniform:2"}, "'uniform:2' has no say"),
        ({"schedule": "over:2of9"}, "number of clients to ask"),
        ({"schedule": "over:2of3", "method": "fedshuffle-mvr"}, "asks clients twice"),
        ({"schedule": "over:2of3", "privacy": Privacy(clip=1.0, noise=1.0)}, "displaces another"),
        ({"schedule": DEADLINE, "secure_aggregation": SecureAggregation(1.0)}, "waits for all"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        strategy(**{"sampling": "full"} | options)


def test_schedule_needs_its_own_loop() -> None:
    with pytest.raises(FedShuffleError, match="leave out fraction_train"):
        ConsistentFedAvg(fraction_train=0.5, schedule="over:1of2")
    with pytest.raises(FedShuffleError, match="fewer than min_train_nodes=20"):
        ConsistentFedAvg(min_train_nodes=20, schedule="over:8of10")
    wrapped = DifferentialPrivacyServerSideFixedClipping(
        ConsistentFedAvg(schedule=DEADLINE), 1.0, 1.0, 2
    )
    with pytest.raises(FedShuffleError, match="another one calls it"):
        wrapped.start(grid(), start(), 1, train_config=ConfigRecord({"lr": LR}))
