"""Flower apps with a train function of their own: the weights their clients really get."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from fedshuffle import Federation, LocalWork
from fedshuffle.auditing import audit_privacy, audit_server
from fedshuffle.auditing.adapters import FlowerAggregator
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import ConsistentFedAvg, ConsistentFedBuff, client_app
from tests.flower.grid import Fault, LocalGrid
from tests.flower.helpers import warnings
from tests.flower.quickstart_app import (
    BEFORE,
    PAGE,
    SIZES,
    changes,
    counted,
    migrate,
    momentum,
    run,
)

pytestmark = pytest.mark.usefixtures("server_process")

MEANT = np.array(SIZES) / sum(SIZES)
LR = 0.25
MOMENTUM = "sgd:momentum=0.9"

Trained = Callable[[int, Message], dict[str, Any]]
"""What a client adds to its metrics, given its number and the message."""


def grid(
    sizes: list[int] = SIZES,
    fault: Fault | None = None,
    trained: Trained = lambda client, message: {},
    mods: Iterable[Any] = (),
    length: Callable[[int], float] = float,
) -> LocalGrid:
    """Clients that follow the gradient along their own coordinate, an epoch at batch size 8;
    ``length``: how far their steps go along a gradient of one.
    """
    app = ClientApp(mods=[*mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        config, steps = message.content["config"], sizes[client] // 8
        model = message.content["arrays"]["w"].numpy().copy()
        model[client] += config["lr"] * length(steps)
        metrics = {"num-examples": sizes[client], "num-steps": steps} | trained(client, message)
        metrics = {name: value for name, value in metrics.items() if value is not None}
        arrays = ArrayRecord({"w": Array(model)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = {"loss": float(context.node_config["partition-id"]), "num-examples": 1}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return LocalGrid([app] * len(sizes), fault)


def start(clients: int = 3) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(clients))})


def trained(strategy: FedAvg, on: LocalGrid, rounds: int = 1, **options: Any) -> Any:
    config = ConfigRecord({"lr": LR, **options})
    return strategy.start(on, start(len(on.apps)), rounds, train_config=config)


def model(*arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = trained(*arguments, **options).arrays["w"].numpy()
    return found


def shares(moved: np.ndarray[Any, Any]) -> list[float]:
    return list(moved / moved.sum())


# The app of the migration page


def test_three_lines_change() -> None:
    added = [line for _, before, after in changes() for line in after.splitlines()]
    removed = [line for _, before, after in changes() for line in before.splitlines()]
    both = set(added) & set(removed)
    of_client = [name for name, *_ in changes() if name == "client_app.py"]
    assert len([line for line in removed if line not in both]) == 2
    assert len([line for line in added if line not in both]) == 3
    assert len(of_client) == 1


@pytest.mark.parametrize("epochs", [1, 3])
def test_quickstart_is_biased_before_and_right_after(tmp_path: Path, epochs: int) -> None:
    config = {"local-epochs": epochs}
    before = run(BEFORE, tmp_path / "before", **config)
    assert before == pytest.approx(counted(epochs), rel=1e-5)
    after = run(migrate(tmp_path / "app"), tmp_path / "after", **config)
    assert after == pytest.approx(MEANT, rel=1e-5)


@pytest.mark.parametrize("sampling", ["full", "uniform:2"])
@pytest.mark.parametrize("name", ["FedAvg", "ConsistentFedAvg"])
def test_table_of_the_page_is_that_of_the_audit(name: str, sampling: str) -> None:
    federation = Federation.from_sizes(SIZES)
    work = LocalWork(batch_size=8, optimiser=MOMENTUM)
    fixed = ConsistentFedAvg(local_steps=4, mean_examples=32, optimiser=MOMENTUM)
    server = FlowerAggregator(FedAvg() if name == "FedAvg" else fixed, 3)
    found = audit_server(server, federation, sampling, work)
    assert found.consistent is (name == "ConsistentFedAvg")
    asked = "all three in every round" if sampling == "full" else "two of three"
    cells = [f"{weight:.1%}" for weight in found.effective_weights]
    assert f"| `{name}`, {asked} | {' | '.join(cells)} |\n" in PAGE.read_text(encoding="utf-8")


# Weights


@pytest.mark.parametrize("step_sizes", ["equal", "scaled"])
@pytest.mark.parametrize(("optimiser", "length"), [("sgd", float), (MOMENTUM, momentum)])
def test_second_round_is_exact_over_all_cohorts(
    step_sizes: Any, optimiser: str, length: Callable[[int], float]
) -> None:
    """Enumerate the cohorts of two rounds: after any first, the mean second is the right one."""

    def fresh() -> ConsistentFedAvg:
        return ConsistentFedAvg(step_sizes=step_sizes, optimiser=optimiser)

    cohorts = list(itertools.combinations(range(3), 2))
    for first in cohorts:
        moves = []
        for second in cohorts:
            sampled = [first, second]

            def away(client: int, message: Message, sampled: Any = sampled) -> str | None:
                return (
                    None
                    if client in sampled[int(message.content["config"]["server-round"]) - 1]
                    else "gone"
                )

            two, one = (model(fresh(), grid(fault=away, length=length), n) for n in (2, 1))
            moves.append(two - one)
        assert shares(np.mean(moves, axis=0)) == pytest.approx(MEANT)


def test_first_round_is_that_of_fednova() -> None:
    fault: Fault = lambda client, message: "gone" if client == 1 else None  # noqa: E731
    x = model(ConsistentFedAvg(), grid(fault=fault))
    weights, steps = np.array([8, 64]) / 72, np.array([1, 8])
    assert x[[0, 2]] == pytest.approx(weights * (weights @ steps) * LR)


@pytest.mark.parametrize(("optimiser", "length"), [("sgd", float), (MOMENTUM, momentum)])
def test_full_participation_moves_as_far_as_fedavg(
    optimiser: str, length: Callable[[int], float]
) -> None:
    strategies = ConsistentFedAvg(optimiser=optimiser), FedAvg()
    ours, theirs = (model(strategy, grid(length=length), 2) for strategy in strategies)
    assert ours.sum() == pytest.approx(theirs.sum())
    assert shares(ours) == pytest.approx(MEANT)


def test_equal_clients_give_fedavg() -> None:
    same = [16] * 3
    ours, theirs = (model(strategy, grid(same), 3) for strategy in (ConsistentFedAvg(), FedAvg()))
    assert ours == pytest.approx(theirs)


def test_scaled_step_sizes_reach_the_clients_from_their_second_round_on() -> None:
    sent: list[Any] = []

    def note(client: int, message: Message) -> dict[str, Any]:
        config = message.content["config"]
        sent.append((config["server-round"], config["lr"], config["planned-steps"]))
        return {}

    x = model(ConsistentFedAvg(step_sizes="scaled"), grid(trained=note), 2)
    mean = float(MEANT @ [1, 3, 8])
    first, second = ([s[1:] for s in sent if s[0] == round] for round in (1, 2))
    assert first == [(LR, 0)] * 3
    assert second == [(pytest.approx(LR * mean / steps), steps) for steps in (1, 3, 8)]
    assert shares(x) == pytest.approx(MEANT)


def test_objective_of_clients() -> None:
    assert shares(model(ConsistentFedAvg(objective="clients"), grid(), 2)) == pytest.approx(
        [1 / 3] * 3
    )


def test_clients_join_and_leave() -> None:
    """The weights are those of the connected clients, whoever was there before."""
    here = grid()
    here.away = {2}
    strategy, x = ConsistentFedAvg(min_available_nodes=1), start()
    for round, away in enumerate([{2}, {0}, set()], 1):
        here.away = away
        config = ConfigRecord({"lr": LR})
        messages = list(strategy.configure_train(round, x, config, here))
        after, _ = strategy.aggregate_train(round, here.send_and_receive(messages))
        assert after is not None
        moved, x = after["w"].numpy() - x["w"].numpy(), after
        left = np.where(np.isin(range(3), list(away)), 0, SIZES)
        assert shares(moved) == pytest.approx(left / left.sum())


def test_samples_by_seed_and_uniformly() -> None:
    def asked(seed: int, rounds: int) -> list[int]:
        here = grid([8] * 4)
        trained(
            ConsistentFedAvg(fraction_train=0.5, fraction_evaluate=0.0, seed=seed), here, rounds
        )
        return [client for client, kind in here.asked if kind == "train"]

    assert asked(1, 20) == asked(1, 20) != asked(2, 20)
    counts = np.bincount(asked(0, 400))
    assert abs(counts - 200).max() < 40  # four standard deviations


def test_second_start_goes_on_with_the_next_rounds() -> None:
    def sent(*rounds: int) -> list[tuple[int, int]]:
        found = []

        def note(client: int, message: Message) -> dict[str, Any]:
            config = message.content["config"]
            found.append((int(config["server-round"]), int(config["seed"])))
            return {}

        ours, here = ConsistentFedAvg(0.5, 0.0), grid([8] * 4, trained=note)
        for number in rounds:
            trained(ours, here, number)
        return found

    assert sent(2, 3) == sent(5)


def test_evaluation_has_the_number_of_its_round_also_in_a_second_start() -> None:
    rounds: dict[str, list[int]] = {"train": [], "evaluate": []}

    def note(message: Message, context: Context, call_next: Any) -> Message:
        number = int(message.content["config"]["server-round"])
        rounds[message.metadata.message_type].append(number)
        return call_next(message, context)

    ours, here = ConsistentFedAvg(1.0, 1.0, 1, 1, 1), grid([8], mods=[note])
    for _ in range(2):
        trained(ours, here, 2)
    assert rounds == {"train": [1, 2, 3, 4], "evaluate": [1, 2, 3, 4]}


def test_log_says_once_what_uneven_steps_mean(log: pytest.LogCaptureFixture) -> None:
    trained(ConsistentFedAvg(), grid([16] * 3), 3)
    assert "That is exact" not in log.text
    strategy, x = ConsistentFedAvg(), start()
    for round, explained in ((1, True), (2, False)):
        log.clear()
        here = grid()
        messages = strategy.configure_train(round, x, ConfigRecord({"lr": LR}), here)
        strategy.aggregate_train(round, here.send_and_receive(messages))
        said = "1 to 8 steps of sgd, and are weighted by how far these go. That is exact"
        assert (said in log.text) is explained


@pytest.mark.parametrize("optimiser", ["adamw", "rmsprop:alpha=0.9"])
def test_uneven_adaptive_steps_are_warned_of(optimiser: str, log: pytest.LogCaptureFixture) -> None:
    trained(ConsistentFedAvg(optimiser=optimiser), grid([16] * 3), 2)
    assert "objective" not in warnings(log)
    trained(ConsistentFedAvg(optimiser=optimiser), grid(), 2)
    assert f"steps of {optimiser}, and uneven steps of adaptive" in warnings(log)


def test_log_says_once_that_clients_do_other_steps_than_asked(
    log: pytest.LogCaptureFixture,
) -> None:
    trained(ConsistentFedAvg(local_steps=2), grid([16] * 3), 2)
    assert "steps" not in warnings(log)
    trained(ConsistentFedAvg(local_steps=4), grid([16] * 3), 2)
    said = "clients did 2 to 2 steps of sgd, and were asked for 4"
    assert len({record for record in log.records if said in record.getMessage()}) == 1


@pytest.mark.parametrize(
    "strategy", [ConsistentFedAvg(fraction_evaluate=0.0), ConsistentFedBuff("fedbuff:K=2")]
)
def test_statistics_are_averaged_by_examples_and_kept_in_their_type(strategy: Any) -> None:
    sent = ArrayRecord(
        {
            "w": Array(np.zeros(1, np.float32)),
            "bn.running_var": Array(np.ones(1, np.float32)),
            "bn.num_batches_tracked": Array(np.array(4)),
        }
    )

    def reply(message: Message, context: Context) -> Message:
        k = int(context.node_config["partition-id"])
        arrays = {
            "w": Array(np.ones(1, np.float32)),
            "bn.running_var": Array(np.full(1, 0.1 + k, np.float32)),
            "bn.num_batches_tracked": Array(np.array(5 + 4 * k)),
        }
        metrics = MetricRecord({"num-examples": 1 + 2 * k, "num-steps": 1 + 9 * k})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(reply)
    found = strategy.start(LocalGrid([app] * 2), sent, 1).arrays
    values = {name: array.numpy() for name, array in found.items()}
    assert values["bn.running_var"][0] == pytest.approx((1 * 0.1 + 3 * 1.1) / 4)
    assert values["bn.num_batches_tracked"] == (1 * 5 + 3 * 9) / 4
    assert values["bn.num_batches_tracked"].dtype == np.int64
    assert values["w"].dtype == np.float32


# Flower's own loop


def test_evaluation_and_config_pass_through() -> None:
    seen: list[ConfigRecord] = []

    def note(client: int, message: Message) -> dict[str, Any]:
        seen.append(message.content["config"])
        return {"mine": 2.0}

    given = ConfigRecord({"lr": LR, "mine": "yes"})
    strategy = ConsistentFedAvg(train_metrics_aggr_fn=lambda r, key: MetricRecord({"n": len(r)}))
    result = strategy.start(grid(trained=note), start(), 2, train_config=given)
    assert dict(given) == {"lr": LR, "mine": "yes"}
    assert {config["mine"] for config in seen} == {"yes"}
    assert [config["server-round"] for config in seen] == [1, 1, 1, 2, 2, 2]
    assert len({config["seed"] for config in seen}) == 6
    assert result.evaluate_metrics_clientapp[2]["loss"] == 1.0
    assert result.train_metrics_clientapp[1]["n"] == 3


def cannot_in(rounds: set[int]) -> ConsistentFedAvg:
    """A strategy whose metrics cannot be aggregated in some rounds."""

    def aggregate(contents: list[RecordDict], key: str) -> MetricRecord:
        if ours._round in rounds:
            raise KeyError("accuracy")
        return MetricRecord({"n": len(contents)})

    ours = ConsistentFedAvg(train_metrics_aggr_fn=aggregate)
    return ours


def test_metrics_that_cannot_be_aggregated_end_the_first_round() -> None:
    with pytest.raises(FedShuffleError, match=r"metrics cannot be aggregated: .*Let all report"):
        trained(cannot_in({1}), grid())


def test_metrics_that_cannot_be_aggregated_later_are_left_out(
    log: pytest.LogCaptureFixture,
) -> None:
    result = trained(cannot_in({2}), grid(), 3)
    assert "round 2: the clients' metrics cannot be aggregated" in warnings(log)
    assert ["n" in found for found in result.train_metrics_clientapp.values()] == [1, 0, 1]
    assert result.arrays["w"].numpy() == pytest.approx(model(ConsistentFedAvg(), grid(), 3))


@pytest.mark.parametrize("key", ["seed", "planned-steps"])
def test_clashing_config_is_refused(key: str) -> None:
    with pytest.raises(FedShuffleError, match=f"train_config has a key '{key}'"):
        trained(ConsistentFedAvg(), grid(), **{key: 1})


def test_scaled_step_sizes_need_one() -> None:
    strategy = ConsistentFedAvg(step_sizes="scaled")
    with pytest.raises(FedShuffleError, match="train_config lacks"):
        strategy.start(grid(), start(), 1)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ({"num-steps": None}, r"does not report 'num-steps'.*MetricRecord\(\{.*tell the strategy"),
        ({"num-examples": None}, "does not report 'num-examples'"),
        ({"num-steps": 0}, "reports 0 as 'num-steps'"),
        ({"num-steps": [1, 2]}, "reports"),
    ],
)
def test_foreign_client_is_told_in_the_first_round(metric: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        trained(ConsistentFedAvg(), grid(trained=lambda client, message: metric), 3)


def test_quickstart_with_only_the_strategy_changed_says_what_is_missing(tmp_path: Path) -> None:
    app = migrate(tmp_path / "app")
    source = BEFORE / "quickstart" / "client_app.py"
    (app / "quickstart" / "client_app.py").write_text(source.read_text())
    with pytest.raises(FedShuffleError, match="num-steps"):
        run(app, tmp_path / "out")


def test_failed_clients_are_left_out(log: pytest.LogCaptureFixture) -> None:
    fault: Fault = lambda client, message: "raises" if client == 0 else None  # noqa: E731
    x = model(ConsistentFedAvg(), grid(fault=fault), 2)
    assert shares(x) == pytest.approx(np.array([0, 24, 64]) / 88)
    assert "node 100 failed: the client failed" in warnings(log)


@pytest.mark.parametrize(("schedule", "fault"), [("wait", "gone"), ("deadline:9", "lost")])
def test_lost_node_is_named(schedule: str, fault: str, log: pytest.LogCaptureFixture) -> None:
    lost: Fault = lambda client, message: fault if client == 2 else None  # noqa: E731
    trained(ConsistentFedAvg(schedule=schedule, fraction_evaluate=0.0), grid(fault=lost))
    assert "round 1: node 102 failed: node " in warnings(log)


def test_client_that_does_not_reply_is_named(log: pytest.LogCaptureFixture) -> None:
    """Flower's loop returns without its reply, and without an error, when time is up."""
    silent: Fault = lambda client, message: "silent" if client == 2 else None  # noqa: E731
    x = model(ConsistentFedAvg(fraction_evaluate=0.0), grid(fault=silent))
    assert shares(x) == pytest.approx(np.array([8, 24, 0]) / 32)
    assert "round 1: node 102 failed: it did not reply in time" in warnings(log)
    assert "2 of 3 clients count" in warnings(log)


