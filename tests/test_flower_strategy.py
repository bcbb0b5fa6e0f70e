"""The strategy and the client app, with messages that are really written and read, but no network.

``test_flower_deployed.py`` does the same across processes, over TLS.
"""

from __future__ import annotations

import io
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedshuffle import Federation, LocalWork, _files, losses, methods, train
from fedshuffle.auditing.adapters.flower import _identity
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import Client, FedShuffleStrategy, client_app, messages
from fedshuffle.flower import client as client_module
from fedshuffle.flower import spool as spool_module
from fedshuffle.flower.round import Round
from fedshuffle.flower.spool import Spool
from fedshuffle.kernel import Probe, Walk
from fedshuffle.local_work import AtMost
from fedshuffle.rounds import Run
from fedshuffle.runs import RunFolder
from fedshuffle.state import State
from tests.flower_grid import Fault, LocalGrid
from tests.problems import unit_vectors

SIZES = [3, 7, 12, 5]
WORK = LocalWork(epochs=2, batch_size=2, weight_decay=0.01)
FEDERATION = Federation.from_arrays(
    torch.from_numpy(np.random.default_rng(0).normal(size=(27, 4)).astype(np.float32)),
    torch.arange(27) % 3,
    sizes=SIZES,
)
DEPLOYABLE = [
    method.name
    for method in methods.available()
    if not (method.direction.client_state or method.pooled or method.balanced_only)
]


@pytest.fixture(autouse=True)
def _a_server_process() -> Iterator[None]:
    with _identity():
        yield


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))


def own(client: int) -> tuple[Tensor, ...]:
    first, last = FEDERATION.offsets[client : client + 2]
    return tuple(field[first:last] for field in FEDERATION.tensors())


def data(context: Context) -> tuple[Tensor, ...]:
    return own(int(context.node_config["partition-id"]))


def apps(**options: Any) -> list[ClientApp]:
    return [client_app(model, data, losses.cross_entropy, **options)] * len(SIZES)


def start() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def simulated(rounds: int = 4, federation: Federation = FEDERATION, **options: Any) -> nn.Module:
    options = {"method": "fedshuffle", "sampling": "uniform:2", "work": WORK, "seed": 3} | options
    options = {"step_size": 0.05} | options
    return train(model(), federation, loss=losses.cross_entropy, rounds=rounds, **options).model


def strategy(**options: Any) -> FedShuffleStrategy:
    options = {"method": "fedshuffle", "sampling": "uniform:2", "work": WORK, "seed": 3} | options
    options = {"clients": len(SIZES), "step_size": 0.05} | options
    return FedShuffleStrategy(**options)


def same(arrays: ArrayRecord, other: nn.Module) -> bool:
    """Bit for bit."""
    found = arrays.to_torch_state_dict()
    return all(torch.equal(found[name], value) for name, value in other.state_dict().items())


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("flwr")  # it does not propagate by itself
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


# The same trajectory -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEPLOYABLE)
def test_the_trajectory_is_that_of_the_simulator(name: str) -> None:
    result = strategy(method=name).start(LocalGrid(apps()), start(), 3)
    assert same(result.arrays, simulated(3, method=name))


def test_the_step_size_and_the_epochs_may_vary() -> None:
    options: dict[str, Any] = {
        "work": LocalWork(epochs=[1, 2, 1, 3], batch_size=2, order="once", clip=0.5),
        "step_size": lambda round: 0.1 / (1 + round),
        "server_step_size": 1.5,
        "sampling": "importance:2",
        "seed": 2**64 - 1,
    }
    result = strategy(**options).start(LocalGrid(apps()), start(), 3)
    assert same(result.arrays, simulated(3, **options))


def test_flowers_own_loop_gives_the_same() -> None:
    ours = strategy(method="fedshuffle-mvr")
    result = Strategy.start(ours, LocalGrid(apps()), start(), 3)
    assert same(result.arrays, simulated(3, method="fedshuffle-mvr"))
    assert result.train_metrics_clientapp[2]["answered"] == 2


def test_flowers_own_loop_may_run_twice_but_keeps_no_folder(tmp_path: Path) -> None:
    ours = strategy(method="fedshuffle-mvr")
    for _ in range(2):
        result = Strategy.start(ours, LocalGrid(apps()), start(), 2)
        assert same(result.arrays, simulated(2, method="fedshuffle-mvr"))
    with pytest.raises(FedShuffleError, match="written by start"):
        Strategy.start(strategy(out=tmp_path / "run"), LocalGrid(apps()), start(), 1)


@pytest.mark.parametrize("other", [2, 9])
def test_in_flowers_own_loop_nobody_answers_for_another(
    other: int, log: pytest.LogCaptureFixture
) -> None:
    ours, grid = strategy(sampling="full"), LocalGrid(apps())
    replies = grid.send_and_receive(ours.configure_train(1, start(), ConfigRecord(), grid))
    replies[1].content.config_records["fedshuffle"]["client"] = other
    _, metrics = ours.aggregate_train(1, [*replies, replies[3]])
    assert metrics is not None
    assert metrics["answered"] == 3
    assert f"client {other} answered for client 1" in warnings(log)
    assert "answers twice" in warnings(log)


