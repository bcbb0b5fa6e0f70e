"""Asynchronous training over Flower's messages, with clients of scripted speeds."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import ConsistentFedAvg, ConsistentFedBuff
from tests.flower.grid import Fault, LocalGrid
from tests.flower.helpers import warnings
from tests.flower.quickstart_app import momentum
from tests.flower.test_consistent_fedavg import (
    LR,
    MEANT,
    MOMENTUM,
    grid,
    model,
    shares,
    start,
)

pytestmark = pytest.mark.usefixtures("server_process")

TIMES = [1, 2, 5]
"""How many polls each client takes for a task."""


def speeds(times: list[int]) -> Fault:
    return lambda client, message: f"after:{times[client]}"


def run(schedule: str, on: LocalGrid, steps: int, **options: Any) -> Any:
    ours = ConsistentFedBuff(schedule, **options)
    return ours.start(on, start(len(on.apps)), steps, train_config=ConfigRecord({"lr": LR}))


def by_hand(buffer: int, exponent: float, steps: int) -> np.ndarray[Any, Any]:
    """Clients that loop: what arrives when, how stale it is, and what it moves, all counted."""
    version, begun, left = 0, [0, 0, 0], [*TIMES]
    waiting: list[tuple[int, int]] = []
    x, contributed = np.zeros(3), np.zeros(3)
    while version < steps:
        left = [ticks - 1 for ticks in left]
        arrived = [i for i in range(3) if left[i] == 0]
        for i in arrived:
            waiting.append((i, begun[i]))
            if len(waiting) == buffer and version < steps:
                fresh = [(i, (1 + version - start) ** -exponent) for i, start in waiting]
                for j, s in fresh:
                    contributed[j] += s
                for j, s in fresh:
                    x[j] += LR * 4 * s / 3 / (contributed[j] / (version + 1))
                version, waiting = version + 1, []
        for i in arrived:
            begun[i], left[i] = version, TIMES[i]
    return x


@pytest.mark.parametrize(("buffer", "exponent"), [(1, 0.0), (1, 0.5), (2, 0.5), (4, 1.0)])
def test_every_server_step_is_the_one_counted_by_hand(buffer: int, exponent: float) -> None:
    schedule = f"fedbuff:K={buffer},a={exponent}"
    options = {"objective": "clients", "local_steps": 4}
    found = run(schedule, grid(fault=speeds(TIMES)), 25, **options)
    expected = by_hand(buffer, exponent, 25)
    np.testing.assert_allclose(found.arrays["w"].numpy(), expected, rtol=1e-12)
    stale = [record["max-staleness"] for record in found.train_metrics_clientapp.values()]
    assert max(stale) > 0


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_slow_clients_count_as_meant(exponent: float) -> None:
    """Updates arrive as 10 : 5 : 2, and count as the examples do."""
    on = grid(fault=speeds(TIMES))
    found = run(f"fedasync:a={exponent}", on, 340)
    tasks = Counter(client for client, _ in on.asked)
    assert [tasks[client] for client in range(3)] == pytest.approx([200, 100, 40], rel=0.05)
    assert shares(found.arrays["w"].numpy()) == pytest.approx(MEANT, rel=0.04)


@pytest.mark.parametrize(("optimiser", "length"), [("sgd", float), (MOMENTUM, momentum)])
def test_equal_times_and_a_buffer_of_all_are_rounds(
    optimiser: str, length: Callable[[int], float]
) -> None:
    found = run("fedbuff:K=3,C=3", grid(length=length), 3, optimiser=optimiser).arrays["w"].numpy()
    rounds = model(ConsistentFedAvg(optimiser=optimiser), grid(length=length), 3)
    np.testing.assert_allclose(found, rounds, rtol=1e-12)
    assert shares(found) == pytest.approx(MEANT)


def test_concurrency_limits_who_trains_and_draws_among_the_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy: set[int] = set()
    most = 0

    def fault(client: int, message: Message) -> str:
        nonlocal most
        assert client not in busy
        busy.add(client)
        most = max(most, len(busy))
        return "after:2"

    on = grid([8] * 6, fault)
    pulled = on.pull_messages

    def pull(ids: Iterable[str]) -> list[Message]:
        replies = pulled(ids)
        busy.difference_update(m.metadata.src_node_id - 100 for m in replies)
        return replies

    monkeypatch.setattr(on, "pull_messages", pull)
    run("fedbuff:K=2,C=3", on, 60)
    tasks = Counter(client for client, _ in on.asked)
    assert most == 3
    assert all(10 <= tasks[client] <= 31 for client in range(6))  # 20.5 on average


def test_clients_join_leave_and_fail(log: pytest.LogCaptureFixture) -> None:
    def fault(client: int, message: Message) -> str | None:
        fails = client == 1 and message.content["config"]["server-round"] == 3
        return "raises" if fails else None

    on = grid(fault=fault)
    on.away = {2}

    def evaluate(step: int, arrays: ArrayRecord) -> None:
        on.away = {2} if step < 4 else {0}

    ours = ConsistentFedBuff("fedasync")
    config = ConfigRecord({"lr": LR})
    result = ours.start(on, start(), 8, train_config=config, evaluate_fn=evaluate)
    known = [record["clients-known"] for record in result.train_metrics_clientapp.values()]
    assert known[0] == 2
    assert known[-1] == 3
    assert "the client failed" in warnings(log)


def test_second_start_counts_from_its_own_first_step() -> None:
    def moved(ours: ConsistentFedBuff, on: LocalGrid) -> Any:
        config = ConfigRecord({"lr": LR})
        return ours.start(on, start(), 6, train_config=config, evaluate_fn=come).arrays["w"].numpy()

    def come(step: int, arrays: ArrayRecord) -> None:
        late.away = {2} if step < 4 else set()

    late = grid()
    late.away = {2}
    again, fresh = (ConsistentFedBuff("fedbuff:K=3", local_steps=4) for _ in range(2))
    moved(again, late)
    assert moved(again, grid()) == pytest.approx(moved(fresh, grid()))


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("deadline:60", "ConsistentFedAvg has rounds"),
        ("queued:C=2", "is not one of this strategy"),
    ],
)
def test_other_schedules_are_refused(schedule: str, says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        ConsistentFedBuff(schedule)


@pytest.mark.parametrize(
    ("fault", "why"), [("raises", "the client failed"), ("refused", "the SuperLink refused")]
)
def test_ends_if_every_task_fails(fault: str, why: str) -> None:
    with pytest.raises(FedShuffleError, match=f"9 tasks in a row failed.*{why}"):
        run("fedasync", grid(fault=lambda client, message: fault), 1)


def test_client_that_always_fails_ends_no_run_in_which_others_train() -> None:
    """While the others are at one task, it could fail any number of times."""

    def fault(client: int, message: Message) -> str:
        return "raises" if client == 0 else "after:50"

    on = grid(fault=fault)
    found = run("fedbuff:K=2", on, 5, objective="clients").arrays["w"].numpy()
    assert found[0] == 0 < min(found[1:])
    tasks = Counter(client for client, _ in on.asked)
    assert 2 <= tasks[0] <= tasks[1] + tasks[2]  # it is asked again, but does not keep Flower busy


def test_config_for_evaluation_is_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"evaluate_config has 'batch'.*evaluate_fn"):
        ConsistentFedBuff().start(grid(), start(), evaluate_config=ConfigRecord({"batch": 1}))


def test_log_says_once_what_uneven_steps_mean(log: pytest.LogCaptureFixture) -> None:
    run("fedbuff:K=3", grid(), 3)
    assert len({r for r in log.records if "That is exact" in r.getMessage()}) == 1


def test_client_without_steps_is_an_error_with_the_remedy() -> None:
    silent = grid(trained=lambda client, message: {"num-steps": None})
    with pytest.raises(FedShuffleError, match="does not report 'num-steps'"):
        run("fedasync", silent, 1)


def test_silent_clients_need_more_time() -> None:
    with pytest.raises(FedShuffleError, match=r"9 tasks in a row failed.*more time \(timeout"):
        ConsistentFedBuff().start(
            grid(fault=lambda client, message: "silent"), start(), timeout=0.01
        )


def test_wrapper_is_refused() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(ConsistentFedBuff(), 1.0, 1.0, 2)
    with pytest.raises(FedShuffleError, match="has no rounds, so another strategy cannot wrap it"):
        wrapped.start(grid(), start(), 1)