def test_diverged_client_is_left_out(log: pytest.LogCaptureFixture) -> None:
    config = {"lr": LR}
    strategy, here = ConsistentFedAvg(), grid()
    messages = strategy.configure_train(1, start(), ConfigRecord(config), here)
    replies = here.send_and_receive(messages)
    replies[0].content["arrays"] = ArrayRecord({"w": Array(np.full(3, np.nan))})
    after, _ = strategy.aggregate_train(1, replies)
    assert after is not None
    assert np.isfinite(after["w"].numpy()).all()
    assert "not finite" in warnings(log)


def test_run_ends_if_nobody_can_train() -> None:
    with pytest.raises(FedShuffleError, match=r"round 1.*2 more.*the client failed"):
        trained(ConsistentFedAvg(), grid(fault=lambda client, message: "raises"), 3)


def test_run_ends_if_nobody_ever_replies(log: pytest.LogCaptureFixture) -> None:
    here = grid(fault=lambda client, message: "late")
    with pytest.raises(FedShuffleError, match=r"no client has replied in 3 rounds.*timeout"):
        trained(ConsistentFedAvg(fraction_evaluate=0.0, schedule="deadline:0.01"), here, 9)
    assert "round 2: no reply counts" in warnings(log)


def test_client_app_of_the_exact_option_is_told_apart() -> None:
    exact = client_app(lambda: torch.nn.Linear(1, 1), lambda c: (torch.ones(1, 1),), torch.mean)
    with pytest.raises(FedShuffleError, match="client_app needs FedShuffleStrategy"):
        trained(ConsistentFedAvg(), LocalGrid([exact] * 3))