def test_a_loop_of_ones_own_may_begin_at_any_round_but_takes_no_old_answers(
    log: pytest.LogCaptureFixture,
) -> None:
    def orders(ours: FedShuffleStrategy, round: int, grid: LocalGrid) -> list[Message]:
        return list(ours.configure_train(round, start(), ConfigRecord(), grid))

    grid = LocalGrid(apps())
    later, before = strategy(), strategy()
    assert orders(later, 6, grid)[0].metadata.group_id == "6"
    sixth = {m.metadata.dst_node_id - 100 for m in orders(later, 6, grid)}
    assert sixth == set(before._run().cohort(5).clients.tolist())

    ours = strategy(sampling="full")
    old = grid.send_and_receive(orders(ours, 1, grid))
    orders(ours, 2, grid)
    _, metrics = ours.aggregate_train(2, old)
    assert metrics is not None
    assert metrics["answered"] == 0
    assert "answers to another round" in warnings(log)
    with pytest.raises(FedShuffleError, match="leave out retries"):
        orders(strategy(retries=1), 1, grid)


def test_clients_that_are_slow_to_introduce_themselves_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow() -> LocalGrid:
        """One introduction arrives at a time, and only at every second look."""
        grid, looks, look = LocalGrid(apps()), itertools.count(), LocalGrid.pull_messages

        def pull(ids: Any) -> list[Message]:
            asked = dict(zip(map(str, itertools.count(1)), grid.asked))
            hellos = [id for id in ids if asked[id][1] == messages.HELLO]
            if hellos and next(looks) % 2 == 0:
                return []
            return look(grid, hellos[:1] or ids)

        monkeypatch.setattr(grid, "pull_messages", pull)
        return grid

    monkeypatch.setattr("fedshuffle.flower.roster._PAUSE", 0.0)
    known: dict[str, Any] = {"sampling": "full", "sizes": SIZES}
    grid, ours = slow(), strategy(**known)
    assert len(list(ours.configure_train(1, start(), ConfigRecord(), grid))) == len(SIZES)
    result = strategy(**known, evaluate_every=1).start(slow(), start(), 1)
    assert result.train_metrics_clientapp[1]["answered"] == len(SIZES)
    result = strategy(sizes=SIZES, sampling="one", evaluate_every=1).start(slow(), start(), 1)
    assert result.evaluate_metrics_clientapp[1]["clients"] == len(SIZES)


def test_what_is_not_trained_must_be_the_same_on_the_server() -> None:
    def half() -> nn.Module:
        made = model()
        made.get_parameter("0.weight").requires_grad = False
        return made

    grid = LocalGrid([client_app(half, data, losses.cross_entropy)] * 4)
    other = half().state_dict()
    other["0.weight"] = other["0.weight"] * 2
    with pytest.raises(FedShuffleError, match=r"'0\.weight' is not trained, and has other values"):
        strategy().start(grid, ArrayRecord(other), 1)
    del other["0.weight"]  # who does not need it need not have it
    assert list(strategy().start(grid, ArrayRecord(other), 1).arrays) == list(other)


def test_sizes_may_be_of_numpy() -> None:
    result = strategy(sizes=FEDERATION.sizes).start(LocalGrid(apps()), start(), 1)
    assert same(result.arrays, simulated(1))


def test_numbers_may_be_of_numpy() -> None:
    work = replace(WORK, batch_size=np.int64(2))  # type: ignore[arg-type]
    result = strategy(work=work).start(LocalGrid(apps()), start(), 1)
    assert same(result.arrays, simulated(1))


def test_a_frozen_part_stays_as_it_is() -> None:
    def half() -> nn.Module:
        made = model()
        made.get_parameter("0.weight").requires_grad = False
        return made

    app = client_app(half, data, losses.cross_entropy)
    result = strategy().start(LocalGrid([app] * 4), ArrayRecord(half().state_dict()), 2)
    expected = train(
        half(),
        FEDERATION,
        loss=losses.cross_entropy,
        rounds=2,
        sampling="uniform:2",
        work=WORK,
        seed=3,
        step_size=0.05,
    )
    assert same(result.arrays, expected.model)


def test_a_parameter_under_two_names_is_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.second(torch.tanh(self.first(x)))
            return found

    app = client_app(Tied, data, losses.cross_entropy)
    result = strategy().start(LocalGrid([app] * 4), ArrayRecord(Tied().state_dict()), 2)
    options: dict[str, Any] = {"sampling": "uniform:2", "work": WORK, "seed": 3, "step_size": 0.05}
    expected = train(Tied(), FEDERATION, loss=losses.cross_entropy, rounds=2, **options)
    assert same(result.arrays, expected.model)


def test_only_a_few_answers_are_in_memory_at_a_time() -> None:
    n = 50

    def one(context: Context) -> tuple[Tensor, ...]:
        return own(int(context.node_config["partition-id"]) % 4)

    grid = LocalGrid([client_app(model, one, losses.cross_entropy)] * n)
    FedShuffleStrategy(n, work=LocalWork(batch_size=8)).start(grid, start(), 1)
    assert 0 < grid.most_in_hand <= 16


@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-mvr"])
def test_what_lies_on_disk_counts_as_what_lies_in_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "IN_MEMORY", 43 * 4)  # one update
    result = strategy(method=name, sampling="full").start(LocalGrid(apps()), start(), 2)
    assert same(result.arrays, simulated(2, method=name, sampling="full"))


# Clients that fail -------------------------------------------------------------------------------


def expected_update(run: Run, answers: np.ndarray, done: np.ndarray) -> np.ndarray:
    """The mean of the update of a round, over every cohort and everybody who may answer."""
    d = len(run.federation)
    state = State(torch.zeros(d, dtype=torch.float64))
    cohorts = run.sampling.cohorts(1000)
    assert cohorts is not None
    mean = np.zeros(d)
    for members, chance in cohorts:
        for pattern in itertools.product([True, False], repeat=len(members)):
            there = dict(zip(members.tolist(), pattern, strict=True))
            odds = np.prod([answers[i] if t else 1 - answers[i] for i, t in there.items()])
            if odds and there:  # nobody moves nothing
                mean += chance * odds * update(run, state, answers, there, done)
    return mean


def update(
    run: Run, state: State, answers: np.ndarray, there: dict[int, bool], done: np.ndarray
) -> np.ndarray:
    """The update of one round in which only some answer; client i walks along axis i."""
    members = np.array(list(there), dtype=np.int64)
    drawn = Round(run, state, answers)
    drawn.cohort = replace(
        run.cohort(0),
        clients=members,
        weight=run.federation.weights[members],
        probability=run.sampling.p[members],
        planned=run.workload.alone[0][members, 0],
        done=run.workload.alone[0][members, 0],
    )
    request = drawn.next()
    assert isinstance(request, Walk)
    spool = Spool((len(state.x),), torch.float64)
    for order in request.orders:
        i = order.minibatches.client
        if there[i]:
            axis = torch.eye(len(state.x), dtype=torch.float64)[i]
            spool.put(i, axis * min(int(done[i]), order.minibatches.steps) * order.step_size)
    planned = drawn.cohort.planned
    drawn.answered(spool, np.minimum(done[members], planned))
    after = drawn.next()
    assert isinstance(after, State)
    return (after.x - state.x).numpy()


@pytest.mark.parametrize("sampling", ["full", "uniform:2", "importance:2", "independent:.3,.9,.5"])
@pytest.mark.parametrize("most", [100, 2])
def test_by_the_stated_dropout_the_mean_round_is_that_of_all(sampling: str, most: int) -> None:
    """Brute force: with probability to be sampled *and* to answer, and unfinished work repaired,
    the mean over all that may happen is the update of all clients with all their steps.
    """
    federation = unit_vectors([2, 5, 3]).federation
    run = Run(federation, "fedshuffle-gen", sampling, step_size=0.1)
    answers = np.array([0.6, 1.0, 0.25])
    mean = expected_update(run, answers, np.full(3, most))
    assert np.allclose(mean, federation.weights * 0.1 * 5, rtol=1e-12)


def test_without_a_stated_dropout_the_mean_round_is_biased() -> None:
    federation = unit_vectors([2, 5, 3]).federation
    run = Run(federation, "fedshuffle-gen", "uniform:2", step_size=0.1)
    state, there = State(torch.zeros(3, dtype=torch.float64)), {0: True, 1: False}
    moved = update(run, state, np.ones(3), there, np.full(3, 100))
    assert np.allclose(moved, [federation.weights[0] / (2 / 3) * 0.1 * 5, 0, 0])


def test_the_remembered_momentum_is_unbiased_under_the_stated_dropout() -> None:
    """The momentum of exact MVR, over all who may answer the probe and then the walk."""
    federation = unit_vectors([2, 5, 3]).federation
    run = Run(federation, "fedshuffle-mvr", "full", step_size=0.1)
    answers, state = np.array([0.6, 1.0, 0.25]), State(torch.zeros(3, dtype=torch.float64))
    axes = torch.eye(3, dtype=torch.float64)
    mean = torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.product(itertools.product([True, False], repeat=3), repeat=2):
        odds = 1.0
        for i in range(3):
            odds *= answers[i] if first[i] else 1 - answers[i]
            if first[i]:
                odds *= answers[i] if second[i] else 1 - answers[i]
            elif second[i]:
                odds = 0.0  # not asked
        if not odds:
            continue
        drawn = Round(run, state, answers)
        assert isinstance(drawn.next(), Probe)
        spool = Spool((1, 3), torch.float64)
        for i in range(3):
            if first[i]:
                spool.put(i, axes[i : i + 1])
        drawn.answered(spool)
        assert isinstance(drawn.next(), Walk)
        spool = Spool((3,), torch.float64)
        for i in range(3):
            if second[i]:
                spool.put(i, axes[i])
        drawn.answered(spool, drawn.cohort.planned)
        after = drawn.next()
        assert isinstance(after, State)
        mean += odds * after.memory.get("momentum", torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(mean, torch.tensor(federation.weights), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "said"), [("fedshuffle-mvr", True), ("fedlin", True), ("mime-lite", False)]
)
def test_who_steers_and_walks_is_called_biased_under_dropout(
    name: str, said: bool, log: pytest.LogCaptureFixture
) -> None:
    strategy(method=name, answers=0.9).summary()
    assert (f"mean round of {name} is biased" in warnings(log)) is said