def test_other_model_is_refused() -> None:
    strategy, here = ConsistentFedAvg(), grid()
    replies = here.send_and_receive(
        strategy.configure_train(1, start(), ConfigRecord({"lr": LR}), here)
    )
    replies[0].content["arrays"] = ArrayRecord({"v": Array(np.zeros(3))})
    with pytest.raises(FedShuffleError, match="'v' and 1 more"):
        strategy.aggregate_train(1, replies)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": "example"}, "unknown objective"),
        ({"step_sizes": "same"}, "unknown step_sizes"),
        ({"local_steps": 0}, "local_steps"),
        ({"mean_examples": 0}, "mean_examples"),
        ({"fraction_train": 1.5}, "fraction_train"),
        ({"server_step_size": 0}, "server_step_size"),
        ({"seed": -1}, "seed"),
        ({"optimiser": "sgdm"}, "unknown local optimiser"),
        ({"optimiser": "sgd:momentum=0.9,weight_decay=0.1"}, "make their own optimiser, leave it"),
        ({"response_probability": 0.9}, r"is 0.9, .*: leave it out"),
        ({"response_probability": {"100": 0.9}}, "has a key '100': give node ids"),
        ({"optimizer": "sgd:momentum=0.9"}, "Did you mean 'optimiser'"),
        ({"fraction_fit": 0.5}, "fraction_train"),  # as in Flower's older API
        ({"min_train_nodes": -1}, "min_train_nodes"),
        ({"min_available_nodes": "all"}, "min_available_nodes"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        ConsistentFedAvg(**options)


# Flower's mods and wrappers


def test_local_privacy_at_clients_works() -> None:
    noiseless = LocalDpMod(clipping_norm=100.0, sensitivity=0.0, epsilon=1.0, delta=0.1)
    assert shares(model(ConsistentFedAvg(), grid(mods=[noiseless]))) == pytest.approx(MEANT)


def equal_steps(client: int, message: Message) -> dict[str, Any]:
    return {"num-steps": 4}


def fixed(wrapper: Any, strategy: FedAvg, noise: float = 0.0) -> FedAvg:
    return wrapper(strategy, noise, 0.1, 3)


def adaptive(wrapper: Any, strategy: FedAvg, noise: float = 0.0) -> FedAvg:
    return wrapper(strategy, noise, 3, initial_clipping_norm=0.1)


CLIENT_SIDE = [
    (fixed, DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod),
    (adaptive, DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod),
]
SERVER_SIDE = [
    (fixed, DifferentialPrivacyServerSideFixedClipping),
    (adaptive, DifferentialPrivacyServerSideAdaptiveClipping),
]


@pytest.mark.parametrize(("wrap", "wrapper", "mod"), CLIENT_SIDE)
def test_clipping_at_clients_works_where_they_count_equally(
    wrap: Any, wrapper: Any, mod: Any
) -> None:
    ours = ConsistentFedAvg(objective="clients", local_steps=4, fraction_evaluate=0.0)
    x = model(wrap(wrapper, ours), grid(trained=equal_steps, mods=[mod]))
    assert x == pytest.approx(np.full(3, 0.1 / 3))


@pytest.mark.parametrize(("wrap", "wrapper", "mod"), CLIENT_SIDE)
def test_clipping_at_clients_is_refused_where_they_do_not(
    wrap: Any, wrapper: Any, mod: Any
) -> None:
    with pytest.raises(FedShuffleError, match="would not hold"):
        trained(wrap(wrapper, ConsistentFedAvg()), grid(mods=[mod]))


@pytest.mark.parametrize("options", [{}, {"response_probability": "estimate"}])
def test_clipping_mod_without_noise_needs_no_equal_clients(options: dict[str, Any]) -> None:
    ours = ConsistentFedAvg(local_steps=4, mean_examples=32, **options)
    here = grid(trained=equal_steps, mods=[fixedclipping_mod])
    x = trained(ours, here, clipping_norm=0.1).arrays["w"].numpy()
    assert x == pytest.approx(0.1 * MEANT)


@pytest.mark.parametrize(("wrap", "wrapper"), SERVER_SIDE)
def test_clipping_on_the_server_works_with_a_warning(
    wrap: Any, wrapper: Any, log: pytest.LogCaptureFixture
) -> None:
    ours = ConsistentFedAvg(objective="clients", local_steps=4)
    x = model(wrap(wrapper, ours), grid(trained=equal_steps))
    assert x == pytest.approx(np.full(3, 0.1 / 3))
    assert "Another strategy calls this one" in warnings(log)


@pytest.mark.parametrize(("objective", "holds"), [("clients", True), ("examples", False)])
def test_noise_of_the_wrapper_is_made_for_equal_clients(objective: Any, holds: bool) -> None:
    def make() -> DifferentialPrivacyServerSideFixedClipping:
        ours = ConsistentFedAvg(objective=objective, local_steps=1)
        return DifferentialPrivacyServerSideFixedClipping(ours, 1.0, 0.1, 3)

    federation = Federation.from_sizes([1, 2, 6])
    found = audit_privacy(FlowerAggregator(make, 3), federation, clip=0.1, noise_multiplier=1)
    assert found.holds is holds