def test_a_client_that_fails_is_left_out_named_and_called_biased(
    log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fault(client: int, message: Message) -> str | None:
        second = message.metadata.group_id == "2"
        return "raises" if client == 2 and second else None

    grid = LocalGrid(apps(), fault)
    strategy(sampling="full", out=tmp_path / "run").start(grid, start(), 3)
    _, second, third = RunFolder(tmp_path / "run").metrics()
    assert second["missing"] == {"2": "failed: the client failed (Flower's error 2)"}
    assert (second["clients"], second["answered"], second["as_stated"]) == (4, 3, False)
    assert (third["answered"], third["as_stated"]) == (4, True)
    assert "client 2 failed" in warnings(log)
    assert "estimate of round 2 is biased" in warnings(log)


def test_a_stated_dropout_is_as_stated(log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    grid = LocalGrid(apps(), walking("gone", 1))
    strategy(sampling="full", answers=0.75, out=tmp_path / "run").start(grid, start(), 1)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert record["missing"]["1"].startswith("failed: node unavailable")
    assert record["as_stated"]
    assert "biased" not in warnings(log)


def _walks(message: Message) -> bool:
    return bool(message.metadata.message_type == messages.WALK)


def walking(fault: str, only: int | None = None) -> Fault:
    """What goes wrong when a client, or only this one, is asked to walk."""
    return lambda client, message: fault if _walks(message) and only in (None, client) else None


def test_a_client_that_is_asked_again_changes_nothing() -> None:
    failed: set[tuple[int, str, str]] = set()

    def once(client: int, message: Message) -> str | None:
        key = (client, message.metadata.message_type, message.metadata.group_id)
        if key in failed or message.metadata.message_type == messages.HELLO:
            return None
        failed.add(key)
        return "raises" if client % 2 else "gone"

    grid = LocalGrid(apps(), once)
    result = strategy(method="fedshuffle-mvr", retries=1).start(grid, start(), 3)
    assert same(result.arrays, simulated(3, method="fedshuffle-mvr"))
    assert len(failed) == 3 * 2 * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedavg", "does not go by the probability"),
        ("fednova", "does not go by the probability"),
        ("fedshuffle-mvr", "those that walk are among"),
        ("fedshuffle-gen", ""),
    ],
)
def test_what_dropout_does_to_a_method_is_said_at_the_start(
    name: str, said: str, log: pytest.LogCaptureFixture
) -> None:
    strategy(method=name).summary()
    assert not warnings(log)
    strategy(method=name, answers=0.9).summary()
    assert said in warnings(log)
    assert bool(said) == bool(warnings(log))


def test_a_silent_client_is_not_waited_for_beyond_the_timeout(tmp_path: Path) -> None:
    grid = LocalGrid(apps(), walking("silent", 0))
    ours = strategy(sampling="full", out=tmp_path / "run", answers=0.9)
    ours.start(grid, start(), 1, timeout=0.3)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert record["missing"] == {"0": "did not answer within 0.3 seconds"}


def test_a_client_that_is_away_takes_part_when_it_is_back(tmp_path: Path) -> None:
    grid = LocalGrid(apps())

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {3} if round == 1 else set()

    ours = strategy(sampling="full", out=tmp_path / "run")
    ours.start(grid, start(), 3, evaluate_fn=evaluate)
    records = RunFolder(tmp_path / "run").metrics()
    assert [record["missing"] for record in records] == [{}, {"3": "is not connected"}, {}]


def test_messages_that_are_not_taken_are_accounted_for(tmp_path: Path) -> None:
    def fault(client: int, message: Message) -> str | None:
        walks = message.metadata.message_type == messages.WALK
        return "refused" if walks and client in (0, 2) else None

    grid = LocalGrid(apps(), fault)
    strategy(sampling="full", out=tmp_path / "run").start(grid, start(), 1)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert set(record["missing"]) == {"0", "2"}
    assert "the SuperLink refused the message" in record["missing"]["0"]
    assert not record["as_stated"]


def test_rounds_in_vain_may_be_as_stated() -> None:
    grid = LocalGrid(apps(), walking("gone"))
    result = strategy(answers=0.3).start(grid, start(), 5)  # by chance in 0.7 ** 10
    assert result.train_metrics_clientapp[5]["answered"] == 0
    with pytest.raises(FedShuffleError, match="nobody answered in 4 rounds in a row"):
        strategy(answers=0.85).start(LocalGrid(apps(), walking("gone")), start(), 5)


def test_nobody_answers_and_nothing_changes() -> None:
    grid = LocalGrid(apps(), walking("gone"))
    result = strategy().start(grid, start(), 2)
    assert same(result.arrays, model())
    assert result.train_metrics_clientapp[2]["answered"] == 0


def test_a_run_in_which_nobody_ever_answers_stops(tmp_path: Path) -> None:
    grid = LocalGrid(apps(), walking("raises"))
    with pytest.raises(FedShuffleError, match=r"nobody answered in 3 rounds in a row.*failed"):
        strategy(out=tmp_path / "run").start(grid, start(), 9)
    result = strategy(out=tmp_path / "run", resume=True).start(LocalGrid(apps()), start(), 4)
    assert result.train_metrics_clientapp[3]["answered"] == 2


def test_a_silent_stranger_holds_up_nobody() -> None:
    grid = LocalGrid([*apps(), apps()[0]], lambda client, m: "silent" if client == 4 else None)
    result = strategy(sampling="full").start(grid, start(), 1, timeout=1e6)
    assert result.train_metrics_clientapp[1]["answered"] == 4


def test_the_second_of_two_answers_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = LocalGrid(apps())
    pulled = grid.pull_messages
    monkeypatch.setattr(grid, "pull_messages", lambda ids: 2 * pulled(ids))
    assert same(strategy().start(grid, start(), 2).arrays, simulated(2))


def test_a_full_disk_is_not_the_fault_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise FedShuffleError("cannot keep what clients send")

    monkeypatch.setattr(Spool, "put", full)
    with pytest.raises(FedShuffleError, match="cannot keep"):
        strategy(answers=0.9).start(LocalGrid(apps()), start(), 1)


def test_the_returning_client_may_be_at_another_node() -> None:
    grid = LocalGrid([*apps(), apps()[0]])

    def moved(message: Message, context: Context) -> Message:
        client = Client(0, model(), own(0), losses.cross_entropy)
        return client.answer(message)

    app = ClientApp()
    app.query("hello")(moved)
    app.train()(moved)
    grid.apps[4] = app
    grid.away = {4}

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {0} if round == 1 else grid.away

    result = strategy(sampling="full").start(grid, start(), 3, evaluate_fn=evaluate)
    assert same(result.arrays, simulated(3, sampling="full"))


# Unfinished work ---------------------------------------------------------------------------------


class _Ticks:
    """A clock that moves on by one at every look."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    def sleep(self, seconds: float) -> None: ...


@pytest.mark.parametrize("name", ["fedshuffle-gen", "fednova", "fedshuffle-mvr+fedshuffle-gen"])
def test_unfinished_work_counts_by_the_steps_really_done(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "time", _Ticks())
    # The first look starts the clock; a look before each further step: three steps in three ticks.
    grid = LocalGrid(apps(seconds=3))
    result = strategy(method=name).start(grid, start(), 3)
    work = replace(WORK, interruption=AtMost(3))
    assert same(result.arrays, simulated(3, method=name, work=work))


def test_a_method_that_does_not_repair_is_called_biased(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_module, "time", _Ticks())
    strategy(out=tmp_path / "run").start(LocalGrid(apps(seconds=3)), start(), 1)
    assert "fedshuffle does not repair" in warnings(log)
    assert not RunFolder(tmp_path / "run").metrics()[0]["as_stated"]


# Sizes that are withheld -------------------------------------------------------------------------


def test_sizes_can_be_withheld() -> None:
    """Clients scale their steps themselves: the walk is as long as FedShuffle's, of the objective
    in which clients count alike.
    """
    grid = LocalGrid(apps(share_size=False))
    ours = strategy(sizes="withheld", step_size=0.3)
    result = ours.start(grid, start(), 3)
    equal = Federation.from_arrays(*FEDERATION.fields, sizes=SIZES, weights=[1, 1, 1, 1])
    expected = simulated(3, equal, step_size=0.3 / 6)  # the longest has six steps an epoch
    found = result.arrays.to_torch_state_dict()
    for name, value in expected.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_withheld_sizes_stand_in_no_message() -> None:
    seen: list[dict[str, Any]] = []
    client = Client(1, model(), own(1), losses.cross_entropy, share_size=False, seconds=1e-9)

    def spy(message: Message, context: Context) -> Message:
        reply = client.answer(message)
        for record in (message, reply):
            seen.append(dict(record.content.config_records.get("fedshuffle", {})))
        return reply

    app = ClientApp()
    app.query("hello")(spy)
    app.train()(spy)
    FedShuffleStrategy(2, sizes="withheld", work=WORK).start(
        LocalGrid([apps(share_size=False)[0], app]), start(), 1
    )
    assert len(seen) == 4
    assert not any("size" in words for words in seen)
    # Epochs, not steps: 2 of them, though the client stopped after the first step.
    assert [words["steps"] for words in seen if "steps" in words] == [2, 2]


def test_a_client_repairs_itself_where_its_size_is_withheld(
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


def test_a_withheld_size_cannot_be_guessed(log: pytest.LogCaptureFixture) -> None:
    ours = strategy(sampling="full", sizes=[3, 8, 12, 5], answers=0.9)
    ours.start(LocalGrid(apps(share_size=False)), start(), 1)
    assert "client 1 withholds its size" in warnings(log)
    assert "7 examples" not in warnings(log)


def test_sizes_that_are_asked_for_and_withheld() -> None:
    with pytest.raises(FedShuffleError, match="client 0 withholds its size"):
        strategy().start(LocalGrid(apps(share_size=False)), start(), 1)


# Answers that cannot be right --------------------------------------------------------------------


def lying(**lies: Any) -> ClientApp:
    """A client 1 that sends something else than it should."""
    client = Client(1, model(), own(1), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = client.answer(message)
        if _walks(message):
            words = messages.Done(lies.get("client", 1), lies.get("steps", 8))
            d = len(client.problem.start)
            update = lies.get("update", torch.zeros(d))
            reply = Message(
                messages.content(words, messages.arrays(**{lies.get("name", "update"): update})),
                reply_to=message,
            )
        return reply

    app = ClientApp()
    app.query("hello")(answer)
    app.train()(answer)
    return app


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"update": torch.zeros(3)}, "has shape"),
        ({"update": torch.full((43,), torch.nan)}, "not finite"),
        ({"update": torch.zeros(43, dtype=torch.int64)}, "floating point"),
        ({"update": torch.full((43,), 1e300, dtype=torch.float64)}, "not finite"),
        ({"update": torch.full((43,), 3.4e38)}, "too long"),
        ({"update": torch.full((43,), -1e30)}, "too long"),
        ({"steps": 9}, "did 9 of 8 steps"),
        ({"steps": 0}, "did 0 of 8 steps"),
        ({"client": 2}, "client 2 answered for client 1"),
        ({"name": "other"}, "which nobody reads"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(
    lie: dict[str, Any], said: str, log: pytest.LogCaptureFixture
) -> None:
    all_apps = apps()
    all_apps[1] = lying(**lie)
    result = strategy(sampling="full", answers=0.9).start(LocalGrid(all_apps), start(), 1)
    assert result.train_metrics_clientapp[1]["answered"] == 3
    assert said in warnings(log)


def test_a_model_that_is_not_finite_is_neither_taken_nor_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that are finite one by one, but not when they are weighed."""
    all_apps = apps()
    all_apps[1] = lying(update=torch.full((43,), 3e37))
    monkeypatch.setattr("fedshuffle.flower.asking.LONGEST", float("inf"))
    ours = {"sampling": "full", "server_step_size": 200.0, "out": tmp_path / "run"}
    strategy(**ours).start(LocalGrid(apps()), start(), 1)
    with pytest.raises(FedShuffleError, match=r"round 2.*Client 1") as error:
        strategy(**ours, resume=True).start(LocalGrid(all_apps), start(), 3)
    assert "\n" not in str(error.value)
    latest = RunFolder(tmp_path / "run").latest()
    assert latest is not None
    assert latest.round == 1
    assert latest.x.isfinite().all()


def _written(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def _zipped() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(2))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 no archive",
        _zipped(),
        _written(np.zeros(43, np.float32)).replace(b"(43,), }".ljust(20), b"(43000000000000,), }"),
        _written(np.zeros(43, np.float32)).replace(b"{'descr'", b"{{{descr"),
        _written(np.zeros(43, np.longdouble)),
        _written(np.zeros(43, ">f4")),
    ],
)
def test_bytes_that_are_no_array_are_refused(data: bytes) -> None:
    record = ArrayRecord({"update": Array("float32", (43,), "numpy.ndarray", data)})
    message = Message(RecordDict({"arrays": record}), 1, "train")
    with pytest.raises(FedShuffleError, match="the array 'update'"):
        messages.vectors(message, torch.float32, update=[43])


@pytest.mark.parametrize(
    "parameters", ["[1]", "[" * 100_000, '{"0.weight": [Infinity]}', b"\xff", "{}"]
)
def test_an_introduction_that_cannot_be_right_is_refused(
    parameters: str | bytes, log: pytest.LogCaptureFixture
) -> None:
    client = Client(0, model(), own(0), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = client.answer(message)
        reply.content.config_records["fedshuffle"]["parameters"] = parameters
        return reply

    app = ClientApp()
    app.query("hello")(answer)
    ours = strategy(sampling="full", sizes=SIZES, answers=0.9)
    result = ours.start(LocalGrid([app, *apps()[1:]]), start(), 1)
    assert result.train_metrics_clientapp[1]["answered"] == 3
    assert "node 100 is no client of this run" in warnings(log)


def test_an_array_is_never_unpickled() -> None:
    class Marker:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([0]))
    head = buffer.getvalue()[:128].replace(b"'<i8'", b"'|O' ")
    record = ArrayRecord(
        {"x": Array("object", (1,), "numpy.ndarray", head + pickle.dumps(Marker()))}
    )
    message = Message(RecordDict({"arrays": record}), 1, "train")
    with pytest.raises(FedShuffleError, match="cannot be read"):
        messages.vectors(message, torch.float32, x=[1])


def test_a_client_refuses_what_is_not_for_it() -> None:
    client = Client(1, model(), own(1), losses.cross_entropy)
    question = messages.Question(2, 0)
    x = messages.arrays(points=torch.zeros(1, 43))
    with pytest.raises(FedShuffleError, match="for client 2, and this is client 1"):
        client.answer(Message(messages.content(question, x), 1, messages.PROBE))
    with pytest.raises(FedShuffleError, match=r"of type 'train\.other'"):
        client.answer(Message(RecordDict({}), 1, "train.other"))
    with pytest.raises(FedShuffleError, match="no words of fedshuffle"):
        client.answer(Message(RecordDict({}), 1, messages.WALK))


def test_data_that_changed_are_refused(log: pytest.LogCaptureFixture) -> None:
    ours = strategy(sampling="full", sizes=[3, 8, 12, 5], answers=0.9)
    ours.start(LocalGrid(apps()), start(), 1)
    assert "client 1 has 7 examples, but the server planned for 8" in warnings(log)


# Who is who --------------------------------------------------------------------------------------


def test_nodes_that_are_no_clients_of_the_run(log: pytest.LogCaptureFixture) -> None:
    def other() -> nn.Module:
        return nn.Linear(4, 3)

    strange = [
        client_app(model, data, losses.cross_entropy, number=lambda context: 9),
        client_app(model, lambda c: own(0), losses.cross_entropy, number=lambda context: 0),
        client_app(other, lambda c: own(0), losses.cross_entropy, number=lambda context: 3),
    ]
    with pytest.raises(FedShuffleError, match=r"3 of 4 clients came within .* client 3"):
        strategy().start(LocalGrid([*apps()[:3], *strange]), start(), 1, timeout=0.1)
    said = warnings(log)
    assert "it says that it is client 9" in said
    assert "it says that it is client 0, and so does node 100" in said
    assert "differ in their model's parameters" in said


def test_a_node_cannot_pass_for_another_client(log: pytest.LogCaptureFixture) -> None:
    registered = {100: 0, 101: 1, 102: 3, 103: 2}
    with pytest.raises(FedShuffleError, match="2 of 4 clients came"):
        strategy(nodes=registered).start(LocalGrid(apps()), start(), 1, timeout=0.1)
    assert "it says that it is client 2, but is not registered so" in warnings(log)


def test_registered_nodes_of_known_sizes_are_not_all_asked_who_they_are() -> None:
    n = 40

    def one(context: Context) -> tuple[Tensor, ...]:
        return own(int(context.node_config["partition-id"]) % 4)

    grid = LocalGrid([client_app(model, one, losses.cross_entropy)] * n)
    nodes = {100 + k: k for k in range(n)}
    sizes = [SIZES[k % 4] for k in range(n)]
    ours = strategy(clients=n, nodes=nodes, sizes=sizes, evaluate_every=3)
    result = ours.start(grid, start(), 3)
    assert sum(kind == messages.HELLO for _, kind in grid.asked) == 16
    assert result.train_metrics_clientapp[3]["answered"] == 2
    assert result.evaluate_metrics_clientapp[3]["clients"] == n


def test_a_stranger_that_says_nothing_is_asked_once(log: pytest.LogCaptureFixture) -> None:
    def fault(client: int, message: Message) -> str | None:
        return "silent" if client == 4 else None

    grid = LocalGrid([*apps(), apps()[0]], fault)

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {3}

    strategy(sampling="full", answers=0.9).start(
        grid, start(), 4, timeout=0.3, evaluate_fn=evaluate
    )
    assert grid.asked.count((4, messages.HELLO)) == 1


def test_those_who_answered_are_heard_while_a_newcomer_says_nothing() -> None:
    def fault(client: int, message: Message) -> str | None:
        return "silent" if client == 4 else None

    grid = LocalGrid([*apps(), apps()[0]], fault)
    grid.away = {4}

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        grid.away = {3}

    ours = strategy(sampling="full", answers=0.9, retries=1)
    result = ours.start(grid, start(), 1, timeout=0.5, evaluate_fn=evaluate)
    assert (4, messages.HELLO) in grid.asked
    assert result.train_metrics_clientapp[1]["answered"] == 3


def test_a_client_that_comes_late_is_met_while_a_stranger_says_nothing(
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
    assert result.train_metrics_clientapp[1]["answered"] == 4


def test_why_nobody_came_is_said() -> None:
    def broken(context: Context) -> Any:
        raise RuntimeError("no disk")

    app = client_app(model, broken, losses.cross_entropy)
    with pytest.raises(FedShuffleError, match=r"0 of 4 .* was refused \(as 3 more\).*no disk"):
        strategy().start(LocalGrid([app] * 4), start(), 1, timeout=0.1)
    with pytest.raises(FedShuffleError, match=r"client 0 is missing. Start it, or another\.$"):
        strategy(sizes=SIZES).start(LocalGrid([]), start(), 1, timeout=0.1)


@pytest.mark.parametrize("nodes", [{1: 0, 2: 0}, {1: 4}, {1: -1}, {"a": 1}])
def test_impossible_nodes_are_refused(nodes: Any) -> None:
    with pytest.raises(FedShuffleError, match="nodes "):
        strategy(nodes=nodes)


def test_server_and_clients_must_have_the_same_model() -> None:
    with pytest.raises(FedShuffleError, match="not among the server's arrays"):
        strategy().start(LocalGrid(apps()), ArrayRecord(nn.Linear(4, 3).state_dict()), 1)
    wider = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    with pytest.raises(FedShuffleError, match=r"shape \(6, 4\) on the server and \(5, 4\)"):
        strategy().start(LocalGrid(apps()), ArrayRecord(wider.state_dict()), 1)


def test_another_protocol_is_refused() -> None:
    content = messages.content(messages.Question(0, 0))
    content.config_records["fedshuffle"]["protocol"] = 99
    with pytest.raises(FedShuffleError, match="protocol 99"):
        messages.read(Message(content, 1, messages.PROBE), messages.Question)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"client": "zero"}, "client is 'zero'"),
        ({"client": -1}, "out of range"),
        ({"round": True}, "round is True"),
        ({"more": 1}, "'more', which nobody reads"),
    ],
)
def test_words_are_checked(change: dict[str, Any], said: str) -> None:
    content = messages.content(messages.Question(0, 0))
    for key, value in change.items():
        content.config_records["fedshuffle"][key] = value
    with pytest.raises(FedShuffleError, match=said):
        messages.read(Message(content, 1, messages.PROBE), messages.Question)


# Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-mvr", "fedadam"])
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == 3:
            raise KilledError
        return MetricRecord({"loss": 0.5})

    options = {"method": name, "out": tmp_path / "run", "checkpoint_every": 2}
    with pytest.raises(KilledError):
        strategy(**options).start(LocalGrid(apps()), start(), 5, evaluate_fn=evaluate)
    other = ArrayRecord({k: v * 0 for k, v in model().state_dict().items()})  # it is not looked at
    result = strategy(**options, resume=True).start(LocalGrid(apps()), other, 5)
    assert same(result.arrays, simulated(5, method=name))
    assert [record["round"] for record in RunFolder(tmp_path / "run").metrics()] == [1, 2, 3, 4, 5]


def test_a_run_goes_on_only_as_it_began(tmp_path: Path) -> None:
    nobody = LocalGrid([])  # who is not waited for
    with pytest.raises(FedShuffleError, match="holds no run to go on with"):
        strategy(out=tmp_path / "run", resume=True).start(nobody, start(), 1)
    strategy(out=tmp_path / "run").start(LocalGrid(apps()), start(), 1)
    with pytest.raises(FedShuffleError, match="holds a run already"):
        strategy(out=tmp_path / "run").start(nobody, start(), 2)
    with pytest.raises(FedShuffleError, match="seed 3, not 4"):
        strategy(out=tmp_path / "run", resume=True, seed=4).start(LocalGrid(apps()), start(), 2)
    with pytest.raises(FedShuffleError, match="other probabilities to answer"):
        strategy(out=tmp_path / "run", resume=True, answers=0.5).start(
            LocalGrid(apps()), start(), 2
        )


def test_only_one_server_may_write_to_a_run(tmp_path: Path) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        with (
            pytest.raises(FedShuffleError, match="is being written"),
            _files.one_writer(tmp_path / "run"),
        ):
            raise AssertionError
        return MetricRecord({"rounds": round})

    strategy(out=tmp_path / "run").start(LocalGrid(apps()), start(), 1, evaluate_fn=evaluate)
    strategy(out=tmp_path / "run", resume=True).start(LocalGrid(apps()), start(), 2)


def test_metrics_that_are_not_finite_or_take_a_name(tmp_path: Path) -> None:
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": float("inf"), "answered": 9.0, "steps": 9})

    strategy(out=tmp_path / "run").start(LocalGrid(apps()), start(), 1, evaluate_fn=evaluate)
    (record,) = RunFolder(tmp_path / "run").metrics()
    assert np.isnan(record["loss"])
    assert (record["answered"], record["evaluated_answered"]) == (2, 9)
    assert record["evaluated_steps"] == 9


# Evaluation --------------------------------------------------------------------------------------


def test_clients_evaluate_by_objective_weight(tmp_path: Path) -> None:
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


def test_an_evaluation_that_cannot_be_right_is_refused(log: pytest.LogCaptureFixture) -> None:
    client = Client(1, model(), own(1), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = client.answer(message)
        if message.metadata.message_type == messages.EVALUATE:
            reply.content.config_records["fedshuffle"]["client"] = 2
        return reply

    app = ClientApp()
    for kind in (app.query("hello"), app.train(), app.evaluate()):
        kind(answer)
    ours = strategy(evaluate_every=1)
    result = ours.start(LocalGrid([apps()[0], app, *apps()[2:]]), start(), 1)
    assert result.evaluate_metrics_clientapp[1]["clients"] == 3
    assert "client 2 answered for client 1" in warnings(log)


def metrics_of(client: int, change: Callable[[dict[str, float]], dict[str, float]]) -> ClientApp:
    """A client that tells other metrics than it found."""
    inside = Client(client, model(), own(client), losses.cross_entropy)

    def answer(message: Message, context: Context) -> Message:
        reply = inside.answer(message)
        if message.metadata.message_type == messages.EVALUATE:
            found = dict(reply.content.metric_records["metrics"])
            reply.content["metrics"] = MetricRecord(change(found))
        return reply

    app = ClientApp()
    for kind in (app.query("hello"), app.train(), app.evaluate()):
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
def test_one_clients_metrics_do_not_spoil_those_of_all(
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


def test_a_metric_that_is_nowhere_finite_is_said_to_be_so() -> None:
    everyone = [metrics_of(k, lambda found: found | {"loss": float("nan")}) for k in range(4)]
    result = strategy(evaluate_every=1).start(LocalGrid(everyone), start(), 1)
    assert np.isnan(result.evaluate_metrics_clientapp[1]["loss"])


# Settings that cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "scaffold"}, "keeps a vector for every client"),
        ({"method": "pooled-rr", "sampling": "full"}, "all data in one place"),
        ({"sampling": "optimal:2"}, "optimal client sampling"),
        ({"sampling": "uniform"}, "incomplete"),
        ({"work": LocalWork(interruption=AtMost(1))}, "say themselves how much they did"),
        ({"method": "fednova", "sizes": "withheld"}, "needs the clients' numbers of steps"),
        ({"sizes": "withheld", "work": LocalWork(steps=3)}, "in epochs, not steps"),
        ({"sizes": "withheld", "sampling": "importance:2"}, "goes by size"),
        ({"sizes": "guessed"}, "unknown sizes 'guessed'"),
        ({"sizes": [1, 2]}, "4 clients, but 2 sizes"),
        ({"sizes": [1, 2, 0, 4]}, "client 2 has 0"),
        ({"clients": None}, "how many clients"),
        ({"answers": 0.0}, "positive"),
        ({"answers": [1, 1, 1]}, "each of the 4 clients"),
        ({"answers": 1.5}, "at most 1"),
        ({"timeout": 0}, "positive number of seconds"),
        ({"resume": True}, "needs the folder"),
        ({"retries": -1}, "retries is -1"),
        ({"nodes": {"100": 0}}, "which client each node is"),
        ({"weights": [1, 2]}, "each of the 4 clients"),
        ({"sampling": "uniform:9"}, "9 of 4"),
        ({"method": "fedavg-min+fedshuffle", "sizes": "withheld"}, "in epochs, not steps"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anybody_is_asked(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(FedShuffleError, match=said):
        strategy(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"number": -1}, "number of a client is -1"),
        ({"seconds": 0}, "seconds is 0"),
        ({"data": ()}, "at least 1"),
        ({"data": FEDERATION}, "not a federation"),
    ],
)
def test_a_client_that_cannot_be(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"number": 0, "data": own(0)} | options
    with pytest.raises(FedShuffleError, match=said):
        Client(given.pop("number"), model(), given.pop("data"), losses.cross_entropy, **given)


def test_a_node_without_a_number() -> None:
    app = apps()[0]
    context = Context(1, 1, {}, RecordDict({}), {})
    with pytest.raises(FedShuffleError, match="partition-id=0"):
        app(Message(RecordDict({}), 1, messages.HELLO), context)
